"""`verify`: what it promises on every call, whatever the rows look like."""

import re
from functools import partial

import hypothesis
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import sampling_oracles as oracles
from hypothesis import strategies as st

from dspark_jax import sampling
from dspark_jax.sampling import drafting, keys
from dspark_jax.sampling.methods import VERIFICATION_METHODS

METHODS = ("standard", "block", "match")
REJECTING = ("standard", "block")


@partial(jax.jit, static_argnames="method")
def compiled(draft_tokens, log_q, log_p, step_keys, *, method, **options):
    log_q = None if method == "match" else log_q
    return sampling.verify(draft_tokens, log_q, log_p, keys=step_keys, method=method, **options)


def verify(draft_tokens, log_q, log_p, step_keys, *, method, lengths=None, valid=None, greedy=None):
    """`verify` with every option given, so that calls of one shape share a compilation."""
    rows, slots = draft_tokens.shape
    options = {
        "draft_lengths": jnp.full((rows,), slots, jnp.int32) if lengths is None else jnp.asarray(lengths, jnp.int32),
        "greedy": jnp.zeros((rows,), bool) if greedy is None else jnp.asarray(greedy),
    }
    if log_q is not None:
        options["proposal_valid"] = jnp.ones((rows,), bool) if valid is None else jnp.asarray(valid)
    return compiled(draft_tokens, log_q, log_p, step_keys, method=method, **options)


@partial(jax.jit, static_argnames="method")
def law(draft_tokens, log_q, log_p, *, method, **options):
    log_q = None if method == "match" else log_q
    return sampling.acceptance(draft_tokens, log_q, log_p, method=method, **options)


def random_rows(batch=512, slots=4, vocab=6, *, scale=1.5, seed=0):
    """Drafts that were drawn from log_q, and unrelated targets."""
    rng = np.random.default_rng(seed)
    log_q = oracles.log_softmax(rng.normal(size=(batch, slots, vocab)) * scale)
    log_p = oracles.log_softmax(rng.normal(size=(batch, slots + 1, vocab)) * scale)
    tokens = np.argmax(log_q + rng.gumbel(size=log_q.shape), axis=-1)
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(log_q, jnp.float32), jnp.asarray(log_p, jnp.float32)


def test_one_draft_standard_and_block_are_bitwise_equal():
    rows = random_rows(4096, 1, 50)
    step_keys = sampling.request_keys(range(4096))
    results = [(*compiled(*rows, step_keys, method=m), *law(*rows, method=m)) for m in REJECTING]
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
    assert 0 < int(results[0][1].sum()) < 4096


def test_one_verified_draft_of_several_standard_and_block_are_bitwise_equal():
    rows = random_rows()
    step_keys = sampling.request_keys(range(512))
    one, other = (verify(*rows, step_keys, method=m, lengths=np.ones(512)) for m in REJECTING)
    np.testing.assert_array_equal(one.tokens, other.tokens)
    one, other = (verify(*rows, step_keys, method=m) for m in REJECTING)
    assert (one.tokens != other.tokens).any()


def test_block_never_accepts_less_on_average():
    for seed, scale in enumerate((0.1, 0.5, 1.5, 4.0)):
        rows = random_rows(scale=scale, seed=seed)
        log_rho = {m: np.asarray(law(*rows, method=m)[0]) for m in REJECTING}
        # Prefix by prefix, given the prefix; averaged over later drafts it is the acceptance length.
        assert (log_rho["block"] >= log_rho["standard"] - 1e-5).all()
        np.testing.assert_allclose(log_rho["block"][:, 0], log_rho["standard"][:, 0], atol=1e-6)
        assert (log_rho["block"] > log_rho["standard"] + 1e-3).any()


@pytest.mark.parametrize("method", REJECTING)
def test_equal_laws_accept_everything(method):
    batch, slots, vocab = 10_000, 7, 32
    rng = np.random.default_rng(5)
    log_p = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(batch, slots + 1, vocab)) * 2, jnp.float32))
    tokens = jnp.asarray(rng.integers(0, vocab, size=(batch, slots)), jnp.int32)
    step_keys = sampling.request_keys(range(batch))
    assert (verify(tokens, log_p[:, :-1], log_p, step_keys, method=method).num_accepted == slots).all()
    lengths = jnp.asarray(rng.integers(0, slots + 1, size=batch), jnp.int32)
    ragged = verify(tokens, log_p[:, :-1], log_p, step_keys, method=method, lengths=lengths)
    np.testing.assert_array_equal(ragged.num_accepted, lengths)
    off = verify(tokens, jnp.roll(log_p[:, :-1], 1, axis=-1), log_p, step_keys, method=method)
    assert (off.num_accepted < slots).any()


# A pattern of -inf in both rows: anything the filters or a smaller draft vocabulary can produce, and more.
pattern = st.lists(st.booleans(), min_size=4, max_size=4)
SLOTS, VOCAB = 3, 4


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(
    p_holes=st.lists(pattern, min_size=SLOTS + 1, max_size=SLOTS + 1),
    q_holes=st.lists(pattern, min_size=SLOTS, max_size=SLOTS),
    tokens=st.lists(st.integers(-1, VOCAB), min_size=SLOTS, max_size=SLOTS),
    length=st.integers(0, SLOTS),
    valid=st.booleans(),
    greedy=st.booleans(),
    scale=st.sampled_from([0.0, 1.0, 30.0, 300.0]),
    seed=st.integers(0, 1000),
    method=st.sampled_from(METHODS),
)
def test_invariants_for_any_pattern_of_zeros(p_holes, q_holes, tokens, length, valid, greedy, scale, seed, method):
    rng = np.random.default_rng(seed)

    def rows(holes):
        logits = np.where(holes, -np.inf, rng.normal(size=np.shape(holes)) * scale)
        full = np.isneginf(logits).all(-1, keepdims=True)
        return np.where(full, -np.inf, oracles.log_softmax(np.where(full, 0.0, logits))).astype(np.float32)

    log_p, log_q = rows(p_holes), rows(q_holes)
    draft_tokens = jnp.asarray([tokens], jnp.int32)
    arguments = (draft_tokens, jnp.asarray(log_q[None]), jnp.asarray(log_p[None]))
    emitted, num_accepted = verify(
        *arguments, sampling.request_keys([seed]), method=method, lengths=[length], valid=[valid], greedy=[greedy]
    )
    options = {"draft_lengths": jnp.asarray([length], jnp.int32), "proposal_valid": jnp.asarray([valid])}
    log_rho, h = law(*arguments, method=method, **options)
    emitted, num_accepted = np.asarray(emitted)[0], int(num_accepted[0])
    assert 0 <= num_accepted <= length
    np.testing.assert_array_equal(emitted[:num_accepted], tokens[:num_accepted])
    np.testing.assert_array_equal(emitted[num_accepted + 1 :], -1)
    for slot in range(num_accepted):
        assert log_p[slot, emitted[slot]] > -np.inf
    last = emitted[num_accepted]
    if np.isneginf(log_p[num_accepted]).all():
        assert last == -1
    else:
        assert log_p[num_accepted, last] > -np.inf
        if num_accepted < length and not greedy and log_p[num_accepted].max() < -1e-6:
            assert last != tokens[num_accepted], "the rejected draft was drawn again"
    log_rho, h = np.asarray(log_rho)[0], np.asarray(h)[0]
    assert not np.isnan(log_rho).any() and not np.isnan(h).any()
    assert (h >= 0).all() and (h <= 1).all() and (h[length:] == 0).all() and (log_rho <= 0).all()
    if method != "block":
        assert (np.diff(log_rho[log_rho > -np.inf]) <= 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_slots_behind_the_draft_length_do_not_matter(method):
    draft_tokens, log_q, log_p = random_rows()
    lengths = np.arange(512) % 5
    step_keys = sampling.request_keys(range(512))
    behind = np.arange(4)[None] >= lengths[:, None]
    blank_p = jnp.pad(jnp.asarray(behind), ((0, 0), (1, 0)))[..., None]
    plain = verify(draft_tokens, log_q, log_p, step_keys, method=method, lengths=lengths)
    blanked = verify(
        jnp.where(jnp.asarray(behind), -1, draft_tokens),
        jnp.where(jnp.asarray(behind)[..., None], -jnp.inf, log_q),
        jnp.where(blank_p, -jnp.inf, log_p),
        step_keys,
        method=method,
        lengths=lengths,
    )
    np.testing.assert_array_equal(plain.tokens, blanked.tokens)
    unlimited = verify(draft_tokens, log_q, log_p, step_keys, method=method)
    assert (unlimited.tokens != plain.tokens).any()


@pytest.mark.parametrize("method", REJECTING)
def test_no_drafts_is_a_plain_draw(method):
    draft_tokens, log_q, log_p = random_rows()
    step_keys = sampling.request_keys(range(512))
    blank = jnp.full_like(draft_tokens, -1)
    emitted, num_accepted = verify(blank, log_q, log_p, step_keys, method=method, lengths=np.zeros(512))
    assert not num_accepted.any()
    np.testing.assert_array_equal(emitted[:, 0], sampling.sample(log_p[:, 0], step_keys))


@pytest.mark.parametrize("method", REJECTING)
def test_rows_without_a_proposal_use_the_one_hot_rule(method):
    draft_tokens, log_q, log_p = random_rows()
    step_keys = sampling.request_keys(range(512))
    valid = np.arange(512) % 2 == 0
    garbage = jnp.where(jnp.asarray(valid)[:, None, None], log_q, jnp.nan)
    mixed = verify(draft_tokens, garbage, log_p, step_keys, method=method, valid=valid)
    with_q = verify(draft_tokens, log_q, log_p, step_keys, method=method)
    without = verify(draft_tokens, None, log_p, step_keys, method=method)
    np.testing.assert_array_equal(mixed.tokens, jnp.where(jnp.asarray(valid)[:, None], with_q.tokens, without.tokens))
    assert (with_q.tokens != without.tokens).any()


def test_the_one_hot_rule_is_the_general_rule_with_a_one_hot_proposal():
    draft_tokens, _, log_p = random_rows()
    one_hot = jnp.where(jnp.arange(6)[None, None] == draft_tokens[..., None], 0.0, -jnp.inf).astype(jnp.float32)
    for method in REJECTING:
        given, short = (law(draft_tokens, log_q, log_p, method=method) for log_q in (one_hot, None))
        for one, other in zip(given, short, strict=True):
            np.testing.assert_allclose(np.exp(one), np.exp(other), atol=1e-6)


def test_match_accepts_drafts_that_equal_the_targets_own_draws():
    draft_tokens, _, log_p = random_rows()
    step_keys = sampling.request_keys(range(512))
    own = np.stack([drafting.draw(log_p[:, i], keys.row_keys(step_keys, jnp.int32(i))) for i in range(5)], axis=1)
    equal = np.cumprod(own[:, :4] == np.asarray(draft_tokens), axis=1).sum(axis=1)
    emitted, num_accepted = verify(draft_tokens, None, log_p, step_keys, method="match")
    np.testing.assert_array_equal(num_accepted, equal)
    np.testing.assert_array_equal(emitted, np.where(np.arange(5)[None] <= equal[:, None], own, -1))
    assert len(np.unique(equal)) >= 4


@pytest.mark.parametrize("method", METHODS)
def test_greedy_rows_beside_sampled_ones(method):
    draft_tokens, log_q, log_p = random_rows()
    step_keys = sampling.request_keys(range(512))
    greedy = np.arange(512) % 3 == 0
    mixed = verify(draft_tokens, log_q, log_p, step_keys, method=method, greedy=greedy)
    sampled = verify(draft_tokens, log_q, log_p, step_keys, method=method)
    all_greedy = verify(draft_tokens, log_q, log_p, step_keys, method=method, greedy=np.ones(512, bool))
    np.testing.assert_array_equal(mixed.tokens, np.where(greedy[:, None], all_greedy.tokens, sampled.tokens))
    best = np.asarray(jnp.argmax(log_p, axis=-1))
    accepted = np.cumprod(best[:, :4] == np.asarray(draft_tokens), axis=1).sum(axis=1)
    np.testing.assert_array_equal(all_greedy.num_accepted, accepted)
    assert (np.asarray(sampled.num_accepted) != accepted).any()


@pytest.mark.parametrize("method", METHODS)
def test_one_hot_rows_make_the_greedy_decision_unasked(method):
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.integers(0, 3, size=(512, 5, 6)), jnp.float32)
    params = sampling.SamplingParams(temperature=0.0)
    log_p = sampling.target_log_probs(logits, params)
    draft_tokens, log_q, _ = random_rows()
    step_keys = sampling.request_keys(range(512))
    unasked = verify(draft_tokens, log_q, log_p, step_keys, method=method)
    named = verify(draft_tokens, log_q, log_p, step_keys, method=method, greedy=np.ones(512, bool))
    np.testing.assert_array_equal(unasked.tokens, named.tokens)
    best = np.asarray(logits).argmax(-1)
    stop = np.cumprod(best[:, :4] == np.asarray(draft_tokens), axis=1).sum(axis=1)
    np.testing.assert_array_equal(unasked.num_accepted, stop)
    last = np.take_along_axis(np.asarray(unasked.tokens), stop[:, None], axis=1)[:, 0]
    np.testing.assert_array_equal(last, best[np.arange(512), stop])


def test_a_proposal_is_refused_where_it_would_be_ignored():
    draft_tokens, log_q, log_p = random_rows(2, 2, 3)
    for call in (
        lambda: sampling.verify(draft_tokens, log_q, log_p, keys=sampling.request_keys([1, 2]), method="match"),
        lambda: sampling.acceptance(draft_tokens, log_q, log_p, method="match"),
    ):
        with pytest.raises(ValueError, match=r'log_q was given to method "match".*pass log_q=None'):
            call()


@pytest.mark.parametrize("name", ["keys", "draft_lengths", "proposal_valid", "greedy"])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_what_belongs_to_another_batch_is_one_sentence(name, method, monkeypatch):
    draft_tokens, log_q, log_p = random_rows(2, 2, 3)
    right = {
        "keys": sampling.request_keys([1, 2]),
        "draft_lengths": jnp.asarray([2, 1], jnp.int32),
        "proposal_valid": jnp.asarray([True, False]),
        "greedy": jnp.asarray([True, False]),
    }
    sampling.verify(draft_tokens, log_q, log_p, method=method, **right)
    # A user has no type checker that would refuse the shape before.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    for wrong in (right[name][:1], jnp.concatenate([right[name]] * 2), right[name][:, None]):
        message = f"{name} has shape {wrong.shape} for drafts (2, 2): it has to be [B]."
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            sampling.verify(draft_tokens, log_q, log_p, method=method, **(right | {name: wrong}))


def test_unknown_methods_are_named_with_the_known_ones():
    draft_tokens, log_q, log_p = random_rows(2, 2, 3)
    with pytest.raises(ValueError, match="'blokc' does not exist: choose one of standard, block, match"):
        sampling.verify(draft_tokens, log_q, log_p, keys=sampling.request_keys([1, 2]), method="blokc")
    with pytest.raises(ValueError, match="'blokc' does not exist"):
        sampling.expected_acceptance_length(jnp.zeros((1, 2), jnp.float32), method="blokc")
    assert list(VERIFICATION_METHODS) == ["standard", "block", "match"]


def test_the_one_hot_residual_needs_the_drafts():
    draft_tokens, _, log_p = random_rows(2, 2, 3)
    log_rho, _ = sampling.acceptance(draft_tokens, None, log_p, method="block")
    with pytest.raises(ValueError, match="needs draft_tokens"):
        sampling.residual_log_probs(None, log_p, log_rho, jnp.zeros((2,), jnp.int32), method="block")


def test_sample_takes_the_argmax_of_greedy_rows_and_never_an_impossible_token():
    rng = np.random.default_rng(9)
    log_p = np.where(rng.random((300, 8)) < 0.5, -np.inf, rng.normal(size=(300, 8))).astype(np.float32)
    log_p[0] = -np.inf
    greedy = np.arange(300) % 2 == 1
    tokens = np.asarray(
        sampling.sample(jnp.asarray(log_p), sampling.request_keys(range(300)), greedy=jnp.asarray(greedy))
    )
    empty = np.isneginf(log_p).all(-1)
    np.testing.assert_array_equal(tokens[empty], -1)
    np.testing.assert_array_equal(tokens[greedy & ~empty], log_p.argmax(-1)[greedy & ~empty])
    assert (log_p[~empty][np.arange((~empty).sum()), tokens[~empty]] > -np.inf).all()
    assert (tokens[~greedy] != log_p.argmax(-1)[~greedy]).any()


@pytest.mark.parametrize("method", METHODS)
def test_lengths_beyond_the_drafts_mean_all_of_them(method, rng_key):
    log_p = jax.nn.log_softmax(jax.random.normal(rng_key, (2, 3, 5)), axis=-1)
    log_q = None if method == "match" else jax.nn.log_softmax(jax.random.normal(rng_key, (2, 2, 5)) * 0.5, axis=-1)
    tokens = jnp.asarray([[1, 2], [3, 0]], jnp.int32)
    laws = [
        sampling.acceptance(tokens, log_q, log_p, method=method, draft_lengths=jnp.full((2,), n, jnp.int32))
        for n in (2, 9)
    ]
    for exact, beyond in zip(*laws, strict=True):
        np.testing.assert_array_equal(exact, beyond)
