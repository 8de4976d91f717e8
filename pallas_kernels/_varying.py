"""Loops inside `shard_map`: their state varies over the mesh axes over which what goes into it varies."""

from typing import Any

import jax
import jax.numpy as jnp


def varying_like[State](state: State, *arrays: Any) -> State:
    """The first state of a loop (a pytree of arrays), varying over all axes over which one of `arrays` does.

    By adding a zero made from each: which axes an array varies over has no lasting name in JAX. XLA drops the sums.
    """
    zeros = [jnp.zeros_like(leaf, jnp.float32, shape=()) for leaf in jax.tree.leaves(arrays)]

    def vary(x: jax.Array) -> jax.Array:
        return x + sum(zeros, jnp.float32(0)).astype(x.dtype)

    return jax.tree.map(vary, state)
