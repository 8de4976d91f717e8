"""The public function `quantized_matmul`."""

import math
from typing import Any

from jaxtyping import Array, Float

from pallas_kernels import _arguments, _dispatch, _quantized
from pallas_kernels._quantized import QuantizedWeight
from pallas_kernels.quantized_matmul.tuning import choose_order
from pallas_kernels.quantized_matmul.xla import quantized_matmul_xla


def quantized_matmul(
    x: Float[Array, "*batch I"], weight: QuantizedWeight, *, implementation: str | None = None
) -> Float[Array, "*batch O"]:
    """x W^T with float32 sums, for a weight [O, I] in MXFP8 or NVFP4 that is read in its own format.

    Args:
      x: bfloat16, float16 or float32. The kernels take bfloat16; the others go through XLA.
      weight: an object with `codes` and `scale`, and for NVFP4 `global_scale` and `global_scale_op`:
        MXFP8: codes float8_e4m3fn [O, I], scale uint8 [O, I / 32], element = codes · 2^(scale - 127);
        NVFP4: codes uint8 [O, I / 2], the even input in the low nibble, scale float8_e4m3fn [O, I / 16], global_scale
        float32 scalar, element = codes · scale, "multiply"ed or "divide"d (global_scale_op) by global_scale.
        What is not looked for: NaN codes, an MXFP8 scale of 255 and an NVFP4 scale that is negative or NaN.
      implementation: None for the fastest one for this device and these shapes, or "mosaic", "triton", "xla".

    The kernels make each weight exact in bfloat16 and apply the global scale to the float32 sums. Exception: an MXFP8
    block whose scale byte is below 11 (2^-116) rounds to multiples of 2^-125, where float32 ends too.

    Returns:
      [..., O] in x's dtype.

    Raises:
      TypeError, ValueError: an argument does not fit.
      NotImplementedError: the named implementation cannot serve this call; the message says why. Or the call is
        differentiated through a kernel: only "xla" has a derivative.
    """
    operands = _quantized.take_apart(weight)
    if operands.codes.ndim != 2:
        raise ValueError(
            f"weight must be one matrix [out, in], got codes {operands.codes.shape}; use vmap for a stack."
        )
    if str(x.dtype) not in _arguments.FLOAT_DTYPES:
        raise TypeError(f"x must be one of {', '.join(_arguments.FLOAT_DTYPES)}, got {x.dtype}.")
    if x.ndim < 1 or x.shape[-1] != operands.in_size:
        raise ValueError(
            f"x must have the weight's {operands.in_size} inputs as its last axis, got x {x.shape} for a weight "
            f"[{operands.out_size}, {operands.in_size}]."
        )
    rows = x.reshape(math.prod(x.shape[:-1]), operands.in_size)

    def mosaic() -> Any:
        from pallas_kernels.quantized_matmul import mosaic_sm90

        return mosaic_sm90.build(rows, operands)

    def triton_form() -> Any:
        from pallas_kernels.quantized_matmul import triton

        return triton.build(rows, operands)

    def xla() -> Any:
        return lambda x, *parts: quantized_matmul_xla(x, _quantized.Operands(operands.format, *parts))

    builders: dict[str, Any] = {"mosaic": mosaic, "triton": triton_form, "xla": xla}
    if implementation is None:
        order = choose_order(operands.format, max(rows.shape[0], 1), operands.out_size)
        builders = {name: builders[name] for name in (*order, "xla")}
    run: Any = _dispatch.choose("quantized_matmul", implementation, builders)
    out = run(rows, operands.codes, operands.scale, operands.global_scale)
    return out.reshape(*x.shape[:-1], operands.out_size)
