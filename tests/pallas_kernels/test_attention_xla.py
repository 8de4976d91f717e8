"""The XLA forms: fresh data against the reference, transformations, bounded reads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import RANDOM_TOLERANCE, REFERENCE, Case, assert_close, public, random_case, random_difference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels import block_attention, merge_future_block, windowed_decode
from pallas_kernels._online_softmax import finish, group_queries
from pallas_kernels.windowed_decode.xla import attend_pages

XLA = public("xla")
SCALE = 0.3
RESULTS = ("decode", "merged", "block", "block_causal")

# Shapes are few, so that programs are compiled once each; lengths, windows and data are free.
SHAPES = [  # queries, heads, head size, page, entries of the table, window, dtype, keys of one step
    (3, (4, 1), 8, 4, 6, 9, "float32", 8),
    (7, (4, 2), 16, 16, 2, 20, "bfloat16", 16),
    (1, (3, 3), 8, 3, 5, 13, "float32", 4),
    (8, (6, 2), 8, 5, 9, None, "float32", 10),
    (5, (2, 1), 8, 8, 1, 3, "float16", 1024),
]


@functools.cache
def programs(shape: int):
    queries, (_, hkv), _, _, _, window, _, step = SHAPES[shape]

    def tiled(q, k_pages, v_pages, page_table, q_start, kv_length):
        grouped = group_queries(q, hkv, SCALE)
        args = (grouped, k_pages, v_pages, page_table, q_start, kv_length)
        return finish(attend_pages(*args, window=window, keys_per_step=step), q.dtype)

    def reference(*args):
        return REFERENCE.decode(*args, window=window, scale=SCALE)

    def blocks(functions):
        return jax.jit(lambda *args: functions.block(*args, window=window, scale=SCALE, causal=queries % 2 == 0))

    return jax.jit(tiled), jax.jit(reference), blocks(XLA), blocks(REFERENCE)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, Case]:
    shape = draw(st.integers(0, len(SHAPES) - 1))
    queries, heads, head_dim, page, entries, window, dtype, _ = SHAPES[shape]
    # A ring forgets; without a window the table has to hold everything.
    longest = page * entries - queries if window is None else 10 * page * entries
    q_start = draw(st.lists(st.integers(0, longest), min_size=2, max_size=2))
    cut = draw(st.lists(st.sampled_from([-queries, 0, 1, 2 * queries, 10**6]), min_size=2, max_size=2))
    # The oldest key of query 0 must still be there: kv_length - capacity <= q_start - window + 1.
    kv_length = [max(0, s - c) for s, c in zip(q_start, cut, strict=True)]
    case = random_case(
        draw(st.integers(0, 2**32 - 1)),
        q_start=q_start, kv_length=kv_length, queries=queries, heads=heads, head_dim=head_dim, page=page,
        window=window, table_length=entries, dtype=dtype, scale=SCALE,
    )  # fmt: skip
    return shape, case


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_equals_the_reference(drawn: tuple[int, Case]) -> None:
    shape, case = drawn
    tiled, reference, block_xla, block_reference = programs(shape)
    args = (case.q, *case.pages, case.q_start, case.kv_length)
    dtype = SHAPES[shape][6]
    assert_close(tiled(*args), reference(*args), dtype, "decode")
    args = (case.q, *case.block, *case.pages, case.q_start)
    assert_close(block_xla(*args), block_reference(*args), dtype, "block")


def appended(case: Case) -> Case:
    """The same case with the block's own keys written to the cache at q_start."""
    k_pages, v_pages = np.array(case.k_pages), np.array(case.v_pages)
    page, entries = k_pages.shape[1], case.page_table.shape[1]
    for row, first in enumerate(np.asarray(case.q_start)):
        for i in range(case.q.shape[1]):
            position = int(first) + i
            at = np.asarray(case.page_table)[row, position // page % entries], position % page
            k_pages[at], v_pages[at] = np.asarray(case.k_block)[row, i], np.asarray(case.v_block)[row, i]
    kv_length = case.q_start + case.q.shape[1]
    return dataclasses.replace(case, k_pages=jnp.asarray(k_pages), v_pages=jnp.asarray(v_pages), kv_length=kv_length)


@pytest.mark.parametrize("window", [None, 3, 16, 40])
def test_decomposition_equals_one_pass(window: int | None) -> None:
    case = random_case(
        1, q_start=[0, 1, 15, 33], kv_length=[0, 1, 15, 33], queries=7, heads=(4, 2), head_dim=16, page=4, window=window
    )  # fmt: skip
    program = XLA.program(case)
    results = program(appended(case))
    assert_close(results["merged"], results["block"], "float32")
    assert_close(results["decode"], results["block_causal"], "float32")
    alone = program(case)  # the block is not in the cache: one pass does not need it there
    assert_close(alone["block"], results["block"], "float32")
    assert random_difference(alone["merged"], results["block"])[0] > 100 * RANDOM_TOLERANCE["float32"][0]


def poisoned(case: Case, value: float) -> Case:
    """`value` in every page that holds no visible key of any row, and unused table entries pointing at such pages."""
    k_pages, v_pages, table = (np.array(x) for x in case.pages)
    page, entries = k_pages.shape[1], table.shape[1]
    touched = set()
    for row in range(table.shape[0]):
        start, length = int(case.q_start[row]), int(case.kv_length[row])
        begin = max(0, length - page * entries, 0 if case.window is None else start - case.window + 1)
        pages = {p // page % entries for p in range(begin, min(length, start + case.q.shape[1]))}
        touched |= {table[row, entry] for entry in pages}
    untouched = [n for n in range(k_pages.shape[0]) if n not in touched]
    assert untouched
    k_pages[untouched], v_pages[untouched] = value, value
    return dataclasses.replace(case, k_pages=jnp.asarray(k_pages), v_pages=jnp.asarray(v_pages))


def test_pages_without_a_visible_key_are_not_read() -> None:
    case = random_case(
        2, q_start=[3, 40, 90], kv_length=[5, 0, 94], queries=4, heads=(2, 1), head_dim=8, page=4, window=10,
        table_length=24,
    )  # fmt: skip
    program = XLA.program(case)
    clean = program(case)
    for value in (np.nan, np.inf):
        dirty = program(poisoned(case, value))
        jax.tree.map(np.testing.assert_array_equal, dirty["decode"], clean["decode"])
    touched = dataclasses.replace(case, v_pages=jnp.full_like(case.v_pages, np.nan))
    assert np.isnan(program(touched)["decode"][0]).any()


def test_memory_does_not_grow_with_the_cache() -> None:
    def temporary_bytes(pages: int, window: int | None) -> int:
        shape = jax.ShapeDtypeStruct
        pool = shape((pages, 16, 1, 64), jnp.bfloat16)
        rows = shape((1,), jnp.int32)
        args = (shape((1, 7, 4, 64), jnp.bfloat16), pool, pool, shape((1, pages), jnp.int32), rows, rows)
        function = jax.jit(lambda *a: windowed_decode(*a, window=window, implementation="xla"))
        return function.lower(*args).compile().memory_analysis().temp_size_in_bytes

    for window in (None, 256):
        assert temporary_bytes(8192, window) <= 1.1 * temporary_bytes(512, window)
    # The mutant: reading the whole table at once.
    assert temporary_bytes(512, None) < 512 * 16 * 64 * 4


def test_runs_inside_a_while_loop() -> None:
    case = random_case(3, q_start=[2], kv_length=[6], queries=4, heads=(2, 1), head_dim=8, page=4, window=10)

    @jax.jit
    def loop(case_arrays):
        def body(carry):
            start, _ = carry
            q, *pages, kb, vb = case_arrays
            out, lse = windowed_decode(q, *pages, start, start + 4, window=10)
            return start + 4, merge_future_block(out, lse, q, kb, vb, window=10)

        first = (jnp.zeros_like(case.q_start), (case.q, jnp.zeros(case.q.shape[:3], jnp.float32)))
        return jax.lax.while_loop(lambda carry: carry[0][0] < 40, body, first)[1]

    result = loop((case.q, *case.pages, *case.block))
    at_36 = dataclasses.replace(case, q_start=jnp.asarray([36], jnp.int32), kv_length=jnp.asarray([40], jnp.int32))
    assert_close(result, REFERENCE.run(at_36)["merged"], "float32")


def test_vmap_equals_a_loop() -> None:
    case = random_case(4, q_start=[5, 9], kv_length=[9, 13], queries=4, heads=(2, 1), head_dim=8, page=4, window=8)
    starts = jnp.asarray([[5, 9], [0, 3], [7, 20]], jnp.int32)

    def one(start):
        return windowed_decode(case.q, *case.pages, start, start + 4, window=8, implementation="xla")

    for i, start in enumerate(starts):
        assert_close(jax.tree.map(lambda x, i=i: x[i], jax.vmap(one)(starts)), one(start), "float32")


def test_xla_differentiates_like_the_reference() -> None:
    case = random_case(5, q_start=[0, 30], kv_length=[4, 34], queries=4, heads=(4, 2), head_dim=8, page=4, window=20)

    def loss(functions, attend):
        def f(q, k_pages, v_pages, k_block, v_block):
            pages = (k_pages, v_pages, case.page_table)
            static = dict(window=20, scale=0.3)
            grouped = attend(q, *pages, case.q_start, case.kv_length, **static)
            out, lse = functions.merge(*grouped, q, k_block, v_block, **static)
            out_2, lse_2 = functions.block(q, k_block, v_block, *pages, case.q_start, causal=False, **static)
            return jnp.sum(jnp.sin(out)) + jnp.sum(lse) + jnp.sum(jnp.cos(out_2)) + jnp.sum(lse_2**2)

        return jax.jit(jax.grad(f, argnums=(0, 1, 2, 3, 4)))

    def tiled(q, *args, window, scale):
        grouped = group_queries(q, 2, scale)
        return finish(attend_pages(grouped, *args, window=window, keys_per_step=8), q.dtype)

    inputs = (case.q, case.k_pages, case.v_pages, *case.block)
    for actual, expected in zip(loss(XLA, tiled)(*inputs), loss(REFERENCE, REFERENCE.decode)(*inputs), strict=True):
        assert np.linalg.norm(actual - expected) <= 1e-5 * np.linalg.norm(expected)  # float32 rounding of some 30 terms


def test_none_is_xla_on_a_cpu() -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("this is about a machine without an accelerator")
    case = random_case(6, q_start=[5], kv_length=[9], queries=4, heads=(2, 1), head_dim=8, page=4, window=8)
    chosen, named = public(None).run(case), XLA.run(case)
    for result in RESULTS:
        for a, b in zip(chosen[result], named[result], strict=True):
            np.testing.assert_array_equal(a, b)


def test_default_scale_and_window() -> None:
    case = random_case(7, q_start=[5], kv_length=[9], queries=4, heads=(2, 1), head_dim=16, page=4, window=None)
    expected = REFERENCE.run(case)
    out = windowed_decode(case.q, *case.pages, case.q_start, case.kv_length, window=None)
    assert_close(out, expected["decode"], "float32")
    merged = merge_future_block(*out, case.q, *case.block)
    assert_close(merged, expected["merged"], "float32")
    whole = block_attention(case.q, *case.block, *case.pages, case.q_start, window=None)
    assert_close(whole, expected["block"], "float32")


def test_a_query_that_is_no_number_is_seen() -> None:
    """In its own row alone, in the result and in its log-sum-exp; an empty row keeps 0 and -inf."""
    case = random_case(
        5, q_start=[20, 0], kv_length=[22, 0], queries=2, heads=(4, 2), head_dim=8, page=4, window=9, dtype="float32"
    )
    args = (*case.pages, case.q_start, case.kv_length)
    right = windowed_decode(case.q, *args, window=9, implementation="xla")
    out, lse = windowed_decode(case.q.at[0, 1, 2, 3].set(jnp.nan), *args, window=9, implementation="xla")
    assert np.isnan(out[0, 1, 2]).all() and np.isnan(lse[0, 1, 2])
    assert np.array_equal(np.isnan(lse), np.isnan(out).any(-1)) and np.isnan(lse).sum() == 1
    rest = ~np.isnan(lse)
    np.testing.assert_allclose(out[rest], right[0][rest], rtol=1e-6)
    assert (lse[1] == -np.inf).all() and (out[1] == 0).all()


def test_a_window_beyond_every_position_is_none() -> None:
    case = random_case(
        6, q_start=[20], kv_length=[22], queries=2, heads=(4, 2), head_dim=8, page=4, window=None, dtype="float32"
    )
    args = (case.q, *case.pages, case.q_start, case.kv_length)
    for a, b in zip(*(windowed_decode(*args, window=w, implementation="xla") for w in (None, 2**31)), strict=True):
        np.testing.assert_array_equal(a, b)
