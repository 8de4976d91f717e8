"""The public function `block_sparse_decode`."""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import _arguments, _dispatch
from pallas_kernels.block_sparse_decode.xla import block_sparse_decode_xla


def block_sparse_decode(
    q: Float[Array, "B K Hq D"],
    k_pages: Float[Array, "N page Hkv D"],
    v_pages: Float[Array, "N page Hkv D"],
    page_table: Int32[Array, "B P"],
    block_ids: Int32[Array, "B K Hkv top_k"],
    q_start: Int32[Array, " B"],
    *,
    block_size: int,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B K Hq D"], Float32[Array, "B K Hq"]]:
    """Causal attention of K queries a row, each KV head over its own selection of key blocks.

    Block n of a row is its positions `n * block_size` to `(n + 1) * block_size - 1`, wherever its pages lie: pages may
    be larger or smaller than blocks. Query i of row b is at position `q_start[b] + i`; in KV head h it sees key p iff
    `p // block_size` is among `block_ids[b, i, h]` and `p <= q_start[b] + i`. A block named twice counts once; -1, and
    a block that begins after the query, count for nothing. Blocks that nobody selected are not read.

    Args:
      q: bfloat16, float16 or float32; query head h reads KV head `h // (Hq // Hkv)`.
      k_pages, v_pages: the pool of pages, in q's dtype. Every slot of a page that holds a visible key is finite.
      page_table: page ids of each row, as in `windowed_decode`; a visible position is below `P * page`, or its ring
        still holds it.
      block_ids: the selection, in any order; -1 where a query has fewer blocks.
      q_start: position of each row's first query.
      block_size: positions of one block.
      scale: factor of the scores; None for D ** -0.5.
      implementation: None for the best one for this device, or "triton", "xla".

    Returns:
      The attention in q's dtype, and its log-sum-exp: natural log, scale included. A query that sees no key gets
      out 0 and lse -inf.

    Raises:
      TypeError, ValueError: an argument does not fit.
      NotImplementedError: the named implementation cannot serve this call; the message says why. Or the call is
        differentiated through a kernel: only "xla" has a derivative.

    Source: the sparse attention of MiniMax-M3 (`sparse_attention_config` of its config.json).
    """
    _arguments.check_arrays(
        q=q, k_pages=k_pages, v_pages=v_pages, page_table=page_table, block_ids=block_ids, q_start=q_start
    )
    _arguments.check_queries(q)
    _arguments.check_pages(q, k_pages, v_pages, page_table)
    _arguments.check_rows(q, q_start=q_start)
    expected = (*q.shape[:2], k_pages.shape[2])
    if block_ids.ndim != 4 or block_ids.shape[:3] != expected or block_ids.shape[3] == 0:
        raise ValueError(
            f"block_ids must be [B, K, Hkv, top_k] = [{', '.join(map(str, expected))}, top_k >= 1] for q {q.shape} "
            f"and k_pages {k_pages.shape}, got {block_ids.shape}."
        )
    if block_ids.dtype != jnp.int32:
        raise TypeError(f"block_ids must be int32, got {block_ids.dtype}; cast them with astype(jnp.int32).")
    static: dict[str, Any] = dict(
        block_size=_arguments.check_block_size(block_size), scale=_arguments.check_scale(scale, q.shape[-1])
    )

    def triton_form() -> _dispatch.Kernel:
        from pallas_kernels.block_sparse_decode import triton

        return triton.build(q, k_pages, page_table, block_ids, **static)

    run = _dispatch.choose(
        "block_sparse_decode",
        implementation,
        {"triton": triton_form, "xla": lambda: functools.partial(block_sparse_decode_xla, **static)},
    )
    return run(*map(jnp.asarray, (q, k_pages, v_pages, page_table, block_ids, q_start)))
