"""`acceptance` and `residual_log_probs` against exact tables, and by enumeration against the target's joint law."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling_oracles as oracles

from dspark_jax import sampling
from dspark_jax.sampling.methods import VERIFICATION_METHODS

# Sums of at most six terms from fp32 logarithms: a numpy fp32 evaluation of the tables is off by 1.5e-6.
TABLE_TOLERANCE = 1e-5
# The residual is a difference, taken in the log domain where it does not cancel. Seen: 2e-6.
FINAL_TOLERANCE = 1e-5
# Where the table says that a state is reached at all.
REACHED = 1e-6
# The bar for losslessness by enumeration in fp32. Seen: 8e-8. The nearest wrong variant here: 1e-3.
JOINT_TOLERANCE = 1e-6
LENGTH_TOLERANCE = 1e-5

BOTH = ("standard", "block")
MOST_ROWS = 192


def arrays(golden):
    """Inputs in fp32, with rows repeated up to one size, so that files of the same K and V share a compilation."""
    rows = np.resize(np.arange(len(golden["draft_tokens"])), MOST_ROWS)
    log_q, log_p = (jnp.asarray(golden[name][rows], jnp.float32) for name in ("log_q", "log_p"))
    return jnp.asarray(golden["draft_tokens"][rows]), log_q, log_p, jnp.asarray(golden["draft_lengths"][rows])


def compute_tables(draft_tokens, log_q, log_p, lengths, *, method, residual_method=None, probs_method=None):
    """log_rho, h, Pr(num_accepted), final [B, K+1, V]. The two other methods make wrong variants."""
    log_rho, h = sampling.acceptance(draft_tokens, log_q, log_p, method=method, draft_lengths=lengths)

    def last_token(i):
        return sampling.residual_log_probs(
            log_q,
            log_p,
            log_rho,
            jnp.minimum(jnp.full_like(lengths, i), lengths),
            method=residual_method or method,
            draft_lengths=lengths,
            draft_tokens=draft_tokens,
        )

    final = jnp.exp(jnp.stack([last_token(i) for i in range(draft_tokens.shape[1] + 1)], axis=1))
    return log_rho, h, sampling.num_accepted_probs(h, method=probs_method or method), final


compiled_tables = jax.jit(compute_tables, static_argnames=("method", "residual_method", "probs_method"))


def tables(golden, function=compiled_tables, one_hot=False, **variant):
    draft_tokens, log_q, log_p, lengths = arrays(golden)
    results = function(draft_tokens, None if one_hot else log_q, log_p, lengths, **variant)
    return [np.asarray(x)[: len(golden["draft_tokens"])] for x in results]


def distance_of(golden, probs, final):
    laws = oracles.emitted_law(golden, probs.astype(np.float64), final.astype(np.float64))
    return oracles.distance_from_target(golden, laws), laws


def enumerate_distance(golden, **variant):
    _, _, probs, final = tables(golden, **variant)
    return distance_of(golden, probs, final)


@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize("name", [*oracles.PATH_FILES, "edge_rows"])
def test_tables(name, method):
    golden = oracles.load(name)
    log_rho, h, probs, final = tables(golden, method=method)
    slot = np.arange(h.shape[1])[None]
    verified = slot < golden["draft_lengths"][:, None]
    wanted = golden["standard/accept"] if method == "standard" else golden["block/h"]
    np.testing.assert_allclose(h, np.where(verified, wanted, 0), atol=TABLE_TOLERANCE)
    np.testing.assert_allclose(probs, golden[f"{method}/num_accepted_probs"], atol=TABLE_TOLERANCE)
    if method == "block":
        np.testing.assert_allclose(np.exp(log_rho), golden["block/rho"][:, 1:], atol=TABLE_TOLERANCE)
    else:
        survival = np.cumprod(np.where(verified, wanted, 0), axis=1)
        np.testing.assert_allclose(np.exp(log_rho), survival, atol=TABLE_TOLERANCE)
    reached = golden[f"{method}/num_accepted_probs"] > REACHED
    np.testing.assert_allclose(final[reached], golden[f"{method}/final"][reached], atol=FINAL_TOLERANCE)
    assert not any(np.isnan(x).any() for x in (log_rho, h, probs, final))


def test_tables_of_unreached_states_are_the_targets_or_the_residual():
    golden = oracles.load("edge_rows")
    for method in BOTH:
        final = tables(golden, method=method)[3]
        covered = np.arange(3)[None] <= golden["draft_lengths"][:, None]
        np.testing.assert_allclose(final[covered], golden[f"{method}/final"][covered], atol=FINAL_TOLERANCE)


@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize("name", oracles.PATH_FILES)
def test_lossless_by_enumeration(name, method):
    golden = oracles.load(name)
    distance, laws = enumerate_distance(golden, method=method)
    assert distance.max() < JOINT_TOLERANCE
    for i, law in enumerate(laws):
        np.testing.assert_allclose(law, golden[f"{method}/emitted_{i}"], atol=JOINT_TOLERANCE)


@pytest.mark.parametrize("method", [*BOTH, "match"])
@pytest.mark.parametrize("name", ["random_v3_k3", "truncated_target_v4_k3", "ragged_v3_k4", "close_v2_k7"])
def test_one_hot_rule_is_lossless_for_any_drafts(name, method):
    distance, _ = enumerate_distance(oracles.load(name), method=method, one_hot=True)
    assert distance.max() < JOINT_TOLERANCE


# Two tokens are too few here: what is left after a rejection is then the same token under either residual.
@pytest.mark.parametrize("name", ["random_v3_k3", "random_v5_k2", "close_v4_k3", "ragged_v3_k4"])
def test_enumeration_sees_the_standard_residual_under_block(name):
    distance, _ = enumerate_distance(oracles.load(name), method="block", residual_method="standard")
    assert distance.max() > 1e-3


@pytest.mark.parametrize("name", ["random_v3_k3", "random_v2_k5", "close_v2_k7", "ragged_v3_k4"])
def test_enumeration_sees_a_stop_at_the_first_failed_coin(name):
    distance, _ = enumerate_distance(oracles.load(name), method="block", probs_method="standard")
    assert distance.min() > 1e-2


@pytest.mark.parametrize("name", ["length_two_v3_k4", "ragged_v3_k4", "ragged_min_v4_k3"])
def test_enumeration_sees_a_last_threshold_from_an_unverified_row(name, monkeypatch):
    golden = oracles.load(name)
    rule = type(VERIFICATION_METHODS["block"])
    correct = rule.thresholds
    full = jnp.full((MOST_ROWS,), golden["draft_tokens"].shape[1], jnp.int32)
    # The mutant believes that every slot is verified, as an implementation for full blocks would.
    monkeypatch.setattr(rule, "thresholds", lambda self, a, b, c, lengths: correct(self, a, b, c, full))
    _, _, probs, final = tables(golden, jax.jit(lambda *inputs: compute_tables(*inputs, method="block")))
    assert distance_of(golden, probs, final)[0].max() > 1e-2


@pytest.mark.parametrize("method", BOTH)
def test_enumeration_sees_rows_off_by_one(method):
    golden = oracles.load("random_v3_k3")
    shifted = golden | {"log_p": np.roll(golden["log_p"], -1, axis=1)}
    assert enumerate_distance(shifted, method=method)[0].min() > 0.1


def test_enumeration_sees_an_unclamped_ratio(monkeypatch):
    golden = oracles.load("random_v3_k3")
    rule = type(VERIFICATION_METHODS["block"])
    monkeypatch.setattr(rule, "log_survival", lambda self, log_ratio: jnp.cumsum(log_ratio, axis=1))
    _, _, probs, final = tables(golden, jax.jit(lambda *inputs: compute_tables(*inputs, method="block")))
    assert distance_of(golden, np.clip(probs, 0, 1), final)[0].min() > 1e-2


@pytest.mark.parametrize("name", oracles.PATH_FILES)
def test_expected_acceptance_length(name):
    golden = oracles.load(name)
    models, weights, which = len(golden["joint"]), golden["weights"], golden["model_index"]
    means = {}
    for method in BOTH:
        _, h, probs, _ = tables(golden, method=method)
        expected = np.asarray(sampling.expected_acceptance_length(jnp.asarray(h), method=method), np.float64)
        means[method] = np.bincount(which, weights * expected, models)
        np.testing.assert_allclose(means[method], golden[f"{method}/acceptance_length"], atol=LENGTH_TOLERANCE)
        survival = 1 - np.cumsum(probs, axis=1)[:, :-1]
        for i in range(survival.shape[1]):
            rate = np.bincount(which, weights * survival[:, i], models)
            np.testing.assert_allclose(rate, golden[f"{method}/survival"][:, i], atol=LENGTH_TOLERANCE)
    assert (means["block"] >= means["standard"] - LENGTH_TOLERANCE).all()


def test_expected_length_of_the_toy_and_what_confusing_the_methods_gives():
    golden = oracles.load("toy_v2_k2")

    def mean(method, survival_of):
        _, h, _, _ = tables(golden, method=method)
        lengths = sampling.expected_acceptance_length(jnp.asarray(h), method=survival_of)
        return float(np.dot(golden["weights"], np.asarray(lengths)))

    assert mean("standard", "standard") == pytest.approx(1 + 10 / 9, abs=LENGTH_TOLERANCE)
    assert mean("block", "block") == pytest.approx(1 + 11 / 9, abs=LENGTH_TOLERANCE)
    assert abs(mean("block", "standard") - (1 + 11 / 9)) > 100 * LENGTH_TOLERANCE


@pytest.mark.parametrize("method", BOTH)
@pytest.mark.parametrize("name", oracles.PATH_FILES)
def test_coins_decide_as_the_tables_say(name, method):
    golden = oracles.load(name)
    _, h, _, _ = tables(golden, method=method)
    for i in range(golden["coins"].shape[1]):
        decided = VERIFICATION_METHODS[method].accepted(jnp.asarray(golden["coins"][:, i], jnp.float32), jnp.asarray(h))
        np.testing.assert_array_equal(decided, golden[f"{method}/num_accepted"][:, i])


def test_the_coins_tell_the_methods_apart():
    golden = oracles.load("random_v2_k5")
    _, h, _, _ = tables(golden, method="block")
    decided = VERIFICATION_METHODS["standard"].accepted(jnp.asarray(golden["coins"][:, 0], jnp.float32), jnp.asarray(h))
    assert (np.asarray(decided) != golden["block/num_accepted"][:, 0]).any()


@pytest.mark.parametrize("method", BOTH)
def test_a_coin_of_zero_accepts_no_impossible_token_and_a_coin_of_one_no_doubtful_one(method):
    rule = VERIFICATION_METHODS[method]
    h = jnp.asarray([[0.0, 0.0], [1.0, 1.0], [1.0, 0.999999]], jnp.float32)
    np.testing.assert_array_equal(rule.accepted(jnp.zeros_like(h), h), [0, 2, 2])
    np.testing.assert_array_equal(rule.accepted(jnp.ones_like(h), h), [0, 2, 1])


@partial(jax.jit, static_argnames="method")
def verify_greedily(draft_tokens, log_q, log_p, lengths, *, method):
    rows = len(lengths)
    return sampling.verify(
        draft_tokens,
        None if method == "match" else log_q,
        log_p,
        keys=sampling.request_keys(range(rows)),
        method=method,
        draft_lengths=lengths,
        greedy=jnp.ones((rows,), bool),
    )


@pytest.mark.parametrize(
    ("name", "method"),
    [(name, "standard") for name in oracles.PATH_FILES]
    + [(name, method) for name in ("ragged_v3_k4", "random_v2_k5") for method in ("block", "match")],
)
def test_greedy_rows(name, method):
    golden = oracles.load(name)
    tokens, num_accepted = verify_greedily(*arrays(golden), method=method)
    rows = len(golden["draft_tokens"])
    np.testing.assert_array_equal(num_accepted[:rows], golden["greedy/num_accepted"])
    np.testing.assert_array_equal(tokens[:rows], golden["greedy/tokens"])


def test_greedy_golden_sees_rows_off_by_one():
    golden = oracles.load("random_v3_k3")
    draft_tokens, log_q, log_p, lengths = arrays(golden)
    tokens, _ = verify_greedily(draft_tokens, log_q, jnp.roll(log_p, -1, axis=1), lengths, method="standard")
    assert (np.asarray(tokens)[: len(golden["draft_tokens"])] != golden["greedy/tokens"]).any()
