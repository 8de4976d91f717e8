"""Dequantisation by bit tricks: the kernels' own assembly, carried out on arrays, against the formats' definitions."""

from pathlib import Path

import ml_dtypes
import numpy as np
import ptx
import pytest
from quantized_matmul_cases import e2m1_values, e4m3_values
from warpgroup_on_numpy import Memory, Registers, replace_operations

import pallas_kernels
from pallas_kernels import _mosaic_fragments as fragments
from pallas_kernels import _quantized_triton as triton_host
from pallas_kernels._quantized import MXFP8, NVFP4

KERNELS = Path(pallas_kernels.__file__).parent / "_quantized_triton_kernel.py"
CODES = np.array([b for b in range(256) if b & 0x7F != 0x7F], np.uint32)
SCALES = np.arange(127, dtype=np.uint32)  # E4M3, not negative, not NaN
MXFP8_LEFT_OVER, NVFP4_LEFT_OVER = 2.0**-60, 2.0**-8


def words(rng: np.random.Generator, count: int, mask: int = 0x7F) -> np.ndarray:
    """Random registers without a byte that is a NaN of E4M3."""
    bytes_ = rng.integers(0, 256, (count, 4), np.uint8)
    bytes_ = np.where((bytes_ & mask) == 0x7F, bytes_ - 1, bytes_).astype(np.uint8)
    return bytes_.view(np.uint32)[:, 0]


def each_byte(registers: np.ndarray) -> np.ndarray:
    return registers[:, None].view(np.uint8)


def each_nibble(registers: np.ndarray) -> np.ndarray:
    bytes_ = each_byte(registers)
    return np.stack([bytes_ & 15, bytes_ >> 4], axis=-1).reshape(len(registers), 8)


def e8m0_register(scale: int) -> np.ndarray:
    """The scale as the Mosaic kernel makes it."""
    field = min(scale, fragments.E8M0_INFINITE) + fragments.E8M0_SHIFT
    return np.full(1, field * 0x0080_0080, np.uint32)


@pytest.mark.parametrize("scale", [63, 64, 100, 127, 193, 194])
def test_e4m3_is_exact(scale: int) -> None:
    """All codes at the ends of the range of scales; the products of two and two lie in the right places."""
    word = np.stack([CODES, CODES[::-1], np.roll(CODES, 1), np.roll(CODES, 2)], 1)
    word = word.astype(np.uint8).view(np.uint32)[:, 0]
    even, odd = ptx.run(fragments.E4M3, [word, e8m0_register(scale)], 2)
    expected = e4m3_values(each_byte(word)) * 2.0 ** (scale - 127) * MXFP8_LEFT_OVER
    assert np.array_equal(ptx.halves(even), expected[:, [0, 2]])
    assert np.array_equal(ptx.halves(odd), expected[:, [1, 3]])


@pytest.mark.parametrize("scale", [0, 1, 40, 62])
def test_e4m3_below_the_range_rounds_to_a_multiple_of_2_to_the_minus_73(scale: int) -> None:
    word = np.repeat(CODES, 4).astype(np.uint8).view(np.uint32)
    even, _ = ptx.run(fragments.E4M3, [word, e8m0_register(scale)], 2)
    exact = e4m3_values(CODES.astype(np.uint8)) * 2.0 ** (scale - 127)
    error = np.abs(ptx.halves(even)[:, 0] / MXFP8_LEFT_OVER - exact)
    assert 0 < error.max() <= 2.0**-74  # half of a step; and it does round


@pytest.mark.parametrize("scale", [195, 196, 254])
def test_e4m3_above_the_range_is_not_finite(scale: int) -> None:
    even, odd = ptx.run(fragments.E4M3, [words(np.random.default_rng(scale), 100), e8m0_register(scale)], 2)
    assert not np.isfinite(ptx.halves(even)).any() and not np.isfinite(ptx.halves(odd)).any()


def test_e2m1_is_exact_with_every_scale() -> None:
    word = words(np.random.default_rng(0), 500, mask=0)
    for scale in SCALES:
        (pair_low, pair_high) = ptx.run(fragments.E4M3_SCALES, [np.full(1, scale | 0x3800, np.uint32)], 2)
        assert np.array_equal(ptx.halves(pair_low)[0], [e4m3_values(scale) * 2.0**118] * 2)
        assert np.array_equal(ptx.halves(pair_high)[0], [2.0**118] * 2)  # 0x38 is 1
        results = ptx.run(fragments.E2M1, [word, pair_low], 4)
        expected = e2m1_values(each_nibble(word)) * e4m3_values(scale) * NVFP4_LEFT_OVER
        for i, result in enumerate(results):
            assert np.array_equal(ptx.halves(result), expected[:, [i, i + 4]])


def in_registers(form, natural: np.ndarray) -> np.ndarray:
    """Positions of the inputs `natural` [K] along K of the multiplication, from what each thread holds.

    Thread q of the four of a row takes 16 consecutive bytes of each 64; the layout of wgmma gives it columns 2 q and
    2 q + 1 of each 8, in the order in which the assembly returns its registers.
    """
    per_word = 4 * form.per_byte
    order = [(0, 2), (1, 3)] if form is MXFP8 else [(i, i + 4) for i in range(4)]
    found = np.empty_like(natural)
    for slab in range(len(natural) // (64 * form.per_byte)):
        inputs = natural[slab * 64 * form.per_byte :][: 64 * form.per_byte].reshape(4, 4, per_word)  # q, word, code
        for q in range(4):
            registers = [inputs[q, word, list(pair)] for word in range(4) for pair in order]
            for column, pair in enumerate(registers):
                start = slab * 64 * form.per_byte + 8 * column + 2 * q
                found[start : start + 2] = pair
    return found


@pytest.mark.parametrize("form", [MXFP8, NVFP4])
def test_mosaic_takes_x_in_the_order_of_its_registers(form) -> None:
    inputs = np.arange(512)
    assert np.array_equal(fragments.reorder(form, inputs), in_registers(form, inputs))
    both = fragments.reorder(form, np.stack([inputs, -inputs]))
    assert np.array_equal(both[1], -in_registers(form, inputs))


TRITON = [  # function, format, pairs, outputs, registers in
    ("e4m3_bytes", MXFP8, False, 2),
    ("e4m3_pairs", MXFP8, True, 2),
    ("e2m1_bytes", NVFP4, False, 4),
    ("e2m1_pairs", NVFP4, True, 4),
]


@pytest.mark.parametrize("function, form, pairs, outputs", TRITON)
def test_triton_codes_are_exact_and_meet_their_x(function: str, form, pairs: bool, outputs: int) -> None:
    """The results of the assembly, as Triton deals them out, lie where `reorder` puts x."""
    word = words(np.random.default_rng(1), 300)
    registers = [ptx.halves(r) for r in ptx.run(ptx.assembly_in(KERNELS, function), [word], outputs)]
    results = {"e4m3_bytes": 1, "e4m3_pairs": 2, "e2m1_bytes": 2, "e2m1_pairs": 4}[function]
    each = outputs // results  # registers of one result
    if form is MXFP8:
        natural, left_over = e4m3_values(each_byte(word)), 2.0**-120
    else:
        natural, left_over = e2m1_values(each_nibble(word)), 2.0**-126
    order = np.asarray(triton_host.reorder(form.name, pairs, np.arange(natural.shape[1])))
    tensors = [np.concatenate(registers[i * each : (i + 1) * each], -1) for i in range(results)]
    assert np.array_equal(np.concatenate(tensors, -1), natural[:, order] * left_over)


def test_triton_scales_are_exact() -> None:
    word = np.resize(SCALES, 128).astype(np.uint8).view(np.uint32)
    low, high = ptx.run(ptx.assembly_in(KERNELS, "e4m3_scales"), [word], 2)
    expected = e4m3_values(each_byte(word)) * 2.0**118
    assert np.array_equal(np.concatenate([ptx.halves(low), ptx.halves(high)], -1), expected)


@pytest.mark.parametrize(
    "old, new",
    [("0x07f007f0", "0x03f003f0"), ("shl.b32 u, $2, 4", "shl.b32 u, $2, 3"), ("t, $2, 8", "t, $2, 7")],
)
def test_mutants_of_the_assembly_are_caught(old: str, new: str) -> None:
    word = words(np.random.default_rng(2), 300)
    expected = e4m3_values(each_byte(word))[:, [0, 2]] * MXFP8_LEFT_OVER
    assert np.array_equal(ptx.halves(ptx.run(fragments.E4M3, [word, e8m0_register(127)], 2)[0]), expected)
    text = fragments.E4M3.replace(old, new)
    assert text != fragments.E4M3
    assert not np.array_equal(ptx.halves(ptx.run(text, [word, e8m0_register(127)], 2)[0]), expected)


def test_nibble_order_of_the_assembly_matters() -> None:
    word = words(np.random.default_rng(3), 300)
    swapped = ((each_byte(word) >> 4) | (each_byte(word) << 4)).copy().view(np.uint32)[:, 0]
    scale = ptx.run(fragments.E4M3_SCALES, [np.full(1, 0x3838, np.uint32)], 2)[0]
    right, wrong = (ptx.run(fragments.E2M1, [w, scale], 4)[0] for w in (word, swapped))
    assert not np.array_equal(right, wrong)


def pieces(form, seed: int) -> tuple[Memory, Memory, np.ndarray]:
    """Codes [64, 128 bytes] in shared memory, scales of twice as many inputs, and the values that belong to them."""
    rng = np.random.default_rng(seed)
    codes = words(rng, 64 * 32).view(np.uint8).reshape(64, 128)
    inputs = 128 * form.per_byte
    scales = rng.integers(100, 140, (64, 2 * inputs // form.block)).astype(np.uint8)
    if form is NVFP4:
        scales = rng.integers(0, 127, scales.shape).astype(np.uint8)
    values = e4m3_values(codes) if form is MXFP8 else e2m1_values(each_nibble(codes.view(np.uint32).reshape(-1)))
    each = 2.0 ** (scales - 127.0) if form is MXFP8 else e4m3_values(scales)
    each = np.repeat(each, form.block, 1)[:, :inputs]
    left_over = MXFP8_LEFT_OVER if form is MXFP8 else NVFP4_LEFT_OVER
    return Memory(codes), Memory(scales), values.reshape(64, inputs) * each * left_over


@pytest.mark.parametrize("form", [MXFP8, NVFP4])
def test_threads_make_the_weights_of_the_places_they_hold(form, monkeypatch: pytest.MonkeyPatch) -> None:
    """`weights` carried out for 128 threads: all addresses, scales and registers, in the order of `reorder`."""
    replace_operations(monkeypatch)
    codes, scales, expected = pieces(form, 5)
    stride = scales.array.shape[1]
    found = [fragments.weights(form, codes, scales, slab, scale_stride=stride) for slab in range(2)]
    together = np.concatenate([fragment.array() for slab in found for fragment in slab], axis=1)
    assert np.array_equal(together, fragments.reorder(form, expected))
    wrong = fragments.weights(form, codes, scales, 0, scale_stride=stride - 2)[0].array()
    assert not np.array_equal(wrong, together[:, :64])


@pytest.mark.parametrize("rows, columns", [(8, 8), (1, 8), (3, 8), (7, 8), (64, 64), (57, 64), (56, 64), (13, 24)])
def test_results_are_stored_transposed_and_cut_short(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_operations(monkeypatch)
    values = np.random.default_rng(rows).standard_normal((64, columns)).astype(np.float32)
    whole = np.full((rows + 2, 64), np.nan, ml_dtypes.bfloat16)
    memory = Memory(whole)
    memory.shape = (rows, 64)
    fragments.store_transposed(memory, Registers.of(values), stride=64)
    assert np.array_equal(whole[:rows], values.T[:rows].astype(ml_dtypes.bfloat16))
    assert np.isnan(whole[rows:].astype(np.float32)).all()
    assert set(memory.written[: 2 * 64 * rows]) == {1}  # once each
