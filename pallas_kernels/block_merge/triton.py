"""`merge_future_block` for NVIDIA GPUs from Ampere on, in Triton through jax-triton."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch
from pallas_kernels._triton import LOG2_E, power_of_two
from pallas_kernels.windowed_decode.triton import NO_WINDOW, check


def build(out: Any, q: Any, k_block: Any, *, window: int | None, scale: float) -> _dispatch.Kernel:
    """The kernel for arguments like these on their device, or NotImplementedError with the reason."""
    check(q, out, k_block)
    run = functools.partial(merge_future_block_triton, window=window, scale=scale)
    return _dispatch.opaque("merge_future_block", run, ("row",) * 5)


def merge_future_block_triton(
    out: jax.Array,
    lse: jax.Array,
    q: jax.Array,
    k_block: jax.Array,
    v_block: jax.Array,
    *,
    window: int | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    import jax_triton  # pyright: ignore[reportMissingImports]

    from pallas_kernels.block_merge import triton_kernel

    b, k, hq, d = q.shape
    hkv = k_block.shape[2]
    packed = k * (hq // hkv)
    rows = min(power_of_two(packed), 64)
    new_out, new_lse = jax_triton.triton_call(
        out, lse, q, k_block, v_block,
        kernel=triton_kernel.merge_future_block,
        out_shape=(jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(lse.shape, jnp.float32)),
        grid=(b * hkv, -(-packed // rows)), name="merge_future_block_triton", num_warps=4,
        QUERIES=k, HEADS=hq, KV_HEADS=hkv, DIM=d, REACH=NO_WINDOW if window is None else window,
        SCALE_LOG2=scale * LOG2_E, ROWS=rows, TILE=power_of_two(k), DIM_PADDED=power_of_two(d),
    )  # fmt: skip
    return new_out, new_lse
