"""The public function `rotate_heads`."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import _arguments, _dispatch
from pallas_kernels.rotate_heads.problem import Problem, Segment
from pallas_kernels.rotate_heads.xla import rotate_heads_xla


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    """Neighbouring heads of a projection that are treated alike.

    Attributes:
      count: how many.
      weight: [D], that of their norm, behind which they are rotated; None: they stay as they are (values).
      cache: [B, S, count, D], or [B, S, D] for one head, in which slot p of a row holds position p; None: wanted as an
        array of their own.
    """

    count: int
    weight: Any = None
    cache: Any = None


def rotate_heads(
    x: Float[Array, "B T F"],
    positions: Int32[Array, "B T"],
    heads: Iterable[Heads],
    *,
    head_dim: int,
    rotary_dim: int,
    theta: float,
    eps: float,
    plus_one: bool,
    ring: bool = False,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """Norms and rotates heads of a joined projection, and writes those that have a cache into it.

    A head's D values are divided by their root mean square, scaled by its weight, and the first `rotary_dim` of them
    are rotated by the angles of its position (NeoX halves: i pairs with i + rotary_dim / 2), in float32, rounded once.

    Args:
      x: bfloat16, float16 or float32; F = D times all heads, those of `heads` one after the other.
      positions: of the tokens; -1 marks padding, which no cache gets.
      heads: what lies in x, in order.
      head_dim: D.
      rotary_dim, theta: the angle of dim i < rotary_dim / 2 at position p is p · theta ** (-2 i / rotary_dim).
      eps: added to the mean square.
      plus_one: scale by 1 + weight (Gemma), added in float32.
      ring: slot p % S of a cache holds position p, and no two positions of a row may share a slot; else positions of S
        and more are not written.
      implementation: None for the best one for this device, or "mosaic", "xla". The kernel writes into the caches where
        they are if nobody else needs them as they were.

    Returns:
      For each of `heads` its values [B, T, count, D] in x's dtype, or its cache with them written.

    Raises:
      TypeError, ValueError: an argument does not fit.
      NotImplementedError: the named implementation cannot serve this call; the message says why. Or the call is
        differentiated through a kernel: only "xla" has a derivative.
    """
    if not isinstance(heads, Iterable):
        raise TypeError(f"heads must be several Heads, such as a list, found {type(heads).__name__}.")
    heads = tuple(heads)  # a generator gives them once
    head_dim, rotary_dim = (
        _arguments.check_integer(name, value) for name, value in (("head_dim", head_dim), ("rotary_dim", rotary_dim))
    )
    plus_one, ring = _arguments.check_flag("plus_one", plus_one), _arguments.check_flag("ring", ring)
    problem = _describe(x, positions, heads, head_dim, rotary_dim, theta, eps, plus_one, ring)
    weights = [each.weight for each in heads if each.weight is not None]
    caches = [
        each.cache.reshape(*each.cache.shape[:2], each.count, head_dim) for each in heads if each.cache is not None
    ]

    def mosaic() -> Any:
        from pallas_kernels.rotate_heads import mosaic_sm90

        return mosaic_sm90.build(*arrays, problem=problem)

    def xla() -> Any:
        return functools.partial(rotate_heads_xla, problem=problem)

    arrays = [jnp.asarray(a) for a in (x, positions, *caches, *weights)]
    run: Any = _dispatch.choose("rotate_heads", implementation, {"mosaic": mosaic, "xla": xla})
    out = iter(run(*arrays))
    results = [next(out) for _ in heads]
    return tuple(
        result if each.cache is None else result.reshape(each.cache.shape)
        for result, each in zip(results, heads, strict=True)
    )


def _describe(
    x: Any, positions: Any, heads: Sequence[Any], head_dim: int, rotary_dim: int, theta: float, eps: float,
    plus_one: bool, ring: bool,
) -> Problem:  # fmt: skip
    for i, each in enumerate(heads):
        if not isinstance(each, Heads):
            raise TypeError(f"heads[{i}] must be a Heads, found {type(each).__name__}.")
        if (count := _arguments.check_integer(f"heads[{i}].count", each.count)) < 1:
            raise ValueError(f"heads[{i}].count must be at least 1, got {count}.")
    given = {f"heads[{i}].{name}": getattr(each, name) for i, each in enumerate(heads) for name in ("weight", "cache")}
    _arguments.check_arrays(x=x, positions=positions, **{k: v for k, v in given.items() if v is not None})
    if str(x.dtype) not in _arguments.FLOAT_DTYPES:
        raise TypeError(f"x must be one of {', '.join(_arguments.FLOAT_DTYPES)}, got {x.dtype}.")
    total = sum(each.count for each in heads)
    if not heads:
        raise ValueError("heads must hold at least one group of heads, got none.")
    if head_dim < 1:
        raise ValueError(f"head_dim must be at least 1, got {head_dim}.")
    if x.ndim != 3 or x.shape[2] != total * head_dim:
        raise ValueError(f"x must be [B, T, {total} heads x {head_dim}] for these heads, got {x.shape}.")
    if positions.shape != x.shape[:2] or positions.dtype != jnp.int32:
        raise ValueError(f"positions must be int32 [B, T] = {x.shape[:2]}, got {positions.dtype} {positions.shape}.")
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(f"rotary_dim must be even and in 2..{head_dim}, got {rotary_dim}.")
    for i, each in enumerate(heads):
        if each.weight is not None and each.weight.shape != (head_dim,):
            raise ValueError(f"heads[{i}].weight must be [{head_dim}], got {each.weight.shape}.")
        if each.weight is not None and not jnp.issubdtype(each.weight.dtype, jnp.floating):
            raise TypeError(f"heads[{i}].weight must be floating point, got {each.weight.dtype}.")
        if each.cache is None:
            continue
        shape = each.cache.shape
        one = each.count == 1 and len(shape) == 3 and shape[2] == head_dim
        if shape[:1] != x.shape[:1] or shape[1:2] == (0,) or not (one or shape[2:] == (each.count, head_dim)):
            raise ValueError(
                f"heads[{i}].cache must be [{x.shape[0]}, S >= 1, {each.count}, {head_dim}] for x {x.shape}, got "
                f"{shape}."
            )
        if each.cache.dtype != x.dtype:
            raise TypeError(f"heads[{i}].cache must have x's dtype {x.dtype}, got {each.cache.dtype}.")
    starts = itertools.accumulate((each.count for each in heads), initial=0)
    segments = tuple(
        Segment(start, each.count, each.weight is not None, each.cache is not None)
        for start, each in zip(starts, heads, strict=False)
    )
    theta, eps = _arguments.check_constant("theta", theta), _arguments.check_constant("eps", eps)
    if theta <= 0 or eps < 0:
        raise ValueError(f"theta must be positive and eps not negative, got {theta} and {eps}.")
    return Problem(segments, head_dim, rotary_dim, theta, eps, plus_one, ring)
