"""Random cases, oracles and comparisons for block-sparse decode and its indexer.

The oracles are written from the definitions, in numpy with float64: one query and head at a time.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    q: Any
    k_pages: Any
    v_pages: Any
    page_table: Any
    block_ids: Any
    q_start: Any
    block_size: int
    scale: float

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self.q, self.k_pages, self.v_pages, self.page_table, self.block_ids, self.q_start

    @property
    def static(self) -> dict[str, Any]:
        return dict(block_size=self.block_size, scale=self.scale)


def visible_positions(case: Case, row: int, query: int, kv_head: int, *, causal: bool = True) -> list[int]:
    """Positions that one query and KV head sees."""
    last = int(case.q_start[row]) + query
    blocks = {int(n) for n in np.asarray(case.block_ids)[row, query, kv_head] if n >= 0}
    end = last + 1 if causal else (last // case.block_size + 1) * case.block_size
    return [p for p in range(end) if p // case.block_size in blocks]


def attention_oracle(case: Case, *, causal: bool = True, base: float = np.e) -> tuple[np.ndarray, np.ndarray]:
    """-> out, lse in float64; the keywords make it wrong."""
    q, k_pages, v_pages = (np.asarray(x, np.float64) for x in case.arrays[:3])
    table, page = np.asarray(case.page_table), k_pages.shape[1]
    group = q.shape[2] // k_pages.shape[2]
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for row, query, head in np.ndindex(*q.shape[:3]):
        positions = np.array(visible_positions(case, row, query, head // group, causal=causal), int)
        if not positions.size:
            continue
        at = table[row, positions // page % table.shape[1]], positions % page, head // group
        scores = k_pages[at] @ q[row, query, head] * case.scale
        weights = np.exp(scores - scores.max())
        out[row, query, head] = weights @ v_pages[at] / weights.sum()
        lse[row, query, head] = (scores.max() + np.log(weights.sum())) / np.log(base)
    return out, lse


def random_case(
    seed: int,
    *,
    q_start: list[int],
    queries: int,
    heads: tuple[int, int],
    head_dim: int,
    page: int,
    block_size: int,
    top_k: int,
    spare_entries: int = 1,
    dtype: str = "float32",
    shared: float = 0.5,
) -> Case:
    """Fresh data, shuffled pages. Each query and KV head has its own selection: most often with the current block, with
    -1 and now and then a repeated block anywhere in it, and a share of the places as the query before has them."""
    rng = np.random.default_rng(seed)
    rows, (hq, hkv) = len(q_start), heads
    entries = max(1, -(-(max(q_start) + queries) // page)) + spare_entries
    num_pages = rows * entries + 2
    ids = np.full((rows, queries, hkv, top_k), -1, np.int32)
    for row, query, head in np.ndindex(rows, queries, hkv):
        last = q_start[row] + query
        if last < 0:
            continue
        own = last // block_size
        chosen = rng.permutation(own + 1)[:top_k]
        if own not in chosen and rng.random() < 0.9:
            chosen[0] = own
        chosen = np.where(rng.random(chosen.size) < 0.15, -1, chosen)
        if chosen.size > 1 and rng.random() < 0.3:
            chosen[0] = chosen[-1]
        place = rng.permutation(top_k)[: chosen.size]
        ids[row, query, head, place] = chosen
        if query:
            ids[row, query, head] = np.where(
                rng.random(top_k) < shared, ids[row, query - 1, head], ids[row, query, head]
            )

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    return Case(
        q=normal(rows, queries, hq, head_dim),
        k_pages=normal(num_pages, page, hkv, head_dim),
        v_pages=normal(num_pages, page, hkv, head_dim),
        page_table=jnp.asarray(rng.permutation(num_pages)[: rows * entries].reshape(rows, -1), jnp.int32),
        block_ids=jnp.asarray(ids),
        q_start=jnp.asarray(q_start, jnp.int32),
        block_size=block_size,
        scale=head_dim**-0.5,
    )


def touched_pages(case: Case) -> set[int]:
    """Pages that hold a key of a block that some query selected and sees a part of."""
    table, page = np.asarray(case.page_table), case.k_pages.shape[1]
    touched: set[int] = set()
    for row, query, head in np.ndindex(*case.block_ids.shape[:3]):
        for position in visible_positions(case, row, query, head):
            touched.add(int(table[row, position // page % table.shape[1]]))
        # A kernel may look at the query's own key whatever is selected.
        own = max(int(case.q_start[row]) + query, 0)
        touched.add(int(table[row, own // page % table.shape[1]]))
    return touched


def with_untouched(case: Case, value: float) -> Case:
    """`value` in every page that no query sees a selected key of."""
    others = np.array(sorted(set(range(case.k_pages.shape[0])) - touched_pages(case)))
    assert others.size
    k_pages, v_pages = (x.at[others].set(value) for x in (case.k_pages, case.v_pages))
    return dataclasses.replace(case, k_pages=k_pages, v_pages=v_pages)


def scores_oracle(q: Any, k: Any, positions: Any, *, block_size: int) -> np.ndarray:
    q, k, positions = np.asarray(q, np.float64), np.asarray(k, np.float64), np.asarray(positions)
    batch, queries, heads, _ = q.shape
    best = np.full((batch, queries, heads, k.shape[1] // block_size), -np.inf)
    for row, query, head, block in np.ndindex(*best.shape):
        for slot in range(block * block_size, min((block + 1) * block_size, int(positions[row, query]) + 1)):
            best[row, query, head, block] = max(best[row, query, head, block], k[row, slot] @ q[row, query, head])
    return best


def selection_oracle(scores: Any, positions: Any, *, block_size: int, top_k: int) -> np.ndarray:
    """By Python's own sort: the current block, then by falling score, then by rising number."""
    scores, positions = np.asarray(scores, np.float64), np.asarray(positions)
    kept = np.full((*scores.shape[:3], top_k), -1, np.int32)
    for row, query, head in np.ndindex(*scores.shape[:3]):
        own = int(positions[row, query]) // block_size
        order = sorted(
            (n for n in range(min(own + 1, scores.shape[3])) if n == own or scores[row, query, head, n] > -np.inf),
            key=lambda n: (n != own, -scores[row, query, head, n], n),
        )[:top_k]
        kept[row, query, head, : len(order)] = order
    return kept


def scores_of_all_kinds(seed: int, blocks: int) -> np.ndarray:
    """[2, 8, 4, blocks]: forced blocks, NaN and zero of either sign, -inf, the largest and the least normal numbers.

    Subnormal numbers are zero to XLA on a CPU.
    """
    nan = np.array([0x7FC00000, 0xFFC00001], np.uint32).view(np.float32)
    largest, least = np.finfo(np.float32).max, np.finfo(np.float32).tiny
    kinds = np.array([np.inf, np.inf, *nan, -np.inf, largest, -largest, 0.0, -0.0, least, 1.0], np.float32)
    return np.random.default_rng(seed).choice(kinds, (2, 8, 4, blocks))


def index_inputs(
    seed: int, *, queries: int, heads: int, dim: int, slots: int, dtype: str, rows: int
) -> tuple[Any, Any]:
    """Index queries [B, K, N, I] and keys [B, S, I]."""
    rng = np.random.default_rng(seed)
    q = jnp.asarray(rng.standard_normal((rows, queries, heads, dim), np.float32), dtype)
    return q, jnp.asarray(rng.standard_normal((rows, slots, dim), np.float32), dtype)


# float32: sums of some 100 products of normal numbers in another order. bfloat16, float16: products of rounded inputs
# are exact in float32, so the same holds.
SCORE_TOLERANCE = 3e-5


def scores_differ(actual: Any, expected: np.ndarray) -> float:
    """Largest difference of finite scores; inf where a -inf or a NaN is in the wrong place."""
    actual = np.asarray(actual, np.float64)
    empty = np.isneginf(expected)
    if actual.shape != expected.shape or not (np.isneginf(actual) == empty).all() or np.isnan(actual).any():
        return np.inf
    return float(np.abs(actual[~empty] - expected[~empty]).max(initial=0))
