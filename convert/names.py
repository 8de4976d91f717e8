"""One table: names of published tensors <-> paths of the parameters of this library.

A tensor name is a module and a suffix (`.weight`, `.weight_scale_inv`, ...). Skipped names are looked up first, on the
whole name: an MTP tensor holds `layers.0` too and must not be read as layer 0 of the model. Every row reads several
spellings (`place`) and writes one of them (`published`).
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

_OUT = "language_model.model."
_OUT_LAYER = _OUT + "layers.{layer}."
_OUT_DRAFT = _OUT + "dspark."
_OUT_DRAFT_LAYER = _OUT_DRAFT + "layers.{layer}.decoder_layer."
_OUT_EXPERT = _OUT_LAYER + "block_sparse_moe.experts.{expert}."

# Module of a tensor as read, module of a parameter, module of a tensor as written.
# Groups: layer, expert (stacked along a new first axis), name.
TARGET_MODULES: tuple[tuple[str, str, str], ...] = (
    (_TARGET + r"embed_tokens", "target/embed_tokens", _OUT + "embed_tokens"),
    (_TARGET + r"norm", "target/norm", _OUT + "norm"),
    (r"(?:language_model\.)?lm_head", "target/lm_head", "language_model.lm_head"),
    (_LAYER + r"input_layernorm", "target/layers/{layer}/input_norm", _OUT_LAYER + "input_layernorm"),
    (
        _LAYER + r"post_attention_layernorm",
        "target/layers/{layer}/post_attention_norm",
        _OUT_LAYER + "post_attention_layernorm",
    ),
    (
        _LAYER + r"self_attn\.(?P<name>[qkvo]_proj|[qk]_norm)",
        "target/layers/{layer}/attention/{name}",
        _OUT_LAYER + "self_attn.{name}",
    ),
    (
        _LAYER + r"self_attn\.index_(?P<name>[qk]_(?:proj|norm))",
        "target/layers/{layer}/attention/indexer/{name}",
        _OUT_LAYER + "self_attn.index_{name}",
    ),
    (
        _LAYER + r"mlp\.(?P<name>(?:gate|up|down)_proj)",
        "target/layers/{layer}/mlp/{name}",
        _OUT_LAYER + "mlp.{name}",
    ),
    (_LAYER + r"block_sparse_moe\.gate", "target/layers/{layer}/moe/router", _OUT_LAYER + "block_sparse_moe.gate"),
    (_LAYER + _EXPERT + r"w1", "target/layers/{layer}/moe/experts/gate_proj", _OUT_EXPERT + "w1"),
    (_LAYER + _EXPERT + r"w3", "target/layers/{layer}/moe/experts/up_proj", _OUT_EXPERT + "w3"),
    (_LAYER + _EXPERT + r"w2", "target/layers/{layer}/moe/experts/down_proj", _OUT_EXPERT + "w2"),
    (
        _LAYER + r"block_sparse_moe\.shared_experts\.(?P<name>(?:gate|up|down)_proj)",
        "target/layers/{layer}/moe/shared_expert/{name}",
        _OUT_LAYER + "block_sparse_moe.shared_experts.{name}",
    ),
)
DRAFTER_MODULES: tuple[tuple[str, str, str], ...] = (
    # A target's drafter has neither; one of its own keeps them without a prefix.
    (r"embed_tokens", "drafter/embed_tokens", "embed_tokens"),
    (r"lm_head", "drafter/lm_head", "lm_head"),
    (_DRAFT + r"fc", "drafter/fc", _OUT_DRAFT + "fc"),
    (_DRAFT + r"hidden_norm", "drafter/hidden_norm", _OUT_DRAFT + "hidden_norm"),
    (_DRAFT + r"(?:final_)?norm", "drafter/norm", _OUT_DRAFT + "final_norm"),
    (_DRAFT_LAYER + r"input_layernorm", "drafter/layers/{layer}/input_norm", _OUT_DRAFT_LAYER + "input_layernorm"),
    (
        _DRAFT_LAYER + r"post_attention_layernorm",
        "drafter/layers/{layer}/post_attention_norm",
        _OUT_DRAFT_LAYER + "post_attention_layernorm",
    ),
    (
        _DRAFT_LAYER + r"self_attn\.(?P<name>[qkvo]_proj|[qk]_norm)",
        "drafter/layers/{layer}/attention/{name}",
        _OUT_DRAFT_LAYER + "self_attn.{name}",
    ),
    (
        _DRAFT_LAYER + r"mlp\.(?P<name>(?:gate|up|down)_proj)",
        "drafter/layers/{layer}/mlp/{name}",
        _OUT_DRAFT_LAYER + "mlp.{name}",
    ),
    (
        _DRAFT + r"(?:markov_head\.)?markov_(?P<name>w[12])",
        "drafter/markov_head/{name}",
        _OUT_DRAFT + "markov_head.markov_{name}",
    ),
    (
        _DRAFT + r"markov_head\.(?P<name>gate_proj|joint_proj)",
        "drafter/markov_head/{name}",
        _OUT_DRAFT + "markov_head.{name}",
    ),
    (
        _DRAFT + r"(?:confidence_head\.proj|confidence_proj)",
        "drafter/confidence_head",
        _OUT_DRAFT + "confidence_head.proj",
    ),
)
# The one parameter whose tensor has no suffix.
_ROUTER_BIAS = re.compile(_LAYER + r"block_sparse_moe\.e_score_correction_bias")
_OUT_ROUTER_BIAS = _OUT_LAYER + "block_sparse_moe.e_score_correction_bias"

_SKIPPED = tuple((re.compile(p), reason) for p, reason in SKIPPED)
_MODULES = {
    part: tuple((re.compile(p), path) for p, path, _ in table)
    for part, table in (("target", TARGET_MODULES), ("drafter", DRAFTER_MODULES))
}
_PATHS = tuple(
    (re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>\\w+)", path)), re.compile(pattern), written)
    for pattern, path, written in (*TARGET_MODULES, *DRAFTER_MODULES)
)


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


def published(path: str, *, expert: int | None = None) -> str:
    """Name of a parameter's tensor as it is written, the inverse of `place`.

    Args:
      path: path of a parameter, `target/layers/3/attention/q_proj/weight`.
      expert: index in a stack of experts.

    Raises:
      ValueError: no published tensor belongs to the path.
    """
    module, _, suffix = path.rpartition("/")
    for pattern, read, written in _PATHS:
        if suffix in ("weight", "bias") and (match := pattern.fullmatch(module)):
            name = written.format(**match.groupdict(), expert=0 if expert is None else expert)
            if not read.fullmatch(name) or (expert is None) == ("{expert}" in written):
                continue
            if module.endswith("/moe/router") and suffix == "bias":
                return _OUT_ROUTER_BIAS.format(**match.groupdict())
            return f"{name}.{suffix}"
    raise ValueError(f"{path} has no name in the published layout")
