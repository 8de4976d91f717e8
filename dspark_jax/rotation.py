"""What lies between the projections and attention, in one launch: per-head norms, rotation and writes into caches."""

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import pallas_kernels
from dspark_jax.config import DrafterConfig, TargetConfig
from dspark_jax.formats import Leaf
from dspark_jax.kernels import Kernels
from dspark_jax.layers import GemmaRMSNorm, RMSNorm
from pallas_kernels import Heads

Place = tuple[nnx.Module | None, Leaf | None]


def rotate_together(
    kernels: Kernels,
    projected: Sequence[Float[Array, "B T _"]],
    places: Sequence[Place],
    positions: Int[Array, "B T"],
    config: TargetConfig | DrafterConfig,
    *,
    plus_one: bool,
    ring: bool = False,
) -> tuple[Array, ...] | None:
    """`pallas_kernels.rotate_heads` of these projections; None where no kernel serves, and none was asked for.

    Each has its place in `places`: the norm of its heads (rotated behind it; None: they stay as they are), and the
    cache of one layer that they go into (None: they are a result).
    """
    if kernels.rotation == "xla":
        return None
    # Of the pieces of one array XLA makes that array again, without a copy.
    joined = jnp.concatenate(projected, axis=-1)
    try:
        heads = [
            Heads(count=each.shape[-1] // config.head_dim, weight=_weight(norm), cache=cache)
            for each, (norm, cache) in zip(projected, places, strict=True)
        ]
        if any(each.cache is not None and each.cache.dtype != joined.dtype for each in heads):
            found = ", ".join(sorted({str(each.cache.dtype) for each in heads if each.cache is not None}))
            raise NotImplementedError(
                f"rotate_heads writes {joined.dtype} projections into caches of their dtype, found {found}."
            )
        return pallas_kernels.rotate_heads(
            joined, positions.astype(jnp.int32), heads, head_dim=config.head_dim, rotary_dim=config.rotary_dim,
            theta=config.rope_theta, eps=config.norm_eps, plus_one=plus_one, ring=ring, implementation="mosaic",
        )  # fmt: skip
    except NotImplementedError:
        if kernels.rotation is not None:
            raise
        return None


def _weight(norm: nnx.Module | None) -> Array | None:
    if norm is None:
        return None
    if not isinstance(norm, GemmaRMSNorm | RMSNorm):  # somebody has put another module there
        raise NotImplementedError(f"rotate_heads knows GemmaRMSNorm and RMSNorm, found {type(norm).__name__}.")
    return norm.weight.get_value()
