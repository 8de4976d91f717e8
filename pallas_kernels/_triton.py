"""What the Triton forms share: the check of the device, and how rows are cut."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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


THROUGH_XLA = False  # how `triton_call` has a kernel compiled and launched
POINTERS = dict(bfloat16="bf16", float16="fp16", float32="fp32", int32="i32", int8="i8", uint32="u32", uint8="u8")


def triton_call(
    *arrays: jax.Array,
    kernel: Any,
    out_shape: Any,
    grid: tuple[int, ...],
    name: str,
    num_warps: int,
    num_stages: int = 3,
    **constants: Any,
) -> Any:
    """`jax_triton.triton_call` for a kernel that takes arrays and constants alone, or the same through XLA.

    XLA compiles what the front end of Triton makes of the kernel and launches it as one of its own: it can be part of
    a command buffer; what jax-triton launches cannot.
    """
    if not THROUGH_XLA:
        import jax_triton  # pyright: ignore[reportMissingImports]

        return jax_triton.triton_call(
            *arrays, kernel=kernel, out_shape=out_shape, grid=grid, name=name, num_warps=num_warps,
            num_stages=num_stages, **constants,
        )  # fmt: skip
    outs = out_shape if isinstance(out_shape, Sequence) else [out_shape]
    dtypes = tuple(str(a.dtype) for a in (*arrays, *outs))
    capability = _dispatch.require_cuda(_dispatch.device_of(*arrays), "the Triton kernel")
    code = front_end(kernel, dtypes, tuple(constants.items()), capability, num_warps, num_stages)
    sizes = {f"grid_{axis}": np.int32(n) for axis, n in zip("xyz", (*grid, 1, 1), strict=False)}
    return jax.ffi.ffi_call("__gpu$xla.gpu.triton", out_shape)(
        *arrays, name=kernel.fn.__name__, ir=code, num_warps=np.int32(num_warps), num_stages=np.int32(num_stages),
        debug=False, **sizes,
    )  # fmt: skip


@functools.cache
def front_end(
    kernel: Any,
    dtypes: tuple[str, ...],
    constants: tuple[tuple[str, Any], ...],
    capability: tuple[int, int],
    num_warps: int,
    num_stages: int,
) -> str:
    """The kernel in Triton's intermediate language."""
    from triton._C.libtriton import ir  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler.compiler import ASTSource, make_backend  # pyright: ignore[reportMissingImports]

    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    backend = make_backend(target)
    options = backend.parse_options(dict(num_warps=num_warps, num_stages=num_stages))
    names, known = [parameter.name for parameter in kernel.params], dict(constants)
    pointers = dict(zip((n for n in names if n not in known), dtypes, strict=True))
    source = ASTSource(
        fn=kernel,
        signature={n: f"*{POINTERS[pointers[n]]}" if n in pointers else "constexpr" for n in names},
        constexprs={(names.index(n),): value for n, value in known.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in pointers},
    )
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    return stages["ttir"](module, {}).str_nodebug()
