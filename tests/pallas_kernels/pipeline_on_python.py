"""The GPU path of `_quantized_mosaic` on plain Python, without values: who waits, copies, reads and multiplies what.

Each warpgroup of each block is traced by itself, as by Pallas: what it does depends on no value in memory. Then all are
carried out at once, as `pipeline_clocks` says. Instead of numbers the result has the products that are added up in it.
"""

import functools
import itertools
import math
import operator
import random
import types
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pipeline_clocks import Barrier, Buffer, CopyEngine, Operation, ProtocolError, Signals, Warpgroup, play
from pipeline_values import Accumulator, Both, Product, Ref, Scratch, Slice, Sum, Weights, origin

from pallas_kernels import _mosaic, _mosaic_fragments, _quantized_mosaic
from pallas_kernels import _quantized_mosaic_block as block_module
from pallas_kernels import _quantized_mosaic_cut as cut_module
from pallas_kernels import _quantized_mosaic_tiling as tiling_module
from pallas_kernels._quantized import Format, Operands

MODULES = (tiling_module, cut_module, block_module, _quantized_mosaic)  # each imports only from those before it


class Launch:
    """The operations of the kernels, and what comes out: `results` by first row, rows and first column.

    `meanwhile`: how often weights are made while so many products run, each of which keeps its own.
    """

    def __init__(self, seed: int):
        self.engine, self.components = CopyEngine(random.Random(seed)), itertools.count()
        self.warpgroups: list[Warpgroup] = []
        self.buffers: dict[tuple, Buffer] = {}
        self.barriers: dict[tuple, Barrier] = {}
        self.counters: dict[tuple, Signals] = {}
        self.results: dict[tuple, tuple[Sum, ...]] = {}
        self.meanwhile: Counter[int] = Counter()

    def modules(self, changes: Sequence[tuple[str, str]]) -> list[types.ModuleType]:
        """Copies of `MODULES` over these operations, past hooks on imports, `changes` (mutants) made in their text."""
        texts = [Path(str(module.__file__)).read_text() for module in MODULES]
        for right, wrong in changes:
            assert sum(text.count(right) for text in texts) == 1, right
            texts = [text.replace(right, wrong) for text in texts]
        copies = []
        for module, text in zip(MODULES, texts, strict=True):
            copy = types.ModuleType(module.__name__)
            names = vars(copy)
            exec(compiled(text, str(module.__file__)), names)
            for original, done in zip(MODULES, copies, strict=False):  # what it imports from them is to be the copies'
                shared = [k for k in vars(original) if k in names and names[k] is vars(original)[k]]
                names.update({k: vars(done)[k] for k in shared})
            copies.append(copy)
        _, cut, block, top = copies
        for module in (cut, block, top):
            vars(module).update(gpu=self.gpu())
        for module in (cut, block):
            vars(module).update(lax=self.lax(), jnp=self.jnp(), fragments=self.fragments())
        return copies

    def gpu(self) -> Any:
        return types.SimpleNamespace(
            ROWS=_mosaic.ROWS, ds=lambda start, size: Slice(int(start), int(size)), loop=self.loop, when=when,
            SMEM=lambda shape, dtype: Scratch(shape), tiled=lambda shape, dtype: Scratch(shape),
            Barrier=lambda num_arrivals=1, num_barriers=1: Scratch((num_barriers,), num_arrivals),
            barrier_wait=self.barrier_wait, barrier_arrive=self.barrier_arrive, copy_to_shared=self.copy_to_shared,
            with_accumulator=self.with_accumulator, multiply_registers=self.multiply_registers,
            wait_products=self.wait_products, set_max_registers=lambda registers, action: None,
            signal_counter=self.signal_counter, wait_for_counter=self.wait_for_counter,
            store_pieces=lambda ref, part, interpret: self.write(ref, part),
            load_pieces=lambda ref, interpret: self.load_left(ref, (ref.shape[1], ref.shape[0] * ref.shape[2])),
            kernel=self.kernel, kernel_into=self.kernel_into,
        )  # fmt: skip

    def lax(self) -> Any:
        return types.SimpleNamespace(
            axis_index=lambda name: np.int64(getattr(self.tracing, {"block": "block", "warpgroup": "number"}[name])),
            div=lambda a, b: (a - np.fmod(a, b)) // b, rem=np.fmod, fori_loop=self.fori_loop,
            cond=lambda which, yes, no, *values: yes(*values) if which else no(*values),
        )  # fmt: skip

    def jnp(self) -> Any:
        return types.SimpleNamespace(
            minimum=min, maximum=max, where=lambda which, a, b: a if which else b, add=operator.add,
            int32=np.int64, float32=float,
        )  # fmt: skip

    def fragments(self) -> Any:
        return types.SimpleNamespace(
            SLAB=_mosaic_fragments.SLAB, weights=self.weights, settle=lambda made: made, put=self.write,
            get=self.read, store_transposed=self.store_transposed,
        )  # fmt: skip

    # The launch.

    def kernel(self, body: Callable[..., None], *, out_type: Any, **static: Any) -> Callable[..., list]:
        def run(*operands: Any) -> list:
            results = [Ref.of(f"result {i}", each.shape) for i, each in enumerate(out_type)]
            self.launch(body, [*operands, *results], **static)
            return results

        return run

    def kernel_into(self, body: Callable[..., None], arrays: Sequence[Any], **static: Any) -> Callable[..., tuple]:
        return lambda *operands: (self.kernel(body, **static)(*operands, *arrays), arrays)

    def launch(
        self, body: Callable[..., None], refs: list, *, grid: dict, scratch: dict, warpgroups: int, **_: Any
    ) -> None:
        for block in range(grid["block"]):
            shared = {name: Ref.of(f"block {block}'s {name}", each.shape) for name, each in scratch.items()}
            for name, each in scratch.items():
                for i in range(each.shape[0] if each.arrivals else 0):
                    key = shared[name].name, i
                    self.barriers[key] = Barrier("{}[{}]".format(*key), each.arrivals)
            for number in range(warpgroups):
                self.tracing = Warpgroup(block, number, next(self.components))
                self.warpgroups.append(self.tracing)
                body(*refs, **shared)
        play(self.warpgroups, self.engine, next(self.components))
        for each in (*self.barriers.values(), *self.counters.values()):
            each.check_end()

    def record(self, run: Callable[[], None], ready: Callable[[], bool] = lambda: True, name: str = "") -> None:
        self.tracing.operations.append(Operation(run, ready, name))

    # Control flow: what the GPU decides from numbers that are known here.

    def loop(self, first: int, end: int) -> Callable[[Callable], None]:
        return lambda body: self.fori_loop(first, end, lambda i, _: body(i), None)

    def fori_loop(self, first: int, end: int, body: Callable, value: Any) -> Any:
        for i in range(int(first), int(end)):
            value = body(np.int64(i), value)
            self.record(self.tracing.check_idle)  # ptxas lets no product run over the back edge
        return value

    # Barriers, counters and memory.

    def barrier(self, ref: Ref) -> Barrier:
        return self.barriers[ref.name, *(ref.indices or (0,))]

    def barrier_wait(self, ref: Ref) -> None:
        barrier, warpgroup = self.barrier(ref), self.tracing
        times = barrier.waits.setdefault(warpgroup, [])
        self.record(lambda: barrier.wait(warpgroup), lambda: barrier.rounds > len(times), f"waits for {barrier.name}")

    def barrier_arrive(self, ref: Ref) -> None:
        barrier, warpgroup = self.barrier(ref), self.tracing
        self.record(lambda: barrier.arrive(warpgroup.clock))

    def counter(self, ref: Ref) -> Signals:
        return self.counters.setdefault((ref.name, ref.axes), Signals())

    def signal_counter(self, ref: Ref) -> None:
        counter, warpgroup = self.counter(ref), self.tracing
        self.record(lambda: counter.signal(warpgroup.clock))

    def wait_for_counter(self, ref: Ref, count: int) -> None:
        counter, warpgroup = self.counter(ref), self.tracing
        counter.wanted += count
        self.record(lambda: warpgroup.learn(counter.clock), lambda: counter.given >= count, "waits for other blocks")

    def buffer(self, ref: Ref) -> Buffer:
        key = ref.name, ref.indices
        if key not in self.buffers:
            self.buffers[key] = Buffer(f"{ref.name}{list(ref.indices)}", next(self.components))
        return self.buffers[key]

    def copy_to_shared(self, source: Ref, target: Ref, barrier: Ref) -> None:
        if source.shape != target.shape:
            raise ProtocolError(f"A copy of {source.shape} goes to {target.shape}.")
        place, warpgroup, arrives = self.buffer(target), self.tracing, self.barrier(barrier)
        self.record(lambda: self.engine.copy(warpgroup, place, (source, target), arrives))

    def write(self, ref: Ref, part: Sum) -> None:
        buffer, warpgroup = self.buffer(ref), self.tracing
        self.record(lambda: buffer.write(warpgroup.clock, warpgroup.access(), part))

    def read(self, ref: Ref, shape: tuple[int, int]) -> Sum:
        buffer, warpgroup, part = self.buffer(ref), self.tracing, Sum(shape)
        self.record(lambda: part.terms.append(buffer.read(warpgroup.clock, warpgroup.access())))
        return part

    def load_left(self, ref: Ref, shape: tuple[int, int]) -> Sum:
        """As `read`, but also of what nobody has left: the kernel throws that away."""
        buffer, warpgroup, part = self.buffer(ref), self.tracing, Sum(shape)
        self.record(lambda: part.terms.append(buffer.holds if buffer.known(warpgroup.clock) else None))
        return part

    # Products.

    def with_accumulator(self, run: Callable[[Any], Any], shape: tuple[int, int]) -> Any:
        return run(Accumulator(shape, lambda: self.record(self.tracing.check_idle)))

    def weights(
        self, form: Format, codes: Ref, scales: Ref, slab: int, *,
        scale_stride: int, parts: Sequence[int], order: Format | None,
    ) -> tuple[Weights, ...]:  # fmt: skip
        made, warpgroup = tuple(Weights(part) for part in parts), self.tracing
        width, blocks = _mosaic_fragments.SLAB, _mosaic_fragments.SLAB * form.per_byte // form.block
        pieces = codes.at[:, Slice(slab * width, width)], scales.at[:, Slice(slab * blocks, blocks)]
        buffers = [self.buffer(piece) for piece in pieces]

        def run() -> None:
            self.meanwhile[len(warpgroup.products)] += 1
            origins = [
                origin(piece, buffer.read(warpgroup.clock, warpgroup.access()))
                for piece, buffer in zip(pieces, buffers, strict=True)
            ]
            if scale_stride != buffers[1].holds[1].shape[1]:
                raise ProtocolError(f"Rows of scales are not {scale_stride} bytes apart.")
            for each in made:
                each.codes, each.scales = origins

        self.record(run)
        return made

    def multiply_registers(self, accumulator: Accumulator, weights: Weights, x: Ref) -> None:
        buffer, warpgroup = self.buffer(x), self.tracing
        if x.shape != (accumulator.shape[1], 64):
            raise ProtocolError(f"A product of 64 inputs with {accumulator.shape[1]} rows reads {x.shape} of x.")

        def run() -> None:
            access = warpgroup.access(end=math.inf)  # until it is waited for
            place = origin(x, buffer.read(warpgroup.clock, access))
            warpgroup.products.append(access)
            accumulator.terms.append(Product(weights.codes, weights.part, weights.scales, place))

        self.record(run)

    def wait_products(self, unfinished: int) -> None:
        warpgroup = self.tracing
        self.record(lambda: warpgroup.wait_products(unfinished))

    def store_transposed(self, ref: Ref, values: Sum | Both, *, stride: int, order: Format | None) -> None:
        (row, rows), (column, _) = ref.slices

        def run() -> None:
            if (row, rows, column) in self.results:
                raise ProtocolError(f"Rows from {row} on of features from {column} on are stored twice.")
            self.results[row, rows, column] = values.sums if isinstance(values, Both) else (values,)

        self.record(run)


def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    return lambda body: body() if condition else None


@functools.cache
def compiled(text: str, path: str) -> types.CodeType:
    return compile(text, path, "exec")


def run(
    form: Format,
    tiling: tiling_module.Tiling,
    *,
    inputs: int,
    sizes: Sequence[int],
    blocks: int,
    swiglu: bool,
    global_scales: Sequence[np.ndarray],
    experts: Sequence[int] | None,
    counts: Sequence[int] | None,
    multiprocessors: int,
    seed: int,
    changes: Sequence[tuple[str, str]] = (),
) -> Launch:
    """`multiply` of `_quantized_mosaic`, of weights [experts, size, inputs], `global_scales` [experts] of each."""
    launch = Launch(seed)
    *_, top = launch.modules(changes)
    spare = tiling_module.spare_rows(tiling, inputs, multiprocessors)
    weights = []
    for i, (size, scales) in enumerate(zip(sizes, global_scales, strict=True)):
        codes = Ref.of(f"codes{i}", (*scales.shape, size, form.bytes(inputs)))
        scale = Ref.of(f"scale{i}", (*scales.shape, size, inputs // form.block))
        weights.append(Operands(form, codes, scale, scales))
    top.multiply(
        Ref.of("x", (blocks * tiling.tokens + spare, inputs)), weights, tiling=tiling,
        experts=None if experts is None else np.array(experts), counts=None if counts is None else np.array(counts),
        swiglu=Both if swiglu else None, multiprocessors=multiprocessors,
    )  # fmt: skip
    return launch
