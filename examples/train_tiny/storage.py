"""Parameters by path, the formats they are stored in, and writing them in the published layout.

Training holds every parameter in float32 by the library's own path ("target/layers/0/attention/q_proj/weight"). What a
checkpoint stores of it is rounded: MXFP8 linears, NVFP4 experts, bf16 for the rest but the router.
"""

import dataclasses
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

from convert import published
from convert.formats import Format
from convert.geometry import Parameter
from convert.safetensors_writer import write_shards
from dspark_jax import formats
from dspark_jax.formats import MXFP8Array, NVFP4Array, Weight

Params = dict[str, jax.Array]
Tree = Any
_QUANTISED = (MXFP8Array, NVFP4Array)

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


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, Weight], *, shard_bytes: int = 5_000_000
) -> None:
    """config.json, safetensors shards and their index, in the published layout."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.safetensors"):
        old.unlink()
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    tensors, values = [], []
    for path, weight in weights.items():
        arrays = _arrays(weight)
        for tensor in published.tensors(path, tuple(weight.shape), _format(weight)):
            tensors.append(tensor)
            values.append(tensor.value(arrays))
            if isinstance(weight, NVFP4Array) and tensor.array == "global_scale":
                # Runtimes that quantise activations ask for their scale; this library does not.
                name = tensor.name.replace("weight_global_scale", "input_global_scale")
                tensors.append(dataclasses.replace(tensor, name=name))
                values.append(np.ones(tensor.shape, np.float32))
    write_shards(folder, tensors, values, shard_bytes=shard_bytes)


def _arrays(weight: Weight) -> dict[str, np.ndarray]:
    if not isinstance(weight, _QUANTISED):
        return {"": np.asarray(weight)}
    names = ("codes", "scale", "global_scale") if isinstance(weight, NVFP4Array) else ("codes", "scale")
    return {name: np.asarray(getattr(weight, name)) for name in names}


def _format(weight: Weight) -> Format:
    if isinstance(weight, NVFP4Array):
        return Format("nvfp4", weight.global_scale_op)
    return (
        Format("mxfp8") if isinstance(weight, MXFP8Array) else Format("f32" if weight.dtype == jnp.float32 else "bf16")
    )


def differences(expected: Mapping[str, Weight], loaded: Mapping[str, Weight]) -> list[str]:
    """Paths whose dequantised values are not bit-equal."""
    a, b = jax.jit(values)(dict(expected)), jax.jit(values)(dict(loaded))
    return [
        path
        for path in sorted(a.keys() | b.keys())
        if path not in a or path not in b or not np.array_equal(np.asarray(a[path]), np.asarray(b[path]))
    ]
