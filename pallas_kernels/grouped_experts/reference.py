"""`grouped_experts` as it is defined, in float32, every expert on every row: the oracle of every implementation."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels._activations import swiglu_oai
from pallas_kernels.grouped_experts import stacks


def grouped_experts_reference(
    x: Float[Array, "N H"],
    experts: Int32[Array, "N k"],
    weights: Float32[Array, "N k"],
    gate: Any,
    up: Any,
    down: Any,
    *,
    alpha: float,
    limit: float,
) -> Float32[Array, "N H"]:
    read = (stacks.read(name, weight) for name, weight in (("gate", gate), ("up", up), ("down", down)))
    gate32, up32, down32 = (stacks.dequantize(stack, form, jnp.float32) for stack, form in read)
    x32 = x.astype(jnp.float32)
    inner = swiglu_oai(
        jnp.einsum("nh,efh->nef", x32, gate32, precision="highest"),
        jnp.einsum("nh,efh->nef", x32, up32, precision="highest"),
        alpha,
        limit,
    )
    each = jnp.einsum("nef,ehf->neh", inner, down32, precision="highest")
    # An index that names no expert matches none here, and an expert named twice counts twice.
    chosen = experts[:, :, None] == jnp.arange(gate32.shape[0], dtype=jnp.int32)[None, None]
    share = jnp.sum(jnp.where(chosen, weights[:, :, None], jnp.float32(0)), axis=1)
    return jnp.einsum("neh,ne->nh", each, share, precision="highest")
