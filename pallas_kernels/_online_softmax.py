"""Softmax over keys that arrive in tiles: the running maximum, the running sum, the weighted values."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Finite, so that exp(old - new) is defined for rows that have seen no key yet.
NO_MAXIMUM = -1e30


class Softmax(NamedTuple):
    """State for query rows [B, Hkv, G, K]: values weighted by exp(score - maximum), not normalised yet."""

    values: jax.Array  # [B, Hkv, G, K, D]
    maximum: jax.Array  # [B, Hkv, G, K]
    total: jax.Array  # [B, Hkv, G, K]


def group_queries(q: jax.Array, kv_heads: int, scale: float) -> jax.Array:
    """[B, K, Hq, D] -> float32 [B, Hkv, G, K, D], scale included."""
    b, k, hq, d = q.shape
    grouped = q.astype(jnp.float32).reshape(b, k, kv_heads, hq // kv_heads, d) * jnp.float32(scale)
    return grouped.transpose(0, 2, 3, 1, 4)


def start(grouped: jax.Array) -> Softmax:
    rows = grouped.shape[:-1]
    return Softmax(
        jnp.zeros(grouped.shape, jnp.float32),
        jnp.full(rows, NO_MAXIMUM, jnp.float32),
        jnp.zeros(rows, jnp.float32),
    )


def add_tile(state: Softmax, grouped: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> Softmax:
    """Adds keys and values [B, S, Hkv, D]; visible [B, K, S] says which query sees which."""
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    scores = jnp.einsum("bhgkd,bshd->bhgks", grouped, k, precision="highest")
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    # The result does not depend on the maximum, so no derivative flows through it.
    maximum = lax.stop_gradient(jnp.maximum(state.maximum, scores.max(-1)))
    decay = jnp.exp(state.maximum - maximum)
    weights = jnp.exp(scores - maximum[..., None])
    values = jnp.einsum("bhgks,bshd->bhgkd", weights, v, precision="highest")
    return Softmax(state.values * decay[..., None] + values, maximum, state.total * decay + weights.sum(-1))


def finish(state: Softmax, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """-> out [B, K, Hq, D] in `dtype`, lse float32 [B, K, Hq] (natural log; -inf and out 0 without a key)."""
    b, hkv, g, k, d = state.values.shape
    seen = state.total != 0  # also where a score was NaN
    total = jnp.where(seen, state.total, jnp.float32(1))
    # A row without a key may have touched nothing but pages that were never written.
    out = jnp.where(seen[..., None], state.values / total[..., None], jnp.float32(0))
    lse = jnp.where(seen, state.maximum + jnp.log(total), -jnp.inf)
    return (
        out.transpose(0, 3, 1, 2, 4).reshape(b, k, hkv * g, d).astype(dtype),
        lse.transpose(0, 3, 1, 2).reshape(b, k, hkv * g),
    )
