"""The only module that imports Pallas Mosaic GPU, whose API may change in any release (known good: jax 0.11.2, 0.12.0).

Besides the names that the kernels use, it hides what the interpreter on the CPU cannot run.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels import _dispatch

plgpu: Any = mosaic_gpu  # its annotations are as unsettled as the rest of it

ds, loop, when = pl.ds, pl.loop, pl.when
SMEM, Barrier, Layout = plgpu.SMEM, plgpu.Barrier, plgpu.Layout
barrier_arrive, barrier_wait = plgpu.barrier_arrive, plgpu.barrier_wait
copy_to_shared, copy_to_global = plgpu.copy_gmem_to_smem, plgpu.copy_smem_to_gmem
commit_shared, set_max_registers = plgpu.commit_smem, plgpu.set_max_registers

# A copy that may leave its array goes through a tensor map and wants 128-byte addresses in shared memory; this one 16.
copy_within = functools.partial(plgpu.copy_gmem_to_smem, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

ROWS = 64  # rows of one wgmma, and so of one warpgroup
SHARED_MEMORY = 232_448  # bytes a block may use on sm_90

interpreter = plgpu.InterpretGPUParams


def require_sm90(device: Any) -> int:
    """Number of multiprocessors of `device`, or NotImplementedError if it is no Hopper GPU."""
    if _dispatch.require_cuda(device, "the Mosaic kernel") != (9, 0):
        raise NotImplementedError(f"the Mosaic kernel is written for sm_90, and {device.device_kind} is another chip.")
    return int(getattr(device, "core_count", 132))


def require_half(dtype: Any) -> None:
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"the Mosaic kernel takes bfloat16 and float16, got {dtype}.")


def padded_group(group: int) -> int:
    """Heads of a group, as the copy engine and the 64 rows of a warpgroup take them: a power of two from 8 to 64."""
    if group > ROWS:
        raise NotImplementedError(f"the Mosaic kernel takes at most {ROWS} query heads a KV head, got {group}.")
    return max(8, 1 << (group - 1).bit_length())


def pad_groups(x: jax.Array, kv_heads: int, padded: int) -> jax.Array:
    """[B, K, Hkv * G, ...] -> [B, K, Hkv * padded, ...]."""
    b, k, hq, *rest = x.shape
    group = hq // kv_heads
    if group == padded:
        return x
    widths = ((0, 0), (0, 0), (0, 0), (0, padded - group)) + ((0, 0),) * len(rest)
    return jnp.pad(x.reshape(b, k, kv_heads, group, *rest), widths).reshape(b, k, kv_heads * padded, *rest)


def unpad_groups(x: jax.Array, kv_heads: int, group: int) -> jax.Array:
    """The reverse of `pad_groups`."""
    b, k, hq, *rest = x.shape
    if hq == kv_heads * group:
        return x
    return x.reshape(b, k, kv_heads, -1, *rest)[:, :, :, :group].reshape(b, k, kv_heads * group, *rest)


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the layout that the tensor cores and the copy engine share; the last axis a multiple of 64."""
    return SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def kernel(
    body: Callable[..., None],
    *,
    name: str,
    out_type: Any,
    grid: dict[str, int],
    scratch: dict[str, Any],
    warpgroups: int,
    interpret: Any,
) -> Callable[..., Any]:
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch,
        # Row reductions of the wgmma layout are shuffles inside a warp: they need no scratch.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name=name,
        interpret=interpret,
    )


def kernel_into(
    body: Callable[..., None],
    arrays: Sequence[jax.Array],
    *,
    name: str,
    out_type: Any,
    grid: dict[str, int],
    scratch: dict[str, Any],
    warpgroups: int,
    interpret: Any,
) -> Callable[..., tuple[Any, list[jax.Array]]]:
    """`kernel` that also writes into `arrays`, which `body` takes between operands and results: -> results, arrays.

    What is not written stays. XLA copies an array first that is needed as it was.
    """

    def scoped(*refs: Any) -> None:
        pl.run_scoped(functools.partial(body, *refs), collective_axes="warpgroup", **scratch)

    def run(*operands: jax.Array) -> tuple[Any, list[jax.Array]]:
        def write(state: tuple[Any, Any]) -> None:
            results, into = state
            made = launch(*operands, *into)
            for ref, value in zip(results, made, strict=True):
                ref[...] = value

        # Unlike references of their own, these do not hinder custom derivatives around the call.
        empty = [lax.empty(each.shape, each.dtype) for each in out_type]
        launch: Any = pl.kernel(
            scoped,
            out_type=[jax.typeof(each) for each in empty],  # which says that none varies, where `shard_map` asks
            mesh=plgpu.Mesh(
                grid=tuple(grid.values()), grid_names=tuple(grid), num_threads=warpgroups, thread_name="warpgroup"
            ),
            # Layouts are all named: the search for them, which the other semantics make, takes minutes here.
            compiler_params=plgpu.CompilerParams(
                approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Lane
            ),
            interpret=interpret,
            name=name,
        )
        return pl.run_state(write)((empty, list(arrays)))

    return run


def writable(*operands: jax.Array) -> bool:
    """Whether `kernel_into` may take them: JAX refuses it what varies over a mesh axis that `shard_map` checks."""
    return not any(jax.typeof(operand).manual_axis_type.varying for operand in operands)


def full(shape: tuple[int, ...], value: float) -> jax.Array:
    """A float32 constant laid out like an accumulator, or (one axis) like its rows."""
    layout = Layout.WGMMA if len(shape) == 2 else Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=Layout.WGMMA)


def along_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, [0])


# [8 n, 32 m]: a warp holds two rows, and columns 32 apart lie in the same thread, so that a head's rotary pairs meet in
# one, its sum takes shuffles alone, and rows in memory are read and written in lines.
PAIRED = Layout.TILED(plgpu.Tiling(((8, 32), (2, 32), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def paired_load(ref: Any, axis: int | None = None) -> jax.Array:
    """A [rows, columns] piece of memory laid out as `PAIRED`, or one row or column of the length of `axis`."""
    return plgpu.load(ref, layout=PAIRED if axis is None else PAIRED.reduce(1 - axis), optimized=False)


def paired_store(ref: Any, x: jax.Array, interpret: Any) -> None:
    """x to shared memory, by the threads that would load it from there."""
    if interpret is not None:
        ref[...] = x
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PAIRED))
    def store(_: Any, ref: Any, x: Any) -> None:
        x.store_untiled(ref, optimized=False)

    store(ref, x)


def paired_broadcast(x: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [axis]), PAIRED)


def paired_rows(shape: tuple[int, ...]) -> jax.Array:
    """Number of the row of each element."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=PAIRED)


def load_global(ref: Any, axes: int) -> jax.Array:
    """A [rows] or [rows, columns] piece of global memory, laid out like an accumulator."""
    return plgpu.load(ref, layout=Layout.WGMMA if axes == 2 else Layout.WGMMA.reduce(1), optimized=False)


def load_shared(ref: Any, axes: int) -> jax.Array:
    """The same from shared memory."""
    return plgpu.load(ref, layout=Layout.WGMMA if axes == 2 else Layout.WGMMA.reduce(1))


def store_pieces(ref: Any, x: jax.Array, interpret: Any) -> None:
    """x [64, D], laid out like an accumulator, to ref [D / 8, 64, 8] in global memory."""
    if interpret is not None:  # the interpreter takes no inlined code
        for i in range(ref.shape[0]):
            ref[i] = x[:, 8 * i : 8 * (i + 1)]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), Layout.WGMMA))
    def store(_: Any, ref: Any, x: Any) -> None:
        x.store_tiled(mosaic_utils.memref_unsqueeze(ref, 0), swizzle=16, optimized=False)

    store(ref, x)


def load_pieces(ref: Any, interpret: Any) -> jax.Array:
    """The reverse of `store_pieces`."""
    if interpret is not None:
        return jnp.concatenate([ref[i] for i in range(ref.shape[0])], axis=1)
    shape = (ref.shape[1], ref.shape[0] * ref.shape[2])
    result = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def load(_: Any, ref: Any) -> Any:
        tiles = mosaic_utils.memref_unsqueeze(ref, 0)
        return fragmented_array.FragmentedArray.load_tiled(
            tiles, swizzle=16, layout=Layout.WGMMA.to_mgpu(), optimized=False
        )

    return cast(jax.Array, load(ref))


def dot_transposed(a: Any, b: Any, meanwhile: Callable[[], None] = lambda: None) -> jax.Array:
    """a [64, D] @ b [S, D]^T, both in shared memory, in float32. `meanwhile` runs while the tensor cores do."""

    def run(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, a, b.transpose((1, 0)))
        meanwhile()
        return accumulator[...]

    return pl.run_scoped(run, plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32))


def add_dot(
    accumulator: jax.Array, a: jax.Array, b: Any, interpret: Any, meanwhile: Callable[[], None] = lambda: None
) -> jax.Array:
    """accumulator + a [64, S] (registers) @ b [S, D] (shared memory)."""
    if interpret is not None:  # the interpreter has neither run_state nor wgmma from registers
        meanwhile()
        result = accumulator + jnp.dot(a.astype(jnp.float32), b[...].astype(jnp.float32))
        plgpu.commit_smem()  # an ordinary read, unlike that of wgmma, has to be ordered before the copy engine's writes
        return result

    def run(ref: Any) -> None:
        plgpu.wgmma(ref, a, b)
        meanwhile()

    return cast(jax.Array, pl.run_state(run)(plgpu.ACC.init(accumulator)))


def with_accumulator(run: Callable[[Any], jax.Array], shape: tuple[int, int]) -> jax.Array:
    """run(accumulator), a zeroed float32 accumulator of the matrix units that `multiply_registers` adds to."""
    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def multiply_registers(accumulator: Any, a: jax.Array, b: Any) -> None:
    """Starts accumulator += a [64, S] (registers) @ b [N, S]^T (shared memory); `wait_products` waits for it."""
    plgpu.wgmma(accumulator, a, b.transpose((1, 0)))


def wait_products(unfinished: int) -> None:
    """Until at most so many of the products started last are unfinished."""
    plgpu.wgmma_wait(unfinished)


def global_semaphores(count: int) -> Any:
    """Zeroed counters that all blocks of the launch share (scratch would give each block its own)."""
    return pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))


def signal(semaphore: Any) -> None:
    plgpu.semaphore_signal(semaphore, 1, memory_scope="gpu")


def wait_for(semaphore: Any, count: int) -> None:
    plgpu.semaphore_wait(semaphore, count, decrement=False, memory_scope="gpu")


def signal_counter(counter: Any) -> None:
    """Adds 1 to 4 bytes of global memory: what this warpgroup has written is seen by who waits for that."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def add(_: Any, counter: Any) -> None:
        mosaic_utils.warpgroup_barrier()
        mosaic_utils.SemaphoreRef(mosaic_utils.memref_ptr(counter)).signal(1, memory_scope="gpu")

    add(counter)


def wait_for_counter(counter: Any, count: Any) -> None:
    """Until 4 bytes of global memory, zero when the launch began, are at least `count`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), Layout.WG_SPLAT(())))
    def wait(_: Any, counter: Any, count: Any) -> None:
        reference = mosaic_utils.SemaphoreRef(mosaic_utils.memref_ptr(counter))
        reference.wait(count.registers.item(), decrement=False, memory_scope="gpu")

    wait(counter, jnp.int32(count))


def wait_until_read() -> None:
    """Shared memory may be reused; the copies to global memory end before the launch does."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
