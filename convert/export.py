"""Write a converted checkpoint back into the published layout: the inverse of `python -m convert.minimax`.

CKPT is a folder that `convert.minimax` or `dspark_jax.save` wrote. DST becomes a folder with safetensors
shards, their index, the configurations and the tokenizer, and with the drafter in DST/dspark (a drafter alone in DST).
Codes and scales are written as they are stored: a native conversion comes back byte for byte. Tensors that a text model
does not use (vision, multi-token prediction, scales of activations) are not in CKPT and do not come back. Until it is
complete, everything lies in DST.partial.

  python -m convert.export ckpt/ MyModel/
  python -m convert.export ckpt/ MyModel/ --weights bf16     # dequantised
"""

import argparse
import dataclasses
import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convert.command import carry_out, size_argument
from convert.destination import check_destination, existing_parent, partial_folder, sync_folder, write_file
from convert.errors import ConversionError
from convert.formats import Format, array_sizes
from convert.plan import RESERVED, RESERVED_PER_TENSOR, Weights
from convert.progress import Progress, release_memory
from convert.published import Tensor, tensors
from convert.safetensors_reader import parse_json
from convert.safetensors_writer import write_shards
from convert.sizes import format_bytes
from convert.source import SIDECARS
from convert.stored import no_stray_errors, read_arrays, read_description
from dspark_jax._words import counted

# Arrays are read together up to this size.
_GROUP_BYTES = 64 << 20
_DISK_SLACK = 64 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of an export.

    Attributes:
      weights: keep quantised weights as they are ("native") or dequantise them ("bf16").
      shard_size: largest size of a shard in bytes.
      max_memory: bound on anonymous memory, in bytes.
    """

    weights: Weights = "native"
    shard_size: int = 5 * 10**9
    max_memory: int = 8 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What an export did: tensors, bytes, shards, seconds, peak anonymous memory in bytes, what is not in CKPT."""

    tensors: int
    nbytes: int
    shards: int
    seconds: float
    peak: int
    left_out: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """What is read at once: a parameter, or experts of it from `start` on.

    Attributes:
      arrays: name of an array ("" of a dense one) -> its path.
      tensors: what becomes of it.
      shapes: name of an array -> its shape.
      nbytes: of the arrays.
    """

    arrays: Mapping[str, str]
    tensors: tuple[Tensor, ...]
    start: int
    shapes: Mapping[str, tuple[int, ...]]
    nbytes: int


@dataclasses.dataclass(frozen=True)
class _Part:
    """The target or the drafter: where it is written below DST, where its files lie below CKPT, what it holds."""

    folder: str
    files: str
    pieces: tuple[_Piece, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for piece in self.pieces for tensor in piece.tensors]


def export(checkpoint: Path, destination: Path, options: Options) -> Report:
    """Write the converted checkpoint in `checkpoint` to the folder `destination` in the published layout.

    Raises:
      ConversionError: the message is one sentence and says what to do; nothing half-written is left.
    """
    started = time.monotonic()
    checkpoint, destination = checkpoint.expanduser(), destination.expanduser().resolve()
    check_destination(destination, resume=True)
    partial = partial_folder(destination)
    in_the_way = f"{partial} is in the way: something did not end there; delete it, or choose another DST"
    if partial.exists():
        raise ConversionError(in_the_way)
    layout = _read_layout(checkpoint)
    parts = _plan(layout, options)
    _check_resources(parts, destination, options)
    arrays = layout.path / "arrays"
    stored = read_description(arrays)
    needed = {path for part in parts for piece in part.pieces for path in piece.arrays.values()}
    if missing := sorted(needed - stored.keys()):
        raise ConversionError(f"{arrays}: {missing[0]} is missing; convert again")
    count, nbytes = (sum(f(t) for p in parts for t in p.tensors) for f in (lambda t: 1, lambda t: t.nbytes))
    shards = 0
    try:
        partial.mkdir(parents=True)
    except FileExistsError as e:  # made since: another export is writing there
        raise ConversionError(in_the_way) from e
    try:
        with Progress("export", total_bytes=nbytes, total_tensors=count) as progress, no_stray_errors():
            for part in parts:
                folder = partial / part.folder
                folder.mkdir(exist_ok=True)
                for name, content in _files(layout.path / part.files, part, options).items():
                    write_file(folder / name, content)
                values = _values(arrays, part.pieces, stored, progress)
                shards += write_shards(folder, part.tensors, values, shard_bytes=options.shard_size)
        if destination.exists():
            destination.rmdir()  # empty, as was checked
        os.rename(partial, destination)
        sync_folder(destination.parent)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise ConversionError(f"{destination}: the disk is full; free some space and export again") from error
        raise
    return Report(
        tensors=count,
        nbytes=nbytes,
        shards=shards,
        seconds=time.monotonic() - started,
        peak=progress.peak,
        left_out=tuple(
            f"{counted(e['count'], 'tensor')}, {e['names']} ({e['reason']})" for e in layout.record.get("skipped", ())
        ),
    )


def _read_layout(checkpoint: Path) -> Any:
    # Only now, as everywhere in this package: help and bad arguments do not wait for jax.
    from dspark_jax.checkpoint import CheckpointError, Layout
    from dspark_jax.config import ConfigError

    try:
        return Layout.read(checkpoint)
    except (CheckpointError, ConfigError) as e:
        raise ConversionError(str(e)) from e


def _plan(layout: Any, options: Options) -> list[_Part]:
    from convert.geometry import drafter_parameters, target_parameters

    parts, known = [], set()
    if layout.target is not None:
        known |= target_parameters(layout.target).keys()
        parts.append(_Part("", "", _pieces(layout, target_parameters(layout.target), options)))
    if layout.drafter is not None:
        known |= drafter_parameters(layout.drafter).keys()
        folder = "dspark" if parts else ""
        parts.append(_Part(folder, "dspark", _pieces(layout, drafter_parameters(layout.drafter), options)))
    if not parts:
        raise ConversionError(f"{layout.path} has neither config.json nor dspark/config.json; convert again")
    if extra := sorted(layout.arrays.keys() - known):
        raise ConversionError(f"{layout.path}: the configs call for no {extra[0]}; convert the checkpoint again")
    return parts


def _pieces(layout: Any, parameters: Mapping[str, Any], options: Options) -> tuple[_Piece, ...]:
    """What to read for `parameters`, in their order."""
    result = []
    for path, parameter in parameters.items():
        entry = layout.arrays.get(path)
        if entry is None or tuple(entry["shape"]) != parameter.shape:
            found = "is missing" if entry is None else f"has shape {entry['shape']}"
            raise ConversionError(
                f"{layout.path}: {path} {found}, the config asks for {list(parameter.shape)}; convert again"
            )
        stored = Format(entry["format"], entry.get("global_scale"))
        if stored.name == "f32" and parameter.kind != "wide" and options.weights == "native":
            raise ConversionError(
                f"{layout.path}: {path} is stored as f32, which the published layout has for routers alone; "
                "pass --weights bf16"
            )
        bf16 = options.weights == "bf16" and parameter.kind != "wide"
        try:
            every = tensors(path, parameter.shape, stored, bf16=bf16, entry=entry)
        except ValueError as e:
            raise ConversionError(f"{layout.path / 'layout.json'}: {e}; convert again") from e
        stacked = len(parameter.shape) == 3
        rows = parameter.shape[0] if stacked else 1
        parts = entry.get("parts", 1) if stacked else 1
        each = len(every) // rows
        for i in range(parts):
            start, stop = rows * i // parts, rows * (i + 1) // parts
            base = path if parts == 1 else f"{path}/part_{i:03d}"
            sizes = array_sizes(stored, (stop - start, *parameter.shape[1:]) if stacked else parameter.shape)
            arrays = {name: f"{base}/{name}" if name else base for name in sizes}
            piece = tuple(every[each * start : each * stop])
            result.append(
                _Piece(
                    arrays,
                    piece,
                    start,
                    {name: shape for name, (shape, _) in sizes.items()},
                    sum(n for _, n in sizes.values()),
                )
            )
    return tuple(result)


def _check_resources(parts: Sequence[_Part], destination: Path, options: Options) -> None:
    """Raise `ConversionError` where memory or disk do not suffice."""
    pieces = [piece for part in parts for piece in part.pieces]
    count = sum(len(p.tensors) for p in pieces)
    # An array is read into a buffer and from there into its place; one tensor more is dequantised.
    most = max(2 * max(p.nbytes, _GROUP_BYTES) + max(t.nbytes for t in p.tensors) for p in pieces)
    needed = RESERVED + RESERVED_PER_TENSOR * count + most
    if needed > options.max_memory:
        raise ConversionError(
            f"--max-memory {format_bytes(options.max_memory)} is not enough; "
            f"pass at least --max-memory {format_bytes(needed, up=True)}"
        )
    needed = sum(t.nbytes for p in pieces for t in p.tensors) + _DISK_SLACK
    free = shutil.disk_usage(existing_parent(destination)).free
    if needed > free:
        raise ConversionError(
            f"{destination}: the result takes {format_bytes(needed)} but the disk has {format_bytes(free)} free; "
            "free some space or choose another DST"
        )


def _values(arrays: Path, pieces: Sequence[_Piece], stored: dict[str, Any], progress: Progress) -> Iterator[np.ndarray]:
    """The values of all tensors of `pieces`, in their order."""
    group: list[_Piece] = []
    for piece in (*pieces, None):
        full = group and (piece is None or sum(p.nbytes for p in group) + piece.nbytes > _GROUP_BYTES)
        if full:
            loaded = read_arrays(arrays, [path for p in group for path in p.arrays.values()], stored)
            for p in group:
                mine = {name: loaded.pop(path) for name, path in p.arrays.items()}
                for name, array in mine.items():
                    if array.shape != p.shapes[name]:
                        raise ConversionError(
                            f"{arrays}: {p.arrays[name]} has shape {list(array.shape)}, layout.json says "
                            f"{list(p.shapes[name])}; convert again"
                        )
                for tensor in p.tensors:
                    yield tensor.value(mine, start=p.start)
                progress.advance(tensors=len(p.tensors), nbytes=sum(t.nbytes for t in p.tensors))
            del loaded, mine
            release_memory()
            group = []
        if piece is not None:
            group.append(piece)


def _files(folder: Path, part: _Part, options: Options) -> dict[str, bytes]:
    """Configurations and tokenizer of a part; a config that announces quantised weights where none are is corrected."""
    files = {name: (folder / name).read_bytes() for name in SIDECARS if (folder / name).is_file()}
    if all(tensor.array == "" or tensor.dequantised for tensor in part.tensors):
        files.pop("hf_quant_config.json", None)
        config = parse_json(files["config.json"], folder / "config.json")
        text = config.get("text_config")
        found = [c for c in (config, text) if isinstance(c, dict) and c.pop("quantization_config", None) is not None]
        if found:
            files["config.json"] = (json.dumps(config, indent=1, ensure_ascii=False) + "\n").encode()
    return files


def summary(report: Report) -> str:
    """A few lines about a finished export."""
    rate = report.nbytes / max(report.seconds, 1e-9) / 1e6
    lines = [
        f"wrote {counted(report.tensors, 'tensor')}, {report.nbytes:,} bytes, {counted(report.shards, 'shard')} in "
        f"{report.seconds:.1f} s ({rate:.0f} MB/s), peak anonymous memory {format_bytes(report.peak)}"
    ]
    return "\n".join(lines + [f"not in the checkpoint: {text}" for text in report.left_out])


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m convert.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("checkpoint", metavar="CKPT", type=Path, help="folder that convert.minimax wrote")
    result.add_argument("destination", metavar="DST", type=Path, help="folder to make; must not exist or be empty")
    result.add_argument(
        "--weights",
        choices=("native", "bf16"),
        default="native",
        help="native writes codes and scales as they are; bf16 dequantises them (default: native)",
    )
    result.add_argument(
        "--shard-size",
        type=size_argument,
        default="5GB",
        metavar="SIZE",
        help="largest size of a shard (default: 5GB)",
    )
    result.add_argument(
        "--max-memory",
        type=size_argument,
        default="8GiB",
        metavar="SIZE",
        help="bound on anonymous memory (default: 8GiB)",
    )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line -> exit status."""
    args = parser().parse_args(argv)
    options = Options(weights=args.weights, shard_size=args.shard_size, max_memory=args.max_memory)

    def work() -> None:
        print(summary(export(args.checkpoint, args.destination, options)))
        print(f"done: {args.destination}")

    return carry_out(work, args.destination, interrupted="nothing was written")


if __name__ == "__main__":
    sys.exit(main())
