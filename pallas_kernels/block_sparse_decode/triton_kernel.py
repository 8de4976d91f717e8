"""The Triton kernel of `block_sparse_decode`. Base 2 inside, as exp2 is what the hardware has."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from pallas_kernels.windowed_decode.triton_kernel import add_tile


@triton.jit
def load_ids(
    ids_ptr, row, kv_head, start, query, place,
    QUERIES: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
):  # fmt: skip
    """The blocks at these places of the queries' selections; -1 where there is none that the query sees."""
    at = ((row * QUERIES + query) * KV_HEADS + kv_head) * TOP_K + place
    ids = tl.load(ids_ptr + at, mask=(query < QUERIES) & (place < TOP_K), other=-1)
    position = start + query
    return tl.where((position >= 0) & (ids <= position // BLOCK) & (ids >= 0), ids, -1)


@triton.jit
def union(
    ids_ptr, row, kv_head, start, first_query,
    QUERIES: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """The different blocks that some of TOGETHER queries selected.

    -> for each place of the selections: block << 16 | a bit for each query that selected it, and its number among the
    different ones (-1 where it was named before); how many there are.
    """
    at = tl.arange(0, TOGETHER * TOP_K_PADDED)
    ids = load_ids(
        ids_ptr, row, kv_head, start, first_query + at // TOP_K_PADDED, at % TOP_K_PADDED,
        QUERIES, KV_HEADS, BLOCK, TOP_K,
    )  # fmt: skip
    queries = tl.zeros([TOGETHER * TOP_K_PADDED], tl.int32)
    named_before = tl.zeros([TOGETHER * TOP_K_PADDED], tl.int32)
    place = tl.arange(0, TOP_K_PADDED)
    for query in tl.static_range(TOGETHER):
        others = load_ids(
            ids_ptr, row, kv_head, start, first_query + query, place, QUERIES, KV_HEADS, BLOCK, TOP_K
        )  # fmt: skip
        same = (ids[:, None] == others[None, :]).to(tl.int32)
        queries = queries | (tl.max(same, 1) << query)
        earlier = ((query * TOP_K_PADDED + place)[None, :] < at[:, None]).to(tl.int32)
        named_before = named_before | tl.max(same * earlier, 1)
    new = (ids >= 0) & (named_before == 0)
    number = tl.where(new, tl.cumsum(new.to(tl.int32), 0) - 1, -1)
    return (tl.maximum(ids, 0).to(tl.int64) << 16) | queries, number, tl.sum(new.to(tl.int32), 0)


@triton.jit
def attend(
    q_ptr, k_pages_ptr, v_pages_ptr, table_ptr, ids_ptr, q_start_ptr,  # inputs
    out_ptr, lse_ptr,  # outputs: the result, or with SPLITS > 1 the parts [B, Hkv, SPLITS, rows, D]
    list_ptr,  # for each program room for TOGETHER * TOP_K_PADDED words of 64 bits
    QUERIES: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    ENTRIES: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, TOP_K_PADDED: tl.constexpr,
    TOGETHER: tl.constexpr, SCALE_LOG2: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    DIM_PADDED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    split, head_of_row, first_query = tl.program_id(0), tl.program_id(1), tl.program_id(2) * TOGETHER
    row, kv_head = head_of_row // KV_HEADS, head_of_row % KV_HEADS
    group: tl.constexpr = HEADS // KV_HEADS
    tiles_per_block: tl.constexpr = (BLOCK + TILE - 1) // TILE
    start = tl.load(q_start_ptr + row)
    blocks, number, count = union(
        ids_ptr, row, kv_head, start, first_query, QUERIES, KV_HEADS, BLOCK, TOP_K, TOP_K_PADDED, TOGETHER
    )  # fmt: skip

    packed = tl.arange(0, ROWS)  # query and head of the group
    bit = packed // group
    query = first_query + bit
    inside = (packed < TOGETHER * group) & (query < QUERIES)
    dim = tl.arange(0, DIM_PADDED)
    real = dim < DIM
    at = ((row * QUERIES + query) * HEADS + kv_head * group + packed % group).to(tl.int64)
    q = tl.load(q_ptr + at[:, None] * DIM + dim[None, :], mask=inside[:, None] & real[None, :], other=0.0)
    q_position = start + query
    last_position = start + tl.minimum(first_query + TOGETHER, QUERIES) - 1

    values = tl.zeros([ROWS, DIM_PADDED], tl.float32)
    maximum = tl.full([ROWS], -1e30, tl.float32)  # finite: exp2(old - new) stays defined for rows without keys
    total = tl.zeros([ROWS], tl.float32)
    if PAGE % BLOCK == 0 and BLOCK % TILE == 0:
        # Where the blocks lie, asked for before the loop: loads of keys that wait for no other load run further ahead.
        begin = ((blocks >> 16) & 0xFFFFFF).to(tl.int32) * BLOCK
        page_id = tl.load(table_ptr + row * ENTRIES + begin // PAGE % ENTRIES, mask=number >= 0, other=0)
        blocks = blocks | ((page_id * (PAGE // BLOCK) + begin % PAGE // BLOCK).to(tl.int64) << 40)
    # Picked out of registers a block would take all warps a turn through shared memory, in every step.
    places: tl.constexpr = TOGETHER * TOP_K_PADDED
    program = (tl.program_id(2) * tl.num_programs(1) + head_of_row) * SPLITS + split
    list_ptr = list_ptr.to(tl.pointer_type(tl.int64)) + program.to(tl.int64) * places
    tl.store(list_ptr + number, blocks, mask=number >= 0)
    tl.debug_barrier()
    tiles = count * tiles_per_block
    for tile in tl.range(tiles * split // SPLITS, tiles * (split + 1) // SPLITS, num_stages=STAGES):
        chosen = tl.load(list_ptr + tile // tiles_per_block)
        offset = tile % tiles_per_block * TILE + tl.arange(0, TILE)
        first = ((chosen >> 16) & 0xFFFFFF).to(tl.int32) * BLOCK
        if PAGE % BLOCK == 0 and BLOCK % TILE == 0:
            slot = (chosen >> 40) * BLOCK + offset
        else:
            # The newest key takes the place of keys that nobody sees: their pages need not exist.
            existing = tl.minimum(first + offset, last_position)
            page_id = tl.load(table_ptr + row * ENTRIES + existing // PAGE % ENTRIES).to(tl.int64)
            slot = page_id * PAGE + existing % PAGE
        key_at = (slot * KV_HEADS + kv_head) * DIM
        k = tl.load(k_pages_ptr + key_at[None, :] + dim[:, None], mask=real[:, None], other=0.0)
        v = tl.load(v_pages_ptr + key_at[:, None] + dim[None, :], mask=real[None, :], other=0.0)
        selected = ((chosen.to(tl.int32) >> bit) & 1) == 1
        visible = selected[:, None] & (offset < BLOCK)[None, :] & ((first + offset)[None, :] <= q_position[:, None])
        values, maximum, total = add_tile(q, k, v, visible, values, maximum, total, SCALE_LOG2)

    seen = total != 0  # also where a score was NaN
    safe = tl.where(seen, total, 1.0)
    values = values / safe[:, None]
    lse = tl.where(seen, maximum + tl.log2(safe), float("-inf"))
    if SPLITS == 1:
        lse = lse * 0.6931471805599453
    else:
        at = (((head_of_row * SPLITS + split) * QUERIES + first_query) * group + packed).to(tl.int64)
    out_at = out_ptr + at[:, None] * DIM + dim[None, :]
    tl.store(out_at, values.to(out_ptr.dtype.element_ty), mask=inside[:, None] & real[None, :])
    tl.store(lse_ptr + at, lse, mask=inside)
