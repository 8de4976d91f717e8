"""The public function `windowed_decode`."""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import _arguments, _dispatch
from pallas_kernels.windowed_decode.xla import windowed_decode_xla


def windowed_decode(
    q: Float[Array, "B K Hq D"],
    k_pages: Float[Array, "N page Hkv D"],
    v_pages: Float[Array, "N page Hkv D"],
    page_table: Int32[Array, "B P"],
    q_start: Int32[Array, " B"],
    kv_length: Int32[Array, " B"],
    *,
    window: int | None,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B K Hq D"], Float32[Array, "B K Hq"]]:
    """Causal attention of K queries a row over a paged or ring cache.

    Query i of row b is at position `q_start[b] + i` and sees key p iff `p < kv_length[b]` and
    `q_pos - window < p <= q_pos`. How positions map to pages, what must hold of the pages, and which implementation
    takes which shapes: see the package docstring.

    Args:
      q: bfloat16, float16 or float32; query head h reads KV head `h // (Hq // Hkv)`.
      k_pages, v_pages: the pool of pages, in q's dtype.
      page_table: page ids of each row.
      q_start: position of each row's first query.
      kv_length: number of positions the cache holds, those of the queries included where they were appended.
      window: how many positions a query sees, its own included; None for all.
      scale: factor of the scores; None for D ** -0.5.
      implementation: None for the best one for this device, or "mosaic", "triton", "xla".

    Returns:
      The attention in q's dtype, and its log-sum-exp: natural log, scale included. A query that sees no key gets
      out 0 and lse -inf.

    Raises:
      TypeError, ValueError: an argument does not fit.
      NotImplementedError: the named implementation cannot serve this call; the message says why. Or the call is
        differentiated through a kernel: only "xla" has a derivative.
    """
    _arguments.check_arrays(
        q=q, k_pages=k_pages, v_pages=v_pages, page_table=page_table, q_start=q_start, kv_length=kv_length
    )
    _arguments.check_queries(q)
    _arguments.check_pages(q, k_pages, v_pages, page_table)
    _arguments.check_rows(q, q_start=q_start, kv_length=kv_length)
    static: dict[str, Any] = dict(
        window=_arguments.check_window(window), scale=_arguments.check_scale(scale, q.shape[-1])
    )

    def mosaic() -> _dispatch.Kernel:
        from pallas_kernels.windowed_decode import mosaic_sm90

        return mosaic_sm90.build(q, k_pages, page_table, **static)

    def triton_form() -> _dispatch.Kernel:
        from pallas_kernels.windowed_decode import triton

        return triton.build(q, k_pages, page_table, **static)

    run = _dispatch.choose(
        "windowed_decode",
        implementation,
        {"mosaic": mosaic, "triton": triton_form, "xla": lambda: functools.partial(windowed_decode_xla, **static)},
    )
    return run(*map(jnp.asarray, (q, k_pages, v_pages, page_table, q_start, kv_length)))
