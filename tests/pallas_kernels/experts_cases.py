"""Cases of `grouped_experts` and their float64 oracle, written from the definitions of the formats and of the layer."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.grouped_experts import stacks
from pallas_kernels.grouped_experts.problem import Problem
from pallas_kernels.grouped_experts.stacks import Stack

ALPHA, LIMIT = 1.702, 1.5
FORMATS = ("plain", "mxfp8", "nvfp4 multiply", "nvfp4 divide")

# Largest ‖row - oracle row‖ / ‖oracle row‖. float32: sums of a few hundred products. bfloat16: gate, up, the inner
# activation and each expert's output are rounded to 2^-9, and the activation stretches the first two up to 3 times.
FLOAT32, BFLOAT16 = 2e-5, 1.5e-2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MXFP8:
    codes: Any
    scale: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NVFP4:
    codes: Any
    scale: Any
    global_scale: Any
    global_scale_op: str = dataclasses.field(metadata=dict(static=True))


def e4m3(bits: np.ndarray) -> np.ndarray:
    sign, exponent, mantissa = bits >> 7, (bits >> 3 & 15).astype(int), (bits & 7) / 8
    value = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7.0))
    return np.where(sign == 1, -value, value)


def e2m1(bits: np.ndarray) -> np.ndarray:
    exponent, mantissa = (bits >> 1 & 3).astype(int), (bits & 1) / 2
    value = np.where(exponent == 0, mantissa, (1 + mantissa) * 2.0 ** (exponent - 1.0))
    return np.where(bits >> 3 == 1, -value, value)


def as_bytes(array: Any) -> np.ndarray:
    return np.asarray(array).view(np.uint8)


def decoded(weight: Any) -> np.ndarray:
    """[E, out, in] in float64."""
    if isinstance(weight, MXFP8):
        scale = 2.0 ** (np.asarray(weight.scale).astype(np.float64) - 127)
        return e4m3(as_bytes(weight.codes)) * np.repeat(scale, 32, -1)
    if isinstance(weight, NVFP4):
        codes = as_bytes(weight.codes)
        values = np.empty((*codes.shape[:-1], 2 * codes.shape[-1]))
        values[..., ::2], values[..., 1::2] = e2m1(codes & 15), e2m1(codes >> 4)
        values *= np.repeat(e4m3(as_bytes(weight.scale)), 16, -1)
        factor = np.asarray(weight.global_scale, np.float64)[:, None, None]
        return values * factor if weight.global_scale_op == "multiply" else values / factor
    return np.asarray(weight).astype(np.float64)


def random_stack(rng: np.random.Generator, kind: str, experts: int, out: int, into: int, dtype: str) -> Any:
    """Random bits, zero and subnormal codes among them, in values of about in ** -0.5; no NaN codes."""
    size = into**-0.5
    if kind == "plain":
        return jnp.asarray(rng.normal(size=(experts, out, into)) * size).astype(dtype)
    if kind == "mxfp8":
        codes = rng.integers(0, 256, (experts, out, into), np.uint8)
        codes = np.where(codes & 0x7F == 0x7F, codes - 1, codes).astype(np.uint8)
        middle = 127 + round(np.log2(size / 96))  # 96: the root mean square of random codes
        scale = rng.integers(middle - 3, middle + 3, (experts, out, into // 32)).astype(np.uint8)
        return MXFP8(jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn)), jnp.asarray(scale))
    codes = rng.integers(0, 256, (experts, out, into // 2), np.uint8)
    scale = rng.integers(0, 0x7F, (experts, out, into // 16), np.uint8)
    factor = (rng.uniform(0.5, 2, experts) * size / 300).astype(np.float32)  # 300: of random codes times random scales
    op = kind.split()[1]
    factor = jnp.asarray(factor if op == "multiply" else (1 / factor).astype(np.float32))
    return NVFP4(jnp.asarray(codes), jnp.asarray(scale.view(ml_dtypes.float8_e4m3fn)), factor, op)


@dataclasses.dataclass(frozen=True)
class Case:
    x: Any
    experts: Any
    weights: Any
    gate: Any
    up: Any
    down: Any

    def arrays(self) -> tuple:
        return self.x, self.experts, self.weights, self.gate, self.up, self.down


def random_case(
    seed: int,
    chosen: np.ndarray,
    *,
    kind: str = "plain",
    down: str | None = None,
    experts: int = 6,
    hidden: int = 64,
    inner: int = 32,
    dtype: str = "float32",
) -> Case:
    rng = np.random.default_rng(seed)
    return Case(
        x=jnp.asarray(2 * rng.normal(size=(len(chosen), hidden))).astype(dtype),
        experts=jnp.asarray(chosen, jnp.int32),
        weights=jnp.asarray(rng.uniform(0.1, 1, chosen.shape), jnp.float32),
        gate=random_stack(rng, kind, experts, inner, hidden, dtype),
        up=random_stack(rng, kind, experts, inner, hidden, dtype),
        down=random_stack(rng, down or kind, experts, hidden, inner, dtype),
    )


def swiglu(gate: np.ndarray, up: np.ndarray, lowest: float = -np.inf) -> np.ndarray:
    gate, up = np.clip(gate, lowest, LIMIT), np.clip(up, -LIMIT, LIMIT)
    return gate / (1 + np.exp(-ALPHA * gate)) * (up + 1)


def oracle(case: Case, lowest: float = -np.inf) -> np.ndarray:
    """Row by row, choice by choice. `lowest`: a lower clamp of the gate, which the layer does not have."""
    gate, up, down = (decoded(w) for w in (case.gate, case.up, case.down))
    x = np.asarray(case.x).astype(np.float64)
    out = np.zeros(x.shape)
    for n, (row, experts, weights) in enumerate(
        zip(x, np.asarray(case.experts), np.asarray(case.weights), strict=True)
    ):
        for e, w in zip(experts, weights, strict=True):
            if 0 <= e < len(gate):
                out[n] += w * (down[e] @ swiglu(gate[e] @ row, up[e] @ row, lowest))
    return out


def assert_close(actual: Any, expected: np.ndarray, tolerance: float) -> None:
    """Row by row, relative to the row; rows that are zero have to be zero."""
    assert actual.dtype == jnp.float32 and actual.shape == expected.shape
    actual = np.asarray(actual).astype(np.float64)
    assert np.isfinite(actual).all()
    wrong, size = (np.linalg.norm(a, axis=-1) for a in (actual - expected, expected))
    worst = np.argmax(wrong - tolerance * size)
    assert (wrong <= tolerance * size).all(), f"row {worst}: {wrong[worst]:.3g} of {size[worst]:.3g}"


def choices(name: str, experts: int, rows: int = 20, k: int = 2) -> np.ndarray:
    """Chosen experts [N, k] of a named situation."""
    rng = np.random.default_rng(3)

    def distinct(count: int, pool: np.ndarray) -> np.ndarray:
        return np.stack([rng.permutation(pool)[:k] for _ in range(count)])

    every = np.arange(experts)
    random = distinct(rows, every)
    return {
        "random": random,
        "one row": random[:1],
        "an expert without rows": distinct(rows, every[every != 2]),
        "all rows on the same experts": np.tile(random[:1], (rows, 1)),
        "an expert named twice": np.repeat(random[:, :1], k, 1),
        "no expert at all": np.full((rows, k), experts),
        "some rows without": np.where(np.arange(rows)[:, None] % 3 == 0, experts, random),
        "some choices without": np.where((np.arange(rows * k) % 5 == 0).reshape(rows, k), experts + 7, random),
        "negative choices": np.where((np.arange(rows * k) % 4 == 0).reshape(rows, k), -1, random),
    }[name]


SITUATIONS = (
    "random", "one row", "an expert without rows", "all rows on the same experts", "an expert named twice",
    "no expert at all", "some rows without", "some choices without", "negative choices",
)  # fmt: skip


def swapped(case: Case) -> Case:
    return dataclasses.replace(case, gate=case.up, up=case.gate)


def neighbours_scale(case: Case) -> Case:
    gate = dataclasses.replace(case.gate, scale=jnp.roll(case.gate.scale, 1, axis=-1))
    return dataclasses.replace(case, gate=gate)


def other_nibble_first(case: Case) -> Case:
    codes = case.down.codes
    down = dataclasses.replace(case.down, codes=(codes >> 4) | (codes << 4))
    return dataclasses.replace(case, down=down)


def other_global_scale(case: Case) -> Case:
    op = {"multiply": "divide", "divide": "multiply"}[case.up.global_scale_op]
    return dataclasses.replace(case, up=dataclasses.replace(case.up, global_scale_op=op))


def next_expert(case: Case) -> Case:
    """What a routing does that is off by one tile."""
    return dataclasses.replace(case, experts=jnp.maximum(case.experts - 1, 0))


# Wrong readings of a case, and the formats to which they apply.
MISREADINGS = [
    *((swapped, kind) for kind in FORMATS),
    *((next_expert, kind) for kind in FORMATS),
    *((neighbours_scale, kind) for kind in FORMATS[1:]),
    *((other_nibble_first, kind) for kind in FORMATS[2:]),
    *((other_global_scale, kind) for kind in FORMATS[2:]),
]


def describe(case: Case) -> tuple[Problem, list[Stack]]:
    """What a kernel is built for and is given."""
    read = [stacks.read(name, getattr(case, name)) for name in ("gate", "up", "down")]
    num_experts, inner, hidden = stacks.size(*read[0])
    problem = Problem(
        rows=case.x.shape[0], choices=case.experts.shape[1], experts=num_experts, hidden=hidden, inner=inner,
        dtype=case.x.dtype, formats=tuple(form for _, form in read), dtypes=tuple(s.codes.dtype for s, _ in read),
        alpha=ALPHA, limit=LIMIT,
    )  # fmt: skip
    return problem, [stack for stack, _ in read]
