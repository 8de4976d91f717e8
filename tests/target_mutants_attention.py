"""Wrong implementations of the target: attention and block selection."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from target_mutants_base import ATTEND, INDEXER, SCORES, SELECT, Call, mutant, remember, unchanged

from dspark_jax import attention

# Attention and block selection --------------------------------------------------------------------------------------

_ATTENTION = "Attention and block selection"


def masked_attention(q, k, v, mask):
    """Plain attention; mask bool [B, T, Hq, S]."""
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    s = jnp.einsum("btnd,bsnd->btns", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("btns,bsnd->btnd", jax.nn.softmax(jnp.where(mask, s, -jnp.inf), axis=-1), v)


def block_mask(blocks, num_blocks):
    """Chosen block ids [B, T, N, K] -> bool [B, T, N, blocks]."""
    return (blocks[..., None] == jnp.arange(num_blocks, dtype=jnp.int32)[None, None, None, None]).any(-2)


def _causal(positions, slots):
    return jnp.arange(slots, dtype=jnp.int32)[None, None] <= positions[..., None]


@mutant(_ATTENTION, "query head j reads KV head j % NKV instead of j // G")
def _strided_groups(patch, model, name):
    def attend(q, k, v, positions, **options):
        heads, kv_heads = q.shape[2], k.shape[2]
        order = np.arange(heads).reshape(-1, kv_heads).T.reshape(-1)
        return ATTEND(q[:, :, order], k, v, positions, **options)[:, :, np.argsort(order)]

    patch.setattr(attention, "attend", attend)
    return model


@mutant(_ATTENTION, "scale (hidden / heads)^-0.5 instead of head_dim^-0.5")
def _wrong_scale(patch, model, name):
    c = model.config
    factor = (c.hidden_size / c.num_heads) ** -0.5 / c.head_dim**-0.5
    patch.setattr(attention, "attend", lambda q, *rest, **options: ATTEND(q * factor, *rest, **options))
    return model


@mutant(_ATTENTION, "indexer ignored")
def _no_selection(patch, model, name):
    patch.setattr(attention, "attend", lambda *rest, blocks, **options: ATTEND(*rest, blocks=None, **options))
    return model


def replace_indexer(attention, wrong):
    """`wrong(indexer, x, positions, index_keys)` in its place, whatever has been projected."""
    own = attention.indexer
    call = Call(
        lambda x, positions, index_keys, projected: wrong(own, x, positions, index_keys),
        q_proj=own.q_proj,
        k_proj=own.k_proj,
    )
    attention.indexer = call


@mutant(_ATTENTION, "layers with a dense MLP run full attention although they carry `index_*` tensors")
def _dense_layers_full(patch, model, name):
    for layer in model.layers:
        if not layer.is_moe:
            replace_indexer(layer.attention, lambda indexer, x, positions, index_keys: (None, index_keys))
    return model


@mutant(_ATTENTION, "query head j uses the selection of index head j % NI")
def _strided_selection(patch, model, name):
    def attend(q, k, v, positions, *, blocks, block_size, chunk):
        heads = np.arange(q.shape[2])
        seen = _causal(positions, k.shape[1])[:, :, None]
        if blocks is not None:
            chosen = block_mask(blocks, k.shape[1] // block_size)[:, :, heads % blocks.shape[2]]
            seen = seen & jnp.repeat(chosen, block_size, axis=-1)
        return masked_attention(q, k, v, seen)

    patch.setattr(attention, "attend", attend)
    return model


def _token_scores(q, k, positions):
    """Index scores [B, T, N, S] and which of them the query sees [B, T, 1, S]."""
    return jnp.einsum("btni,bsi->btns", q, k), _causal(positions, k.shape[1])[:, :, None]


def _reduced(reduce):
    def scores(q, k, positions, *, block_size, chunk):
        s, seen = _token_scores(q, k, positions)
        split = (*s.shape[:-1], -1, block_size)
        seen = jnp.broadcast_to(seen, s.shape).reshape(split)
        return jnp.where(seen.any(-1), reduce(s.reshape(split), seen), -jnp.inf)

    return scores


def _mean(s, seen):
    return jnp.where(seen, s, 0.0).sum(-1) / jnp.maximum(seen.sum(-1), 1).astype(s.dtype)


def _log_sum_exp(s, seen):
    return jax.nn.logsumexp(s, axis=-1, where=seen)


def _relu(s, seen):
    return jnp.where(seen, jax.nn.relu(s), -jnp.inf).max(-1)


@mutant(_ATTENTION, "block score = mean of token scores", _reduced(_mean))
@mutant(_ATTENTION, "block score = log-sum-exp of token scores", _reduced(_log_sum_exp))
@mutant(_ATTENTION, "ReLU on index scores", _reduced(_relu))
def _block_score(wrong, patch, model, name):
    patch.setattr(attention, "block_scores", wrong)
    return model


def _pooled(scores, positions, **options):
    return SELECT(jnp.broadcast_to(scores.max(2, keepdims=True), scores.shape), positions, **options)


def _best(scores, allowed, forced, top_k):
    scores = jnp.where(jnp.broadcast_to(forced, scores.shape), jnp.inf, scores)
    best, blocks = lax.top_k(jnp.where(jnp.broadcast_to(allowed, scores.shape), scores, -jnp.inf), top_k)
    return jnp.where(best > -jnp.inf, blocks, -1)


def _own_and_index(scores, positions, block_size):
    return (positions // block_size)[:, :, None, None], jnp.arange(scores.shape[-1], dtype=jnp.int32)[None, None, None]


def _own_not_forced(scores, positions, *, block_size, top_k):
    own, index = _own_and_index(scores, positions, block_size)
    return _best(scores, index <= own, jnp.zeros_like(index, bool), min(top_k, scores.shape[-1]))


def _first_forced(scores, positions, *, block_size, top_k):
    own, index = _own_and_index(scores, positions, block_size)
    return _best(scores, index <= own, (index == own) | (index == 0), min(top_k, scores.shape[-1]))


def _one_more(scores, positions, *, block_size, top_k):
    return SELECT(scores, positions, block_size=block_size, top_k=top_k + 1)


def _one_less(scores, positions, *, block_size, top_k):
    return SELECT(scores, positions, block_size=block_size, top_k=top_k - 1)


@mutant(_ATTENTION, "one selection for all KV heads (max over index heads)", _pooled)
@mutant(_ATTENTION, "current block not forced", _own_not_forced)
@mutant(_ATTENTION, "current block on top of K others (K + 1 blocks)", _one_more)
@mutant(_ATTENTION, "block 0 forced as well", _first_forced)
@mutant(_ATTENTION, "K - 1 blocks", _one_less)
def _selection(wrong, patch, model, name):
    patch.setattr(attention, "select_blocks", wrong)
    return model


@mutant(_ATTENTION, "future keys scored: future blocks take slots")
def _future(patch, model, name):
    def select(scores, positions, *, block_size, top_k):
        own, index = _own_and_index(scores, positions, block_size)
        return _best(scores, jnp.ones_like(index, bool), index == own, min(top_k, scores.shape[-1]))

    def scores(q, k, positions, **options):
        return SCORES(q, k, jnp.broadcast_to(positions.max(1, keepdims=True), positions.shape), **options)

    patch.setattr(attention, "block_scores", scores)
    patch.setattr(attention, "select_blocks", select)
    return model


@mutant(_ATTENTION, "block grid counted from the end of the sequence (left padding to a block multiple)")
def _grid_from_end(patch, model, name):
    def shifted(positions, block_size):
        """Positions moved so that the last token ends a block, and the slot [B, S] that lies at each moved one."""
        shift = (-(positions.max(1) + 1) % block_size)[:, None]
        slots = -(-(int(positions.max()) + 1) // block_size) * block_size
        return positions + shift, jnp.arange(slots, dtype=jnp.int32)[None] - shift

    def scores(q, k, positions, *, block_size, chunk):
        s, seen = _token_scores(q, k, positions)
        s = jnp.where(seen, s, -jnp.inf)
        _, slot = shifted(positions, block_size)
        slot = jnp.broadcast_to(slot[:, None, None], s.shape)
        s = jnp.where(slot < 0, -jnp.inf, jnp.take_along_axis(s, jnp.maximum(slot, 0), axis=-1))
        return s.reshape(*s.shape[:-1], -1, block_size).max(-1)

    def select(scores, positions, *, block_size, **options):
        return SELECT(scores, shifted(positions, block_size)[0], block_size=block_size, **options)

    def attend(q, k, v, positions, *, blocks, block_size, chunk):
        seen = _causal(positions, k.shape[1])[:, :, None]
        if blocks is not None:
            chosen = jnp.repeat(block_mask(blocks, k.shape[1] // block_size), block_size, axis=-1)
            _, slot = shifted(positions, block_size)
            back = jnp.argsort(slot % k.shape[1], axis=-1)
            chosen = jnp.take_along_axis(chosen, jnp.broadcast_to(back[:, None, None], chosen.shape), axis=-1)
            seen = seen & jnp.repeat(chosen, q.shape[2] // k.shape[2], axis=2)
        return masked_attention(q, k, v, seen)

    patch.setattr(attention, "block_scores", scores)
    patch.setattr(attention, "select_blocks", select)
    patch.setattr(attention, "attend", attend)
    return model


def _indexers(model):
    return [layer.attention.indexer for layer in model.layers if layer.attention.indexer is not None]


@mutant(_ATTENTION, "index q/k norm missing")
def _no_index_norm(patch, model, name):
    for indexer in _indexers(model):
        indexer.q_norm = indexer.k_norm = Call(unchanged)
    return model


@mutant(_ATTENTION, "index q/k without RoPE")
def _no_index_rope(patch, model, name):
    def call(self, *inputs):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(attention, "rotate", lambda x, positions, **options: x)
            return INDEXER(self, *inputs)

    patch.setattr(attention.Indexer, "__call__", call)
    return model


@mutant(_ATTENTION, "indexer reads the residual stream before input_layernorm")
def _indexer_before_norm(patch, model, name):
    for layer in model.layers:
        if layer.attention.indexer is not None:
            memory = []
            layer.input_norm = remember(layer.input_norm, memory)
            replace_indexer(
                layer.attention,
                lambda indexer, x, *inputs, memory=memory: indexer(memory[0], *inputs),
            )
    return model
