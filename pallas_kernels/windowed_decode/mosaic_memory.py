"""What one thread block of the Mosaic kernel works on, and its memory warpgroup, which keeps the copy engine busy."""

import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mosaic as gpu
from pallas_kernels.windowed_decode.mosaic_problem import Problem
from pallas_kernels.windowed_decode.tuning import Tuning

TABLE_PIECE = 256  # entries of a page table that the copy engine takes at once


class Share:
    """One thread block's share of the work, while it is traced: a row, a KV head, a split of its keys, some queries.

    Names of refs: `self.g` global memory, `self.s` shared memory and barriers.
    """

    def __init__(
        self, problem: Problem, tuning: Tuning, refs: dict[str, Any], shared: dict[str, Any], interpret: Any
    ) -> None:
        self.p, self.t, self.g, self.s, self.interpret = problem, tuning, refs, shared, interpret
        self.row, self.split, self.head, self.chunk = (lax.axis_index(x) for x in ("row", "split", "head", "chunk"))
        self.block_keys_here = self.split == tuning.splits - 1

    def locate(self) -> None:
        """The keys [start, stop) of this split in `count` tiles, and what the queries of this chunk can see."""
        p, tile, splits = self.p, self.t.tile, jnp.int32(self.t.splits)
        per_chunk = p.queries_per_warpgroup * p.warpgroups
        self.q_first = self.g["q_start"][self.row] + self.chunk * per_chunk
        self.length = self.g["kv_length"][self.row]
        self.q_end = self.q_first + jnp.minimum(p.queries - self.chunk * per_chunk, per_chunk)
        self.begin = jnp.maximum(self.q_first - (p.reach - 1), 0)
        self.end = jnp.minimum(self.length, self.q_end)
        unit = jnp.int32(p.unit(self.t))
        first = lax.div(self.begin, unit)
        count = jnp.maximum(lax.div(self.end + (unit - 1), unit) - first, 0)
        here, next_split = (first + lax.div(count * i, splits) for i in (self.split, self.split + 1))
        self.start, self.stop = here * unit, next_split * unit
        self.count = lax.div(self.stop - self.start + (tile - 1), jnp.int32(tile))

    def slot(self, step: Any) -> Any:
        return lax.rem(step, jnp.int32(self.t.stages))


class Memory(Share):
    """The memory warpgroup."""

    def run(self) -> None:
        p, g, s, stages = self.p, self.g, self.s, self.t.stages
        zero = self.row * 0  # a start that is not static: rows past the array are filled with zeros
        if "table" in s:
            for start in range(0, p.table_entries, TABLE_PIECE):
                piece = min(TABLE_PIECE, p.table_entries - start)
                source = g["table"].at[gpu.ds(self.row * p.entries + start, piece)]
                gpu.copy_within(source, s["table"].at[gpu.ds(start, piece)], s["table_ready"])
        if p.block:

            @gpu.when(self.block_keys_here)
            def _block_keys() -> None:
                for i, name in enumerate(("k_block", "v_block")):
                    source = g[name].at[self.row, gpu.ds(zero, gpu.ROWS), self.head]
                    gpu.copy_to_shared(source, s[name], s["block_ready"].at[i])

        self.locate()
        if "table" in s:
            gpu.barrier_wait(s["table_ready"])

        @gpu.when(self.count > 0)
        def _pages() -> None:
            @gpu.loop(0, self.count)
            def _tile(step: Any) -> None:
                slot, pages = self.slot(step), self.pages(step)
                for kind in ("k", "v"):
                    free, ready = (s[f"{kind}_{state}"].at[slot] for state in ("free", "ready"))
                    gpu.when(step >= stages)(functools.partial(gpu.barrier_wait, free))
                    for source, rows in self.pieces(kind, step, pages):
                        gpu.copy_to_shared(source, s[kind].at[slot, rows], ready)

            @gpu.loop(jnp.maximum(self.count - stages, 0), self.count)
            def _drain(step: Any) -> None:  # every phase of a barrier is waited for, as the interpreter demands
                gpu.barrier_wait(s["k_free"].at[self.slot(step)])
                gpu.barrier_wait(s["v_free"].at[self.slot(step)])

    def position(self, step: Any, piece: int) -> Any:
        return self.start + step * self.t.tile + piece * self.p.page

    def pages(self, step: Any) -> tuple[Any, ...]:
        """Ids of the pages of a tile. A page without a visible key is not read: the nearest one that has some takes
        its place, and the mask hides it."""
        p, page_size = self.p, jnp.int32(self.p.page)
        end = self.end if p.unit(self.t) == self.t.tile else jnp.minimum(self.end, self.stop)
        oldest, newest = lax.div(self.begin, page_size), lax.div(end - 1, page_size)

        def look_up(piece: int) -> Any:
            page = jnp.clip(lax.div(self.position(step, piece), page_size), oldest, newest)
            entry = lax.rem(page, jnp.int32(p.entries))
            return self.s["table"][entry] if "table" in self.s else self.g["table"][self.row * p.entries + entry]

        return tuple(look_up(piece) for piece in range(p.pages_of(self.t.tile)))

    def pieces(self, kind: str, step: Any, pages: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
        """What to copy for a tile, and to which of its rows."""
        p, rows = self.p, min(self.t.tile, self.p.page)
        for piece, page in enumerate(pages):
            offset = lax.rem(self.position(step, piece), jnp.int32(p.page)) if p.page > self.t.tile else 0
            yield self.g[f"{kind}_pages"].at[page, gpu.ds(offset, rows), self.head], gpu.ds(piece * rows, rows)
