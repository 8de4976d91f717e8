"""`windowed_decode` as it is defined, in float32: the oracle of every other implementation."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels._reference import dense_attention, read_ring


def windowed_decode_reference(
    q: Float[Array, "B K Hq D"],
    k_pages: Float[Array, "N page Hkv D"],
    v_pages: Float[Array, "N page Hkv D"],
    page_table: Int32[Array, "B P"],
    q_start: Int32[Array, " B"],
    kv_length: Int32[Array, " B"],
    *,
    window: int | None,
    scale: float,
) -> tuple[Float[Array, "B K Hq D"], Float32[Array, "B K Hq"]]:
    k, position = read_ring(k_pages, page_table, kv_length)
    v, _ = read_ring(v_pages, page_table, kv_length)
    q_position = q_start[:, None] + jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    visible = (position[:, None] >= 0) & (position[:, None] <= q_position[..., None])
    if window is not None:
        visible &= position[:, None] > q_position[..., None] - window
    out, lse = dense_attention(q, k, v, visible, scale)
    return out.astype(q.dtype), lse
