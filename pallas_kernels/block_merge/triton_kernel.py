"""The Triton kernel of `merge_future_block`."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from pallas_kernels.windowed_decode.triton_kernel import add_tile


@triton.jit
def merge_future_block(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, new_out_ptr, new_lse_ptr,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, REACH: tl.constexpr,
    SCALE_LOG2: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    row, kv_head, chunk = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS, tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    packed = chunk * ROWS + tl.arange(0, ROWS)
    query = packed // group
    inside = packed < QUERIES * group
    dim = tl.arange(0, DIM_PADDED)
    real = dim < DIM
    at = ((row * QUERIES + query) * HEADS + kv_head * group + packed % group).to(tl.int64)
    mask = inside[:, None] & real[None, :]
    q = tl.load(q_ptr + at[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
    # A finished attention is a softmax state whose total is 1 at the maximum lse.
    lse = tl.load(lse_ptr + at, mask=inside, other=float("-inf")) * 1.4426950408889634
    maximum = tl.maximum(lse, -1e30)
    total = tl.exp2(lse - maximum)
    values = tl.load(out_ptr + at[:, None] * DIM + dim[None, :], mask=mask, other=0.0).to(tl.float32) * total[:, None]
    key = tl.arange(0, TILE)
    exists = key < QUERIES
    key_at = ((row * QUERIES + key) * KV_HEADS + kv_head).to(tl.int64) * DIM
    k = tl.load(k_ptr + key_at[None, :] + dim[:, None], mask=exists[None, :] & real[:, None], other=0.0)
    v = tl.load(v_ptr + key_at[:, None] + dim[None, :], mask=exists[:, None] & real[None, :], other=0.0)
    ahead = key[None, :] - query[:, None]
    visible = exists[None, :] & (ahead > 0) & (ahead < REACH)
    values, maximum, total = add_tile(q, k, v, visible, values, maximum, total, SCALE_LOG2)
    seen = total != 0  # also where a score was NaN
    safe = tl.where(seen, total, 1.0)
    merged = (values / safe[:, None]).to(new_out_ptr.dtype.element_ty)
    tl.store(new_out_ptr + at[:, None] * DIM + dim[None, :], merged, mask=mask)
    merged_lse = tl.where(seen, (maximum + tl.log2(safe)) * 0.6931471805599453, float("-inf"))
    tl.store(new_lse_ptr + at, merged_lse, mask=inside)
