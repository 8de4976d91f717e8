"""The public functions `quantized_matmul`, `quantized_matmuls` and `quantized_mlp`."""

import functools
import itertools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import _arguments, _dispatch, _quantized
from pallas_kernels._activations import rounded_float32, swiglu_oai
from pallas_kernels._quantized import Operands, QuantizedWeight
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
    block whose scale byte is below 11 (2^-116) rounds to multiples of 2^-125, where float32 ends too. In "xla" weights
    of 2^128 and more, which scale bytes from 247 on can make, are infinite.

    Returns:
      [..., O] in x's dtype.

    Raises:
      TypeError, ValueError: an argument does not fit.
      NotImplementedError: the named implementation cannot serve this call; the message says why. Or the call is
        differentiated through a kernel: only "xla" has a derivative.
    """
    operands = _read(weight)
    rows = _rows(x, operands)

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
    out = run(rows, *_parts(operands))
    return out.reshape(*x.shape[:-1], operands.out_size)


def quantized_matmuls(
    x: Float[Array, "*batch I"], weights: Iterable[QuantizedWeight], *, implementation: str | None = None
) -> tuple[Float[Array, "*batch _"], ...]:
    """(x W^T for each W of `weights`), as `quantized_matmul` gives them, where a kernel can in one launch.

    Args:
      x, implementation: as in `quantized_matmul`. "mosaic" is one launch and takes weights of one format whose outputs
        come in whole tiles; "triton" and "xla" are calls of their own; None is one launch where that can serve.
      weights: one or more, [O_i, I] each, read where they are: nothing is joined but the results.

    Returns:
      [..., O_i] in x's dtype for each weight, in their order.

    Raises:
      TypeError, ValueError: an argument does not fit.
      NotImplementedError: the named implementation cannot serve this call; the message says why. Or the call is
        differentiated through a kernel: only "xla" has a derivative.
    """
    if isinstance(weights, QuantizedWeight) or not isinstance(weights, Iterable):
        raise TypeError(f"weights must be several weights, such as a list, found {type(weights).__name__}.")
    weights = tuple(weights)  # a generator gives them once
    if not weights:
        raise ValueError("weights must hold at least one weight, got none.")
    operands = [_read(weight, f"weights[{i}]") for i, weight in enumerate(weights)]
    rows, *_ = [_rows(x, each, f"weights[{i}]") for i, each in enumerate(operands)]

    def mosaic() -> Any:
        from pallas_kernels.quantized_matmul import mosaic_sm90

        run: Any = mosaic_sm90.build(rows, *operands)

        def split(x: jax.Array) -> tuple[jax.Array, ...]:
            out = run(rows, *itertools.chain.from_iterable(map(_parts, operands)))
            out = out.reshape(*x.shape[:-1], out.shape[-1])
            ends = list(itertools.accumulate(each.out_size for each in operands))
            return tuple(out[..., start:end] for start, end in itertools.pairwise([0, *ends]))

        return split

    def one_by_one(name: str | None) -> Any:
        return lambda x: tuple(quantized_matmul(x, weight, implementation=name) for weight in weights)

    return _together("quantized_matmuls", implementation, mosaic, one_by_one)(jnp.asarray(x))


def quantized_mlp(
    x: Float[Array, "*batch I"],
    gate: QuantizedWeight,
    up: QuantizedWeight,
    down: QuantizedWeight,
    *,
    alpha: float,
    limit: float,
    implementation: str | None = None,
) -> Float[Array, "*batch O"]:
    """down(swiglu(gate(x), up(x))), x W^T with weights as in `quantized_matmul`.

    swiglu(g, u) = g · sigmoid(alpha · g) · (u + 1) with g = min(g, limit), u = clip(u, ±limit) (the SwiGLU of gpt-oss;
    the gate has no lower clamp). Sums and activation are float32; gate, up, their SwiGLU and the result are rounded to
    x's dtype once each, in every implementation.

    Args:
      x, implementation: as in `quantized_matmul`. "mosaic" is two launches, gate, up and SwiGLU in the first; it takes
        gate and up of one format. "triton" and "xla" are calls of `quantized_matmul`.
      gate, up: [F, I], and down: [O, F], weights as in `quantized_matmul`; their formats may differ.
      alpha, limit: constants of the activation, part of the program.

    Returns:
      [..., O] in x's dtype.

    Raises:
      TypeError, ValueError: an argument does not fit.
      NotImplementedError: the named implementation cannot serve this call; the message says why. Or the call is
        differentiated through a kernel: only "xla" has a derivative.
    """
    alpha, limit = _arguments.check_constant("alpha", alpha), _arguments.check_limit(limit)
    operands = [_read(weight, name) for name, weight in (("gate", gate), ("up", up), ("down", down))]
    rows = _rows(x, operands[0], "gate")
    inner, inputs = operands[0].out_size, operands[0].in_size
    for name, each, out, wanted in (("up", operands[1], inner, inputs), ("down", operands[2], "O", inner)):
        if each.in_size != wanted or out not in (each.out_size, "O"):
            raise ValueError(
                f"{name} must be [{out}, {wanted}] for gate [{inner}, {inputs}], got [{each.out_size}, {each.in_size}]."
            )

    def mosaic() -> Any:
        from pallas_kernels._quantized_mosaic import Swiglu
        from pallas_kernels.quantized_matmul import mosaic_sm90

        run: Any = mosaic_sm90.build_mlp(rows, *operands, swiglu=Swiglu(alpha, limit, rounded=True))
        return lambda x: run(rows, *itertools.chain.from_iterable(map(_parts, operands))).reshape(*x.shape[:-1], -1)

    def separate(name: str | None) -> Any:
        def run(x: jax.Array) -> jax.Array:
            g, u = map(rounded_float32, quantized_matmuls(x, [gate, up], implementation=name))
            return quantized_matmul(swiglu_oai(g, u, alpha, limit).astype(x.dtype), down, implementation=name)

        return run

    return _together("quantized_mlp", implementation, mosaic, separate)(jnp.asarray(x))


def _together(function: str, implementation: str | None, mosaic: Any, separate: Any) -> Any:
    """The chosen form of what only Mosaic does in few launches, and the others call by call: `separate(name)`."""
    names = ("triton", "xla") if implementation is not None else (None,)
    others = {name or "any": functools.partial(separate, name) for name in names}
    return _dispatch.choose(function, implementation, {"mosaic": mosaic, **others})


def _read(weight: Any, name: str = "weight") -> Operands:
    operands = _quantized.take_apart(weight, name)
    if operands.codes.ndim != 2:
        raise ValueError(
            f"{name} must be one matrix [out, in], got codes {operands.codes.shape}; use vmap for a stack."
        )
    return operands


def _rows(x: Any, weight: Operands, name: str = "weight") -> Any:
    """x [rows, in]."""
    _arguments.check_arrays(x=x)
    if str(x.dtype) not in _arguments.FLOAT_DTYPES:
        raise TypeError(f"x must be one of {', '.join(_arguments.FLOAT_DTYPES)}, got {x.dtype}.")
    if x.ndim < 1 or x.shape[-1] != weight.in_size:
        raise ValueError(
            f"x must have the {name}'s {weight.in_size} inputs as its last axis, got x {x.shape} for a weight "
            f"[{weight.out_size}, {weight.in_size}]."
        )
    return jnp.asarray(x).reshape(math.prod(x.shape[:-1]), weight.in_size)


def _parts(weight: Operands) -> tuple[jax.Array, jax.Array, jax.Array]:
    return jnp.asarray(weight.codes), jnp.asarray(weight.scale), jnp.asarray(weight.global_scale)
