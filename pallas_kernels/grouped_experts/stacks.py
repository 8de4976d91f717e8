"""Stacks of expert matrices [E, out, in], plain or quantised, as pytrees of arrays."""

from typing import Any, NamedTuple

import jax
from jax import lax

from pallas_kernels import _quantized

PLAIN = ("bfloat16", "float16", "float32")


class Stack(NamedTuple):
    """`codes` alone (plain), or with `scale` and one `global_scale` for each expert: see `_quantized.Operands`."""

    codes: jax.Array
    scale: jax.Array | None = None
    global_scale: jax.Array | None = None


def read(name: str, weight: Any, shape: tuple[int, ...] | None = None) -> tuple[Stack, _quantized.Format | None]:
    """The arrays and the format (None: plain) of `weight`, which has to be [E, out, in], and of `shape` if given.

    Raises:
      TypeError, ValueError: a dtype or a shape does not fit; the message names it.
    """
    if isinstance(weight, _quantized.QuantizedWeight):
        operands = _quantized.take_apart(weight, name)
        stack, form = Stack(operands.codes, operands.scale, operands.global_scale), operands.format
        found = (*operands.codes.shape[:-1], operands.in_size)
    else:
        if str(getattr(weight, "dtype", type(weight).__name__)) not in PLAIN:
            raise TypeError(
                f"{name} must be an array of {', '.join(PLAIN)} or have the attributes codes and scale (MXFP8, NVFP4), "
                f"got {getattr(weight, 'dtype', type(weight).__name__)}."
            )
        stack, form, found = Stack(weight), None, tuple(weight.shape)
    if len(found) != 3 or 0 in found:
        raise ValueError(f"{name} must be a stack [E, out, in] without an empty axis, got {found}.")
    if shape is not None and found != shape:
        raise ValueError(f"{name} must be [E, out, in] = {shape}, got {found}.")
    return stack, form


def size(stack: Stack, form: _quantized.Format | None) -> tuple[int, int, int]:
    """(E, out, in)."""
    experts, out_size, stored = stack.codes.shape
    return experts, out_size, stored * (form.per_byte if form else 1)


def take(stack: Stack, expert: jax.Array) -> Stack:
    """The matrix of one expert (int32 scalar): only its bytes are read."""
    return jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, expert, keepdims=False), stack)


def dequantize(stack: Stack, form: _quantized.Format | None, dtype: Any) -> jax.Array:
    """The matrices [..., out, in] in `dtype`: computed in float32 and rounded once."""
    if form is None:
        return stack.codes.astype(dtype)
    return _quantized.dequantize(_quantized.Operands(form, *stack), dtype)
