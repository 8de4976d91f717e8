"""Chi-square on whole streams: the jitted chain of drafting and verification draws from the target's law.

Four tokens of streams with K = 2 and three drawable tokens, so at least two steps each; target and drafter depend on
the tokens before. Only this sees noise that is used twice, within a step or across steps; enumeration sees the rest.
"""

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling_oracles as oracles

from dspark_jax import sampling
from dspark_jax.sampling import drafting, keys, verification

STREAMS = 100_000
MANY_STREAMS = 400_000
TOKENS, SLOTS, VOCAB = 4, 2, 5
# Token 0 stands for the mask id, token 3 for padding: neither may ever be drawn.
DRAWABLE = np.array([1, 2, 4])
START = (2, 4)
TEMPERATURE = 0.8
METHODS = ("standard", "block", "match")


def tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Target logits [V, V, V] after two tokens; drafter logits [V, V, K, V] after two tokens; Markov bias [V, V]."""
    rng = np.random.default_rng(0)
    target = rng.normal(size=(VOCAB, VOCAB, VOCAB))
    base = np.stack([target, np.broadcast_to(target.mean(0), target.shape)], axis=2)
    # A drafter that leans only a little towards the target: most blocks are rejected somewhere.
    base = 0.2 * base + rng.normal(size=base.shape) * 0.6
    return tuple(x.astype(np.float32) for x in (target, base, rng.normal(size=(VOCAB, VOCAB)) * 0.5))


TARGET, BASE, BIAS = tables()
ALLOWED = np.isin(np.arange(VOCAB), DRAWABLE)


def exact_law(**filters: float) -> np.ndarray:
    """The target's law of four tokens, [3, 3, 3, 3], from the tables in float64."""
    law = np.zeros((len(DRAWABLE),) * TOKENS)
    for path in itertools.product(range(len(DRAWABLE)), repeat=TOKENS):
        context, log_p = START, 0.0
        for choice in path:
            row = oracles.filtered_log_probs(TARGET[context][DRAWABLE], temperature=TEMPERATURE, **filters)
            context, log_p = (context[1], DRAWABLE[choice]), log_p + row[choice]
        law[path] = np.exp(log_p)
    return law


def markov(previous, hidden, carry):
    return jnp.asarray(BIAS)[previous], jnp.asarray(BIAS)[previous], carry


def by_step(request_keys, step, length):
    return sampling.step_keys(request_keys, step)


@dataclasses.dataclass(frozen=True)
class Chain:
    """How streams are made. Everything but `method`, `drafting` and the honest lengths is a wrong variant."""

    method: str
    drafting: str = "ancestral"
    lengths: Callable | None = None
    step_keys: Callable = by_step
    filters: tuple = ()
    argmax_as_sampled: bool = False

    def step(self, context, step_keys):
        """One draft and one verification after two tokens -> Verified, expected acceptance length."""
        second, anchor = context[:, 0], context[:, 1]
        streams = anchor.shape[0]
        block = partial(
            sampling.draft,
            jnp.asarray(BASE)[second, anchor],
            jnp.broadcast_to(jnp.arange(SLOTS, dtype=jnp.float32)[None, :, None], (streams, SLOTS, 1)),
            anchor,
            temperature=TEMPERATURE,
            keys=step_keys,
            allowed=jnp.asarray(ALLOWED),
        )
        drafted = block(markov=markov, method=self.drafting)
        tokens, log_q = drafted.tokens, drafted.log_q
        if self.argmax_as_sampled:
            tokens = block(markov=markov, method="greedy").tokens
            chain = jnp.concatenate([anchor[:, None], tokens], axis=1)

            def forced(_, hidden, carry):
                return markov(chain[jnp.arange(streams), hidden[:, 0].astype(jnp.int32)], hidden, carry)

            log_q = block(markov=forced, method="ancestral").log_q
        before = jnp.concatenate([context, tokens], axis=1)
        logits = jnp.asarray(TARGET)[before[:, :-1], before[:, 1:]]
        params = sampling.SamplingParams(temperature=TEMPERATURE, **dict(self.filters))
        log_p = sampling.target_log_probs(logits, params, allowed=jnp.asarray(ALLOWED))
        if self.method == "match":
            log_q = None
        lengths = None if self.lengths is None else self.lengths(anchor, tokens)
        verified = sampling.verify(tokens, log_q, log_p, keys=step_keys, method=self.method, draft_lengths=lengths)
        _, h = sampling.acceptance(tokens, log_q, log_p, method=self.method, draft_lengths=lengths)
        return verified, sampling.expected_acceptance_length(h, method=self.method)

    def run(self, request_keys):
        """-> the first four tokens [N, 4]; accepted drafts and their expectation, summed over all steps [N]."""
        streams = request_keys.shape[0]
        text = jnp.broadcast_to(jnp.asarray(START, jnp.int32), (streams, 2))
        text = jnp.pad(text, ((0, 0), (0, TOKENS + SLOTS)))
        rows = jnp.arange(streams)[:, None]

        def advance(carry, step):
            text, length = carry
            context = text[rows, length[:, None] + jnp.asarray([[-2, -1]])]
            verified, expected = self.step(context, self.step_keys(request_keys, step, length))
            place = jnp.where(verified.tokens >= 0, length[:, None] + jnp.arange(SLOTS + 1)[None], text.shape[1])
            text = text.at[rows, place].set(verified.tokens, mode="drop")
            length = jnp.minimum(length + verified.num_accepted + 1, 2 + TOKENS)
            return (text, length), (verified.num_accepted, expected)

        start = (text, jnp.full((streams,), 2, jnp.int32))
        (text, _), (accepted, expected) = jax.lax.scan(advance, start, jnp.arange(TOKENS, dtype=jnp.int32))
        return text[:, 2 : 2 + TOKENS], jnp.sum(accepted, axis=0), jnp.sum(expected - 1, axis=0)


def streams_of(chain: Chain, streams: int, first_seed: int = 0):
    # A new function each time: a cached trace would not see what a test has patched.
    return [
        np.asarray(x)
        for x in jax.jit(lambda k: chain.run(k))(sampling.request_keys(range(first_seed, first_seed + streams)))
    ]


def chi_square(chain: Chain, streams: int, **exact_filters) -> tuple[float, float]:
    tokens, accepted, expected = streams_of(chain, streams)
    assert np.isin(tokens, DRAWABLE).all(), "a masked or padded token was drawn"
    assert accepted.sum() > streams // 20, "hardly any draft was accepted: the test would prove nothing"
    spread = (accepted - expected).std() / np.sqrt(streams)
    assert abs((accepted - expected).mean()) < 6 * spread, "accepted drafts are not what their law says"
    cells = np.ravel_multi_index(np.searchsorted(DRAWABLE, tokens).T, (len(DRAWABLE),) * TOKENS)
    counts = np.bincount(cells, minlength=len(DRAWABLE) ** TOKENS)
    return oracles.chi_square(counts, streams * exact_law(**exact_filters))


def ragged(anchor, tokens):
    """Decided before the token is looked at: slot 1 by the anchor, slot 2 by the first draft."""
    return jnp.where(anchor == 2, 1, jnp.where(tokens[:, 0] == 1, 1, 2)).astype(jnp.int32)


def anticipating(anchor, tokens):
    """Cuts a draft off because of what it is."""
    return jnp.where(tokens[:, 0] == 2, 0, SLOTS).astype(jnp.int32)


HONEST = {
    **{f"{method}": Chain(method) for method in METHODS},
    **{f"{method}, greedy drafts": Chain(method, drafting="greedy") for method in METHODS},
    **{f"{method}, ragged": Chain(method, lengths=ragged) for method in METHODS},
}


@pytest.mark.parametrize("name", HONEST)
def test_streams_have_the_targets_law(name):
    statistic, critical = chi_square(HONEST[name], STREAMS)
    assert statistic < critical


@pytest.mark.slow
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.7}], ids=str)
@pytest.mark.parametrize("name", HONEST)
def test_many_streams_have_the_targets_law(name, filters):
    chain = dataclasses.replace(HONEST[name], filters=tuple(filters.items()))
    statistic, critical = chi_square(chain, MANY_STREAMS, **filters)
    assert statistic < critical


@pytest.mark.parametrize("method", ["standard", "block"])
def test_sees_the_noise_of_a_draft_reused_for_the_correction(method, monkeypatch):
    def shared(step_keys, purpose):
        if purpose == sampling.Purpose.FINAL:
            return keys.draft_keys(step_keys, 0)
        return sampling.purpose_keys(step_keys, purpose)

    monkeypatch.setattr(verification, "purpose_keys", shared)
    statistic, critical = chi_square(Chain(method), STREAMS)
    assert statistic > critical


def keyed_by_position(monkeypatch):
    """Step keys that are the same in every step, and draft keys that count from the anchor's position."""
    position = {}

    def step_keys(request_keys, step, length):
        position["anchor"] = length
        return sampling.step_keys(request_keys, length)

    def draft_keys(step_keys, slot):
        request_keys = position["requests"]
        place = jnp.uint32(1000) + position["anchor"].astype(jnp.uint32) + jnp.uint32(slot)
        return jax.vmap(jax.random.fold_in)(request_keys, place)

    def remembering(request_keys, step, length):
        position["requests"] = request_keys
        return step_keys(request_keys, step, length)

    monkeypatch.setattr(drafting, "draft_keys", draft_keys)
    return remembering


def test_sees_noise_keyed_by_position_under_block(monkeypatch):
    chain = Chain("block", step_keys=keyed_by_position(monkeypatch))
    statistic, critical = chi_square(chain, STREAMS)
    assert statistic > critical


def test_noise_keyed_by_position_is_harmless_under_standard(monkeypatch):
    chain = Chain("standard", step_keys=keyed_by_position(monkeypatch))
    statistic, critical = chi_square(chain, STREAMS)
    assert statistic < critical


@pytest.mark.parametrize("method", ["standard", "block"])
def test_sees_argmax_drafts_verified_as_sampled(method):
    statistic, critical = chi_square(Chain(method, argmax_as_sampled=True), STREAMS)
    assert statistic > critical


@pytest.mark.parametrize("method", ["standard", "block"])
def test_sees_lengths_that_look_at_the_token(method):
    statistic, critical = chi_square(Chain(method, lengths=anticipating), STREAMS)
    assert statistic > critical


def test_the_one_hot_rule_forgives_lengths_that_look_at_the_token():
    statistic, critical = chi_square(Chain("match", lengths=anticipating), STREAMS)
    assert statistic < critical


def test_plain_draws_have_the_targets_law():
    log_p = jnp.asarray(oracles.log_softmax(TARGET[START][None].astype(np.float64)), jnp.float32)
    draw = jax.jit(lambda k: sampling.sample(jnp.broadcast_to(log_p, (k.shape[0], VOCAB)), k))
    tokens = np.asarray(draw(sampling.request_keys(range(STREAMS))))
    statistic, critical = oracles.chi_square(
        np.bincount(tokens, minlength=VOCAB), STREAMS * np.exp(np.asarray(log_p[0], np.float64))
    )
    assert statistic < critical
