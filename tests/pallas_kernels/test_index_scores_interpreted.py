"""The Triton forms of `index_block_scores` and `select_blocks`, run by Triton's interpreter on the CPU.

TRITON_INTERPRET=1 pytest tests/pallas_kernels/test_index_scores_interpreted.py
"""

import jax.numpy as jnp
import numpy as np
import pytest
from sparse_cases import (
    SCORE_TOLERANCE,
    index_inputs,
    scores_differ,
    scores_of_all_kinds,
    scores_oracle,
    selection_oracle,
)
from triton_interpreter import interpreted, requires_interpreter, rewrite

SHAPES = {
    "as the model": dict(queries=8, heads=4, dim=64, slots=256, block_size=32),
    "one query, one head": dict(queries=1, heads=1, dim=32, slots=96, block_size=16),
    "small blocks, odd head": dict(queries=3, heads=2, dim=24, slots=60, block_size=6),
    "blocks of two tiles": dict(queries=2, heads=4, dim=16, slots=768, block_size=256),
    "many rows": dict(queries=18, heads=4, dim=16, slots=64, block_size=16),
}


@requires_interpreter
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_scores_equal_the_oracle(name: str, dtype: str) -> None:
    from pallas_kernels.index_scores import triton

    shape = dict(SHAPES[name])
    block_size = shape.pop("block_size")
    q, k = index_inputs(1, dtype=dtype, rows=3, **shape)
    start = np.array([[shape["slots"] - shape["queries"]], [block_size - 1], [-1]])
    positions = np.where(start < 0, -1, start + np.arange(shape["queries"]))
    positions[1, 1:] = -1
    positions = jnp.asarray(positions, jnp.int32)
    expected = scores_oracle(q, k, positions, block_size=block_size)
    for tuning in (None, triton.Tuning(blocks=4, stages=2)):
        with interpreted():
            actual = triton.block_maxima(
                q, k, positions, block_size=block_size, multiprocessors=2, tuning=tuning
            )  # fmt: skip
        assert scores_differ(actual, expected) <= SCORE_TOLERANCE
    if shape["queries"] > 1:
        late = jnp.where(positions < 0, -1, positions + 1)
        assert scores_differ(actual, scores_oracle(q, k, late, block_size=block_size)) > 100 * SCORE_TOLERANCE


@requires_interpreter
def test_keys_behind_the_last_visible_block_are_not_read() -> None:
    from pallas_kernels.index_scores import triton

    q, k = index_inputs(2, queries=2, heads=2, dim=16, slots=128, dtype="float16", rows=2)
    positions = jnp.asarray([[16, 17], [60, 61]], jnp.int32)
    slot = jnp.arange(128, dtype=jnp.int32)[None, :, None]
    poisoned = jnp.where(slot >= jnp.asarray([32, 64], jnp.int32)[:, None, None], jnp.float16(jnp.nan), k)
    with interpreted():
        clean, dirty = (triton.block_maxima(q, x, positions, block_size=16, multiprocessors=2) for x in (k, poisoned))
    np.testing.assert_array_equal(clean, dirty)


@requires_interpreter
@pytest.mark.parametrize("blocks, top_k", [(13, 4), (3, 5), (64, 16), (1, 1)])
def test_selection_equals_the_oracle(blocks: int, top_k: int) -> None:
    from pallas_kernels.index_scores import triton

    rng = np.random.default_rng(blocks)
    # Few different values: many ties, of either sign.
    scores = rng.integers(-3, 3, (3, 4, 2, blocks)).astype(np.float32)
    scores[0, 0] = -np.inf
    positions = rng.integers(-1, blocks * 8 + 4, (3, 4)).astype(np.int32)
    positions[0, 0], positions[1, 0] = blocks * 8 - 1, -1
    with interpreted():
        actual = triton.select(jnp.asarray(scores), jnp.asarray(positions), block_size=8, top_k=top_k)
    np.testing.assert_array_equal(actual, selection_oracle(scores, positions, block_size=8, top_k=top_k))


def selected_and_expected(blocks: int, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    from pallas_kernels.index_scores import triton

    scores = scores_of_all_kinds(blocks, blocks)
    positions = np.random.default_rng(blocks).integers(-1, blocks * 8 + 4, (2, 8)).astype(np.int32)
    with interpreted():
        actual = triton.select(jnp.asarray(scores), jnp.asarray(positions), block_size=8, top_k=top_k)
    return np.asarray(actual), selection_oracle(scores, positions, block_size=8, top_k=top_k)


@requires_interpreter
@pytest.mark.parametrize("blocks, top_k", [(13, 4), (3, 5), (64, 16), (1, 1)])
def test_selection_by_scores_of_all_kinds(blocks: int, top_k: int) -> None:
    np.testing.assert_array_equal(*selected_and_expected(blocks, top_k))


MUTANTS = {
    "the query's own block is forced like others": ("0x7FFFFFFF, ascending)", "0x7F800000, ascending)"),
    "NaN is a number": ("score == score", "score != 0.5"),
    "-0 is less than 0": ("score == 0.0", "score == 0.5"),
}


@requires_interpreter
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_of_the_selection(mutant: str, monkeypatch, tmp_path) -> None:
    rewrite(monkeypatch, tmp_path, "pallas_kernels.index_scores.triton_kernel", *MUTANTS[mutant])
    assert not np.array_equal(*selected_and_expected(13, 4))
