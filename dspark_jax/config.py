"""Model configurations, built from the `config.json` of a checkpoint.

Hugging Face key names appear here and in the reader beside it, nowhere else. Nothing that would change the answer has a
default: a missing key, an unknown key or a value that the library does not implement raises `ConfigError` with the
key's name, because engines differ in what they assume for an absent key.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dspark_jax import _hf_config as hf
from dspark_jax._hf_config import ConfigError

__all__ = [
    "DRAFTER_ARCHITECTURES",
    "MARKOV_TYPES",
    "TARGET_ARCHITECTURES",
    "ConfigError",
    "DrafterConfig",
    "TargetConfig",
]

TARGET_ARCHITECTURES = (
    "MiniMaxM3SparseForConditionalGeneration",
    "MiniMaxM3SparseForCausalLM",
    "MiniMaxM3VLForCausalLM",
)
MINIMAX_DRAFTER = "DSparkMiniMaxDraftModel"
QWEN3_DRAFTER = "Qwen3DSparkModel"
DRAFTER_ARCHITECTURES = (MINIMAX_DRAFTER, QWEN3_DRAFTER)
MARKOV_TYPES = ("vanilla", "gated", "rnn")

# The published configs name neither; the published tokenizer fixes both.
_MINIMAX_EOS, _MINIMAX_PAD = 200020, 200000


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Geometry and constants of a MiniMax-M3 / M3.1-Flash text backbone.

    Attributes:
      vocab_size: rows of the embedding and of the head (V).
      hidden_size: width of the residual stream (H).
      num_layers: decoder layers.
      num_heads, num_kv_heads, head_dim: query heads, key/value heads, size of one head (Hq, Hkv, D).
      rotary_dim, rope_theta: leading dims of a head that rotate (NeoX halves), and the base of their frequencies.
      norm_eps: epsilon inside the root of every norm.
      dense_mlp_size, expert_mlp_size, shared_mlp_size: inner sizes of a dense MLP, a routed and the shared expert.
      num_experts, num_experts_per_token, routed_scaling: routed experts, how many a token takes, factor on their sum.
      swiglu_alpha, swiglu_limit: constants of the clamped SwiGLU.
      moe_layers: per layer, whether the feed-forward part is a mixture of experts.
      sparse_layers: per layer, whether attention is block-sparse (the layer carries an indexer).
      index_heads, index_head_dim: index query heads (one per KV head) and their size.
      block_size, top_k_blocks: keys in a block, blocks that a query keeps (its own block is one of them).
      max_context: longest sequence, in tokens.
      eos_token_ids: tokens that end a generation unless the caller says otherwise.
      pad_token_id: fills rows behind their end.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    norm_eps: float
    dense_mlp_size: int
    expert_mlp_size: int
    shared_mlp_size: int
    num_experts: int
    num_experts_per_token: int
    routed_scaling: float
    swiglu_alpha: float
    swiglu_limit: float
    moe_layers: tuple[bool, ...]
    sparse_layers: tuple[bool, ...]
    index_heads: int
    index_head_dim: int
    block_size: int
    top_k_blocks: int
    max_context: int
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0

    def __post_init__(self):
        for name in ("moe_layers", "sparse_layers"):
            if len(getattr(self, name)) != self.num_layers:
                raise ConfigError(f"{name} has {len(getattr(self, name))} entries for {self.num_layers} layers")
        if any(self.sparse_layers) and self.index_heads != self.num_kv_heads:
            raise ConfigError(
                f"index_heads {self.index_heads} must equal num_kv_heads {self.num_kv_heads}: "
                "each index head selects for one KV head"
            )
        if any(self.sparse_layers) and self.rotary_dim > self.index_head_dim:
            raise ConfigError(f"rotary_dim {self.rotary_dim} exceeds index_head_dim {self.index_head_dim}")
        if any(self.moe_layers) and self.num_experts_per_token > self.num_experts:
            raise ConfigError(
                f"num_experts_per_token {self.num_experts_per_token} exceeds num_experts {self.num_experts}"
            )
        for token in (*self.eos_token_ids, self.pad_token_id):
            if token >= self.vocab_size:
                raise ConfigError(f"token id {token} lies outside the vocabulary of {self.vocab_size}")

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        *,
        generation_config: Mapping[str, Any] | None = None,
        sparse_layers: tuple[bool, ...] | None = None,
        ignore: Sequence[str] = (),
    ) -> "TargetConfig":
        """From the parsed `config.json` of a MiniMax-M3 / M3.1-Flash checkpoint (nested under `text_config` or flat).

        Args:
          config: the parsed `config.json`.
          generation_config: the parsed `generation_config.json`, which wins for the end-of-sequence ids.
          sparse_layers: per layer, whether the checkpoint really holds an indexer; must agree with the config.
          ignore: unknown keys to accept.

        Raises:
          ConfigError: a key is missing, unknown, contradictory, or asks for something that is not implemented.
        """
        r = hf.Reader(config, "config.json")
        hf.architecture(r, TARGET_ARCHITECTURES)
        layers = r.size("num_hidden_layers")
        heads, kv_heads, head_dim = hf.heads(r)
        alpha, limit = hf.minimax_switches(r)
        rotary_dim, theta = hf.rope(r, head_dim)
        moe = hf.moe_layers(r, layers)
        r.expect("scoring_func", ("sigmoid",))
        r.expect("use_routing_bias", (True,))
        r.expect("n_shared_experts", (1,))
        sparse, index = hf.sparse_attention(r, layers, kv_heads)
        if sparse_layers is not None and len(sparse_layers) != layers:
            raise ConfigError(f"the checkpoint describes {len(sparse_layers)} layers, config.json {layers}")
        if sparse_layers is not None and sparse_layers != sparse:
            odd = next(i for i, (a, b) in enumerate(zip(sparse_layers, sparse, strict=True)) if a != b)
            found = "has" if sparse_layers[odd] else "has no"
            raise ConfigError(
                f"config.json: sparse_attention_freq says {int(sparse[odd])} for layer {odd}, but the checkpoint "
                f"{found} index_q_proj there; correct the config or the checkpoint"
            )
        vocab = r.size("vocab_size")
        generation_config = generation_config or {}
        if not isinstance(generation_config, Mapping):
            raise ConfigError(f"generation_config.json: expected an object, found {type(generation_config).__name__}")
        eos = r.get("eos_token_id", (int, list), None)
        eos_ids = hf.token_ids(generation_config.get("eos_token_id", eos), "eos_token_id")
        if not eos_ids and vocab > _MINIMAX_EOS:
            eos_ids = (_MINIMAX_EOS,)
        pad = r.fields.get("pad_token_id", r.top.get("pad_token_id"))
        pad_ids = hf.token_ids(pad, "pad_token_id")
        result = cls(
            vocab_size=vocab,
            hidden_size=r.size("hidden_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            rope_theta=theta,
            norm_eps=r.number("rms_norm_eps"),
            dense_mlp_size=r.size("dense_intermediate_size"),
            expert_mlp_size=r.size("intermediate_size"),
            shared_mlp_size=r.size("shared_intermediate_size"),
            num_experts=r.size("num_local_experts"),
            num_experts_per_token=r.size("num_experts_per_tok"),
            routed_scaling=r.number("routed_scaling_factor"),
            swiglu_alpha=alpha,
            swiglu_limit=limit,
            moe_layers=moe,
            sparse_layers=sparse,
            max_context=r.size("max_position_embeddings"),
            eos_token_ids=eos_ids,
            pad_token_id=pad_ids[0] if pad_ids else _MINIMAX_PAD if vocab > _MINIMAX_PAD else 0,
            **index,
        )
        r.finish(ignore)
        return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Geometry and constants of a DSpark drafter.

    Attributes:
      architecture: one of `DRAFTER_ARCHITECTURES`; decides norms (Gemma or plain), activation and own embeddings.
      vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim: as in `TargetConfig`.
      rotary_dim, rope_theta, norm_eps, mlp_size: as in `TargetConfig`; the drafter has its own.
      swiglu_alpha, swiglu_limit: constants of the clamped SwiGLU; None where the MLP is a plain SiLU-GLU.
      block_size: slots of a block, which is the largest number of drafts of one step (K).
      mask_token_id: the token that fills the block behind the anchor.
      target_layer_ids: target layers whose output residual streams are the drafter's features, ascending.
      markov_type, markov_rank: head that biases a draft by the token before it; (None, 0) without one.
      confidence_head, confidence_with_markov: whether there is one, and whether it reads the Markov embedding.
      window: two-sided attention window in tokens (a query sees keys less than `window` away), or None.
      causal: whether a block's slot sees only itself and earlier slots.
      max_context: longest sequence, in tokens.
      quantized: whether the checkpoint's weights are quantised: a drafter must then be built with their formats.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    norm_eps: float
    mlp_size: int
    swiglu_alpha: float | None
    swiglu_limit: float | None
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_type: str | None
    markov_rank: int
    confidence_head: bool
    confidence_with_markov: bool
    window: int | None
    causal: bool
    max_context: int
    quantized: bool = False

    def __post_init__(self):
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(
                f"mask token id {self.mask_token_id} lies outside the vocabulary of {self.vocab_size}; "
                "an embedding look-up would clamp it to another token"
            )
        if self.block_size < 1 or self.markov_rank < 0:
            raise ConfigError(
                f"block_size must be at least 1 and markov_rank not negative, found {self.block_size} and "
                f"{self.markov_rank}"
            )
        if (self.markov_type is None) != (self.markov_rank == 0):
            raise ConfigError(f"Markov head of type {self.markov_type!r} cannot have rank {self.markov_rank}")
        if self.markov_type not in (None, *MARKOV_TYPES):
            raise ConfigError(f"Markov head type {self.markov_type!r} is unknown; known: {', '.join(MARKOV_TYPES)}")
        if self.confidence_with_markov and not (self.confidence_head and self.markov_type):
            raise ConfigError("confidence_with_markov needs a confidence head and a Markov head")
        ids = self.target_layer_ids
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0:
            raise ConfigError(f"target layer ids must be ascending, distinct and not negative, found {list(ids)}")

    @property
    def gemma_norm(self) -> bool:
        """Whether norms scale by 1 + w."""
        return self.architecture == MINIMAX_DRAFTER

    @property
    def own_embeddings(self) -> bool:
        """Whether the checkpoint of the drafter holds an embedding and a head of its own."""
        return self.architecture == QWEN3_DRAFTER

    def check_target(self, target: TargetConfig) -> None:
        """Raise `ConfigError` if this drafter cannot draft for `target`."""
        for name in ("hidden_size", "vocab_size"):
            ours, theirs = getattr(self, name), getattr(target, name)
            if ours != theirs:
                raise ConfigError(
                    f"{name} of the drafter is {ours} but that of the target is {theirs}; use its own drafter"
                )
        if self.target_layer_ids[-1] >= target.num_layers:
            raise ConfigError(
                f"the drafter reads target layer {self.target_layer_ids[-1]}, but the target has layers "
                f"0..{target.num_layers - 1}; use the drafter of this target"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, ignore: Sequence[str] = ()) -> "DrafterConfig":
        """From the parsed `config.json` of a drafter: nested or flat, MiniMax or DeepSpec (`Qwen3DSparkModel`) layout.

        Raises:
          ConfigError: a key is missing, unknown, contradictory, or asks for something that is not implemented.
        """
        r = hf.Reader(config, "dspark/config.json")
        architecture = hf.architecture(r, DRAFTER_ARCHITECTURES)
        minimax = architecture == MINIMAX_DRAFTER
        layers = r.size("num_hidden_layers")
        heads, kv_heads, head_dim = hf.heads(r)
        alpha = limit = None
        if minimax:
            alpha, limit = hf.minimax_switches(r)
            r.expect("dspark_use_dense_ffn", (True,), True)
            r.expect("sparse_attention_config", (None,), None)
            if any(r.flags("moe_layer_freq", layers)):
                raise ConfigError(
                    f"{r.name}: moe_layer_freq must be all zeros: drafters with experts are not implemented"
                )
            mlp_size = r.size("dense_intermediate_size")
            r.expect("dspark_ffn_hidden_size", (mlp_size,), mlp_size)
        else:
            r.expect("hidden_act", ("silu",))
            r.expect("attention_bias", (False,), False)
            r.expect("tie_word_embeddings", (False,), False)
            mlp_size = r.size("intermediate_size")
        rotary_dim, theta = hf.rope(r, head_dim, full=not minimax)
        window, causal = hf.draft_window(r, layers)
        d = hf.DraftReader(r)
        d.expect("hybrid_context_fusion", (False,), False)
        rank = d.get("markov_rank", int, 0)
        markov_type = d.get("markov_head_type", str, "vanilla")
        confidence = d.get("enable_confidence_head", bool, d.get("use_confidence_head", bool, False))
        with_markov = d.get("confidence_head_with_markov", bool, False)
        target_layer_ids = d.get("target_layer_ids", list)
        hf.token_ids(target_layer_ids, "target_layer_ids")
        result = cls(
            architecture=architecture,
            vocab_size=r.size("vocab_size"),
            hidden_size=r.size("hidden_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            rope_theta=theta,
            norm_eps=r.number("rms_norm_eps"),
            mlp_size=mlp_size,
            swiglu_alpha=alpha,
            swiglu_limit=limit,
            block_size=d.get("block_size", int),
            mask_token_id=d.get("noise_token_id" if d.has("noise_token_id") else "mask_token_id", int),
            target_layer_ids=tuple(target_layer_ids),
            markov_type=markov_type if rank else None,
            markov_rank=rank,
            confidence_head=confidence,
            confidence_with_markov=confidence and with_markov,
            window=window,
            causal=causal,
            max_context=r.size("max_position_embeddings"),
            quantized=r.has("quantization_config"),
        )
        r.finish((*hf.DRAFT_INERT, *ignore))
        return result
