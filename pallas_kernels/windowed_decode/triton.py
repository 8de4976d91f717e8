"""`windowed_decode` and `block_attention` for NVIDIA GPUs from Ampere on, in Triton through jax-triton.

Any head size up to 256 (padded to a power of two inside), any group, any page size.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch
from pallas_kernels._triton import LOG2_E, power_of_two, require_triton

LARGEST_HEAD = 256
NO_WINDOW = 2**30
# Bytes a block may use, by compute capability; consumer chips have less.
SHARED_MEMORY = {"8.0": 166_912, "9.0": 232_448, "10.0": 232_448, "10.3": 232_448}
MOST_SHARED_MEMORY, LEAST_SHARED_MEMORY = 232_448, 101_376


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """`rows` (queries x heads) and `warps` of a program, `tile` keys of one of its `stages` steps. With `one_loop`
    tiles at the edges of what is visible are masked in a branch, otherwise in a loop of their own."""

    rows: int = 128
    tile: int = 64
    stages: int = 3
    warps: int = 8
    one_loop: bool = True


def choose_tuning(
    *,
    rows: int,
    heads: int,
    head_dim: int,
    keys: int,
    block: bool,
    multiprocessors: int,
    shared_memory: int = MOST_SHARED_MEMORY,
) -> Tuning:
    """For `heads` rows of the batch x KV heads, each with `rows` queries x heads of the group, and a padded head size.

    Measured on an H200, cold: 64 rows where few heads leave multiprocessors idle (4 heads, 4,103 keys: 11.8 us, 14.0
    with 128 rows); 3 stages of 128 rows, if they fit (256 heads: 175 us, 177 with 4); borders apart where a block has
    keys of its own (256 heads: 185 us, 196 in one loop), but not elsewhere (182 us).
    """
    large = head_dim > 128
    tile = 32 if large else 64
    few = 2 * heads * -(-rows // 128) * max(1, keys // (4 * tile)) <= multiprocessors
    rows = min(rows, 64 if large or few else 128)
    room = shared_memory - 2 * rows * head_dim - 1024
    stages = max(2, min(4 if rows <= 64 else 3, room // (2 * 2 * tile * head_dim)))
    return Tuning(rows=rows, tile=tile, stages=stages, warps=4 if rows <= 64 else 8, one_loop=not block)


def merge_warps(splits: int) -> int:
    """Warps of a program that merges so many splits: one where it can hold all of them."""
    return 1 if splits <= 32 else 4


def build(q: Any, k_pages: Any, page_table: Any, *, window: int | None, scale: float) -> _dispatch.Kernel:
    """The kernel for arguments like these on their device, or NotImplementedError with the reason."""
    run = functools.partial(attend, window=window, scale=scale, **limits(q, k_pages, page_table))
    return _dispatch.opaque("windowed_decode", run, ("row", "pages", "pages", "table", "row", "row"))


def check(*arrays: Any) -> int:
    """Number of multiprocessors of the arrays' device, or NotImplementedError with the reason; arrays[0] is q."""
    q = arrays[0]
    multiprocessors = require_triton(q.dtype, _dispatch.device_of(*arrays))
    if q.shape[-1] > LARGEST_HEAD:
        raise NotImplementedError(f"the Triton kernel takes head sizes up to {LARGEST_HEAD}, got {q.shape[-1]}.")
    return multiprocessors


def limits(*arrays: Any) -> dict[str, int]:
    """What `attend` has to know of the arrays' device, or NotImplementedError with the reason; arrays[0] is q."""
    multiprocessors = check(*arrays)
    capability = getattr(_dispatch.device_of(*arrays), "compute_capability", None)
    shared_memory = SHARED_MEMORY.get(str(capability), LEAST_SHARED_MEMORY)
    return dict(multiprocessors=multiprocessors, shared_memory=shared_memory)


def attend(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    q_start: jax.Array,
    kv_length: jax.Array,
    *block: jax.Array,
    window: int | None,
    scale: float,
    causal: bool = False,
    multiprocessors: int,
    shared_memory: int = MOST_SHARED_MEMORY,
    tuning: Tuning | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention over the pages (keys below `kv_length`) and, if given, over the block's own keys and values."""
    import jax_triton  # pyright: ignore[reportMissingImports]

    from pallas_kernels.windowed_decode import triton_kernel

    b, k, hq, d = q.shape
    _, page, hkv, _ = k_pages.shape
    entries, group = page_table.shape[1], hq // hkv
    padded = power_of_two(d)
    keys = page * entries if window is None else min(window - 1 + k, page * entries)
    tuning = tuning or choose_tuning(
        rows=power_of_two(k * group), heads=b * hkv, head_dim=padded, keys=keys, block=bool(block),
        multiprocessors=multiprocessors, shared_memory=shared_memory,
    )  # fmt: skip
    rows = tuning.rows
    chunks = -(-k * group // rows)
    # A split that reads less than two tiles is not worth its merge.
    splits = max(1, min(multiprocessors // (b * hkv * chunks), -(-keys // (2 * tuning.tile)), 64))
    scale_log2 = (scale or 1e-30) * LOG2_E  # 0 times the infinity of a hidden score is no number
    shape = dict(QUERIES=k, HEADS=hq, KV_HEADS=hkv, DIM=d, SPLITS=splits, DIM_PADDED=padded)
    out_shape = (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32))
    part = (b, hkv, splits, k * group)
    part_shape = (jax.ShapeDtypeStruct((*part, d), jnp.float32), jax.ShapeDtypeStruct(part, jnp.float32))
    results = jax_triton.triton_call(
        q, k_pages, v_pages, page_table, q_start, kv_length, *(block or (q, q)),
        kernel=triton_kernel.attend, out_shape=out_shape if splits == 1 else part_shape,
        grid=(chunks * splits * b * hkv,), name="block_attention_triton" if block else "windowed_decode_triton",
        num_warps=tuning.warps, num_stages=tuning.stages, PAGE=page, ENTRIES=entries,
        REACH=NO_WINDOW if window is None else window, SCALE_LOG2=scale_log2, HAS_BLOCK=bool(block), CAUSAL=causal,
        CHUNKS=chunks, ROWS=rows, TILE=tuning.tile, BLOCK_TILE=power_of_two(k), ONE_LOOP=tuning.one_loop,
        **shape,
    )  # fmt: skip
    if splits == 1:
        return results[0], results[1]
    out, lse = jax_triton.triton_call(
        *results, kernel=triton_kernel.merge_splits, out_shape=out_shape, grid=(b * k * hq,),
        name="windowed_decode_triton_merge", num_warps=merge_warps(splits), SPLITS_PADDED=power_of_two(splits, 1),
        **shape,
    )  # fmt: skip
    return out, lse
