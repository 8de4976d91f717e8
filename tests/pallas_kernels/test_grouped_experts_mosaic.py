"""The Mosaic form of `grouped_experts` without a GPU: interpreted with race detection, and lowered to CUDA."""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts_cases import BFLOAT16, MISREADINGS, Case, assert_close, choices, describe, oracle, random_case

from pallas_kernels import _mosaic
from pallas_kernels._quantized import MXFP8, NVFP4, Format
from pallas_kernels._quantized_mosaic import Tiling
from pallas_kernels.grouped_experts import mosaic_sm90, mosaic_tuning, routing, tuning
from pallas_kernels.grouped_experts.problem import Problem
from pallas_kernels.grouped_experts.stacks import Stack

pytestmark = pytest.mark.filterwarnings("ignore:.*os.fork.*:RuntimeWarning")  # the interpreter's threads, harmless


SHAPES, CHOSEN = ((2, 1), (1, 2)), ((2, 2), (2, 2))  # warpgroups and split of gate_up, of down


def interpreted(
    case: Case, tokens: int = 8, races: bool = True, shapes: tuple = SHAPES, few: int | None = None
) -> jax.Array:
    problem, arrays = describe(case)
    tilings = [
        Tiling(tokens=tokens, step=256, stages=2, warpgroups=w, split=s, scale_stages=2, few=few) for w, s in shapes
    ]
    interpret = _mosaic.interpreter(detect_races=races)
    run = functools.partial(
        mosaic_sm90.grouped_experts_mosaic, problem=problem, tilings=tuple(tilings), multiprocessors=2,
        interpret=interpret,
    )  # fmt: skip
    return jax.jit(run)(case.x, case.experts, case.weights, *arrays)


SIZES = dict(experts=3, hidden=512, inner=512, dtype="bfloat16")


@pytest.mark.parametrize(
    "kind, down, situation, rows, shapes",
    [
        ("mxfp8", "mxfp8", "some choices without", 5, SHAPES),
        ("nvfp4 divide", "nvfp4 multiply", "an expert without rows", 5, SHAPES),
        ("nvfp4 divide", "mxfp8", "some choices without", 5, CHOSEN),
        pytest.param("mxfp8", "nvfp4 divide", "all rows on the same experts", 9, SHAPES, marks=pytest.mark.slow),
    ],
)
def test_interpreted_equals_the_loop(kind: str, down: str, situation: str, rows: int, shapes: tuple) -> None:
    case = random_case(1, choices(situation, 3, rows=rows), kind=kind, down=down, **SIZES)
    assert_close(interpreted(case, shapes=shapes), oracle(case), BFLOAT16)


@pytest.mark.parametrize("shapes", [pytest.param(SHAPES, marks=pytest.mark.slow), CHOSEN])
def test_tiles_with_few_rows_are_cut(shapes: tuple) -> None:
    """11, 1, 18 and 2 rows in tiles of 16: two tiles of 16 and 11 rows whole, three of 1 and 2 rows as if of 8."""
    chosen = np.repeat([0, 1, 2, 3], [11, 1, 18, 2]).reshape(4, 8).T.astype(np.int32)
    case = random_case(4, chosen, kind="nvfp4 divide", down="mxfp8", **SIZES | dict(experts=4))
    assert_close(interpreted(case, tokens=16, shapes=shapes, few=8), oracle(case), BFLOAT16)


@pytest.mark.parametrize("wrong", ["counts of the neighbour", "all tiles are few"])
def test_a_full_tile_that_is_cut_is_seen(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    def route(*args, **options):
        right = routing.route(*args, **options)
        return right._replace(
            counts=jnp.roll(right.counts, 1) if wrong == "counts of the neighbour" else right.counts * 0
        )

    case = random_case(4, np.repeat([0, 1], [13, 3]).reshape(4, 4).T.astype(np.int32), kind="mxfp8", **SIZES)
    assert_close(interpreted(case, tokens=16, few=8, races=False), oracle(case), BFLOAT16)
    monkeypatch.setattr(mosaic_sm90, "route", route)
    with pytest.raises(AssertionError):
        assert_close(interpreted(case, tokens=16, few=8, races=False), oracle(case), BFLOAT16)


def test_few_rows_one_more_and_what_nobody_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 rows are few and 9 not, in tiles of 16; a row that no pair has written is NaN. The mutant takes 9 for 8."""
    chosen = np.repeat([0, 1, 3], [8, 9, 25])[:, None].astype(np.int32)
    case = random_case(5, chosen, kind="mxfp8", **SIZES | dict(experts=4))
    monkeypatch.setattr(mosaic_sm90.lax, "empty", lambda shape, dtype: jnp.full(shape, -1, jnp.int32).view(dtype))
    assert_close(interpreted(case, tokens=16, few=8, shapes=CHOSEN), oracle(case), BFLOAT16)

    def one_less(*args, **options):
        right = routing.route(*args, **options)
        return right._replace(counts=right.counts - 1)

    monkeypatch.setattr(mosaic_sm90, "route", one_less)
    with pytest.raises(AssertionError):
        assert_close(interpreted(case, tokens=16, few=8, shapes=CHOSEN, races=False), oracle(case), BFLOAT16)


def _swiglu_symmetric(monkeypatch: pytest.MonkeyPatch, case: Case) -> Case:
    right = mosaic_sm90.Swiglu.__call__
    wrong = lambda self, gate, up: right(self, jnp.maximum(gate, -self.limit), up)  # noqa: E731
    monkeypatch.setattr(mosaic_sm90.Swiglu, "__call__", wrong)
    return case


def _tiles_shifted(monkeypatch: pytest.MonkeyPatch, case: Case) -> Case:
    def wrong(*args, **options):
        right = routing.route(*args, **options)
        return right._replace(tiles=jnp.concatenate([right.tiles[:1], jnp.roll(right.tiles[1:], 1)]))

    monkeypatch.setattr(mosaic_sm90, "route", wrong)
    return case


def _inner_not_reordered(monkeypatch: pytest.MonkeyPatch, case: Case) -> Case:
    right = mosaic_sm90.multiply
    monkeypatch.setattr(mosaic_sm90, "multiply", lambda *args, order=None, **more: right(*args, **more))
    return case


def _rows_in_other_places(monkeypatch: pytest.MonkeyPatch, case: Case) -> Case:
    right = mosaic_sm90.spread
    monkeypatch.setattr(mosaic_sm90, "spread", lambda x, *rest: right(jnp.roll(x, 1, axis=0), *rest))
    return case


def _nothing(monkeypatch: pytest.MonkeyPatch, case: Case) -> Case:
    return case


MUTANTS = [
    _nothing,
    _swiglu_symmetric,
    _tiles_shifted,
    _inner_not_reordered,
    _rows_in_other_places,
    *(
        pytest.param(lambda _, case, misread=misread: misread(case), id=misread.__name__, marks=pytest.mark.slow)
        for misread, kind in MISREADINGS
        if kind == "nvfp4 divide"
    ),
]


@pytest.mark.parametrize("wrong", MUTANTS)
def test_mutants_are_caught(monkeypatch: pytest.MonkeyPatch, wrong) -> None:
    sizes = SIZES | dict(hidden=256, inner=512)
    case = random_case(2, choices("random", 3, rows=3), kind="nvfp4 divide", **sizes)
    expected = oracle(case)
    caught = contextlib.nullcontext() if wrong is _nothing else pytest.raises(AssertionError)
    with caught:
        assert_close(interpreted(wrong(monkeypatch, case), races=False), expected, BFLOAT16)


def abstract(form: Format, experts: int, out: int, into: int) -> Stack:
    shape = jax.ShapeDtypeStruct
    codes, scale = (jnp.float8_e4m3fn, jnp.uint8) if form is MXFP8 else (jnp.uint8, jnp.float8_e4m3fn)
    return Stack(
        shape((experts, out, form.bytes(into)), codes),
        shape((experts, out, into // form.block), scale),
        shape((experts,), jnp.float32),
    )


def real_size(form: Format | None, rows: int, experts: int = 128, hidden: int = 6144, inner: int = 3072) -> Problem:
    return Problem(
        rows=rows, choices=4, experts=experts, hidden=hidden, inner=inner, dtype=jnp.dtype(jnp.bfloat16),
        formats=(form,) * 3, dtypes=(jnp.dtype(jnp.bfloat16),) * 3, alpha=1.702, limit=7.0,
    )  # fmt: skip


@pytest.mark.parametrize("rows", [1, 8, 64, 200, 512, 800, 1600, 4096])
@pytest.mark.parametrize("form", [MXFP8, NVFP4], ids=lambda form: form.name)
def test_lowers_to_cuda(form: Format, rows: int) -> None:
    problem = real_size(form, rows)
    tilings = mosaic_sm90.plan(problem)
    assert tilings[0].tokens == tilings[1].tokens
    run = functools.partial(mosaic_sm90.grouped_experts_mosaic, problem=problem, tilings=tilings)
    shape, p = jax.ShapeDtypeStruct, problem
    rows_and_choices = (
        shape((rows, p.hidden), jnp.bfloat16), shape((rows, 4), jnp.int32), shape((rows, 4), jnp.float32)
    )  # fmt: skip
    weights = [abstract(form, p.experts, p.inner, p.hidden)] * 2 + [abstract(form, p.experts, p.hidden, p.inner)]
    text = jax.jit(run).trace(*rows_and_choices, *weights).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 2
    # The stacks go to the kernels as they are: nothing but a change of shape is between.
    touched = re.findall(rf"stablehlo\.(\w+) %arg[3-9][^\n]*tensor<{p.experts}x\d+x\d+x", text)
    assert set(touched) <= {"reshape"}, touched


def test_which_lists_a_kernel_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = real_size(NVFP4, 128), real_size(NVFP4, 129)
    assert [mosaic_sm90.choose_routing(few, Hopper(), name) for name in ("xla", None)] == ["xla", "xla"]
    with pytest.raises(NotImplementedError, match="jax-triton"):
        mosaic_sm90.choose_routing(few, Hopper(), "triton")
    monkeypatch.setattr(mosaic_sm90, "require_triton", lambda *_: 132)
    assert [mosaic_sm90.choose_routing(few, Hopper(), name) for name in ("triton", "xla", None)] == [
        "triton", "xla", "triton",
    ]  # fmt: skip
    assert mosaic_sm90.choose_routing(many, Hopper(), None) == "xla"
    with pytest.raises(NotImplementedError, match="up to 512 choices, got 516"):
        mosaic_sm90.choose_routing(many, Hopper(), "triton")


def test_padding_adds_nothing() -> None:
    sizes = SIZES | dict(hidden=256, inner=512)
    case = random_case(3, choices("random", 3, rows=5), kind="nvfp4 divide", **sizes)
    positions = jnp.asarray([3, -1, 0, -1, 9], jnp.int32)
    without = jnp.where(positions[:, None] < 0, 3, case.experts)
    problem, arrays = describe(case)
    tilings = tuple(
        Tiling(tokens=8, step=256, stages=2, warpgroups=w, split=s, scale_stages=2) for w, s in ((2, 1), (1, 2))
    )
    run = functools.partial(
        mosaic_sm90.grouped_experts_mosaic, positions=positions, problem=problem, tilings=tilings, multiprocessors=2,
        interpret=_mosaic.interpreter(detect_races=False),
    )  # fmt: skip
    found = jax.jit(run)(case.x, case.experts, case.weights, *arrays)
    assert_close(found, oracle(dataclasses.replace(case, experts=without)), BFLOAT16)
    assert not np.asarray(found)[[1, 3]].any()


class Hopper:
    platform, compute_capability, device_kind, core_count = "gpu", "9.0", "H200", 132


def test_layers_of_one_size_are_lowered_once() -> None:
    problem = real_size(MXFP8, 8)
    shape, p = jax.ShapeDtypeStruct, problem
    weights = [abstract(MXFP8, p.experts, p.inner, p.hidden)] * 2 + [abstract(MXFP8, p.experts, p.hidden, p.inner)]

    def layers(x, experts, shares, positions, first, second):
        for layer in (first, second):
            x = x + mosaic_sm90.build(real_size(MXFP8, 8), Hopper())(x, experts, shares, positions, *layer).astype(
                x.dtype
            )
        return x

    inputs = (
        shape((8, p.hidden), jnp.bfloat16), shape((8, 4), jnp.int32), shape((8, 4), jnp.float32), shape((8,), jnp.int32)
    )  # fmt: skip
    text = jax.jit(layers).trace(*inputs, weights, weights).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @\w*mosaic_gpu", text)) == 2


REFUSED = [
    (real_size(None, 8), "MXFP8 and NVFP4 stacks; plain ones go through Triton"),
    (real_size(MXFP8, 8, hidden=128, inner=64), "cannot cut 128 inputs of mxfp8 into copies of 16 bytes"),
    (real_size(NVFP4, 8, inner=3104), "cuts the output features by 64, got 3104"),
]


@pytest.mark.parametrize("problem, reason", REFUSED)
def test_refuses_in_words(problem: Problem, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        mosaic_sm90.plan(problem)


# Tuning ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field, value", [("features", 24), ("step", 8), ("warps", 3), ("stages", 0), ("stages", 9)])
def test_tuning_is_validated(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=field):
        tuning.Tuning(**dict(features=32, step=64, stages=3, warps=4) | {field: value})


@pytest.mark.parametrize("rows", [1, 2, 8, 64, 100, 512, 1000, 4096, 100_000])
@pytest.mark.parametrize("form", [None, MXFP8, NVFP4])
def test_every_size_has_a_tuning(form: Format | None, rows: int) -> None:
    problem = real_size(form, rows)
    tile = tuning.choose_tile(problem)
    for part, (outputs, inputs) in enumerate([(3072, 6144), (6144, 3072)]):
        found = tuning.triton_tuning(form, tile, part, outputs, inputs)
        assert outputs % found.features == 0 and inputs % found.step == 0
    assert tuning.preferred(problem)[-1] == "xla"
    assert (tuning.preferred(problem)[0] == "triton") == (form is None)  # which Mosaic has no form for


def test_small_sizes_are_cut_or_refused() -> None:
    found = tuning.triton_tuning(MXFP8, 8, 0, 48, 96)
    assert (found.features, found.step) == (16, 32)
    with pytest.raises(NotImplementedError, match="multiple of 16 outputs and of 64 inputs, got \\[48, 96\\]"):
        tuning.triton_tuning(NVFP4, 8, 0, 48, 96)


@pytest.mark.parametrize(
    "formats, dtype, reason",
    [
        ((MXFP8, NVFP4, MXFP8), jnp.bfloat16, "gate and up of one format, got mxfp8 and nvfp4"),
        ((None, None, None), jnp.float32, "plain stacks of x's dtype float32, got bfloat16"),
        ((MXFP8, MXFP8, MXFP8), jnp.float16, "takes bfloat16 rows, got float16"),
    ],
)
def test_what_no_kernel_takes(formats: tuple, dtype, reason: str) -> None:
    problem = dataclasses.replace(real_size(MXFP8, 8), formats=formats, dtype=jnp.dtype(dtype))
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        problem.require_uniform("the kernel")


def test_tiles_hold_most_experts_rows() -> None:
    """A tile that were much smaller than an expert's rows would read its weights again and again."""
    rng = np.random.default_rng(0)
    for rows in (8, 64, 512):
        chosen = np.argsort(rng.normal(size=(rows, 128)))[:, :4]
        counts = np.bincount(chosen.reshape(-1), minlength=128)
        for tile in (
            tuning.choose_tile(real_size(NVFP4, rows)),
            mosaic_tuning.choose_entry(real_size(NVFP4, rows)).tile,
        ):
            tiles = -(-counts // tile)
            assert tiles.sum() <= 1.35 * (counts > 0).sum()
