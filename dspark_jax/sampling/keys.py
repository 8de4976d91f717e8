"""Random numbers, keyed by (request seed, verification step, purpose).

A request's key never depends on its batch row, its neighbours or the position in the text. Position-keyed noise would
make block verification lossy: its decision looks at drafts behind the place where it stops, and drafting there again
with the same noise would no longer be an independent draw.
"""

import enum
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float, Int, Key

SEED_BITS = 64


class Purpose(enum.IntEnum):
    """What a step's random numbers are used for. Every purpose has its own stream, so none is ever used twice."""

    DRAFT = 0  # the draft tokens, one stream a position
    COINS = 1  # acceptance
    FINAL = 2  # the correction or bonus token; every row's token under "match"; the token of a plain step


def request_keys(seeds: int | Sequence[int] | np.ndarray | Array) -> Key[Array, " B"]:
    """One typed key per request.

    Args:
      seeds: an integer or B integers in [0, 2**64). A traced array may have any integer dtype.

    Returns:
      Keys [B], of JAX's threefry implementation whatever the default is: others draw different numbers for a row
      when the batch changes. For seeds under 2**32 they equal `jax.random.key(seed)`.

    Raises:
      TypeError: a seed is not an integer.
      ValueError: a seed is outside [0, 2**64), or seeds has more than one axis.
    """
    if isinstance(seeds, Tracer):
        return _wrap(*_split_traced(seeds))
    array = np.asarray(seeds)
    if array.ndim > 1:
        raise ValueError(f"seeds has shape {array.shape}: pass one integer per request, shape [B].")
    values = np.atleast_1d(array).tolist() if isinstance(seeds, np.ndarray | Array) else _as_list(seeds)
    for seed in values:
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
            raise TypeError(f"seeds holds {seed!r}, which is not an integer.")
        if not 0 <= int(seed) < 2**SEED_BITS:
            raise ValueError(f"seed {seed} is outside [0, 2**{SEED_BITS}): choose a non-negative 64-bit integer.")
    words = [(int(seed) >> 32, int(seed) & 0xFFFFFFFF) for seed in values]
    high, low = np.array(words, np.uint32).reshape(-1, 2).T
    return _wrap(jnp.asarray(high), jnp.asarray(low))


def _as_list(seeds: int | Sequence[int]) -> list:
    return list(seeds) if isinstance(seeds, Sequence) else [seeds]


def _split_traced(seeds: Array) -> tuple[Array, Array]:
    if not jnp.issubdtype(seeds.dtype, jnp.integer):
        raise TypeError(f"seeds has dtype {seeds.dtype}: pass integers.")
    if seeds.ndim > 1:
        raise ValueError(f"seeds has shape {seeds.shape}: pass one integer per request, shape [B].")
    seeds = jnp.atleast_1d(seeds)
    wide = seeds.dtype.itemsize == 8
    high = (seeds >> jnp.asarray(32, seeds.dtype)).astype(jnp.uint32) if wide else jnp.zeros(seeds.shape, jnp.uint32)
    return high, seeds.astype(jnp.uint32)


def _wrap(high: Array, low: Array) -> Key[Array, " B"]:
    return jax.random.wrap_key_data(jnp.stack([high, low], axis=-1), impl="threefry2x32")


def step_keys(keys: Key[Array, " B"], step: int | Int[Array, ""] | Int[Array, " B"]) -> Key[Array, " B"]:
    """The keys of one step: `draft`, `verify` and `sample` take these and fold in their purpose.

    Args:
      keys: the requests' keys.
      step: how many steps the request has made (not its position in the text), for all rows or one per row.
    """
    steps = jnp.broadcast_to(jnp.asarray(step).astype(jnp.uint32), keys.shape)
    return jax.vmap(jax.random.fold_in)(keys, steps)


def purpose_keys(keys: Key[Array, " B"], purpose: Purpose) -> Key[Array, " B"]:
    """The keys of one purpose within a step."""
    return _fold(keys, jnp.uint32(purpose))


def draft_keys(keys: Key[Array, " B"], slot: int | Int[Array, ""]) -> Key[Array, " B"]:
    """The keys of draft slot 0..K-1 within a step."""
    return _fold(purpose_keys(keys, Purpose.DRAFT), jnp.asarray(slot).astype(jnp.uint32))


def row_keys(keys: Key[Array, " B"], row: Int[Array, ""]) -> Key[Array, " B"]:
    """The keys of target row 0..K within a step, where every row draws a token of its own."""
    return _fold(purpose_keys(keys, Purpose.FINAL), row.astype(jnp.uint32))


def _fold(keys: Key[Array, " B"], data: Array) -> Key[Array, " B"]:
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, data)


def coins(keys: Key[Array, " B"], num: int) -> Float[Array, "B num"]:
    """Uniform fp32 numbers in [0, 1), one for each draft slot, also for slots that are not verified."""
    draw = jax.vmap(lambda key: jax.random.uniform(key, (num,), jnp.float32))
    return draw(purpose_keys(keys, Purpose.COINS))


def gumbels(keys: Key[Array, " B"], num: int) -> Float[Array, "B num"]:
    """Standard Gumbel numbers in fp32, all finite, each row from its own key.

    The numbers of `jax.random.gumbel` in mode "high", whose default draws 23 bits a number, so that a token of
    probability under 1e-7 would come up too often or never.
    """
    if "threefry" not in str(jax.random.key_impl(keys)):
        return jax.vmap(lambda key: jax.random.gumbel(key, (num,), jnp.float32, mode="high"))(keys)
    # That function makes both halves of the bits as one array and then takes it apart: on a GPU they would lie in
    # memory, and be made by a kernel of their own in front of the draw.
    high, low = (_uniform(jax.random.key_data(keys), start, num) for start in (0, num))
    # Exact to the last of 46 bits near 0, where the large numbers come from.
    fine = jnp.where(high >= 0.5, high, high + jnp.float32(2**-23) * low + jnp.float32(2**-47))
    return -jnp.log(-jnp.log1p(-fine))


def _uniform(words: Array, start: int, num: int) -> Array:
    """What `jax.random.uniform` draws at places start to start + num of an array, for keys of words [B,2]."""
    shape = (words.shape[0], num)
    place = lax.broadcasted_iota(jnp.uint32, shape, 1) + jnp.uint32(start)
    first, second = (jnp.broadcast_to(words[:, i : i + 1], shape) for i in range(2))
    left, right = threefry2x32_p.bind(first, second, jnp.zeros(shape, jnp.uint32), place)
    mantissa = ((left ^ right) >> jnp.uint32(9)) | jnp.uint32(0x3F800000)
    return lax.bitcast_convert_type(mantissa, jnp.float32) - jnp.float32(1)
