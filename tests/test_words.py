"""Words of what commands print."""

from pathlib import Path

import numpy as np
import pytest

import dspark_jax as ds
from dspark_jax._words import counted
from dspark_jax.commands._common import describe
from dspark_jax.prompts import read_text


def test_files_that_cannot_be_read_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"none\.txt cannot be read \(No such file.*; name a file of prompts"):
        read_text(tmp_path / "none.txt")
    (tmp_path / "latin.txt").write_bytes("für".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 text .* at byte 1"):
        read_text(tmp_path / "latin.txt")
    with pytest.raises(ds.CheckpointError, match=r"none is not a folder; name one that holds tokenizer\.json"):
        ds.Tokenizer.load(tmp_path / "none")


def test_one_of_a_thing_is_no_plural():
    assert [counted(n, "pass", "passes") for n in (0, 1, 2)] == ["0 passes", "1 pass", "2 passes"]
    assert [counted(n, "token") for n in (1, 1234)] == ["1 token", "1,234 tokens"]
    one = np.ones((1, 1), np.int32)
    stats = ds.AcceptanceStats(
        num_steps=one[0],
        num_spec_steps=one[0],
        acceptance_histogram=np.array([[0, 1]], np.int32),
        drafted_per_position=one,
        reached_per_position=one,
        num_emitted_tokens=2 * one[0],
        expected_accepted=np.ones((1, 2), np.float32),
    )
    assert "(1 of 1 draft accepted in 1 step)" in describe(stats)
