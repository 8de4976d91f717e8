"""`block_sparse_decode`: the XLA form and the reference against the numpy oracle, mutants, memory, transformations."""

import dataclasses
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import RANDOM_TOLERANCE, assert_close, random_difference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sparse_cases import Case, attention_oracle, random_case, with_untouched

from pallas_kernels.block_sparse_decode.api import block_sparse_decode
from pallas_kernels.block_sparse_decode.reference import block_sparse_decode_reference

# Shapes are few, so that programs are compiled once each; positions, selections and data are free.
SHAPES = [  # queries, heads, head size, page, block size, top k, dtype
    (3, (4, 2), 8, 4, 4, 3, "float32"),
    (8, (8, 4), 16, 16, 8, 4, "bfloat16"),
    (1, (3, 3), 8, 4, 12, 2, "float32"),
    (5, (4, 1), 8, 6, 4, 1, "float32"),
    (2, (2, 2), 8, 8, 16, 5, "float16"),
]
CAPACITY = 96


@functools.cache
def programs(shape: int):
    _, _, dim, _, block_size, _, _ = SHAPES[shape]
    static = dict(block_size=block_size, scale=dim**-0.5)
    xla = jax.jit(functools.partial(block_sparse_decode, implementation="xla", **static))
    return xla, jax.jit(functools.partial(block_sparse_decode_reference, **static))


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, Case]:
    shape = draw(st.integers(0, len(SHAPES) - 1))
    queries, heads, head_dim, page, block_size, top_k, dtype = SHAPES[shape]
    q_start = draw(st.lists(st.integers(-queries, CAPACITY - queries), min_size=2, max_size=2))
    case = random_case(
        draw(st.integers(0, 2**32 - 1)),
        q_start=q_start, queries=queries, heads=heads, head_dim=head_dim, page=page, block_size=block_size,
        top_k=top_k, dtype=dtype, shared=draw(st.sampled_from([0.0, 0.5, 1.0])),
        spare_entries=CAPACITY // page - max(1, -(-(max(q_start) + queries) // page)) + 1,
    )  # fmt: skip
    return shape, case


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_equals_the_oracle(drawn: tuple[int, Case]) -> None:
    shape, case = drawn
    xla, reference = programs(shape)
    expected, dtype = attention_oracle(case), SHAPES[shape][6]
    assert_close(xla(*case.arrays), expected, dtype, "xla")
    assert_close(reference(*case.arrays), expected, dtype, "reference")


def typical(seed: int = 1, **changes) -> Case:
    shape = dict(q_start=[61, 30, -4], queries=4, heads=(4, 2), head_dim=16, page=16, block_size=8, top_k=4)
    return random_case(seed, **shape | changes)


def run(case: Case):
    return block_sparse_decode(*case.arrays, implementation="xla", **case.static)


def fails(actual, expected) -> bool:
    difference, allowed = random_difference(actual, expected), RANDOM_TOLERANCE["float32"]
    return difference[0] > 30 * allowed[0] or difference[1] > 30 * allowed[1]


def test_mutants() -> None:
    case = typical()
    expected = attention_oracle(case)
    assert_close(run(case), expected, "float32")
    ids = np.asarray(case.block_ids)
    newest = (np.asarray(case.q_start)[:, None, None, None] + np.arange(4)[None, :, None, None]) // 8
    mutants = {
        "-1 reads block 0": np.where(ids < 0, 0, ids),
        "-1 reads the last block": np.where(ids < 0, np.maximum(newest, 0), ids),
        "KV heads swapped": ids[:, :, ::-1],
        "every query reads the selection of the first": np.broadcast_to(ids[:, :1], ids.shape),
        "a query reads the selection of the next": np.roll(ids, -1, axis=1),
    }
    for name, wrong in mutants.items():
        assert fails(run(dataclasses.replace(case, block_ids=jnp.asarray(wrong, jnp.int32))), expected), name
    assert fails(run(case), attention_oracle(case, causal=False)), "no causal mask inside the current block"
    assert fails(run(case), attention_oracle(case, base=2.0)), "lse in base 2"
    off = dataclasses.replace(case, q_start=case.q_start + 1)
    assert fails(run(off), expected), "positions off by one"


def test_a_repeated_block_counts_once() -> None:
    case = typical()
    once = case.block_ids.at[..., 2:].set(-1)
    twice = once.at[..., 2:].set(once[..., :2])
    a, b = (run(dataclasses.replace(case, block_ids=ids)) for ids in (once, twice))
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_order_of_the_selection_does_not_matter() -> None:
    case = typical()
    assert_close(run(dataclasses.replace(case, block_ids=case.block_ids[..., ::-1])), run(case), "float32")


def test_all_blocks_selected_is_dense_causal_attention() -> None:
    case = typical(q_start=[20, 28, 11])
    everything = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32)[None, None, None], (3, 4, 2, 4))
    case = dataclasses.replace(case, block_ids=everything)
    from pallas_kernels import windowed_decode

    expected = windowed_decode(
        *case.arrays[:4], case.q_start, case.q_start + 4, window=None, scale=case.scale, implementation="xla"
    )
    assert_close(run(case), expected, "float32")


def test_blocks_that_nobody_selected_are_not_read() -> None:
    case = typical(q_start=[61, 30, 3], page=8)
    clean = run(case)
    for value in (np.nan, np.inf):
        jax.tree.map(np.testing.assert_array_equal, run(with_untouched(case, value)), clean)
    touched = dataclasses.replace(case, v_pages=jnp.full_like(case.v_pages, np.nan))
    assert np.isnan(run(touched)[0]).any()


def test_no_visible_key() -> None:
    case = typical(q_start=[61, -4, 2])
    case = dataclasses.replace(case, block_ids=case.block_ids.at[0].set(-1))
    out, lse = run(case)
    assert np.isneginf(lse[:2]).all() and (np.asarray(out[:2]) == 0).all()
    # A block behind the query is named, and nothing else.
    future = dataclasses.replace(case, block_ids=jnp.full_like(case.block_ids, 9))
    out, lse = run(future)
    assert np.isneginf(lse).all() and (np.asarray(out) == 0).all()


def test_memory_does_not_grow_with_the_cache() -> None:
    def temporary_bytes(pages: int) -> int:
        shape = jax.ShapeDtypeStruct
        pool, rows = shape((pages, 16, 2, 64), jnp.bfloat16), shape((1,), jnp.int32)
        args = (
            shape((1, 7, 8, 64), jnp.bfloat16), pool, pool, shape((1, pages), jnp.int32),
            shape((1, 7, 2, 4), jnp.int32), rows,
        )  # fmt: skip
        function = jax.jit(lambda *a: block_sparse_decode(*a, block_size=16, implementation="xla"))
        return function.lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(8192) <= 1.1 * temporary_bytes(512)
    # The mutant: a copy of the pool.
    assert temporary_bytes(512) < 512 * 16 * 2 * 64 * 4


def test_vmap_equals_a_loop() -> None:
    case = typical()
    starts = case.q_start[None] - jnp.asarray([[0], [1], [7]], jnp.int32)

    def one(start):
        return run(dataclasses.replace(case, q_start=start))

    for i, start in enumerate(starts):
        assert_close(jax.tree.map(lambda x, i=i: x[i], jax.vmap(one)(starts)), one(start), "float32")


def test_xla_differentiates_like_the_reference() -> None:
    case = typical()

    def gradient(function):
        def loss(q, k, v):
            out, lse = function(q, k, v, *case.arrays[3:], **case.static)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0.0, lse))

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*case.arrays[:3])

    xla = gradient(functools.partial(block_sparse_decode, implementation="xla"))
    for actual, expected in zip(xla, gradient(block_sparse_decode_reference), strict=True):
        # float32 rounding of some 100 terms. The reference's 0 * inf at rows without a key is not compared.
        known = np.isfinite(expected)
        assert known.mean() > 0.5
        error = np.linalg.norm(np.where(known, actual - expected, 0))
        assert error <= 1e-5 * np.linalg.norm(np.where(known, expected, 0))
        assert np.isfinite(actual).all()


def test_default_scale_and_choice() -> None:
    case = typical()
    default = block_sparse_decode(*case.arrays, block_size=case.block_size)
    if jax.default_backend() == "cpu":
        jax.tree.map(np.testing.assert_array_equal, default, run(case))
    assert_close(default, attention_oracle(case), "float32")


BAD = {
    "too few heads": (
        lambda c: dict(block_ids=c.block_ids[:, :, :1]),
        ValueError,
        "block_ids must be [B, K, Hkv, top_k]",
    ),
    "no place": (lambda c: dict(block_ids=c.block_ids[..., :0]), ValueError, "top_k >= 1"),
    "ids of floats": (lambda c: dict(block_ids=c.block_ids.astype(jnp.float32)), TypeError, "block_ids must be int32"),
    "no block": (lambda c: dict(block_size=0), ValueError, "block_size must be from 1 to 65536 keys, got 0"),
    "a block of billions": (lambda c: dict(block_size=2**40), ValueError, "block_size must be from 1 to 65536 keys"),
    "a traced block": (lambda c: dict(block_size=jnp.int32(8)), TypeError, "block_size must be a Python int"),
    "q_start of another batch": (lambda c: dict(q_start=c.q_start[:1]), ValueError, "q_start must have shape [B]"),
    "infinite scale": (lambda c: dict(scale=float("inf")), ValueError, "scale must be finite"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    case = typical()
    change, kind, message = BAD[name]
    names = ("q", "k_pages", "v_pages", "page_table", "block_ids", "q_start")
    arguments = dict(zip(names, case.arrays, strict=True)) | case.static | change(case)
    with pytest.raises(kind, match=re.escape(message)):
        inspect.unwrap(block_sparse_decode)(**arguments)  # the test run's shape checker would speak first


def test_a_named_implementation_gives_its_reason() -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("this is about a machine without an accelerator")
    case = typical()
    with pytest.raises(NotImplementedError, match=r"implementation='triton'.*NVIDIA"):
        block_sparse_decode(*case.arrays, block_size=8, implementation="triton")
    with pytest.raises(ValueError, match="unknown implementation 'cuda'"):
        block_sparse_decode(*case.arrays, block_size=8, implementation="cuda")
