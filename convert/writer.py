"""Writing the destination so that it can be killed at any point and resumed.

Everything is made in `DST.partial`:

    lock             held while a conversion runs
    marker.json      which source and options this is; a resumption with others is refused
    batches/0007     one finished batch: an Orbax partial save of its own, renamed into place when complete, and the
                     stamps of the shards that it was read from; it is written again if one of them has changed
    result/          the destination, assembled from the batches by hard links and renamed to DST as the last step

Batches are partial saves of their own because `partial.save` reads the metadata of all earlier calls (seen:
2 s a call after 200 calls), and because `partial.finalize` cannot be repeated after a kill: here it works on
links and starts again from batches that it never touched.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint.experimental.v1 as ocp

from convert.build import Arrays, insert
from convert.destination import LOCK, check_destination, check_version, partial_folder, sync_folder, write_file
from convert.errors import ConversionError
from convert.plan import CHUNKED_FROM, CHUNKS
from convert.progress import release_memory
from convert.safetensors_reader import read_json

ARRAYS = "arrays"
# What one Orbax partial save leaves in its folder; anything else is a layout that `_merge` does not know.
_PARTIAL = f"{ARRAYS}.partial_save"
_PENDING = f"{_PARTIAL}.pending_"
_STAMPS = "shards.json"
_STATE_JSON = ("_METADATA", "_sharding")
# What the entries of the marker are called in a message.
_MARKER_NAMES = {"source": "source", "weights": "--weights", "plan": "--max-memory or version of this program"}


class Writer:
    """The folder `DST.partial` of one conversion.

    Args:
      destination: DST, which appears complete in `publish` and not before.
      marker: what identifies the conversion (JSON values).
      resume: go on with a folder that is there; without it, such a folder is an error.

    Raises:
      ConversionError: DST is not empty, another conversion is running, or the folder belongs to another conversion.
    """

    def __init__(self, destination: Path, marker: Mapping[str, Any], *, resume: bool):
        self.destination = destination
        self.folder = partial_folder(destination)
        self._batches = self.folder / "batches"
        self.result = self.folder / "result"
        check_destination(destination, resume=resume)
        with _disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / LOCK, "w")
            try:
                self._begin(marker)
            except BaseException:
                self.close()
                raise

    def _begin(self, marker: Mapping[str, Any]) -> None:
        """Take the lock, check that the folder is this conversion's, remove what a kill left half written."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise ConversionError(f"{self.folder}: another conversion is writing here; wait for its end") from e
        self._check_marker(marker)
        self._batches.mkdir(exist_ok=True)
        for leftover in self._batches.glob("*.tmp"):
            shutil.rmtree(leftover)

    def _check_marker(self, marker: Mapping[str, Any]) -> None:
        path = self.folder / "marker.json"
        if not path.exists():
            write_file(path, json.dumps(marker, indent=1).encode())
            return
        known = read_json(path)
        check_version(known.get("format_version"), path)
        for key, value in marker.items():
            if known.get(key) != value:
                shown = f" ({known.get(key)!r}, now {value!r})" if len(repr(value)) < 40 else ""
                raise ConversionError(
                    f"{self.folder} was begun with another {_MARKER_NAMES.get(key, key)}{shown}; "
                    "resume with the same one, or delete the folder to start again"
                )

    def has(self, batch: int, stamps: Mapping[str, Any]) -> bool:
        """Whether a batch was written by this or an earlier process, from the shards that are there now."""
        folder = self._batches / f"{batch:04d}"
        if not folder.is_dir():
            return False
        if (folder / _STAMPS).is_file() and read_json(folder / _STAMPS) == stamps:
            return True
        with _disk_errors(self.folder):
            shutil.rmtree(folder)
        return False

    def write(self, batch: int, arrays: Mapping[str, Arrays], stamps: Mapping[str, Any]) -> None:
        """Write one batch: path -> array, or path -> {name: array}. It is there completely or not at all."""
        tree: dict[str, Any] = {}
        for path, value in arrays.items():
            insert(tree, path, value)
        temporary = self._batches / f"{batch:04d}.tmp"
        with _disk_errors(self.folder):
            temporary.mkdir()
            with _context():
                ocp.partial.save(str(temporary / ARRAYS), tree)
            write_file(temporary / _STAMPS, json.dumps(stamps).encode())
            os.rename(temporary, self._batches / f"{batch:04d}")
            sync_folder(self._batches)
        release_memory()

    def assemble(self, files: Mapping[str, bytes]) -> Path:
        """Make the destination in `result` from the batches and `files` (relative path -> content) -> `result`."""
        with _disk_errors(self.folder), _damage(self.folder):
            if self.result.exists():
                shutil.rmtree(self.result)
            self.result.mkdir()
            for name, content in files.items():
                (self.result / name).parent.mkdir(parents=True, exist_ok=True)
                write_file(self.result / name, content)
            _merge(sorted(self._batches.iterdir()), self.result / _PARTIAL)
            with _context():
                ocp.partial.finalize(str(self.result / ARRAYS))
            for folder, _, names in os.walk(self.result):
                for name in names:
                    with open(Path(folder) / name, "rb") as f:
                        os.fsync(f.fileno())
                sync_folder(Path(folder))
        return self.result

    def publish(self) -> None:
        """Rename the result to DST, in one step, and remove `DST.partial`."""
        with _disk_errors(self.folder):
            os.rename(self.result, self.destination)
            sync_folder(self.destination.parent)
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Give up the lock and leave the folder for a resumption."""
        self._lock.close()


def _context() -> ocp.Context:
    context = ocp.Context()
    # Codes do not compress: compression costs time and saves nothing. Nothing changes an array while it is written.
    context.array.saving.use_compression = False
    context.memory.deepcopy_host_arrays = False
    context.array.saving.scoped_storage_options_creator = _storage
    return context


def _storage(key: Any, value: Any) -> ocp.options.ArrayOptions.Saving.StorageOptions | None:
    """Chunks of a big array: one for each expert of a stack, rows of a table of many rows; otherwise one chunk."""
    options = ocp.options.ArrayOptions.Saving.StorageOptions
    if value.nbytes < CHUNKED_FROM:
        return None
    if value.ndim == 3:
        return options(chunk_byte_size=value.nbytes // value.shape[0], shard_axes=(0,))
    # Orbax splits the longest axis until a chunk is small enough; rows stay whole only while that is the first one.
    if value.ndim == 2 and value.shape[0] >= CHUNKS * value.shape[1]:
        return options(chunk_byte_size=value.nbytes // CHUNKS)
    return None


def _merge(batches: list[Path], into: Path) -> None:
    """Link the partial saves of all batches into one whose metadata is the union of theirs."""
    pending = into / f"{_PENDING}0_{'0' * 32}"
    state = pending / "state"
    state.mkdir(parents=True)
    merged: dict[str, dict[str, Any]] = {}
    array_metadata: dict[str, dict[str, Any]] = {}
    for at, batch in enumerate(batches):
        saves = list((batch / _PARTIAL).glob(f"{_PENDING}*"))
        if len(saves) != 1:
            raise ConversionError(f"{batch} holds {len(saves)} Orbax saves instead of one; delete it and resume")
        for item in saves[0].iterdir():
            if item.name != "state" and not (pending / item.name).exists():
                shutil.copyfile(item, pending / item.name)
        for item in (saves[0] / "state").iterdir():
            if item.name in _STATE_JSON:
                _union(merged.setdefault(item.name, {}), json.loads(item.read_text()), item)
            elif item.name == "array_metadatas":
                for file in item.iterdir():
                    content = json.loads(file.read_text())
                    known = array_metadata.setdefault(file.name, content)
                    if known is not content:
                        known["array_metadatas"].extend(content["array_metadatas"])
            elif item.name.startswith("ocdbt.process_"):
                shutil.copytree(item, state / f"{item.name}b{at:04d}", copy_function=_link)
            else:
                raise ConversionError(f"{item}: this version of Orbax stores something unknown; install the tested one")
    for name, content in merged.items():
        write_file(state / name, json.dumps(content).encode())
    for name, content in array_metadata.items():
        (state / "array_metadatas").mkdir(exist_ok=True)
        write_file(state / "array_metadatas" / name, json.dumps(content).encode())


def _union(into: dict[str, Any], other: dict[str, Any], where: Path) -> None:
    for key, value in other.items():
        if key not in into:
            into[key] = value
        elif isinstance(value, dict) and isinstance(into[key], dict):
            _union(into[key], value, where)
        elif into[key] != value:
            raise ConversionError(f"{where}: {key} differs from another batch's; delete DST.partial and start again")


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError as e:
        if e.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        shutil.copyfile(source, target)  # a file system without hard links


@contextlib.contextmanager
def _damage(folder: Path) -> Iterator[None]:
    """Turn what comes of unreadable batches into a sentence."""
    try:
        yield
    except ConversionError:
        raise
    except (ValueError, TypeError, AttributeError, KeyError) as e:
        reason = str(e).split("\n", 1)[0][:200]
        raise ConversionError(f"{folder}: a batch is damaged ({reason}); delete the folder and convert again") from e


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Turn an error of the file system, however Orbax wraps it, into a sentence."""
    try:
        yield
    except ConversionError:
        raise
    except Exception as e:
        if getattr(e, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(e):
            raise ConversionError(
                f"{folder}: the disk is full; free some space and go on with --resume, what is written is kept"
            ) from e
        known = [os.strerror(code) for code in (errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)]
        found = str(e) if isinstance(e, OSError) else next((text for text in known if text in str(e)), None)
        if found is not None:
            raise ConversionError(f"{folder}: cannot write ({found}); correct that and go on with --resume") from e
        raise
