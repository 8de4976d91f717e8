"""A parameter of this library as tensors of the published layout: their names, dtypes and shapes, and their values.

The inverse of `convert.plan` and `convert.build`: stacks of experts fall apart, and codes and scales get the names of
their format (MXFP8: `weight`, `weight_scale_inv`; NVFP4 of compressed-tensors: `weight_packed`, `weight_scale`,
`weight_global_scale`; NVFP4 of ModelOpt: `weight`, `weight_scale`, `weight_scale_2`).
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from convert import names
from convert.formats import BF16, MX_BLOCK, NV_BLOCK, Format, check_finite, dequantize_mxfp8, dequantize_nvfp4
from convert.safetensors_reader import DTYPES

# Stands for the array of a tensor that is computed from codes and scales.
_DEQUANTISED = "dequantised"


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the published layout.

    Attributes:
      name, dtype, shape: as its shard's header has them.
      format: of the stored parameter that it comes from.
      array: which of the parameter's stored arrays it is: "" (dense), "codes", "scale" or "global_scale".
      expert: its index in a stack of experts.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    format: Format
    array: str = ""
    expert: int | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def dequantised(self) -> bool:
        """Whether it is computed from codes and scales."""
        return self.array == _DEQUANTISED

    def value(self, arrays: Mapping[str, np.ndarray], *, start: int = 0) -> np.ndarray:
        """The tensor, of its dtype and shape.

        Args:
          arrays: stored arrays of the parameter by name.
          start: expert that comes first in them.
        """
        mine = {k: a if self.expert is None else a[self.expert - start] for k, a in arrays.items()}
        if self.dequantised:
            out = np.empty(self.shape, BF16)
            if self.format.name == "mxfp8":
                dequantize_mxfp8(mine["codes"], mine["scale"], out)
            else:
                divide = self.format.global_scale == "divide"
                dequantize_nvfp4(mine["codes"], mine["scale"], np.float32(mine["global_scale"].item()), divide, out)
            check_finite(out, self.name)
            return out
        value, dtype = mine[self.array], DTYPES[self.dtype]
        if value.dtype.itemsize == dtype.itemsize:
            return np.ascontiguousarray(value).view(dtype).reshape(self.shape)
        return value.astype(dtype).reshape(self.shape)


def tensors(
    path: str, shape: tuple[int, ...], stored: Format, *, bf16: bool = False, entry: Mapping[str, Any] | None = None
) -> list[Tensor]:
    """The published tensors of a parameter, an expert after the other.

    Args:
      path: of the parameter.
      shape: its logical shape, [E, out, in] of a stack.
      stored: its format.
      bf16: dequantise it, or round it where it is f32.
      entry: its entry of layout.json; the tensors are then spelled as in the source of the conversion.

    Raises:
      ValueError: no published tensor belongs to the path, or the entry contradicts it.
    """
    entry = entry or {}
    stacked, suffix = len(shape) == 3, path.rpartition("/")[2]
    spelled = _spelled(path, entry)
    result = []
    for expert in range(shape[0]) if stacked else (None,):
        name = spelled.format(expert=expert) if spelled else names.published(path, expert=expert)
        module = name.removesuffix(f".{suffix}")
        one = shape[-2:] if stacked else shape
        if stored.name in ("bf16", "f32") or bf16:
            narrow = stored.name == "bf16" or bf16 or entry.get("source_format") == "bf16"
            array = "" if stored.name in ("bf16", "f32") else _DEQUANTISED
            result.append(Tensor(name, "BF16" if narrow else "F32", one, stored, array, expert))
            continue
        for tail, dtype, size, array in _quantised(one, stored, entry):
            result.append(Tensor(f"{module}.{tail}", dtype, size, stored, array, expert))
    return result


def _quantised(
    shape: tuple[int, ...], stored: Format, entry: Mapping[str, Any]
) -> list[tuple[str, str, tuple[int, ...], str]]:
    """Suffix, dtype, shape and stored array of the tensors of one quantised matrix."""
    rows, columns = shape
    if stored.name == "mxfp8":
        scale = entry.get("scale_dtype", "U8")
        return [
            ("weight", "F8_E4M3", (rows, columns), "codes"),
            ("weight_scale_inv", scale, (rows, columns // MX_BLOCK), "scale"),
        ]
    divide = stored.global_scale == "divide"
    return [
        ("weight_packed" if divide else "weight", "U8", (rows, columns // 2), "codes"),
        ("weight_scale", "F8_E4M3", (rows, columns // NV_BLOCK), "scale"),
        ("weight_global_scale" if divide else "weight_scale_2", "F32", (1,) if divide else (), "global_scale"),
    ]


def _spelled(path: str, entry: Mapping[str, Any]) -> str | None:
    """Name of the parameter's tensor in the source of the conversion, "{expert}" for the number of an expert."""
    source = entry.get("source")
    if not isinstance(source, str):
        return None
    module, _, tail = source.rpartition(".")
    part, suffix = path.split("/", 1)[0], path.rpartition("/")[2]
    tail = suffix if tail.startswith(("{", "weight")) else tail
    name = re.sub(r"\.experts\.\{0\.\.\d+\}\.", ".experts.{expert}.", f"{module}.{tail}")
    placed = names.place(name.replace("{expert}", "0"), part)
    if placed is None or f"{placed.module}/{placed.suffix}" != path:
        raise ValueError(f"the entry of {path} names {source} as its source, which is another parameter")
    return name
