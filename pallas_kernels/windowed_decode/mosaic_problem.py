"""What the Mosaic kernel of `windowed_decode` and `block_attention` is built for, and what it cannot do."""

import dataclasses
from typing import Any

from pallas_kernels import _mosaic as gpu
from pallas_kernels.windowed_decode.tuning import Tuning, choose_tuning, shared_memory_bytes

NO_WINDOW = 2**30
MOST_TABLE_ENTRIES = 2048  # longer page tables are read where they are


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is known when the kernel is built. `group` divides 64 and is a multiple of 8."""

    batch: int
    queries: int
    kv_heads: int
    group: int
    head_dim: int
    page: int
    entries: int
    dtype: Any
    window: int | None
    scale: float
    block: bool
    causal: bool
    most_warpgroups: int = 2

    @property
    def queries_per_warpgroup(self) -> int:
        return gpu.ROWS // self.group

    @property
    def warpgroups(self) -> int:
        # Two accumulators of 256 columns and their scores do not fit in the registers of one block.
        return 1 if self.queries <= self.queries_per_warpgroup or self.head_dim > 128 else self.most_warpgroups

    @property
    def chunks(self) -> int:
        return -(-self.queries // (self.queries_per_warpgroup * self.warpgroups))

    @property
    def heads(self) -> int:
        return self.batch * self.kv_heads * self.chunks

    def pages_of(self, tile: int) -> int:
        """Pages that a tile is copied from."""
        return max(tile // self.page, 1)

    def unit(self, tuning: Tuning) -> int:
        """Keys between which splits are cut: half tiles where there are any, so that the longest split is shorter.

        The matrix units take no fewer than 64 keys, and a page is not cut.
        """
        half = tuning.tile // 2
        return half if tuning.splits > 1 and half >= gpu.ROWS and self.page <= half else tuning.tile

    @property
    def table_entries(self) -> int:
        """Entries of the page table that are copied to shared memory; 0: they are read where they are.

        The copy engine moves multiples of 16 bytes to and from multiples of 16 bytes.
        """
        return self.entries if self.entries <= MOST_TABLE_ENTRIES and self.entries % 4 == 0 else 0

    @property
    def reach(self) -> int:
        return NO_WINDOW if self.window is None else self.window


def describe(
    q: Any, k_pages: Any, page_table: Any, *, window: int | None, scale: float, block: bool, causal: bool = False
) -> Problem:
    b, k, hq, d = q.shape
    _, page, hkv, _ = k_pages.shape
    group, entries = gpu.padded_group(hq // hkv), page_table.shape[1]
    return Problem(b, k, hkv, group, d, page, entries, q.dtype, window, scale, block, causal)


def plan(problem: Problem, multiprocessors: int = 132, tuning: Tuning | None = None) -> Tuning:
    """The tuning for a problem, or NotImplementedError with the reason why the kernel cannot serve it."""
    p, capacity = problem, problem.page * problem.entries
    gpu.require_half(p.dtype)
    if tuning is None:
        keys = capacity if p.window is None else min(p.window - 1 + p.queries, capacity)
        tuning = choose_tuning(
            heads=p.heads, head_dim=p.head_dim, keys=keys, multiprocessors=multiprocessors, warpgroups=p.warpgroups,
            readers=p.chunks,
        )  # fmt: skip
    p = dataclasses.replace(p, most_warpgroups=tuning.warpgroups)
    if p.page % 8 or (tuning.tile % p.page and p.page % tuning.tile):
        raise NotImplementedError(
            f"the Mosaic kernel takes pages of 8, 16, 32, 64 or a multiple of {tuning.tile} slots, got {p.page}."
        )
    if p.block and p.queries > gpu.ROWS:
        raise NotImplementedError(f"the Mosaic kernel takes blocks of at most {gpu.ROWS}, got {p.queries}.")
    needed = shared_memory_bytes(
        tuning, head_dim=p.head_dim, warpgroups=p.warpgroups, block=p.block, table=p.table_entries
    )
    if needed + 1024 > gpu.SHARED_MEMORY:  # the barriers
        raise NotImplementedError(f"the Mosaic kernel would need {needed} bytes of shared memory with {tuning}.")
    return tuning
