"""`block_attention` for NVIDIA GPUs from Ampere on: the Triton kernel of `windowed_decode` with one more tile."""

import functools
from typing import Any

import jax

from pallas_kernels import _dispatch
from pallas_kernels.windowed_decode import triton


def build(q: Any, k_pages: Any, page_table: Any, *, window: int | None, scale: float, causal: bool) -> _dispatch.Kernel:
    """The kernel for arguments like these on their device, or NotImplementedError with the reason."""
    limits = triton.limits(q, k_pages, page_table)
    run = functools.partial(block_attention_triton, window=window, scale=scale, causal=causal, **limits)
    return _dispatch.opaque("block_attention", run, ("row", "row", "row", "pages", "pages", "table", "row"))


def block_attention_triton(
    q: jax.Array,
    k_block: jax.Array,
    v_block: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    q_start: jax.Array,
    **static: Any,
) -> tuple[jax.Array, jax.Array]:
    return triton.attend(q, k_pages, v_pages, page_table, q_start, q_start, k_block, v_block, **static)
