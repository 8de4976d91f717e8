"""The Triton kernel of `quantized_matmul` without a GPU: on numpy, compiled ahead of time; its tilings."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import triton_on_numpy
from quantized_matmul_cases import assert_product, every_weight, mutants, random_weight, random_x
from test_attention_triton import BF16, F32, compile_for

from pallas_kernels._quantized import FORMATS, MXFP8, NVFP4, take_apart
from pallas_kernels._quantized_triton import Tiling, reorder
from pallas_kernels.quantized_matmul import tuning

FLOAT8, BYTES = "*fp8e4nv", "*u8"


PIECES, KERNEL = "pallas_kernels._quantized_triton_kernel", "pallas_kernels.quantized_matmul.triton_kernel"


def on_numpy(x, weight, tiling: Tiling, ordered: bool = True, mutant: dict[str, Any] | None = None):
    """What `quantized_matmul_triton` does, with the kernel on numpy; results that are not written are NaN.

    `mutant`: pieces of the kernel in place of its own.
    """
    parts, rows = take_apart(weight), x.shape[0]
    form, out = parts.format, parts.out_size
    split = tiling.splits > 1
    shape = (tiling.splits, rows, out) if split else (rows, out)
    result = np.full(shape, np.nan, np.float32 if split else ml_dtypes.bfloat16)
    x = reorder(form.name, tiling.pairs, x) if ordered else x
    arrays = [np.array(a) for a in (x, parts.codes, parts.scale, parts.global_scale)]
    grid = (-(-rows // tiling.tokens), -(-out // tiling.features), tiling.splits)
    with triton_on_numpy.imported(PIECES, KERNEL) as (language, (pieces, module)):
        vars(pieces).update(mutant or {})
        triton_on_numpy.launch(
            language, module.quantized_matmul_kernel, grid, [*arrays, result], TOKENS=rows, OUT=out, IN=parts.in_size,
            FORMAT=form.name, DIVIDES=form.divides, PAIRS=tiling.pairs, BLOCK_OUT=tiling.features,
            BLOCK_TOKENS=tiling.tokens, STEP=tiling.step, SPLITS=tiling.splits, STAGES=1,
        )  # fmt: skip
    return jnp.asarray(result.sum(0) if split else result).astype(jnp.bfloat16)


CASES = [  # rows, out, in, tiling
    (1, 32, 256, Tiling(features=32, tokens=8, step=128)),
    (8, 64, 512, Tiling(features=16, tokens=8, step=256, splits=2)),
    (9, 40, 352, Tiling(features=32, tokens=8, step=128)),
    (5, 17, 32, Tiling(features=16, tokens=8, step=64)),
    (16, 64, 256, Tiling(features=32, tokens=16, step=64)),
    (65, 48, 384, Tiling(features=32, tokens=32, step=64, splits=4)),
    (64, 33, 96, Tiling(features=16, tokens=64, step=64)),
]


@pytest.mark.parametrize("form, op", [("mxfp8", "multiply"), ("nvfp4", "multiply"), ("nvfp4", "divide")])
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c[:3])))
def test_on_numpy(case: tuple, form: str, op: str) -> None:
    rows, out, inputs, tiling = case
    weight, x = random_weight(form, rows, out, inputs, op=op), random_x(rows, rows, inputs)
    assert_product(on_numpy(x, weight, tiling), x, weight)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("tokens", [8, 16])
def test_mutants_are_caught_on_numpy(tokens: int, form: str) -> None:
    weight, x = random_weight(form, 2, 32, 256, plain=True), random_x(2, 8, 256)
    tiling = Tiling(features=32, tokens=tokens, step=128)
    for mutant in mutants(form):
        with pytest.raises(AssertionError, match="of the elements are wrong"):
            assert_product(on_numpy(x, mutant(weight), tiling), x, weight)
    if (form, tokens) != ("mxfp8", 8):  # single bytes of MXFP8 take x as it is
        with pytest.raises(AssertionError, match="of the elements are wrong"):
            assert_product(on_numpy(x, weight, tiling, ordered=False), x, weight)


def one_by_one(form: str, tokens: int, power: int, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Every weight times 2^power, by rows of x with a single element; what is right, as bfloat16 results."""
    weight, kept = every_weight(form)
    x = jnp.eye(kept.shape[1], dtype=jnp.bfloat16) * jnp.bfloat16(2.0**power)
    out = on_numpy(x, weight, Tiling(features=32, tokens=tokens, step=64 if form == "nvfp4" else 128), **options)
    return np.asarray(out), (kept.T * 2.0**power).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("form, power", [("mxfp8", -9), ("mxfp8", 20), ("nvfp4", 0)])
@pytest.mark.parametrize("tokens", [8, 64])  # single bytes, pairs of bytes
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # 2^20 takes the largest beyond float32
def test_every_scale_times_every_code_on_numpy(tokens: int, form: str, power: int) -> None:
    found, right = one_by_one(form, tokens, power)
    assert np.isfinite(right.astype(np.float32)).all() or power > 0
    assert np.array_equal(found, right)


def narrow_scales(scales: Any) -> Any:
    """Mutant: scale bytes as they were with one factor of 2^60: from 195 on infinite."""
    field = np.where(scales > 194, 255, scales.astype(np.uint16) + 60).astype(np.uint16)
    return triton_on_numpy.tensor((field << 7).view(ml_dtypes.bfloat16))


def scales_without_the_smallest(scales: Any) -> Any:
    """Mutant: scale byte 0 as zero."""
    return triton_on_numpy.tensor((scales.astype(np.uint16) << 7).view(ml_dtypes.bfloat16))


@pytest.mark.parametrize("tokens", [8, 64])
@pytest.mark.parametrize("mutant, power", [(narrow_scales, -9), (scales_without_the_smallest, 20)])
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_mutants_of_the_range_are_caught_on_numpy(mutant: Any, power: int, tokens: int) -> None:
    found, right = one_by_one("mxfp8", tokens, power, mutant=dict(e8m0_scales=mutant))
    assert not np.array_equal(found, right)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("shape", [(8192, 6144), (500, 6144), (96, 352), (512, 6144)])
def test_every_entry_of_the_table_compiles(shape: tuple[int, int], form, capability: int) -> None:
    pytest.importorskip("triton", reason="triton is not installed: dspark-jax[triton]")
    from pallas_kernels.quantized_matmul import triton_kernel

    float8 = FLOAT8 if capability >= 89 else BYTES
    for rows in (entry.rows for entry in tuning.TABLE[form.name]):
        rows = min(rows, 100)
        t = tuning.choose_triton(form, rows, *shape)
        pointers = dict(x_ptr=BF16, global_scale_ptr=F32, out_ptr=BF16 if t.splits == 1 else F32)
        pointers |= dict(codes_ptr=float8 if form is MXFP8 else BYTES, scale_ptr=float8 if form is NVFP4 else BYTES)
        constants = dict(
            TOKENS=rows, OUT=shape[0], IN=shape[1], FORMAT=form.name, DIVIDES=True, PAIRS=t.pairs, BLOCK_OUT=t.features,
            BLOCK_TOKENS=t.tokens, STEP=t.step, SPLITS=t.splits, STAGES=t.stages,
        )  # fmt: skip
        assert compile_for(triton_kernel.quantized_matmul_kernel, capability, pointers, constants, warps=t.warps)


@pytest.mark.parametrize("field, value", [("features", 8), ("tokens", 12), ("step", 96), ("splits", 3), ("warps", 0)])
def test_tiling_is_validated(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=field):
        Tiling(**(dict(features=64, tokens=8, step=256) | {field: value}))
    with pytest.raises(ValueError, match="stages"):
        Tiling(features=64, tokens=8, step=256, stages=9)


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda f: f.name)
def test_small_weights_are_cut_until_all_have_work(form) -> None:
    for out, inputs in ((8192, 6144), (6144, 8192), (512, 6144), (128, 6144), (64, 64)):
        t = tuning.choose_triton(form, 8, out, inputs)
        programs = -(-out // t.features) * t.splits
        assert programs >= 118 or (t.features == 16 and (t.splits == 16 or 2 * t.splits > -(-inputs // t.step) // 2))
        assert t.splits <= -(-inputs // t.step)


def test_the_order_follows_the_shape() -> None:
    assert tuning.choose_order(MXFP8, 8, 8192) == ("mosaic", "triton")
    assert tuning.choose_order(MXFP8, 8, 6144) == ("mosaic", "triton")
    assert tuning.choose_order(MXFP8, 8, 3072) == ("triton", "mosaic")
    assert tuning.choose_order(MXFP8, 64, 8192)[0] == "mosaic"
    assert tuning.choose_order(NVFP4, 8, 8192)[0] == "mosaic"
    assert tuning.choose_order(NVFP4, 8, 5120)[0] == "triton"  # tiles of 64 features fill 61 % of 132 multiprocessors


@pytest.mark.parametrize("field, value", [("rows", 0), ("order", ()), ("mosaic", ()), ("least_fill", 1.5)])
def test_entries_are_validated(field: str, value) -> None:
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(tuning.TABLE["mxfp8"][0], **{field: value})
