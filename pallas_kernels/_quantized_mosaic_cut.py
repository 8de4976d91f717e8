"""How thread blocks share the tiles of a launch, and what they exchange where a tile is not one block's.

Without a unit a block takes every so many-th tile, whole. With one all units of all tiles lie end to end, those of the
same weights next to each other, each block takes an even share of them, and tiles end where they end: "stream-K"
(Osama, Merrill, Cecka, Garland, Owens, PPoPP 2023). Only a share's first piece can lack the beginning of its tile: it
is done first and left in global memory for the block that has the beginning, as its last piece, and finishes the tile.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mosaic as gpu

AT_ONCE = 128  # columns of parts that a warpgroup has registers for


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a block does in one go: units [first, end) of a tile.

    Attributes:
      block, tile: number of the tile of x and of the tile of the output features.
      before: units that the block has done before.
      owner: block that has the beginning of the tile and finishes it.
      others: blocks that have the rest if this is the owner; they are those of the numbers just below.
    """

    block: Any
    tile: Any
    first: Any
    end: Any
    before: Any
    owner: Any = 0
    others: Any = 0


@dataclasses.dataclass(frozen=True)
class Shares:
    """The even cut, by number of the thread block: `tiles` of `units` each among `blocks`.

    `of_x` tiles of x take turns, with the same tile of the output features each.
    """

    tiles: int
    units: int
    blocks: int
    of_x: int = 1

    def start(self, block: Any) -> Any:
        """First of all units that the block takes; the one of a lower number goes on where it ends.

        All blocks are resident at once, one to a multiprocessor. They wait for those of lower numbers alone, and start
        in that order in practice, so that no wait is for ever even where something else holds multiprocessors back.
        """
        return divide((self.blocks - 1 - block) * (self.tiles * self.units), self.blocks)

    def pieces(self, block: Any) -> Any:
        return divide(self.start(block - 1) - 1, self.units) - divide(self.start(block), self.units) + 1

    def piece(self, block: Any, item: Any) -> Piece:
        start, stop = self.start(block), self.start(block - 1)
        tile = divide(start, self.units) + item
        ahead = tile * self.units
        first, end = jnp.maximum(start - ahead, 0), jnp.minimum(stop - ahead, self.units)
        owner, last = self.block(ahead), self.block(ahead + self.units - 1)
        return Piece(
            modulo(tile, self.of_x), divide(tile, self.of_x), first, end, ahead + first - start, owner,
            jnp.where(first == 0, owner - last, 0),
        )  # fmt: skip

    def block(self, unit: Any) -> Any:
        """The block that takes this one of all units: its share is the last one that starts at or before it."""
        return self.blocks - 1 - divide((unit + 1) * self.blocks - 1, self.tiles * self.units)

    @property
    def most_others(self) -> int:
        total, n = self.tiles * self.units, self.units
        shares = [[((u + 1) * self.blocks - 1) // total for u in (n * i, n * i + n - 1)] for i in range(self.tiles)]
        return max(last - first for first, last in shares)


class Exchange:
    """Parts of tiles in global memory, `left` [blocks, parts of a block, *part_shape], never initialised.

    Counters of 4 bytes, one for each block, of signals for the tile that it owns, are the zeros behind the rows of x
    [rows + `spare_rows`, in]. (Semaphores of Pallas would be zeroed by XLA, in a loop by a copy for each launch.)
    The copying warpgroup, which is done first, waits for them, and the others in shared memory for it: `ready`.
    The interpreter has none and runs one block after the other. There a signal copies to `seen` what the block has
    written until then, no more can be read, and that only as `given` to a second launch.
    """

    def __init__(self, refs: dict[str, Any], ready: Any, rows: int, finishers: int, interpret: Any):
        self.left, self.ready, self.finishers, self.interpret = refs["left"], ready, finishers, interpret
        self.seen, self.given = refs.get("seen", self.left), refs.get("given", self.left)
        self.a_finisher = self.left.shape[1] // finishers  # parts of it
        self.x, self.rows = refs["x"], rows

    def leave(self, block: Any, owner: Any, finisher: Any, parts: list[jax.Array]) -> None:
        self.write(block, finisher, parts)
        self.signal(block, owner, finisher)

    def wait(self, piece: Piece) -> None:
        """Until the others have left their parts of the tile of this piece."""

        @gpu.when(piece.others > 0)
        def _wait() -> None:
            if self.interpret is None:
                gpu.wait_for_counter(self.counter(piece.owner), piece.others * self.finishers)
            gpu.barrier_arrive(self.ready)

    def add_others(self, piece: Piece, finisher: Any, totals: list[jax.Array], most: int) -> list[jax.Array]:
        """totals and what the same warpgroup of the other blocks, at most so many, has left; in their order."""

        def add(i: Any, totals: Any) -> Any:
            return [a + b for a, b in zip(totals, self.take(piece.owner - 1 - i, finisher), strict=True)]

        def collect(totals: Any) -> Any:
            gpu.barrier_wait(self.ready)
            if most * len(totals) * totals[0].shape[1] > AT_ONCE:
                return lax.fori_loop(0, piece.others, add, totals)
            # One after the other would be slow: that many parts are on their way together, also where fewer are wanted.
            taken = [self.take(jnp.maximum(piece.owner - 1 - i, 0), finisher) for i in range(most)]
            for i, parts in enumerate(taken):
                totals = [jnp.where(i < piece.others, a + b, a) for a, b in zip(totals, parts, strict=True)]
            return totals

        return lax.cond(piece.others > 0, collect, lambda totals: totals, totals)

    def take(self, block: Any, finisher: Any) -> list[jax.Array]:
        """What the same warpgroup of another block has left."""
        return [gpu.load_pieces(self.given.at[block, place], self.interpret) for place in self.places(finisher)]

    def write(self, block: Any, finisher: Any, parts: list[jax.Array]) -> None:
        for place, part in zip(self.places(finisher), parts, strict=True):
            gpu.store_pieces(self.left.at[block, place], part, self.interpret)

    def signal(self, block: Any, owner: Any, finisher: Any) -> None:
        if self.interpret is None:
            gpu.signal_counter(self.counter(owner))
            return
        for place in self.places(finisher):
            self.seen.at[block, place][...] = self.left.at[block, place][...]

    def counter(self, block: Any) -> Any:
        inputs = self.x.shape[1]
        return self.x.at[self.rows + divide(2 * block, inputs), gpu.ds(modulo(2 * block, inputs), 2)]

    def places(self, finisher: Any) -> list[Any]:
        return [finisher * self.a_finisher + i for i in range(self.a_finisher)]


def part_shape(tokens: int) -> tuple[int, ...]:
    """Of 64 outputs, in pieces of 8 columns, which a warp writes and reads in lines."""
    return tokens // 8, gpu.ROWS, 8


def divide(a: Any, b: int) -> Any:
    return lax.div(a, jnp.int32(b))


def modulo(a: Any, b: int) -> Any:
    return lax.rem(a, jnp.int32(b))
