"""What a conversion will do, decided from headers alone: which tensors make up which array, in which order."""

import collections
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from convert import formats, names
from convert.errors import ConversionError
from convert.geometry import Parameter
from convert.safetensors_reader import Checkpoint
from convert.sizes import MIB, format_bytes

Weights = Literal["native", "bf16"]

# An array of this size or more is stored in chunks along its first axis, so that sharded readers take what they need.
CHUNKED_FROM, CHUNKS = 256 * MIB, 16
# Interpreter, jax, Orbax, their threads, scratch of a dequantisation; then the Python objects of each tensor.
RESERVED, RESERVED_PER_TENSOR = 256 * MIB, 1024
# Leaves are written together until they reach this size: a call costs a fixed time, a bigger one costs more to redo.
BATCH_BYTES = 1024 * MIB


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One parameter of the destination.

    Attributes:
      path: where it goes, for example `target/layers/3/moe/experts/gate_proj/weight`.
      parameter: logical shape and kind.
      stored: format in the source; `format`: format in the destination.
      source: the checkpoint that holds it.
      tensors: suffix -> tensor name, one mapping per expert (one in all for a parameter that is not a stack).
    """

    path: str
    parameter: Parameter
    stored: formats.Format
    format: formats.Format
    source: Checkpoint
    tensors: tuple[dict[str, str], ...]

    @property
    def stacked(self) -> bool:
        return len(self.parameter.shape) == 3

    @property
    def rows(self) -> int:
        """Experts of a stack; 1 otherwise."""
        return self.parameter.shape[0] if self.stacked else 1

    def array_sizes(self, experts: int) -> dict[str, tuple[tuple[int, ...], int]]:
        """Name -> shape and bytes of the stored arrays of so many experts; the name "" is a dense array."""
        shape = (experts, *self.parameter.shape[1:]) if self.stacked else self.parameter.shape
        return formats.array_sizes(self.format, shape)

    def nbytes(self, experts: int | None = None) -> int:
        return sum(n for _, n in self.array_sizes(self.rows if experts is None else experts).values())

    def cost(self, experts: int) -> int:
        """Anonymous memory needed to build and write so many experts: what is assembled here, and copies of chunks."""
        sizes = [n for _, n in self.array_sizes(experts).values()]
        built = self.stacked or self.stored != self.format or self.widened
        assembled = sum(sizes) if built or not self._aligned() else 0
        # TensorStore writes a chunk from where it lies, except a chunk of one expert, which it copies first.
        copied = sum(n for n in sizes if self.stacked and n >= CHUNKED_FROM)
        return assembled + copied

    @property
    def widened(self) -> bool:
        return self.format.name == "f32" and self.source.tensors[self.name(0)].dtype != "F32"

    @property
    def scale_dtype(self) -> str:
        """Of the MXFP8 scales in the source; the bytes are the same."""
        return self.source.tensors[self.tensors[0]["weight_scale_inv"]].dtype

    def name(self, expert: int) -> str:
        """The tensor with the values themselves (codes or dense)."""
        tensors = self.tensors[expert]
        return next(tensors[s] for s in ("weight_packed", "weight", "bias") if s in tensors)

    def _aligned(self) -> bool:
        infos = [self.source.tensors[n] for n in self.tensors[0].values()]
        return all(i.begin % 4 == 0 for i in infos)


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Experts `[start, stop)` of a leaf, written under `path` (the leaf's, or a part of it)."""

    leaf: Leaf
    path: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.leaf.nbytes(self.stop - self.start)

    @property
    def cost(self) -> int:
        return self.leaf.cost(self.stop - self.start)

    @property
    def tensors(self) -> int:
        """Source tensors that go into it."""
        return sum(len(t) for t in self.leaf.tensors[self.start : self.stop])

    @property
    def names(self) -> Iterable[str]:
        return (name for tensors in self.leaf.tensors[self.start : self.stop] for name in tensors.values())


def stamps(pieces: Iterable[Piece]) -> dict[str, list[str]]:
    """Stamps of the shards that the pieces are read from, as a JSON object."""
    found = {source.stamp(source.tensors[n].shard) for p in pieces for source in (p.leaf.source,) for n in p.names}
    return {"shards": sorted(found)}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The whole conversion: batches are written one after the other, in this order.

    Attributes:
      leaves: every array of the destination, in order.
      batches: pieces that are written in one call.
      parts: path -> number of parts of the leaves that were split by expert range.
      skipped: (name pattern, reason) -> tensors, bytes.
      used: source tensors that go into the destination.
      source_bytes: payload of all source tensors.
      memory, verify_memory: largest anonymous memory expected of the conversion and of a verification, in bytes.
    """

    leaves: tuple[Leaf, ...]
    batches: tuple[tuple[Piece, ...], ...]
    parts: dict[str, int]
    skipped: dict[tuple[str, str], tuple[int, int]]
    used: int
    source_bytes: int
    memory: int
    verify_memory: int

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes() for leaf in self.leaves)

    def digest(self) -> str:
        """Identifies the layout and the order of the batches."""
        text = json.dumps(
            [[(p.path, p.start, p.stop, dataclasses.astuple(p.leaf.format)) for p in b] for b in self.batches]
        )
        return hashlib.sha256(text.encode()).hexdigest()


def collect(
    source: Checkpoint, part: str, parameters: dict[str, Parameter], weights: Weights
) -> tuple[list[Leaf], dict[tuple[str, str], tuple[int, int]]]:
    """Assign every tensor of `source` to a parameter -> leaves in the order of `parameters`, skipped tensors.

    Raises:
      ConversionError: a tensor is unknown, left over, missing, or does not fit its parameter.
    """
    modules: dict[str, dict[int, dict[str, str]]] = collections.defaultdict(lambda: collections.defaultdict(dict))
    skipped: dict[tuple[str, str], tuple[int, int]] = {}

    def skip(name: str, reason: str) -> None:
        key = (_pattern(name), reason)
        count, size = skipped.get(key, (0, 0))
        skipped[key] = count + 1, size + source.tensors[name].nbytes

    for name in source.tensors:
        if reason := names.skip_reason(name):
            skip(name, reason)
            continue
        placed = names.place(name, part)
        if placed is None:
            raise ConversionError(
                f"{source.where(name)} is no tensor of a known {part}; it would be lost, so check the architecture"
            )
        if placed.suffix in names.SKIPPED_SUFFIXES:
            skip(name, names.SKIPPED_SUFFIXES[placed.suffix])
            continue
        path = f"{placed.module}/{'bias' if placed.suffix == 'bias' else 'weight'}"
        slot = modules[path][placed.expert or 0]
        if placed.suffix in slot:
            raise ConversionError(
                f"{source.where(name)} and {slot[placed.suffix]} are the same parameter {path}; remove one"
            )
        slot[placed.suffix] = name
    for path, parameter in parameters.items():
        if path in modules and len(parameter.shape) == 3:
            _check_fused(source, path, parameter, modules[path])
    for path, slots in modules.items():
        if path not in parameters:
            name = next(iter(next(iter(slots.values())).values()))
            raise ConversionError(
                f"{source.where(name)} is left over: the config calls for no {path}; correct the config"
            )
    leaves = [_leaf(source, path, p, modules.get(path, {}), weights) for path, p in parameters.items()]
    return leaves, skipped


def _check_fused(source: Checkpoint, path: str, parameter: Parameter, slots: dict[int, dict[str, str]]) -> None:
    count = parameter.shape[0]
    for expert in sorted(slots):
        if expert == count:
            name = next(iter(slots[expert].values()))
            raise ConversionError(
                f"{source.where(name)} is expert {expert} of {count}: the shared expert stored as an extra routed "
                "expert is not read here; store it under shared_experts"
            )
        if expert > count:
            name = next(iter(slots[expert].values()))
            raise ConversionError(
                f"{source.where(name)} is left over: config.json has num_local_experts {count}; correct the config"
            )


def _leaf(
    source: Checkpoint, path: str, parameter: Parameter, slots: dict[int, dict[str, str]], weights: Weights
) -> Leaf:
    count = parameter.shape[0] if len(parameter.shape) == 3 else 1
    missing = [i for i in range(count) if i not in slots]
    if missing:
        which = f" of expert {missing[0]}" if count > 1 or len(parameter.shape) == 3 else ""
        raise ConversionError(
            f"{source.folder}: no tensor for {path}{which} (shape {list(parameter.shape)}); complete the checkpoint"
        )
    tensors = tuple(slots[i] for i in range(count))
    stored = []
    for slot in tensors:
        module = next(iter(slot.values())).rpartition(".")[0]
        stored.append(formats.detect(source, module, slot, parameter))
        if stored[-1] != stored[0]:
            first, other = next(iter(tensors[0].values())), next(iter(slot.values()))
            raise ConversionError(
                f"{source.where(other)} is {stored[-1].name} but {first} of the same stack is {stored[0].name}; "
                "all experts of a layer must have one format"
            )
    quantised = stored[0].name in ("mxfp8", "nvfp4")
    target = formats.BF16_FORMAT if weights == "bf16" and quantised else stored[0]
    return Leaf(path, parameter, stored[0], target, source, tensors)


def sparse_layers(source: Checkpoint, layers: int) -> tuple[bool, ...]:
    """Per layer, whether the checkpoint holds an indexer: that, and not the config, makes a layer sparse."""
    found = set()
    for name in source.tensors:
        if not names.skip_reason(name) and (placed := names.place(name, "target")):
            match = re.fullmatch(r"target/layers/(\d+)/attention/indexer/q_proj", placed.module)
            if match:
                found.add(int(match[1]))
    return tuple(i in found for i in range(layers))


def schedule(
    leaves: Sequence[Leaf],
    skipped: dict[tuple[str, str], tuple[int, int]],
    sources: Sequence[Checkpoint],
    *,
    max_memory: int,
    batch_bytes: int = BATCH_BYTES,
    parts: Mapping[str, int] | None = None,
) -> Plan:
    """Split and batch the leaves so that none needs more than `max_memory` bytes of anonymous memory.

    Args:
      leaves, skipped, sources: what to write, what not, and where it lies.
      max_memory: the bound, in bytes.
      batch_bytes: leaves are written together up to this size.
      parts: path -> number of parts of an earlier conversion, which decides the splits instead of `max_memory`.

    Raises:
      ConversionError: even the smallest pieces need more; the message says how much.
    """
    reserved = RESERVED + RESERVED_PER_TENSOR * sum(len(s.tensors) for s in sources)
    budget = max_memory - reserved
    least = max((leaf.cost(1) for leaf in leaves), default=0)
    if least > budget and parts is None:
        leaf = max(leaves, key=lambda x: x.cost(1))
        raise ConversionError(
            f"--max-memory {format_bytes(max_memory)} is not enough for {leaf.path}, which cannot be split further; "
            f"pass at least --max-memory {format_bytes(reserved + least, up=True)}"
        )
    split: dict[str, int] = {}
    batches: list[list[Piece]] = []
    size = cost = 0
    for leaf in leaves:
        if parts is not None:
            count = parts.get(leaf.path, 1)
        else:
            count = next(n for n in range(1, leaf.rows + 1) if leaf.cost(math.ceil(leaf.rows / n)) <= budget)
        if count > 1:
            split[leaf.path] = count
        bounds = [leaf.rows * i // count for i in range(count + 1)]
        for i in range(count):
            path = leaf.path if count == 1 else f"{leaf.path}/part_{i:03d}"
            piece = Piece(leaf, path, bounds[i], bounds[i + 1])
            if not batches or size + piece.nbytes > batch_bytes or cost + piece.cost > budget:
                batches.append([])
                size = cost = 0
            batches[-1].append(piece)
            size, cost = size + piece.nbytes, cost + piece.cost
    peak = max((sum(p.cost for p in b) for b in batches), default=0)
    return Plan(
        leaves=tuple(leaves),
        batches=tuple(map(tuple, batches)),
        parts=split,
        skipped=skipped,
        used=sum(len(t) for leaf in leaves for t in leaf.tensors),
        source_bytes=sum(s.nbytes for s in sources),
        memory=reserved + peak,
        # An array is read into a buffer and from there into its place.
        verify_memory=reserved + 2 * max((p.nbytes for b in batches for p in b), default=0),
    )


def _pattern(name: str) -> str:
    top = name.split(".", 1)[0]
    if top in ("vision_tower", "multi_modal_projector", "patch_merge_mlp"):
        return f"{top}.*"
    if (at := f".{name}".find(".mtp.")) >= 0:
        return name[: at + 4] + "*"
    return re.sub(r"\d+", "*", name)
