"""`grouped_experts` for Hopper, in Pallas Mosaic GPU: MXFP8 and NVFP4 stacks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mosaic as gpu
from pallas_kernels._quantized import Operands
from pallas_kernels._quantized_mosaic import Swiglu, Tiling, multiply, reorder
from pallas_kernels._triton import require_triton
from pallas_kernels.grouped_experts import spreading
from pallas_kernels.grouped_experts.mosaic_tuning import mosaic_tilings
from pallas_kernels.grouped_experts.opaque import combine, opaque, without_padding
from pallas_kernels.grouped_experts.problem import Problem
from pallas_kernels.grouped_experts.routing import exists, route
from pallas_kernels.grouped_experts.stacks import Stack


def build(problem: Problem, device: Any, routing: str | None = "xla") -> Any:
    """The kernel for a problem on a device, or NotImplementedError with the reason."""
    multiprocessors = gpu.require_sm90(device)
    return _program(problem, plan(problem), multiprocessors, choose_routing(problem, device, routing))


@functools.cache  # and so traced and lowered once for all layers of a model
def _program(problem: Problem, tilings: tuple[Tiling, Tiling], multiprocessors: int, routing: str) -> Any:
    constants = dict(problem=problem, tilings=tilings, multiprocessors=multiprocessors, routing=routing)

    def run(x: jax.Array, experts: jax.Array, weights: jax.Array, positions: jax.Array, *stacks: Stack) -> jax.Array:
        return grouped_experts_mosaic(x, experts, weights, *stacks, positions=positions, **constants)

    return opaque(jax.jit(run))


def choose_routing(problem: Problem, device: Any, routing: str | None) -> str:
    """How lists are made: "triton" or "xla". NotImplementedError with the reason where the named one cannot serve."""
    if routing == "xla":
        return routing
    try:
        require_triton(problem.dtype, device)
        if problem.pairs > spreading.MOST_PAIRS:
            raise NotImplementedError(
                f"one launch lists up to {spreading.MOST_PAIRS} choices, got {problem.pairs}; use routing=None."
            )
    except NotImplementedError:
        if routing is None:
            return "xla"
        raise
    return "triton"


def plan(problem: Problem) -> tuple[Tiling, Tiling]:
    """Tilings of gate_up and down, or NotImplementedError with the reason why the kernels cannot serve."""
    gate, down = problem.require_uniform("the Mosaic kernel"), problem.formats[2]
    if gate is None or down is None:
        raise NotImplementedError("the Mosaic kernel takes MXFP8 and NVFP4 stacks; plain ones go through Triton.")
    return mosaic_tilings(problem)


def grouped_experts_mosaic(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    gate: Stack,
    up: Stack,
    down: Stack,
    *,
    positions: jax.Array | None = None,
    problem: Problem,
    tilings: tuple[Tiling, Tiling],
    routing: str = "xla",
    multiprocessors: int = 132,
    interpret: Any = None,
) -> jax.Array:
    p = problem
    first, second, last = p.formats
    assert first is not None and second is not None and last is not None
    if positions is None:
        positions = jnp.zeros(x.shape[:1], jnp.int32)
    live, tile = exists(experts, p.experts) & (positions >= 0)[:, None], tilings[0].tokens
    if routing == "triton" and experts.size <= spreading.MOST_PAIRS:  # not what a vmap has made many
        tiles, places, counts, rows = spreading.spread_by_expert(
            x, experts, positions, form=first, num_experts=p.experts, tile=tile
        )
    else:
        wanted = without_padding(experts, positions, p.experts)
        tiles, pairs, places, counts = route(wanted, num_experts=p.experts, tile=tile)
        rows = spread(reorder(first, x), places, live, pairs.size)
    rest: dict[str, Any] = dict(experts=tiles, counts=counts, multiprocessors=multiprocessors, interpret=interpret)
    inner = multiply(
        rows, [Operands(first, *gate), Operands(second, *up)], tiling=tilings[0], swiglu=Swiglu(p.alpha, p.limit),
        order=last, name="grouped_experts_gate_up", **rest,
    )  # fmt: skip
    outputs = multiply(inner, [Operands(last, *down)], tiling=tilings[1], name="grouped_experts_down", **rest)
    return combine(outputs, places, live, weights)


def spread(x: jax.Array, places: jax.Array, live: jax.Array, size: int) -> jax.Array:
    """x bfloat16 [N, H] -> [size, H] with row n at places[n, j] for each choice j that is `live`, as tiles want them:
    the copy engine takes rows that follow each other.

    The other rows are never written and hold anything. What is made of them stays in them, and nobody reads it.
    """
    (num_rows, choices), words = places.shape, lax.bitcast_convert_type(x.reshape(x.shape[0], -1, 2), jnp.uint32)
    pair = jnp.arange(num_rows * choices, dtype=jnp.int32).reshape(places.shape)
    target = jnp.where(live, places, size + pair)  # beyond the end, each somewhere else: dropped
    each = jnp.broadcast_to(words[:, None], (num_rows, choices, words.shape[1]))
    spread = lax.empty((size, words.shape[1]), jnp.uint32).at[target].set(each, mode="drop", unique_indices=True)
    return lax.bitcast_convert_type(spread, x.dtype).reshape(size, -1)
