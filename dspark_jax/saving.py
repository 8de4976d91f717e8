"""A model in memory, written as a checkpoint that `dspark_jax.load` takes."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from flax import nnx

from dspark_jax._version import __version__
from dspark_jax.checkpoint import (
    ARRAYS_DIR,
    FORMAT_VERSION,
    LAYOUT_FILE,
    CheckpointError,
    Layout,
    Model,
    as_dict,
    insert_path,
)
from dspark_jax.drafter import DSparkDrafter
from dspark_jax.formats import Leaf, MXFP8Array, NVFP4Array


def save(model: Model | DSparkDrafter, path: str | Path, *, like: str | Path) -> None:
    """Write a model in memory, fine-tuned for instance, as a checkpoint that `load` takes; at once or not at all.

    Args:
      model: what `load` or `load_drafter` returned, with any values; weights keep the format they are in.
      path: folder to make; must not exist or be empty.
      like: the converted checkpoint that the model came from. Its configs and tokenizer are copied, for a drafter
        alone what lies in its dspark folder.

    Raises:
      CheckpointError: `like` is no converted checkpoint or has other configs, `path` is taken or holds one of * ? [ ].
      ConfigError: a config of `like` that the library cannot compute.
    """
    if not isinstance(model, Model | DSparkDrafter):
        raise CheckpointError(f"save takes what load or load_drafter returned, found {type(model).__name__}")
    path, layout = Path(path).expanduser().absolute(), Layout.read(like)
    target, drafter = (model.target, model.drafter) if isinstance(model, Model) else (None, model)
    parts = [("target", "", target, layout.target), ("drafter", "dspark", drafter, layout.drafter)]
    parts = [part for part in parts if part[2] is not None]
    arrays, tree = {}, {}
    for root, _, module, config in parts:
        _check_same_config(root, module.config, config, layout.path)
        for keys, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
            name, weight = "/".join(map(str, (root, *keys))), variable.get_value()
            arrays[name] = _stored_as(name, weight) | {"shape": list(weight.shape), "parts": 1}
            insert_path(tree, name, as_dict(weight))
    partial = path.with_name(path.name + ".partial")
    if any(c in str(path) for c in "*?[]"):
        raise CheckpointError(f"{path}: Orbax takes * ? [ ] in a path for a pattern; choose another folder")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} is not empty; choose another folder, or delete it first")
    try:
        partial.mkdir(parents=True)
    except FileExistsError as error:
        raise CheckpointError(
            f"{partial} is in the way: something did not end there; delete it, or choose another folder"
        ) from error
    record = {
        "format_version": FORMAT_VERSION,
        "library_version": __version__,
        "weights": "native",
        "ignored_config_keys": list(layout.record.get("ignored_config_keys", ())),
        "source": {"name": path.name, "fingerprint": None, "like": layout.record["source"]},
        "sparse_layers": list(target.config.sparse_layers) if target is not None else [],
        "arrays": arrays,
        "skipped": [],
    }
    context = ocp.Context()
    context.array.saving.use_compression = False  # fp8 does not shrink
    try:
        for _, folder, _, _ in parts:
            (partial / folder).mkdir(exist_ok=True)
            for file in (layout.path / folder).iterdir():
                if file.is_file() and file.name != LAYOUT_FILE:
                    shutil.copyfile(file, partial / folder / file.name)
        with context:
            ocp.save(str(partial / ARRAYS_DIR), tree)
        (partial / LAYOUT_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        if path.exists():
            path.rmdir()
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _check_same_config(root: str, mine: Any, other: Any, like: Path) -> None:
    if other is None:
        raise CheckpointError(f"{like} has no {root}, but the model has; name the checkpoint that it came from")
    if mine != other:
        field = next(f.name for f in dataclasses.fields(mine) if getattr(mine, f.name) != getattr(other, f.name))
        raise CheckpointError(
            f"{like} is of another {root}: {field} is {getattr(other, field)!r} there and {getattr(mine, field)!r} "
            "in the model; name the checkpoint that it came from"
        )


def _stored_as(name: str, weight: Leaf) -> dict[str, str]:
    """The entry's format for a weight in memory."""
    for leaf in jax.tree.leaves(weight):
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise CheckpointError(f"{name} is {type(leaf).__name__}, which holds no values; save a loaded model")
    if isinstance(weight, NVFP4Array):
        return {"format": "nvfp4", "global_scale": weight.global_scale_op}
    if isinstance(weight, MXFP8Array):
        return {"format": "mxfp8"}
    names = {jnp.dtype(jnp.bfloat16): "bf16", jnp.dtype(jnp.float32): "f32"}
    if weight.dtype not in names:
        raise CheckpointError(f"{name} is {weight.dtype}, but a checkpoint holds bfloat16 or float32; cast it")
    return {"format": names[weight.dtype]}
