"""The public function `block_attention`."""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import _arguments, _dispatch
from pallas_kernels.block_attention.xla import block_attention_xla


def block_attention(
    q: Float[Array, "B K Hq D"],
    k_block: Float[Array, "B K Hkv D"],
    v_block: Float[Array, "B K Hkv D"],
    k_pages: Float[Array, "N page Hkv D"],
    v_pages: Float[Array, "N page Hkv D"],
    page_table: Int32[Array, "B P"],
    q_start: Int32[Array, " B"],
    *,
    window: int | None,
    causal: bool = False,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B K Hq D"], Float32[Array, "B K Hq"]]:
    """The attention of a draft block in one pass: the cached context and the block's own K keys.

    Query i of row b is at position `q_start[b] + i`. It sees the cached positions `q_pos - window < p < q_start` and
    the block keys j with `abs(i - j) < window`, with `causal` only those with `j <= i`. Slots of the cache from
    `q_start` on are not read as keys: the block need not be written to the cache first.

    Args:
      q: bfloat16, float16 or float32; query head h reads KV head `h // (Hq // Hkv)`.
      k_block, v_block: key and value at each query's own position, in q's dtype.
      k_pages, v_pages: the pool of pages, in q's dtype; see the package docstring.
      page_table: page ids of each row.
      q_start: position of each row's first query, and number of context positions the cache holds.
      window: how many positions a query sees to its left, its own included; None for all.
      causal: whether the block is causal. The usual drafter sees its block in both directions.
      scale: factor of the scores; None for D ** -0.5.
      implementation: None for the best one for this device, or "mosaic", "triton", "xla".

    Returns:
      The attention in q's dtype and its log-sum-exp: natural log, scale included. Each query sees itself, so it is
      finite.

    Raises:
      TypeError, ValueError: an argument does not fit.
      NotImplementedError: the named implementation cannot serve this call; the message says why. Or the call is
        differentiated through a kernel: only "xla" has a derivative.
    """
    _arguments.check_arrays(
        q=q, k_block=k_block, v_block=v_block, k_pages=k_pages, v_pages=v_pages, page_table=page_table, q_start=q_start
    )
    _arguments.check_queries(q)
    _arguments.check_pages(q, k_pages, v_pages, page_table)
    _arguments.check_block(q, k_block, v_block)
    if k_block.shape[2] != k_pages.shape[2]:
        raise ValueError(
            f"k_block and k_pages must have the same KV heads, got {k_block.shape[2]} in {k_block.shape} and "
            f"{k_pages.shape[2]} in {k_pages.shape}."
        )
    _arguments.check_rows(q, q_start=q_start)
    static: dict[str, Any] = dict(
        window=_arguments.check_window(window), causal=bool(causal), scale=_arguments.check_scale(scale, q.shape[-1])
    )

    def mosaic() -> _dispatch.Kernel:
        from pallas_kernels.block_attention import mosaic_sm90

        return mosaic_sm90.build(q, k_pages, page_table, **static)

    def triton_form() -> _dispatch.Kernel:
        from pallas_kernels.block_attention import triton

        return triton.build(q, k_pages, page_table, **static)

    run = _dispatch.choose(
        "block_attention",
        implementation,
        {"mosaic": mosaic, "triton": triton_form, "xla": lambda: functools.partial(block_attention_xla, **static)},
    )
    return run(*map(jnp.asarray, (q, k_block, v_block, k_pages, v_pages, page_table, q_start)))
