"""Just enough of Triton's language on numpy to carry out a kernel without a GPU and without Triton.

Programs run one after the other. A load or a store outside its array is an error unless it is masked. Assembly is
carried out by `ptx`, on neighbours along the last axis, as Triton packs them.
"""

import importlib
import itertools
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import ptx


class Tensor(np.ndarray):
    def to(self, dtype: Any, bitcast: bool = False) -> "Tensor":
        return self.view(dtype) if bitcast else self.astype(dtype)


def tensor(value: Any) -> Tensor:
    return np.asarray(value).view(Tensor)


class Pointer:
    """Elements of a flat array, counted from its start."""

    def __init__(self, array: np.ndarray, offsets: Any = 0):
        self.array, self.offsets = array, offsets
        self.dtype = types.SimpleNamespace(element_ty=array.dtype.type)

    def __add__(self, offsets: Any) -> "Pointer":
        return Pointer(self.array, self.offsets + offsets)

    def to(self, dtype: Any) -> "Pointer":
        assert np.all(np.equal(self.offsets, 0)), "cast before adding"
        return Pointer(self.array.view(dtype))

    def places(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        offsets = np.asarray(self.offsets)
        mask = np.broadcast_to(True if mask is None else np.asarray(mask), offsets.shape)
        inside = (offsets >= 0) & (offsets < self.array.size)
        if not np.all(inside | ~mask):
            raise IndexError(f"an access outside {self.array.size} elements, at {offsets[mask & ~inside][:4]}")
        return np.where(mask, offsets, 0), mask


class Language(types.ModuleType):
    constexpr = Any
    float32, int32, int64, uint8, uint16 = np.float32, np.int32, np.int64, np.uint8, np.uint16
    bfloat16, float16 = ml_dtypes.bfloat16, np.float16

    def __init__(self) -> None:
        super().__init__("triton.language")
        self.program: tuple[int, ...] = (0, 0, 0)

    def program_id(self, axis: int) -> Tensor:
        return tensor(np.int32(self.program[axis]))

    def arange(self, start: int, end: int) -> Tensor:
        assert (end - start) & (end - start - 1) == 0, "a power of two"
        return tensor(np.arange(start, end, dtype=np.int32))

    def range(self, *bounds: Any, **_: Any) -> Iterator[Tensor]:
        return (tensor(np.int32(i)) for i in range(*map(int, bounds)))

    def load(self, pointer: Pointer, mask: Any = None, other: Any = None) -> Tensor:
        places, mask = pointer.places(mask)
        assert other is not None or mask.all(), "what is masked has no value"
        return tensor(np.where(mask, pointer.array[places], np.array(other or 0, pointer.array.dtype)))

    def store(self, pointer: Pointer, value: Any, mask: Any = None) -> None:
        places, mask = pointer.places(mask)
        pointer.array[places[mask]] = np.broadcast_to(value, places.shape)[mask]

    def dot(self, a: Tensor, b: Tensor, acc: Tensor | None = None) -> Tensor:
        assert a.dtype == b.dtype
        product = a.astype(np.float32) @ b.astype(np.float32)
        return product if acc is None else acc + product

    def inline_asm_elementwise(
        self, text: str, constraints: str, args: list, dtype: Any, is_pure: bool, pack: int
    ) -> Any:
        results = dtype if isinstance(dtype, tuple) else (dtype,)
        shape = args[0].shape
        registers = [np.ascontiguousarray(a).reshape(-1, pack).view(np.uint32)[:, 0] for a in args]
        outputs = ptx.run(text, registers, constraints.count("="))
        each = len(outputs) // len(results)
        found = [
            tensor(np.stack(outputs[i * each : (i + 1) * each], -1).view(t).reshape(shape))
            for i, t in enumerate(results)
        ]
        return tuple(found) if isinstance(dtype, tuple) else found[0]

    zeros = staticmethod(lambda shape, dtype: tensor(np.zeros(shape, dtype)))
    full = staticmethod(lambda shape, value, dtype: tensor(np.full(shape, value, dtype)))
    reshape = staticmethod(lambda x, shape: tensor(np.reshape(x, shape)))
    where = staticmethod(lambda c, a, b: tensor(np.where(c, a, b)))
    minimum = staticmethod(lambda a, b: tensor(np.minimum(a, b)))
    maximum = staticmethod(lambda a, b: tensor(np.maximum(a, b)))
    clamp = staticmethod(lambda x, low, high: tensor(np.clip(x, low, high)))
    sum = staticmethod(lambda x, axis: tensor(np.sum(x, axis)))
    exp = staticmethod(lambda x: tensor(np.exp(x)))
    sigmoid = staticmethod(lambda x: tensor(1 / (1 + np.exp(-x))))
    pointer_type = staticmethod(lambda dtype: dtype)


@contextmanager
def imported(*names: str) -> Iterator[tuple[Language, list[types.ModuleType]]]:
    """The modules of kernels, imported with this in place of Triton; gone again afterwards."""
    language, fake = Language(), types.ModuleType("triton")
    fake.__dict__.update(jit=lambda function: function, language=language)
    hidden = {n: sys.modules.pop(n) for n in list(sys.modules) if n.split(".")[0] == "triton" or n in names}
    sys.modules.update({"triton": fake, "triton.language": language})
    try:
        yield language, [importlib.import_module(name) for name in names]
    finally:
        for name in ("triton", "triton.language", *names):
            sys.modules.pop(name, None)
        sys.modules.update(hidden)
        for name in names:  # `from package import module` looks at the package first
            package, _, module = name.rpartition(".")
            if name in hidden:
                setattr(sys.modules[package], module, hidden[name])
            else:
                delattr(sys.modules[package], module)


def launch(language: Language, kernel: Any, grid: tuple[int, ...], arrays: list[np.ndarray], **static: Any) -> None:
    """Runs `kernel` for each program of the grid; arrays are changed in place."""
    pointers = [Pointer(a.reshape(-1)) for a in arrays]
    for program in itertools.product(*map(range, grid)):
        language.program = program
        kernel(*pointers, **static)
