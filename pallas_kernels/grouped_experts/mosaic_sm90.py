"""`grouped_experts` for Hopper, in Pallas Mosaic GPU: MXFP8 and NVFP4 stacks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _mosaic as gpu
from pallas_kernels._quantized import Operands
from pallas_kernels._quantized_mosaic import Swiglu, Tiling, multiply, reorder
from pallas_kernels.grouped_experts.mosaic_tuning import mosaic_tilings
from pallas_kernels.grouped_experts.opaque import combine, opaque
from pallas_kernels.grouped_experts.problem import Problem
from pallas_kernels.grouped_experts.routing import exists, route
from pallas_kernels.grouped_experts.stacks import Stack


def build(problem: Problem, device: Any) -> Any:
    """The kernel for a problem on a device, or NotImplementedError with the reason."""
    multiprocessors = gpu.require_sm90(device)
    return _program(problem, plan(problem), multiprocessors)


@functools.cache  # and so traced and lowered once for all layers of a model
def _program(problem: Problem, tilings: tuple[Tiling, Tiling], multiprocessors: int) -> Any:
    run = functools.partial(grouped_experts_mosaic, problem=problem, tilings=tilings, multiprocessors=multiprocessors)
    return opaque(jax.jit(run))


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
    problem: Problem,
    tilings: tuple[Tiling, Tiling],
    multiprocessors: int = 132,
    interpret: Any = None,
) -> jax.Array:
    p, k = problem, experts.shape[1]
    first, second, last = p.formats
    assert first is not None and second is not None and last is not None
    routing = route(experts, num_experts=p.experts, tile=tilings[0].tokens)
    used_and_experts = jnp.concatenate([routing.used[None], jnp.maximum(routing.expert, 0)])
    # The copy engine takes rows that follow each other: gathered here, in the order along K that the kernel wants.
    rows = reorder(first, x)[jnp.maximum(routing.pairs, 0).reshape(-1) // k]
    rest: dict[str, Any] = dict(experts=used_and_experts, multiprocessors=multiprocessors, interpret=interpret)
    inner = multiply(
        rows, [Operands(first, *gate), Operands(second, *up)], tiling=tilings[0], swiglu=Swiglu(p.alpha, p.limit),
        name="grouped_experts_gate_up", **rest,
    )  # fmt: skip
    outputs = multiply(
        reorder(last, inner), [Operands(last, *down)], tiling=tilings[1], name="grouped_experts_down", **rest
    )  # fmt: skip
    return combine(outputs, routing.places, exists(experts, p.experts), weights)
