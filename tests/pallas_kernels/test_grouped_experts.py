"""`grouped_experts` in its XLA form and its reference against float64 loops; arguments, derivatives, vmap."""

import dataclasses
import functools
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts_cases import (
    ALPHA,
    BFLOAT16,
    FLOAT32,
    FORMATS,
    LIMIT,
    MISREADINGS,
    SITUATIONS,
    Case,
    assert_close,
    choices,
    decoded,
    oracle,
    random_case,
)

from pallas_kernels.grouped_experts import routing, xla
from pallas_kernels.grouped_experts.api import grouped_experts
from pallas_kernels.grouped_experts.reference import grouped_experts_reference

STATIC: dict[str, Any] = dict(alpha=ALPHA, limit=LIMIT)


@functools.cache
def compiled(function=grouped_experts):
    more = dict(implementation="xla") if function is grouped_experts else {}
    return jax.jit(functools.partial(function, **STATIC, **more))


def run(case: Case, function=grouped_experts) -> jax.Array:
    return compiled(function)(*case.arrays())


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_equals_the_loop(situation: str, kind: str) -> None:
    case = random_case(1, choices(situation, 6), kind=kind)
    expected = oracle(case)
    for function in (grouped_experts, grouped_experts_reference):
        assert_close(run(case, function), expected, FLOAT32)


def test_bf16_rows_are_summed_in_float32() -> None:
    for kind in FORMATS:
        case = random_case(2, choices("some choices without", 6), kind=kind, dtype="bfloat16")
        assert_close(run(case), oracle(case), BFLOAT16)
        assert_close(run(case, grouped_experts_reference), oracle(case), FLOAT32)


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 300])
def test_rows_beyond_a_tile(rows: int) -> None:
    for situation in ("random", "all rows on the same experts"):
        case = random_case(3, choices(situation, 6, rows=rows))
        assert_close(run(case), oracle(case), FLOAT32)


def test_each_stack_has_a_format_of_its_own() -> None:
    case = random_case(4, choices("random", 6), kind="mxfp8", down="nvfp4 divide")
    case = dataclasses.replace(case, up=random_case(5, choices("random", 6), kind="nvfp4 multiply").up)
    assert_close(run(case), oracle(case), FLOAT32)


def test_extreme_scales() -> None:
    """Scale bytes from 2^-126 to 2^60, blocks of zeros and of subnormal codes."""
    case = random_case(6, choices("random", 6), kind="mxfp8")
    scale = np.asarray(case.gate.scale).copy()
    codes = np.asarray(case.gate.codes).view(np.uint8).copy()
    scale[0, :, 0], codes[1, :, :32], scale[1, :, 0], codes[2, :, :32] = 1, 0, 187, codes[2, :, :32] & 0x87
    gate = dataclasses.replace(case.gate, codes=jnp.asarray(codes.view(case.gate.codes.dtype)), scale=scale)
    case = dataclasses.replace(case, gate=jax.tree.map(jnp.asarray, gate))
    assert_close(run(case), oracle(case), FLOAT32)


@pytest.mark.parametrize("misread, kind", MISREADINGS, ids=lambda value: getattr(value, "__name__", value))
def test_misread_inputs_are_caught(misread, kind: str) -> None:
    case = random_case(7, choices("random", 6), kind=kind)
    expected = oracle(case)
    assert_close(run(case), expected, FLOAT32)
    with pytest.raises(AssertionError):
        assert_close(run(misread(case)), expected, BFLOAT16)


def _symmetric_clamp(monkeypatch: pytest.MonkeyPatch) -> None:
    right = xla.swiglu_oai
    wrong = lambda g, u, alpha, limit: right(jnp.maximum(g, -limit), u, alpha, limit)  # noqa: E731
    monkeypatch.setattr(xla, "swiglu_oai", wrong)


def _tiles_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args, **options):
        right = routing.route(*args, **options)
        return right._replace(pairs=jnp.roll(right.pairs, 1, axis=0))

    monkeypatch.setattr(xla, "route", wrong)


def _pad_rows_not_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args, **options):
        right = routing.route(*args, **options)
        return right._replace(pairs=jnp.maximum(right.pairs, 0))

    monkeypatch.setattr(xla, "route", wrong)


@pytest.mark.parametrize("wrong", [_symmetric_clamp, _tiles_shifted, _pad_rows_not_masked])
def test_mutants_are_caught(monkeypatch: pytest.MonkeyPatch, wrong) -> None:
    case = random_case(8, choices("random", 6))
    wrong(monkeypatch)
    with pytest.raises(AssertionError):
        assert_close(grouped_experts(*case.arrays(), **STATIC, implementation="xla"), oracle(case), BFLOAT16)


def test_idle_experts_are_not_read() -> None:
    case = random_case(9, choices("an expert without rows", 6))
    spoilt = [w.at[2].set(jnp.nan) for w in (case.gate, case.up, case.down)]
    assert_close(run(dataclasses.replace(case, gate=spoilt[0], up=spoilt[1], down=spoilt[2])), oracle(case), FLOAT32)


def test_padding_rows_may_hold_anything() -> None:
    case = random_case(10, choices("some rows without", 6))
    dead = jnp.asarray(np.asarray(case.experts)[:, 0] == 6)[:, None]
    dirty = dataclasses.replace(
        case, x=jnp.where(dead, jnp.nan, case.x), weights=jnp.where(dead, jnp.nan, case.weights)
    )
    assert_close(run(dirty), oracle(case), FLOAT32)


def _directional(case: Case, name: str) -> tuple[float, float]:
    """Derivative of a fixed sum of the output along a random direction: ours, and by float64 differences."""
    rng = np.random.default_rng(11)
    pick = rng.normal(size=case.x.shape)
    value = np.asarray(getattr(case, name), np.float64)
    direction = rng.normal(size=value.shape)

    def loss(array: jax.Array) -> jax.Array:
        out = grouped_experts(*dataclasses.replace(case, **{name: array}).arrays(), **STATIC, implementation="xla")
        return jnp.sum(out * jnp.asarray(pick, jnp.float32))

    ours = float(np.sum(np.asarray(jax.jit(jax.grad(loss))(getattr(case, name)), np.float64) * direction))
    step = 1e-6
    either = [np.sum(oracle(dataclasses.replace(case, **{name: value + s * direction})) * pick) for s in (step, -step)]
    return ours, (either[0] - either[1]) / (2 * step)


@pytest.mark.parametrize("name", ["x", "weights", "gate", "down"])
def test_derivatives(name: str) -> None:
    ours, differences = _directional(random_case(12, choices("some choices without", 6, rows=9)), name)
    # The activation has corners at the limit; no value of this seed is within 1e-6 of one.
    assert abs(ours - differences) <= 1e-3 * abs(differences)


def test_rows_at_negative_positions_are_padding() -> None:
    case = random_case(16, choices("random", 6))
    positions = jnp.asarray(np.where(np.arange(len(case.x)) % 3 == 1, -1, 7), jnp.int32)
    x = jnp.where(positions[:, None] < 0, jnp.nan, case.x)

    def call(x, positions):
        return grouped_experts(
            x, case.experts, case.weights, case.gate, case.up, case.down, positions, **STATIC, implementation="xla"
        )

    found = call(x, positions)
    without = np.where(np.asarray(positions)[:, None] < 0, 6, np.asarray(case.experts))
    assert_close(found, oracle(dataclasses.replace(case, experts=jnp.asarray(without, jnp.int32))), FLOAT32)
    both = jax.vmap(call)(jnp.stack([x, case.x]), jnp.stack([positions, 0 * positions]))
    np.testing.assert_allclose(both[0], found, atol=1e-5)
    assert_close(both[1], oracle(case), FLOAT32)


def test_vmap_equals_a_loop() -> None:
    cases = [random_case(13, choices("random", 6)), random_case(13, choices("some choices without", 6))]
    first = cases[0]
    mapped = jax.vmap(
        lambda x, e, w: grouped_experts(x, e, w, first.gate, first.up, first.down, **STATIC, implementation="xla")
    )(*(jnp.stack([getattr(c, n) for c in cases]) for n in ("x", "experts", "weights")))
    for out, case in zip(mapped, cases, strict=True):
        assert_close(out, oracle(case), FLOAT32)


def test_memory_is_bounded() -> None:
    """All experts at once would be 64 matrices of 256 KiB; one tile needs three and its rows."""
    case = random_case(14, choices("random", 64, rows=256), experts=64, hidden=256, inner=256, kind="mxfp8")
    memory = compiled().lower(*case.arrays()).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 16 * 2**18


# Arguments ------------------------------------------------------------------------------------------------------------

GOOD = random_case(15, choices("random", 6, rows=3), kind="nvfp4 multiply")
PLAIN = random_case(15, choices("random", 6, rows=3))
BAD = [
    (dict(x=jnp.zeros((3, 2, 64))), ValueError, "x must have shape [N, H]"),
    (dict(x=jnp.zeros((3, 64), jnp.int32)), TypeError, "x must be one of bfloat16, float16, float32, got int32"),
    (dict(x=jnp.zeros((3, 32))), ValueError, "H = 32 of x (3, 32), got H = 64"),
    (dict(experts=jnp.zeros((4, 2), jnp.int32)), ValueError, "experts must be [N, k] = [3, k >= 1]"),
    (dict(experts=jnp.zeros((3, 2), jnp.uint8)), TypeError, "experts must be int32, got uint8"),
    (dict(weights=jnp.zeros((3, 1))), ValueError, "weights must have the shape of experts (3, 2), got (3, 1)"),
    (dict(weights=jnp.zeros((3, 2), jnp.bfloat16)), TypeError, "weights must be float32, got bfloat16"),
    (dict(gate=PLAIN.gate.astype(jnp.int32)), TypeError, "gate must be an array of bfloat16, float16, float32"),
    (dict(gate=PLAIN.gate[0]), ValueError, "gate must be a stack [E, out, in] without an empty axis, got (32, 64)"),
    (dict(up=PLAIN.up[:5]), ValueError, "up must be [E, out, in] = (6, 32, 64), got (5, 32, 64)"),
    (dict(down=PLAIN.gate), ValueError, "down must be [E, out, in] = (6, 64, 32), got (6, 32, 64)"),
    (dict(down=dataclasses.replace(GOOD.down, scale=GOOD.down.scale[..., :1])), ValueError, "down.scale must be"),
    (dict(alpha=jnp.float32(1)), TypeError, "alpha must be a Python float"),
    (dict(limit=float("inf")), ValueError, "limit must be finite in float32, got inf"),
    (dict(limit=0.0), ValueError, "limit must be positive, got 0.0"),
    (dict(alpha=1e39), ValueError, "alpha must be finite in float32, got 1e+39"),
    (dict(positions=jnp.zeros(4, jnp.int32)), ValueError, "positions must be int32 [N] = (3,) for x (3, 64)"),
    (dict(positions=jnp.zeros(3)), ValueError, "positions must be int32 [N] = (3,) for x (3, 64), got float32 (3,)"),
    (dict(routing="mosaic"), ValueError, "routing must be None, 'triton' or 'xla', got 'mosaic'"),
    (
        dict(routing="triton", implementation="xla"),
        NotImplementedError,
        "the XLA form makes its lists without a kernel",
    ),
    (dict(implementation="cuda"), ValueError, "unknown implementation 'cuda'"),
]


@pytest.mark.parametrize("changes, kind, message", BAD, ids=lambda value: str(value)[:40])
def test_bad_arguments_are_named(changes: dict, kind: type[Exception], message: str) -> None:
    options = STATIC | {k: v for k, v in changes.items() if k not in GOOD.__dict__}
    case = dataclasses.replace(GOOD, **{k: v for k, v in changes.items() if k not in options})
    function = inspect.unwrap(grouped_experts)  # the test run's shape checker would speak first
    with pytest.raises(kind, match=re.escape(message)):
        function(*case.arrays(), **options)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about machines without an NVIDIA GPU")
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_a_named_kernel_does_not_fall_back(implementation: str) -> None:
    with pytest.raises(NotImplementedError, match=f"'{implementation}'.*NVIDIA GPUs, and this call runs on cpu"):
        grouped_experts(*GOOD.arrays(), **STATIC, implementation=implementation)


def test_none_ends_in_xla() -> None:
    if jax.default_backend() == "cpu":
        assert_close(grouped_experts(*GOOD.arrays(), **STATIC), oracle(GOOD), FLOAT32)


def test_the_oracle_decodes_as_published() -> None:
    """A few values of the formats' tables, so that oracle and library cannot be wrong in the same way."""
    assert decoded(PLAIN.gate).dtype == np.float64
    from experts_cases import e2m1, e4m3

    codes = np.asarray([0x00, 0x01, 0x08, 0x38, 0x7E, 0xFE, 0xB8], np.uint8)
    np.testing.assert_array_equal(e4m3(codes), [0, 2.0**-9, 2.0**-6, 1, 448, -448, -1])
    np.testing.assert_array_equal(e2m1(np.arange(8, dtype=np.uint8)), [0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert e2m1(np.asarray([15], np.uint8)) == -6
