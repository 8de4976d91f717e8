"""Parameters by path, the formats they are stored in, and the published layout: names, shards, index.

Training holds every parameter in float32 by the library's own path ("target/layers/0/attention/q_proj/weight"). What a
checkpoint stores of it is rounded: MXFP8 linears, NVFP4 experts, bf16 for the rest but the router.
"""

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from safetensors.numpy import save_file

from convert.geometry import Parameter
from dspark_jax import formats
from dspark_jax.formats import MXFP8Array, NVFP4Array, Weight

Params = dict[str, jax.Array]
Tree = Any
_QUANTISED = (MXFP8Array, NVFP4Array)

# Parameter paths -> tensor names of the published target and drafter.
_NAMES = (
    (r"target/embed_tokens", r"language_model.model.embed_tokens"),
    (r"target/norm", r"language_model.model.norm"),
    (r"target/lm_head", r"language_model.lm_head"),
    (r"target/layers/(\d+)/input_norm", r"language_model.model.layers.\1.input_layernorm"),
    (r"target/layers/(\d+)/post_attention_norm", r"language_model.model.layers.\1.post_attention_layernorm"),
    (r"target/layers/(\d+)/attention/indexer/(\w+)", r"language_model.model.layers.\1.self_attn.index_\2"),
    (r"target/layers/(\d+)/attention/(\w+)", r"language_model.model.layers.\1.self_attn.\2"),
    (r"target/layers/(\d+)/mlp/(\w+)", r"language_model.model.layers.\1.mlp.\2"),
    (r"target/layers/(\d+)/moe/router", r"language_model.model.layers.\1.block_sparse_moe.gate"),
    (
        r"target/layers/(\d+)/moe/shared_expert/(\w+)",
        r"language_model.model.layers.\1.block_sparse_moe.shared_experts.\2",
    ),
    (r"target/layers/(\d+)/moe/experts/(\w+)", r"language_model.model.layers.\1.block_sparse_moe.experts.{expert}.\2"),
    (r"drafter/(fc|hidden_norm)", r"language_model.model.dspark.\1"),
    (r"drafter/norm", r"language_model.model.dspark.final_norm"),
    (r"drafter/markov_head/(w[12])", r"language_model.model.dspark.markov_head.markov_\1"),
    (r"drafter/confidence_head", r"language_model.model.dspark.confidence_head.proj"),
    (r"drafter/layers/(\d+)/input_norm", r"language_model.model.dspark.layers.\1.decoder_layer.input_layernorm"),
    (
        r"drafter/layers/(\d+)/post_attention_norm",
        r"language_model.model.dspark.layers.\1.decoder_layer.post_attention_layernorm",
    ),
    (r"drafter/layers/(\d+)/attention/(\w+)", r"language_model.model.dspark.layers.\1.decoder_layer.self_attn.\2"),
    (r"drafter/layers/(\d+)/mlp/(\w+)", r"language_model.model.dspark.layers.\1.decoder_layer.mlp.\2"),
)
_EXPERT_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_PLAIN_LINEARS = ("target/lm_head/weight", "drafter/fc/weight")


def initial(geometry: Mapping[str, Parameter], key: jax.Array, *, layers: int) -> Params:
    """Random parameters; matrices that write to the residual stream start smaller the more of them there are."""
    params = {}
    for path, parameter in geometry.items():
        shape, draw = parameter.shape, jax.random.fold_in(key, zlib.crc32(path.encode()))
        if len(shape) == 1 or path.endswith("bias"):
            params[path] = jnp.zeros(shape, jnp.float32)
            continue
        if "embed_tokens" in path:
            scale = 0.1
        elif "lm_head" in path or "markov_head" in path or "confidence_head" in path:
            scale = 0.02
        else:
            scale = shape[-1] ** -0.5
        if path.endswith(("o_proj/weight", "down_proj/weight")):
            scale *= (2 * layers) ** -0.5
        params[path] = scale * jax.random.normal(draw, shape, jnp.float32)
    return params


def group(path: str) -> str:
    """Name under which training keeps a parameter of all layers as one array: fewer and larger arrays run faster."""
    return re.sub(r"layers/\d+", "layers/*", path)


def decays(name: str) -> bool:
    """Whether weight decay applies: to matrices and tables, not to norms and biases."""
    return not re.search(r"norm/|bias$", name)


def stack(params: Params) -> Params:
    """Parameters by path -> by group, layers along a new first axis."""
    groups: dict[str, list[jax.Array]] = {}
    for path, value in params.items():
        groups.setdefault(group(path), []).append(value)
    return {name: jnp.stack(parts) if "*" in name else parts[0] for name, parts in groups.items()}


def unstack(stacked: Params, geometry: Mapping[str, Parameter]) -> Params:
    """The inverse of `stack`."""
    counts: dict[str, int] = {}
    params = {}
    for path in geometry:
        name = group(path)
        index = counts.get(name, 0)
        counts[name] = index + 1
        params[path] = stacked[name][index] if "*" in name else stacked[name]
    return params


def stored(params: Params, geometry: Mapping[str, Parameter]) -> dict[str, Weight]:
    """Parameters, by path or by group, as a checkpoint stores them. Gate and up of an expert share one global scale."""
    kinds = {group(path): parameter.kind for path, parameter in geometry.items()}
    result: dict[str, Weight] = {}
    for path, value in params.items():
        kind = kinds[group(path)]
        if kind == "wide":
            result[path] = value
        elif kind == "plain" or path in _PLAIN_LINEARS:
            result[path] = value.astype(jnp.bfloat16)
        elif "/experts/" not in path:
            result[path] = formats.quantize_mxfp8(value)
        elif path.endswith("down_proj/weight"):
            result[path] = formats.quantize_nvfp4(value, global_scale_op="divide")
        elif path.endswith("gate_proj/weight"):
            up_path = path.replace("gate_proj", "up_proj")
            both = formats.quantize_nvfp4(jnp.concatenate([value, params[up_path]], axis=-2), global_scale_op="divide")
            rows = value.shape[-2]
            for name, part in ((path, slice(None, rows)), (up_path, slice(rows, None))):
                result[name] = NVFP4Array(
                    codes=both.codes[..., part, :],
                    scale=both.scale[..., part, :],
                    global_scale=both.global_scale,
                    global_scale_op="divide",
                )
    return result


def values(weights: Mapping[str, Weight]) -> Params:
    """Stored weights as float32."""
    return {path: formats.dequantize(weight, jnp.float32) for path, weight in weights.items()}


@jax.custom_vjp
def _passed_through(value: jax.Array, rounded: jax.Array) -> jax.Array:
    """`rounded`, whose gradient goes to `value` unchanged (a straight-through estimator)."""
    del value
    return rounded


_passed_through.defvjp(lambda value, rounded: (rounded, None), lambda _, g: (g, jnp.zeros_like(g)))


def rounded(params: Params, geometry: Mapping[str, Parameter], on: jax.Array | bool = True) -> Params:
    """Parameters (by path or by group) as the exported model will have them, with gradients as if not rounded.

    `on` False gives the parameters themselves; it may be traced, so that one program serves both parts of a training.
    """
    result = {}
    # Without the barrier XLA may drop f32 -> bf16 -> f32, and the training would not see what the export rounds.
    for path, value in values(lax.optimization_barrier(stored(params, geometry))).items():
        chosen = jnp.where(on, value, params[path])
        result[path] = _passed_through(params[path], lax.stop_gradient(chosen))
    return result


def dequantised(model: Tree) -> Tree:
    """A library model with every weight in bf16: the same law, and faster where memory is no concern."""

    def plain(weight: Any) -> Any:
        return formats.dequantize(weight, jnp.bfloat16) if isinstance(weight, _QUANTISED) else weight

    return jax.jit(lambda m: jax.tree.map(plain, m, is_leaf=lambda w: isinstance(w, _QUANTISED)))(model)


def module_params(module: nnx.Module, root: str) -> dict[str, Weight]:
    """The weights of a library module ("target" or "drafter") by path, as it stores them."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {"/".join(map(str, (root, *path))): variable.get_value() for path, variable in flat}


def published(weights: Mapping[str, Weight]) -> dict[str, np.ndarray]:
    """Tensors by their published name."""
    tensors: dict[str, np.ndarray] = {}
    for path, weight in weights.items():
        name = published_name(path)
        if isinstance(weight, MXFP8Array):
            tensors[f"{name}.weight"] = np.asarray(weight.codes)
            tensors[f"{name}.weight_scale_inv"] = np.asarray(weight.scale)
        elif isinstance(weight, NVFP4Array):
            for expert in range(weight.codes.shape[0]):
                prefix = name.format(expert=expert)
                tensors[f"{prefix}.weight_packed"] = np.asarray(weight.codes[expert])
                tensors[f"{prefix}.weight_scale"] = np.asarray(weight.scale[expert])
                tensors[f"{prefix}.weight_global_scale"] = np.asarray(weight.global_scale[expert]).reshape(1)
                tensors[f"{prefix}.input_global_scale"] = np.ones(1, np.float32)
        elif path.endswith("router/bias"):
            tensors[name.replace("gate", "e_score_correction_bias")] = np.asarray(weight)
        else:
            tensors[f"{name}.{path.rpartition('/')[2]}"] = np.asarray(weight)
    return tensors


def published_name(path: str) -> str:
    """Published name of a parameter's module; "{expert}" stands for the number of an expert.

    Raises:
      ValueError: a parameter that the published layout does not have.
    """
    module = path.rpartition("/")[0]
    for pattern, name in _NAMES:
        if match := re.fullmatch(pattern, module):
            name = match.expand(name)
            if "experts.{expert}." in name:
                head, _, last = name.rpartition(".")
                name = f"{head}.{_EXPERT_NAMES[last]}"
            return name
    raise ValueError(f"{path} has no name in the published layout")


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, shards: int
) -> None:
    """config.json, safetensors shards of about equal size, and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.safetensors"):
        old.unlink()
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    total, done = sum(t.nbytes for t in tensors.values()), 0
    groups: list[dict[str, np.ndarray]] = [{} for _ in range(shards)]
    for name, tensor in tensors.items():
        groups[min(shards - 1, done * shards // max(1, total))][name] = np.ascontiguousarray(tensor)
        done += tensor.nbytes
    weight_map = {}
    for i, group in enumerate(groups):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file(group, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(group, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=0) + "\n", encoding="utf-8")


def differences(expected: Mapping[str, Weight], loaded: Mapping[str, Weight]) -> list[str]:
    """Paths whose dequantised values are not bit-equal."""
    a, b = jax.jit(values)(dict(expected)), jax.jit(values)(dict(loaded))
    return [
        path
        for path in sorted(a.keys() | b.keys())
        if path not in a or path not in b or not np.array_equal(np.asarray(a[path]), np.asarray(b[path]))
    ]
