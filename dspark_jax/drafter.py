"""The DSpark drafter: target features become context keys and values, and one forward drafts a whole block.

The drafter never runs over the context. A committed token leaves one key and one value in every layer, projected
straight from the target's residual streams; the block [anchor, mask, mask, ...] attends to these and to itself.

Sources: DSpark (DeepSpec); DFlash for the context projection and the block.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from dspark_jax.cache import DraftCache
from dspark_jax.config import ConfigError, DrafterConfig
from dspark_jax.heads import ConfidenceHead, make_markov_head
from dspark_jax.kernels import Kernels
from dspark_jax.layers import Format, GemmaRMSNorm, Linear, RMSNorm, Scope, SwigluMLP, project, rotate
from dspark_jax.rotation import rotate_together
from dspark_jax.target import Embedding
from pallas_kernels import block_attention, merge_future_block, windowed_decode

Lowering = Literal["one_pass", "decode_merge"]
"""How the attention of a block is computed. Both give the same result.

"one_pass": `block_attention` reads the context from the cache and the block's keys from the arguments.
"decode_merge": the block's keys go into a copy of the cache, a causal `windowed_decode` reads it, and
`merge_future_block` adds the later keys of the block. Engines whose kernels window only causal attention do this.
"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockOutput:
    """Result of a block forward.

    Attributes:
      hidden: [B, K, H] after the final norm; the heads read it.
      base_logits: float32 [B, K, V], before the Markov bias. Slot j is about the token at position p0 + j + 1.
    """

    hidden: jax.Array
    base_logits: jax.Array


class SiluMLP(nnx.Module):
    """down(silu(gate(x)) · up(x)), the activation in float32."""

    def __init__(self, scope: Scope, hidden_size: int, size: int):
        self.gate_proj = Linear(scope / "gate_proj", size, hidden_size, ("mlp", "embed"))
        self.up_proj = Linear(scope / "up_proj", size, hidden_size, ("mlp", "embed"))
        self.down_proj = Linear(scope / "down_proj", hidden_size, size, ("embed", "mlp"))

    def __call__(self, x: Float[Array, "*batch H"]) -> Float[Array, "*batch H"]:
        gate, up = (a.astype(jnp.float32) for a in project(x, self.gate_proj, self.up_proj))
        return self.down_proj((jax.nn.silu(gate) * up).astype(x.dtype))


def _norm(scope: Scope, size: int, config: DrafterConfig) -> GemmaRMSNorm | RMSNorm:
    return (GemmaRMSNorm if config.gemma_norm else RMSNorm)(scope, size, config.norm_eps)


class DraftAttention(nnx.Module):
    """Attention of one drafter layer: queries of the block, keys of the context and of the block."""

    def __init__(self, scope: Scope, config: DrafterConfig):
        h, d = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_heads * d, config.num_kv_heads * d
        self.q_proj = Linear(scope / "q_proj", q_size, h, ("heads", "embed"))
        self.k_proj = Linear(scope / "k_proj", kv_size, h, ("kv_heads", "embed"))
        self.v_proj = Linear(scope / "v_proj", kv_size, h, ("kv_heads", "embed"))
        self.o_proj = Linear(scope / "o_proj", h, q_size, ("embed", "heads"))
        self.q_norm = _norm(scope / "q_norm", d, config)
        self.k_norm = _norm(scope / "k_norm", d, config)
        self.kernels = scope.kernels
        self.config = config

    def _heads(
        self, x: Float[Array, "B T size"], norm: GemmaRMSNorm | RMSNorm, positions: Int[Array, "B T"]
    ) -> Float[Array, "B T N D"]:
        c = self.config
        # float32 from the norm to the end of the rotation, rounded once.
        normed = norm(x.reshape(*x.shape[:2], -1, c.head_dim), jnp.float32)
        return rotate(normed, positions, rotary_dim=c.rotary_dim, theta=c.rope_theta).astype(x.dtype)

    def keys_values(
        self, k: Float[Array, "B T size"], v: Float[Array, "B T size"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T Hkv D"], Float[Array, "B T Hkv D"]]:
        """Keys, normed and rotated, and values, from k_proj and v_proj of context vectors or block tokens."""
        v = v.reshape(*v.shape[:2], self.config.num_kv_heads, self.config.head_dim)
        return self._heads(k, self.k_norm, positions), v

    def __call__(
        self,
        x: Float[Array, "B K H"],
        positions: Int[Array, "B K"],
        cache: DraftCache,
        layer: int,
        *,
        lowering: Lowering,
        implementation: str | None,
    ) -> Float[Array, "B K H"]:
        c = self.config
        projected = q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj)
        places = ((self.q_norm, None), (self.k_norm, None), (None, None))
        together = rotate_together(self.kernels, projected, places, positions, c, plus_one=c.gemma_norm)
        if together is None:
            q = self._heads(q, self.q_norm, positions)
            k, v = self.keys_values(k, v, positions)
        else:
            q, k, v = together
        start = positions[:, 0]
        keys, values = cache.keys[layer], cache.values[layer]
        if lowering == "decode_merge":
            keys, values = cache.write_layer(layer, k, v, positions)
        pages = (cache.as_pages(keys), cache.as_pages(values), cache.page_table)
        if lowering == "one_pass":
            out, _ = block_attention(
                q, k, v, *pages, start, window=c.window, causal=c.causal, implementation=implementation
            )
        else:
            end = start + jnp.int32(q.shape[1])
            out, lse = windowed_decode(q, *pages, start, end, window=c.window, implementation=implementation)
            if not c.causal:
                out, _ = merge_future_block(out, lse, q, k, v, window=c.window, implementation=implementation)
        return self.o_proj(out.reshape(*x.shape[:2], -1))


class DraftLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), over the tokens of a block."""

    def __init__(self, scope: Scope, config: DrafterConfig):
        h, f = config.hidden_size, config.mlp_size
        self.input_norm = _norm(scope / "input_norm", h, config)
        self.attention = DraftAttention(scope / "attention", config)
        self.post_attention_norm = _norm(scope / "post_attention_norm", h, config)
        alpha, limit = config.swiglu_alpha, config.swiglu_limit
        if alpha is None or limit is None:
            self.mlp = SiluMLP(scope / "mlp", h, f)
        else:
            self.mlp = SwigluMLP(scope / "mlp", h, f, alpha=alpha, limit=limit)

    def __call__(
        self,
        x: Float[Array, "B K H"],
        positions: Int[Array, "B K"],
        cache: DraftCache,
        layer: int,
        *,
        lowering: Lowering,
        implementation: str | None,
    ) -> Float[Array, "B K H"]:
        normed = self.input_norm(x)
        x = x + self.attention(normed, positions, cache, layer, lowering=lowering, implementation=implementation)
        return x + self.mlp(self.post_attention_norm(x))


class DSparkDrafter(nnx.Module):
    """The drafter. A pytree: pass it to `jax.jit` as any argument; nothing in it changes in a forward.

    Architectures: `DSparkMiniMaxDraftModel` (Gemma norms, partial RoPE, clamped SwiGLU, embedding and head of the
    target) and `Qwen3DSparkModel` (plain norms, full RoPE, SiLU-GLU, an embedding and a head of its own).

    Attributes:
      markov_head: a `dspark_jax.heads.MarkovHead`, or `NoMarkov`, which biases nothing.
      confidence_head: a `dspark_jax.heads.ConfidenceHead`, or None.
      embed_tokens, lm_head: its own `Embedding`s, or None where it uses the target's.

    Args:
      config: geometry and constants.
      formats: storage format by parameter path ("drafter/..."); bf16 where nothing is said. A config of a quantised
        checkpoint needs it.
      key: random weights from it; without one the weights are zeros.
      compute_dtype: dtype of activations and cache. Norms, rotation, softmax, heads and logits are float32 in any case.
      kernels: what the work goes through; the best on the device by default.

    Raises:
      ConfigError: the config is of a quantised checkpoint and there are no formats.
    """

    def __init__(
        self,
        config: DrafterConfig,
        *,
        formats: Mapping[str, Format] | None = None,
        key: jax.Array | None = None,
        compute_dtype=jnp.bfloat16,
        kernels: Kernels | None = None,
    ):
        if config.quantized and formats is None:
            raise ConfigError(
                "the drafter's config has a quantization_config, so its weights are not bf16: load it with "
                "load_drafter, or give formats (an empty one builds it in bf16)"
            )
        h = config.hidden_size
        scope = Scope("drafter", formats or {}, key, kernels or Kernels())
        own = config.own_embeddings
        self.fc = Linear(scope / "fc", h, len(config.target_layer_ids) * h, ("embed", "features"))
        self.hidden_norm = _norm(scope / "hidden_norm", h, config)
        self.layers = nnx.List(DraftLayer(scope / "layers" / i, config) for i in range(config.num_layers))
        self.norm = _norm(scope / "norm", h, config)
        self.markov_head = make_markov_head(scope / "markov_head", config)
        self.confidence_head = ConfidenceHead(scope / "confidence_head", config) if config.confidence_head else None
        self.embed_tokens = Embedding(scope / "embed_tokens", config.vocab_size, h) if own else None
        self.lm_head = Embedding(scope / "lm_head", config.vocab_size, h) if own else None
        self.config = config
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.kernels = scope.kernels

    def make_cache(self, batch: int, capacity: int | None = None) -> DraftCache:
        """An empty cache for `batch` rows in the compute dtype.

        `capacity` is the longest context in tokens; with a window it may be left out and changes nothing.
        """
        return DraftCache.zeros(self.config, batch, capacity, self.compute_dtype)

    def write_context(
        self,
        features: Float[Array, "B T features"] | Sequence[Float[Array, "B T H"]],
        positions: Int[Array, "B T"],
        cache: DraftCache,
    ) -> DraftCache:
        """Store context keys and values of T tokens of each row.

        Of more than R tokens (R slots in the ring) only the last R of each row are projected and written.

        Args:
          features: the target's residual streams behind `config.target_layer_ids`, in that order: one array a layer, or
            concatenated along the last axis.
          positions: int32 [B, T], absolute positions, consecutive in a row; -1 marks padding and rejected tokens, at
            either end of a row, which are dropped.
          cache: what was written before.

        Raises:
          ValueError: the features do not have the width that the drafter reads.
        """
        parts = tuple(features) if isinstance(features, Sequence) else (features,)
        layers, h = len(self.config.target_layer_ids), self.config.hidden_size
        if sum(part.shape[-1] for part in parts) != layers * h:
            raise ValueError(
                f"features of shapes {[part.shape for part in parts]} do not give the {layers} x {h} values a token "
                f"that the drafter reads; capture target layers {list(self.config.target_layer_ids)}"
            )
        parts, positions = _last_tokens(parts, positions, cache.slots)
        with jax.named_scope("draft_context"):
            x = jnp.concatenate([part.astype(self.compute_dtype) for part in parts], axis=-1)
            x = self.hidden_norm(self.fc(x))
            attentions, written = [layer.attention for layer in self.layers], []
            # The same x in every layer: all of them together.
            projected = project(x, *(linear for a in attentions for linear in (a.k_proj, a.v_proj)))
            places = [
                place
                for i, a in enumerate(attentions)
                for place in ((a.k_norm, cache.keys[i]), (None, cache.values[i]))
            ]
            together = rotate_together(
                self.kernels, projected, places, positions, self.config, plus_one=self.config.gemma_norm, ring=True
            )
            if together is not None:
                return dataclasses.replace(cache, keys=together[0::2], values=together[1::2])
            for i, attention in enumerate(attentions):
                k, v = attention.keys_values(projected[2 * i], projected[2 * i + 1], positions)
                written.append(cache.write_layer(i, k, v, positions))
        keys, values = zip(*written, strict=True)
        return dataclasses.replace(cache, keys=keys, values=values)

    def block(
        self,
        anchor: Int[Array, " B"],
        p0: Int[Array, " B"],
        cache: DraftCache,
        *,
        num_slots: int | None = None,
        embed: Embedding | None = None,
        head: Embedding | None = None,
        lowering: Lowering = "one_pass",
        implementation: str | None = None,
    ) -> BlockOutput:
        """One forward of the block [anchor, mask, ..., mask] at positions p0, p0 + 1, ...

        Slot j sees the context positions p0 + j - W < p < p0 and the block's slots i with |i - j| < W; a causal drafter
        only the slots i <= j. Without a window W it sees all of them.

        Args:
          anchor: int32 [B], the newest committed token, which has not been through the target yet.
          p0: int32 [B], its position: the number of tokens whose features are in the cache.
          cache: context keys and values of the positions before p0; what later slots of the ring hold does not matter.
          num_slots: K, the drafts wanted; the config's block size by default. A block of fewer slots is a computation
            of its own and not the beginning of a longer one.
          embed, head: the target's embedding and head; a drafter that has its own needs none.
          lowering: see `Lowering`.
          implementation: of the attention (see `pallas_kernels`); None for that of the model's `kernels`.

        Raises:
          ConfigError: `num_slots` is not in 1..block size.
          ValueError: there is no embedding or head, or the ring of the cache is too short.
          NotImplementedError: the named implementation cannot serve this call.
        """
        c = self.config
        k = c.block_size if num_slots is None else num_slots
        if not 1 <= k <= c.block_size:
            raise ConfigError(
                f"num_draft_tokens must be between 1 and the drafter's block size {c.block_size}, found {k}"
            )
        implementation = implementation or self.kernels.attention
        embed = self.embed_tokens if embed is None else embed
        head = self.lm_head if head is None else head
        if embed is None or head is None:
            raise ValueError(f"{c.architecture} has no embedding and head of its own; pass those of the target")
        if c.window is not None and cache.slots < c.window - 1 + k:
            raise ValueError(
                f"the cache has {cache.slots} slots a row, but a window of {c.window} and a block of {k} need "
                f"{c.window - 1 + k}; make it with make_cache"
            )
        offsets = jnp.arange(k, dtype=jnp.int32)[None, :]
        tokens = jnp.where(offsets == 0, anchor[:, None].astype(jnp.int32), jnp.int32(c.mask_token_id))
        positions = p0[:, None].astype(jnp.int32) + offsets
        with jax.named_scope("draft_block"):
            x = embed.lookup(tokens, self.compute_dtype)
            for i, layer in enumerate(self.layers):
                with jax.named_scope(f"layer_{i}"):
                    x = layer(x, positions, cache, i, lowering=lowering, implementation=implementation)
            hidden = self.norm(x)
            return BlockOutput(hidden=hidden, base_logits=head.logits(hidden))


def _last_tokens(
    parts: tuple[Float[Array, "B T _"], ...], positions: Int[Array, "B T"], count: int
) -> tuple[tuple[Float[Array, "B C _"], ...], Int[Array, "B C"]]:
    """The columns that hold each row's last `count` tokens; all of them where there are no more."""
    tokens = positions.shape[1]
    if tokens <= count:
        return parts, positions
    newest = jnp.argmax(positions, axis=1).astype(jnp.int32)
    first = jnp.clip(newest + 1 - count, 0, tokens - count)
    cut = jax.vmap(lambda row, start: lax.dynamic_slice_in_dim(row, start, count, axis=0))
    return tuple(cut(part, first) for part in parts), cut(positions, first)
