"""How the Mosaic kernels over MXFP8 and NVFP4 weights cut their work, and what they cannot do."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp

from pallas_kernels import _mosaic as gpu
from pallas_kernels._quantized import Format

# Registers of a thread, computing and copying, where those at launch do not do, by computing warpgroups. With more the
# launch waits for ever: over all warpgroups there are as many as at launch, a multiple of 8 for each thread.
REGISTERS = {2: (232, 40), 3: (152, 40), 4: (112, 32)}
SCALE_BYTES = 64  # in one copy of 64 rows, of a row, about; less where there are more rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a block cuts its work.

    Attributes:
      tokens: rows of x in a tile, a multiple of 8.
      step: inputs of one pipeline step.
      stages: pipeline steps held in shared memory, a multiple of `split`.
      warpgroups: computing warpgroups side by side, 64 output features each (with SwiGLU half of them gate, half up).
      split: computing warpgroups that share the inputs of a tile.
      scale_stages: copies of scales held in shared memory; one copy serves several steps.
      group: tiles of x that are worked through together before the next ones; 1 keeps x, many keep W in the cache.
      straight: most steps in a straight line of code, so that the products of one run on into the next.
      ahead: the first weights of the next line are made while the last of this one are multiplied.
      few: tiles of an expert that have no more rows are read and multiplied as if of so many, a multiple of 8. None:
        every tile is multiplied whole.
      unit: inputs by which blocks share the tiles evenly; one copy of scales serves them. None: a block takes whole
        tiles.
    """

    tokens: int
    step: int
    stages: int
    warpgroups: int = 1
    split: int = 1
    scale_stages: int = 3
    group: int = 1
    straight: int = 1
    ahead: bool = False
    few: int | None = None
    unit: int | None = None

    @property
    def holds_and_waits(self) -> bool:
        """Whether a warpgroup may hold a stage and wait for its next: with fewer both can be in the same place."""
        return self.stages >= 2 * self.split

    def __post_init__(self) -> None:
        if self.tokens % 8 or not 8 <= self.tokens <= 256:
            raise ValueError(f"tokens must be a multiple of 8 from 8 to 256, got {self.tokens}.")
        if self.step not in (64, 128, 256, 512):
            raise ValueError(f"step must be 64, 128, 256 or 512 inputs, got {self.step}.")
        if self.warpgroups < 1 or self.split < 1 or self.warpgroups * self.split > 7:
            raise ValueError(
                f"warpgroups and split must make 1 to 7 computing warpgroups, got {self.warpgroups} and {self.split}."
            )
        if self.stages < 2 or self.stages % self.split:
            raise ValueError(
                f"stages must be at least 2 and a multiple of split {self.split}, got {self.stages}: each computing "
                "warpgroup has to see every round of its slots."
            )
        if self.scale_stages < 2:
            raise ValueError(f"scale_stages must be at least 2, one to fill and one to use, got {self.scale_stages}.")
        if self.group < 1:
            raise ValueError(f"group must be at least 1 tile of x, got {self.group}.")
        if self.straight < 1:
            raise ValueError(f"straight must be at least 1 step, got {self.straight}.")
        if self.ahead and not self.holds_and_waits:
            raise ValueError(
                f"weights are made ahead with two stages for each of split {self.split}, got {self.stages}: a "
                "warpgroup would wait for the stage that it holds."
            )
        if self.few is not None and (self.few % 8 or not 8 <= self.few < self.tokens):
            raise ValueError(f"few must be a multiple of 8 below tokens {self.tokens}, got {self.few}.")
        if self.few is not None and self.unit is not None:
            raise ValueError(f"few is for tiles of experts and unit for those without, got {self.few} and {self.unit}.")
        if self.unit is not None and (self.unit < 1 or self.unit % (self.step * self.split)):
            raise ValueError(
                f"unit must be a multiple of step {self.step} times split {self.split}, got {self.unit}: each "
                "computing warpgroup has to see every round of its slots."
            )


@dataclasses.dataclass(frozen=True)
class Swiglu:
    """g · sigmoid(alpha · g) · (u + 1) with g = min(gate, limit) and u = clip(up, -limit, limit).

    `rounded`: gate and up are rounded to bfloat16 first, as by linears of their own.
    """

    alpha: float
    limit: float
    rounded: bool = False

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        if self.rounded:
            gate, up = (a.astype(jnp.bfloat16).astype(jnp.float32) for a in (gate, up))
        gate = jnp.minimum(gate, self.limit)
        up = jnp.minimum(jnp.maximum(up, -self.limit), self.limit)
        return gate / (1.0 + jnp.exp(-self.alpha * gate)) * (up + 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What a launch computes, and how a tiling cuts it."""

    form: Format
    divides: tuple[bool, ...]
    inputs: int
    sizes: tuple[int, ...]  # outputs of each weight
    blocks: int
    rows: int
    spare: int  # rows of zeros behind the result
    steps_a_scale: int
    swiglu: Swiglu | None
    order: Format | None
    grouped: bool
    multiprocessors: int

    @property
    def outputs(self) -> int:
        return self.sizes[0] if self.swiglu else sum(self.sizes)

    def grid(self, tiling: Tiling) -> int:
        parts = self.units(tiling) if tiling.unit else 1  # of a tile
        return min(self.multiprocessors, self.blocks * self.tiles(tiling) * parts)

    def units(self, tiling: Tiling) -> int:
        """Copies of scales of a tile."""
        return self.inputs // tiling.step // self.steps_a_scale

    def finishers(self, tiling: Tiling) -> int:
        """Warpgroups that write a tile; the others help them."""
        return tiling.warpgroups // 2 if self.swiglu else tiling.warpgroups

    def helpers(self, tiling: Tiling) -> int:
        return tiling.warpgroups * tiling.split - self.finishers(tiling)

    def features(self, tiling: Tiling) -> int:
        """Output features of a tile."""
        return gpu.ROWS * self.finishers(tiling)

    def tiles(self, tiling: Tiling) -> int:
        return self.outputs // self.features(tiling)

    def sources(self, tiling: Tiling) -> list[tuple[tuple[int, ...], int, int]]:
        """The weights that a tile reads, its own first and the tile after its last, in the order of the tiles."""
        if self.swiglu:
            return [((0, 1), 0, self.tiles(tiling))]
        bounds = [0, *(end // self.features(tiling) for end in itertools.accumulate(self.sizes))]
        return [((i,), first, end) for i, (first, end) in enumerate(itertools.pairwise(bounds))]

    def scale_bytes(self, tiling: Tiling) -> int:
        return self.steps_a_scale * tiling.step // self.form.block


@dataclasses.dataclass(frozen=True)
class Registers:
    """What the warpgroups have, and ask for once they know their work.

    Attributes:
      computing: registers of a thread of a computing warpgroup.
      copying: those of the copying one; 0: nobody asks, all have what they had at launch.
    """

    computing: int
    copying: int = 0

    def room(self, form: Format, tokens: int) -> bool:
        """Whether they do to make the weights of a slab while those of the one before are multiplied."""
        return needed_registers(form, tokens) + 24 <= self.computing


def needed_registers(form: Format, tokens: int) -> int:
    """Of a thread, for its accumulator and the weights of two slabs."""
    return tokens // 2 + 32 * form.per_byte


def registers(form: Format, tiling: Tiling) -> Registers:
    """A thread holds its accumulator, the weights of two slabs, and about 24 to 32 registers more.

    Where it is short of them ptxas waits for each product by itself: C7512, "wgmma.mma_async instructions are
    serialized". So it said at 96 registers of NVFP4 with 24 rows a tile, and of both with 4 warpgroups and 128 rows.
    """
    computing = tiling.warpgroups * tiling.split
    at_launch = 65536 // (128 * (computing + 1)) // 8 * 8
    if computing not in REGISTERS or needed_registers(form, tiling.tokens) + 32 < at_launch:
        return Registers(at_launch)
    return Registers(*REGISTERS[computing])


def scale_steps(form: Format, tiling: Tiling, inputs: int) -> int:
    """Steps that one copy of scales serves, or NotImplementedError: the copy engine moves multiples of 16 bytes."""
    steps, a_step = inputs // tiling.step, tiling.step // form.block
    fitting = [
        n for n in range(tiling.split, steps + 1, tiling.split)
        if steps % n == 0 and n * a_step % 16 == 0 and n * a_step <= 256 and tiling.unit in (None, n * tiling.step)
    ]  # fmt: skip
    if inputs % tiling.step or not fitting:
        units = f" in units of {tiling.unit}" if tiling.unit else ""
        raise NotImplementedError(
            f"the Mosaic kernel with steps of {tiling.step} inputs, split {tiling.split} ways{units}, cannot cut "
            f"{inputs} inputs of {form.name} into copies of 16 bytes of scales."
        )
    few = [n for n in fitting if n * a_step * tiling.warpgroups <= SCALE_BYTES]
    return max(few or fitting[:1])


def shared_memory_bytes(form: Format, tiling: Tiling, inputs: int, swiglu: bool = False) -> int:
    """Shared memory of one block, without its barriers."""
    t = tiling
    rows = t.warpgroups * gpu.ROWS
    stage = 2 * t.tokens * t.step + rows * form.bytes(t.step)
    scales = t.scale_stages * rows * scale_steps(form, t, inputs) * t.step // form.block
    helpers = t.warpgroups * t.split - t.warpgroups // (2 if swiglu else 1)
    return t.stages * stage + scales + 4 * helpers * gpu.ROWS * t.tokens


def spare_rows(tiling: Tiling, inputs: int, multiprocessors: int) -> int:
    """Rows of zeros that have to be behind x for the counters of blocks that share tiles: 4 bytes for each.

    The copy engine takes arrays in eights of rows.
    """
    return -(-2 * multiprocessors // (8 * inputs)) * 8 if tiling.unit else 0


def plan(form: Format, tiling: Tiling, inputs: int, outputs: int, swiglu: bool = False) -> None:
    """NotImplementedError, with the reason, if the kernel cannot serve a weight [outputs, inputs] with this tiling."""
    t = tiling
    if swiglu and t.warpgroups % 2:
        raise ValueError(f"a SwiGLU takes pairs of warpgroups, gate and up, got {t}.")
    tile = gpu.ROWS * t.warpgroups // (2 if swiglu else 1)
    if outputs % tile:
        raise NotImplementedError(f"the Mosaic kernel cuts the output features by {tile}, got {outputs}.")
    if t.ahead and not registers(form, t).room(form, t.tokens):
        raise NotImplementedError(f"the Mosaic kernel has no registers to make weights of {form.name} ahead with {t}.")
    if not 64 <= form.bytes(t.step) <= 256:
        raise NotImplementedError(f"the Mosaic kernel copies 64 to 256 bytes of a row, got {form.name} with {t}.")
    needed = shared_memory_bytes(form, t, inputs, swiglu)
    if needed + 2048 > gpu.SHARED_MEMORY:
        raise NotImplementedError(f"the Mosaic kernel would need {needed} bytes of shared memory with {t}.")
