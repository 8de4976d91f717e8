"""The parameters that a configuration calls for, path -> shape and kind; every tensor is checked against them."""

import dataclasses
from typing import Literal

from dspark_jax.config import DrafterConfig, TargetConfig

# linear: [out, in], may be quantised; plain: bf16; wide: f32 (bf16 in a source is widened).
Kind = Literal["linear", "plain", "wide"]


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """Logical shape (a stack of experts: [E, out, in]) and kind of one parameter."""

    shape: tuple[int, ...]
    kind: Kind


def _glu(hidden: int, inner: int) -> dict[str, Parameter]:
    return {
        "gate_proj": Parameter((inner, hidden), "linear"),
        "up_proj": Parameter((inner, hidden), "linear"),
        "down_proj": Parameter((hidden, inner), "linear"),
    }


def _attention(hidden: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Parameter]:
    return {
        "q_proj": Parameter((heads * head_dim, hidden), "linear"),
        "k_proj": Parameter((kv_heads * head_dim, hidden), "linear"),
        "v_proj": Parameter((kv_heads * head_dim, hidden), "linear"),
        "o_proj": Parameter((hidden, heads * head_dim), "linear"),
        "q_norm": Parameter((head_dim,), "plain"),
        "k_norm": Parameter((head_dim,), "plain"),
    }


def target_parameters(config: TargetConfig) -> dict[str, Parameter]:
    """Every parameter of a target model, in the order in which they are written."""
    c, h = config, config.hidden_size
    result = {"target/embed_tokens/weight": Parameter((c.vocab_size, h), "plain")}

    def add(prefix: str, modules: dict[str, Parameter]) -> None:
        result.update({f"{prefix}/{name}/weight": p for name, p in modules.items()})

    for i in range(c.num_layers):
        layer = f"target/layers/{i}"
        add(layer, {"input_norm": Parameter((h,), "plain"), "post_attention_norm": Parameter((h,), "plain")})
        add(f"{layer}/attention", _attention(h, c.num_heads, c.num_kv_heads, c.head_dim))
        if c.sparse_layers[i]:
            index = {
                "q_proj": Parameter((c.index_heads * c.index_head_dim, h), "linear"),
                "k_proj": Parameter((c.index_head_dim, h), "linear"),
                "q_norm": Parameter((c.index_head_dim,), "plain"),
                "k_norm": Parameter((c.index_head_dim,), "plain"),
            }
            add(f"{layer}/attention/indexer", index)
        if not c.moe_layers[i]:
            add(f"{layer}/mlp", _glu(h, c.dense_mlp_size))
            continue
        result[f"{layer}/moe/router/weight"] = Parameter((c.num_experts, h), "wide")
        result[f"{layer}/moe/router/bias"] = Parameter((c.num_experts,), "wide")
        add(f"{layer}/moe/shared_expert", _glu(h, c.shared_mlp_size))
        stacked = {n: Parameter((c.num_experts, *p.shape), p.kind) for n, p in _glu(h, c.expert_mlp_size).items()}
        add(f"{layer}/moe/experts", stacked)
    result["target/norm/weight"] = Parameter((h,), "plain")
    result["target/lm_head/weight"] = Parameter((c.vocab_size, h), "linear")
    return result


def drafter_parameters(config: DrafterConfig) -> dict[str, Parameter]:
    """Every parameter of a drafter, in the order in which they are written."""
    c, h, rank = config, config.hidden_size, config.markov_rank
    result: dict[str, Parameter] = {}

    def add(prefix: str, modules: dict[str, Parameter]) -> None:
        result.update({f"{prefix}/{name}/weight": p for name, p in modules.items()})

    if c.own_embeddings:
        table = (c.vocab_size, h)
        add("drafter", {"embed_tokens": Parameter(table, "plain"), "lm_head": Parameter(table, "linear")})
    add("drafter", {"fc": Parameter((h, len(c.target_layer_ids) * h), "linear")})
    add("drafter", {"hidden_norm": Parameter((h,), "plain"), "norm": Parameter((h,), "plain")})
    for i in range(c.num_layers):
        layer = f"drafter/layers/{i}"
        add(layer, {"input_norm": Parameter((h,), "plain"), "post_attention_norm": Parameter((h,), "plain")})
        add(f"{layer}/attention", _attention(h, c.num_heads, c.num_kv_heads, c.head_dim))
        add(f"{layer}/mlp", _glu(h, c.mlp_size))
    if c.markov_type:
        head = "drafter/markov_head"
        table = (c.vocab_size, rank)
        add(head, {"w1": Parameter(table, "plain"), "w2": Parameter(table, "plain")})
        extra = {
            "gated": ("gate_proj", (rank, h + rank)),
            "rnn": ("joint_proj", (3 * rank, h + 2 * rank)),
        }.get(c.markov_type)
        if extra:
            name, shape = extra
            result[f"{head}/{name}/weight"] = Parameter(shape, "plain")
            result[f"{head}/{name}/bias"] = Parameter(shape[:1], "plain")
    if c.confidence_head:
        inputs = h + (rank if c.confidence_with_markov else 0)
        result["drafter/confidence_head/weight"] = Parameter((1, inputs), "plain")
        result["drafter/confidence_head/bias"] = Parameter((1,), "plain")
    return result
