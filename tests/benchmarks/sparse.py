"""Times block-sparse attention and its indexer on one GPU, at the target's real shapes.

    python tests/benchmarks/sparse.py [--json FILE] [--only TEXT] [--tune] [--time-limit SECONDS]

64 query heads over 4 KV heads of size 128, 8 queries a row, blocks of 128 keys, 16 of them a query and KV head, bf16.
Times are sums of the CUPTI kernel durations of one call with the L2 cache flushed before it, median of 20, in
microseconds. "bytes" are those that a call has to read: each selected block of a row and KV head once, or the index
keys of the context; "share" is that at the fastest stream measured over the time. Selections are of two kinds: "near",
where neighbouring queries have 14 of 16 blocks in common, and "far", where each query has drawn its own. Every result
is first compared with the XLA form, which attends in float32. Figures are printed and written as they come.
"""

import argparse
import dataclasses
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention import Clock, Compiler, errors

from pallas_kernels.block_sparse_decode import triton as attention_triton
from pallas_kernels.block_sparse_decode.api import block_sparse_decode
from pallas_kernels.index_scores import triton as index_triton
from pallas_kernels.index_scores.api import index_block_scores, select_blocks

QUERIES, HEADS, KV_HEADS, INDEX_HEADS, DIM, BLOCK, TOP_K = 8, 64, 4, 4, 128, 128, 16
OUT_TOLERANCE, LSE_TOLERANCE = 6e-3, 1e-3  # relative norm and absolute: bfloat16 output, float32 log-sum-exp
SCORE_TOLERANCE = 1e-3  # absolute; the products of bfloat16 numbers are exact, their sum is float32 in any order
# Batch and context. Cost has to follow the selected bytes: 128k against 32k.
SHAPES = [(8, 32_768), (8, 131_072), (1, 4096), (8, 4096), (1, 32_768), (1, 131_072), (64, 4096), (64, 32_768)]


@dataclasses.dataclass(frozen=True)
class Line:
    """One program: what it is, how to run it, the bytes it has to read, and how far its result may be off."""

    name: str
    program: Future[Any]
    args: tuple[Any, ...]
    bytes: int
    wrong: Callable[[Any], float] | None = None

    def measure(self, clock: Clock) -> tuple[float, str]:
        compiled = self.program.result()

        def launch() -> Any:
            return jax.block_until_ready(compiled(*self.args))

        result = launch()
        if self.wrong is not None and not (excess := self.wrong(result)) <= 1:
            raise ArithmeticError(f"{excess:.1f} times more wrong than allowed")
        kernels: dict[str, float] = {}
        for name, milliseconds in clock.record(launch):
            kernels[name] = kernels.get(name, 0.0) + 1e3 * milliseconds
        parts = ", ".join(f"{name[:32]} {t:.1f}" for name, t in kernels.items())
        return clock.microseconds(launch)[0], parts


def describe_shape(batch: int, context: int) -> str:
    return f"B={batch} context={context}"


def selections(rng: np.random.Generator, batch: int, context: int, kind: str) -> np.ndarray:
    """Block ids [B, K, Hkv, top_k] for queries at the end of the context."""
    blocks = context // BLOCK
    ids = np.empty((batch, QUERIES, KV_HEADS, TOP_K), np.int32)
    for row, head in np.ndindex(batch, KV_HEADS):
        common = rng.permutation(blocks - 1)[:TOP_K]
        for query in range(QUERIES):
            chosen = common.copy() if kind == "near" else rng.permutation(blocks - 1)[:TOP_K]
            if kind == "near":
                others = np.setdiff1d(np.arange(blocks - 1), common)
                chosen[-3:-1] = rng.permutation(others)[:2]
            chosen[-1] = blocks - 1
            ids[row, query, head] = chosen
    return ids


def read_bytes(ids: np.ndarray) -> int:
    unique = sum(np.unique(ids[row, :, head]).size for row, head in np.ndindex(ids.shape[0], KV_HEADS))
    return unique * BLOCK * DIM * 2 * 2


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.jit(lambda s: jax.random.normal(jax.random.key(s), shape, jnp.bfloat16))(jnp.int32(seed))


def describe(tuning: Any) -> str:
    return " ".join(f"{name} {value}" for name, value in dataclasses.asdict(tuning).items())


def attention_lines(batch: int, context: int, compiler: Compiler, tune: bool) -> Iterator[Line]:
    rng = np.random.default_rng(batch + context)
    pages = batch * context // BLOCK
    q = normal(1, batch, QUERIES, HEADS, DIM)
    k, v = (normal(s, pages, BLOCK, KV_HEADS, DIM) for s in (2, 3))
    table = jnp.arange(pages, dtype=jnp.int32).reshape(batch, -1)
    start = jnp.full((batch,), context - QUERIES, jnp.int32)
    xla = None
    programs: dict[str, Future[Any]] = {}
    for kind in ("near", "far"):
        ids = selections(rng, batch, context, kind)
        args = (q, k, v, table, jnp.asarray(ids), start)
        size = read_bytes(ids)
        xla = xla or compiler(functools.partial(block_sparse_decode, block_size=BLOCK, implementation="xla"), *args)

        def wrong(actual: Any, xla: Any = xla, args: Any = args) -> float:
            out, lse = errors(actual, xla.result()(*args))
            return max(out / OUT_TOLERANCE, lse / LSE_TOLERANCE)

        if not programs and not tune:
            programs["triton"] = compiler(
                functools.partial(block_sparse_decode, block_size=BLOCK, implementation="triton"), *args
            )
        if not programs and tune:
            chosen = attention_triton.choose_tuning(
                rows=batch * KV_HEADS, queries=QUERIES, group=16, head_dim=DIM, block_size=BLOCK, top_k=TOP_K,
                blocks=context // BLOCK, multiprocessors=132,
            )  # fmt: skip
            for tuning in attention_variants(chosen, batch):
                run = functools.partial(
                    attention_triton.attend, block_size=BLOCK, scale=DIM**-0.5, multiprocessors=132, tuning=tuning
                )
                programs[describe(tuning)] = compiler(run, *args)
        for name, program in programs.items():
            yield Line(f"attention {kind}, {name}", program, args, size, wrong)
        if not tune:
            yield Line(f"attention {kind}, xla", xla, args, size)


def attention_variants(chosen: attention_triton.Tuning, batch: int) -> Iterator[attention_triton.Tuning]:
    for together in (1, 2, 4, 8):
        programs, warps = batch * KV_HEADS * QUERIES // together, 8 if together == 8 else 4
        for splits in sorted({max(1, min(blocks // programs, 32)) for blocks in (132, 264, 528)}):
            yield dataclasses.replace(chosen, queries=together, splits=splits, warps=warps)
    for together, tile, stages in ((1, 128, 2), (1, 64, 4), (4, 64, 2), (4, 128, 2)):
        yield dataclasses.replace(chosen, queries=together, tile=tile, stages=stages, warps=4)


def index_lines(batch: int, context: int, compiler: Compiler, tune: bool) -> Iterator[Line]:
    q, k = normal(4, batch, QUERIES, INDEX_HEADS, DIM), normal(5, batch, context, DIM)
    start = context - QUERIES
    positions = jnp.broadcast_to(jnp.arange(start, context, dtype=jnp.int32)[None], (batch, QUERIES))
    args, size = (q, k, positions), k.nbytes
    xla = compiler(functools.partial(index_block_scores, block_size=BLOCK, implementation="xla"), *args)

    def wrong(actual: Any) -> float:
        return float(jnp.max(jnp.abs(actual - xla.result()(*args)))) / SCORE_TOLERANCE

    if not tune:
        run = functools.partial(index_block_scores, block_size=BLOCK, implementation="triton")
        yield Line("index scores, triton", compiler(run, *args), args, size, wrong)
        yield Line("index scores, xla", xla, args, size)
    else:
        for blocks, stages, warps in ((1, 1, 4), (2, 2, 4), (4, 3, 4), (4, 4, 4), (8, 3, 4), (8, 4, 4), (8, 3, 8)):
            tuning = index_triton.Tuning(blocks=blocks, stages=stages, warps=warps)
            run = functools.partial(index_triton.block_maxima, block_size=BLOCK, multiprocessors=132, tuning=tuning)
            yield Line(
                f"index scores, blocks {blocks} stages {stages} warps {warps}", compiler(run, *args), args, size, wrong
            )
    if tune:
        return
    scores = jax.random.normal(jax.random.key(6), (*q.shape[:3], context // BLOCK), jnp.float32)
    static: dict[str, Any] = dict(block_size=BLOCK, top_k=TOP_K)
    chosen = compiler(functools.partial(select_blocks, implementation="xla", **static), scores, positions)

    def differs(actual: Any) -> float:
        return 0.0 if bool(jnp.array_equal(actual, chosen.result()(scores, positions))) else np.inf

    run = functools.partial(select_blocks, implementation="triton", **static)
    selected = (scores, positions)
    yield Line("selection, triton", compiler(run, *selected), selected, scores.nbytes, differs)
    yield Line("selection, xla", chosen, selected, scores.nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="where to write all figures")
    parser.add_argument("--only", default="", help="run the shapes whose description contains this text")
    parser.add_argument("--tune", action="store_true", help="time variants of the Triton kernels instead")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds after which no line is begun")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit("This benchmark needs a GPU.")
    begin, clock, compiler, rows = time.perf_counter(), Clock(), Compiler(), []
    bandwidth = clock.copy_bandwidth()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, fastest stream measured {bandwidth:.2f} TB/s")
    shapes = [shape for shape in SHAPES if args.only in describe_shape(*shape)]
    # All of them first: programs are compiled while others are timed.
    lines = {
        shape: [*attention_lines(*shape, compiler, args.tune), *index_lines(*shape, compiler, args.tune)]
        for shape in shapes
    }
    for shape in shapes:
        print(describe_shape(*shape), flush=True)
        for line in lines.pop(shape):
            if time.perf_counter() - begin > args.time_limit:
                print(f"stopped by the time limit of {args.time_limit:.0f} s")
                compiler.lower.shutdown(wait=False, cancel_futures=True)
                compiler.compile.shutdown(wait=False, cancel_futures=True)
                return
            try:
                measured, parts = line.measure(clock)
            except Exception as problem:
                print(f"  {line.name:62} {type(problem).__name__}: {str(problem)[:150]}", flush=True)
                continue
            share = line.bytes / bandwidth / 1e6 / measured
            print(
                f"  {line.name:62} {measured:8.1f} us {line.bytes / 1e6:7.1f} MB share {share:4.2f}"
                + (f" ({parts})" if args.tune else ""),
                flush=True,
            )
            rows.append(dict(batch=shape[0], context=shape[1], name=line.name, us=measured, bytes=line.bytes))
            if args.json:
                with open(args.json, "w") as file:
                    json.dump(dict(bandwidth=bandwidth, rows=rows), file)
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
