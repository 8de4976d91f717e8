"""Plain decoding, and all of `generate`, `prefill` and `step` that does not depend on how drafts are verified."""

import dataclasses
import logging

import generation_cases as cases
import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as ds
from dspark_jax import sampling
from dspark_jax.generate_config import FinishReason

# Log-probabilities are logits minus a logsumexp: twice the tolerance of a logit covers both.
LOG_PROB_TOLERANCE = 2 * golden.TOLERANCE["logits"]
# The same float32 forward in another shape: seen 2e-6 on the toy, whose nearest two logits are 1e-3 apart.
TOY_TOLERANCE = 2e-5
PLAIN = ds.GenerateConfig(max_new_tokens=12, draft="none")
PROMPTS = ([3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3])


@pytest.fixture(scope="module")
def toy() -> ds.Model:
    return cases.toy(1, num_layers=2, moe_layers=(False, True), pad_token_id=7)


@pytest.fixture(scope="module")
def plain() -> ds.Model:
    """One layer and no drafter: for what every model does alike."""
    return cases.toy(1, with_drafter=False, pad_token_id=7)


def padded(prompts, width: int = 8):
    return ds.pad_prompts(prompts, (width,))


def run(model, prompts, seeds, config=PLAIN, *, width: int = 8, **params) -> ds.Generation:
    return cases.run(model, *padded(prompts, width), ds.request_keys(seeds), ds.SamplingParams(**params), config=config)


def rows(out: ds.Generation) -> list[list[int]]:
    """The tokens of each row up to its length."""
    return [t[:n].tolist() for t, n in zip(np.asarray(out.tokens), np.asarray(out.lengths), strict=True)]


def reasons(out) -> list[FinishReason]:
    return [FinishReason(r) for r in np.asarray(out.finish_reason).tolist()]


# Golden checkpoints


@pytest.mark.parametrize("name", golden.CHECKPOINTS)
def test_greedy_continuations_are_the_golden_ones(name):
    expected = golden.expected(name)
    model = ds.Model(target=golden.model(name))
    tokens, lengths = padded([golden.prompt(name, i).tolist() for i in golden.PROMPTS], 96)
    config = ds.GenerateConfig(max_new_tokens=golden.NEW_TOKENS, draft="none", stop_token_ids=(), log_probs=True)

    def go(lengths):
        keys = ds.request_keys(golden.PROMPTS)
        return cases.run(model, tokens, lengths, keys, ds.SamplingParams(temperature=0.0), config=config)

    out = go(lengths)
    for i in golden.PROMPTS:
        assert rows(out)[i] == expected[f"p{i}_greedy_ids"].tolist()
        logits = jnp.asarray(expected[f"p{i}_greedy_logits"])
        best = jnp.max(jax.nn.log_softmax(logits), axis=-1)
        np.testing.assert_allclose(out.log_probs[i], best, rtol=0, atol=LOG_PROB_TOLERANCE)
    # Mutant: the last token of the prompt is not read.
    assert all(a != b for a, b in zip(rows(go(lengths - 1)), rows(out), strict=True))


def test_target_logits_are_the_golden_ones():
    name = cases.TRACED
    expected, model = golden.expected(name), cases.golden_model(name)
    tokens = jnp.asarray(golden.prompt(name, 1))[None]
    logits = cases.target_logits(model, tokens)
    assert logits.dtype == jnp.float32
    difference = np.abs(np.asarray(logits[0]) - expected["p1_logits"])
    assert difference.max() < golden.TOLERANCE["logits"]
    # Mutant: rows that score the token at their own position.
    assert np.abs(np.asarray(logits[0, 1:]) - expected["p1_logits"][:-1]).max() > golden.TOLERANCE["logits"]


# Seeds and batches


def test_same_seed_same_tokens_and_different_seeds_differ(toy):
    first, again, other = (run(toy, PROMPTS, seeds) for seeds in ((0, 1, 2), (0, 1, 2), (3, 4, 5)))
    assert rows(first) == rows(again)
    assert all(a != b for a, b in zip(rows(first), rows(other), strict=True))
    # The seed and not the row decides: equal prompts with equal seeds are equal.
    twins = run(toy, [PROMPTS[0]] * 3, (8, 9, 8))
    assert rows(twins)[0] == rows(twins)[2] != rows(twins)[1]


def with_coins(model: ds.Model) -> ds.Model:
    """Every target law is uniform, whatever the prompt: tokens are random bits and nothing else."""
    target = golden.copy(model.target)
    target.lm_head.weight.set_value(jnp.zeros_like(target.lm_head.weight.get_value()))
    return dataclasses.replace(model, target=target)


BATCHES = {
    "in another order": ((2, 0, 1), {}),
    "alone": ((0,), {}),
    "beside an empty row, in a wider bucket": ((1, None, 0, 2), dict(width=24)),
    "prefilled in chunks": ((0, 1, 2), dict(chunk=3)),
}


@pytest.mark.parametrize("draft", ["none", "ancestral"])
def test_a_row_does_not_depend_on_its_batch(toy, draft):
    config = ds.GenerateConfig(max_new_tokens=12, draft=draft)
    # Experts compute tokens of all rows together; that drafts do not change it is seen on a model without.
    model = toy if draft == "none" else cases.hot_model()
    for variant in (model, with_coins(model)):
        expected = rows(run(variant, PROMPTS, (10, 11, 12), config))
        assert len({tuple(r) for r in expected}) == 3
        for name, (order, options) in BATCHES.items():
            changed = dataclasses.replace(config, prefill_chunk=options.get("chunk", 512))
            prompts = [[] if i is None else PROMPTS[i] for i in order]
            seeds = [99 if i is None else 10 + i for i in order]
            out = rows(run(variant, prompts, seeds, changed, width=options.get("width", 8)))
            assert out == [[] if i is None else expected[i] for i in order], (name, draft)


def test_random_bits_come_from_the_seed_alone(toy):
    # With uniform laws the token of step s is the best of the Gumbel numbers of (seed, s, final).
    out = run(with_coins(toy), PROMPTS, (20, 21, 22))
    for row, seed in zip(rows(out), (20, 21, 22), strict=True):
        key = jax.random.key(seed, impl="threefry2x32")
        for step, token in enumerate(row):
            noise = jax.random.gumbel(
                jax.random.fold_in(jax.random.fold_in(key, step), int(sampling.Purpose.FINAL)), (12,), mode="high"
            )
            assert token == int(jnp.argmax(noise))


# How rows end


def test_exact_lengths_and_padding(plain):
    out = run(plain, PROMPTS, (0, 1, 2))
    assert np.asarray(out.lengths).tolist() == [12] * 3
    assert reasons(out) == [FinishReason.LENGTH] * 3
    one = run(plain, PROMPTS, (0, 1, 2), dataclasses.replace(PLAIN, max_new_tokens=1))
    assert rows(one) == [r[:1] for r in rows(out)]
    assert reasons(one) == [FinishReason.LENGTH] * 3


def test_stop_tokens_end_a_row_as_its_last_token(plain):
    whole = rows(run(plain, PROMPTS, (0, 1, 2)))
    stops = (whole[0][4], whole[1][0])
    out = run(plain, PROMPTS, (0, 1, 2), dataclasses.replace(PLAIN, stop_token_ids=stops))
    for i, row in enumerate(whole):
        end = next((j for j, t in enumerate(row) if t in stops), None)
        assert rows(out)[i] == (row if end is None else row[: end + 1])
        assert reasons(out)[i] == (FinishReason.LENGTH if end is None else FinishReason.STOP)
        # Pad ids behind the end, which are not zeros here.
        assert set(np.asarray(out.tokens)[i, int(out.lengths[i]) :].tolist()) <= {7}
    assert FinishReason.STOP in reasons(out) and int(out.lengths[1]) == 1


def test_the_checkpoint_names_the_stop_tokens_unless_the_caller_does(plain):
    whole = rows(run(plain, PROMPTS, (0, 1, 2)))
    token = whole[2][3]
    model = cases.toy(1, with_drafter=False, pad_token_id=7, eos_token_ids=(token,))
    cut = [r[: r.index(token) + 1] if token in r else r for r in whole]
    assert rows(run(model, PROMPTS, (0, 1, 2))) == cut != whole
    assert rows(run(model, PROMPTS, (0, 1, 2), dataclasses.replace(PLAIN, stop_token_ids=()))) == whole


def test_a_stop_token_on_the_last_place_of_the_budget_is_a_stop(plain):
    whole = rows(run(plain, PROMPTS, (0, 1, 2)))
    row = next(r for r in whole if r[-1] not in r[:-1])
    i = whole.index(row)
    out = run(plain, PROMPTS, (0, 1, 2), dataclasses.replace(PLAIN, stop_token_ids=(row[-1],)))
    assert rows(out)[i] == row and reasons(out)[i] == FinishReason.STOP


@pytest.mark.parametrize("draft", ["none", "ancestral"])
def test_rows_end_where_the_context_ends(draft):
    """Prompts that leave room for 0, 1, 2 and 6 tokens, and an empty one, side by side in a context of 16."""
    prompts = [[(5 * i + j) % 12 for j in range(n)] for i, n in enumerate((16, 15, 14, 10, 0))]
    config = ds.GenerateConfig(max_new_tokens=12, draft=draft, record_steps=True)
    small, large = (cases.toy(3, max_context=n) for n in (16, 64))
    out = run(small, prompts, range(5), config, width=16)
    assert np.asarray(out.lengths).tolist() == [1, 1, 2, 6, 0]
    assert reasons(out) == [FinishReason.CONTEXT] * 4 + [FinishReason.EMPTY]
    # Up to there the tokens are those of a context with room; greedy, since drafts that are cut draw other numbers.
    greedy = run(small, prompts, range(5), config, width=16, temperature=0.0)
    if draft == "none":
        free = run(large, prompts, range(5), config, width=16, temperature=0.0)
        assert reasons(free)[:4] == [FinishReason.LENGTH] * 4
        assert rows(greedy) == [r[:n] for r, n in zip(rows(free), (1, 1, 2, 6, 0), strict=True)]
    # Teacher-forced, every row is the target's own choice, the one on the last slot too.
    for prompt, row in zip(prompts[1:4], rows(greedy)[1:4], strict=True):
        assert row == np.argmax(cases.continuation_logits(large, prompt, row), axis=-1).tolist()


def test_a_prompt_that_fits_exactly_is_read_to_its_end():
    prompts = [[(5 * i + j) % 12 for j in range(16)] for i in range(3)]
    model = cases.toy(3, max_context=16)
    out = run(model, prompts, range(3), PLAIN, width=16, temperature=0.0)
    tokens = jnp.asarray(prompts, jnp.int32)
    expected = np.argmax(np.asarray(cases.target_logits(model, tokens))[:, -1], axis=-1)
    assert rows(out) == [[t] for t in expected.tolist()]


def test_a_row_without_a_law_ends_as_invalid_and_leaves_the_others_alone(monkeypatch):
    model, right = cases.hot_model(), sampling.target_log_probs
    config = ds.GenerateConfig(max_new_tokens=12, draft="ancestral")
    whole = rows(run(model, PROMPTS, (10, 11, 12), config))

    def broken(logits, params, **options):
        log_p = right(logits, params, **options)
        # Row 0 from the first token on, row 2 from the first step on.
        lost = (0, 2) if logits.shape[1] > 1 else (0,)
        return log_p.at[jnp.asarray(lost)].set(-jnp.inf)

    monkeypatch.setattr(sampling, "target_log_probs", broken)
    arguments = (*padded(PROMPTS), ds.request_keys((10, 11, 12)), ds.SamplingParams())
    out = cases.jit_generate()(model, *arguments, config=config)
    assert rows(out) == [[], whole[1], whole[2][:1]]
    assert reasons(out) == [FinishReason.INVALID, FinishReason.LENGTH, FinishReason.INVALID]
    assert (np.asarray(out.tokens) >= 0).all(), "pad ids, where there is no token"


# Log-probabilities


@pytest.mark.parametrize("draft", ["none", "ancestral"])
def test_log_probs_are_those_of_the_unfiltered_target(draft):
    toy = cases.hot_model()
    config = ds.GenerateConfig(max_new_tokens=12, draft=draft, log_probs=True)
    out = run(toy, PROMPTS, (0, 1, 2), config, temperature=0.6, top_k=4)
    for i, row in enumerate(rows(out)):
        logits = cases.continuation_logits(toy, PROMPTS[i], row)
        law = np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))
        expected = law[np.arange(len(row)), row]
        np.testing.assert_allclose(out.log_probs[i], expected, rtol=0, atol=TOY_TOLERANCE)
        # Mutant: the law that was sampled from.
        with np.errstate(divide="ignore"):
            sampled = np.log(cases.filtered_law(logits, temperature=0.6, top_k=4))[np.arange(len(row)), row]
        assert np.abs(sampled - expected).max() > 0.1


def test_log_probs_are_left_out_unless_asked_for_and_zero_behind_the_end(plain):
    assert run(plain, PROMPTS, (0, 1, 2)).log_probs is None
    stop = rows(run(plain, PROMPTS, (0, 1, 2)))[0][2]
    config = dataclasses.replace(PLAIN, log_probs=True, stop_token_ids=(stop,))
    out = run(plain, PROMPTS, (0, 1, 2), config)
    ends = np.arange(12)[None] >= np.asarray(out.lengths)[:, None]
    assert ends.any() and (np.asarray(out.log_probs)[ends] == 0).all() and (np.asarray(out.log_probs)[~ends] < 0).all()


# Compilation, prefill and step


def test_what_compiles_and_what_does_not(plain):
    traces = []

    def counted(*arguments, config):
        traces.append(config)
        return ds.generate(*arguments, config=config)

    go = cases.jit_once(counted, static_argnames="config")

    def call(prompts, seeds, config=PLAIN, **params):
        go(plain, *ds.pad_prompts(prompts, (8, 16)), ds.request_keys(seeds), ds.SamplingParams(**params), config=config)
        return len(traces)

    assert call([[1, 2, 3], [4]], (0, 1)) == 1
    assert call([[5, 6, 7, 8, 9], [2, 2]], (2, 3)) == 1, "another prompt of the bucket"
    assert call([[1, 2, 3], [4]], (0, 1), temperature=0.3, top_k=5, top_p=0.5, min_p=0.1) == 1, "other values"
    assert call([[1, 2, 3], [4]], (0, 1), temperature=0.0) == 1, "greedy"
    assert call([[1, 2, 3], [4]], (0, 1), dataclasses.replace(PLAIN)) == 1, "an equal config"
    assert call([[1] * 9, [4]], (0, 1)) == 2, "the next bucket"


@pytest.fixture(scope="module")
def stepped():
    """Rows of which the second stops at once and the last is empty: config, inputs of `prefill`."""
    tokens, lengths = padded([*PROMPTS, []])
    keys = ds.request_keys((0, 1, 2, 3))
    params = ds.SamplingParams(temperature=jnp.asarray([0.5, 1.0, 2.0, 1.0]))
    config = ds.GenerateConfig(max_new_tokens=12, record_steps=True, log_probs=True)
    stop = int(ds.prefill(cases.hot_model(), tokens, lengths, keys, params, config=config).anchor[1])
    return dataclasses.replace(config, stop_token_ids=(stop,)), (tokens, lengths, keys, params)


def still_running(state) -> bool:
    return bool((np.asarray(state.finish_reason) == FinishReason.RUNNING).any())


def test_step_by_step_is_generate(stepped):
    config, arguments = stepped
    whole = cases.run(cases.hot_model(), *arguments, config=config)
    state = ds.prefill(cases.hot_model(), *arguments, config=config)
    assert np.asarray(state.num_tokens).tolist() == [1, 1, 1, 0]
    committed = [t[:n].tolist() for t, n in zip(np.asarray(state.tokens), (1, 1, 1, 0), strict=True)]
    steps = 0
    while still_running(state):
        before = state
        state, new = ds.step(cases.hot_model(), state, config=config)
        steps += 1
        # All of the old state was given away.
        assert all(a.is_deleted() for a in (before.tokens, before.cache.keys[0], before.draft_cache.keys[0]))
        for i in range(4):
            count = int(new.num_tokens[i])
            committed[i] += np.asarray(new.tokens)[i, :count].tolist()
            assert (np.asarray(new.tokens)[i, count:] == -1).all()
        assert (new.finish_reason == state.finish_reason).all()
    assert steps >= 2 and committed == rows(whole)
    # Integers are equal; log-probabilities come from another program.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=TOY_TOLERANCE), state.result(), whole)
    # What the caller passed in was not given away.
    assert not any(a.is_deleted() for a in jax.tree.leaves(arguments) if isinstance(a, jax.Array))


def test_a_finished_row_does_not_change_while_others_run(stepped):
    config, arguments = stepped
    state = ds.prefill(cases.hot_model(), *arguments, config=config)
    assert reasons(state)[1] == FinishReason.STOP and reasons(state)[3] == FinishReason.EMPTY

    def frozen(state):
        fields = (state.tokens, state.num_tokens, state.anchor, state.position, state.step, state.log_probs)
        arrays = jax.tree.leaves((fields, state.cache, state.draft_cache, state.stats, state.steps))
        return [np.array(a)[[1, 3]] for a in arrays]

    before = frozen(state)
    while still_running(state):
        state, new = ds.step(cases.hot_model(), state, config=config)
        assert np.asarray(new.num_tokens)[[1, 3]].tolist() == [0, 0]
    for a, b in zip(before, frozen(state), strict=True):
        np.testing.assert_array_equal(a, b)


# What is refused


def test_the_effective_mode_is_logged(toy, caplog):
    tokens, lengths = padded(PROMPTS)
    arguments = (tokens, lengths, ds.request_keys((0, 1, 2)), ds.SamplingParams())

    def logged(**options) -> str:
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="dspark_jax"):
            config = ds.GenerateConfig(max_new_tokens=4, **options)
            jax.eval_shape(lambda *a: ds.generate(toy, *a, config=config), *arguments)
        assert len(caplog.records) == 1
        return caplog.text

    assert "4 ancestral drafts a step, block verification" in logged()
    assert "2 greedy drafts a step, match verification" in logged(num_draft_tokens=2, draft="greedy", verify="match")
    # What a threshold does to the rule is said, since the caller asked for another one.
    assert "standard verification" in logged(confidence_threshold=0.5)
    assert "block verification" in logged(confidence_threshold=0.5, ragged_verify="block")
    assert "without drafts" in logged(draft="none")
