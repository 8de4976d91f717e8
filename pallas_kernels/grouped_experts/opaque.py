"""What the kernels of `grouped_experts` share: vmap folds into the rows, no derivative, the sum over choices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch


def opaque(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`kernel(x, experts, weights, positions, gate, up, down)` as something that XLA cannot look into."""

    @jax.custom_batching.custom_vmap
    def folded(*args: Any) -> jax.Array:
        return kernel(*args)

    @folded.def_vmap
    def fold(axis_size: int, batched: list[Any], *args: Any) -> tuple[jax.Array, bool]:
        *rows, gate, up, down = args
        if any(jax.tree.leaves(batched[4:])):
            raise NotImplementedError(
                "grouped_experts: a kernel maps over rows, not over stacks of experts; use implementation='xla' there."
            )
        rows = [
            a if is_batched else jnp.broadcast_to(a[None], (axis_size, *a.shape))
            for a, is_batched in zip(rows, batched[:4], strict=True)
        ]
        out = folded(*(a.reshape(-1, *a.shape[2:]) for a in rows), gate, up, down)
        return out.reshape(axis_size, -1, out.shape[-1]), True

    return _dispatch.without_derivative("grouped_experts", folded)


def masked(form: Callable[..., jax.Array], num_experts: int) -> Callable[..., jax.Array]:
    """`form(x, experts, weights, *stacks)` with positions before the stacks: padding chooses no expert."""

    def run(x: jax.Array, experts: jax.Array, weights: jax.Array, positions: jax.Array, *stacks: Any) -> jax.Array:
        return form(x, without_padding(experts, positions, num_experts), weights, *stacks)

    return run


def without_padding(experts: jax.Array, positions: jax.Array, num_experts: int) -> jax.Array:
    return jnp.where(positions[:, None] >= 0, experts, num_experts)


def combine(outputs: jax.Array, places: jax.Array, live: jax.Array, weights: jax.Array) -> jax.Array:
    """Sum over the choices of weight · output, float32 [N, H]; `outputs` has the row of a pair at its place.

    Choices that are not `live` [N, k] are passed over, whatever is in their row and weight.
    """
    # Written out: one elementwise kernel that adds in a fixed order.
    total = jnp.zeros((places.shape[0], outputs.shape[-1]), jnp.float32)
    for j in range(places.shape[1]):
        each = outputs.at[places[:, j]].get(mode="promise_in_bounds").astype(jnp.float32)
        total = total + jnp.where(live[:, j, None], each * weights[:, j, None], jnp.float32(0))
    return total
