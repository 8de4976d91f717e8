"""`merge_future_block` as it is defined, in float32: the oracle of every other implementation."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels._reference import dense_attention


def merge_future_block_reference(
    out: Float[Array, "B K Hq D"],
    lse: Float32[Array, "B K Hq"],
    q: Float[Array, "B K Hq D"],
    k_block: Float[Array, "B K Hkv D"],
    v_block: Float[Array, "B K Hkv D"],
    *,
    window: int | None,
    scale: float,
) -> tuple[Float[Array, "B K Hq D"], Float32[Array, "B K Hq"]]:
    query, key = (jnp.arange(q.shape[1], dtype=jnp.int32)[index] for index in ((slice(None), None), (None,)))
    visible = key > query
    if window is not None:
        visible &= key - query < window
    visible = jnp.broadcast_to(visible[None], (q.shape[0], *visible.shape))
    future_out, future_lse = dense_attention(q, k_block, v_block, visible, scale)
    merged_lse = jnp.logaddexp(lse, future_lse)
    empty = jnp.isneginf(merged_lse)
    past, future = (jnp.where(empty, jnp.float32(0), jnp.exp(part - merged_lse)) for part in (lse, future_lse))
    merged = past[..., None] * out.astype(jnp.float32) + future[..., None] * future_out
    return merged.astype(q.dtype), merged_lse
