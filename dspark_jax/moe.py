"""Mixture of experts: sigmoid router with a selection bias, routed experts, one shared expert."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from dspark_jax import formats
from dspark_jax.config import TargetConfig
from dspark_jax.layers import Scope, SwigluMLP, swiglu_oai

# Rows of one expert that are computed together. A tile costs one dequantisation of the expert's matrices.
_TILE = 128


class Router(nnx.Module):
    """Chooses experts by sigmoid(logit) + bias and weighs them by sigmoid(logit) alone, all in float32."""

    def __init__(self, scope: Scope, config: TargetConfig):
        shape = (config.num_experts, config.hidden_size)
        self.weight = scope.param("weight", shape, ("experts", "embed"), scale=config.hidden_size**-0.5)
        self.bias = scope.param("bias", shape[:1], ("experts",), scale=0.1)
        self.top_k = config.num_experts_per_token

    def __call__(self, x: Float[Array, "N H"]) -> tuple[Int[Array, "N k"], Float[Array, "N k"]]:
        """-> experts (the lower index wins a tie) and their weights, which sum to 1."""
        logits = formats.linear(x.astype(jnp.float32), self.weight.get_value())
        scores = jax.nn.sigmoid(logits)
        bias = self.bias.get_value().astype(jnp.float32)
        _, experts = lax.top_k(scores + bias[None, :], self.top_k)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        return experts, weights / jnp.sum(weights, axis=-1, keepdims=True)


class Experts(nnx.Module):
    """The routed experts' matrices, stacked: gate and up [E, F, H], down [E, H, F]."""

    def __init__(self, scope: Scope, config: TargetConfig):
        e, f, h = config.num_experts, config.expert_mlp_size, config.hidden_size
        axes_in, axes_out = ("experts", "expert_mlp", "embed"), ("experts", "embed", "expert_mlp")
        self.gate_proj = ExpertWeights(scope / "gate_proj", (e, f, h), axes_in)
        self.up_proj = ExpertWeights(scope / "up_proj", (e, f, h), axes_in)
        self.down_proj = ExpertWeights(scope / "down_proj", (e, h, f), axes_out)
        self.num_experts = e
        self.alpha, self.limit = config.swiglu_alpha, config.swiglu_limit

    def __call__(
        self, x: Float[Array, "N H"], experts: Int[Array, "N k"], weights: Float[Array, "N k"]
    ) -> Float[Array, "N H"]:
        """Weighted sum of each row's experts, float32 [N, H]. An index of `num_experts` or more computes nothing.

        Rows are sorted by expert and computed in tiles of one expert each, so that memory stays bounded and an
        expert without rows is not read. The number of tiles is static; those that are not needed are branched over.
        """
        rows, k = experts.shape
        tile = min(rows, _TILE)
        num_tiles = min(self.num_experts, rows * k) + (rows * k) // tile
        flat = jnp.minimum(experts.reshape(-1), self.num_experts)
        order = jnp.argsort(flat, stable=True)
        counts = jnp.bincount(flat, length=self.num_experts + 1)[:-1].astype(jnp.int32)
        ends = jnp.cumsum(counts)
        tile_ends = jnp.cumsum((counts + tile - 1) // tile)
        flat_weights = weights.reshape(-1)

        def compute(index: Int[Array, ""], total: Float[Array, "N H"]) -> Float[Array, "N H"]:
            expert = jnp.searchsorted(tile_ends, index, side="right").astype(jnp.int32)
            first_tile = tile_ends[expert] - (counts[expert] + tile - 1) // tile
            start = ends[expert] - counts[expert] + (index - first_tile) * tile
            slots = start + jnp.arange(tile, dtype=jnp.int32)
            pairs = order[jnp.minimum(slots, rows * k - 1)]
            token = jnp.where(slots < ends[expert], pairs // k, rows)
            inputs = x.at[token].get(mode="fill", fill_value=0)
            gate = formats.linear(inputs, self.gate_proj.take(expert))
            up = formats.linear(inputs, self.up_proj.take(expert))
            inner = swiglu_oai(gate, up, alpha=self.alpha, limit=self.limit)
            output = formats.linear(inner, self.down_proj.take(expert)).astype(jnp.float32)
            return total.at[token].add(output * flat_weights[pairs][:, None], mode="drop")

        def step(index: Int[Array, ""], total: Float[Array, "N H"]) -> Float[Array, "N H"]:
            return lax.cond(index < tile_ends[-1], compute, lambda _, total: total, index, total)

        return lax.fori_loop(0, num_tiles, step, jnp.zeros(x.shape, jnp.float32))


class ExpertWeights(nnx.Module):
    """A stack [E, out, in] in any storage format."""

    def __init__(self, scope: Scope, shape: tuple[int, int, int], axes: tuple[str, str, str]):
        self.weight = scope.param("weight", shape, axes, scale=shape[-1] ** -0.5)

    def take(self, expert: Int[Array, ""]) -> formats.Weight:
        """Matrix [out, in] of one expert."""
        return formats.take_matrix(self.weight.get_value(), expert)


class MoE(nnx.Module):
    """routed_scaling · (weighted sum of the chosen experts) + shared expert."""

    def __init__(self, scope: Scope, config: TargetConfig):
        self.router = Router(scope / "router", config)
        self.experts = Experts(scope / "experts", config)
        self.shared_expert = SwigluMLP(
            scope / "shared_expert",
            config.hidden_size,
            config.shared_mlp_size,
            alpha=config.swiglu_alpha,
            limit=config.swiglu_limit,
        )
        self.routed_scaling = config.routed_scaling

    def __call__(
        self, x: Float[Array, "B T H"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T H"], Int[Array, "B T k"], Float[Array, "B T k"]]:
        """-> output, chosen experts, their weights. A token at position -1 is padding and takes no routed expert."""
        rows = x.reshape(-1, x.shape[-1])
        experts, weights = self.router(rows)
        live = jnp.where(positions.reshape(-1, 1) >= 0, experts, self.experts.num_experts)
        routed = self.experts(rows, live, weights) * self.routed_scaling
        output = (routed + self.shared_expert(rows).astype(jnp.float32)).astype(x.dtype)
        shape = (*x.shape[:-1], experts.shape[-1])
        return output.reshape(x.shape), experts.reshape(shape), weights.reshape(shape)
