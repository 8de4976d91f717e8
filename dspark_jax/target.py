"""The MiniMax-M3 / M3.1-Flash text backbone: one forward for prefill and for a step of any number of tokens."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dspark_jax import formats
from dspark_jax.attention import Attention, LayerCache
from dspark_jax.cache import TargetCache
from dspark_jax.config import TargetConfig
from dspark_jax.formats import Leaf
from dspark_jax.kernels import Kernels
from dspark_jax.layers import Format, GemmaRMSNorm, Scope, SwigluMLP
from dspark_jax.moe import MoE

LogitsAt = Literal["all", "last", "none"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRecord:
    """What one layer chose, for tests and studies.

    Attributes:
      blocks: int32 [B, T, Hkv, top_k], key blocks of each query and KV head, best first, -1 unused; None if not sparse.
      experts, expert_weights: int32 and float32 [B, T, k], before the routed scaling; None in a dense layer.
    """

    blocks: Leaf | None
    experts: Leaf | None
    expert_weights: Leaf | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetOutput:
    """Result of a forward.

    Attributes:
      logits: float32 [B, T, V], or [B, 1, V] of each row's last token, or None, as asked for.
      hidden: [B, T, H] after the final norm.
      cache: the cache with this call's tokens written.
      features: per captured layer [B, T, H], the raw residual stream behind it (the last layer's too: no final norm).
      records: one `LayerRecord` a layer.
    """

    logits: Leaf | None
    hidden: Leaf
    cache: TargetCache
    features: tuple[Leaf, ...]
    records: tuple[LayerRecord, ...]


class Embedding(nnx.Module):
    """A table [V, H]: looked up as an embedding, or multiplied as a head."""

    def __init__(self, scope: Scope, vocab_size: int, hidden_size: int):
        self.weight = scope.param("weight", (vocab_size, hidden_size), ("vocab", "embed"), scale=hidden_size**-0.5)

    def lookup(self, tokens: Int[Array, "B T"], dtype) -> Float[Array, "B T H"]:
        """Rows of the table, unscaled."""
        return self.weight.get_value()[tokens].astype(dtype)

    def logits(self, hidden: Float[Array, "*batch H"]) -> Float[Array, "*batch V"]:
        """hidden · table^T with float32 accumulation, in float32."""
        weight = formats.dequantize(self.weight.get_value(), hidden.dtype)
        return jnp.einsum(
            "...h,vh->...v",
            hidden,
            weight,
            preferred_element_type=jnp.float32,
            precision=formats.precision(hidden.dtype),
        )


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, scope: Scope, config: TargetConfig, *, sparse: bool, moe: bool):
        self.input_norm = GemmaRMSNorm(scope / "input_norm", config.hidden_size, config.norm_eps)
        self.attention = Attention(scope / "attention", config, sparse=sparse)
        self.post_attention_norm = GemmaRMSNorm(scope / "post_attention_norm", config.hidden_size, config.norm_eps)
        self.is_moe = moe
        if moe:
            self.moe = MoE(scope / "moe", config)
        else:
            self.mlp = _dense_mlp(scope / "mlp", config)

    def __call__(
        self, x: Float[Array, "B T H"], positions: Int[Array, "B T"], cache: LayerCache
    ) -> tuple[Float[Array, "B T H"], LayerCache, LayerRecord]:
        attended, cache, blocks = self.attention(self.input_norm(x), positions, cache)
        x = x + attended
        normed = self.post_attention_norm(x)
        experts = weights = None
        if self.is_moe:
            fed, experts, weights = self.moe(normed, positions)
        else:
            fed = self.mlp(normed)
        return x + fed, cache, LayerRecord(blocks=blocks, experts=experts, expert_weights=weights)


def _dense_mlp(scope: Scope, config: TargetConfig) -> SwigluMLP:
    alpha, limit = config.swiglu_alpha, config.swiglu_limit
    return SwigluMLP(scope, config.hidden_size, config.dense_mlp_size, alpha=alpha, limit=limit)


class MiniMaxTarget(nnx.Module):
    """The target model. A pytree: pass it to `jax.jit` as any argument; nothing in it changes in a forward.

    Architecture: MiniMax-M3 (`MiniMaxM3SparseForConditionalGeneration`), text part, checked against transformers 5.24.

    Args:
      config: geometry and constants.
      formats: storage format by parameter path ("target/..."); bf16 where nothing is said.
      key: random weights from it; without one the weights are zeros.
      compute_dtype: dtype of activations and caches. Router, norms, softmax and logits are float32 in any case.
      kernels: what the work goes through; the best on the device by default.
    """

    def __init__(
        self,
        config: TargetConfig,
        *,
        formats: Mapping[str, Format] | None = None,
        key: jax.Array | None = None,
        compute_dtype=jnp.bfloat16,
        kernels: Kernels | None = None,
    ):
        router: dict[str, Format] = {
            f"target/layers/{i}/moe/router/{name}": "f32"
            for i, moe in enumerate(config.moe_layers)
            if moe
            for name in ("weight", "bias")
        }
        scope = Scope("target", {**router, **(formats or {})}, key, kernels or Kernels())
        self.embed_tokens = Embedding(scope / "embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = nnx.List(
            DecoderLayer(scope / "layers" / i, config, sparse=sparse, moe=moe)
            for i, (sparse, moe) in enumerate(zip(config.sparse_layers, config.moe_layers, strict=True))
        )
        self.norm = GemmaRMSNorm(scope / "norm", config.hidden_size, config.norm_eps)
        self.lm_head = Embedding(scope / "lm_head", config.vocab_size, config.hidden_size)
        self.config = config
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.kernels = scope.kernels

    def make_cache(self, batch: int, capacity: int) -> TargetCache:
        """An empty cache for `batch` rows of `capacity` tokens in the compute dtype."""
        return TargetCache.zeros(self.config, batch, capacity, self.compute_dtype)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: TargetCache,
        *,
        capture: tuple[int, ...] = (),
        logits: LogitsAt = "all",
    ) -> TargetOutput:
        """Run T tokens of each row through the model.

        Args:
          tokens: int32 [B, T], ids inside the vocabulary.
          positions: int32 [B, T], absolute position of each token, consecutive in a row; -1 marks padding, which
            writes nothing, routes nowhere and has a meaningless output. Positions past the cache's end are not written.
          cache: keys and values of all earlier positions.
          capture: layers (0-based, ascending) whose output residual stream is wanted.
          logits: for which tokens to compute logits; "last" is the last one of each row that is not padding.

        Raises:
          ValueError: a captured layer does not exist.
        """
        c = self.config
        if any(not 0 <= i < c.num_layers for i in capture):
            raise ValueError(f"capture {capture} names a layer outside 0..{c.num_layers - 1}")
        with jax.named_scope("embed"):
            x = self.embed_tokens.lookup(tokens, self.compute_dtype)
        caches, features, records = [], {}, []
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{i}"):
                old = LayerCache(keys=cache.keys[i], values=cache.values[i], index_keys=cache.index_keys[i])
                x, new, record = layer(x, positions, old)
            caches.append(new)
            records.append(record)
            features[i] = x
        with jax.named_scope("head"):
            hidden = self.norm(x)
            wanted = None
            if logits == "all":
                wanted = self.lm_head.logits(hidden)
            elif logits == "last":
                wanted = self.lm_head.logits(last_row(hidden, positions))
        return TargetOutput(
            logits=wanted,
            hidden=hidden,
            cache=TargetCache(
                keys=tuple(c.keys for c in caches),
                values=tuple(c.values for c in caches),
                index_keys=tuple(c.index_keys for c in caches),
            ),
            features=tuple(features[i] for i in capture),
            records=tuple(records),
        )


def last_row(x: Float[Array, "B T H"], positions: Int[Array, "B T"]) -> Float[Array, "B 1 H"]:
    """Row of the last token that is not padding (of the first token where all are)."""
    last = jnp.argmax(positions, axis=1).astype(jnp.int32)
    return jnp.take_along_axis(x, last[:, None, None], axis=1)


def token_positions(start: Int[Array, " B"], lengths: Int[Array, " B"], tokens: int) -> Int[Array, "B T"]:
    """Positions start .. start + length - 1 of each row, then -1 up to `tokens` columns."""
    offset = jnp.arange(tokens, dtype=jnp.int32)[None, :]
    return jnp.where(offset < lengths[:, None], start[:, None] + offset, -1)
