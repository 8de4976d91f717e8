"""`rotate_heads` for Hopper, in Pallas Mosaic GPU.

A warpgroup serves some heads of one token: they come to shared memory in one copy and leave in one for each
destination. Between, a head lies in half a warp, a rotary pair in one thread.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _dispatch
from pallas_kernels import _mosaic as gpu
from pallas_kernels.rotate_heads.problem import Problem, Segment, angles

# Heads of one block: with few tokens short blocks for all multiprocessors, with many less reading of angles and scales.
FEW, MANY, MOST_TOKENS_OF_FEW = 16, 64, 64


def build(x: Any, *others: Any, problem: Problem) -> Any:
    """The kernel for arguments like these on their device, or NotImplementedError with the reason."""
    gpu.require_sm90(_dispatch.device_of(x))
    gpu.require_half(x.dtype)
    if not gpu.writable(x, *others):
        raise NotImplementedError(
            "the Mosaic kernel writes into the caches, which JAX does not allow where arrays vary over the devices of "
            "a shard_map: use check_vma=False."
        )
    if 0 in x.shape:
        raise NotImplementedError(f"the Mosaic kernel needs at least one token, got x {x.shape}.")
    # The copy engine takes heads from shared memory at multiples of 128 bytes.
    if problem.head_dim % 64 or problem.head_dim > 256 or problem.half % 32:
        raise NotImplementedError(
            f"the Mosaic kernel takes heads of 64, 128, 192 and 256 and rotary pairs in multiples of 32, got "
            f"{problem.head_dim} and {problem.half}."
        )
    cached = sum(segment.cached for segment in problem.segments)
    normed = sum(segment.normed for segment in problem.segments)
    run: Any = functools.partial(rotate_heads_mosaic, problem=problem)
    return _dispatch.opaque("rotate_heads", run, ("row",) * (2 + cached) + ("pages",) * normed)


def rotate_heads_mosaic(
    x: jax.Array,
    positions: jax.Array,
    *caches_and_weights: jax.Array,
    problem: Problem,
    together: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """x [B, T, F], positions [B, T], the caches, then the norms' weights [D] -> see `rotate_heads`.

    A block takes so many heads `together`, a multiple of 8.
    """
    p = problem
    cached = sum(segment.cached for segment in p.segments)
    caches, weights = caches_and_weights[:cached], caches_and_weights[cached:]
    if any(weight.shape != (p.head_dim,) for weight in weights):
        raise NotImplementedError(
            "rotate_heads: one norm for the whole of a vmapped batch; loop over the norms instead."
        )
    (batch, tokens, _), rows = x.shape, x.shape[0] * x.shape[1]
    together = together or (FEW if rows <= MOST_TOKENS_OF_FEW else MANY)
    parts = -(-p.heads // together)
    operands = (x.reshape(rows, p.heads, p.head_dim), positions.reshape(rows), angles(positions.reshape(rows), p))
    out_type = [
        jax.ShapeDtypeStruct((rows, segment.count, p.head_dim), x.dtype) for segment in p.segments if not segment.cached
    ]

    def body(*refs: Any, tile: Any, ready: Any) -> None:
        block = lax.axis_index("block")
        token, part = lax.div(block, jnp.int32(parts)), lax.rem(block, jnp.int32(parts))
        rest = iter(refs)
        heads, places, table = next(rest), next(rest), next(rest)
        norms = [next(rest) for _ in weights]
        written = [next(rest) for _ in caches]
        wanted = list(rest)
        share = Share(
            p, token, lax.div(token, jnp.int32(tokens)), heads, places, table, norms, written, wanted, tile, interpret
        )
        for first in range(0, p.heads, together):
            gpu.when(part == first // together)(functools.partial(share.run, first, ready))

    results, filled = gpu.kernel_into(
        body,
        caches,
        name="rotate_heads",
        out_type=out_type,
        grid={"block": rows * parts},  # one axis: a second would end at 65,535
        scratch=dict(tile=gpu.SMEM((together, p.head_dim), x.dtype), ready=gpu.Barrier()),
        warpgroups=1,
        interpret=interpret,
    )(*operands, *weights)
    results, filled = iter(results), iter(filled)
    return tuple(
        next(filled) if segment.cached else next(results).reshape(batch, tokens, segment.count, p.head_dim)
        for segment in p.segments
    )


class Share:
    """What a block works on: its token, and the arrays."""

    def __init__(
        self, problem: Problem, token: Any, row: Any, heads: Any, positions: Any, table: Any, norms: list[Any],
        caches: list[Any], results: list[Any], tile: Any, interpret: Any,
    ):  # fmt: skip
        self.p, self.token, self.row, self.interpret = problem, token, row, interpret
        self.heads, self.positions, self.table, self.tile = heads, positions, table, tile
        rest_norms, rest_caches, rest_results = iter(norms), iter(caches), iter(results)
        self.segments: list[tuple[Segment, Any, Any]] = [  # with its norm and its destination
            (s, next(rest_norms) if s.normed else None, next(rest_caches if s.cached else rest_results))
            for s in problem.segments
        ]

    def run(self, first: int, ready: Any) -> None:
        """Heads `first` and on, as many as the tile holds."""
        p, tile = self.p, self.tile
        count = min(tile.shape[0], p.heads - first)
        gpu.copy_to_shared(self.heads.at[self.token, gpu.ds(first, count)], tile.at[gpu.ds(0, count)], ready)
        here = [each for each in self.segments if each[0].start < first + count and each[0].end > first]
        position = self.positions[self.token]
        if any(segment.normed for segment, _, _ in here):
            self.normalize_and_rotate(first, here, ready)
        else:
            gpu.barrier_wait(ready)
        for segment, _, to in here:
            start, end = max(segment.start, first), min(segment.end, first + count)
            source, into = tile.at[gpu.ds(start - first, end - start)], gpu.ds(start - segment.start, end - start)
            if not segment.cached:
                gpu.copy_to_global(source, to.at[self.token, into])
                continue
            slots = to.shape[1]
            seen = position >= 0 if p.ring else (position >= 0) & (position < slots)
            slot = lax.rem(position, jnp.int32(slots)) if p.ring else position

            @gpu.when(seen)
            def _copy(source: Any = source, to: Any = to, slot: Any = slot, into: Any = into) -> None:
                gpu.copy_to_global(source, to.at[self.row, slot, into])

        gpu.wait_until_read()

    def normalize_and_rotate(self, first: int, here: list[tuple[Segment, Any, Any]], ready: Any) -> None:
        p, tile = self.p, self.tile
        rows = -(-min(tile.shape[0], p.heads - first) // 8) * 8
        # Columns that turn, their partners, and what does not turn.
        starts = [0, p.half] + [p.rotary_dim] * (p.rotary_dim < p.head_dim)
        columns = [gpu.ds(a, b - a) for a, b in zip(starts, [*starts[1:], p.head_dim], strict=True)]
        cos, sin = (gpu.paired_load(self.table.at[self.token, gpu.ds(at, p.half)], 1) for at in (0, p.half))
        scales = [self.scales(norm, columns) for _, norm, _ in here]
        gpu.barrier_wait(ready)
        given = [gpu.paired_load(tile.at[gpu.ds(0, rows), each]) for each in columns]
        wide = [each.astype(jnp.float32) for each in given]
        total = sum((jnp.sum(each * each, axis=1) for each in wide[1:]), jnp.sum(wide[0] * wide[0], axis=1))
        inverse = lax.rsqrt(total * (1.0 / p.head_dim) + p.eps)
        normed = []
        for i, each in enumerate(wide):
            scale = self.of_rows([scale[i] for scale in scales], first, here, each.shape)
            normed.append(each * gpu.paired_broadcast(inverse, each.shape, 0) * scale)
        a, b = normed[:2]
        cos, sin = (gpu.paired_broadcast(each, a.shape, 1) for each in (cos, sin))
        turned = [a * cos - b * sin, b * cos + a * sin, *normed[2:]]
        for each, given_here, at in zip(turned, given, columns, strict=True):
            each = each.astype(given_here.dtype)
            for segment, norm, _ in here:
                if norm is None:
                    row = gpu.paired_rows(each.shape) + first
                    each = jnp.where((row >= segment.start) & (row < segment.end), given_here, each)
            gpu.paired_store(tile.at[gpu.ds(0, rows), at], each, self.interpret)
        gpu.commit_shared()

    def scales(self, norm: Any, columns: list[Any]) -> list[Any]:
        """The factors of a norm for these columns; None where there is none."""
        if norm is None:
            return [None for _ in columns]
        loaded = [gpu.paired_load(norm.at[each], 1).astype(jnp.float32) for each in columns]
        return [1.0 + each for each in loaded] if self.p.plus_one else loaded

    def of_rows(self, scales: list[Any], first: int, here: list[Any], shape: tuple[int, ...]) -> Any:
        """Of each row the scale of its segment."""
        chosen = None
        for (segment, _, _), scale in zip(here, scales, strict=True):
            if scale is None:
                continue
            scale = gpu.paired_broadcast(scale, shape, 1)
            if chosen is not None:
                scale = jnp.where(gpu.paired_rows(shape) + first < segment.start, chosen, scale)
            chosen = scale
        return chosen
