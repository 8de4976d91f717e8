"""Measuring acceptance: which steps count, intervals, calibration, entropy, ablations."""

import dataclasses

import generation_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as ds
from dspark_jax import ablations, entropy, measurement_programs
from dspark_jax.measurement import Measurement, calibration, interval, measure, recording

PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10], [2, 4]]
CONFIG = ds.GenerateConfig(max_new_tokens=17, num_draft_tokens=3, stop_token_ids=())
HOT = ds.SamplingParams(temperature=2.0)


@pytest.fixture(scope="module")
def found() -> Measurement:
    return measure(cases.hot_model(), PROMPTS, HOT, config=CONFIG, seeds=range(5), batch_size=2)


def test_steps_are_those_of_generate_that_verify_a_full_block(found):
    # The oracle runs each prompt alone and reads its record.
    expected = []
    config = dataclasses.replace(CONFIG, record_steps=True, expected_acceptance=True)
    for i, prompt in enumerate(PROMPTS):
        tokens, lengths = ds.pad_prompts([prompt])
        out = cases.run(cases.hot_model(), tokens, lengths, ds.request_keys([i]), HOT, config=config)
        left = CONFIG.max_new_tokens - 1
        for step, accepted in enumerate(np.asarray(out.steps.accepted)[0]):
            if accepted < 0:
                break
            if left >= CONFIG.num_draft_tokens + 1:  # drafts and the token behind them fit into the budget
                expected.append((i, int(accepted), step))
            left -= accepted + 1
        assert np.asarray(out.tokens)[0].tolist() == found.tokens[i].tolist()
    assert list(zip(found.prompt.tolist(), found.accepted.tolist(), strict=True)) == [e[:2] for e in expected]
    assert found.confidence.shape == (len(expected), 3) and found.expected.shape == (len(expected), 2)
    assert (found.confidence > 0).all() and (found.confidence < 1).all()
    # Mutant: all steps, the short last ones with them.
    everything = sum(int((np.asarray(out.steps.accepted) >= 0).sum()) for out in [out])
    assert everything > sum(e[0] == len(PROMPTS) - 1 for e in expected)


def test_confidences_are_those_of_the_head(found):
    """The head over the drafter's hidden states, computed outside of generation, for the first step of two prompts."""
    model = cases.hot_model()
    for i, prompt in enumerate(PROMPTS[:2]):
        tokens = jnp.asarray([prompt], jnp.int32)
        positions = jnp.arange(len(prompt), dtype=jnp.int32)[None]
        out = model.target(
            tokens,
            positions,
            model.target.make_cache(1, 32),
            capture=model.drafter.config.target_layer_ids,
            logits="none",
        )
        cache = model.drafter.write_context(out.features, positions, model.drafter.make_cache(1, 32))
        anchor = jnp.asarray(found.tokens[i, :1], jnp.int32)
        block = model.drafter.block(
            anchor,
            jnp.asarray([len(prompt)], jnp.int32),
            cache,
            num_slots=3,
            embed=model.target.embed_tokens,
            head=model.target.lm_head,
        )
        # The first slot's token before is the anchor.
        before = model.drafter.markov_head.w1.lookup(anchor, jnp.float32)
        logit = model.drafter.confidence_head(block.hidden[:, :1], before[:, None])
        first = int(np.argmax(found.prompt == i))
        np.testing.assert_allclose(found.confidence[first, 0], jax.nn.sigmoid(logit)[0, 0], rtol=1e-4)


def test_summary_counts(found):
    row = found.summary()
    accepted = found.accepted
    assert row["num_spec_steps"] == len(accepted) and sum(row["acceptance_histogram"]) == len(accepted)
    assert row["mean_acceptance_length"] == pytest.approx(1 + accepted.mean())
    assert row["acceptance_rate_per_position"] == pytest.approx([(accepted >= j).mean() for j in (1, 2, 3)])
    conditional = [(accepted >= j).sum() / max((accepted >= j - 1).sum(), 1) for j in (1, 2, 3)]
    assert row["conditional_acceptance_rate_per_position"] == pytest.approx(conditional)
    low, high = row["interval"]
    assert low < row["mean_acceptance_length"] < high
    gain = row["expected_block_gain"]
    lengths = row["expected_acceptance_length"]
    assert gain["mean"] == pytest.approx(lengths["block"] - lengths["standard"], abs=1e-6)


def synthetic(accepted: np.ndarray, prompt: np.ndarray, prompts: int) -> Measurement:
    return Measurement(
        num_draft_tokens=7,
        prompt=prompt,
        accepted=accepted,
        expected=np.zeros((len(prompt), 2)),
        confidence=None,
        tokens=np.zeros((prompts, 1), int),
        lengths=np.ones(prompts, int),
        num_prompts=prompts,
    )


def test_intervals_cover_the_truth_when_prompts_differ():
    """Prompts of mean acceptance 1 to 5: the interval covers their mean 3 in about 95 % of the studies (with 40 prompts
    a little less often); one that draws steps and not prompts is far too narrow."""
    rng = np.random.default_rng(0)
    covered = {"prompts": 0, "steps": 0}
    studies, prompts, steps = 300, 40, 30
    for _ in range(studies):
        mean = rng.uniform(1, 5, prompts)
        prompt = np.repeat(np.arange(prompts), steps)
        accepted = rng.binomial(7, (mean / 7)[prompt])
        for name, owner, count in (("prompts", prompt, prompts), ("steps", np.arange(len(prompt)), len(prompt))):
            m = synthetic(accepted, owner, count)
            low, high = interval(m.bootstrap(accepted[:, None].astype(float), resamples=200))
            covered[name] += low[0] <= 3 <= high[0]
    assert covered["prompts"] / studies > 0.90
    assert covered["steps"] / studies < 0.60  # the mutant


def test_differences_are_paired():
    """Two settings whose prompts differ much and whose difference is always 1: the paired interval is [1, 1]."""
    prompt = np.repeat(np.arange(20), 5)
    base = (prompt % 5).astype(int)
    a, b = synthetic(base + 1, prompt, 20), synthetic(base, prompt, 20)
    paired = a.bootstrap(a.survived).sum(1) - b.bootstrap(b.survived).sum(1)
    assert interval(paired) == pytest.approx([1.0, 1.0])
    apart = a.bootstrap(a.survived).sum(1) - b.bootstrap(b.survived, seed=1).sum(1)
    low, high = interval(apart)
    assert high - low > 0.5  # the mutant: other prompts for each


def test_calibration_of_known_confidences():
    rng = np.random.default_rng(1)
    n = 40_000
    chance = rng.uniform(0, 1, (n, 2))
    hits = rng.random((n, 2)) < chance
    accepted = np.where(hits[:, 0], 1 + hits[:, 1].astype(int), 0)
    right = calibration(chance, accepted)
    assert [s["steps"] for s in right] == [n, int((accepted >= 1).sum())]
    assert max(s["ece"] for s in right) < 0.015
    # By theory: Pr(c of a hit > c of a miss) = 5/6 for c uniform and hits of probability c.
    assert [s["auc"] for s in right] == pytest.approx([5 / 6] * 2, abs=0.01)
    # Confidences that are the square of the chance are off by E[c - c^2] = 1/6.
    assert [s["ece"] for s in calibration(chance**2, accepted)] == pytest.approx([1 / 6] * 2, abs=0.01)
    # Mutant: all steps in every slot, also those that never came so far.
    assert abs(calibration(chance[:, 1:], (accepted >= 2).astype(int))[0]["ece"]) > 0.2


def test_calibration_where_nothing_can_be_told():
    (one,) = calibration(np.full((3, 1), 1.0), np.ones(3, int))
    assert one["auc"] is None and one["ece"] == 0 and one["bins"] == [(3, 1.0, 1.0)]
    first, second = calibration(np.full((3, 2), 0.5), np.zeros(3, int))
    assert first["acceptance_rate"] == 0 and second["steps"] == 0 and second["bins"] == []


def test_entropy_is_that_of_teacher_forced_logits(found):
    model = cases.hot_model()
    params = ds.SamplingParams(temperature=2.0, top_p=0.8)
    raw, sampled = [], []
    for prompt, row in zip(PROMPTS, found.tokens, strict=True):
        logits = cases.continuation_logits(model, prompt, row.tolist())
        for law, into in ((cases.filtered_law(logits), raw), (dict(temperature=2.0, top_p=0.8), sampled)):
            p = law if isinstance(law, np.ndarray) else cases.filtered_law(logits, **law)
            into.append(-(p * np.log(np.where(p > 0, p, 1))).sum(-1))
    result = entropy.continuation_entropy(model, PROMPTS, found, params, batch_size=2)
    # fp32 against float64 over 12 tokens.
    assert result["unfiltered"]["mean"] == pytest.approx(np.mean(raw), abs=1e-4)
    assert result["sampled"]["mean"] == pytest.approx(np.mean(sampled), abs=1e-4)
    low, high = result["sampled"]["interval"]
    assert low < result["sampled"]["mean"] < high
    assert abs(np.mean(raw) - np.mean(sampled)) > 0.01  # or the two could be exchanged


def test_measure_refuses_what_it_cannot_measure():
    model = cases.hot_model()
    with pytest.raises(ValueError, match="4 seeds for 5 prompts"):
        measure(model, PROMPTS, HOT, config=CONFIG, seeds=range(4))
    with pytest.raises(ValueError, match="acceptance needs drafts"):
        measure(model, PROMPTS, HOT, config=ds.GenerateConfig(max_new_tokens=4, draft="none"), seeds=range(5))
    with pytest.raises(ValueError, match=r"confidence_threshold 0\.5 shortens"):
        config = dataclasses.replace(CONFIG, confidence_threshold=0.5)
        measure(model, PROMPTS, HOT, config=config, seeds=range(5))
    with pytest.raises(ValueError, match="no step verified 3 drafts: max_new_tokens 2"):
        config = dataclasses.replace(CONFIG, max_new_tokens=2)
        measure(model, PROMPTS, HOT, config=config, seeds=range(5), run=cases.jit_generate())


def test_one_program_whatever_the_prompts():
    """Two batches, the last one not full, share a program."""
    runs = []

    def run(*arguments, config):
        runs.append(jax.tree.map(lambda a: (a.shape, a.dtype), arguments[1:4]))
        return cases.run(*arguments, config=config)

    measure(cases.hot_model(), [[1]] * 4 + [[2] * 60], HOT, config=CONFIG, seeds=range(5), batch_size=2, run=run)
    assert len(runs) == 3 and all(r == runs[0] for r in runs)


# Programs

RUNS = ((3, "ancestral", "block"), (1, "greedy", "match"))


def recorded(k: int, draft: str, verify: str) -> ds.GenerateConfig:
    return recording(dataclasses.replace(CONFIG, num_draft_tokens=k, draft=draft, verify=verify))


def inputs(model: ds.Model, params: ds.SamplingParams) -> tuple:
    return model, *ds.pad_prompts(PROMPTS), ds.request_keys(range(len(PROMPTS))), params


@pytest.mark.slow
def test_two_programs_give_what_generate_gives():
    arguments = inputs(cases.hot_model(), HOT)
    outs = []
    with measurement_programs.Programs() as programs:
        for run in RUNS:
            programs.order(arguments, recorded(*run))
        assert len(programs) == 3
        for run in RUNS:
            expected = cases.run(*arguments, config=recorded(*run))
            found = programs(*arguments, config=recorded(*run))
            assert jax.tree.structure(found) == jax.tree.structure(expected)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)  # fp32, compiled in two ways
            outs.append(expected)
        assert len(programs) == 3
    assert not np.array_equal(*(o.tokens for o in outs)), "or one setting could be taken for the other"


def test_programs_without_drafts():
    model, config = cases.toy(1, with_drafter=False), dataclasses.replace(CONFIG, draft="none", record_steps=True)
    expected = cases.run(*inputs(model, HOT), config=config)
    found = measurement_programs.generate_in_parts(*inputs(model, HOT), config=config)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert jax.tree.structure(found) == jax.tree.structure(expected)


def test_what_a_model_cannot_serve_is_refused_when_it_is_ordered(monkeypatch):
    monkeypatch.setattr(measurement_programs.Programs, "_compile", lambda self, trace: None)
    model = cases.hot_model()
    with measurement_programs.Programs() as programs, pytest.raises(ValueError, match="exceeds the drafter's block"):
        programs.order(inputs(model, HOT), recorded(model.drafter.config.block_size + 1, "ancestral", "block"))


def test_prompts_are_read_by_one_program(monkeypatch):
    monkeypatch.setattr(measurement_programs.Programs, "_compile", lambda self, trace: None)
    model = cases.hot_model()
    every = [recorded(k, *run[1:]) for k in (1, 2, 3, 4) for run in RUNS]

    def ordered(programs: measurement_programs.Programs, model: ds.Model, params: ds.SamplingParams = HOT) -> int:
        for config in every:
            programs.order(inputs(model, params), config)
        return len(programs)

    with measurement_programs.Programs() as programs:
        assert ordered(programs, model) == 1 + len(every)
        # Another law and another Markov table are other arguments of the same programs, a causal block is not.
        assert ordered(programs, ablations.zeroed_markov(model), ds.SamplingParams(temperature=0.5)) == 1 + len(every)
        assert ordered(programs, ablations.causal_block(model)) == 2 * (1 + len(every))
    # Mutant: each config reads its prompts for itself.
    monkeypatch.setattr(measurement_programs, "_of_the_prompts", lambda config: config)
    with measurement_programs.Programs() as programs:
        assert ordered(programs, model) == 2 * len(every)


# Ablations


def block_of(model: ds.Model, window: int | None = None):
    """Logits of one block over a context of 20 tokens."""
    target, drafter = model.target, model.drafter
    tokens = jnp.arange(20, dtype=jnp.int32)[None] % 11
    positions = jnp.arange(20, dtype=jnp.int32)[None]
    out = target(tokens, positions, target.make_cache(1, 32), capture=drafter.config.target_layer_ids, logits="none")
    cache = drafter.write_context(out.features, positions, drafter.make_cache(1, 32))
    block = drafter.block(
        jnp.asarray([3], jnp.int32),
        jnp.asarray([20], jnp.int32),
        cache,
        embed=target.embed_tokens,
        head=target.lm_head,
    )
    return np.asarray(block.base_logits)[0]


@pytest.mark.parametrize("change", [dict(causal=True), dict(window=3)], ids=["causal", "window"])
def test_a_variant_is_the_drafter_that_was_built_so(change):
    model = cases.toy(2)
    variant = ablations.causal_block(model) if "causal" in change else ablations.with_window(model, 3)
    built = cases.toy(2, drafter=change)
    np.testing.assert_array_equal(block_of(variant), block_of(built))
    assert np.abs(block_of(variant) - block_of(model)).max() > 1e-3
    # The model it was made from is what it was.
    np.testing.assert_array_equal(block_of(model), block_of(cases.toy(2)))
    assert model.drafter.config.window == 6 and not model.drafter.config.causal


def test_a_causal_block_does_not_see_later_slots():
    """K slots of a causal block are the first K of a longer one; two-sided they are not."""
    for model, equal in ((ablations.causal_block(cases.toy(2)), True), (cases.toy(2), False)):
        target, drafter = model.target, model.drafter
        cache = drafter.make_cache(1, 32)
        arguments = (jnp.asarray([3], jnp.int32), jnp.asarray([0], jnp.int32), cache)
        short, long = (
            np.asarray(
                drafter.block(*arguments, num_slots=k, embed=target.embed_tokens, head=target.lm_head).base_logits
            )
            for k in (2, 4)
        )
        assert np.allclose(short, long[:, :2], atol=1e-5) == equal


def test_zeroed_markov_biases_nothing():
    model = cases.toy(2)
    variant = ablations.zeroed_markov(model)
    prev, hidden = jnp.asarray([1, 2], jnp.int32), jnp.ones((2, 16), jnp.float32)
    bias, embedding, _ = variant.drafter.markov_head(prev, hidden)
    assert not np.asarray(bias).any()
    before = model.drafter.markov_head(prev, hidden)
    assert np.abs(np.asarray(before[0])).max() > 0.1, "the model it was made from keeps its head"
    np.testing.assert_array_equal(embedding, before[1])  # the confidence head reads them
    assert jax.tree.structure(variant) == jax.tree.structure(model), "the same program serves both"


def test_ablations_refuse_what_changes_nothing():
    bare = cases.toy(2, with_drafter=False)
    for ablate in (ablations.causal_block, ablations.zeroed_markov, lambda m: ablations.with_window(m, 3)):
        with pytest.raises(ValueError, match="the model has no drafter"):
            ablate(bare)
    with pytest.raises(ValueError, match="causal already"):
        ablations.causal_block(ablations.causal_block(cases.toy(2)))
    plain = cases.toy(2, drafter=dict(markov_type=None, markov_rank=0, confidence_with_markov=False))
    with pytest.raises(ValueError, match="no Markov head"):
        ablations.zeroed_markov(plain)
    for window in (0, 7):
        with pytest.raises(ValueError, match=f"window is {window}; it must be at least 1 and at most"):
            ablations.with_window(cases.toy(2), window)
