"""Configs, models and inputs that `generate`, `prefill` and `step` refuse, in words."""

import dataclasses

import generation_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as ds

PLAIN = ds.GenerateConfig(max_new_tokens=12, draft="none")
TOKENS, LENGTHS = ds.pad_prompts(([3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]), (8,))


@pytest.fixture(scope="module")
def toy() -> ds.Model:
    return cases.toy(1, num_layers=2, moe_layers=(False, True), pad_token_id=7)


@pytest.fixture
def unchecked():
    with cases.unchecked():
        yield


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_new_tokens=0), "max_new_tokens must be an integer of at least 1.*, found 0"),
        (dict(max_new_tokens=2.0), "max_new_tokens must be an integer"),
        (dict(max_new_tokens=True), "max_new_tokens must be an integer"),
        (dict(num_draft_tokens=0), "num_draft_tokens must be an integer of at least 1.*, found 0.*draft='none'"),
        (dict(num_draft_tokens=-3), "num_draft_tokens must be an integer of at least 1.*, found -3"),
        (dict(draft="beam"), "draft is 'beam'; known: ancestral, greedy, none"),
        (dict(verify="typical"), "verify is 'typical'; known: block, standard, match"),
        (dict(ragged_verify="match"), "ragged_verify is 'match'; known: standard, block"),
        (dict(confidence_threshold=1.5), r"confidence_threshold must be in \[0, 1\], found 1.5"),
        (dict(confidence_threshold=float("nan")), "confidence_threshold must be in"),
        (dict(stop_token_ids=(3, -1)), "stop_token_ids must be token ids"),
        (dict(stop_token_ids=(3.0,)), "stop_token_ids must be token ids"),
        (dict(stop_token_ids=("</s>",)), "stop_token_ids must be token ids"),
        (dict(stop_token_ids=5), "stop_token_ids must be token ids"),
        (dict(prefill_chunk=0), "prefill_chunk must be an integer of at least 1"),
        (dict(benchmark_forced_acceptance=-1.0), "benchmark_forced_acceptance must be a number that is not negative"),
    ],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, dict) else "",
)
def test_configs_that_are_refused(unchecked, options, message):
    with pytest.raises(ValueError, match=message):
        ds.GenerateConfig(**({"max_new_tokens": 4} | options))


@pytest.mark.parametrize("option", ["n", "best_of", "repetition_penalty", "logit_bias", "min_tokens", "guided_json"])
def test_options_of_other_libraries_are_named_as_missing(option):
    with pytest.raises(NotImplementedError, match=rf"{option} is not implemented.*temperature"):
        ds.GenerateConfig(max_new_tokens=4, **{option: 2})
    if option in ("n", "repetition_penalty"):
        with pytest.raises(NotImplementedError, match=option):
            ds.SamplingParams(**{option: 2})


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="max_tokens"):
        ds.GenerateConfig(max_new_tokens=4, max_tokens=4)
    with pytest.raises(TypeError):
        ds.GenerateConfig(4)


def test_configs_are_values(unchecked):
    a, b = (ds.GenerateConfig(max_new_tokens=4, stop_token_ids=ids) for ids in ([1, 2], (1, 2)))
    assert a == b and hash(a) == hash(b)
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.max_new_tokens = 5
    with pytest.raises(ValueError, match="num_draft_tokens"):
        dataclasses.replace(a, num_draft_tokens=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_draft_tokens=5), "num_draft_tokens 5 exceeds the drafter's block size 4"),
        (dict(stop_token_ids=(12,)), "stop token 12 lies outside the vocabulary of 12"),
        (dict(benchmark_forced_acceptance=4.5), "benchmark_forced_acceptance 4.5 exceeds the 4 drafts of a step"),
    ],
    ids=["block size", "stop token", "forced"],
)
@pytest.mark.parametrize("entry", ["generate", "prefill", "step"])
def test_configs_that_the_model_cannot_serve(toy, options, message, entry):
    config = ds.GenerateConfig(max_new_tokens=4, **options)
    arguments = (TOKENS, LENGTHS, ds.request_keys((0, 1, 2)), ds.SamplingParams())
    if entry == "step":
        arguments = (jax.eval_shape(lambda *a: ds.prefill(*a, config=PLAIN), toy, *arguments),)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda *a: getattr(ds, entry)(*a, config=config), toy, *arguments)


def test_models_that_cannot_draft(toy):
    arguments = (TOKENS, LENGTHS, ds.request_keys((0, 1, 2)), ds.SamplingParams())
    with pytest.raises(
        ValueError, match="draft='ancestral' needs a drafter and this checkpoint has none; use draft='none'"
    ):
        ds.generate(ds.Model(target=toy.target), *arguments, config=ds.GenerateConfig(max_new_tokens=4))
    plain = cases.toy(1, drafter=dict(confidence_head=False, confidence_with_markov=False))
    with pytest.raises(ValueError, match="confidence_threshold needs a confidence head and this drafter has none"):
        ds.generate(plain, *arguments, config=ds.GenerateConfig(max_new_tokens=4, confidence_threshold=0.5))


def test_inputs_that_are_refused(toy):
    tokens, lengths = TOKENS, LENGTHS
    keys, params = ds.request_keys((0, 1, 2)), ds.SamplingParams()

    def shapes(*arguments):
        jax.eval_shape(lambda *a: ds.generate(toy, *a, config=PLAIN), *arguments)

    wide = jnp.zeros((3, 129), jnp.int32)
    with pytest.raises(ValueError, match="tokens is 129 wide but the target's context is 128; shorten the prompts"):
        shapes(wide, lengths, keys, params)
    with pytest.raises(ValueError, match=r"top_k has 2 entries for a batch of 3"):
        shapes(tokens, lengths, keys, ds.SamplingParams(top_k=np.asarray([1, 2])))
    with pytest.raises(ValueError, match="at least one row and one column"):
        shapes(tokens[:, :0], lengths, keys, params)
    with pytest.raises(ValueError, match="tokens is 129 wide, the target's context is 128"):
        ds.target_logits(toy, wide)


def test_keys_and_lengths_of_the_wrong_kind(toy, unchecked):
    tokens, lengths = TOKENS, LENGTHS
    keys, params = ds.request_keys((0, 1, 2)), ds.SamplingParams()
    for arguments, message in (
        ((tokens, lengths, keys[:2], params), "must share their first axis; make keys with request_keys"),
        ((tokens, lengths[:2], keys, params), "must share their first axis"),
        ((tokens, lengths, jax.random.key_data(keys)[:, 0], params), "keys must be typed keys, found dtype uint32"),
        ((tokens, lengths, keys, {}), "params must be SamplingParams, found dict"),
    ):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda *a: ds.generate(toy, *a, config=PLAIN), *arguments)


def test_arguments_that_are_something_else_altogether(toy, unchecked):
    tokens, lengths = TOKENS, LENGTHS
    rest = (tokens, lengths, ds.request_keys((0, 1, 2)), ds.SamplingParams())
    with pytest.raises(ValueError, match=r"model must be what dspark_jax\.load returned, found str"):
        ds.generate("ckpt/", *rest, config=PLAIN)
    with pytest.raises(ValueError, match="config must be a GenerateConfig, found NoneType"):
        ds.generate(toy, *rest, config=None)
    with pytest.raises(ValueError, match=r"tokens must be integers \[B, T\], found int32 \(3,\)"):
        ds.target_logits(toy, jnp.zeros((3,), jnp.int32))


def test_a_budget_beyond_the_context_takes_no_memory_for_it(toy):
    config = dataclasses.replace(PLAIN, max_new_tokens=10_000)
    tokens, lengths = TOKENS, LENGTHS
    state = jax.eval_shape(
        lambda *a: ds.prefill(toy, *a, config=config), tokens, lengths, ds.request_keys((0, 1, 2)), ds.SamplingParams()
    )
    assert state.cache.slots == 128
