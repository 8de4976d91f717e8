"""How the Mosaic kernels of `grouped_experts` cut their work, by format and number of rows.

How many rows an expert has is known on the device alone. Dequantising is most of the work of a tile, so that a second
tile of an expert costs as much as its first, and rows that are not there cost products. So tiles are large enough for
experts that are chosen more often than the average, and those with `few` rows are multiplied as small ones. On an H200,
128 experts of 6144 x 3072, 4 a row, microseconds of both kernels with tiles of one size before and now; skewed: a
normal popularity is added to the normal scores, with the weight given:

    rows            64     64, 0.8   64, 1.2   128     128, 1.0   256     256, 1.0   512     512, 1.0   512, 1.5
    NVFP4 before    872    570       480       1,099   693        1,137   1,015      1,338   1,414      1,247
    NVFP4 now       884    531       422       1,017   666        1,093   981        1,316   1,187      1,036
    MXFP8 before    1,431  875       713       1,695   1,026      1,758   1,454      1,798   1,805      1,560
    MXFP8 now       1,434  832       641       1,680   962        1,773   1,219      1,774   1,467      1,234
"""

import dataclasses

from pallas_kernels._quantized import MXFP8, Format
from pallas_kernels._quantized_mosaic import Tiling, plan
from pallas_kernels.grouped_experts.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """What to do for a number of rows.

    Attributes:
      most: most rows that an active expert has on average.
      tile, few: rows of a tile, and of those that are cut.
      ways: (bytes of codes in a step and row, split) in the order in which they are tried. A tile of twice the features
        in place of a split reads x half as often, and was 4 (MXFP8) and 7 % (NVFP4) slower on an H200 at 512 rows.
    """

    most: float
    tile: int
    few: int | None
    ways: tuple[tuple[int, int], ...]


_FEW, _SOME, _MANY = ((256, 2), (128, 2), (256, 1), (128, 1)), ((128, 2), (128, 1)), ((128, 1), (64, 1))
ONE_TILE = Entry(most=8.0, tile=8, few=None, ways=_FEW)  # of up to 8 rows: more only where a row names one twice
_LONG = (
    Entry(most=80.0, tile=96, few=48, ways=_MANY),
    Entry(most=float("inf"), tile=128, few=64, ways=_MANY),
)
# 48 rows of NVFP4 in four warpgroups need all their 112 registers, and took 1 % less to 6 % more time than 40.
MOSAIC = {
    "mxfp8": (
        Entry(most=2.5, tile=16, few=8, ways=_FEW),
        Entry(most=6.0, tile=32, few=8, ways=_SOME),
        Entry(most=10.0, tile=40, few=16, ways=_SOME),
        Entry(most=28.0, tile=48, few=24, ways=_SOME),
        *_LONG,
    ),
    "nvfp4": (
        Entry(most=8.0, tile=16, few=8, ways=_FEW),
        Entry(most=28.0, tile=40, few=24, ways=_SOME),
        *_LONG,
    ),
}
MOST_STAGES = 8


def choose_entry(problem: Problem) -> Entry:
    gate, _, down = problem.formats
    assert gate is not None and down is not None
    if problem.rows <= ONE_TILE.tile:
        return ONE_TILE
    # Rows lie in tiles of one size for both kernels, and what is short of registers for one is for both.
    form = gate if gate is not MXFP8 else down
    return next(entry for entry in MOSAIC[form.name] if problem.rows_an_expert <= entry.most)


def mosaic_tilings(problem: Problem) -> tuple[Tiling, Tiling]:
    """Tilings of gate_up and down, or NotImplementedError with the reason if nothing fits.

    Both have two warpgroups side by side: gate and up, or 128 features of down.
    """
    entry = choose_entry(problem)
    gate, _, down = problem.formats
    assert gate is not None and down is not None
    return (
        _mosaic_tiling(gate, entry, problem.hidden, problem.inner, swiglu=True),
        _mosaic_tiling(down, entry, problem.inner, problem.hidden, swiglu=False),
    )


def _mosaic_tiling(form: Format, entry: Entry, inputs: int, outputs: int, *, swiglu: bool) -> Tiling:
    """The first way that fits three stages, or two, as deep as shared memory allows."""
    # Where an expert has several tiles, these are worked through together, so that its weights are read once.
    group = 8 if entry.tile >= 64 else 1
    reason = None
    for least in (3, 2):
        for width, split in entry.ways:
            for stages in range(MOST_STAGES - MOST_STAGES % split, least - 1, -split):
                tiling = Tiling(
                    tokens=entry.tile, few=entry.few, step=width * form.per_byte, stages=stages, warpgroups=2,
                    split=split, scale_stages=2, group=group,
                )  # fmt: skip
                try:
                    plan(form, tiling, inputs, outputs, swiglu)
                except NotImplementedError as error:
                    reason = reason or error
                else:
                    return tiling
    assert reason is not None
    raise reason
