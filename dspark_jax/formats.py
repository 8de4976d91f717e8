"""Weights in the checkpoint's own formats, as pytrees: `MXFP8Array`, `NVFP4Array`, or a plain array.

Every weight is stored [..., out, in], blocks run along the input axis, and `dequantize` is exact in float32 except for
the one rounding that an arbitrary NVFP4 global scale costs. Layer code calls `linear` on any of them
and does not know which it has.

Sources: OCP Microscaling Formats (MX) v1.0 for MXFP8; NVIDIA's NVFP4 as the published MiniMax checkpoints use it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from dspark_jax.kernels import first_that_serves
from pallas_kernels import quantized_matmul, quantized_matmuls

MXFP8_BLOCK = 32
NVFP4_BLOCK = 16
# Magnitudes of the eight E2M1 codes; bit 3 is the sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E4M3_MAX = 448.0
_E2M1_MAX = 6.0

GlobalScale = Literal["multiply", "divide"]
# A leaf of a pytree: an array, or what stands for one while the tree is abstract (a shape, a sharding).
Leaf = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8Array:
    """Element = codes · 2^(scale - 127), one scale for 32 consecutive inputs.

    Attributes:
      codes: float8_e4m3fn [..., out, in].
      scale: uint8 [..., out, in / 32], E8M0 exponents. 255 (NaN) is refused by the converter.
    """

    codes: Leaf
    scale: Leaf

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class NVFP4Array:
    """Element = codes · scale · global_scale, or codes · scale / global_scale, one scale for 16 consecutive inputs.

    Attributes:
      codes: uint8 [..., out, in / 2], two E2M1 codes a byte, the even input in the low nibble.
      scale: float8_e4m3fn [..., out, in / 16].
      global_scale: float32 [...] (no axis for out and in).
      global_scale_op: "multiply" (ModelOpt) or "divide" (compressed-tensors).
    """

    codes: Leaf
    scale: Leaf
    global_scale: Leaf
    global_scale_op: GlobalScale = dataclasses.field(metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])


Weight = jax.Array | MXFP8Array | NVFP4Array


def dequantize(weight: Weight, dtype=jnp.float32) -> Float[Array, "*shape"]:
    """The weight [..., out, in] as a plain array of `dtype`, computed in float32 and rounded once."""
    if isinstance(weight, MXFP8Array):
        codes, scale = weight.codes.astype(jnp.float32), weight.scale
        # Scale byte 0 is 2^-127, subnormal in float32 and flushed by XLA: scale by 2^-126 and halve the codes instead.
        power = lax.bitcast_convert_type(jnp.maximum(scale, jnp.uint8(1)).astype(jnp.uint32) << 23, jnp.float32)
        power = _repeat(power, MXFP8_BLOCK)
        return (jnp.where(_repeat(scale, MXFP8_BLOCK) == 0, 0.5 * codes, codes) * power).astype(dtype)
    if isinstance(weight, NVFP4Array):
        nibbles = jnp.stack([weight.codes & 0xF, weight.codes >> 4], axis=-1).reshape(weight.shape)
        magnitude = jnp.asarray(_E2M1, jnp.float32)[nibbles & 7]
        values = jnp.where(nibbles >= 8, -magnitude, magnitude) * _repeat(weight.scale.astype(jnp.float32), NVFP4_BLOCK)
        factor = weight.global_scale[..., None, None]
        return _scaled(values, factor, weight.global_scale_op).astype(dtype)
    return weight.astype(dtype)


def _scaled(values: jax.Array, factor: jax.Array, op: GlobalScale) -> jax.Array:
    factor = jnp.broadcast_to(factor, values.shape)
    return values * factor if op == "multiply" else values / factor


def _repeat(x: jax.Array, times: int) -> jax.Array:
    return jnp.repeat(x, times, axis=-1)


def precision(dtype) -> lax.Precision | None:
    """Float32 means float32: without this a GPU would round matmul inputs to TF32."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def linear(
    x: Float[Array, "*batch I"], weight: Weight, *, implementation: str | None = None
) -> Float[Array, "*batch O"]:
    """y = x W^T in x's dtype with float32 accumulation; `weight` is [O, I] in any format.

    `implementation` is that of `pallas_kernels.quantized_matmul`, which a plain weight does not need.
    """
    if isinstance(weight, MXFP8Array | NVFP4Array):
        return quantized_matmul(x, weight, implementation=implementation)
    return jnp.einsum("...i,oi->...o", x, dequantize(weight, x.dtype), precision=precision(x.dtype))


def merges(implementation: str | None, *weights: Weight) -> bool:
    """Whether a kernel may serve these weights together: MXFP8 or NVFP4, and not told to go through another."""
    quantized = all(isinstance(weight, MXFP8Array | NVFP4Array) for weight in weights)
    return quantized and implementation in (None, "mosaic")


def linears(
    x: Float[Array, "*batch I"], weights: Sequence[Weight], *, implementation: str | None = None
) -> tuple[Float[Array, "*batch _"], ...]:
    """`linear` of the same x with each weight, in one launch where `pallas_kernels.quantized_matmuls` can serve."""
    quantized: Any = weights

    def run(together: bool) -> tuple[Array, ...]:
        if together:  # not weights of mixed formats, or not in whole tiles, or on another device
            return quantized_matmuls(x, quantized, implementation="mosaic")
        return tuple(linear(x, weight, implementation=implementation) for weight in weights)

    several = len(weights) > 1 and merges(implementation, *weights)
    return first_that_serves((True, False) if several else (False,), run)


def quantize_mxfp8(weight: Float[Array, "*shape"]) -> MXFP8Array:
    """Nearest-even MXFP8 of [..., out, in]; the scale exponent of a block is ceil(log2(amax / 448)).

    Raises:
      ValueError: the input axis is not a multiple of 32.
    """
    blocks = _blocks(weight, MXFP8_BLOCK, "MXFP8")
    amax = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    # 448 = 7/8 · 2^9, so amax / 448 = (m / (7/8)) · 2^(e - 9) without a quotient that XLA might flush to zero; its
    # ceil(log2) is e - 9, and one more where m > 7/8.
    mantissa, exponent = jnp.frexp(amax)
    power = exponent - 9 + (mantissa > 0.875).astype(exponent.dtype)
    power = jnp.where(amax == 0, -127, jnp.clip(power, -127, 127))
    # ldexp in two halves, since 2^127 and 2^-127 are at and beyond the edge of float32.
    half = power // 2
    codes = jnp.ldexp(
        jnp.ldexp(blocks, jnp.broadcast_to(-half, blocks.shape)), jnp.broadcast_to(half - power, blocks.shape)
    )
    codes = _rounded(codes.reshape(weight.shape).astype(jnp.float8_e4m3fn))
    return MXFP8Array(codes=codes, scale=(power[..., 0] + 127).astype(jnp.uint8))


def quantize_nvfp4(weight: Float[Array, "*shape"], *, global_scale_op: GlobalScale = "multiply") -> NVFP4Array:
    """Nearest-even NVFP4 of [..., out, in]; each matrix gets a global scale of its own from amax / (448 · 6).

    Raises:
      ValueError: the input axis is not a multiple of 16.
    """
    blocks = _blocks(weight, NVFP4_BLOCK, "NVFP4")
    amax = jnp.max(jnp.abs(blocks), axis=(-3, -2, -1))
    factor = amax / (_E4M3_MAX * _E2M1_MAX)
    factor = jnp.where(factor == 0, 1.0, factor)
    block_max = jnp.max(jnp.abs(blocks), axis=-1)
    scale = block_max / _E2M1_MAX / jnp.broadcast_to(factor[..., None, None], block_max.shape)
    scale = _rounded(scale.astype(jnp.float8_e4m3fn))
    step = scale.astype(jnp.float32) * jnp.broadcast_to(factor[..., None, None], block_max.shape)
    step = jnp.broadcast_to(step[..., None], blocks.shape)
    magnitude = jnp.where(step == 0, 0.0, jnp.abs(blocks) / jnp.where(step == 0, 1.0, step))
    # Rounding to E2M1: the value steps by 1/2 up to 2, by 1 up to 4, by 2 up to 6; `round` is half to even in each.
    high = jnp.where(magnitude < 4, 2 + jnp.round(magnitude), 4 + jnp.round(jnp.minimum(magnitude, _E2M1_MAX) / 2))
    codes = jnp.where(magnitude < 2, jnp.round(2 * magnitude), high)
    nibbles = codes.astype(jnp.uint8) | (jnp.signbit(blocks).astype(jnp.uint8) << 3)
    pairs = nibbles.reshape(*weight.shape[:-1], weight.shape[-1] // 2, 2)
    return NVFP4Array(
        codes=pairs[..., 0] | (pairs[..., 1] << 4),
        scale=scale,
        global_scale=factor if global_scale_op == "multiply" else 1 / factor,
        global_scale_op=global_scale_op,
    )


def _rounded(x: jax.Array) -> jax.Array:
    """`x`, which XLA must not replace by the wider value that it was rounded from, as it may in f32 -> f8 -> f32."""
    return lax.optimization_barrier(x)


def _blocks(weight: jax.Array, size: int, name: str) -> jax.Array:
    if weight.ndim < 2 or weight.shape[-1] % size:
        raise ValueError(f"{name} needs [..., out, in] with in a multiple of {size}, found shape {weight.shape}")
    return weight.astype(jnp.float32).reshape(*weight.shape[:-1], weight.shape[-1] // size, size)
