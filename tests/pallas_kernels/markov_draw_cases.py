"""Inputs of `markov_draw`, and its oracle: numpy in float64, and the noise of `jax.random.gumbel`."""

import jax
import jax.numpy as jnp
import numpy as np

# float32 sums of at most 256 products of a few units, and of 200,064 exponentials.
LOGIT_TOLERANCE = 1e-5
MASS_TOLERANCE = 5e-6
# A token may lose to one whose noisy score is nearer than the rounding of scores up to 40, and of the bias over T.
DRAW_TOLERANCE = 2e-5
NAMES = ("logits", "latents", "index", "table", "allowed", "words", "inverse_temperature", "drawn")


def temperatures(batch: int) -> np.ndarray:
    return np.resize(np.array([1.0, 0.7, 0.0, 1.5, 0.05], np.float32), batch)


def arguments(
    batch: int, vocab: int, rank: int, *, slots: int = 2, seed: int = 0, spread: float = 2.0, latents: int = 50
) -> dict[str, jax.Array]:
    """Every fifth request but two is greedy; of the tokens a few are not allowed; logits hold NaN and infinities."""
    rng = np.random.default_rng(seed)
    logits = (spread * rng.normal(size=(batch, slots, vocab))).astype(np.float32)
    logits[:, :, vocab // 2] = np.nan
    logits[:, :, vocab // 3] = -np.inf
    temperature = temperatures(batch)
    greedy = temperature < 1e-5
    allowed = np.ones(vocab, bool)
    allowed[vocab // 5 :: 97] = False
    table, rows = (jnp.asarray(rng.normal(size=(n, rank)) * rank**-0.25, jnp.bfloat16) for n in (vocab, latents))
    return dict(
        logits=jnp.asarray(logits), latents=rows, index=jnp.asarray(rng.integers(-1, latents, batch), jnp.int32),
        table=table, allowed=jnp.asarray(allowed),
        words=jnp.asarray(rng.integers(0, 2**32, (batch, slots, 2), dtype=np.uint32)),
        inverse_temperature=jnp.asarray(np.float32(1) / np.where(greedy, np.float32(1), temperature)),
        drawn=jnp.asarray(~greedy),
    )  # fmt: skip


def noise(words: np.ndarray, vocab: int) -> np.ndarray:
    keys = jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")
    return np.asarray(jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32, mode="high"))(keys))


def scores(given: dict[str, jax.Array], slot: int) -> tuple[np.ndarray, np.ndarray]:
    """-> logits with their bias and scores, [B, V] in float64."""
    wide = {name: np.asarray(value, np.float64) for name, value in given.items() if name in ("latents", "table")}
    x = np.asarray(given["logits"], np.float64)[:, slot] + wide["latents"][np.asarray(given["index"])] @ wide["table"].T
    x = np.where(np.isnan(x) | ~np.asarray(given["allowed"])[None], -np.inf, np.minimum(x, np.finfo(np.float32).max))
    peak = x.max(axis=1, keepdims=True)
    z = (x - np.where(peak > -np.inf, peak, 0)) * np.asarray(given["inverse_temperature"], np.float64)[:, None]
    return x, z


def problems(given: dict[str, jax.Array], found, slot: int, *, keep: bool = True, gumbels=noise) -> list[str]:
    """What is wrong with the slot that was found, in words."""
    logits, token, peak, log_mass = (np.asarray(a) for a in found)
    before = np.asarray(given["logits"])
    x, z = scores(given, slot)
    empty = ~(x > -np.inf).any(axis=1)
    said = []
    others = [k for k in range(before.shape[1]) if k != slot]
    if not np.array_equal(logits[:, others], before[:, others], equal_nan=True):
        said.append("other slots were written")
    with np.errstate(invalid="ignore"):
        off = np.where(x == logits[:, slot], 0, np.abs(logits[:, slot] - x))
    if keep and not off.max() <= LOGIT_TOLERANCE:
        said.append(f"logits are off by {off.max()}")
    inverse = np.asarray(given["inverse_temperature"], np.float64)
    with np.errstate(divide="ignore"):
        whole = np.log(np.exp(z).sum(axis=1)) + np.where(empty, 0, x.max(axis=1)) * inverse
    mass = np.asarray(log_mass, np.float64) + np.asarray(peak, np.float64) * inverse
    off = np.where(empty, np.abs(peak) + np.abs(log_mass), np.abs(mass - whole) / np.maximum(1, inverse))
    if not off.max() <= MASS_TOLERANCE + LOGIT_TOLERANCE:
        said.append(f"the mass is off by {off.max()}")
    if not np.array_equal(token == -1, empty) or not ((token >= -1) & (token < x.shape[1])).all():
        return [*said, f"tokens {token.tolist()}, rows without a token {np.flatnonzero(empty).tolist()}"]
    drawn = np.asarray(given["drawn"])
    noisy = z + np.where(drawn[:, None], gumbels(np.asarray(given["words"])[:, slot], x.shape[1]), 0)
    own = np.where(empty, noisy.max(axis=1), np.take_along_axis(noisy, np.maximum(token, 0)[:, None], 1)[:, 0])
    with np.errstate(invalid="ignore"):
        lost = np.where(empty, 0, noisy.max(axis=1) - own) / np.maximum(1, inverse)
    if not lost.max() <= DRAW_TOLERANCE:
        said.append(f"tokens {token.tolist()} lose by {lost.tolist()}")
    return said


def equal_tokens(given: dict[str, jax.Array], slot: int) -> np.ndarray:
    """Of the oracle; rows in which two tokens come within twice the rounding have -2."""
    x, z = scores(given, slot)
    noisy = z + np.where(np.asarray(given["drawn"])[:, None], noise(np.asarray(given["words"])[:, slot], x.shape[1]), 0)
    second, first = np.partition(np.where(noisy > -np.inf, noisy, -1e30), -2, axis=1)[:, -2:].T
    inverse = np.asarray(given["inverse_temperature"])
    near = first - second <= 2 * DRAW_TOLERANCE * np.maximum(1, inverse)
    return np.where((x > -np.inf).any(axis=1), np.where(near, -2, noisy.argmax(axis=1)), -1)
