"""The Triton kernels compile ahead of time for architectures that no test machine has."""

import re

import pytest

BF16, F32, I32 = "*bf16", "*fp32", "*i32"
SHAPE = dict(QUERIES=8, HEADS=64, KV_HEADS=4)


def compile_for(kernel, capability: int, pointers: dict[str, str], constants: dict[str, object], warps: int) -> bytes:
    return compiled(kernel, capability, pointers, constants, num_warps=warps).asm["cubin"]


def compiled(kernel, capability: int, pointers: dict[str, str], constants: dict[str, object], **options: int):
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [parameter.name for parameter in kernel.params]
    assert set(names) == set(pointers) | set(constants)
    source = ASTSource(
        fn=kernel,
        signature={name: pointers.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in pointers},
    )
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128, 256])
def test_attend_compiles(head_dim: int, capability: int) -> None:
    pytest.importorskip("triton", reason="triton is not installed: dspark-jax[triton]")
    from pallas_kernels.windowed_decode import triton_kernel

    padded = 64 if head_dim == 64 else 128 if head_dim <= 128 else 256
    inputs = {f"{name}_ptr": BF16 for name in ("q", "k_pages", "v_pages", "k_block", "v_block")}
    inputs |= {f"{name}_ptr": I32 for name in ("table", "q_start", "kv_length")}
    for splits, block, scale in ((1, False, 0.1), (4, True, -0.1)):
        constants = dict(
            **SHAPE, DIM=head_dim, DIM_PADDED=padded, PAGE=64 if block else 16, ENTRIES=65, REACH=4096,
            SCALE_LOG2=scale, HAS_BLOCK=block, CAUSAL=False, SPLITS=splits, CHUNKS=1, ROWS=128 if padded <= 128 else 64,
            TILE=64 if padded <= 128 else 32, BLOCK_TILE=16, ONE_LOOP=not block,
        )  # fmt: skip
        outputs = dict(out_ptr=BF16 if splits == 1 else F32, lse_ptr=F32)
        assert compile_for(triton_kernel.attend, capability, inputs | outputs, constants, warps=8)


@pytest.mark.slow
@pytest.mark.parametrize("page, entries", [(16, 17), (16, 1), (64, 17), (64, 1), (256, 5)])
@pytest.mark.parametrize("one_loop, stages", [(True, 3), (True, 4), (False, 3)])
def test_copies_of_tiles_to_come_are_under_way(page: int, entries: int, one_loop: bool, stages: int) -> None:
    pytest.importorskip("triton", reason="triton is not installed: dspark-jax[triton]")
    from pallas_kernels.windowed_decode import triton_kernel

    pointers = {f"{name}_ptr": BF16 for name in ("q", "k_pages", "v_pages", "k_block", "v_block", "out")}
    pointers |= {f"{name}_ptr": I32 for name in ("table", "q_start", "kv_length")} | dict(lse_ptr=F32)
    constants = dict(
        **SHAPE, DIM=128, DIM_PADDED=128, PAGE=page, ENTRIES=entries, REACH=100, SCALE_LOG2=0.1, HAS_BLOCK=False,
        CAUSAL=False, SPLITS=1, CHUNKS=1, ROWS=128, TILE=64, BLOCK_TILE=16, ONE_LOOP=one_loop,
    )  # fmt: skip
    made = compiled(triton_kernel.attend, 90, pointers, constants, num_warps=8, num_stages=stages)
    waits = re.findall(r"async_wait %[^{]*{num = (\d+)", made.asm["ttgir"])
    under_way = str(2 * (stages - 2))  # keys and values of the tiles to come
    assert set(waits) == {under_way}, "each tile waits for its own keys and values alone"


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_merges_compile(capability: int) -> None:
    pytest.importorskip("triton", reason="triton is not installed: dspark-jax[triton]")
    from pallas_kernels.block_merge import triton_kernel as block_merge
    from pallas_kernels.windowed_decode import triton_kernel as decode

    pointers = dict(part_ptr=F32, part_lse_ptr=F32, out_ptr=BF16, lse_ptr=F32)
    constants = dict(**SHAPE, DIM=128, DIM_PADDED=128, SPLITS=33, SPLITS_PADDED=64)
    assert compile_for(decode.merge_splits, capability, pointers, constants, warps=4)
    pointers = {f"{name}_ptr": BF16 for name in ("out", "q", "k", "v", "new_out")} | dict(lse_ptr=F32, new_lse_ptr=F32)
    constants = dict(**SHAPE, DIM=128, DIM_PADDED=128, REACH=4096, SCALE_LOG2=0.1, ROWS=64, TILE=16)
    assert compile_for(block_merge.merge_future_block, capability, pointers, constants, warps=4)


@pytest.mark.parametrize(
    "heads, keys, block, rows, stages, one_loop",
    [
        (256, 4103, False, 128, 3, True),
        (256, 4103, True, 128, 3, False),  # a block's own keys: borders apart
        (32, 4103, False, 128, 3, True),
        (4, 4103, False, 64, 4, True),  # few heads: twice as many programs
        (4, 32768, False, 128, 3, True),
        (256, 70, False, 128, 3, True),
    ],
)
def test_the_choice_of_a_tuning(heads: int, keys: int, block: bool, rows: int, stages: int, one_loop: bool) -> None:
    from pallas_kernels.windowed_decode.triton import choose_tuning

    tuning = choose_tuning(rows=128, heads=heads, head_dim=128, keys=keys, block=block, multiprocessors=132)
    assert (tuning.rows, tuning.stages, tuning.one_loop) == (rows, stages, one_loop)
