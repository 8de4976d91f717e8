"""Acceptance statistics against a recount in numpy."""

import json

import generation_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as ds

BATCH, SLOTS, STEPS = 5, 4, 30


@pytest.fixture(scope="module")
def steps() -> dict[str, np.ndarray]:
    """Made-up steps [S, B]: every draft length and count, rows that have ended, steps without drafts."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, SLOTS + 1, (STEPS, BATCH))
    accepted = rng.integers(0, lengths + 1)
    return {
        "running": np.arange(STEPS)[:, None] < np.asarray([30, 12, 1, 0, 20])[None],
        "draft_lengths": lengths,
        "num_accepted": accepted,
        "num_emitted": rng.integers(0, accepted + 2),
        "expected_accepted": rng.random((STEPS, BATCH, 2)).astype(np.float32),
    }


def accumulate(steps) -> ds.AcceptanceStats:
    def as_jax(i: int) -> dict[str, jax.Array]:
        kinds = dict(running=bool, expected_accepted=jnp.float32)
        return {k: jnp.asarray(v[i]).astype(kinds.get(k, jnp.int32)) for k, v in steps.items()}

    stats = ds.AcceptanceStats.zeros(BATCH, SLOTS)
    for i in range(STEPS):
        stats = stats.add(**as_jax(i))
    return stats


def recount(steps, row: int) -> dict[str, object]:
    """The same figures, counted one step at a time."""
    r = {k: v[:, row] for k, v in steps.items()}
    spec = [i for i in range(len(r["running"])) if r["running"][i] and r["draft_lengths"][i] > 0]
    histogram, drafted, accepted, reached = [0] * (SLOTS + 1), [0] * SLOTS, [0] * SLOTS, [0] * SLOTS
    emitted, expected = 0, np.zeros(2)
    for i in spec:
        n, a = int(r["draft_lengths"][i]), int(r["num_accepted"][i])
        histogram[a] += 1
        emitted += int(r["num_emitted"][i])
        expected += r["expected_accepted"][i]
        for j in range(n):
            drafted[j] += 1
            accepted[j] += j < a
            reached[j] += j <= a
    count = len(spec)

    def ratio(a, b):
        return a / b if b else 0.0

    return {
        "num_steps": int(r["running"].sum()),
        "num_spec_steps": count,
        "acceptance_histogram": histogram,
        "drafted_per_position": drafted,
        "accepted_per_position": accepted,
        "reached_per_position": reached,
        "num_draft_tokens": sum(drafted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_emitted_tokens": emitted,
        "mean_acceptance_length": 1 + sum(accepted) / count if count else 0.0,
        "mean_emitted_length": ratio(emitted, count),
        "draft_acceptance_rate": ratio(sum(accepted), sum(drafted)),
        "acceptance_rate_per_position": [ratio(a, d) for a, d in zip(accepted, drafted, strict=True)],
        "conditional_acceptance_rate_per_position": [ratio(a, d) for a, d in zip(accepted, reached, strict=True)],
        "expected_acceptance_length": [1 + e / count if count else 0.0 for e in expected],
    }


def agree(stats: ds.AcceptanceStats, expected: list[dict[str, object]]) -> bool:
    return all(
        np.allclose(getattr(stats, name), [e[name] for e in expected], rtol=1e-6, atol=1e-6) for name in expected[0]
    )


def test_per_request_figures_equal_a_recount(steps):
    stats = accumulate(steps)
    expected = [recount(steps, row) for row in range(BATCH)]
    assert agree(stats, expected)
    assert expected[3]["num_steps"] == 0 and expected[2]["num_steps"] == 1
    # Mutant: rows that have ended go on counting.
    assert not agree(accumulate(steps | {"running": np.ones_like(steps["running"])}), expected)


def test_totals_are_ratios_of_sums(steps):
    stats = accumulate(steps).total()
    counts = [recount(steps, row) for row in range(BATCH)]
    steps_of = [c["num_spec_steps"] for c in counts]
    accepted = sum(c["num_accepted_draft_tokens"] for c in counts)
    drafted = sum(c["num_draft_tokens"] for c in counts)
    assert float(stats.mean_acceptance_length) == pytest.approx(1 + accepted / sum(steps_of))
    assert float(stats.draft_acceptance_rate) == pytest.approx(accepted / drafted)
    # Mutant: the mean of the requests' own means.
    means = [c["mean_acceptance_length"] for c in counts if c["num_spec_steps"]]
    assert float(stats.mean_acceptance_length) != pytest.approx(np.mean(means), abs=1e-3)


def test_identities_between_the_figures(steps):
    for stats in (accumulate(steps), accumulate(steps).total()):
        histogram = np.asarray(stats.acceptance_histogram)
        np.testing.assert_array_equal(histogram.sum(-1), stats.num_spec_steps)
        np.testing.assert_array_equal((histogram * np.arange(SLOTS + 1)).sum(-1), stats.num_accepted_draft_tokens)
        per_slot = np.asarray(stats.accepted_per_position)
        assert (np.diff(per_slot, axis=-1) <= 0).all()
        assert (per_slot <= np.asarray(stats.reached_per_position)).all()
        assert (np.asarray(stats.reached_per_position) <= np.asarray(stats.drafted_per_position)).all()


def test_nothing_counted_is_zero_everywhere():
    stats = ds.AcceptanceStats.zeros(2, 3)
    figures = json.dumps(stats.summary())
    assert "NaN" not in figures and set(figures) & set("123456789") == set()


def test_summary_is_plain_numbers_of_the_total(steps):
    stats = accumulate(steps)
    summary = stats.summary()
    assert summary == stats.total().summary()
    assert json.loads(json.dumps(summary)) == summary
    assert summary["num_spec_steps"] == sum(recount(steps, row)["num_spec_steps"] for row in range(BATCH))


def test_stats_are_a_pytree(steps):
    stats = accumulate(steps)
    doubled = jax.tree.map(lambda a: a + a, stats)
    assert isinstance(doubled, ds.AcceptanceStats)
    np.testing.assert_array_equal(doubled.num_spec_steps, 2 * stats.num_spec_steps)


def test_generate_counts_its_own_steps():
    """The stats of a generation are those of its recorded steps, cut at stop tokens where they say so."""
    # The configuration of a test in test_speculative.py: one program for both.
    out = cases.hot_run(ds.GenerateConfig(max_new_tokens=11, record_steps=True, stop_token_ids=(3,)))
    stats = jax.tree.map(jnp.asarray, out.stats)
    rows = cases.HOT_ROWS
    record = out.steps
    accepted = record.accepted.T
    emitted, done = np.zeros_like(accepted), np.ones(rows, int)
    for i in range(accepted.shape[0]):
        emitted[i] = np.where(accepted[i] >= 0, np.minimum(accepted[i] + 1, np.asarray(out.lengths) - done), 0)
        done += emitted[i]
    counted = {
        "running": accepted >= 0,
        "draft_lengths": (record.draft_tokens >= 0).sum(-1).T,
        "num_accepted": np.maximum(accepted, 0),
        "num_emitted": emitted,
        "expected_accepted": np.zeros((*accepted.shape, 2)),
    }
    expected = [recount(counted, row) for row in range(rows)]
    assert agree(stats, [{k: v for k, v in e.items() if k != "expected_acceptance_length"} for e in expected])
    # Some row stopped inside a block, so that raw and cut figures differ.
    raw = np.asarray(stats.num_accepted_draft_tokens + stats.num_spec_steps)
    assert (raw > np.asarray(stats.num_emitted_tokens)).any()
    assert (done == np.asarray(out.lengths)).all()
