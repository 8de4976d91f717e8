"""Golden cases, random cases and comparisons for the attention kernels."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import block_attention, merge_future_block, windowed_decode
from pallas_kernels.block_attention.reference import block_attention_reference
from pallas_kernels.block_merge.reference import merge_future_block_reference
from pallas_kernels.windowed_decode.reference import windowed_decode_reference

GOLDEN = Path(__file__).parent.parent / "data" / "attention"
GOLDEN_NAMES = sorted(path.stem for path in GOLDEN.glob("*.npz"))
RESULTS = ("decode", "merged", "block", "block_causal")  # what the golden data have

# Absolute (out, lse). float32: a numpy evaluation is off by 2e-6 and 1e-6, ten times that is allowed. bfloat16 and
# float16: weights and output are rounded to 8 (11) bits, 8e-3 on these data; the log-sum-exp stays float32, but adds up
# products of rounded inputs in another order.
GOLDEN_TOLERANCE = {"float32": (2e-5, 2e-5), "bfloat16": (2e-2, 2e-3), "float16": (2e-2, 2e-3)}
# Relative norm of out, absolute lse, for fresh random inputs: rounding of weights and output to 8 bits gives 2e-3.
RANDOM_TOLERANCE = {"float32": (1e-5, 2e-5), "bfloat16": (6e-3, 1e-3), "float16": (1e-3, 1e-3)}


@dataclasses.dataclass(frozen=True)
class Case:
    """Inputs of all three functions; `window` None for no window."""

    q: Any
    k_pages: Any
    v_pages: Any
    page_table: Any
    q_start: Any
    kv_length: Any
    k_block: Any
    v_block: Any
    window: int | None
    scale: float

    def astype(self, dtype: str) -> "Case":
        floats = ("q", "k_pages", "v_pages", "k_block", "v_block")
        return dataclasses.replace(self, **{name: jnp.asarray(getattr(self, name), dtype) for name in floats})

    @property
    def pages(self) -> tuple[Any, ...]:
        return self.k_pages, self.v_pages, self.page_table

    @property
    def block(self) -> tuple[Any, Any]:
        return self.k_block, self.v_block


Pair = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Functions:
    """One implementation of the three functions; each takes window and scale by keyword."""

    decode: Callable[..., Pair]
    merge: Callable[..., Pair]
    block: Callable[..., Pair]

    def program(self, case: Case, results: tuple[str, ...] = RESULTS) -> Callable[[Case], dict[str, Pair]]:
        """One jitted program of these results for cases of this shape."""
        static = dict(window=case.window, scale=case.scale)

        def everything(q, k_pages, v_pages, page_table, q_start, kv_length, k_block, v_block):
            pages = (k_pages, v_pages, page_table)
            decoded = self.decode(q, *pages, q_start, kv_length, **static)
            block = functools.partial(self.block, q, k_block, v_block, *pages, q_start, **static)
            ways = dict(
                decode=lambda: decoded,
                merged=lambda: self.merge(*decoded, q, k_block, v_block, **static),
                block=lambda: block(causal=False),
                block_causal=lambda: block(causal=True),
            )
            return {result: ways[result]() for result in results}

        jitted = jax.jit(everything)
        names = [field.name for field in dataclasses.fields(case) if field.name not in static]
        return lambda case: jitted(**{name: jnp.asarray(getattr(case, name)) for name in names})

    def run(self, case: Case, results: tuple[str, ...] = RESULTS) -> dict[str, Pair]:
        return self.program(case, results)(case)


REFERENCE = Functions(windowed_decode_reference, merge_future_block_reference, block_attention_reference)


def public(implementation: str | None) -> Functions:
    return Functions(
        *(
            functools.partial(f, implementation=implementation)
            for f in (windowed_decode, merge_future_block, block_attention)
        )
    )


def load_golden(name: str) -> tuple[Case, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """The inputs, and (out, lse) for each of decode, merged, block, block_causal; NaN in out: not in the data."""
    with np.load(GOLDEN / f"{name}.npz") as data:
        arrays = dict(data)
    window, scale, appended = int(arrays.pop("window")), float(arrays.pop("scale")), arrays.pop("appended")
    expected = {k: arrays.pop(k) for k in list(arrays) if k.endswith(("_out", "_lse"))}
    # Where the block is in the cache, two of the results equal two others and are not stored.
    unknown = np.where(appended[:, None, None, None], np.float32(0), np.float32(np.nan))
    expected.setdefault("merged_out", expected["block_out"] + unknown)
    expected.setdefault("block_causal_out", expected["decode_out"] + unknown)
    case = Case(**arrays, window=None if window < 0 else window, scale=scale)
    return case, {name: (expected[f"{name}_out"], expected[f"{name}_lse"]) for name in RESULTS}


def golden_difference(actual: Pair, expected: tuple[np.ndarray, np.ndarray]) -> tuple[float, float]:
    """Largest absolute difference of out and of lse; inf where a -inf or a NaN is in the wrong place."""
    out, lse = (np.asarray(x, np.float32) for x in actual)
    out_expected, lse_expected = (np.asarray(x, np.float32) for x in expected)
    known = ~np.isnan(out_expected)
    empty = np.isneginf(lse_expected)
    if not (np.isneginf(lse) == empty).all() or np.isnan(lse).any() or not np.isfinite(out).all():
        return np.inf, np.inf
    if (out[empty & known.all(-1)] != 0).any():
        return np.inf, np.inf
    lse_difference = np.abs(lse[~empty] - lse_expected[~empty]).max(initial=0)
    return float(np.abs(out[known] - out_expected[known]).max(initial=0)), float(lse_difference)


def matches_golden(actual: Pair, expected: tuple[np.ndarray, np.ndarray], dtype: str) -> bool:
    difference, allowed = golden_difference(actual, expected), GOLDEN_TOLERANCE[dtype]
    return difference[0] <= allowed[0] and difference[1] <= allowed[1]


def random_difference(actual: Pair, expected: Pair) -> tuple[float, float]:
    """Relative norm of the error of out, largest error of lse; inf where a -inf or a NaN is in the wrong place."""
    out, lse, out_expected, lse_expected = (np.asarray(x, np.float32) for x in (*actual, *expected))
    empty = np.isneginf(lse_expected)
    if not (np.isneginf(lse) == empty).all() or np.isnan(lse).any() or not np.isfinite(out).all():
        return np.inf, np.inf
    if (out[empty] != 0).any():
        return np.inf, np.inf
    norm = np.linalg.norm(out - out_expected) / max(float(np.linalg.norm(out_expected)), 1e-30)
    return float(norm), float(np.abs(lse[~empty] - lse_expected[~empty]).max(initial=0))


def assert_close(actual: Pair, expected: Pair, dtype: str, what: str = "") -> None:
    difference, allowed = random_difference(actual, expected), RANDOM_TOLERANCE[dtype]
    assert difference[0] <= allowed[0] and difference[1] <= allowed[1], f"{what} {difference} > {allowed}"


def with_nan(q: jax.Array, places: list[tuple[int, int, int]]) -> jax.Array:
    """q with one NaN in the query and head at each of `places` (row, query, head)."""
    for number, place in enumerate(places):
        q = q.at[(*place, number)].set(jnp.nan)
    return q


def assert_lost(actual: Pair, expected: Pair, places: list[tuple[int, int, int]], dtype: str, what: str = "") -> None:
    """NaN in out and in lse at `places` and nowhere else; the rest is as `expected`, of a q without NaN."""
    lost = np.zeros(actual[1].shape, bool)
    lost[tuple(np.transpose(places))] = True
    np.testing.assert_array_equal(np.isnan(actual[1]), lost, f"{what} lse")
    np.testing.assert_array_equal(np.isnan(actual[0]), np.broadcast_to(lost[..., None], actual[0].shape), f"{what} out")
    out, lse = (e.astype(a.dtype) for a, e in zip(actual, expected, strict=True))
    rest = jnp.where(lost[..., None], out, actual[0]), jnp.where(lost, lse, actual[1])
    assert_close(rest, expected, dtype, what)


def random_case(
    seed: int,
    *,
    q_start: list[int],
    kv_length: list[int],
    queries: int,
    heads: tuple[int, int],
    head_dim: int,
    page: int,
    window: int | None,
    table_length: int | None = None,
    dtype: str = "float32",
    scale: float | None = None,
    num_pages: int | None = None,
) -> Case:
    """Fresh data. The table is as short as the window allows (a ring) unless `table_length` says otherwise; rows share
    pages if there are only `num_pages` of them."""
    rng = np.random.default_rng(seed)
    rows, (hq, hkv) = len(q_start), heads
    if table_length is None:
        longest = max(max(q_start) + queries, max(kv_length), 1)
        table_length = -(-longest // page) if window is None else -(-(window - 1 + queries) // page)
    entries = rows * table_length
    if num_pages is None:
        num_pages = entries + 3
        table = rng.permutation(num_pages)[:entries]
    else:
        table = rng.integers(0, num_pages, entries)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    return Case(
        q=normal(rows, queries, hq, head_dim),
        k_pages=normal(num_pages, page, hkv, head_dim),
        v_pages=normal(num_pages, page, hkv, head_dim),
        page_table=jnp.asarray(table.reshape(rows, -1), jnp.int32),
        q_start=jnp.asarray(q_start, jnp.int32),
        kv_length=jnp.asarray(kv_length, jnp.int32),
        k_block=normal(rows, queries, hkv, head_dim),
        v_block=normal(rows, queries, hkv, head_dim),
        window=window,
        scale=head_dim**-0.5 if scale is None else scale,
    )


def repaged(case: Case, page: int = 16) -> Case:
    """The same case in larger pages: another ring with room for the same positions, slots never written 12 times
    larger than real data. The Mosaic kernel takes no page of 4 slots."""
    rng = np.random.default_rng(0)
    old_table, old_page = np.asarray(case.page_table), case.k_pages.shape[1]
    rows, old_entries = old_table.shape
    entries = -(-old_entries * old_page // page) + 1
    shape = (rows * entries + 2, page, *case.k_pages.shape[2:])
    table = rng.permutation(shape[0])[: rows * entries].reshape(rows, entries)
    pools = []
    for old in (case.k_pages, case.v_pages):
        pool = 12 * rng.standard_normal(shape, np.float32)
        for row, start in enumerate(np.asarray(case.q_start)):
            end = int(start) + case.q.shape[1]
            position = np.arange(max(0, end - old_entries * old_page), end)
            source = old_table[row, position // old_page % old_entries], position % old_page
            pool[table[row, position // page % entries], position % page] = np.asarray(old)[source]
        pools.append(pool)
    return dataclasses.replace(case, k_pages=pools[0], v_pages=pools[1], page_table=table.astype(np.int32))
