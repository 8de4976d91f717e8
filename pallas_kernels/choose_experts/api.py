"""The public function `choose_experts`."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import _arguments, _dispatch
from pallas_kernels.choose_experts.reference import choose_experts_reference


class ExpertChoice(NamedTuple):
    """What a router chose.

    Attributes:
      experts: the experts of a row, best first.
      weights: their scores divided by the sum of these; NaN where all of them are 0 in float32.
    """

    experts: Int32[Array, "N k"]
    weights: Float32[Array, "N k"]


def choose_experts(
    x: Float[Array, "N H"],
    weight: Float32[Array, "E H"],
    bias: Float32[Array, " E"],
    *,
    top_k: int,
    implementation: str | None = None,
) -> ExpertChoice:
    """The `top_k` experts of each row with the largest sigmoid(x · weight) + bias, weighed without the bias.

    Products and sums are float32, in an order of each form's own. The lower index wins a tie, and NaN wins over every
    number (in "xla" a NaN with a sign loses to all); an infinite weight gives NaN in "triton". The bias is that of load
    balancing without an auxiliary loss (DeepSeek-V3, arXiv 2412.19437, 2.1.2).

    Args:
      x: rows, bfloat16, float16 or float32.
      top_k: 1..E, part of the program.
      implementation: None for the best one for this device, or "triton", "xla".

    Raises:
      TypeError, ValueError: an argument does not fit.
      NotImplementedError: the named implementation cannot serve this call; the message says why. Or the call is
        differentiated through a kernel.
    """
    _arguments.check_arrays(x=x, weight=weight, bias=bias)
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x must have shape [N, H] without an empty axis, got {x.shape}.")
    if str(x.dtype) not in _arguments.FLOAT_DTYPES:
        raise TypeError(f"x must be one of {', '.join(_arguments.FLOAT_DTYPES)}, got {x.dtype}.")
    if weight.ndim != 2 or weight.shape[0] == 0 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"weight must be [E, H] with H = {x.shape[1]} of x {x.shape}, got {weight.shape}.")
    if bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [E] = {weight.shape[:1]} for weight {weight.shape}, got {bias.shape}.")
    for name, array in (("weight", weight), ("bias", bias)):
        if array.dtype != jnp.float32:
            raise TypeError(f"{name} must be float32, got {array.dtype}; rounded scores choose other experts.")
    if not 1 <= (top_k := _arguments.check_integer("top_k", top_k)) <= weight.shape[0]:
        raise ValueError(f"top_k must be in 1..{weight.shape[0]}, got {top_k}.")

    def triton_form() -> Any:
        from pallas_kernels.choose_experts import triton

        return triton.build(x, weight, top_k)

    def xla_form() -> Any:
        return functools.partial(choose_experts_reference, top_k=top_k)

    run: Any = _dispatch.choose("choose_experts", implementation, {"triton": triton_form, "xla": xla_form})
    return ExpertChoice(*run(*map(jnp.asarray, (x, weight, bias))))
