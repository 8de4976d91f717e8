"""`quantized_matmul` on an NVIDIA GPU: fresh data, shapes, scales at their limits, transformations.

export XLA_FLAGS=--xla_gpu_autotune_level=0 XLA_PYTHON_CLIENT_PREALLOCATE=false
pytest -n 12 tests/pallas_kernels/test_quantized_matmul_gpu.py
"""

import dataclasses
import functools
import itertools
import re
import secrets

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gpu_marks import MARKS, MOSAIC, TRITON, XLA, needs_gpu, needs_sm90
from quantized_matmul_cases import (
    MX,
    NV,
    assert_mlp,
    assert_product,
    e2m1_values,
    e4m3_values,
    every_weight,
    mutants,
    random_weight,
    random_x,
)

from pallas_kernels import _quantized
from pallas_kernels._quantized_mosaic import Tiling
from pallas_kernels.quantized_matmul import tuning
from pallas_kernels.quantized_matmul.api import quantized_matmul, quantized_matmuls, quantized_mlp

KERNELS = [MOSAIC, TRITON]
FORMS = ["mxfp8", "nvfp4"]


@functools.cache
def compiled(implementation: str | None):
    return jax.jit(functools.partial(quantized_matmul, implementation=implementation))


def poison(*shape: int) -> None:
    """Leaves NaN where the next result will probably be allocated: what a kernel does not write shows."""
    jax.block_until_ready([jnp.full(shape, jnp.nan, jnp.bfloat16) for _ in range(4)])


def check(implementation: str | None, x, weight, **options) -> None:
    poison(*x.shape[:-1], weight.codes.shape[0])
    assert_product(compiled(implementation)(x, weight), x, weight, **options)


@pytest.mark.parametrize("implementation", [*KERNELS, XLA])
@pytest.mark.parametrize("form, op", [("mxfp8", "multiply"), ("nvfp4", "multiply"), ("nvfp4", "divide")])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 17, 64, 65, 200, 512])
def test_fresh_data(rows: int, form: str, op: str, implementation: str) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    check(implementation, random_x(seed, rows, 1536), random_weight(form, seed, 768, 1536, op=op))


ROWS = [1, 7, 8, 20, 64, 200, 512]
ANYWHERE = pytest.param(None, marks=needs_gpu)


def several(form: str, seed: int, sizes: tuple[int, ...], inputs: int) -> list:
    ops = ["divide" if i % 2 else "multiply" for i in range(len(sizes))]
    return [
        random_weight(form, seed + i, out, inputs, op=op) for i, (out, op) in enumerate(zip(sizes, ops, strict=True))
    ]


@functools.cache
def compiled_several(implementation: str | None):
    return jax.jit(functools.partial(quantized_matmuls, implementation=implementation))


@functools.cache
def compiled_mlp(implementation: str | None):
    return jax.jit(functools.partial(quantized_mlp, alpha=1.702, limit=7.0, implementation=implementation))


@pytest.mark.parametrize("implementation", [MOSAIC, ANYWHERE])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", ROWS)
def test_several_weights_and_one_x(rows: int, form: str, implementation: str | None) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    weights, x = several(form, seed, (768, 128, 384, 128), 1536), random_x(seed, rows, 1536)
    poison(rows, 1408)
    for out, weight in zip(compiled_several(implementation)(x, weights), weights, strict=True):
        assert_product(out, x, weight)


ATTENTION, CONTEXT = (8192, 512, 512, 512, 128), (512,) * 10


@needs_sm90
@pytest.mark.parametrize("rows", [3, 8, 64, 512])
@pytest.mark.parametrize("sizes", [ATTENTION, CONTEXT], ids=["attention", "context"])
def test_the_weights_of_the_model_together_and_alone(sizes: tuple, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, in the same whole tiles, and right, with shared tiles too; a wrong boundary would show."""
    from pallas_kernels.quantized_matmul.mosaic_sm90 import quantized_matmul_mosaic, quantized_matmuls_mosaic

    weights, x = several("mxfp8", rows, sizes, 6144), random_x(rows, rows, 6144)
    poison(rows, sum(sizes))
    outs = compiled_several("mosaic")(x, weights)
    form, taken = _quantized.FORMATS["mxfp8"], [_quantized.take_apart(weight) for weight in weights]
    parts = [(each.codes, each.scale, each.global_scale) for each in taken]
    monkeypatch.setattr(tuning, "EXCHANGE", float("inf"))
    tiling = tuning.choose_mosaic(form, rows, sizes, 6144)
    alone = jax.jit(functools.partial(quantized_matmul_mosaic, form=form, tiling=tiling))
    together = jax.jit(functools.partial(quantized_matmuls_mosaic, forms=(form,) * len(sizes), tiling=tiling))
    whole = np.split(np.asarray(together(x, *itertools.chain(*parts))), np.cumsum(sizes)[:-1], axis=1)
    for out, part in zip(whole, parts, strict=True):
        assert np.array_equal(out, alone(x, *part))
    for each in (outs, whole):
        assert_product(each[1], x, weights[1])
        assert_product(each[-1], x, weights[-1])
    with pytest.raises(AssertionError, match="of the elements are wrong"):
        assert_product(outs[1], x, weights[2])


MLP_RUNS = [
    *(pytest.param(rows, "mosaic", marks=needs_sm90) for rows in ROWS),
    *(pytest.param(rows, name, marks=MARKS[name]) for rows in (7, 200) for name in ("triton", "xla")),
    *(pytest.param(rows, None, marks=needs_gpu) for rows in (8, 64)),
]


@pytest.mark.parametrize("rows, implementation", MLP_RUNS)
@pytest.mark.parametrize(
    "forms", [("mxfp8",) * 3, ("nvfp4",) * 3, ("mxfp8", "mxfp8", "nvfp4"), ("nvfp4", "nvfp4", "mxfp8")]
)
def test_mlp(rows: int, forms: tuple, implementation: str | None) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    gate, up = (random_weight(f, seed + i, 1536, 1536, op="divide") for i, f in enumerate(forms[:2]))
    down, x = random_weight(forms[2], seed + 2, 256, 1536), random_x(seed, rows, 1536) * jnp.bfloat16(2.0**-6)
    poison(rows, 1536), poison(rows, 256)
    out = compiled_mlp(implementation)(x, gate, up, down)
    assert_mlp(out, x, gate, up, down)
    with pytest.raises(AssertionError, match="too far"):
        assert_mlp(out, x, up, gate, down)


@needs_sm90
@pytest.mark.parametrize("entry", range(len(tuning.all_swiglu_tilings())))
def test_every_tiling_of_the_mlp(entry: int) -> None:
    from pallas_kernels._quantized_mosaic import Swiglu
    from pallas_kernels.quantized_matmul.mosaic_sm90 import quantized_mlp_mosaic

    form, rows, tiling = tuning.all_swiglu_tilings()[entry]
    for r in {min(rows, 300), max(1, tiling.tokens - 3)}:
        gate, up = (random_weight(form.name, entry + i, 512, 6144) for i in range(2))
        down, x = random_weight("mxfp8", entry, 256, 512), random_x(entry, r, 6144) * jnp.bfloat16(2.0**-8)
        second = tuning.choose_mosaic(_quantized.MXFP8, r, 256, 512)
        parts = [_quantized.take_apart(w) for w in (gate, up, down)]
        static = dict(forms=tuple(p.format for p in parts), swiglu=Swiglu(1.702, 7.0, rounded=True))
        run = jax.jit(functools.partial(quantized_mlp_mosaic, tilings=(tiling, second), **static))
        poison(r, 512), poison(r, 256)
        out = run(x, *(a for p in parts for a in (p.codes, p.scale, p.global_scale)))
        assert_mlp(out, x, gate, up, down)


def shared_tilings(name: str, rows: int, inputs: int = 6144, swiglu: bool = False) -> list:
    """Those of the table in which blocks share tiles, and a wide one (at 64 rows and more of several tiles of x)."""
    form = _quantized.FORMATS[name]
    entry = tuning.find(form, rows)
    candidates = [c for c in (entry.swiglu if swiglu else entry.mosaic) if c.unit]
    if rows > 16:
        candidates.append(tuning.Candidate(warpgroups=4, tokens=40, step=128, unit=512))
    return [
        candidate.tiling(rows, form, inputs, swiglu=swiglu) for candidate in candidates if inputs % candidate.unit == 0
    ]


def repeated(run, *args) -> jax.Array:
    """run(*args), bit for bit the same every time, whatever earlier results left in memory."""
    out = run(*args)
    for _ in range(5):
        poison(132, 2, 64, 128)
        assert np.array_equal(np.asarray(out).view(np.uint16), np.asarray(run(*args)).view(np.uint16))
    return out


@needs_sm90
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 7, 8, 16, 56, 64, 100, 250, 500])
def test_shared_tiles_of_several_weights(rows: int, form: str) -> None:
    from pallas_kernels.quantized_matmul.mosaic_sm90 import quantized_matmuls_mosaic

    sizes, seed = (1536, 256, 768), secrets.randbits(32)
    print(f"seed {seed}")
    weights, x = several(form, seed, sizes, 6144), random_x(seed, rows, 6144)
    taken = [_quantized.take_apart(weight) for weight in weights]
    parts = [part for each in taken for part in (each.codes, each.scale, each.global_scale)]
    for tiling in shared_tilings(form, rows):
        run = jax.jit(
            functools.partial(quantized_matmuls_mosaic, forms=tuple(each.format for each in taken), tiling=tiling)
        )
        poison(rows, sum(sizes))
        outs = np.split(np.asarray(repeated(run, x, *parts)), np.cumsum(sizes)[:-1], axis=1)
        for out, weight in zip(outs, weights, strict=True):
            assert_product(out, x, weight)


@needs_sm90
@pytest.mark.parametrize("forms", [("mxfp8",) * 3, ("nvfp4", "nvfp4", "mxfp8")], ids=["mxfp8", "nvfp4"])
@pytest.mark.parametrize("rows", [1, 7, 56, 64, 130, 300])
def test_shared_tiles_of_an_mlp(rows: int, forms: tuple) -> None:
    from pallas_kernels._quantized_mosaic import Swiglu
    from pallas_kernels.quantized_matmul.mosaic_sm90 import quantized_mlp_mosaic

    gate, up = (random_weight(f, rows + i, 1536, 6144) for i, f in enumerate(forms[:2]))
    down, x = random_weight(forms[2], rows, 768, 1536), random_x(rows, rows, 6144) * jnp.bfloat16(2.0**-8)
    parts = [_quantized.take_apart(w) for w in (gate, up, down)]
    static = dict(forms=tuple(p.format for p in parts), swiglu=Swiglu(1.702, 7.0, rounded=True))
    seconds = itertools.cycle(shared_tilings(forms[2], rows, 1536))
    for first, second in zip(shared_tilings(forms[0], rows, swiglu=True), seconds, strict=False):
        run = jax.jit(functools.partial(quantized_mlp_mosaic, tilings=(first, second), **static))
        poison(rows, 1536), poison(rows, 768)
        assert_mlp(repeated(run, x, *(a for p in parts for a in (p.codes, p.scale, p.global_scale))), x, gate, up, down)


@needs_sm90
@pytest.mark.parametrize("rows", [7, 64, 300])
def test_shared_tiles_in_a_loop(rows: int) -> None:
    """Each launch finds its counters at zero; the weights are those of o_proj."""
    from pallas_kernels.quantized_matmul.mosaic_sm90 import quantized_matmul_mosaic

    weight, x = random_weight("mxfp8", rows, 6144, 8192), random_x(rows, rows, 8192)
    form, tiling = _quantized.FORMATS["mxfp8"], shared_tilings("mxfp8", rows, 8192)[0]

    @jax.jit
    def looped(x, codes, scale):
        def step(_, carry):
            x, _previous = carry
            out = quantized_matmul_mosaic(x, codes, scale, jnp.float32(1), form=form, tiling=tiling)
            return jnp.roll(x, 1, axis=0), out

        return jax.lax.fori_loop(0, 20, step, (x, jnp.zeros((rows, 6144), x.dtype)))[1]

    assert_product(looped(x, weight.codes, weight.scale), jnp.roll(x, 19, axis=0), weight)


# out, in, rows; of the model, and of tiles that do not fill the chip
SHAPES = [(8192, 6144, 3), (6144, 8192, 33), (512, 6144, 8), (6144, 3072, 300), (3072, 1536, 1000), (256, 512, 4096)]


@pytest.mark.parametrize("implementation", [*KERNELS, pytest.param(None, marks=needs_gpu)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
def test_shapes_of_the_model(shape: tuple, form: str, implementation: str | None) -> None:
    out, inputs, rows = shape
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    check(implementation, random_x(seed, rows, inputs), random_weight(form, seed, out, inputs))


@pytest.mark.parametrize("implementation", [TRITON, pytest.param(None, marks=needs_gpu)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(100, 352, 5), (1, 32, 1), (33, 96, 70), (500, 6176, 9), (1000, 1056, 600)])
def test_shapes_that_tiles_do_not_divide(shape: tuple, form: str, implementation: str | None) -> None:
    out, inputs, rows = shape
    check(implementation, random_x(out, rows, inputs), random_weight(form, out, out, inputs))


@needs_sm90
@pytest.mark.parametrize("entry", range(len(tuning.all_tilings())))
def test_every_mosaic_tiling(entry: int) -> None:
    from pallas_kernels.quantized_matmul.mosaic_sm90 import quantized_matmul_mosaic

    form, rows, tiling, _ = tuning.all_tilings()[entry]
    for r in {min(rows, 300), max(1, tiling.tokens - 3)}:
        out = 64 * tiling.warpgroups * 5
        weight, x = random_weight(form.name, entry, out, 6144), random_x(entry, r, 6144)
        parts = _quantized.take_apart(weight)
        poison(r, out)
        run = jax.jit(functools.partial(quantized_matmul_mosaic, form=form, tiling=tiling))
        assert_product(run(x, parts.codes, parts.scale, parts.global_scale), x, weight)


LINES = [  # ahead: as few stages as may be, one line and several a copy of scales, one copy and several a piece
    Tiling(tokens=64, step=128, stages=2, warpgroups=2, ahead=True),
    Tiling(tokens=40, step=128, stages=4, split=2, straight=2, ahead=True),
    Tiling(tokens=72, step=128, stages=5, warpgroups=2, scale_stages=3, unit=1024, straight=4, ahead=True),
    Tiling(tokens=104, step=128, stages=4, split=2, scale_stages=3, unit=1024, straight=4, ahead=True),
    Tiling(tokens=64, step=256, stages=3, warpgroups=2, straight=8, ahead=True),
    # Not ahead: one stage a warpgroup, so no line; few stages; no registers for the weights of two turns.
    Tiling(tokens=40, step=128, stages=2, split=2, straight=4),
    Tiling(tokens=64, step=128, stages=2, warpgroups=2, straight=4),
    Tiling(tokens=128, step=128, stages=2, warpgroups=4, straight=4),
]


@needs_sm90
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tiling", LINES, ids=str)
def test_lines_of_steps(tiling: Tiling, form: str) -> None:
    from pallas_kernels.quantized_matmul.mosaic_sm90 import quantized_matmul_mosaic

    out = 128 * 140
    weight, x = random_weight(form, tiling.tokens, out, 6144), random_x(tiling.step, 2 * tiling.tokens - 5, 6144)
    parts = _quantized.take_apart(weight)
    poison(len(x), out)
    run = jax.jit(functools.partial(quantized_matmul_mosaic, form=parts.format, tiling=tiling))
    assert_product(run(x, parts.codes, parts.scale, parts.global_scale), x, weight)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("low, high", [(0, 0), (0, 10), (11, 11), (63, 63), (127, 127), (190, 200), (254, 254)])
def test_every_mxfp8_scale_is_exact(low: int, high: int, rows: int, implementation: str) -> None:
    x = random_x(low, rows, 1536) * jnp.bfloat16(2.0**20 if high < 127 else 2.0**-20)
    weight = random_weight("mxfp8", low, 128, 1536, scales=(low, high))
    check(implementation, x, weight, tiny=2.0**-126 if low < 11 else 0.0)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("rows", [8, 512])
@pytest.mark.parametrize(
    "form, power, scales", [("mxfp8", -9, (40, 256)), ("mxfp8", 20, (0, 200)), ("nvfp4", 0, (0, 128))]
)
def test_every_scale_times_every_code(form: str, power: int, scales: tuple, rows: int, implementation: str) -> None:
    """x picks inputs one by one, times a power of two that keeps sums and results in the range of float32."""
    weight, kept = every_weight(form)
    inputs, some = 512, slice(*scales)
    if kept.shape[1] < inputs:  # the Mosaic kernel takes no fewer
        weight = MX(*(jnp.tile(a, (1, inputs // kept.shape[1])) for a in (weight.codes, weight.scale)))
        kept = np.tile(kept, (1, inputs // kept.shape[1]))
    x, expected = one_hot(inputs) * jnp.bfloat16(2.0**power), (kept.T * 2.0**power).astype(ml_dtypes.bfloat16)
    for start in range(0, inputs, rows):
        out = np.asarray(compiled(implementation)(x[start : start + rows], weight))
        assert np.array_equal(out[:, some], expected[start : start + rows, some])


def one_hot(inputs: int) -> jax.Array:
    return jnp.eye(inputs, dtype=jnp.bfloat16)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("rows", [8, 512])
def test_every_mxfp8_code_at_every_place(rows: int, implementation: str) -> None:
    """x picks inputs one by one: each element of the result is one weight, exactly."""
    rng = np.random.default_rng(rows)
    codes = np.array([b for b in range(256) if b & 0x7F != 0x7F], np.uint8)[rng.integers(0, 254, (256, 512))]
    scale = rng.integers(120, 134, (256, 16)).astype(np.uint8)
    weight = MX(jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn)), jnp.asarray(scale))
    expected = e4m3_values(codes) * np.repeat(2.0 ** (scale.astype(float) - 127), 32, axis=1)
    for start in range(0, 512, rows):
        out = compiled(implementation)(one_hot(512)[start : start + rows], weight)
        assert np.array_equal(np.asarray(out, np.float64), expected.T[start : start + rows])


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("rows", [8, 512])
@pytest.mark.parametrize("op", ["multiply", "divide"])
def test_every_nvfp4_scale_at_every_place(op: str, rows: int, implementation: str) -> None:
    rng = np.random.default_rng(rows)
    nibbles = rng.integers(0, 16, (256, 512)).astype(np.uint8)
    scale = np.resize(np.arange(127, dtype=np.uint8), (256, 32))  # zero and subnormal ones too
    weight = NV(
        jnp.asarray(nibbles[:, ::2] | nibbles[:, 1::2] << 4), jnp.asarray(scale.view(ml_dtypes.float8_e4m3fn)),
        jnp.float32(0.25), op,
    )  # fmt: skip
    expected = e2m1_values(nibbles) * np.repeat(e4m3_values(scale), 16, axis=1) * (0.25 if op == "multiply" else 4)
    for start in range(0, 512, rows):
        out = compiled(implementation)(one_hot(512)[start : start + rows], weight)
        assert np.array_equal(np.asarray(out, np.float64), expected.T[start : start + rows])


@pytest.mark.parametrize("implementation", [*KERNELS, XLA])
@pytest.mark.parametrize("form", FORMS)
def test_mutants_are_caught(form: str, implementation: str) -> None:
    weight, x = random_weight(form, 2, 128, 1536, plain=True), random_x(2, 8, 1536)
    for mutant in mutants(form):
        with pytest.raises(AssertionError, match="of the elements are wrong"):
            assert_product(compiled(implementation)(x, mutant(weight)), x, weight)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("form", FORMS)
def test_zero_weights_give_zero(form: str, implementation: str) -> None:
    weight, x = random_weight(form, 1, 128, 1536), random_x(1, 8, 1536)
    weight = dataclasses.replace(weight, codes=jnp.zeros_like(weight.codes))
    assert not np.asarray(compiled(implementation)(x, weight), np.float32).any()


@needs_sm90
def test_vmap_of_several_weights_and_of_an_mlp() -> None:
    weights, x = several("mxfp8", 3, (256, 128), 512), random_x(3, 4, 5, 512) * jnp.bfloat16(2.0**-6)
    gate, up, down = (
        random_weight("mxfp8", 4, 512, 512),
        random_weight("mxfp8", 5, 512, 512),
        random_weight("mxfp8", 6, 64, 512),
    )
    outs = jax.jit(jax.vmap(lambda x: quantized_matmuls(x, weights, implementation="mosaic")))(x)
    for out, weight in zip(outs, weights, strict=True):
        assert_product(out, x, weight)
    mlp = functools.partial(quantized_mlp, alpha=1.702, limit=7.0, implementation="mosaic")
    assert_mlp(jax.jit(jax.vmap(lambda x: mlp(x, gate, up, down)))(x), x, gate, up, down)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("form", FORMS)
def test_vmap_and_a_loop(form: str, implementation: str) -> None:
    weight, x = random_weight(form, 3, 256, 512), random_x(3, 4, 5, 512)
    run = functools.partial(quantized_matmul, implementation=implementation)
    out = jax.jit(jax.vmap(run, in_axes=(0, None)))(x, weight)
    assert_product(out, x, weight)
    looped = jax.jit(lambda x, w: jax.lax.map(lambda row: run(row, w), x))(x, weight)
    assert_product(looped, x, weight)
    stack = random_weight(form, 3, 256, 512, lead=(4,))
    each = jax.jit(jax.vmap(run))(x, stack)
    for i in range(4):
        assert_product(each[i], x[i], jax.tree.map(lambda a, i=i: a[i], stack))


@pytest.mark.parametrize("implementation", KERNELS)
def test_a_kernel_has_no_derivative(implementation: str) -> None:
    weight, x = random_weight("mxfp8", 3, 256, 512), random_x(3, 4, 512)
    with pytest.raises(NotImplementedError, match=re.escape("differentiate implementation='xla'")):
        jax.grad(lambda x: quantized_matmul(x, weight, implementation=implementation).astype(jnp.float32).sum())(x)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_kernels_refuse_other_dtypes_in_words(dtype: str, implementation: str) -> None:
    weight, x = random_weight("mxfp8", 3, 256, 512), random_x(3, 4, 512, dtype=dtype)
    with pytest.raises(NotImplementedError, match=f"{implementation}.*got {dtype}"):
        quantized_matmul(x, weight, implementation=implementation)
    assert_product(quantized_matmul(x, weight), x, weight)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("form", FORMS)
def test_the_weight_reaches_the_kernel_without_a_copy(form: str, implementation: str) -> None:
    """Nothing in the compiled program makes an array as large as the weight."""
    weight, x = random_weight(form, 1, 512, 6144), random_x(1, 8, 6144)
    text = compiled(implementation).lower(x, weight).compile().as_text()
    for line in re.findall(r"= (?:u8|f8e4m3fn)\[512,\d+\]\S* (\w[\w-]*)\(", text):
        assert line in ("parameter", "bitcast", "get-tuple-element"), line


@needs_sm90
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [7, 8, 64, 512])
def test_the_change_of_order_is_one_elementwise_kernel(rows: int, form: str) -> None:
    """Rows that fill a tile included; and between the products of an MLP there is nothing."""
    x, weight = random_x(1, rows, 6144), random_weight(form, 1, 512, 6144)
    narrow = random_weight(form, 2, 512, 512)
    for program in (
        compiled("mosaic").lower(x, weight),
        compiled_several("mosaic").lower(x, [weight]),
        compiled_mlp("mosaic").lower(x, weight, weight, narrow),
    ):
        entry = program.compile().as_text().partition("\nENTRY")[2]
        assert len(re.findall(r" fusion\(", entry)) == 1 and not re.search(r" (copy|transpose|pad)\(", entry)
        assert re.search(r" fusion\(.*kind=kLoop", entry)


@needs_sm90
def test_the_weights_of_a_launch_reach_it_without_a_copy() -> None:
    weights, x = several("mxfp8", 1, (256, 512, 512), 6144), random_x(1, 8, 6144)
    down = random_weight("mxfp8", 1, 256, 512)
    for program in (
        compiled_several("mosaic").lower(x, weights),
        compiled_mlp("mosaic").lower(x, weights[1], weights[2], down),
    ):
        text = program.compile().as_text()
        assert len(re.findall(r"custom-call\(.*mosaic_gpu", text)) <= 2
        for line in re.findall(r"= (?:u8|f8e4m3fn)\[\d+,\d+\]\S* (\w[\w-]*)\(", text):
            assert line in ("parameter", "bitcast", "get-tuple-element"), line
