"""The Triton kernels of `windowed_decode` and `block_attention`. Base 2 inside, as exp2 is what the hardware has."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl


@triton.jit
def add_tile(
    q, k, v, visible, values, maximum, total, SCALE_LOG2: tl.constexpr, MASKED: tl.constexpr = True, border=True
):  # fmt: skip
    """One step of the online softmax: keys [D, S], values [S, D]. `MASKED` None: masked if `border`."""
    scores = tl.dot(q, k)
    if MASKED:
        scores = tl.where(visible, scores * SCALE_LOG2, float("-inf"))
        new = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
    else:  # one multiplication with addition a score
        if MASKED is None:
            if border:
                scores = tl.where(visible, scores, float("-inf") if SCALE_LOG2 > 0 else float("inf"))
        if SCALE_LOG2 >= 0:
            new = tl.maximum(maximum, tl.max(scores, 1) * SCALE_LOG2)
        else:
            new = tl.maximum(maximum, tl.min(scores, 1) * SCALE_LOG2)
        weights = tl.exp2(scores * SCALE_LOG2 - new[:, None])
    decay = tl.exp2(maximum - new)
    values = tl.dot(weights.to(v.dtype), v, values * decay[:, None])
    return values, new, total * decay + tl.sum(weights, 1)


@triton.jit
def look_up(
    tile, table_ptr, begin, end, PAGE: tl.constexpr, ENTRIES: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The page of a tile of the cache, or where it has several pages the slot of each of its keys."""
    if PAGE % TILE == 0:
        where = tl.load(table_ptr + tile * TILE // PAGE % ENTRIES)
    else:  # pages without a visible key are not read: the nearest key that is visible stands in for others
        existing = tl.maximum(tl.minimum(tl.maximum(tile * TILE + tl.arange(0, TILE), begin), end - 1), 0)
        where = tl.load(table_ptr + existing // PAGE % ENTRIES) * PAGE + existing % PAGE
    return where


@triton.jit
def add_pages(
    tile, where, border, q, values, maximum, total, k_ptr, v_ptr, q_position, length,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, REACH: tl.constexpr, SCALE_LOG2: tl.constexpr,
    TILE: tl.constexpr, DIM_PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds a tile of the cache; pointers are those of the KV head. `MASKED` None: where it is a `border`."""
    position = tile * TILE + tl.arange(0, TILE)
    if PAGE % TILE == 0:
        slot = where.to(tl.int64) * PAGE + position % PAGE
    else:
        slot = where.to(tl.int64)
    key_at = slot * KV_HEADS * DIM
    dim = tl.arange(0, DIM_PADDED)
    if DIM == DIM_PADDED:
        k = tl.load(k_ptr + key_at[None, :] + dim[:, None])
        v = tl.load(v_ptr + key_at[:, None] + dim[None, :])
    else:
        k = tl.load(k_ptr + key_at[None, :] + dim[:, None], mask=(dim < DIM)[:, None], other=0.0)
        v = tl.load(v_ptr + key_at[:, None] + dim[None, :], mask=(dim < DIM)[None, :], other=0.0)
    visible = (position[None, :] <= q_position[:, None]) & (position[None, :] < length)
    visible = visible & (position[None, :] > q_position[:, None] - REACH)
    return add_tile(q, k, v, visible, values, maximum, total, SCALE_LOG2, MASKED, border)


@triton.jit
def attend(
    q_ptr, k_pages_ptr, v_pages_ptr, table_ptr, q_start_ptr, kv_length_ptr, k_block_ptr, v_block_ptr,  # inputs
    out_ptr, lse_ptr,  # outputs: the result, or with SPLITS > 1 the parts [B, Hkv, SPLITS, rows, D]
    QUERIES: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    ENTRIES: tl.constexpr, REACH: tl.constexpr, SCALE_LOG2: tl.constexpr, HAS_BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr, SPLITS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    BLOCK_TILE: tl.constexpr, DIM_PADDED: tl.constexpr, ONE_LOOP: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)  # programs that read the same keys start together
    chunk, split, head_of_row = at % CHUNKS, at // CHUNKS % SPLITS, at // (CHUNKS * SPLITS)
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
    # Tiles [inner, outer) are seen by every query in full; those around them are masked.
    inner = (tl.maximum(start + last_query + 1 - REACH, 0) + TILE - 1) // TILE
    outer = tl.minimum(length, start + first_query + 1) // TILE
    inner = tl.minimum(tl.maximum(inner, from_tile), to_tile)
    outer = tl.minimum(tl.maximum(outer, inner), to_tile)
    k_ptr, v_ptr, row_ptr = k_pages_ptr + kv_head * DIM, v_pages_ptr + kv_head * DIM, table_ptr + row * ENTRIES
    # A page is looked up a tile ahead, so that copies of tiles to come wait for no load. The loops do not name their
    # stages: the look-ups of one that does are copied as well, and everything waits for them.
    SEVERAL: tl.constexpr = ENTRIES > 1 or PAGE % TILE != 0
    if ONE_LOOP:
        where = look_up(from_tile, row_ptr, begin, end, PAGE, ENTRIES, TILE)
        for tile in tl.range(from_tile, to_tile):
            following = where
            if SEVERAL:
                following = look_up(tile + 1, row_ptr, begin, end, PAGE, ENTRIES, TILE)
            values, maximum, total = add_pages(
                tile, where, (tile < inner) | (tile >= outer), q, values, maximum, total, k_ptr, v_ptr, q_position,
                length, KV_HEADS, DIM, PAGE, REACH, SCALE_LOG2, TILE, DIM_PADDED, None,
            )  # fmt: skip
            where = following
    else:
        first = tl.where(from_tile < inner, from_tile, outer)
        where = look_up(first, row_ptr, begin, end, PAGE, ENTRIES, TILE)
        tile = first
        for _ in tl.range(0, to_tile - outer + inner - from_tile):
            next_tile = tl.where(tile + 1 == inner, outer, tile + 1)
            following = where
            if SEVERAL:
                following = look_up(next_tile, row_ptr, begin, end, PAGE, ENTRIES, TILE)
            values, maximum, total = add_pages(
                tile, where, True, q, values, maximum, total, k_ptr, v_ptr, q_position,
                length, KV_HEADS, DIM, PAGE, REACH, SCALE_LOG2, TILE, DIM_PADDED, True,
            )  # fmt: skip
            where, tile = following, next_tile
        where = look_up(inner, row_ptr, begin, end, PAGE, ENTRIES, TILE)
        for tile in tl.range(inner, outer):
            following = where
            if SEVERAL:
                following = look_up(tile + 1, row_ptr, begin, end, PAGE, ENTRIES, TILE)
            values, maximum, total = add_pages(
                tile, where, False, q, values, maximum, total, k_ptr, v_ptr, q_position,
                length, KV_HEADS, DIM, PAGE, REACH, SCALE_LOG2, TILE, DIM_PADDED, False,
            )  # fmt: skip
            where = following

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

    seen = total != 0  # also where a score was NaN
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
    seen = total != 0
    safe = tl.where(seen, total, 1.0)
    dim = tl.arange(0, DIM_PADDED)
    inside = exists[:, None] & (dim < DIM)[None, :]
    values = tl.load(part_ptr + part.to(tl.int64)[:, None] * DIM + dim[None, :], mask=inside, other=0.0)
    out = tl.sum(values * weights[:, None], 0) / safe
    tl.store(out_ptr + at.to(tl.int64) * DIM + dim, out.to(out_ptr.dtype.element_ty), mask=dim < DIM)
    tl.store(lse_ptr + at, tl.where(seen, (maximum + tl.log2(safe)) * 0.6931471805599453, float("-inf")))
