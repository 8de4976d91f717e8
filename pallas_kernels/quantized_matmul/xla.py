"""`quantized_matmul` for any device: dequantise, then one matrix product. XLA writes the dequantised weight out."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._quantized import Operands, dequantize


def quantized_matmul_xla(x: jax.Array, weight: Operands) -> jax.Array:
    """x [rows, in] -> [rows, out] in x's dtype."""
    # Codes and block scales make exact bfloat16, the global scale does not: it multiplies the float32 sums. Float16
    # does not hold every MXFP8 weight.
    wide = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
    precision = None if wide == jnp.bfloat16 else lax.Precision.HIGHEST
    exact = Operands(weight.format, weight.codes, weight.scale, jnp.float32(weight.format.factor))
    sums = lax.dot_general(
        x.astype(wide), dequantize(exact, wide), (((1,), (1,)), ((), ())), precision, jnp.float32
    )  # fmt: skip
    return (sums * left_over(weight)).astype(x.dtype)


def left_over(weight: Operands) -> Any:
    """The factor beside codes and block scales, [1, 1] for broadcasting."""
    return (weight.factor * jnp.float32(1 / weight.format.factor)).reshape(1, 1)
