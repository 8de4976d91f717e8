"""Registers of one warpgroup, by hand: weights from bytes, exchange of accumulators, transposed stores.

Like `_mosaic_hints.py` it works on the level below Pallas. Nothing here runs in the interpreter: `_quantized_mosaic.py`
says the same in plain operations there.

A bfloat16 or float32 [64, n] array in the layout of wgmma: thread 32 w + 4 r + q of the 128 holds, in register pair
(c, h), row 16 w + 8 h + r and columns 8 c + 2 q and 8 c + 2 q + 1.

Which output feature such a row is, is free. Transposed by `movmatrix`, thread q of the four of a column has rows
16 w + 2 q, one more, and 8 more of both: `_feature` makes them the features that lie side by side where they are
stored, so that a thread stores 8 bytes and four of them a whole sector (in NVFP4's order half of two, whose other
halves are another piece's).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector

from pallas_kernels import _mosaic
from pallas_kernels._quantized import MXFP8, Format

plgpu = _mosaic.plgpu
WGMMA: Any = fragmented_array.WGMMA_LAYOUT
SLAB = 64  # bytes of a weight's row that one step of `weights` takes: 16 for each of 4 threads

# Four e4m3 codes b0 to b3 -> (b0, b1), (b2, b3) as bfloat16: value 2^-8, times a scale in both halves of $3. A byte is
# extended with its sign, which so reaches the top; what is between sign and exponent is cleared; 0x7780 is 2^112.
E4M3 = """{
.reg .b32 t, u, m;
mov.b32 m, 0x77807780;
prmt.b32 t, $2, 0, 0x9180;
shl.b32 t, t, 4;
and.b32 t, t, 0x87f087f0;
prmt.b32 u, $2, 0, 0xb3a2;
shl.b32 u, u, 4;
and.b32 u, u, 0x87f087f0;
mul.rn.bf16x2 t, t, m;
mul.rn.bf16x2 u, u, m;
mul.rn.bf16x2 $0, t, $3;
mul.rn.bf16x2 $1, u, $3;
}"""

# Eight e2m1 codes n0 to n7 -> (n0, n1), (n2, n3), (n4, n5), (n6, n7): value 2^-126, times a scale in both halves of $5.
# The same with the low nibbles moved to the top of their bytes.
E2M1 = """{
.reg .b32 l, s, t, u, v;
shl.b32 l, $4, 4;
prmt.b32 s, l, $4, 0xc480;
prmt.b32 t, l, $4, 0xd591;
prmt.b32 u, l, $4, 0xe6a2;
prmt.b32 v, l, $4, 0xf7b3;
shl.b32 s, s, 2;
shl.b32 t, t, 2;
shl.b32 u, u, 2;
shl.b32 v, v, 2;
and.b32 s, s, 0x81c081c0;
and.b32 t, t, 0x81c081c0;
and.b32 u, u, 0x81c081c0;
and.b32 v, v, 0x81c081c0;
mul.rn.bf16x2 $0, s, $5;
mul.rn.bf16x2 $1, t, $5;
mul.rn.bf16x2 $2, u, $5;
mul.rn.bf16x2 $3, v, $5;
}"""

# Two e4m3 scales in the low 16 bits -> each times 2^118 in both halves of a register; 2^127 and 2^111 are bfloat16.
E4M3_SCALES = """{
.reg .b32 t, m;
prmt.b32 t, $2, 0, 0x1404;
shr.b32 t, t, 4;
mov.b32 m, 0x7f007f00;
mul.rn.bf16x2 t, t, m;
mov.b32 m, 0x77007700;
mul.rn.bf16x2 t, t, m;
prmt.b32 $0, t, 0, 0x1010;
prmt.b32 $1, t, 0, 0x3232;
}"""

ZERO = """{
.reg .b32 t;
mov.u32 t, %dynamic_smem_size;
shr.u32 $0, t, 20;
}"""

BOTH, SMALLEST = 0x0080_0080, 0x0040_0040  # scale byte 1 and 0, 2^-126 and 2^-127, in both halves of a register


def reorder(form: Format, x: Any, *, rows: int | None = None) -> Any:
    """x [..., K] in the order in which the kernel multiplies along K; K a multiple of 64 for MXFP8, 128 for NVFP4.

    Thread q of 4 holds 16 consecutive bytes of a slab of 64, and the layout gives it columns 2 q and 2 q + 1 of each 8:
    pairs j of the inputs of thread q and thread q of pairs j are swapped. x [n, K] gets zeros up to `rows` rows.
    """
    slabs = (-1, 4, 8 * form.per_byte)
    if not isinstance(x, jax.Array) or x.dtype.itemsize != 2:
        assert rows is None
        return x.reshape(*x.shape[:-1], *slabs, 2).swapaxes(-2, -3).reshape(x.shape)
    # Of 32-bit words XLA makes an elementwise kernel that reads and writes whole lines; of pairs, and of words that
    # become pairs before they become rows, a transposition through shared memory, several times slower.
    words = lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.uint32)
    if rows is not None and rows > x.shape[0]:
        words = jnp.pad(words, ((0, rows - x.shape[0]), (0, 0)))
    swapped = words.reshape(*words.shape[:-1], *slabs).swapaxes(-1, -2).reshape(words.shape)
    return lax.bitcast_convert_type(swapped, x.dtype).reshape(*words.shape[:-1], x.shape[-1])


def weights(
    form: Format, codes: Any, scales: Any, slab: int, *,
    scale_stride: int, parts: Sequence[int], order: Format | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """bfloat16 fragments [64, 64] of slab number `slab` of codes [64, bytes] in shared memory, ordered as by `reorder`.

    Their rows are in the order that `store_transposed` with the same `order` takes.
    `scales` is [64, blocks] in shared memory, its rows `scale_stride` bytes apart, for the same inputs as `codes`.
    There is one fragment for MXFP8, two for NVFP4; `parts` names those that are wanted. `LEFT_OVER` is missing.
    """
    fragment = plgpu.ShapeDtypeStruct((64, 64), jnp.bfloat16, layout=plgpu.Layout.WGMMA)
    code_stride = codes.shape[-1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()), return_type=(fragment,) * len(parts))
    def build(ctx: Any, codes: Any, scales: Any) -> tuple[Any, ...]:
        warp, row, q = _place()
        base, scale_base = utils.memref_ptr(codes), utils.memref_ptr(scales)
        feature, apart = _feature(order, warp, row)
        offset = _add(_multiply(feature, code_stride), _add(_multiply(q, 16), _i32(SLAB * slab)))
        scale_offset = _multiply(feature, scale_stride)
        columns = []  # registers of the two rows of this thread
        for h in range(2):
            words = _load_words(_address(base, _add(offset, _i32(h * apart * code_stride))))
            at = _add(scale_offset, _i32(h * apart * scale_stride))
            if form is MXFP8:
                at = _add(at, _add(arith.shrui(q, _i32(1)), _i32(2 * slab)))
                byte = arith.extui(_i32_type(), llvm.load(_integer(8), _address(scale_base, at)))
                scale = arith.maxui(_multiply(byte, BOTH), _i32(SMALLEST))
                columns.append([r for word in words for r in _asm(2, [word, scale], E4M3)])
            else:
                at = _add(at, _add(_multiply(q, 2), _i32(8 * slab)))
                two = arith.extui(_i32_type(), llvm.load(_integer(16), _address(scale_base, at), alignment=2))
                pair = _asm(2, [two], E4M3_SCALES)
                wanted = [(word, pair[c // 2]) for c, word in enumerate(words) if c // 2 in parts]
                columns.append([r for both in wanted for r in _asm(4, both, E2M1)])
        pairs = list(zip(*columns, strict=True))
        return tuple(_fragment(pairs[i : i + 8]) for i in range(0, len(pairs), 8))

    return build(codes, scales)


def settle(made: tuple[Any, ...]) -> tuple[Any, ...]:
    """The fragments in registers of their own.

    Where a loop carries the weights of its next product ptxas would make them in the registers that the running product
    reads, and so wait for it first: C7513, "wgmma.mma_async instructions are serialized". A zero that it does not know
    keeps it from that; the values show nothing of it, ptxas says it.
    """
    fragment = plgpu.ShapeDtypeStruct((64, 64), jnp.bfloat16, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,) * len(made), return_type=(fragment,) * len(made))
    def move(ctx: Any, *made: Any) -> tuple[Any, ...]:
        (zero,) = _asm(1, [], ZERO, has_side_effects=True)
        words = [[_bits(pair) for pair in each.registers.flat] for each in made]
        moved = [[_asm(1, [w, zero], "xor.b32 $0, $1, $2;", has_side_effects=True)[0] for w in each] for each in words]
        return tuple(_fragment(list(zip(each[::2], each[1::2], strict=True))) for each in moved)

    return move(*made)


def put(ref: Any, values: Any) -> None:
    """Accumulator [64, n] to shared memory float32 [64 n], in the order in which `get` of any warpgroup reads it."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA), return_type=None)
    def store(ctx: Any, ref: Any, values: Any) -> None:
        base, at = utils.memref_ptr(ref), _multiply(_thread(), 8)
        for i, pair in enumerate(values.registers.flat):
            llvm.store(pair, _address(base, _add(at, _i32(1024 * i))), alignment=8)

    store(ref, values)


def get(ref: Any, shape: tuple[int, int]) -> Any:
    """The accumulator that `put` left."""
    array = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=array)
    def load(ctx: Any, ref: Any) -> Any:
        base, at = utils.memref_ptr(ref), _multiply(_thread(), 8)
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        count = int(np.prod(WGMMA.registers_shape(shape)))
        registers = [llvm.load(pair, _address(base, _add(at, _i32(1024 * i))), alignment=8) for i in range(count)]
        return _array(registers, shape)

    return load(ref)


def store_transposed(ref: Any, values: Any, *, stride: int, order: Format | None = None) -> None:
    """values [64, n] float32, transposed and rounded, to global bfloat16 [m <= n, 64] with rows `stride` apart.

    Rows of `values` are features in the order of `weights`; columns from m on are left out. With an `order` features go
    where `reorder` puts the inputs of a slab; of a slab of NVFP4, twice as long, they are the first half, and `ref`
    starts 4 columns later for the second.
    """
    rows = ref.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA), return_type=None)
    def store(ctx: Any, ref: Any, values: Any) -> None:
        warp, column, q = _place()
        base = utils.memref_ptr(ref)
        space = utils.get_memref_llvm_address_space(ir.MemRefType(ref.type)) or 0
        four = _multiply(_add(_multiply(warp, 4), q), 8 if order is None else 8 * order.per_byte)
        start = _add(_multiply(column, 2 * stride), four)
        pairs = iter(values.astype(ir.BF16Type.get()).registers.flat)
        for first, (low, high) in zip(range(0, rows, 8), zip(pairs, pairs, strict=True), strict=False):
            at = _address(base, _add(start, _i32(2 * first * stride)), space)
            value = _joined(_transposed(_bits(low)), _transposed(_bits(high)))
            if first + 8 <= rows:
                llvm.store(value, at, alignment=8)
            else:
                _store_if(column, rows - first, value, at)

    store(ref, values)


def store_zeros(ref: Any, *, stride: int) -> None:
    """Zeros to global bfloat16 [rows, 64], rows, a multiple of 4, `stride` apart."""
    rows = ref.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=None)
    def store(ctx: Any, ref: Any) -> None:
        base, thread = utils.memref_ptr(ref), _thread()
        space = utils.get_memref_llvm_address_space(ir.MemRefType(ref.type)) or 0
        start = _add(_multiply(arith.andi(thread, _i32(31)), 4), _multiply(arith.shrui(thread, _i32(5)), 2 * stride))
        for row in range(0, rows, 4):  # one for each warp
            llvm.store(_i32(0), _address(base, _add(start, _i32(2 * stride * row)), space), alignment=4)

    store(ref)


def _feature(order: Format | None, warp: Any, row: Any) -> tuple[Any, int]:
    """Output feature of accumulator row 16 w + r, r < 8, and how much further that of the row 8 on is.

    `reorder` takes 2 j + o of thread q's 16 or 32 to 8 j + 2 q + o. With r = 2 i + o, fours of results follow each
    other in the order of 4 w + i, in MXFP8's pairs of them with the same j, in NVFP4's with a four of other features
    behind each.
    """
    four, odd = _add(_multiply(warp, 4), arith.shrui(row, _i32(1))), arith.andi(row, _i32(1))
    if order is None:
        return _add(_multiply(four, 4), odd), 2
    if order is MXFP8:
        j, second = arith.shrui(four, _i32(1)), arith.andi(four, _i32(1))
        return _add(_multiply(second, 32), _add(_multiply(j, 2), odd)), 16
    return _add(_multiply(four, 2), odd), 32


def _bits(pair: Any) -> Any:
    """Two bfloat16 as 32 bits."""
    word = vector.bitcast(ir.VectorType.get((1,), _i32_type()), pair)
    return vector.extract(word, [], [0])


def _transposed(register: Any) -> Any:
    """Of 8 x 8 elements of 2 bytes, two in each thread of a warp."""
    (result,) = _asm(1, [register], "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", has_side_effects=True)
    return result


def _joined(low: Any, high: Any) -> Any:
    """Two registers as 64 bits."""
    wide = [arith.extui(_integer(64), register) for register in (low, high)]
    return arith.ori(wide[0], arith.shli(wide[1], utils.c(32, _integer(64))))


def _store_if(number: Any, below: int, value: Any, at: Any) -> None:
    """A store of 64 bits by the threads of numbers below `below`."""
    text = "{ .reg .pred p; setp.lt.u32 p, $0, $1; @p st.b64 [$2], $3; }"
    address, nothing = llvm.ptrtoint(_integer(64), at), ir.Type.parse("!llvm.void")
    llvm.inline_asm(nothing, [number, _i32(below), address, value], text, "r,r,l,l,~{memory}", has_side_effects=True)


def _i32_type() -> Any:
    return ir.IntegerType.get_signless(32)


def _integer(bits: int) -> Any:
    return ir.IntegerType.get_signless(bits)


def _i32(value: int) -> Any:
    return utils.c(value, _i32_type())


def _add(a: Any, b: Any) -> Any:
    return arith.addi(a, b)


def _multiply(a: Any, b: int) -> Any:
    return arith.muli(a, _i32(b))


def _thread() -> Any:
    """Number of this thread in its warpgroup."""
    return arith.andi(arith.index_cast(_i32_type(), gpu.thread_id(gpu.Dimension.x)), _i32(127))


def _place() -> tuple[Any, Any, Any]:
    """w, r and q of this thread."""
    thread = _thread()
    lane, warp = arith.andi(thread, _i32(31)), arith.shrui(thread, _i32(5))
    return warp, arith.shrui(lane, _i32(2)), arith.andi(lane, _i32(3))


def _address(base: Any, offset: Any, space: int = 3) -> Any:
    pointer, dynamic = llvm.PointerType.get(space), [-2147483648]
    return llvm.getelementptr(pointer, base, [offset], dynamic, _integer(8), llvm.GEPNoWrapFlags.none)


def _load_words(at: Any) -> list[Any]:
    """16 bytes of shared memory as four registers."""
    words = llvm.load(ir.VectorType.get((4,), _i32_type()), at, alignment=16)
    return [llvm.extractelement(words, _i32(i)) for i in range(4)]


def _asm(outputs: int, inputs: Sequence[Any], text: str, has_side_effects: bool = False) -> list[Any]:
    result = llvm.StructType.get_literal([_i32_type()] * outputs) if outputs > 1 else _i32_type()
    constraints = ",".join(["=r"] * outputs + ["r"] * len(inputs))
    values = llvm.inline_asm(result, list(inputs), text, constraints, has_side_effects=has_side_effects)
    if outputs == 1:
        return [values]
    return [llvm.extractvalue(_i32_type(), values, [i]) for i in range(outputs)]


def _fragment(pairs: Sequence[Sequence[Any]]) -> Any:
    """pairs[c][h], 32 bits each, as a bfloat16 array [64, 8 * len(pairs)]."""
    one, two = ir.VectorType.get((1,), _i32_type()), ir.VectorType.get((2,), ir.BF16Type.get())
    registers = [vector.bitcast(two, vector.broadcast(one, r)) for pair in pairs for r in pair]
    return _array(registers, (64, 8 * len(pairs)))


def _array(registers: Sequence[Any], shape: tuple[int, int]) -> Any:
    flat = np.empty(len(registers), dtype=object)
    for i, register in enumerate(registers):  # one by one, or numpy would look into them
        flat[i] = register
    shaped = flat.reshape(WGMMA.registers_shape(shape))
    return fragmented_array.FragmentedArray(_registers=shaped, _layout=WGMMA, _is_signed=None)
