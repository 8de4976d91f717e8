"""The Triton kernels of block-sparse attention compile ahead of time for architectures that no test machine has."""

import os

import pytest
from test_attention_triton import BF16, F32, I32, compile_for

from pallas_kernels.block_sparse_decode.triton import choose_tuning

compiles = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="Triton compiles nothing with TRITON_INTERPRET=1"
)


# Batch, context -> queries of a program, splits: what was fastest on an H200 with the heads and blocks of the model.
@pytest.mark.parametrize(
    "batch, context, queries, splits", [(1, 4096, 4, 16), (8, 4096, 8, 4), (64, 4096, 8, 1), (8, 32768, 4, 4)]
)
def test_queries_of_a_program(batch: int, context: int, queries: int, splits: int) -> None:
    tuning = choose_tuning(
        rows=4 * batch, queries=8, group=16, head_dim=128, block_size=128, top_k=16, blocks=context // 128,
        multiprocessors=132,
    )  # fmt: skip
    assert (tuning.queries, tuning.splits) == (queries, splits)
    assert (tuning.warps, tuning.stages) == ((8, 4) if queries == 8 else (4, 3))


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("together, page", [(1, 128), (4, 128), (8, 128), (4, 64), (2, 48)])
def test_attend_compiles(together: int, page: int, capability: int) -> None:
    pytest.importorskip("triton", reason="triton is not installed: dspark-jax[triton]")
    from pallas_kernels.block_sparse_decode import triton_kernel

    inputs = {f"{name}_ptr": BF16 for name in ("q", "k_pages", "v_pages")}
    inputs |= {f"{name}_ptr": I32 for name in ("table", "ids", "q_start")}
    for splits, queries in ((1, 512), (8, 8)):  # a chunk of a prompt, a step
        constants = dict(
            QUERIES=queries, HEADS=64, KV_HEADS=4, DIM=128, PAGE=page, ENTRIES=1024, BLOCK=128, TOP_K=16,
            TOP_K_PADDED=16, TOGETHER=together, SCALE_LOG2=0.1, SPLITS=splits, ROWS=16 * together, TILE=64,
            DIM_PADDED=128, STAGES=3,
        )  # fmt: skip
        outputs = dict(out_ptr=BF16 if splits == 1 else F32, lse_ptr=F32, list_ptr=I32)
        warps = 8 if together == 8 else 4
        assert compile_for(triton_kernel.attend, capability, inputs | outputs, constants, warps=warps)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("queries, rows, warps", [(8, 32, 4), (512, 64, 4), (512, 128, 8)])  # a step, a chunk
def test_the_indexer_compiles(queries: int, rows: int, warps: int, capability: int) -> None:
    pytest.importorskip("triton", reason="triton is not installed: dspark-jax[triton]")
    from pallas_kernels.index_scores import triton_kernel

    pointers = dict(q_ptr=BF16, k_ptr=BF16, positions_ptr=I32, out_ptr=F32)
    constants = dict(
        QUERIES=queries, HEADS=4, DIM=128, BLOCK=128, BLOCKS=1024, EACH=8, ROWS=rows, TILE=128, DIM_PADDED=128, STAGES=3
    )  # fmt: skip
    assert compile_for(triton_kernel.block_maxima, capability, pointers, constants, warps=warps)
    pointers = dict(scores_ptr=F32, positions_ptr=I32, out_ptr=I32)
    constants = dict(HEADS=4, BLOCK=128, BLOCKS=1024, BLOCKS_PADDED=1024, TOP_K=16, TOP_K_PADDED=16)
    assert compile_for(triton_kernel.select, capability, pointers, constants, warps=4)
