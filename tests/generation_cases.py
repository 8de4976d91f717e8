"""Small models for tests of generation, the jitted `generate` that they share, and laws computed without it."""

import contextlib
import functools
import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import drafter_cases
import golden
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import safetensors.numpy
import scipy.stats
from flax import nnx

import dspark_jax as ds
from convert import minimax
from dspark_jax.drafter import DSparkDrafter
from dspark_jax.target import MiniMaxTarget

TRACED = "m31-flash-tiny"


def jit_once(function, **options):
    """`jax.jit` for programs that run a few times: compiling is most of their work, so a CPU optimises nothing."""
    fast = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(function, compiler_options=fast, **options)


def jit_generate():
    """A jitted `generate` of its own: tests that patch the library trace it afresh."""
    return jit_once(lambda *a, config: ds.generate(*a, config=config), static_argnames="config")


run = jit_generate()


@contextlib.contextmanager
def unchecked():
    """Without the type checker of the tests: values of the wrong type get as far as they do at a user's."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def target_config(**changes: Any) -> ds.TargetConfig:
    """A target that compiles in a second: 16 wide, one dense, block-sparse layer."""
    layers = changes.get("num_layers", 1)
    fields: dict[str, Any] = dict(
        vocab_size=12,
        hidden_size=16,
        num_layers=layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        rotary_dim=4,
        rope_theta=100.0,
        norm_eps=1e-6,
        dense_mlp_size=16,
        expert_mlp_size=8,
        shared_mlp_size=8,
        num_experts=4,
        num_experts_per_token=2,
        routed_scaling=2.0,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        moe_layers=(False,) * layers,
        sparse_layers=(True,) * layers,
        index_heads=1,
        index_head_dim=8,
        block_size=8,
        top_k_blocks=2,
        max_context=128,
        eos_token_ids=(),
        pad_token_id=0,
    )
    return ds.TargetConfig(**(fields | changes))


def drafter_config(target: ds.TargetConfig, **changes: Any) -> ds.DrafterConfig:
    """A drafter for `target_config`: one layer, blocks of 4, window 6, vanilla Markov head, confidence head."""
    fields: dict[str, Any] = dict(
        architecture="DSparkMiniMaxDraftModel",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        rotary_dim=4,
        rope_theta=50.0,
        norm_eps=1e-6,
        mlp_size=16,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        block_size=4,
        mask_token_id=target.vocab_size - 1,
        target_layer_ids=tuple(range(target.num_layers)),
        markov_type="vanilla",
        markov_rank=4,
        confidence_head=True,
        confidence_with_markov=True,
        window=6,
        causal=False,
        max_context=target.max_context,
    )
    return ds.DrafterConfig(**(fields | changes))


def toy(
    seed: int = 0, *, drafter: dict[str, Any] | None = None, with_drafter: bool = True, **target: Any
) -> "ds.Model":
    """A model with random weights, float32 activations."""
    config = target_config(**target)
    key = jax.random.key(seed)
    model = MiniMaxTarget(config, key=jax.random.fold_in(key, 0), compute_dtype=jnp.float32)
    if not with_drafter:
        return ds.Model(target=model)
    draft = DSparkDrafter(
        drafter_config(config, **(drafter or {})), key=jax.random.fold_in(key, 1), compute_dtype=jnp.float32
    )
    return ds.Model(target=model, drafter=draft)


def law_toy() -> "ds.Model":
    """A model for chi-square tests: 3 drawable tokens whose law depends on the context, drafts that often miss it.

    With random weights, proposals have nothing to do with the law and hardly matter. Here a constant in the embedding
    turns the head's first column into a bias: about (0.5, 0.3, 0.2, 0), to which the context adds. The drafter prefers
    token 2, so that both rules accept about 40 % and noise that is reused wrongly shows (measured: 598 against a
    critical value of 367 in 50,000 streams).
    """
    model = toy(5, vocab_size=4, drafter=dict(block_size=2))
    target, drafter = model.target, model.drafter
    embedding, head = (t.weight.get_value().astype(jnp.float32) for t in (target.embed_tokens, target.lm_head))
    target.embed_tokens.weight.set_value(embedding.at[:, 0].set(1.0).astype(jnp.bfloat16))
    head = (0.7 * head).at[:, 0].set(0.5 * jnp.log(jnp.asarray([0.5, 0.3, 0.2, 1e-9])))
    target.lm_head.weight.set_value(head.astype(jnp.bfloat16))
    w1, w2 = drafter.markov_head.w1.weight, drafter.markov_head.w2.weight
    w1.set_value((0.5 * w1.get_value().astype(jnp.float32)).at[:, 0].set(1.0).astype(jnp.bfloat16))
    w2.set_value(w2.get_value().at[:, 0].set(jnp.asarray([0.0, 0.2, 0.0, 0.0], jnp.bfloat16)))
    return model


HOT_ROWS = 64


def hot_batch() -> tuple:
    """64 short prompts, their lengths and keys."""
    prompts = [[(3 * i + j) % 12 for j in range(1 + i % 8)] for i in range(HOT_ROWS)]
    return *ds.pad_prompts(prompts, (8,)), ds.request_keys(range(HOT_ROWS))


@functools.cache
def hot_model() -> "ds.Model":
    return toy(1, pad_token_id=7)


@functools.cache
def hot_run(config: "ds.GenerateConfig") -> "ds.Generation":
    """`hot_model` at temperature 2, where laws are nearly flat and many drafts are accepted, as numpy arrays."""
    out = run(hot_model(), *hot_batch(), ds.SamplingParams(temperature=2.0), config=config)
    return jax.tree.map(np.asarray, out)


@functools.cache
def golden_model(name: str) -> "ds.Model":
    """A golden checkpoint with its drafter, if there is one."""
    drafter = drafter_cases.make_drafter(drafter_cases.MINIMAX) if name == TRACED else None
    return ds.Model(target=golden.model(name), drafter=drafter)


target_logits = jit_once(ds.target_logits)


def continuation_logits(model: "ds.Model", prompt: Sequence[int], new: Sequence[int]) -> np.ndarray:
    """Teacher-forced logits [len(new), V]: row i scores new[i] after prompt + new[:i]."""
    text = np.asarray([*prompt, *new], np.int32)[None]
    logits = np.asarray(target_logits(model, jnp.asarray(text)))[0]
    return logits[len(prompt) - 1 : len(text[0]) - 1]


def filtered_law(
    logits: np.ndarray, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Probabilities after temperature, min-p, top-k and top-p, by sorting in float64."""
    z = np.asarray(logits, np.float64) / temperature
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    p = np.where(p >= min_p * p.max(-1, keepdims=True), p, 0.0)
    if top_k:
        p = np.where(p >= np.sort(p, -1)[..., -top_k, None], p, 0.0)
    p /= p.sum(-1, keepdims=True)
    order = np.argsort(-p, -1)
    ranked = np.take_along_axis(p, order, -1)
    # A token stays while the mass before it is short of top_p.
    kept = np.zeros_like(p)
    np.put_along_axis(kept, order, (np.cumsum(ranked, -1) - ranked < top_p).astype(float), -1)
    p = np.where(kept > 0, p, 0.0)
    return p / p.sum(-1, keepdims=True)


def joint_law(model: "ds.Model", prompt: Sequence[int], count: int, **filters: Any) -> np.ndarray:
    """Exact probability [V] * count of the next `count` tokens, from teacher-forced logits of every continuation."""
    vocab = model.target.config.vocab_size
    paths = np.asarray(list(itertools.product(range(vocab), repeat=count - 1)), np.int32)
    text = np.concatenate([np.broadcast_to(np.asarray(prompt, np.int32), (len(paths), len(prompt))), paths], axis=1)
    logits = np.asarray(target_logits(model, jnp.asarray(text)))[:, len(prompt) - 1 :]
    p = filtered_law(logits, **filters).reshape(*(vocab,) * (count - 1), count, vocab)
    law = np.ones((vocab,) * count)
    for i in range(count):
        # The i-th conditional depends on the first i tokens only: take any continuation of them.
        conditional = p[(slice(None),) * i + (0,) * (count - 1 - i) + (i,)]
        law = law * conditional.reshape(*conditional.shape, *(1,) * (count - 1 - i))
    return law


# One false alarm in a million runs.
ALPHA = 1e-6


def chi_square(tokens: np.ndarray, law: np.ndarray) -> tuple[float, float]:
    """Pearson's statistic of rows of tokens against their joint law, and its critical value.

    Cells that expect fewer than 5 rows are merged. A row outside the support makes the statistic infinite.
    """
    cell = np.ravel_multi_index(tokens.T, law.shape)
    seen, expected = np.bincount(cell, minlength=law.size), law.reshape(-1) * len(tokens)
    if seen[expected == 0].any():
        return np.inf, 0.0
    big = expected >= 5
    seen = np.append(seen[big], seen[~big].sum())
    expected = np.append(expected[big], expected[~big].sum())
    keep = expected > 0
    statistic = ((seen - expected)[keep] ** 2 / expected[keep]).sum()
    return float(statistic), float(scipy.stats.chi2.isf(ALPHA, keep.sum() - 1))


def passes(tokens: np.ndarray, law: np.ndarray) -> bool:
    statistic, critical = chi_square(tokens, law)
    return statistic <= critical


# Parameter path -> tensor name, for models without experts. Written out here: the converter's table is under test.
_TENSORS = {
    "embed_tokens": "model.embed_tokens",
    "lm_head": "lm_head",
    "norm": "model.norm",
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
}


def _tensor_name(path: tuple) -> str:
    """Name of a target's tensor in a published checkpoint."""
    parts = [str(p) for p in path]
    if parts[0] == "layers":
        name = ".".join(parts[2:]).replace("attention.indexer.", "self_attn.index_").replace("attention.", "self_attn.")
        name = name.replace("post_self_attn.", "post_attention.")
        first, *rest = name.split(".")
        return f"language_model.model.layers.{parts[1]}." + ".".join([_TENSORS.get(first, first), *rest])
    return f"language_model.{_TENSORS[parts[0]]}.{parts[1]}"


def _draft_tensor_name(path: tuple) -> str:
    parts = [str(p) for p in path]
    name = ".".join(parts)
    for ours, theirs in (("markov_head.w", "markov_head.markov_w"), ("confidence_head.", "confidence_head.proj.")):
        name = name.replace(ours, theirs)
    if parts[0] == "layers":
        name = name.replace("attention.", "self_attn.").replace("post_self_attn", "post_attention")
        name = name.replace("input_norm", "input_layernorm").replace("post_attention_norm", "post_attention_layernorm")
        layer, rest = name.split(".", 2)[1:]
        name = f"layers.{layer}.decoder_layer.{rest}"
    name = "final_norm.weight" if name == "norm.weight" else name
    return f"language_model.model.dspark.{name}"


def write_source(folder: Path, model: "ds.Model", *, tokenizer: bool = True) -> Path:
    """A toy as a checkpoint in the published layout, bf16, with a byte-level tokenizer of 512 tokens."""
    parts = [(model.target, folder, _tensor_name, golden.hf_config(TRACED), target_fields)]
    if model.drafter is not None:
        config = drafter_cases.hf_config(drafter_cases.MINIMAX)
        parts.append((model.drafter, folder / "dspark", _draft_tensor_name, config, drafter_fields))
    for module, where, name_of, config, fields in parts:
        where.mkdir(parents=True)
        state = nnx.to_flat_state(nnx.state(module, nnx.Param))
        tensors = {name_of(path): np.asarray(p.get_value()) for path, p in state}
        safetensors.numpy.save_file(tensors, where / "model.safetensors")
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
        (where / "model.safetensors.index.json").write_text(json.dumps(index))
        config.pop("quantization_config")
        config["text_config"] |= fields(module.config)
        (where / "config.json").write_text(json.dumps(config))
    if tokenizer:
        shutil.copy(golden.DATA / "tokenizer" / "tokenizer.json", folder)
    return folder


def target_fields(c: "ds.TargetConfig") -> dict[str, Any]:
    """What `config.json` says about a toy."""
    return dict(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rotary_dim=c.rotary_dim,
        partial_rotary_factor=c.rotary_dim / c.head_dim,
        rope_theta=c.rope_theta,
        rms_norm_eps=c.norm_eps,
        dense_intermediate_size=c.dense_mlp_size,
        max_position_embeddings=c.max_context,
        moe_layer_freq=[int(m) for m in c.moe_layers],
        sparse_attention_config=golden.hf_config(TRACED)["text_config"]["sparse_attention_config"]
        | dict(
            sparse_index_dim=c.index_head_dim,
            sparse_num_index_heads=c.index_heads,
            sparse_topk_blocks=c.top_k_blocks,
            sparse_block_size=c.block_size,
            sparse_disable_index_value=[1] * c.num_layers,
            sparse_attention_freq=[int(s) for s in c.sparse_layers],
        ),
    )


def drafter_fields(c: "ds.DrafterConfig") -> dict[str, Any]:
    """What `dspark/config.json` says about a toy's drafter."""
    return dict(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rotary_dim=c.rotary_dim,
        partial_rotary_factor=c.rotary_dim / c.head_dim,
        rope_theta=c.rope_theta,
        rms_norm_eps=c.norm_eps,
        dense_intermediate_size=c.mlp_size,
        dspark_ffn_hidden_size=c.mlp_size,
        swiglu_limit=c.swiglu_limit,
        max_position_embeddings=c.max_context,
        moe_layer_freq=[0] * c.num_layers,
        layer_types=["sliding_attention"] * c.num_layers,
        sliding_window=c.window,
        dspark_block_size=c.block_size,
        dspark_noise_token_id=c.mask_token_id,
        dspark_target_layer_ids=list(c.target_layer_ids),
        dspark_markov_rank=c.markov_rank,
    )


def convert(source: Path, destination: Path, *options: str) -> Path:
    """Run the converter's command line in this process."""
    assert minimax.main([str(source), str(destination), *options]) == 0
    return destination
