"""How the Mosaic kernel cuts its work: tile, pipeline depth, splits over the keys and how these are merged."""

import dataclasses
from typing import Literal

from pallas_kernels import _mosaic


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """One way to run the kernel.

    Attributes:
      tile: keys of one pipeline step.
      stages: pipeline steps held in shared memory.
      splits: blocks that share the keys of one row and KV head.
      merge: how splits become one result: in the same launch ("fused": all blocks of a head have to be resident at
        once) or by a second kernel ("kernel").
      merge_columns: columns of one block of the second kernel.
      warpgroups: compute warpgroups of a block, at most. With 1 the query rows of a head are shared by twice as many
        blocks, each of which loads all keys of its split: for few heads, where latency counts and not bytes.
      evict_first: whether loaded keys are the first to leave the L2 cache, before what was in it when the kernel
        started and may have to be written back.
    """

    tile: int = 128
    stages: int = 2
    splits: int = 1
    merge: Literal["fused", "kernel"] = "fused"
    merge_columns: int = 32
    warpgroups: int = 2
    evict_first: bool = False

    def __post_init__(self) -> None:
        if self.tile not in (64, 128):
            raise ValueError(f"tile must be 64 or 128 keys, got {self.tile}.")
        if self.stages < 2:
            raise ValueError(f"stages must be at least 2, one to fill while one is used, got {self.stages}.")
        if self.splits < 1:
            raise ValueError(f"splits must be at least 1, got {self.splits}.")
        if self.merge not in ("fused", "kernel"):
            raise ValueError(f"merge must be 'fused' or 'kernel', got {self.merge!r}.")
        if self.warpgroups not in (1, 2):
            raise ValueError(f"warpgroups must be 1 or 2, got {self.warpgroups}.")
        if self.merge_columns not in (8, 16, 32, 64):
            raise ValueError(f"merge_columns must be 8, 16, 32 or 64, got {self.merge_columns}.")

    def fused_columns(self, head_dim: int) -> int:
        """Columns that each of the merging blocks takes in a fused merge: at least 8, and an even cut."""
        blocks = min(self.splits, head_dim // 8)
        return head_dim >> (blocks.bit_length() - 1)


# Head size -> tile, stages: the most that fits beside the queries and a block's own keys. 256 heads of 4,103 keys take
# 142.7 us on an H200; 147 with 3 stages, 169 with 6 of 64 keys, 144.6 with 132 blocks that serve one head after the
# other, the keys of the next on their way while the results of the last are written.
PIPELINES = {64: (128, 3), 128: (128, 2), 192: (64, 2), 256: (64, 2)}

MOST_FUSED = 16  # splits, each of which merges 8 of 128 columns
MOST_EVICTED = 150_000_000  # bytes of keys and values, three times the L2 cache of an H200


def choose_tuning(
    *, heads: int, head_dim: int, keys: int, multiprocessors: int = 132, warpgroups: int = 2, readers: int = 1
) -> Tuning:
    """The tuning for `heads` blocks (rows x KV heads x chunks of the queries) over at most `keys` keys each.

    A block has `warpgroups` warpgroups if it wants; `readers` blocks read the same keys.

    Few heads leave multiprocessors idle, so their keys are split until all have a block; more blocks than
    multiprocessors would wait for a second wave, and fused splits would wait for ever. If that leaves a block two tiles
    of keys at most, blocks with one warpgroup each are faster (4 heads, 4,103 keys, an H200, cold: 10.8 us in 16 splits
    of blocks with one, 11.7 in 17 with two).

    A fused merge waits longer the more blocks it reads from, a second kernel costs 3 us of its own. Four heads of 33
    tiles take 12.9 us in 33 fused splits, 11.4 in 33 and a second kernel. A single head takes 9.8 us in 33 splits and a
    second kernel, 11.2 in 17 fused ones and 11.5 in 33.

    Keys that are the first to leave the cache save 9 % (32 heads: 26.5 us, 29.3) where it is full of changed lines:
    these are written back later. Where many times the cache is read they cost 2 % (256 heads, cut or not).
    """
    if head_dim not in PIPELINES:
        known = ", ".join(map(str, PIPELINES))
        raise NotImplementedError(f"the Mosaic kernel takes head sizes {known}, got {head_dim}.")
    tile, stages = PIPELINES[head_dim]
    tiles, single = -(-keys // tile), heads == 1
    if warpgroups == 2 and 2 * heads * max(1, tiles // 2) <= multiprocessors:
        warpgroups, heads, readers = 1, 2 * heads, 2 * readers
    most = max(1, min(multiprocessors // heads, tiles, 64))
    can_fuse = head_dim <= 128
    if can_fuse and not single and most > MOST_FUSED and tiles <= 2 * MOST_FUSED + 1:
        most = MOST_FUSED
    per_split = -(-tiles // most)
    splits = -(-tiles // per_split)  # the fewest that leave no split with more tiles
    if can_fuse and most <= MOST_FUSED:
        splits = most
    fused = can_fuse and splits <= MOST_FUSED
    read = 4 * heads // readers * keys * head_dim
    return Tuning(
        tile=tile,
        stages=stages,
        splits=splits,
        merge="fused" if fused else "kernel",
        merge_columns=32 if fused else 8,
        warpgroups=warpgroups,
        evict_first=splits > 1 and readers == 1 and read <= MOST_EVICTED,
    )


def shared_memory_bytes(tuning: Tuning, *, head_dim: int, warpgroups: int, block: bool, table: int) -> int:
    """Shared memory of one block of the kernel, without its barriers."""
    rows = warpgroups * _mosaic.ROWS + 2 * tuning.stages * tuning.tile + 2 * _mosaic.ROWS * block
    merged = warpgroups * _mosaic.ROWS * tuning.fused_columns(head_dim)
    if tuning.splits == 1 or tuning.merge != "fused":
        merged = 0
    return 2 * rows * head_dim + 2 * merged + 1024 + -(-4 * table // 1024) * 1024  # buffers start at multiples of 1024
