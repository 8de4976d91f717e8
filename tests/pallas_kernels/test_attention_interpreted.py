"""The Triton forms of the attention kernels, run by Triton's interpreter on the CPU.

TRITON_INTERPRET=1 pytest tests/pallas_kernels/test_attention_interpreted.py
"""

import dataclasses

import jax.numpy as jnp
import pytest
from attention_cases import (
    GOLDEN_NAMES,
    RANDOM_TOLERANCE,
    REFERENCE,
    Case,
    assert_close,
    assert_lost,
    load_golden,
    matches_golden,
    random_case,
    random_difference,
    with_nan,
)
from triton_interpreter import interpreted, requires_interpreter, rewrite

# queries, heads, head size, page, table entries, window, scale
SHAPES = {
    "as the model": (8, (16, 1), 64, 64, 16, 200, 0.1),
    "padded head, small pages": (7, (6, 2), 72, 16, 17, 100, 0.1),
    "no window, large pages, scale below 0": (3, (4, 2), 64, 128, 8, None, -0.2),
    "a window of a few": (16, (16, 16), 32, 32, 20, 3, 0.1),
    "two chunks of queries": (8, (32, 1), 64, 64, 16, 150, -0.2),
}


def decode(case: Case, multiprocessors: int, **changes):
    from pallas_kernels.windowed_decode.triton import attend

    static = dict(window=case.window, scale=case.scale) | changes
    with interpreted():
        return attend(case.q, *case.pages, case.q_start, case.kv_length, **static, multiprocessors=multiprocessors)


def block(case: Case, multiprocessors: int, causal: bool):
    from pallas_kernels.windowed_decode.triton import attend

    static = dict(window=case.window, scale=case.scale, causal=causal, multiprocessors=multiprocessors)
    with interpreted():
        return attend(case.q, *case.pages, case.q_start, case.q_start, *case.block, **static)


def merge(partial, case: Case):
    from pallas_kernels.block_merge.triton import merge_future_block_triton

    with interpreted():
        return merge_future_block_triton(*partial, case.q, *case.block, window=case.window, scale=case.scale)


def small(name: str) -> Case:
    queries, heads, head_dim, page, entries, window, scale = SHAPES[name]
    starts = [0, 1, 63, 250, 640, 500]
    lengths = [queries, 1, 63 + queries, 247, 240, 500 + queries]
    return random_case(
        5, q_start=starts, kv_length=lengths, queries=queries, heads=heads, head_dim=head_dim, page=page, window=window,
        table_length=entries, dtype="float16", scale=scale,
    )  # fmt: skip


@requires_interpreter
@pytest.mark.parametrize("multiprocessors", [1, 9])  # no splits, and many
@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_reference(name: str, multiprocessors: int) -> None:
    case = small(name)
    static = dict(window=case.window, scale=case.scale)
    args = (case.q, *case.pages, case.q_start, case.kv_length)
    assert_close(decode(case, multiprocessors), REFERENCE.decode(*args, **static), "float16")
    args = (case.q, *case.block, *case.pages, case.q_start)
    for causal in (False, True):
        expected = REFERENCE.block(*args, **static, causal=causal)
        assert_close(block(case, multiprocessors, causal), expected, "float16")


@requires_interpreter
@pytest.mark.parametrize("name", [name for name in SHAPES if name != "padded head, small pages"])
def test_borders_in_a_loop_of_their_own(name: str) -> None:
    from pallas_kernels.windowed_decode.triton import Tuning

    case, tuning = small(name), Tuning(rows=64, tile=32, stages=2, one_loop=False)
    static = dict(window=case.window, scale=case.scale)
    expected = REFERENCE.decode(case.q, *case.pages, case.q_start, case.kv_length, **static)
    for multiprocessors in (1, 9):
        assert_close(decode(case, multiprocessors, tuning=tuning), expected, "float16")


@requires_interpreter
def test_a_scale_of_zero() -> None:
    case = small("as the model")
    expected = REFERENCE.decode(case.q, *case.pages, case.q_start, case.kv_length, window=case.window, scale=0.0)
    assert_close(decode(case, 1, scale=0.0), expected, "float16")


@requires_interpreter
@pytest.mark.parametrize("name", GOLDEN_NAMES[::6])
def test_golden(name: str) -> None:
    case, expected = load_golden(name)
    case = case.astype("float16")
    arrays = {name: jnp.asarray(getattr(case, name)) for name in ("page_table", "q_start", "kv_length")}
    case = dataclasses.replace(case, **arrays)
    assert matches_golden(decode(case, 1), expected["decode"], "float16")
    assert matches_golden(block(case, 1, False), expected["block"], "float16")


@requires_interpreter
def test_mutants() -> None:
    case = small("as the model")
    args = (case.q, *case.pages, case.q_start, case.kv_length)
    expected, allowed = REFERENCE.decode(*args, window=case.window, scale=case.scale), RANDOM_TOLERANCE["float16"]
    for wrong in (dict(window=case.window - 1), dict(scale=0.11)):
        difference = random_difference(decode(case, 1, **wrong), expected)
        assert difference[0] > allowed[0] or difference[1] > allowed[1], wrong


@requires_interpreter
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # numpy's word on such a maximum
@pytest.mark.parametrize("mutant", [False, True])
@pytest.mark.parametrize("multiprocessors", [1, 9])
def test_a_query_that_is_no_number_is_seen(multiprocessors: int, mutant: bool, monkeypatch, tmp_path) -> None:
    """In its own row alone; a query that sees no key keeps 0 and -inf, whatever it is."""
    if mutant:
        for kernel in ("windowed_decode", "block_merge"):
            rewrite(monkeypatch, tmp_path, f"pallas_kernels.{kernel}.triton_kernel", "total != 0", "total > 0")
    case = random_case(
        4, q_start=[190, 3], kv_length=[194, 0], queries=4, heads=(16, 1), head_dim=64, page=16, window=170,
        dtype="float16",
    )  # fmt: skip
    in_context, last, without_context = (0, 1, 5), (0, 3, 7), (1, 2, 3)
    static = dict(window=case.window, scale=case.scale)
    decoded = REFERENCE.decode(case.q, *case.pages, case.q_start, case.kv_length, **static)
    merged = REFERENCE.merge(*decoded, case.q, *case.block, **static)
    whole = REFERENCE.block(case.q, *case.block, *case.pages, case.q_start, **static, causal=False)
    case = dataclasses.replace(case, q=with_nan(case.q, [in_context, last, without_context]))
    calls = [
        (decode(case, multiprocessors), decoded, [in_context, last]),
        (merge(decoded, case), merged, [in_context, without_context]),  # no key comes after the last query
        (block(case, multiprocessors, False), whole, [in_context, last, without_context]),
    ]
    for actual, expected, lost in calls:
        if mutant:
            with pytest.raises(AssertionError, match="lse"):
                assert_lost(actual, expected, lost, "float16")
        else:
            assert_lost(actual, expected, lost, "float16")
