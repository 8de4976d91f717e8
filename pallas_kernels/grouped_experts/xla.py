"""`grouped_experts` for any device, in bounded memory and with a derivative: a loop over tiles of one expert each."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._activations import swiglu_oai
from pallas_kernels._quantized import Format
from pallas_kernels._varying import varying_like
from pallas_kernels.grouped_experts import stacks
from pallas_kernels.grouped_experts.routing import route
from pallas_kernels.grouped_experts.stacks import Stack

TILE = 128  # rows of one expert that are computed together: a tile dequantises its expert's matrices once


def grouped_experts_xla(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    gate: Stack,
    up: Stack,
    down: Stack,
    *,
    formats: tuple[Format | None, Format | None, Format | None],
    alpha: float,
    limit: float,
) -> jax.Array:
    num_rows, k = experts.shape
    routing = route(experts, num_experts=gate.codes.shape[0], tile=min(num_rows, TILE), most_compared=0)
    flat_weights = weights.reshape(-1)

    def multiply(rows: jax.Array, stack: Stack, form: Format | None, expert: jax.Array) -> jax.Array:
        # Float16 does not hold every weight; float32 means float32: a GPU would round the factors to TF32.
        wide = jnp.bfloat16 if rows.dtype == jnp.bfloat16 else jnp.float32
        matrix = stacks.dequantize(stacks.take(stack, expert), form, wide)
        precision = lax.Precision.HIGHEST if wide == jnp.float32 else None
        rows = rows.astype(wide)
        return jnp.einsum("ni,oi->no", rows, matrix, precision=precision, preferred_element_type=jnp.float32)

    @jax.checkpoint  # or the derivative would keep the matrices of every tile
    def compute(expert: jax.Array, pairs: jax.Array) -> jax.Array:
        used = (pairs >= 0)[:, None]
        pairs = jnp.maximum(pairs, 0)
        inputs = jnp.where(used, x[pairs // k], jnp.zeros((), x.dtype))
        g = multiply(inputs, gate, formats[0], expert)
        u = multiply(inputs, up, formats[1], expert)
        inner = swiglu_oai(g, u, alpha, limit).astype(x.dtype)
        output = multiply(inner, down, formats[2], expert).astype(x.dtype).astype(jnp.float32)
        return jnp.where(used, output * flat_weights[pairs][:, None], jnp.float32(0))

    def step(total: jax.Array, tile: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        expert, pairs = tile

        def add(total: jax.Array) -> jax.Array:
            rows = jnp.where(pairs >= 0, pairs // k, num_rows)  # beyond the end: dropped
            return total.at[rows].add(compute(expert, pairs), mode="drop")

        return lax.cond(expert >= 0, add, lambda total: total, total), None

    total = varying_like(jnp.zeros(x.shape, jnp.float32), x, experts, weights, gate, up, down)
    return lax.scan(step, total, (routing.expert, routing.pairs))[0]
