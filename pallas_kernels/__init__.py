"""Attention kernels for block drafting: Pallas Mosaic GPU, Triton and XLA forms of one set of functions.

    windowed_decode      causal attention of K queries a row over a cache, and its log-sum-exp
    merge_future_block   adds the block keys after each query to such a result
    block_attention      both in one call: the context from the cache, the block's keys from the arguments

Shapes: B rows, K queries a row, Hq query heads, Hkv key/value heads, D head size, N pages, P pages a row.

The cache is a pool of pages `[N, page, Hkv, D]` and a table of page ids `[B, P]`. Position p of row b lives in page
`page_table[b, (p // page) % P]`, slot `p % page`. A contiguous cache is a table that counts up; a ring is one that
wraps. What must hold:

    - every visible position is at least `kv_length - P * page` (`q_start - P * page` in `block_attention`): the ring
      is long enough. The window and a block of K fit when `P * page >= window - 1 + K`;
    - table entries past a row's pages hold any valid page id;
    - every slot of a page that holds a visible key is finite: let caches start as zeros. Other pages are not looked at.

The log-sum-exp is the natural one of the scaled scores, in float32; -inf (and out 0) where a query sees no key.

Implementations, in the order in which `implementation=None` tries them:

    ==========  ==========================  =================  ==============  ========================================
    name        device                      dtypes             head sizes      other limits
    ==========  ==========================  =================  ==============  ========================================
    "mosaic"    Hopper (sm_90)              bf16, fp16         64, 128, 192,   pages of 8, 16, 32, 64 or a multiple of
                                                               256             128 slots; at most 64 query heads a KV
                                                                               head; blocks of at most 64
    "triton"    NVIDIA from Ampere on,      bf16, fp16         up to 256
                with jax-triton installed
    "xla"       any                         bf16, fp16, fp32   any             has derivatives
    ==========  ==========================  =================  ==============  ========================================

All run under `jit` and inside `lax.while_loop` without a word to the host, and fold `vmap` into the batch. "mosaic" is
fastest when the page table has a multiple of 4 entries a row and a group has 8, 16, 32 or 64 query heads (others are
padded to the next). Under a mesh, call them inside `shard_map`: XLA cannot split a kernel that it cannot look into.
"""

from pallas_kernels.block_attention.api import block_attention
from pallas_kernels.block_merge.api import merge_future_block
from pallas_kernels.windowed_decode.api import windowed_decode

__all__ = ["block_attention", "merge_future_block", "windowed_decode"]
