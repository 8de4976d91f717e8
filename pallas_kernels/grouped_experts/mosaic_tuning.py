"""How the Mosaic kernels of `grouped_experts` cut their work, by format and number of rows."""

from pallas_kernels._quantized import Format
from pallas_kernels._quantized_mosaic import Tiling, plan
from pallas_kernels.grouped_experts.problem import Problem

# Rows of a tile of the Mosaic kernels -> most rows an active expert has on average.
MOSAIC_TILES = {8: 2.5, 16: 8.0, 24: 20.0, 32: 28.0, 64: 80.0}
LARGEST_MOSAIC_TILE = 128

# Rows of a tile -> (bytes of codes in a step and row, split) in the order in which they are tried. A tile of twice the
# features instead of a split reads x half as often, and was 4 (MXFP8) and 7 % (NVFP4) slower on an H200 at 512 rows.
_FEW, _SOME, _MANY = ((256, 2), (128, 2), (256, 1), (128, 1)), ((128, 2), (128, 1)), ((128, 1), (64, 1))
MOSAIC = {8: _FEW, 16: _FEW, 24: _SOME, 32: _SOME, 64: _MANY, 128: _MANY}
MOST_STAGES = 8


def choose_mosaic_tile(problem: Problem) -> int:
    for tile, most in MOSAIC_TILES.items():
        if problem.rows_an_expert <= most:
            return tile
    return LARGEST_MOSAIC_TILE


def mosaic_tilings(problem: Problem, tile: int | None = None) -> tuple[Tiling, Tiling]:
    """Tilings of gate_up and down, or NotImplementedError with the reason if nothing fits.

    Both have two warpgroups side by side: gate and up, or 128 features of down.
    """
    tile = tile or choose_mosaic_tile(problem)
    gate, _, down = problem.formats
    assert gate is not None and down is not None
    return (
        _mosaic_tiling(gate, tile, problem.hidden, problem.inner, swiglu=True),
        _mosaic_tiling(down, tile, problem.inner, problem.hidden, swiglu=False),
    )


def _mosaic_tiling(form: Format, tile: int, inputs: int, outputs: int, *, swiglu: bool) -> Tiling:
    """The first way that fits three stages, or two, as deep as shared memory allows."""
    # Where an expert has several tiles, these are worked through together, so that its weights are read once.
    group = 8 if tile >= 64 else 1
    reason = None
    for least in (3, 2):
        for width, split in MOSAIC[tile]:
            for stages in range(MOST_STAGES - MOST_STAGES % split, least - 1, -split):
                tiling = Tiling(
                    tokens=tile, step=width * form.per_byte, stages=stages, warpgroups=2, split=split, scale_stages=2,
                    group=group,
                )  # fmt: skip
                try:
                    plan(form, tiling, inputs, outputs, swiglu)
                except NotImplementedError as error:
                    reason = reason or error
                else:
                    return tiling
    assert reason is not None
    raise reason
