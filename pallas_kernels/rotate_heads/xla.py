"""`rotate_heads` through XLA: any device, any size, with derivatives."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rotate_heads.problem import Problem, angles


def rotate_heads_xla(
    x: jax.Array, positions: jax.Array, *caches_and_weights: jax.Array, problem: Problem
) -> tuple[jax.Array, ...]:
    p, rest = problem, iter(caches_and_weights)
    caches = [next(rest) for segment in p.segments if segment.cached]
    weights = list(rest)
    table = angles(positions, p)[:, :, None, :]
    cos, sin = table[..., : p.half], table[..., p.half :]
    split = x.reshape(*x.shape[:2], p.heads, p.head_dim)
    results, caches, weights = [], iter(caches), iter(weights)
    for segment in p.segments:
        heads = split[:, :, segment.start : segment.end]
        if segment.normed:
            heads = _rotate(_normalize(heads, next(weights), p), cos, sin).astype(x.dtype)
        results.append(_write(next(caches), heads, positions, p.ring) if segment.cached else heads)
    return tuple(results)


def _normalize(x: jax.Array, weight: jax.Array, p: Problem) -> jax.Array:
    x32, scale = x.astype(jnp.float32), weight.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + p.eps)
    return x32 * jnp.broadcast_to(1.0 + scale if p.plus_one else scale, x.shape)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    half = cos.shape[-1]
    a, b, rest = jnp.split(x, [half, 2 * half], axis=-1)
    cos, sin = (jnp.broadcast_to(each, a.shape) for each in (cos, sin))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def _write(cache: jax.Array, heads: jax.Array, positions: jax.Array, ring: bool) -> jax.Array:
    slots = cache.shape[1]
    place = jnp.where(positions < 0, slots, positions % slots if ring else positions)
    batch = jnp.arange(cache.shape[0], dtype=jnp.int32)[:, None]
    return cache.at[batch, place].set(heads, mode="drop")
