"""The ring of the drafter: what is stored where, that chunking does not matter, and that memory does not grow."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafter_cases import MINIMAX, greedy_chain, hf_config, jit_once, make_drafter, minimax_golden, target_tables

from dspark_jax import drafter as drafter_module
from dspark_jax.cache import DraftCache, ring_slots
from dspark_jax.config import DrafterConfig
from dspark_jax.drafter import DSparkDrafter

CONFIG = DrafterConfig.from_hf(hf_config(MINIMAX))
WINDOW, K = 16, 7
RING = WINDOW - 1 + K
# Two float32 evaluations of the same values in matmuls of other shapes; the golden comparison allows 5e-5.
SAME = 2e-5


# --- the ring alone


def tagged_rows(batch: int, positions: np.ndarray) -> jax.Array:
    """[B, T, 2, 32], every row filled with row · 1000 + position."""
    tag = np.arange(batch)[:, None] * 1000 + positions
    return jnp.asarray(np.broadcast_to(tag[:, :, None, None], (*tag.shape, 2, 32)), jnp.float32)


def read_position(cache: DraftCache, layer: int, row: int, position: int) -> tuple[float, float]:
    """A key and a value, found the way the kernels find them: through the page table."""
    table, size = np.asarray(cache.page_table), cache.page_size
    page = table[row, (position // size) % table.shape[1]]
    return tuple(
        float(cache.as_pages(ring)[page, position % size, 0, 0]) for ring in (cache.keys[layer], cache.values[layer])
    )


def written(cache: DraftCache, positions: np.ndarray) -> DraftCache:
    rows = tagged_rows(len(positions), positions)
    layers = [cache.write_layer(i, rows, -rows, jnp.asarray(positions)) for i in range(len(cache.keys))]
    keys, values = zip(*layers, strict=True)
    return dataclasses.replace(cache, keys=keys, values=values)


@pytest.mark.parametrize("page_size", [1, 8, 64])
def test_the_last_positions_are_found_through_the_page_table(page_size: int) -> None:
    rng = np.random.default_rng(page_size)
    cache = DraftCache.zeros(CONFIG, 2, dtype=jnp.float32, page_size=page_size)
    assert cache.slots >= RING and cache.slots % page_size == 0 and cache.slots - RING < page_size
    lengths, last = np.zeros(2, np.int32), 3 * cache.slots
    while lengths.min() < last:
        taken = rng.integers(0, min(cache.slots, 20), 2)
        columns = np.arange(20, dtype=np.int32)[None]
        positions = np.where(columns < taken[:, None], lengths[:, None] + columns, -1).astype(np.int32)
        cache = written(cache, positions)
        lengths += taken.astype(np.int32)
    for row in range(2):
        for position in range(lengths[row] - cache.slots, lengths[row]):
            tag = float(row * 1000 + position)
            assert read_position(cache, 1, row, position) == (tag, -tag)


def test_padding_is_dropped() -> None:
    cache = DraftCache.zeros(CONFIG, 2, dtype=jnp.float32, page_size=1)
    positions = np.array([[5, -1, -1], [-1, -1, -1]], np.int32)
    keys = np.asarray(written(cache, positions).keys[0])
    assert np.flatnonzero(keys.any(axis=(2, 3))).tolist() == [5]


def test_rows_do_not_share_pages() -> None:
    table = np.asarray(DraftCache.zeros(CONFIG, 3, page_size=8).page_table)
    assert table.dtype == np.int32 and table.shape == (3, 3)
    assert np.unique(table).tolist() == list(range(9))


def test_bytes_do_not_depend_on_the_context() -> None:
    contexts = (None, 200, 20_000, 1_000_000)
    trees = [jax.eval_shape(lambda c=capacity: DraftCache.zeros(CONFIG, 4, c)) for capacity in contexts]
    assert len({str(jax.tree.leaves(tree)) for tree in trees}) == 1
    released = dataclasses.replace(CONFIG, num_layers=5, num_kv_heads=4, head_dim=128, window=4096)
    leaves = jax.tree.leaves(jax.eval_shape(lambda: DraftCache.zeros(released, 1)))
    # 10,240 bytes a token (5 layers, keys and values, 4 heads of 128, bfloat16) for 65 pages of 64.
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) == 65 * 64 * 10_240


def test_without_a_window_the_ring_holds_the_context() -> None:
    full = dataclasses.replace(CONFIG, window=None)
    assert ring_slots(full, 100) == 107 and ring_slots(CONFIG, None) == RING
    assert DraftCache.zeros(full, 1, 100).slots == 128
    for capacity in (None, 0):
        with pytest.raises(ValueError, match="needs a capacity of at least one token"):
            DraftCache.zeros(full, 1, capacity)


def test_layers_are_arrays_of_their_own() -> None:
    cache = DraftCache.zeros(CONFIG, 1)
    donated = jax.jit(lambda c: jax.tree.map(lambda x: x + jnp.ones_like(x), c), donate_argnums=0)
    assert float(donated(cache).keys[2].sum()) > 0


# --- chunks, rejected tokens, stale slots: the next block is that of a drafter which saw the committed tokens once


@functools.cache
def drafter() -> DSparkDrafter:
    return make_drafter(MINIMAX)


@functools.cache
def compiled() -> tuple[Callable[..., Any], Callable[..., Any]]:
    model, (embed, head) = drafter(), target_tables()
    write = jit_once(model.write_context)
    return write, jit_once(lambda anchor, p0, cache: model.block(anchor, p0, cache, embed=embed, head=head))


def empty(batch: int) -> DraftCache:
    return DraftCache.zeros(CONFIG, batch, dtype=jnp.float32, page_size=1)


def features_of(tokens: int) -> np.ndarray:
    golden = minimax_golden().features
    return golden[np.arange(tokens) % len(golden)]


def block_of(cache: DraftCache, p0: Any) -> Any:
    p0 = np.atleast_1d(np.asarray(p0, np.int32))
    return compiled()[1](jnp.full(p0.shape, 7, jnp.int32), jnp.asarray(p0), cache)


def hidden_of(cache: DraftCache, p0: Any) -> np.ndarray:
    return np.asarray(block_of(cache, p0).hidden)


def write_chunk(cache: DraftCache, features: np.ndarray, start: int, stop: int, pad_to: int) -> DraftCache:
    """Positions start..stop-1 in a call of `pad_to` tokens; what the padding holds is large and must not matter."""
    chunk = np.full((1, pad_to, features.shape[1]), 1e3, np.float32)
    positions = np.full((1, pad_to), -1, np.int32)
    chunk[0, : stop - start] = features[start:stop]
    positions[0, : stop - start] = np.arange(start, stop)
    return compiled()[0](jnp.asarray(chunk), jnp.asarray(positions), cache)


@functools.cache
def fresh(p0: int) -> np.ndarray:
    """Hidden states of a drafter that was given nothing but the window in front of the block."""
    cache = empty(1)
    start = max(0, p0 - WINDOW + 1)
    return hidden_of(write_chunk(cache, features_of(p0), start, p0, WINDOW), p0)


def chunked(cache: DraftCache, p0: int, sizes: list[int], pad_to: int) -> DraftCache:
    features, start, step = features_of(p0), 0, 0
    while start < p0:
        stop = min(start + sizes[step % len(sizes)], p0)
        cache = write_chunk(cache, features, start, stop, pad_to)
        start, step = stop, step + 1
    return cache


@pytest.mark.parametrize("p0", [14, 22, 23, 100])
@pytest.mark.parametrize(
    ("sizes", "pad_to"),
    [([1], WINDOW), ([8, 3, 1, 5], WINDOW), ([16], WINDOW), ([22], 23), ([23], 23), ([60, 64], 64), ([100], 128)],
    ids=str,
)
def test_any_chunking_gives_the_same_block(sizes: list[int], pad_to: int, p0: int) -> None:
    np.testing.assert_allclose(hidden_of(chunked(empty(1), p0, sizes, pad_to), p0), fresh(p0), atol=SAME, rtol=0)


def matmul_shapes(jaxpr: Any) -> list[tuple[int, ...]]:
    shapes = [eqn.outvars[0].aval.shape for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    inner = [value.jaxpr for eqn in jaxpr.eqns for value in eqn.params.values() if hasattr(value, "jaxpr")]
    return shapes + [shape for part in inner for shape in matmul_shapes(part)]


def test_a_long_chunk_projects_only_the_last_tokens() -> None:
    features, positions = jax.ShapeDtypeStruct((1, 1000, 512), "float32"), jax.ShapeDtypeStruct((1, 1000), "int32")
    shapes = matmul_shapes(jax.make_jaxpr(drafter().write_context)(features, positions, empty(1)).jaxpr)
    assert len(shapes) == 1 + 2 * CONFIG.num_layers
    assert all(math.prod(shape[:-1]) == RING for shape in shapes), shapes


def test_rows_of_one_chunk_may_have_any_length() -> None:
    features, p0 = features_of(64), np.array([0, 3, 22, 41, 64], np.int32)
    positions = np.arange(64, dtype=np.int32)[None]
    right = np.where(positions < p0[:, None], positions, -1)
    # The same tokens with the padding in front.
    left = np.where(positions >= 64 - p0[:, None], positions - (64 - p0[:, None]), -1)
    write, _ = compiled()
    for where in (right, left):
        rows = np.where(where[..., None] >= 0, features[where], np.float32(1e3))
        cache = write(jnp.asarray(rows), jnp.asarray(where), empty(len(p0)))
        for row, start in enumerate(p0):
            np.testing.assert_allclose(hidden_of(cache, p0)[row], fresh(int(start))[0], atol=SAME, rtol=0)


@pytest.mark.parametrize("marked", [True, False], ids=["rejected marked", "rejected written"])
def test_rejected_tokens_leave_no_trace(marked: bool) -> None:
    """Steps of K + 1 verified tokens, of which n + 1 are kept: the next step starts behind them."""
    features, rng = features_of(120), np.random.default_rng(5)
    cache, p0 = chunked(empty(1), 30, [16], WINDOW), 30
    for accepted in (0, 7, 2, 0, 0, 5, 7, 7, 1, 3):
        rows = np.full((1, K + 1, features.shape[1]), 1e3, np.float32)
        rows[0, : accepted + 1] = features[p0 : p0 + accepted + 1]
        rows[0, accepted + 1 :] = rng.normal(size=(K - accepted, features.shape[1]))
        positions = p0 + np.arange(K + 1, dtype=np.int32)[None]
        if marked:
            positions[:, accepted + 1 :] = -1
        cache = compiled()[0](jnp.asarray(rows), jnp.asarray(positions), cache)
        p0 += accepted + 1
        np.testing.assert_allclose(hidden_of(cache, p0), fresh(p0), atol=SAME, rtol=0)


def test_what_another_request_left_behind_does_not_matter() -> None:
    stale = jax.tree.map(lambda x: jnp.full_like(x, 50.0), empty(1))
    for p0 in (0, 1, 9, 15, 16, 40):
        cache = chunked(stale, p0, [16], WINDOW)
        np.testing.assert_allclose(hidden_of(cache, p0), fresh(p0), atol=SAME, rtol=0)


def test_long_prompt_drafts_like_its_last_window() -> None:
    length = 20_000
    features, model = features_of(length), drafter()
    cache = chunked(empty(1), length, [2048], 2048)
    windowed = write_chunk(empty(1), features, length - 2 * WINDOW, length, 2 * WINDOW)
    assert [x.shape for x in jax.tree.leaves(cache)] == [x.shape for x in jax.tree.leaves(empty(1))]
    drafts = []
    for each in (cache, windowed):
        block = block_of(each, length)
        np.testing.assert_allclose(block.hidden, fresh(length), atol=SAME, rtol=0)
        heads = (model.markov_head, model.confidence_head)
        drafts.append(greedy_chain(heads, block.hidden, block.base_logits, jnp.array([7], jnp.int32))["drafts"])
    np.testing.assert_array_equal(*drafts)


# --- mutants of the ring, seen by the comparisons above


def off(cache: DraftCache, p0: int) -> float:
    return float(np.abs(hidden_of(cache, p0) - fresh(p0)).max())


@pytest.mark.parametrize(("slots", "lost"), [(RING, False), (RING - 1, True)])
def test_a_ring_one_slot_short_is_caught(slots: int, lost: bool) -> None:
    """Of K + 1 written tokens one is kept: the next block sees W - 1 keys that the rejected ones must have spared."""
    rings = [tuple(x[:, :slots] for x in rings) for rings in (empty(1).keys, empty(1).values)]
    cache, p0 = DraftCache(keys=rings[0], values=rings[1], page_size=1), 40
    for start, count in ((0, 20), (20, 20), (p0, K + 1)):
        cache = written(cache, start + np.arange(count, dtype=np.int32)[None])
    visible = range(p0 + 1 - (WINDOW - 1), p0 + 1)
    assert lost == any(read_position(cache, 0, 0, position)[0] != position for position in visible)


def test_keeping_the_first_tokens_of_a_long_chunk_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_tokens(parts: Any, positions: Any, count: int) -> Any:
        return tuple(part[:, :count] for part in parts), positions[:, :count]

    features, positions = jnp.asarray(features_of(100))[None], jnp.arange(100, dtype=jnp.int32)[None]
    model = drafter()
    write = jit_once(lambda cache: model.write_context(features, positions, cache))
    assert off(write(empty(1)), 100) <= SAME
    monkeypatch.setattr(drafter_module, "_last_tokens", first_tokens)
    wrong = jit_once(lambda cache: model.write_context(features, positions, cache))
    assert off(wrong(empty(1)), 100) > 0.1


def test_writing_padding_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def unmasked(self: DraftCache, layer: int, keys: Any, values: Any, positions: Any) -> Any:
        batch, slots = np.arange(keys.shape[0])[:, None], positions % self.slots
        return self.keys[layer].at[batch, slots].set(keys), self.values[layer].at[batch, slots].set(values)

    # A row that commits nothing; unmasked it lands in slot -1, that of position 43, the last one before p0 = 44.
    nothing = (jnp.full((1, 3, 512), 1e3, jnp.float32), jnp.full((1, 3), -1, jnp.int32))
    cache, model = chunked(empty(1), 44, [16], WINDOW), drafter()
    assert off(jit_once(lambda *args: model.write_context(*args))(*nothing, cache), 44) <= SAME
    monkeypatch.setattr(DraftCache, "write_layer", unmasked)
    assert off(jit_once(lambda *args: model.write_context(*args))(*nothing, cache), 44) > 0.1
