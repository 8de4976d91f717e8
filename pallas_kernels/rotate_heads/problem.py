"""What `rotate_heads` is built for, and the angles that all forms take from XLA."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Segment:
    """`count` heads from number `start` on: whether they are normed and rotated, and whether they go into a cache."""

    start: int
    count: int
    normed: bool
    cached: bool

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclasses.dataclass(frozen=True)
class Problem:
    segments: tuple[Segment, ...]
    head_dim: int
    rotary_dim: int
    theta: float
    eps: float
    plus_one: bool
    ring: bool

    @property
    def half(self) -> int:
        return self.rotary_dim // 2

    @property
    def heads(self) -> int:
        return self.segments[-1].end


def angles(positions: jax.Array, problem: Problem) -> jax.Array:
    """float32 [*positions, rotary_dim]: the cosines, then the sines. The same for all layers, so one kernel a step."""
    lane, half = np.arange(problem.rotary_dim), problem.half
    frequency = jnp.asarray(problem.theta ** (-(lane % half) / half), jnp.float32)
    angle = positions.astype(jnp.float32)[..., None] * frequency[(None,) * positions.ndim]
    return jnp.where(jnp.broadcast_to(lane < half, angle.shape), jnp.cos(angle), jnp.sin(angle))
