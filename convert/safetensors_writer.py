"""Writing a safetensors checkpoint: shards of a bounded size and their index, one tensor in memory at a time."""

import itertools
import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convert.destination import sync_folder, write_file
from convert.published import Tensor
from convert.safetensors_reader import DTYPES, INDEX_NAME


def split(tensors: Sequence[Tensor], shard_bytes: int) -> list[list[Tensor]]:
    """Tensors in their order -> shards of at most `shard_bytes` bytes, or of one bigger tensor."""
    shards: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        if not shards or size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def write_shards(folder: Path, tensors: Sequence[Tensor], values: Iterable[np.ndarray], *, shard_bytes: int) -> int:
    """Write `model-*.safetensors` and `model.safetensors.index.json` -> number of shards.

    Args:
      folder: where; it exists.
      tensors: what, in the order in which the values come.
      values: the values; each is taken when it is written and not kept.
      shard_bytes: largest size of a shard's tensors together; a bigger tensor gets a shard of its own.

    Raises:
      ValueError: values that are not as many as the tensors, or one of another dtype or shape than its tensor.
    """
    shards, given = split(tensors, shard_bytes), iter(values)
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / file, shard, given)
        weight_map |= {tensor.name: file for tensor in shard}
    if next(given, None) is not None:
        raise ValueError(f"there are more values than the {len(tensors)} tensors")
    total = sum(tensor.nbytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_file(folder / INDEX_NAME, (json.dumps(index, indent=1) + "\n").encode())
    sync_folder(folder)
    return len(shards)


def _write_shard(path: Path, shard: Sequence[Tensor], values: Iterator[np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, at = {}, 0
    # Wide types first: every tensor is then aligned, which some readers need.
    for tensor in sorted(shard, key=lambda t: (-DTYPES[t.dtype].itemsize, t.name)):
        begins[tensor.name] = at
        at += tensor.nbytes
        offsets = [begins[tensor.name], at]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(raw)) + raw)
        for tensor, value in zip(shard, itertools.islice(values, len(shard)), strict=True):
            if value.shape != tensor.shape or value.dtype != DTYPES[tensor.dtype]:
                raise ValueError(
                    f"{tensor.name} is {value.dtype} {value.shape}, expected {tensor.dtype} {tensor.shape}"
                )
            f.seek(8 + len(raw) + begins[tensor.name])
            f.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        f.flush()
        os.fsync(f.fileno())
