"""out^T = W x^T with W in MXFP8, NVFP4 or bfloat16, in Triton: the pieces that the linear and the grouped kernel share.

A program multiplies BLOCK_OUT rows of W (dequantised in registers, the first operand of the dot) with BLOCK_TOKENS rows
of x. There are two ways to read W. PAIRS False takes bytes, which is best where a dot runs on the matrix units of
Ampere: fewer than 16 tokens. PAIRS True takes two bytes at once as wgmma wants them, and one dot for the inputs of each
place in such a pair. Either way x has to be ordered along K so that a dot's inputs follow each other:
`_quantized_triton.reorder`.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl


@triton.jit
def e4m3_bytes(codes):
    """4 codes -> bfloat16 value 2^-8, in order.

    A byte is extended with its sign, which so reaches the top; then what is between sign and exponent is cleared, and
    a product with 2^112, the bits 0x7780, puts the exponent right. A product is a sum with -0: Ampere has no plain one.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t, u, m, z;
        mov.b32 m, 0x77807780;
        mov.b32 z, 0x80008000;
        prmt.b32 t, $2, 0, 0x9180;
        shl.b32 t, t, 4;
        and.b32 t, t, 0x87f087f0;
        fma.rn.bf16x2 $0, t, m, z;
        prmt.b32 u, $2, 0, 0xb3a2;
        shl.b32 u, u, 4;
        and.b32 u, u, 0x87f087f0;
        fma.rn.bf16x2 $1, u, m, z;
        }""", "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)  # fmt: skip


@triton.jit
def e4m3_pairs(codes):
    """2 pairs b0 b1, b2 b3 -> (b0, b2), (b1, b3) as bfloat16 value 2^-8; see `e4m3_bytes`."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t, u, m, z;
        mov.b32 m, 0x77807780;
        mov.b32 z, 0x80008000;
        prmt.b32 t, $2, 0, 0xa280;
        shl.b32 t, t, 4;
        and.b32 t, t, 0x87f087f0;
        fma.rn.bf16x2 $0, t, m, z;
        prmt.b32 u, $2, 0, 0xb391;
        shl.b32 u, u, 4;
        and.b32 u, u, 0x87f087f0;
        fma.rn.bf16x2 $1, u, m, z;
        }""", "=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)  # fmt: skip


@triton.jit
def e2m1_bytes(codes):
    """4 bytes of codes n0 to n7 -> (n0, n4, n2, n6), (n1, n5, n3, n7) as bfloat16 value 2^-126."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t, u;
        shl.b32 t, $4, 12;
        and.b32 t, t, 0x80008000;
        shl.b32 u, $4, 6;
        lop3.b32 $0, u, 0x01c001c0, t, 0xea;
        shl.b32 t, $4, 4;
        and.b32 t, t, 0x80008000;
        shr.b32 u, $4, 2;
        lop3.b32 $1, u, 0x01c001c0, t, 0xea;
        shl.b32 t, $4, 8;
        and.b32 t, t, 0x80008000;
        shl.b32 u, $4, 2;
        lop3.b32 $2, u, 0x01c001c0, t, 0xea;
        shr.b32 u, $4, 6;
        and.b32 u, u, 0x01c001c0;
        lop3.b32 $3, $4, 0x80008000, u, 0xea;
        }""", "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4)  # fmt: skip


@triton.jit
def e2m1_pairs(codes):
    """2 pairs of bytes, codes n0 to n7 -> (n0, n4), (n1, n5), (n2, n6), (n3, n7) as bfloat16 value 2^-126."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t, u;
        shl.b32 t, $4, 12;
        and.b32 t, t, 0x80008000;
        shl.b32 u, $4, 6;
        lop3.b32 $0, u, 0x01c001c0, t, 0xea;
        shl.b32 t, $4, 8;
        and.b32 t, t, 0x80008000;
        shl.b32 u, $4, 2;
        lop3.b32 $1, u, 0x01c001c0, t, 0xea;
        shl.b32 t, $4, 4;
        and.b32 t, t, 0x80008000;
        shr.b32 u, $4, 2;
        lop3.b32 $2, u, 0x01c001c0, t, 0xea;
        shr.b32 u, $4, 6;
        and.b32 u, u, 0x01c001c0;
        lop3.b32 $3, $4, 0x80008000, u, 0xea;
        }""", "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True,
        pack=2)  # fmt: skip


@triton.jit
def e4m3_scales(scales):
    """4 scales that are not negative -> bfloat16 value 2^118, by the exact factors 2^127 and 2^111."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 h, l, a, b, m, n, z;
        shr.b32 h, $2, 4;
        and.b32 h, h, 0x07070707;
        shl.b32 l, $2, 4;
        and.b32 l, l, 0xf0f0f0f0;
        prmt.b32 a, l, h, 0x5140;
        prmt.b32 b, l, h, 0x7362;
        mov.b32 m, 0x7f007f00;
        mov.b32 n, 0x77007700;
        mov.b32 z, 0x80008000;
        fma.rn.bf16x2 a, a, m, z;
        fma.rn.bf16x2 b, b, m, z;
        fma.rn.bf16x2 $0, a, n, z;
        fma.rn.bf16x2 $1, b, n, z;
        }""", "=r,=r,r", [scales], dtype=tl.bfloat16, is_pure=True, pack=4)  # fmt: skip


@triton.jit
def e8m0_scales(scales):
    """Scale byte s -> bfloat16 2^(s - 127), exponent field s; 0x40 is 2^-127."""
    return tl.maximum(scales.to(tl.uint16) << 7, 0x40).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def scale_rows(weights, scales, OUT: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """[OUT, BLOCKS * BLOCK] times the scale [OUT, BLOCKS] of each block."""
    return tl.reshape(tl.reshape(weights, (OUT, BLOCKS, BLOCK)) * scales[:, :, None], (OUT, BLOCKS * BLOCK))


@triton.jit
def load(pointers, exists, ALWAYS: tl.constexpr):
    """What is there, zero elsewhere."""
    if ALWAYS:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=exists, other=0)


@triton.jit
def left_over(global_scale, DIVIDES: tl.constexpr):
    """What the sums of `multiply_step` lack: 2^8 and the global scale (1 for MXFP8)."""
    if DIVIDES:
        return 256.0 / global_scale
    else:
        return 256.0 * global_scale


@triton.jit
def multiply_step(
    acc, codes_ptr, scale_ptr, x_ptr, features, tokens, token_exists, start,
    IN: tl.constexpr, BLOCK_OUT: tl.constexpr, STEP: tl.constexpr, FORMAT: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_OUT, BLOCK_TOKENS] += W[features, start : start + STEP] @ x[tokens, start : start + STEP]^T.

    FORMAT is "mxfp8", "nvfp4" or "bf16" (whose scale_ptr is not read). Inputs beyond IN count as zero. Of quantised
    weights `left_over` is to be multiplied in the end.
    """
    EVEN: tl.constexpr = IN % STEP == 0
    # Inputs of one element that is loaded.
    PER: tl.constexpr = (2 if FORMAT == "nvfp4" else 1) * (2 if PAIRS else 1)
    PLACES: tl.constexpr = IN // PER
    column = start // PER + tl.arange(0, STEP // PER)
    weight_exists = (column < PLACES)[None, :]
    at = features[:, None] * PLACES + column[None, :]
    x_at = x_ptr + tokens[None, :] * IN + column[:, None]
    x_exists = token_exists[None, :] if EVEN else token_exists[None, :] & (column < PLACES)[:, None]
    x0 = tl.load(x_at, mask=x_exists, other=0.0)
    if FORMAT == "bf16":
        return tl.dot(load(codes_ptr + at, weight_exists, EVEN), x0, acc)

    BLOCK: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
    BLOCKS: tl.constexpr = STEP // BLOCK
    EACH: tl.constexpr = BLOCK // PER
    block = start // BLOCK + tl.arange(0, BLOCKS)
    scale_at = scale_ptr.to(tl.pointer_type(tl.uint8)) + features[:, None] * (IN // BLOCK) + block[None, :]
    scales = load(scale_at, (block < IN // BLOCK)[None, :], EVEN)
    if PAIRS:
        codes = load(codes_ptr.to(tl.pointer_type(tl.uint16)) + at, weight_exists, EVEN)
    else:
        codes = load(codes_ptr.to(tl.pointer_type(tl.uint8)) + at, weight_exists, EVEN)
    if FORMAT == "mxfp8":
        scales = e8m0_scales(scales)
        if PAIRS:
            w0, w1 = e4m3_pairs(codes)
            x1 = tl.load(x_at + PLACES, mask=x_exists, other=0.0)
            acc = tl.dot(scale_rows(w0, scales, BLOCK_OUT, BLOCKS, EACH), x0, acc)
            acc = tl.dot(scale_rows(w1, scales, BLOCK_OUT, BLOCKS, EACH), x1, acc)
        else:
            acc = tl.dot(scale_rows(e4m3_bytes(codes), scales, BLOCK_OUT, BLOCKS, EACH), x0, acc)
    else:
        scales = e4m3_scales(scales)
        x1 = tl.load(x_at + PLACES, mask=x_exists, other=0.0)
        if PAIRS:
            w0, w1, w2, w3 = e2m1_pairs(codes)
            x2 = tl.load(x_at + 2 * PLACES, mask=x_exists, other=0.0)
            x3 = tl.load(x_at + 3 * PLACES, mask=x_exists, other=0.0)
            acc = tl.dot(scale_rows(w0, scales, BLOCK_OUT, BLOCKS, EACH), x0, acc)
            acc = tl.dot(scale_rows(w1, scales, BLOCK_OUT, BLOCKS, EACH), x1, acc)
            acc = tl.dot(scale_rows(w2, scales, BLOCK_OUT, BLOCKS, EACH), x2, acc)
            acc = tl.dot(scale_rows(w3, scales, BLOCK_OUT, BLOCKS, EACH), x3, acc)
        else:
            w0, w1 = e2m1_bytes(codes)
            acc = tl.dot(scale_rows(w0, scales, BLOCK_OUT, BLOCKS, EACH), x0, acc)
            acc = tl.dot(scale_rows(w1, scales, BLOCK_OUT, BLOCKS, EACH), x1, acc)
    return acc
