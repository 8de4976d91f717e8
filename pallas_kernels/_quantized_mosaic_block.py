"""One thread block of the Mosaic kernels over MXFP8 and NVFP4 weights."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mosaic as gpu
from pallas_kernels import _mosaic_fragments as fragments
from pallas_kernels._mosaic_fragments import reorder
from pallas_kernels._quantized import LEFT_OVER, MXFP8, Format, dequantize_blocks
from pallas_kernels._quantized_mosaic_cut import Exchange, Piece, Shares, divide, modulo
from pallas_kernels._quantized_mosaic_tiling import Problem, Tiling, registers


class Step(NamedTuple):
    """One pipeline step of a warpgroup: number of the stage, and refs in shared memory.

    Attributes:
      x: [tokens, step].
      codes, scales: [64, bytes] and [64, blocks], what this warpgroup reads of W.
    """

    slot: Any
    x: Any
    codes: Any
    scales: Any


class Turn(NamedTuple):
    """What is made and multiplied at once: `parts` of a slab of a step, the step's number in a line of code."""

    step: int
    slab: int
    parts: Sequence[int]


class Block:
    """One thread block, while it is traced. Names of refs: `self.g` global, `self.s` shared memory and barriers."""

    def __init__(self, problem: Problem, tiling: Tiling, interpret: Any, refs: dict[str, Any], shared: dict[str, Any]):
        self.p, self.t, self.interpret, self.g, self.s = problem, tiling, interpret, refs, shared
        self.tiles = problem.tiles(tiling)
        self.grid = problem.grid(tiling)
        self.units = problem.units(tiling)
        self.computing = tiling.warpgroups * tiling.split
        self.block, self.warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        self.blocks = refs["experts"][0] if problem.grouped else self.block * 0 + problem.blocks
        self.exchange = self.shares = None
        if tiling.unit:
            self.shares = Shares(problem.blocks * self.tiles, self.units, self.grid, problem.blocks)
            rows = problem.blocks * tiling.tokens
            self.exchange = Exchange(refs, shared["others_ready"], rows, problem.finishers(tiling), interpret)
            self.items = self.shares.pieces(self.block)
            self.copies = self.shares.start(self.block - 1) - self.shares.start(self.block)
        else:
            self.items = divide(self.blocks * self.tiles - self.block + (self.grid - 1), self.grid)
            self.copies = self.items * self.units
        self.registers = registers(problem.form, tiling)

    def run(self) -> None:
        @gpu.when(self.warpgroup < self.computing)
        def _compute() -> None:
            if self.registers.copying:
                gpu.set_max_registers(self.registers.computing, action="increase")
            self.compute()

        @gpu.when(self.warpgroup == self.computing)
        def _memory() -> None:
            if self.registers.copying:
                gpu.set_max_registers(self.registers.copying, action="decrease")
            self.memory()

    def locate(self, item: Any) -> Piece:
        """What this block does as its item."""
        if self.shares is not None:
            return self.shares.piece(self.block, item)
        return Piece(*self.whole(item), 0, self.units, item * self.units)

    def whole(self, item: Any) -> tuple[Any, Any]:
        """Tile of x and tile of the output features of this block's item, if tiles are not shared."""
        number = self.block + item * self.grid
        if self.t.group == 1:
            return divide(number, self.tiles), modulo(number, self.tiles)
        first = divide(number, self.t.group * self.tiles) * self.t.group
        size = jnp.minimum(self.blocks - first, self.t.group)
        inside = number - first * self.tiles
        tile = lax.div(inside, size)
        return first + inside - tile * size, tile

    def by_rows(self, block: Any, run: Callable[[int], None]) -> None:
        """run(rows that are read and multiplied of the tile of x of this number)."""
        few = self.t.few
        if few is None:
            run(self.t.tokens)
            return
        is_few = self.g["counts"][block] <= few
        gpu.when(is_few)(lambda: run(few))
        gpu.when(~is_few)(lambda: run(self.t.tokens))

    # The memory warpgroup.

    def memory(self) -> None:
        p, t = self.p, self.t

        @gpu.loop(0, self.items)
        def _item(item: Any) -> None:
            piece = self.locate(item)
            for weights, first, end in p.sources(t):
                copy = functools.partial(self.copy_piece, piece, piece.tile - first, weights)
                copy_all = functools.partial(self.by_rows, piece.block, copy)
                own = (piece.tile >= first) & (piece.tile < end)
                copy_all() if (first, end) == (0, self.tiles) else gpu.when(own)(copy_all)

        if self.exchange is not None:
            self.exchange.wait(self.locate(self.items - 1))  # only the last piece can have others
        self.drain("free", self.copies * p.steps_a_scale, t.stages)
        self.drain("scale_free", self.copies, t.scale_stages)

    def copy_piece(self, piece: Piece, tile: Any, weights: tuple[int, ...], tokens: int) -> None:
        """All that one piece reads; `tile` counts from the first of its weight."""
        p, t, g, s = self.p, self.t, self.g, self.s
        block = piece.block
        start = tile * p.features(t) + (g["experts"][1 + block] * p.outputs if p.grouped else 0)

        def sources(name: str) -> list[Any]:
            """What each computing warpgroup reads of `codes` or `scale`: 64 rows."""
            rows = [gpu.ds(start + m * gpu.ROWS, gpu.ROWS) for m in range(p.finishers(t))]
            return [g[f"{name}{i}"].at[part] for i in weights for part in rows]

        codes, scales = sources("codes"), sources("scale")

        @gpu.loop(0, piece.end - piece.first)
        def _scales(copy: Any) -> None:
            number = piece.before + copy
            copy = piece.first + copy
            slot = modulo(number, t.scale_stages)
            gpu.when(number >= t.scale_stages)(lambda: gpu.barrier_wait(s["scale_free"].at[slot]))
            columns = gpu.ds(copy * p.scale_bytes(t), p.scale_bytes(t))
            for m, source in enumerate(scales):
                gpu.copy_to_shared(source.at[:, columns], s["scale"].at[slot, m], s["scale_ready"].at[slot])

            @gpu.loop(0, p.steps_a_scale)
            def _step(k: Any) -> None:
                step = copy * p.steps_a_scale + k
                number_of_step = number * p.steps_a_scale + k
                slot = modulo(number_of_step, t.stages)
                ready = s["ready"].at[slot]
                gpu.when(number_of_step >= t.stages)(lambda: gpu.barrier_wait(s["free"].at[slot]))
                columns = gpu.ds(step * p.form.bytes(t.step), p.form.bytes(t.step))
                for m, source in enumerate(codes):
                    gpu.copy_to_shared(source.at[:, columns], s["codes"].at[slot, m], ready)
                x = g["x"].at[gpu.ds(block * t.tokens, tokens), gpu.ds(step * t.step, t.step)]
                gpu.copy_to_shared(x, s["x"].at[slot, gpu.ds(0, tokens)], ready)

    def drain(self, name: str, filled: Any, slots: int) -> None:
        """Every phase of a barrier is waited for, as the interpreter demands."""

        @gpu.loop(jnp.maximum(filled - slots, 0), filled)
        def _wait(number: Any) -> None:
            gpu.barrier_wait(self.s[name].at[modulo(number, slots)])

    # The computing warpgroups.

    def compute(self) -> None:
        t, s = self.t, self.s
        self.place = modulo(self.warpgroup, t.warpgroups)  # which 64 rows
        self.share = divide(self.warpgroup, t.warpgroups)  # which steps

        @gpu.loop(0, self.items)
        def _item(item: Any) -> None:
            piece = self.locate(item)
            self.by_rows(piece.block, functools.partial(self.compute_piece, piece, item))

        if "parts" in s:

            @gpu.when((self.warpgroup >= self.p.finishers(t)) & (self.items > 0))
            def _drain() -> None:
                gpu.barrier_wait(s["parts_free"])

    def compute_piece(self, piece: Piece, item: Any, tokens: int) -> None:
        s, finishers = self.s, self.p.finishers(self.t)
        part = self.accumulate(piece, tokens)
        if "parts" not in s:
            self.finish(piece, [part])
            return

        @gpu.when(self.warpgroup >= finishers)
        def _help() -> None:
            gpu.when(item > 0)(lambda: gpu.barrier_wait(s["parts_free"]))
            self.put_part(self.warpgroup - finishers, part)
            gpu.barrier_arrive(s["parts_ready"])

        @gpu.when(self.warpgroup < finishers)
        def _finish() -> None:
            gpu.barrier_wait(s["parts_ready"])
            others = range(0, self.computing - finishers, finishers)
            helped = [self.get_part(first + self.warpgroup, tokens) for first in others]
            gpu.barrier_arrive(s["parts_free"])
            self.finish(piece, [part, *helped])

    def accumulate(self, piece: Piece, tokens: int) -> jax.Array:
        """This warpgroup's share of the product of a piece: float32 [64, tokens], before the factor."""
        shape = (gpu.ROWS, tokens)
        if self.interpret is not None:  # the interpreter knows neither registers as operands of wgmma nor assembly
            return self.add_plainly(piece, gpu.full(shape, 0.0))

        def run(accumulator: Any) -> jax.Array:
            self.multiply(piece, accumulator)
            return accumulator[...]

        return gpu.with_accumulator(run, shape)

    def own_steps(self) -> int:
        """Steps that this warpgroup does of those that one copy of scales serves."""
        return self.p.steps_a_scale // self.t.split

    def scale_slot(self, piece: Piece, copy: Any) -> Any:
        return modulo(piece.before + copy, self.t.scale_stages)

    def step(self, piece: Piece, copy: Any, own: Any, tokens: int) -> Step:
        """This warpgroup's step number `own` of a copy of scales of the piece."""
        p, t, s = self.p, self.t, self.s
        a_step, k = t.step // p.form.block, own * t.split + self.share
        slot = modulo((piece.before + copy) * p.steps_a_scale + k, t.stages)
        scales = s["scale"].at[self.scale_slot(piece, copy), self.place, :, gpu.ds(k * a_step, a_step)]
        return Step(slot, s["x"].at[slot, gpu.ds(0, tokens)], s["codes"].at[slot, self.place], scales)

    def multiply(self, piece: Piece, accumulator: Any) -> None:
        """Adds all products of a piece, some steps in a straight line of code.

        ptxas lets no product run over the back edge of a loop; with `ahead` the weights for the first product of a line
        are made before it. With registers for the weights of two turns the next are made while these are multiplied.
        """
        p, t, s = self.p, self.t, self.s
        tokens, own = accumulator.shape[1], self.own_steps()
        parts, room = range(p.form.per_byte), self.registers.room(p.form, tokens)
        most = t.straight if t.holds_and_waits else 1
        straight = next(n for n in range(min(most, own), 0, -1) if own % n == 0)
        turns = [
            Turn(j, slab, some)
            for j in range(straight)
            for slab in range(p.form.bytes(t.step) // fragments.SLAB)
            for some in ([parts] if room else [[part] for part in parts])
        ]
        copies, lines = piece.end - piece.first, own // straight

        def make(step: Step, turn: Turn) -> Any:
            return fragments.weights(
                p.form, step.codes, step.scales, turn.slab,
                scale_stride=p.scale_bytes(t), parts=turn.parts, order=p.order,
            )  # fmt: skip

        def start(step: Step, turn: Turn, made: Any) -> None:
            for part, weights in zip(turn.parts, made, strict=True):
                column = 64 * (len(parts) * turn.slab + part)
                gpu.multiply_registers(accumulator, weights, step.x.at[:, gpu.ds(column, 64)])

        def let_go(steps: list[Step], held: int, end: int) -> int:
            """Steps held to end - 1, once only the products started last run on, or without room none: -> end."""
            gpu.wait_products(len(parts) if room else 0)
            for step in steps[held:end]:
                gpu.barrier_arrive(s["free"].at[step.slot])
            return end

        def wait_and_make(step: Step) -> Any:
            gpu.barrier_wait(s["ready"].at[step.slot])
            return make(step, turns[0])

        def make_ahead(copy: Any, i: Any) -> Any:
            """The first weights after line i of a copy; after the last of all its last step's again, still held."""
            ends = i == lines - 1
            last = ends & (copy == copies - 1)
            following = self.step(
                piece, jnp.where(ends & ~last, copy + 1, copy),
                jnp.where(ends, jnp.where(last, own - 1, 0), (i + 1) * straight), tokens,
            )  # fmt: skip

            @gpu.when(~last)
            def _wait() -> None:
                gpu.when(ends)(lambda: gpu.barrier_wait(s["scale_ready"].at[self.scale_slot(piece, copy + 1)]))
                gpu.barrier_wait(s["ready"].at[following.slot])

            return make(following, turns[0])

        def line(copy: Any, i: Any, made: Any) -> Any:
            steps = [self.step(piece, copy, i * straight + j, tokens) for j in range(straight)]
            if not t.ahead:
                made = wait_and_make(steps[0])
            held = 0
            for turn, upcoming in itertools.pairwise(turns):
                start(steps[turn.step], turn, made)
                held = let_go(steps, held, turn.step if room else upcoming.step)
                if upcoming.step > turn.step:
                    gpu.barrier_wait(s["ready"].at[steps[upcoming.step].slot])
                made = make(steps[upcoming.step], upcoming)
            start(steps[-1], turns[-1], made)
            if t.ahead:
                held = let_go(steps, held, straight - 1)
                made = make_ahead(copy, i)
            gpu.wait_products(0)
            for step in steps[held:]:
                gpu.barrier_arrive(s["free"].at[step.slot])
            return fragments.settle(made) if t.ahead else None

        def each(copy: Any, made: Any) -> Any:
            if not t.ahead:
                gpu.barrier_wait(s["scale_ready"].at[self.scale_slot(piece, copy)])
            made = lax.fori_loop(0, lines, functools.partial(line, copy), made)
            gpu.barrier_arrive(s["scale_free"].at[self.scale_slot(piece, copy)])
            return made

        made = None
        if t.ahead:
            gpu.barrier_wait(s["scale_ready"].at[self.scale_slot(piece, 0)])
            made = wait_and_make(self.step(piece, 0, 0, tokens))
        lax.fori_loop(0, copies, each, made)

    def add_plainly(self, piece: Piece, total: jax.Array) -> jax.Array:
        """The same for the interpreter: total + all products of a piece."""
        s = self.s

        def add(copy: Any, own: Any, total: jax.Array) -> jax.Array:
            step = self.step(piece, copy, own, total.shape[1])
            gpu.barrier_wait(s["ready"].at[step.slot])
            weights = plain_weights(self.p.form, step.codes[...], step.scales[...])
            total += jnp.dot(weights, step.x[...].astype(jnp.float32).T)
            gpu.commit_shared()  # ordinary reads, unlike those of wgmma, have to be ordered before the engine's writes
            gpu.barrier_arrive(s["free"].at[step.slot])
            return total

        def each(copy: Any, total: jax.Array) -> jax.Array:
            slot = self.scale_slot(piece, copy)
            gpu.barrier_wait(s["scale_ready"].at[slot])
            total = lax.fori_loop(0, self.own_steps(), functools.partial(add, copy), total)
            gpu.barrier_arrive(s["scale_free"].at[slot])
            return total

        return lax.fori_loop(0, piece.end - piece.first, each, total)

    def put_part(self, place: Any, part: jax.Array) -> None:
        if self.interpret is not None:
            self.s["parts"].at[place, gpu.ds(0, part.size)][...] = part.reshape(-1)
        else:
            fragments.put(self.s["parts"].at[place], part)

    def get_part(self, place: Any, tokens: int) -> jax.Array:
        shape = (gpu.ROWS, tokens)
        if self.interpret is not None:
            return self.s["parts"].at[place, gpu.ds(0, gpu.ROWS * tokens)][...].reshape(shape)
        return fragments.get(self.s["parts"].at[place], shape)

    def finish(self, piece: Piece, parts: list[jax.Array]) -> None:
        """Sum, and of a tile that is complete the results. With a SwiGLU parts alternate: gate, up, gate, up."""
        sums = 2 if self.p.swiglu else 1
        totals = [functools.reduce(jnp.add, parts[i + sums :: sums], parts[i]) for i in range(sums)]
        exchange, shares, finisher = self.exchange, self.shares, self.warpgroup
        if exchange is None or shares is None:
            self.results(piece, totals)
            return

        @gpu.when(piece.first > 0)
        def _leave() -> None:
            exchange.leave(self.block, piece.owner, finisher, totals)

        @gpu.when(piece.first == 0)
        def _complete() -> None:
            self.results(piece, exchange.add_others(piece, finisher, totals, shares.most_others))

    def results(self, piece: Piece, totals: list[jax.Array]) -> None:
        """Factor, SwiGLU, store."""
        p, t, g = self.p, self.t, self.g
        expert = g["experts"][1 + piece.block] if p.grouped else 0
        left_over = 1.0 if self.interpret is not None else LEFT_OVER

        def factor(weight: int) -> Any:
            if p.form is MXFP8:
                return left_over
            scale = g[f"global_scale{weight}"][expert]
            return jnp.float32(left_over) / scale if p.divides[weight] else scale * jnp.float32(left_over)

        if p.swiglu:
            values = p.swiglu(*(total * factor(i) for i, total in enumerate(totals)))
        else:
            own = factor(0)
            if p.form is not MXFP8:
                for (i,), first, _ in p.sources(t)[1:]:
                    own = jnp.where(piece.tile >= first, factor(i), own)
            values = totals[0] * own
        self.store(piece.block, piece.tile * p.finishers(t) + self.place, values)

    def store(self, block: Any, number: Any, values: jax.Array) -> None:
        """values [64, tokens], of the 64 outputs of this number, to the result, transposed and rounded."""
        p, rows = self.p, min(values.shape[1], self.p.rows)
        slabs = 1 if p.order is None else p.order.per_byte  # pieces of 64 outputs that take turns in the order
        start = number * gpu.ROWS
        if slabs > 1:
            start = divide(number, slabs) * (slabs * gpu.ROWS) + modulo(number, slabs) * (8 // slabs)
        tokens = gpu.ds(block * self.t.tokens, rows)
        if p.spare:
            zeros = self.g["out"].at[gpu.ds(p.rows, p.spare), gpu.ds(number * gpu.ROWS, gpu.ROWS)]
            if self.interpret is None:
                fragments.store_zeros(zeros, stride=p.outputs)
            else:
                zeros[...] = jnp.zeros(zeros.shape, jnp.bfloat16)
        if self.interpret is None:
            out = self.g["out"].at[tokens, gpu.ds(start, gpu.ROWS)]
            fragments.store_transposed(out, values, stride=p.outputs, order=p.order)
            return
        result = values[:, :rows].T
        if p.order is not None:
            result = reorder(p.order, jnp.tile(result, (1, slabs)))
        result = result.astype(jnp.bfloat16)
        for i in range(8 * slabs if slabs > 1 else 1):  # every 8 columns hold 8 / slabs of this piece
            width = gpu.ROWS if slabs == 1 else 8 // slabs
            self.g["out"].at[tokens, gpu.ds(start + 8 * i, width)][...] = result[:, 8 * i : 8 * i + width]


def plain_weights(form: Format, codes: jax.Array, scales: jax.Array) -> jax.Array:
    """What the warpgroups make of [64, bytes] codes and [64, blocks] scales, in float32, in the kernel's order of K."""
    # Without their power of two, which would make some subnormal: interpreters may flush those.
    return reorder(form, dequantize_blocks(form, codes, scales))
