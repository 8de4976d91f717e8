"""The registers of a warpgroup on numpy: carries out `_mosaic_fragments` for 128 threads at once, without a GPU.

Its operations on MLIR values are replaced by the same on arrays [128]. What a fragment is follows the layout of
wgmma: thread 32 w + 4 r + q holds, in register pair (c, h), row 16 w + 8 h + r and columns 8 c + 2 q and 8 c + 2 q + 1.
"""

import types
from typing import Any

import ml_dtypes
import numpy as np
import ptx
import pytest

from pallas_kernels import _mosaic_fragments as fragments

THREADS = np.arange(128)
WARP, ROW, QUARTER = THREADS // 32, THREADS % 32 // 4, THREADS % 4


class Memory:
    """An array in shared or global memory; addresses are bytes from its start."""

    def __init__(self, array: np.ndarray):
        self.array, self.shape, self.type = array, array.shape, None
        self.bytes = array.reshape(-1).view(np.uint8)
        self.written = np.zeros(self.bytes.shape, np.int64)

    def read(self, offsets: np.ndarray, dtype: Any) -> np.ndarray:
        width = np.dtype(dtype).itemsize
        assert np.all(np.asarray(offsets) % width == 0), "not aligned"
        return self.bytes[np.asarray(offsets)[:, None] + np.arange(width)].view(dtype)[:, 0]

    def write(self, offsets: np.ndarray, values: np.ndarray) -> None:
        assert np.all(np.asarray(offsets) % values.itemsize == 0), "not aligned"
        places = np.asarray(offsets)[:, None] + np.arange(values.itemsize)
        self.bytes[places] = values.reshape(-1, 1).view(np.uint8)
        np.add.at(self.written, places, 1)


class Registers:
    """An array [64, n] as its threads hold it: one [128, 2] for each register pair."""

    def __init__(self, pairs: list[np.ndarray]):
        self.registers = types.SimpleNamespace(flat=pairs)

    @classmethod
    def of(cls, array: np.ndarray) -> "Registers":
        return cls([array[rows, columns] for rows, columns in places(array.shape[1])])

    def astype(self, dtype: Any) -> "Registers":
        return Registers([pair.astype(dtype) for pair in self.registers.flat])

    def array(self) -> np.ndarray:
        pairs = self.registers.flat
        result = np.full((64, 4 * len(pairs)), np.nan)
        for (rows, columns), pair in zip(places(result.shape[1]), pairs, strict=True):
            result[rows, columns] = pair
        return result


def places(columns: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows [128, 1] and columns [128, 2] of each register pair."""
    return [
        ((16 * WARP + 8 * h + ROW)[:, None], (8 * c + 2 * QUARTER)[:, None] + np.arange(2))
        for c in range(columns // 8)
        for h in range(2)
    ]


def _store_if(number: np.ndarray, below: int, value: np.ndarray, at: tuple) -> None:
    memory, offsets = at
    chosen = number < below
    memory.write(offsets[chosen], value[chosen])


def replace_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = types.SimpleNamespace
    word = np.uint32
    replacements = dict(
        plgpu=wide(
            inline_mgpu=lambda **_: lambda f: lambda *args: f(None, *args), RefType=lambda *_: None,
            ShapeDtypeStruct=lambda *_, **__: None, Layout=wide(WGMMA=None),
        ),
        arith=wide(
            addi=lambda a, b: a + b, muli=lambda a, b: a * b, andi=lambda a, b: a & b, shrui=lambda a, b: a >> b,
            extui=lambda _, a: a.astype(word), maxui=np.maximum,
        ),
        llvm=wide(
            load=lambda dtype, at, alignment=1: at[0].read(at[1], dtype),
            store=lambda value, at, alignment: at[0].write(at[1], value),
        ),
        utils=wide(c=lambda value, _: np.full(128, value, word), memref_ptr=lambda memory: memory,
                   get_memref_llvm_address_space=lambda _: 1),
        ir=wide(MemRefType=lambda _: None, BF16Type=wide(get=lambda: ml_dtypes.bfloat16)),
        _i32_type=lambda: word,
        _integer=lambda bits: np.dtype(f"uint{bits}"),
        _thread=lambda: THREADS.astype(word),
        _address=lambda base, offset, space=3: (base, offset.astype(np.int64)),
        _load_words=lambda at: [at[0].read(at[1] + 4 * i, word) for i in range(4)],
        _asm=lambda outputs, inputs, text, has_side_effects=False: ptx.run(text, inputs, outputs),
        _bits=ptx.joined,
        _joined=lambda low, high: low | (high.astype(np.uint64) << np.uint64(32)),
        _fragment=lambda pairs: Registers([ptx.halves(register) for pair in pairs for register in pair]),
        _store_if=_store_if,
    )  # fmt: skip
    for name, value in replacements.items():
        monkeypatch.setattr(fragments, name, value)
