"""The Triton kernels of `windowed_decode` and `block_attention`. Base 2 inside, as exp2 is what the hardware has."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl


@triton.jit
def add_tile(q, k, v, visible, values, maximum, total, scale_log2):
    """One step of the online softmax: keys [D, S], values [S, D]."""
    scores = tl.where(visible, tl.dot(q, k) * scale_log2, float("-inf"))
    new = tl.maximum(maximum, tl.max(scores, 1))
    decay = tl.exp2(maximum - new)
    weights = tl.exp2(scores - new[:, None])
    values = tl.dot(weights.to(v.dtype), v, values * decay[:, None])
    return values, new, total * decay + tl.sum(weights, 1)


@triton.jit
def attend(
    q_ptr, k_pages_ptr, v_pages_ptr, table_ptr, q_start_ptr, kv_length_ptr, k_block_ptr, v_block_ptr,  # inputs
    out_ptr, lse_ptr,  # outputs: the result, or with SPLITS > 1 the parts [B, Hkv, SPLITS, rows, D]
    QUERIES: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    ENTRIES: tl.constexpr, REACH: tl.constexpr, SCALE_LOG2: tl.constexpr, HAS_BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_TILE: tl.constexpr,
    DIM_PADDED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    split, head_of_row, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, kv_head = head_of_row // KV_HEADS, head_of_row % KV_HEADS
    group: tl.constexpr = HEADS // KV_HEADS
    packed = chunk * ROWS + tl.arange(0, ROWS)  # query and head of the group
    query = packed // group
    inside = packed < QUERIES * group
    dim = tl.arange(0, DIM_PADDED)
    real = dim < DIM
    at = ((row * QUERIES + query) * HEADS + kv_head * group + packed % group).to(tl.int64)
    q = tl.load(q_ptr + at[:, None] * DIM + dim[None, :], mask=inside[:, None] & real[None, :], other=0.0)

    start, length = tl.load(q_start_ptr + row), tl.load(kv_length_ptr + row)
    q_position = start + query
    first_query = chunk * ROWS // group
    last_query = tl.minimum(QUERIES - 1, (chunk * ROWS + ROWS - 1) // group)
    begin = tl.maximum(start + first_query - (REACH - 1), 0)
    end = tl.minimum(length, start + last_query + 1)
    first_tile = begin // TILE
    tiles = tl.maximum((end + TILE - 1) // TILE - first_tile, 0)
    from_tile = first_tile + tiles * split // SPLITS
    to_tile = first_tile + tiles * (split + 1) // SPLITS

    values = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    maximum = tl.full([ROWS], -1e30, tl.float32)  # finite: exp2(old - new) stays defined for rows without keys
    total = tl.zeros([ROWS], tl.float32)
    for tile in tl.range(from_tile, to_tile, num_stages=STAGES):
        position = tile * TILE + tl.arange(0, TILE)
        # Pages without a visible key are not read: the nearest key that is visible takes the place of others.
        if PAGE % TILE == 0:
            page = tile * TILE // PAGE
            page_id = tl.load(table_ptr + row * ENTRIES + page % ENTRIES).to(tl.int64)
            slot = page_id * PAGE + position % PAGE
        else:
            existing = tl.minimum(tl.maximum(position, begin), end - 1)
            page_id = tl.load(table_ptr + row * ENTRIES + existing // PAGE % ENTRIES).to(tl.int64)
            slot = page_id * PAGE + existing % PAGE
        key_at = (slot * KV_HEADS + kv_head) * DIM
        k = tl.load(k_pages_ptr + key_at[None, :] + dim[:, None], mask=real[:, None], other=0.0)
        v = tl.load(v_pages_ptr + key_at[:, None] + dim[None, :], mask=real[None, :], other=0.0)
        visible = (position[None, :] <= q_position[:, None]) & (position[None, :] < length)
        visible = visible & (position[None, :] > q_position[:, None] - REACH)
        values, maximum, total = add_tile(q, k, v, visible, values, maximum, total, SCALE_LOG2)

    if HAS_BLOCK:
        if split == SPLITS - 1:
            key = tl.arange(0, BLOCK_TILE)
            key_at = ((row * QUERIES + key) * KV_HEADS + kv_head).to(tl.int64) * DIM
            exists = key < QUERIES
            k = tl.load(k_block_ptr + key_at[None, :] + dim[:, None], mask=exists[None, :] & real[:, None], other=0.0)
            v = tl.load(v_block_ptr + key_at[:, None] + dim[None, :], mask=exists[:, None] & real[None, :], other=0.0)
            behind = query[:, None] - key[None, :]
            visible = exists[None, :] & (behind < REACH) & (behind > -REACH)
            if CAUSAL:
                visible = visible & (behind >= 0)
            values, maximum, total = add_tile(q, k, v, visible, values, maximum, total, SCALE_LOG2)

    seen = total > 0
    safe = tl.where(seen, total, 1.0)
    values = values / safe[:, None]
    lse = tl.where(seen, maximum + tl.log2(safe), float("-inf"))
    if SPLITS == 1:
        lse = lse * 0.6931471805599453
    else:
        at = ((head_of_row * SPLITS + split) * QUERIES * group + packed).to(tl.int64)
    out_at = out_ptr + at[:, None] * DIM + dim[None, :]
    tl.store(out_at, values.to(out_ptr.dtype.element_ty), mask=inside[:, None] & real[None, :])
    tl.store(lse_ptr + at, lse, mask=inside)


@triton.jit
def merge_splits(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    """One query and head a program: [B, Hkv, SPLITS, rows, D] -> [B, K, Hq, D]."""
    at = tl.program_id(0)
    group: tl.constexpr = HEADS // KV_HEADS
    head, query, row = at % HEADS, at // HEADS % QUERIES, at // (HEADS * QUERIES)
    split = tl.arange(0, SPLITS_PADDED)
    exists = split < SPLITS
    part = ((row * KV_HEADS + head // group) * SPLITS + split) * QUERIES * group + query * group + head % group
    lse = tl.load(part_lse_ptr + part, mask=exists, other=float("-inf"))
    maximum = tl.maximum(tl.max(lse, 0), -1e30)
    weights = tl.exp2(lse - maximum)
    total = tl.sum(weights, 0)
    safe = tl.where(total > 0, total, 1.0)
    dim = tl.arange(0, DIM_PADDED)
    inside = exists[:, None] & (dim < DIM)[None, :]
    values = tl.load(part_ptr + part.to(tl.int64)[:, None] * DIM + dim[None, :], mask=inside, other=0.0)
    out = tl.sum(values * weights[:, None], 0) / safe
    tl.store(out_ptr + at.to(tl.int64) * DIM + dim, out.to(out_ptr.dtype.element_ty), mask=dim < DIM)
    tl.store(lse_ptr + at, tl.where(total > 0, (maximum + tl.log2(safe)) * 0.6931471805599453, float("-inf")))
