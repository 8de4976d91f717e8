"""Pieces of arrays, and sums as lists of what is added up in them: the values of `pipeline_on_python`."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pipeline_clocks import ProtocolError


class Slice(NamedTuple):
    start: int
    size: int


class Ref:
    """A piece of an array: of each axis an index, or the slice that is taken."""

    dtype = None

    def __init__(self, name: str, axes: Sequence[int | Slice]):
        self.name, self.axes = name, tuple(axes)

    @property
    def slices(self) -> list[Slice]:
        return [axis for axis in self.axes if isinstance(axis, Slice)]

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(axis for axis in self.axes if not isinstance(axis, Slice))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.slices)

    @classmethod
    def of(cls, name: str, shape: Sequence[int]) -> "Ref":
        return cls(name, [Slice(0, size) for size in shape])

    @property
    def at(self) -> "At":
        return At(self)

    def reshape(self, *shape: int) -> "Ref":
        assert shape == (-1, self.shape[-1])
        return Ref.of(self.name, (math.prod(self.shape[:-1]), self.shape[-1]))


class At:
    def __init__(self, ref: Ref):
        self.ref = ref

    def __getitem__(self, index: Any) -> Ref:
        items = iter(index if type(index) is tuple else (index,))
        axes = [self.narrow(axis, next(items, None)) if isinstance(axis, Slice) else axis for axis in self.ref.axes]
        return Ref(self.ref.name, axes)

    def narrow(self, axis: Slice, item: Any) -> int | Slice:
        if item is None or item == slice(None):
            return axis
        start, size = item if isinstance(item, Slice) else (int(item), 1)
        if not 0 <= start <= start + size <= axis.size:
            raise ProtocolError(f"{start} to {start + size - 1} is outside {axis.size} of {self.ref.name}.")
        return Slice(axis.start + start, size) if isinstance(item, Slice) else axis.start + start


class Weights:
    """A fragment, made of what: name, first row and first column; `part` of a slab of codes."""

    def __init__(self, part: int):
        self.part, self.codes, self.scales = part, (), ()


class Product(NamedTuple):
    """64 features times rows of x, of 64 inputs: name, first row and first column of what is multiplied."""

    codes: tuple
    part: int  # of a slab of codes
    scales: tuple
    x: tuple


class Sum:
    """A float32 array [64, tokens]: what is added up in it once all has been carried out, and its factor."""

    def __init__(self, shape: tuple[int, ...], terms: Sequence[Any] = (), factor: float = 1.0):
        self.shape, self.terms, self.factor = shape, list(terms), factor

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.shape, [self, other])

    def __mul__(self, factor: float) -> "Sum":
        return Sum(self.shape, [self], factor)

    def products(self) -> list[Product]:
        if None in self.terms:
            raise ProtocolError("A result contains a part that another block may not have left yet.")
        return [p for term in self.terms for p in (term.products() if isinstance(term, Sum) else [term])]


class Accumulator(Sum):
    def __init__(self, shape: tuple[int, ...], on_read: Callable[[], None]):
        super().__init__(shape)
        self.on_read = on_read

    def __getitem__(self, _: Any) -> Sum:
        self.on_read()
        return self


class Both:
    """Gate and up, in place of their SwiGLU."""

    def __init__(self, *sums: Sum):
        self.sums, self.shape = sums, sums[0].shape


class Scratch(NamedTuple):
    shape: tuple[int, ...]
    arrivals: int = 0


def origin(ref: Ref, holds: tuple[Ref, Ref]) -> tuple:
    """Name, row and column from where the first of `ref`, a piece of a buffer, was copied there."""
    source, target = holds
    starts = []
    for a, b, c in zip(source.slices, target.slices, ref.slices, strict=True):
        if not b.start <= c.start <= c.start + c.size <= b.start + b.size:
            raise ProtocolError(f"More of {ref.name} is read than was copied there.")
        starts.append(a.start + c.start - b.start)
    return source.name, *starts
