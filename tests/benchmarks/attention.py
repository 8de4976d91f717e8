"""Times the attention kernels on one GPU beside FlashAttention-3, torch SDPA, cuDNN and the fastest plain stream.

    python tests/benchmarks/attention.py [--json FILE] [--only TEXT] [--runs 2] [--flush read]

Times are sums of the CUPTI kernel durations of one call, median of many, in microseconds: "warm" back to back, "cold"
with the L2 cache flushed before each call: by writing 256 MB, which leaves the cache full of changed lines that what is
timed has to write back, or with `--flush read` by reading them. Every result of ours is first compared with the XLA
form, which computes in float32. Peers that are not installed are left out (flash_attn3_jax, torch). SDPA and cuDNN read
exactly the keys of the window, without a mask; FlashAttention-3 takes the window and the lengths, in its best number of
splits.
"""

import argparse
import collections
import dataclasses
import functools
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

# Only the float32 reference uses matrix products of XLA, and searching the best for each would take most of the run.
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # torch needs some

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import block_attention, merge_future_block, windowed_decode

HEAD_DIM = 128
REPEATS = 20
PAUSES = (0.2, 0.5, 1.0)  # seconds until a record is made again
OUT_TOLERANCE, LSE_TOLERANCE = 6e-3, 1e-3  # relative norm and absolute: bfloat16 output, float32 log-sum-exp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    batch: int
    heads: tuple[int, int]
    queries: int = 8
    window: int | None = 4096
    context: int = 5992
    slots: int = 8192
    page: int = 64

    def __str__(self) -> str:
        hq, hkv = self.heads
        return f"{hq}/{hkv} B={self.batch} K={self.queries} window={self.window} context={self.context}"

    @property
    def keys(self) -> int:
        """Keys that some query of a row sees."""
        seen = self.context + self.queries
        return seen if self.window is None else min(seen, self.window - 1 + self.queries)

    @property
    def bytes(self) -> int:
        return 2 * self.batch * self.keys * self.heads[1] * HEAD_DIM * 2


LONG = [dict(context=32760, slots=32768), dict(context=131064, slots=131072)]
CASES = [
    *(Case(batch=b, heads=h, queries=k) for h in ((64, 4), (16, 1)) for b in (64, 8, 1) for k in (8, 7)),
    *(Case(batch=8, heads=(64, 4), window=None, **long) for long in LONG),
]


Inputs = Mapping[str, Any]


def make_inputs(case: Case, seed: jax.Array) -> dict[str, jax.Array]:
    """Random arrays; `shuffled` and `counting` are page tables over one pool."""
    hq, hkv = case.heads
    table_length = case.slots // case.page
    pages = case.batch * table_length
    keys = jax.random.split(jax.random.key(seed), 6)

    def normal(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape, jnp.bfloat16)

    return dict(
        q=normal(keys[0], case.batch, case.queries, hq, HEAD_DIM),
        k_pages=normal(keys[1], pages, case.page, hkv, HEAD_DIM),
        v_pages=normal(keys[2], pages, case.page, hkv, HEAD_DIM),
        k_block=normal(keys[3], case.batch, case.queries, hkv, HEAD_DIM),
        v_block=normal(keys[4], case.batch, case.queries, hkv, HEAD_DIM),
        shuffled=jax.random.permutation(keys[5], pages).astype(jnp.int32).reshape(case.batch, table_length),
        counting=jnp.arange(pages, dtype=jnp.int32).reshape(case.batch, table_length),
        q_start=jnp.full((case.batch,), case.context, jnp.int32),
        kv_length=jnp.full((case.batch,), case.context + case.queries, jnp.int32),
        out=normal(keys[0], case.batch, case.queries, hq, HEAD_DIM)[::-1],
        lse=jnp.zeros((case.batch, case.queries, hq), jnp.float32),
    )


Kernel = tuple[str, float]  # name, milliseconds


def odd(records: list[Kernel], calls: int) -> str:
    """The kernels that cannot have run equally often in each call, with how often they ran."""
    counts = collections.Counter(name for name, _ in records)
    return ", ".join(f"{count} x {name[:60]}" for name, count in counts.items() if count % calls) or "none"


def alike(calls: list[list[Kernel]]) -> list[list[Kernel]]:
    """`calls`, or RuntimeError where they are not of the same kernels; in which order these end is left to the GPU."""
    first, *others = (collections.Counter(name for name, _ in call) for call in calls)
    for other in others:
        more = {name: other[name] - first[name] for name in [*first, *other] if other[name] != first[name]}
        if more:
            found = ", ".join(f"{count:+} x {name[:60]}" for name, count in more.items())
            raise RuntimeError(f"a call runs other kernels than the first one: {found}.")
    return calls


class Clock:
    """Kernel durations by CUPTI, through the profiler that comes with Mosaic GPU."""

    def __init__(self, flush: str = "write") -> None:
        from jax._src.lib import mosaic_gpu

        self.cupti = mosaic_gpu._mosaic_gpu_ext
        self.buffer = jnp.zeros((128, 1024, 1024), jnp.uint16)  # 256 MB, several times the L2 cache
        # XLA names a kernel after its operation: this one must be in no program that is timed.
        self.scrub = jax.jit(jax.lax.population_count if flush == "write" else lambda x: x.max(axis=2))
        self.flush()
        [(self.flush_name, _)] = self.rounds(self.flush, REPEATS)[0]

    def flush(self) -> None:
        self.scrub(self.buffer).block_until_ready()

    def record(self, run: Callable[[], Any]) -> list[Kernel]:
        """Name and milliseconds of each kernel that runs meanwhile, whichever thread started it."""
        self.cupti._cupti_init()
        try:
            run()
        finally:
            records = self.cupti._cupti_get_timings(True)
        return records

    def calls(self, run: Callable[[], Any], split: Callable[[list[Kernel]], list[list[Kernel]]]) -> list[list[Kernel]]:
        """The record of `run`, split into calls that have to run the same kernels.

        The record is of the whole process: where another thread compiles, kernels that XLA tries out to choose among
        them are in it too. So it is made again, a little later, before a difference counts.
        """
        for pause in PAUSES:
            try:
                return alike(split(self.record(run)))
            except RuntimeError:
                time.sleep(pause)
        return alike(split(self.record(run)))

    def rounds(self, launch: Callable[[], Any], count: int) -> list[list[Kernel]]:
        """The kernels of each of `count` calls, back to back after one more."""
        launch()

        def split(records: list[Kernel]) -> list[list[Kernel]]:
            each, extra = divmod(len(records), count)
            if extra or not each:
                raise RuntimeError(
                    f"{len(records)} kernels in {count} calls, not the same in each: {odd(records, count)}."
                )
            return [records[i : i + each] for i in range(0, len(records), each)]

        return self.calls(lambda: [launch() for _ in range(count)], split)

    def microseconds(self, launch: Callable[[], Any]) -> tuple[float, float]:
        """Medians, over cold and over warm calls, of the sum of a call's kernels."""
        for _ in range(2):
            launch()

        def repeat() -> None:
            for _ in range(REPEATS):
                self.flush()
                launch()
            self.flush()
            for _ in range(REPEATS):
                launch()

        def split(records: list[Kernel]) -> list[list[Kernel]]:
            between: list[list[Kernel]] = [[]]
            for record in records:
                if record[0] == self.flush_name:
                    between.append([])
                else:
                    between[-1].append(record)
            before, *cold, warm = between
            per_call, extra = divmod(len(warm), REPEATS)
            if before or extra or not per_call or len(cold) != REPEATS:
                found = odd([r for r in records if r[0] != self.flush_name], 2 * REPEATS)
                raise RuntimeError(f"the calls do not all run the same kernels: {found}.")
            return [*cold, *(warm[i : i + per_call] for i in range(0, len(warm), per_call))]

        sums = [1e3 * sum(time for _, time in call) for call in self.calls(repeat, split)]
        return float(np.median(sums[:REPEATS])), float(np.median(sums[REPEATS:]))

    def copy_bandwidth(self) -> float:
        """Terabytes a second of the fastest stream over 1 GB, which floors and shares refer to; prints all streams.

        By kernel time: an array changed in place and one changed into another (bytes read and written), and sums of its
        rows, of the best of three lengths (bytes read).
        """
        array = [jax.jit(lambda: jax.random.normal(jax.random.key(0), (2**28,), jnp.float32))()]

        def speed(stream: Callable[[jax.Array], jax.Array], passes: int, in_place: bool = False) -> float:
            program = jax.jit(stream, donate_argnums=0 if in_place else ())

            def run() -> None:
                result = jax.block_until_ready(program(array[0]))
                if in_place:
                    array[0] = result

            times = [sum(milliseconds for _, milliseconds in call) for call in self.rounds(run, REPEATS)]
            return passes * array[0].nbytes / float(np.median(times)) / 1e9

        def change(x: jax.Array) -> jax.Array:
            return x + jnp.float32(1)

        streams = {
            "in place": speed(change, 2, in_place=True),
            "to another array": speed(change, 2),
            "read alone": max(speed(lambda x, n=n: x.reshape(-1, n).sum(axis=1), 1) for n in (2**10, 2**13, 2**16)),
        }
        print("streams over 1 GB, TB/s:", ", ".join(f"{name} {rate:.2f}" for name, rate in streams.items()), flush=True)
        return max(streams.values())


Arrange = Callable[[Inputs], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the table: a program, which of the inputs it takes, and a program for what it should return.

    Of several entries of a name the fastest is shown.
    """

    name: str
    program: Future[Any]
    arrange: Arrange
    expected: Future[Any] | None = None

    def launcher(self, inputs: Inputs) -> Callable[[], Any]:
        compiled, args = self.program.result(), self.arrange(inputs)
        return lambda: jax.block_until_ready(compiled(*args))


class Compiler:
    """Lowers in one thread, which holds Python's lock, and compiles in many; both while the GPU is timed."""

    def __init__(self) -> None:
        self.lower, self.compile = ThreadPoolExecutor(1), ThreadPoolExecutor(12)

    def __call__(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        result: Future[Any] = Future()

        def attempt(work: Callable[[], None]) -> None:
            try:
                work()
            except Exception as error:
                result.set_exception(error)

        def lower() -> None:
            lowered = jax.jit(function).lower(*args)
            self.compile.submit(attempt, lambda: result.set_result(lowered.compile()))

        self.lower.submit(attempt, lower)
        return result


def errors(actual: Any, expected: Any) -> tuple[float, float]:
    out, lse = (np.asarray(x, np.float32) for x in actual)
    out_expected, lse_expected = (np.asarray(x, np.float32) for x in expected)
    relative = np.linalg.norm(out - out_expected) / np.linalg.norm(out_expected)
    return float(relative), float(np.abs(lse - lse_expected).max())


def names(*names: str) -> Arrange:
    return lambda inputs: tuple(inputs[name] for name in names)


def ours(case: Case, i: Inputs, compiler: Compiler, implementations: list[str]) -> Iterator[Entry]:
    static = dict(window=case.window, scale=HEAD_DIM**-0.5)
    arrange = {
        "decode, shuffled pages": names("q", "k_pages", "v_pages", "shuffled", "q_start", "kv_length"),
        "decode, counting pages": names("q", "k_pages", "v_pages", "counting", "q_start", "kv_length"),
        "block attention": names("q", "k_block", "v_block", "k_pages", "v_pages", "shuffled", "q_start"),
        "merge": names("out", "lse", "q", "k_block", "v_block"),
    }
    functions = dict(zip(arrange, (windowed_decode, windowed_decode, block_attention, merge_future_block), strict=True))

    def compile_all(implementation: str) -> dict[str, Future[Any]]:
        done: dict[Any, Future[Any]] = {}
        for name, function in functions.items():
            if function not in done:
                run = functools.partial(function, implementation=implementation, **static)
                done[function] = compiler(run, *arrange[name](i))
        return {name: done[function] for name, function in functions.items()}

    expected = compile_all("xla")
    for implementation in implementations:
        for name, program in compile_all(implementation).items():
            yield Entry(f"{implementation} {name}", program, arrange[name], expected[name])


def flat(case: Case, pages: Any, slots: int | None = None) -> Any:
    """The pool by rows of the batch, whose pages count up."""
    return pages.reshape(case.batch, case.slots, -1, HEAD_DIM)[:, :slots]


def flash_attention_3(case: Case, i: Inputs, compiler: Compiler) -> Iterator[Entry]:
    if importlib.util.find_spec("flash_attn3_jax") is None:
        return
    import flash_attn3_jax

    window = (-1, -1) if case.window is None else (case.window - 1, case.window - 1)

    def contiguous(i: Inputs) -> tuple[Any, ...]:
        return i["q"], flat(case, i["k_pages"]), flat(case, i["v_pages"]), i["kv_length"]

    paged = names("q", "k_pages", "v_pages", "kv_length", "shuffled")
    for splits in (1, 2, 4, 8, 16, 32):

        def run(q, k, v, lengths, *table, splits=splits):
            more = {"page_table": table[0]} if table else {}
            return flash_attn3_jax.flash_mha_with_kvcache(
                q, k, v, cache_seqlens=lengths, window_size=window, is_causal=False, num_splits=splits, **more
            )

        for name, arrange in (("FA3 contiguous", contiguous), ("FA3 paged", paged)):
            yield Entry(name, compiler(run, *jax.eval_shape(arrange, dict(i))), arrange)


def dense_peers(case: Case, i: Inputs, compiler: Compiler) -> Iterator[Entry]:
    """Peers that take no page table and no lengths: they get the keys of the window and nothing else."""

    def arrange(i: Inputs) -> tuple[Any, ...]:
        return i["q"], flat(case, i["k_pages"], case.keys), flat(case, i["v_pages"], case.keys)

    cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    yield Entry("cuDNN through jax", compiler(cudnn, *jax.eval_shape(arrange, dict(i))), arrange)
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    def sdpa(*tensors: Any) -> None:
        torch.nn.functional.scaled_dot_product_attention(*tensors, enable_gqa=True)
        torch.cuda.synchronize()

    def tensors(i: Inputs) -> tuple[Any, ...]:
        return tuple(torch.from_dlpack(x).transpose(1, 2).contiguous() for x in arrange(i))

    ready: Future[Any] = Future()
    ready.set_result(sdpa)
    yield Entry("torch SDPA", ready, tensors)


def entries_of(case: Case, compiler: Compiler, args: argparse.Namespace) -> list[Entry]:
    shapes = jax.eval_shape(functools.partial(make_inputs, case), jnp.int32(0))
    entries = [*ours(case, shapes, compiler, args.implementations)]
    if not args.no_peers:
        entries += [*flash_attention_3(case, shapes, compiler), *dense_peers(case, shapes, compiler)]
    return entries


@dataclasses.dataclass
class Line:
    entry: Entry
    launch: Callable[[], Any]
    error: tuple[float, float] | None
    runs: list[tuple[float, float]]


def run_case(case: Case, entries: list[Entry], clock: Clock, bandwidth: float, runs: int) -> list[dict[str, Any]]:
    started, floor = time.perf_counter(), case.bytes / bandwidth / 1e6
    print(f"{case}: {case.bytes / 1e6:.1f} MB, {floor:.1f} us at the fastest stream measured", flush=True)
    inputs = jax.jit(functools.partial(make_inputs, case))(jnp.int32(3))
    best: dict[str, Line] = {}
    for entry in entries:
        try:
            line = Line(entry, entry.launcher(inputs), None, [])
            if entry.expected is not None:
                line.error = errors(line.launch(), entry.expected.result()(*entry.arrange(inputs)))
                if not (line.error[0] <= OUT_TOLERANCE and line.error[1] <= LSE_TOLERANCE):
                    raise ArithmeticError(f"wrong by {line.error}")
            line.runs.append(clock.microseconds(line.launch))
        except Exception as problem:
            print(f"  {entry.name}: {type(problem).__name__}: {str(problem)[:150]}", flush=True)
            continue
        if entry.name not in best or line.runs < best[entry.name].runs:
            best[entry.name] = line
    rows = []
    for name, line in best.items():
        line.runs += [clock.microseconds(line.launch) for _ in range(runs - 1)]
        cold, warm = ([run[i] for run in line.runs] for i in (0, 1))
        rows.append(dict(case=dataclasses.asdict(case), name=name, cold=cold, warm=warm, floor=floor, error=line.error))
        shown = (" ".join(f"{t:6.1f}" for t in times) for times in (cold, warm))
        print("  {:36} cold {}   warm {}".format(name, *shown), flush=True)
    print(f"  ({time.perf_counter() - started:.1f} s)", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="where to write all figures")
    parser.add_argument("--only", default="", help="run the cases whose description contains this text")
    parser.add_argument("--runs", type=int, default=2, help="medians to print for each figure")
    parser.add_argument("--implementations", nargs="+", default=["mosaic", "triton"])
    parser.add_argument("--flush", choices=["write", "read"], default="write", help="how the L2 cache is flushed")
    parser.add_argument("--no-peers", action="store_true", help="time this library alone")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit("This benchmark needs a GPU.")
    clock = Clock(args.flush)
    bandwidth = clock.copy_bandwidth()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, fastest stream measured {bandwidth:.2f} TB/s")
    cases, compiler, rows = [case for case in CASES if args.only in str(case)], Compiler(), []
    for case, entries in [(case, entries_of(case, compiler, args)) for case in cases]:
        rows += run_case(case, entries, clock, bandwidth, args.runs)
        entries.clear()  # programs and their memory
        if args.json:
            with open(args.json, "w") as file:
                json.dump(rows, file)


if __name__ == "__main__":
    main()
