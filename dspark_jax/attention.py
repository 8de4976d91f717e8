"""The target's attention: grouped queries, per-head norms, partial rotary embedding, and block-sparse selection.

A sparse layer scores blocks of `block_size` keys with a small indexer, keeps the best `top_k_blocks` for each query and
each KV head (the query's own block is always one of them), and attends to the keys of those blocks only.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

import pallas_kernels
from dspark_jax import attention_forms, formats
from dspark_jax.attention_forms import LOOPS, Form, attend_with_kernels
from dspark_jax.cache import key_chunk, write_rows
from dspark_jax.config import TargetConfig
from dspark_jax.formats import Leaf
from dspark_jax.kernels import first_that_serves
from dspark_jax.layers import GemmaRMSNorm, Linear, Scope, project, rotate
from dspark_jax.rotation import Place, rotate_together


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCache:
    """One layer's slice of a `TargetCache`: keys, values [B, S, Hkv, D], index keys [B, S, D_index] or None."""

    keys: Leaf
    values: Leaf
    index_keys: Leaf | None


class Indexer(nnx.Module):
    """Block selection: index queries of `index_heads` heads against one index key a token."""

    def __init__(self, scope: Scope, config: TargetConfig):
        h, d = config.hidden_size, config.index_head_dim
        self.q_proj = Linear(scope / "q_proj", config.index_heads * d, h, ("index_heads", "embed"))
        self.k_proj = Linear(scope / "k_proj", d, h, (None, "embed"))
        self.q_norm = GemmaRMSNorm(scope / "q_norm", d, config.norm_eps)
        self.k_norm = GemmaRMSNorm(scope / "k_norm", d, config.norm_eps)
        self.kernels = scope.kernels
        self.config = config

    def __call__(
        self,
        x: Float[Array, "B T H"],
        positions: Int[Array, "B T"],
        index_keys: Float[Array, "B S I"],
        projected: Sequence[Float[Array, "B T _"]] = (),
    ) -> tuple[Int[Array, "B T Hkv top_k"], Float[Array, "B S I"]]:
        """-> blocks that each query keeps (see `select_blocks`), index keys with this call's tokens written.

        `projected` is q_proj(x) and k_proj(x) if they are known already.
        """
        c = self.config
        q, k = projected or project(x, self.q_proj, self.k_proj)
        q = self.q_norm(q.reshape(*x.shape[:2], c.index_heads, c.index_head_dim), jnp.float32)
        k = self.k_norm(k[:, :, None, :], jnp.float32)
        q = rotate(q, positions, rotary_dim=c.rotary_dim, theta=c.rope_theta).astype(x.dtype)
        k = rotate(k, positions, rotary_dim=c.rotary_dim, theta=c.rope_theta).astype(x.dtype)
        index_keys = write_rows(index_keys, k[:, :, 0], positions)
        return self.select(q, index_keys, positions), index_keys

    def select(
        self, q: Float[Array, "B T N I"], index_keys: Float[Array, "B S I"], positions: Int[Array, "B T"]
    ) -> Int[Array, "B T Hkv top_k"]:
        """Blocks that each query keeps, from index queries that are normed and rotated."""
        c = self.config
        common: dict[str, Any] = dict(block_size=c.block_size)

        def select(form: Form) -> Int[Array, "B T Hkv top_k"]:
            if form == LOOPS:
                scores = block_scores(q, index_keys, positions, chunk=key_chunk(c), **common)
                return select_blocks(scores, positions, top_k=c.top_k_blocks, **common)
            chosen: dict[str, Any] = common | dict(implementation=form)
            scores = pallas_kernels.index_block_scores(q, index_keys, positions, **chosen)
            return pallas_kernels.select_blocks(scores, positions, top_k=c.top_k_blocks, **chosen)

        forms = attention_forms.choose(self.kernels, "selection", q.shape[1], q, index_keys)
        return first_that_serves(forms, select)


def block_scores(
    q: Float[Array, "B T N I"], k: Float[Array, "B S I"], positions: Int[Array, "B T"], *, block_size: int, chunk: int
) -> Float[Array, "B T N blocks"]:
    """Largest q·k over the visible keys of each block, float32; -inf where a block has none.

    Reads the keys `chunk` at a time, so that no [T, S] array exists.
    """
    batch, tokens, heads, _ = q.shape
    slots = k.shape[1]

    def scores_of(start: Int[Array, ""] | int, size: int) -> Float[Array, "B T N blocks"]:
        keys = lax.dynamic_slice_in_dim(k, start, size, axis=1)
        s = jnp.einsum(
            "btni,bsi->btns", q, keys, preferred_element_type=jnp.float32, precision=formats.precision(q.dtype)
        )
        seen = _causal(positions, start, size)[:, :, None, :]
        s = jnp.where(jnp.broadcast_to(seen, s.shape), s, -jnp.inf)
        return jnp.max(s.reshape(batch, tokens, heads, size // block_size, block_size), axis=-1)

    if slots <= chunk:
        return scores_of(0, slots)
    blocks = jnp.full((batch, tokens, heads, slots // block_size), -jnp.inf, jnp.float32)

    def step(i: Int[Array, ""], blocks: Float[Array, "B T N blocks"]) -> Float[Array, "B T N blocks"]:
        return lax.dynamic_update_slice_in_dim(blocks, scores_of(i * chunk, chunk), i * (chunk // block_size), axis=-1)

    return lax.fori_loop(0, _chunks_seen(positions, slots, chunk), step, blocks)


def select_blocks(
    scores: Float[Array, "B T N blocks"], positions: Int[Array, "B T"], *, block_size: int, top_k: int
) -> Int[Array, "B T N top_k"]:
    """`pallas_kernels.select_blocks` through XLA: the best blocks of each query and head, best first, then -1."""
    return pallas_kernels.select_blocks(scores, positions, block_size=block_size, top_k=top_k, implementation="xla")


def attend(
    q: Float[Array, "B T Hq D"],
    k: Float[Array, "B S Hkv D"],
    v: Float[Array, "B S Hkv D"],
    positions: Int[Array, "B T"],
    *,
    blocks: Int[Array, "B T Hkv top_k"] | None = None,
    block_size: int,
    chunk: int,
) -> Float[Array, "B T Hq D"]:
    """Causal attention with scale D^-1/2 over slots 0..position; with `blocks`, over the keys of those blocks only.

    Softmax in float32, computed online over `chunk` keys at a time; chunks that no query can see are not read.
    A query at position -1 sees nothing and gets 0. S must be a multiple of `chunk` where it is larger.
    """
    batch, tokens, heads, dim = q.shape
    slots, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads
    grouped = q.reshape(batch, tokens, kv_heads, group, dim)
    precision = formats.precision(q.dtype)
    kept = None if blocks is None else _block_mask(blocks, slots // block_size)

    def step(i: Int[Array, ""] | int, state: tuple, size: int) -> tuple:
        peak, total, out = state
        start = i * size
        keys = lax.dynamic_slice_in_dim(k, start, size, axis=1)
        values = lax.dynamic_slice_in_dim(v, start, size, axis=1)
        s = jnp.einsum("bthgd,bshd->bthgs", grouped, keys, preferred_element_type=jnp.float32, precision=precision)
        seen = _causal(positions, start, size)[:, :, None, :]
        if kept is not None:
            part = lax.dynamic_slice_in_dim(kept, i * (size // block_size), size // block_size, axis=-1)
            seen = jnp.repeat(part, block_size, axis=-1) & seen
        seen = jnp.broadcast_to(seen[:, :, :, None, :], s.shape)
        s = jnp.where(seen, s * dim**-0.5, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(s, axis=-1))
        # A row that has seen nothing yet keeps a peak of -inf; 0 in its place makes exp(-inf - 0) = 0, not NaN.
        safe = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        p = jnp.exp(s - safe[..., None])
        decay = jnp.exp(peak - safe)
        update = jnp.einsum(
            "bthgs,bshd->bthgd",
            p.astype(v.dtype),
            values,
            preferred_element_type=jnp.float32,
            precision=formats.precision(v.dtype),
        )
        return new_peak, decay * total + jnp.sum(p, axis=-1), decay[..., None] * out + update

    shape = (batch, tokens, kv_heads, group)
    state = (
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, dim), jnp.float32),
    )
    if slots <= chunk:
        state = step(0, state, slots)
    else:
        state = lax.fori_loop(0, _chunks_seen(positions, slots, chunk), lambda i, s: step(i, s, chunk), state)
    _, total, out = state
    out = out / jnp.where(total == 0, 1.0, total)[..., None]
    return out.reshape(batch, tokens, heads, dim).astype(q.dtype)


def _causal(positions: Int[Array, "B T"], start: Int[Array, ""] | int, size: int) -> Bool[Array, "B T size"]:
    slot = start + jnp.arange(size, dtype=jnp.int32)
    return slot[None, None, :] <= positions[:, :, None]


def _chunks_seen(positions: Int[Array, "B T"], slots: int, chunk: int) -> Int[Array, ""]:
    # At most what there is: a slice past the end would be clamped and count the last keys twice.
    return jnp.minimum(jnp.max(positions) // chunk + 1, slots // chunk)


def _block_mask(blocks: Int[Array, "B T N top_k"], num_blocks: int) -> Bool[Array, "B T N blocks"]:
    b, t, n, _ = blocks.shape
    at = jnp.ix_(*(jnp.arange(s, dtype=jnp.int32) for s in (b, t, n)))
    where = jnp.where(blocks < 0, num_blocks, blocks)
    return jnp.zeros((b, t, n, num_blocks), bool).at[(*(a[..., None] for a in at), where)].set(True, mode="drop")


class Attention(nnx.Module):
    """Self-attention of one target layer; block-sparse iff `sparse`."""

    def __init__(self, scope: Scope, config: TargetConfig, *, sparse: bool):
        h, d = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_heads * d, config.num_kv_heads * d
        self.q_proj = Linear(scope / "q_proj", q_size, h, ("heads", "embed"))
        self.k_proj = Linear(scope / "k_proj", kv_size, h, ("kv_heads", "embed"))
        self.v_proj = Linear(scope / "v_proj", kv_size, h, ("kv_heads", "embed"))
        self.o_proj = Linear(scope / "o_proj", h, q_size, ("embed", "heads"))
        self.q_norm = GemmaRMSNorm(scope / "q_norm", d, config.norm_eps)
        self.k_norm = GemmaRMSNorm(scope / "k_norm", d, config.norm_eps)
        self.indexer = Indexer(scope / "indexer", config) if sparse else None
        self.kernels = scope.kernels
        self.config = config

    def __call__(
        self, x: Float[Array, "B T H"], positions: Int[Array, "B T"], cache: LayerCache
    ) -> tuple[Float[Array, "B T H"], LayerCache, Int[Array, "B T Hkv top_k"] | None]:
        """-> output, cache with this call's tokens written, selected blocks (None without an indexer)."""
        c = self.config
        batch, tokens, _ = x.shape
        if self.indexer is not None and cache.index_keys is None:
            raise ValueError("a block-sparse layer needs index keys in its cache; make it with TargetCache.zeros")
        index_projections = () if self.indexer is None else (self.indexer.q_proj, self.indexer.k_proj)
        projected = project(x, self.q_proj, self.k_proj, self.v_proj, *index_projections)
        together = None if self.kernels.rotation == "xla" else self._together(projected, positions, cache)
        if together is None:
            q, cache, blocks = self._apart(x, projected, positions, cache)
        else:
            q, cache, blocks = together
        common: dict[str, Any] = dict(block_size=c.block_size)
        whole = blocks is None or attention_forms.selects_everything(
            tokens=tokens, slots=cache.keys.shape[1], top_k=c.top_k_blocks, **common
        )

        def attended(form: Form) -> Float[Array, "B T Hq D"]:
            if form == LOOPS:
                return attend(q, cache.keys, cache.values, positions, blocks=blocks, chunk=key_chunk(c), **common)
            kept = None if whole else blocks
            return attend_with_kernels(
                q, cache.keys, cache.values, positions, blocks=kept, implementation=form, **common
            )

        forms = attention_forms.choose(self.kernels, "dense" if whole else "sparse", tokens, x, cache.keys)
        out = first_that_serves(forms, attended)
        return self.o_proj(out.reshape(batch, tokens, c.num_heads * c.head_dim)), cache, blocks

    def _together(
        self, projected: Sequence[Float[Array, "B T _"]], positions: Int[Array, "B T"], cache: LayerCache
    ) -> tuple[Float[Array, "B T Hq D"], LayerCache, Int[Array, "B T Hkv top_k"] | None] | None:
        """Queries, cache and blocks through one kernel behind the projections, if one serves."""
        c, indexer = self.config, self.indexer
        places: list[Place] = [(self.q_norm, None), (self.k_norm, cache.keys), (None, cache.values)]
        if isinstance(indexer, Indexer) and c.index_head_dim == c.head_dim:
            places += [(indexer.q_norm, None), (indexer.k_norm, cache.index_keys)]
        elif indexer is not None:
            if self.kernels.rotation is not None:
                raise NotImplementedError(
                    f"Kernels(rotation={self.kernels.rotation!r}): rotate_heads takes an Indexer and heads of one size,"
                    f" and this layer has {type(indexer).__name__} and heads of {c.head_dim} and, in its index, "
                    f"{c.index_head_dim}; None takes the form that serves."
                )
            return None
        found = rotate_together(self.kernels, projected, places, positions, c, plus_one=True)
        if found is None:
            return None
        q, keys, values, *rest = found
        if indexer is None:
            return q, LayerCache(keys=keys, values=values, index_keys=cache.index_keys), None
        index_q, index_keys = rest
        new = LayerCache(keys=keys, values=values, index_keys=index_keys)
        return q, new, indexer.select(index_q, index_keys, positions)

    def _apart(
        self,
        x: Float[Array, "B T H"],
        projected: Sequence[Float[Array, "B T _"]],
        positions: Int[Array, "B T"],
        cache: LayerCache,
    ) -> tuple[Float[Array, "B T Hq D"], LayerCache, Int[Array, "B T Hkv top_k"] | None]:
        """The same through XLA."""
        c = self.config
        batch, tokens, _ = x.shape
        q, k, v, *indexed = projected
        q = self.q_norm(q.reshape(batch, tokens, c.num_heads, c.head_dim), jnp.float32)
        k = self.k_norm(k.reshape(batch, tokens, c.num_kv_heads, c.head_dim), jnp.float32)
        v = v.reshape(batch, tokens, c.num_kv_heads, c.head_dim)
        # float32 from the norm to the end of the rotation, rounded once.
        q = rotate(q, positions, rotary_dim=c.rotary_dim, theta=c.rope_theta).astype(x.dtype)
        k = rotate(k, positions, rotary_dim=c.rotary_dim, theta=c.rope_theta).astype(x.dtype)
        blocks, index_keys = None, cache.index_keys
        if self.indexer is not None and index_keys is not None:
            blocks, index_keys = self.indexer(x, positions, index_keys, indexed)
        cache = LayerCache(
            keys=write_rows(cache.keys, k, positions),
            values=write_rows(cache.values, v, positions),
            index_keys=index_keys,
        )
        return q, cache, blocks
