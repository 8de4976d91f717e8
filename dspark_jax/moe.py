"""Mixture of experts: sigmoid router with a selection bias, routed experts, one shared expert."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dspark_jax import formats
from dspark_jax.config import TargetConfig
from dspark_jax.layers import Scope, SwigluMLP
from pallas_kernels import choose_experts, grouped_experts


class Router(nnx.Module):
    """Chooses experts by sigmoid(logit) + bias and weighs them by sigmoid(logit) alone, all in float32."""

    def __init__(self, scope: Scope, config: TargetConfig):
        shape = (config.num_experts, config.hidden_size)
        self.weight = scope.param("weight", shape, ("experts", "embed"), scale=config.hidden_size**-0.5)
        self.bias = scope.param("bias", shape[:1], ("experts",), scale=0.1)
        self.top_k = config.num_experts_per_token
        self.kernels = scope.kernels

    def __call__(self, x: Float[Array, "N H"]) -> tuple[Int[Array, "N k"], Float[Array, "N k"]]:
        """-> experts (the lower index wins a tie) and their weights, which sum to 1."""
        weight, bias = (formats.dequantize(a.get_value(), jnp.float32) for a in (self.weight, self.bias))
        return choose_experts(x, weight, bias, top_k=self.top_k, implementation=self.kernels.routing)


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
        self.kernels = scope.kernels

    def __call__(
        self,
        x: Float[Array, "N H"],
        experts: Int[Array, "N k"],
        weights: Float[Array, "N k"],
        positions: Int[Array, " N"] | None = None,
    ) -> Float[Array, "N H"]:
        """Weighted sum of each row's experts, float32 [N, H].

        An index of `num_experts` or more computes nothing, and neither does a row at a negative position.
        """
        gate, up, down = (part.weight.get_value() for part in (self.gate_proj, self.up_proj, self.down_proj))
        return grouped_experts(
            x, experts, weights, gate, up, down, positions, alpha=self.alpha, limit=self.limit,
            routing=self.kernels.routing, implementation=self.kernels.experts,
        )  # fmt: skip


class ExpertWeights(nnx.Module):
    """A stack [E, out, in] in any storage format."""

    def __init__(self, scope: Scope, shape: tuple[int, int, int], axes: tuple[str, str, str]):
        self.weight = scope.param("weight", shape, axes, scale=shape[-1] ** -0.5)


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
        routed = self.experts(rows, experts, weights, positions.reshape(-1).astype(jnp.int32)) * self.routed_scaling
        output = (routed + self.shared_expert(rows).astype(jnp.float32)).astype(x.dtype)
        shape = (*x.shape[:-1], experts.shape[-1])
        return output.reshape(x.shape), experts.reshape(shape), weights.reshape(shape)
