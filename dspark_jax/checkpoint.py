"""Checkpoints: Orbax arrays, the configs of the source, and a layout description.

`load` reads what `python -m convert.minimax` or `save` wrote; `python -m convert.export` writes it back into the
published layout.
"""

import contextlib
import dataclasses
import gc
import itertools
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import orbax.checkpoint.experimental.v1 as ocp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh

from dspark_jax import formats
from dspark_jax.config import DrafterConfig, TargetConfig
from dspark_jax.drafter import DSparkDrafter
from dspark_jax.formats import Leaf, MXFP8Array, NVFP4Array, Weight
from dspark_jax.heads import check_head_tensors
from dspark_jax.kernels import Kernels
from dspark_jax.layers import Format
from dspark_jax.sharding import ShardingRules, check_mesh, default_sharding, weight_sharding
from dspark_jax.target import MiniMaxTarget

LAYOUT_FILE = "layout.json"
ARRAYS_DIR = "arrays"
FORMAT_VERSION = 1
# Bytes in flight while arrays are read, beyond the arrays themselves.
_READ_BYTES = 2 << 30


class CheckpointError(ValueError):
    """A folder that is not a finished conversion, or does not fit the model its configs describe."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """What `load` returns and `generate` takes: a pytree of the target and, where there is one, its drafter."""

    target: MiniMaxTarget
    drafter: DSparkDrafter | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A converted checkpoint as its `layout.json` and configs describe it, without its arrays.

    Attributes:
      path: the checkpoint's folder.
      arrays: per parameter path, what the converter recorded: format, shape, parts, source.
      target, drafter: the parsed configs; one of them may be missing.
      record: the whole `layout.json`.
    """

    path: Path
    arrays: Mapping[str, Mapping[str, Any]]
    target: TargetConfig | None
    drafter: DrafterConfig | None
    record: Mapping[str, Any]

    @classmethod
    def read(cls, path: str | Path) -> "Layout":
        """Read `path`/layout.json and the configs beside it.

        Raises:
          CheckpointError: not a converted checkpoint, or one that a newer version of the library wrote.
          ConfigError: a config that the library cannot compute.
        """
        path = Path(path).expanduser().absolute()  # Orbax takes no relative path
        file = path / LAYOUT_FILE
        interrupted = path.with_name(path.name + ".partial").exists()
        if not path.is_dir() and not interrupted:
            raise CheckpointError(f"{path} is not a folder; name what `python -m convert.minimax SRC DST` wrote to DST")
        if not file.is_file():
            hint = ""
            if interrupted or path.name.endswith(".partial"):
                hint = "; its conversion was interrupted, finish it with --resume"
            elif (path / "model.safetensors.index.json").exists() or list(path.glob("*.safetensors")):
                hint = "; these are safetensors, convert them first: python -m convert.minimax SRC DST"
            raise CheckpointError(f"{path} is not a converted checkpoint: it has no {LAYOUT_FILE}{hint}")
        record = _read_json(file)
        wanted = {"format_version": int, "weights": str, "sparse_layers": list, "arrays": dict, "source": dict}
        broken = [
            k for k, kind in wanted.items() if not isinstance(record, dict) or not isinstance(record.get(k), kind)
        ]
        if broken:
            raise CheckpointError(f"{file}: {broken[0]} is missing or of the wrong type; convert the checkpoint again")
        version = record["format_version"]
        if version > FORMAT_VERSION:
            raise CheckpointError(
                f"{file}: format_version is {version!r}, this library reads up to {FORMAT_VERSION}; update the library"
            )
        for name, entry in record["arrays"].items():
            _check_entry(file, name, entry)
        ignore = tuple(record.get("ignored_config_keys", ()))
        target = drafter = None
        if (path / "config.json").is_file():
            generation = path / "generation_config.json"
            target = TargetConfig.from_hf(
                _read_json(path / "config.json"),
                generation_config=_read_json(generation) if generation.is_file() else None,
                sparse_layers=tuple(bool(sparse) for sparse in record["sparse_layers"]),
                ignore=ignore,
            )
        if (path / "dspark" / "config.json").is_file():
            drafter = DrafterConfig.from_hf(_read_json(path / "dspark" / "config.json"), ignore=ignore)
        if target is not None and drafter is not None:
            drafter.check_target(target)
        return cls(path=path, arrays=record["arrays"], target=target, drafter=drafter, record=record)

    def formats(self) -> dict[str, Format]:
        """Storage format by parameter path, as model constructors take it."""
        return {path: _format(entry) for path, entry in self.arrays.items()}


def _check_entry(file: Path, name: str, entry: Any) -> None:
    entry = entry if isinstance(entry, dict) else {}
    shape, parts = entry.get("shape"), entry.get("parts", 1)
    good = entry.get("format") in ("bf16", "f32", "mxfp8", "nvfp4") and type(parts) is int and parts >= 1
    good = good and isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape)
    good = good and parts <= (shape or [1])[0]
    if not good or (entry["format"] == "nvfp4" and entry.get("global_scale") not in ("multiply", "divide")):
        raise CheckpointError(f"{file}: the entry of {name} is damaged; convert the checkpoint again")


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error


def _format(entry: Mapping[str, Any]) -> Format:
    name = f"nvfp4/{entry['global_scale']}" if entry["format"] == "nvfp4" else entry["format"]
    return cast(Format, name)


def load(
    path: str | Path,
    *,
    weights: str = "native",
    compute_dtype=jnp.bfloat16,
    mesh: Mesh | None = None,
    rules: ShardingRules | None = None,
    kernels: Kernels | None = None,
) -> Model:
    """Load a converted checkpoint: the target and, if there is one, its drafter.

    Args:
      path: a folder that `python -m convert.minimax` or `save` wrote.
      weights: "native" keeps every weight in the format it is stored in; "bf16" dequantises on the way in.
      compute_dtype: dtype of activations and caches; float32 for comparisons, bfloat16 otherwise.
      mesh: devices to spread the arrays over; the default device without one.
      rules: how logical axes map to mesh axes, `ShardingRules()` by default.
      kernels: what the model's work goes through; the best on the device by default, XLA on a mesh of several devices.

    Raises:
      CheckpointError: not a finished conversion, no target in it, or arrays that do not fit the configs.
      ConfigError: a config that the library cannot compute.
      ValueError: `weights` is neither "native" nor "bf16", the compute dtype neither bfloat16 nor float32, `mesh` or
        `kernels` are none, or there are kernels other than XLA's on a mesh of several devices.
    """
    compute_dtype, kernels = _compute_dtype(compute_dtype), _kernels(kernels, _mesh(mesh))
    layout = Layout.read(path)
    if layout.target is None:
        raise CheckpointError(
            f"{path} holds a drafter only: convert its target too, or load it with load_drafter and combine the two as "
            "Model(target=..., drafter=...)"
        )
    config, kinds = layout.target, layout.formats()
    target = _restore(
        nnx.eval_shape(lambda: MiniMaxTarget(config, formats=kinds, compute_dtype=compute_dtype, kernels=kernels)),
        "target",
        layout,
        weights=weights,
        mesh=mesh,
        rules=rules,
    )
    drafter = None
    if layout.drafter is not None or any(name.startswith("drafter/") for name in layout.arrays):
        drafter = load_drafter(
            path, weights=weights, compute_dtype=compute_dtype, mesh=mesh, rules=rules, kernels=kernels
        )
    return Model(target=target, drafter=drafter)


def _compute_dtype(dtype) -> Any:
    """bfloat16 or float32: float16 overflows in the residual stream, and nothing else is a dtype of activations."""
    with contextlib.suppress(TypeError):
        if jnp.dtype(dtype) in (jnp.bfloat16, jnp.float32):
            return jnp.dtype(dtype)
    raise ValueError(f"compute_dtype must be bfloat16 or float32, found {dtype!r}")


def _mesh(mesh: Mesh | None) -> Mesh | None:
    if not isinstance(mesh, Mesh | None):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, found {mesh!r}; make one with jax.make_mesh")
    return mesh


def _kernels(kernels: Kernels | None, mesh: Mesh | AbstractMesh | None) -> Kernels:
    """The default, or ValueError for what are no kernels, and for kernels on a mesh: XLA cannot split them."""
    if not isinstance(kernels, Kernels | None):
        raise ValueError(f"kernels must be a dspark_jax.Kernels, found {kernels!r}; name them as Kernels(linear=...)")
    if mesh is None or mesh.size == 1:
        return kernels or Kernels()
    if kernels not in (None, Kernels.xla()):
        raise ValueError(f"kernels must be Kernels.xla() on a mesh of {mesh.size} devices, found {kernels}")
    return Kernels.xla()


def load_drafter(
    path: str | Path,
    *,
    weights: str = "native",
    compute_dtype=jnp.bfloat16,
    mesh: Mesh | None = None,
    rules: ShardingRules | None = None,
    kernels: Kernels | None = None,
) -> DSparkDrafter:
    """Load the drafter of a converted checkpoint; arguments and errors as for `load`."""
    compute_dtype, kernels = _compute_dtype(compute_dtype), _kernels(kernels, _mesh(mesh))
    layout = Layout.read(path)
    if layout.drafter is None:
        if any(name.startswith("drafter/") for name in layout.arrays):
            raise CheckpointError(
                f"{path} has the arrays of a drafter, but dspark/config.json is missing; copy it there or convert again"
            )
        raise CheckpointError(f"{path} has no drafter: dspark/config.json is missing; generate with draft='none'")
    config, kinds = layout.drafter, layout.formats()
    check_head_tensors(config, {path: tuple(entry["shape"]) for path, entry in layout.arrays.items()})
    abstract = nnx.eval_shape(
        lambda: DSparkDrafter(config, formats=kinds, compute_dtype=compute_dtype, kernels=kernels)
    )
    return _restore(abstract, "drafter", layout, weights=weights, mesh=mesh, rules=rules)


def _restore[M: nnx.Module](
    abstract: M, root: str, layout: Layout, *, weights: str, mesh: Mesh | None, rules: ShardingRules | None
) -> M:
    """`abstract` with the arrays of the checkpoint in place of its shapes."""
    if weights not in ("native", "bf16"):
        raise ValueError(f"weights must be 'native' or 'bf16', found {weights!r}")
    if mesh is not None:
        check_mesh(mesh, rules or ShardingRules())
        # XLA places intermediate values; explicit axes would ask every operation of the model for a sharding.
        mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    graph, state = nnx.split(abstract)
    variables = {"/".join(map(str, (root, *path))): v for path, v in nnx.to_flat_state(state)}
    stored = {path for path in layout.arrays if path.startswith(f"{root}/")}
    missing, extra = sorted(variables.keys() - stored), sorted(stored - variables.keys())
    if missing or extra:
        raise CheckpointError(
            f"{layout.path}: arrays do not fit the config: {len(missing)} missing (first {missing[:1]}), "
            f"{len(extra)} unexpected (first {extra[:1]}); convert the checkpoint again"
        )
    requests = {}
    for path, variable in variables.items():
        weight, axes = variable.get_value(), variable.get_metadata("logical_axes")
        if tuple(layout.arrays[path]["shape"]) != tuple(weight.shape):
            raise CheckpointError(
                f"{layout.path}: {path} has shape {tuple(layout.arrays[path]['shape'])}, "
                f"the config asks for {tuple(weight.shape)}; convert the checkpoint again"
            )
        shardings = (
            jax.tree.map(lambda _: default_sharding(), weight)
            if mesh is None
            else weight_sharding(weight, axes, mesh, rules or ShardingRules())
        )
        requests[path] = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), weight, shardings
        )
    loaded = _read_arrays(layout, requests)
    if weights == "bf16":
        loaded = {path: _to_bf16(w) if isinstance(w, MXFP8Array | NVFP4Array) else w for path, w in loaded.items()}
    restored = {path: variables[path].replace(weight) for path, weight in loaded.items()}
    flat = [(path, restored["/".join(map(str, (root, *path)))]) for path, _ in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def _to_bf16(weight: Weight) -> jax.Array:
    return jax.jit(lambda w: formats.dequantize(w, jnp.bfloat16))(weight)


def insert_path(tree: dict[str, Any], path: str, value: Any) -> None:
    """Put a value at "a/b/c" into nested dicts."""
    *parents, last = path.split("/")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = value


def _read_arrays(layout: Layout, requests: Mapping[str, Leaf]) -> dict[str, Weight]:
    """Restore `requests`, abstract weights by path, joining stacks that were stored in parts."""
    tree: dict[str, Any] = {}
    for path, weight in requests.items():
        parts = layout.arrays[path].get("parts", 1)
        node = as_dict(weight)
        if parts > 1:
            cuts = [weight.shape[0] * i // parts for i in range(parts + 1)]
            sizes = [b - a for a, b in itertools.pairwise(cuts)]
            node = {f"part_{i:03d}": jax.tree.map(lambda a, n=n: _resized(a, n), node) for i, n in enumerate(sizes)}
        insert_path(tree, path, node)
    context = ocp.Context()
    context.memory.read_concurrent_bytes = _READ_BYTES
    # Target and drafter are read apart; that nothing is left over was checked against layout.json.
    context.pytree.loading.partial_load = True
    folder = layout.path / ARRAYS_DIR
    try:
        with context, _quiet_event_loop():
            restored = ocp.load(str(folder), tree)
    except Exception as error:  # Orbax and TensorStore report damaged files in many ways
        reason = str(error).split("\n", 1)[0][:200]
        raise CheckpointError(f"{folder} cannot be read ({reason}); convert the checkpoint again") from error
    result = {}
    for path, weight in requests.items():
        node = restored
        for name in path.split("/"):
            node = node[name]
        if layout.arrays[path].get("parts", 1) > 1:
            node = jax.tree.map(lambda *parts: jnp.concatenate(parts), *[node[k] for k in sorted(node)])
        result[path] = _from_dict(weight, node)
    return result


@contextlib.contextmanager
def _quiet_event_loop() -> Iterator[None]:
    """When one array of a call cannot be read, the others' callbacks find their event loop closed and say so."""
    right, logger = sys.unraisablehook, logging.getLogger("asyncio")
    disabled = logger.disabled
    sys.unraisablehook = lambda e: None if "Event loop is closed" in str(e.exc_value) else right(e)
    logger.disabled = True
    try:
        yield
    except Exception:
        # Tasks of the failed call complain when they are collected; that must happen while nobody listens.
        gc.collect()
        raise
    finally:
        sys.unraisablehook, logger.disabled = right, disabled


def _resized(array: jax.ShapeDtypeStruct, size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size, *array.shape[1:]), array.dtype, sharding=array.sharding)


def as_dict(weight: Leaf) -> Any:
    """The arrays of a weight by the names they are stored under; a plain array as it is."""
    if isinstance(weight, NVFP4Array):
        return {"codes": weight.codes, "scale": weight.scale, "global_scale": weight.global_scale}
    if isinstance(weight, MXFP8Array):
        return {"codes": weight.codes, "scale": weight.scale}
    return weight


def _from_dict(like: Leaf, node: Any) -> Weight:
    return dataclasses.replace(like, **node) if isinstance(like, MXFP8Array | NVFP4Array) else node
