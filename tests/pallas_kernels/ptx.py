"""The few PTX instructions that dequantisation is written in, carried out on arrays: assembly tested without a GPU."""

import ast
import re
from pathlib import Path

import ml_dtypes
import numpy as np


def assembly_in(path: str | Path, function: str) -> str:
    """The assembly text inside a function of a module that need not be importable."""
    for node in ast.walk(ast.parse(Path(path).read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return next(
                n.value
                for n in ast.walk(node)
                if isinstance(n, ast.Constant) and isinstance(n.value, str) and ".reg" in n.value
            )
    raise LookupError(function)


def run(text: str, inputs: list[np.ndarray], outputs: int) -> list[np.ndarray]:
    """Executes `text` on uint32 arrays; $0 to $outputs-1 are results, the operands follow."""
    registers = {f"${outputs + i}": np.asarray(value, np.uint32) for i, value in enumerate(inputs)}
    registers["%dynamic_smem_size"] = np.uint32(232448)  # the most there is

    def read(operand: str) -> np.ndarray:
        return registers[operand] if operand in registers else np.uint32(int(operand, 0))

    for statement in re.sub(r"\.reg[^;]*;", "", text.strip().strip("{}")).split(";"):
        if not statement.strip():
            continue
        name, rest = statement.split(None, 1)
        target, *operands = (part.strip() for part in rest.split(","))
        registers[target] = OPERATIONS[name](*map(read, operands))
    return [registers[f"${i}"] for i in range(outputs)]


def halves(register: np.ndarray) -> np.ndarray:
    """The two bfloat16 of a register [..., 2] as float64, the low half first."""
    pair = np.stack([register & np.uint32(0xFFFF), register >> np.uint32(16)], axis=-1)
    return pair.astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)


def joined(pair: np.ndarray) -> np.ndarray:
    """The reverse of `halves`, rounded to bfloat16."""
    bits = pair.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
    return bits[..., 0] | (bits[..., 1] << np.uint32(16))


def _lop3(a, b, c, table):
    result = np.uint32(0)
    for i in range(8):
        if int(table) >> i & 1:
            term = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
            result = result | term
    return result


def _permute(a, b, selector):
    source = a.astype(np.uint64) | (np.asarray(b).astype(np.uint64) << np.uint64(32))
    result = np.uint64(0)
    for i in range(4):
        place = int(selector) >> (4 * i) & 15
        byte = source >> np.uint64(8 * (place & 7)) & np.uint64(0xFF)
        if place & 8:  # its sign, eight times
            byte = (byte >> np.uint64(7)) * np.uint64(0xFF)
        result = result | (byte << np.uint64(8 * i))
    return result.astype(np.uint32)


def _movmatrix(register):
    """Lane 4 r + q of a warp has elements 2 q and 2 q + 1 of row r; afterwards the same of the transposed matrix."""
    halves_ = np.stack([register & np.uint32(0xFFFF), register >> np.uint32(16)], axis=-1)  # [threads, 2]
    columns = halves_.reshape(-1, 8, 8).swapaxes(1, 2).reshape(-1, 2)
    return columns[:, 0] | (columns[:, 1] << np.uint32(16))


def _fma(a, b, c):
    with np.errstate(invalid="ignore"):  # infinity times zero is NaN here as there
        return joined(halves(a) * halves(b) + halves(c))


def _multiply(a, b):
    with np.errstate(invalid="ignore"):
        return joined(halves(a) * halves(b))


OPERATIONS = {
    "shl.b32": lambda a, n: (a << n).astype(np.uint32),
    "shr.b32": lambda a, n: (a >> n).astype(np.uint32),
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "shr.u32": lambda a, n: (a >> n).astype(np.uint32),
    "lop3.b32": _lop3,
    "prmt.b32": _permute,
    "movmatrix.sync.aligned.m8n8.trans.b16": _movmatrix,
    "mul.rn.bf16x2": _multiply,
    "fma.rn.bf16x2": _fma,
}
