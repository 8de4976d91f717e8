"""The Triton kernels of `grouped_experts` on a CPU, by Triton's interpreter and the assembly by `ptx`: see
`triton_interpreter` for how to run this."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
import ptx
import pytest
from experts_cases import (
    BFLOAT16,
    FORMATS,
    LIMIT,
    MISREADINGS,
    Case,
    assert_close,
    choices,
    describe,
    oracle,
    random_case,
)
from triton_interpreter import interpreted, requires_interpreter

from pallas_kernels.grouped_experts import routing, triton


class Results:
    def __init__(self, handles: list[Any]):
        self.handles = handles

    def get_result(self, i: int) -> Any:
        return self.handles[i]


def inline_assembly(text: str, constraints: str, values: list[Any], types: list[Any], pure: bool, pack: int) -> Results:
    """Every `pack` elements are a register, in and out; all results are bfloat16."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    outputs = sum(c.strip().startswith("=") for c in constraints.split(","))
    registers = [np.ascontiguousarray(v.data).reshape(-1).view(np.uint32) for v in values]
    results = ptx.run(text, registers, outputs)
    each = outputs // len(types)
    handles = []
    for i in range(len(types)):
        bits = np.stack(results[i * each : (i + 1) * each], -1).astype(np.uint32).view(np.uint16)
        handles.append(TensorHandle(bits.reshape(values[0].data.shape), tl.bfloat16))
    return Results(handles)


@contextlib.contextmanager
def bfloat16_and_assembly() -> Iterator[None]:
    """What the interpreter lacks: inline assembly, and arithmetic and rounding of bfloat16."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    builder: Any = interpreter_builder
    before = {name: getattr(builder, name) for name in ("create_inline_asm", "create_fmul", "cast_impl")}

    def multiply(a: Any, b: Any) -> Any:
        if a.dtype.scalar != tl.bfloat16:
            return before["create_fmul"](a, b)
        product = np.multiply(*(v.data.view(ml_dtypes.bfloat16).astype(np.float32) for v in (a, b)))
        return TensorHandle(product.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)

    def cast(source: Any, target: Any) -> Any:
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return before["cast_impl"](source, target)
        return TensorHandle(source.data.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)

    builder.create_inline_asm, builder.create_fmul, builder.cast_impl = inline_assembly, multiply, cast
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(builder, name, function)


def run(case: Case, tile: int, tiles_first: bool = False) -> jax.Array:
    problem, arrays = describe(case)
    tunings = tuple(dataclasses.replace(t, tiles_first=tiles_first) for t in triton.plan(problem, tile))
    with interpreted(), bfloat16_and_assembly():
        return triton.grouped_experts_triton(
            case.x, case.experts, case.weights, *arrays, problem=problem, tile=tile, tunings=tunings
        )


SIZES: dict[str, Any] = dict(hidden=192, inner=128, dtype="bfloat16")


@requires_interpreter
@pytest.mark.parametrize("tile", [8, 16, 32])
@pytest.mark.parametrize("kind", FORMATS)
def test_equals_the_loop(kind: str, tile: int) -> None:
    situations = [("some choices without", 13), ("all rows on the same experts", 19)]
    for situation, rows in situations[: 2 if tile == 16 else 1]:
        case = random_case(1, choices(situation, 6, rows=rows), kind=kind, **SIZES)
        assert_close(run(case, tile, tiles_first=rows == 19), oracle(case), BFLOAT16)


@requires_interpreter
@pytest.mark.parametrize("tile", [8, 16])
@pytest.mark.parametrize("kind, down", [("plain", "nvfp4 divide"), ("nvfp4 divide", "mxfp8"), ("mxfp8", "plain")])
def test_formats_of_their_own(kind: str, down: str, tile: int) -> None:
    case = random_case(2, choices("random", 6, rows=13), kind=kind, down=down, **SIZES)
    assert_close(run(case, tile), oracle(case), BFLOAT16)


@requires_interpreter
@pytest.mark.parametrize("misread, kind", MISREADINGS, ids=lambda value: getattr(value, "__name__", value))
def test_misread_inputs_are_caught(misread, kind: str) -> None:
    case = random_case(3, choices("random", 6, rows=5), kind=kind, **SIZES)
    with pytest.raises(AssertionError):
        assert_close(run(misread(case), 8), oracle(case), BFLOAT16)


@requires_interpreter
def test_mutants_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(4, choices("random", 6, rows=13), kind="mxfp8", **SIZES)
    with pytest.raises(AssertionError):
        assert_close(run(case, 8), oracle(case, lowest=-LIMIT), BFLOAT16)

    def wrong(*args, **options):
        right = routing.route(*args, **options)
        return right._replace(tiles=np.concatenate([right.tiles[:1], np.roll(right.tiles[1:], 1)]))

    monkeypatch.setattr(triton, "route", wrong)
    with pytest.raises(AssertionError):
        assert_close(run(case, 8), oracle(case), BFLOAT16)
