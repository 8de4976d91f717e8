"""`windowed_decode` and `block_attention` for NVIDIA GPUs from Ampere on, in Triton through jax-triton.

Any head size up to 256 (padded to a power of two inside), any group, any page size.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch
from pallas_kernels._triton import LOG2_E, power_of_two, require_triton

LARGEST_HEAD = 256
NO_WINDOW = 2**30


def build(q: Any, k_pages: Any, page_table: Any, *, window: int | None, scale: float) -> _dispatch.Kernel:
    """The kernel for arguments like these on their device, or NotImplementedError with the reason."""
    run = functools.partial(attend, window=window, scale=scale, multiprocessors=check(q, k_pages, page_table))
    return _dispatch.opaque("windowed_decode", run, ("row", "pages", "pages", "table", "row", "row"))


def check(*arrays: Any) -> int:
    """Number of multiprocessors of the arrays' device, or NotImplementedError with the reason; arrays[0] is q."""
    q = arrays[0]
    multiprocessors = require_triton(q.dtype, _dispatch.device_of(*arrays))
    if q.shape[-1] > LARGEST_HEAD:
        raise NotImplementedError(f"the Triton kernel takes head sizes up to {LARGEST_HEAD}, got {q.shape[-1]}.")
    return multiprocessors


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
) -> tuple[jax.Array, jax.Array]:
    """Attention over the pages (keys below `kv_length`) and, if given, over the block's own keys and values."""
    import jax_triton  # pyright: ignore[reportMissingImports]

    from pallas_kernels.windowed_decode import triton_kernel

    b, k, hq, d = q.shape
    _, page, hkv, _ = k_pages.shape
    entries, group = page_table.shape[1], hq // hkv
    padded = power_of_two(d)
    rows = min(power_of_two(k * group), 128 if padded <= 128 else 64)
    tile = 64 if padded <= 128 else 32
    chunks = -(-k * group // rows)
    keys = page * entries if window is None else min(window - 1 + k, page * entries)
    # Two blocks fit on a multiprocessor; a split that reads less than two tiles is not worth its merge.
    splits = max(1, min(2 * multiprocessors // (b * hkv * chunks), -(-keys // (2 * tile)), 64))
    shape = dict(QUERIES=k, HEADS=hq, KV_HEADS=hkv, DIM=d, SPLITS=splits, DIM_PADDED=padded)
    out_shape = (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32))
    part = (b, hkv, splits, k * group)
    part_shape = (jax.ShapeDtypeStruct((*part, d), jnp.float32), jax.ShapeDtypeStruct(part, jnp.float32))
    stages = 3 if padded <= 128 else 2
    results = jax_triton.triton_call(
        q, k_pages, v_pages, page_table, q_start, kv_length, *(block or (q, q)),
        kernel=triton_kernel.attend, out_shape=out_shape if splits == 1 else part_shape, grid=(splits, b * hkv, chunks),
        name="block_attention_triton" if block else "windowed_decode_triton", num_warps=4 if rows <= 64 else 8,
        num_stages=stages, PAGE=page, ENTRIES=entries, REACH=NO_WINDOW if window is None else window,
        SCALE_LOG2=scale * LOG2_E, HAS_BLOCK=bool(block), CAUSAL=causal, ROWS=rows, TILE=tile,
        BLOCK_TILE=power_of_two(k), STAGES=stages, **shape,
    )  # fmt: skip
    if splits == 1:
        return results[0], results[1]
    out, lse = jax_triton.triton_call(
        *results, kernel=triton_kernel.merge_splits, out_shape=out_shape, grid=(b * k * hq,),
        name="windowed_decode_triton_merge", num_warps=4, SPLITS_PADDED=power_of_two(splits, 1), **shape,
    )  # fmt: skip
    return out, lse
