"""One table: names of published tensors -> paths of the parameters of this library.

A tensor name is a module and a suffix (`.weight`, `.weight_scale_inv`, ...). Skipped names are looked up first, on the
whole name: an MTP tensor holds `layers.0` too and must not be read as layer 0 of the model.
"""

import dataclasses
import re

# Whole names that a text model does not use, and why.
SKIPPED: tuple[tuple[str, str], ...] = (
    (r"(?:.*\.)?vision_tower\..*", "vision tower: only text is computed"),
    (r"(?:.*\.)?multi_modal_projector\..*", "vision projector: only text is computed"),
    (r"(?:.*\.)?patch_merge_mlp\..*", "vision patch merger: only text is computed"),
    (r"(?:.*\.)?mtp\..*", "multi-token prediction: not part of the model or of its drafter"),
)
# Suffixes of a tensor beside a weight that is not used, and why.
SKIPPED_SUFFIXES = {
    "input_scale": "activation scale: activations are not quantised",
    "input_global_scale": "activation scale: activations are not quantised",
}
SUFFIXES = (
    "weight",
    "weight_scale_inv",
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_global_scale",
    *SKIPPED_SUFFIXES,
    "bias",
)

_TARGET = r"(?:language_model\.)?model\."
_LAYER = _TARGET + r"layers\.(?P<layer>\d{1,6})\."
_DRAFT = r"(?:(?:language_model\.)?model\.dspark\.)?"
_DRAFT_LAYER = _DRAFT + r"layers\.(?P<layer>\d{1,6})\.(?:decoder_layer\.)?"
_EXPERT = r"block_sparse_moe\.experts\.(?P<expert>\d{1,6})\."

# Module of a tensor -> module of a parameter. Groups: layer, expert (stacked along a new first axis), name.
TARGET_MODULES: tuple[tuple[str, str], ...] = (
    (_TARGET + r"embed_tokens", "target/embed_tokens"),
    (_TARGET + r"norm", "target/norm"),
    (r"(?:language_model\.)?lm_head", "target/lm_head"),
    (_LAYER + r"input_layernorm", "target/layers/{layer}/input_norm"),
    (_LAYER + r"post_attention_layernorm", "target/layers/{layer}/post_attention_norm"),
    (_LAYER + r"self_attn\.(?P<name>[qkvo]_proj|[qk]_norm)", "target/layers/{layer}/attention/{name}"),
    (_LAYER + r"self_attn\.index_(?P<name>[qk]_(?:proj|norm))", "target/layers/{layer}/attention/indexer/{name}"),
    (_LAYER + r"mlp\.(?P<name>(?:gate|up|down)_proj)", "target/layers/{layer}/mlp/{name}"),
    (_LAYER + r"block_sparse_moe\.gate", "target/layers/{layer}/moe/router"),
    (_LAYER + _EXPERT + r"w1", "target/layers/{layer}/moe/experts/gate_proj"),
    (_LAYER + _EXPERT + r"w3", "target/layers/{layer}/moe/experts/up_proj"),
    (_LAYER + _EXPERT + r"w2", "target/layers/{layer}/moe/experts/down_proj"),
    (
        _LAYER + r"block_sparse_moe\.shared_experts\.(?P<name>(?:gate|up|down)_proj)",
        "target/layers/{layer}/moe/shared_expert/{name}",
    ),
)
DRAFTER_MODULES: tuple[tuple[str, str], ...] = (
    (r"embed_tokens", "drafter/embed_tokens"),
    (r"lm_head", "drafter/lm_head"),
    (_DRAFT + r"fc", "drafter/fc"),
    (_DRAFT + r"hidden_norm", "drafter/hidden_norm"),
    (_DRAFT + r"(?:final_)?norm", "drafter/norm"),
    (_DRAFT_LAYER + r"input_layernorm", "drafter/layers/{layer}/input_norm"),
    (_DRAFT_LAYER + r"post_attention_layernorm", "drafter/layers/{layer}/post_attention_norm"),
    (_DRAFT_LAYER + r"self_attn\.(?P<name>[qkvo]_proj|[qk]_norm)", "drafter/layers/{layer}/attention/{name}"),
    (_DRAFT_LAYER + r"mlp\.(?P<name>(?:gate|up|down)_proj)", "drafter/layers/{layer}/mlp/{name}"),
    (_DRAFT + r"(?:markov_head\.)?markov_(?P<name>w[12])", "drafter/markov_head/{name}"),
    (_DRAFT + r"markov_head\.(?P<name>gate_proj|joint_proj)", "drafter/markov_head/{name}"),
    (_DRAFT + r"(?:confidence_head\.proj|confidence_proj)", "drafter/confidence_head"),
)
# The one parameter whose tensor has no suffix.
_ROUTER_BIAS = re.compile(_LAYER + r"block_sparse_moe\.e_score_correction_bias")

_SKIPPED = tuple((re.compile(p), reason) for p, reason in SKIPPED)
_MODULES = {
    "target": tuple((re.compile(p), path) for p, path in TARGET_MODULES),
    "drafter": tuple((re.compile(p), path) for p, path in DRAFTER_MODULES),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """Where a tensor goes: module path, suffix, and its index in a stack of experts (None: not stacked)."""

    module: str
    suffix: str
    expert: int | None


def skip_reason(name: str) -> str | None:
    """Why a text model does not use the tensor, or None if it might."""
    return next((reason for pattern, reason in _SKIPPED if pattern.fullmatch(name)), None)


def place(name: str, part: str) -> Placed | None:
    """The parameter that a tensor belongs to, for `part` "target" or "drafter"; None for a name not in the table."""
    if part == "target" and (match := _ROUTER_BIAS.fullmatch(name)):
        return Placed(f"target/layers/{int(match['layer'])}/moe/router", "bias", None)
    module, _, suffix = name.rpartition(".")
    if suffix not in SUFFIXES:
        return None
    for pattern, path in _MODULES[part]:
        if match := pattern.fullmatch(module):
            groups = match.groupdict()
            if groups.get("layer"):
                groups["layer"] = str(int(groups["layer"]))
            expert = groups.get("expert")
            return Placed(path.format(**groups), suffix, None if expert is None else int(expert))
    return None
