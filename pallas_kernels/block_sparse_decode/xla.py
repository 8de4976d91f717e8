"""`block_sparse_decode` for any device: a loop over the places of the selection, one block of keys at a time."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._online_softmax import Softmax, add_tile, finish, group_queries, start
from pallas_kernels._varying import varying_like


def block_sparse_decode_xla(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    block_ids: jax.Array,
    q_start: jax.Array,
    *,
    block_size: int,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    batch, queries, heads, dim = q.shape
    _, page_size, kv_heads, _ = k_pages.shape
    table_len = page_table.shape[1]
    position = q_start[:, None] + jnp.arange(queries, dtype=jnp.int32)[None]
    block_ids = _each_once(block_ids)
    # Every query and KV head has keys of its own, so each of them is a row of the softmax.
    grouped = group_queries(q, kv_heads, scale).transpose(0, 3, 1, 2, 4).reshape(-1, 1, heads // kv_heads, 1, dim)
    row = jnp.arange(batch, dtype=jnp.int32)[:, None, None, None]
    kv_head = jnp.arange(kv_heads, dtype=jnp.int32)[None, None, :, None]
    offset = jnp.arange(block_size, dtype=jnp.int32)[None, None, None, :]

    def step(state: Softmax, block: jax.Array) -> tuple[Softmax, None]:
        key = block[..., None] * block_size + offset  # [B, K, Hkv, S]
        last = position[:, :, None, None]
        visible = (block[..., None] >= 0) & (block[..., None] <= last // block_size) & (key <= last)
        # The query's own key stands in for keys that it does not see: their pages need not exist.
        key = jnp.where(visible, key, jnp.maximum(last, 0))
        page = page_table[row, (key // page_size) % table_len]
        k, v = (
            pages.at[page, key % page_size, kv_head].get(mode="clip").reshape(-1, block_size, 1, dim)
            for pages in (k_pages, v_pages)
        )
        return add_tile(state, grouped, k, v, visible.reshape(-1, 1, block_size)), None

    # Recomputing each step in the derivative keeps its memory bounded too.
    loop = jax.checkpoint(step, prevent_cse=False)
    state = varying_like(start(grouped), grouped, k_pages, v_pages, page_table, block_ids, q_start)
    out, lse = finish(lax.scan(loop, state, jnp.moveaxis(block_ids, -1, 0))[0], q.dtype)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def _each_once(block_ids: jax.Array) -> jax.Array:
    """The selection with -1 in the place of a block that was named before."""
    same = block_ids[..., :, None] == block_ids[..., None, :]
    earlier = jnp.tril(jnp.ones(same.shape[-2:], bool), -1)
    return jnp.where(jnp.any(same & earlier[None, None, None], axis=-1), -1, block_ids)
