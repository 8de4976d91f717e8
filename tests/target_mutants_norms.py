"""Wrong implementations of the target: rotary embedding and norms."""

import functools

import jax.numpy as jnp
import numpy as np
from target_mutants_base import ROTATE, Call, mutant, unchanged

from dspark_jax import attention, layers

# Rotary embedding ---------------------------------------------------------------------------------------------------


def _interleaved(x, positions, *, rotary_dim, theta):
    half = rotary_dim // 2
    order = np.concatenate([np.arange(0, rotary_dim, 2), np.arange(1, rotary_dim, 2)])
    order = np.concatenate([order, np.arange(rotary_dim, x.shape[-1])])
    assert len(order[:half]) == half
    return ROTATE(x[..., order], positions, rotary_dim=rotary_dim, theta=theta)[..., np.argsort(order)]


def _last_dims(x, positions, *, rotary_dim, theta):
    shift = x.shape[-1] - rotary_dim
    turned = ROTATE(jnp.roll(x, -shift, axis=-1), positions, rotary_dim=rotary_dim, theta=theta)
    return jnp.roll(turned, shift, axis=-1)


def _all_dims(x, positions, *, rotary_dim, theta):
    return ROTATE(x, positions, rotary_dim=x.shape[-1], theta=theta)


def _frequencies_of_head(x, positions, *, rotary_dim, theta):
    return ROTATE(x, positions, rotary_dim=rotary_dim, theta=theta ** (rotary_dim / x.shape[-1]))


def _fixed_theta(x, positions, *, rotary_dim, theta):
    return ROTATE(x, positions, rotary_dim=rotary_dim, theta=5e6 if theta == 1e4 else 1e4)


_ROPE = "Rotary embedding"


@mutant(_ROPE, "all head dims rotated (`rotary_dim` ignored)", _all_dims)
@mutant(_ROPE, "right dims rotated, frequencies `theta^(-2i/head_dim)`", _frequencies_of_head)
@mutant(_ROPE, "pairs (2i, 2i+1) instead of (i, i + rotary/2)", _interleaved)
@mutant(_ROPE, "last instead of first `rotary_dim` dims", _last_dims)
@mutant(_ROPE, "theta not read from the config (1e4; where the config says 1e4, 5e6)", _fixed_theta)
def _rotary(wrong, patch, model, name):
    patch.setattr(attention, "rotate", wrong)
    return model


# Norms --------------------------------------------------------------------------------------------------------------


def _scale_by_w(self, x, dtype=None):
    return layers.rms_normalize(x, self.weight.get_value().astype(jnp.float32), self.eps, dtype or x.dtype)


def _folded_in_bf16(self, x, dtype=None):
    scale = jnp.bfloat16(1) + self.weight.get_value()
    return layers.rms_normalize(x, scale.astype(jnp.float32), self.eps, dtype or x.dtype)


@mutant("Norms", "scale by w instead of 1 + w", _scale_by_w)
@mutant("Norms", "1 + w folded into a bf16 array", _folded_in_bf16)
def _norm(wrong, patch, model, name):
    patch.setattr(layers.GemmaRMSNorm, "__call__", wrong)
    return model


@mutant("Norms", "q/k norm missing (main attention)")
def _no_head_norm(patch, model, name):
    for layer in model.layers:
        layer.attention.q_norm = layer.attention.k_norm = Call(unchanged)
    return model


@mutant("Norms", "q/k norm after RoPE")
def _norm_after_rope(patch, model, name):
    # Turn, norm, turn back: what the library then turns is the norm of the turned head.
    turn = functools.partial(ROTATE, rotary_dim=model.config.rotary_dim, theta=model.config.rope_theta)

    def after(norm):
        def call(x, dtype):
            positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None], x.shape[:2])
            return turn(norm(turn(x, positions), dtype), -positions)

        return Call(call)

    for layer in model.layers:
        layer.attention.q_norm, layer.attention.k_norm = after(layer.attention.q_norm), after(layer.attention.k_norm)
    return model


@mutant("Norms", "q/k norm over all heads together")
def _joint_head_norm(patch, model, name):
    def joint(norm):
        def call(x, dtype):
            scale = jnp.tile(1.0 + norm.weight.get_value().astype(jnp.float32), x.shape[2])
            return layers.rms_normalize(x.reshape(*x.shape[:2], -1), scale, norm.eps, dtype).reshape(x.shape)

        return Call(call)

    for layer in model.layers:
        layer.attention.q_norm, layer.attention.k_norm = joint(layer.attention.q_norm), joint(layer.attention.k_norm)
    return model


@mutant("Norms", "final norm missing")
def _no_final_norm(patch, model, name):
    model.norm = Call(unchanged)
    return model


@mutant("Norms", "eps not read from the config (1e-6 for 1e-5 and the reverse)")
def _fixed_eps(patch, model, name):
    def call(self, x, dtype=None):
        scale = 1.0 + self.weight.get_value().astype(jnp.float32)
        return layers.rms_normalize(x, scale, 1e-5 if self.eps == 1e-6 else 1e-6, dtype or x.dtype)

    patch.setattr(layers.GemmaRMSNorm, "__call__", call)
    return model
