"""The Mosaic kernel of `quantized_matmul` without a GPU: interpreted with race detection, and lowered to CUDA."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantized_matmul_cases import assert_product, mutants, random_weight, random_x, values

from pallas_kernels import _mosaic, _quantized, _quantized_mosaic
from pallas_kernels._quantized import FORMATS, MXFP8, NVFP4, take_apart
from pallas_kernels._quantized_mosaic import Swiglu, Tiling, plan, reorder, scale_steps, shared_memory_bytes
from pallas_kernels._quantized_mosaic_tiling import Registers, registers
from pallas_kernels.quantized_matmul import mosaic_sm90, tuning
from pallas_kernels.quantized_matmul.mosaic_sm90 import quantized_matmul_mosaic

pytestmark = pytest.mark.filterwarnings("ignore:.*os.fork.*:RuntimeWarning")  # the interpreter's threads, harmless

RACES = _mosaic.interpreter(detect_races=True)


def run(x, weight, **static):
    parts = take_apart(weight)
    return quantized_matmul_mosaic(x, parts.codes, parts.scale, parts.global_scale, form=parts.format, **static)


CASES = [  # format, rows, out, in, multiprocessors, tiling
    ("mxfp8", 1, 64, 512, 1, Tiling(tokens=8, step=128, stages=2, scale_stages=2)),
    ("mxfp8", 5, 128, 1024, 1, Tiling(tokens=8, step=128, stages=4, split=2, scale_stages=2)),
    ("mxfp8", 40, 256, 512, 2, Tiling(tokens=16, step=128, stages=2, warpgroups=2, scale_stages=2, group=2)),
    ("nvfp4", 9, 64, 512, 1, Tiling(tokens=16, step=128, stages=4, split=2, scale_stages=2)),
    ("nvfp4", 8, 128, 256, 2, Tiling(tokens=8, step=256, stages=2, warpgroups=2, scale_stages=2)),
    ("nvfp4", 24, 192, 256, 1, Tiling(tokens=8, step=128, stages=3, warpgroups=3, scale_stages=2, group=8)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def test_interpreted(case: tuple) -> None:
    form, rows, out, inputs, multiprocessors, tiling = case
    weight, x = random_weight(form, rows, out, inputs), random_x(rows, rows, inputs)
    actual = run(x, weight, tiling=tiling, multiprocessors=multiprocessors, interpret=RACES)
    assert_product(actual, x, weight)


@pytest.mark.parametrize("op", ["multiply", "divide"])
def test_global_scale_interpreted(op: str) -> None:
    weight, x = random_weight("nvfp4", 1, 64, 256, op=op), random_x(1, 3, 256)
    actual = run(x, weight, tiling=Tiling(tokens=8, step=256, stages=2), multiprocessors=1, interpret=RACES)
    assert_product(actual, x, weight)


@pytest.mark.parametrize("form", FORMATS)
def test_mutants_are_caught(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = random_weight(form, 2, 64, 512, plain=True), random_x(2, 8, 512)
    static = dict(tiling=Tiling(tokens=8, step=256, stages=2), multiprocessors=1, interpret=_mosaic.interpreter())
    for mutant in mutants(form):
        with pytest.raises(AssertionError, match="of the elements are wrong"):
            assert_product(run(x, mutant(weight), **static), x, weight)
    monkeypatch.setattr(mosaic_sm90, "reorder", lambda form, x: x)
    with pytest.raises(AssertionError, match="of the elements are wrong"):
        assert_product(run(x, weight, **static), x, weight)


def test_grouped_swiglu_interpreted() -> None:
    """Three used tiles of five, of experts 2, 0, 2; gate and up are two stacks with global scales of their own."""
    stacks = [random_weight("nvfp4", i, 64, 256, lead=(3,), op="divide" if i else "multiply") for i in range(2)]
    x, experts = random_x(3, 40, 256) * jnp.bfloat16(2.0**-7), jnp.array([3, 2, 0, 2, 1, 1], jnp.int32)
    swiglu = Swiglu(alpha=1.702, limit=7.0)

    tiling = Tiling(tokens=8, step=256, stages=2, warpgroups=2)
    static = dict(tiling=tiling, experts=experts, swiglu=swiglu, multiprocessors=2, interpret=RACES)

    def grouped(x, gate, up):
        return _quantized_mosaic.multiply(reorder(NVFP4, x), [take_apart(gate), take_apart(up)], **static)

    def expected(tile: int, expert: int) -> np.ndarray:
        rows = np.asarray(x[8 * tile : 8 * tile + 8], np.float64)
        gate, up = (rows @ values(jax.tree.map(lambda a: a[expert], s)).T for s in stacks)
        gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)

    out, swapped = grouped(x, *stacks), grouped(x, *stacks[::-1])
    for tile, expert in enumerate([2, 0, 2]):
        rows = slice(8 * tile, 8 * tile + 8)
        np.testing.assert_allclose(np.asarray(out[rows], np.float64), expected(tile, expert), rtol=2.0**-7, atol=1e-3)
        assert not np.allclose(np.asarray(swapped[rows], np.float64), expected(tile, expert), rtol=2.0**-7, atol=1e-3)


def lower(form: _quantized.Format, rows: int, out: int, inputs: int, tiling: Tiling | None) -> str:
    shape, f8 = jax.ShapeDtypeStruct, jnp.float8_e4m3fn
    codes = shape((out, form.bytes(inputs)), f8 if form is MXFP8 else jnp.uint8)
    scale = shape((out, inputs // form.block), jnp.uint8 if form is MXFP8 else f8)
    function = functools.partial(quantized_matmul_mosaic, form=form, tiling=tiling)
    traced = jax.jit(function).trace(shape((rows, inputs), jnp.bfloat16), codes, scale, shape((), jnp.float32))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("entry", range(len(tuning.all_tilings())))
def test_every_entry_of_the_table_lowers_to_cuda(entry: int) -> None:
    form, rows, tiling, _ = tuning.all_tilings()[entry]
    text = lower(form, rows, 64 * tiling.warpgroups * 8, 6144, tiling)
    assert re.search(r"custom_call @mosaic_gpu\w*\(%\w+, %arg1, %arg2, ", text)  # the weight goes in as it is


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize(
    "rows, shape", [(1, (8192, 6144)), (9, (6144, 8192)), (100, (512, 3072)), (1000, (6144, 8192))]
)
def test_the_choice_lowers_to_cuda(form, rows: int, shape: tuple[int, int]) -> None:
    assert "mosaic_gpu" in lower(form, rows, *shape, None)


@pytest.mark.parametrize(
    "form, out, inputs, reason",
    [
        (MXFP8, 96, 6144, "cuts the output features by 64, got 96"),
        (MXFP8, 64, 6176, "cannot cut 6176 inputs of mxfp8"),
        (MXFP8, 64, 96, "cannot cut 96 inputs of mxfp8"),
        (NVFP4, 64, 6160, "cannot cut 6160 inputs of nvfp4"),
    ],
)
def test_refuses_in_words(form, out: int, inputs: int, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        tuning.choose_mosaic(form, 8, out, inputs)


@pytest.mark.parametrize("slower, chosen", [(1.0, 4), (3.0, 2)])
def test_the_table_settles_what_the_estimate_does_not(
    slower: float, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    four, two = (tuning.Candidate(warpgroups=w, tokens=128, step=128) for w in (4, 2))
    entry = dataclasses.replace(tuning.find(MXFP8, 512), mosaic=(dataclasses.replace(four, slower=slower), two))
    monkeypatch.setattr(tuning, "find", lambda form, rows: entry)
    assert tuning.choose_mosaic(MXFP8, 512, 8192, 6144).warpgroups == chosen
    with pytest.raises(ValueError, match="slower must be a positive factor, got 0"):
        dataclasses.replace(four, slower=0.0)


def test_refuses_what_does_not_fit_in_words() -> None:
    with pytest.raises(NotImplementedError, match="bytes of shared memory"):
        plan(MXFP8, Tiling(tokens=256, step=256, stages=4), 6144, 64)
    with pytest.raises(ValueError, match="two warpgroups, gate and up"):
        plan(MXFP8, Tiling(tokens=8, step=256, stages=4), 6144, 64, swiglu=True)
    with pytest.raises(NotImplementedError, match="at least one row"):
        tuning.choose_mosaic(MXFP8, 0, 64, 512)


@pytest.mark.parametrize(
    "field, value",
    [
        ("tokens", 12), ("tokens", 264), ("step", 96), ("stages", 1), ("stages", 5), ("split", 5), ("scale_stages", 1),
        ("group", 0),
    ],
)  # fmt: skip
def test_tiling_is_validated(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=field):
        Tiling(**(dict(tokens=8, step=128, stages=4, warpgroups=2, split=2) | {field: value}))


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("tokens", [8, 24, 64, 104, 128, 256])
@pytest.mark.parametrize("warpgroups, split", [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1), (3, 2)])
def test_registers_fit_the_chip(warpgroups: int, split: int, tokens: int, form) -> None:
    found = registers(form, Tiling(tokens=tokens, step=128, stages=4, warpgroups=warpgroups, split=split))
    computing = warpgroups * split
    at_launch = 65536 // (128 * (computing + 1)) // 8 * 8
    if found.computing:
        # With more the launch never ends: the warpgroups share what there is at launch.
        assert computing * found.computing + found.copying <= at_launch * (computing + 1)
        assert found.computing % 8 == 0 and found.copying % 8 == 0
        assert found.computing > at_launch > found.copying >= 24
    assert not found.room or tokens // 2 + 32 * form.per_byte < (found.computing or at_launch)


def test_registers_of_what_ptxas_would_serialize() -> None:
    """Seen in its reports for sm_90a: C7512 for these with the registers at launch, and none with what is asked for."""
    tiling = functools.partial(Tiling, step=128, stages=4)
    assert registers(NVFP4, tiling(tokens=24, warpgroups=2, split=2)) == Registers(112, 32, True)
    assert registers(NVFP4, tiling(tokens=8, split=4)) == Registers(112, 32, True)
    assert registers(MXFP8, tiling(tokens=128, warpgroups=4)) == Registers(112, 32, False)
    assert registers(MXFP8, tiling(tokens=128, warpgroups=3)) == Registers(152, 40, True)
    assert registers(MXFP8, tiling(tokens=24, warpgroups=2, split=2)) == Registers(0, 0, True)
    assert registers(NVFP4, tiling(tokens=128, warpgroups=2)) == Registers(0, 0, True)


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("shape", [(8192, 6144), (6144, 8192), (12288, 6144), (6144, 12288), (3072, 6144), (512, 6144)])
def test_tilings_of_the_model_fit_the_chip(form, shape: tuple[int, int]) -> None:
    for rows in (1, 2, 8, 9, 16, 31, 64, 65, 129, 512, 777, 4096):
        tiling = tuning.choose_mosaic(form, rows, *shape)
        assert shared_memory_bytes(form, tiling, shape[1]) <= _mosaic.SHARED_MEMORY - 2048
        blocks = -(-rows // tiling.tokens)
        assert blocks * tiling.tokens - rows < 8 * blocks  # no more padding than whole groups of 8
        steps = shape[1] // tiling.step
        a_copy = scale_steps(form, tiling, shape[1])
        assert steps % a_copy == 0 and a_copy % tiling.split == 0 and a_copy * tiling.step // form.block % 16 == 0
        if shape[0] >= 6144 and rows == 512:
            tiles = blocks * shape[0] // (64 * tiling.warpgroups)
            assert tiles / (-(-tiles // 132) * 132) > 0.9  # the multiprocessors are busy
