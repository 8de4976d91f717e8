"""The parts of a draft-verify step as functions of their own, with the bytes that each has to move and its products."""

import dataclasses
import math
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dspark_jax as ds
from dspark_jax import sampling
from dspark_jax.attention import LayerCache
from dspark_jax.formats import MXFP8Array, NVFP4Array
from dspark_jax.speculation import Plan, draft_block, draft_tokens, target_law, verify_block


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of the step: `function(carry, *args) -> carry, out` with the carry donated, how often a step runs it, the
    bytes it has to move and the floating-point operations of its matrix products each time, and whether it belongs to
    the drafter."""

    name: str
    function: Callable[..., Any]
    carry: Any
    args: tuple[Any, ...]
    times: int
    nbytes: float
    operations: float = 0.0
    drafter: bool = False


class LastLogits:
    """A Markov head that keeps the logits of the slot that was drawn last."""

    def __init__(self, head: Any) -> None:
        self.head, self.logits = head, None

    def __call__(self, *args: Any) -> Any:
        return self.head(*args)

    def draw_slot(self, *args: Any, **options: Any) -> Any:
        drawn = self.head.draw_slot(*args, **options)
        self.logits = drawn.logits
        return drawn


def nbytes(*trees: Any) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(trees))


def elements(*trees: Any) -> int:
    """Weights in the trees, whatever they are stored in."""
    leaves = jax.tree.leaves(trees, is_leaf=lambda a: isinstance(a, MXFP8Array | NVFP4Array))
    return sum(math.prod(a.shape) for a in leaves)


def random_like(tree: Any, seed: int) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    keys = [jax.random.key(seed + 100 * i) for i in range(len(leaves))]
    made = [_random(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, made)


_random = jax.jit(jax.random.normal, static_argnums=(1, 2))


def active_experts(chosen: jax.Array) -> int:
    return len(np.unique(np.asarray(chosen)))


def parts(model: ds.Model, state: Any, config: ds.GenerateConfig, context: int) -> list[Part]:
    """The parts of a step. They hold `state` but for its target cache, of which they have copied one layer."""
    target, drafter = model.target, model.drafter
    assert drafter is not None
    t, d = target.config, drafter.config
    plan = Plan.of(model, config)
    drafts, batch = plan.num_drafts, state.anchor.shape[0]
    half = jnp.dtype(target.compute_dtype).itemsize
    positions = state.position[:, None] + jnp.arange(drafts + 1, dtype=jnp.int32)[None, :]
    x = random_like(jax.ShapeDtypeStruct((batch, drafts + 1, t.hidden_size), target.compute_dtype), 7)
    keys = sampling.step_keys(state.keys, state.step)
    logits = random_like(jax.ShapeDtypeStruct((batch, drafts + 1, t.vocab_size), jnp.float32), 8)
    hidden, base = x[:, :drafts], logits[:, :drafts]
    temperature = jnp.asarray(state.params.temperature)
    slim = dataclasses.replace(state, cache=None, draft_cache=None, tokens=None, steps=None)
    lengths = jnp.full((batch,), drafts, jnp.int32)
    ring = state.draft_cache

    def draft_whole(carry, drafter, target, state, ring, keys, lengths):
        return carry, draft_block(drafter, target, state, ring, keys, lengths, config, drafts)[:3]

    def draft_body(carry, drafter, embed, head, anchor, p0, ring):
        return carry, drafter.block(anchor, p0, ring, num_slots=drafts, embed=embed, head=head)

    def draft_chain(base, drafter, hidden, anchor, keys, temperature):
        # In a step nothing else reads these logits, and what they lie in becomes that of the laws. Those of a kernel
        # are computed where they are read: returned, they would be written as in no step.
        allowed = jnp.arange(base.shape[-1]) != d.mask_token_id
        head = LastLogits(drafter.markov_head)
        own: Any = types.SimpleNamespace(markov_head=head, kernels=drafter.kernels)
        drafted = draft_tokens(
            own, base, hidden, anchor, temperature=temperature, keys=keys, method=config.draft, allowed=allowed
        )
        rows = drafted.log_q if head.logits is None else head.logits
        return rows, (drafted.tokens, drafted.prev_embeddings)

    def draft_context(ring, drafter, features, positions):
        return drafter.write_context(features, positions, ring), ()

    def attention(cache, layer, x, positions):
        out, cache, blocks = layer.attention(layer.input_norm(x), positions, cache)
        return cache, (x + out, blocks)

    def index(index_keys, indexer, x, positions):
        blocks, index_keys = indexer(x, positions, index_keys)
        return index_keys, blocks

    def moe(carry, layer, x, positions):
        out, experts, _ = layer.moe(layer.post_attention_norm(x), positions)
        return carry, (x + out, experts)

    def dense(carry, layer, x):
        return carry, x + layer.mlp(layer.post_attention_norm(x))

    def head(carry, target, x):
        return carry, target.lm_head.logits(target.norm(x))

    def verification(carry, logits, draft_tokens, log_q, keys, state):
        log_p = target_law(logits, state.params, target.kernels)
        forced = dataclasses.replace(config, benchmark_forced_acceptance=None)
        return carry, verify_block(draft_tokens, log_q, log_p, keys, lengths, state, forced, plan)

    moe_layers = [i for i, is_moe in enumerate(t.moe_layers) if is_moe]
    dense_layers = [i for i in range(t.num_layers) if i not in moe_layers]
    first = moe_layers[0]
    layer, dense_layer = target.layers[first], target.layers[dense_layers[0]]
    keys_of_one, values_of_one, index_of_one = (
        jnp.copy(arrays[first]) for arrays in (state.cache.keys, state.cache.values, state.cache.index_keys)
    )
    one_cache = LayerCache(keys=keys_of_one, values=values_of_one, index_keys=index_of_one)
    features = [random_like(x, 20 + i) for i in range(len(plan.capture))]
    projections = [(block.attention.k_proj, block.attention.v_proj) for block in drafter.layers]
    log_q = jax.nn.log_softmax(base)
    active = active_experts(jax.jit(lambda *args: moe((), *args)[1][1])(layer, x, positions))

    seen = min(context + drafts + 1, d.window or context)
    ring_bytes = batch * seen * 2 * d.num_kv_heads * d.head_dim * half * d.num_layers
    selected = min(t.top_k_blocks * t.block_size, context)
    selected_bytes = batch * selected * 2 * t.num_kv_heads * t.head_dim * half
    index_bytes = batch * context * t.index_head_dim * half
    body_bytes = nbytes(drafter.layers, drafter.norm, target.lm_head) + nbytes(base) + ring_bytes
    chain_bytes = drafts * nbytes(drafter.markov_head.w2) + 2 * nbytes(base)
    expert_bytes = nbytes(layer.moe.experts) * active / t.num_experts
    moe_bytes = expert_bytes + nbytes(layer.moe.shared_expert, layer.moe.router)
    # Operations: two for each weight and row, and for each key and query of a head two products of D.
    rows, drafted = batch * (drafts + 1), batch * drafts
    block = (
        drafted * 2 * (elements(drafter.layers, target.lm_head) + 2 * seen * d.num_heads * d.head_dim * d.num_layers)
    )
    chain = 2 * drafted * elements(drafter.markov_head.w2)
    routed = elements(layer.moe.experts) * t.num_experts_per_token / t.num_experts
    attended = 2 * selected * t.num_heads * t.head_dim
    indexed = elements(layer.attention.indexer) + context * t.num_kv_heads * t.index_head_dim
    ends = (drafter, target.embed_tokens, target.lm_head)
    context_bytes = nbytes(drafter.fc, projections, features)
    return [
        Part(
            "drafter's step, one program", draft_whole, (), (drafter, target, slim, ring, keys, lengths), 0,
            body_bytes + chain_bytes, block + chain, True,
        ),
        Part(
            "draft: body and head", draft_body, (), (*ends, state.anchor, state.position, ring), 1, body_bytes, block,
            True,
        ),
        Part(
            "draft: Markov chain and draws", draft_chain, jnp.copy(base),
            (drafter, hidden, state.anchor, keys, temperature), 1, chain_bytes, chain, True,
        ),
        Part(
            "draft: context of the accepted", draft_context, jax.tree.map(jnp.copy, ring),
            (drafter, features, positions), 1, context_bytes, 2 * rows * elements(drafter.fc, projections), True,
        ),
        Part(
            f"experts ({active} of {t.num_experts} active)", moe, (), (layer, x, positions), len(moe_layers), moe_bytes,
            2 * rows * (routed + elements(layer.moe.shared_expert, layer.moe.router)),
        ),
        Part(
            "attention with its index", attention, one_cache, (layer, x, positions), t.num_layers,
            nbytes(layer.attention) + selected_bytes + index_bytes,
            2 * rows * (elements(layer.attention) + attended + context * t.num_kv_heads * t.index_head_dim),
        ),
        Part(
            "  of which index", index, jnp.copy(index_of_one), (layer.attention.indexer, x, positions), 0,
            nbytes(layer.attention.indexer) + index_bytes, 2 * rows * indexed,
        ),
        Part(
            "dense feed-forward", dense, (), (dense_layer, x), len(dense_layers), nbytes(dense_layer.mlp),
            2 * rows * elements(dense_layer.mlp),
        ),
        Part(
            "head", head, (), (target, x), 1, nbytes(target.lm_head) + nbytes(logits),
            2 * rows * elements(target.lm_head),
        ),
        Part(
            "filters and verification", verification, (), (logits, jnp.argmax(base, axis=-1), log_q, keys, slim), 1,
            nbytes(logits) + nbytes(base),
        ),
    ]  # fmt: skip
