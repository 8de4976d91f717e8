"""Scores, block selection, attention and cache writes against brute force in numpy float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import CHECKPOINTS, model
from hypothesis import given, settings
from hypothesis import strategies as st

import dspark_jax.cache
from dspark_jax import attention
from dspark_jax.attention import attend, block_scores, select_blocks
from dspark_jax.cache import TargetCache, cache_slots, key_chunk, write_rows

compiled_scores = jax.jit(block_scores, static_argnames=("block_size", "chunk"))
compiled_selection = jax.jit(select_blocks, static_argnames=("block_size", "top_k"))
compiled = jax.jit(attend, static_argnames=("block_size", "chunk"))
few = settings(max_examples=20, deadline=None)
# Softmax of at most 64 scores and its average of values of size one, in float32.
FLOAT32 = 2e-5
B, TOP_K = 8, 3
HEADS, KV_HEADS, DIM = 4, 2, 16
# Lengths around the ends of blocks and of the selection.
BOUNDARIES = (1, B - 1, B, B + 1, TOP_K * B, TOP_K * B + 1, 61)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# Brute force --------------------------------------------------------------------------------------------------------


def scores_numpy(q: np.ndarray, k: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[B, T, N, blocks], one query at a time."""
    out = np.full((*q.shape[:3], k.shape[1] // B), -np.inf)
    for b, t, n in np.ndindex(*q.shape[:3]):
        token = q[b, t, n].astype(np.float64) @ k[b].astype(np.float64).T
        for block in range(out.shape[-1]):
            seen = [token[u] for u in range(block * B, (block + 1) * B) if u <= positions[b, t]]
            out[b, t, n, block] = max(seen, default=-np.inf)
    return out


def select_numpy(scores: np.ndarray, positions: np.ndarray, top_k: int) -> np.ndarray:
    """[B, T, N, top_k]: own block, then by score and, at a tie, by number; -1 behind."""
    out = np.full((*scores.shape[:3], top_k), -1)
    for b, t, n in np.ndindex(*scores.shape[:3]):
        own = positions[b, t] // B
        if positions[b, t] < 0:
            continue
        others = sorted(range(min(own, scores.shape[-1])), key=lambda i, s=scores[b, t, n]: (-s[i], i))
        chosen = ([own] if own < scores.shape[-1] else []) + others
        out[b, t, n, : len(chosen)] = chosen[:top_k]
    return out


def attend_numpy(q, k, v, positions, blocks=None) -> np.ndarray:
    """[B, T, Hq, D] in float64, one query at a time."""
    out = np.zeros(q.shape)
    group = q.shape[2] // k.shape[2]
    for b, t, h in np.ndindex(*q.shape[:3]):
        n = h // group
        seen = [u for u in range(k.shape[1]) if u <= positions[b, t] and (blocks is None or u // B in blocks[b, t, n])]
        if seen:
            s = k[b, seen, n].astype(np.float64) @ q[b, t, h].astype(np.float64) / np.sqrt(q.shape[-1])
            p = np.exp(s - s.max())
            out[b, t, h] = (p / p.sum()) @ v[b, seen, n].astype(np.float64)
    return out


# Block scores -------------------------------------------------------------------------------------------------------


def check_scores(score, chunk: int) -> None:
    q, k = normal(1, 2, 9, KV_HEADS, DIM), normal(2, 2, 48, DIM)
    positions = np.stack([np.arange(9), [40, 47, 15, 16, 31, -1, 7, 24, 60]]).astype(np.int32)
    ours = score(*map(jnp.asarray, (q, k, positions)), block_size=B, chunk=chunk)
    theirs = scores_numpy(q, k, positions)
    assert ours.dtype == jnp.float32
    np.testing.assert_array_equal(np.isneginf(ours), np.isneginf(theirs))
    finite = np.isfinite(theirs)
    np.testing.assert_allclose(np.asarray(ours)[finite], theirs[finite], atol=FLOAT32, rtol=FLOAT32)


@pytest.mark.parametrize("chunk", [48, 24, 16, 8])
def test_block_scores(chunk):
    check_scores(compiled_scores, chunk)


def _without_causal_mask(q, k, positions, **options):
    return block_scores(q, k, jnp.full_like(positions, k.shape[1]), **options)


def _mean_score(q, k, positions, *, block_size, chunk):
    s = jnp.einsum("btni,bsi->btns", q, k)
    seen = (jnp.arange(k.shape[1])[None, None] <= positions[..., None])[:, :, None]
    split = (*s.shape[:-1], -1, block_size)
    seen = jnp.broadcast_to(seen, s.shape).reshape(split)
    mean = jnp.where(seen, s.reshape(split), 0.0).sum(-1) / jnp.maximum(seen.sum(-1), 1).astype(s.dtype)
    return jnp.where(seen.any(-1), mean, -jnp.inf)


def _other_heads(q, k, positions, **options):
    return block_scores(q[:, :, ::-1], k, positions, **options)


@pytest.mark.parametrize("wrong", [_without_causal_mask, _mean_score, _other_heads])
def test_block_score_mutants(wrong):
    with pytest.raises(AssertionError):
        check_scores(wrong, 48)


def test_block_scores_of_bf16_are_summed_in_float32():
    q, k = (jnp.asarray(normal(i, *shape)).astype(jnp.bfloat16) for i, shape in ((3, (1, 4, 2, 64)), (4, (1, 16, 64))))
    positions = jnp.full((1, 4), 15, jnp.int32)
    ours = block_scores(q, k, positions, block_size=B, chunk=16)
    theirs = scores_numpy(np.asarray(q), np.asarray(k), np.asarray(positions))
    np.testing.assert_allclose(ours, theirs, atol=FLOAT32, rtol=FLOAT32)
    assert np.abs(np.asarray(ours.astype(jnp.bfloat16)).astype(np.float64) - theirs).max() > 100 * FLOAT32


# Block selection ----------------------------------------------------------------------------------------------------


def check_selection(select, scores: np.ndarray, positions: np.ndarray, top_k: int = TOP_K) -> None:
    ours = np.asarray(select(jnp.asarray(scores), jnp.asarray(positions), block_size=B, top_k=top_k))
    theirs = select_numpy(scores, positions, top_k)
    assert ours.shape == theirs.shape
    np.testing.assert_array_equal(ours, theirs)


def selection_case(seed: int, blocks: int, values: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores from a few values, so that ties are everywhere; future blocks score too and must not be taken."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(-values, values, (2, 7, 2, blocks)).astype(np.float32)
    positions = rng.integers(-1, blocks * B, (2, 7)).astype(np.int32)
    return scores, positions


@few
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 3, 4, 9]), st.sampled_from([1, 2, 100]))
def test_selection_with_ties(seed, blocks, values):
    check_selection(compiled_selection, *selection_case(seed, blocks, values))


def test_selection_of_ties_takes_the_lowest():
    scores = np.zeros((1, 1, 1, 6), np.float32)
    ours = select_blocks(jnp.asarray(scores), jnp.full((1, 1), 5 * B, jnp.int32), block_size=B, top_k=3)
    np.testing.assert_array_equal(ours[0, 0, 0], [5, 0, 1])


def test_selection_of_padding_is_empty():
    ours = select_blocks(jnp.zeros((1, 2, 2, 4)), jnp.asarray([[-1, 0]], jnp.int32), block_size=B, top_k=3)
    np.testing.assert_array_equal(ours[0], [[[-1] * 3] * 2, [[0, -1, -1]] * 2])


def _not_forced(scores, positions, *, block_size, top_k):
    own = (positions // block_size)[:, :, None, None]
    index = jnp.arange(scores.shape[-1], dtype=jnp.int32)[None, None, None]
    best, blocks = jax.lax.top_k(jnp.where(index <= own, scores, -jnp.inf), min(top_k, scores.shape[-1]))
    return jnp.where(best > -jnp.inf, blocks, -1)


def _on_top(scores, positions, *, block_size, top_k):
    return select_blocks(scores, positions, block_size=block_size, top_k=top_k + 1)[..., :top_k][..., ::-1]


def _highest_at_ties(scores, positions, **options):
    nudge = jnp.arange(scores.shape[-1], dtype=jnp.float32) * 1e-3
    return select_blocks(scores + nudge[None, None, None], positions, **options)


def _pooled(scores, positions, **options):
    return select_blocks(jnp.broadcast_to(scores.max(2, keepdims=True), scores.shape), positions, **options)


@pytest.mark.parametrize("wrong", [_not_forced, _on_top, _highest_at_ties, _pooled])
def test_selection_mutants(wrong):
    with pytest.raises(AssertionError):
        check_selection(wrong, *selection_case(0, 9, 2))


# Attention ----------------------------------------------------------------------------------------------------------


def attention_case(length: int, slots: int, *, seed: int = 0, rows: int = 2):
    """The last 3 positions of rows of `length` (and of shorter ones), keys of `slots` that all hold something."""
    q, k, v = normal(seed, rows, 3, HEADS, DIM), normal(seed + 1, rows, slots, KV_HEADS, DIM), None
    v = normal(seed + 2, rows, slots, KV_HEADS, DIM)
    last = np.maximum(length - 1 - 2 * np.arange(rows), 0)
    positions = (last[:, None] + np.arange(-2, 1)[None]).astype(np.int32)
    return q, k, v, np.where(positions < 0, -1, positions).astype(np.int32)


def chosen_blocks(positions: np.ndarray, slots: int, seed: int) -> np.ndarray:
    scores = normal(seed, *positions.shape, KV_HEADS, slots // B)
    return select_numpy(scores, positions, TOP_K).astype(np.int32)


def check_attention(attention_of, length: int, slots: int, chunk: int, *, sparse: bool) -> None:
    q, k, v, positions = attention_case(length, slots)
    blocks = chosen_blocks(positions, slots, 9) if sparse else None
    options = dict(blocks=None if blocks is None else jnp.asarray(blocks), block_size=B, chunk=chunk)
    ours = attention_of(*map(jnp.asarray, (q, k, v, positions)), **options)
    np.testing.assert_allclose(ours, attend_numpy(q, k, v, positions, blocks), atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("chunk", [64, 16])
@pytest.mark.parametrize("length", BOUNDARIES)
def test_attention(length, chunk, sparse):
    check_attention(compiled, length, 64, chunk, sparse=sparse)


@few
@given(st.integers(1, 64), st.sampled_from([64, 32, 8]), st.booleans())
def test_attention_of_any_length(length, chunk, sparse):
    check_attention(compiled, length, 64, chunk, sparse=sparse)


@pytest.mark.parametrize("chunk", [48, 24, 16])
def test_queries_past_the_end_of_the_cache(chunk):
    """A query behind the last slot sees every slot once; no chunk is clamped and read twice."""
    for length in (49, 60, 200):
        check_attention(compiled, length, 48, chunk, sparse=False)
        check_attention(compiled, length, 48, chunk, sparse=True)


def test_reading_past_the_end_would_be_noticed(monkeypatch):
    monkeypatch.setattr(attention, "_chunks_seen", lambda positions, slots, chunk: jnp.max(positions) // chunk + 1)
    with pytest.raises(AssertionError):
        check_attention(attend, 60, 48, 16, sparse=False)


def test_skipping_a_chunk_would_be_noticed(monkeypatch):
    monkeypatch.setattr(attention, "_chunks_seen", lambda positions, slots, chunk: jnp.max(positions) // chunk)
    with pytest.raises(AssertionError):
        check_attention(attend, 40, 64, 16, sparse=False)


def test_short_prompts_see_everything_in_a_sparse_layer():
    """Up to top_k blocks the selection holds every block, so sparse and full attention are equal."""
    q, k, v, positions = attention_case(TOP_K * B, 64)
    arrays = tuple(map(jnp.asarray, (q, k, v, positions)))
    blocks = jnp.asarray(chosen_blocks(positions, 64, 3))
    full = attend(*arrays, block_size=B, chunk=64)
    np.testing.assert_allclose(attend(*arrays, blocks=blocks, block_size=B, chunk=64), full, atol=FLOAT32)


@pytest.mark.parametrize("chunk", [64, 16])
def test_padding_gives_zero(chunk):
    q, k, v, _ = attention_case(9, 64)
    positions = jnp.asarray([[-1, -1, -1], [-1, 5, -1]], jnp.int32)
    out = attend(*map(jnp.asarray, (q, k, v)), positions, block_size=B, chunk=chunk)
    assert np.isfinite(out).all() and not out[0].any() and not out[1, 0].any() and out[1, 1].any()


def test_large_scores_do_not_overflow():
    q, k, v, positions = attention_case(50, 64)
    q = 1e4 * q
    ours = attend(*map(jnp.asarray, (q, k, v, positions)), block_size=B, chunk=16)
    # Scores of 1e5 have float32 steps of 1e-2, but one key stands out and takes everything.
    theirs = attend_numpy(q, k, v, positions)
    assert np.isfinite(ours).all()
    np.testing.assert_allclose(ours, theirs, atol=0.05)


def _strided_heads(q, *rest, **options):
    order = np.arange(HEADS).reshape(-1, KV_HEADS).T.reshape(-1)
    return attend(q[:, :, order], *rest, **options)[:, :, np.argsort(order)]


def _other_scale(q, *rest, **options):
    return attend(q * DIM**0.5, *rest, **options)


def _strict_causal(q, k, v, positions, **options):
    return attend(q, k, v, positions - 1, **options)


def _one_selection(*arrays, blocks, **options):
    return attend(*arrays, blocks=jnp.broadcast_to(blocks[:, :, :1], blocks.shape), **options)


def _selection_ignored(*arrays, blocks, **options):
    return attend(*arrays, **options)


@pytest.mark.parametrize("wrong", [_strided_heads, _other_scale, _strict_causal, _one_selection, _selection_ignored])
def test_attention_mutants(wrong):
    with pytest.raises(AssertionError):
        check_attention(wrong, 61, 64, 16, sparse=True)


def test_attention_of_bf16_keeps_scores_and_sums_in_float32():
    q, k, v, positions = attention_case(61, 64)
    bf16 = [jnp.asarray(a).astype(jnp.bfloat16) for a in (q, k, v)]
    ours = attend(*bf16, jnp.asarray(positions), block_size=B, chunk=16)
    assert ours.dtype == jnp.bfloat16
    theirs = attend_numpy(*map(np.asarray, bf16), positions)
    # Probabilities and the result are rounded to bf16 (2^-9 each) of values of size one.
    np.testing.assert_allclose(np.asarray(ours).astype(np.float64), theirs, atol=0.01)


# Cache --------------------------------------------------------------------------------------------------------------


def write_numpy(cache: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    out = cache.copy()
    for b, t in np.ndindex(*positions.shape):
        if 0 <= positions[b, t] < cache.shape[1]:
            out[b, positions[b, t]] = rows[b, t]
    return out


def check_writes(write) -> None:
    cache, rows = normal(1, 3, 8, 2, 4), normal(2, 3, 4, 2, 4)
    positions = np.asarray([[4, 5, 6, 7], [6, 7, 8, 9], [-1, 2, -1, -1]], np.int32)
    ours = write(*map(jnp.asarray, (cache, rows, positions)))
    np.testing.assert_array_equal(ours, write_numpy(cache, rows, positions))
    flat = write(*map(jnp.asarray, (cache[..., 0], rows[..., 0], positions)))
    np.testing.assert_array_equal(flat, write_numpy(cache[..., 0], rows[..., 0], positions))


def test_writes():
    check_writes(write_rows)


def _clamped(cache, rows, positions):
    return write_rows(cache, rows, jnp.minimum(positions, cache.shape[1] - 1))


def _padding_written(cache, rows, positions):
    return write_rows(cache, rows, jnp.maximum(positions, 0))


def _wrapped(cache, rows, positions):
    return write_rows(cache, rows, positions % cache.shape[1])


@pytest.mark.parametrize("wrong", [_clamped, _padding_written, _wrapped])
def test_write_mutants(wrong):
    with pytest.raises(AssertionError):
        check_writes(wrong)


@pytest.mark.parametrize("capacity", [1, 7, 8, 9, 24, 25, 40])
def test_cache_has_room_in_whole_blocks_and_chunks(monkeypatch, capacity):
    monkeypatch.setattr(dspark_jax.cache, "KEY_CHUNK", 20)
    config = model("m3-mxfp8-tiny").config
    assert key_chunk(config) == 16, "whole blocks"
    slots = cache_slots(config, capacity)
    assert capacity <= slots < capacity + (16 if capacity > 16 else 8)
    assert slots % (16 if slots > 16 else 8) == 0


@pytest.mark.parametrize("capacity", [0, -3])
def test_cache_without_room_is_refused(capacity):
    with pytest.raises(ValueError, match=f"room for at least one token, asked for {capacity}"):
        TargetCache.zeros(model("m3-mxfp8-tiny").config, 1, capacity)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_cache_shapes(name):
    c = model(name).config
    cache = TargetCache.zeros(c, 2, 10, jnp.float32)
    assert cache.slots == 16
    assert len(cache.keys) == len(cache.values) == len(cache.index_keys) == c.num_layers
    for keys, index, sparse in zip(cache.keys, cache.index_keys, c.sparse_layers, strict=True):
        assert keys.shape == (2, 16, c.num_kv_heads, c.head_dim) and keys.dtype == jnp.float32
        assert (index is not None) == sparse
        assert index is None or index.shape == (2, 16, c.index_head_dim)


def test_attention_lowers_once_for_every_length():
    """Lengths are data: the same shapes compile once."""
    run = jax.jit(functools.partial(attend, block_size=B, chunk=16))
    for length in BOUNDARIES:
        run(*map(jnp.asarray, attention_case(length, 64)))
    assert run._cache_size() == 1
