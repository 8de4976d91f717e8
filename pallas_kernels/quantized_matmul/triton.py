"""`quantized_matmul` for NVIDIA GPUs from Ampere on, in Triton through jax-triton. Takes every shape of the formats."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _dispatch
from pallas_kernels._quantized import Format, Operands
from pallas_kernels._quantized_triton import Tiling, reorder
from pallas_kernels._triton import require_triton
from pallas_kernels.quantized_matmul.tuning import choose_triton

FIRST_WITH_FLOAT8 = (8, 9)


def build(x: Any, weight: Operands) -> Callable[..., jax.Array]:
    """The kernel for rows x [rows, in] and a weight like these on their device, or NotImplementedError."""
    device = _dispatch.device_of(x, weight.codes)
    multiprocessors = require_triton(x.dtype, device)
    if x.shape[0] < 1:
        raise NotImplementedError("the Triton kernel needs at least one row of x.")
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"the Triton kernel takes bfloat16 x (others go through XLA), got {x.dtype}.")
    float8 = _dispatch.require_cuda(device, "the Triton kernel") >= FIRST_WITH_FLOAT8
    return _dispatch.opaque_rows("quantized_matmul", _program(weight.format, multiprocessors, float8))


@functools.cache  # and so traced and lowered once for all layers of a model
def _program(form: Format, multiprocessors: int, float8: bool) -> Callable[..., jax.Array]:
    return jax.jit(
        functools.partial(quantized_matmul_triton, form=form, multiprocessors=multiprocessors, float8=float8)
    )


def quantized_matmul_triton(
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array,
    global_scale: jax.Array,
    *,
    form: Format,
    multiprocessors: int = 132,
    float8: bool = True,
    tiling: Tiling | None = None,
) -> jax.Array:
    """x bfloat16 [rows, in] -> bfloat16 [rows, out]. `float8`: Triton knows the type on this device."""
    import jax_triton  # pyright: ignore[reportMissingImports]

    from pallas_kernels.quantized_matmul import triton_kernel

    rows, weight = x.shape[0], Operands(form, codes, scale, global_scale)
    t = tiling or choose_triton(form, rows, weight.out_size, weight.in_size, multiprocessors)
    if not float8:
        codes, scale = (lax.bitcast_convert_type(a, jnp.uint8) for a in (codes, scale))
    shape, dtype = (rows, weight.out_size), jnp.bfloat16
    if t.splits > 1:
        shape, dtype = (t.splits, *shape), jnp.float32
    out = jax_triton.triton_call(
        reorder(form.name, t.pairs, x), codes, scale, global_scale.reshape(1),
        kernel=triton_kernel.quantized_matmul_kernel, out_shape=jax.ShapeDtypeStruct(shape, dtype),
        grid=(-(-rows // t.tokens), -(-weight.out_size // t.features), t.splits), name="quantized_matmul_triton",
        num_warps=t.warps, num_stages=t.stages, TOKENS=rows, OUT=weight.out_size, IN=weight.in_size, FORMAT=form.name,
        DIVIDES=form.divides, PAIRS=t.pairs, BLOCK_OUT=t.features, BLOCK_TOKENS=t.tokens,
        STEP=t.step, SPLITS=t.splits, STAGES=t.stages,
    )  # fmt: skip
    return out if t.splits == 1 else jnp.sum(out, axis=0).astype(jnp.bfloat16)
