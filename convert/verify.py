"""Re-reading a converted checkpoint and comparing it, array by array, with what its source says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from convert.build import build, insert
from convert.errors import ConversionError
from convert.plan import Piece, Plan


def verify(result: Path, plan: Plan, files: dict[str, bytes], done: Callable[[Piece], None]) -> None:
    """Compare every array and file in `result` with the source that `plan` was made from.

    Args:
      result: a complete destination folder.
      plan: the plan of the conversion.
      files: relative path -> content of the files that were copied.
      done: called after each piece.

    Raises:
      ConversionError: something is missing, left over or different; the message names it.
    """
    import orbax.checkpoint.experimental.v1 as ocp

    for name, content in files.items():
        if not (result / name).is_file() or (result / name).read_bytes() != content:
            raise ConversionError(f"{result / name} differs from the source; convert again")
    arrays = result / "arrays"
    stored = _flatten(ocp.metadata(str(arrays)).metadata)
    wanted = {path for batch in plan.batches for piece in batch for path in _leaf_paths(piece)}
    for path in sorted(wanted ^ stored.keys()):
        problem = "is missing" if path in wanted else "is there but belongs to no parameter"
        raise ConversionError(f"{arrays}: {path} {problem}; convert again")
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    for batch in plan.batches:
        # The stored metadata is the template: arrays come back as numpy, on no device.
        tree: dict[str, Any] = {}
        for path in (p for piece in batch for p in _leaf_paths(piece)):
            insert(tree, path, stored[path])
        with context:
            loaded = _flatten(ocp.load(str(arrays), tree))
        for piece in batch:
            _compare(arrays, piece, loaded)
            done(piece)


def _compare(arrays: Path, piece: Piece, loaded: dict[str, np.ndarray]) -> None:
    expected = build(piece)
    for path in _leaf_paths(piece):
        value = expected[path.rpartition("/")[2]] if isinstance(expected, dict) else expected
        found = loaded.pop(path)
        if found.shape != value.shape or found.dtype != value.dtype:
            raise ConversionError(
                f"{arrays}: {path} is {found.dtype} {list(found.shape)} but the source says {value.dtype} "
                f"{list(value.shape)}; convert again"
            )
        if not _same_bytes(found, value):
            raise ConversionError(f"{arrays}: {path} differs from the source; convert again")


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    a, b = (np.atleast_1d(x) for x in (a, b))
    return all(
        np.array_equal(np.ascontiguousarray(x).view(np.uint8), np.ascontiguousarray(y).view(np.uint8))
        for x, y in zip(a, b, strict=True)
    )


def _leaf_paths(piece: Piece) -> list[str]:
    names = piece.leaf.array_sizes(piece.stop - piece.start)
    return [f"{piece.path}/{name}" if name else piece.path for name in names]


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        path: leaf
        for key, child in tree.items()
        for path, leaf in _flatten(child, f"{prefix}/{key}" if prefix else str(key)).items()
    }
