"""Dense attention in float32 with its log-sum-exp: the arithmetic that all reference implementations share."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32


def dense_attention(
    q: Float[Array, "B K Hq D"],
    k: Float[Array, "B S Hkv D"],
    v: Float[Array, "B S Hkv D"],
    visible: Bool[Array, "B K S"],
    scale: float,
) -> tuple[Float32[Array, "B K Hq D"], Float32[Array, "B K Hq"]]:
    """Softmax attention and natural log-sum-exp; a query without a visible key gets out 0 and lse -inf."""
    group = q.shape[2] // k.shape[2]
    q = q.astype(jnp.float32)
    k = jnp.repeat(k.astype(jnp.float32), group, axis=2)
    v = jnp.repeat(v.astype(jnp.float32), group, axis=2)
    scores = jnp.einsum("bqhd,bshd->bqhs", q, k, precision="highest") * jnp.float32(scale)
    scores = jnp.where(visible[:, :, None, :], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.where(jnp.isneginf(lse)[..., None], jnp.float32(0), jnp.exp(scores - lse[..., None]))
    return jnp.einsum("bqhs,bshd->bqhd", weights, v, precision="highest"), lse


def read_ring(
    pages: Float[Array, "N page Hkv D"], page_table: Int32[Array, "B P"], end: Int32[Array, " B"]
) -> tuple[Float[Array, "B S Hkv D"], Int32[Array, "B S"]]:
    """The last S = P * page positions before `end`, with their numbers; numbers below 0 do not exist."""
    page_size, num_pages = pages.shape[1], page_table.shape[1]
    position = end[:, None] - jnp.arange(num_pages * page_size, 0, -1, dtype=jnp.int32)[None]
    page = jnp.take_along_axis(page_table, (position // page_size) % num_pages, axis=1)
    return pages[page, position % page_size], position
