"""The Mosaic kernel of `quantized_matmul` without a GPU: interpreted with race detection, and lowered to CUDA."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantized_matmul_cases import assert_mlp, assert_product, mutants, random_weight, random_x, values

from pallas_kernels import _dispatch, _mosaic, _quantized, _quantized_mosaic
from pallas_kernels._quantized import FORMATS, MXFP8, NVFP4, take_apart
from pallas_kernels._quantized_mosaic import Swiglu, Tiling, plan, reorder, scale_steps, shared_memory_bytes
from pallas_kernels._quantized_mosaic_tiling import Problem, Registers, registers
from pallas_kernels.quantized_matmul import mosaic_sm90, tuning
from pallas_kernels.quantized_matmul.api import quantized_matmuls, quantized_mlp
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


def parts_of(weights) -> tuple[list, tuple]:
    """Codes, scale and global scale of each in a row; their formats."""
    taken = [take_apart(weight) for weight in weights]
    return [part for w in taken for part in (w.codes, w.scale, w.global_scale)], tuple(w.format for w in taken)


SIZES = (128, 64, 192)  # outputs of weights that share a launch


def run_several(x, weights, **static) -> list:
    flat, forms = parts_of(weights)
    static = dict(tiling=Tiling(tokens=8, step=128, stages=4, split=2, scale_stages=2), multiprocessors=2) | static
    out = mosaic_sm90.quantized_matmuls_mosaic(x, *flat, forms=forms, **static)
    return np.split(np.asarray(out), np.cumsum([weight.codes.shape[0] for weight in weights])[:-1], axis=1)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [5, 20])
def test_several_weights_interpreted(rows: int, form: str) -> None:
    """Each reads its own codes, scales and global scale, which may multiply or divide."""
    ops = ("multiply", "divide", "multiply")
    weights = [random_weight(form, i, out, 512, op=op) for i, (out, op) in enumerate(zip(SIZES, ops, strict=True))]
    x = random_x(rows, rows, 512)
    for out, weight in zip(run_several(x, weights, interpret=RACES), weights, strict=True):
        assert_product(out, x, weight)


@pytest.mark.parametrize("mutant", ["weights exchanged", "boundary off by a tile", "global scale of the first"])
def test_mutants_of_several_weights_are_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, x = [random_weight("nvfp4", i, 128, 512, plain=True) for i in range(2)], random_x(1, 8, 512)
    read = weights
    if mutant == "weights exchanged":
        monkeypatch.setattr(Problem, "sources", lambda p, t: [((1,), 0, 2), ((0,), 2, 4)])
    elif mutant == "boundary off by a tile":
        monkeypatch.setattr(Problem, "sources", lambda p, t: [((0,), 0, 1), ((1,), 1, 4)])
    else:
        read = [weights[0], dataclasses.replace(weights[1], global_scale=weights[0].global_scale)]
    outs = run_several(x, read, interpret=_mosaic.interpreter())
    with pytest.raises(AssertionError, match="of the elements are wrong"):
        for out, weight in zip(outs, weights, strict=True):
            assert_product(out, x, weight)


PAIR = Tiling(tokens=8, step=128, stages=4, warpgroups=2, split=2, scale_stages=2)
ALONE = Tiling(tokens=8, step=128, stages=4, split=2, scale_stages=2)
SWIGLU = Swiglu(1.702, 7.0, rounded=True)


def run_mlp(x, weights, *, tilings=(PAIR, ALONE), swiglu=SWIGLU, interpret=None):
    flat, forms = parts_of(weights)
    static = dict(forms=forms, swiglu=swiglu, tilings=tilings, multiprocessors=2, interpret=interpret)
    return mosaic_sm90.quantized_mlp_mosaic(x, *flat, **static)


def mlp_weights(forms: tuple) -> list:
    shapes = ((512, 512), (512, 512), (64, 512))
    ops = ("multiply", "divide", "multiply")
    return [random_weight(f, i, *s, op=op) for i, (f, s, op) in enumerate(zip(forms, shapes, ops, strict=True))]


@pytest.mark.parametrize(
    "forms, rows, interpret",
    [
        (("mxfp8", "mxfp8", "mxfp8"), 20, RACES),
        (("nvfp4", "nvfp4", "mxfp8"), 5, _mosaic.interpreter()),
        (("mxfp8", "mxfp8", "nvfp4"), 5, _mosaic.interpreter()),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, tuple) else "",
)
def test_mlp_interpreted(forms: tuple, rows: int, interpret) -> None:
    """The second kernel reads what the first wrote in its order, in other tiles, too."""
    weights, x = mlp_weights(forms), random_x(rows, rows, 512) * jnp.bfloat16(2.0**-6)
    second = dataclasses.replace(ALONE, tokens=16)
    assert_mlp(run_mlp(x, weights, tilings=(PAIR, second), interpret=interpret), x, *weights)


@pytest.mark.parametrize("mutant", ["exchanged", "order"])
def test_mutants_of_the_mlp_are_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, x = mlp_weights(("mxfp8",) * 3), random_x(2, 8, 512) * jnp.bfloat16(2.0**-6)
    given = weights
    if mutant == "exchanged":
        given = [weights[1], weights[0], weights[2]]
    else:
        whole = mosaic_sm90.multiply
        monkeypatch.setattr(mosaic_sm90, "multiply", lambda *args, order=None, **rest: whole(*args, **rest))
    with pytest.raises(AssertionError, match="too far"):
        assert_mlp(run_mlp(x, given, interpret=_mosaic.interpreter()), x, *weights)


def test_the_mlp_rounds_where_separate_products_round() -> None:
    """Bit for bit: few inputs and one scale make float32 sums exact in any order, and down picks single values."""
    gate, up = (random_weight("mxfp8", i, 512, 512, scales=(120, 120)) for i in range(2))
    picks = np.zeros((64, 512), np.float32)
    picks[np.arange(64), np.random.default_rng(3).permutation(512)[:64]] = 1
    down = type(gate)(jnp.asarray(picks).astype(jnp.float8_e4m3fn), jnp.full((64, 16), 127, jnp.uint8))
    x = np.zeros((8, 512), np.float32)
    for row in range(8):
        x[row, np.random.default_rng(row).permutation(512)[:4]] = [0.25, -0.5, 0.75, 0.25]
    x, weights = jnp.asarray(x).astype(jnp.bfloat16), [gate, up, down]
    run = functools.partial(run_mlp, x, weights, interpret=_mosaic.interpreter())
    expected = quantized_mlp(x, *weights, alpha=1.702, limit=7.0, implementation="xla")
    assert np.array_equal(run(), expected)
    assert not np.array_equal(run(swiglu=Swiglu(1.702, 7.0)), expected)


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
    monkeypatch.setattr(mosaic_sm90, "reorder", lambda form, x, rows: x)
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


def abstract(form: _quantized.Format, out: int, inputs: int) -> list:
    shape, f8 = jax.ShapeDtypeStruct, jnp.float8_e4m3fn
    codes = shape((out, form.bytes(inputs)), f8 if form is MXFP8 else jnp.uint8)
    scale = shape((out, inputs // form.block), jnp.uint8 if form is MXFP8 else f8)
    return [codes, scale, shape((), jnp.float32)]


def lower_function(function, rows: int, inputs: int, *parts) -> str:
    traced = jax.jit(function).trace(jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16), *parts)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def lower(form: _quantized.Format, rows: int, out: int, inputs: int, tiling: Tiling | None) -> str:
    function = functools.partial(quantized_matmul_mosaic, form=form, tiling=tiling)
    return lower_function(function, rows, inputs, *abstract(form, out, inputs))


ATTENTION, CONTEXT = (8192, 512, 512, 512, 128), (512,) * 10  # q, k, v and the index; k and v of five layers


@pytest.mark.parametrize("rows", [1, 8, 64, 512])
@pytest.mark.parametrize("sizes", [ATTENTION, CONTEXT], ids=["attention", "context"])
def test_several_weights_lower_to_cuda(sizes: tuple, rows: int) -> None:
    parts = [part for size in sizes for part in abstract(MXFP8, size, 6144)]
    run = functools.partial(mosaic_sm90.quantized_matmuls_mosaic, forms=(MXFP8,) * len(sizes))
    text = lower_function(run, rows, 6144, *parts)
    # One launch, and codes and scales of every weight go in as they are, in their order.
    (call,) = re.findall(r"custom_call @mosaic_gpu\w*\((.*?)\)", text)
    given = [int(number) for number in re.findall(r"%arg(\d+)", call)]
    assert given == sorted(set(given)) and len(given) == 2 * len(sizes)


@pytest.mark.parametrize("entry", range(len(tuning.all_swiglu_tilings())))
def test_every_swiglu_of_the_table_lowers_to_cuda(entry: int) -> None:
    form, rows, tiling = tuning.all_swiglu_tilings()[entry]
    tilings = (tiling, tuning.choose_mosaic(MXFP8, rows, 512, 512))
    forms = (form, form, MXFP8)
    parts = [p for f, inputs in zip(forms, (6144, 6144, 512), strict=True) for p in abstract(f, 512, inputs)]
    run = functools.partial(mosaic_sm90.quantized_mlp_mosaic, forms=forms, swiglu=SWIGLU, tilings=tilings)
    assert len(re.findall(r"custom_call @mosaic_gpu", lower_function(run, rows, 6144, *parts))) == 2


@pytest.mark.parametrize("entry", range(len(tuning.all_tilings())))
def test_every_entry_of_the_table_lowers_to_cuda(entry: int) -> None:
    form, rows, tiling, _ = tuning.all_tilings()[entry]
    text = lower(form, rows, 64 * tiling.warpgroups * 8, 6144, tiling)
    # The weight goes in as it is, behind x or, where blocks share tiles, before it.
    assert re.search(r"custom_call @mosaic_gpu\w*\(" + ("" if tiling.unit else r"%\w+, ") + "%arg1, %arg2[,)]", text)


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


def test_refuses_weights_that_cannot_share_a_launch_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    device = types.SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=132)
    monkeypatch.setattr(_dispatch, "device_of", lambda *arrays: device)
    mx, nv, x = random_weight("mxfp8", 1, 128, 1024), random_weight("nvfp4", 1, 128, 1024), random_x(1, 8, 1024)
    run = functools.partial(quantized_matmuls, x, implementation="mosaic")
    with pytest.raises(NotImplementedError, match="weights of one format in a launch"):
        run([mx, nv])
    with pytest.raises(NotImplementedError, match="cuts the output features by 64, got 96"):
        run([mx, random_weight("mxfp8", 1, 96, 1024)])
    mlp = functools.partial(quantized_mlp, x, alpha=1.7, limit=7.0, implementation="mosaic")
    with pytest.raises(NotImplementedError, match="gate and up of one format"):
        mlp(mx, nv, random_weight("mxfp8", 1, 64, 128))
    narrow = random_weight("mxfp8", 1, 64, 1024)
    with pytest.raises(NotImplementedError, match="inner activation in slabs of 128, got 64"):
        mlp(narrow, narrow, random_weight("nvfp4", 1, 64, 64))


def test_multiply_refuses_what_does_not_fit_together() -> None:
    mx, nv, x = random_weight("mxfp8", 1, 128, 512), random_weight("nvfp4", 1, 128, 512), random_x(1, 8, 512)
    a, b = take_apart(mx), take_apart(random_weight("mxfp8", 1, 64, 512))
    run = functools.partial(_quantized_mosaic.multiply, x, tiling=ALONE, interpret=_mosaic.interpreter())
    for wrong in ([a, take_apart(nv)], [a, take_apart(random_weight("mxfp8", 1, 128, 1024))]):
        with pytest.raises(ValueError, match="do not fit"):
            run(wrong)
    with pytest.raises(ValueError, match="do not fit"):
        run([a, b], experts=jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match="do not fit"):
        run([a, b], tiling=PAIR, swiglu=SWIGLU)
    with pytest.raises(ValueError, match="only one tile may be cut short, got 9 of 8 rows"):
        run([b], rows=9)
    with pytest.raises(ValueError, match="not in whole slabs of nvfp4"):
        run([b], order=NVFP4)


@pytest.mark.parametrize(
    "rows, out, inputs, tokens, warpgroups",
    [(512, 8192, 6144, 256, 2), (512, 6144, 8192, 128, 3), (64, 8192, 6144, 64, 1), (8, 8192, 6144, 8, 1)],
)
def test_the_estimate_agrees_with_what_was_measured(
    rows: int, out: int, inputs: int, tokens: int, warpgroups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest of eight ways on an H200 at 512 rows, all with whole tiles."""
    monkeypatch.setattr(tuning, "EXCHANGE", float("inf"))
    tiling = tuning.choose_mosaic(MXFP8, rows, out, inputs)
    assert (tiling.tokens, tiling.warpgroups) == (tokens, warpgroups)


def test_tiles_of_a_launch_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """77 whole tiles of 128 outputs are one round at 64 rows, where 154 of 64 would be two."""
    monkeypatch.setattr(tuning, "EXCHANGE", float("inf"))
    assert tuning.choose_mosaic(MXFP8, 64, 8192, 6144).warpgroups == 1
    assert tuning.choose_mosaic(MXFP8, 64, ATTENTION, 6144).warpgroups == 2
    with pytest.raises(NotImplementedError, match="by 64, got 96"):
        tuning.choose_mosaic(MXFP8, 8, (8192, 96), 6144)


@pytest.mark.parametrize("out, first", [(8192, "mosaic"), (6144, "mosaic"), (3072, "triton"), (512, "triton")])
def test_few_rows_of_few_outputs_are_for_the_kernel_that_cuts_finer(out: int, first: str) -> None:
    assert tuning.choose_order(MXFP8, 8, out)[0] == first
    assert tuning.choose_order(MXFP8, 64, out)[0] == "mosaic"


def test_refuses_what_does_not_fit_in_words() -> None:
    with pytest.raises(NotImplementedError, match="bytes of shared memory"):
        plan(MXFP8, Tiling(tokens=256, step=256, stages=4), 6144, 64)
    with pytest.raises(ValueError, match="pairs of warpgroups, gate and up"):
        plan(MXFP8, Tiling(tokens=8, step=256, stages=4), 6144, 64, swiglu=True)
    with pytest.raises(NotImplementedError, match="no registers to make weights of nvfp4 ahead"):
        plan(NVFP4, Tiling(tokens=128, step=128, stages=2, warpgroups=4, ahead=True), 6144, 256)
    with pytest.raises(ValueError, match="two stages for each of split 2, got 2"):
        Tiling(tokens=8, step=128, stages=2, split=2, ahead=True)
    with pytest.raises(NotImplementedError, match="at least one row"):
        tuning.choose_mosaic(MXFP8, 0, 64, 512)


@pytest.mark.parametrize(
    "field, value",
    [
        ("tokens", 12), ("tokens", 264), ("step", 96), ("stages", 1), ("stages", 5), ("split", 5), ("scale_stages", 1),
        ("group", 0), ("few", 12), ("few", 8),
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
    if found.copying:
        # With more the launch never ends: the warpgroups share what there is at launch.
        assert computing * found.computing + found.copying <= at_launch * (computing + 1)
        assert found.computing % 8 == 0 and found.copying % 8 == 0
        assert found.computing > at_launch > found.copying >= 24
    else:
        assert found.computing == at_launch
    assert not found.room(form, tokens) or tokens // 2 + 32 * form.per_byte < found.computing


def test_registers_of_what_ptxas_would_serialize() -> None:
    """Seen in its reports for sm_90a: C7512 for these with the registers at launch, and none with what is asked for."""
    tiling = functools.partial(Tiling, step=128, stages=4)
    for form, found, asked, room in (
        (NVFP4, tiling(tokens=24, warpgroups=2, split=2), Registers(112, 32), True),
        (NVFP4, tiling(tokens=8, split=4), Registers(112, 32), True),
        (MXFP8, tiling(tokens=128, warpgroups=4), Registers(112, 32), False),
        (MXFP8, tiling(tokens=128, warpgroups=3), Registers(152, 40), True),
        (MXFP8, tiling(tokens=24, warpgroups=2, split=2), Registers(96), True),
        (NVFP4, tiling(tokens=128, warpgroups=2), Registers(168), True),
        (NVFP4, tiling(tokens=64, warpgroups=2, split=2, few=24), Registers(112, 32), False),
    ):
        assert registers(form, found) == asked
        assert registers(form, found).room(form, found.tokens) == room
    assert Registers(112, 32).room(NVFP4, 24)  # which `few` asks where the whole tile has none


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
        if shape[0] >= 6144 and rows == 512 and not tiling.unit:
            tiles = blocks * shape[0] // (64 * tiling.warpgroups)
            assert tiles / (-(-tiles // 132) * 132) > 0.9  # the multiprocessors are busy
