"""`merge_future_block` for any device."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._online_softmax import NO_MAXIMUM, Softmax, add_tile, finish, group_queries


def merge_future_block_xla(
    out: jax.Array,
    lse: jax.Array,
    q: jax.Array,
    k_block: jax.Array,
    v_block: jax.Array,
    *,
    window: int | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    b, k, hq, _ = q.shape
    hkv = k_block.shape[2]
    # An attention result is a softmax state whose total is 1 at the maximum lse.
    seen = lse.reshape(b, k, hkv, hq // hkv).transpose(0, 2, 3, 1)
    maximum = lax.stop_gradient(jnp.maximum(seen, jnp.float32(NO_MAXIMUM)))
    total = jnp.exp(seen - maximum)
    values = group_queries(out, hkv, 1.0) * total[..., None]
    index = jnp.arange(k, dtype=jnp.int32)
    ahead = index[None, :] - index[:, None]
    visible = (ahead > 0) if window is None else (ahead > 0) & (ahead < window)
    visible = jnp.broadcast_to(visible[None], (b, k, k))
    grouped = group_queries(q, hkv, scale)
    return finish(add_tile(Softmax(values, maximum, total), grouped, k_block, v_block, visible), q.dtype)
