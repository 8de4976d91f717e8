"""Times the attention of one chunk of a prompt on one GPU, at the target's widths, in every form that can serve it.

    python tests/benchmarks/prefill.py [--chunk 512 2048] [--context 2048 8192 32768] [--tune] [--json FILE]
    python tests/benchmarks/prefill.py --tiny                 # the same path in a minute on a CPU, wall clock

64 query heads over 4 KV heads of size 128, bf16, one row, a cache of the longest context; the chunk's queries are the
last of the context. A sparse layer scores blocks of 128 keys ("scores"), chooses 16 of them for each query and KV head
("choice") and attends to those; a dense one attends to everything. "near": 16 neighbouring queries have most blocks in
common; "far": each query has drawn its own. Times are sums of the CUPTI kernel durations of one call with the L2 cache
flushed before it, median of 20, in microseconds. TFLOP/s counts the products that are asked for (visible keys of the
selection), MB what has to be read at least once; "floor" is the larger of MB at the fastest stream that this process
measured and products at `--peak`. Every result is first compared with the loops, in float32. The last lines are what
`dspark_jax.attention_forms.CHUNK_FORMS` should say after this run.

cuDNN: `is_causal` counts from the first query and the first key, so it serves a chunk at position 0. A later chunk is
two calls, the keys before it (masked by their number) and its own (causal), merged by their log-sum-exp. jax's public
function rounds that to bf16, hence the private one.
"""

import argparse
import collections
import dataclasses
import functools
import importlib.util
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

# Set before jax is imported: kernels of a command buffer cannot be told apart, and the loops deserve XLA's best
# matrix products, which `attention` would turn off.
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")

import attention as timing
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import attention as loops
from dspark_jax.attention_forms import LOOPS, attend_with_kernels
from pallas_kernels import index_block_scores, select_blocks
from pallas_kernels.block_sparse_decode import triton as sparse_triton
from pallas_kernels.index_scores import triton as index_triton

GPU = jax.default_backend() == "gpu"
MULTIPROCESSORS = getattr(jax.devices()[0], "core_count", 132)
OUT_TOLERANCE = 6e-3  # relative norm: weights and output in bfloat16
SCORE_TOLERANCE = 1e-3  # absolute; the products of bfloat16 numbers are exact, their sum is float32 in any order
KEYS_AT_A_TIME = 1024  # of the loops; see `dspark_jax.cache.KEY_CHUNK`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    heads: int = 64
    kv_heads: int = 4
    dim: int = 128
    index_heads: int = 4
    block: int = 128
    top_k: int = 16


TINY = Sizes(heads=8, kv_heads=2, dim=32, index_heads=2, block=16, top_k=3)


@dataclasses.dataclass(frozen=True)
class Line:
    """One program: which work it does in which form, how to run it at a context, and how far its result may be off."""

    work: str
    form: str
    program: Future[Any]
    arrange: Callable[[dict[str, Any]], tuple[Any, ...]]
    reference: str
    serves: Callable[[int], bool] = lambda start: True


class WallClock:
    """Stands in for the profiler where there is no GPU."""

    def microseconds(self, launch: Callable[[], Any]) -> tuple[float, float]:
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            launch()
            times.append(time.perf_counter() - begin)
        return (1e6 * float(np.median(times)),) * 2


def names(*keys: str) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    return lambda inputs: tuple(inputs[key] for key in keys)


def make_inputs(sizes: Sizes, chunk: int, slots: int, start: jax.Array) -> dict[str, jax.Array]:
    """Arrays of a chunk at `start`, with two selections; keys behind the chunk hold numbers too."""
    keys = jax.random.split(jax.random.key(0), 7)
    shape = dict(q=(chunk, sizes.heads), k=(slots, sizes.kv_heads), v=(slots, sizes.kv_heads))
    shape |= dict(index_q=(chunk, sizes.index_heads), index_k=(slots, 1))
    made = {
        name: jax.random.normal(key, (1, *shape[name], sizes.dim), jnp.bfloat16)
        for name, key in zip(shape, keys, strict=False)
    }
    made["index_k"] = made["index_k"][:, :, 0]
    made["positions"] = (start + jnp.arange(chunk, dtype=jnp.int32))[None]
    made["start"] = start[None]
    for name in "kv":
        made[f"own_{name}"] = jax.lax.dynamic_slice_in_dim(made[name], start, chunk, axis=1)
    drawn = (1, chunk, sizes.kv_heads, slots // sizes.block)
    far = jax.random.normal(keys[5], drawn)
    common = jnp.repeat(jax.random.normal(keys[6], (1, -(-chunk // 16), *drawn[2:])), 16, axis=1)[:, :chunk]
    static: dict[str, Any] = dict(block_size=sizes.block, top_k=sizes.top_k)
    for name, scores in dict(far=far, near=common + jnp.float32(0.2) * far).items():
        made[name] = loops.select_blocks(scores, made["positions"], **static)
    made["scores"] = loops.block_scores(
        made["index_q"], made["index_k"], made["positions"], block_size=sizes.block,
        chunk=max(KEYS_AT_A_TIME, sizes.block),
    )  # fmt: skip
    return made


def cudnn_in_two_parts(q: Any, own_k: Any, own_v: Any, k: Any, v: Any, start: Any) -> Any:
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    common: dict[str, Any] = dict(scale=q.shape[-1] ** -0.5, return_residual=True)
    own, own_lse = dot_product_attention(q, own_k, own_v, mask_type=MaskType.CAUSAL, **common)
    queries = jnp.full(start.shape, q.shape[1], jnp.int32)
    before, lse = dot_product_attention(
        q, k, v, q_seqlen=queries, kv_seqlen=jnp.maximum(start, 1), mask_type=MaskType.PADDING, **common
    )
    lse = jnp.where(start[:, None, None] > 0, lse, -jnp.inf)
    share = jax.nn.sigmoid(lse - own_lse).transpose(0, 2, 1)[..., None]  # [B, Hq, T] -> [B, T, Hq, 1]
    before = jnp.where(start[:, None, None, None] > 0, before.astype(jnp.float32), jnp.float32(0))
    return (share * before + (jnp.float32(1) - share) * own.astype(jnp.float32)).astype(q.dtype)


def attention_lines(sizes: Sizes, chunk: int, slots: int, compiler: Any, tune: bool) -> Iterator[Line]:
    shapes = jax.eval_shape(functools.partial(make_inputs, sizes, chunk, slots), jnp.int32(0))
    cache = names("q", "k", "v", "positions")
    at_once = dict(block_size=sizes.block, chunk=max(KEYS_AT_A_TIME, sizes.block))
    kernel: dict[str, Any] = dict(block_size=sizes.block)

    def line(work: str, form: str, function: Any, arrange: Any, reference: str, **more: Any) -> Line:
        return Line(work, form, compiler(function, *arrange(shapes)), arrange, reference, **more)

    def sparse_arguments(kind: str) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
        return lambda inputs: (*cache(inputs), inputs[kind])

    def both(form: str, function: Any) -> Iterator[Line]:
        near = line("sparse near", form, function, sparse_arguments("near"), "near")
        yield near
        yield dataclasses.replace(near, work="sparse far", arrange=sparse_arguments("far"), reference="far")

    def with_tuning(q: Any, k: Any, v: Any, positions: Any, blocks: Any, *, tuning: Any) -> Any:
        pages = (x.reshape(-1, sizes.block, *x.shape[2:]) for x in (k, v))
        table = jnp.arange(slots // sizes.block, dtype=jnp.int32)[None]
        return sparse_triton.attend(
            q, *pages, table, blocks, positions[:, 0], block_size=sizes.block, scale=sizes.dim**-0.5,
            multiprocessors=MULTIPROCESSORS, tuning=tuning,
        )[0]  # fmt: skip

    forms = ["triton", "mosaic"] if GPU else ["xla of pallas_kernels"]
    named = {"xla of pallas_kernels": "xla"}
    yield line("dense", LOOPS, lambda *a: loops.attend(*a, **at_once), cache, "dense")
    for form in forms:
        run = functools.partial(attend_with_kernels, implementation=named.get(form, form), **kernel)
        yield line("dense", form, lambda *a, run=run: run(*a), cache, "dense")
    if GPU:
        parts = names("q", "own_k", "own_v", "k", "v", "start")
        yield line("dense", "cudnn in two parts", cudnn_in_two_parts, parts, "dense")
        square = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
        own = names("q", "own_k", "own_v")
        yield line("dense", "cudnn at position 0", square, own, "dense", serves=lambda start: start == 0)
    yield from both(LOOPS, lambda *a: loops.attend(*a[:4], blocks=a[4], **at_once))
    for form in forms[:1]:
        run = functools.partial(attend_with_kernels, implementation=named.get(form, form), **kernel)
        yield from both(form, lambda *a, run=run: run(*a[:4], blocks=a[4]))
    if GPU and tune:
        for tuning in sparse_variants():
            label = (
                f"triton, {tuning.queries} queries, tile {tuning.tile}, {tuning.stages} stages, {tuning.warps} warps"
            )
            yield from both(label, functools.partial(with_tuning, tuning=tuning))
    scored, chosen = names("index_q", "index_k", "positions"), names("scores", "positions")
    yield line("scores", LOOPS, lambda *a: loops.block_scores(*a, **at_once), scored, "scores")
    static: dict[str, Any] = dict(block_size=sizes.block, top_k=sizes.top_k)
    yield line("choice", LOOPS, lambda *a: loops.select_blocks(*a, **static), chosen, "choice")
    for form in forms[:1]:
        implementation = named.get(form, form)
        score = functools.partial(index_block_scores, implementation=implementation, block_size=sizes.block)
        yield line("scores", form, lambda *a, score=score: score(*a), scored, "scores")
        choose = functools.partial(select_blocks, implementation=implementation, **static)
        yield line("choice", form, lambda *a, choose=choose: choose(*a), chosen, "choice")
    for rows, blocks, stages, warps in INDEX_VARIANTS if GPU and tune else ():
        tuning = index_triton.Tuning(rows=rows, blocks=blocks, stages=stages, warps=warps)
        run = functools.partial(
            index_triton.block_maxima, block_size=sizes.block, multiprocessors=MULTIPROCESSORS, tuning=tuning
        )
        yield line(
            "scores", f"triton, {rows} rows, {blocks} blocks, {stages} stages, {warps} warps", run, scored, "scores"
        )


def sparse_variants() -> Iterator[sparse_triton.Tuning]:
    """Neighbours that share the blocks they read, beside the 4 that are chosen, and larger tiles."""
    shapes = [
        (1, 64, 3, 4),
        (2, 64, 3, 4),
        (4, 64, 2, 4),
        (4, 128, 2, 4),
        (8, 64, 2, 8),
        (8, 128, 2, 8),
        (16, 64, 2, 8),
    ]
    for queries, tile, stages, warps in shapes:
        yield sparse_triton.Tuning(queries=queries, splits=1, tile=tile, stages=stages, warps=warps)


INDEX_VARIANTS = [(64, 8, 2, 4), (128, 8, 2, 4), (128, 4, 3, 8), (256, 8, 2, 8)]  # rows, blocks, stages, warps


def references(sizes: Sizes) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """The loops in float32, by what they are the reference of."""
    at_once = dict(block_size=sizes.block, chunk=max(KEYS_AT_A_TIME, sizes.block))

    @jax.jit
    def attend(q: Any, k: Any, v: Any, positions: Any, blocks: Any = None) -> Any:
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        # Few queries at a time: the scores of all are gigabytes in float32.
        pieces = max(1, q.shape[1] // 256)

        def piece(part: Any) -> Any:
            q, positions, blocks = part
            return loops.attend(q, k, v, positions, blocks=blocks, **at_once)

        split = jax.tree.map(
            lambda x: jnp.moveaxis(x.reshape(1, pieces, -1, *x.shape[2:]), 1, 0), (q, positions, blocks)
        )
        return jnp.moveaxis(jax.lax.map(piece, split), 0, 1).reshape(q.shape)

    def sparse(kind: str) -> Callable[[dict[str, Any]], Any]:
        return lambda i: attend(i["q"], i["k"], i["v"], i["positions"], i[kind])

    static: dict[str, Any] = dict(block_size=sizes.block, top_k=sizes.top_k)
    return dict(
        dense=lambda i: attend(i["q"], i["k"], i["v"], i["positions"]),
        near=sparse("near"),
        far=sparse("far"),
        scores=lambda i: i["scores"],
        choice=lambda i: loops.select_blocks(i["scores"], i["positions"], **static),
    )


def wrong(reference: str, actual: Any, expected: Any) -> float:
    """How many times more wrong than allowed."""
    actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
    if reference == "choice":
        return 0.0 if np.array_equal(actual, expected) else math.inf
    if reference == "scores":
        finite = np.isfinite(expected)
        if not np.array_equal(finite, np.isfinite(actual)):
            return math.inf
        return float(np.abs(actual[finite] - expected[finite]).max()) / SCORE_TOLERANCE
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected)) / OUT_TOLERANCE


def work_of(line: Line, sizes: Sizes, inputs: dict[str, Any]) -> tuple[float, float]:
    """-> floating point operations that are asked for, bytes that have to be read or written at least once."""
    positions = np.asarray(inputs["positions"][0], np.int64)
    group, seen = sizes.heads // sizes.kv_heads, int(positions[-1]) + 1
    key = sizes.dim * 2
    ends = 2 * inputs["q"].nbytes
    if line.reference == "dense":
        return 4.0 * sizes.dim * sizes.heads * float((positions + 1).sum()), ends + 2 * seen * sizes.kv_heads * key
    if line.reference == "scores":
        operations = 2.0 * sizes.dim * sizes.index_heads * float((positions + 1).sum())
        return operations, seen * key + inputs["index_q"].nbytes + inputs["scores"].nbytes
    if line.reference == "choice":
        return 0.0, inputs["scores"].nbytes
    ids = np.asarray(inputs[line.reference][0])
    keys = np.where(ids < 0, 0, np.minimum(sizes.block, positions[:, None, None] + 1 - ids * sizes.block))
    read = sum(np.unique(ids[:, h][ids[:, h] >= 0]).size for h in range(sizes.kv_heads))
    return 4.0 * sizes.dim * group * float(keys.sum()), ends + 2 * read * sizes.block * key


def advice(rows: list[dict[str, Any]]) -> Iterator[str]:
    """For each work the forms by their time over all cases, as `CHUNK_FORMS` would name them."""
    cases = collections.defaultdict(set)
    total: dict[tuple[str, str], float] = collections.defaultdict(float)
    works = dict(selection=("scores", "choice"), sparse=("sparse near", "sparse far"), dense=("dense",))
    for row in rows:
        for work, parts in works.items():
            if row["work"] in parts and row["form"] in (LOOPS, "mosaic", "triton"):
                total[work, row["form"]] += row["us"]
                cases[work, row["form"]].add((row["chunk"], row["context"], row["work"]))
    for work in works:
        full = max((len(c) for (w, _), c in cases.items() if w == work), default=0)
        order = sorted((t, f) for (w, f), t in total.items() if w == work and len(cases[w, f]) == full)
        forms = [form for _, form in order]
        forms = forms[: forms.index(LOOPS) + 1] if LOOPS in forms else forms
        times = ", ".join(f"{form} {t / 1e3:.2f} ms" for t, form in order)
        yield f'"{work}": {tuple(forms)}  # sums: {times}'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--context", type=int, nargs="+", default=[2048, 8192, 32_768])
    parser.add_argument("--peak", type=float, default=989.0, help="TFLOP/s of the matrix units; default: H200, bf16")
    parser.add_argument("--tune", action="store_true", help="more variants of the Triton kernels")
    parser.add_argument("--json", help="where to write all figures")
    parser.add_argument("--tiny", action="store_true", help="small widths, for a CPU")
    options = parser.parse_args()
    sizes, chunks, contexts = Sizes(), options.chunk, options.context
    if options.tiny:
        sizes, chunks, contexts = TINY, [48], [48, 2048]
    begin, compiler = time.perf_counter(), timing.Compiler()
    clock: Any = timing.Clock() if GPU else WallClock()
    bandwidth = clock.copy_bandwidth() if GPU else math.nan
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, fastest stream measured {bandwidth:.2f} TB/s")
    if GPU and importlib.util.find_spec("jax_triton") is None:
        print("jax-triton is not installed: install dspark-jax[triton] to time the Triton forms")
    slots, rows, expected = max(contexts), [], references(sizes)
    lines = {chunk: [*attention_lines(sizes, chunk, slots, compiler, options.tune)] for chunk in chunks}
    # XLA times matrix products on the same GPU while it compiles.
    wait([line.program for several in lines.values() for line in several])
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    for chunk, context in ((chunk, context) for chunk in chunks for context in contexts if context >= chunk):
        print(f"chunk of {chunk} at the end of {context}", flush=True)
        inputs = jax.jit(functools.partial(make_inputs, sizes, chunk, slots))(jnp.int32(context - chunk))
        want = {name: np.asarray(reference(inputs), np.float32) for name, reference in expected.items()}
        for line in lines[chunk]:
            if not line.serves(context - chunk):
                continue
            try:
                run, args = line.program.result(), line.arrange(inputs)

                def launch(run: Any = run, args: Any = args) -> Any:
                    return jax.block_until_ready(run(*args))

                if not (excess := wrong(line.reference, launch(), want[line.reference])) <= 1:
                    raise ArithmeticError(f"{excess:.1f} times more wrong than allowed")
                spent = clock.microseconds(launch)[0]
            except Exception as problem:
                print(f"  {line.work:12} {line.form:52} {type(problem).__name__}: {str(problem)[:120]}", flush=True)
                continue
            operations, moved = work_of(line, sizes, inputs)
            floor = max(moved / bandwidth / 1e6, operations / options.peak / 1e6)
            print(
                f"  {line.work:12} {line.form:52} {spent:9.1f} us {operations / spent / 1e6:6.1f} TFLOP/s "
                f"{moved / 1e6:7.1f} MB, floor {floor:7.1f} us",
                flush=True,
            )
            rows.append(
                dict(
                    chunk=chunk,
                    context=context,
                    work=line.work,
                    form=line.form,
                    us=spent,
                    flops=operations,
                    floor=floor,
                )
            )
    print(*advice(rows), sep="\n")
    print(f"{time.perf_counter() - begin:.0f} s")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(dict(bandwidth=bandwidth, rows=rows), file)


if __name__ == "__main__":
    main()
