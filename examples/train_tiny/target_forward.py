"""A differentiable forward of the target for training: all tokens at once, no cache, every expert on every token.

Equal to `dspark_jax.MiniMaxTarget` on the same weights (float32: up to rounding), with two things that training needs:
a loss for the indexer, which the choice of blocks gives no gradient, and the load of every expert.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from jax import lax

from dspark_jax import formats
from dspark_jax.config import TargetConfig
from dspark_jax.layers import rms_normalize, rotate, swiglu_oai

Params = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropout:
    """Drops this share of what attention and feed-forward add to the residual stream."""

    key: jax.Array
    rate: float = dataclasses.field(metadata=dict(static=True))

    def __call__(self, x: jax.Array, place: int) -> jax.Array:
        kept = jax.random.bernoulli(jax.random.fold_in(self.key, place), 1 - self.rate, x.shape)
        return jnp.where(kept, x / (1 - self.rate), jnp.zeros_like(x))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Forward:
    """Result of a forward.

    Attributes:
      hidden: [B, T, H] after the final norm.
      features: per captured layer [B, T, H].
      index_loss: scalar, mean over layers of the divergence between indexer and attention mass.
      kept_mass: scalar, mean over layers of the attention mass that falls on chosen blocks, of queries that leave any.
      expert_load: [MoE layers, E], share of the choices that went to each expert.
    """

    hidden: jax.Array
    features: tuple[jax.Array, ...]
    index_loss: jax.Array
    kept_mass: jax.Array
    expert_load: jax.Array


def forward(
    weights: Params,
    tokens: jax.Array,
    config: TargetConfig,
    *,
    dtype=jnp.bfloat16,
    capture: tuple[int, ...] = (),
    full_attention: jax.Array | bool = False,
    dropout: Dropout | None = None,
) -> Forward:
    """Run whole sequences.

    Args:
      weights: float32 values by path.
      tokens: int32 [B, T]; T must be a multiple of the block size.
      config: the target's.
      dtype: of the activations.
      capture: layers whose output residual stream is wanted.
      full_attention: attend to every earlier token, chosen or not (may be traced).
      dropout: None for evaluation.

    Raises:
      ValueError: T is not a multiple of the block size.
    """
    if tokens.shape[1] % config.block_size:
        raise ValueError(f"{tokens.shape[1]} tokens are not whole blocks of {config.block_size}")
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
    x = weights["target/embed_tokens/weight"][tokens].astype(dtype)
    losses, kept, loads, features = [], [], [], []
    for (moe, sparse), members in itertools.groupby(
        range(config.num_layers), lambda i: (config.moe_layers[i], config.sparse_layers[i])
    ):
        run = list(members)

        def step(x: jax.Array, inputs: tuple, moe: bool = moe, sparse: bool = sparse) -> tuple[jax.Array, tuple]:
            one, i = inputs
            layer = _Layer(one, config, sparse)
            y, indexer = layer.attention(layer.norm(x, "input_norm"), positions, full_attention)
            x = x + (y if dropout is None else dropout(y, 2 * i))
            normed = layer.norm(x, "post_attention_norm")
            y, load = layer.moe(normed) if moe else (layer.glu(normed, "mlp", config), None)
            x = x + (y if dropout is None else dropout(y, 2 * i + 1))
            return x, (x, indexer, load)

        # Layers of one kind are one loop: the program is compiled in a fraction of the time.
        x, (outputs, indexer, load) = lax.scan(step, x, (_layers(weights, run), jnp.asarray(run, jnp.int32)))
        features += [outputs[i] for i in range(len(run))]
        if indexer is not None:
            losses.append(indexer[0])
            kept.append(indexer[1])
        if load is not None:
            loads.append(load)
    nothing = jnp.zeros((1,), jnp.float32)
    return Forward(
        hidden=_gemma_norm(x, weights["target/norm/weight"], config.norm_eps, dtype),
        features=tuple(features[i] for i in capture),
        index_loss=jnp.mean(jnp.concatenate(losses) if losses else nothing),
        kept_mass=jnp.mean(jnp.concatenate(kept) if kept else nothing),
        expert_load=jnp.concatenate(loads) if loads else jnp.zeros((0, config.num_experts), jnp.float32),
    )


def _layers(weights: Params, run: list[int]) -> Params:
    """The parameters of some layers of one kind by their name inside a layer, along a new first axis."""
    start = f"target/layers/{run[0]}/"
    names = [path.removeprefix(start) for path in weights if path.startswith(start)]
    return {name: jnp.stack([weights[f"target/layers/{i}/{name}"] for i in run]) for name in names}


def logits(weights: Params, hidden: jax.Array) -> jax.Array:
    """float32 [..., V]."""
    return jnp.einsum(
        "...h,vh->...v",
        hidden,
        weights["target/lm_head/weight"].astype(hidden.dtype),
        preferred_element_type=jnp.float32,
        precision=formats.precision(hidden.dtype),
    )


def _gemma_norm(x: jax.Array, weight: jax.Array, eps: float, dtype) -> jax.Array:
    return rms_normalize(x, 1.0 + weight, eps, dtype)


@dataclasses.dataclass(frozen=True)
class _Layer:
    weights: Params
    config: TargetConfig
    sparse: bool

    def __getitem__(self, name: str) -> jax.Array:
        return self.weights[f"{name}/weight"]

    def norm(self, x: jax.Array, name: str, dtype=None) -> jax.Array:
        return _gemma_norm(x, self[name], self.config.norm_eps, dtype or x.dtype)

    def linear(self, x: jax.Array, name: str) -> jax.Array:
        return formats.linear(x, self[name].astype(x.dtype))

    def glu(self, x: jax.Array, name: str, config: TargetConfig) -> jax.Array:
        gate, up = self.linear(x, f"{name}/gate_proj"), self.linear(x, f"{name}/up_proj")
        inner = swiglu_oai(gate, up, alpha=config.swiglu_alpha, limit=config.swiglu_limit)
        return self.linear(inner, f"{name}/down_proj")

    def heads(self, x: jax.Array, name: str, positions: jax.Array, dim: int) -> jax.Array:
        """Projection [B, T, N, D], normed and rotated."""
        c = self.config
        y = self.norm(self.linear(x, f"{name}_proj").reshape(*x.shape[:2], -1, dim), f"{name}_norm", jnp.float32)
        return rotate(y, positions, rotary_dim=c.rotary_dim, theta=c.rope_theta).astype(x.dtype)

    def attention(
        self, x: jax.Array, positions: jax.Array, full_attention: jax.Array | bool
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """-> output [B, T, H]; loss of the indexer and mass of the chosen blocks."""
        c = self.config
        batch, length, _ = x.shape
        precision = formats.precision(x.dtype)
        q, k = (self.heads(x, f"attention/{n}", positions, c.head_dim) for n in "qk")
        q = q.reshape(batch, length, c.num_kv_heads, -1, c.head_dim)
        v = self.linear(x, "attention/v_proj").reshape(batch, length, c.num_kv_heads, c.head_dim)
        s = jnp.einsum("bthgd,bshd->bhgts", q, k, preferred_element_type=jnp.float32, precision=precision)
        time = jnp.arange(length, dtype=jnp.int32)
        causal = time[:, None] >= time[None, :]
        s = jnp.where(_as_rank(causal, s), s * c.head_dim**-0.5, -jnp.inf)
        # All earlier keys share one largest score, so that the mass of blocks that are not chosen is known too.
        e = jnp.exp(s - lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True)))
        indexer = None
        if self.sparse:
            mass = jnp.sum(lax.stop_gradient(e).reshape(*e.shape[:-1], -1, c.block_size), axis=-1)
            mass = jnp.mean(mass / jnp.sum(mass, axis=-1, keepdims=True), axis=2)
            scores = self.block_scores(lax.stop_gradient(x), positions, causal)
            chosen = chosen_blocks(scores, block_size=c.block_size, top_k=c.top_k_blocks)
            choosing = slice(min(c.block_size * c.top_k_blocks, length - 1), None)
            kept_mass = jnp.mean(jnp.sum(jnp.where(chosen, mass, 0.0), axis=-1)[:, :, choosing])
            indexer = _index_loss(scores * c.index_head_dim**-0.5, mass, c.block_size), kept_mass
            kept = jnp.repeat(chosen | full_attention, c.block_size, axis=-1)[:, :, None]
            e = jnp.where(jnp.broadcast_to(kept, e.shape), e, 0.0)
        out = jnp.einsum(
            "bhgts,bshd->bthgd", e.astype(x.dtype), v, preferred_element_type=jnp.float32, precision=precision
        )
        total = jnp.moveaxis(jnp.sum(e, axis=-1), 3, 1)[..., None]
        out = (out / total).astype(x.dtype).reshape(batch, length, -1)
        return self.linear(out, "attention/o_proj"), indexer

    def block_scores(self, x: jax.Array, positions: jax.Array, causal: jax.Array) -> jax.Array:
        """Largest index score of every block, float32 [B, Hkv, T, blocks]."""
        c = self.config
        q, k = (self.heads(x, f"attention/indexer/{n}", positions, c.index_head_dim) for n in "qk")
        z = jnp.einsum(
            "btni,bsi->bnts",
            q,
            k[:, :, 0],
            preferred_element_type=jnp.float32,
            precision=formats.precision(x.dtype),
        )
        z = jnp.where(_as_rank(causal, z), z, -jnp.inf)
        return jnp.max(z.reshape(*z.shape[:-1], -1, c.block_size), axis=-1)

    def moe(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """-> output [B, T, H], share of the choices that went to each expert."""
        c = self.config
        scores = jax.nn.sigmoid(formats.linear(x.astype(jnp.float32), self["moe/router"]))
        bias = lax.stop_gradient(self.weights["moe/router/bias"])
        chosen = _rank(scores + bias[None, None, :]) < c.num_experts_per_token
        combine = jnp.where(chosen, scores, 0.0)
        combine = combine / jnp.sum(combine, axis=-1, keepdims=True)
        precision = formats.precision(x.dtype)
        gate, up = (
            jnp.einsum("bth,efh->btef", x, self[f"moe/experts/{n}_proj"].astype(x.dtype), precision=precision)
            for n in ("gate", "up")
        )
        inner = swiglu_oai(gate, up, alpha=c.swiglu_alpha, limit=c.swiglu_limit)
        weighted = (inner.astype(jnp.float32) * combine[..., None]).astype(x.dtype)
        routed = jnp.einsum(
            "btef,ehf->bth",
            weighted,
            self["moe/experts/down_proj"].astype(x.dtype),
            preferred_element_type=jnp.float32,
            precision=precision,
        )
        shared = self.glu(x, "moe/shared_expert", c).astype(jnp.float32)
        load = jnp.mean(chosen.astype(jnp.float32), axis=(0, 1)) / c.num_experts_per_token
        return (routed * c.routed_scaling + shared).astype(x.dtype), load


def _as_rank(mask: jax.Array, like: jax.Array) -> jax.Array:
    return jnp.broadcast_to(mask.reshape((1,) * (like.ndim - mask.ndim) + mask.shape), like.shape)


def _rank(x: jax.Array) -> jax.Array:
    """Place of each entry along the last axis, 0 for the largest; the lower index wins a tie."""
    ahead, entry = x[..., None, :], x[..., :, None]
    index = jnp.arange(x.shape[-1], dtype=jnp.int32)
    earlier = _as_rank(index[None, :] < index[:, None], jnp.broadcast_to(ahead, (*x.shape, x.shape[-1])))
    return jnp.sum((ahead > entry) | ((ahead == entry) & earlier), axis=-1, dtype=jnp.int32)


def chosen_blocks(scores: jax.Array, *, block_size: int, top_k: int) -> jax.Array:
    """Which blocks each query keeps, bool [B, Hkv, T, blocks]: its own and the best others, `top_k` in all."""
    own, index = _own_and_index(scores, block_size)
    ranked = jnp.where(index == own, jnp.inf, jnp.where(index < own, lax.stop_gradient(scores), -jnp.inf))
    _, best = lax.top_k(ranked, min(top_k, ranked.shape[-1]))
    blocks = jnp.arange(ranked.shape[-1], dtype=jnp.int32)
    chosen = jnp.any(best[..., None] == blocks.reshape((1,) * best.ndim + (-1,)), axis=-2)
    return chosen & (index <= own)


def _index_loss(scores: jax.Array, mass: jax.Array, block_size: int) -> jax.Array:
    """Divergence of softmax(scores) from the attention mass over the blocks before a query's own, mean over queries.

    The own block is always kept, so it says nothing about the choice; queries of the first block have no other.
    """
    own, index = _own_and_index(scores, block_size)
    past = index < own
    log_q = jax.nn.log_softmax(jnp.where(past, scores, -1e30), axis=-1)
    p = jnp.where(past, mass, 0.0)
    p = p / jnp.maximum(jnp.sum(p, axis=-1, keepdims=True), 1e-30)
    loss = jnp.sum(jnp.where(past, p * (jnp.log(jnp.maximum(p, 1e-30)) - log_q), 0.0), axis=-1)
    some = past[..., 0].astype(jnp.float32)
    return jnp.sum(loss * some) / jnp.maximum(jnp.sum(some), 1.0)


def _own_and_index(scores: jax.Array, block_size: int) -> tuple[jax.Array, jax.Array]:
    length, blocks = scores.shape[-2:]
    own = (jnp.arange(length, dtype=jnp.int32) // block_size)[:, None]
    index = jnp.arange(blocks, dtype=jnp.int32)[None, :]
    shape = jnp.broadcast_to(index, (length, blocks))
    return _as_rank(jnp.broadcast_to(own, (length, blocks)), scores), _as_rank(shape, scores)
