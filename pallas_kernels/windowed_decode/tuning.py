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
      cut: between which keys splits are cut: "tile", or "half" a tile (64 of 128 keys), so that the longest split is
        shorter; its last half tile takes half the work. Pages of more than half a tile are cut at tiles.
      table: how the page table gets to shared memory: through a tensor map, which has to be fetched first, or "plain".
      borders: whether tiles at the edges of what is visible have "loops" of their own or are masked in a "branch", with
        half as much code to compile and to fetch.
      warpgroups: compute warpgroups of a block, at most. With 1 the query rows of a head are shared by twice as many
        blocks, each of which loads all keys of its split: for few heads, where latency counts and not bytes.
      partials: how the results of splits lie in memory: by "rows", or in "pieces" of 64 rows x 8 columns, of which a
        warp writes and reads 256 bytes in one go and not 8 times 32.

    What was tried and gained nothing on an H200: blocks that stay and serve one head after the other, with the next
    head's pages on their way while a result is written (batch 64: 141.5 us with 132 blocks, 140.2 with one for each
    head, 134 with the loads alone), and page ids read a tile ahead (136.5 us and 136.4).
    """

    tile: int = 128
    stages: int = 2
    splits: int = 1
    merge: Literal["fused", "kernel"] = "fused"
    merge_columns: int = 32
    cut: Literal["tile", "half"] = "tile"
    table: Literal["mapped", "plain"] = "mapped"
    partials: Literal["rows", "pieces"] = "rows"
    borders: Literal["loops", "branch"] = "loops"
    warpgroups: int = 2

    def __post_init__(self) -> None:
        if self.tile not in (64, 128):
            raise ValueError(f"tile must be 64 or 128 keys, got {self.tile}.")
        if self.stages < 2:
            raise ValueError(f"stages must be at least 2, one to fill while one is used, got {self.stages}.")
        if self.splits < 1:
            raise ValueError(f"splits must be at least 1, got {self.splits}.")
        if self.merge not in ("fused", "kernel"):
            raise ValueError(f"merge must be 'fused' or 'kernel', got {self.merge!r}.")
        for name, known in (
            ("cut", ("tile", "half")),
            ("table", ("mapped", "plain")),
            ("partials", ("rows", "pieces")),
            ("borders", ("loops", "branch")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be {known[0]!r} or {known[1]!r}, got {getattr(self, name)!r}.")
        if self.warpgroups not in (1, 2):
            raise ValueError(f"warpgroups must be 1 or 2, got {self.warpgroups}.")
        if self.cut == "half" and self.tile == 64:
            raise ValueError("cut must be 'tile' for tiles of 64 keys: the matrix units take no fewer.")
        if self.merge_columns not in (8, 16, 32, 64):
            raise ValueError(f"merge_columns must be 8, 16, 32 or 64, got {self.merge_columns}.")

    def fused_columns(self, head_dim: int) -> int:
        """Columns that each of the merging blocks takes in a fused merge: at least 8, and an even cut."""
        blocks = min(self.splits, head_dim // 8)
        return head_dim >> (blocks.bit_length() - 1)


# Head size -> tile, stages: the most that fits beside the queries and a block's own keys. More stages were slower.
PIPELINES = {64: (128, 3), 128: (128, 2), 192: (64, 2), 256: (64, 2)}


MOST_FUSED = 17


def choose_tuning(*, heads: int, head_dim: int, keys: int, multiprocessors: int = 132) -> Tuning:
    """The tuning for `heads` independent rows x KV heads (x query chunks) over at most `keys` keys each.

    Few heads leave multiprocessors idle, so their keys are split until all have a block; more blocks than
    multiprocessors would wait for a second wave, and fused splits would wait for ever.

    A fused merge waits longer the more blocks it reads from, a second kernel costs 3 to 4 us of its own. Measured on an
    H200, cold, 4,103 keys in 33 tiles: 4 heads take 14.6 us in 33 fused splits, 13.1 in 33 and a second kernel, 12.3 in
    17 fused ones of two tiles each, so several heads take two tiles a split where one would need a second kernel. A
    single head takes 9.8 us in 33 splits and a second kernel, 11.2 in 17 fused ones and 11.5 in 33.
    """
    if head_dim not in PIPELINES:
        known = ", ".join(map(str, PIPELINES))
        raise NotImplementedError(f"the Mosaic kernel takes head sizes {known}, got {head_dim}.")
    tile, stages = PIPELINES[head_dim]
    tiles = -(-keys // tile)
    per_split = -(-tiles // max(1, min(multiprocessors // heads, tiles, 64)))
    can_fuse = head_dim <= 128
    if can_fuse and heads > 1 and per_split == 1 and MOST_FUSED < tiles <= 2 * MOST_FUSED:
        per_split = 2
    splits = -(-tiles // per_split)  # the fewest that leave no split with more tiles
    if can_fuse and splits <= MOST_FUSED:
        return Tuning(tile=tile, stages=stages, splits=splits, merge="fused")
    return Tuning(tile=tile, stages=stages, splits=splits, merge="kernel", merge_columns=8)


def shared_memory_bytes(tuning: Tuning, *, head_dim: int, warpgroups: int, block: bool, table: int) -> int:
    """Shared memory of one block of the kernel, without its barriers."""
    rows = warpgroups * _mosaic.ROWS + 2 * tuning.stages * tuning.tile + 2 * _mosaic.ROWS * block
    merged = warpgroups * _mosaic.ROWS * tuning.fused_columns(head_dim)
    if tuning.splits == 1 or tuning.merge != "fused":
        merged = 0
    return 2 * rows * head_dim + 2 * merged + 1024 + -(-4 * table // 1024) * 1024  # buffers start at multiples of 1024
