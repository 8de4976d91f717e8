"""`quantized_matmul` and its siblings for Hopper, in Pallas Mosaic GPU: cases of `_quantized_mosaic.multiply`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch
from pallas_kernels import _mosaic as gpu
from pallas_kernels._quantized import Format, Operands
from pallas_kernels._quantized_mosaic import Swiglu, Tiling, multiply, reorder, spare_rows
from pallas_kernels.quantized_matmul.tuning import choose_mosaic


def build(x: Any, *weights: Operands) -> Callable[..., jax.Array]:
    """The kernel for rows x [rows, in] and weights like these on their device, or NotImplementedError.

    Its result is that of one weight after that of the other.
    """
    multiprocessors = _require(x, weights)
    forms = tuple(weight.format for weight in weights)
    if len({form.name for form in forms}) > 1:
        raise NotImplementedError("the Mosaic kernel takes weights of one format in a launch.")
    sizes = tuple(weight.out_size for weight in weights)
    choose_mosaic(forms[0], x.shape[0], sizes, weights[0].in_size, multiprocessors)
    return _dispatch.opaque_rows("quantized_matmul", _program(forms, multiprocessors))


@functools.cache  # and so traced and lowered once for all layers of a model
def _program(forms: tuple[Format, ...], multiprocessors: int) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(quantized_matmuls_mosaic, forms=forms, multiprocessors=multiprocessors))


def build_mlp(x: Any, gate: Operands, up: Operands, down: Operands, *, swiglu: Swiglu) -> Callable[..., jax.Array]:
    """The kernels for down(swiglu(gate(x), up(x))) on their device, or NotImplementedError."""
    multiprocessors = _require(x, (gate, up, down))
    if gate.format.name != up.format.name:
        raise NotImplementedError("the Mosaic kernel takes gate and up of one format.")
    _mlp_tilings(x.shape[0], gate, down, multiprocessors)
    forms = (gate.format, up.format, down.format)
    return _dispatch.opaque_rows("quantized_mlp", _mlp_program(forms, swiglu, multiprocessors))


@functools.cache
def _mlp_program(forms: tuple[Format, ...], swiglu: Swiglu, multiprocessors: int) -> Callable[..., jax.Array]:
    run = functools.partial(quantized_mlp_mosaic, forms=forms, swiglu=swiglu, multiprocessors=multiprocessors)
    return jax.jit(run)


def _require(x: Any, weights: Sequence[Operands]) -> int:
    """Number of multiprocessors of the device."""
    multiprocessors = gpu.require_sm90(_dispatch.device_of(x, weights[0].codes))
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"the Mosaic kernel takes bfloat16 x (others go through XLA), got {x.dtype}.")
    return multiprocessors


def _mlp_tilings(
    rows: int, gate: Operands, down: Operands, multiprocessors: int, shared: bool = True
) -> tuple[Tiling, Tiling]:
    first = choose_mosaic(gate.format, rows, gate.out_size, gate.in_size, multiprocessors, swiglu=True, shared=shared)
    if gate.out_size % (gpu.ROWS * down.format.per_byte):
        raise NotImplementedError(
            f"the Mosaic kernel takes an inner activation in slabs of {gpu.ROWS * down.format.per_byte}, "
            f"got {gate.out_size}."
        )
    return first, choose_mosaic(down.format, rows, down.out_size, down.in_size, multiprocessors, shared=shared)


def quantized_matmul_mosaic(x: jax.Array, *parts: jax.Array, form: Format, **static: Any) -> jax.Array:
    """The case of one weight."""
    return quantized_matmuls_mosaic(x, *parts, forms=(form,), **static)


def quantized_matmuls_mosaic(
    x: jax.Array,
    *parts: jax.Array,
    forms: tuple[Format, ...],
    multiprocessors: int = 132,
    tiling: Tiling | None = None,
    interpret: Any = None,
) -> jax.Array:
    """x bfloat16 [rows, in] and codes, scale and global scale of each weight -> bfloat16 [rows, sum of out]."""
    weights, rows = _operands(forms, parts), x.shape[0]
    sizes = tuple(weight.out_size for weight in weights)
    shared = gpu.writable(x, *parts)
    tiling = tiling or choose_mosaic(forms[0], rows, sizes, weights[0].in_size, multiprocessors, shared=shared)
    run = functools.partial(multiply, multiprocessors=multiprocessors, interpret=interpret)
    ordered = _in_order(forms[0], x, tiling, multiprocessors)
    return run(ordered, weights, tiling=tiling, rows=_cut(rows, tiling))[:rows]


def quantized_mlp_mosaic(
    x: jax.Array,
    *parts: jax.Array,
    forms: tuple[Format, ...],
    swiglu: Swiglu,
    multiprocessors: int = 132,
    tilings: tuple[Tiling, Tiling] | None = None,
    interpret: Any = None,
) -> jax.Array:
    """x bfloat16 [rows, in] and codes, scale and global scale of gate, up and down -> bfloat16 [rows, out]."""
    (gate, up, down), rows = _operands(forms, parts), x.shape[0]
    first, second = tilings or _mlp_tilings(rows, gate, down, multiprocessors, gpu.writable(x, *parts))
    run = functools.partial(multiply, multiprocessors=multiprocessors, interpret=interpret)
    # Rows that pad a tile are kept, as the next product pads to tiles too; columns come out as it reads them.
    padded, wanted = _padded_rows(rows, first), _padded_rows(rows, second)
    spare = spare_rows(second, down.in_size, multiprocessors)
    direct = padded == wanted
    inner = run(
        _in_order(gate.format, x, first, multiprocessors), [gate, up], tiling=first, swiglu=swiglu, order=down.format,
        spare=spare if direct else 0, name="quantized_gate_up",
    )  # fmt: skip
    if not direct:
        inner = jnp.pad(inner[:wanted], ((0, max(0, wanted - padded) + spare), (0, 0)))
    return run(inner, [down], tiling=second, rows=_cut(rows, second), name="quantized_down")[:rows]


def _operands(forms: tuple[Format, ...], parts: tuple[jax.Array, ...]) -> list[Operands]:
    return [Operands(form, *parts[3 * i : 3 * i + 3]) for i, form in enumerate(forms)]


def _in_order(form: Format, x: jax.Array, tiling: Tiling, multiprocessors: int) -> jax.Array:
    spare = spare_rows(tiling, x.shape[1], multiprocessors)
    return reorder(form, x, rows=_padded_rows(x.shape[0], tiling) + spare)


def _padded_rows(rows: int, tiling: Tiling) -> int:
    return -(-rows // tiling.tokens) * tiling.tokens


def _cut(rows: int, tiling: Tiling) -> int | None:
    return rows if rows <= tiling.tokens else None
