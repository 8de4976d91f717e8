"""What the Triton forms share: the check of the device, how rows are cut, and two ways to launch a kernel."""

import functools
import math
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
POINTERS = dict(
    bfloat16="bf16", float16="fp16", float32="fp32", float8_e4m3fn="fp8e4nv", int8="i8", uint8="u8", int32="i32",
    uint32="u32",
)  # fmt: skip


def triton_call(*arguments: Any, **options: Any) -> Any:
    """`jax_triton.triton_call`, or the same through XLA."""
    if THROUGH_XLA:
        return call_through_xla(*arguments, **options)
    import jax_triton  # pyright: ignore[reportMissingImports]

    return jax_triton.triton_call(*arguments, **options)


def call_through_xla(
    *arguments: Any,
    kernel: Any,
    out_shape: Any,
    grid: tuple[int, ...],
    name: str,
    num_warps: int,
    num_stages: int = 3,
    input_output_aliases: dict[int, int] | None = None,
    **constants: Any,
) -> Any:
    """A Triton kernel as one of XLA's: it compiles what the front end of Triton makes, and launches it by itself.

    So the kernel can be part of a command buffer; what jax-triton launches cannot. An integer among the arguments is a
    constant of the kernel. The profiler shows the name of the kernel's function, and not `name`.
    """
    del name
    outs = list(out_shape) if isinstance(out_shape, list | tuple) else [out_shape]
    arrays = [a for a in arguments if not isinstance(a, int)]
    # Of a pointer its dtype, of a number the number.
    given = tuple(a if isinstance(a, int) else str(a.dtype) for a in (*arguments, *outs))
    capability = _dispatch.require_cuda(_dispatch.device_of(*arrays), "the Triton kernel")
    code = front_end(kernel, given, tuple(constants.items()), capability, num_warps, num_stages)
    sizes = {f"grid_{axis}": np.int32(n) for axis, n in zip("xyz", (*grid, 1, 1), strict=False)}
    return jax.ffi.ffi_call("__gpu$xla.gpu.triton", out_shape, input_output_aliases=input_output_aliases)(
        *arrays, name=kernel.fn.__name__, ir=code, num_warps=np.int32(num_warps), num_stages=np.int32(num_stages),
        debug=False, **sizes,
    )  # fmt: skip


@functools.cache
def front_end(
    kernel: Any,
    given: tuple[str | int, ...],
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
    arguments = dict(zip((n for n in names if n not in known), given, strict=True))
    pointers = {n: f"*{POINTERS[dtype]}" for n, dtype in arguments.items() if isinstance(dtype, str)}
    values = known | {n: value for n, value in arguments.items() if n not in pointers}
    source = ASTSource(
        fn=kernel,
        signature={n: pointers.get(n, "constexpr") for n in names},
        constexprs={(i,): values[n] for i, n in enumerate(names) if n in values},
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
