"""The destination folder: whether a conversion may write to it, its version, and writing small files safely."""

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

from convert.errors import ConversionError
from convert.safetensors_reader import read_json

# Version of the destination's layout; a reader refuses a newer one.
FORMAT_VERSION = 1
LAYOUT = "layout.json"
LOCK = "lock"
# More parts than any stack has experts: a damaged description must not make a plan of a billion pieces.
MOST_PARTS = 4096


def partial_folder(destination: Path) -> Path:
    """Where an unfinished conversion lies."""
    return destination.with_name(destination.name + ".partial")


def existing_parent(path: Path) -> Path:
    """The nearest folder above `path` that exists."""
    path = path.absolute()
    return next(p for p in path.parents if p.exists())


def check_version(version: Any, path: Path) -> None:
    """Raise `ConversionError` if `path` was written by a newer version of this library."""
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ConversionError(
            f"{path}: format_version is {version!r} but this library knows up to {FORMAT_VERSION}; "
            "install a newer dspark-jax or convert again"
        )


def read_layout(destination: Path) -> dict[str, Any]:
    """The layout of a finished conversion. Raises `ConversionError` if it is newer than this library."""
    path = destination / LAYOUT
    layout = read_json(path)
    check_version(layout.get("format_version"), path)
    for key, kind in {"weights": str, "source": dict, "arrays": dict}.items():
        if not isinstance(layout.get(key), kind):
            raise ConversionError(f"{path}: {key} is missing or damaged; delete {destination} and convert again")
    return layout


def check_destination(destination: Path, *, resume: bool) -> None:
    """Raise `ConversionError` if a conversion may not write to `destination`; changes nothing."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConversionError(f"{destination} is not empty; choose another DST, or delete it first")
    if any(c in str(destination) for c in "*?[]"):
        raise ConversionError(f"{destination}: Orbax takes * ? [ ] in a path for a pattern; name another DST")
    if destination.is_mount():
        raise ConversionError(f"{destination} is a mount point, which cannot be renamed to; name a folder inside it")
    partial = partial_folder(destination)
    if partial.exists() and not resume:
        if is_locked(partial):
            raise ConversionError(f"{partial}: another conversion is writing here; wait for its end")
        raise ConversionError(f"{partial} holds an unfinished conversion; go on with --resume, or delete it")


def is_locked(partial: Path) -> bool:
    """Whether a running conversion holds the lock of this folder."""
    try:
        with open(partial / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock file: nobody can hold it
        return False
    return False


def remove_leftovers(destination: Path) -> None:
    """Delete the `DST.partial` of a conversion that was killed after DST had appeared."""
    shutil.rmtree(partial_folder(destination), ignore_errors=True)


def write_file(path: Path, content: bytes) -> None:
    """Write a file so that it is there completely or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
    os.rename(temporary, path)


def sync_folder(path: Path) -> None:
    """Make the entries of a folder durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
