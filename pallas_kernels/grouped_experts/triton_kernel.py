"""The Triton kernels of `grouped_experts`: gate, up and SwiGLU of the rows of a tile, then down."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from pallas_kernels._quantized_triton_kernel import left_over, multiply_step


@triton.jit
def position(feature, SIZE: tl.constexpr, FORMAT: tl.constexpr, PAIRS: tl.constexpr):
    """Where input `feature` of SIZE is in the order of `_quantized_triton.reorder`."""
    if FORMAT == "nvfp4":
        if PAIRS:
            return feature % 4 * (SIZE // 4) + feature // 4
        # Of each 8, the even ones as 0 4 2 6 and the odd ones as 1 5 3 7.
        return feature % 2 * (SIZE // 2) + feature // 8 * 4 + feature // 2 % 2 * 2 + feature // 4 % 2
    if FORMAT == "mxfp8" and PAIRS:
        return feature % 2 * (SIZE // 2) + feature // 2
    return feature


@triton.jit
def locate(expert_ptr, TILES_FIRST: tl.constexpr):
    """Tile of rows, its expert (-1: not used), block of features of this program."""
    if TILES_FIRST:
        tile, block = tl.program_id(0), tl.program_id(1)
    else:
        tile, block = tl.program_id(1), tl.program_id(0)
    return tile, tl.load(expert_ptr + tile), block


@triton.jit
def gate_up(
    x_ptr, gate_ptr, gate_scale_ptr, gate_global_ptr, up_ptr, up_scale_ptr, up_global_ptr, expert_ptr, pairs_ptr,
    inner_ptr,  # output [tiles * TILE, INNER], in the order in which `down` reads it
    CHOICES: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    FORMAT: tl.constexpr, GATE_DIVIDES: tl.constexpr, UP_DIVIDES: tl.constexpr, NEXT_FORMAT: tl.constexpr,
    PAIRS: tl.constexpr, TILE: tl.constexpr, FEATURES: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    TILES_FIRST: tl.constexpr,
):  # fmt: skip
    tile, expert, block = locate(expert_ptr, TILES_FIRST)
    if expert >= 0:
        place = tile * TILE + tl.arange(0, TILE)
        pair = tl.load(pairs_ptr + place)
        exists = pair >= 0
        row = tl.where(exists, pair // CHOICES, 0)
        feature = block * FEATURES + tl.arange(0, FEATURES)
        PER: tl.constexpr = 2 if FORMAT == "nvfp4" else 1
        BLOCK: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
        matrix = expert.to(tl.int64) * INNER
        codes, scales = matrix * (HIDDEN // PER), matrix * (HIDDEN // BLOCK)
        gate = tl.zeros((FEATURES, TILE), tl.float32)
        up = tl.zeros((FEATURES, TILE), tl.float32)
        for start in tl.range(0, HIDDEN, STEP, num_stages=STAGES):
            gate = multiply_step(
                gate, gate_ptr + codes, gate_scale_ptr + scales, x_ptr, feature, row, exists, start, HIDDEN, FEATURES,
                STEP, FORMAT, PAIRS and FORMAT != "bf16",
            )  # fmt: skip
            up = multiply_step(
                up, up_ptr + codes, up_scale_ptr + scales, x_ptr, feature, row, exists, start, HIDDEN, FEATURES,
                STEP, FORMAT, PAIRS and FORMAT != "bf16",
            )  # fmt: skip
        if FORMAT != "bf16":
            gate = gate * left_over(tl.load(gate_global_ptr + expert), GATE_DIVIDES)
            up = up * left_over(tl.load(up_global_ptr + expert), UP_DIVIDES)
        gate = tl.minimum(gate, LIMIT)
        up = tl.clamp(up, -LIMIT, LIMIT)
        values = (gate * tl.sigmoid(ALPHA * gate) * (up + 1.0)).to(inner_ptr.dtype.element_ty)
        # Rows of the tile that do not exist are written too: as the zeros that they are.
        column = position(feature, INNER, NEXT_FORMAT, PAIRS)
        tl.store(inner_ptr + place[None, :] * INNER + column[:, None], values)


@triton.jit
def down(
    inner_ptr, down_ptr, down_scale_ptr, down_global_ptr, expert_ptr,
    out_ptr,  # output [tiles * TILE, HIDDEN]
    HIDDEN: tl.constexpr, INNER: tl.constexpr, FORMAT: tl.constexpr, DIVIDES: tl.constexpr, PAIRS: tl.constexpr,
    TILE: tl.constexpr, FEATURES: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, TILES_FIRST: tl.constexpr,
):  # fmt: skip
    tile, expert, block = locate(expert_ptr, TILES_FIRST)
    if expert >= 0:
        place = tile * TILE + tl.arange(0, TILE)
        feature = block * FEATURES + tl.arange(0, FEATURES)
        PER: tl.constexpr = 2 if FORMAT == "nvfp4" else 1
        BLOCK: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
        matrix = expert.to(tl.int64) * HIDDEN
        codes, scales = matrix * (INNER // PER), matrix * (INNER // BLOCK)
        total = tl.zeros((FEATURES, TILE), tl.float32)
        for start in tl.range(0, INNER, STEP, num_stages=STAGES):
            total = multiply_step(
                total, down_ptr + codes, down_scale_ptr + scales, inner_ptr, feature, place, place >= 0, start, INNER,
                FEATURES, STEP, FORMAT, PAIRS and FORMAT != "bf16",
            )  # fmt: skip
        if FORMAT != "bf16":
            total = total * left_over(tl.load(down_global_ptr + expert), DIVIDES)
        tl.store(out_ptr + place[None, :] * HIDDEN + feature[:, None], total.to(out_ptr.dtype.element_ty))
