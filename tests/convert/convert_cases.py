"""What the converter's tests share: running it, reading its result, and reading goldens without its code."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from checkpoint_maker import DATA, Tensor, read_shard, write_shard

from convert import minimax


def run(*argv: object) -> int:
    """The command line -> exit status."""
    return minimax.main([str(a) for a in argv])


def fails(capsys, *argv: object) -> str:
    """The command line must fail with one line on stderr -> that line; neither DST nor DST.partial may exist."""
    destination = Path(str(argv[1]))
    capsys.readouterr()
    assert run(*argv) != 0
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert out == ""
    assert not destination.exists() and not destination.with_name(destination.name + ".partial").exists()
    return err


def load_arrays(destination: Path) -> dict[str, np.ndarray]:
    """Every stored array of a conversion by its path in the tree."""

    def flatten(tree: Any, prefix: str) -> dict[str, np.ndarray]:
        if not isinstance(tree, dict):
            return {prefix: np.asarray(tree)}
        return {p: a for k, v in tree.items() for p, a in flatten(v, f"{prefix}/{k}" if prefix else k).items()}

    template = ocp.metadata(str(destination / "arrays")).metadata
    return flatten(ocp.load(str(destination / "arrays"), template), "")


def digests(destination: Path) -> dict[str, str]:
    """Digest of every restored array, of the tree metadata, and of every file beside the arrays."""
    result = {}
    for path, array in load_arrays(destination).items():
        head = f"{array.dtype} {array.shape} ".encode()
        result[path] = hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()
    metadata = json.loads((destination / "arrays" / "state" / "_METADATA").read_text())
    result["tree metadata"] = json.dumps(metadata, sort_keys=True)
    for file in sorted(destination.rglob("*")):
        relative = file.relative_to(destination)
        if file.is_file() and relative.parts[0] != "arrays":
            result[str(relative)] = hashlib.sha256(file.read_bytes()).hexdigest()
    return result


def golden_tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name -> dtype, shape, bytes of every tensor of a checkpoint."""
    tensors = (t for shard in sorted(folder.glob("*.safetensors")) for t in read_shard(shard))
    return {t.name: (t.dtype, t.shape, b"".join(t.data())) for t in tensors}


def copy_golden(name: str, target: Path) -> Path:
    """A copy of a golden checkpoint that a test may damage: configs, index, shards."""
    for file in (DATA / name).rglob("*"):
        if file.suffix in (".json", ".safetensors") and file.name not in ("greedy_trace.json",):
            copied = target / file.relative_to(DATA / name)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copied)
    return target


def edit_json(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]


def edit_tensors(folder: Path, name: str, edit: Callable[[Tensor], Tensor | None]) -> None:
    """Replace one tensor in its shard (None removes it there and in the index)."""
    shard = shard_of(folder, name)
    tensors = [edit(t) if t.name == name else t for t in read_shard(shard)]
    write_shard(shard, [t for t in tensors if t is not None])
    changed = [t for t in tensors if t is not None and t.name not in index_map(folder)]

    def fix(index: dict[str, Any]) -> None:
        if not any(t is not None and t.name == name for t in tensors):
            del index["weight_map"][name]
        for t in changed:
            index["weight_map"][t.name] = shard.name

    edit_json(folder / "model.safetensors.index.json", fix)


def index_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
