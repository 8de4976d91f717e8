"""`quantized_matmul` for Hopper, in Pallas Mosaic GPU: the linear case of `_quantized_mosaic.multiply`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch
from pallas_kernels import _mosaic as gpu
from pallas_kernels._quantized import Format, Operands
from pallas_kernels._quantized_mosaic import Tiling, multiply, reorder
from pallas_kernels.quantized_matmul.tuning import choose_mosaic


def build(x: Any, weight: Operands) -> Callable[..., jax.Array]:
    """The kernel for rows x [rows, in] and a weight like these on their device, or NotImplementedError."""
    multiprocessors = gpu.require_sm90(_dispatch.device_of(x, weight.codes))
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"the Mosaic kernel takes bfloat16 x (others go through XLA), got {x.dtype}.")
    choose_mosaic(weight.format, x.shape[0], weight.out_size, weight.in_size, multiprocessors)
    return _dispatch.opaque_rows("quantized_matmul", _program(weight.format, multiprocessors))


@functools.cache  # and so traced and lowered once for all layers of a model
def _program(form: Format, multiprocessors: int) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(quantized_matmul_mosaic, form=form, multiprocessors=multiprocessors))


def quantized_matmul_mosaic(
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array,
    global_scale: jax.Array,
    *,
    form: Format,
    multiprocessors: int = 132,
    tiling: Tiling | None = None,
    interpret: Any = None,
) -> jax.Array:
    """x bfloat16 [rows, in] -> bfloat16 [rows, out]."""
    weight, rows = Operands(form, codes, scale, global_scale), x.shape[0]
    tiling = tiling or choose_mosaic(form, rows, weight.out_size, weight.in_size, multiprocessors)
    # XLA fuses this into what makes x, a norm or an activation; behind another kernel it is one more pass over x.
    x = reorder(form, jnp.pad(x, ((0, -rows % tiling.tokens), (0, 0))))
    run = functools.partial(multiply, tiling=tiling, multiprocessors=multiprocessors, interpret=interpret)
    return run(x, [weight], rows=rows if rows <= tiling.tokens else None)[:rows]
