"""`block_sparse_decode` as it is defined, in float32: the oracle of every other implementation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels._reference import dense_attention, read_ring


def block_sparse_decode_reference(
    q: Float[Array, "B K Hq D"],
    k_pages: Float[Array, "N page Hkv D"],
    v_pages: Float[Array, "N page Hkv D"],
    page_table: Int32[Array, "B P"],
    block_ids: Int32[Array, "B K Hkv top_k"],
    q_start: Int32[Array, " B"],
    *,
    block_size: int,
    scale: float,
) -> tuple[Float[Array, "B K Hq D"], Float32[Array, "B K Hq"]]:
    end = q_start + q.shape[1]
    k, position = read_ring(k_pages, page_table, end)
    v, _ = read_ring(v_pages, page_table, end)
    q_position = q_start[:, None] + jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    causal = (position[:, None] >= 0) & (position[:, None] <= q_position[..., None])
    selected = jnp.any((position // block_size)[:, None, None, :, None] == block_ids[:, :, :, None, :], axis=-1)
    group = q.shape[2] // k.shape[2]

    def one_head(q: jax.Array, k: jax.Array, v: jax.Array, selected: jax.Array) -> tuple[jax.Array, jax.Array]:
        return dense_attention(q, k[:, :, None], v[:, :, None], causal & selected, scale)

    grouped = q.reshape(*q.shape[:2], -1, group, q.shape[3])
    out, lse = jax.vmap(one_head, in_axes=2, out_axes=2)(grouped, k, v, selected)
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[:3])
