"""Weights in MXFP8 and NVFP4 from raw bits, their values in float64 by definition, the comparison with a product."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

BLOCK = dict(mxfp8=32, nvfp4=16)
# One rounding of the result, relative to it; and of float32 sums, relative to the sum of magnitudes. A sum of n terms
# in float32 has at most n roundings of 2^-24 each, and matrix units truncate: 2^-14 holds for 8,192 inputs with room.
ROUNDING = dict(bfloat16=2.0**-8, float16=2.0**-11, float32=2.0**-23)
SUM_ROUNDING = 2.0**-14
# Relative norm of an error. The last rounding to bfloat16 makes 0.8 to 0.9 2^-9; gate, up or inner values between two
# bfloat16 that go the other way, as float32 sums do, add little. With one rounding less it is 1.2 to 1.7 2^-9.
MLP_ERROR = 1.1 * 2.0**-9


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MX:
    """The least that `quantized_matmul` needs of an MXFP8 weight."""

    codes: Any
    scale: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NV:
    """The least that it needs of an NVFP4 weight."""

    codes: Any
    scale: Any
    global_scale: Any
    global_scale_op: str = dataclasses.field(metadata=dict(static=True), default="multiply")


def e4m3_values(bits: np.ndarray) -> np.ndarray:
    """Sign, 4 bits of exponent (bias 7), 3 of mantissa; exponent 0 is subnormal."""
    sign, exponent, mantissa = bits >> 7, (bits >> 3).astype(np.int64) & 15, (bits & 7) / 8.0
    magnitude = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7.0))
    return np.where(sign == 1, -magnitude, magnitude)


def e2m1_values(nibbles: np.ndarray) -> np.ndarray:
    """Sign, 2 bits of exponent (bias 1), 1 of mantissa; exponent 0 is subnormal."""
    exponent, mantissa = (nibbles >> 1).astype(np.int64) & 3, (nibbles & 1) / 2.0
    magnitude = np.where(exponent == 0, mantissa, (1 + mantissa) * 2.0 ** (exponent - 1.0))
    return np.where(nibbles & 8, -magnitude, magnitude)


E4M3, E2M1 = e4m3_values(np.arange(256)), e2m1_values(np.arange(16))


def values(weight: Any) -> np.ndarray:
    """The weight [..., out, in] in float64."""
    codes, scale = np.asarray(weight.codes), np.asarray(weight.scale)
    if isinstance(weight, MX):
        power = 2.0 ** (scale.astype(np.float64) - 127)
        return E4M3[codes.view(np.uint8)] * np.repeat(power, 32, axis=-1)
    pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    product = E2M1[pairs] * np.repeat(E4M3[scale.view(np.uint8)], 16, axis=-1)
    factor = np.asarray(weight.global_scale, np.float64)[..., None, None]
    return product * factor if weight.global_scale_op == "multiply" else product / factor


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], *, negative: bool = True) -> np.ndarray:
    """Every E4M3 code but NaN, those below 2^-6 (subnormal) and zero included."""
    bits = rng.integers(0, 127, shape, np.uint8)
    return bits | (rng.integers(0, 2, shape, np.uint8) << 7) if negative else bits


def random_weight(
    form: str,
    seed: int,
    out: int,
    inputs: int,
    *,
    lead: tuple[int, ...] = (),
    scales: tuple[int, int] = (112, 122),
    op: str = "multiply",
    plain: bool = False,
) -> Any:
    """Random codes and scales. One block in eight is zero, one in eight has subnormal codes; `plain`: none of that.

    `scales` are the least and the largest MXFP8 scale byte; NVFP4 scales are any that are not negative.
    """
    rng = np.random.default_rng(seed)
    blocks = (*lead, out, inputs // BLOCK[form])
    kind = rng.integers(2 if plain else 0, 16, blocks)
    if form == "mxfp8":
        codes = random_bits(rng, (*lead, out, inputs))
        each = np.repeat(kind, 32, axis=-1)
        codes = np.where(each < 2, codes & 0x80, np.where(each < 4, codes & 0x87, codes)) if not plain else codes
        scale = rng.integers(scales[0], scales[1] + 1, blocks).astype(np.uint8)
        return MX(jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn)), jnp.asarray(scale))
    codes = rng.integers(0, 256, (*lead, out, inputs // 2)).astype(np.uint8)
    scale = random_bits(rng, blocks, negative=False)
    if not plain:
        codes = np.where(np.repeat(kind, 8, axis=-1) < 2, codes & 0x88, codes)
        scale = np.where(kind < 4, scale & 7, scale)  # zero and subnormal scales
    factor = rng.uniform(0.005, 0.02, lead).astype(np.float32)
    factor = factor if op == "multiply" else (1 / factor).astype(np.float32)
    return NV(jnp.asarray(codes), jnp.asarray(scale.view(ml_dtypes.float8_e4m3fn)), jnp.asarray(factor), op)


def every_weight(form: str) -> tuple[Any, np.ndarray]:
    """A weight with every code in each row and every block scale in a row; its values as the kernels keep them.

    MXFP8 [256, 256] (the last row as the one before), NVFP4 [128, 512].
    """
    if form == "mxfp8":
        codes = np.resize([b for b in range(256) if b & 0x7F != 0x7F], 256).astype(np.uint8)
        scale = np.repeat(np.minimum(np.arange(256), 254).astype(np.uint8)[:, None], 8, axis=1)
        weight = MX(jnp.asarray(np.tile(codes, (256, 1)).view(ml_dtypes.float8_e4m3fn)), jnp.asarray(scale))
        # bfloat16 2^-8 times too small: a multiple of 2^-125 remains.
        return weight, (values(weight) * 2.0**-8).astype(ml_dtypes.bfloat16).astype(np.float64) * 2.0**8
    codes = np.tile(np.arange(256, dtype=np.uint8), (128, 1))
    scale = np.repeat(np.minimum(np.arange(128), 126).astype(np.uint8)[:, None], 32, axis=1)
    weight = NV(jnp.asarray(codes), jnp.asarray(scale.view(ml_dtypes.float8_e4m3fn)), jnp.float32(0.5), "divide")
    return weight, values(weight)


def random_x(seed: int, *shape: int, dtype: str = "bfloat16") -> jax.Array:
    x = np.random.default_rng(seed + 1_000_003).standard_normal(shape, np.float32)
    return jnp.asarray(x).astype(dtype)


def assert_product(actual: Any, x: Any, weight: Any, *, tiny: float = 0.0) -> None:
    """`actual` is x W^T, rounded once to x's dtype from float32 sums. `tiny` is an error that each weight may have."""
    wide, exact = np.asarray(x, np.float64), values(weight)
    assert actual.dtype == x.dtype
    assert actual.shape == (*x.shape[:-1], exact.shape[-2])
    expected = wide @ exact.T
    allowed = ROUNDING[str(x.dtype)] * np.abs(expected) + SUM_ROUNDING * (np.abs(wide) @ np.abs(exact).T)
    allowed = allowed + tiny * np.abs(wide).sum(-1, keepdims=True)
    error = np.abs(np.asarray(actual, np.float64) - expected)
    worst = float(np.max(error - allowed))
    assert worst <= 0, f"{np.mean(error > allowed):.2%} of the elements are wrong, one by {error.max():.3g}"


def swiglu(gate: np.ndarray, up: np.ndarray, alpha: float = 1.702, limit: float = 7.0) -> np.ndarray:
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate / (1 + np.exp(-alpha * gate)) * (up + 1)


def mlp_oracle(x: Any, gate: Any, up: Any, down: Any, rounded: str = "gate, up, inner") -> np.ndarray:
    """down(swiglu(gate(x), up(x))) in float64, with what is named rounded to bfloat16."""

    def maybe(name: str, a: np.ndarray) -> np.ndarray:
        return a.astype(ml_dtypes.bfloat16).astype(np.float64) if name in rounded else a

    g, u = (maybe(name, np.asarray(x, np.float64) @ values(w).T) for name, w in (("gate", gate), ("up", up)))
    return maybe("inner", swiglu(g, u)) @ values(down).T


def assert_mlp(actual: Any, x: Any, gate: Any, up: Any, down: Any) -> None:
    """`actual` is down(swiglu(gate(x), up(x))), gate, up and swiglu in float64 and each rounded to bfloat16.

    A product that lies between two bfloat16 may round to either, and so may what follows: compared by norm.
    """
    assert x.dtype == actual.dtype == jnp.bfloat16
    expected = mlp_oracle(x, gate, up, down)
    assert actual.shape == expected.shape
    error = np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected)
    assert error <= MLP_ERROR, f"{error:.2e} is too far"


def with_next_scale(weight: Any) -> Any:
    """Mutant: each block has the scale of the block after it."""
    return dataclasses.replace(weight, scale=jnp.roll(weight.scale.view(jnp.uint8), -1, -1).view(weight.scale.dtype))


def with_swapped_nibbles(weight: NV) -> NV:
    """Mutant: the even input is in the high nibble."""
    return dataclasses.replace(weight, codes=(weight.codes >> 4) | (weight.codes << 4))


def with_other_op(weight: NV) -> NV:
    """Mutant: the global scale the wrong way."""
    return dataclasses.replace(weight, global_scale_op="divide" if weight.global_scale_op == "multiply" else "multiply")


def mutants(form: str) -> list:
    return [with_next_scale] + ([with_swapped_nibbles, with_other_op] if form == "nvfp4" else [])
