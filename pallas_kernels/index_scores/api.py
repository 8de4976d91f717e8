"""The public functions `index_block_scores` and `select_blocks`."""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import _arguments, _dispatch
from pallas_kernels.index_scores import xla


def index_block_scores(
    q: Float[Array, "B K N I"],
    k: Float[Array, "B S I"],
    positions: Int32[Array, "B K"],
    *,
    block_size: int,
    implementation: str | None = None,
) -> Float32[Array, "B K N blocks"]:
    """The largest q·k over the visible keys of each block: `blocks = S / block_size` scores for each of N index heads.

    The query at `positions[b, i]` sees the keys at slots 0 to that of its row; -1 sees nothing. Keys behind a row's
    last visible block are not read, and no array of [K, S] exists.

    Args:
      q: bfloat16, float16 or float32; index queries.
      k: one index key a token, in q's dtype; slot s of a row holds position s.
      positions: of the queries.
      block_size: keys of one block; divides S.
      implementation: None for the best one for this device, or "triton", "xla".

    Returns:
      Scores, -inf where the query sees no key of the block. Where it sees a NaN the score is a NaN, or is that of the
      other keys: by implementation.

    Raises:
      TypeError, ValueError: an argument does not fit.
      NotImplementedError: the named implementation cannot serve this call; the message says why. Or the call is
        differentiated through a kernel.

    Source: the indexer of MiniMax-M3 (`sparse_score_type` "max" of its config.json).
    """
    _arguments.check_arrays(q=q, k=k, positions=positions)
    _arguments.check_queries(q)
    if k.ndim != 3 or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[3] or k.shape[1] == 0:
        raise ValueError(f"k must be [B, S, I] = [{q.shape[0]}, S >= 1, {q.shape[3]}] for q {q.shape}, got {k.shape}.")
    if k.dtype != q.dtype:
        raise TypeError(f"k must have q's dtype {q.dtype}, got {k.dtype}; cast one of them.")
    block_size = _arguments.check_block_size(block_size)
    if k.shape[1] % block_size:
        raise ValueError(f"k must hold whole blocks of {block_size} keys, got {k.shape[1]} in {k.shape}; pad it.")
    _check_positions(positions, q.shape[:2])

    def triton_form() -> _dispatch.Kernel:
        from pallas_kernels.index_scores import triton

        return triton.build_scores(q, k, block_size=block_size)

    def xla_form() -> _dispatch.Kernel:
        return lambda *args: (xla.index_block_scores_xla(*args, block_size=block_size), positions)

    run = _dispatch.choose("index_block_scores", implementation, {"triton": triton_form, "xla": xla_form})
    return run(*map(jnp.asarray, (q, k, positions)))[0]


def select_blocks(
    scores: Float32[Array, "B K N blocks"],
    positions: Int32[Array, "B K"],
    *,
    block_size: int,
    top_k: int,
    implementation: str | None = None,
) -> Int32[Array, "B K N top_k"]:
    """The best `top_k` blocks of each query and head, best first, -1 where fewer are visible.

    The query's own block, `positions // block_size`, always comes first and counts among the `top_k`; blocks behind it
    are not visible, nor is anything to a query at position -1. The lower block wins a tie.

    A score of +inf is a block that has to be kept: such blocks come next after the query's own, and where there are
    more than places the lower ones are kept. A NaN counts as -inf: the block is not selected and takes no place.

    Args:
      scores: see `index_block_scores`.
      positions: of the queries.
      block_size: keys of one block.
      top_k: blocks to keep.
      implementation: None for the best one for this device, or "triton", "xla".

    Raises:
      TypeError, ValueError: an argument does not fit.
      NotImplementedError: the named implementation cannot serve this call; the message says why.
    """
    _arguments.check_arrays(scores=scores, positions=positions)
    if scores.ndim != 4 or 0 in scores.shape or scores.dtype != jnp.float32:
        raise ValueError(
            f"scores must be float32 [B, K, N, blocks] with no empty axis, got {scores.dtype} {scores.shape}."
        )
    _check_positions(positions, scores.shape[:2])
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
        raise ValueError(f"top_k must be a Python int of at least 1, got {top_k!r}: it is part of the program.")
    static: dict[str, Any] = dict(block_size=_arguments.check_block_size(block_size), top_k=top_k)

    def triton_form() -> _dispatch.Kernel:
        from pallas_kernels.index_scores import triton

        return triton.build_selection(scores, **static)

    def xla_form() -> _dispatch.Kernel:
        select = functools.partial(xla.select_blocks_xla, **static)
        return lambda scores, positions: (select(scores, positions), positions)

    run = _dispatch.choose("select_blocks", implementation, {"triton": triton_form, "xla": xla_form})
    return run(jnp.asarray(scores), jnp.asarray(positions))[0]


def _check_positions(positions: Any, expected: tuple[int, ...]) -> None:
    if positions.shape != expected:
        raise ValueError(f"positions must have shape [B, K] = {expected} of the queries, got {positions.shape}.")
    if positions.dtype != jnp.int32:
        raise TypeError(f"positions must be int32, got {positions.dtype}; cast it with astype(jnp.int32).")
