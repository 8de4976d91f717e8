"""`windowed_decode` and `block_attention` for Hopper, in Pallas Mosaic GPU.

A thread block serves one row, one KV head, one split of its keys and one chunk of its queries. Its compute warpgroups
own 64 query rows each (queries x heads of a group); one more warpgroup keeps the copy engine busy with pages. Only
tiles at the edges of what is visible are masked.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _dispatch
from pallas_kernels import _mosaic as gpu
from pallas_kernels import _mosaic_softmax as softmax
from pallas_kernels._mosaic_hints import evict_first
from pallas_kernels.windowed_decode.mosaic_memory import TABLE_PIECE, Memory, Share
from pallas_kernels.windowed_decode.mosaic_merge import load_part, merge_splits, part_shape
from pallas_kernels.windowed_decode.mosaic_problem import Problem, describe, plan
from pallas_kernels.windowed_decode.tuning import Tuning


def tune(*arrays: Any, **static: Any) -> Tuning:
    """The tuning for these arrays (q, k_pages, page_table) on their device, or NotImplementedError with the reason."""
    multiprocessors = gpu.require_sm90(_dispatch.device_of(*arrays))
    return plan(describe(*arrays, **static), multiprocessors)


def build(q: Any, k_pages: Any, page_table: Any, *, window: int | None, scale: float) -> _dispatch.Kernel:
    """The kernel for arguments like these on their device, or NotImplementedError with the reason."""
    tuning = tune(q, k_pages, page_table, window=window, scale=scale, block=False)
    run = functools.partial(attend, window=window, scale=scale, tuning=tuning)
    return _dispatch.opaque("windowed_decode", run, ("row", "pages", "pages", "table", "row", "row"))


def attend(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    q_start: jax.Array,
    kv_length: jax.Array,
    *block: jax.Array,
    window: int | None,
    scale: float,
    causal: bool = False,
    tuning: Tuning | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention over the pages (keys below `kv_length`) and, if given, over the block's own keys and values."""
    problem = describe(q, k_pages, page_table, window=window, scale=scale, block=bool(block), causal=causal)
    tuning = plan(problem, tuning=tuning)
    problem = dataclasses.replace(problem, most_warpgroups=tuning.warpgroups)
    hkv = problem.kv_heads
    group = q.shape[2] // hkv
    q = gpu.pad_groups(q, hkv, problem.group)
    out, lse = _launch(problem, tuning, interpret, q, k_pages, v_pages, page_table, q_start, kv_length, block)
    return gpu.unpad_groups(out, hkv, group), gpu.unpad_groups(lse, hkv, group)


def _launch(problem: Problem, tuning: Tuning, interpret: Any, *args: Any) -> tuple[jax.Array, jax.Array]:
    q, k_pages, v_pages, page_table, q_start, kv_length, block = args
    p, warpgroups, splits = problem, problem.warpgroups, tuning.splits
    fused = splits > 1 and tuning.merge == "fused"
    table = page_table.reshape(-1)
    operands = [q, k_pages, v_pages, table, q_start, kv_length]
    operands += block
    if interpret is not None:  # the copy engine fills what lies outside an array with zeros, the interpreter does not
        rows = ((0, 0), (0, gpu.ROWS - p.queries), (0, 0), (0, 0))
        operands[6:] = [jnp.pad(x, rows) for x in operands[6:]]

    tiles = functools.partial(gpu.tiled, dtype=p.dtype)
    scratch = dict(
        q=tiles((warpgroups, gpu.ROWS, p.head_dim)),
        k=tiles((tuning.stages, tuning.tile, p.head_dim)),
        v=tiles((tuning.stages, tuning.tile, p.head_dim)),
        lse=gpu.SMEM((warpgroups, gpu.ROWS), jnp.float32),
        q_ready=gpu.Barrier(num_barriers=warpgroups, num_arrivals=p.queries_per_warpgroup),
        k_ready=gpu.Barrier(num_barriers=tuning.stages, num_arrivals=p.pages_of(tuning.tile)),
        v_ready=gpu.Barrier(num_barriers=tuning.stages, num_arrivals=p.pages_of(tuning.tile)),
        k_free=gpu.Barrier(num_barriers=tuning.stages, num_arrivals=warpgroups),
        v_free=gpu.Barrier(num_barriers=tuning.stages, num_arrivals=warpgroups),
        turn=gpu.Barrier(num_arrivals=warpgroups),
    )
    if p.table_entries:
        scratch.update(table=gpu.SMEM((p.table_entries,), jnp.int32))
        scratch.update(table_ready=gpu.Barrier(num_arrivals=-(-p.table_entries // TABLE_PIECE)))
    if p.block:
        rows = (gpu.ROWS, p.head_dim)
        scratch.update(k_block=tiles(rows), v_block=tiles(rows), block_ready=gpu.Barrier(num_barriers=2))
    if fused:
        scratch.update(merged=gpu.SMEM((warpgroups, gpu.ROWS, tuning.fused_columns(p.head_dim)), p.dtype))

    blocks = p.chunks * warpgroups  # of 64 rows
    out_type = [jax.ShapeDtypeStruct(q.shape, p.dtype), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)]
    part_type = [
        jax.ShapeDtypeStruct((p.batch, p.kv_heads, splits, *part_shape(blocks, p.head_dim)), jnp.float32),
        jax.ShapeDtypeStruct((p.batch, p.kv_heads, splits, blocks * gpu.ROWS), jnp.float32),
    ]
    outputs = out_type if splits == 1 else out_type + part_type if fused else part_type
    names = ["q", "k_pages", "v_pages", "table", "q_start", "kv_length"] + ["k_block", "v_block"] * p.block
    names += ["out", "lse"] * (splits == 1 or fused) + ["part", "part_lse"] * (splits > 1)

    def body(*refs: Any, **shared: Any) -> None:
        share = problem, tuning, dict(zip(names, refs, strict=True)), shared, interpret
        compute, memory = Compute(*share), Memory(*share)
        if tuning.evict_first and interpret is None:
            evict_first()

        @gpu.when(compute.warpgroup < warpgroups)
        def _compute() -> None:
            if compute.turns:  # 2 * 128 * 232 + 128 * 40 registers: any more and this waits for ever
                gpu.set_max_registers(232, action="increase")
            compute.run()

        @gpu.when(compute.warpgroup == warpgroups)
        def _memory() -> None:
            if compute.turns:
                gpu.set_max_registers(40, action="decrease")
            memory.run()

    results = gpu.kernel(
        body,
        name="block_attention" if p.block else "windowed_decode",
        out_type=outputs,
        # The last axis varies fastest: blocks that read the same pages, then the heads of a row, start together.
        grid={"row": p.batch, "split": splits, "head": p.kv_heads, "chunk": p.chunks},
        scratch=scratch,
        warpgroups=warpgroups + 1,
        interpret=interpret,
    )(*operands)
    if splits == 1 or fused:
        return results[0], results[1]
    rest = dict(queries=p.queries, group=p.group, dtype=p.dtype, columns=tuning.merge_columns)
    return merge_splits(*results, **rest, interpret=interpret)


class Compute(Share):
    """A compute warpgroup."""

    def __init__(self, *share: Any) -> None:
        super().__init__(*share)
        self.warpgroup = lax.axis_index("warpgroup")
        self.heads = gpu.ds(self.head * self.p.group, self.p.group)
        self.turns = self.p.warpgroups == 2

    def run(self) -> None:
        p, s = self.p, self.s
        self.q = s["q"].at[self.warpgroup]
        self.load_queries()
        self.locate()
        state = softmax.start(p.head_dim)
        gpu.barrier_wait(s["q_ready"].at[self.warpgroup])
        if p.block:
            state = lax.fori_loop(0, jnp.where(self.block_keys_here, 1, 0), lambda _, x: self.block_tile(x), state)
        self.store(*softmax.finish(self.page_tiles(state)))
        gpu.wait_until_read()

    def query(self, i: int) -> Any:
        """Number, within the block of K, of this warpgroup's query i."""
        return (self.chunk * self.p.warpgroups + self.warpgroup) * self.p.queries_per_warpgroup + i

    def load_queries(self) -> None:
        p, ready = self.p, self.s["q_ready"].at[self.warpgroup]
        for i in range(p.queries_per_warpgroup):
            rows = self.q.at[gpu.ds(i * p.group, p.group)]

            @gpu.when(self.query(i) < p.queries)
            def _copy(i: int = i, rows: Any = rows) -> None:
                gpu.copy_to_shared(self.g["q"].at[self.row, self.query(i), self.heads], rows, ready)

            gpu.when(self.query(i) >= p.queries)(lambda: gpu.barrier_arrive(ready))

    def block_tile(self, state: Any) -> Any:
        """The block's own keys: one tile, masked to the K that exist."""
        p, s = self.p, self.s
        gpu.barrier_wait(s["block_ready"].at[0])
        scores = gpu.dot_transposed(self.q, s["k_block"])
        key = gpu.iota((gpu.ROWS, gpu.ROWS), 1)
        visible = key < p.queries
        if p.causal or p.reach < p.queries:
            query = lax.div(gpu.iota((gpu.ROWS, gpu.ROWS), 0), jnp.int32(p.group)) + self.query(0)
            visible &= key < query + p.reach
            visible &= key > query - p.reach
            if p.causal:
                visible &= key <= query
        scores = softmax.hide(visible, scores, p.scale)
        weights, (values, maximum, total) = softmax.weigh(scores, state, p.scale, p.dtype)
        gpu.barrier_wait(s["block_ready"].at[1])
        values = gpu.add_dot(values, weights, s["v_block"], self.interpret)
        return values, maximum, total

    def mask(self, scores: Any, step: Any) -> Any:
        p, shape = self.p, scores.shape
        query = lax.div(gpu.iota(shape, 0), jnp.int32(p.group))
        query += self.q_first + self.warpgroup * p.queries_per_warpgroup
        key = gpu.iota(shape, 1) + (self.start + step * self.t.tile)
        return softmax.hide((key <= query) & (key < self.length) & (key > query - p.reach), scores, p.scale)

    def take_turn(self) -> None:
        """The two compute warpgroups alternate between tensor cores and softmax."""
        if self.turns:
            gpu.barrier_arrive(self.s["turn"])
            gpu.barrier_wait(self.s["turn"])

    def page_tiles(self, state: Any) -> Any:
        s, tile, count = self.s, jnp.int32(self.t.tile), self.count

        @gpu.when(count > 0)
        def _first() -> None:
            gpu.barrier_wait(s["k_ready"].at[self.slot(0)])

        gpu.when(self.warpgroup == 1)(self.take_turn)

        def one(step: Any, state: Any, keys: int = self.t.tile) -> Any:
            slot = self.slot(step)
            k, v = (s[name].at[slot] if keys == self.t.tile else s[name].at[slot, gpu.ds(0, keys)] for name in "kv")
            scores = gpu.dot_transposed(self.q, k, self.take_turn)
            gpu.barrier_arrive(s["k_free"].at[slot])
            border = (step < inner) | (step >= outer)
            scores = lax.cond(border, lambda x: self.mask(x, step), lambda x: x, scores)
            weights, (values, maximum, total) = softmax.weigh(scores, state, self.p.scale, self.p.dtype)
            # Softmax has to be done before the other warpgroup's turn ends, not wherever the compiler moves it.
            values, total, maximum, weights = lax.optimization_barrier((values, total, maximum, weights))
            if self.turns:
                gpu.barrier_arrive(s["turn"])
            gpu.barrier_wait(s["v_ready"].at[slot])
            if self.turns:
                gpu.barrier_wait(s["turn"])

            def wait_for_next_keys() -> None:
                @gpu.when(step + 1 < count)
                def _() -> None:
                    gpu.barrier_wait(s["k_ready"].at[self.slot(step + 1)])

            values = gpu.add_dot(values, weights, v, self.interpret, wait_for_next_keys)
            gpu.barrier_arrive(s["v_free"].at[slot])
            return values, maximum, total

        # Tiles [inner, outer) are seen by every query in full and need no mask.
        inner = lax.div(jnp.maximum(self.q_end - self.p.reach - self.start, 0) + (tile - 1), tile)
        outer = lax.div(jnp.minimum(self.length, self.q_first + 1) - self.start, tile)
        half = self.p.unit(self.t)
        whole = count if half == self.t.tile else lax.div(self.stop - self.start, tile)
        state = lax.fori_loop(0, whole, one, state)
        if half < self.t.tile:  # the last tile may be half full
            state = lax.fori_loop(whole, count, functools.partial(one, keys=half), state)
        gpu.when(self.warpgroup == 0)(self.take_turn)
        return state

    # Results.

    def store(self, values: Any, lse: Any) -> None:
        p, g, s = self.p, self.g, self.s
        if "part" not in g:
            self.q[...] = values.astype(p.dtype)  # the queries are used up
            self.store_rows(self.q, lse, gpu.ds(0, p.head_dim), True)
            return
        block = self.chunk * p.warpgroups + self.warpgroup
        rows = gpu.ds(block * gpu.ROWS, gpu.ROWS)
        part, part_lse = (g[name].at[self.row, self.head] for name in ("part", "part_lse"))
        part_lse[self.split, rows] = lse
        gpu.store_pieces(part.at[self.split, block], values, self.interpret)
        if "out" not in g:
            return
        head = (self.row * p.kv_heads + self.head) * p.chunks + self.chunk
        arrived = gpu.global_semaphores(p.heads * p.warpgroups).at[head * p.warpgroups + self.warpgroup]
        gpu.signal(arrived)
        columns = s["merged"].shape[-1]

        @gpu.when(self.split < p.head_dim // columns)  # this block merges its share of the columns
        def _merge() -> None:
            gpu.wait_for(arrived, self.t.splits)
            share = gpu.ds(self.split * columns, columns)
            merged, merged_lse = softmax.merge_rows(
                self.t.splits,
                lambda i: gpu.load_global(part_lse.at[i, rows], 1),
                lambda i: load_part(part.at[i, block], self.split, columns, self.interpret),
            )
            s["merged"].at[self.warpgroup][...] = merged.astype(p.dtype)
            self.store_rows(s["merged"].at[self.warpgroup], merged_lse, share, self.split == 0)

    def store_rows(self, source: Any, lse: Any, columns: Any, with_lse: Any) -> None:
        """One copy for each query: `source` [64, columns] and lse (base 2) to where the caller wants them."""
        p, g = self.p, self.g
        lse_rows = self.s["lse"].at[self.warpgroup]
        lse_rows[...] = lse * softmax.LN_2
        gpu.commit_shared()
        for i in range(p.queries_per_warpgroup):
            rows = gpu.ds(i * p.group, p.group)

            @gpu.when(self.query(i) < p.queries)
            def _copy(i: int = i, rows: Any = rows) -> None:
                gpu.copy_to_global(source.at[rows], g["out"].at[self.row, self.query(i), self.heads, columns])

                @gpu.when(with_lse)
                def _() -> None:
                    gpu.copy_to_global(lse_rows.at[rows], g["lse"].at[self.row, self.query(i), self.heads])
