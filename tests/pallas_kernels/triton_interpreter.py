"""Runs the Triton kernels on a CPU: `triton_call` of jax-triton, done by Triton's own interpreter.

    TRITON_INTERPRET=1 pytest tests/pallas_kernels/test_*_interpreted.py

The variable has to be set before Triton is imported, and then Triton compiles nothing: hence a run of its own. Inputs
lie between guards (NaN, or a large integer), so that a read outside an array shows in the result; outputs start as
NaN (or that integer), so that what is not written shows too; a write outside an array raises. Programs run one after
another: races do not show.
"""

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

GUARD = 1 << 14  # elements before and behind each array
BAD_INTEGER = 0x3FFFFFF

requires_interpreter = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs triton (dspark-jax[triton]) and a run of its own with TRITON_INTERPRET=1",
)


class Guarded:
    """An array in the middle of a larger one; looks like a pointer argument to Triton."""

    def __init__(self, shape: Sequence[int], dtype: Any, values: np.ndarray | None = None) -> None:
        self.dtype = np.dtype(dtype)
        bad = np.nan if self.dtype.kind == "f" or self.dtype == ml_dtypes.bfloat16 else BAD_INTEGER
        if self.dtype.itemsize == 1:
            bad = np.array(0x7F, np.uint8).view(self.dtype)  # NaN of float8_e4m3fn
        size = int(np.prod(shape))
        self.buffer = np.full(size + 2 * GUARD, bad, self.dtype)
        self.clean = self.buffer[:GUARD].copy()
        self.array = self.buffer[GUARD : GUARD + size].reshape(shape)
        if values is not None:
            self.array[...] = values

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def check(self, name: str) -> None:
        for guard in (self.buffer[:GUARD], self.buffer[GUARD + self.array.size :]):
            if guard.tobytes() != self.clean.tobytes():
                raise IndexError(f"{name}: written outside the array {self.array.shape}")


def _as_float32(handle: Any) -> np.ndarray:
    from triton.language import bfloat16

    # The interpreter keeps bfloat16 as its 16 bits, and multiplies these if one lets it.
    return handle.data.view(ml_dtypes.bfloat16).astype(np.float32) if handle.dtype.scalar == bfloat16 else handle.data


def _without_checks(kernel: Any) -> Any:
    """The kernel, and what it calls, without the test run's wrapper around every function: it hides their globals."""
    function = inspect.unwrap(kernel.fn)
    if function is not kernel.fn:
        kernel.fn = kernel.rewriter.fn = function
        for other in list(function.__globals__.values()):
            if type(other) is type(kernel):
                _without_checks(other)
    return kernel


def triton_call(
    *args: Any,
    kernel: Any,
    out_shape: Any,
    grid: tuple[int, ...],
    zeroed_outputs: Sequence[int] = (),
    input_output_aliases: dict[int, int] | None = None,
    name: str = "",
    num_warps: int | None = None,
    num_stages: int | None = None,
    **constants: Any,
) -> Any:
    """`jax_triton.triton_call` for concrete arrays."""
    from triton.runtime import interpreter

    single = not isinstance(out_shape, list | tuple)
    shapes = [out_shape] if single else list(out_shape)
    inputs = [Guarded(np.shape(a), np.asarray(a).dtype, np.asarray(a)) if np.ndim(a) else a for a in args]
    outputs = [Guarded(s.shape, s.dtype) for s in shapes]
    for index in zeroed_outputs:
        outputs[index].array[...] = 0
    for given, made in (input_output_aliases or {}).items():
        outputs[made] = inputs[given]
    builder = interpreter.interpreter_builder
    plain_dot, plain_patch = builder.create_dot, interpreter._patch_lang_tensor

    def dot(a: Any, b: Any, accumulator: Any, *rest: Any) -> Any:
        data = np.matmul(_as_float32(a).astype(np.float32), _as_float32(b).astype(np.float32)) + accumulator.data
        return interpreter.TensorHandle(data.astype(accumulator.data.dtype), accumulator.dtype.scalar)

    def patch(tensor: Any, scope: Any) -> None:
        plain_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())  # numpy 2.4 refuses int(array([1]))

    function = _without_checks(kernel).rewrite()
    interpreter._patch_lang_tensor = patch
    scope = interpreter._patch_lang(function)
    builder.create_dot = dot
    try:
        bound = inspect.getcallargs(function, *inputs, *outputs, **constants)
        bound = {n: v if n in constants else interpreter._implicit_cvt(v) for n, v in bound.items()}
        sizes = (*grid, 1, 1)[:3]
        builder.set_grid_dim(*sizes)
        for index in np.ndindex(*sizes):
            builder.set_grid_idx(*index)
            function(**bound)
    finally:
        builder.create_dot, interpreter._patch_lang_tensor = plain_dot, plain_patch
        scope.restore()
    for array in (*inputs, *outputs):
        if isinstance(array, Guarded):
            array.check(name or kernel.__name__)
    results = [jnp.asarray(o.array.copy()) for o in outputs]
    return results[0] if single else results


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Inside it, `import jax_triton` gives a module whose `triton_call` is the one above."""
    module: Any = types.ModuleType("jax_triton")
    module.triton_call = triton_call
    before = sys.modules.get("jax_triton")
    sys.modules["jax_triton"] = module
    try:
        with jax.ensure_compile_time_eval():
            yield
    finally:
        del sys.modules["jax_triton"]
        if before is not None:
            sys.modules["jax_triton"] = before


def rewrite(monkeypatch: pytest.MonkeyPatch, folder: Path, module: str, right: str, wrong: str) -> None:
    """Makes a mutant: until the test ends, `module` is its own text with `wrong` in place of each `right`."""
    text = Path(str(importlib.import_module(module).__file__)).read_text()
    assert right in text
    path = folder / f"{module}.py"
    path.write_text(text.replace(right, wrong))
    specification = importlib.util.spec_from_file_location(module, path)
    assert specification is not None and specification.loader is not None
    mutant = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(mutant)
    monkeypatch.setitem(sys.modules, module, mutant)
    package, name = module.rsplit(".", 1)
    monkeypatch.setattr(sys.modules[package], name, mutant)  # a function of the same name may hide the package
