"""`windowed_decode` for any device: a loop over pages that hold visible keys, in bounded memory."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._online_softmax import Softmax, add_tile, finish, group_queries, start
from pallas_kernels._varying import varying_like

KEYS_PER_STEP = 1024


def windowed_decode_xla(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    q_start: jax.Array,
    kv_length: jax.Array,
    *,
    window: int | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    grouped = group_queries(q, k_pages.shape[2], scale)
    state = attend_pages(grouped, k_pages, v_pages, page_table, q_start, kv_length, window=window)
    return finish(state, q.dtype)


def attend_pages(
    grouped: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    q_start: jax.Array,
    kv_length: jax.Array,
    *,
    window: int | None,
    keys_per_step: int = KEYS_PER_STEP,
) -> Softmax:
    """Attention of grouped queries [B, Hkv, G, K, D] over keys p < kv_length, q_pos - window < p <= q_pos.

    Rows with fewer pages than others read their last visible page again, masked: pages without a visible key are
    never read, and steps after the longest row's last are skipped.
    """
    num_queries = grouped.shape[3]
    page_size, table_len = k_pages.shape[1], page_table.shape[1]
    capacity = page_size * table_len
    most_keys = capacity if window is None else min(window - 1 + num_queries, capacity)
    most_pages = (most_keys + page_size - 2) // page_size + 1  # they need not start at a page's first slot
    pages_per_step = min(most_pages, max(1, keys_per_step // page_size))
    num_steps = -(-most_pages // pages_per_step)

    q_position = q_start[:, None] + jnp.arange(num_queries, dtype=jnp.int32)[None]
    end = jnp.minimum(kv_length, q_start + num_queries)
    oldest = jnp.maximum(kv_length - capacity, 0)
    begin = oldest if window is None else jnp.maximum(q_start - (window - 1), oldest)
    first = begin // page_size
    last = jnp.maximum((end - 1) // page_size, first)

    def step(state: Softmax, index: jax.Array) -> Softmax:
        page = first[:, None] + index * pages_per_step + jnp.arange(pages_per_step, dtype=jnp.int32)[None]
        entry = jnp.minimum(page, last[:, None]) % table_len
        ids = jnp.take_along_axis(page_table, entry, axis=1)
        position = page[..., None] * page_size + jnp.arange(page_size, dtype=jnp.int32)[None, None]
        position = position.reshape(position.shape[0], -1)[:, None]
        visible = (position >= begin[:, None, None]) & (position < end[:, None, None])
        visible &= position <= q_position[..., None]
        if window is not None:
            visible &= position > q_position[..., None] - window
        k, v = (jnp.take(pages, ids, axis=0, mode="clip") for pages in (k_pages, v_pages))
        k, v = (x.reshape(x.shape[0], -1, *x.shape[3:]) for x in (k, v))
        return add_tile(state, grouped, k, v, visible)

    if num_steps == 1:
        return step(start(grouped), jnp.int32(0))
    used_steps = jnp.max(last - first) // pages_per_step + 1

    def scanned(state: Softmax, index: jax.Array) -> tuple[Softmax, None]:
        return lax.cond(index < used_steps, step, lambda state, _: state, state, index), None

    # A scan of fixed length has a reverse derivative; recomputing each step keeps its memory bounded too.
    steps = jnp.arange(num_steps, dtype=jnp.int32)
    first_state = varying_like(start(grouped), grouped, k_pages, v_pages, page_table, q_start, kv_length)
    return lax.scan(jax.checkpoint(scanned, prevent_cse=False), first_state, steps)[0]
