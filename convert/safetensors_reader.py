"""Reading a safetensors checkpoint: headers first, bytes lazily through mmap.

The library's own loaders refuse F8 dtypes on fetch, so headers are parsed and checked here, every shard is also opened
by the library (a second opinion on its structure), and tensors are views of the mapped file in `ml_dtypes` types.
"""

import dataclasses
import hashlib
import json
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from convert.errors import ConversionError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_HEADER = 100_000_000  # the safetensors format's own limit, in bytes
_SAMPLE = 4096

DTYPES: Mapping[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "BOOL": np.dtype(np.bool_),
}


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: `[begin, end)` are byte offsets from the start of the file `shard`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class Checkpoint:
    """A folder of safetensors shards with its index (or one `model.safetensors` without).

    Opening reads and checks every header and nothing else.

    Attributes:
      folder: where the files are.
      tensors: name -> `TensorInfo` of every tensor, in the order of the shards.

    Raises:
      ConversionError: a file is missing, damaged, or contradicts the index.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.tensors: dict[str, TensorInfo] = {}
        self._maps: dict[str, mmap.mmap] = {}
        self._header_digests: dict[str, str] = {}
        self._stats: dict[str, tuple[int, int]] = {}
        listed = self._read_index()
        for shard, names in listed.items():
            self._add_shard(shard, names)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def where(self, name: str) -> str:
        """The file and name of a tensor, for messages."""
        return f"{self.folder / self.tensors[name].shard}: {name}"

    def array(self, name: str) -> np.ndarray:
        """A read-only view of the mapped bytes; no copy is made."""
        t = self.tensors[name]
        dtype = DTYPES[t.dtype]
        flat = np.frombuffer(self._map(t.shard), dtype=np.uint8, count=t.nbytes, offset=t.begin)
        return flat.view(dtype).reshape(t.shape)

    def will_need(self, name: str) -> None:
        """Ask the kernel to start reading a tensor, without waiting for it."""
        t = self.tensors[name]
        start = t.begin - t.begin % mmap.PAGESIZE
        if t.nbytes:
            self._map(t.shard).madvise(mmap.MADV_WILLNEED, start, t.end - start)

    def stamp(self, shard: str) -> str:
        """Name, header, size and time of a shard when it was opened: another stamp, another file."""
        return " ".join((shard, self._header_digests[shard], *map(str, self._stats[shard])))

    def fingerprint(self) -> str:
        """Digest of the headers and of samples of the data: tells two checkpoints of one architecture apart."""
        digest = hashlib.sha256()
        for shard, header in sorted(self._header_digests.items()):
            digest.update(f"{shard}\0{header}\0".encode())
            mapped = self._map(shard)
            for part in range(5):
                at = max(0, (len(mapped) - _SAMPLE) * part // 4)
                digest.update(mapped[at : at + _SAMPLE])
        return digest.hexdigest()

    def _map(self, shard: str) -> mmap.mmap:
        if shard not in self._maps:
            with open(self.folder / shard, "rb") as f:
                self._maps[shard] = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[shard]

    def _read_index(self) -> dict[str, set[str] | None]:
        """-> shard -> the names it must hold (None: whatever it holds)."""
        path = self.folder / INDEX_NAME
        if not path.is_file():
            if (self.folder / SINGLE_NAME).is_file():
                return {SINGLE_NAME: None}
            raise ConversionError(
                f"{self.folder}: neither {INDEX_NAME} nor {SINGLE_NAME} is there; point SRC at the folder of the shards"
            )
        index = read_json(path)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConversionError(f"{path}: weight_map must be a non-empty object; download the index again")
        listed: dict[str, set[str] | None] = {}
        for name, shard in weight_map.items():
            if not isinstance(shard, str) or not shard:
                raise ConversionError(f"{path}: {name} names no file ({shard!r}); download the index again")
            names = listed.get(shard)
            if names is None:
                parts = PurePosixPath(shard).parts
                if PurePosixPath(shard).is_absolute() or ".." in parts or "\\" in shard or "\0" in shard:
                    raise ConversionError(
                        f"{path}: {name} lies in {shard!r}, outside the checkpoint; "
                        "an index may only name files beside it, so do not trust this one"
                    )
                names = listed[shard] = set()
            names.add(name)
        return listed

    def _add_shard(self, shard: str, names: set[str] | None) -> None:
        path = self.folder / shard
        if not path.is_file():
            raise ConversionError(f"{path}: the index names this shard but it is missing; download it again")
        stat = path.stat()
        self._stats[shard] = stat.st_size, stat.st_mtime_ns
        found, digest = read_header(path, shard)
        self._header_digests[shard] = digest
        if names is not None:
            for name in sorted(names - found.keys()):
                raise ConversionError(
                    f"{path}: {name} is in the index but not in this shard; download the index and the shard again"
                )
        for name, info in found.items():
            if name in self.tensors:
                raise ConversionError(
                    f"{path}: {name} is also in {self.tensors[name].shard}; remove one of the two shards"
                )
            if names is not None and name not in names:
                raise ConversionError(
                    f"{path}: {name} is in this shard but the index does not say so; download the index again"
                )
            self.tensors[name] = info


def read_header(path: Path, shard: str) -> tuple[dict[str, TensorInfo], str]:
    """Checked header of one file -> its tensors, digest of the header.

    Raises:
      ConversionError: the header or an offset does not fit the file.
    """
    size = path.stat().st_size
    with open(path, "rb") as f:
        head = f.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 0 < length <= min(_MAX_HEADER, size - 8):
            raise ConversionError(
                f"{path}: the header claims {length:,} bytes but the file has {size:,}; download the shard again"
            )
        raw = f.read(length)
    header = parse_json(raw, path)
    start, spans, found = 8 + length, [], {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        info = _tensor_info(path, shard, name, entry, start, size)
        spans.append((info.begin, info.end, name))
        found[name] = info
    spans.sort()
    at = start
    for begin, end, name in spans:
        if begin < at:
            raise ConversionError(f"{path}: the bytes of {name} overlap another tensor's; download the shard again")
        if begin > at:
            raise ConversionError(
                f"{path}: {begin - at:,} bytes before {name} belong to no tensor; download the shard again"
            )
        at = end
    if at != size:
        raise ConversionError(f"{path}: {size - at:,} bytes at the end belong to no tensor; download the shard again")
    try:
        with safetensors.safe_open(path, framework="np"):
            pass
    except safetensors.SafetensorError as e:
        raise ConversionError(f"{path}: safetensors refuses the file ({e}); download the shard again") from e
    return found, hashlib.sha256(raw).hexdigest()


def _tensor_info(path: Path, shard: str, name: str, entry: Any, start: int, size: int) -> TensorInfo:
    malformed = ConversionError(f"{path}: the header entry of {name} is malformed; download the shard again")
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
            raise malformed
    except (TypeError, KeyError, ValueError) as e:
        raise malformed from e
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ConversionError(f"{path}: {name} has dtype {dtype}, which is not known here; known: {', '.join(DTYPES)}")
    if begin > end or start + end > size:
        raise ConversionError(
            f"{path}: {name} lies at bytes {begin:,} to {end:,} of {size - start:,}; "
            "the shard is truncated or damaged, download it again"
        )
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != expected:
        raise ConversionError(
            f"{path}: {name} is {dtype} {list(shape)}, {expected:,} bytes, but its offsets span {end - begin:,}; "
            "download the shard again"
        )
    return TensorInfo(name, dtype, tuple(shape), shard, start + begin, start + end)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise KeyError(key)
            seen.add(key)
    return result


def parse_json(raw: bytes | str, path: Path) -> dict[str, Any]:
    """A JSON object without duplicate keys; anything else is an error that names `path`."""
    try:
        value = json.loads(raw, object_pairs_hook=_no_duplicates)
    except KeyError as e:
        raise ConversionError(f"{path}: the key {e.args[0]} is there twice; remove one or download it again") from e
    except (ValueError, RecursionError) as e:
        raise ConversionError(f"{path}: not valid JSON ({e}); download it again") from e
    if not isinstance(value, dict):
        raise ConversionError(f"{path}: expected a JSON object, found {type(value).__name__}; download it again")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      ConversionError: the file cannot be read, is not an object, or holds a key twice.
    """
    try:
        return parse_json(path.read_bytes(), path)
    except OSError as e:
        raise ConversionError(f"{path}: cannot be read ({e.strerror}); check that SRC is a checkpoint folder") from e
