"""`grouped_experts` for NVIDIA GPUs from Ampere on, in Triton through jax-triton: bf16, MXFP8 and NVFP4 stacks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _dispatch
from pallas_kernels._quantized import Format
from pallas_kernels._quantized_triton import reorder
from pallas_kernels._triton import require_triton
from pallas_kernels.grouped_experts.opaque import combine, masked, opaque
from pallas_kernels.grouped_experts.problem import Problem
from pallas_kernels.grouped_experts.routing import exists, most_tiles, route
from pallas_kernels.grouped_experts.stacks import Stack
from pallas_kernels.grouped_experts.tuning import Tuning, choose_tile, format_name, triton_tuning

MOST_ELEMENTS = 2**31  # offsets of activations are 32 bits wide
FLOAT8 = (8, 9)  # the first architecture for which Triton knows pointers to 8-bit floats


def build(problem: Problem, device: Any) -> Any:
    """The kernel for a problem on a device, or NotImplementedError with the reason."""
    require_triton(problem.dtype, device)
    tile = choose_tile(problem)
    float8 = _dispatch.require_cuda(device, "the Triton kernel") >= FLOAT8
    return _program(problem, tile, plan(problem, tile), float8)


@functools.cache  # and so traced and lowered once for all layers of a model
def _program(problem: Problem, tile: int, tunings: tuple[Tuning, Tuning], float8: bool) -> Any:
    run = functools.partial(grouped_experts_triton, problem=problem, tile=tile, tunings=tunings, float8=float8)
    return opaque(jax.jit(masked(run, problem.experts)))


def plan(problem: Problem, tile: int) -> tuple[Tuning, Tuning]:
    """Tunings of gate_up and down, or NotImplementedError with the reason why the kernels cannot serve."""
    gate = problem.require_uniform("the Triton kernel")
    places = most_tiles(problem.pairs, problem.experts, tile) * tile
    if places * max(problem.hidden, problem.inner) >= MOST_ELEMENTS:
        raise NotImplementedError(
            f"the Triton kernel takes activations of less than 2^31 elements, got {problem.rows} rows; split them."
        )
    return (
        triton_tuning(gate, tile, 0, problem.inner, problem.hidden),
        triton_tuning(problem.formats[2], tile, 1, problem.hidden, problem.inner),
    )


def grouped_experts_triton(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    gate: Stack,
    up: Stack,
    down: Stack,
    *,
    problem: Problem,
    tile: int,
    tunings: tuple[Tuning, Tuning],
    float8: bool = True,
) -> jax.Array:
    import jax_triton  # pyright: ignore[reportMissingImports]

    from pallas_kernels.grouped_experts import triton_kernel

    p, pairs = problem, tile >= 16
    outer, last = p.formats[0], p.formats[2]
    divides = [form is not None and form.divides for form in p.formats]
    routing = route(experts, num_experts=p.experts, tile=tile)
    tiles = routing.expert.shape[0]
    sizes = dict(HIDDEN=p.hidden, INNER=p.inner, PAIRS=pairs, TILE=tile)
    inner = jax_triton.triton_call(
        reorder(format_name(outer), pairs, x), *operands(gate, outer, float8), *operands(up, outer, float8),
        routing.expert, routing.pairs,
        kernel=triton_kernel.gate_up, out_shape=jax.ShapeDtypeStruct((tiles * tile, p.inner), jnp.bfloat16),
        grid=grid(tunings[0], tiles, p.inner), name="grouped_experts_gate_up", num_warps=tunings[0].warps,
        num_stages=tunings[0].stages, CHOICES=experts.shape[1], ALPHA=p.alpha, LIMIT=p.limit,
        FORMAT=format_name(outer), GATE_DIVIDES=divides[0], UP_DIVIDES=divides[1], NEXT_FORMAT=format_name(last),
        **constants(tunings[0]), **sizes,
    )  # fmt: skip
    outputs = jax_triton.triton_call(
        inner, *operands(down, last, float8), routing.expert,
        kernel=triton_kernel.down, out_shape=jax.ShapeDtypeStruct((tiles * tile, p.hidden), jnp.bfloat16),
        grid=grid(tunings[1], tiles, p.hidden), name="grouped_experts_down", num_warps=tunings[1].warps,
        num_stages=tunings[1].stages, FORMAT=format_name(last), DIVIDES=divides[2],
        **constants(tunings[1]), **sizes,
    )  # fmt: skip
    return combine(outputs, routing.places, exists(experts, p.experts), weights)


def operands(stack: Stack, form: Format | None, float8: bool) -> tuple[jax.Array, ...]:
    """Codes, scale and global scale; a plain stack stands for the two that it lacks, and they are not read."""
    if form is None:
        return (stack.codes,) * 3
    assert stack.scale is not None and stack.global_scale is not None
    codes, scale = (
        a if float8 or a.dtype == jnp.uint8 else lax.bitcast_convert_type(a, jnp.uint8)
        for a in (stack.codes, stack.scale)
    )
    return codes, scale, stack.global_scale


def constants(tuning: Tuning) -> dict[str, Any]:
    return dict(FEATURES=tuning.features, STEP=tuning.step, STAGES=tuning.stages, TILES_FIRST=tuning.tiles_first)


def grid(tuning: Tuning, tiles: int, features: int) -> tuple[int, int]:
    blocks = features // tuning.features
    return (tiles, blocks) if tuning.tiles_first else (blocks, tiles)
