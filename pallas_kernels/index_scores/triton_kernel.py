"""The Triton kernels of `index_block_scores` and `select_blocks`."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl


@triton.jit
def block_maxima(
    q_ptr, k_ptr, positions_ptr, out_ptr,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    EACH: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DIM_PADDED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """EACH blocks of keys a program, against ROWS rows of queries x index heads."""
    first, row = tl.program_id(0) * EACH, tl.program_id(1)
    tiles_per_block: tl.constexpr = (BLOCK + TILE - 1) // TILE
    packed = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    inside = packed < QUERIES * HEADS
    position = tl.load(positions_ptr + row * QUERIES + packed // HEADS, mask=inside, other=-1)
    dim = tl.arange(0, DIM_PADDED)
    real = dim < DIM
    at = row * QUERIES * HEADS + packed
    q = tl.load(q_ptr + at[None, :] * DIM + dim[:, None], mask=inside[None, :] & real[:, None], other=0.0)

    # max(-1) + BLOCK is less than one block: padding sees none.
    end = tl.minimum((tl.max(position, 0) + BLOCK) // BLOCK, tl.minimum(first + EACH, BLOCKS))
    column = tl.arange(0, EACH)
    best = tl.full([EACH, ROWS], float("-inf"), tl.float32)
    k_row = k_ptr + row.to(tl.int64) * (BLOCKS * BLOCK * DIM)
    for tile in tl.range(first * tiles_per_block, end * tiles_per_block, num_stages=STAGES):
        block = tile // tiles_per_block
        offset = tile % tiles_per_block * TILE + tl.arange(0, TILE)
        slot = block * BLOCK + offset
        exists = offset < BLOCK
        if BLOCK % TILE == 0 and DIM == DIM_PADDED:
            k = tl.load(k_row + slot.to(tl.int64)[:, None] * DIM + dim[None, :])
        else:
            mask = exists[:, None] & real[None, :]
            k = tl.load(k_row + slot.to(tl.int64)[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
        scores = tl.dot(k, q)  # keys are the rows: whole matrix units for any number of queries
        scores = tl.where(exists[:, None] & (slot[:, None] <= position[None, :]), scores, float("-inf"))
        new = tl.maximum(best, tl.max(scores, 0)[None, :])
        best = tl.where((column == block - first)[:, None], new, best)
    out_at = out_ptr + at.to(tl.int64)[None, :] * BLOCKS + (first + column)[:, None]
    tl.store(out_at, best, mask=inside[None, :] & (first + column < BLOCKS)[:, None])


@triton.jit
def select(
    scores_ptr, positions_ptr, out_ptr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_PADDED: tl.constexpr, TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
):  # fmt: skip
    """One query and head a program."""
    at = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + at // HEADS)
    own = tl.where(position >= 0, position // BLOCK, -1)
    block = tl.arange(0, BLOCKS_PADDED)
    score = tl.load(scores_ptr + at * BLOCKS + block, mask=(block < own) & (block < BLOCKS), other=float("-inf"))
    score = tl.where(score == score, tl.where(score == 0.0, 0.0, score), float("-inf"))  # -0 is 0, NaN is nothing
    # One integer orders by score, then by the lower block: a float's bits, made to ascend, above those of the block.
    bits = score.to(tl.int32, bitcast=True)
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ascending = tl.where((block == own) & (block < BLOCKS), 0x7FFFFFFF, ascending)  # above +inf
    nothing: tl.constexpr = -0x7F800001  # of -inf
    rank = (ascending.to(tl.int64) << 32) | (0x7FFFFFFF - block).to(tl.int64)
    place = tl.arange(0, TOP_K_PADDED)
    kept = tl.full([TOP_K_PADDED], -1, tl.int32)
    for i in range(TOP_K):
        best = tl.max(rank, 0)
        found = tl.where((best >> 32).to(tl.int32) > nothing, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), -1)
        kept = tl.where(place == i, found, kept)
        rank = tl.where(rank == best, -0x7FFFFFFFFFFFFFFF, rank)
    tl.store(out_ptr + at * TOP_K + place, kept, mask=place < TOP_K)
