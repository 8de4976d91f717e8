"""One conversion from start to end: plan, write, assemble, verify, publish."""

import dataclasses
import shutil
import time
from pathlib import Path
from typing import Any

from convert import plan as planning
from convert.build import Arrays, build, fits
from convert.destination import (
    FORMAT_VERSION,
    LAYOUT,
    MOST_PARTS,
    check_destination,
    existing_parent,
    partial_folder,
    read_layout,
    remove_leftovers,
)
from convert.errors import ConversionError
from convert.layout import array_entries, describe_plan, layout_json
from convert.plan import Plan
from convert.progress import Progress
from convert.sizes import format_bytes
from convert.source import Source, describe, open_source

# Metadata, manifests and small files beside the arrays.
_DISK_SLACK = 64 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a conversion.

    Attributes:
      weights: keep quantised weights as they are ("native") or dequantise them ("bf16").
      resume: go on with an unfinished conversion.
      verify: compare the result with the source before it appears at the destination.
      max_memory: bound on anonymous memory, in bytes.
      ignore: unknown keys of config.json to accept.
      batch_bytes: small arrays are written together up to this size.
    """

    weights: planning.Weights = "native"
    resume: bool = False
    verify: bool = False
    max_memory: int = 8 << 30
    ignore: tuple[str, ...] = ()
    batch_bytes: int = planning.BATCH_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What a conversion did: seconds in all and of writing, bytes of arrays written, peak anonymous memory in bytes."""

    plan: Plan
    seconds: float
    writing: float
    written: int
    peak: int
    verified: bool


def make_plan(source_name: str, options: Options) -> Plan:
    """The plan of a conversion, from headers alone. Raises `ConversionError`."""
    return _plan(open_source(source_name, ignore=options.ignore, offline=True), options)


def convert(source_name: str, destination: Path, options: Options) -> Report:
    """Convert a source to the folder `destination`; or finish, or only verify, an earlier conversion.

    Raises:
      ConversionError: the message is one sentence and says what to do.
    """
    started = time.monotonic()
    # A link would be replaced by the result instead of the folder that it names.
    try:
        destination = destination.expanduser().resolve()
    except RuntimeError as e:
        raise ConversionError(f"{destination}: {e}; name another DST") from e
    finished = (destination / LAYOUT).exists() and (options.verify or options.resume)
    if not finished:
        check_destination(destination, resume=options.resume)
    layout = read_layout(destination) if finished else {}
    source = open_source(source_name, ignore=options.ignore)
    if finished:
        return _check_finished(source, destination, layout, options, started)
    plan = _plan(source, options)
    _check_verify_memory(plan, options)
    partial = partial_folder(destination)
    if not partial.exists():
        _check_space(destination, plan)
    # Only now: a bad source is reported without waiting for jax.
    from convert.writer import Writer

    fingerprint = source.fingerprint()
    marker = {
        "format_version": FORMAT_VERSION,
        "source": fingerprint,
        "weights": options.weights,
        "plan": plan.digest(),
    }
    writer = Writer(destination, marker, resume=options.resume)
    try:
        writing = time.monotonic()
        written, peak = _write(writer, plan)
        writing = time.monotonic() - writing
        files = source.sidecars()
        layout = make_layout(source, plan, options, fingerprint)
        result = writer.assemble(files | {LAYOUT: layout_json(layout)})
        if options.verify:
            peak = max(peak, _verify(result, plan, files))
        writer.publish()
    finally:
        writer.close()
    return Report(
        plan=plan,
        seconds=time.monotonic() - started,
        writing=writing,
        written=written,
        peak=peak,
        verified=options.verify,
    )


def make_layout(source: Source, plan: Plan, options: Options, fingerprint: str) -> dict[str, Any]:
    """The content of layout.json: what every array is, how it is stored, and where it came from."""
    from dspark_jax import __version__

    arrays, skipped = array_entries(plan)
    return {
        "format_version": FORMAT_VERSION,
        "library_version": __version__,
        "weights": options.weights,
        "ignored_config_keys": list(options.ignore),
        "source": describe(source, fingerprint),
        "sparse_layers": list(source.target[1].sparse_layers) if source.target else [],
        "arrays": arrays,
        "skipped": skipped,
    }


def _plan(source: Source, options: Options, *, parts: dict[str, int] | None = None) -> Plan:
    return source.plan(
        weights=options.weights, max_memory=options.max_memory, batch_bytes=options.batch_bytes, parts=parts
    )


def _write(writer: Any, plan: Plan) -> tuple[int, int]:
    """Write the batches that are not there yet -> bytes written, peak memory."""
    stamps = [planning.stamps(pieces) for pieces in plan.batches]
    todo = [i for i in range(len(plan.batches)) if not writer.has(i, stamps[i])]
    left = [p for i in todo for p in plan.batches[i]]
    tensors, nbytes = sum(p.tensors for p in left), sum(p.nbytes for p in left)
    with Progress("convert", total_bytes=plan.nbytes, total_tensors=plan.used) as progress:
        arrays: dict[str, Arrays] = {}
        progress.start_at(tensors=plan.used - tensors, nbytes=plan.nbytes - nbytes)
        for done, at in enumerate(todo):
            pieces = plan.batches[at]
            for piece in plan.batches[todo[done + 1]] if done + 1 < len(todo) else ():
                for name in piece.names:
                    piece.leaf.source.will_need(name)
            old = arrays.popitem()[1] if len(arrays) == len(pieces) == 1 else None
            arrays.clear()
            if old is not None and not fits(old, pieces[0]):
                old = None
            arrays = {piece.path: build(piece, into=old) for piece in pieces}
            del old
            writer.write(at, arrays, stamps[at])
            progress.advance(tensors=sum(p.tensors for p in pieces), nbytes=sum(p.nbytes for p in pieces))
    return nbytes, progress.peak


def _verify(result: Path, plan: Plan, files: dict[str, bytes]) -> int:
    from convert.verify import verify

    with Progress("verify", total_bytes=plan.nbytes, total_tensors=plan.used) as progress:
        verify(result, plan, files, lambda piece: progress.advance(tensors=piece.tensors, nbytes=piece.nbytes))
    return progress.peak


def _check_finished(
    source: Source, destination: Path, layout: dict[str, Any], options: Options, started: float
) -> Report:
    """DST is complete already: check that it is this conversion, verify it if asked, remove what a kill left."""
    if layout["weights"] != options.weights:
        raise ConversionError(
            f"{destination} was converted with --weights {layout['weights']}; pass that, or choose another DST"
        )
    if layout["source"].get("fingerprint") != source.fingerprint():
        raise ConversionError(f"{destination} was converted from another source; pass that, or choose another DST")
    plan = _plan(source, options, parts=_stored_parts(destination, layout))
    _check_verify_memory(plan, options)
    _check_layout(destination, layout, make_layout(source, plan, options, source.fingerprint()))
    peak = _verify(destination, plan, source.sidecars()) if options.verify else 0
    remove_leftovers(destination)
    return Report(
        plan=plan, seconds=time.monotonic() - started, writing=0.0, written=0, peak=peak, verified=options.verify
    )


def _stored_parts(destination: Path, layout: dict[str, Any]) -> dict[str, int]:
    """Into how many parts each array was split."""
    parts: dict[str, int] = {}
    for path, entry in layout["arrays"].items():
        count = entry.get("parts") if isinstance(entry, dict) else None
        if type(count) is not int or not 1 <= count <= MOST_PARTS:
            raise ConversionError(f"{destination / LAYOUT}: the entry of {path} is damaged; convert again")
        parts[path] = count
    return parts


def _check_layout(destination: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise `ConversionError` if layout.json does not describe this conversion of this source."""
    for key in ("format_version", "weights", "sparse_layers", "arrays", "skipped"):
        if found.get(key) != wanted[key]:
            at = key
            if key == "arrays":
                ours, theirs = found[key], wanted[key]
                at += "." + next(p for p in sorted(ours.keys() | theirs.keys()) if ours.get(p) != theirs.get(p))
            raise ConversionError(f"{destination / LAYOUT}: {at} does not describe the source; convert again")


def _check_verify_memory(plan: Plan, options: Options) -> None:
    if options.verify and plan.verify_memory > options.max_memory:
        raise ConversionError(
            f"--verify needs more than --max-memory {format_bytes(options.max_memory)}, as it holds an array twice; "
            f"pass at least --max-memory {format_bytes(plan.verify_memory, up=True)}, or leave --verify away"
        )


def _check_space(destination: Path, plan: Plan) -> None:
    needed = plan.nbytes + _DISK_SLACK
    free = shutil.disk_usage(existing_parent(destination)).free
    if needed > free:
        raise ConversionError(
            f"{destination}: the result takes {format_bytes(needed)} but the disk has {format_bytes(free)} free; "
            "free some space or choose another DST"
        )


def summary(report: Report) -> str:
    """A few lines about a finished conversion."""
    lines = [describe_plan(report.plan)]
    if report.written:
        rate = report.written / max(report.writing, 1e-9) / 1e6
        lines.append(
            f"wrote {report.written:,} bytes in {report.writing:.1f} s ({rate:.0f} MB/s), "
            f"{report.seconds:.1f} s in all, peak anonymous memory {format_bytes(report.peak)}"
        )
    if report.verified:
        lines.append("verified: every array equals the source")
    return "\n".join(lines)
