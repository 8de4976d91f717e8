"""`index_block_scores` and `select_blocks` as they are defined, in float32: the oracle of the other implementations."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32


def index_block_scores_reference(
    q: Float[Array, "B K N I"], k: Float[Array, "B S I"], positions: Int32[Array, "B K"], *, block_size: int
) -> Float32[Array, "B K N blocks"]:
    scores = jnp.einsum("bkni,bsi->bkns", q.astype(jnp.float32), k.astype(jnp.float32), precision="highest")
    slot = jnp.arange(k.shape[1], dtype=jnp.int32)
    visible = slot[None, None, None] <= positions[:, :, None, None]
    return jnp.where(visible, scores, -jnp.inf).reshape(*q.shape[:3], -1, block_size).max(-1)


def select_blocks_reference(
    scores: Float32[Array, "B K N blocks"], positions: Int32[Array, "B K"], *, block_size: int, top_k: int
) -> Int32[Array, "B K N top_k"]:
    own = (positions // block_size)[:, :, None, None]
    block = jnp.broadcast_to(jnp.arange(scores.shape[3], dtype=jnp.int32)[None, None, None], scores.shape)
    visible = (block == own) | ((block < own) & (scores > -jnp.inf))  # no NaN is larger than anything
    # The last key counts most: what is visible, then the query's own block, then the score, then the lower number.
    order = jnp.lexsort((-scores, block != own, ~visible), axis=-1)[..., :top_k].astype(jnp.int32)
    kept = jnp.where(jnp.take_along_axis(visible, order, axis=-1), order, -1)
    return jnp.pad(kept, ((0, 0),) * 3 + ((0, top_k - kept.shape[3]),), constant_values=-1)
