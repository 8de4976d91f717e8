"""`filter_floors` for NVIDIA GPUs from Ampere on, in Triton through jax-triton."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch
from pallas_kernels._triton import power_of_two, require_triton

LARGEST_VOCABULARY = 2**23  # counts stay exact in float32, and places of the sample inside int32
# A chunk's tokens as they lie in the threads of 8 warps, 4 of a row in each, and how many of them are neighbours.
DEPTH, WIDTH, RUN = 4, 1024, 64
SCAN_DEPTH = 8  # in the first kernel, which does less with each
SLOTS, FEW = 256, 64  # scores of a chunk that there is room for, and that are cheaper to search
SAMPLE = 8192
SIGMAS, SPARE = 3.5, 8.0  # half the width of a bracket: deviations of the sample, and tokens of it on top
STEPS = 12  # of the search for the tail that may be dropped
TILE, FLOORS = 4096, 4  # of a search in the whole row: tokens at a time, and floors tried in one reading
FULL = 0.65  # of all slots, at most, by plan: chunks do not fill evenly


def build(logits: Any) -> Callable[..., tuple[jax.Array, ...]]:
    """The kernels for arguments like these on their device, or NotImplementedError with the reason."""
    require_triton(jnp.bfloat16, _dispatch.device_of(logits))
    if logits.shape[2] > LARGEST_VOCABULARY:
        raise NotImplementedError(f"the Triton kernel takes up to {LARGEST_VOCABULARY} tokens, got {logits.shape[2]}.")
    kernel = _dispatch.opaque("filter_floors", run, ("row", "row"))

    def floors(
        logits: jax.Array,
        inverse: jax.Array,
        top_k: jax.Array,
        top_p: jax.Array,
        min_p: jax.Array,
        find_best: jax.Array,
    ) -> tuple[jax.Array, ...]:
        settings = (inverse, jnp.minimum(top_k, logits.shape[2]), top_p, jnp.log(min_p), find_best)
        numbers, best = kernel(logits, jnp.stack([a.astype(jnp.float32) for a in settings], axis=-1))
        return *(numbers[..., i] for i in range(3)), best

    return floors


def run(logits: jax.Array, settings: jax.Array) -> tuple[jax.Array, jax.Array]:
    """-> float32 [B, N, 3]: peak, floor, log of the mass; int32 [B, N]: the first of the largest logits.

    Args:
      settings: float32 [B, 5]; inverse temperature, top-k, top-p, least score to keep, whether to find the best token.
    """
    import jax_triton  # pyright: ignore[reportMissingImports]

    from pallas_kernels.filter_floors import triton_kernel

    batch, rows, vocab = logits.shape
    lines, chunks, scans = batch * rows, -(-vocab // (DEPTH * WIDTH)), -(-vocab // (SCAN_DEPTH * WIDTH))
    call = functools.partial(jax_triton.triton_call, ROWS=rows, VOCAB=vocab)

    def shapes(*wanted: tuple[Any, tuple[int, ...]]) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct((lines, *rest), dtype) for dtype, rest in wanted]

    f, i = jnp.float32, jnp.int32
    top, weights, first = call(
        logits, settings, kernel=triton_kernel.scan,
        out_shape=shapes((f, (scans,)), (f, (scans,)), (i, (scans,))), grid=(scans, lines),
        name="filter_floors_scan_triton", num_warps=8, CHUNKS=scans, DEPTH=SCAN_DEPTH, WIDTH=WIDTH, RUN=RUN,
    )  # fmt: skip
    peak, best, mass, low, high = call(
        logits, settings, top, weights, first, kernel=triton_kernel.bracket,
        out_shape=shapes((f, ()), (i, ()), (f, ()), (f, ()), (f, ())), grid=(lines,),
        name="filter_floors_bracket_triton", num_warps=16, CHUNKS=scans, CHUNKS_PADDED=power_of_two(scans, 1),
        SAMPLE=SAMPLE, STEPS=STEPS, SIGMAS=SIGMAS, SPARE=SPARE, MOST=FULL * chunks * SLOTS,
    )  # fmt: skip
    total, over_mass, over_count, count, found = call(
        logits, settings, peak, low, high, kernel=triton_kernel.collect,
        out_shape=shapes(*[(dtype, (chunks,)) for dtype in (f, f, i, i)], (f, (chunks, SLOTS))),
        grid=(chunks, lines), name="filter_floors_collect_triton", num_warps=8, CHUNKS=chunks, DEPTH=DEPTH,
        WIDTH=WIDTH, RUN=RUN, SLOTS=SLOTS,
    )  # fmt: skip
    numbers = call(
        logits, settings, peak, mass, low, total, over_mass, over_count, count, found,
        kernel=triton_kernel.finish, out_shape=shapes((f, (3,)))[0], grid=(lines,),
        name="filter_floors_finish_triton", num_warps=16, CHUNKS=chunks, CHUNKS_PADDED=power_of_two(chunks, 1),
        SLOTS=SLOTS, FEW=FEW, TILE=TILE, FLOORS=FLOORS,
    )  # fmt: skip
    return numbers.reshape(batch, rows, 3), best.reshape(batch, rows)
