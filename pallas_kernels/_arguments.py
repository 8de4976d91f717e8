"""Argument checks of the public functions: every problem that can be seen before a launch, in words."""

import numbers
import operator
from typing import Any

import jax.numpy as jnp
import numpy as np

FLOAT_DTYPES = ("bfloat16", "float16", "float32")
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
LARGEST_BLOCK = 2**16  # keys that a query takes or leaves together: all of them are looked at at once


def check_arrays(**arrays: Any) -> None:
    """Each argument is an array: it has what the other checks look at."""
    for name, value in arrays.items():
        if not all(hasattr(value, attribute) for attribute in ("shape", "ndim", "dtype")):
            raise TypeError(f"{name} must be a JAX or NumPy array, found {type(value).__name__}.")


def check_window(window: Any) -> int | None:
    """`window` as a Python int, or None for no window."""
    if window is None:
        return None
    if isinstance(window, bool) or not isinstance(window, numbers.Integral):
        raise TypeError(f"window must be a Python int or None, got {type(window).__name__}: it is part of the program.")
    if (window := operator.index(window)) <= 0:
        raise ValueError(f"window must be at least 1 (a query sees itself), got {window}; pass None for no window.")
    return window if window < 2**31 else None  # positions are int32: it hides nothing


def check_scale(scale: Any, head_dim: int) -> float:
    """`scale` as a Python float; None means head_dim ** -0.5."""
    if scale is None:
        return head_dim**-0.5
    return check_constant("scale", scale)


def check_constant(name: str, value: Any) -> float:
    """`value` as a Python float."""
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TypeError(f"{name} must be a Python float, got {type(value).__name__}: it is part of the program.")
    if not -LARGEST_FLOAT32 <= number <= LARGEST_FLOAT32:
        raise ValueError(f"{name} must be finite in float32, got {number}.")
    return float(number)


def check_limit(limit: Any) -> float:
    """`limit` of an activation as a Python float."""
    if (limit := check_constant("limit", limit)) <= 0:
        raise ValueError(f"limit must be positive, got {limit}; a large one, such as 1e30, cuts nothing off.")
    return limit


def check_integer(name: str, value: Any) -> int:
    """`value` as a Python int."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a Python int, got {type(value).__name__}: it is part of the program.")
    return operator.index(value)


def check_flag(name: str, value: Any) -> bool:
    """`value` as a Python bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {type(value).__name__}: it is part of the program.")
    return value


def check_block_size(block_size: Any) -> int:
    """`block_size` as a Python int."""
    if not 1 <= (block_size := check_integer("block_size", block_size)) <= LARGEST_BLOCK:
        raise ValueError(f"block_size must be from 1 to {LARGEST_BLOCK} keys, got {block_size}.")
    return block_size


def check_queries(q: Any) -> None:
    if q.ndim != 4:
        raise ValueError(f"q must have shape [B, K, Hq, D], got {q.shape}.")
    if str(q.dtype) not in FLOAT_DTYPES:
        raise TypeError(f"q must be one of {', '.join(FLOAT_DTYPES)}, got {q.dtype}.")
    if 0 in q.shape:
        raise ValueError(f"q must have no empty axis, got {q.shape}.")


def check_pages(q: Any, k_pages: Any, v_pages: Any, page_table: Any) -> None:
    """The cache fits the queries: head size, grouping, dtypes, one table row a batch row."""
    if k_pages.ndim != 4 or k_pages.shape != v_pages.shape:
        raise ValueError(
            f"k_pages and v_pages must share one shape [N, page, Hkv, D], got {k_pages.shape} and {v_pages.shape}."
        )
    if 0 in k_pages.shape:
        raise ValueError(f"k_pages must have no empty axis, got {k_pages.shape}.")
    _check_keys(q, k_pages, v_pages, "k_pages", "v_pages")
    if page_table.ndim != 2 or page_table.shape[0] != q.shape[0] or page_table.shape[1] == 0:
        raise ValueError(f"page_table must be [B, P] = [{q.shape[0]}, P >= 1] for q {q.shape}, got {page_table.shape}.")
    if page_table.dtype != jnp.int32:
        raise TypeError(f"page_table must be int32, got {page_table.dtype}; cast the page ids with astype(jnp.int32).")


def check_block(q: Any, k_block: Any, v_block: Any) -> None:
    """The block's own keys: one for each query."""
    if k_block.ndim != 4 or k_block.shape != v_block.shape:
        raise ValueError(
            f"k_block and v_block must share one shape [B, K, Hkv, D], got {k_block.shape} and {v_block.shape}."
        )
    if k_block.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"k_block must hold one key for each query: [B, K] = {q.shape[:2]} of q, got {k_block.shape[:2]}."
        )
    _check_keys(q, k_block, v_block, "k_block", "v_block")


def check_rows(q: Any, **rows: Any) -> None:
    """One int32 number for each row of the batch."""
    for name, array in rows.items():
        if array.shape != q.shape[:1]:
            raise ValueError(f"{name} must have shape [B] = {q.shape[:1]} for q {q.shape}, got {array.shape}.")
        if array.dtype != jnp.int32:
            raise TypeError(f"{name} must be int32, got {array.dtype}; cast it with astype(jnp.int32).")


def check_partial(q: Any, out: Any, lse: Any) -> None:
    """`out` and `lse` as `windowed_decode` returns them for `q`."""
    if out.shape != q.shape or out.dtype != q.dtype:
        raise ValueError(f"out must be like q, {q.dtype} {q.shape}, got {out.dtype} {out.shape}.")
    if lse.shape != q.shape[:3]:
        raise ValueError(f"lse must have shape [B, K, Hq] = {q.shape[:3]}, got {lse.shape}.")
    if lse.dtype != jnp.float32:
        raise TypeError(f"lse must be float32, got {lse.dtype}; a rounded log-sum-exp spoils the merge.")


def _check_keys(q: Any, k: Any, v: Any, k_name: str, v_name: str) -> None:
    for name, array in ((k_name, k), (v_name, v)):
        if array.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {array.dtype}; cast one of them.")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{k_name} must have q's head size {q.shape[-1]}, got {k.shape[-1]} in {k.shape}.")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"query heads must divide into groups of one KV head each: {q.shape[2]} query heads (q {q.shape}) over "
            f"{k.shape[2]} KV heads ({k_name} {k.shape})."
        )
