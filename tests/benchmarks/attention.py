"""Times the attention kernels on one GPU beside FlashAttention-3, torch SDPA, cuDNN and a plain copy.

    python tests/benchmarks/attention.py [--json FILE] [--only TEXT] [--runs 2]

Times are sums of the CUPTI kernel durations of one call, median of many, in microseconds: "warm" back to back, "cold"
with the L2 cache flushed before each call. Every result of ours is first compared with the XLA form, which computes in
float32. Peers that are not installed are left out (flash_attn3_jax, torch). SDPA and cuDNN read exactly the keys of the
window, without a mask; FlashAttention-3 takes the window and the lengths, in its best number of splits.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
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


def make_inputs(case: Case, seed: int) -> dict[str, jax.Array]:
    """Random arrays; `shuffled` and `counting` are page tables over one pool, `k_flat`, `v_flat` the pool by rows."""
    hq, hkv = case.heads
    table_length = case.slots // case.page
    pages = case.batch * table_length

    @jax.jit
    def make(seed: jax.Array) -> dict[str, jax.Array]:
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
        )

    return make(jnp.int32(seed))


class Clock:
    """Kernel durations by CUPTI, through the profiler that comes with Mosaic GPU."""

    def __init__(self) -> None:
        from jax._src.lib import mosaic_gpu

        self.cupti = mosaic_gpu._mosaic_gpu_ext
        self.buffer = jnp.zeros((128, 1024, 1024), jnp.bfloat16)  # 256 MB, several times the L2 cache
        self.scrub = jax.jit(lambda x: x + jnp.bfloat16(1))
        self.flush()
        self.flush_names = {name for name, _ in self.record(self.flush)}

    def flush(self) -> None:
        self.scrub(self.buffer).block_until_ready()

    def record(self, run: Callable[[], Any]) -> list[tuple[str, float]]:
        self.cupti._cupti_init()
        try:
            run()
        finally:
            records = self.cupti._cupti_get_timings(True)
        return records

    def microseconds(self, launch: Callable[[], Any], *, cold: bool) -> float:
        """Median over calls of the sum of a call's kernels."""
        for _ in range(2):
            launch()

        def repeat() -> None:
            for _ in range(REPEATS):
                if cold:
                    self.flush()
                launch()

        records = self.record(repeat)
        per_call, extra = divmod(len(records), REPEATS)
        if extra:
            raise RuntimeError(f"{len(records)} kernels in {REPEATS} calls: the calls do not all run the same kernels.")
        calls = [records[i : i + per_call] for i in range(0, len(records), per_call)]
        flushed = self.flush_names if cold else set()
        return 1e3 * float(np.median([sum(t for name, t in call if name not in flushed) for call in calls]))


def copy_bandwidth() -> float:
    """Terabytes a second of a pass over a large array, bytes read plus bytes written, by the wall clock."""
    x = jnp.zeros((2048, 1024, 1024), jnp.bfloat16)
    # In place: fresh outputs would time the allocator where memory is not taken in advance.
    one = jax.jit(lambda x: x + jnp.bfloat16(1), donate_argnums=0)
    x = one(x).block_until_ready()
    start = time.perf_counter()
    for _ in range(REPEATS):
        x = one(x)
    x.block_until_ready()
    return 2 * x.nbytes * REPEATS / (time.perf_counter() - start) / 1e12


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line of the table: a program, compiled in the background, its arguments and what it should return."""

    name: str
    program: Future[Any]
    args: tuple[Any, ...]
    expected: Future[Any] | None = None

    def launcher(self) -> Callable[[], Any]:
        compiled = self.program.result()
        return lambda: jax.block_until_ready(compiled(*self.args))


class Compiler:
    """Lowers here and compiles in threads."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(12)

    def __call__(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        try:
            return self.pool.submit(jax.jit(function).lower(*args).compile)
        except Exception as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed


def errors(actual: Any, expected: Any) -> tuple[float, float]:
    out, lse = (np.asarray(x, np.float32) for x in actual)
    out_expected, lse_expected = (np.asarray(x, np.float32) for x in expected)
    relative = np.linalg.norm(out - out_expected) / np.linalg.norm(out_expected)
    return float(relative), float(np.abs(lse - lse_expected).max())


def ours(case: Case, i: dict[str, jax.Array], compiler: Compiler, implementations: list[str]) -> Iterator[Entry]:
    static = dict(window=case.window, scale=HEAD_DIM**-0.5)
    pages = (i["k_pages"], i["v_pages"])
    decode_args = {
        o: (i["q"], *pages, i[o], i["q_start"], i["q_start"] + case.queries) for o in ("shuffled", "counting")
    }
    block_args = (i["q"], i["k_block"], i["v_block"], *pages, i["shuffled"], i["q_start"])
    merge_args = (i["q"][::-1], jnp.zeros(i["q"].shape[:3], jnp.float32), i["q"], i["k_block"], i["v_block"])
    functions = dict(decode=windowed_decode, block=block_attention, merge=merge_future_block)

    def compile_all(implementation: str) -> dict[str, Future[Any]]:
        args = dict(decode=decode_args["shuffled"], block=block_args, merge=merge_args)
        return {
            n: compiler(functools.partial(f, implementation=implementation, **static), *args[n])
            for n, f in functions.items()
        }

    expected = compile_all("xla")
    for implementation in implementations:
        programs = compile_all(implementation)
        for order, args in decode_args.items():
            yield Entry(f"{implementation} decode, {order} pages", programs["decode"], args, expected["decode"])
        yield Entry(f"{implementation} block attention", programs["block"], block_args, expected["block"])
        yield Entry(f"{implementation} merge", programs["merge"], merge_args, expected["merge"])


def flash_attention_3(case: Case, i: dict[str, jax.Array], compiler: Compiler) -> Iterator[Entry]:
    if importlib.util.find_spec("flash_attn3_jax") is None:
        return
    import flash_attn3_jax

    window = (-1, -1) if case.window is None else (case.window - 1, case.window - 1)
    lengths = i["q_start"] + case.queries
    flat = [i[name].reshape(case.batch, case.slots, -1, HEAD_DIM) for name in ("k_pages", "v_pages")]
    for splits in (1, 2, 4, 8, 16, 32):

        def run(q, k, v, lengths, *table, splits=splits):
            more = {"page_table": table[0]} if table else {}
            return flash_attn3_jax.flash_mha_with_kvcache(
                q, k, v, cache_seqlens=lengths, window_size=window, is_causal=False, num_splits=splits, **more
            )

        for name, *args in (
            ("FA3 contiguous", i["q"], *flat, lengths),
            ("FA3 paged", i["q"], i["k_pages"], i["v_pages"], lengths, i["shuffled"]),
        ):
            yield Entry(name, compiler(run, *args), tuple(args))


def dense_peers(case: Case, i: dict[str, jax.Array], compiler: Compiler) -> Iterator[Entry]:
    """Peers that take no page table and no lengths: they get the keys of the window and nothing else."""
    flat = [i[n].reshape(case.batch, case.slots, -1, HEAD_DIM)[:, : case.keys] for n in ("k_pages", "v_pages")]
    cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    yield Entry("cuDNN through jax", compiler(cudnn, i["q"], *flat), (i["q"], *flat))
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    def sdpa(*tensors: Any) -> None:
        torch.nn.functional.scaled_dot_product_attention(*tensors, enable_gqa=True)
        torch.cuda.synchronize()

    ready: Future[Any] = Future()
    ready.set_result(sdpa)
    yield Entry("torch SDPA", ready, tuple(torch.from_dlpack(x).transpose(1, 2).contiguous() for x in (i["q"], *flat)))


def run_case(case: Case, clock: Clock, bandwidth: float, args: argparse.Namespace) -> list[dict[str, Any]]:
    floor = case.bytes / bandwidth / 1e6
    print(f"{case}: {case.bytes / 1e6:.1f} MB, {floor:.1f} us at copy bandwidth", flush=True)
    compiler, inputs = Compiler(), make_inputs(case, seed=3)
    entries = [*ours(case, inputs, compiler, args.implementations)]
    if not args.no_peers:
        entries += [*flash_attention_3(case, inputs, compiler), *dense_peers(case, inputs, compiler)]
    best: dict[str, dict[str, Any]] = {}
    for entry in entries:
        try:
            launch, error = entry.launcher(), None
            if entry.expected is not None:
                error = errors(launch(), entry.expected.result()(*entry.args))
                if not (error[0] <= OUT_TOLERANCE and error[1] <= LSE_TOLERANCE):
                    raise ArithmeticError(f"wrong by {error}")
            cold, warm = ([clock.microseconds(launch, cold=c) for _ in range(args.runs)] for c in (True, False))
        except Exception as problem:
            print(f"  {entry.name}: {type(problem).__name__}: {str(problem)[:150]}", flush=True)
            continue
        row = dict(case=dataclasses.asdict(case), name=entry.name, cold=cold, warm=warm, floor=floor, error=error)
        if entry.name not in best or min(cold) < min(best[entry.name]["cold"]):
            best[entry.name] = row
    for row in best.values():
        cold, warm = (" ".join(f"{t:6.1f}" for t in row[k]) for k in ("cold", "warm"))
        print(f"  {row['name']:36} cold {cold}   warm {warm}", flush=True)
    return list(best.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="where to write all figures")
    parser.add_argument("--only", default="", help="run the cases whose description contains this text")
    parser.add_argument("--runs", type=int, default=2, help="medians to print for each figure")
    parser.add_argument("--implementations", nargs="+", default=["mosaic", "triton"])
    parser.add_argument("--no-peers", action="store_true", help="time this library alone")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit("This benchmark needs a GPU.")
    clock = Clock()
    bandwidth = copy_bandwidth()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, copy {bandwidth:.2f} TB/s (read plus write)")
    rows = []
    for case in CASES:
        if args.only in str(case):
            rows += run_case(case, clock, bandwidth, args)
            if args.json:
                with open(args.json, "w") as file:
                    json.dump(rows, file)


if __name__ == "__main__":
    main()
