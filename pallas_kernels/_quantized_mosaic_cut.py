"""How thread blocks share the tiles of a launch, and what they exchange where a tile is not one block's.

Without a unit a block takes every so many-th tile, whole. With one all units of all tiles (one tile of rows) lie end
to end, each block takes an even share of them, and tiles end where they end: "stream-K" (Osama, Merrill, Cecka,
Garland, Owens, PPoPP 2023). Only a share's first piece can lack the beginning of its tile: it is done first and left in
global memory for the block that has the beginning, as its last piece, and finishes the tile.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mosaic as gpu


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a block does in one go: units [first, end) of a tile.

    Attributes:
      block, tile: number of the tile of x and of the tile of the output features.
      before: units that the block has done before.
      others: blocks that have the rest of the tile; they are those of the numbers just below.
    """

    block: Any
    tile: Any
    first: Any
    end: Any
    before: Any
    others: Any = 0


@dataclasses.dataclass(frozen=True)
class Shares:
    """The even cut, by number of the thread block: `tiles` of `units` each among `blocks`."""

    tiles: int
    units: int
    blocks: int

    def start(self, block: Any) -> Any:
        """First of all units that the block takes; the one of a lower number goes on where it ends.

        Blocks wait for those of lower numbers alone. All are resident at once, one to a multiprocessor; and even where
        something else holds multiprocessors back they start in the order of their numbers, so that no wait is for ever.
        """
        return divide((self.blocks - 1 - block) * (self.tiles * self.units), self.blocks)

    def pieces(self, block: Any) -> Any:
        return divide(self.start(block - 1) - 1, self.units) - divide(self.start(block), self.units) + 1

    def piece(self, block: Any, item: Any) -> Piece:
        start, stop = self.start(block), self.start(block - 1)
        tile = divide(start, self.units) + item
        ahead = tile * self.units
        first, end = jnp.maximum(start - ahead, 0), jnp.minimum(stop - ahead, self.units)
        # The share of unit v is the last one that starts at or before it, and the tile's last unit is v.
        last = divide((ahead + self.units) * self.blocks - 1, self.tiles * self.units)
        others = jnp.where(first == 0, last - (self.blocks - 1 - block), 0)
        return Piece(0, tile, first, end, ahead + first - start, others)


class Exchange:
    """Parts of tiles in global memory, `left` [blocks, parts of a block, *part_shape], never initialised.

    Counters of 4 bytes, one for each finisher of each block, are the zeros behind the rows of x [tokens + `spare_rows`,
    in]. (Semaphores of Pallas would be zeroed by XLA, in a loop by a copy for each launch.)
    The interpreter has none and runs one block after the other. There a signal copies to `seen` what the block has
    written until then, no more can be read, and that only as `given` to a second launch.
    """

    def __init__(self, refs: dict[str, Any], tokens: int, finishers: int, interpret: Any):
        self.left, self.finishers, self.interpret = refs["left"], finishers, interpret
        self.seen, self.given = refs.get("seen", self.left), refs.get("given", self.left)
        self.a_finisher = self.left.shape[1] // finishers  # parts of it
        self.x, self.tokens = refs["x"], tokens

    def leave(self, block: Any, finisher: Any, parts: list[jax.Array]) -> None:
        self.write(block, finisher, parts)
        self.signal(block, finisher)

    def take(self, block: Any, finisher: Any) -> list[jax.Array]:
        """What the same warpgroup of another block has left."""
        if self.interpret is None:
            gpu.wait_for_counter(self.counter(block, finisher), 1)
        return [gpu.load_pieces(self.given.at[block, place], self.interpret) for place in self.places(finisher)]

    def write(self, block: Any, finisher: Any, parts: list[jax.Array]) -> None:
        for place, part in zip(self.places(finisher), parts, strict=True):
            gpu.store_pieces(self.left.at[block, place], part, self.interpret)

    def signal(self, block: Any, finisher: Any) -> None:
        if self.interpret is None:
            gpu.signal_counter(self.counter(block, finisher))
            return
        for place in self.places(finisher):
            self.seen.at[block, place][...] = self.left.at[block, place][...]

    def counter(self, block: Any, finisher: Any) -> Any:
        place = 2 * (block * self.finishers + finisher)  # in bfloat16
        inputs = self.x.shape[1]
        return self.x.at[self.tokens + divide(place, inputs), gpu.ds(modulo(place, inputs), 2)]

    def places(self, finisher: Any) -> list[Any]:
        return [finisher * self.a_finisher + i for i in range(self.a_finisher)]


def part_shape(tokens: int) -> tuple[int, ...]:
    """Of 64 outputs, in pieces of 8 columns, which a warp writes and reads in lines."""
    return tokens // 8, gpu.ROWS, 8


def divide(a: Any, b: int) -> Any:
    return lax.div(a, jnp.int32(b))


def modulo(a: Any, b: int) -> Any:
    return lax.rem(a, jnp.int32(b))
