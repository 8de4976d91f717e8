"""The public function `grouped_experts`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import _arguments, _dispatch
from pallas_kernels.grouped_experts import stacks
from pallas_kernels.grouped_experts.opaque import masked
from pallas_kernels.grouped_experts.problem import Problem
from pallas_kernels.grouped_experts.tuning import preferred
from pallas_kernels.grouped_experts.xla import grouped_experts_xla


def grouped_experts(
    x: Float[Array, "N H"],
    experts: Int32[Array, "N k"],
    weights: Float32[Array, "N k"],
    gate: Any,
    up: Any,
    down: Any,
    positions: Int32[Array, " N"] | None = None,
    *,
    alpha: float,
    limit: float,
    routing: str | None = None,
    implementation: str | None = None,
) -> Float32[Array, "N H"]:
    """Weighted sum of each row's experts: sum over j of weights[n, j] · down[e](swiglu(gate[e](x[n]), up[e](x[n]))).

    e = experts[n, j]; swiglu(g, u) = g · sigmoid(alpha · g) · (u + 1) with g = min(g, limit), u = clip(u, ±limit) (the
    SwiGLU of gpt-oss; the gate has no lower clamp). Everything between the matrices' inputs and the result is float32,
    but the inner activation and each expert's output, which are rounded to x's dtype; with bfloat16 x "xla" rounds the
    weights to it too, global scale and all, which kernels apply to the sums. An expert that no row chose is
    not read. Routing lists are made on the device, in static shapes: nothing waits for the host. Inside `shard_map` a
    device may hold some of the experts: take the number of its first one from `experts`, and sum what devices return.

    Args:
      x: rows, bfloat16, float16 or float32.
      experts: chosen experts; an index outside [0, E) computes nothing and adds nothing (padding).
      weights: factor of each choice.
      gate, up: stacks [E, F, H], each a plain array or a pytree with the attributes `codes` and `scale`: MXFP8 (codes
        float8_e4m3fn [E, F, H], scale uint8 [E, F, H / 32]) or NVFP4 (codes uint8 [E, F, H / 2], scale float8_e4m3fn
        [E, F, H / 16], global_scale float32 [E], global_scale_op "multiply" or "divide").
      down: the same for [E, H, F]; formats may differ from stack to stack.
      positions: a row at a negative position is padding: its choices compute nothing and add nothing. None: no row is.
      alpha, limit: constants of the activation, part of the program.
      routing: how "mosaic" makes its lists of rows: "triton" (one launch, up to 512 choices), "xla" (several), or None
        for the first of these that serves. The others know "xla" alone.
      implementation: None for the best one for this device, or "mosaic", "triton", "xla".

    Returns:
      float32 [N, H]. The same inputs give the same bits on every call of a kernel.

    Raises:
      TypeError, ValueError: an argument does not fit.
      NotImplementedError: the named implementation cannot serve this call; the message says why. Or the call is
        differentiated through a kernel: only "xla" has a derivative (of x, weights and plain stacks).
    """
    check_rows(x, experts, weights, positions)
    if routing not in (None, "triton", "xla"):
        raise ValueError(f"routing must be None, 'triton' or 'xla', got {routing!r}.")
    alpha, limit = _arguments.check_constant("alpha", alpha), _arguments.check_limit(limit)
    gate_stack, gate_form = stacks.read("gate", gate)
    num_experts, inner, hidden = stacks.size(gate_stack, gate_form)
    if hidden != x.shape[1]:
        raise ValueError(f"gate must be [E, F, H] with H = {x.shape[1]} of x {x.shape}, got H = {hidden}.")
    up_stack, up_form = stacks.read("up", up, (num_experts, inner, hidden))
    down_stack, down_form = stacks.read("down", down, (num_experts, hidden, inner))
    if positions is None:
        positions = jnp.zeros(x.shape[:1], jnp.int32)
    arrays = (x, experts, weights, positions, gate_stack, up_stack, down_stack)
    problem = Problem(
        rows=x.shape[0],
        choices=experts.shape[1],
        experts=num_experts,
        hidden=hidden,
        inner=inner,
        dtype=jnp.dtype(x.dtype),
        formats=(gate_form, up_form, down_form),
        dtypes=(gate_stack.codes.dtype, up_stack.codes.dtype, down_stack.codes.dtype),
        alpha=alpha,
        limit=limit,
    )

    def mosaic() -> _dispatch.Kernel:
        from pallas_kernels.grouped_experts import mosaic_sm90

        return mosaic_sm90.build(problem, _dispatch.device_of(*jax.tree.leaves(arrays)), routing)

    def triton_form() -> _dispatch.Kernel:
        from pallas_kernels.grouped_experts import triton

        require_no_kernel(routing, "the Triton kernel")
        return triton.build(problem, _dispatch.device_of(*jax.tree.leaves(arrays)))

    def xla() -> _dispatch.Kernel:
        require_no_kernel(routing, "the XLA form")
        form = functools.partial(grouped_experts_xla, formats=problem.formats, alpha=alpha, limit=limit)
        return masked(form, num_experts)  # pyright: ignore[reportReturnType]

    builders = {"mosaic": mosaic, "triton": triton_form, "xla": xla}
    builders = {name: builders[name] for name in preferred(problem)}
    run: Any = _dispatch.choose("grouped_experts", implementation, builders)
    return run(*jax.tree.map(jnp.asarray, arrays))


def require_no_kernel(routing: str | None, what: str) -> None:
    if routing == "triton":
        raise NotImplementedError(f"{what} makes its lists without a kernel: routing must be None or 'xla'.")


def check_rows(x: Any, experts: Any, weights: Any, positions: Any) -> None:
    given = {} if positions is None else dict(positions=positions)
    _arguments.check_arrays(x=x, experts=experts, weights=weights, **given)
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x must have shape [N, H] without an empty axis, got {x.shape}.")
    if str(x.dtype) not in _arguments.FLOAT_DTYPES:
        raise TypeError(f"x must be one of {', '.join(_arguments.FLOAT_DTYPES)}, got {x.dtype}.")
    if experts.ndim != 2 or experts.shape[0] != x.shape[0] or experts.shape[1] == 0:
        raise ValueError(f"experts must be [N, k] = [{x.shape[0]}, k >= 1] for x {x.shape}, got {experts.shape}.")
    if experts.dtype != jnp.int32:
        raise TypeError(f"experts must be int32, got {experts.dtype}; cast them with astype(jnp.int32).")
    if weights.shape != experts.shape:
        raise ValueError(f"weights must have the shape of experts {experts.shape}, got {weights.shape}.")
    if weights.dtype != jnp.float32:
        raise TypeError(f"weights must be float32, got {weights.dtype}; rounded weights spoil the sum.")
    if positions is not None and (positions.shape != x.shape[:1] or positions.dtype != jnp.int32):
        raise ValueError(
            f"positions must be int32 [N] = {x.shape[:1]} for x {x.shape}, got {positions.dtype} {positions.shape}."
        )
