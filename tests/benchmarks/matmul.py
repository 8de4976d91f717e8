"""Times `quantized_matmul` on a GPU beside XLA: bfloat16 weights, and dequantise-then-multiply.

    python tests/benchmarks/matmul.py                                  # the table
    python tests/benchmarks/matmul.py --sweep --only "mxfp8 8192x6144" # every tiling that is worth a look, best first

Kernel durations by CUPTI, the median of 20 rounds over 4 to 8 weights in turn, so that none is found in the cache.
"whole" is every kernel of the call, "kernel" without those that only reorder x or sum parts: in a model the first is
part of whatever makes x. Terabytes and shares count codes and scales. Results are compared with float32.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

os.environ.setdefault("XLA_FLAGS", "")  # XLA is to choose its best product, unlike in attention.py

import jax
import jax.numpy as jnp
import numpy as np
from attention import REPEATS, Clock, Compiler

from pallas_kernels import _quantized
from pallas_kernels._quantized import FORMATS, Format, Operands
from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.quantized_matmul.tuning import choose_order

SHAPES = [(8192, 6144), (6144, 8192), (12288, 6144)]  # out, in
ROWS = [1, 8, 64, 512]
BYTES = 200e6  # of the weights that are taken in turn, about
KERNEL = "quantized_matmul"  # in the names of the kernels
TOLERANCE = 4e-3  # relative norm, bfloat16 results


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weight:
    codes: Any
    scale: Any
    global_scale: Any
    global_scale_op: str = dataclasses.field(metadata=dict(static=True), default="multiply")


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def make_weight(form: Format, out: int, inputs: int, seed: jax.Array) -> Weight:
    """Random codes and scales without NaN."""
    first, second = jax.random.split(jax.random.key(seed))
    bits = jax.random.bits(first, (out, form.bytes(inputs)), jnp.uint8)
    shape, f8 = (out, inputs // form.block), jnp.float8_e4m3fn
    if form is _quantized.MXFP8:
        bits = jnp.where((bits & 0x7F) == 0x7F, bits - 1, bits)
        scale = jax.random.randint(second, shape, 112, 122, jnp.int32).astype(jnp.uint8)
        return Weight(jax.lax.bitcast_convert_type(bits, f8), scale, jnp.float32(1))
    scale = jax.random.randint(second, shape, 8, 127, jnp.int32).astype(jnp.uint8)
    return Weight(bits, jax.lax.bitcast_convert_type(scale, f8), jnp.float32(0.0123))


def bf16_dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum("ti,oi->to", x, weight)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line: a program, compiled in the background, over some weights in turn."""

    name: str
    program: Future[Any]
    x: jax.Array
    weights: list[Any]
    bytes: float
    expected: Any = None

    def measure(self, clock: Clock) -> tuple[float, float]:
        """Microseconds of a call: of the multiplying kernels, and of all."""
        compiled = self.program.result()
        if self.expected is not None:
            actual = np.asarray(compiled(self.x, self.weights[0]), np.float32)
            error = float(np.linalg.norm(actual - self.expected) / np.linalg.norm(self.expected))
            if not error <= TOLERANCE:
                raise ArithmeticError(f"wrong by {error:.2e}")

        def launch() -> None:
            jax.block_until_ready([compiled(self.x, w) for w in self.weights])

        launch()

        def rounds() -> None:
            for _ in range(REPEATS):
                launch()

        records = clock.record(rounds)
        a_round, extra = divmod(len(records), REPEATS)
        if extra:
            raise RuntimeError(f"{len(records)} kernels in {REPEATS} rounds: they do not all run the same kernels.")
        found = [records[i : i + a_round] for i in range(0, len(records), a_round)]
        scale = 1e3 / len(self.weights)
        ours = any(KERNEL in name for name, _ in found[0])

        def total(run: list[tuple[str, float]], every: bool) -> float:
            return scale * sum(t for name, t in run if every or not ours or KERNEL in name)

        kernel, whole = (float(np.median([total(run, every) for run in found])) for every in (False, True))
        return kernel, whole


class Shape:
    """Weights of one shape and format, and what they should give."""

    def __init__(self, form: Format, out: int, inputs: int, compiler: Compiler):
        self.form, self.out, self.inputs, self.compiler = form, out, inputs, compiler
        self.bytes = out * form.bytes(inputs) + out * inputs // form.block
        count = int(min(8, max(4, -(-BYTES // self.bytes))))
        self.weights = [make_weight(form, out, inputs, jnp.int32(seed)) for seed in range(count)]
        self.x = jax.random.normal(jax.random.key(out), (max(ROWS), inputs), jnp.bfloat16)

    @functools.cached_property
    def expected(self) -> np.ndarray:
        """[512, out] in float32 through exact bfloat16 weights."""
        parts = _quantized.take_apart(self.weights[0])
        plain = Operands(parts.format, parts.codes, parts.scale, jnp.float32(parts.format.factor))

        def product(x: jax.Array, plain: Any, factor: jax.Array) -> jax.Array:
            weight = _quantized.dequantize(Operands(parts.format, *plain), jnp.bfloat16)
            return jnp.einsum("ti,oi->to", x, weight, preferred_element_type=jnp.float32) * factor[None, None]

        factor = parts.factor / jnp.float32(parts.format.factor)
        return np.asarray(jax.jit(product)(self.x, (plain.codes, plain.scale, plain.factor), factor))

    def entry(self, name: str, rows: int, function: Callable[..., jax.Array]) -> Entry:
        x = self.x[:rows]
        program = self.compiler(function, x, self.weights[0])
        return Entry(name, program, x, self.weights, self.bytes, self.expected[:rows])

    def implementations(self, rows: int, with_xla: bool) -> Iterator[Entry]:
        best = choose_order(self.form, rows, self.out)[0]
        for name in ("mosaic", "triton", "xla") if with_xla else ("mosaic", "triton"):
            call = functools.partial(quantized_matmul, implementation=name)
            label = f"{name}{' *' if name == best else ''}" if name != "xla" else "xla: dequantise + dot"
            yield self.entry(label, rows, call)

    def sweep(self, rows: int) -> Iterator[Entry]:
        from pallas_kernels import _quantized_mosaic, _quantized_triton
        from pallas_kernels.quantized_matmul.mosaic_sm90 import quantized_matmul_mosaic
        from pallas_kernels.quantized_matmul.triton import quantized_matmul_triton
        from pallas_kernels.quantized_matmul.tuning import Candidate

        def through(function: Callable[..., jax.Array], **static: Any) -> Callable[..., jax.Array]:
            def call(x: jax.Array, weight: Weight) -> jax.Array:
                parts = _quantized.take_apart(weight)
                return function(x, parts.codes, parts.scale, parts.factor, form=parts.format, **static)

            return call

        for warpgroups, split, tokens, step in itertools.product(
            (1, 2, 3, 4), (1, 2, 4), TOKENS[rows], (64, 128, 256, 512)
        ):
            if warpgroups * split > 4 or (rows <= 64 and warpgroups > 2) or (rows > 64 and split > 1):
                continue
            try:
                tiling = Candidate(warpgroups=warpgroups, split=split, tokens=tokens, step=step).tiling(
                    rows, self.form, self.inputs
                )
                _quantized_mosaic.plan(self.form, tiling, self.inputs, self.out)
            except NotImplementedError:
                continue
            yield self.entry(f"mosaic {_short(tiling)}", rows, through(quantized_matmul_mosaic, tiling=tiling))
        tokens = max(8, 1 << (rows - 1).bit_length())
        for features, step, splits, warps, stages in TRITON_FEW if rows <= 64 else TRITON_MANY:
            step = step * self.form.per_byte if rows <= 8 else step
            tiling = _quantized_triton.Tiling(
                features=features, tokens=min(tokens, 128), step=step, splits=splits, warps=warps, stages=stages
            )
            yield self.entry(f"triton {_short(tiling)}", rows, through(quantized_matmul_triton, tiling=tiling))


TOKENS = {1: (8,), 8: (8,), 64: (32, 64), 512: (64, 88, 104, 128, 256)}
TRITON_FEW = [  # features, bytes of a step, splits, warps, stages
    (64, 256, 1, 4, 4), (64, 256, 1, 4, 6), (64, 256, 2, 4, 4), (64, 128, 1, 4, 6), (32, 256, 1, 4, 4),
    (32, 256, 1, 2, 4), (32, 256, 2, 4, 4), (16, 256, 1, 4, 4), (16, 512, 1, 4, 3), (32, 512, 1, 4, 3),
]  # fmt: skip
TRITON_MANY = [(128, 64, 1, 8, 3), (128, 64, 1, 4, 3), (64, 64, 1, 4, 4), (128, 128, 1, 8, 2)]


def _short(tiling: Any) -> str:
    return " ".join(f"{key}={value}" for key, value in dataclasses.asdict(tiling).items())


def run(title: str, entries: list[Entry], clock: Clock, bandwidth: float, best_first: bool) -> list[dict[str, Any]]:
    rows = []
    for entry in entries:
        try:
            kernel, whole = entry.measure(clock)
        except Exception as problem:
            print(f"  {title} {entry.name}: {type(problem).__name__}: {str(problem)[:200]}", flush=True)
            continue
        speed = entry.bytes / kernel / 1e6
        rows.append(dict(title=title, name=entry.name, kernel=kernel, whole=whole, tbs=speed, share=speed / bandwidth))
    for row in sorted(rows, key=lambda row: row["whole"]) if best_first else rows:
        print(
            f"{title:26} {row['name']:24} kernel {row['kernel']:6.1f} us  whole {row['whole']:6.1f} us  "
            f"{row['tbs']:5.2f} TB/s  {row['share']:4.0%}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="where to write all figures")
    parser.add_argument("--only", default="", help="run the lines whose title (format, shape) contains this text")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, choices=ROWS)
    parser.add_argument("--sweep", action="store_true", help="try tilings instead of printing the table")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit("This benchmark needs a GPU.")
    started = time.time()
    compiler, lines = Compiler(), []
    for out, inputs in SHAPES:
        for form in FORMATS.values():
            title = f"{form.name} {out}x{inputs}"
            if args.only not in title:
                continue
            shape = Shape(form, out, inputs, compiler)
            for rows in args.rows:
                # Dequantising takes the same time whatever the shape: one shows it.
                entries = shape.sweep(rows) if args.sweep else shape.implementations(rows, (out, inputs) == SHAPES[0])
                lines.append((f"{title} T={rows}", list(entries)))
        if args.only in (title := f"bf16 {out}x{inputs}") and not args.sweep:
            weights = [jax.random.normal(jax.random.key(i), (out, inputs), jnp.bfloat16) for i in range(4)]
            for rows in args.rows:
                x = jax.random.normal(jax.random.key(rows), (rows, inputs), jnp.bfloat16)
                entry = Entry("xla dot", compiler(bf16_dot, x, weights[0]), x, weights, 2 * out * inputs)
                lines.append((f"{title} T={rows}", [entry]))
    wait([entry.program for _, entries in lines for entry in entries])  # XLA runs kernels while it chooses
    print(f"compiled after {time.time() - started:.0f} s", flush=True)
    clock = Clock()
    bandwidth = clock.copy_bandwidth()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, fastest stream measured {bandwidth:.2f} TB/s")
    results = []
    for title, entries in lines:
        results += run(title, entries, clock, bandwidth, args.sweep)
    print(f"{time.time() - started:.0f} s")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
