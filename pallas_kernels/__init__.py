"""Kernels for speculative decoding from quantised weights: Pallas Mosaic GPU, Triton and XLA forms of each function.

    windowed_decode      causal attention of K queries a row over a cache, and its log-sum-exp
    merge_future_block   adds the block keys after each query to such a result
    block_attention      both in one call: the context from the cache, the block's keys from the arguments
    index_block_scores   largest index score of each block of keys
    select_blocks        the best blocks of each query
    block_sparse_decode  causal attention over the selected blocks only
    quantized_matmul     x W^T with W in MXFP8 or NVFP4
    quantized_matmuls    the same x times several weights, in one launch
    quantized_mlp        gate, up, SwiGLU and down over such weights, in two launches
    rotate_heads         per-head norms, rotary embedding and cache writes of joined projections
    filter_floors        the scores that min-p, top-k and top-p keep, and their mass
    markov_draw          a slot of a block of drafts: Markov bias, law and draw, in two launches
    choose_experts       router of a mixture of experts: sigmoid scores, the best few, their weights, in two launches
    grouped_experts      a mixture of experts: gate, up, SwiGLU, down and the weighted sum, in bf16, MXFP8 or NVFP4

Implementations, in the order in which `implementation=None` tries them ("mosaic" and "triton" in the order that was
measured as faster for the format and shape):

    "mosaic"    Hopper (sm_90)
    "triton"    NVIDIA from Ampere on, with jax-triton installed
    "xla"       any device, any size; has derivatives

    ===================  ================================  =====================================  ================
    function             "mosaic"                          "triton"                               "xla"
    ===================  ================================  =====================================  ================
    windowed_decode,     bf16, fp16; heads of 64, 128,     bf16, fp16; heads up to 256            bf16, fp16, fp32
    merge_future_block,  192, 256; pages of 8, 16, 32, 64
    block_attention      or a multiple of 128 slots; at
                         most 64 query heads a KV head;
                         blocks of at most 64
    index_block_scores,                                    bf16, fp16; heads up to 256; select    bf16, fp16, fp32
    select_blocks                                          among up to 16,384 blocks
    block_sparse_decode                                    bf16, fp16; heads up to 256; at most   bf16, fp16, fp32
                                                           128 query heads a KV head and 128
                                                           blocks a query
    rotate_heads         bf16, fp16; heads of 64, 128,                                        bf16, fp16, fp32
                         192, 256; rotary pairs in
                         multiples of 32
    filter_floors                                          up to 8,388,608 tokens                 bf16, fp16, fp32
    markov_draw                                            bf16 tables; up to 2,097,152 tokens    bf16, fp16, fp32
    choose_experts                                         bf16 rows, up to 1,024                 bf16, fp16, fp32
    quantized_matmul,    bf16 rows; weights in whole       bf16 rows; every size                  bf16, fp16, fp32
    quantized_matmuls,   tiles, those of a launch in one
    quantized_mlp        format
    grouped_experts      bf16 rows; MXFP8 and NVFP4 in     bf16 rows; multiples of 16 outputs,    bf16, fp16, fp32
                         whole tiles                       of 16 (bf16), 32 (MXFP8) and 64
                                                           (NVFP4) inputs
    ===================  ================================  =====================================  ================

All run under `jit` and inside `lax.while_loop` without a word to the host, and fold `vmap` into the batch. Under a
mesh, call them inside `shard_map`: XLA cannot split a kernel that it cannot look into. With its `check_vma`, the
default, the Mosaic forms of `quantized_matmul` and its siblings are slower where blocks would share tiles, and
`rotate_heads` goes through XLA: JAX has no types there for kernels that write into their operands. `check_vma=False`
leaves them as they are.

The attention functions. Shapes: B rows, K queries a row, Hq query heads, Hkv key/value heads, D head size, N pages, P
pages a row. The cache is a pool of pages `[N, page, Hkv, D]` and a table of page ids `[B, P]`. Position p of row b
lives in page `page_table[b, (p // page) % P]`, slot `p % page`. A contiguous cache is a table that counts up; a ring is
one that wraps. What must hold:

    - every visible position is at least `kv_length - P * page` (`q_start - P * page` in `block_attention`): the ring
      is long enough. The window and a block of K fit when `P * page >= window - 1 + K`;
    - table entries past a row's pages hold any valid page id;
    - every slot of a page that holds a visible key is finite: let caches start as zeros. Other pages are not looked at.

The log-sum-exp is the natural one of the scaled scores, in float32; -inf (and out 0) where a query sees no key. A query
with a NaN that sees a key has NaN for both, and changes no other query's.
"mosaic" is fastest when the page table has a multiple of 4 entries a row and a group has 8, 16, 32 or 64 query heads
(others are padded to the next).
"""

from pallas_kernels.block_attention.api import block_attention
from pallas_kernels.block_merge.api import merge_future_block
from pallas_kernels.block_sparse_decode.api import block_sparse_decode
from pallas_kernels.choose_experts.api import ExpertChoice, choose_experts
from pallas_kernels.filter_floors.api import FilterFloors, filter_floors
from pallas_kernels.grouped_experts.api import grouped_experts
from pallas_kernels.index_scores.api import index_block_scores, select_blocks
from pallas_kernels.markov_draw.api import MarkovDraw, markov_draw
from pallas_kernels.quantized_matmul.api import quantized_matmul, quantized_matmuls, quantized_mlp
from pallas_kernels.rotate_heads.api import Heads, rotate_heads
from pallas_kernels.windowed_decode.api import windowed_decode

__all__ = [
    "ExpertChoice",
    "FilterFloors",
    "Heads",
    "MarkovDraw",
    "block_attention",
    "block_sparse_decode",
    "choose_experts",
    "filter_floors",
    "grouped_experts",
    "index_block_scores",
    "markov_draw",
    "merge_future_block",
    "quantized_matmul",
    "quantized_matmuls",
    "quantized_mlp",
    "rotate_heads",
    "select_blocks",
    "windowed_decode",
]
