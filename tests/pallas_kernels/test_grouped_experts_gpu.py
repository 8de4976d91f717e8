"""Every form of `grouped_experts` on an NVIDIA GPU: fresh data in every format and tile, mutants, loops, vmap.

    export XLA_FLAGS=--xla_gpu_autotune_level=0 XLA_PYTHON_CLIENT_PREALLOCATE=false
    pytest -n 8 tests/pallas_kernels/test_grouped_experts_gpu.py

Without the first variable XLA tries many ways to multiply the matrices of each reference.
"""

import dataclasses
import functools
import re
import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts_cases import (
    ALPHA,
    BFLOAT16,
    FORMATS,
    LIMIT,
    MISREADINGS,
    SITUATIONS,
    Case,
    assert_close,
    choices,
    oracle,
    random_case,
)
from gpu_marks import MARKS, needs_gpu, needs_sm90, needs_triton

from pallas_kernels.grouped_experts.api import grouped_experts
from pallas_kernels.grouped_experts.reference import grouped_experts_reference

# Mosaic has no form for plain stacks.
EVERY = [
    pytest.param(name, kind, marks=MARKS[name])
    for name in MARKS
    for kind in FORMATS
    if (name, kind) != ("mosaic", "plain")
]
KERNELS = [pytest.param(name, marks=MARKS[name]) for name in ("mosaic", "triton")]
# Sizes that all kernels take: scales of 16 bytes a row in every copy of the Mosaic kernels.
SIZES: dict[str, Any] = dict(hidden=1024, inner=1024, dtype="bfloat16")
STATIC: dict[str, Any] = dict(alpha=ALPHA, limit=LIMIT)


@functools.cache
def program(implementation: str | None):
    return jax.jit(functools.partial(grouped_experts, **STATIC, implementation=implementation))


def run(case: Case, implementation: str | None) -> jax.Array:
    # Leaves NaN where the next results will probably be allocated: what a kernel does not write shows.
    places = 4 * case.experts.size + 512
    poison = [jnp.full((places, 1024), jnp.nan, dtype) for dtype in (jnp.bfloat16, jnp.float32) for _ in range(2)]
    jax.block_until_ready(poison)
    del poison
    return program(implementation)(*case.arrays())


def fresh_seed() -> int:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return seed


@pytest.mark.parametrize("implementation, kind", EVERY)
def test_situations(implementation: str, kind: str) -> None:
    base = random_case(fresh_seed(), choices("random", 6), kind=kind, **SIZES)
    for situation in SITUATIONS:
        chosen = choices(situation, 6)
        case = dataclasses.replace(
            base, x=base.x[: len(chosen)], experts=jnp.asarray(chosen, jnp.int32), weights=base.weights[: len(chosen)]
        )
        assert_close(run(case, implementation), oracle(case), BFLOAT16)


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 17, 40, 64, 129, 512, 1000])
@pytest.mark.parametrize("implementation, kind", EVERY)
def test_every_tile(implementation: str, kind: str, rows: int) -> None:
    """From a tile of 8 rows to the largest, several tiles an expert, some with few rows, no multiple of a tile."""
    chosen = np.argsort(np.random.default_rng(rows).normal(size=(rows, 16)) + np.arange(16) / 8)[:, :4]
    case = random_case(fresh_seed(), chosen, kind=kind, experts=16, **SIZES)
    expected = jax.jit(functools.partial(grouped_experts_reference, **STATIC))(*case.arrays())
    actual = run(case, implementation)
    assert_close(actual, np.asarray(expected, np.float64), BFLOAT16)
    if implementation != "xla":  # whose sums are atomic
        np.testing.assert_array_equal(run(case, implementation), actual)  # a moving error is a race


@pytest.mark.parametrize("implementation, kind", EVERY)
def test_small_sizes(implementation: str, kind: str) -> None:
    case = random_case(
        fresh_seed(), choices("some choices without", 6), kind=kind, hidden=128, inner=64, dtype="bfloat16"
    )
    try:
        actual = run(case, implementation)
    except NotImplementedError as reason:
        assert implementation == "mosaic" and "copies of 16 bytes" in str(reason)
        pytest.skip(str(reason))
    assert_close(actual, oracle(case), BFLOAT16)


@pytest.mark.parametrize("down", FORMATS)
@pytest.mark.parametrize("implementation, kind", EVERY)
def test_formats_of_their_own(implementation: str, kind: str, down: str) -> None:
    if kind == down:
        pytest.skip("one format: see the other tests")
    if implementation == "mosaic" and down == "plain":
        pytest.skip("Mosaic has no form for plain stacks")
    for rows in (9, 60):
        case = random_case(fresh_seed(), choices("random", 6, rows=rows), kind=kind, down=down, **SIZES)
        assert_close(run(case, implementation), oracle(case), BFLOAT16)


@pytest.mark.parametrize("implementation", KERNELS)
def test_extreme_scales(implementation: str) -> None:
    """Blocks of zeros and of subnormal codes, scale bytes from 2^-126 to 2^33."""
    case = random_case(fresh_seed(), choices("random", 6), kind="mxfp8", **SIZES)
    scale, codes = np.asarray(case.down.scale).copy(), np.asarray(case.down.codes).view(np.uint8).copy()
    codes[0, :, :32], codes[1, :, :32], scale[2, :, 0], scale[3, :, 1] = 0, codes[1, :, :32] & 0x87, 1, 160
    down = dataclasses.replace(
        case.down, codes=jnp.asarray(codes.view(case.down.codes.dtype)), scale=jnp.asarray(scale)
    )
    case = dataclasses.replace(case, down=down)
    assert_close(run(case, implementation), oracle(case), BFLOAT16)


@pytest.mark.parametrize("misread, kind", MISREADINGS, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize("implementation", KERNELS)
def test_misread_inputs_are_caught(implementation: str, misread: Any, kind: str) -> None:
    if implementation == "mosaic" and kind == "plain":
        pytest.skip("Mosaic has no form for plain stacks")
    case = random_case(fresh_seed(), choices("random", 6), kind=kind, **SIZES)
    expected = oracle(case)
    assert_close(run(case, implementation), expected, BFLOAT16)
    with pytest.raises(AssertionError):
        assert_close(run(misread(case), implementation), expected, BFLOAT16)
    with pytest.raises(AssertionError):  # a gate that is clamped from below as well
        assert_close(run(case, implementation), oracle(case, lowest=-LIMIT), BFLOAT16)


@pytest.mark.parametrize("implementation, kind", EVERY)
def test_idle_experts_are_not_read(implementation: str, kind: str) -> None:
    case = random_case(fresh_seed(), choices("an expert without rows", 6), kind=kind, **SIZES)

    def spoil(weight: Any) -> Any:
        if kind == "plain":
            return weight.at[2].set(jnp.nan)
        if kind == "mxfp8":
            return dataclasses.replace(weight, scale=weight.scale.at[2].set(255))
        return dataclasses.replace(weight, global_scale=weight.global_scale.at[2].set(jnp.nan))

    spoilt = dataclasses.replace(case, gate=spoil(case.gate), up=spoil(case.up), down=spoil(case.down))
    assert_close(run(spoilt, implementation), oracle(case), BFLOAT16)


@pytest.mark.parametrize("implementation", KERNELS)
def test_padding_rows_may_hold_anything(implementation: str) -> None:
    case = random_case(fresh_seed(), choices("some rows without", 6), kind="mxfp8", **SIZES)
    dead = jnp.asarray(np.asarray(case.experts)[:, 0] == 6)[:, None]
    dirty = dataclasses.replace(
        case, x=jnp.where(dead, jnp.asarray(jnp.nan, case.x.dtype), case.x),
        weights=jnp.where(dead, jnp.float32(jnp.nan), case.weights),
    )  # fmt: skip
    assert_close(run(dirty, implementation), oracle(case), BFLOAT16)


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4 divide"])
@pytest.mark.parametrize("implementation", KERNELS)
def test_runs_in_a_loop_without_copies_or_the_host(implementation: str, kind: str) -> None:
    case = random_case(fresh_seed(), choices("random", 6), kind=kind, **SIZES)

    def loop(x, experts, weights, gate, up, down):
        def body(i, x):
            out = grouped_experts(x, experts, weights, gate, up, down, **STATIC, implementation=implementation)
            return (0.5 * out).astype(x.dtype)

        return jax.lax.fori_loop(0, 3, body, x)

    compiled = jax.jit(loop).lower(*case.arrays()).compile()
    text = compiled.as_text()
    assert not re.search(r"\b(infeed|outfeed|send|recv|host-?transfer)\b", text)
    for stack in (case.gate, case.down):  # no operation but the kernel makes or moves an array as large as the codes
        size = ",".join(map(str, stack.codes.shape))
        flat = f"{stack.codes.shape[0] * stack.codes.shape[1]},{stack.codes.shape[2]}"
        moved = re.findall(rf"= \w+\[(?:{size}|{flat})\]\S* (\S+?)\(", text)
        assert set(moved) <= {"parameter", "get-tuple-element", "bitcast"}, set(moved)
    x = case.x
    for _ in range(3):
        x = (0.5 * run(dataclasses.replace(case, x=x), implementation)).astype(x.dtype)
    np.testing.assert_array_equal(np.float32(compiled(*case.arrays())), np.float32(x))


@pytest.mark.parametrize("implementation", KERNELS)
def test_vmap_folds_into_the_rows(implementation: str) -> None:
    cases = [random_case(1, choices(s, 6), kind="mxfp8", **SIZES) for s in ("random", "some choices without")]
    first = cases[0]

    def one(x, experts, weights):
        return grouped_experts(
            x, experts, weights, first.gate, first.up, first.down, **STATIC, implementation=implementation
        )

    stacked = [jnp.stack([getattr(c, name) for c in cases]) for name in ("x", "experts", "weights")]
    for out, case in zip(jax.jit(jax.vmap(one))(*stacked), cases, strict=True):
        assert_close(out, oracle(case), BFLOAT16)
    with pytest.raises(NotImplementedError, match="maps over rows, not over stacks"):
        jax.vmap(lambda gate: grouped_experts(
            first.x, first.experts, first.weights, gate, first.up, first.down, **STATIC, implementation=implementation
        ))(jax.tree.map(lambda a: a[None], first.gate))  # fmt: skip


@needs_sm90
@needs_triton
@pytest.mark.parametrize("rows", [1, 8, 37, 64, 128])
def test_routing_in_one_launch_gives_the_same_bits(rows: int) -> None:
    chosen = np.argsort(np.random.default_rng(rows).normal(size=(rows, 16)) + np.arange(16) / 8)[:, :4]
    for kind in ("mxfp8", "nvfp4 divide"):
        case = random_case(fresh_seed(), np.where(chosen == 3, 16 + rows % 2, chosen), kind=kind, experts=16, **SIZES)
        positions = jnp.asarray(np.where(np.arange(rows) % 5 == 2, -1, 9), jnp.int32)

        def call(x, experts, weights, positions, routing, case=case):
            arrays = x, experts, weights, case.gate, case.up, case.down, positions
            return grouped_experts(*arrays, **STATIC, implementation="mosaic", routing=routing)

        inputs = case.x, case.experts, case.weights, positions
        apart, together = (jax.jit(functools.partial(call, routing=name))(*inputs) for name in ("xla", "triton"))
        np.testing.assert_array_equal(together, apart)
        without = jnp.where(positions[:, None] < 0, 16, case.experts)
        assert_close(together, oracle(dataclasses.replace(case, experts=without)), BFLOAT16)
        if rows == 64:
            split = [a.reshape(2, 32, *a.shape[1:]) for a in inputs]
            mapped = jax.jit(jax.vmap(functools.partial(call, routing=None)))(*split)
            # Tiles are cut for the rows of one example, so sums are in another order than those of all 64 rows.
            assert_close(mapped.reshape(together.shape), oracle(dataclasses.replace(case, experts=without)), BFLOAT16)

            def loop(x, experts, weights, positions, call=call):
                body = lambda i, total: total + call(x, experts, weights, positions, "triton")  # noqa: E731
                return jax.lax.fori_loop(0, 3, body, jnp.zeros(x.shape, jnp.float32))

            np.testing.assert_allclose(jax.jit(loop)(*inputs), 3 * together, rtol=1e-6)


@pytest.mark.parametrize("implementation", KERNELS)
def test_a_derivative_raises(implementation: str) -> None:
    case = random_case(1, choices("random", 6), kind="mxfp8", **SIZES)

    def loss(x: jax.Array) -> jax.Array:
        return grouped_experts(x, *case.arrays()[1:], **STATIC, implementation=implementation).sum()

    with pytest.raises(NotImplementedError, match="differentiate implementation='xla'"):
        jax.grad(loss)(case.x)


@needs_gpu
@pytest.mark.parametrize("kind", FORMATS)
def test_none_serves_what_kernels_refuse(kind: str) -> None:
    for dtype, into in (("float32", 96), ("bfloat16", 96), ("bfloat16", 64)):
        case = random_case(
            fresh_seed(), choices("random", 6), kind=kind, hidden=into, inner=48 if kind == "plain" else 96, dtype=dtype
        )
        assert_close(run(case, None), oracle(case), BFLOAT16)
