"""Choosing an implementation, and what the kernels that XLA cannot look into have in common."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

Kernel = Callable[..., tuple[jax.Array, jax.Array]]
FORMS = ("mosaic", "triton", "xla")  # of any function; not every function has all
_REMEDY = "None takes the best form that serves this call, and 'xla' runs on every device."


def device_of(*arrays: Any) -> Any:
    """The device the call will run on: that of a concrete argument, else the default one."""
    for array in arrays:
        if isinstance(array, jax.Array) and not isinstance(array, Tracer):
            return next(iter(array.devices()))
    default = jax.config.jax_default_device
    if isinstance(default, str):
        return jax.devices(default)[0]
    return default if default is not None else jax.devices()[0]


def choose(function: str, implementation: str | None, builders: Mapping[str, Callable[[], Kernel]]) -> Kernel:
    """The named implementation, or the first of `builders` that takes this call.

    A builder raises NotImplementedError, with the reason, when it cannot serve the call; a named implementation
    passes that on and the automatic choice goes to the next.
    """
    if implementation is not None:
        if not isinstance(implementation, str) or implementation not in {*FORMS, *builders}:
            raise ValueError(
                f"{function}: unknown implementation {implementation!r}; known: None, {', '.join(map(repr, builders))}."
            )
        if implementation not in builders:
            forms = " and ".join(map(repr, builders))
            raise NotImplementedError(f"{function} has no form {implementation!r}, only {forms}. {_REMEDY}")
        try:
            return builders[implementation]()
        except NotImplementedError as error:
            raise NotImplementedError(f"{function}(implementation={implementation!r}): {error} {_REMEDY}") from None
    for builder in list(builders.values())[:-1]:
        try:
            return builder()
        except NotImplementedError:
            continue
    return list(builders.values())[-1]()


def require_cuda(device: Any, what: str) -> tuple[int, int]:
    """The compute capability of `device`, or NotImplementedError when it is no NVIDIA GPU."""
    capability = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or capability is None:
        raise NotImplementedError(f"{what} runs on NVIDIA GPUs, and this call runs on {device.platform}.")
    try:
        major, minor = (int(part) for part in str(capability).split("."))
    except ValueError:
        raise NotImplementedError(f"{what} runs on NVIDIA GPUs, and this one reports {capability!r}.") from None
    return major, minor


def without_derivative(function: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, but an error with a way out for whoever differentiates it."""

    def kernel_without_derivative(*args: Any) -> Any:
        return run(*args)

    guarded = jax.custom_jvp(kernel_without_derivative)

    @guarded.defjvp
    def no_derivative(primals: Any, tangents: Any) -> Any:
        raise NotImplementedError(f"{function} has no derivative on this device: differentiate implementation='xla'.")

    return guarded


def opaque[Result: tuple[jax.Array, ...]](
    function: str, kernel: Callable[..., Result], roles: tuple[str, ...]
) -> Callable[..., Result]:
    """`kernel` with a vmap rule that folds into the batch, and without a derivative.

    `roles` says what each argument's leading axis is: "row" (the batch), "pages" (the pool of pages) or "table" (the
    batch, and the entries are page ids).
    """

    @jax.custom_batching.custom_vmap
    def folded(*args: jax.Array) -> Any:
        return kernel(*args)

    @folded.def_vmap
    def fold(axis_size: int, batched: list[bool], *args: jax.Array) -> tuple[Any, Any]:
        pools = [b for b, role in zip(batched, roles, strict=True) if role == "pages"]
        own_pages = any(pools)
        flat = []
        for array, is_batched, role in zip(args, batched, roles, strict=True):
            if role == "pages" and not own_pages:
                flat.append(array)
                continue
            if not is_batched:
                array = jnp.broadcast_to(array[None], (axis_size, *array.shape))
            if role == "table" and own_pages:
                pages_each = args[roles.index("pages")].shape[int(batched[roles.index("pages")])]
                array = array + pages_each * jnp.arange(axis_size, dtype=jnp.int32)[:, None, None]
            flat.append(array.reshape(array.shape[0] * array.shape[1], *array.shape[2:]))
        outs = folded(*flat)
        return tuple(o.reshape(axis_size, -1, *o.shape[1:]) for o in outs), (True,) * len(outs)

    return without_derivative(function, folded)


def opaque_rows(function: str, kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`kernel(x [rows, ...], *weights) -> [rows, ...]` with a vmap rule and without a derivative.

    A batch of x is folded into its rows; batches that have weights of their own run one after the other.
    """

    @jax.custom_batching.custom_vmap
    def folded(*args: jax.Array) -> jax.Array:
        return kernel(*args)

    @folded.def_vmap
    def fold(axis_size: int, batched: list[bool], *args: jax.Array) -> tuple[Any, bool]:
        if any(batched[1:]):
            each = [a for a, is_batched in zip(args, batched, strict=True) if is_batched]

            def one(own: list[jax.Array]) -> jax.Array:
                rest = iter(own)
                return folded(*(next(rest) if b else a for a, b in zip(args, batched, strict=True)))

            return jax.lax.map(one, each), True
        x, *weights = args
        out = folded(x.reshape(-1, *x.shape[2:]), *weights)
        return out.reshape(axis_size, -1, *out.shape[1:]), True

    return without_derivative(function, folded)
