"""What the Triton forms share: the check of the device, and how rows are cut."""

import math
from typing import Any

import jax.numpy as jnp

from pallas_kernels import _dispatch

LOG2_E = math.log2(math.e)
OLDEST = (8, 0)  # the first NVIDIA architecture with bfloat16 matrix units


def require_triton(dtype: Any, device: Any) -> int:
    """Number of multiprocessors of `device`, or NotImplementedError with the reason."""
    capability = _dispatch.require_cuda(device, "the Triton kernel")
    if capability < OLDEST:
        raise NotImplementedError(f"the Triton kernel needs compute capability 8.0, {device.device_kind} has less.")
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"the Triton kernel takes bfloat16 and float16, got {dtype}.")
    try:
        import jax_triton  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        reason = str(error).splitlines()[0]
        raise NotImplementedError(f"jax-triton cannot be imported ({reason}); install dspark-jax[triton].") from None
    return int(getattr(device, "core_count", 108))


def power_of_two(n: int, least: int = 16) -> int:
    """The next power of two that is at least `n` and `least`, the smallest side of a Triton dot."""
    return max(least, 1 << (n - 1).bit_length())
