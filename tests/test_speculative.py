"""Drafting and verifying inside `generate`: golden traces, budgets, stops inside a block, thresholds, long prompts."""

import dataclasses
import functools
import itertools
import json
import logging

import generation_cases as cases
import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as ds
from dspark_jax import generation
from dspark_jax.cache import DraftCache
from dspark_jax.generate_config import FinishReason

TRACE = json.loads((golden.DATA / cases.TRACED / "dspark" / "greedy_trace.json").read_text())
BATCH = cases.HOT_ROWS
NEW = 11


# Golden traces


@functools.cache
def trace_inputs():
    tokens, lengths = ds.pad_prompts([p["prompt"] for p in TRACE["prompts"]], (96,))
    return tokens, lengths, ds.request_keys(range(3)), ds.SamplingParams(temperature=0.0)


def differing_steps(out: ds.Generation, drafts: int) -> list[str]:
    """Every way in which the recorded steps differ from the golden ones."""
    steps = jax.tree.map(np.asarray, out.steps)
    found = []
    for golden_run in (r for r in TRACE["runs"] if r["num_draft_tokens"] == drafts):
        row, emitted = golden_run["prompt"], 1
        for i, step in enumerate(golden_run["steps"]):
            ours = steps.draft_tokens[row, i]
            # The trace drafts whole blocks; here a block ends where the budget does.
            room = min(drafts, TRACE["max_new_tokens"] - emitted - 1)
            expected = [*step["drafts"][:room], *[-1] * (drafts - room)]
            if ours.tolist() != expected:
                found.append(f"row {row} step {i}: drafts {ours.tolist()} for {expected}")
            if step["num_accepted"] <= room:
                if (steps.accepted[row, i], steps.last_token[row, i]) != (step["num_accepted"], step["bonus"]):
                    found.append(f"row {row} step {i}: {steps.accepted[row, i]} accepted, {steps.last_token[row, i]}")
            elif steps.accepted[row, i] != room:
                found.append(f"row {row} step {i}: {steps.accepted[row, i]} of {room} accepted")
            emitted += step["num_accepted"] + 1
        if (steps.accepted[row, len(golden_run["steps"]) :] != -1).any():
            found.append(f"row {row}: more steps than {len(golden_run['steps'])}")
    return found


@pytest.mark.parametrize(
    ("drafts", "draft", "verify"),
    [
        (7, "ancestral", "block"),
        (7, "greedy", "standard"),
        (3, "greedy", "match"),
        pytest.param(7, "greedy", "match", marks=pytest.mark.slow),
        pytest.param(3, "ancestral", "block", marks=pytest.mark.slow),
        pytest.param(3, "ancestral", "standard", marks=pytest.mark.slow),
    ],
)
def test_greedy_runs_follow_the_golden_trace(drafts, draft, verify):
    config = ds.GenerateConfig(
        max_new_tokens=TRACE["max_new_tokens"],
        num_draft_tokens=drafts,
        draft=draft,
        verify=verify,
        record_steps=True,
        stop_token_ids=(),
    )
    out = cases.run(cases.golden_model(cases.TRACED), *trace_inputs(), config=config)
    assert differing_steps(out, drafts) == []
    # The text is that of plain decoding, which does not know the drafter.
    for i, prompt in enumerate(TRACE["prompts"]):
        assert np.asarray(out.tokens)[i].tolist() == prompt["greedy_tokens"]
    # Mutant: a block of another length is another computation, not the beginning of this one.
    if drafts == 3:
        cut = {**TRACE, "runs": [r | {"num_draft_tokens": 3} for r in TRACE["runs"] if r["num_draft_tokens"] == 7]}
        cut["runs"] = [r | {"steps": [s | {"drafts": s["drafts"][:3]} for s in r["steps"]]} for r in cut["runs"]]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(TRACE, "runs", cut["runs"])
            assert differing_steps(out, 3)


# Many rows of a toy


def stats_of(out: ds.Generation) -> ds.AcceptanceStats:
    return jax.tree.map(jnp.asarray, out.stats)


def emitted_by_step(out: ds.Generation, row: int) -> list[list[int]]:
    """Tokens that each recorded step of a row gave, nothing cut."""
    steps = out.steps
    count = int((steps.accepted[row] >= 0).sum())
    return [
        [*steps.draft_tokens[row, i, : steps.accepted[row, i]].tolist(), int(steps.last_token[row, i])]
        for i in range(count)
    ]


def drafted_by_step(out: ds.Generation, row: int) -> list[int]:
    count = int((out.steps.accepted[row] >= 0).sum())
    return (out.steps.draft_tokens[row, :count] >= 0).sum(axis=-1).tolist()


@pytest.fixture(scope="module")
def recorded() -> dict[int, ds.Generation]:
    """By number of drafts."""
    config = ds.GenerateConfig(max_new_tokens=NEW, record_steps=True)
    return {k: cases.hot_run(dataclasses.replace(config, num_draft_tokens=k)) for k in (1, 2, 3, 4)}


@pytest.mark.parametrize("drafts", [1, 2, 3, 4])
def test_tokens_are_those_of_the_steps_and_fill_the_budget_exactly(recorded, drafts):
    out = recorded[drafts]
    assert out.lengths.tolist() == [NEW] * BATCH
    assert set(out.finish_reason.tolist()) == {FinishReason.LENGTH}
    left = set()
    for row in range(BATCH):
        steps = emitted_by_step(out, row)
        tokens = out.tokens[row].tolist()
        assert [tokens[0], *itertools.chain(*steps)] == tokens
        # As many drafts as the budget has room for, with the token behind them.
        done = 1
        for step, drafted in zip(steps, drafted_by_step(out, row), strict=True):
            assert drafted == min(drafts, NEW - done - 1)
            left.add(NEW - done)
            done += len(step)
        assert (out.steps.accepted[row, len(steps) :] == -1).all()
        assert (out.steps.last_token[row, len(steps) :] == -1).all()
        assert (out.steps.draft_tokens[row, len(steps) :] == -1).all()
    # Every remainder occurred in some row, those that cut a block among them.
    assert left >= set(range(2, drafts + 3)), left


def test_drafts_are_accepted_and_rejected(recorded):
    for drafts, out in recorded.items():
        accepted = [len(s) - 1 for row in range(BATCH) for s in emitted_by_step(out, row)]
        assert set(accepted) == set(range(drafts + 1))


def test_neither_mask_nor_padding_is_ever_drafted(recorded):
    mask = cases.hot_model().drafter.config.mask_token_id
    for out in recorded.values():
        assert out.steps.draft_tokens.max() < mask
        # The target may emit it: it is a token like any other there.
        assert (out.tokens == mask).any()


def test_a_budget_of_one_token_needs_no_step():
    config = ds.GenerateConfig(max_new_tokens=1, record_steps=True)
    out = cases.hot_run(config)
    assert out.lengths.tolist() == [1] * BATCH and (out.steps.accepted == -1).all()
    assert int(out.stats.num_steps.sum()) == 0


def test_one_draft_is_verified_alike_by_standard_and_block(recorded):
    config = ds.GenerateConfig(max_new_tokens=NEW, num_draft_tokens=1, verify="standard", record_steps=True)
    jax.tree.map(np.testing.assert_array_equal, cases.hot_run(config), recorded[1])


# Stop tokens


def test_a_stop_token_inside_an_accepted_block_cuts_it_there(recorded):
    whole, stop = recorded[4], 3
    out = cases.hot_run(ds.GenerateConfig(max_new_tokens=NEW, record_steps=True, stop_token_ids=(stop,)))
    inside = 0
    for row in range(BATCH):
        tokens = whole.tokens[row].tolist()
        end = tokens.index(stop) + 1 if stop in tokens else NEW
        assert out.lengths[row] == end
        assert out.tokens[row, :end].tolist() == tokens[:end]
        assert (out.tokens[row, end:] == 7).all(), "pad ids behind the stop"
        assert out.finish_reason[row] == (FinishReason.STOP if stop in tokens else FinishReason.LENGTH)
        steps = emitted_by_step(out, row)
        raw = 1 + sum(map(len, steps))
        inside += raw > end
        # Raw counts say what was accepted, the emitted ones what arrived.
        assert stats_of(out).num_accepted_draft_tokens[row] == sum(len(s) - 1 for s in steps)
        if all(drafted_by_step(out, row)):
            assert out.stats.num_emitted_tokens[row] == end - 1
    assert inside > 5, "rows whose stop token had accepted tokens behind it"


def test_a_cut_in_the_wrong_place_would_show(recorded, monkeypatch):
    """Mutant: the whole step that holds a stop token is emitted."""
    right = generation._is_in
    monkeypatch.setattr(generation, "_is_in", lambda tokens, ids: right(tokens, ids) & _last_real(tokens))
    stop = 3
    config = ds.GenerateConfig(max_new_tokens=NEW, stop_token_ids=(stop,))
    params = ds.SamplingParams(temperature=2.0)
    out = cases.jit_generate()(cases.hot_model(), *cases.hot_batch(), params, config=config)
    ends = [t.index(stop) + 1 if stop in t else NEW for t in recorded[4].tokens.tolist()]
    assert np.asarray(out.lengths).tolist() != ends


def _last_real(tokens: jax.Array) -> jax.Array:
    """Only the last token that a step gave."""
    count = jnp.sum(tokens >= 0, axis=1)
    return jnp.arange(tokens.shape[1])[None] == count[:, None] - 1


# Confidence threshold


def _hot(model: ds.Model, config: ds.GenerateConfig) -> ds.Generation:
    params = ds.SamplingParams(temperature=2.0)
    return jax.tree.map(np.asarray, cases.run(model, *cases.hot_batch(), params, config=config))


def test_the_threshold_cuts_before_the_first_unsure_slot():
    """With a confidence that depends on the previous token alone, lengths follow from the recorded tokens."""
    model = cases.toy(1, drafter=dict(markov_rank=4))
    head, table = model.drafter.confidence_head, model.drafter.markov_head.w1.weight.get_value()
    hidden = model.target.config.hidden_size
    # [hidden, embedding] -> the first entry of the embedding, times 4.
    head.weight.set_value(jnp.zeros_like(head.weight.get_value()).at[0, hidden].set(4.0))
    head.bias.set_value(jnp.zeros_like(head.bias.get_value()))
    confidence = 1 / (1 + np.exp(-4 * np.asarray(table[:, 0], np.float64)))
    threshold = 0.4
    assert np.abs(confidence - threshold).min() > 1e-3
    assert 2 < (confidence < threshold).sum() < 10
    config = ds.GenerateConfig(max_new_tokens=NEW, record_steps=True, confidence_threshold=threshold)
    out = _hot(model, config)

    def lengths(first_slot_reads: int) -> bool:
        """Whether every step drafted up to the first slot whose previous token is unsure."""
        seen = set()
        for row in range(BATCH):
            done, anchor = 1, int(out.tokens[row, 0])
            for i, step in enumerate(emitted_by_step(out, row)):
                drafted = drafted_by_step(out, row)[i]
                drafts = out.steps.draft_tokens[row, i].tolist()
                # The token behind the last draft is unknown: a block may end there for any reason of its own.
                read = [anchor, *drafts][first_slot_reads:][: drafted + 1]
                unsure = [confidence[t] < threshold for t in read if t >= 0]
                room = min(4, NEW - done - 1)
                if drafted > room or any(unsure[:drafted]) or (drafted < room and unsure[drafted:] != [True]):
                    return False
                seen.add(drafted)
                done, anchor = done + len(step), step[-1]
        return seen == {0, 1, 2, 3, 4}

    assert lengths(0)
    assert not lengths(1), "mutant: the threshold reads the slot's own token"
    # Without one, nothing is cut; at 1 nothing is drafted, and plain decoding goes on.
    none = _hot(model, ds.GenerateConfig(max_new_tokens=NEW, record_steps=True, confidence_threshold=1.0))
    assert (none.steps.draft_tokens == -1).all() and none.lengths.tolist() == [NEW] * BATCH
    assert int(none.stats.num_spec_steps.sum()) == 0 and int(none.stats.num_steps.sum()) == BATCH * (NEW - 1)


# Benchmark mode


def test_forced_acceptance_gives_the_mean_that_was_asked_for(caplog):
    with caplog.at_level(logging.WARNING, logger="dspark_jax"):
        config = ds.GenerateConfig(max_new_tokens=41, benchmark_forced_acceptance=1.5, record_steps=True)
        out = cases.hot_run(config)
    assert "BENCHMARK ONLY" in caplog.text
    # 40 tokens behind the first, 2.5 a step: 16 steps, all alike in every row.
    assert out.stats.num_spec_steps.tolist() == [16] * BATCH
    np.testing.assert_allclose(stats_of(out).mean_acceptance_length, 2.5, rtol=0, atol=1e-6)
    assert out.lengths.tolist() == [41] * BATCH
    for row in range(3):
        tokens = out.tokens[row].tolist()
        assert [tokens[0], *itertools.chain(*emitted_by_step(out, row))] == tokens


# Expected acceptance


def test_expected_acceptance_is_what_happens_on_average(recorded):
    """The coin-free lengths of both rules agree with counted ones, whichever rule verified the drafts."""
    found = {}
    for verify in ("block", "match"):
        config = ds.GenerateConfig(max_new_tokens=40, verify=verify, expected_acceptance=True, num_draft_tokens=3)
        stats = stats_of(cases.hot_run(config)).total()
        found[verify] = float(stats.mean_acceptance_length), np.asarray(stats.expected_acceptance_length)
    # About 1,000 steps with a standard deviation near 1: 5 sigma.
    noise = 0.16
    counted, expected = found["block"]
    assert abs(counted - expected[1]) < noise
    # Under "match" the figures are still those of rejection sampling, which accepts more than matching does.
    matched, same = found["match"]
    np.testing.assert_allclose(same, expected, rtol=0, atol=noise)
    assert min(expected[0], same[0]) > matched + noise
    assert expected[1] >= expected[0] and same[1] >= same[0], "block accepts at least as much"
    # Not counted unless asked for.
    assert recorded[3].stats.expected_accepted.sum() == 0


# Long prompts


on_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="200,000 tokens take a GPU; 20,000 run anywhere")


@pytest.mark.parametrize("length", [20_000, pytest.param(200_000, marks=on_gpu)])
def test_a_long_prompt_drafts_as_from_its_end(length):
    """The same drafts as a drafter that was given the last window + margin alone, and the same memory."""
    chunk = 2048
    model = cases.toy(4, max_context=262_144)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 11, (1, length)).astype(np.int32)
    config = ds.GenerateConfig(max_new_tokens=8, prefill_chunk=chunk)
    arguments = (jnp.asarray([length], jnp.int32), ds.request_keys([0]), ds.SamplingParams())
    state = ds.prefill(model, jnp.asarray(prompt), *arguments, config=config)
    assert int(state.position[0]) == length

    def block(cache: DraftCache):
        target = model.target
        return model.drafter.block(state.anchor, state.position, cache, embed=target.embed_tokens, head=target.lm_head)

    # The last window + margin alone: their features from one more forward over the target's cache.
    tail = model.drafter.config.window + 8
    positions = jnp.arange(length - tail, length, dtype=jnp.int32)[None]
    layers = model.drafter.config.target_layer_ids
    last = cases.jit_once(lambda m, t, p, c: m(t, p, c, capture=layers, logits="none").features)
    features = last(model.target, jnp.asarray(prompt[:, -tail:]), positions, state.cache)
    cache = model.drafter.make_cache(1)
    cache = model.drafter.write_context(features, positions, cache)
    drafted, expected = block(state.draft_cache), block(cache)
    # Chunks of another length only reorder float32 sums.
    np.testing.assert_allclose(drafted.base_logits, expected.base_logits, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(jnp.argmax(drafted.base_logits, -1), jnp.argmax(expected.base_logits, -1))
    # Mutant: the same tail one position off.
    shifted = model.drafter.write_context(features, positions - 1, model.drafter.make_cache(1))
    assert np.abs(np.asarray(block(shifted).base_logits - expected.base_logits)).max() > 1e-2

    short = jax.eval_shape(
        lambda *a: ds.prefill(*a, config=config), model, jax.ShapeDtypeStruct((1, 200), jnp.int32), *arguments
    )

    def size(tree) -> int:
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))

    assert size(state.draft_cache) == size(short.draft_cache)
    assert size(state.cache) > 50 * size(short.cache)
