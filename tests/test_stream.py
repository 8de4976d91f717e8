"""Streaming: the same tokens as `generate`, one event a step; text in and text out."""

import itertools

import generation_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import dspark_jax as ds
from dspark_jax import streaming
from dspark_jax.generate_config import FinishReason

PROMPTS = [[3, 1, 4], [], [1, 5, 9, 2, 6]]
SEEDS = [5, 6, 7]
CONFIG = ds.GenerateConfig(max_new_tokens=12)
WORDS = ["a", "b", "cd", "d", " ", "e", "f\n", "g", "h", "i", "j", "k"]


@pytest.fixture(scope="module")
def toy() -> ds.Model:
    return cases.toy(1, pad_token_id=7)


@pytest.fixture(scope="module")
def tokenizer() -> ds.Tokenizer:
    """One token a word of `WORDS`."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    return ds.Tokenizer(backend=backend, chat_template="{{ messages[0].content }}e")


@pytest.fixture(scope="module")
def whole(toy) -> ds.Generation:
    tokens, lengths = ds.pad_prompts(PROMPTS)
    return cases.run(toy, tokens, lengths, ds.request_keys(SEEDS), ds.SamplingParams(), config=CONFIG)


def rows(out: ds.Generation) -> list[list[int]]:
    return [t[:n].tolist() for t, n in zip(np.asarray(out.tokens), np.asarray(out.lengths), strict=True)]


def stream(toy, prompts=PROMPTS, **options) -> list[streaming.StreamEvent]:
    return list(ds.stream(toy, prompts, **({"config": CONFIG, "seeds": SEEDS} | options)))


def test_events_join_to_the_tokens_of_generate(toy, whole):
    params = ds.SamplingParams(temperature=jnp.float32(1.0))
    events = stream(toy, params=params)
    joined = [list(itertools.chain(*(e.tokens[i] for e in events))) for i in range(3)]
    assert joined == rows(whole)
    assert [len(t) for t in events[0].tokens] == [1, 0, 1], "the prefill's token is an event of its own"
    assert len(events) == 1 + int(whole.stats.num_steps.max())
    assert all(e.generation is None and FinishReason.RUNNING in e.finish_reason for e in events[:-1])
    assert events[-1].finish_reason == (FinishReason.LENGTH, FinishReason.EMPTY, FinishReason.LENGTH)
    # Without log-probabilities the result holds integers and counts: equal, all of them.
    jax.tree.map(np.testing.assert_array_equal, events[-1].generation, whole)
    assert all(e.text == () for e in events)
    # What the caller passed in can be used again.
    assert rows(stream(toy, params=params)[-1].generation) == rows(whole)


def test_a_stream_may_be_left_early(toy, whole):
    events = ds.stream(toy, PROMPTS, config=CONFIG, seeds=SEEDS)
    first = next(events)
    assert first.tokens[0] == (rows(whole)[0][0],)
    events.close()


def test_one_program_serves_every_step_and_prompt_of_a_bucket(toy):
    stream(toy)
    before = ds.prefill._cache_size(), ds.step._cache_size()
    assert len(stream(toy, prompts=[[7], [8, 8], [6]], seeds=[1, 2, 3])) > 3
    assert (ds.prefill._cache_size(), ds.step._cache_size()) == before


def test_seeds_count_up_from_zero(toy):
    implicit, explicit = (stream(toy, seeds=s)[-1].generation for s in (None, [0, 1, 2]))
    assert rows(implicit) == rows(explicit)


def text_of(tokens: list[int]) -> str:
    return "".join(WORDS[t] for t in tokens)


def test_text_follows_the_tokens(toy, whole, tokenizer):
    events = stream(toy, tokenizer=tokenizer)
    for i, row in enumerate(rows(whole)):
        assert "".join(e.text[i] for e in events) == text_of(row)


def test_stop_strings_end_a_row_and_only_that_one(toy, whole, tokenizer):
    row = rows(whole)[0]
    # Two tokens that no single step has to give together: found in the text, wherever the border of steps is.
    stop = text_of(row[4:6])
    expected = [t[: t.find(stop)] if stop in t else t for t in map(text_of, rows(whole))]
    events = stream(toy, tokenizer=tokenizer, stop_strings=(stop, "never said"))
    texts = ["".join(e.text[i] for e in events) for i in range(3)]
    assert texts == expected and texts[0] != text_of(row)
    generation = events[-1].generation
    for i, t in enumerate(map(text_of, rows(whole))):
        reason = FinishReason(int(generation.finish_reason[i]))
        assert reason == (FinishReason.STOP if stop in t else (FinishReason.EMPTY if not t else FinishReason.LENGTH))
    # The tokens that spell it stay, nothing is generated far behind it.
    kept = rows(generation)[0]
    assert kept == row[: len(kept)] and stop in text_of(kept)
    assert len(kept) <= 6 + CONFIG.max_new_tokens // 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(seeds=[1, 2]), "2 seeds for 3 prompts; give one each"),
        (dict(stop_strings=("x",)), "stop_strings need a tokenizer.*stop_token_ids"),
        (dict(prompts=[[1], [12]], seeds=None), "prompt 1 holds token 12, outside the vocabulary of 12"),
        (dict(prompts=["text"], seeds=None), "prompt 0 is text; encode it first"),
        (dict(prompts=[], seeds=None), "at least one prompt"),
        (dict(prompts=[[1] * 129], seeds=None), "prompt 0 has 129 tokens, the target's context holds 128; shorten it"),
    ],
)
def test_arguments_that_are_refused_before_anything_runs(toy, options, message):
    with cases.unchecked(), pytest.raises(ValueError, match=message):
        # No event is asked for: the call itself refuses.
        ds.stream(toy, **({"prompts": PROMPTS, "config": CONFIG, "seeds": SEEDS} | options))


def test_an_empty_stop_string_is_refused(toy, tokenizer):
    with pytest.raises(ValueError, match="stop_strings must be a list of texts that are not empty"):
        ds.stream(toy, PROMPTS, config=CONFIG, tokenizer=tokenizer, stop_strings=("",))


def test_prompts_that_fit_the_context_need_no_bucket_inside_it():
    model = cases.toy(1, max_context=16)
    event = next(iter(ds.stream(model, [[1] * 10], config=ds.GenerateConfig(max_new_tokens=1, draft="none"))))
    assert len(event.tokens[0]) == 1


# Text in, text out


def test_generate_text_is_stream_with_a_tokenizer(toy, tokenizer):
    def text(prompts, **options) -> list[str]:
        return ds.generate_text(toy, prompts, tokenizer=tokenizer, config=CONFIG, seeds=[3, 4, 5], **options)

    prompts = ["ab", "cd", "e"]
    texts = text(prompts)
    *_, last = stream(toy, prompts=[tokenizer.encode(p) for p in prompts], seeds=[3, 4, 5])
    assert texts == [text_of(r) for r in rows(last.generation)]
    stop = texts[0][3:5]
    assert text(prompts, stop_strings=(stop,))[0] == texts[0][: texts[0].find(stop)]
    # The template adds a token, and so changes the text.
    assert text(prompts, chat=True) == text(["abe", "cde", "ee"]) != texts


def test_generate_text_needs_a_tokenizer(toy):
    with pytest.raises(ds.CheckpointError, match="needs a tokenizer beside a loaded model"):
        ds.generate_text(toy, ["a"])
