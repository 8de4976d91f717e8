"""Weights in MXFP8 and NVFP4 as the kernels take them: what is in a weight, and the exact dequantisation.

The kernels build bfloat16 from the bits of a code with shifts and masks, which leaves every value too small by a fixed
power of two. Products with powers of two, which bfloat16 knows up to 2^127, mend that:

    MXFP8  code: bits (b & 0x7f) << 4 | (b & 0x80) << 8   = value 2^-120, times 2^112 = value 2^-8
           scale byte s: bits s << 7, or 0x40 for s = 0   = 2^(s - 127)
    NVFP4  code: bits (n & 7) << 6 | (n & 8) << 12        = value 2^-126
           scale: bits b << 4, times 2^127, times 2^111   = scale 2^118

So code times scale is weight 2^-8 in bfloat16, and `LEFT_OVER`, the rest, is in one float32 factor at the end. That is
exact for every NVFP4 weight, subnormal codes and scales included, and for MXFP8 as far as float32 goes: below scale
byte 11 weights round to multiples of 2^-125. The 2^-8 keeps the largest, 448 2^127, finite.
Codes and scales that are NaN are not looked for.
"""

import dataclasses
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _arguments

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
    """A storage format: how many inputs share a scale, how many a byte holds, whether a global scale divides."""

    name: FormatName
    block: int
    per_byte: int
    divides: bool = False

    def bytes(self, inputs: int) -> int:
        """Bytes of codes of so many inputs."""
        return inputs // self.per_byte


MXFP8 = Format("mxfp8", block=32, per_byte=1)
NVFP4 = Format("nvfp4", block=16, per_byte=2)
NVFP4_DIVIDED = dataclasses.replace(NVFP4, divides=True)
FORMATS = {f.name: f for f in (MXFP8, NVFP4)}
LEFT_OVER = 2.0**8  # what the weights of the kernels lack


@dataclasses.dataclass(frozen=True)
class Operands:
    """A weight taken apart for a kernel: codes [..., out, bytes], scale [..., out, blocks], global_scale float32 [...].

    The global scale is as the weight has it (1 for MXFP8): a kernel reads it, and no other is needed to prepare it.
    """

    format: Format
    codes: Any
    scale: Any
    global_scale: Any

    @property
    def out_size(self) -> int:
        return self.codes.shape[-2]

    @property
    def in_size(self) -> int:
        return self.codes.shape[-1] * self.format.per_byte

    @property
    def factor(self) -> jax.Array:
        """float32 [...], by which code times scale is to be multiplied."""
        return jnp.float32(1) / self.global_scale if self.format.divides else self.global_scale


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
    _arguments.check_arrays(**{f"{name}.codes": codes, f"{name}.scale": scale})
    dtypes = (str(codes.dtype), str(scale.dtype))
    known = {("float8_e4m3fn", "uint8"): MXFP8, ("uint8", "float8_e4m3fn"): NVFP4}
    if dtypes not in known:
        raise TypeError(
            f"{name} must have codes and scale of float8_e4m3fn and uint8 (MXFP8) or uint8 and float8_e4m3fn (NVFP4), "
            f"got {dtypes[0]} and {dtypes[1]}."
        )
    form = known[dtypes]
    if codes.ndim < 2 or 0 in codes.shape:
        raise ValueError(
            f"{name}.codes must be [..., out, in / {form.per_byte}] with no empty axis, got {codes.shape}."
        )
    inputs = codes.shape[-1] * form.per_byte
    if scale.shape != (*codes.shape[:-1], inputs // form.block):
        raise ValueError(
            f"{name}.scale must be [..., out, in / {form.block}] for codes [..., out, in / {form.per_byte}], "
            f"got scale {scale.shape} for codes {codes.shape}."
        )
    if inputs % form.block:
        raise ValueError(f"{name} must have an input axis in blocks of {form.block}, got {inputs} inputs.")
    form, global_scale = _global_scale(weight, form, name)
    return Operands(form, codes, scale, global_scale)


def _global_scale(weight: Any, form: Format, name: str) -> tuple[Format, Any]:
    lead = weight.codes.shape[:-2]
    if form is MXFP8:
        return form, jnp.ones(lead, jnp.float32)
    missing = [a for a in ("global_scale", "global_scale_op") if not hasattr(weight, a)]
    if missing:
        raise TypeError(f"{name} is NVFP4 (codes uint8) and lacks {' and '.join(missing)}.")
    scale, op = weight.global_scale, weight.global_scale_op
    _arguments.check_arrays(**{f"{name}.global_scale": scale})
    if scale.shape != lead or scale.dtype != jnp.float32:
        raise ValueError(f"{name}.global_scale must be float32 {lead}, got {scale.dtype} {scale.shape}.")
    if op not in ("multiply", "divide"):
        raise ValueError(f'{name}.global_scale_op must be "multiply" or "divide", got {op!r}.')
    return NVFP4_DIVIDED if op == "divide" else form, scale


def dequantize(operands: Operands, dtype: Any) -> jax.Array:
    """[..., out, in] in `dtype`, computed in float32 and rounded once.

    The global scale of NVFP4 costs one more rounding if it is no power of two.
    """
    values = dequantize_blocks(operands.format, operands.codes, operands.scale)
    if operands.format is MXFP8:
        return values.astype(dtype)
    return (values * jnp.broadcast_to(operands.factor[..., None, None], values.shape)).astype(dtype)


def dequantize_blocks(form: Format, codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Code times scale, float32 [..., out, in], exact; without the global scale of NVFP4."""
    if form is not MXFP8:
        return unpack_e2m1(codes) * _spread(scale.astype(jnp.float32), form.block)
    # Scale byte 0 is 2^-127, subnormal in float32, which XLA may flush: halve the codes instead.
    byte = _spread(scale, form.block)
    power = lax.bitcast_convert_type(jnp.maximum(byte, jnp.uint8(1)).astype(jnp.uint32) << 23, jnp.float32)
    values = codes.astype(jnp.float32)
    return jnp.where(byte == 0, jnp.float32(0.5) * values, values) * power


def unpack_e2m1(codes: jax.Array) -> jax.Array:
    """uint8 [..., n] -> float32 [..., 2n], the low nibble first."""
    nibbles = jnp.stack([codes & jnp.uint8(0xF), codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    exponent, mantissa = ((nibbles >> 1) & 3).astype(jnp.int32), (nibbles & 1).astype(jnp.int32)
    doubled = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    return jnp.where(nibbles >= 8, jnp.float32(-0.5), jnp.float32(0.5)) * doubled.astype(jnp.float32)


def _spread(x: jax.Array, times: int) -> jax.Array:
    return jnp.repeat(x, times, axis=-1)
