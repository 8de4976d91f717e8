"""Random numbers belong to a request, a step and a purpose, and to nothing else."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import sampling
from dspark_jax.sampling import keys

SEEDS = [3, 1, 2**40 + 7, 0, 2**64 - 1, 12]
K, V = 3, 17


def data(typed_keys):
    return np.asarray(jax.random.key_data(typed_keys))


def test_small_seeds_are_jaxs_own_and_large_ones_keep_all_their_bits():
    made = data(sampling.request_keys(SEEDS))
    np.testing.assert_array_equal(made[0], data(jax.random.key(3, impl="threefry2x32")))
    np.testing.assert_array_equal(made[2], [2**8, 7])
    np.testing.assert_array_equal(made[4], [2**32 - 1, 2**32 - 1])


def test_seeds_may_be_numbers_arrays_or_traced():
    wanted = data(sampling.request_keys([5, 6]))
    for seeds in (np.array([5, 6]), jnp.asarray([5, 6]), (5, 6), range(5, 7)):
        np.testing.assert_array_equal(data(sampling.request_keys(seeds)), wanted)
    traced = jax.jit(lambda s: jax.random.key_data(sampling.request_keys(s)))(jnp.asarray([5, 6], jnp.uint32))
    np.testing.assert_array_equal(traced, wanted)
    assert sampling.request_keys(5).shape == (1,)


@pytest.mark.parametrize(
    ("seeds", "error", "words"),
    [
        ([1, -1], ValueError, r"seed -1 is outside \[0, 2\*\*64\)"),
        ([2**64], ValueError, "outside"),
        (np.array([0.5]), TypeError, "not an integer"),
        (np.zeros((2, 2), int), ValueError, r"shape \(2, 2\)"),
    ],
    ids=str,
)
def test_bad_seeds(seeds, error, words):
    with pytest.raises(error, match=words):
        sampling.request_keys(seeds)


def test_keys_are_threefry_whatever_the_default_is():
    with jax.default_prng_impl("rbg"):
        assert jax.random.key_impl(sampling.request_keys([1, 2])) == "threefry2x32"


def test_no_two_uses_share_a_key():
    requests = sampling.request_keys([0, 1])
    streams = [
        data(stream)
        for step in range(3)
        for stream in (
            *(keys.draft_keys(sampling.step_keys(requests, step), slot) for slot in range(3)),
            sampling.purpose_keys(sampling.step_keys(requests, step), sampling.Purpose.COINS),
            sampling.purpose_keys(sampling.step_keys(requests, step), sampling.Purpose.FINAL),
            *(keys.row_keys(sampling.step_keys(requests, step), jnp.int32(row)) for row in range(3)),
        )
    ]
    every = np.concatenate(streams)
    assert len(np.unique(every, axis=0)) == len(every)


def test_steps_may_differ_from_row_to_row():
    requests = sampling.request_keys([4, 5])
    mixed = data(sampling.step_keys(requests, jnp.asarray([7, 9])))
    np.testing.assert_array_equal(mixed[0], data(sampling.step_keys(requests, 7))[0])
    np.testing.assert_array_equal(mixed[1], data(sampling.step_keys(requests, 9))[1])


def bits(requests):
    """Everything a step draws for each row, before any law is applied."""
    step = sampling.step_keys(requests, 5)
    final = keys.gumbels(sampling.purpose_keys(step, sampling.Purpose.FINAL), V)
    drafts = [keys.gumbels(keys.draft_keys(step, slot), V) for slot in range(K)]
    return np.asarray(jnp.concatenate([keys.coins(step, K), final, *drafts], axis=1))


def batches():
    """Row numbers of batches in which some requests return: alone, in another order, among others, padded."""
    yield from ([i] for i in range(len(SEEDS)))
    yield list(reversed(range(len(SEEDS))))
    yield [2, 2, 0]
    yield [*range(len(SEEDS)), *[0] * 10]


def same_in_any_batch(make_requests, draw):
    whole = draw(make_requests(range(len(SEEDS))))
    return all(np.array_equal(draw(make_requests(rows)), whole[rows]) for rows in map(list, batches()))


def test_bits_are_the_same_in_any_batch():
    assert same_in_any_batch(lambda rows: sampling.request_keys([SEEDS[i] for i in rows]), bits)


def test_the_comparison_sees_keys_that_depend_on_the_batch():
    def one_key_for_all(rows):
        return jax.random.split(sampling.request_keys([1])[0], len(list(rows)))

    assert not same_in_any_batch(one_key_for_all, bits)


def test_fewer_slots_do_not_shift_later_draws():
    step = sampling.step_keys(sampling.request_keys(SEEDS), 1)
    np.testing.assert_array_equal(keys.coins(step, 7)[:, :3], keys.coins(step, 3))


@partial(jax.jit, static_argnames="method")
def tokens_of(requests, base, log_p, method):
    step = sampling.step_keys(requests, 2)
    rows = requests.shape[0]
    block = sampling.draft(
        jnp.broadcast_to(base, (rows, *base.shape)),
        jnp.zeros((rows, K, 1), jnp.float32),
        jnp.zeros((rows,), jnp.int32),
        markov=lambda previous, hidden, carry: (jnp.zeros((rows, V), jnp.float32), hidden, carry),
        temperature=1.0,
        keys=step,
        method="ancestral",
    )
    log_q = None if method == "match" else block.log_q
    log_p = jnp.broadcast_to(log_p, (rows, *log_p.shape))
    verified = sampling.verify(block.tokens, log_q, log_p, keys=step, method=method)
    return jnp.concatenate([block.tokens, verified.tokens, sampling.sample(log_p[:, 0], step)[:, None]], axis=1)


# "standard" draws what "block" draws.
@pytest.mark.parametrize("method", ["block", "match"])
def test_tokens_are_the_same_in_any_batch(method):
    rng = np.random.default_rng(3)
    base = jnp.asarray(rng.normal(size=(K, V)), jnp.float32)
    log_p = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(K + 1, V)), jnp.float32))
    whole = np.asarray(tokens_of(sampling.request_keys(SEEDS), base, log_p, method))
    for rows in ([4], [*reversed(range(len(SEEDS))), *[0] * 10]):
        part = tokens_of(sampling.request_keys([SEEDS[i] for i in rows]), base, log_p, method)
        np.testing.assert_array_equal(part, whole[rows])
    other_seeds = tokens_of(sampling.request_keys(range(100, 100 + len(SEEDS))), base, log_p, method)
    assert (np.asarray(other_seeds) != whole).any()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_gumbel_noise_is_jaxs_own_in_its_finer_mode(impl):
    typed = jax.vmap(partial(jax.random.key, impl=impl))(jnp.arange(4, dtype=jnp.uint32))
    fine, coarse = (
        jax.vmap(lambda key, mode=mode: jax.random.gumbel(key, (1001,), jnp.float32, mode=mode))(typed)
        for mode in ("high", "low")
    )
    found = np.asarray(keys.gumbels(typed, 1001))
    np.testing.assert_allclose(found, fine, rtol=1e-6, atol=1e-6)
    assert (np.abs(found - np.asarray(coarse)) > 1e-3).any()


def test_gumbel_noise_reaches_into_the_tail():
    """The default noise stops at 16; a token of probability 1e-9 needs more to win as often as it should."""
    noise = np.asarray(keys.gumbels(sampling.request_keys(range(200)), 200_000))
    assert np.isfinite(noise).all()
    assert noise.max() > 16.7
    for level in (5.0, 10.0, 13.0):
        expected = noise.size * -np.expm1(-np.exp(-level))
        assert abs((noise > level).sum() - expected) < 5 * np.sqrt(expected) + 1
