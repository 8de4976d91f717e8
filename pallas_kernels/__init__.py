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
"""

from pallas_kernels.block_attention.api import block_attention
from pallas_kernels.block_merge.api import merge_future_block
from pallas_kernels.windowed_decode.api import windowed_decode

__all__ = ["block_attention", "merge_future_block", "windowed_decode"]
