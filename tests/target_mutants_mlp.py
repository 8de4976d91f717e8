"""Wrong implementations of the target: MLP, router and experts."""

import jax
import jax.numpy as jnp
from jax import lax
from target_mutants_base import Call, moe_layers, mutant, remember

from dspark_jax import formats, layers, moe
from pallas_kernels.grouped_experts import xla as xla_experts

# MLP ----------------------------------------------------------------------------------------------------------------


def _activation(*, alpha=None, limit=None, gate=(None, 1), up=(-1, 1), plus=1.0):
    """The activation with parts replaced; `gate` and `up` are bounds in units of the limit."""
    fixed_alpha, fixed_limit = alpha, limit

    def clip(x, bounds, limit):
        low, high = (None if b is None else b * limit for b in bounds)
        return x if low is high is None else jnp.clip(x, low, high)

    def call(g, u, *, alpha, limit):
        alpha, limit = fixed_alpha or alpha, fixed_limit or limit
        g, u = clip(g, gate, limit), clip(u, up, limit)
        return g * jax.nn.sigmoid(alpha * g) * (u + plus)

    return call


_OPEN = (None, None)


@mutant("MLP", "silu(g) * u: no alpha, clamp, +1", _activation(alpha=1.0, gate=_OPEN, up=_OPEN, plus=0.0))
@mutant("MLP", "alpha = 1 (sigmoid(g) instead of sigmoid(alpha g))", _activation(alpha=1.0))
@mutant("MLP", "u instead of u + 1", _activation(plus=0.0))
@mutant("MLP", "no clamp at all", _activation(gate=_OPEN, up=_OPEN))
@mutant("MLP", "gate not clamped", _activation(gate=_OPEN))
@mutant("MLP", "up not clamped", _activation(up=_OPEN))
@mutant("MLP", "up clamped from above only", _activation(up=(None, 1)))
@mutant("MLP", "gate clamped on both sides", _activation(gate=(-1, 1)))
@mutant("MLP", "alpha, limit not read from the config (1.702, 7)", _activation(alpha=1.702, limit=7.0))
def _swiglu(wrong, patch, model, name):
    patch.setattr(layers, "swiglu_oai", wrong)
    patch.setattr(xla_experts, "swiglu_oai", lambda g, u, alpha, limit: wrong(g, u, alpha=alpha, limit=limit))
    return model


def _exchange(mlp):
    gate, up = mlp.gate_proj, mlp.up_proj
    mlp.gate_proj, mlp.up_proj = up, gate


@mutant("MLP", "w1 and w3 of the routed experts exchanged")
def _w1_w3(patch, model, name):
    for block in moe_layers(model):
        _exchange(block.experts)
    return model


def _mlps(model):
    for layer in model.layers:
        yield from (layer.moe.experts, layer.moe.shared_expert) if layer.is_moe else (layer.mlp,)


@mutant("MLP", "gate and up exchanged everywhere")
def _gate_up(patch, model, name):
    for mlp in _mlps(model):
        _exchange(mlp)
    return model


@mutant("MLP", "fused [gate; up] read as interleaved rows")
def _interleaved_rows(patch, model, name):
    for mlp in _mlps(model):
        parts = [formats.dequantize(part.weight.get_value()) for part in (mlp.gate_proj, mlp.up_proj)]
        fused = jnp.concatenate(parts, axis=-2)
        mlp.gate_proj.weight.set_value(fused[..., 0::2, :])
        mlp.up_proj.weight.set_value(fused[..., 1::2, :])
    return model


# Router and experts -------------------------------------------------------------------------------------------------

_ROUTER = "Router and experts"


def _router(*, score=jax.nn.sigmoid, select=True, combine=False, normalise=True, dtype=jnp.float32):
    def call(self, x):
        x, weight, bias = (
            a.astype(dtype).astype(jnp.float32) for a in (x, self.weight.get_value(), self.bias.get_value())
        )
        scores = score(x @ weight.T)
        biased = scores + bias[None]
        _, experts = lax.top_k(biased if select else scores, self.top_k)
        weights = jnp.take_along_axis(biased if combine else scores, experts, axis=-1)
        return experts, weights / weights.sum(-1, keepdims=True) if normalise else weights

    return call


@mutant(_ROUTER, "correction bias not used for the selection", _router(select=False))
@mutant(_ROUTER, "correction bias also in the combine weights", _router(combine=True))
@mutant(_ROUTER, "softmax scores instead of sigmoid", _router(score=jax.nn.softmax))
@mutant(_ROUTER, "top-k weights not normalised", _router(normalise=False))
@mutant(_ROUTER, "router weight, bias, input rounded to bf16", _router(dtype=jnp.bfloat16))
def _wrong_router(wrong, patch, model, name):
    patch.setattr(moe.Router, "__call__", wrong)
    return model


@mutant(_ROUTER, "`routed_scaling_factor` missing", 1.0)
@mutant(_ROUTER, "`routed_scaling_factor` not read from the config (2.0)", 2.0)
def _scaling(factor, patch, model, name):
    for block in moe_layers(model):
        block.routed_scaling = factor
    return model


@mutant(_ROUTER, "`routed_scaling_factor` on the shared expert too", None)
@mutant(_ROUTER, "shared expert dropped", 0.0)
def _shared(factor, patch, model, name):
    for block in moe_layers(model):
        shared, scale = block.shared_expert, block.routed_scaling if factor is None else factor
        block.shared_expert = Call(lambda x, shared=shared, scale=scale: shared(x) * scale)
    return model


@mutant(_ROUTER, "router reads the residual stream before post_attention_layernorm")
def _router_before_norm(patch, model, name):
    for layer in model.layers:
        if layer.is_moe:
            memory = []
            layer.post_attention_norm = remember(layer.post_attention_norm, memory)
            layer.moe.router = Call(lambda x, r=layer.moe.router, memory=memory: r(memory[0].reshape(x.shape)))
    return model
