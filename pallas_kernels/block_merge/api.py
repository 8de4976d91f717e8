"""The public function `merge_future_block`."""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels import _arguments, _dispatch
from pallas_kernels.block_merge.xla import merge_future_block_xla


def merge_future_block(
    out: Float[Array, "B K Hq D"],
    lse: Float32[Array, "B K Hq"],
    q: Float[Array, "B K Hq D"],
    k_block: Float[Array, "B K Hkv D"],
    v_block: Float[Array, "B K Hkv D"],
    *,
    window: int | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B K Hq D"], Float32[Array, "B K Hq"]]:
    """Adds the block's keys after each query to an attention over the keys up to it.

    Query i gains the block keys j with `j > i` and `j - i < window`. After `windowed_decode` over a cache that ends
    with the block's own keys, the result is the attention of the block in both directions.

    Args:
      out, lse: what `windowed_decode` returned for `q` (lse float32, natural log, scale included).
      q: bfloat16, float16 or float32; query head h reads KV head `h // (Hq // Hkv)`.
      k_block, v_block: key and value at each query's own position, in q's dtype.
      window: as in `windowed_decode`; None for no window.
      scale: factor of the scores; None for D ** -0.5. It must be the one that `out` was made with.
      implementation: None for the best one for this device, or "mosaic", "triton", "xla".

    Returns:
      The merged attention in q's dtype and its log-sum-exp. Where both sides are empty: out 0, lse -inf.

    Raises:
      TypeError, ValueError: an argument does not fit.
      NotImplementedError: the named implementation cannot serve this call; the message says why. Or the call is
        differentiated through a kernel: only "xla" has a derivative.
    """
    _arguments.check_arrays(out=out, lse=lse, q=q, k_block=k_block, v_block=v_block)
    _arguments.check_queries(q)
    _arguments.check_partial(q, out, lse)
    _arguments.check_block(q, k_block, v_block)
    static: dict[str, Any] = dict(
        window=_arguments.check_window(window), scale=_arguments.check_scale(scale, q.shape[-1])
    )

    def mosaic() -> _dispatch.Kernel:
        from pallas_kernels.block_merge import mosaic_sm90

        return mosaic_sm90.build(out, q, k_block, **static)

    def triton_form() -> _dispatch.Kernel:
        from pallas_kernels.block_merge import triton

        return triton.build(out, q, k_block, **static)

    run = _dispatch.choose(
        "merge_future_block",
        implementation,
        {"mosaic": mosaic, "triton": triton_form, "xla": lambda: functools.partial(merge_future_block_xla, **static)},
    )
    return run(*map(jnp.asarray, (out, lse, q, k_block, v_block)))
