"""`block_attention` for any device: the pages by a loop, then the block as one more tile."""

import jax
import jax.numpy as jnp

from pallas_kernels._online_softmax import add_tile, finish, group_queries
from pallas_kernels.windowed_decode.xla import attend_pages


def block_attention_xla(
    q: jax.Array,
    k_block: jax.Array,
    v_block: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    q_start: jax.Array,
    *,
    window: int | None,
    causal: bool,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    grouped = group_queries(q, k_block.shape[2], scale)
    state = attend_pages(grouped, k_pages, v_pages, page_table, q_start, q_start, window=window)
    index = jnp.arange(q.shape[1], dtype=jnp.int32)
    behind = index[:, None] - index[None, :]
    visible = jnp.ones(behind.shape, bool) if window is None else jnp.abs(behind) < window
    if causal:
        visible &= behind >= 0
    visible = jnp.broadcast_to(visible[None], (q.shape[0], *visible.shape))
    return finish(add_tile(state, grouped, k_block, v_block, visible), q.dtype)
