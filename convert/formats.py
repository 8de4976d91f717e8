"""Storage formats of one weight: which tensors make it up, how they are checked, and how they dequantise.

MXFP8: value = e4m3 code * 2^(scale byte - 127), one byte per 32 columns. NVFP4: value = e2m1 code * e4m3 block scale
per 16 columns, times (ModelOpt) or divided by (compressed-tensors) a float32 global scale; two codes in a byte, the
low nibble is the even column.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import ml_dtypes
import numpy as np

from convert.errors import ConversionError
from convert.geometry import Parameter
from convert.safetensors_reader import Checkpoint

MX_BLOCK, NV_BLOCK = 32, 16
BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
# e2m1: sign in bit 3, then two exponent bits and one mantissa bit.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# Rows are dequantised in pieces of about this many values, so that float32 intermediates stay small.
_PIECE = 1 << 20

FormatName = Literal["bf16", "f32", "mxfp8", "nvfp4"]


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """Format of one weight; `global_scale` says what an NVFP4 global scale does."""

    name: FormatName
    global_scale: Literal["multiply", "divide"] | None = None


BF16_FORMAT, F32_FORMAT = Format("bf16"), Format("f32")


def array_sizes(format: Format, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], int]]:
    """Name -> shape and bytes of the arrays that hold a weight of logical `shape`; the name "" is a dense array."""
    lead, values = shape[:-1], math.prod(shape)
    match format.name:
        case "bf16":
            return {"": (shape, 2 * values)}
        case "f32":
            return {"": (shape, 4 * values)}
        case "mxfp8":
            scale = ((*lead, shape[-1] // MX_BLOCK), values // MX_BLOCK)
            return {"codes": (shape, values), "scale": scale}
    scale = ((*lead, shape[-1] // NV_BLOCK), values // NV_BLOCK)
    codes = ((*lead, shape[-1] // 2), values // 2)
    return {"codes": codes, "scale": scale, "global_scale": (shape[:-2], 4 * math.prod(shape[:-2]))}


def detect(source: Checkpoint, module: str, tensors: Mapping[str, str], parameter: Parameter) -> Format:
    """The format of one weight (or one expert), from the suffixes and dtypes that are really there.

    Args:
      source: the checkpoint.
      module: name of the weight without suffix, for messages.
      tensors: suffix -> tensor name.
      parameter: what the config calls for; shapes are checked against its last two axes (or its only one).

    Raises:
      ConversionError: a part is missing, left over, or of the wrong dtype or shape.
    """
    shape = parameter.shape[-2:]
    suffixes = set(tensors)

    def info(suffix: str):
        return source.tensors[tensors[suffix]]

    def fail(suffix: str, problem: str):
        raise ConversionError(f"{source.where(tensors[suffix])} {problem}")

    def check(suffix: str, dtypes: tuple[str, ...], expected: tuple[int, ...], remedy: str) -> None:
        t = info(suffix)
        if t.dtype not in dtypes or t.shape != expected:
            fail(suffix, f"is {t.dtype} {list(t.shape)}, expected {' or '.join(dtypes)} {list(expected)}; {remedy}")

    def need(suffix: str, because: str) -> None:
        if suffix not in suffixes:
            fail(because, f"has no {module.rpartition('.')[2]}.{suffix} beside it; complete the checkpoint")

    again = "correct the config or quantise again"
    if "weight_packed" in suffixes or suffixes & {"weight_scale_2", "weight_global_scale"}:
        first = next(s for s in ("weight_packed", "weight_global_scale", "weight_scale_2") if s in suffixes)
        divide = "weight_global_scale" in suffixes
        codes = "weight_packed" if "weight_packed" in suffixes else "weight"
        need(codes, first)
        need("weight_scale", codes)
        if not divide and "weight_scale_2" not in suffixes:
            need("weight_global_scale", codes)
        global_suffix = "weight_global_scale" if divide else "weight_scale_2"
        extra = suffixes - {codes, "weight_scale", global_suffix}
        rows, columns = _matrix(shape, source, tensors[codes], NV_BLOCK)
        check(codes, ("U8",), (rows, columns // 2), again)
        check("weight_scale", ("F8_E4M3",), (rows, columns // NV_BLOCK), again)
        if info(global_suffix).dtype != "F32" or info(global_suffix).shape not in ((), (1,)):
            t = info(global_suffix)
            fail(global_suffix, f"is {t.dtype} {list(t.shape)}, expected one F32 value; {again}")
        result = Format("nvfp4", "divide" if divide else "multiply")
    elif "weight_scale_inv" in suffixes:
        need("weight", "weight_scale_inv")
        extra = suffixes - {"weight", "weight_scale_inv"}
        rows, columns = _matrix(shape, source, tensors["weight"], MX_BLOCK)
        if info("weight_scale_inv").dtype not in ("U8", "F8_E8M0"):
            fail(
                "weight_scale_inv",
                f"is {info('weight_scale_inv').dtype}, expected one exponent byte (U8 or F8_E8M0) per {MX_BLOCK} "
                "columns; only MXFP8 scales are read here",
            )
        check("weight", ("F8_E4M3",), (rows, columns), again)
        check("weight_scale_inv", ("U8", "F8_E8M0"), (rows, columns // MX_BLOCK), again)
        result = Format("mxfp8")
    else:
        suffix = "bias" if "bias" in suffixes else "weight"
        if suffix not in suffixes:
            fail(min(suffixes), "is a scale without its weight; complete the checkpoint")
        extra = suffixes - {suffix}
        dtype = info(suffix).dtype
        if dtype in ("F8_E4M3", "F8_E5M2", "U8", "I8"):
            if extra:
                fail(min(extra), f"is no scale of a known format ({dtype} weight); use MXFP8 or NVFP4")
            fail(suffix, f"is {dtype} but no scale lies beside it; complete the checkpoint")
        allowed = ("F32", "BF16") if parameter.kind == "wide" else ("BF16",)
        check(suffix, allowed, shape, "correct the config or cast the tensor")
        result = F32_FORMAT if parameter.kind == "wide" else BF16_FORMAT
    if extra:
        fail(min(extra), f"does not belong to a weight of format {result.name}; remove it")
    if result.name in ("mxfp8", "nvfp4") and parameter.kind != "linear":
        fail(next(iter(tensors)), f"is quantised ({result.name}), which this parameter cannot be; use bf16")
    return result


def _matrix(shape: tuple[int, ...], source: Checkpoint, name: str, block: int) -> tuple[int, int]:
    if len(shape) != 2 or shape[1] % block:
        raise ConversionError(
            f"{source.where(name)} is quantised in blocks of {block} columns, but the config gives it the shape "
            f"{list(shape)}; use a bf16 checkpoint"
        )
    return shape[0], shape[1]


def check_mxfp8_scale(scale: np.ndarray, where: str) -> None:
    """Raise on an E8M0 byte 255, which stands for NaN."""
    if scale.size and int(scale.max()) == 255:
        raise ConversionError(f"{where} holds the scale byte 255, which is NaN; quantise or download the tensor again")


def check_mxfp8_codes(codes: np.ndarray, where: str) -> None:
    """Raise on an E4M3 code 0x7f or 0xff: both are NaN, and E4M3 has no infinities."""
    # Without temporary arrays: 0x7f is the largest signed byte, 0xff the largest unsigned one.
    if codes.size and (int(codes.view(np.int8).max()) == 0x7F or int(codes.view(np.uint8).max()) == 0xFF):
        raise ConversionError(f"{where} holds a NaN code (0x7f or 0xff); quantise or download the tensor again")


def check_nvfp4_scales(scale: np.ndarray, global_scale: float, where: str) -> None:
    """Raise on a NaN or signed block scale or a global scale that has no normal float32 or no normal reciprocal."""
    if scale.size and int(scale.view(np.uint8).max()) > 0x7F:
        raise ConversionError(
            f"{where} holds a negative block scale or NaN block scale; quantise or download the tensor again"
        )
    if scale.size and int((scale.view(np.uint8) & 0x7F).max()) == 0x7F:
        raise ConversionError(f"{where} holds a NaN block scale; quantise or download the tensor again")
    if not 2.0**-126 <= global_scale <= 2.0**126:
        raise ConversionError(
            f"{where} has the global scale {global_scale}, which must be from 2^-126 to 2^126; "
            "quantise or download the tensor again"
        )


def check_finite(values: np.ndarray, where: str) -> None:
    """Raise on a bf16 that is infinite or NaN, which is what a weight beyond bf16's range becomes."""
    for lo, hi in _pieces(*values.shape):
        if int((values[lo:hi].view(np.uint16) & 0x7FFF).max(initial=0)) >= 0x7F80:
            raise ConversionError(
                f"{where} holds a weight that is too large for bfloat16; keep its format (--weights native), "
                "or quantise or download the tensor again"
            )


def exponents(scale: np.ndarray) -> np.ndarray:
    """E8M0 bytes -> float32 2^(byte - 127), also for byte 0, which is subnormal in float32."""
    bits = scale.astype(np.uint32) << np.uint32(23)
    bits[scale == 0] = 1 << 22
    return bits.view(np.float32)


def _pieces(rows: int, columns: int):
    step = max(1, _PIECE // max(1, columns))
    return ((at, min(at + step, rows)) for at in range(0, rows, step))


def dequantize_mxfp8(codes: np.ndarray, scale: np.ndarray, out: np.ndarray) -> None:
    """codes e4m3 [o, i], scale u8 [o, i/32] -> out bf16 [o, i]; exact inside bf16's exponent range."""
    rows, columns = codes.shape
    for lo, hi in _pieces(rows, columns):
        values = codes[lo:hi].astype(np.float32).reshape(hi - lo, -1, MX_BLOCK)
        with np.errstate(over="ignore"):  # `check_finite` is for that
            values *= exponents(scale[lo:hi])[..., None]
            out[lo:hi] = values.reshape(hi - lo, columns).astype(BF16)


def dequantize_nvfp4(
    codes: np.ndarray, scale: np.ndarray, global_scale: np.float32, divide: bool, out: np.ndarray
) -> None:
    """codes u8 [o, i/2], scale e4m3 [o, i/16] -> out bf16 [o, i], rounded once from the float32 product."""
    rows, columns = out.shape
    for lo, hi in _pieces(rows, columns):
        packed = codes[lo:hi]
        values = np.empty((hi - lo, columns), np.float32)
        values[:, 0::2] = E2M1[packed & 0xF]
        values[:, 1::2] = E2M1[packed >> 4]
        blocks = values.reshape(hi - lo, -1, NV_BLOCK)
        blocks *= scale[lo:hi].astype(np.float32)[..., None]
        with np.errstate(over="ignore"):  # `check_finite` is for that
            values = values / global_scale if divide else values * global_scale
            out[lo:hi] = values.astype(BF16)
