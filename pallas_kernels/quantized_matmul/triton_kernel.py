"""The Triton kernel of `quantized_matmul`."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import triton
import triton.language as tl

from pallas_kernels._quantized_triton_kernel import left_over, multiply_step


@triton.jit
def quantized_matmul_kernel(
    x_ptr, codes_ptr, scale_ptr, global_scale_ptr,  # inputs
    out_ptr,  # bfloat16 [TOKENS, OUT], or with SPLITS > 1 float32 parts [SPLITS, TOKENS, OUT]
    TOKENS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, FORMAT: tl.constexpr, DIVIDES: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_TOKENS: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(2)
    feature = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    exists = token < TOKENS
    if OUT % BLOCK_OUT == 0:
        row = feature
    else:
        row = tl.minimum(feature, OUT - 1)  # read again, not stored
    factor = left_over(tl.load(global_scale_ptr), DIVIDES)
    STEPS: tl.constexpr = (IN + STEP - 1) // STEP
    acc = tl.zeros((BLOCK_OUT, BLOCK_TOKENS), tl.float32)
    for step in tl.range(split * STEPS // SPLITS, (split + 1) * STEPS // SPLITS, num_stages=STAGES):
        acc = multiply_step(
            acc, codes_ptr, scale_ptr, x_ptr, row, token, exists, step * STEP, IN, BLOCK_OUT, STEP, FORMAT, PAIRS
        )
    acc *= factor
    at = (split * TOKENS + token)[None, :].to(tl.int64) * OUT + feature[:, None]
    stored = exists[None, :] & (feature < OUT)[:, None]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=stored)
