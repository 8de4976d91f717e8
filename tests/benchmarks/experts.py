"""Times `grouped_experts` at the released size on one GPU: every format, kernel by kernel, beside the XLA form.

    python tests/benchmarks/experts.py [--json FILE] [--formats mxfp8 nvfp4 bf16] [--rows 8 64 512] [--skew 0 1]

128 experts of 6144 x 3072, 4 a row, random weights made on the device, two layers in turn (bf16: one), so that nothing
of a layer is in the L2 cache when its turn comes. Times are CUPTI kernel durations, median of many calls, in
microseconds: the two kernels, and everything else of a call (routing lists, gather, sum over choices). Bytes are those
of the weights and scales of the experts that were chosen; shares are of the fastest stream measured in the same
process. Every result is first compared with the XLA form's. A row chooses the experts of the largest normal scores, to
which `--skew` times a normal popularity of each expert is added: 0 is even, as training for balance wants it.
"""

import argparse
import functools
import itertools
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention import Clock, Compiler
from jax import lax

from pallas_kernels._quantized import FORMATS
from pallas_kernels.grouped_experts.api import grouped_experts

EXPERTS, HIDDEN, INNER, CHOICES = 128, 6144, 3072, 4
ALPHA, LIMIT = 1.702, 7.0
REPEATS = 10
TOLERANCE = 2e-2  # relative norm: gate, up, inner activation and outputs are rounded to bfloat16, not all in each form
BYTES = {"bf16": 2.0, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}  # of one parameter


@jax.tree_util.register_pytree_node_class
class Weight:
    """A quantised stack, as the library takes it."""

    def __init__(self, codes: Any, scale: Any, global_scale: Any = None):
        self.codes, self.scale = codes, scale
        if global_scale is not None:
            self.global_scale, self.global_scale_op = global_scale, "multiply"

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        more = (self.global_scale,) if hasattr(self, "global_scale") else ()
        return (self.codes, self.scale, *more), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any, ...]) -> "Weight":
        return cls(*children)


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def make_stack(name: str, key: jax.Array, out: int, into: int) -> Any:
    """Random codes and scales, values of about in ** -0.5."""
    first, second = jax.random.split(key)
    if name == "bf16":
        return jax.random.normal(first, (EXPERTS, out, into), jnp.bfloat16) * jnp.bfloat16(into**-0.5)
    form = FORMATS[name]  # pyright: ignore[reportArgumentType]
    codes = jax.random.bits(first, (EXPERTS, out, form.bytes(into)), jnp.uint8)
    shape = (EXPERTS, out, into // form.block)
    if name == "mxfp8":
        middle = 127 + round(np.log2(into**-0.5 / 96))  # 96: the root mean square of random codes
        codes = jnp.where((codes & jnp.uint8(0x7F)) == 0x7F, codes - jnp.uint8(1), codes)
        scale = jax.random.randint(second, shape, middle - 3, middle + 3, jnp.int32).astype(jnp.uint8)
        return Weight(lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), scale)
    scale = jax.random.randint(second, shape, 1, 0x7F, jnp.int32).astype(jnp.uint8)
    factor = jnp.full((EXPERTS,), into**-0.5 / 300, jnp.float32)  # 300: of random codes times random scales
    return Weight(codes, lax.bitcast_convert_type(scale, jnp.float8_e4m3fn), factor)


def make_layer(name: str, seed: int) -> tuple[Any, Any, Any]:
    keys = jax.random.split(jax.random.key(seed), 3)
    sizes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    return tuple(make_stack(name, key, *size) for key, size in zip(keys, sizes, strict=True))  # pyright: ignore


def make_rows(rows: int, seed: int, skew: float = 0.0) -> tuple[jax.Array, jax.Array, jax.Array, int]:
    """x, experts, weights, and how many experts are chosen."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(rows, EXPERTS)) + skew * rng.normal(size=EXPERTS)
    experts = np.argsort(-scores, axis=1)[:, :CHOICES].astype(np.int32)
    x = jnp.asarray(rng.normal(size=(rows, HIDDEN)), jnp.bfloat16)
    weights = jnp.asarray(rng.dirichlet(np.ones(CHOICES), rows), jnp.float32)
    return x, jnp.asarray(experts), weights, len(np.unique(experts))


def split_times(clock: Clock, launches: list[Callable[[], Any]]) -> tuple[float, float, float]:
    """Microseconds of a call: everything but the two kernels, gate_up, down. Median over calls."""
    rows = []
    for several in clock.rounds(lambda: [launch() for launch in launches], REPEATS):
        each = len(several) // len(launches)
        for call in (several[i : i + each] for i in range(0, len(several), each)):
            # A backend may rename a kernel; these two are by far the longest, and gate_up comes first.
            two = sorted(sorted(range(each), key=lambda i: call[i][1])[-2:])
            outer, last = (1e3 * call[i][1] for i in two)
            rows.append((1e3 * sum(t for _, t in call) - outer - last, outer, last))
    rest, outer, last = np.median(rows, axis=0)
    return float(rest), float(outer), float(last)


def run_case(
    name: str, rows: int, skew: float, layers: list[Any], clock: Clock, bandwidth: float, args: argparse.Namespace
) -> list[dict[str, Any]]:
    inputs = [make_rows(rows, seed, skew) for seed in range(len(layers))]
    active = float(np.mean([i[3] for i in inputs]))
    size = 3 * HIDDEN * INNER * BYTES[name] * active
    print(
        f"{name}, {rows} rows, skew {skew:g}, {active:.0f} experts active: {size / 1e9:.2f} GB, "
        f"floor {size / bandwidth / 1e6:.0f} us"
    )
    compiler = Compiler()
    arguments = [(*i[:3], *layer) for i, layer in zip(inputs, layers, strict=True)]
    chosen = ["triton"] if name == "bf16" else args.implementations
    programs = {
        implementation: compiler(
            functools.partial(grouped_experts, alpha=ALPHA, limit=LIMIT, implementation=implementation), *arguments[0]
        )
        for implementation in ["xla", *chosen]
    }
    expected, table = None, []
    for implementation, program in programs.items():
        try:
            compiled = program.result()
            result = np.asarray(compiled(*arguments[0]), np.float64)
            if expected is None:
                expected = result
            error = float(np.linalg.norm(result - expected) / np.linalg.norm(expected))
            if not error <= TOLERANCE:
                raise ArithmeticError(f"wrong by {error}")
            if implementation == "xla" and args.no_xla:
                continue
            launches = [lambda a=a, c=compiled: jax.block_until_ready(c(*a)) for a in arguments]
            if implementation == "xla":  # a loop of many kernels
                total = clock.microseconds(launches[0])[1]
                print(f"  xla     {total:8.0f} us", flush=True)
                table.append(dict(format=name, rows=rows, skew=skew, implementation="xla", us=total))
                continue
            runs = [split_times(clock, launches) for _ in range(2)]
        except Exception as problem:
            print(f"  {implementation}: {type(problem).__name__}: {str(problem)[:200]}", flush=True)
            continue
        for rest, outer, last in runs:
            kernels, whole = (size / t / 1e6 for t in (outer + last, outer + last + rest))
            parts = f"gate_up {outer:7.1f} ({2 / 3 * size / outer / 1e6 / bandwidth:4.0%})   down {last:7.1f}"
            parts += f" ({1 / 3 * size / last / 1e6 / bandwidth:4.0%})   rest {rest:5.1f}"
            print(
                f"  {implementation:7} {rest + outer + last:8.1f} us   {parts}   {kernels:.2f} TB/s = "
                f"{kernels / bandwidth:4.0%} of that stream, all counted {whole / bandwidth:4.0%}   error {error:.1e}",
                flush=True,
            )
        rest, outer, last = np.mean(runs, axis=0)
        table.append(
            dict(
                format=name, rows=rows, skew=skew, implementation=implementation, active=active, bytes=size, rest=rest,
                gate_up=outer, down=last, error=error, bandwidth=bandwidth,
            )
        )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="where to write all figures")
    parser.add_argument("--formats", nargs="+", default=["nvfp4", "mxfp8", "bf16"], choices=list(BYTES))
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 64, 512])
    parser.add_argument("--skew", nargs="+", type=float, default=[0.0], help="weights of the experts' popularity")
    parser.add_argument("--implementations", nargs="+", default=["mosaic", "triton"])
    parser.add_argument("--no-xla", action="store_true", help="do not time the XLA form, only compare with it")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds after which no case is begun")
    args, begin = parser.parse_args(), time.perf_counter()
    if jax.default_backend() != "gpu":
        sys.exit("This benchmark needs a GPU.")
    clock = Clock()
    bandwidth = clock.copy_bandwidth()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, fastest stream measured {bandwidth:.2f} TB/s")
    table = []
    for name in args.formats:
        layers = [make_layer(name, seed) for seed in range(1 if name == "bf16" else 2)]
        for rows, skew in itertools.product(args.rows, args.skew):
            if time.perf_counter() - begin > args.time_limit:
                print(f"stopped by the time limit of {args.time_limit:.0f} s")
                return
            table += run_case(name, rows, skew, layers, clock, bandwidth, args)
            if args.json:
                with open(args.json, "w") as file:
                    json.dump(table, file)
        del layers


if __name__ == "__main__":
    main()
