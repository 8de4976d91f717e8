"""`block_attention` as it is defined, in float32: the oracle of every other implementation."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels._reference import dense_attention, read_ring


def block_attention_reference(
    q: Float[Array, "B K Hq D"],
    k_block: Float[Array, "B K Hkv D"],
    v_block: Float[Array, "B K Hkv D"],
    k_pages: Float[Array, "N page Hkv D"],
    v_pages: Float[Array, "N page Hkv D"],
    page_table: Int32[Array, "B P"],
    q_start: Int32[Array, " B"],
    *,
    window: int | None,
    causal: bool,
    scale: float,
) -> tuple[Float[Array, "B K Hq D"], Float32[Array, "B K Hq"]]:
    k, position = read_ring(k_pages, page_table, q_start)
    v, _ = read_ring(v_pages, page_table, q_start)
    q_position = q_start[:, None] + jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    # The ring ends at q_start; the block's keys stand at the queries' own positions.
    position = jnp.concatenate([position, q_position], axis=1)
    distance = q_position[..., None] - position[:, None]
    visible = jnp.broadcast_to((position >= 0)[:, None], distance.shape)
    if window is not None:
        visible &= jnp.abs(distance) < window
    if causal:
        visible &= distance >= 0
    k, v = jnp.concatenate([k, k_block], axis=1), jnp.concatenate([v, v_block], axis=1)
    out, lse = dense_attention(q, k, v, visible, scale)
    return out.astype(q.dtype), lse
