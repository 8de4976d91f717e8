"""Assembling the arrays of one piece from the mapped source. Whatever needs no change stays a view of the file."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from convert import formats
from convert.formats import BF16, E4M3
from convert.plan import Leaf, Piece

Arrays = np.ndarray | dict[str, np.ndarray]


def insert(tree: dict[str, Any], path: str, value: Any) -> None:
    """Put `value` into nested dicts at a path of keys separated by slashes."""
    *parents, last = path.split("/")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = value


def build(piece: Piece, *, into: Arrays | None = None) -> Arrays:
    """The stored arrays of a piece: one array for a dense format, else `codes`, `scale` and, for NVFP4, `global_scale`.

    Args:
      piece: what to build.
      into: arrays that are no longer needed and fit: their memory is used again, because fresh pages cost as much
        as the copy itself.

    Raises:
      ConversionError: a scale or an MXFP8 code in the source is NaN.
    """
    leaf = piece.leaf
    if not leaf.stacked:
        return _one(leaf, leaf.tensors[0])
    sizes = leaf.array_sizes(piece.stop - piece.start)
    dtypes = {"codes": E4M3 if leaf.format.name == "mxfp8" else np.dtype(np.uint8), "": BF16}
    dtypes["scale"] = np.dtype(np.uint8) if leaf.format.name == "mxfp8" else E4M3
    dtypes["global_scale"] = np.dtype(np.float32)
    if into is None:
        out = {name: np.empty(shape, dtypes[name]) for name, (shape, _) in sizes.items()}
    else:
        old = into if isinstance(into, dict) else {"": into}
        out = {name: old[name].reshape(-1).view(dtypes[name]).reshape(shape) for name, (shape, _) in sizes.items()}
    for at, tensors in enumerate(leaf.tensors[piece.start : piece.stop]):
        if leaf.format != leaf.stored:
            _dequantize(leaf, tensors, out[""][at])
            continue
        one = _one(leaf, tensors)
        for name, array in out.items():
            array[at] = one[name] if isinstance(one, dict) else one
    return out[""] if "" in out else out


def fits(old: Arrays, piece: Piece) -> bool:
    """Whether the memory of `old` can hold the arrays of `piece`."""
    named = old if isinstance(old, dict) else {"": old}
    sizes = piece.leaf.array_sizes(piece.stop - piece.start)
    same = {k: a.nbytes for k, a in named.items()} == {k: n for k, (_, n) in sizes.items()}
    return piece.leaf.stacked and same and all(a.flags.writeable for a in named.values())


def _one(leaf: Leaf, tensors: Mapping[str, str]) -> Arrays:
    """The arrays of a parameter that is not stacked, or of one expert."""
    read = leaf.source.array
    if leaf.format != leaf.stored:
        out = np.empty(leaf.parameter.shape[-2:], BF16)
        _dequantize(leaf, tensors, out)
        return out
    match leaf.format.name:
        case "mxfp8":
            codes, scale = _mxfp8(leaf, tensors)
            return {"codes": codes, "scale": scale}
        case "nvfp4":
            codes, scale, global_scale = _nvfp4(leaf, tensors)
            return {"codes": codes, "scale": scale, "global_scale": np.asarray(global_scale)}
        case "f32":
            return read(tensors.get("bias") or tensors["weight"]).astype(np.float32, copy=False)
    return read(tensors.get("bias") or tensors["weight"])


def _mxfp8(leaf: Leaf, tensors: Mapping[str, str]) -> tuple[np.ndarray, np.ndarray]:
    scale = leaf.source.array(tensors["weight_scale_inv"]).view(np.uint8)
    formats.check_mxfp8_scale(scale, leaf.source.where(tensors["weight_scale_inv"]))
    codes = leaf.source.array(tensors["weight"])
    formats.check_mxfp8_codes(codes, leaf.source.where(tensors["weight"]))
    return codes, scale


def _nvfp4(leaf: Leaf, tensors: Mapping[str, str]) -> tuple[np.ndarray, np.ndarray, np.float32]:
    read = leaf.source.array
    codes = read(tensors.get("weight_packed") or tensors["weight"])
    scale = read(tensors["weight_scale"])
    global_scale = np.float32(read(tensors.get("weight_global_scale") or tensors["weight_scale_2"]).item())
    formats.check_nvfp4_scales(scale, float(global_scale), leaf.source.where(tensors["weight_scale"]))
    return codes, scale, global_scale


def _dequantize(leaf: Leaf, tensors: Mapping[str, str], out: np.ndarray) -> None:
    if leaf.stored.name == "mxfp8":
        formats.dequantize_mxfp8(*_mxfp8(leaf, tensors), out)
    else:
        divide = leaf.stored.global_scale == "divide"
        formats.dequantize_nvfp4(*_nvfp4(leaf, tensors), divide, out)
    formats.check_finite(out, leaf.source.where(tensors.get("weight_packed") or tensors["weight"]))
