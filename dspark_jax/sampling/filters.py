"""The target's sampling distribution: temperature, min-p, top-k, top-p, without sorting the vocabulary."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.sampling.params import SamplingParams, inverse_temperature

# Bits of the threshold found in one reading of the logits, by 2**_DIGIT_BITS - 1 sums at once: 1, 2 or 4.
_DIGIT_BITS = 4
_INFINITY_BITS = 0x7F800000


class RowFloors(NamedTuple):
    """What the filters make of each row of logits, with score z = `scale` of a logit.

    Attributes:
      peak: the largest logit; 0 in a row without a finite one.
      floor: the least score that is kept.
      log_mass: the log of the sum of exp(z) over the tokens that are kept.
      best: the first of the largest logits; meaningless in rows that did not ask for it.
    """

    peak: Float[Array, "B N"]
    floor: Float[Array, "B N"]
    log_mass: Float[Array, "B N"]
    best: Int[Array, "B N"]


# (logits [B,N,V], inverse temperature [B], top_k [B], top_p [B], min_p [B], find_best [B]) -> the fields of RowFloors
Floors = Callable[[Array, Array, Array, Array, Array, Array], tuple[Array, Array, Array, Array]]


def target_log_probs(
    logits: Float[Array, "B N V"],
    params: SamplingParams,
    *,
    allowed: Bool[Array, " V"] | None = None,
    floors: Floors | None = None,
) -> Float[Array, "B N V"]:
    """The log-probabilities the target samples from, normalised, in fp32; -inf where a token cannot be drawn.

    In this order: temperature; min-p keeps tokens with p >= min_p * max p; top-k keeps the k best; top-p keeps the
    smallest set of likeliest tokens whose mass reaches top_p of what is left, at least one; then renormalise. Tokens as
    likely (in fp32) as the last one kept are kept too, by top-k and by top-p: which of two equal tokens may be drawn
    never depends on their ids. Filters that no row uses cost nothing.

    Rows of greedy requests (temperature under 1e-5) are one-hot at the argmax, the first index of equal ones:
    verification and plain draws then make the greedy decision by themselves, whether or not they are told which rows
    are greedy.

    Args:
      logits: any float dtype. NaN counts as -inf. All of a request's rows get the same filters.
      params: one value for the batch or one per request.
      allowed: tokens that may be drawn at all (False for padded vocabulary and mask ids). None: all.
      floors: finds the scores that the filters keep, for instance `pallas_kernels.filter_floors`, which needs a few
        readings of the logits. None: `search_floors`, which runs on every device.

    Returns:
      fp32 log-probabilities. A row without a finite logit is all -inf.
    """
    batch, _, vocab = logits.shape
    rows = params.broadcast(batch)
    greedy = rows.greedy
    # The kernel that `floors` may be and what follows have to see the same bits.
    inverse = inverse_temperature(jnp.asarray(rows.temperature))
    top_k = jnp.where(greedy, 0, jnp.asarray(rows.top_k))
    top_p = jnp.where(greedy, jnp.float32(1), jnp.asarray(rows.top_p))
    min_p = jnp.where(greedy, jnp.float32(0), jnp.asarray(rows.min_p))
    if allowed is None:
        allowed = jnp.ones((vocab,), bool)
    elif floors is not None:
        logits = _clean(logits, allowed)
    find = floors or functools.partial(search_floors, allowed=allowed)
    peak, floor, log_mass, best = find(logits, inverse, top_k, top_p, min_p, greedy)
    if floors is None:
        # From the logits again, behind a barrier: scores shared with the sum would be one more [B, N, V] buffer.
        logits, log_mass = lax.optimization_barrier((logits, log_mass))
    z = (_clean(logits, allowed) - peak[..., None]) * inverse[:, None, None]  # the bits of `scale`
    kept = (z >= floor[..., None]) & (z > -jnp.inf)
    log_p = jnp.where(kept, z - log_mass[..., None], -jnp.inf)
    one_hot = (jnp.arange(vocab, dtype=jnp.int32)[None, None] == best[..., None]) & (z == 0)
    return jnp.where(greedy[:, None, None], jnp.where(one_hot, 0.0, -jnp.inf).astype(jnp.float32), log_p)


def search_floors(
    logits: Float[Array, "B N V"],
    inverse: Float[Array, " B"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
    find_best: Bool[Array, " B"],
    *,
    allowed: Bool[Array, " V"],
) -> RowFloors:
    """The scores that the filters keep, found bit by bit and without a sort.

    Args:
      logits, allowed: as for `target_log_probs`.
      inverse: inverse temperature.
      top_k, top_p, min_p: as in `SamplingParams`.
      find_best: rows whose argmax is wanted.
    """
    peak = row_peak(logits, allowed)

    def scores(logits: Array) -> Array:
        return scale(logits, peak, inverse[:, None], allowed)

    top_k, top_p = top_k[:, None], top_p[:, None]
    # Every filter keeps the scores above a floor: min-p first, then the searches raise it where a row asks for it.
    floor = jnp.broadcast_to(jnp.log(min_p)[:, None], peak.shape)
    floor = lax.cond(
        jnp.any(top_k > 0),
        lambda: jnp.where(top_k > 0, jnp.maximum(floor, _top_k_floor(logits, scores, top_k)), floor),
        lambda: floor,
    )
    floor = lax.cond(
        jnp.any(top_p < 1),
        lambda: jnp.where(top_p < 1, jnp.maximum(floor, _top_p_floor(logits, scores, floor, top_p)), floor),
        lambda: floor,
    )
    log_mass = jnp.log(jnp.sum(_weights(scores(logits), floor), axis=-1))
    best = lax.cond(
        jnp.any(find_best),
        lambda: jnp.argmax(scores(logits), axis=-1).astype(jnp.int32),
        lambda: jnp.zeros(peak.shape, jnp.int32),
    )
    return RowFloors(jnp.where(peak > -jnp.inf, peak, 0.0), floor, log_mass, best)


def scale(
    logits: Float[Array, "*rows V"],
    peak: Float[Array, "*rows"],
    inverse: Float[Array, "..."],
    allowed: Bool[Array, " V"],
) -> Float[Array, "*rows V"]:
    """(logits - peak) * inverse temperature in fp32: at most 0, -inf where not allowed, never NaN."""
    # The peak goes first, so that nothing overflows upwards; an empty row's is -inf, and -inf - -inf would be NaN.
    return (_clean(logits, allowed) - jnp.where(peak > -jnp.inf, peak, 0.0)[..., None]) * inverse[..., None]


def row_peak(logits: Float[Array, "*rows V"], allowed: Bool[Array, " V"]) -> Float[Array, "*rows"]:
    """The largest allowed logit of each row, in fp32."""
    return jnp.max(_clean(logits, allowed), axis=-1)


def _clean(logits: Array, allowed: Array) -> Array:
    logits = logits.astype(jnp.float32)
    usable = ~jnp.isnan(logits) & allowed.reshape((1,) * (logits.ndim - 1) + allowed.shape)
    return jnp.where(usable, jnp.minimum(logits, jnp.finfo(jnp.float32).max), -jnp.inf)


def _top_k_floor(logits: Array, scores: Callable[[Array], Array], top_k: Array) -> Array:
    return _largest_floor(logits, scores, lambda z: jnp.ones_like(z, jnp.int32), top_k)


def _top_p_floor(logits: Array, scores: Callable[[Array], Array], floor: Array, top_p: Array) -> Array:
    target = top_p * jnp.sum(_weights(scores(logits), floor), axis=-1)
    return _largest_floor(logits, scores, lambda z: _weights(z, floor), target)


def _weights(z: Array, floor: Array) -> Array:
    return jnp.where(z >= floor[..., None], jnp.exp(z), 0.0)


def _largest_floor(
    logits: Array, scores: Callable[[Array], Array], measure: Callable[[Array], Array], target: Array
) -> Array:
    """The largest t for which the tokens with score >= t measure at least target; -inf where all together do not.

    Scores are <= 0, so -t has the order of its bits, and its bits are found a digit at a time from the top: exact to
    the last bit, also among equal scores, in 32 / _DIGIT_BITS readings.
    """

    def add_digit(found: Array, shift: Array) -> tuple[Array, None]:
        # The barrier keeps scores and weights inside the sums: XLA would hoist them out of the loop as buffers.
        found, fresh = lax.optimization_barrier((found, logits))
        z = scores(fresh)
        weight = measure(z)
        zero = jnp.zeros((), weight.dtype)
        steps = jnp.arange(1, 2**_DIGIT_BITS, dtype=jnp.uint32) << shift
        last = jnp.minimum(found[..., None] + steps[None, None] - jnp.uint32(1), jnp.uint32(_INFINITY_BITS))
        floors = -lax.bitcast_convert_type(last, jnp.float32)
        masked = [jnp.where(z >= floors[..., i : i + 1], weight, zero) for i in range(2**_DIGIT_BITS - 1)]
        # One reduction with many accumulators: separate sums would read the logits (or buffer the masks) once each.
        measured = lax.reduce(masked, [zero] * len(masked), _add_each, (z.ndim - 1,))
        digit = sum((m < target).astype(jnp.uint32) for m in measured)
        return found + (digit << shift), None

    shifts = jnp.asarray(np.arange(32 - _DIGIT_BITS, -1, -_DIGIT_BITS), jnp.uint32)
    found, _ = lax.scan(add_digit, jnp.zeros_like(logits[..., 0], jnp.uint32), shifts)
    return -lax.bitcast_convert_type(jnp.minimum(found, jnp.uint32(_INFINITY_BITS)), jnp.float32)


def _add_each(left: Sequence[Array], right: Sequence[Array]) -> list[Array]:
    return [a + b for a, b in zip(left, right, strict=True)]
