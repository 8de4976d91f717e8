"""The pipeline of the Mosaic kernels over MXFP8 and NVFP4 weights as a GPU runs it: waits, copies, products, results.

The interpreter goes a way of its own through each step; here is the other one, without values. What has to come out
follows from the shapes alone: of every result the products of all its inputs, each once.
"""

import dataclasses
import gc
import random
from collections.abc import Sequence

import numpy as np
import pytest
from pipeline_clocks import ProtocolError
from pipeline_on_python import Launch, run
from pipeline_values import Product

from pallas_kernels._quantized import LEFT_OVER, MXFP8, NVFP4, Format
from pallas_kernels._quantized_mosaic_tiling import Tiling, plan, registers
from pallas_kernels.quantized_matmul import tuning

EXPERTS = 3


@pytest.fixture(scope="module", autouse=True)
def leave_other_objects_alone():
    """Tens of thousands of objects come and go here: the collector would look at all others each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@dataclasses.dataclass(frozen=True)
class Case:
    """A launch: `blocks` tiles of x; `experts` as the kernel takes them, how many tiles are used and whose each is."""

    form: Format
    tiling: Tiling
    inputs: int = 4096
    sizes: tuple[int, ...] = (192,)
    blocks: int = 1
    swiglu: bool = False
    experts: tuple[int, ...] | None = None
    counts: tuple[int, ...] | None = None
    multiprocessors: int = 1

    @property
    def global_scales(self) -> list[np.ndarray]:
        """Of each weight [experts], all different; MXFP8 has none."""
        base, experts = 1.0 if self.form is MXFP8 else 3.0, EXPERTS if self.experts else 1
        return [base ** (1 + EXPERTS * i + np.arange(experts)) for i in range(len(self.sizes))]

    def run(self, seed: int, changes: Sequence[tuple[str, str]] = ()) -> Launch:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return run(**given, global_scales=self.global_scales, seed=seed, changes=changes)

    def products(self, weight: int, row: int, x_row: int) -> list[Product]:
        """64 features from `row` on, all inputs: a slab is 64 bytes of codes and has a part for each code in a byte."""
        found = []
        for first in range(0, self.inputs, 64):
            slab, part = divmod(first // 64, self.form.per_byte)
            codes = f"codes{weight}", row, 64 * slab
            scales = f"scale{weight}", row, 64 * slab * self.form.per_byte // self.form.block
            found.append(Product(codes, part, scales, ("x", x_row, first)))
        return sorted(found)

    def expected(self) -> dict:
        """By first row, rows and first column of the results: factor and products; with a SwiGLU two of them."""
        if self.swiglu:
            columns = [[(0, row), (1, row)] for row in range(0, self.sizes[0], 64)]
        else:
            columns = [[(i, row)] for i, size in enumerate(self.sizes) for row in range(0, size, 64)]
        used, *experts = self.experts or (self.blocks, *[0] * self.blocks)
        results = {}
        for block, expert in enumerate(experts[:used]):
            few, rows, x_row = self.tiling.few, self.tiling.tokens, block * self.tiling.tokens
            if few and self.counts and self.counts[block] <= few:
                rows = few
            for number, sources in enumerate(columns):
                results[x_row, rows, 64 * number] = [
                    (LEFT_OVER * self.global_scales[i][expert], self.products(i, row + expert * self.sizes[i], x_row))
                    for i, row in sources
                ]
        return results

    def check(self, seed: int = 0, changes: Sequence[tuple[str, str]] = ()) -> Launch:
        launch = self.run(seed, changes)
        actual = {key: [(s.factor, sorted(s.products())) for s in sums] for key, sums in launch.results.items()}
        assert actual == self.expected(), "wrong products"
        room = registers(self.form, self.tiling).room(self.form, self.tiling.few or self.tiling.tokens)
        assert max(launch.meanwhile, default=0) <= room * self.form.per_byte, "registers for the weights of two slabs"
        return launch


def tiling(tokens: int = 8, step: int = 128, stages: int = 4, scale_stages: int = 2, **rest) -> Tiling:
    return Tiling(tokens=tokens, step=step, stages=stages, scale_stages=scale_stages, **rest)


CASES = {
    "one stage each": Case(MXFP8, tiling(stages=2, split=2)),
    "one stage each, four wanted in a line": Case(MXFP8, tiling(stages=2, split=2, straight=4)),
    "one stage each of four": Case(MXFP8, tiling(split=4, straight=4)),
    "two stages": Case(MXFP8, tiling(stages=2)),
    "two stages, four in a line": Case(MXFP8, tiling(stages=2, straight=4)),
    "two stages, sixteen in a line": Case(MXFP8, tiling(stages=2, step=64, straight=16)),
    "two stages, ahead": Case(MXFP8, tiling(stages=2, ahead=True)),
    "two stages each": Case(MXFP8, tiling(split=2, straight=4, ahead=True)),
    "two stages each of four": Case(MXFP8, tiling(stages=8, split=4, straight=16, ahead=True), inputs=8192),
    "three stages, three in a line": Case(MXFP8, tiling(stages=3, straight=3, ahead=True), inputs=3072),
    "three stages each": Case(NVFP4, tiling(stages=6, split=2, straight=4, ahead=True)),
    "steps of four slabs": Case(MXFP8, tiling(stages=2, step=256, straight=2, ahead=True)),
    "steps of four slabs of NVFP4": Case(NVFP4, tiling(stages=2, step=512, straight=2)),
    "one line for all": Case(MXFP8, tiling(stages=3, straight=16, ahead=True), inputs=2048),
    "scales for two steps of eight stages": Case(NVFP4, tiling(stages=8, step=256, warpgroups=2), sizes=(128,)),
    "pieces of half the stages": Case(
        MXFP8, tiling(stages=8, warpgroups=2, ahead=True), inputs=512, sizes=(192, 192), blocks=2, swiglu=True
    ),
    "no room": Case(NVFP4, tiling(tokens=64, stages=2, warpgroups=4, straight=4), sizes=(512,)),
    "no room, MXFP8": Case(MXFP8, tiling(tokens=128, stages=3, warpgroups=4), sizes=(256,), blocks=2),
    "no room, one stage each": Case(
        NVFP4, tiling(tokens=64, stages=2, warpgroups=2, split=2, straight=4), sizes=(256,)
    ),
    "256 rows": Case(MXFP8, tiling(tokens=256, step=64, warpgroups=2, straight=16, ahead=True), sizes=(256,), blocks=2),
    "three warpgroups": Case(MXFP8, tiling(warpgroups=3, stages=3, straight=4), sizes=(384,), blocks=2),
    "two weights": Case(NVFP4, tiling(split=2, straight=2), sizes=(64, 192), blocks=2, multiprocessors=3),
    "groups of tiles of x": Case(MXFP8, tiling(group=2, ahead=True), inputs=1024, blocks=5, multiprocessors=4),
    "SwiGLU": Case(MXFP8, tiling(warpgroups=2, straight=4), sizes=(192, 192), swiglu=True),
    "SwiGLU, split": Case(NVFP4, tiling(warpgroups=2, split=2, ahead=True), sizes=(128, 128), blocks=2, swiglu=True),
    "SwiGLU of four": Case(MXFP8, tiling(warpgroups=4, stages=3), sizes=(256, 256), swiglu=True),
    "units": Case(MXFP8, tiling(split=2, unit=512), inputs=1536, multiprocessors=4),
    "units ahead": Case(
        MXFP8, tiling(stages=3, step=64, straight=4, ahead=True, unit=512), inputs=2048, sizes=(128, 64),
        multiprocessors=5,
    ),
    "units, tiles of three blocks": Case(MXFP8, tiling(unit=512), sizes=(128,), multiprocessors=7),
    "units, many columns": Case(
        NVFP4, tiling(tokens=128, stages=2, warpgroups=2, unit=256), inputs=768, sizes=(256,), blocks=2,
        multiprocessors=5,
    ),
    "units, SwiGLU": Case(
        MXFP8, tiling(warpgroups=2, split=2, unit=512), inputs=1536, sizes=(192, 192), swiglu=True, multiprocessors=5
    ),
    "experts": Case(
        NVFP4, tiling(warpgroups=2, split=2), sizes=(256,), blocks=4, experts=(3, 2, 0, 2, 1), multiprocessors=3
    ),
    "experts, few rows": Case(
        MXFP8, tiling(tokens=40, few=16, split=2, straight=2, ahead=True), inputs=2048, blocks=4,
        experts=(4, 0, 0, 1, 2), counts=(40, 16, 17, 1),
    ),
    "experts, room for few alone": Case(
        NVFP4, tiling(tokens=64, few=8, stages=2, warpgroups=4, straight=4), sizes=(256,), blocks=3,
        experts=(3, 0, 1, 1), counts=(8, 9, 1),
    ),
    "experts, SwiGLU": Case(
        MXFP8, tiling(tokens=16, few=8, warpgroups=2, straight=4), sizes=(64, 64), blocks=3, experts=(2, 1, 2, 0),
        counts=(9, 8, 16), swiglu=True,
    ),
    "no tile in use": Case(MXFP8, tiling(split=2, ahead=True), blocks=2, experts=(0, 1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_product_is_made_once(name: str) -> None:
    for seed in range(2):
        CASES[name].check(seed)


def of_the_table() -> list[Case]:
    """Every tiling, with rows of x for one tile and outputs for two, which three blocks share if there is a unit."""
    tilings = {(form, tiling, False) for form, _, tiling, _ in tuning.all_tilings()}
    tilings |= {(form, tiling, True) for form, _, tiling in tuning.all_swiglu_tilings()}
    cases = []
    for form, tiling, swiglu in sorted(tilings, key=repr):
        tile = 64 * tiling.warpgroups // (2 if swiglu else 1)
        cases.append(
            Case(
                form, tiling, inputs=6144, sizes=(2 * tile,) * (2 if swiglu else 1), swiglu=swiglu,
                multiprocessors=3 if tiling.unit else 1,
            )
        )  # fmt: skip
    return cases


@pytest.mark.parametrize("part", range(8))
def test_every_tiling_of_the_table(part: int) -> None:
    cases = of_the_table()
    assert len(cases) > 40
    for case in cases[part::8]:
        case.check(part)


def random_case(draw: random.Random) -> Case:
    """ValueError or NotImplementedError where the kernel refuses it."""
    form, warpgroups, split = draw.choice((MXFP8, NVFP4)), draw.choice((1, 2, 2, 3, 4)), draw.choice((1, 1, 2, 2, 3, 4))
    swiglu, grouped = warpgroups % 2 == 0 and draw.random() < 0.4, draw.random() < 0.3
    tokens, step = draw.choice((8, 16, 40, 64, 128, 208, 256)), draw.choice((64, 128, 256, 512))
    unit = None if grouped or draw.random() < 0.5 else step * split * draw.choice((1, 2, 4))
    few = 8 * draw.randrange(1, tokens // 8) if grouped and tokens > 8 and draw.random() < 0.6 else None
    tiling = Tiling(
        tokens=tokens, step=step, stages=split * draw.choice((1, 2, 2, 3, 4)), warpgroups=warpgroups, split=split,
        scale_stages=draw.choice((2, 2, 3)), group=draw.choice((1, 1, 2, 8)), straight=draw.choice((1, 2, 3, 4, 8, 16)),
        ahead=draw.random() < 0.5, few=few, unit=unit,
    )  # fmt: skip
    inputs, blocks = 512 * draw.choice((1, 2, 3, 4, 6)), draw.randint(1, 3)
    tile = 64 * warpgroups // (2 if swiglu else 1)
    first, second = (tile * draw.randint(1, 3) for _ in range(2))
    sizes = (first, first) if swiglu else (first,) if grouped or draw.random() < 0.5 else (first, second)
    for size in sizes:
        plan(form, tiling, inputs, size, swiglu)
    experts = (draw.randint(0, blocks), *(draw.randrange(EXPERTS) for _ in range(blocks))) if grouped else None
    counts = tuple(draw.randint(1, tokens) for _ in range(blocks)) if tiling.few else None
    return Case(form, tiling, inputs, sizes, blocks, swiglu, experts, counts, multiprocessors=draw.choice((1, 2, 3, 5)))


@pytest.mark.parametrize("seed", range(5))
def test_random_tilings(seed: int) -> None:
    draw, done = random.Random(seed), 0
    while done < 30:
        try:
            case = random_case(draw)
        except (ValueError, NotImplementedError):
            continue
        case.check(seed)
        done += 1


def test_weights_are_made_while_products_run_where_there_is_room() -> None:
    """But for the first of a line, unless they are made ahead."""
    line, ahead = (Case(MXFP8, tiling(straight=4, ahead=ahead), sizes=(64,)) for ahead in (False, True))
    assert line.check().meanwhile == {1: 56, 0: 8}  # 32 steps of two slabs, 8 lines
    assert ahead.check().meanwhile == {1: 64, 0: 1}
    both = Case(NVFP4, tiling(step=256, straight=2), sizes=(64,))
    assert both.check().meanwhile == {2: 24, 0: 8}  # 16 steps of two slabs, both halves at once
    for name in ("no room", "no room, MXFP8", "no room, one stage each"):
        assert list(CASES[name].check().meanwhile) == [0], name


FREE = 'gpu.barrier_arrive(s["free"].at[step.slot])'
SCALE_FREE = 'gpu.barrier_arrive(s["scale_free"].at[self.scale_slot(piece, copy)])'
HELPED = "helped = [self.get_part(first + self.warpgroup, tokens) for first in others]"
PARTS_FREE = 'gpu.barrier_arrive(s["parts_free"])'
RACE = "may still use it|may not be written yet|may end before|may come before"
STILL, SIGNALS, WRONG = "All stand still", "signals were given where", "wrong products"
# Case, what goes wrong, text, what it is replaced by.
MUTANTS = {
    "a stage is let go of a step too early": (
        "two stages, four in a line", RACE, "turn.step if room", "turn.step + 1 if room",
    ),
    "a stage is let go of a turn too early": (
        "two stages, four in a line", RACE, "turn.step if room", "upcoming.step if room",
    ),
    "a stage is let go of before the last line makes weights of it": (
        "two stages, ahead", RACE, "jnp.where(last, own - 1, 0)", "jnp.where(last, 0, 0)",
    ),
    "a stage is let go of while its last product runs": (
        "two stages", RACE,
        f"            gpu.wait_products(0)\n            for step in steps[held:]:\n                {FREE}\n",
        f"            for step in steps[held:]:\n                {FREE}\n            gpu.wait_products(0)\n",
    ),
    "a stage is never let go of": ("two stages", STILL, "steps[held:]:", "steps[held + 1:]:"),
    "one product too many runs": (
        "two stages, four in a line", RACE, "len(parts) if room else 0", "len(parts) + 1 if room else 1",
    ),
    "one product too many runs without room": (
        "no room", RACE, "len(parts) if room else 0", "len(parts) if room else 1",
    ),
    "products of three slabs run": (
        "steps of four slabs", "registers",
        "held = let_go(steps, held, turn.step", "held = held if turn.slab == 1 else let_go(steps, held, turn.step",
    ),
    "products run where there is no room": (
        "no room, one stage each", "registers", "gpu.wait_products(len(parts) if room else 0)", "pass",
    ),
    "products run into the next line": (
        "two stages", f"all have to be waited for|{RACE}", "            gpu.wait_products(0)\n", "",
    ),
    "lines whatever the stages": (
        "one stage each, four wanted in a line", STILL, "t.straight if t.holds_and_waits else 1", "t.straight",
    ),
    "lines whatever the stages of four": (
        "one stage each of four", STILL, "t.straight if t.holds_and_waits else 1", "t.straight",
    ),
    "ahead of the last line, too": ("two stages, ahead", STILL, "@gpu.when(~last)", "@gpu.when(True)"),
    "scales let go of before their last step": (
        "scales for two steps of eight stages", RACE,
        f"            made = lax.fori_loop(0, lines, functools.partial(line, copy), made)\n            {SCALE_FREE}\n",
        f"            {SCALE_FREE}\n            made = lax.fori_loop(0, lines, functools.partial(line, copy), made)\n",
    ),
    "scales of the next copy are not waited for": (
        "two stages, ahead", RACE,
        'gpu.when(ends)(lambda: gpu.barrier_wait(s["scale_ready"].at[self.scale_slot(piece, copy + 1)]))', "pass",
    ),
    "the first stage of a line is not waited for": (
        "two stages", RACE, 'gpu.barrier_wait(s["ready"].at[step.slot])\n            return make', "return make",
    ),
    "the other stages of a line are not waited for": (
        "two stages, four in a line", RACE,
        'gpu.barrier_wait(s["ready"].at[steps[upcoming.step].slot])', "pass",
    ),
    "the stage ahead is not waited for": (
        "two stages, ahead", RACE, 'gpu.barrier_wait(s["ready"].at[following.slot])', "pass",
    ),
    "a stage is filled before it is free": (
        "two stages", RACE,
        'gpu.when(number_of_step >= t.stages)(lambda: gpu.barrier_wait(s["free"].at[slot]))', "pass",
    ),
    "a stage is waited for a round late": (
        "two stages", RACE, "number_of_step >= t.stages", "number_of_step >= 2 * t.stages",
    ),
    "scales are filled before they are free": (
        "two stages", RACE,
        'gpu.when(number >= t.scale_stages)(lambda: gpu.barrier_wait(s["scale_free"].at[slot]))', "pass",
    ),
    "the last rounds are not waited for": (
        "two stages", "had 48 rounds", 'self.drain("free", self.copies * p.steps_a_scale, t.stages)', "pass",
    ),
    "the slots start again with each piece": (
        "one line for all", STILL, "(piece.before + copy) * p.steps_a_scale + k", "copy * p.steps_a_scale + k",
    ),
    "one arrival too few fills a stage": (
        "two stages", RACE, "num_arrivals=t.warpgroups + 1", "num_arrivals=t.warpgroups",
    ),
    "parts are written before they are read": (
        "pieces of half the stages", RACE, 'gpu.when(item > 0)(lambda: gpu.barrier_wait(s["parts_free"]))', "pass",
    ),
    "parts are let go of before they are read": (
        "pieces of half the stages", RACE,
        f"{HELPED}\n            {PARTS_FREE}\n", f"{PARTS_FREE}\n            {HELPED}\n",
    ),
    "parts are not waited for": (
        "SwiGLU", RACE, 'gpu.barrier_wait(s["parts_ready"])', "pass",
    ),
    "another block's part is not waited for": (
        "units", SIGNALS,
        "gpu.wait_for_counter(self.counter(piece.owner), piece.others * self.finishers)", "pass",
    ),
    "one block too few is waited for": (
        "units, tiles of three blocks", SIGNALS,
        "piece.others * self.finishers)", "(piece.others - 1) * self.finishers)",
    ),
    "a part is signalled before it is left": (
        "units", "may not have left",
        "        self.write(block, finisher, parts)\n        self.signal(block, owner, finisher)\n",
        "        self.signal(block, owner, finisher)\n        self.write(block, finisher, parts)\n",
    ),
    "steps of the others": (
        "two stages each", RACE, "own * t.split + self.share", "own + self.share * self.own_steps()",
    ),
    "scales of the first step": ("two stages", WRONG, "gpu.ds(k * a_step, a_step)", "gpu.ds(0 * k, a_step)"),
    "slabs of x exchanged": (
        "steps of four slabs of NVFP4", WRONG, "len(parts) * turn.slab + part", "len(parts) * turn.slab + 1 - part",
    ),
    "the first tile's features": ("two stages", WRONG, "start + m * gpu.ROWS, gpu.ROWS", "m * gpu.ROWS, gpu.ROWS"),
    "tiles of the first expert": (
        "experts", WRONG, 'g["experts"][1 + block] * p.outputs', 'g["experts"][1] * p.outputs',
    ),
    "9 rows are few where 8 are": ("experts, SwiGLU", WRONG, "<= few", "<= few + 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught_in_every_order(name: str) -> None:
    case, says, right, wrong = MUTANTS[name]
    for seed in range(2):
        with pytest.raises((AssertionError, ProtocolError), match=says):
            CASES[case].check(seed, changes=((right, wrong),))
