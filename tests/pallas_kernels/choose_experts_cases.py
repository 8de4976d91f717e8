"""Inputs of `choose_experts`, and its oracle: numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np

# float32 noise of sigmoids of sums of up to 6,144 products, of size one.
SCORE_TOLERANCE = 2e-6
CLOSE = 4e-6  # biased scores that rounding may exchange


def arguments(rows: int, experts: int, hidden: int, *, seed: int = 0, dtype=jnp.bfloat16) -> tuple[jax.Array, ...]:
    """x, weight, bias; logits have a standard deviation of one."""
    rng = np.random.default_rng([rows, experts, hidden, seed])
    x = jnp.asarray(rng.normal(size=(rows, hidden)), dtype)
    weight = jnp.asarray(rng.normal(size=(experts, hidden)) * hidden**-0.5, jnp.float32)
    return x, weight, jnp.asarray(0.1 * rng.normal(size=experts), jnp.float32)


def oracle(x: jax.Array, weight: jax.Array, bias: jax.Array, top_k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """-> experts, weights, whether a row's choice and order are beyond rounding; NaN first, then the lower index."""
    x, weight, bias = (np.asarray(a, np.float64) for a in (x, weight, bias))
    with np.errstate(all="ignore"):
        scores = 1 / (1 + np.exp(-x @ weight.T))
        biased = scores + bias
        experts = np.argsort(np.where(np.isnan(biased), -np.inf, -biased), axis=-1, kind="stable")
        # A NaN goes before +inf, which the key above takes for its equal: there is none here.
        ranked = np.take_along_axis(biased, experts, -1)[:, : top_k + 1]
        gaps = ranked[:, :-1] - ranked[:, 1:]
        clear = np.all((gaps > CLOSE) | np.isnan(gaps), axis=-1)
        chosen = np.take_along_axis(scores, experts[:, :top_k], -1)
        return experts[:, :top_k], chosen / chosen.sum(-1, keepdims=True), clear


def check(found, x: jax.Array, weight: jax.Array, bias: jax.Array, top_k: int) -> None:
    """Raises AssertionError where the choice or its weights are wrong."""
    experts, weights, clear = oracle(x, weight, bias, top_k)
    assert clear.mean() > 0.9
    assert found[0].dtype == jnp.int32 and found[1].dtype == jnp.float32
    assert found[0].shape == found[1].shape == (x.shape[0], top_k)
    np.testing.assert_array_equal(np.asarray(found[0])[clear], experts[clear])
    np.testing.assert_allclose(np.asarray(found[1])[clear], weights[clear], atol=SCORE_TOLERANCE, rtol=0)


def special(rows: int, experts: int, hidden: int) -> dict[str, tuple[jax.Array, ...]]:
    """Inputs whose choice is known: name -> x, weight, bias."""
    x, weight, bias = arguments(rows, experts, hidden)
    zero = jnp.zeros_like(weight)
    return {
        "all equal": (x, zero, jnp.zeros_like(bias)),
        "pairs equal": (x, zero, jnp.repeat(bias[: experts // 2], 2)),
        "some never": (x, weight, bias.at[: experts // 2].set(-jnp.inf)),
        "all but two never": (x, weight, jnp.full_like(bias, -jnp.inf).at[jnp.asarray([1, experts - 1])].set(0.0)),
        "one NaN weight": (x, weight.at[experts // 2, 3].set(jnp.nan), bias),
        "one NaN bias": (x, weight, bias.at[2].set(jnp.nan)),
        "a NaN row": (x.at[0].set(jnp.nan), weight, bias),
        "saturated": (x, weight * 1000, bias),
        "zeros of both signs": (x, zero, jnp.resize(jnp.asarray([-0.5, -0.5, -0.75], jnp.float32), bias.shape)),
    }
