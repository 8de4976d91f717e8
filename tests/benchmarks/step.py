"""Times one draft-verify step of the real geometry on one GPU, whole and by part, beside the bytes it has to move.

    python tests/benchmarks/step.py [--layers 6] [--batch 1 8 64] [--context 4096 32768] [--weights native|bf16]
    python tests/benchmarks/step.py --graphs --loop 20        # wall time alone, with XLA's command buffers
    python tests/benchmarks/step.py --tiny                    # the same path in a minute on a CPU, wall clock

The target is a slice of the released geometry (one dense layer, the rest MoE), the drafter is the whole released one;
random weights are made on the device in their storage formats. Acceptance is forced to 2.6 of 7 drafts, which leaves
out the accepting of drafts (it is in the part "filters and verification"). Caches are filled with random keys instead
of a prefill. Times are sums of the CUPTI kernel durations of one call, median of many: of the whole step back to back,
of a part with the L2 cache flushed before it; "wall" is the time from call to call, with `--loop` also that of a step
of a program that takes many, as `generate` does. The profiler cannot tell the
kernels of a command buffer apart, so these are off unless `--graphs` is given, which leaves the kernel times out. A
floor is bytes over the fastest stream that this process measured: weights (of the experts that were chosen), the keys
and values that the selection or the window names, index keys, and logits. The second floor is the larger of that and
the time of the matrix products at `--peak`: what many rows are bound by.

Whatever has been measured is printed, and with `--json` written, at once; `--time-limit` ends between two rows.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

# Set before jax is imported: `attention` would turn the search for the best matrix products off, and halve the memory.
GRAPHS = "--graphs" in sys.argv
os.environ.setdefault("XLA_FLAGS", "" if GRAPHS else "--xla_gpu_enable_command_buffer=")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")  # nothing else runs, and weights and caches are large
START = time.perf_counter()

# ruff: noqa: E402
import attention as timing
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from real_size import configs, fill, formats
from step_parts import Part, nbytes, parts, random_like

import dspark_jax as ds

FORCED = 2.6
LONGEST = 12  # kernels of the whole step that are listed by name


def since_start() -> float:
    return time.perf_counter() - START


class WallClock:
    """Stands in for the profiler where there is no GPU."""

    def microseconds(self, launch: Callable[[], Any]) -> tuple[float, float]:
        launch()
        times = []
        for _ in range(3):
            start = time.perf_counter()
            launch()
            times.append(time.perf_counter() - start)
        return (1e6 * float(np.median(times)),) * 2

    def record(self, run: Callable[[], Any]) -> list[tuple[str, float]]:
        run()
        return []


class OutOfTime(Exception):
    """The time limit has passed."""


class Table:
    """Rows of figures, written to a file (if there is one) as they come, until the time limit."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.rows = options, []

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        if self.options.json:
            with open(self.options.json, "w") as file:
                json.dump(self.rows, file, indent=1)

    def check(self) -> None:
        if since_start() > self.options.time_limit:
            raise OutOfTime


def make_state(model: ds.Model, batch: int, context: int, config: ds.GenerateConfig, params: ds.SamplingParams):
    """A running state behind `context` tokens, with random caches, as a prefill would leave it."""
    keys, lengths = ds.request_keys(range(batch)), jnp.full((batch,), context, jnp.int32)
    prompts = jax.ShapeDtypeStruct((batch, context), jnp.int32)
    like = jax.eval_shape(functools.partial(ds.prefill, config=config), model, prompts, lengths, keys, params)
    caches = dict(
        cache=random_like(like.cache, 5),
        draft_cache=None if like.draft_cache is None else random_like(like.draft_cache, 6),
    )
    rest = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), replace(like, keys=None, cache=None, draft_cache=None))
    anchor = jnp.arange(batch, dtype=jnp.int32) % model.target.config.vocab_size
    running = jnp.full((batch,), ds.FinishReason.RUNNING.value, like.finish_reason.dtype)
    # Own copies of everything: a step gives its whole state away.
    params = jax.tree.map(jnp.array, params)
    return replace(
        rest, keys=keys, params=params, anchor=anchor, position=lengths, step=rest.step + 1, finish_reason=running,
        **caches,
    )  # fmt: skip


def kernel_time(clock: Any, launch: Callable[[], Any], *, cold: bool) -> float:
    """Microseconds of the kernels of a call; their mean where the calls do not all run the same ones."""
    try:
        return clock.microseconds(launch)[0 if cold else 1]
    except RuntimeError as problem:
        print(f"  mean of {timing.REPEATS} warm calls: {str(problem)[:80]}", flush=True)
    records = clock.record(lambda: [launch() for _ in range(timing.REPEATS)])
    return 1e3 * sum(milliseconds for _, milliseconds in records) / timing.REPEATS


class Programs:
    """Compiles side by side. XLA runs kernels to choose among them, so nothing may be timed before `ready`."""

    def __init__(self) -> None:
        self.pool, self.futures = ThreadPoolExecutor(8), []

    def __call__(self, function: Any, *args: Any, **static: Any) -> Future[Any]:
        try:
            future = self.pool.submit(function.lower(*args, **static).compile)
        except Exception as problem:  # a kernel that does not lower is one row less
            future = Future()
            future.set_exception(problem)
        self.futures.append(future)
        return future

    def ready(self) -> None:
        wait(self.futures)
        self.pool.shutdown()


def lower_bound(part: Part, bandwidth: float, peak: float) -> float:
    """Microseconds of a part's bytes or of its products, whichever is more."""
    return max(part.nbytes / bandwidth / 1e6, part.operations / peak / 1e6)


def by_name(records: list[tuple[str, float]]) -> dict[str, tuple[int, float]]:
    """Of each kernel in a record of launches, in milliseconds: how often it ran and its microseconds together."""
    names: dict[str, tuple[int, float]] = {}
    for name, milliseconds in records:
        count, total = names.get(name, (0, 0.0))
        names[name] = count + 1, total + 1e3 * milliseconds
    return names


def time_part(part: Part, program: Future[Any], clock: Any) -> tuple[float, dict[str, tuple[int, float]]]:
    """-> microseconds cold, and each kernel of one warm call."""
    run, carry = program.result(), [part.carry]

    def launch() -> None:
        carry[0], out = run(carry[0], *part.args)
        jax.block_until_ready(out)

    launch()
    return kernel_time(clock, launch, cold=True), by_name(clock.record(launch))


@dataclasses.dataclass(frozen=True)
class Timed:
    """A whole step: microseconds of kernels and from call to call; of each kernel, how often it ran and its time."""

    us: float
    wall: float
    names: dict[str, tuple[int, float]]

    @property
    def kernels(self) -> int:
        return sum(count for count, _ in self.names.values())


def time_step(program: Future[Any], model: ds.Model, state: Any, clock: Any, steps: int) -> Timed:
    run, held = program.result(), [state]

    def launch() -> None:
        held[0], committed = run(model, held[0])
        jax.block_until_ready(committed)

    launch(), launch()
    kernels, names = math.nan, {}
    if not GRAPHS:
        kernels = kernel_time(clock, launch, cold=False)
        names = by_name(clock.record(launch))
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        launch()
        times.append(time.perf_counter() - start)
    return Timed(kernels, 1e6 * float(np.median(times)), names)


def time_loop(program: Future[Any], model: ds.Model, state: Any, steps: int) -> float:
    """Microseconds of a step of a program that takes so many: what `generate` does, without a call for each."""
    run, held, times = program.result(), jax.block_until_ready(program.result()(model, state)), []
    for _ in range(3):
        start = time.perf_counter()
        held = jax.block_until_ready(run(model, held))
        times.append(time.perf_counter() - start)
    return 1e6 * float(np.median(times)) / steps


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch size and context, with the programs of its whole steps and of their parts."""

    name: dict[str, int]
    fresh: Callable[[ds.GenerateConfig], Any]
    steps: tuple[tuple[ds.GenerateConfig, Future[Any]], ...]  # with drafts, without
    loops: tuple[Future[Any], ...]  # the same, many in one program
    pieces: list[Part]
    compiled: list[Future[Any]]

    @classmethod
    def prepare(cls, model: ds.Model, batch: int, context: int, programs: Programs, options: argparse.Namespace):
        params = ds.SamplingParams(temperature=1.0, top_p=options.top_p)
        make = functools.partial(ds.GenerateConfig, max_new_tokens=512, stop_token_ids=())
        config, plain = make(benchmark_forced_acceptance=FORCED), make(draft="none")

        def fresh(config: ds.GenerateConfig) -> Any:
            return make_state(model, batch, context, config, params)

        steps = tuple((c, programs(ds.step, model, fresh(c), config=c)) for c in (config, plain))
        loops = ()
        if options.loop:

            def loop(model: ds.Model, state: Any, config: ds.GenerateConfig) -> Any:
                return lax.fori_loop(0, options.loop, lambda _, state: ds.step(model, state, config=config)[0], state)

            run = jax.jit(loop, static_argnames="config", donate_argnums=1)
            loops = tuple(programs(run, model, fresh(c), config=c) for c in (config, plain))
        pieces = [] if GRAPHS else parts(model, fresh(config), config, context)
        timed = [] if options.whole else pieces
        compiled = [programs(jax.jit(part.function, donate_argnums=0), part.carry, *part.args) for part in timed]
        return cls(dict(batch=batch, context=context), fresh, steps, loops, pieces, compiled)

    def time(self, model: ds.Model, clock: Any, bandwidth: float, table: Table) -> None:
        options = table.options
        table.check()
        print(f"{', '.join(f'{k} {v}' for k, v in self.name.items())}, at {since_start():.0f} s", flush=True)
        floor = sum(part.times * part.nbytes for part in self.pieces) / bandwidth / 1e6 or math.nan
        both = sum(part.times * lower_bound(part, bandwidth, options.peak) for part in self.pieces) or math.nan
        (config, whole), (plain, without) = self.steps
        found = time_step(whole, model, self.fresh(config), clock, options.steps)
        print(
            f"  {'whole step, 7 drafts':34}{found.us:10.1f} us in {found.kernels} kernels, wall {found.wall:.1f} us, "
            f"floor {floor:.1f} us, ratio {found.us / floor:.2f}, of wall {found.wall / floor:.2f}; "
            f"with products {both:.1f} us, ratio {found.us / both:.2f}",
            flush=True,
        )
        table.add(
            **self.name, part="whole", us=found.us, kernels=found.kernels, wall=found.wall, floor=floor, both=both,
            names=found.names,
        )  # fmt: skip
        for name, (count, total) in sorted(found.names.items(), key=lambda item: -item[1][1])[:LONGEST]:
            print(f"    {count:4} x {name[:70]:70} {total:9.1f} us", flush=True)
        found = time_step(without, model, self.fresh(plain), clock, options.steps)
        print(
            f"  {'whole step, no drafts':34}{found.us:10.1f} us in {found.kernels} kernels, wall {found.wall:.1f} us",
            flush=True,
        )
        table.add(**self.name, part="plain", us=found.us, kernels=found.kernels, wall=found.wall)
        for name, (config, _), program in zip(("7 drafts", "no drafts"), self.steps, self.loops, strict=False):
            wall = time_loop(program, model, self.fresh(config), options.loop)
            print(f"  {f'{options.loop} steps in one program, {name}':38} wall {wall:10.1f} us a step", flush=True)
            table.add(**self.name, part=f"loop, {name}", steps=options.loop, wall=wall)
        if self.compiled:
            time_parts(self.pieces, self.compiled, self.name, clock, bandwidth, table)


def time_parts(
    pieces: list[Part],
    compiled: list[Future[Any]],
    case: dict[str, int],
    clock: Any,
    bandwidth: float,
    table: Table,
) -> None:
    spent: dict[bool, float] = {True: 0.0, False: 0.0}
    peak = table.options.peak
    for part, program in zip(pieces, compiled, strict=True):
        table.check()
        at_best, both = part.nbytes / bandwidth / 1e6, lower_bound(part, bandwidth, peak)
        try:
            time_us, names = time_part(part, program, clock)
            count = sum(times for times, _ in names.values())
        except Exception as problem:
            print(f"  {part.name:34} {type(problem).__name__}: {str(problem)[:200]}", flush=True)
            spent[part.drafter] = math.nan
            continue
        spent[part.drafter] += part.times * time_us
        print(
            f"  {part.name:34}{time_us:10.1f} us x {part.times} in {count:4} kernels {part.nbytes / 1e6:9.1f} MB, "
            f"floor {at_best:8.1f} us, ratio {time_us / at_best:6.2f}; with products {both:8.1f} us, "
            f"ratio {time_us / both:6.2f}",
            flush=True,
        )
        table.add(
            **case, part=part.name, us=time_us, times=part.times, kernels=count, floor=at_best, both=both, names=names,
        )  # fmt: skip
    for name, drafter in (("drafter", True), ("target", False)):
        mine = [part for part in pieces if part.drafter == drafter]
        floor = sum(part.times * part.nbytes for part in mine) / bandwidth / 1e6
        both = sum(part.times * lower_bound(part, bandwidth, peak) for part in mine)
        print(
            f"  sum of the parts of the {name:10}{spent[drafter]:10.1f} us, floor {floor:8.1f} us, "
            f"ratio {spent[drafter] / floor:5.2f}; with products {both:8.1f} us, ratio {spent[drafter] / both:5.2f}",
            flush=True,
        )
        table.add(**case, part=f"sum of the {name}", us=spent[drafter], floor=floor, both=both)


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends with a sentence where the options do not fit, before anything is made."""
    least = dict(layers=5, context=1, batch=1, steps=1, loop=0)
    for name, lowest in least.items():
        given = getattr(options, name)
        if min(given if isinstance(given, list) else [given]) < lowest:
            parser.error(f"--{name} must be at least {lowest}, got {given}")
    if not 0 < options.top_p <= 1:
        parser.error(f"--top-p must be above 0 and at most 1, got {options.top_p}")
    if options.peak <= 0:
        parser.error(f"--peak must be above 0, got {options.peak}")
    if options.json and not pathlib.Path(options.json).absolute().parent.is_dir():
        parser.error(f"--json {options.json}: its folder does not exist")
    if jax.default_backend() != "gpu" and not options.tiny:
        parser.error("this benchmark needs a GPU; --tiny runs on a CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6, help="target layers, at least 5; default 6")
    parser.add_argument("--weights", default="native", choices=("native", "bf16"))
    parser.add_argument("--experts", default="nvfp4/divide", choices=("nvfp4/divide", "mxfp8"))
    parser.add_argument("--context", type=int, nargs="+", default=[4096])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--top-p", type=float, default=0.95, help="1: no filter but the temperature")
    parser.add_argument("--whole", action="store_true", help="leave out the parts")
    parser.add_argument("--graphs", action="store_true", help="command buffers on, wall time alone")
    parser.add_argument("--loop", type=int, default=0, metavar="N", help="time N steps in one program, too")
    parser.add_argument("--peak", type=float, default=989.0, help="TFLOP/s of the matrix units; default: H200, bf16")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds after which no row is begun")
    parser.add_argument("--json", help="where to write all figures")
    parser.add_argument("--tiny", action="store_true", help="small widths, for a CPU")
    options = parser.parse_args()
    check(parser, options)
    target_config, drafter_config = configs(options.layers, options.tiny)
    kinds = formats(target_config, drafter_config, options.experts) if options.weights == "native" else {}
    gpu = jax.default_backend() == "gpu"
    clock = timing.Clock() if gpu else WallClock()
    bandwidth = clock.copy_bandwidth() if gpu else math.nan
    kind = jax.devices()[0].device_kind
    print(f"{kind}, jax {jax.__version__}, stream {bandwidth:.2f} TB/s, {options.layers} layers, {options.weights}")
    model = ds.Model(
        target=fill(nnx.eval_shape(lambda: ds.MiniMaxTarget(target_config, formats=kinds)), jax.random.key(0)),
        drafter=fill(nnx.eval_shape(lambda: ds.DSparkDrafter(drafter_config, formats=kinds)), jax.random.key(1)),
    )
    jax.block_until_ready(model)
    print(
        f"target {nbytes(model.target) / 1e9:.2f} GB, drafter {nbytes(model.drafter) / 1e9:.2f} GB, "
        f"made after {since_start():.0f} s",
        flush=True,
    )
    table = Table(options)
    try:
        for context in options.context:  # the short one first, at every batch
            for batch in options.batch:
                table.check()
                programs = Programs()
                case = Case.prepare(model, batch, context, programs, options)
                programs.ready()
                print(f"compiled at {since_start():.0f} s", flush=True)
                case.time(model, clock, bandwidth, table)
    except OutOfTime:
        print(f"stopped after {since_start():.0f} s, the time limit is {options.time_limit:.0f} s")


if __name__ == "__main__":
    main()
