"""Re-reading a converted checkpoint and comparing it, array by array, with what its source says."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from convert.build import build
from convert.errors import ConversionError
from convert.plan import Piece, Plan
from convert.progress import release_memory
from convert.stored import no_stray_errors, read_arrays, read_description

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
    for name, content in files.items():
        if not (result / name).is_file() or (result / name).read_bytes() != content:
            raise ConversionError(f"{result / name} differs from the source; convert again")
    for name in ("config.json", "generation_config.json", "dspark/config.json"):
        if (result / name).exists() and name not in files:
            raise ConversionError(f"{result / name} is there, but the source has none; delete it or convert again")
    arrays = result / "arrays"
    stored = read_description(arrays)
    wanted = {path for batch in plan.batches for piece in batch for path in _leaf_paths(piece)}
    for path in sorted(wanted ^ stored.keys()):
        problem = "is missing" if path in wanted else "is there but belongs to no parameter"
        raise ConversionError(f"{arrays}: {path} {problem}; convert again")
    with no_stray_errors():
        for group in _groups(plan):
            loaded = read_arrays(arrays, [p for piece in group for p in _leaf_paths(piece)], stored)
            for piece in group:
                _compare(arrays, piece, loaded)
                done(piece)
            del loaded
            release_memory()


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
