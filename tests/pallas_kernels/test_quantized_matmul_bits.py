"""Dequantisation by bit tricks: the kernels' own assembly, carried out on arrays, against the formats' definitions."""

import functools
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import ptx
import pytest
from quantized_matmul_cases import e2m1_values, e4m3_values
from warpgroup_on_numpy import Memory, Registers, replace_operations

import pallas_kernels
from pallas_kernels import _mosaic_fragments as fragments
from pallas_kernels import _quantized_triton as triton_host
from pallas_kernels._quantized import LEFT_OVER, MXFP8, NVFP4, NVFP4_DIVIDED

KERNELS = Path(pallas_kernels.__file__).parent / "_quantized_triton_kernel.py"
CODES = np.array([b for b in range(256) if b & 0x7F != 0x7F], np.uint32)
SCALES = np.arange(127, dtype=np.uint32)  # E4M3, not negative, not NaN
E8M0 = np.arange(255)  # scale bytes but 255, which is NaN


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


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounded once, as float64. The kernels' weights are too small by 2^8, so this is where MXFP8 ends for them."""
    return (values / LEFT_OVER).astype(ml_dtypes.bfloat16).astype(np.float64)


def test_bfloat16_holds_every_mxfp8_weight_that_float32_holds() -> None:
    """What `as_bfloat16` may round: weights of scale bytes below 11, by at most 2^-126, the smallest normal float32."""
    weights = e4m3_values(CODES)[None] * 2.0 ** (E8M0 - 127.0)[:, None]
    error = np.abs(as_bfloat16(weights) * LEFT_OVER - weights)
    assert np.isfinite(error).all() and not error[11:].any()
    assert error[10].any() and error.max() == 2.0**-126


def rows_of(order, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which row of a weight is in each row of what `weights` makes, seen from 64 rows that grow."""
    replace_operations(monkeypatch)
    scales = np.repeat(np.arange(100, 164, dtype=np.uint8)[:, None], 2, axis=1)
    ones = Memory(np.full((64, 64), 0x38, np.uint8))
    (made,) = fragments.weights(MXFP8, ones, Memory(scales), 0, scale_stride=2, parts=[0], order=order)
    return np.argsort(np.argsort(made.array().max(axis=1))).tolist()


def test_rows_lie_so_that_four_threads_store_a_sector(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `movmatrix` thread q gets rows 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of its warp's 16."""
    rows = np.array(rows_of(None, monkeypatch)).reshape(4, 2, 4, 2)  # warp, h, q, odd
    assert np.array_equal(rows.swapaxes(1, 2).reshape(-1), np.arange(64))
    for order in (MXFP8, NVFP4):
        assert rows_of(order, monkeypatch) != rows_of(None, monkeypatch)


def every_mxfp8_weight(monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray]:
    """What 128 threads make of all codes [256] with all scale bytes [256], in the order of `reorder`; what is right."""
    replace_operations(monkeypatch)
    codes = np.resize(CODES, 256).astype(np.uint8)
    found = []
    for scale in np.resize(E8M0, 256).reshape(4, 64):
        memories = Memory(np.tile(codes, (64, 1))), Memory(np.repeat(scale.astype(np.uint8)[:, None], 8, axis=1))
        made = [fragments.weights(MXFP8, *memories, slab, scale_stride=8, parts=[0]) for slab in range(4)]
        together = np.concatenate([fragment.array() for (fragment,) in made], axis=1)
        found.append(together[np.argsort(rows_of(None, monkeypatch))])
    right = e4m3_values(codes)[None] * 2.0 ** (np.resize(E8M0, 256) - 127.0)[:, None]
    return np.concatenate(found), fragments.reorder(MXFP8, as_bfloat16(right))


def test_threads_make_every_mxfp8_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    found, right = every_mxfp8_weight(monkeypatch)
    assert np.array_equal(found, right)


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("E4M3", "0x77807780", "0x77007700"),  # 2^111
        ("E4M3", "mul.rn.bf16x2 t, t, m;", ""),  # one factor alone: what is above 2^7 is not finite
        ("SMALLEST", None, 0),  # scale byte 0 as zero
        ("SMALLEST", None, 0x0080_0080),  # as 1
        ("BOTH", None, 0x0000_0080),  # for one weight of two
    ],
)
def test_mutants_of_the_range_are_caught(name: str, old, new, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = getattr(fragments, name).replace(old, new) if old else new
    assert mutant != getattr(fragments, name)
    monkeypatch.setattr(fragments, name, mutant)
    found, right = every_mxfp8_weight(monkeypatch)
    assert not np.array_equal(found, right)


def e8m0_register(scale: int) -> np.ndarray:
    return np.full(1, scale * fragments.BOTH, np.uint32)


def test_e4m3_is_exact_and_in_place() -> None:
    """The products of two and two lie in the right places."""
    word = np.stack([CODES, CODES[::-1], np.roll(CODES, 1), np.roll(CODES, 2)], 1)
    word = word.astype(np.uint8).view(np.uint32)[:, 0]
    first, second = ptx.run(fragments.E4M3, [word, e8m0_register(130)], 2)
    expected = e4m3_values(each_byte(word)) * 8 / LEFT_OVER
    assert np.array_equal(ptx.halves(first), expected[:, :2])
    assert np.array_equal(ptx.halves(second), expected[:, 2:])


def test_e2m1_is_exact_with_every_scale() -> None:
    word = words(np.random.default_rng(0), 500, mask=0)
    for scale in SCALES:
        (pair_low, pair_high) = ptx.run(fragments.E4M3_SCALES, [np.full(1, scale | 0x3800, np.uint32)], 2)
        assert np.array_equal(ptx.halves(pair_low)[0], [e4m3_values(scale) * 2.0**118] * 2)
        assert np.array_equal(ptx.halves(pair_high)[0], [2.0**118] * 2)  # 0x38 is 1
        results = ptx.run(fragments.E2M1, [word, pair_low], 4)
        expected = e2m1_values(each_nibble(word)) * e4m3_values(scale) / LEFT_OVER
        for i, result in enumerate(results):
            assert np.array_equal(ptx.halves(result), expected[:, 2 * i : 2 * i + 2])


def in_registers(form, natural: np.ndarray) -> np.ndarray:
    """Positions of the inputs `natural` [K] along K of the multiplication, from what each thread holds.

    Thread q of the four of a row takes 16 consecutive bytes of each 64; the layout of wgmma gives it columns 2 q and
    2 q + 1 of each 8, in the order in which the assembly returns its registers.
    """
    per_word = 4 * form.per_byte
    order = [(i, i + 1) for i in range(0, per_word, 2)]
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
        natural, left_over = e4m3_values(each_byte(word)), 2.0**-8
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
    "name, old, new",
    [
        ("E4M3", "and.b32 t, t, 0x87f087f0", "and.b32 t, t, 0x83f083f0"),
        ("E4M3", "shl.b32 u, u, 4", "shl.b32 u, u, 3"),
        ("E4M3", "0x9180", "0x1100"),  # without the sign
        ("E2M1", "shl.b32 l, $4, 4", "shl.b32 l, $4, 3"),
        ("E2M1", "0xd591", "0xd5d5"),  # the high nibble twice
        ("E2M1", "and.b32 s, s, 0x81c081c0", "and.b32 s, s, 0x83c083c0"),  # the sign left in the exponent too
    ],
)
def test_mutants_of_the_assembly_are_caught(name: str, old: str, new: str) -> None:
    word, text = words(np.random.default_rng(2), 300), getattr(fragments, name)
    if name == "E4M3":
        scale, expected = e8m0_register(127), e4m3_values(each_byte(word)) / LEFT_OVER
    else:
        scale = ptx.run(fragments.E4M3_SCALES, [np.full(1, 0x3838, np.uint32)], 2)[0]
        expected = e2m1_values(each_nibble(word)) / LEFT_OVER

    def run(text: str) -> np.ndarray:
        return np.concatenate([ptx.halves(r) for r in ptx.run(text, [word, scale], expected.shape[1] // 2)], axis=1)

    assert np.array_equal(run(text), expected)
    assert text.replace(old, new) != text
    assert not np.array_equal(run(text.replace(old, new)), expected)


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
    return Memory(codes), Memory(scales), values.reshape(64, inputs) * each / LEFT_OVER


@pytest.mark.parametrize("form", [MXFP8, NVFP4])
def test_threads_make_the_weights_of_the_places_they_hold(form, monkeypatch: pytest.MonkeyPatch) -> None:
    """`weights` carried out for 128 threads: all addresses, scales and registers, in the order of `reorder`."""
    replace_operations(monkeypatch)
    codes, scales, expected = pieces(form, 5)
    stride = scales.array.shape[1]
    make, parts = functools.partial(fragments.weights, form, codes, scales), range(form.per_byte)
    found = [make(slab, scale_stride=stride, parts=parts) for slab in range(2)]
    together = np.concatenate([fragment.array() for slab in found for fragment in slab], axis=1)
    assert np.array_equal(together, fragments.reorder(form, expected)[rows_of(None, monkeypatch)])
    for order in (MXFP8, NVFP4):
        other = make(1, scale_stride=stride, parts=parts, order=order)[0].array()
        right = fragments.reorder(form, expected)[rows_of(order, monkeypatch)]
        assert np.array_equal(other, right[:, 64 * form.per_byte :][:, :64])
    alone = [make(slab, scale_stride=stride, parts=[part])[0].array() for slab in range(2) for part in parts]
    assert np.array_equal(np.concatenate(alone, axis=1), together)
    wrong = make(0, scale_stride=stride - 2, parts=parts)[0].array()
    assert not np.array_equal(wrong, together[:, :64])


@pytest.mark.parametrize("rows, columns", [(8, 8), (1, 8), (3, 8), (7, 8), (64, 64), (57, 64), (56, 64), (13, 24)])
def test_results_are_stored_transposed_and_cut_short(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_operations(monkeypatch)
    values = np.random.default_rng(rows).standard_normal((64, columns)).astype(np.float32)
    whole = np.full((rows + 2, 64), np.nan, ml_dtypes.bfloat16)
    memory = Memory(whole)
    memory.shape = (rows, 64)
    fragments.store_transposed(memory, Registers.of(values[rows_of(None, monkeypatch)]), stride=64)
    assert np.array_equal(whole[:rows], values.T[:rows].astype(ml_dtypes.bfloat16))
    assert np.isnan(whole[rows:].astype(np.float32)).all()
    assert set(memory.written[: 2 * 64 * rows]) == {1}  # once each


def test_settled_fragments_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_operations(monkeypatch)
    values = [np.random.default_rng(i).standard_normal((64, 64)).astype(ml_dtypes.bfloat16) for i in range(2)]
    settled = fragments.settle(tuple(map(Registers.of, values)))
    assert all(np.array_equal(after.array(), before) for after, before in zip(settled, values, strict=True))


def test_zeros_are_stored_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_operations(monkeypatch)
    whole = np.ones((18, 192), ml_dtypes.bfloat16)
    memory = Memory(whole)
    memory.shape, memory.bytes = (16, 64), whole.reshape(-1).view(np.uint8)[2 * (192 + 64) :]  # from row 1, column 64
    fragments.store_zeros(memory, stride=192)
    assert not whole[1:17, 64:128].any() and whole.astype(np.float32).sum() == 18 * 192 - 16 * 64
    assert memory.written.sum() == 2 * 16 * 64  # once each


def stored_in_order(form, values: np.ndarray, rows: int, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """What 128 threads leave of values [128, columns], two pieces of 64, in rows of 128."""
    whole = np.full((rows, 128), np.nan, ml_dtypes.bfloat16)
    for piece in range(2):
        start = 64 * piece if form is MXFP8 else 4 * piece
        memory = Memory(whole)
        memory.shape, memory.bytes = (rows, 64), whole.reshape(-1).view(np.uint8)[2 * start :]
        own = values[64 * piece :][:64][rows_of(form, monkeypatch)]
        fragments.store_transposed(memory, Registers.of(own), stride=128, order=form)
    return whole


@pytest.mark.parametrize("form", [MXFP8, NVFP4, NVFP4_DIVIDED])
@pytest.mark.parametrize("rows, columns", [(8, 8), (3, 8), (64, 64)])
def test_results_are_stored_in_the_order_of_the_next_product(
    rows: int, columns: int, form, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_operations(monkeypatch)
    values = np.random.default_rng(rows).standard_normal((128, columns)).astype(np.float32)
    expected = fragments.reorder(form, values.T[:rows].astype(ml_dtypes.bfloat16))
    assert np.array_equal(stored_in_order(form, values, rows, monkeypatch), expected)
    other = NVFP4 if form is MXFP8 else MXFP8
    assert not np.array_equal(fragments.reorder(other, values.T[:rows].astype(ml_dtypes.bfloat16)), expected)


@pytest.mark.parametrize("form", [MXFP8, NVFP4])
@pytest.mark.parametrize("shape", [(5, 256), (2, 3, 128), (128,)])
def test_rows_of_half_precision_are_reordered_as_words(shape: tuple, form) -> None:
    x = np.random.default_rng(7).standard_normal(shape).astype(ml_dtypes.bfloat16)
    assert np.array_equal(fragments.reorder(form, jnp.asarray(x)), fragments.reorder(form, x))
    if len(shape) == 2:
        padded = np.asarray(fragments.reorder(form, jnp.asarray(x), rows=8))
        assert np.array_equal(padded[:5], fragments.reorder(form, x)) and not padded[5:].any() and len(padded) == 8
