"""`block_attention` for Hopper: the kernel of `windowed_decode`, with the block's own keys as one more tile.

The last split of each row takes that tile first, while the first pages are still on their way.
"""

import functools
from typing import Any

import jax

from pallas_kernels import _dispatch
from pallas_kernels.windowed_decode import mosaic_sm90
from pallas_kernels.windowed_decode.tuning import Tuning


def build(q: Any, k_pages: Any, page_table: Any, *, window: int | None, scale: float, causal: bool) -> _dispatch.Kernel:
    """The kernel for arguments like these on their device, or NotImplementedError with the reason."""
    static: dict[str, Any] = dict(window=window, scale=scale, causal=causal)
    tuning = mosaic_sm90.tune(q, k_pages, page_table, **static, block=True)
    run = functools.partial(block_attention_mosaic, **static, tuning=tuning)
    return _dispatch.opaque("block_attention", run, ("row", "row", "row", "pages", "pages", "table", "row"))


def block_attention_mosaic(
    q: jax.Array,
    k_block: jax.Array,
    v_block: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    q_start: jax.Array,
    *,
    window: int | None,
    scale: float,
    causal: bool,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    return mosaic_sm90.attend(
        q, k_pages, v_pages, page_table, q_start, q_start, k_block, v_block,
        window=window, scale=scale, causal=causal, tuning=tuning, interpret=interpret,
    )  # fmt: skip
