"""Weight formats against tables that numpy and ml_dtypes make, and against brute force."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dspark_jax import formats
from dspark_jax.formats import MXFP8Array, NVFP4Array

E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
FINITE = np.isfinite(E4M3.astype(np.float32))
E2M1_VALUES = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
E2M1_VALUES = np.concatenate([E2M1_VALUES, -E2M1_VALUES])
TINY = float(np.finfo(np.float32).tiny)
EXACT = functools.partial(np.testing.assert_array_equal, strict=True)

few = settings(max_examples=25, deadline=None)


def bits(x) -> np.ndarray:
    """float32 as bits, so that -0 is not 0."""
    return np.asarray(x, np.float32).view(np.uint32)


# MXFP8 --------------------------------------------------------------------------------------------------------------


def mxfp8_table(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Element by element in float64: code · 2^(byte - 127)."""
    spread = np.repeat(scale.astype(np.int32), 32, axis=-1)
    return np.ldexp(codes.astype(np.float64), spread - 127)


def every_code_and_scale() -> MXFP8Array:
    """All 254 finite codes in rows of 8 blocks, each row under one of the 255 scale bytes."""
    codes = np.concatenate([E4M3[FINITE], E4M3[:2]])
    return MXFP8Array(
        codes=np.broadcast_to(codes, (255, 256)).copy(),
        scale=np.broadcast_to(np.arange(255, dtype=np.uint8)[:, None], (255, 8)).copy(),
    )


def check_mxfp8(read) -> None:
    """`read` gives every element's float64 value rounded to float32; below 2^-126 it may be flushed to 0."""
    weight = every_code_and_scale()
    exact = mxfp8_table(weight.codes, weight.scale)
    ours = np.asarray(read(jax.tree.map(jnp.asarray, weight)))
    assert ours.dtype == np.float32
    with np.errstate(over="ignore"):
        theirs = exact.astype(np.float32)
    normal = (np.abs(theirs) >= TINY) | (theirs == 0)
    EXACT(bits(ours)[normal], bits(theirs)[normal])
    flushed = ours[~normal]
    assert ((flushed == 0) | (flushed == theirs[~normal])).all()


def test_mxfp8_dequantises_every_code_under_every_scale():
    check_mxfp8(formats.dequantize)
    check_mxfp8(jax.jit(formats.dequantize))


def test_mxfp8_scale_byte_0_is_2_to_the_minus_127():
    """2^-127 is no normal float32: built as one it would be flushed, and 448 · 2^-127 with it."""
    codes = np.full((1, 32), 448, ml_dtypes.float8_e4m3fn)
    weight = MXFP8Array(codes=jnp.asarray(codes), scale=jnp.zeros((1, 1), jnp.uint8))
    EXACT(np.asarray(formats.dequantize(weight)), np.full((1, 32), 448 * 2.0**-127, np.float32))


def test_mxfp8_keeps_negative_zero():
    weight = MXFP8Array(
        codes=jnp.asarray(np.full((1, 32), -0.0, ml_dtypes.float8_e4m3fn)), scale=jnp.full((1, 1), 130, jnp.uint8)
    )
    assert np.signbit(formats.dequantize(weight)).all()


def test_mxfp8_is_exact_in_bf16():
    weight = jax.tree.map(jnp.asarray, every_code_and_scale())
    weight = MXFP8Array(codes=weight.codes[20:240], scale=weight.scale[20:240])
    ours = formats.dequantize(weight, jnp.bfloat16)
    assert ours.dtype == jnp.bfloat16
    EXACT(np.asarray(ours.astype(jnp.float32)), np.asarray(formats.dequantize(weight)))


def _mxfp8_read(exponent, spread=lambda s: jnp.repeat(s, 32, axis=-1)):
    return lambda w: jnp.ldexp(w.codes.astype(jnp.float32), exponent(spread(w.scale).astype(jnp.int32)))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(_mxfp8_read(lambda s: s - 126), id="exponent off by one"),
        pytest.param(_mxfp8_read(lambda s: 127 - s), id="divided"),
        pytest.param(
            _mxfp8_read(lambda s: s - 127, lambda s: jnp.roll(jnp.repeat(s, 32, axis=-1), 1, axis=0)), id="next row"
        ),
        pytest.param(
            lambda w: (
                w.codes.astype(jnp.float32)
                * jax.lax.bitcast_convert_type(jnp.repeat(w.scale, 32, axis=-1).astype(jnp.uint32) << 23, jnp.float32)
            ),
            id="byte 0 as 0",
        ),
    ],
)
def test_mxfp8_mutants(wrong):
    with pytest.raises(AssertionError):
        check_mxfp8(wrong)


def test_mxfp8_scale_belongs_to_its_own_block():
    scale = np.asarray([[100, 127, 140], [130, 120, 110]], np.uint8)
    weight = MXFP8Array(codes=jnp.ones((2, 96), jnp.float8_e4m3fn), scale=jnp.asarray(scale))
    theirs = np.ldexp(1.0, np.repeat(scale.astype(int), 32, axis=1) - 127).astype(np.float32)
    EXACT(np.asarray(formats.dequantize(weight)), theirs)
    neighbour = MXFP8Array(codes=weight.codes, scale=jnp.roll(weight.scale, 1, axis=-1))
    assert (np.asarray(formats.dequantize(neighbour)) != theirs).any()


def brute_force_e4m3(x: np.ndarray) -> np.ndarray:
    """Nearest E4M3 value of |x| <= 448, the even mantissa at a tie."""
    order = np.argsort(E4M3[FINITE].astype(np.float64), kind="stable")
    codes = np.flatnonzero(FINITE)[order].astype(np.uint8)
    codes = codes[codes != 0x80]
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    distance = np.abs(x[..., None] - values)
    tied = distance == distance.min(-1, keepdims=True)
    even = tied & (codes % 2 == 0)
    return values[np.where(even.any(-1), even.argmax(-1), tied.argmax(-1))]


def weights_of(shape: tuple[int, ...], least: float):
    """Weights of either sign and of sizes from `least` to far more than any weight has, and zeros."""
    sizes = st.floats(least, 2.0**40, width=32)
    return arrays.arrays(np.float32, shape, elements=sizes | sizes.map(lambda x: -x) | st.just(0.0))


def check_quantised_mxfp8(quantise, weight: np.ndarray) -> None:
    q = quantise(jnp.asarray(weight))
    assert q.codes.dtype == jnp.float8_e4m3fn and q.scale.dtype == jnp.uint8
    blocks = weight.astype(np.float64).reshape(*weight.shape[:-1], -1, 32)
    amax = np.abs(blocks).max(-1)
    rule = np.ceil(np.log2(np.where(amax == 0, 1, amax) / 448.0))
    # log2 of a power of two is exact in float64; of anything else it is never mistaken for one at these sizes.
    EXACT(np.asarray(q.scale).astype(int), np.where(amax == 0, 0, rule.clip(-127, 127) + 127).astype(int))
    step = np.ldexp(1.0, np.asarray(q.scale).astype(int) - 127)[..., None]
    EXACT(np.asarray(q.codes).astype(np.float64).reshape(blocks.shape), brute_force_e4m3(blocks / step))


@few
@given(weights_of((2, 64), TINY))
def test_mxfp8_quantises_to_the_nearest(weight):
    check_quantised_mxfp8(formats.quantize_mxfp8, weight)


def mxfp8_examples() -> np.ndarray:
    """Ties, powers of two at both sides of the scale's step, an all-zero block, a normal one."""
    rng = np.random.default_rng(0)
    ties = np.concatenate([448 - 16 * np.arange(16), 17 * np.arange(16)])
    edge = np.full(32, 448.0) / 2.0 ** np.arange(32)
    return np.stack(
        [ties, edge, np.nextafter(edge, np.inf, dtype=np.float32), np.zeros(32), rng.normal(size=32)]
    ).astype(np.float32)


def test_mxfp8_quantises_ties_to_even_and_zeros():
    check_quantised_mxfp8(formats.quantize_mxfp8, mxfp8_examples())


def _floor_rule(weight):
    q = formats.quantize_mxfp8(weight)
    return MXFP8Array(codes=(q.codes.astype(jnp.float32) * 2).astype(jnp.float8_e4m3fn), scale=q.scale - jnp.uint8(1))


def _truncated(weight):
    q = formats.quantize_mxfp8(weight)
    value = weight.reshape(*q.scale.shape, 32) * jnp.ldexp(jnp.float32(1), 127 - q.scale.astype(jnp.int32))[..., None]
    low = jnp.nextafter(value, jnp.zeros_like(value)).astype(jnp.float8_e4m3fn)
    return MXFP8Array(codes=low.reshape(weight.shape), scale=q.scale)


@pytest.mark.parametrize("wrong", [_floor_rule, _truncated])
def test_mxfp8_quantising_mutants(wrong):
    with pytest.raises(AssertionError):
        check_quantised_mxfp8(wrong, mxfp8_examples())


@few
@given(
    arrays.arrays(np.uint8, (3, 32), elements=st.sampled_from(np.flatnonzero(FINITE).tolist())), st.integers(40, 200)
)
def test_mxfp8_round_trip(codes, scale):
    """Values that MXFP8 can hold come back, whatever scale the quantiser takes."""
    weight = MXFP8Array(
        codes=jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn)), scale=jnp.full((3, 1), scale, jnp.uint8)
    )
    exact = formats.dequantize(weight)
    EXACT(np.asarray(formats.dequantize(formats.quantize_mxfp8(exact))), np.asarray(exact))


# NVFP4 --------------------------------------------------------------------------------------------------------------

OPS = ("multiply", "divide")


def nvfp4_table(weight: NVFP4Array) -> np.ndarray:
    """Element by element in float64, from the nibbles' definition."""
    packed = np.asarray(weight.codes)
    *lead, rows, half = packed.shape
    scale = np.asarray(weight.scale).astype(np.float64)
    factor = np.asarray(weight.global_scale, np.float64)
    result = np.empty((*lead, rows, 2 * half))
    for index in np.ndindex(*result.shape):
        byte = int(packed[(*index[:-1], index[-1] // 2)])
        code = byte & 15 if index[-1] % 2 == 0 else byte >> 4
        value = E2M1_VALUES[code] * scale[(*index[:-1], index[-1] // 16)]
        g = factor[index[:-2]]
        result[index] = value * g if weight.global_scale_op == "multiply" else value / g
    return result


def nvfp4_examples(op: str) -> NVFP4Array:
    """Every byte, under every finite block scale of a checkpoint, in two matrices of different global scale."""
    rng = np.random.default_rng(4)
    positive = E4M3[FINITE & ~np.signbit(E4M3.astype(np.float32))]
    codes = np.stack([np.arange(256), rng.permutation(256)]).astype(np.uint8).reshape(2, 16, 16)
    scale = np.resize(rng.permutation(positive), (2, 16, 2))
    return NVFP4Array(
        codes=codes, scale=scale, global_scale=np.asarray([641.91046, 0.0017], np.float32), global_scale_op=op
    )


def check_nvfp4(read, op: str) -> None:
    weight = nvfp4_examples(op)
    ours = np.asarray(read(jax.tree.map(jnp.asarray, weight)))
    # E2M1 times E4M3 is exact in float32, so the global scale costs the only rounding.
    EXACT(bits(ours), bits(nvfp4_table(weight).astype(np.float32)))


@pytest.mark.parametrize("op", OPS)
def test_nvfp4_dequantises_every_byte(op):
    check_nvfp4(formats.dequantize, op)
    assert formats.dequantize(jax.tree.map(jnp.asarray, nvfp4_examples(op)), jnp.bfloat16).dtype == jnp.bfloat16


def _changed(**changes):
    def read(weight):
        fields = {name: getattr(weight, name) for name in ("codes", "scale", "global_scale", "global_scale_op")}
        return formats.dequantize(
            NVFP4Array(**fields | {name: change(fields[name]) for name, change in changes.items()})
        )

    return read


NVFP4_MUTANTS = {
    "nibbles swapped": _changed(codes=lambda c: (c << 4) | (c >> 4)),
    "scale of the neighbouring block": _changed(scale=lambda s: jnp.roll(s, 1, axis=-1)),
    "global scale the other way": _changed(global_scale_op=lambda op: OPS[op == "multiply"]),
    "global scale of the other matrix": _changed(global_scale=lambda g: g[::-1]),
    "sign bit dropped": _changed(codes=lambda c: c & 0x77),
    "negative zero dropped": _changed(codes=lambda c: jnp.where((c & 0xF) == 8, c & 0xF0, c)),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", NVFP4_MUTANTS)
def test_nvfp4_mutants(name, op):
    with pytest.raises(AssertionError):
        check_nvfp4(NVFP4_MUTANTS[name], op)


def brute_force_e2m1(x: np.ndarray) -> np.ndarray:
    """Codes of the nearest E2M1 magnitude, the even code at a tie (codes 0 to 7 ascend with their magnitudes)."""
    distance = np.abs(np.abs(x)[..., None] - E2M1_VALUES[:8])
    tied = distance == distance.min(-1, keepdims=True)
    even = tied & (np.arange(8) % 2 == 0)
    return np.where(even.any(-1), even.argmax(-1), tied.argmax(-1))


def check_quantised_nvfp4(quantise, weight: np.ndarray, op: str) -> None:
    """Scales by the rule amax / 6 of a global amax / 2688, codes nearest under the scales that were stored."""
    q = quantise(jnp.asarray(weight), global_scale_op=op)
    assert (q.codes.dtype, q.scale.dtype, q.global_scale.dtype) == (jnp.uint8, jnp.float8_e4m3fn, jnp.float32)
    assert q.shape == weight.shape and q.global_scale.shape == weight.shape[:-2]
    amax = np.abs(weight).max((-2, -1))
    factor = np.asarray(q.global_scale) if op == "multiply" else 1 / np.asarray(q.global_scale, np.float64)
    np.testing.assert_allclose(factor, np.where(amax == 0, 1, amax / np.float64(2688)), rtol=3e-7)
    blocks = weight.reshape(*weight.shape[:-1], -1, 16)
    block_max = np.abs(blocks).max(-1)
    scale = np.asarray(q.scale).astype(np.float64)
    wanted = block_max.astype(np.float64) / 6 / factor[..., None, None]
    # Half a step of E4M3: 2^-4 relative, or half of its smallest value.
    assert (np.abs(scale - wanted) <= np.maximum(wanted * 2.0**-4, 2.0**-10) * (1 + 1e-6)).all()
    step = (scale * factor[..., None, None])[..., None]
    nibbles = np.stack([np.asarray(q.codes) & 15, np.asarray(q.codes) >> 4], -1).reshape(blocks.shape)
    ratio = np.divide(blocks, step, out=np.zeros(blocks.shape), where=step != 0)
    # Ties are exact only as far as float32 division is; within 1e-6 of one, both neighbours are right.
    low, high = (brute_force_e2m1(ratio * (1 + s * 1e-6)) for s in (-1, 1))
    assert (((nibbles & 7) >= low) & ((nibbles & 7) <= high)).all()
    EXACT(nibbles >= 8, np.signbit(blocks))


@few
@given(weights_of((2, 3, 32), 2.0**-100), st.sampled_from(OPS))
def test_nvfp4_quantises_to_the_nearest(weight, op):
    check_quantised_nvfp4(formats.quantize_nvfp4, weight, op)


@pytest.mark.parametrize("op", OPS)
def test_nvfp4_of_a_matrix_too_small_for_a_global_scale_is_zero(op):
    """amax / 2688 is below 2^-126 here: divided by a scale of 0, the codes would be NaN."""
    q = formats.quantize_nvfp4(jnp.full((2, 16), 2.0**-120, jnp.float32), global_scale_op=op)
    EXACT(np.asarray(formats.dequantize(q)), np.zeros((2, 16), np.float32))


def nvfp4_ties() -> np.ndarray:
    """One matrix whose scales come out as 1: every tie of E2M1, both signs, -0."""
    ties = np.asarray([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    return np.stack([np.concatenate([ties, -ties]), np.concatenate([[2688, -0.0], np.linspace(0, 2600, 14)])])[
        None
    ].astype(np.float32)


@pytest.mark.parametrize("op", OPS)
def test_nvfp4_quantises_ties_to_even(op):
    weight = nvfp4_ties()
    check_quantised_nvfp4(formats.quantize_nvfp4, weight, op)
    q = formats.quantize_nvfp4(jnp.asarray(weight), global_scale_op=op)
    nibbles = np.stack([np.asarray(q.codes) & 15, np.asarray(q.codes) >> 4], -1).reshape(2, 16)
    EXACT(nibbles[0, :8], np.asarray([0, 2, 2, 4, 4, 6, 6, 7], np.uint8))


@pytest.mark.parametrize("op", OPS)
def test_nvfp4_round_trip(op):
    """What NVFP4 holds comes back when each matrix uses its largest code under its largest scale."""
    rng = np.random.default_rng(7)
    codes = rng.integers(0, 256, (2, 4, 16)).astype(np.uint8)
    codes[:, :, ::8] |= 0x07
    scale = rng.choice([448, 224, 56, 7, 1], (2, 4, 2)).astype(ml_dtypes.float8_e4m3fn)
    scale[:, 0, 0] = 448
    g = np.asarray([2.0**-7, 2.0**3], np.float32)
    weight = NVFP4Array(
        codes=jnp.asarray(codes), scale=jnp.asarray(scale), global_scale=jnp.asarray(g), global_scale_op=op
    )
    exact = formats.dequantize(weight)
    again = formats.quantize_nvfp4(exact, global_scale_op=op)
    EXACT(bits(formats.dequantize(again)), bits(exact))


def _high_first(weight, *, global_scale_op):
    q = formats.quantize_nvfp4(weight, global_scale_op=global_scale_op)
    return NVFP4Array(
        codes=(q.codes << 4) | (q.codes >> 4),
        scale=q.scale,
        global_scale=q.global_scale,
        global_scale_op=global_scale_op,
    )


def _inverse(weight, *, global_scale_op):
    q = formats.quantize_nvfp4(weight, global_scale_op=global_scale_op)
    return NVFP4Array(codes=q.codes, scale=q.scale, global_scale=1 / q.global_scale, global_scale_op=global_scale_op)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("wrong", [_high_first, _inverse])
def test_nvfp4_quantising_mutants(wrong, op):
    with pytest.raises(AssertionError):
        check_quantised_nvfp4(wrong, 8 * nvfp4_ties(), op)


@pytest.mark.parametrize("quantise, block", [(formats.quantize_mxfp8, 32), (formats.quantize_nvfp4, 16)])
@pytest.mark.parametrize("shape", [(4, 40), (64,)])
def test_input_axis_must_be_whole_blocks(quantise, block, shape):
    with pytest.raises(ValueError, match=rf"multiple of {block}, found shape \({shape[0]},"):
        quantise(jnp.zeros(shape, jnp.float32))


# Uses ---------------------------------------------------------------------------------------------------------------


def stacks() -> dict[str, formats.Weight]:
    w = jax.random.normal(jax.random.key(3), (5, 6, 32), jnp.float32)
    return {
        "f32": w,
        "bf16": w.astype(jnp.bfloat16),
        "mxfp8": formats.quantize_mxfp8(w),
        **{f"nvfp4/{op}": formats.quantize_nvfp4(w, global_scale_op=op) for op in OPS},
    }


# 32 products of size 1 in float32: 32 · 2^-24 and their sum's own roundings.
LINEAR_F32 = 1e-5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", stacks())
def test_linear(name, dtype):
    weight = jax.tree.map(lambda a: a[1], stacks()[name])
    x = jax.random.normal(jax.random.key(9), (2, 3, 32), jnp.float32).astype(dtype)
    y = formats.linear(x, weight)
    assert y.dtype == dtype and y.shape == (2, 3, 6)
    # A plain weight is rounded to x's dtype; stored formats enter the float32 sums exact.
    w64 = np.asarray(formats.dequantize(weight, dtype if name in ("f32", "bf16") else jnp.float32)).astype(np.float64)
    exact = np.asarray(x).astype(np.float64) @ w64.T
    # bf16: float32 sums rounded once, to half a step of 2^-8.
    atol = LINEAR_F32 if dtype == jnp.float32 else LINEAR_F32 + 2.0**-8 * np.abs(exact)
    assert (np.abs(np.asarray(y).astype(np.float64) - exact) <= atol).all()
    assert (np.abs(np.asarray(x).astype(np.float64) @ w64[::-1].T - exact) > atol).any()


@few
@given(st.sampled_from(list(itertools.product(stacks(), (jnp.float32, jnp.bfloat16)))))
def test_dequantise_rounds_once(case):
    name, dtype = case
    weight = stacks()[name]
    EXACT(
        np.asarray(formats.dequantize(weight, dtype).astype(jnp.float32)),
        np.asarray(formats.dequantize(weight)).astype(dtype).astype(np.float32),
    )
