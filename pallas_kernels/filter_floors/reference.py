"""`filter_floors` as it is defined, by sorting each row: the oracle of the other implementations."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32


def filter_floors_reference(
    logits: Float[Array, "B N V"],
    inverse_temperature: Float32[Array, " B"],
    top_k: Int32[Array, " B"],
    top_p: Float32[Array, " B"],
    min_p: Float32[Array, " B"],
    find_best: Bool[Array, " B"],
) -> tuple[Float32[Array, "B N"], Float32[Array, "B N"], Float32[Array, "B N"], Int32[Array, "B N"]]:
    del find_best  # it is no work here
    x = logits.astype(jnp.float32)
    x = jnp.where(jnp.isnan(x), -jnp.inf, jnp.minimum(x, jnp.finfo(jnp.float32).max))
    peak = jnp.max(x, axis=-1)
    peak = jnp.where(peak > -jnp.inf, peak, 0.0)  # -inf - -inf would be NaN
    z = (x - peak[..., None]) * inverse_temperature[:, None, None]
    ranked = -jnp.sort(-z, axis=-1)
    floor = jnp.broadcast_to(jnp.log(min_p)[:, None], peak.shape)

    def last(reached: Array) -> Array:
        """The score of the first token in order at which something is reached, -inf if at none."""
        at = jnp.argmax(reached, axis=-1, keepdims=True)
        return jnp.where(jnp.any(reached, axis=-1), jnp.take_along_axis(ranked, at, axis=-1)[..., 0], -jnp.inf)

    count = jnp.arange(1, z.shape[-1] + 1, dtype=jnp.int32)[None, None]
    kth = last((count >= top_k[:, None, None]) & (ranked > -jnp.inf))
    floor = jnp.where(top_k[:, None] > 0, jnp.maximum(floor, kth), floor)
    mass = jnp.cumsum(jnp.where(ranked >= floor[..., None], jnp.exp(ranked), 0.0), axis=-1)
    reached = last(mass >= top_p[:, None, None] * mass[..., -1:])
    floor = jnp.where(top_p[:, None] < 1, jnp.maximum(floor, reached), floor)
    log_mass = jnp.log(jnp.sum(jnp.where(ranked >= floor[..., None], jnp.exp(ranked), 0.0), axis=-1))
    return peak, floor, log_mass, jnp.argmax(x, axis=-1).astype(jnp.int32)
