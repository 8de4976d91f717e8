"""`merge_future_block` for Hopper, in Pallas Mosaic GPU: one warpgroup for 64 query rows of a KV head."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _dispatch
from pallas_kernels import _mosaic as gpu
from pallas_kernels import _mosaic_softmax as softmax


def build(out: Any, q: Any, k_block: Any, *, window: int | None, scale: float) -> _dispatch.Kernel:
    """The kernel for arguments like these on their device, or NotImplementedError with the reason."""
    gpu.require_sm90(_dispatch.device_of(out, q, k_block))
    check(q, k_block)
    run = functools.partial(merge_future_block_mosaic, window=window, scale=scale)
    return _dispatch.opaque("merge_future_block", run, ("row",) * 5)


def check(q: Any, k_block: Any) -> None:
    gpu.require_half(q.dtype)
    gpu.padded_group(q.shape[2] // k_block.shape[2])
    if q.shape[-1] % 64 or q.shape[-1] > 256:
        raise NotImplementedError(f"the Mosaic kernel takes head sizes 64, 128, 192, 256, got {q.shape[-1]}.")
    if q.shape[1] > gpu.ROWS:
        raise NotImplementedError(f"the Mosaic kernel takes blocks of at most {gpu.ROWS}, got {q.shape[1]}.")


def merge_future_block_mosaic(
    out: jax.Array,
    lse: jax.Array,
    q: jax.Array,
    k_block: jax.Array,
    v_block: jax.Array,
    *,
    window: int | None,
    scale: float,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    check(q, k_block)
    b, k, hq, d = q.shape
    hkv, dtype = k_block.shape[2], q.dtype
    group = hq // hkv
    padded = gpu.padded_group(group)
    out, lse, q = (gpu.pad_groups(x, hkv, padded) for x in (out, lse, q))
    if interpret is not None:  # the copy engine fills what lies outside an array with zeros, the interpreter does not
        k_block, v_block = (jnp.pad(x, ((0, 0), (0, gpu.ROWS - k), (0, 0), (0, 0))) for x in (k_block, v_block))
    per_block = gpu.ROWS // padded

    def body(*refs: Any, **s: Any) -> None:
        g: dict[str, Any] = dict(zip(("out", "lse", "q", "k", "v", "new_out", "new_lse"), refs, strict=True))
        row, head, rows = (lax.axis_index(x) for x in ("row", "head", "rows"))
        heads = gpu.ds(head * padded, padded)
        zero = row * 0  # a start that is not static: rows past the array are filled with zeros

        def each_query(action: Callable[[Any, Any], None]) -> None:
            for i in range(per_block):
                query = rows * per_block + i
                gpu.when(query < k)(functools.partial(action, query, gpu.ds(i * padded, padded)))

        def load(query: Any, at: Any) -> None:
            for name, copy in (("q", gpu.copy_to_shared), ("out", gpu.copy_to_shared), ("lse", gpu.copy_within)):
                copy(g[name].at[row, query, heads], s[name].at[at], s["ready"])

        each_query(load)
        for name in ("k", "v"):
            gpu.copy_to_shared(g[name].at[row, gpu.ds(zero, gpu.ROWS), head], s[name], s["ready"])
        for i in range(per_block):

            @gpu.when(rows * per_block + i >= k)
            def _skip() -> None:
                for _ in range(3):
                    gpu.barrier_arrive(s["ready"])

        gpu.barrier_wait(s["ready"])
        scores = gpu.dot_transposed(s["q"], s["k"])
        shape = (gpu.ROWS, gpu.ROWS)
        query = lax.div(gpu.iota(shape, 0), jnp.int32(padded)) + rows * per_block
        key = gpu.iota(shape, 1)
        visible = (key > query) & (key < k)
        if window is not None and window < k:
            visible &= key < query + window
        state = softmax.resume(gpu.load_shared(s["out"], 2).astype(jnp.float32), gpu.load_shared(s["lse"], 1))
        weights, (values, maximum, total) = softmax.weigh(softmax.hide(visible, scores, scale), state, scale, dtype)
        values = gpu.add_dot(values, weights, s["v"], interpret)
        values, merged_lse = softmax.finish((values, maximum, total))
        s["out"][...] = values.astype(dtype)
        s["lse"][...] = merged_lse * softmax.LN_2
        gpu.commit_shared()

        def store(query: Any, at: Any) -> None:
            gpu.copy_to_global(s["out"].at[at], g["new_out"].at[row, query, heads])
            gpu.copy_to_global(s["lse"].at[at], g["new_lse"].at[row, query, heads])

        each_query(store)
        gpu.wait_until_read()

    tile = gpu.tiled((gpu.ROWS, d), dtype)
    new_out, new_lse = gpu.kernel(
        body,
        name="merge_future_block",
        out_type=[jax.ShapeDtypeStruct(q.shape, dtype), jax.ShapeDtypeStruct(lse.shape, jnp.float32)],
        grid={"row": b, "head": hkv, "rows": -(-k // per_block)},
        scratch=dict(
            q=tile,
            out=tile,
            k=tile,
            v=tile,
            lse=gpu.SMEM((gpu.ROWS,), jnp.float32),
            ready=gpu.Barrier(num_arrivals=3 * per_block + 2),
        ),
        warpgroups=1,
        interpret=interpret,
    )(out, lse, q, k_block, v_block)
    return gpu.unpad_groups(new_out, hkv, group), gpu.unpad_groups(new_lse, hkv, group)
