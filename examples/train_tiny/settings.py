"""Sizes and training options of the pair, and the `config.json` files that describe it in the published layout."""

import dataclasses
from typing import Any

END_OF_TEXT, MASK = "<|endoftext|>", "<|mask|>"
END_OF_TEXT_ID, MASK_ID = 0, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """Options of one training.

    Attributes:
      batch, length: sequences of a step and tokens of a sequence.
      epochs: passes over the training tokens that are planned; fewer if the minutes do not suffice.
      peak_rate, warmup: learning rate after `warmup` steps; it then falls along a cosine to `final_rate` of its peak.
      steps_per_call: steps of one compiled call.
      early: share of the steps in which the target attends to everything and its weights are not rounded yet.
    """

    batch: int
    length: int
    epochs: float
    peak_rate: float
    warmup: int
    betas: tuple[float, float]
    weight_decay: float
    final_rate: float = 0.0
    dropout: float = 0.0
    clip: float = 1.0
    steps_per_call: int = 25
    early: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """One pair: sizes of target and drafter, their trainings, and the sizes of the measurements."""

    name: str
    vocab_size: int
    hidden: int
    layers: int
    dense_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    index_dim: int
    block_size: int
    top_k_blocks: int
    experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int
    dense_size: int
    draft_layers: int
    draft_size: int
    draft_block: int
    markov_rank: int
    window: int
    target_layer_ids: tuple[int, ...]
    target: Training
    drafter: Training
    anchors: int
    sample_rows: int
    sample_batch: int
    sample_prompt: int
    sample_share: float
    corpus_bytes: int | None = None
    eval_rows: int
    check_prompts: int
    check_tokens: int
    max_context: int = 4096
    rope_theta: float = 10000.0
    index_weight: float = 1.0
    balance_rate: float = 1e-3


TINY = Preset(
    name="tiny",
    vocab_size=2048,
    hidden=256,
    layers=6,
    dense_layers=1,
    heads=8,
    kv_heads=2,
    head_dim=64,
    rotary_dim=32,
    index_dim=32,
    block_size=16,
    top_k_blocks=16,
    experts=8,
    experts_per_token=2,
    expert_size=192,
    shared_size=192,
    dense_size=512,
    draft_layers=2,
    draft_size=768,
    draft_block=7,
    markov_rank=64,
    window=256,
    target_layer_ids=(1, 3, 5),
    target=Training(
        batch=32,
        length=1024,
        epochs=14,
        peak_rate=2e-3,
        warmup=200,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        dropout=0.05,
        final_rate=0.02,
        early=0.25,
    ),
    drafter=Training(batch=64, length=512, epochs=30, peak_rate=1e-3, warmup=250, betas=(0.9, 0.999), weight_decay=0.0),
    anchors=128,
    sample_rows=32768,
    sample_batch=4096,
    sample_prompt=64,
    sample_share=0.75,
    eval_rows=128,
    check_prompts=128,
    check_tokens=192,
)

SMOKE = Preset(
    name="smoke",
    vocab_size=512,
    hidden=64,
    layers=3,
    dense_layers=1,
    heads=4,
    kv_heads=2,
    head_dim=32,
    rotary_dim=16,
    index_dim=16,
    block_size=8,
    top_k_blocks=4,
    experts=4,
    experts_per_token=2,
    expert_size=32,
    shared_size=32,
    dense_size=96,
    draft_layers=1,
    draft_size=96,
    draft_block=7,
    markov_rank=16,
    window=24,
    target_layer_ids=(0, 2),
    target=Training(
        batch=8,
        length=128,
        epochs=0.6,
        peak_rate=4e-3,
        warmup=10,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        dropout=0.05,
        steps_per_call=10,
        early=0.25,
    ),
    drafter=Training(
        batch=8,
        length=96,
        epochs=0.6,
        peak_rate=2e-3,
        warmup=10,
        betas=(0.9, 0.999),
        weight_decay=0.0,
        steps_per_call=10,
    ),
    anchors=12,
    sample_rows=32,
    sample_batch=32,
    sample_prompt=16,
    sample_share=0.5,
    corpus_bytes=400_000,
    eval_rows=16,
    check_prompts=8,
    check_tokens=48,
)

PRESETS = {p.name: p for p in (TINY, SMOKE)}


def target_json(p: Preset) -> dict[str, Any]:
    """config.json of the target."""
    moe = [0] * p.dense_layers + [1] * (p.layers - p.dense_layers)
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "torch_dtype": "bfloat16",
        "text_config": {
            "architectures": ["MiniMaxM3SparseForCausalLM"],
            "dtype": "bfloat16",
            "vocab_size": p.vocab_size,
            "hidden_size": p.hidden,
            "num_hidden_layers": p.layers,
            "num_attention_heads": p.heads,
            "num_key_value_heads": p.kv_heads,
            "head_dim": p.head_dim,
            "intermediate_size": p.expert_size,
            "shared_intermediate_size": p.shared_size,
            "dense_intermediate_size": p.dense_size,
            **_backbone(p, p.rotary_dim, p.head_dim),
            "bos_token_id": END_OF_TEXT_ID,
            "eos_token_id": END_OF_TEXT_ID,
            "pad_token_id": END_OF_TEXT_ID,
            "num_local_experts": p.experts,
            "num_experts_per_tok": p.experts_per_token,
            "n_shared_experts": 1,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "routed_scaling_factor": 2.0,
            "moe_layer_freq": moe,
            "sparse_attention_config": {
                "use_sparse_attention": True,
                "sparse_index_dim": p.index_dim,
                "sparse_num_index_heads": p.kv_heads,
                "sparse_topk_blocks": p.top_k_blocks,
                "sparse_block_size": p.block_size,
                "sparse_disable_index_value": [1] * p.layers,
                "sparse_score_type": "max",
                "sparse_init_block": 0,
                "sparse_local_block": 1,
                "sparse_attention_freq": [1] * p.layers,
            },
        },
        "quantization_config": {
            "quant_method": "mxfp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [1, 32],
            "ignored_layers": ["lm_head", "model.embed_tokens"]
            + [f"language_model.model.layers.{i}.block_sparse_moe.gate" for i in range(p.layers) if moe[i]],
        },
    }


def drafter_json(p: Preset, *, causal: bool = False, markov: bool = True) -> dict[str, Any]:
    """dspark/config.json of a drafter for the preset's target."""
    return drafter_config(
        target_json(p)["text_config"],
        layers=p.draft_layers,
        mlp_size=p.draft_size,
        block=p.draft_block,
        rank=p.markov_rank if markov else 0,
        window=p.window,
        target_layer_ids=p.target_layer_ids,
        mask_id=MASK_ID,
        causal=causal,
    )


def drafter_config(
    text: dict[str, Any],
    *,
    layers: int,
    mlp_size: int,
    block: int,
    rank: int,
    window: int,
    target_layer_ids: tuple[int, ...],
    mask_id: int,
    causal: bool = False,
) -> dict[str, Any]:
    """dspark/config.json of a drafter whose geometry follows a target's `text_config`."""
    copied = (
        "vocab_size hidden_size num_attention_heads num_key_value_heads head_dim max_position_embeddings rope_theta "
        "rotary_dim partial_rotary_factor rms_norm_eps use_gemma_norm use_qk_norm qk_norm_type attention_output_gate "
        "hidden_act swiglu_alpha swiglu_limit tie_word_embeddings"
    ).split()
    result = {
        "architectures": ["DSparkMiniMaxDraftModel"],
        "model_type": "minimax_m3_vl",
        "torch_dtype": "bfloat16",
        "text_config": {
            "dtype": "bfloat16",
            **{key: text[key] for key in copied if key in text},
            "num_hidden_layers": layers,
            "dense_intermediate_size": mlp_size,
            "moe_layer_freq": [0] * layers,
            "sparse_attention_config": None,
            "layer_types": ["sliding_attention"] * layers,
            "sliding_window": window,
            "dspark_use_dense_ffn": True,
            "dspark_ffn_hidden_size": mlp_size,
            "dspark_block_size": block,
            "dspark_noise_token_id": mask_id,
            "dspark_target_layer_ids": list(target_layer_ids),
            "dspark_markov_rank": rank,
            "dspark_markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": rank > 0,
            "dspark_hybrid_context_fusion": False,
            "dspark_config": {"hybrid_context_fusion": False},
        },
        "quantization_config": {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
    }
    if causal:
        result["text_config"]["is_causal"] = True
    return result


def _backbone(p: Preset, rotary_dim: int, head_dim: int) -> dict[str, Any]:
    return {
        "max_position_embeddings": p.max_context,
        "rope_theta": p.rope_theta,
        "rotary_dim": rotary_dim,
        "partial_rotary_factor": rotary_dim / head_dim,
        "rms_norm_eps": 1e-6,
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "attention_output_gate": False,
        "hidden_act": "swigluoai",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
    }
