"""`draft`: what each token is conditioned on, what is stored, and what greedy rows do."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling_oracles as oracles

from dspark_jax import sampling
from dspark_jax.sampling import keys

B, K, V, H, R = 6, 4, 13, 3, 5
# fp32 against float64 on logits of a few units.
LOG_PROB_TOLERANCE = 1e-5


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    base = rng.normal(size=(B, K, V)).astype(np.float32) * 2
    hidden = rng.normal(size=(B, K, H)).astype(np.float32)
    anchor = rng.integers(0, V, size=B).astype(np.int32)
    first, second = rng.normal(size=(V, R)).astype(np.float32), rng.normal(size=(R, V)).astype(np.float32)
    return base, hidden, anchor, first, second


BASE, HIDDEN, ANCHOR, FIRST, SECOND = inputs()


def markov(previous, hidden, carry):
    """Bias from the previous token, the slot's hidden state and everything before it in the block."""
    embedding = jnp.asarray(FIRST)[previous]
    state = embedding if carry is None else 0.5 * carry + embedding
    bias = state @ jnp.asarray(SECOND) + jnp.sum(hidden, axis=1, keepdims=True) * jnp.asarray(SECOND)[:1]
    return bias, embedding, state


def dense_bias(tokens_before, slot, row):
    """The same head, as a loop over the tokens of one row."""
    state = np.zeros(R)
    for i, token in enumerate(tokens_before):
        state = FIRST[token].astype(np.float64) if i == 0 else 0.5 * state + FIRST[token]
    return state @ SECOND.astype(np.float64) + HIDDEN[row, slot].sum(dtype=np.float64) * SECOND[0]


@partial(jax.jit, static_argnames=("method", "head"))
def compiled(base, temperature, step_keys, allowed, *, method, head):
    return sampling.draft(
        base,
        jnp.asarray(HIDDEN),
        jnp.asarray(ANCHOR),
        markov=head,
        temperature=temperature,
        keys=step_keys,
        method=method,
        allowed=allowed,
    )


def run(method="ancestral", temperature=1.0, allowed=None, base=BASE, head=markov):
    temperature = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (B,))
    allowed = jnp.asarray(np.ones(V, bool) if allowed is None else allowed)
    return compiled(jnp.asarray(base), temperature, sampling.request_keys(range(B)), allowed, method=method, head=head)


def conditional_log_q(tokens, temperature):
    """[B, K, V]: the softmax that each slot should have been drawn from, given the tokens drawn before it."""
    rows = [[BASE[b, k] + dense_bias([ANCHOR[b], *tokens[b, :k]], k, b) for k in range(K)] for b in range(B)]
    return oracles.log_softmax(np.array(rows) / temperature)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_each_slot_is_conditioned_on_the_token_drawn_before_it(temperature):
    drafted = run(temperature=temperature)
    wanted = conditional_log_q(np.asarray(drafted.tokens), temperature)
    np.testing.assert_allclose(drafted.log_q, wanted, atol=LOG_PROB_TOLERANCE, rtol=LOG_PROB_TOLERANCE)
    before = np.concatenate([ANCHOR[:, None], np.asarray(drafted.tokens)[:, :-1]], axis=1)
    np.testing.assert_array_equal(drafted.prev_embeddings, FIRST[before])
    assert drafted.tokens.dtype == jnp.int32 and drafted.log_q.dtype == jnp.float32


def test_the_comparison_sees_a_head_fed_with_the_argmax_and_one_without_the_anchor():
    chain = np.asarray(run("greedy").tokens)
    sampled = run()
    assert np.abs(conditional_log_q(chain, 1.0) - np.asarray(sampled.log_q)).max() > 0.1

    def first_slot_unconditioned(previous, hidden, carry):
        bias, embedding, state = markov(previous, hidden, carry)
        return (0 * bias if carry is None else bias), embedding, state

    wrong = run(head=first_slot_unconditioned)
    assert np.abs(conditional_log_q(np.asarray(wrong.tokens), 1.0) - np.asarray(wrong.log_q)).max() > 0.1


def test_tokens_are_drawn_from_the_stored_numbers_with_the_slots_own_noise():
    step_keys = sampling.request_keys(range(B))
    drafted = run()
    for k in range(K):
        noise = keys.gumbels(keys.draft_keys(step_keys, k), V)
        np.testing.assert_array_equal(drafted.tokens[:, k], jnp.argmax(drafted.log_q[:, k] + noise, axis=-1))


def test_many_drafts_have_the_stored_law():
    streams = 50_000
    first = np.asarray(run().log_q)[0, 0].astype(np.float64)
    log_q = jnp.broadcast_to(
        jnp.asarray(BASE[0, 0] + dense_bias([ANCHOR[0]], 0, 0).astype(np.float32))[None, None], (streams, 1, V)
    )
    tokens = jax.jit(
        lambda step_keys: (
            sampling.draft(
                log_q,
                jnp.zeros((streams, 1, 1), jnp.float32),
                jnp.zeros((streams,), jnp.int32),
                markov=lambda previous, hidden, carry: (jnp.zeros((streams, 1), jnp.float32), hidden, carry),
                temperature=1.0,
                keys=step_keys,
                method="ancestral",
            ).tokens
        )
    )(sampling.request_keys(range(streams)))
    statistic, critical = oracles.chi_square(
        np.bincount(np.asarray(tokens)[:, 0], minlength=V), streams * np.exp(first)
    )
    assert statistic < critical


def argmax_chain():
    tokens = np.zeros((B, 0), int)
    for k in range(K):
        rows = [BASE[b, k] + dense_bias([ANCHOR[b], *tokens[b]], k, b) for b in range(B)]
        tokens = np.concatenate([tokens, np.argmax(rows, axis=-1)[:, None]], axis=1)
    return tokens


def test_greedy_method_is_the_argmax_chain_and_stores_no_proposal():
    drafted = run("greedy", temperature=1.0)
    np.testing.assert_array_equal(drafted.tokens, argmax_chain())
    assert drafted.log_q is None
    assert (np.asarray(run().tokens) != argmax_chain()).any()


def test_greedy_rows_draft_the_argmax_chain_beside_sampled_ones():
    temperature = np.array([0, 1, 0, 1e-6, 1, 0.7], np.float32)
    drafted, sampled = run(temperature=temperature), run(temperature=np.maximum(temperature, 0.5))
    greedy = temperature < 1e-5
    np.testing.assert_array_equal(np.asarray(drafted.tokens)[greedy], argmax_chain()[greedy])
    np.testing.assert_array_equal(np.asarray(drafted.tokens)[~greedy], np.asarray(sampled.tokens)[~greedy])
    one_hot = np.where(np.arange(V) == argmax_chain()[greedy][..., None], 0, -np.inf)
    np.testing.assert_array_equal(np.asarray(drafted.log_q)[greedy], one_hot)
    all_greedy = run(temperature=np.zeros(B, np.float32))
    np.testing.assert_array_equal(all_greedy.tokens, argmax_chain())


@pytest.mark.parametrize("method", ["ancestral", "greedy"])
def test_tokens_that_are_not_allowed_are_never_drafted(method):
    allowed = np.ones(V, bool)
    allowed[np.unique(argmax_chain())] = False
    drafted = run(method, allowed=allowed)
    assert allowed[np.asarray(drafted.tokens)].all()
    if method == "ancestral":
        log_q = np.asarray(drafted.log_q)
        assert (log_q[..., ~allowed] == -np.inf).all()
        np.testing.assert_allclose(np.exp(log_q).sum(-1), 1, atol=1e-5)


def test_the_first_of_equal_logits_wins():
    drafted = run(
        "greedy", base=np.zeros_like(BASE), head=lambda previous, hidden, carry: (0 * hidden[:, :1], hidden, carry)
    )
    np.testing.assert_array_equal(drafted.tokens, np.zeros((B, K)))


def test_bfloat16_logits_are_widened_before_they_are_scaled():
    narrow = jnp.asarray(BASE).astype(jnp.bfloat16)
    drafted, wide = (run(base=x, temperature=0.7) for x in (narrow, narrow.astype(jnp.float32)))
    assert drafted.log_q.dtype == jnp.float32
    np.testing.assert_array_equal(drafted.log_q, wide.log_q)


def test_a_broken_drafter_drafts_nothing_that_stands():
    base = BASE.copy()
    base[0] = np.nan
    base[1, 2] = -np.inf
    drafted = run(base=base)
    assert not np.isnan(np.asarray(drafted.log_q)).any()
    assert (np.asarray(drafted.tokens)[0] == -1).all() and np.asarray(drafted.tokens)[1, 2] == -1
    log_p = jax.nn.log_softmax(jnp.zeros((B, K + 1, V), jnp.float32))
    for method in ("standard", "block"):
        verified = sampling.verify(
            drafted.tokens, drafted.log_q, log_p, keys=sampling.request_keys(range(B)), method=method
        )
        assert verified.num_accepted[0] == 0 and verified.num_accepted[1] <= 2
        assert (np.asarray(verified.tokens)[:, 0] >= 0).all()


def test_unknown_method():
    with pytest.raises(ValueError, match="drafting method 'beam' does not exist: choose one of ancestral, greedy"):
        run("beam")
