"""The activation between the matrices of an MLP, as the forms outside of the kernels compute it."""

import jax
import jax.numpy as jnp
from jax import lax


def rounded_float32(x: jax.Array) -> jax.Array:
    """x in float32, as its own type holds it.

    A conversion alone XLA takes together with the one that made x, on GPUs, and x is never rounded.
    """
    info = jnp.finfo(x.dtype)
    return lax.reduce_precision(x.astype(jnp.float32), exponent_bits=info.nexp, mantissa_bits=info.nmant)


def swiglu_oai(gate: jax.Array, up: jax.Array, alpha: float, limit: float) -> jax.Array:
    """g · sigmoid(alpha · g) · (u + 1) of float32, g = min(gate, limit), u = clip(up, ±limit).

    The gate has no lower clamp but that of its type: of float16 it may be -inf, and -inf · 0 would be no number.
    """
    gate = jnp.clip(gate, jnp.finfo(jnp.float32).min, jnp.float32(limit))
    up = jnp.clip(up, jnp.float32(-limit), jnp.float32(limit))
    return gate * jax.nn.sigmoid(jnp.float32(alpha) * gate) * (up + jnp.float32(1))
