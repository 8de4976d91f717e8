"""The Triton kernel of `quantized_matmul` without a GPU: on numpy, compiled ahead of time; its tilings."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import triton_on_numpy
from quantized_matmul_cases import assert_product, mutants, random_weight, random_x
from test_attention_triton import BF16, F32, compile_for

from pallas_kernels._quantized import FORMATS, MXFP8, NVFP4, take_apart
from pallas_kernels._quantized_triton import Tiling, reorder
from pallas_kernels.quantized_matmul import tuning

FLOAT8, BYTES = "*fp8e4nv", "*u8"


PIECES, KERNEL = "pallas_kernels._quantized_triton_kernel", "pallas_kernels.quantized_matmul.triton_kernel"


def on_numpy(x, weight, tiling: Tiling, ordered: bool = True):
    """What `quantized_matmul_triton` does, with the kernel on numpy; results that are not written are NaN."""
    parts, rows = take_apart(weight), x.shape[0]
    form, out = parts.format, parts.out_size
    split = tiling.splits > 1
    shape = (tiling.splits, rows, out) if split else (rows, out)
    result = np.full(shape, np.nan, np.float32 if split else ml_dtypes.bfloat16)
    x = reorder(form.name, tiling.pairs, x) if ordered else x
    arrays = [np.array(a) for a in (x, parts.codes, parts.scale, parts.factor)]
    grid = (-(-rows // tiling.tokens), -(-out // tiling.features), tiling.splits)
    with triton_on_numpy.imported(PIECES, KERNEL) as (language, (_, module)):
        triton_on_numpy.launch(
            language, module.quantized_matmul_kernel, grid, [*arrays, result], TOKENS=rows, OUT=out, IN=parts.in_size,
            FORMAT=form.name, PAIRS=tiling.pairs, BLOCK_OUT=tiling.features, BLOCK_TOKENS=tiling.tokens,
            STEP=tiling.step, SPLITS=tiling.splits, STAGES=1,
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


@pytest.mark.parametrize("tokens", [8, 16])
@pytest.mark.parametrize("scale", [63, 194])
def test_mxfp8_scales_at_the_ends_of_the_range_on_numpy(scale: int, tokens: int) -> None:
    weight = random_weight("mxfp8", scale, 32, 128, scales=(scale, scale))
    x = random_x(scale, 4, 128) * jnp.bfloat16(2.0**20 if scale == 63 else 1)
    assert_product(on_numpy(x, weight, Tiling(features=32, tokens=tokens, step=128)), x, weight)


@pytest.mark.parametrize("tokens", [8, 16])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # infinity times zero
def test_mxfp8_scales_above_the_range_are_seen_on_numpy(tokens: int) -> None:
    weight = random_weight("mxfp8", 1, 32, 128, plain=True)
    weight = dataclasses.replace(weight, scale=weight.scale.at[5, 2].set(195).at[6, 1].set(254))
    out = np.asarray(on_numpy(random_x(1, 4, 128), weight, Tiling(features=32, tokens=tokens, step=64)), np.float32)
    assert not np.isfinite(out[:, 5:7]).any() and np.isfinite(np.delete(out, [5, 6], axis=1)).all()


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
        pointers = dict(x_ptr=BF16, factor_ptr=F32, out_ptr=BF16 if t.splits == 1 else F32)
        pointers |= dict(codes_ptr=float8 if form is MXFP8 else BYTES, scale_ptr=float8 if form is NVFP4 else BYTES)
        constants = dict(
            TOKENS=rows, OUT=shape[0], IN=shape[1], FORMAT=form.name, PAIRS=t.pairs, BLOCK_OUT=t.features,
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
    assert tuning.choose_order(MXFP8, 8, 6144) == ("triton", "mosaic")
    assert tuning.choose_order(MXFP8, 64, 8192)[0] == "mosaic"
    assert tuning.choose_order(NVFP4, 8, 8192)[0] == "mosaic"
    assert tuning.choose_order(NVFP4, 8, 6144)[0] == "triton"  # tiles of 64 features fill 73 % of 132 multiprocessors


@pytest.mark.parametrize("field, value", [("rows", 0), ("order", ()), ("mosaic", ())])
def test_entries_are_validated(field: str, value) -> None:
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(tuning.TABLE["mxfp8"][0], **{field: value})
