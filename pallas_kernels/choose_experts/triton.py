"""`choose_experts` for NVIDIA GPUs from Ampere on, in Triton through jax-triton: few rows, two launches."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch
from pallas_kernels._triton import power_of_two, require_triton

MOST_ROWS = 1024  # what the slices leave behind grows with the rows: 25 MB for so many
MOST_EXPERTS = 1024
ROW_TILE, EXPERT_TILE = 64, 64  # of a program of the first kernel, at most
STEP = 128  # inputs of a slice
WARPS = (4, 8)  # of a program of each kernel


def build(x: Any, weight: Any, top_k: int) -> Callable[..., tuple[jax.Array, ...]]:
    """The kernels for arguments like these on their device, or NotImplementedError with the reason."""
    require_triton(jnp.bfloat16, _dispatch.device_of(x, weight))
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"the Triton kernel takes bfloat16 rows, got {x.dtype}.")
    if x.shape[0] > MOST_ROWS or weight.shape[0] > MOST_EXPERTS:
        raise NotImplementedError(
            f"the Triton kernel takes up to {MOST_ROWS} rows and {MOST_EXPERTS} experts, got {x.shape[0]} and "
            f"{weight.shape[0]}."
        )
    return _program(top_k)


@functools.cache  # and so traced and lowered once for all layers of a model
def _program(top_k: int) -> Callable[..., tuple[jax.Array, ...]]:
    return _opaque(jax.jit(functools.partial(run, top_k=top_k)))


def run(x: jax.Array, weight: jax.Array, bias: jax.Array, *, top_k: int) -> tuple[jax.Array, jax.Array]:
    """-> int32 and float32 [N, top_k]."""
    import jax_triton  # pyright: ignore[reportMissingImports]

    from pallas_kernels.choose_experts import triton_kernel

    (rows, hidden), experts = x.shape, weight.shape[0]
    step, row_tile = min(STEP, power_of_two(hidden)), min(ROW_TILE, power_of_two(rows))
    slices = -(-hidden // step)
    shape = jax.ShapeDtypeStruct
    parts = jax_triton.triton_call(
        x, weight, kernel=triton_kernel.multiply, out_shape=shape((slices, rows, experts), jnp.float32),
        grid=(slices, -(-experts // EXPERT_TILE), -(-rows // row_tile)), name="choose_experts_multiply_triton",
        num_warps=WARPS[0], ROWS=rows, EXPERTS=experts, HIDDEN=hidden, ROW_TILE=row_tile, EXPERT_TILE=EXPERT_TILE,
        STEP=step,
    )  # fmt: skip
    chosen, weights = jax_triton.triton_call(
        parts, bias, kernel=triton_kernel.choose,
        out_shape=[shape((rows, top_k), jnp.int32), shape((rows, top_k), jnp.float32)], grid=(rows,),
        name="choose_experts_choose_triton", num_warps=WARPS[1], ROWS=rows, EXPERTS=experts,
        EXPERTS_PADDED=power_of_two(experts), SLICES=slices, SLICES_PADDED=power_of_two(slices, 1),
        SLICES_AT_ONCE=min(power_of_two(slices, 1), max(1, 8192 // power_of_two(experts))), CHOICES=top_k,
        CHOICES_PADDED=power_of_two(top_k, 1),
    )  # fmt: skip
    return chosen, weights


def _opaque(kernel: Callable[..., tuple[jax.Array, ...]]) -> Callable[..., tuple[jax.Array, ...]]:
    """`kernel(x, weight, bias)` with a vmap rule that folds into the rows, and without a derivative."""

    @jax.custom_batching.custom_vmap
    def folded(*args: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(kernel(*args))

    @folded.def_vmap
    def fold(axis_size: int, batched: list[bool], x: jax.Array, *router: jax.Array) -> tuple[Any, Any]:
        if any(batched[1:]):
            raise NotImplementedError(
                "choose_experts: a kernel maps over rows, not over routers; use implementation='xla' there."
            )
        pieces = [x[i : i + MOST_ROWS] for x in (x.reshape(-1, x.shape[-1]),) for i in range(0, x.shape[0], MOST_ROWS)]
        outs = [jnp.concatenate(each) for each in zip(*(folded(piece, *router) for piece in pieces), strict=True)]
        return tuple(o.reshape(axis_size, -1, o.shape[-1]) for o in outs), (True,) * len(outs)

    return _dispatch.without_derivative("choose_experts", folded)
