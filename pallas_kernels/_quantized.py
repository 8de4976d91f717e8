"""Weights in MXFP8 and NVFP4 as the kernels take them: what is in a weight, and the exact dequantisation.

The kernels build bfloat16 from the bits of a code with shifts and masks, which leaves every value too small by a fixed
power of two; a scale gets another one, and what is left over goes into one float32 factor at the end:

    MXFP8  code: bits (b & 0x7f) << 4 | (b & 0x80) << 8   = value 2^-120
           scale byte s: exponent field s + 60            = 2^(s - 127) 2^60,   factor 2^60
    NVFP4  code: bits (n & 7) << 6 | (n & 8) << 12        = value 2^-126
           scale: bits b << 4, times 2^127, times 2^111   = scale 2^118,        factor 2^8 · global scale

The product of code and scale is exact in bfloat16, subnormal codes and scales included, for every NVFP4 weight and for
MXFP8 scale bytes from 63 to 194. Below 63, weights round to a multiple of 2^-73; above 194 (weights beyond 2^59) the
scale is taken as infinity, and the result is inf or NaN. Codes and scales that are NaN are not looked for.
"""

import dataclasses
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

FormatName = Literal["mxfp8", "nvfp4"]


@runtime_checkable
class QuantizedWeight(Protocol):
    """A weight [..., out, in] in blocks along `in`, MXFP8 or NVFP4 as told apart by the dtype of `codes`.

    MXFP8: codes float8_e4m3fn [..., out, in], scale uint8 [..., out, in / 32] (E8M0 exponents).
    NVFP4: codes uint8 [..., out, in / 2] (two E2M1 codes a byte, the even input in the low nibble), scale float8_e4m3fn
    [..., out, in / 16], and two more attributes: global_scale float32 [...] and global_scale_op, "multiply" or
    "divide".
    """

    @property
    def codes(self) -> Any: ...
    @property
    def scale(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Format:
    """A storage format: how many inputs share a scale, how many a byte holds, and the kernels' left-over factor."""

    name: FormatName
    block: int
    per_byte: int
    factor: float

    def bytes(self, inputs: int) -> int:
        """Bytes of codes of so many inputs."""
        return inputs // self.per_byte


MXFP8 = Format("mxfp8", block=32, per_byte=1, factor=2.0**60)
NVFP4 = Format("nvfp4", block=16, per_byte=2, factor=2.0**8)
FORMATS = {f.name: f for f in (MXFP8, NVFP4)}


@dataclasses.dataclass(frozen=True)
class Operands:
    """A weight taken apart for a kernel: codes [..., out, bytes], scale [..., out, blocks], factor float32 [...].

    The factor makes a kernel's accumulator the result: the format's left-over power of two, and the global scale.
    """

    format: Format
    codes: Any
    scale: Any
    factor: Any

    @property
    def out_size(self) -> int:
        return self.codes.shape[-2]

    @property
    def in_size(self) -> int:
        return self.codes.shape[-1] * self.format.per_byte


def take_apart(weight: Any, name: str = "weight") -> Operands:
    """The operands of `weight`, with a leading axis or more if it has some.

    Raises:
      TypeError, ValueError: `weight` is neither MXFP8 nor NVFP4, or its parts do not fit together.
    """
    if not isinstance(weight, QuantizedWeight):
        raise TypeError(
            f"{name} must have the attributes codes and scale (MXFP8 or NVFP4), got {type(weight).__name__}; "
            "multiply a plain array with jnp.einsum."
        )
    codes, scale = weight.codes, weight.scale
    dtypes = (str(codes.dtype), str(scale.dtype))
    known = {("float8_e4m3fn", "uint8"): MXFP8, ("uint8", "float8_e4m3fn"): NVFP4}
    if dtypes not in known:
        raise TypeError(
            f"{name} must have codes and scale of float8_e4m3fn and uint8 (MXFP8) or uint8 and float8_e4m3fn (NVFP4), "
            f"got {dtypes[0]} and {dtypes[1]}."
        )
    form = known[dtypes]
    inputs = codes.shape[-1] * form.per_byte if codes.ndim >= 2 else 0
    if codes.ndim < 2 or 0 in codes.shape or scale.shape != (*codes.shape[:-1], inputs // form.block):
        raise ValueError(
            f"{name}.scale must be [..., out, in / {form.block}] for codes [..., out, in / {form.per_byte}], "
            f"got scale {scale.shape} for codes {codes.shape}."
        )
    if inputs % form.block:
        raise ValueError(f"{name} must have an input axis in blocks of {form.block}, got {inputs} inputs.")
    return Operands(form, codes, scale, _factor(weight, form, name))


def _factor(weight: Any, form: Format, name: str) -> Any:
    lead = weight.codes.shape[:-2]
    if form is MXFP8:
        return jnp.full(lead, form.factor, jnp.float32)
    missing = [a for a in ("global_scale", "global_scale_op") if not hasattr(weight, a)]
    if missing:
        raise TypeError(f"{name} is NVFP4 (codes uint8) and lacks {' and '.join(missing)}.")
    scale, op = weight.global_scale, weight.global_scale_op
    if scale.shape != lead or scale.dtype != jnp.float32:
        raise ValueError(f"{name}.global_scale must be float32 {lead}, got {scale.dtype} {scale.shape}.")
    if op not in ("multiply", "divide"):
        raise ValueError(f'{name}.global_scale_op must be "multiply" or "divide", got {op!r}.')
    power = jnp.full(lead, form.factor, jnp.float32)
    return power * scale if op == "multiply" else power / scale


def dequantize(operands: Operands, dtype: Any) -> jax.Array:
    """[..., out, in] in `dtype`, computed in float32 and rounded once.

    The factor beside the format's own (the global scale of NVFP4) costs one more rounding if it is no power of two.
    """
    form, codes = operands.format, operands.codes
    if form is MXFP8:
        # Scale byte 0 is 2^-127, subnormal in float32, which XLA may flush: halve the codes instead.
        byte = _spread(operands.scale, form.block)
        power = lax.bitcast_convert_type(jnp.maximum(byte, jnp.uint8(1)).astype(jnp.uint32) << 23, jnp.float32)
        values = codes.astype(jnp.float32)
        return (jnp.where(byte == 0, jnp.float32(0.5) * values, values) * power).astype(dtype)
    values = unpack_e2m1(codes) * _spread(operands.scale.astype(jnp.float32), form.block)
    factor = (operands.factor * jnp.float32(1 / form.factor))[..., None, None]
    return (values * jnp.broadcast_to(factor, values.shape)).astype(dtype)


def unpack_e2m1(codes: jax.Array) -> jax.Array:
    """uint8 [..., n] -> float32 [..., 2n], the low nibble first."""
    nibbles = jnp.stack([codes & jnp.uint8(0xF), codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    exponent, mantissa = ((nibbles >> 1) & 3).astype(jnp.int32), (nibbles & 1).astype(jnp.int32)
    doubled = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    return jnp.where(nibbles >= 8, jnp.float32(-0.5), jnp.float32(0.5)) * doubled.astype(jnp.float32)


def _spread(x: jax.Array, times: int) -> jax.Array:
    return jnp.repeat(x, times, axis=-1)
