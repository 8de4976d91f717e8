"""Errors before a launch, and the choice of the implementation."""

import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _dispatch, block_attention, merge_future_block, windowed_decode

# The checked functions themselves: the test run's shape checker would speak first.
decode, merge, block = (inspect.unwrap(f) for f in (windowed_decode, merge_future_block, block_attention))

ARRAYS = dict(
    q=jnp.zeros((2, 3, 4, 8), jnp.float32),
    k_pages=jnp.zeros((6, 4, 2, 8), jnp.float32),
    v_pages=jnp.zeros((6, 4, 2, 8), jnp.float32),
    page_table=jnp.zeros((2, 3), jnp.int32),
    q_start=jnp.zeros((2,), jnp.int32),
    kv_length=jnp.zeros((2,), jnp.int32),
    k_block=jnp.zeros((2, 3, 2, 8), jnp.float32),
    v_block=jnp.zeros((2, 3, 2, 8), jnp.float32),
    out=jnp.zeros((2, 3, 4, 8), jnp.float32),
    lse=jnp.zeros((2, 3, 4), jnp.float32),
)
NAMES = {
    decode: ("q", "k_pages", "v_pages", "page_table", "q_start", "kv_length"),
    merge: ("out", "lse", "q", "k_block", "v_block"),
    block: ("q", "k_block", "v_block", "k_pages", "v_pages", "page_table", "q_start"),
}


def call(function: Any, *, window: Any = 4, **changes: Any) -> Any:
    keywords = {k: changes.pop(k) for k in ("scale", "implementation") if k in changes}
    arrays = {name: changes.pop(name, ARRAYS[name]) for name in NAMES[function]}
    assert not changes
    return function(*arrays.values(), window=window, **keywords)


f32 = jnp.float32
BAD = [
    (decode, dict(q=jnp.zeros((2, 3, 32), f32)), ValueError, "q must have shape [B, K, Hq, D], got (2, 3, 32)"),
    (
        decode,
        dict(q=jnp.zeros((2, 3, 4, 8), jnp.int32)),
        TypeError,
        "q must be one of bfloat16, float16, float32, got int32",
    ),
    (decode, dict(q=jnp.zeros((2, 0, 4, 8), f32)), ValueError, "no empty axis"),
    (decode, dict(v_pages=jnp.zeros((6, 4, 2, 4), f32)), ValueError, "(6, 4, 2, 8) and (6, 4, 2, 4)"),
    (
        decode,
        dict(k_pages=jnp.zeros((6, 4, 2, 8), jnp.bfloat16)),
        TypeError,
        "k_pages must have q's dtype float32, got bfloat16",
    ),
    (
        decode,
        dict(k_pages=jnp.zeros((6, 4, 3, 8), f32), v_pages=jnp.zeros((6, 4, 3, 8), f32)),
        ValueError,
        "4 query heads",
    ),
    (
        decode,
        dict(k_pages=jnp.zeros((6, 4, 2, 6), f32), v_pages=jnp.zeros((6, 4, 2, 6), f32)),
        ValueError,
        "head size 8, got 6",
    ),
    (decode, dict(page_table=jnp.zeros((3, 3), jnp.int32)), ValueError, "page_table must be [B, P]"),
    (decode, dict(page_table=jnp.zeros((2, 0), jnp.int32)), ValueError, "page_table must be [B, P]"),
    (decode, dict(page_table=jnp.zeros((2, 3), jnp.uint32)), TypeError, "page_table must be int32, got uint32"),
    (decode, dict(q_start=jnp.zeros((3,), jnp.int32)), ValueError, "q_start must have shape [B] = (2,)"),
    (decode, dict(kv_length=jnp.zeros((2,), f32)), TypeError, "kv_length must be int32, got float32"),
    (decode, dict(window=0), ValueError, "window must be at least 1"),
    (decode, dict(window=-4), ValueError, "window must be at least 1"),
    (decode, dict(window=4.0), TypeError, "window must be a Python int or None, got float"),
    (decode, dict(window=True), TypeError, "window must be a Python int or None, got bool"),
    (decode, dict(scale=float("nan")), ValueError, "scale must be finite"),
    (decode, dict(scale="1"), TypeError, "scale must be a Python float"),
    (decode, dict(implementation="cuda"), ValueError, "unknown implementation 'cuda'; known: None, "),
    (merge, dict(out=jnp.zeros((2, 3, 4, 4), f32)), ValueError, "out must be like q, float32 (2, 3, 4, 8)"),
    (merge, dict(lse=jnp.zeros((2, 4, 3), f32)), ValueError, "lse must have shape [B, K, Hq] = (2, 3, 4)"),
    (merge, dict(lse=jnp.zeros((2, 3, 4), jnp.bfloat16)), TypeError, "lse must be float32, got bfloat16"),
    (
        merge,
        dict(k_block=jnp.zeros((2, 4, 2, 8), f32), v_block=jnp.zeros((2, 4, 2, 8), f32)),
        ValueError,
        "one key for each query",
    ),
    (merge, dict(v_block=jnp.zeros((2, 3, 2, 8), jnp.bfloat16)), TypeError, "v_block must have q's dtype"),
    (
        block,
        dict(k_block=jnp.zeros((2, 3, 4, 8), f32), v_block=jnp.zeros((2, 3, 4, 8), f32)),
        ValueError,
        "same KV heads, got 4",
    ),
    (block, dict(v_block=jnp.zeros((2, 3, 2, 4), f32)), ValueError, "k_block and v_block must share one shape"),
    (block, dict(q_start=jnp.zeros((2,), jnp.int16)), TypeError, "q_start must be int32"),
    (block, dict(window=0), ValueError, "window must be at least 1"),
]


@pytest.mark.parametrize("function, changes, error, message", BAD, ids=lambda x: x.__name__ if callable(x) else None)
def test_errors(function: Any, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call(function, **changes)
    with pytest.raises(error, match=re.escape(message)):
        arrays = {name: changes.get(name, ARRAYS[name]) for name in NAMES[function]}
        rest = {k: v for k, v in changes.items() if k not in arrays}
        jax.jit(lambda arrays: call(function, **arrays, **rest))(arrays)


def test_a_numpy_integer_is_a_window() -> None:
    call(decode, window=np.int64(4))


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"known: None, .*'xla'"):
        call(block, implementation="flash")


def test_choice_takes_the_first_that_can_and_a_name_never_falls_back() -> None:
    def cannot():
        raise NotImplementedError("no such unit here.")

    builders = {"a": cannot, "b": lambda: lambda: "b", "xla": lambda: lambda: "xla"}
    assert _dispatch.choose("f", None, builders)() == "b"
    assert _dispatch.choose("f", "xla", builders)() == "xla"
    with pytest.raises(NotImplementedError, match=re.escape("f(implementation='a'): no such unit here.")):
        _dispatch.choose("f", "a", builders)
    with pytest.raises(ValueError, match="f: unknown implementation 'd'; known: None, 'a', 'b', 'xla'"):
        _dispatch.choose("f", "d", builders)
    # A name of the library, of which this function has no form.
    with pytest.raises(NotImplementedError, match="f has no form 'mosaic', only 'a' and 'b' and 'xla'"):
        _dispatch.choose("f", "mosaic", builders)
