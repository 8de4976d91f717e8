"""`quantized_matmul` for any device: dequantise, then one matrix product. XLA writes the dequantised weight out."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._quantized import Operands, dequantize_blocks


def quantized_matmul_xla(x: jax.Array, weight: Operands) -> jax.Array:
    """x [rows, in] -> [rows, out] in x's dtype."""
    # Codes and block scales make exact bfloat16, the global scale does not: it multiplies the float32 sums. Float16
    # does not hold every MXFP8 weight.
    wide = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
    precision = None if wide == jnp.bfloat16 else lax.Precision.HIGHEST
    exact = dequantize_blocks(weight.format, weight.codes, weight.scale).astype(wide)
    sums = lax.dot_general(x.astype(wide), exact, (((1,), (1,)), ((), ())), precision, jnp.float32)
    return (sums * weight.factor.reshape(1, 1)).astype(x.dtype)
