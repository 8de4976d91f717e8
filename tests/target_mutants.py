"""Every wrong implementation that data/mutants.md lists, injected into the library or into the weights.

A mutant gets a monkeypatch, a copy of the golden model and the checkpoint's name, and returns the model to run.
Functions are patched where the library looks them up, so that all code around them is the library's own.
"""

import functools
from collections.abc import Callable

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from dspark_jax import attention, formats, layers, moe, target
from dspark_jax.formats import MXFP8Array, NVFP4Array
from dspark_jax.target import MiniMaxTarget
from pallas_kernels.grouped_experts import xla as xla_experts

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch, MiniMaxTarget, str], MiniMaxTarget]
MUTANTS: dict[tuple[str, str], Mutant] = {}

# The library's own, whatever is patched later.
_ROTATE, _NORM, _ATTEND = layers.rotate, layers.GemmaRMSNorm.__call__, attention.attend
_SCORES, _SELECT, _INDEXER = attention.block_scores, attention.select_blocks, attention.Indexer.__call__
_EXPERTS, _LOOKUP, _DEQUANTIZE = moe.Experts.__call__, target.Embedding.lookup, formats.dequantize
_LINEAR = formats.linear


def mutant(section: str, row: str, *arguments):
    def register(make):
        MUTANTS[section, row] = functools.partial(make, *arguments)
        return make

    return register


@functools.lru_cache(maxsize=8)
def _compiled_experts(*_):
    def experts(self, *inputs):
        if formats.dequantize is not _DEQUANTIZE:  # as in `_dequantize_by`
            for part in (self.gate_proj, self.up_proj, self.down_proj):
                part.weight.set_value(formats.dequantize(part.weight.get_value()))
        return _EXPERTS(self, *inputs)

    return jax.jit(experts)


def compile_experts(patch: Patch) -> None:
    """Compile the loop over experts where all else runs op by op; again once a function that it calls is replaced."""

    def experts(self, *inputs):
        return _compiled_experts(xla_experts.swiglu_oai, formats.dequantize)(self, *inputs)

    patch.setattr(moe.Experts, "__call__", experts)


def _dequantize_by(patch: Patch, dequantize) -> None:
    """Replace `formats.dequantize`, also in products, which read stored formats by themselves."""
    patch.setattr(formats, "dequantize", dequantize)
    patch.setattr(formats, "linear", lambda x, weight, **_: _LINEAR(x, dequantize(weight, x.dtype)))


def run_op_by_op(patch: Patch, model: MiniMaxTarget, name: str) -> dict[str, float]:
    """`golden.errors`, the largest over the three prompts, of a forward without jit.

    Without jit a mutant compiles only the operations that it changes, not a whole model.
    """
    compile_experts(patch)
    out = golden.run(model, [golden.prompt(name, i) for i in golden.PROMPTS], jit=False)
    found = [golden.errors(out, name, i, row=i) for i in golden.PROMPTS]
    return {key: max(f[key] for f in found) for key in found[0]}


class Call(nnx.Module):
    """A function in the place of a module."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *inputs):
        return self.function(*inputs)


def unchanged(x, dtype=None):
    return x if dtype is None else x.astype(dtype)


# Rotary embedding ---------------------------------------------------------------------------------------------------


def _interleaved(x, positions, *, rotary_dim, theta):
    half = rotary_dim // 2
    order = np.concatenate([np.arange(0, rotary_dim, 2), np.arange(1, rotary_dim, 2)])
    order = np.concatenate([order, np.arange(rotary_dim, x.shape[-1])])
    assert len(order[:half]) == half
    return _ROTATE(x[..., order], positions, rotary_dim=rotary_dim, theta=theta)[..., np.argsort(order)]


def _last_dims(x, positions, *, rotary_dim, theta):
    shift = x.shape[-1] - rotary_dim
    turned = _ROTATE(jnp.roll(x, -shift, axis=-1), positions, rotary_dim=rotary_dim, theta=theta)
    return jnp.roll(turned, shift, axis=-1)


def _all_dims(x, positions, *, rotary_dim, theta):
    return _ROTATE(x, positions, rotary_dim=x.shape[-1], theta=theta)


def _frequencies_of_head(x, positions, *, rotary_dim, theta):
    return _ROTATE(x, positions, rotary_dim=rotary_dim, theta=theta ** (rotary_dim / x.shape[-1]))


def _fixed_theta(x, positions, *, rotary_dim, theta):
    return _ROTATE(x, positions, rotary_dim=rotary_dim, theta=5e6 if theta == 1e4 else 1e4)


_ROPE = "Rotary embedding"


@mutant(_ROPE, "all head dims rotated (`rotary_dim` ignored)", _all_dims)
@mutant(_ROPE, "right dims rotated, frequencies `theta^(-2i/head_dim)`", _frequencies_of_head)
@mutant(_ROPE, "pairs (2i, 2i+1) instead of (i, i + rotary/2)", _interleaved)
@mutant(_ROPE, "last instead of first `rotary_dim` dims", _last_dims)
@mutant(_ROPE, "theta not read from the config (1e4; where the config says 1e4, 5e6)", _fixed_theta)
def _rotary(wrong, patch, model, name):
    patch.setattr(attention, "rotate", wrong)
    return model


# Norms --------------------------------------------------------------------------------------------------------------


def _scale_by_w(self, x, dtype=None):
    return layers.rms_normalize(x, self.weight.get_value().astype(jnp.float32), self.eps, dtype or x.dtype)


def _folded_in_bf16(self, x, dtype=None):
    scale = jnp.bfloat16(1) + self.weight.get_value()
    return layers.rms_normalize(x, scale.astype(jnp.float32), self.eps, dtype or x.dtype)


@mutant("Norms", "scale by w instead of 1 + w", _scale_by_w)
@mutant("Norms", "1 + w folded into a bf16 array", _folded_in_bf16)
def _norm(wrong, patch, model, name):
    patch.setattr(layers.GemmaRMSNorm, "__call__", wrong)
    return model


@mutant("Norms", "q/k norm missing (main attention)")
def _no_head_norm(patch, model, name):
    for layer in model.layers:
        layer.attention.q_norm = layer.attention.k_norm = Call(unchanged)
    return model


@mutant("Norms", "q/k norm after RoPE")
def _norm_after_rope(patch, model, name):
    # Turn, norm, turn back: what the library then turns is the norm of the turned head.
    turn = functools.partial(_ROTATE, rotary_dim=model.config.rotary_dim, theta=model.config.rope_theta)

    def after(norm):
        def call(x, dtype):
            positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None], x.shape[:2])
            return turn(norm(turn(x, positions), dtype), -positions)

        return Call(call)

    for layer in model.layers:
        layer.attention.q_norm, layer.attention.k_norm = after(layer.attention.q_norm), after(layer.attention.k_norm)
    return model


@mutant("Norms", "q/k norm over all heads together")
def _joint_head_norm(patch, model, name):
    def joint(norm):
        def call(x, dtype):
            scale = jnp.tile(1.0 + norm.weight.get_value().astype(jnp.float32), x.shape[2])
            return layers.rms_normalize(x.reshape(*x.shape[:2], -1), scale, norm.eps, dtype).reshape(x.shape)

        return Call(call)

    for layer in model.layers:
        layer.attention.q_norm, layer.attention.k_norm = joint(layer.attention.q_norm), joint(layer.attention.k_norm)
    return model


@mutant("Norms", "final norm missing")
def _no_final_norm(patch, model, name):
    model.norm = Call(unchanged)
    return model


@mutant("Norms", "eps not read from the config (1e-6 for 1e-5 and the reverse)")
def _fixed_eps(patch, model, name):
    def call(self, x, dtype=None):
        scale = 1.0 + self.weight.get_value().astype(jnp.float32)
        return layers.rms_normalize(x, scale, 1e-5 if self.eps == 1e-6 else 1e-6, dtype or x.dtype)

    patch.setattr(layers.GemmaRMSNorm, "__call__", call)
    return model


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
        return _ATTEND(q[:, :, order], k, v, positions, **options)[:, :, np.argsort(order)]

    patch.setattr(attention, "attend", attend)
    return model


@mutant(_ATTENTION, "scale (hidden / heads)^-0.5 instead of head_dim^-0.5")
def _wrong_scale(patch, model, name):
    c = model.config
    factor = (c.hidden_size / c.num_heads) ** -0.5 / c.head_dim**-0.5
    patch.setattr(attention, "attend", lambda q, *rest, **options: _ATTEND(q * factor, *rest, **options))
    return model


@mutant(_ATTENTION, "indexer ignored")
def _no_selection(patch, model, name):
    patch.setattr(attention, "attend", lambda *rest, blocks, **options: _ATTEND(*rest, blocks=None, **options))
    return model


@mutant(_ATTENTION, "layers with a dense MLP run full attention although they carry `index_*` tensors")
def _dense_layers_full(patch, model, name):
    for layer in model.layers:
        if not layer.is_moe:
            layer.attention.indexer = Call(lambda x, positions, index_keys: (None, index_keys))
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
    return _SELECT(jnp.broadcast_to(scores.max(2, keepdims=True), scores.shape), positions, **options)


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
    return _SELECT(scores, positions, block_size=block_size, top_k=top_k + 1)


def _one_less(scores, positions, *, block_size, top_k):
    return _SELECT(scores, positions, block_size=block_size, top_k=top_k - 1)


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
        return _SCORES(q, k, jnp.broadcast_to(positions.max(1, keepdims=True), positions.shape), **options)

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
        return _SELECT(scores, shifted(positions, block_size)[0], block_size=block_size, **options)

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
            return _INDEXER(self, *inputs)

    patch.setattr(attention.Indexer, "__call__", call)
    return model


def _remember(norm, memory):
    """`norm`, which also leaves its input in `memory`."""

    def call(x, *rest):
        memory[:] = [x]
        return norm(x, *rest)

    return Call(call)


@mutant(_ATTENTION, "indexer reads the residual stream before input_layernorm")
def _indexer_before_norm(patch, model, name):
    for layer in model.layers:
        if layer.attention.indexer is not None:
            memory = []
            layer.input_norm = _remember(layer.input_norm, memory)
            layer.attention.indexer = Call(
                lambda x, *rest, indexer=layer.attention.indexer, memory=memory: indexer(memory[0], *rest)
            )
    return model


# MLP ----------------------------------------------------------------------------------------------------------------


def _activation(*, alpha=None, limit=None, gate=(None, 1), up=(-1, 1), plus=1.0):
    """The activation with parts replaced; `gate` and `up` are bounds in units of the limit."""
    fixed_alpha, fixed_limit = alpha, limit

    def clip(x, bounds, limit):
        low, high = (None if b is None else b * limit for b in bounds)
        return x if low is high is None else jnp.clip(x, low, high)

    def call(g, u, *, alpha, limit):
        alpha, limit = fixed_alpha or alpha, fixed_limit or limit
        g, u = clip(g, gate, limit), clip(u, up, limit)
        return g * jax.nn.sigmoid(alpha * g) * (u + plus)

    return call


_OPEN = (None, None)


@mutant("MLP", "silu(g) * u: no alpha, clamp, +1", _activation(alpha=1.0, gate=_OPEN, up=_OPEN, plus=0.0))
@mutant("MLP", "alpha = 1 (sigmoid(g) instead of sigmoid(alpha g))", _activation(alpha=1.0))
@mutant("MLP", "u instead of u + 1", _activation(plus=0.0))
@mutant("MLP", "no clamp at all", _activation(gate=_OPEN, up=_OPEN))
@mutant("MLP", "gate not clamped", _activation(gate=_OPEN))
@mutant("MLP", "up not clamped", _activation(up=_OPEN))
@mutant("MLP", "up clamped from above only", _activation(up=(None, 1)))
@mutant("MLP", "gate clamped on both sides", _activation(gate=(-1, 1)))
@mutant("MLP", "alpha, limit not read from the config (1.702, 7)", _activation(alpha=1.702, limit=7.0))
def _swiglu(wrong, patch, model, name):
    patch.setattr(layers, "swiglu_oai", wrong)
    patch.setattr(xla_experts, "swiglu_oai", lambda g, u, alpha, limit: wrong(g, u, alpha=alpha, limit=limit))
    return model


def _moe_layers(model):
    return [layer.moe for layer in model.layers if layer.is_moe]


def _exchange(mlp):
    gate, up = mlp.gate_proj, mlp.up_proj
    mlp.gate_proj, mlp.up_proj = up, gate


@mutant("MLP", "w1 and w3 of the routed experts exchanged")
def _w1_w3(patch, model, name):
    for block in _moe_layers(model):
        _exchange(block.experts)
    return model


def _mlps(model):
    for layer in model.layers:
        yield from (layer.moe.experts, layer.moe.shared_expert) if layer.is_moe else (layer.mlp,)


@mutant("MLP", "gate and up exchanged everywhere")
def _gate_up(patch, model, name):
    for mlp in _mlps(model):
        _exchange(mlp)
    return model


@mutant("MLP", "fused [gate; up] read as interleaved rows")
def _interleaved_rows(patch, model, name):
    for mlp in _mlps(model):
        parts = [formats.dequantize(part.weight.get_value()) for part in (mlp.gate_proj, mlp.up_proj)]
        fused = jnp.concatenate(parts, axis=-2)
        mlp.gate_proj.weight.set_value(fused[..., 0::2, :])
        mlp.up_proj.weight.set_value(fused[..., 1::2, :])
    return model


# Router and experts -------------------------------------------------------------------------------------------------

_ROUTER = "Router and experts"


def _router(*, score=jax.nn.sigmoid, select=True, combine=False, normalise=True, dtype=jnp.float32):
    def call(self, x):
        x, weight, bias = (
            a.astype(dtype).astype(jnp.float32) for a in (x, self.weight.get_value(), self.bias.get_value())
        )
        scores = score(x @ weight.T)
        biased = scores + bias[None]
        _, experts = lax.top_k(biased if select else scores, self.top_k)
        weights = jnp.take_along_axis(biased if combine else scores, experts, axis=-1)
        return experts, weights / weights.sum(-1, keepdims=True) if normalise else weights

    return call


@mutant(_ROUTER, "correction bias not used for the selection", _router(select=False))
@mutant(_ROUTER, "correction bias also in the combine weights", _router(combine=True))
@mutant(_ROUTER, "softmax scores instead of sigmoid", _router(score=jax.nn.softmax))
@mutant(_ROUTER, "top-k weights not normalised", _router(normalise=False))
@mutant(_ROUTER, "router weight, bias, input rounded to bf16", _router(dtype=jnp.bfloat16))
def _wrong_router(wrong, patch, model, name):
    patch.setattr(moe.Router, "__call__", wrong)
    return model


@mutant(_ROUTER, "`routed_scaling_factor` missing", 1.0)
@mutant(_ROUTER, "`routed_scaling_factor` not read from the config (2.0)", 2.0)
def _scaling(factor, patch, model, name):
    for block in _moe_layers(model):
        block.routed_scaling = factor
    return model


@mutant(_ROUTER, "`routed_scaling_factor` on the shared expert too", None)
@mutant(_ROUTER, "shared expert dropped", 0.0)
def _shared(factor, patch, model, name):
    for block in _moe_layers(model):
        shared, scale = block.shared_expert, block.routed_scaling if factor is None else factor
        block.shared_expert = Call(lambda x, shared=shared, scale=scale: shared(x) * scale)
    return model


@mutant(_ROUTER, "router reads the residual stream before post_attention_layernorm")
def _router_before_norm(patch, model, name):
    for layer in model.layers:
        if layer.is_moe:
            memory = []
            layer.post_attention_norm = _remember(layer.post_attention_norm, memory)
            layer.moe.router = Call(lambda x, r=layer.moe.router, memory=memory: r(memory[0].reshape(x.shape)))
    return model


# Ends and names -----------------------------------------------------------------------------------------------------


@mutant("Ends", "embedding times sqrt(hidden)")
def _scaled_embedding(patch, model, name):
    factor = model.config.hidden_size**0.5
    patch.setattr(target.Embedding, "lookup", lambda self, tokens, dtype: _LOOKUP(self, tokens, dtype) * factor)
    return model


@mutant("Ends", "lm_head tied to the embedding")
def _tied(patch, model, name):
    model.lm_head = model.embed_tokens
    return model


def _text_order(count):
    return sorted(range(count), key=str)


@mutant("Names", "experts stacked in the text order of their names (0, 1, 10, 11, 2, ...)")
def _experts_in_text_order(patch, model, name):
    order = np.asarray(_text_order(model.config.num_experts))
    for block in _moe_layers(model):
        for part in golden.EXPERT_NAMES:
            parameter = getattr(block.experts, part).weight
            parameter.set_value(jax.tree.map(lambda a: a[order], parameter.get_value()))
    return model


@mutant("Names", "layers stacked in the text order of their names")
def _layers_in_text_order(patch, model, name):
    model.layers = nnx.List([model.layers[i] for i in _text_order(model.config.num_layers)])
    return model


@mutant("Names", "`mtp.layers.0.transformer_layer.*` taken for layer 0")
def _mtp_as_layer(patch, model, name):
    here, layer = "language_model.model.mtp.layers.0.transformer_layer.", model.layers[0]
    found = {key.removeprefix(here): jnp.asarray(a) for key, a in golden.tensors(name).items() if key.startswith(here)}
    layer.input_norm.weight.set_value(found.pop("input_layernorm.weight"))
    layer.attention.k_proj.weight.set_value(found.pop("self_attn.k_proj.weight"))
    assert not found
    return model


# Reading MXFP8 ------------------------------------------------------------------------------------------------------

_MXFP8 = "MXFP8 reading"


def _mxfp8(weight, *, codes=lambda c: c, exponent=lambda s: s.astype(jnp.int32) - 127, spread=None):
    """Codes times 2^exponent; `spread` gives the scale bytes [..., out, in / 32] one value per element."""
    scale = (spread or (lambda s, shape: jnp.repeat(s, 32, axis=-1)))(weight.scale, weight.shape)
    return jnp.ldexp(codes(weight.codes).astype(jnp.float32), exponent(scale))


def _rows_of_32(scale, shape):
    out, size = shape[-2:]
    return jnp.repeat(scale.reshape(*shape[:-2], out // 32, size), 32, axis=-2)


def _transposed(scale, shape):
    out, size = shape[-2:]
    return jnp.repeat(jnp.swapaxes(scale.reshape(*shape[:-2], size // 32, out), -1, -2), 32, axis=-1)


def _cyclic(block):
    return lambda scale, shape: jnp.tile(scale, (1,) * (len(shape) - 1) + (block,))


def _bits(dtype):
    return lambda codes: lax.bitcast_convert_type(codes, dtype)


@mutant(_MXFP8, "divide by the scale (the suffix says `_inv`)", dict(exponent=lambda s: 127 - s.astype(jnp.int32)))
@mutant(_MXFP8, "scale ignored", dict(exponent=lambda s: jnp.zeros(s.shape, jnp.int32)))
@mutant(_MXFP8, "2^(byte - 126)", dict(exponent=lambda s: s.astype(jnp.int32) - 126))
@mutant(_MXFP8, "scale byte read as int8", dict(exponent=lambda s: s.astype(jnp.int8).astype(jnp.int32) - 127))
@mutant(_MXFP8, "one scale per 32 rows instead of per 32 columns", dict(spread=_rows_of_32))
@mutant(_MXFP8, "scale bytes read as [in/32, out]", dict(spread=_transposed))
@mutant(_MXFP8, "scale of column c taken from block c % nblocks", dict(spread=_cyclic(32)))
@mutant(_MXFP8, "codes read as E5M2", dict(codes=_bits(jnp.float8_e5m2)))
@mutant(_MXFP8, "codes read as E4M3 FNUZ", dict(codes=_bits(jnp.float8_e4m3fnuz)))
def _wrong_mxfp8(options, patch, model, name):
    def dequantize(weight, dtype=jnp.float32):
        return _mxfp8(weight, **options).astype(dtype) if isinstance(weight, MXFP8Array) else _DEQUANTIZE(weight, dtype)

    _dequantize_by(patch, dequantize)
    return model


# Reading NVFP4 ------------------------------------------------------------------------------------------------------

_NVFP4 = "NVFP4 reading"
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _low_first(low, high):
    return jnp.stack([low, high], axis=-1).reshape(*low.shape[:-1], -1)


def _nvfp4(weight, *, order=_low_first, scale=lambda s: s.astype(jnp.float32), spread=None, op=lambda op: op):
    table = jnp.asarray(_E2M1 + tuple(-v for v in _E2M1), jnp.float32)
    values = table[order(weight.codes & 0xF, weight.codes >> 4)]
    spread = spread or (lambda s, shape: jnp.repeat(s, 16, axis=-1))
    values = values * spread(scale(weight.scale), weight.shape)
    factor = jnp.broadcast_to(weight.global_scale[..., None, None], values.shape)
    return dict(multiply=values * factor, divide=values / factor, ignore=values)[op(weight.global_scale_op)]


def _as_e8m0(scale):
    return jnp.ldexp(jnp.float32(1), lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32) - 127)


def _flipped(op):
    return "divide" if op == "multiply" else "multiply"


@mutant(_NVFP4, "high nibble = even column", dict(order=lambda low, high: _low_first(high, low)))
@mutant(_NVFP4, "low nibbles = first half of the row", dict(order=lambda *halves: jnp.concatenate(halves, axis=-1)))
@mutant(_NVFP4, "global scale multiplied where it divides, or the reverse", dict(op=_flipped))
@mutant(_NVFP4, "global scale ignored", dict(op=lambda op: "ignore"))
@mutant(_NVFP4, "block scale byte read as E8M0", dict(scale=_as_e8m0))
@mutant(_NVFP4, "block scale of column c taken from block c % nblocks", dict(spread=_cyclic(16)))
def _wrong_nvfp4(options, patch, model, name):
    def dequantize(weight, dtype=jnp.float32):
        return _nvfp4(weight, **options).astype(dtype) if isinstance(weight, NVFP4Array) else _DEQUANTIZE(weight, dtype)

    _dequantize_by(patch, dequantize)
    return model


@mutant(_NVFP4, "one global scale for w1, w2, w3")
def _one_global(patch, model, name):
    for block in _moe_layers(model):
        shared = block.experts.gate_proj.weight.get_value().global_scale
        down = block.experts.down_proj.weight
        down.set_value(_with_global(down.get_value(), shared))
    return model


def _with_global(weight, value):
    return NVFP4Array(
        codes=weight.codes, scale=weight.scale, global_scale=value, global_scale_op=weight.global_scale_op
    )


@mutant(_NVFP4, "activation scale applied to the weight")
def _activation_scale(patch, model, name):
    t = golden.tensors(name)
    suffix = "input_global_scale" if name == "m31-flash-tiny" else "input_scale"
    for i, layer in enumerate(model.layers):
        for part, theirs in golden.EXPERT_NAMES.items() if layer.is_moe else ():
            key = f"language_model.model.layers.{i}.block_sparse_moe.experts"
            found = np.stack([t[f"{key}.{e}.{theirs}.{suffix}"].reshape(()) for e in range(model.config.num_experts)])
            parameter = getattr(layer.moe.experts, part).weight
            old = parameter.get_value()
            parameter.set_value(_with_global(old, old.global_scale * found))
    return model


@mutant(
    "Not wrong, for comparison",
    "NVFP4 weights rounded to bf16 after dequantisation (a legitimate choice; see the tolerance note)",
)
def _nvfp4_in_bf16(patch, model, name):
    def dequantize(weight, dtype=jnp.float32):
        exact = _DEQUANTIZE(weight, jnp.float32)
        return (exact.astype(jnp.bfloat16) if isinstance(weight, NVFP4Array) else exact).astype(dtype)

    _dequantize_by(patch, dequantize)
    return model
