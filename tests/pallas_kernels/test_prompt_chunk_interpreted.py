"""A chunk of a prompt through the Triton forms, as a layer calls them, run by Triton's interpreter on the CPU.

TRITON_INTERPRET=1 pytest tests/pallas_kernels/test_prompt_chunk_interpreted.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sparse_cases import SCORE_TOLERANCE, index_inputs, scores_differ
from triton_interpreter import interpreted, requires_interpreter

from dspark_jax import attention, attention_forms
from pallas_kernels import _dispatch, index_block_scores, select_blocks
from pallas_kernels.index_scores.reference import index_block_scores_reference

BLOCK, SLOTS, TOP_K, TOKENS = 16, 128, 3, 37
HEADS, KV_HEADS, DIM = 8, 2, 32
# A whole chunk in the middle and at the end of the cache, one that ends early, padding alone.
ROWS = [(40, TOKENS), (SLOTS - TOKENS, TOKENS), (0, 11), (0, 0)]
# float16: rounded weights and result (2^-11 each) of values of size one.
TOLERANCE = 3e-3


@pytest.fixture
def triton(monkeypatch):
    """The Triton forms as they are built for a GPU of 4 multiprocessors, called with concrete arrays."""
    from pallas_kernels.block_sparse_decode import triton as sparse
    from pallas_kernels.index_scores import triton as index
    from pallas_kernels.windowed_decode import triton as dense

    for module in (sparse, index, dense):
        monkeypatch.setattr(module, "require_triton", lambda dtype, device: 4)
    monkeypatch.setattr(_dispatch, "opaque", lambda function, kernel, roles: kernel)
    with interpreted():
        yield


def positions() -> jax.Array:
    offset = np.arange(TOKENS)
    return jnp.asarray([np.where(offset < n, start + offset, -1) for start, n in ROWS], jnp.int32)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), jnp.float16)


def largest_difference(actual, expected) -> float:
    assert np.isfinite(actual).all()
    difference = np.abs(np.asarray(actual, np.float32) - np.asarray(expected, np.float32))
    return float(np.where(np.asarray(positions())[..., None, None] < 0, 0, difference).max())


@requires_interpreter
@pytest.mark.parametrize("sparse", [True, False])
def test_attention_of_a_chunk(triton, sparse: bool) -> None:
    at = positions()
    q, k, v = (
        normal(seed, len(ROWS), n, heads, DIM)
        for seed, (n, heads) in enumerate([(TOKENS, HEADS), (SLOTS, KV_HEADS), (SLOTS, KV_HEADS)])
    )
    scores = normal(3, len(ROWS), TOKENS, KV_HEADS, SLOTS // BLOCK).astype(jnp.float32)
    blocks = attention.select_blocks(scores, at, block_size=BLOCK, top_k=TOP_K) if sparse else None
    options = dict(block_size=BLOCK, implementation="triton")
    actual = attention_forms.attend_with_kernels(q, k, v, at, blocks=blocks, **options)

    def loops(positions=at, **changes):
        return attention.attend(q, k, v, positions, **(dict(blocks=blocks, block_size=BLOCK, chunk=SLOTS) | changes))

    assert largest_difference(actual, loops()) <= TOLERANCE
    mutants = [loops(at + 1), loops(jnp.maximum(at - 16, -1))]
    if blocks is not None:
        mutants += [loops(blocks=blocks[:, :, ::-1]), loops(blocks=jnp.roll(blocks, 1, axis=1)), loops(blocks=None)]
    assert min(largest_difference(actual, m) for m in mutants) > 30 * TOLERANCE


@requires_interpreter
def test_selection_of_a_chunk(triton) -> None:
    """Scores of several programs' rows, and the blocks that the loops would keep by them."""
    at = positions()
    q, k = index_inputs(5, queries=TOKENS, heads=4, dim=16, slots=SLOTS, dtype="float16", rows=len(ROWS))
    options = dict(block_size=BLOCK, implementation="triton")
    scores = index_block_scores(q, k, at, **options)

    def expected(positions):
        return np.asarray(index_block_scores_reference(q, k, positions, block_size=BLOCK), np.float64)

    assert scores_differ(scores, expected(at)) <= SCORE_TOLERANCE
    assert scores_differ(scores, expected(jnp.where(at < 0, -1, at + 1))) > 100 * SCORE_TOLERANCE
    kept = select_blocks(scores, at, top_k=TOP_K, **options)
    loops = attention.select_blocks(scores, at, block_size=BLOCK, top_k=TOP_K)
    np.testing.assert_array_equal(kept, loops)
    assert not np.array_equal(kept, attention.select_blocks(-scores, at, block_size=BLOCK, top_k=TOP_K))


@requires_interpreter
@pytest.mark.parametrize("rows", [16, 64, 128])
def test_any_number_of_rows_a_program(rows: int) -> None:
    from pallas_kernels.index_scores.triton import Tuning, block_maxima

    q, k = index_inputs(6, queries=TOKENS, heads=4, dim=16, slots=SLOTS, dtype="float16", rows=len(ROWS))
    tuning = Tuning(blocks=4, stages=2, rows=rows)
    with interpreted():
        scores = block_maxima(q, k, positions(), block_size=BLOCK, multiprocessors=4, tuning=tuning)
    expected = np.asarray(index_block_scores_reference(q, k, positions(), block_size=BLOCK), np.float64)
    assert scores_differ(scores, expected) <= SCORE_TOLERANCE


@pytest.mark.parametrize("tokens, programs", [(8, 256), (512, 32 * 256)])
def test_programs_of_the_scoring(tokens: int, programs: int) -> None:
    """A chunk's groups of rows are programs too, so each of them scores several blocks; a step's has as few as ever."""
    from pallas_kernels.index_scores.triton import choose_tuning

    t = choose_tuning(batch=1, rows=4 * tokens, blocks=256, multiprocessors=132)
    assert t.blocks == (1 if tokens == 8 else 8)
    assert -(-4 * tokens // t.rows) * 256 == programs
