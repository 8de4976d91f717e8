"""`markov_draw` as it is defined, in plain jax.numpy: the oracle of the other implementations."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32


def markov_draw_reference(
    logits: Float32[Array, "B K V"],
    latents: Float[Array, "N r"],
    index: Int32[Array, " B"],
    table: Float[Array, "V r"],
    allowed: Bool[Array, " V"],
    words: UInt32[Array, "B K 2"],
    inverse_temperature: Float32[Array, " B"],
    drawn: Bool[Array, " B"],
    *,
    slot: int,
    keep: bool,
) -> tuple[Float32[Array, "B K V"], Int32[Array, " B"], Float32[Array, " B"], Float32[Array, " B"]]:
    precision = jax.lax.Precision.HIGHEST if latents.dtype == jnp.float32 else None
    bias = jnp.einsum("br,vr->bv", latents[index], table, preferred_element_type=jnp.float32, precision=precision)
    x = logits[:, slot] + bias
    x = jnp.where(jnp.isnan(x) | ~allowed[None], -jnp.inf, jnp.minimum(x, jnp.finfo(jnp.float32).max))
    peak = jnp.max(x, axis=-1)
    some = peak > -jnp.inf
    peak = jnp.where(some, peak, 0.0)  # -inf - -inf would be NaN
    z = (x - peak[:, None]) * inverse_temperature[:, None]
    keys = jax.random.wrap_key_data(words[:, slot], impl="threefry2x32")
    noise = jax.vmap(lambda key: jax.random.gumbel(key, z.shape[1:], jnp.float32, mode="high"))(keys)
    best = jnp.argmax(z + jnp.where(drawn[:, None], noise, 0.0), axis=-1).astype(jnp.int32)
    log_mass = jnp.where(some, jnp.log(jnp.sum(jnp.exp(z), axis=-1)), 0.0)
    return logits.at[:, slot].set(x) if keep else logits, jnp.where(some, best, -1), peak, log_mass
