"""Reading the arrays of a converted checkpoint as numpy arrays."""

import contextlib
import gc
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convert.build import insert
from convert.errors import ConversionError


def read_description(arrays: Path) -> dict[str, Any]:
    """Path -> what Orbax knows of each stored array, without reading them.

    Raises:
      ConversionError: there is no readable description.
    """
    import orbax.checkpoint.experimental.v1 as ocp

    try:
        stored = _flatten(ocp.metadata(str(arrays)).metadata)
    except Exception as e:  # Orbax and TensorStore report damaged files in many ways
        raise ConversionError(f"{arrays}: its description cannot be read; convert again") from e
    if set(stored) <= {""}:
        raise ConversionError(f"{arrays}: its description holds no array; convert again")
    return stored


def read_arrays(arrays: Path, paths: Sequence[str], stored: dict[str, Any]) -> dict[str, np.ndarray]:
    """Read arrays as numpy -> path -> array.

    The templates are numpy's (and untouched memory), so that nothing is put on a device.

    Raises:
      ConversionError: an array cannot be read; the message names it.
    """
    import orbax.checkpoint.experimental.v1 as ocp

    context = ocp.Context()
    context.pytree.loading.partial_load = True
    tree: dict[str, Any] = {}
    for path in paths:
        insert(tree, path, np.empty(stored[path].shape, stored[path].dtype))
    # TensorStore reports damaged files as ValueError and others.
    with contextlib.suppress(Exception), context:
        return _flatten(ocp.load(str(arrays), tree))
    # Tasks of the failed call complain when they are collected; that must happen while nobody listens.
    gc.collect()
    for path in paths if len(paths) > 1 else ():
        read_arrays(arrays, [path], stored)
    raise ConversionError(f"{arrays}: {', '.join(paths)} cannot be read; convert again")


@contextlib.contextmanager
def no_stray_errors() -> Iterator[None]:
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


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        path: leaf
        for key, child in tree.items()
        for path, leaf in _flatten(child, f"{prefix}/{key}" if prefix else str(key)).items()
    }
