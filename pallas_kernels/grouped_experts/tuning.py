"""How the Triton kernels of `grouped_experts` cut their work, by format and rows, and which form is chosen."""

import dataclasses

from pallas_kernels._quantized import Format
from pallas_kernels.grouped_experts.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """One way to run one of the Triton kernels.

    Attributes:
      features: output features of a program.
      step: inputs of one pipeline step.
      stages: pipeline steps held in shared memory.
      warps: warps of a program.
      tiles_first: programs of neighbouring tiles of rows start together (they may share an expert's weights through
        the cache), not those of neighbouring features.
    """

    features: int
    step: int
    stages: int
    warps: int
    tiles_first: bool = False

    def __post_init__(self) -> None:
        for name, least, most in (("features", 16, 256), ("step", 16, 1024), ("warps", 1, 16)):
            value = getattr(self, name)
            if value & (value - 1) or not least <= value <= most:
                raise ValueError(f"{name} must be a power of two from {least} to {most}, got {value}.")
        if not 1 <= self.stages <= 8:
            raise ValueError(f"stages must be from 1 to 8, got {self.stages}.")


# Tile of rows -> most rows an active expert has on average. A tile that is too small reads its expert again, one that
# is too large multiplies rows that do not exist.
TILES = {8: 2.5, 16: 6.0, 32: 20.0}
LARGEST_TILE = 64


def choose_tile(problem: Problem) -> int:
    """Rows of one expert that a program multiplies together."""
    for tile, most in TILES.items():
        if problem.rows_an_expert <= most:
            return tile
    return LARGEST_TILE


# (format, tile of rows) -> tuning of gate_up, of down.
TRITON = {
    ("bf16", 8): (Tuning(features=32, step=128, stages=4, warps=4), Tuning(features=32, step=256, stages=4, warps=4)),
    ("bf16", 16): (Tuning(features=64, step=64, stages=4, warps=4), Tuning(features=64, step=128, stages=4, warps=4)),
    ("bf16", 32): (Tuning(features=64, step=64, stages=4, warps=4), Tuning(features=64, step=128, stages=4, warps=4)),
    ("bf16", 64): (Tuning(features=64, step=64, stages=4, warps=4), Tuning(features=128, step=64, stages=4, warps=4)),
    ("mxfp8", 8): (Tuning(features=32, step=256, stages=4, warps=2), Tuning(features=32, step=256, stages=4, warps=2)),
    ("mxfp8", 16): (Tuning(features=64, step=128, stages=4, warps=4), Tuning(features=64, step=256, stages=4, warps=4)),
    ("mxfp8", 32): (Tuning(features=64, step=128, stages=4, warps=4), Tuning(features=64, step=256, stages=3, warps=4)),
    ("mxfp8", 64): (Tuning(features=64, step=128, stages=3, warps=4), Tuning(features=64, step=128, stages=4, warps=4)),
    ("nvfp4", 8): (Tuning(features=32, step=512, stages=3, warps=4), Tuning(features=32, step=512, stages=3, warps=4)),
    ("nvfp4", 16): (Tuning(features=64, step=256, stages=3, warps=4), Tuning(features=64, step=256, stages=4, warps=4)),
    ("nvfp4", 32): (Tuning(features=64, step=256, stages=3, warps=4), Tuning(features=64, step=256, stages=3, warps=4)),
    ("nvfp4", 64): (Tuning(features=64, step=128, stages=3, warps=4), Tuning(features=64, step=128, stages=4, warps=4)),
}


def format_name(form: Format | None) -> str:
    return form.name if form else "bf16"


def triton_tuning(form: Format | None, tile: int, part: int, outputs: int, inputs: int) -> Tuning:
    """The tuning of gate_up (part 0) or down (part 1), cut to a matrix [outputs, inputs].

    Raises:
      NotImplementedError: the sizes have too few factors of two.
    """
    tuning = TRITON[format_name(form), tile][part]
    features, step = (min(most, size & -size) for most, size in ((tuning.features, outputs), (tuning.step, inputs)))
    # A dot takes at least 16 inputs, and each loaded element of a quantised weight holds up to 4.
    least = 16 if form is None else 32 if form.name == "mxfp8" else 64
    if features < 16 or step < least:
        raise NotImplementedError(
            f"the Triton kernel takes {format_name(form)} stacks with a multiple of 16 outputs and of {least} inputs, "
            f"got [{outputs}, {inputs}]."
        )
    return dataclasses.replace(tuning, features=features, step=step, tiles_first=tile == LARGEST_TILE)


def preferred(problem: Problem) -> tuple[str, ...]:
    """Implementations in the order in which they are tried, fastest first where all can serve.

    H200, 128 experts [3072, 6144] of which 4 a row, all counted, 8 / 64 / 512 rows, in microseconds: NVFP4 Mosaic 281
    / 911 / 1,399, Triton 562 / 1,979 / 1,698; MXFP8 Mosaic 430 / 1,509 / 1,881, Triton 426 / 1,494 / 2,617. One percent
    is less than what a call of jax-triton costs: it cannot be part of a command buffer, so the host launches it.
    """
    return ("triton", "mosaic", "xla") if problem.formats[0] is None else ("mosaic", "triton", "xla")
