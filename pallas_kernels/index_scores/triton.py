"""`index_block_scores` and `select_blocks` for NVIDIA GPUs from Ampere on, in Triton through jax-triton."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch
from pallas_kernels._triton import power_of_two, require_triton

LARGEST_HEAD = 256
MOST_BLOCKS = 16_384


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """How the scoring is cut.

    Attributes:
      blocks: of keys, of one program.
      stages: steps in flight.
      warps: of one program.
      rows: queries x index heads of one program, a power of two; more of them read the keys again.
    """

    blocks: int
    stages: int
    warps: int = 4
    rows: int = 64


def choose_tuning(*, batch: int, rows: int, blocks: int, multiprocessors: int) -> Tuning:
    """The tuning for `rows` queries x index heads in each row of a batch, against `blocks` blocks: some programs for
    every multiprocessor, not too short."""
    tuning = Tuning(blocks=8, stages=3)
    programs = batch * -(-rows // tuning.rows) * blocks
    each = tuning.blocks
    while each > 1 and programs < 2 * each * multiprocessors:
        each //= 2
    return dataclasses.replace(tuning, blocks=each)


def build_scores(q: Any, k: Any, *, block_size: int) -> _dispatch.Kernel:
    """The kernel for arguments like these on their device, or NotImplementedError with the reason."""
    multiprocessors = require_triton(q.dtype, _dispatch.device_of(q, k))
    if q.shape[-1] > LARGEST_HEAD:
        raise NotImplementedError(f"the Triton kernel takes index heads up to {LARGEST_HEAD}, got {q.shape[-1]}.")
    run = functools.partial(block_maxima, block_size=block_size, multiprocessors=multiprocessors)
    return _dispatch.opaque("index_block_scores", lambda *args: (run(*args), args[2]), ("row", "row", "row"))


def build_selection(scores: Any, *, block_size: int, top_k: int) -> _dispatch.Kernel:
    """The kernel for arguments like these on their device, or NotImplementedError with the reason."""
    require_triton(jnp.bfloat16, _dispatch.device_of(scores))
    if scores.shape[3] > MOST_BLOCKS:
        raise NotImplementedError(f"the Triton kernel selects among up to {MOST_BLOCKS} blocks, got {scores.shape[3]}.")
    run = functools.partial(select, block_size=block_size, top_k=top_k)
    return _dispatch.opaque("select_blocks", lambda *args: (run(*args), args[1]), ("row", "row"))


def block_maxima(
    q: jax.Array,
    k: jax.Array,
    positions: jax.Array,
    *,
    block_size: int,
    multiprocessors: int,
    tuning: Tuning | None = None,
) -> jax.Array:
    import jax_triton  # pyright: ignore[reportMissingImports]

    from pallas_kernels.index_scores import triton_kernel

    b, queries, heads, dim = q.shape
    blocks = k.shape[1] // block_size
    t = tuning or choose_tuning(batch=b, rows=queries * heads, blocks=blocks, multiprocessors=multiprocessors)
    padded = power_of_two(dim)
    rows = min(power_of_two(queries * heads), t.rows)
    return jax_triton.triton_call(
        q, k, positions, kernel=triton_kernel.block_maxima,
        out_shape=jax.ShapeDtypeStruct((b, queries, heads, blocks), jnp.float32),
        grid=(-(-blocks // t.blocks), b, -(-queries * heads // rows)), name="index_block_scores_triton",
        num_warps=t.warps, num_stages=t.stages, QUERIES=queries, HEADS=heads, DIM=dim, BLOCK=block_size,
        BLOCKS=blocks, EACH=t.blocks, ROWS=rows, TILE=min(power_of_two(block_size), 128 if padded <= 128 else 64),
        DIM_PADDED=padded, STAGES=t.stages,
    )  # fmt: skip


def select(scores: jax.Array, positions: jax.Array, *, block_size: int, top_k: int) -> jax.Array:
    import jax_triton  # pyright: ignore[reportMissingImports]

    from pallas_kernels.index_scores import triton_kernel

    b, queries, heads, blocks = scores.shape
    return jax_triton.triton_call(
        scores, positions, kernel=triton_kernel.select,
        out_shape=jax.ShapeDtypeStruct((b, queries, heads, top_k), jnp.int32), grid=(b * queries * heads,),
        name="select_blocks_triton", num_warps=4 if blocks <= 2048 else 8, HEADS=heads, BLOCK=block_size,
        BLOCKS=blocks, BLOCKS_PADDED=power_of_two(blocks, 1), TOP_K=top_k, TOP_K_PADDED=power_of_two(top_k, 1),
    )  # fmt: skip
