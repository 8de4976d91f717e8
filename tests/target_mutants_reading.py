"""Wrong implementations of the target: ends, names, and the reading of MXFP8 and NVFP4."""

import golden
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from target_mutants_base import DEQUANTIZE, LOOKUP, dequantize_by, moe_layers, mutant

from dspark_jax import target
from dspark_jax.formats import MXFP8Array, NVFP4Array

# Ends and names -----------------------------------------------------------------------------------------------------


@mutant("Ends", "embedding times sqrt(hidden)")
def _scaled_embedding(patch, model, name):
    factor = model.config.hidden_size**0.5
    patch.setattr(target.Embedding, "lookup", lambda self, tokens, dtype: LOOKUP(self, tokens, dtype) * factor)
    return model


@mutant("Ends", "lm_head tied to the embedding")
def _tied(patch, model, name):
    model.lm_head = model.embed_tokens
    return model


def _text_order(count):
    return sorted(range(count), key=str)


@mutant("Names", "experts stacked in the text order of their names (0, 1, 10, 11, 2, ...)")
def _experts_in_text_order(patch, model, name):
    order = np.asarray(_text_order(model.config.num_experts))
    for block in moe_layers(model):
        for part in golden.EXPERT_NAMES:
            parameter = getattr(block.experts, part).weight
            parameter.set_value(jax.tree.map(lambda a: a[order], parameter.get_value()))
    return model


@mutant("Names", "layers stacked in the text order of their names")
def _layers_in_text_order(patch, model, name):
    model.layers = nnx.List([model.layers[i] for i in _text_order(model.config.num_layers)])
    return model


@mutant("Names", "`mtp.layers.0.transformer_layer.*` taken for layer 0")
def _mtp_as_layer(patch, model, name):
    here, layer = "language_model.model.mtp.layers.0.transformer_layer.", model.layers[0]
    found = {key.removeprefix(here): jnp.asarray(a) for key, a in golden.tensors(name).items() if key.startswith(here)}
    layer.input_norm.weight.set_value(found.pop("input_layernorm.weight"))
    layer.attention.k_proj.weight.set_value(found.pop("self_attn.k_proj.weight"))
    assert not found
    return model


# Reading MXFP8 ------------------------------------------------------------------------------------------------------

_MXFP8 = "MXFP8 reading"


def _mxfp8(weight, *, codes=lambda c: c, exponent=lambda s: s.astype(jnp.int32) - 127, spread=None):
    """Codes times 2^exponent; `spread` gives the scale bytes [..., out, in / 32] one value per element."""
    scale = (spread or (lambda s, shape: jnp.repeat(s, 32, axis=-1)))(weight.scale, weight.shape)
    return jnp.ldexp(codes(weight.codes).astype(jnp.float32), exponent(scale))


def _rows_of_32(scale, shape):
    out, size = shape[-2:]
    return jnp.repeat(scale.reshape(*shape[:-2], out // 32, size), 32, axis=-2)


def _transposed(scale, shape):
    out, size = shape[-2:]
    return jnp.repeat(jnp.swapaxes(scale.reshape(*shape[:-2], size // 32, out), -1, -2), 32, axis=-1)


def _cyclic(block):
    return lambda scale, shape: jnp.tile(scale, (1,) * (len(shape) - 1) + (block,))


def _bits(dtype):
    return lambda codes: lax.bitcast_convert_type(codes, dtype)


@mutant(_MXFP8, "divide by the scale (the suffix says `_inv`)", dict(exponent=lambda s: 127 - s.astype(jnp.int32)))
@mutant(_MXFP8, "scale ignored", dict(exponent=lambda s: jnp.zeros(s.shape, jnp.int32)))
@mutant(_MXFP8, "2^(byte - 126)", dict(exponent=lambda s: s.astype(jnp.int32) - 126))
@mutant(_MXFP8, "scale byte read as int8", dict(exponent=lambda s: s.astype(jnp.int8).astype(jnp.int32) - 127))
@mutant(_MXFP8, "one scale per 32 rows instead of per 32 columns", dict(spread=_rows_of_32))
@mutant(_MXFP8, "scale bytes read as [in/32, out]", dict(spread=_transposed))
@mutant(_MXFP8, "scale of column c taken from block c % nblocks", dict(spread=_cyclic(32)))
@mutant(_MXFP8, "codes read as E5M2", dict(codes=_bits(jnp.float8_e5m2)))
@mutant(_MXFP8, "codes read as E4M3 FNUZ", dict(codes=_bits(jnp.float8_e4m3fnuz)))
def _wrong_mxfp8(options, patch, model, name):
    def dequantize(weight, dtype=jnp.float32):
        return _mxfp8(weight, **options).astype(dtype) if isinstance(weight, MXFP8Array) else DEQUANTIZE(weight, dtype)

    dequantize_by(patch, dequantize)
    return model


# Reading NVFP4 ------------------------------------------------------------------------------------------------------

_NVFP4 = "NVFP4 reading"
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _low_first(low, high):
    return jnp.stack([low, high], axis=-1).reshape(*low.shape[:-1], -1)


def _nvfp4(weight, *, order=_low_first, scale=lambda s: s.astype(jnp.float32), spread=None, op=lambda op: op):
    table = jnp.asarray(_E2M1 + tuple(-v for v in _E2M1), jnp.float32)
    values = table[order(weight.codes & 0xF, weight.codes >> 4)]
    spread = spread or (lambda s, shape: jnp.repeat(s, 16, axis=-1))
    values = values * spread(scale(weight.scale), weight.shape)
    factor = jnp.broadcast_to(weight.global_scale[..., None, None], values.shape)
    return dict(multiply=values * factor, divide=values / factor, ignore=values)[op(weight.global_scale_op)]


def _as_e8m0(scale):
    return jnp.ldexp(jnp.float32(1), lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32) - 127)


def _flipped(op):
    return "divide" if op == "multiply" else "multiply"


@mutant(_NVFP4, "high nibble = even column", dict(order=lambda low, high: _low_first(high, low)))
@mutant(_NVFP4, "low nibbles = first half of the row", dict(order=lambda *halves: jnp.concatenate(halves, axis=-1)))
@mutant(_NVFP4, "global scale multiplied where it divides, or the reverse", dict(op=_flipped))
@mutant(_NVFP4, "global scale ignored", dict(op=lambda op: "ignore"))
@mutant(_NVFP4, "block scale byte read as E8M0", dict(scale=_as_e8m0))
@mutant(_NVFP4, "block scale of column c taken from block c % nblocks", dict(spread=_cyclic(16)))
def _wrong_nvfp4(options, patch, model, name):
    def dequantize(weight, dtype=jnp.float32):
        return _nvfp4(weight, **options).astype(dtype) if isinstance(weight, NVFP4Array) else DEQUANTIZE(weight, dtype)

    dequantize_by(patch, dequantize)
    return model


@mutant(_NVFP4, "one global scale for w1, w2, w3")
def _one_global(patch, model, name):
    for block in moe_layers(model):
        shared = block.experts.gate_proj.weight.get_value().global_scale
        down = block.experts.down_proj.weight
        down.set_value(_with_global(down.get_value(), shared))
    return model


def _with_global(weight, value):
    return NVFP4Array(
        codes=weight.codes, scale=weight.scale, global_scale=value, global_scale_op=weight.global_scale_op
    )


@mutant(_NVFP4, "activation scale applied to the weight")
def _activation_scale(patch, model, name):
    t = golden.tensors(name)
    suffix = "input_global_scale" if name == "m31-flash-tiny" else "input_scale"
    for i, layer in enumerate(model.layers):
        for part, theirs in golden.EXPERT_NAMES.items() if layer.is_moe else ():
            key = f"language_model.model.layers.{i}.block_sparse_moe.experts"
            found = np.stack([t[f"{key}.{e}.{theirs}.{suffix}"].reshape(()) for e in range(model.config.num_experts)])
            parameter = getattr(layer.moe.experts, part).weight
            old = parameter.get_value()
            parameter.set_value(_with_global(old, old.global_scale * found))
    return model


@mutant(
    "Not wrong, for comparison",
    "NVFP4 weights rounded to bf16 after dequantisation (a legitimate choice; see the tolerance note)",
)
def _nvfp4_in_bf16(patch, model, name):
    def dequantize(weight, dtype=jnp.float32):
        exact = DEQUANTIZE(weight, jnp.float32)
        return (exact.astype(jnp.bfloat16) if isinstance(weight, NVFP4Array) else exact).astype(dtype)

    dequantize_by(patch, dequantize)
    return model
