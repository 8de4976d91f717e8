"""Padding prompts to buckets."""

import json

import generation_cases as cases
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as ds
from dspark_jax.prompts import DEFAULT_BUCKETS, check_vocabulary, read_prompt_lines


def test_rows_are_right_padded_with_zeros():
    tokens, lengths = ds.pad_prompts([[5, 6, 7], [], [8]], (4, 8))
    assert tokens.dtype == lengths.dtype == jnp.int32
    assert np.asarray(tokens).tolist() == [[5, 6, 7, 0], [0, 0, 0, 0], [8, 0, 0, 0]]
    assert np.asarray(lengths).tolist() == [3, 0, 1]


@pytest.mark.parametrize(
    ("longest", "width"), [(0, 4), (1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16), (17, 24), (100, 104)]
)
def test_widths_are_buckets_and_then_multiples_of_the_last(longest, width):
    tokens, _ = ds.pad_prompts([[1] * longest], (4, 8) if width != 16 else (4, 8, 16))
    assert tokens.shape == (1, width)


def test_default_buckets_hold_any_length():
    for longest in (1, 64, 65, 8192, 8193):
        tokens, _ = ds.pad_prompts([[1] * longest])
        assert tokens.shape[1] >= longest
        assert tokens.shape[1] in DEFAULT_BUCKETS or tokens.shape[1] % DEFAULT_BUCKETS[-1] == 0


def test_a_bucket_beyond_the_context_is_cut_to_it():
    tokens, _ = ds.pad_prompts([[1] * 600], max_width=1000)
    assert tokens.shape == (1, 1000)
    with pytest.raises(ValueError, match="prompt 1 has 11 tokens, the target's context holds 10; shorten it"):
        ds.pad_prompts([[1], [1] * 11], (16,), max_width=10)


def test_arrays_and_other_integers_are_prompts():
    with cases.unchecked():
        tokens, _ = ds.pad_prompts([np.asarray([1, 2], np.uint8), (3,), range(2)], (2,))
    assert np.asarray(tokens).tolist() == [[1, 2], [3, 0], [0, 1]]


def test_a_line_of_a_file_ends_at_a_newline_alone(tmp_path):
    """JSON may hold the line ends that only Unicode knows."""
    file = tmp_path / "prompts.jsonl"
    texts = ["a\u2028b", "c\x85d", "e\u2029"]
    file.write_bytes("\r\n".join(json.dumps({"prompt": t}, ensure_ascii=False) for t in texts).encode() + b"\n\n")
    assert read_prompt_lines(file) == texts
    assert len(file.read_text(encoding="utf-8").splitlines()) > len(texts) + 1  # the mutant's lines


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "at least one prompt"),
        (["text"], "prompt 0 is text; encode it first"),
        ([[1], [2, -1]], "prompt 1 must be a flat list of token ids"),
        ([[1.5]], "prompt 0 must be a flat list"),
        ([[[1, 2]]], "prompt 0 must be a flat list"),
        ([[2**31]], "prompt 0 must be a flat list"),
        ([[True, False]], "prompt 0 must be a flat list"),
    ],
)
def test_what_is_not_a_prompt(prompts, message):
    with cases.unchecked(), pytest.raises(ValueError, match=message):
        ds.pad_prompts(prompts)


@pytest.mark.parametrize("buckets", [(), (0, 4), (8, 4), (4, 4), (-1,)])
def test_buckets_that_do_not_ascend(buckets):
    with pytest.raises(ValueError, match="buckets must be positive and ascending"):
        ds.pad_prompts([[1]], buckets)


def test_tokens_outside_the_vocabulary_are_named():
    tokens, _ = ds.pad_prompts([[11], [3, 12]], (2,))
    with pytest.raises(ValueError, match="prompt 1 holds token 12, outside the vocabulary of 12"):
        check_vocabulary(tokens, 12)
    check_vocabulary(tokens, 13)
