"""`quantized_matmul` and its siblings as they are defined, in float32: the oracle of every other implementation."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._activations import swiglu_oai

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantized_matmul_reference(x: Float[Array, "*batch I"], weight: Any) -> Float[Array, "*batch O"]:
    if weight.codes.dtype == jnp.float8_e4m3fn:
        exponent = weight.scale.astype(jnp.int32) - 127
        scale = jnp.ldexp(jnp.ones(exponent.shape, jnp.float32), exponent)
        values = weight.codes.astype(jnp.float32) * jnp.repeat(scale, 32, axis=-1)
    else:
        low, high = weight.codes & jnp.uint8(15), weight.codes >> 4
        code = jnp.stack([low, high], axis=-1).reshape(*weight.codes.shape[:-1], -1).astype(jnp.int32)
        table = jnp.array([*E2M1, *(-v for v in E2M1)], jnp.float32)
        values = table[code] * jnp.repeat(weight.scale.astype(jnp.float32), 16, axis=-1)
        factor = weight.global_scale if weight.global_scale_op == "multiply" else 1 / weight.global_scale
        values = values * jnp.broadcast_to(factor, values.shape)
    with jax.default_matmul_precision("highest"):
        return jnp.einsum("...i,oi->...o", x.astype(jnp.float32), values).astype(x.dtype)


def quantized_matmuls_reference(
    x: Float[Array, "*batch I"], weights: Sequence[Any]
) -> tuple[Float[Array, "*batch _"], ...]:
    return tuple(quantized_matmul_reference(x, weight) for weight in weights)


def quantized_mlp_reference(
    x: Float[Array, "*batch I"], gate: Any, up: Any, down: Any, *, alpha: float, limit: float
) -> Float[Array, "*batch O"]:
    g, u = (a.astype(jnp.float32) for a in quantized_matmuls_reference(x, [gate, up]))
    return quantized_matmul_reference(swiglu_oai(g, u, alpha, limit).astype(x.dtype), down)
