"""Times the attention kernels on one GPU beside FlashAttention-3, torch SDPA, cuDNN and a plain copy.

    python tests/benchmarks/attention.py [--json FILE] [--only TEXT] [--runs 2]

Times are sums of the CUPTI kernel durations of one call, median of many, in microseconds: "warm" back to back, "cold"
with the L2 cache flushed before each call. Every timed result is compared with the float32 reference first. Peers that
are not installed are left out (flash_attn3_jax, torch). SDPA and cuDNN read exactly the keys of the window, without a
mask; FlashAttention-3 takes the window and the lengths, in its best number of splits.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import block_attention, merge_future_block, windowed_decode
from pallas_kernels.block_attention.xla import block_attention_xla
from pallas_kernels.windowed_decode.xla import windowed_decode_xla

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

    def copy_bandwidth(self) -> float:
        """Terabytes a second of a large copy, bytes read plus bytes written."""
        x = jnp.zeros((2048, 1024, 1024), jnp.bfloat16)
        copy = jax.jit(lambda x: x + jnp.bfloat16(1))
        time = self.microseconds(lambda: copy(x).block_until_ready(), cold=False)
        return 2 * x.nbytes / time / 1e6


def waiting(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    compiled = jax.jit(function).lower(*args).compile()
    return lambda: jax.block_until_ready(compiled(*args))


def errors(actual: Any, expected: Any) -> tuple[float, float]:
    out, lse = (np.asarray(x, np.float32) for x in actual)
    out_expected, lse_expected = (np.asarray(x, np.float32) for x in expected)
    relative = np.linalg.norm(out - out_expected) / np.linalg.norm(out_expected)
    return float(relative), float(np.abs(lse - lse_expected).max())


def ours(case: Case, inputs: dict[str, jax.Array], implementation: str) -> Iterator[tuple[str, Any, Any]]:
    """(name, launch, expected) of each of our functions."""
    i = inputs
    pages, scale = (i["k_pages"], i["v_pages"]), HEAD_DIM**-0.5
    length = i["q_start"] + case.queries
    static = dict(window=case.window, scale=scale)
    decode = functools.partial(windowed_decode, implementation=implementation, **static)
    expected_decode = functools.partial(windowed_decode_xla, **static)
    block = functools.partial(block_attention, implementation=implementation, **static)
    for order in ("shuffled", "counting"):
        args = (i["q"], *pages, i[order], i["q_start"], length)
        yield f"decode, {order} pages", waiting(decode, *args), waiting(expected_decode, *args)
    args = (i["q"], i["k_block"], i["v_block"], *pages, i["shuffled"], i["q_start"])
    expected_block = functools.partial(block_attention_xla, causal=False, **static)
    yield "block attention", waiting(block, *args), waiting(expected_block, *args)
    out, lse = expected_decode(i["q"], *pages, i["shuffled"], i["q_start"], length)
    args = (out, lse, i["q"], i["k_block"], i["v_block"])
    merge = functools.partial(merge_future_block, **static)
    yield (
        "merge",
        waiting(functools.partial(merge, implementation=implementation), *args),
        waiting(functools.partial(merge, implementation="xla"), *args),
    )


def flash_attention_3(case: Case, inputs: dict[str, jax.Array]) -> Iterator[tuple[str, Any]]:
    if importlib.util.find_spec("flash_attn3_jax") is None:
        return
    import flash_attn3_jax

    i = inputs
    window = (-1, -1) if case.window is None else (case.window - 1, case.window - 1)
    lengths = i["q_start"] + case.queries
    flat = [i[name].reshape(case.batch, case.slots, -1, HEAD_DIM) for name in ("k_pages", "v_pages")]
    for name, k, v, extra in (("contiguous", *flat, {}), ("paged", i["k_pages"], i["v_pages"], {"page_table": True})):
        for splits in (1, 2, 4, 8, 16, 32):

            def run(q, k, v, lengths, table, splits=splits, extra=extra):
                more = {"page_table": table} if extra else {}
                return flash_attn3_jax.flash_mha_with_kvcache(
                    q, k, v, cache_seqlens=lengths, window_size=window, is_causal=False, num_splits=splits, **more
                )

            try:
                yield f"FA3 {name}", waiting(run, i["q"], k, v, lengths, i["shuffled"])
            except Exception as error:
                print(f"  FA3 {name}, {splits} splits: {type(error).__name__}: {str(error)[:100]}", flush=True)


def dense_peers(case: Case, inputs: dict[str, jax.Array]) -> Iterator[tuple[str, Any]]:
    """Peers that take no page table and no lengths: they get the keys of the window and nothing else."""
    flat = [inputs[n].reshape(case.batch, case.slots, -1, HEAD_DIM)[:, : case.keys] for n in ("k_pages", "v_pages")]
    try:
        yield (
            "cuDNN through jax",
            waiting(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation="cudnn"), inputs["q"], *flat),
        )
    except Exception as error:
        print(f"  cuDNN: {type(error).__name__}: {str(error)[:200]}", flush=True)
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    tensors = [torch.from_dlpack(x).transpose(1, 2).contiguous() for x in (inputs["q"], *flat)]

    def sdpa() -> None:
        torch.nn.functional.scaled_dot_product_attention(*tensors, enable_gqa=True)
        torch.cuda.synchronize()

    yield "torch SDPA", sdpa


def run_case(case: Case, clock: Clock, bandwidth: float, implementations: list[str], runs: int) -> list[dict[str, Any]]:
    floor = case.bytes / bandwidth / 1e6
    print(f"{case}: {case.bytes / 1e6:.1f} MB, {floor:.1f} us at copy bandwidth", flush=True)
    rows: list[dict[str, Any]] = []

    def add(name: str, launch: Callable[[], Any]) -> dict[str, Any]:
        cold = [clock.microseconds(launch, cold=True) for _ in range(runs)]
        warm = [clock.microseconds(launch, cold=False) for _ in range(runs)]
        return dict(case=dataclasses.asdict(case), name=name, cold=cold, warm=warm, floor=floor)

    def show(row: dict[str, Any]) -> None:
        cold, warm = (" ".join(f"{t:6.1f}" for t in row[k]) for k in ("cold", "warm"))
        print(f"  {row['name']:36} cold {cold}   warm {warm}", flush=True)
        rows.append(row)

    inputs = make_inputs(case, seed=3)
    for implementation in implementations:
        try:
            for name, launch, expected in ours(case, inputs, implementation):
                error = errors(launch(), expected())
                if not (error[0] <= OUT_TOLERANCE and error[1] <= LSE_TOLERANCE):
                    print(f"  {implementation} {name}: WRONG, errors {error}", flush=True)
                    continue
                show({**add(f"{implementation} {name}", launch), "error": error})
        except NotImplementedError as error:
            print(f"  {error}", flush=True)
    best: dict[str, dict[str, Any]] = {}
    for name, launch in (*flash_attention_3(case, inputs), *dense_peers(case, inputs)):
        row = add(name, launch)
        if name not in best or min(row["cold"]) < min(best[name]["cold"]):
            best[name] = row
    for row in best.values():
        show(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="where to write all figures")
    parser.add_argument("--only", default="", help="run the cases whose description contains this text")
    parser.add_argument("--runs", type=int, default=2, help="medians to print for each figure")
    parser.add_argument("--implementations", nargs="+", default=["mosaic", "triton"])
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit("This benchmark needs a GPU.")
    clock = Clock()
    bandwidth = clock.copy_bandwidth()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, copy {bandwidth:.2f} TB/s (read plus write)")
    rows = []
    for case in CASES:
        if args.only in str(case):
            rows += run_case(case, clock, bandwidth, args.implementations, args.runs)
            if args.json:
                with open(args.json, "w") as file:
                    json.dump(rows, file)


if __name__ == "__main__":
    main()
