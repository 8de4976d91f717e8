"""The Triton kernels of `choose_experts`: products over slices of the inputs, then sum, choice and weights of a row."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**63))


@triton.jit
def split(number):
    """The first 8 bits of float32 numbers as bfloat16, and what is left."""
    bits = number.to(tl.int32, bitcast=True)
    first = (bits & -65536).to(tl.float32, bitcast=True)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), number - first


@triton.jit
def multiply(
    x_ptr, weight_ptr,
    parts_ptr,  # output [slices, ROWS, EXPERTS]
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, ROW_TILE: tl.constexpr,
    EXPERT_TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    expert = tl.program_id(1) * EXPERT_TILE + tl.arange(0, EXPERT_TILE)
    row = tl.program_id(2) * ROW_TILE + tl.arange(0, ROW_TILE)
    place = piece * STEP + tl.arange(0, STEP)
    x = tl.load(
        x_ptr + row[None, :] * HIDDEN + place[:, None],
        mask=(row < ROWS)[None, :] & (place < HIDDEN)[:, None],
        other=0.0,
    )
    weight = tl.load(
        weight_ptr + expert[:, None] * HIDDEN + place[None, :],
        mask=(expert < EXPERTS)[:, None] & (place < HIDDEN)[None, :], other=0.0,
    )  # fmt: skip
    # Three bfloat16 numbers hold a finite float32 one to the last bit, their products with x are exact in float32, and
    # the matrix units take them; of float32 operands they would take 11 bits.
    high, rest = split(weight)
    middle, rest = split(rest)
    low, _ = split(rest)
    total = tl.zeros((EXPERT_TILE, ROW_TILE), tl.float32)
    total = tl.dot(low, x, total)
    total = tl.dot(middle, x, total)
    total = tl.dot(high, x, total)
    tl.store(
        parts_ptr + (piece * ROWS + row[None, :]) * EXPERTS + expert[:, None], total,
        mask=(expert < EXPERTS)[:, None] & (row < ROWS)[None, :],
    )  # fmt: skip


@triton.jit
def choose(
    parts_ptr, bias_ptr,
    experts_ptr, weights_ptr,  # outputs [ROWS, CHOICES]
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, SLICES: tl.constexpr,
    SLICES_PADDED: tl.constexpr, SLICES_AT_ONCE: tl.constexpr, CHOICES: tl.constexpr, CHOICES_PADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    expert = tl.arange(0, EXPERTS_PADDED)
    exists = expert < EXPERTS
    bias = tl.load(bias_ptr + expert, mask=exists, other=0.0)
    logit = tl.zeros((EXPERTS_PADDED,), tl.float32)
    for start in tl.static_range(0, SLICES_PADDED, SLICES_AT_ONCE):
        piece = start + tl.arange(0, SLICES_AT_ONCE)
        part = tl.load(
            parts_ptr + (piece[:, None] * ROWS + row) * EXPERTS + expert[None, :],
            mask=(piece < SLICES)[:, None] & exists[None, :], other=0.0,
        )  # fmt: skip
        logit += tl.sum(part, axis=0)
    score = 1.0 / (1.0 + tl.exp(-logit))
    biased = score + bias
    # Integers that order numbers as a sort does (-0 before 0, NaN last), and then the lower expert before the higher.
    bits = biased.to(tl.int32, bitcast=True)
    order = tl.where(biased == biased, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    key = order.to(tl.int64) * 4294967296 + (EXPERTS_PADDED - 1 - expert)
    key = tl.where(exists, key, LOWEST)
    choice = tl.arange(0, CHOICES_PADDED)
    chosen = tl.zeros((CHOICES_PADDED,), tl.int32)
    for j in tl.static_range(CHOICES):
        best = (EXPERTS_PADDED - 1 - (tl.max(key, axis=0) & 0xFFFFFFFF)).to(tl.int32)
        key = tl.where(expert == best, LOWEST, key)
        chosen = tl.where(choice == j, best, chosen)
    mine = (expert[None, :] == chosen[:, None]) & (choice < CHOICES)[:, None]
    weights = tl.sum(tl.where(mine, score[None, :], 0.0), axis=1)
    at = row * CHOICES + choice
    tl.store(experts_ptr + at, chosen, mask=choice < CHOICES)
    tl.store(weights_ptr + at, weights / tl.sum(weights, axis=0), mask=choice < CHOICES)
