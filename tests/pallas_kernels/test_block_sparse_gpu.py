"""`block_sparse_decode` and its indexer on an NVIDIA GPU, every implementation: edge cases, real shapes, loops, vmap.

export XLA_FLAGS=--xla_gpu_autotune_level=0 XLA_PYTHON_CLIENT_PREALLOCATE=false
pytest -n 8 -o addopts= tests/pallas_kernels/test_block_sparse_gpu.py
"""

import dataclasses
import functools
import secrets

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import assert_close, assert_lost, random_difference, with_nan
from gpu_marks import TRITON, XLA, needs_gpu
from sparse_cases import (
    SCORE_TOLERANCE,
    Case,
    attention_oracle,
    index_inputs,
    random_case,
    scores_differ,
    scores_of_all_kinds,
    scores_oracle,
    selection_oracle,
    with_untouched,
)

from pallas_kernels.block_sparse_decode.api import block_sparse_decode
from pallas_kernels.block_sparse_decode.reference import block_sparse_decode_reference
from pallas_kernels.index_scores.api import index_block_scores, select_blocks
from pallas_kernels.index_scores.reference import index_block_scores_reference

ALL = [TRITON, XLA]
FRESH = secrets.randbits(24)  # printed by a failing assertion

SHAPES = {
    "the model": dict(queries=8, heads=(64, 4), head_dim=128, page=128, block_size=128, top_k=16),
    "one query": dict(queries=1, heads=(64, 4), head_dim=128, page=128, block_size=128, top_k=16),
    "tiny": dict(queries=4, heads=(8, 4), head_dim=32, page=8, block_size=8, top_k=3),
    "blocks of several pages": dict(queries=3, heads=(6, 2), head_dim=64, page=16, block_size=64, top_k=2),
    "pages of several blocks": dict(queries=4, heads=(4, 2), head_dim=72, page=64, block_size=8, top_k=3),
    "neither divides": dict(queries=5, heads=(4, 4), head_dim=256, page=24, block_size=40, top_k=2),
    "many queries": dict(queries=21, heads=(32, 2), head_dim=128, page=32, block_size=16, top_k=5),
    "the largest group": dict(queries=2, heads=(128, 1), head_dim=64, page=64, block_size=64, top_k=4),
}


def poison(case: Case) -> None:
    """Leaves NaN where the next results will probably be allocated: what a kernel does not write shows."""
    shapes = [(case.q.shape, case.q.dtype), (case.q.shape[:3], jnp.float32)] * 4
    jax.block_until_ready([jnp.full(shape, jnp.nan, dtype) for shape, dtype in shapes])


def attend(case: Case, implementation: str | None):
    return jax.jit(functools.partial(block_sparse_decode, implementation=implementation, **case.static))(*case.arrays)


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SHAPES)
def test_attention(name: str, dtype: str, implementation: str) -> None:
    for q_start in ([301, 40, 0, -30], [700]):
        case = random_case(FRESH, q_start=q_start, dtype=dtype, **SHAPES[name])
        poison(case)
        assert_close(attend(case, implementation), attention_oracle(case), dtype, f"{name}, seed {FRESH}")


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("shared", [0.0, 0.9])
@pytest.mark.parametrize("rows, longest", [(1, 9000), (8, 9000), (8, 4000), (20, 9000), (20, 4000)])
def test_attention_at_real_lengths(rows: int, longest: int, shared: float, implementation: str) -> None:
    rng = np.random.default_rng(FRESH)
    q_start = [int(x) for x in rng.integers(0, longest, rows)]
    case = random_case(FRESH, q_start=q_start, dtype="bfloat16", shared=shared, **SHAPES["the model"])
    poison(case)
    # Row by row: the reference looks at all keys.
    reference = jax.jit(functools.partial(block_sparse_decode_reference, **case.static))
    parts = [
        reference(case.q[i : i + 1], *case.arrays[1:3], *(x[i : i + 1] for x in case.arrays[3:])) for i in range(rows)
    ]
    expected = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    assert_close(attend(case, implementation), expected, "bfloat16", f"seed {FRESH}")


@pytest.mark.parametrize("implementation", ALL)
def test_mutants(implementation: str) -> None:
    case = random_case(FRESH, q_start=[2100, 300], dtype="bfloat16", **SHAPES["the model"])
    result = attend(case, implementation)
    assert_close(result, attention_oracle(case), "bfloat16", f"seed {FRESH}")
    ids = np.asarray(case.block_ids)
    for wrong in (np.where(ids < 0, 0, ids), ids[:, :, ::-1], np.roll(ids, 1, axis=1)):
        expected = attention_oracle(dataclasses.replace(case, block_ids=wrong))
        assert random_difference(result, expected)[0] > 0.05
    for expected in (attention_oracle(case, causal=False), attention_oracle(case, base=2.0)):
        assert random_difference(result, expected)[1] > 0.01


@pytest.mark.parametrize("implementation", ALL)
def test_blocks_that_nobody_selected_are_not_read(implementation: str) -> None:
    case = random_case(FRESH, q_start=[700, 90], dtype="bfloat16", **SHAPES["one query"] | dict(top_k=2))
    clean = attend(case, implementation)
    jax.tree.map(np.testing.assert_array_equal, attend(with_untouched(case, np.nan), implementation), clean)


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("rows", [2, 40])  # many splits, and few or none
def test_a_query_that_is_no_number_is_seen(rows: int, implementation: str) -> None:
    """In its own row alone; a query that sees no key keeps 0 and -inf, whatever it is."""
    case = random_case(FRESH, q_start=[700, 31] * (rows // 2), dtype="bfloat16", **SHAPES["the model"])
    ids = jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32), case.block_ids.shape)
    case = dataclasses.replace(case, block_ids=ids.at[1].set(-1))
    seen, also_seen, without_a_key = (0, 1, 5), (0, 7, 63), (1, 2, 3)
    expected = jax.jit(functools.partial(block_sparse_decode_reference, **case.static))(*case.arrays)
    case = dataclasses.replace(case, q=with_nan(case.q, [seen, also_seen, without_a_key]))
    assert_lost(attend(case, implementation), expected, [seen, also_seen], "bfloat16", f"seed {FRESH}")


@pytest.mark.parametrize("implementation", ALL)
def test_loop_and_vmap(implementation: str) -> None:
    case = random_case(FRESH, q_start=[40, 12], dtype="bfloat16", **SHAPES["tiny"])
    run = functools.partial(block_sparse_decode, implementation=implementation, **case.static)

    @jax.jit
    def loop(arrays):
        def body(carry):
            start, total = carry
            out, _ = run(*arrays[:5], start)
            return start + 4, total + out.astype(jnp.float32)

        first = (arrays[5] - 12, jnp.zeros(case.q.shape, jnp.float32))
        return jax.lax.while_loop(lambda carry: carry[0][0] <= 40, body, first)[1]

    starts = case.q_start[None] - jnp.asarray([[12], [8], [4], [0]], jnp.int32)
    each = [attend(dataclasses.replace(case, q_start=s), implementation) for s in starts]
    total, summed = loop(case.arrays), sum(out.astype(jnp.float32) for out, _ in each)
    # Rounded to bfloat16 in another order: half of the last bit of some.
    assert np.linalg.norm(total - summed) <= 3e-3 * np.linalg.norm(summed)
    batched = jax.jit(jax.vmap(lambda start: run(*case.arrays[:5], start)))(starts)
    for i, expected in enumerate(each):
        assert_close(jax.tree.map(lambda x, i=i: x[i], batched), expected, "bfloat16")


@needs_gpu
def test_choice_by_dtype() -> None:
    case = random_case(FRESH, q_start=[40, 12], dtype="float32", **SHAPES["tiny"])
    assert_close(attend(case, None), attention_oracle(case), "float32")
    with pytest.raises(NotImplementedError, match="takes bfloat16 and float16, got float32"):
        attend(case, "triton")


INDEX_SHAPES = {
    "the model": (dict(queries=8, heads=4, dim=128, slots=4096), 128),
    "one query": (dict(queries=1, heads=4, dim=128, slots=1024), 128),
    "one head": (dict(queries=3, heads=1, dim=64, slots=768), 16),
    "odd": (dict(queries=5, heads=3, dim=40, slots=660), 12),
    "two tiles a block": (dict(queries=2, heads=4, dim=256, slots=1280), 256),
    "many rows": (dict(queries=40, heads=4, dim=32, slots=512), 64),
}


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", INDEX_SHAPES)
def test_index_scores(name: str, dtype: str, implementation: str) -> None:
    shape, block_size = INDEX_SHAPES[name]
    q, k = index_inputs(FRESH, dtype=dtype, rows=4, **shape)
    start = np.array([[shape["slots"] - shape["queries"]], [block_size - 1], [-1], [shape["slots"] // 2 + 3]])
    positions = np.where(start < 0, -1, start + np.arange(shape["queries"]))
    positions[1, 1:] = -1
    positions = jnp.asarray(positions, jnp.int32)
    program = jax.jit(functools.partial(index_block_scores, block_size=block_size, implementation=implementation))
    expected = np.asarray(index_block_scores_reference(q, k, positions, block_size=block_size), np.float64)
    if shape["slots"] < 800:
        assert scores_differ(expected, scores_oracle(q, k, positions, block_size=block_size)) <= SCORE_TOLERANCE
    jax.block_until_ready([jnp.full(expected.shape, jnp.nan, jnp.float32) for _ in range(4)])
    # Twice: the reference's sums are in yet another order.
    assert scores_differ(program(q, k, positions), expected) <= 2 * SCORE_TOLERANCE, f"seed {FRESH}"
    late = np.asarray(index_block_scores_reference(q, k, positions + 1, block_size=block_size), np.float64)
    assert scores_differ(program(q, k, positions), late) > 100 * SCORE_TOLERANCE


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("blocks, top_k", [(1024, 16), (256, 16), (8192, 16), (13, 4), (3, 5), (1, 1)])
@pytest.mark.parametrize("ties", [True, False])
def test_selection(ties: bool, blocks: int, top_k: int, implementation: str) -> None:
    rng = np.random.default_rng(FRESH)
    scores = rng.integers(-3, 3, (2, 8, 4, blocks)) if ties else rng.standard_normal((2, 8, 4, blocks))
    scores = np.where(rng.random(scores.shape) < 0.1, -np.inf, scores).astype(np.float32)
    positions = rng.integers(-1, blocks * 8 + 4, (2, 8)).astype(np.int32)
    program = jax.jit(functools.partial(select_blocks, block_size=8, top_k=top_k, implementation=implementation))
    actual = program(jnp.asarray(scores), jnp.asarray(positions))
    np.testing.assert_array_equal(actual, selection_oracle(scores, positions, block_size=8, top_k=top_k))


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("blocks, top_k", [(8192, 16), (256, 16), (13, 4), (3, 5), (1, 1)])
def test_selection_by_scores_of_all_kinds(blocks: int, top_k: int, implementation: str) -> None:
    scores = scores_of_all_kinds(FRESH, blocks)
    positions = np.random.default_rng(FRESH).integers(-1, blocks * 8 + 4, (2, 8)).astype(np.int32)
    program = jax.jit(functools.partial(select_blocks, block_size=8, top_k=top_k, implementation=implementation))
    actual = program(jnp.asarray(scores), jnp.asarray(positions))
    expected = selection_oracle(scores, positions, block_size=8, top_k=top_k)
    np.testing.assert_array_equal(actual, expected, f"seed {FRESH}")


@pytest.mark.parametrize("implementation", ALL)
def test_keys_behind_a_row_are_not_read(implementation: str) -> None:
    if implementation == "xla":
        pytest.skip("the XLA form reads whole chunks, up to the longest row's")
    q, k = index_inputs(FRESH, queries=2, heads=2, dim=64, slots=512, dtype="bfloat16", rows=2)
    positions = jnp.asarray([[62, 63], [200, 201]], jnp.int32)
    end = jnp.asarray([64, 256], jnp.int32)[:, None, None]
    poisoned = jnp.where(jnp.arange(512, dtype=jnp.int32)[None, :, None] >= end, jnp.bfloat16(jnp.nan), k)
    program = jax.jit(functools.partial(index_block_scores, block_size=64, implementation=implementation))
    np.testing.assert_array_equal(program(q, k, positions), program(q, poisoned, positions))
