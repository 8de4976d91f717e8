"""`choose_experts` as it is defined: the form for any device, and what the kernels are compared with."""

import functools

import jax
import jax.numpy as jnp
from jax import lax


def choose_experts_reference(
    x: jax.Array, weight: jax.Array, bias: jax.Array, *, top_k: int
) -> tuple[jax.Array, jax.Array]:
    scores = jax.nn.sigmoid(jnp.einsum("nh,eh->ne", x.astype(jnp.float32), weight, precision=lax.Precision.HIGHEST))
    _, experts = lax.top_k(scores + bias[None], top_k)
    chosen = jnp.take_along_axis(scores, experts, axis=-1)
    # Written out, the sum is part of the kernel that uses the weights, and no reduction by itself.
    total = functools.reduce(jnp.add, (chosen[:, j] for j in range(top_k)))
    return experts, chosen / total[:, None]
