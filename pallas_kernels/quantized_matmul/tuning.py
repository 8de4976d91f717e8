"""Which kernel, and how it cuts its work, by format, rows and shape of the weight.

The order of implementations and the candidates come from times on an H200 (132 multiprocessors, 4.3 TB/s). An MXFP8
weight [8192, 6144], in microseconds: 1 row Mosaic 15.6, Triton 17.9; 8 rows 15.9 and 17.8; 64 rows 19.9 and 31.7 (with
the reorder of x as a kernel of its own, in an order that is no longer used: 16.9, 17.9; 17.3, 17.8; 24.7, 33.4). Mosaic
comes first where it is about as fast, since XLA captures its launches in a graph, and those of Triton not. Among the
candidates for a number of rows the one with the least estimated time wins: waves of tiles over the multiprocessors,
each as long as its products or its reads of W and x take. Candidates with a `unit` cut tiles evenly among the
multiprocessors, and pay for the exchange of their parts. Microseconds with whole and with shared tiles, before threads
stored 8 bytes of a result at once instead of 2, which took 1 to 5 % off 512 rows:

    rows   gate, up 12288   down         q, k, v, index   o            gate, up 3072   down 3072
    8      45.7, 42.6       22.4, 24.1   21.1, 20.0       16.4, 18.0   20.2, 15.7      8.8, 10.2
    64     63.1, 54.9       33.8, 30.6   33.5, 24.8       24.2, 22.4   28.5, 20.8      (56 rows) 11.0, 14.1
    128    91.4, 77.0       62.2, 39.7   42.9, 33.7       42.5, 28.6   34.2, 30.6      18.4, 18.8
    256    127.6, 142.7     80.6, 64.3   74.3, 51.4       55.5, 46.5   43.1, 44.3      23.5, 26.1
    512    209.9, 269.5     114.8, 115.9 104.5, 91.8      78.0, 79.7   69.8, 74.9      34.1, 36.2
"""

import dataclasses
from typing import Literal

from pallas_kernels import _quantized_mosaic, _quantized_triton
from pallas_kernels._quantized import FORMATS, Format, FormatName

Implementation = Literal["mosaic", "triton"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way for the Mosaic kernel, before the rows are known.

    Attributes:
      warpgroups, split: as in its tiling.
      tokens: most rows of x in a tile; rows are cut evenly into tiles of at most this many.
      step: inputs of a pipeline step.
      straight, ahead, unit: as in its tiling.
    """

    warpgroups: int
    tokens: int
    step: int
    split: int = 1
    straight: int = 1
    ahead: bool = False
    unit: int | None = None

    def tiling(self, rows: int, form: Format, inputs: int, *, swiglu: bool = False) -> _quantized_mosaic.Tiling:
        """The tiling for `rows`, as deep as shared memory allows, or NotImplementedError if not even two stages fit."""
        tiles = -(-rows // self.tokens)
        tokens = -(-rows // (8 * tiles)) * 8
        group = 8 if tiles > 4 else 2 if swiglu and tiles > 1 else 1
        reason = None
        for stages in range(MOST_STAGES - MOST_STAGES % self.split, 1, -self.split):
            tiling = _quantized_mosaic.Tiling(
                tokens=tokens, step=self.step, stages=stages, warpgroups=self.warpgroups, split=self.split,
                scale_stages=2 + (stages * self.step // self.unit if self.unit else 0), group=group,
                straight=self.straight, ahead=self.ahead, unit=self.unit,
            )  # fmt: skip
            try:
                _quantized_mosaic.plan(form, tiling, inputs, 64 * self.warpgroups, swiglu)
            except NotImplementedError as error:
                reason = error
            else:
                return tiling
        raise reason or NotImplementedError(f"no pipeline of the Mosaic kernel fits {self}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """What to do for a number of rows.

    Attributes:
      rows: the most rows this entry is for.
      order: implementations that are faster than XLA, best first.
      least_fill: share of the multiprocessors that Mosaic's tiles of 64 output features must keep busy; with less
        Triton comes first, which cuts finer.
      mosaic: candidates, the one that is best where all fill the chip first.
      swiglu: the same for gate, up and their SwiGLU in one launch.
      triton: tiling; features and splits are for a weight that fills the chip, `choose_triton` fits them to others.
    """

    rows: int
    order: tuple[Implementation, ...]
    mosaic: tuple[Candidate, ...]
    swiglu: tuple[Candidate, ...]
    triton: _quantized_triton.Tiling
    least_fill: float = 0.0

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows must be at least 1, got {self.rows}.")
        if not self.order or not set(self.order) <= {"mosaic", "triton"} or len(set(self.order)) != len(self.order):
            raise ValueError(f'order must name "mosaic" and "triton" at most once each, got {self.order}.')
        for name in ("mosaic", "swiglu"):
            if not getattr(self, name):
                raise ValueError(f"{name} must hold at least one candidate, got none.")
        if not 0 <= self.least_fill <= 1:
            raise ValueError(f"least_fill must be a share from 0 to 1, got {self.least_fill}.")


MOST_STAGES = 8
# Of one multiprocessor: products and bytes out of the cache in a clock, and clocks for which a warpgroup that makes its
# weights holds up the products of one input, step by step and with steps in a straight line. That tells times on an
# H200 apart: 512 rows, microseconds with tiles of (64 features x warpgroups) x rows: [8192, 6144] 4 x 128 78.4,
# 2 x 256 68.9, 2 x 128 88.6; [6144, 8192] 4 x 128 97.6, 3 x 128 80.9, 2 x 256 88.3. Weights of one x in a launch,
# [9856, 6144]: 8 rows 1 x 8 25.4, 2 x 8 21.3; 512 rows 2 x 176 104, 2 x 104 116, 2 x 128 131, 2 x 256 139.
PRODUCTS, CACHE_BYTES, MAKING, MAKING_STRAIGHT = 2048, 33, 1.8, 1.4
# Of a weight read once: bytes that a multiprocessor gets out of memory in a clock, and that all of them get.
OWN_BYTES, MEMORY_BYTES = 26, 2420
# Clocks for a part of a tile to global memory, its signal, and back; for every column beyond 64; and those more where a
# tile is longer than a share, so that parts are not done long before they are wanted. EXCHANGE = infinity: no tile is
# shared.
EXCHANGE, EXCHANGED_COLUMN, LATE = 4000, 80, 2000
ANY = 2**31

_T = _quantized_triton.Tiling
_FEW = (Candidate(warpgroups=1, split=4, tokens=16, step=256), Candidate(warpgroups=1, split=2, tokens=16, step=256))
_FEW_WIDE = Candidate(warpgroups=2, split=2, tokens=16, step=256)
_SOME = (Candidate(warpgroups=1, split=2, tokens=64, step=128), Candidate(warpgroups=2, tokens=64, step=128))
_MANY = (
    Candidate(warpgroups=4, tokens=128, step=128),
    Candidate(warpgroups=3, tokens=128, step=128),
    Candidate(warpgroups=2, tokens=128, step=128),
    Candidate(warpgroups=2, tokens=176, step=128),
    Candidate(warpgroups=2, tokens=104, step=128),
    Candidate(warpgroups=2, tokens=64, step=128),
    Candidate(warpgroups=1, tokens=64, step=128, split=2),  # takes outputs that come only in 64s
)
_MANY_STRAIGHT = tuple(dataclasses.replace(c, straight=4 if c.warpgroups < 4 else 1) for c in _MANY)
_MANY_EVEN_PAIRS = (Candidate(warpgroups=2, tokens=128, step=128, straight=4, unit=1024),)
_MANY_EVEN = (*_MANY_EVEN_PAIRS, Candidate(warpgroups=2, tokens=256, step=64, straight=4, unit=512))
_FEW_EVEN = (Candidate(warpgroups=1, split=4, tokens=16, step=256, unit=1024),)
_FEW_EVEN_PAIRS = tuple(Candidate(warpgroups=2, split=2, tokens=16, step=256, unit=unit) for unit in (1024, 512))
# Four steps in a straight line are 2 to 4 % faster than one at 64 rows, and up to 8 % slower at 8. At 128 to 512 rows
# whole tiles gain 1 to 11 %.
_SOME_EVEN = tuple(Candidate(warpgroups=1, split=2, tokens=64, step=128, straight=4, unit=u) for u in (512, 1024))
_SOME_EVEN_PAIRS = tuple(Candidate(warpgroups=2, tokens=64, step=128, straight=4, unit=u) for u in (1024, 512))
_FEW_PAIRS = (Candidate(warpgroups=2, split=2, tokens=16, step=256), Candidate(warpgroups=2, tokens=16, step=256))
_SOME_PAIRS = (Candidate(warpgroups=2, split=2, tokens=64, step=128), Candidate(warpgroups=2, tokens=64, step=128))
_MANY_PAIRS = (Candidate(warpgroups=2, tokens=128, step=128), Candidate(warpgroups=2, tokens=64, step=128))
_MANY_STRAIGHT_PAIRS = tuple(dataclasses.replace(c, straight=4) for c in _MANY_PAIRS)
# Whole tiles of 256 rows, 512 rows of [8192, 6144], us: 4 steps in a line 67.1, 8 66.2, 16 65.9, 16 and ahead 65.5.
_TALL = Candidate(warpgroups=2, tokens=256, step=64, straight=16, ahead=True)
# Gate and up of 12288 with its 3 stages, us: 1 step 209.6, 1 ahead 213.7, 4 ahead 221.1, 8 272.6, 8 ahead 220.0.
_TALL_PAIRS = dataclasses.replace(_TALL, straight=1, ahead=False)
_TALL_WIDE = Candidate(warpgroups=2, tokens=256, step=128)
_WIDE = (Candidate(warpgroups=1, split=4, tokens=16, step=512), *_FEW)
_WIDE_PAIRS = (Candidate(warpgroups=2, split=2, tokens=16, step=512), *_FEW_PAIRS)
_WIDE_EVEN = (Candidate(warpgroups=1, split=2, tokens=16, step=512, unit=1024), *_FEW_EVEN)

TABLE: dict[FormatName, tuple[Entry, ...]] = {
    "mxfp8": (
        Entry(
            rows=8, order=("mosaic", "triton"), mosaic=(*_FEW, _FEW_WIDE, *_FEW_EVEN), least_fill=0.7,
            swiglu=(*_FEW_PAIRS, *_FEW_EVEN_PAIRS), triton=_T(features=64, tokens=8, step=256, stages=5),
        ),
        Entry(
            rows=16, order=("mosaic", "triton"), mosaic=(*_FEW, *_FEW_EVEN), swiglu=(*_FEW_PAIRS, *_FEW_EVEN_PAIRS),
            triton=_T(features=64, tokens=16, step=256),
        ),
        Entry(
            rows=32, order=("mosaic", "triton"), mosaic=(*_SOME, *_SOME_EVEN), swiglu=(*_SOME_PAIRS, *_SOME_EVEN_PAIRS),
            triton=_T(features=64, tokens=32, step=128),
        ),
        Entry(
            rows=64, order=("mosaic", "triton"), mosaic=(*_SOME, *_SOME_EVEN), swiglu=(*_SOME_PAIRS, *_SOME_EVEN_PAIRS),
            triton=_T(features=64, tokens=64, step=128),
        ),
        Entry(
            rows=512, order=("mosaic", "triton"), mosaic=(*_MANY_STRAIGHT, _TALL, *_MANY_EVEN),
            swiglu=(*_MANY_STRAIGHT_PAIRS, _TALL_PAIRS, *_MANY_EVEN_PAIRS),
            triton=_T(features=128, tokens=128, step=64, warps=8, stages=3),
        ),
        Entry(
            rows=ANY, order=("mosaic", "triton"), mosaic=(*_MANY_STRAIGHT, _TALL),
            swiglu=(*_MANY_STRAIGHT_PAIRS, _TALL_PAIRS),
            triton=_T(features=128, tokens=128, step=64, warps=8, stages=3),
        ),
    ),
    "nvfp4": (
        Entry(
            rows=8, order=("mosaic", "triton"), mosaic=(*_WIDE, *_WIDE_EVEN), least_fill=0.7,
            swiglu=(*_WIDE_PAIRS, *_FEW_EVEN_PAIRS), triton=_T(features=64, tokens=8, step=512),
        ),
        Entry(
            rows=16, order=("mosaic", "triton"), mosaic=(*_WIDE, *_WIDE_EVEN),
            swiglu=(*_WIDE_PAIRS, *_FEW_EVEN_PAIRS),
            triton=_T(features=64, tokens=16, step=256),
        ),
        Entry(
            rows=32, order=("mosaic", "triton"), mosaic=(*_SOME, *_SOME_EVEN), swiglu=(*_SOME_PAIRS, *_SOME_EVEN_PAIRS),
            triton=_T(features=64, tokens=32, step=128),
        ),
        Entry(
            rows=64, order=("mosaic", "triton"), mosaic=(*_SOME, *_SOME_EVEN), swiglu=(*_SOME_PAIRS, *_SOME_EVEN_PAIRS),
            triton=_T(features=64, tokens=64, step=128),
        ),
        Entry(
            rows=ANY, order=("mosaic", "triton"), mosaic=(*_MANY, _TALL_WIDE), swiglu=_MANY_PAIRS,
            triton=_T(features=128, tokens=128, step=64, warps=8, stages=3),
        ),
    ),
}  # fmt: skip


def find(form: Format, rows: int) -> Entry:
    return next(entry for entry in TABLE[form.name] if rows <= entry.rows)


def choose_order(form: Format, rows: int, out: int, multiprocessors: int = 132) -> tuple[Implementation, ...]:
    """Implementations to try before XLA, best first."""
    entry = find(form, rows)
    # Waves do not count: where few rows are to be multiplied the last one reads as fast as a full one.
    if -(-out // 64) / multiprocessors < entry.least_fill and "triton" in entry.order:
        return ("triton", *(name for name in entry.order if name != "triton"))
    return entry.order


def choose_mosaic(
    form: Format,
    rows: int,
    out: int | tuple[int, ...],
    inputs: int,
    multiprocessors: int = 132,
    *,
    swiglu: bool = False,
    shared: bool = True,
) -> _quantized_mosaic.Tiling:
    """The tiling, or NotImplementedError with the reason why the kernel cannot serve this weight.

    `out` is a tuple for weights that share a launch; with `swiglu` it is that of gate and of up. `shared`: blocks may
    share tiles.
    """
    if rows < 1:
        raise NotImplementedError("the Mosaic kernel needs at least one row of x.")
    sizes = (out,) if isinstance(out, int) else out
    entry, fitting, reason = find(form, rows), [], None
    for candidate in entry.swiglu if swiglu else entry.mosaic:
        if candidate.unit and not shared:
            continue
        try:
            tiling = candidate.tiling(rows, form, inputs, swiglu=swiglu)
            for size in sizes:
                _quantized_mosaic.plan(form, tiling, inputs, size, swiglu)
        except NotImplementedError as error:
            reason = reason or error
            continue
        fitting.append((*_estimate(tiling, form, rows, sum(sizes), inputs, multiprocessors, swiglu), tiling))
    if not fitting:
        raise reason or NotImplementedError("the Mosaic kernel has no tiling for this weight.")
    return min(fitting, key=lambda estimate: estimate[:2])[-1]


def _estimate(
    tiling: _quantized_mosaic.Tiling,
    form: Format,
    rows: int,
    outputs: int,
    inputs: int,
    multiprocessors: int,
    swiglu: bool,
) -> tuple[float, float]:
    """Clocks that a launch takes, and that its longest block would without the others."""
    matrices = 2 if swiglu else 1  # gate and up: what is read of W, and columns that one warpgroup finishes
    features, making = 64 * tiling.warpgroups, MAKING if tiling.straight == 1 else MAKING_STRAIGHT
    blocks = -(-rows // tiling.tokens)
    tiles = matrices * outputs // features * blocks
    weights = features * (1 / form.per_byte + 1 / form.block)  # bytes for each input
    clocks = inputs * max(
        features * tiling.tokens / PRODUCTS + making * tiling.warpgroups,
        (features / form.per_byte + 2 * tiling.tokens) / CACHE_BYTES,
        weights / OWN_BYTES,
    )
    of_memory = weights * inputs / MEMORY_BYTES if blocks == 1 else 0.0  # clocks of a tile; the cache serves the others
    if not tiling.unit:
        waves, rest = divmod(tiles, multiprocessors)
        longest = waves * clocks + (clocks if rest else 0)
        return waves * max(clocks, multiprocessors * of_memory) + (
            max(clocks, rest * of_memory) if rest else 0
        ), longest
    units = tiles * inputs // tiling.unit
    share = -(-units // min(multiprocessors, units)) * tiling.unit
    longest = clocks * share / inputs
    exchange = EXCHANGE + EXCHANGED_COLUMN * max(0, matrices * tiling.tokens - 64) + (LATE if share < inputs else 0)
    return max(longest, tiles * of_memory) + exchange, longest


def choose_triton(
    form: Format, rows: int, out: int, inputs: int, multiprocessors: int = 132
) -> _quantized_triton.Tiling:
    """The tiling. A weight of few output features is cut finer, then along its inputs, until there is work for all."""
    tiling = find(form, rows).triton
    features, splits = tiling.features, tiling.splits
    while features > 16 and -(-out // features) * -(-rows // tiling.tokens) < 0.9 * multiprocessors:
        features //= 2
    programs = -(-out // features) * -(-rows // tiling.tokens)
    steps = -(-inputs // tiling.step)
    while programs * splits < 0.9 * multiprocessors and 2 * splits <= min(16, steps // 2):
        splits *= 2
    return dataclasses.replace(tiling, features=features, splits=splits)


def all_tilings() -> list[tuple[Format, int, _quantized_mosaic.Tiling, _quantized_triton.Tiling]]:
    """Every entry of the table with its most rows (4,096 where it has no end), for 6,144 inputs: for tests."""
    found = []
    for name, entries in TABLE.items():
        form = FORMATS[name]
        for entry in entries:
            rows = min(entry.rows, 4096)
            found += [(form, rows, c.tiling(rows, form, 6144), entry.triton) for c in entry.mosaic]
    return found


def all_swiglu_tilings() -> list[tuple[Format, int, _quantized_mosaic.Tiling]]:
    """The same of gate, up and SwiGLU in one launch."""
    found = []
    for name, entries in TABLE.items():
        form = FORMATS[name]
        for entry in entries:
            rows = min(entry.rows, 4096)
            found += [(form, rows, c.tiling(rows, form, 6144, swiglu=True)) for c in entry.swiglu]
    return found
