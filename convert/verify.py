"""Re-reading a converted checkpoint and comparing it, array by array, with what its source says."""

import contextlib
import dataclasses
import gc
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convert.build import build, insert
from convert.errors import ConversionError
from convert.plan import Piece, Plan
from convert.progress import release_memory

_GROUP_BYTES = 64 << 20
_COMPARE_BYTES = 16 << 20


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
    for name in ("config.json", "generation_config.json", "dspark/config.json"):
        if (result / name).exists() and name not in files:
            raise ConversionError(f"{result / name} is there, but the source has none; delete it or convert again")
    arrays = result / "arrays"
    try:
        stored = _flatten(ocp.metadata(str(arrays)).metadata)
    except Exception as e:  # Orbax and TensorStore report damaged files in many ways
        raise ConversionError(f"{arrays}: its description cannot be read; convert again") from e
    if set(stored) <= {""}:
        raise ConversionError(f"{arrays}: its description holds no array; convert again")
    wanted = {path for batch in plan.batches for piece in batch for path in _leaf_paths(piece)}
    for path in sorted(wanted ^ stored.keys()):
        problem = "is missing" if path in wanted else "is there but belongs to no parameter"
        raise ConversionError(f"{arrays}: {path} {problem}; convert again")
    with _no_stray_errors():
        for group in _groups(plan):
            loaded = _load(arrays, [p for piece in group for p in _leaf_paths(piece)], stored)
            for piece in group:
                _compare(arrays, piece, loaded)
                done(piece)
            del loaded
            release_memory()


def _load(arrays: Path, paths: Sequence[str], stored: dict[str, Any]) -> dict[str, np.ndarray]:
    """Read arrays as numpy. The stored metadata is the template, so that nothing is put on a device."""
    import orbax.checkpoint.experimental.v1 as ocp

    context = ocp.Context()
    context.pytree.loading.partial_load = True
    tree: dict[str, Any] = {}
    for path in paths:
        insert(tree, path, stored[path])
    # TensorStore reports damaged files as ValueError and others.
    with contextlib.suppress(Exception), context:
        return _flatten(ocp.load(str(arrays), tree))
    # Tasks of the failed call complain when they are collected; that must happen while nobody listens.
    gc.collect()
    for path in paths if len(paths) > 1 else ():
        _load(arrays, [path], stored)
    raise ConversionError(f"{arrays}: {', '.join(paths)} cannot be read; convert again")


@contextlib.contextmanager
def _no_stray_errors() -> Iterator[None]:
    """When one array of a call cannot be read, the others' callbacks find their event loop closed and say so."""
    right, logger = sys.unraisablehook, logging.getLogger("asyncio")
    disabled = logger.disabled

    def hook(unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            right(unraisable)

    sys.unraisablehook, logger.disabled = hook, True
    try:
        yield
    finally:
        sys.unraisablehook, logger.disabled = right, disabled


def _groups(plan: Plan) -> Iterator[list[Piece]]:
    """Pieces that are read in one call: small ones together."""
    group: list[Piece] = []
    for piece in (p for batch in plan.batches for p in batch):
        if group and sum(p.nbytes for p in group) + piece.nbytes > _GROUP_BYTES:
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _compare(arrays: Path, piece: Piece, loaded: dict[str, np.ndarray]) -> None:
    stacked = piece.leaf.stacked
    for start in range(piece.start, piece.stop):
        expected = build(dataclasses.replace(piece, start=start, stop=start + 1))
        at = start - piece.start
        for path in _leaf_paths(piece):
            value = expected[path.rpartition("/")[2]] if isinstance(expected, dict) else expected
            found = loaded[path]
            shape = (piece.stop - piece.start, *value.shape[1:]) if stacked else value.shape
            if found.shape != shape or found.dtype != value.dtype:
                raise ConversionError(
                    f"{arrays}: {path} is {found.dtype} {list(found.shape)} but the source says {value.dtype} "
                    f"{list(shape)}; convert again"
                )
            if not _same_bytes(found[at : at + 1] if stacked else found, value):
                raise ConversionError(f"{arrays}: {path} differs from the source; convert again")


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of one shape and dtype have the same bits; -0 and 0 differ, a NaN equals itself."""
    flat = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b)]
    ends = range(0, flat[0].size, _COMPARE_BYTES)
    return all(np.array_equal(flat[0][i : i + _COMPARE_BYTES], flat[1][i : i + _COMPARE_BYTES]) for i in ends)


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
