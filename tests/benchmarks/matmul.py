"""Times `quantized_matmul` on a GPU beside XLA: bfloat16 weights, and dequantise-then-multiply.

    python tests/benchmarks/matmul.py [--json FILE] [--time-limit 100]  # the table, most important lines first
    python tests/benchmarks/matmul.py --sweep [--only nvfp4]            # MXFP8 tilings for up to 8 rows, about 50 s
    python tests/benchmarks/matmul.py --sweep --rows 512                # for 512 rows, about 30 s

Kernel durations by CUPTI, the median of 20 rounds over 4 to 8 weights in turn, so that none is found in the cache.
"whole" is every kernel of the call, "kernel" without those that only reorder x or sum parts. In a model XLA fuses the
reorder into what makes x: "behind a norm" (or a SwiGLU) is the whole of both together less the norm alone. Terabytes
and shares count codes and scales. Results are compared with float32 products of some rows with some outputs. Each line
is printed, and written to the JSON file, as soon as it is known; `*` marks the implementation that is chosen by itself.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

os.environ.setdefault("XLA_FLAGS", "")  # XLA is to choose its best product, unlike in attention.py

import jax
import jax.numpy as jnp
import numpy as np
from attention import REPEATS, Clock, Compiler

import pallas_kernels
from pallas_kernels import _quantized, _quantized_mosaic, _quantized_triton
from pallas_kernels._quantized import FORMATS, MXFP8, NVFP4, Format
from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.quantized_matmul.tuning import Candidate, choose_order

BYTES = 200e6  # of the weights that are taken in turn, about
KERNEL = "quantized_matmul"  # in the names of the kernels
TOLERANCE = 4e-3  # relative norm, bfloat16 results
MOST_ROWS, CHECKED = 4096, 32  # rows of x; rows from either end that are compared
OUTPUTS = 384  # outputs that are compared
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
TUNING_SECONDS = 45  # for programs that XLA tunes by running kernels, before the clock starts
STUCK_SECONDS = 25  # a line that takes longer never ends

ALL, FEW = (8, 64, 512, 1, 4096), (8, 64, 1, 512)
# format, out, in, rows, what to time: implementations (Triton up to 64 rows), XLA, bfloat16, what may stand before.
LINES: list[tuple[Format, int, int, tuple[int, ...], tuple[str, ...]]] = [
    (MXFP8, 8192, 6144, ALL, ("mosaic", "triton", "norm", "bf16")),
    (MXFP8, 6144, 8192, ALL, ("mosaic", "triton", "bf16")),
    (MXFP8, 6144, 12288, FEW, ("mosaic", "triton", "swiglu")),
    (MXFP8, 12288, 6144, FEW, ("mosaic", "triton")),
    (NVFP4, 8192, 6144, ALL, ("mosaic", "triton")),
    (MXFP8, 8192, 6144, (8,), ("xla",)),
    (MXFP8, 512, 6144, FEW, ("mosaic", "triton")),
    (MXFP8, 3072, 6144, FEW, ("mosaic", "triton")),
    (MXFP8, 6144, 3072, FEW, ("mosaic", "triton")),
    (NVFP4, 6144, 8192, ALL, ("mosaic",)),
    (NVFP4, 8192, 6144, (8,), ("xla",)),
]  # fmt: skip
SWEPT = [(6144, 8192), (12288, 6144), (6144, 12288), (3072, 6144)]
SWEPT_MANY = [(6144, 8192), (8192, 6144)]
# Rows -> candidates of the Mosaic kernel: warpgroups, split, tokens, bytes of a row in a step.
MOSAIC = {
    8: [(1, 4, 8, 256), (1, 2, 8, 256), (2, 2, 8, 256), (1, 4, 8, 128), (1, 2, 8, 128)],
    64: [(1, 2, 64, 128), (2, 1, 64, 128), (1, 4, 64, 64), (1, 2, 32, 128), (2, 2, 64, 64)],
    512: [(4, 1, 128, 128), (4, 1, 128, 64), (3, 1, 128, 128), (3, 1, 128, 64), (2, 1, 256, 64), (2, 1, 256, 128),
          (4, 1, 104, 128), (2, 1, 128, 128)],
}  # fmt: skip
# Rows -> tilings of the Triton kernel: features, bytes of a row in a step, splits, warps, stages.
TRITON = {
    8: [(64, 256, 1, 4, 5), (32, 256, 1, 4, 4), (32, 256, 1, 2, 4), (64, 256, 2, 4, 4), (16, 512, 1, 4, 3)],
    64: [(64, 128, 1, 4, 4), (64, 128, 2, 4, 4), (32, 128, 1, 4, 4)],
    512: [(128, 64, 1, 8, 3), (128, 128, 1, 8, 2)],
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weight:
    codes: Any
    scale: Any
    global_scale: Any
    global_scale_op: str = dataclasses.field(metadata=dict(static=True), default="multiply")


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def make_weight(form: Format, out: int, inputs: int, bits: jax.Array) -> Weight:
    """Random codes and scales without NaN, cut from random bytes."""
    f8, (codes_shape, scale_shape) = jnp.float8_e4m3fn, ((out, form.bytes(inputs)), (out, inputs // form.block))
    codes = bits[: out * form.bytes(inputs)].reshape(codes_shape)
    byte = bits[-out * inputs // form.block :].reshape(scale_shape)
    if form is MXFP8:
        codes = jnp.where((codes & 0x7F) == 0x7F, codes - 1, codes)
        return Weight(jax.lax.bitcast_convert_type(codes, f8), 112 + byte % 10, jnp.float32(1))
    return Weight(codes, jax.lax.bitcast_convert_type(8 + byte % 119, f8), jnp.float32(0.0123))


def values(weight: Weight, outputs: np.ndarray) -> np.ndarray:
    """Rows `outputs` of a weight in float32."""
    codes, scale = (np.asarray(a)[outputs] for a in (weight.codes, weight.scale))
    if codes.dtype != np.uint8:
        power = np.exp2(scale.astype(np.float32) - 127)
        return codes.astype(np.float32) * np.repeat(power, MXFP8.block, axis=1)
    pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(outputs), -1)
    scale = np.repeat(scale.astype(np.float32), NVFP4.block, axis=1)
    return np.concatenate([E2M1, -E2M1])[pairs] * scale * np.float32(weight.global_scale)


def bf16_dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum("ti,oi->to", x, weight)


def norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def swiglu(x: jax.Array) -> jax.Array:
    gate, up = jnp.minimum(x.astype(jnp.float32), 7.0), jnp.clip(x[:, ::-1].astype(jnp.float32), -7.0, 7.0)
    return (gate * jax.nn.sigmoid(1.702 * gate) * (up + 1.0)).astype(x.dtype)


BEFORE = {"norm": norm, "swiglu": swiglu}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One line: a program, compiled in the background. `before` is what makes x in it, timed alone and taken off."""

    title: str
    name: str
    form: Format | None
    out: int
    inputs: int
    rows: int
    program: Future[Any]
    before: Future[Any] | None = None

    @property
    def shape(self) -> tuple[Format | None, int, int]:
        return self.form, self.out, self.inputs

    @property
    def bytes(self) -> int:
        if self.form is None:
            return 2 * self.out * self.inputs
        return self.out * self.form.bytes(self.inputs) + self.out * self.inputs // self.form.block


class Data:
    """Weights of one shape at a time, cut from one pool of random bytes."""

    def __init__(self) -> None:
        most = max(2 * out * inputs for _, out, inputs, _, what in LINES if "bf16" in what)
        keys = jax.random.split(jax.random.key(0), 8)
        make = jax.jit(lambda key: jax.random.bits(key, (most,), jnp.uint8))
        self.pool, self.weights = [make(key) for key in keys], {}
        self.x = jax.jit(lambda key: jax.random.normal(key, (MOST_ROWS, 12288), jnp.bfloat16))(keys[0])

    def take(self, entry: Entry) -> tuple[jax.Array, list[Any]]:
        """x and the weights; `self.values` is some rows, `self.outputs`, of the first weight."""
        if any(key[1:] != entry.shape[1:] for key in self.weights):
            self.weights.clear()
        if entry.shape not in self.weights:
            self.weights[entry.shape] = self.make(entry)
        weights = self.weights[entry.shape]
        self.outputs = np.unique(np.linspace(0, entry.out - 1, OUTPUTS).astype(int))
        self.values = None if entry.form is None else values(weights[0], self.outputs)
        return jax.block_until_ready((self.x[: entry.rows, : entry.inputs], weights))

    def make(self, entry: Entry) -> list[Any]:
        if entry.form is None:
            normal = jax.jit(lambda key: jax.random.normal(key, (entry.out, entry.inputs), jnp.bfloat16))
            return [normal(jax.random.key(i)) for i in range(4)]
        count = int(min(8, max(4, -(-BYTES // entry.bytes))))
        return [make_weight(entry.form, entry.out, entry.inputs, bits) for bits in self.pool[:count]]

    def check(self, entry: Entry, x: Any, result: Any) -> None:
        if self.values is None:
            return
        ends = np.unique(np.r_[: min(CHECKED, entry.rows), max(0, entry.rows - CHECKED) : entry.rows])
        actual = np.asarray(result[ends], np.float32)[:, self.outputs]
        expected = np.asarray(x[ends], np.float32) @ self.values.T
        error = float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
        if not error <= TOLERANCE:
            raise ArithmeticError(f"wrong by {error:.2e}")


def measure(entry: Entry, data: Data, clock: Clock, timeout: float) -> tuple[float, float]:
    """Microseconds of a call: of the multiplying kernels, and of all."""
    compiled = entry.program.result(timeout)
    before = entry.before.result(timeout) if entry.before else None
    watch = threading.Timer(STUCK_SECONDS, give_up, [entry])
    watch.start()
    try:
        return _measure(entry, data, clock, compiled, before)
    finally:
        watch.cancel()


def give_up(entry: Entry) -> None:
    print(f"{entry.title} {entry.name}: a kernel has not returned for {STUCK_SECONDS} s", flush=True)
    os._exit(1)


def _measure(entry: Entry, data: Data, clock: Clock, compiled: Any, before: Any) -> tuple[float, float]:
    x, weights = data.take(entry)
    data.check(entry, before(x) if before else x, compiled(x, weights[0]))

    def record(launch: Callable[[], Any], calls: int) -> tuple[float, float]:
        found = clock.rounds(launch, REPEATS)
        ours = any(KERNEL in name for name, _ in found[0])

        def total(run: list[tuple[str, float]], every: bool) -> float:
            return 1e3 / calls * sum(t for name, t in run if every or not ours or KERNEL in name)

        kernel, whole = (float(np.median([total(run, every) for run in found])) for every in (False, True))
        return kernel, whole

    kernel, whole = record(lambda: jax.block_until_ready([compiled(x, w) for w in weights]), len(weights))
    if before:
        whole -= record(lambda: jax.block_until_ready([before(x) for _ in weights]), len(weights))[1]
    return kernel, whole


class Table:
    """Entries in the order in which they are to be measured."""

    def __init__(self, compiler: Compiler, only: str, rows: list[int] | None):
        self.compiler, self.only, self.rows = compiler, only, rows

    def compile(self, function: Callable[..., Any], rows: int, inputs: int, *weights: Any) -> Future[Any]:
        return self.compiler(function, jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16), *weights)

    def entries(self, needs_tuning: bool) -> Iterator[tuple[int, Entry]]:
        """Place and entry of those that XLA tunes by running kernels, or of the others."""
        place = 0
        for form, out, inputs, rows, what in LINES:
            weight = self.weight(form, out, inputs)
            for r in rows if self.rows is None else [r for r in rows if r in self.rows]:
                for name in what:
                    place += 1
                    title = f"{'bf16' if name == 'bf16' else form.name} {out}x{inputs} T={r}"
                    if (name in ("xla", "bf16", *BEFORE)) != needs_tuning or self.only not in title:
                        continue
                    if name == "triton" and r > 64:
                        continue
                    if name == "bf16":
                        plain = jax.ShapeDtypeStruct((out, inputs), jnp.bfloat16)
                        program = self.compile(bf16_dot, r, inputs, plain)
                        yield place, Entry(title, "xla dot", None, out, inputs, r, program)
                        continue
                    best = choose_order(form, r, out)[0]
                    implementation = best if name in BEFORE else name
                    call, before = functools.partial(quantized_matmul, implementation=implementation), None
                    label = f"{name}{' *' if name == best else ''}"
                    if name in BEFORE:
                        made, before = BEFORE[name], self.compile(BEFORE[name], r, inputs)
                        call = functools.partial(lambda x, w, made, call: call(made(x), w), made=made, call=call)
                        label = f"{best} behind a {name}"
                    program = self.compile(call, r, inputs, weight)
                    yield place, Entry(title, label, form, out, inputs, r, program, before)

    @staticmethod
    def weight(form: Format, out: int, inputs: int) -> Any:
        bits = jax.ShapeDtypeStruct((out * inputs * 2,), jnp.uint8)
        return jax.eval_shape(functools.partial(make_weight, form, out, inputs), bits)

    def all(self) -> list[Entry]:
        tuned = list(self.entries(True))
        others = list(self.entries(False))
        concurrent.futures.wait([f for _, e in tuned for f in (e.program, e.before) if f], TUNING_SECONDS)
        return [entry for _, entry in sorted([*tuned, *others], key=lambda pair: pair[0])]

    def sweep(self) -> list[Entry]:
        from pallas_kernels.quantized_matmul.mosaic_sm90 import quantized_matmul_mosaic
        from pallas_kernels.quantized_matmul.triton import quantized_matmul_triton

        def through(function: Callable[..., jax.Array], tiling: Any) -> Callable[..., jax.Array]:
            def call(x: jax.Array, weight: Weight) -> jax.Array:
                parts = _quantized.take_apart(weight)
                form, *arrays = (getattr(parts, field.name) for field in dataclasses.fields(parts))
                return function(x, *arrays, form=form, tiling=tiling)

            return call

        found = []
        for rows in self.rows or [8]:
            key = next(k for k in MOSAIC if rows <= k or k == 512)
            for form in FORMATS.values() if self.only else [MXFP8]:
                for out, inputs in SWEPT if key < 512 else SWEPT_MANY:
                    title = f"{form.name} {out}x{inputs} T={rows}"
                    if self.only not in title:
                        continue
                    tilings: list[tuple[str, Any, Any]] = []
                    for warpgroups, split, tokens, width in MOSAIC[key]:
                        candidate = Candidate(
                            warpgroups=warpgroups, split=split, tokens=tokens, step=width * form.per_byte
                        )
                        try:
                            tiling = candidate.tiling(rows, form, inputs)
                            _quantized_mosaic.plan(form, tiling, inputs, out)
                        except (NotImplementedError, ValueError):
                            continue
                        tilings.append(("mosaic", quantized_matmul_mosaic, tiling))
                    tokens = min(128, max(8, 1 << (rows - 1).bit_length()))
                    for features, width, splits, warps, stages in TRITON[key]:
                        step = width * (form.per_byte if rows <= 8 else 1)
                        tiling = _quantized_triton.Tiling(
                            features=features, tokens=tokens, step=step, splits=splits, warps=warps, stages=stages
                        )
                        tilings.append(("triton", quantized_matmul_triton, tiling))
                    for name, function, tiling in tilings:
                        weight = self.weight(form, out, inputs)
                        program = self.compile(through(function, tiling), rows, inputs, weight)
                        found.append(Entry(title, f"{name} {_short(tiling)}", form, out, inputs, rows, program))
        return found


def _short(tiling: Any) -> str:
    return " ".join(f"{key}={value}" for key, value in dataclasses.asdict(tiling).items())


def line(row: dict[str, Any]) -> str:
    text = f"{row['title']:24} {row['name']:24} kernel {row['kernel']:6.1f} us  whole {row['whole']:6.1f} us  "
    text += f"{row['tbs']:5.2f} TB/s  {row['share']:4.0%}, whole {row['whole_share']:4.0%}"
    return text + (f"  {row['tflops']:4.0f} TFLOP/s" if row["rows"] >= 512 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="where to write all figures, after each of them")
    parser.add_argument("--only", default="", help="run the lines whose title, as in 'mxfp8 8192x6144 T=8', has this")
    parser.add_argument("--rows", type=int, nargs="+", help="rows of x, of those in the table")
    parser.add_argument("--sweep", action="store_true", help="try tilings instead of printing the table")
    parser.add_argument("--time-limit", type=float, default=100, help="seconds, compilation and all")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit("This benchmark needs a GPU.")
    started = time.monotonic()
    table = Table(Compiler(), args.only, args.rows)
    entries = table.sweep() if args.sweep else table.all()
    data, clock = Data(), Clock()
    bandwidth = clock.copy_bandwidth()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, fastest stream measured {bandwidth:.2f} TB/s")
    print(f"{pallas_kernels.__file__}; {len(entries)} lines; clock started after {time.monotonic() - started:.0f} s")
    results: list[dict[str, Any]] = []
    for number, entry in enumerate(entries):
        left = args.time_limit - (time.monotonic() - started)
        if left <= 0:
            print(f"time limit of {args.time_limit:.0f} s: {len(entries) - number} lines are missing", flush=True)
            break
        try:
            kernel, whole = measure(entry, data, clock, left)
        except Exception as problem:
            print(f"  {entry.title} {entry.name}: {type(problem).__name__}: {str(problem)[:200]}", flush=True)
            continue
        speed = entry.bytes / kernel / 1e6
        row = dict(
            title=entry.title, name=entry.name, out=entry.out, inputs=entry.inputs, rows=entry.rows, kernel=kernel,
            whole=whole, tbs=speed, share=speed / bandwidth, whole_share=entry.bytes / whole / 1e6 / bandwidth,
            tflops=2e-6 * entry.rows * entry.out * entry.inputs / whole,
        )  # fmt: skip
        results.append(row)
        print(line(row), flush=True)
        if args.json:
            with open(args.json, "w") as file:
                json.dump(dict(bandwidth=bandwidth, rows=results), file)
    if args.sweep:
        print("best of each, whole:")
        best: dict[tuple[str, str], dict[str, Any]] = {}
        for row in sorted(results, key=lambda row: row["whole"]):
            best.setdefault((row["title"], row["name"].split()[0]), row)
        for row in sorted(best.values(), key=lambda row: (row["title"], row["whole"])):
            print(line(row))
    print(f"{time.monotonic() - started:.0f} s", flush=True)
    os._exit(0)  # without waiting for what is still being compiled


if __name__ == "__main__":
    main()
