"""`block_sparse_decode` for NVIDIA GPUs from Ampere on, in Triton through jax-triton.

Any head size up to 256 (padded to a power of two inside), up to 128 query heads a KV head, any page and block size.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch
from pallas_kernels._triton import LOG2_E, power_of_two, require_triton

LARGEST_HEAD = 256
MOST_ROWS = 128
# One matrix unit's rows: two programs fit on a multiprocessor, and one computes while one waits. Twice as many load
# half as often where neighbours select mostly the same blocks. On an H200, microseconds with 64 and 128 rows of 8
# queries that select 16 blocks at random: of 32, batch 64 244 and 178, batch 8 37.9 and 36.0; of 256, batch 8 70.1 and
# 77.4.
PREFERRED_ROWS = 64
MOST_QUERIES = 16  # of one program
MOST_SPLITS = 16
MOST_BLOCKS = 2**23  # of the pool and of a row: a block's number, its place and a bit for each query are one word


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """One way to cut the work.

    Attributes:
      queries: neighbouring queries of one program, a power of two. It reads each block that one of them selected once,
        for all of them: fewer bytes where they share, products that nobody wants where they do not.
      splits: programs that share the blocks of one program's queries and KV head; merged by a second kernel.
      tile: keys of one step.
      stages: steps in flight.
      warps: of one program.
    """

    queries: int
    splits: int
    tile: int
    stages: int
    warps: int


def choose_tuning(
    *,
    rows: int,
    queries: int,
    group: int,
    head_dim: int,
    block_size: int,
    top_k: int,
    blocks: int,
    multiprocessors: int,
) -> Tuning:
    """The tuning for `rows` independent rows x KV heads, each with so many blocks to select from."""
    padded = power_of_two(head_dim)
    all_of_them, few = power_of_two(queries, 1), max(1, PREFERRED_ROWS // power_of_two(group, 1))
    alike = blocks <= 4 * top_k and all_of_them <= 2 * few and padded <= 128 and 8 * rows >= multiprocessors
    together = min(all_of_them, 2 * few if alike else few, MOST_QUERIES)
    tile = min(64 if padded <= 128 else 32, power_of_two(block_size))
    tiles = min(queries, together) * top_k * -(-block_size // tile)
    programs = rows * -(-queries // together)
    wide = together * group > 64
    # A split that reads less than two tiles is not worth its merge, nor are more than 16: on an H200, microseconds for
    # one row at 4,096 tokens, 8 splits 15.8, 16 13.2, 32 14.0.
    splits = max(1, min((1 if wide else 2) * multiprocessors // programs, -(-tiles // 2), MOST_SPLITS))
    stages = 2 if padded > 128 else 4 if wide else 3
    return Tuning(queries=together, splits=splits, tile=tile, stages=stages, warps=8 if wide else 4)


def build(q: Any, k_pages: Any, page_table: Any, block_ids: Any, *, block_size: int, scale: float) -> _dispatch.Kernel:
    """The kernel for arguments like these on their device, or NotImplementedError with the reason."""
    multiprocessors = require_triton(q.dtype, _dispatch.device_of(q, k_pages, page_table))
    group = q.shape[2] // k_pages.shape[2]
    if q.shape[-1] > LARGEST_HEAD:
        raise NotImplementedError(f"the Triton kernel takes head sizes up to {LARGEST_HEAD}, got {q.shape[-1]}.")
    if group > MOST_ROWS:
        raise NotImplementedError(f"the Triton kernel takes at most {MOST_ROWS} query heads a KV head, got {group}.")
    if block_ids.shape[3] > MOST_ROWS:
        raise NotImplementedError(
            f"the Triton kernel takes up to {MOST_ROWS} blocks a query, got {block_ids.shape[3]}."
        )
    if max(k_pages.shape[0], page_table.shape[1]) * k_pages.shape[1] // block_size >= MOST_BLOCKS:
        raise NotImplementedError(
            f"the Triton kernel takes fewer than {MOST_BLOCKS} blocks, and k_pages {k_pages.shape} has more of "
            f"{block_size} keys."
        )
    run = functools.partial(attend, block_size=block_size, scale=scale, multiprocessors=multiprocessors)
    return _dispatch.opaque("block_sparse_decode", run, ("row", "pages", "pages", "table", "row", "row"))


def attend(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    block_ids: jax.Array,
    q_start: jax.Array,
    *,
    block_size: int,
    scale: float,
    multiprocessors: int,
    tuning: Tuning | None = None,
) -> tuple[jax.Array, jax.Array]:
    import jax_triton  # pyright: ignore[reportMissingImports]

    from pallas_kernels.block_sparse_decode import triton_kernel
    from pallas_kernels.windowed_decode.triton_kernel import merge_splits

    b, k, hq, d = q.shape
    _, page, hkv, _ = k_pages.shape
    group, top_k = hq // hkv, block_ids.shape[3]
    t = tuning or choose_tuning(
        rows=b * hkv, queries=k, group=group, head_dim=d, block_size=block_size, top_k=top_k,
        blocks=page_table.shape[1] * page // block_size, multiprocessors=multiprocessors,
    )  # fmt: skip
    shape = dict(QUERIES=k, HEADS=hq, KV_HEADS=hkv, DIM=d, SPLITS=t.splits, DIM_PADDED=power_of_two(d))
    out_shape = (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32))
    part = (b, hkv, t.splits, k * group)
    part_shape = (jax.ShapeDtypeStruct((*part, d), jnp.float32), jax.ShapeDtypeStruct(part, jnp.float32))
    grid, places = (t.splits, b * hkv, -(-k // t.queries)), t.queries * power_of_two(top_k, 1)
    lists = jax.ShapeDtypeStruct((*grid, 2 * places), jnp.int32)  # of words of 64 bits
    *results, _ = jax_triton.triton_call(
        q, k_pages, v_pages, page_table, block_ids, q_start,
        kernel=triton_kernel.attend, out_shape=(*(out_shape if t.splits == 1 else part_shape), lists),
        grid=grid, name="block_sparse_decode_triton", num_warps=t.warps,
        num_stages=t.stages, PAGE=page, ENTRIES=page_table.shape[1], BLOCK=block_size, TOP_K=top_k,
        TOP_K_PADDED=power_of_two(top_k, 1), TOGETHER=t.queries, ROWS=power_of_two(t.queries * group), TILE=t.tile,
        SCALE_LOG2=scale * LOG2_E, STAGES=t.stages, **shape,
    )  # fmt: skip
    if t.splits == 1:
        return results[0], results[1]
    # One warp a row: of 4 splits and 4,096 rows 3.8 microseconds, with four warps, which wait for one another, 12.9.
    out, lse = jax_triton.triton_call(
        *results, kernel=merge_splits, out_shape=out_shape, grid=(b * k * hq,),
        name="block_sparse_decode_triton_merge", num_warps=1, SPLITS_PADDED=power_of_two(t.splits, 1), **shape,
    )  # fmt: skip
    return out, lse
