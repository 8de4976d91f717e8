"""`index_block_scores` and `select_blocks` for any device: a loop over chunks of keys that some query sees."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._varying import varying_like

KEYS_PER_STEP = 1024


def index_block_scores_xla(
    q: jax.Array, k: jax.Array, positions: jax.Array, *, block_size: int, keys_per_step: int = KEYS_PER_STEP
) -> jax.Array:
    slots = k.shape[1]
    chunk = min(block_size * max(1, keys_per_step // block_size), slots)
    precision = "highest" if q.dtype == jnp.float32 else None

    def scores_of(start: jax.Array | int) -> jax.Array:
        keys = lax.dynamic_slice_in_dim(k, start, chunk, axis=1)
        scores = jnp.einsum("bkni,bsi->bkns", q, keys, preferred_element_type=jnp.float32, precision=precision)
        visible = (start + jnp.arange(chunk, dtype=jnp.int32))[None, None, None] <= positions[:, :, None, None]
        scores = jnp.where(visible, scores, -jnp.inf)
        return scores.reshape(*q.shape[:3], chunk // block_size, block_size).max(-1)

    if chunk == slots:
        return scores_of(0)

    def step(index: jax.Array, blocks: jax.Array) -> jax.Array:
        # The last chunk is as long as the others; where it overlaps the one before it finds the same scores again.
        start = jnp.minimum(index * chunk, slots - chunk)
        return lax.dynamic_update_slice_in_dim(blocks, scores_of(start), start // block_size, axis=-1)

    seen = jnp.minimum(jnp.max(positions) // chunk + 1, -(-slots // chunk))
    nothing = jnp.full((*q.shape[:3], slots // block_size), -jnp.inf, jnp.float32)
    return lax.fori_loop(0, seen, step, varying_like(nothing, q, k, positions))


def select_blocks_xla(scores: jax.Array, positions: jax.Array, *, block_size: int, top_k: int) -> jax.Array:
    own = (positions // block_size)[:, :, None, None]
    blocks = scores.shape[3]
    # -1 // block_size is -1: nothing is visible to padding. A comparison with NaN is false.
    block = jnp.arange(blocks, dtype=jnp.int32)[None, None, None]
    scores = jnp.where(scores == 0, jnp.float32(0), scores)  # top_k puts -0 behind 0
    others = jnp.where((block < own) & (scores > -jnp.inf), scores, -jnp.inf)
    best, kept = lax.top_k(others, min(top_k, blocks))
    kept = jnp.where(best > -jnp.inf, kept.astype(jnp.int32), -1)
    # The query's own block in front, whatever the scores of others.
    shifted = jnp.concatenate([jnp.broadcast_to(own, (*kept.shape[:3], 1)), kept[..., :-1]], axis=-1)
    kept = jnp.where((own >= 0) & (own < blocks), shifted, kept)
    return jnp.pad(kept, ((0, 0),) * 3 + ((0, top_k - kept.shape[3]),), constant_values=-1)
