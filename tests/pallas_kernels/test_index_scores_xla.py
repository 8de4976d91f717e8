"""`index_block_scores` and `select_blocks`: XLA forms and references against numpy and a plain sort; mutants."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sparse_cases import (
    SCORE_TOLERANCE,
    index_inputs,
    scores_differ,
    scores_of_all_kinds,
    scores_oracle,
    selection_oracle,
)

from pallas_kernels.index_scores.api import index_block_scores, select_blocks
from pallas_kernels.index_scores.reference import index_block_scores_reference, select_blocks_reference
from pallas_kernels.index_scores.xla import index_block_scores_xla

# Shapes are few, so that programs are compiled once each.
SHAPES = [  # queries, heads, dim, slots, block size, dtype, keys of one step
    (3, 2, 8, 40, 4, "float32", 12),
    (8, 4, 16, 64, 8, "bfloat16", 16),
    (1, 1, 8, 35, 5, "float32", 1024),
    (4, 3, 8, 42, 7, "float16", 14),
]


@functools.cache
def programs(shape: int):
    *_, block_size, _, step = SHAPES[shape]
    tiled = functools.partial(index_block_scores_xla, block_size=block_size, keys_per_step=step)
    return jax.jit(tiled), jax.jit(functools.partial(index_block_scores_reference, block_size=block_size))


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_scores_equal_the_oracle(data: st.DataObject) -> None:
    shape = data.draw(st.integers(0, len(SHAPES) - 1))
    queries, heads, dim, slots, block_size, dtype, _ = SHAPES[shape]
    q, k = index_inputs(
        data.draw(st.integers(0, 2**32 - 1)), queries=queries, heads=heads, dim=dim, slots=slots, dtype=dtype, rows=2
    )
    one = st.integers(-1, slots + 3)  # positions need not be consecutive, and may be past the end
    positions = jnp.asarray(data.draw(st.lists(one, min_size=2 * queries, max_size=2 * queries)), jnp.int32)
    positions = positions.reshape(2, queries)
    expected = scores_oracle(q, k, jnp.minimum(positions, slots - 1), block_size=block_size)
    for program in programs(shape):
        assert scores_differ(program(q, k, positions), expected) <= SCORE_TOLERANCE


def test_mutants_of_the_scores() -> None:
    q, k = index_inputs(1, queries=4, heads=2, dim=16, slots=64, dtype="float32", rows=2)
    positions = jnp.asarray([[50, 51, 52, 53], [9, 10, -1, -1]], jnp.int32)
    actual = index_block_scores(q, k, positions, block_size=8, implementation="xla")

    def difference(q=q, k=k, positions=positions):
        return scores_differ(actual, scores_oracle(q, k, positions, block_size=8))

    assert difference() <= SCORE_TOLERANCE
    mutants = {
        "index heads swapped": difference(q=q[:, :, ::-1]),
        "the next key is visible": difference(positions=positions + 1),
        "padding sees key 0": difference(positions=jnp.maximum(positions, 0)),
        "keys of the other row": difference(k=k[::-1]),
        "pooled over heads": difference(q=jnp.broadcast_to(q.mean(2, keepdims=True), q.shape)),
    }
    assert min(mutants.values()) > 100 * SCORE_TOLERANCE, mutants


def test_keys_behind_the_longest_row_are_not_read() -> None:
    q, k = index_inputs(2, queries=2, heads=2, dim=8, slots=64, dtype="float32", rows=2)
    positions = jnp.asarray([[14, 15], [3, 4]], jnp.int32)
    program = functools.partial(index_block_scores_xla, block_size=8, keys_per_step=16)
    np.testing.assert_array_equal(program(q, k, positions), program(q, k.at[:, 16:].set(jnp.nan), positions))
    assert np.isnan(program(q, k.at[:, 15].set(jnp.nan), positions)).any()


def test_no_array_of_queries_by_keys() -> None:
    def temporary_bytes(slots: int) -> int:
        shape = jax.ShapeDtypeStruct
        args = (
            shape((1, 8, 4, 16), jnp.bfloat16), shape((1, slots, 16), jnp.bfloat16), shape((1, 8), jnp.int32)
        )  # fmt: skip
        function = jax.jit(lambda *a: index_block_scores(*a, block_size=128, implementation="xla"))
        return function.lower(*args).compile().memory_analysis().temp_size_in_bytes

    outputs = 8 * 4 * (65_536 // 128) * 4
    assert temporary_bytes(65_536) <= temporary_bytes(8_192) + 4 * outputs
    # The mutant: the scores of all keys.
    assert temporary_bytes(65_536) < 8 * 4 * 65_536 * 4 / 4


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32 - 1), st.sampled_from([(13, 4), (3, 5), (40, 16), (1, 1)]), st.booleans())
def test_selection_equals_the_oracle(seed: int, shape: tuple[int, int], ties: bool) -> None:
    blocks, top_k = shape
    rng = np.random.default_rng(seed)
    scores = rng.integers(-3, 3, (2, 4, 2, blocks)) if ties else rng.standard_normal((2, 4, 2, blocks))
    scores = np.where(rng.random(scores.shape) < 0.1, -np.inf, scores).astype(np.float32)
    positions = rng.integers(-1, blocks * 8 + 4, (2, 4)).astype(np.int32)
    expected = selection_oracle(scores, positions, block_size=8, top_k=top_k)
    for function in (functools.partial(select_blocks, implementation="xla"), select_blocks_reference):
        actual = function(jnp.asarray(scores), jnp.asarray(positions), block_size=8, top_k=top_k)
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("blocks, top_k", [(13, 4), (3, 5), (40, 16), (1, 1)])
def test_selection_by_scores_of_all_kinds(blocks: int, top_k: int) -> None:
    """Forced blocks behind the query's own, no NaN, and no block twice."""
    scores = scores_of_all_kinds(blocks, blocks)
    positions = np.random.default_rng(blocks).integers(-1, blocks * 8 + 4, (2, 8)).astype(np.int32)
    expected = selection_oracle(scores, positions, block_size=8, top_k=top_k)
    static = dict(block_size=8, top_k=top_k)
    for function in (functools.partial(select_blocks, implementation="xla"), select_blocks_reference):
        actual = function(jnp.asarray(scores), jnp.asarray(positions), **static)
        np.testing.assert_array_equal(actual, expected)
        np.testing.assert_array_equal(jax.jit(functools.partial(function, **static))(scores, positions), expected)
    if blocks < top_k:
        return
    # The mutants: NaN is larger than all; the query's own block is forced like others; NaN is a place without a block.
    number, own = np.arange(blocks), positions[..., None, None] // 8
    seen = np.where(number < own, scores, np.float32(-np.inf))
    nan_first = selection_oracle(np.where(np.isnan(seen), np.inf, seen), positions, **static)
    forced = np.where(number == own, np.inf, np.where(np.isnan(seen), -np.inf, seen))
    order = np.argsort(-forced, -1, "stable")[..., :top_k]
    like_others = np.where(np.take_along_axis(forced, order, -1) > -np.inf, order, -1)
    holes = np.where(np.isnan(np.take_along_axis(seen, np.maximum(nan_first, 0), -1)), -1, nan_first)
    for mutant in (nan_first, like_others, holes) if blocks > 1 else ():
        assert not np.array_equal(expected, mutant)


def test_mutants_of_the_selection() -> None:
    rng = np.random.default_rng(3)
    scores = rng.integers(-3, 3, (2, 4, 2, 12)).astype(np.float32)
    positions = rng.integers(40, 96, (2, 4)).astype(np.int32)
    actual = np.asarray(select_blocks(jnp.asarray(scores), jnp.asarray(positions), block_size=8, top_k=4))
    np.testing.assert_array_equal(actual, selection_oracle(scores, positions, block_size=8, top_k=4))
    higher_wins = 11 - selection_oracle(scores[..., ::-1], 11 * 8 - (positions // 8) * 8, block_size=8, top_k=4)
    assert not np.array_equal(actual[..., 1:], higher_wins[..., 1:])
    not_forced = np.argsort(-np.where(np.arange(12) <= positions[..., None, None] // 8, scores, -np.inf), -1, "stable")
    assert not np.array_equal(actual, not_forced[..., :4])
    assert not np.array_equal(actual, selection_oracle(scores[:, :, ::-1], positions, block_size=8, top_k=4))
    sees_all = np.argsort(-scores, -1, "stable")[..., :4]
    assert not np.array_equal(actual, sees_all)


def test_agrees_with_the_layer() -> None:
    from dspark_jax import attention

    q, k = index_inputs(4, queries=5, heads=2, dim=16, slots=96, dtype="float32", rows=2)
    positions = jnp.asarray([[70, 71, 72, 73, 74], [3, 4, 5, -1, -1]], jnp.int32)
    scores = index_block_scores(q, k, positions, block_size=8)
    np.testing.assert_allclose(
        scores, attention.block_scores(q, k, positions, block_size=8, chunk=32), atol=SCORE_TOLERANCE
    )
    np.testing.assert_array_equal(
        select_blocks(scores, positions, block_size=8, top_k=4),
        attention.select_blocks(scores, positions, block_size=8, top_k=4),
    )


def test_a_kernel_folds_vmap_and_has_no_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    """What wraps the Triton forms, with XLA in their place."""
    from pallas_kernels.index_scores import triton, xla

    seen = []

    def scores(q, k, positions, *, block_size, multiprocessors):
        seen.append(q.shape)
        return xla.index_block_scores_xla(q, k, positions, block_size=block_size)

    monkeypatch.setattr(triton, "require_triton", lambda dtype, device: 132)
    monkeypatch.setattr(triton, "block_maxima", scores)
    monkeypatch.setattr(triton, "select", xla.select_blocks_xla)
    q, k = index_inputs(5, queries=3, heads=2, dim=8, slots=32, dtype="bfloat16", rows=2)
    positions = jnp.asarray([[[5, 6, 7], [20, 21, -1]], [[9, 10, 11], [29, 30, 31]]], jnp.int32)

    def both(positions, implementation="triton"):
        scores = index_block_scores(q, k, positions, block_size=4, implementation=implementation)
        return scores, select_blocks(scores, positions, block_size=4, top_k=3, implementation=implementation)

    results = jax.jit(jax.vmap(both))(positions)
    assert seen[-1] == (4, 3, 2, 8)  # one launch over 2 · 2 rows
    for i in range(2):
        expected = both(positions[i], "xla")
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x, i=i: x[i], results), expected)
    with pytest.raises(NotImplementedError, match="index_block_scores has no derivative"):
        jax.grad(lambda q: index_block_scores(q, k, positions[0], block_size=4, implementation="triton").sum())(q)


Q, K_ = jnp.zeros((2, 3, 2, 8)), jnp.zeros((2, 16, 8))
AT, SCORES = jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 3, 2, 4))
BAD = [
    (index_block_scores, (Q, K_[:1], AT), dict(block_size=4), ValueError, "k must be [B, S, I] = [2, S >= 1, 8]"),
    (index_block_scores, (Q, K_.astype(jnp.bfloat16), AT), dict(block_size=4), TypeError, "k must have q's dtype"),
    (index_block_scores, (Q, K_, AT), dict(block_size=5), ValueError, "whole blocks of 5 keys, got 16"),
    (index_block_scores, (Q, K_, AT[:, :1]), dict(block_size=4), ValueError, "positions must have shape [B, K]"),
    (index_block_scores, (Q, K_, Q[:, :, 0, 0]), dict(block_size=4), TypeError, "positions must be int32"),
    (select_blocks, (SCORES.astype(jnp.bfloat16), AT), dict(block_size=4, top_k=2), ValueError, "must be float32"),
    (select_blocks, (SCORES, AT), dict(block_size=4, top_k=0), ValueError, "top_k must be a Python int of at least 1"),
    (select_blocks, (SCORES, AT[:1]), dict(block_size=4, top_k=2), ValueError, "positions must have shape [B, K]"),
]


@pytest.mark.parametrize("index", range(len(BAD)))
def test_bad_arguments(index: int) -> None:
    function, args, keywords, kind, message = BAD[index]
    with pytest.raises(kind, match=re.escape(message)):
        inspect.unwrap(function)(*args, **keywords)  # the test run's shape checker would speak first


def test_a_named_implementation_gives_its_reason() -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("this is about a machine without an accelerator")
    with pytest.raises(NotImplementedError, match=r"index_block_scores\(implementation='triton'\).*NVIDIA"):
        index_block_scores(Q, K_, AT, block_size=4, implementation="triton")
    with pytest.raises(NotImplementedError, match=r"select_blocks\(implementation='triton'\).*NVIDIA"):
        select_blocks(SCORES, AT, block_size=4, top_k=2, implementation="triton")
