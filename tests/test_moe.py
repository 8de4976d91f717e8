"""Router and experts against loops in numpy float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import hf_config

from dspark_jax import formats, moe
from dspark_jax.config import TargetConfig
from dspark_jax.kernels import Kernels
from dspark_jax.layers import Scope
from dspark_jax.moe import MoE
from pallas_kernels.grouped_experts import xla

# Three matrix products with sums of 64 and 32 products in float32, outputs of size one.
FLOAT32 = 1e-4


SMALL = dict(hidden_size=64, expert_mlp_size=32, shared_mlp_size=32, num_experts=6, swiglu_limit=1.5)


def config(**changes) -> TargetConfig:
    return dataclasses.replace(TargetConfig.from_hf(hf_config("m3-mxfp8-tiny")), **SMALL | changes)


def make(c: TargetConfig, kind: str = "bf16", kernels: Kernels | None = None) -> MoE:
    paths = {f"moe/experts/{part}/weight": kind for part in ("gate_proj", "up_proj", "down_proj")}
    router = {"moe/router/weight": "f32", "moe/router/bias": "f32"}
    return MoE(Scope("moe", {**paths, **router}, jax.random.key(0), kernels or Kernels()), c)


def rows(count: int, size: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, size)).astype(np.float32)


def swiglu(g: np.ndarray, u: np.ndarray, c: TargetConfig) -> np.ndarray:
    g, u = np.minimum(g, c.swiglu_limit), np.clip(u, -c.swiglu_limit, c.swiglu_limit)
    return g / (1 + np.exp(-c.swiglu_alpha * g)) * (u + 1)


def float64(parameter) -> np.ndarray:
    return np.asarray(formats.dequantize(parameter.weight.get_value())).astype(np.float64)


def dense_loop(m: MoE, c: TargetConfig, x: np.ndarray, experts: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Row by row, choice by choice; an expert that does not exist adds nothing."""
    gate, up, down = (float64(getattr(m.experts, part)) for part in ("gate_proj", "up_proj", "down_proj"))
    out = np.zeros(x.shape, np.float64)
    for n in range(len(x)):
        for e, w in zip(experts[n], weights[n], strict=True):
            if e < c.num_experts:
                out[n] += w * (swiglu(x[n] @ gate[e].T, x[n] @ up[e].T, c) @ down[e].T)
    return out


def choices(case: str, c: TargetConfig) -> np.ndarray:
    """Chosen experts [N, k] of a case."""
    rng = np.random.default_rng(3)

    def distinct(count, pool):
        return np.stack([rng.permutation(pool)[:2] for _ in range(count)])

    every = np.arange(c.num_experts)
    return {
        "random": lambda: distinct(20, every),
        "one row": lambda: distinct(1, every),
        "an expert without rows": lambda: distinct(20, every[[0, 1, 3, 4]]),
        "all rows on the same experts": lambda: np.tile([[4, 2]], (20, 1)),
        "same expert twice": lambda: np.full((9, 2), 5),
        "exactly one tile": lambda: distinct(xla.TILE, every),
        "more rows than a tile": lambda: distinct(xla.TILE + 37, every),
        "a tile and one row on one expert": lambda: np.tile([[3, 0]], (xla.TILE + 1, 1)),
        "no expert at all": lambda: np.full((7, 2), c.num_experts),
        "some rows without": lambda: np.where(np.arange(20)[:, None] % 3 == 0, c.num_experts, distinct(20, every)),
    }[case]().astype(np.int32)


CASES = (
    "random",
    "one row",
    "an expert without rows",
    "all rows on the same experts",
    "same expert twice",
    "exactly one tile",
    "more rows than a tile",
    "a tile and one row on one expert",
    "no expert at all",
    "some rows without",
)


def check_experts(m: MoE, c: TargetConfig, chosen: np.ndarray) -> None:
    x = rows(len(chosen), c.hidden_size)
    weights = np.random.default_rng(5).uniform(0.1, 1, chosen.shape).astype(np.float32)
    ours = jax.jit(lambda m, *inputs: m(*inputs))(m.experts, *map(jnp.asarray, (x, chosen, weights)))
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, dense_loop(m, c, x, chosen, weights), atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_grouped_experts_equal_the_dense_loop(case):
    c = config()
    check_experts(make(c), c, choices(case, c))


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4/divide"])
def test_experts_in_stored_formats(kind):
    c = config()
    check_experts(make(c, kind), c, choices("some rows without", c))


def test_experts_of_bf16_rows_are_summed_in_float32():
    c = config()
    m, chosen = make(c), choices("random", c)
    x = jnp.asarray(rows(len(chosen), c.hidden_size)).astype(jnp.bfloat16)
    weights = np.full(chosen.shape, 0.5, np.float32)
    ours = m.experts(x, jnp.asarray(chosen), jnp.asarray(weights))
    assert ours.dtype == jnp.float32
    theirs = dense_loop(m, c, np.asarray(x).astype(np.float64), chosen, weights)
    # Four roundings to bf16 (2^-9) on the way, of values of size one.
    np.testing.assert_allclose(ours, theirs, atol=0.03)


def _other_weights(monkeypatch, call):
    monkeypatch.setattr(moe.Experts, "__call__", lambda self, x, e, w: call(self, x, e, w[::-1]))


def _last_row_lost(monkeypatch, call):
    monkeypatch.setattr(moe.Experts, "__call__", lambda self, x, e, w: call(self, x, e.at[-1].set(self.num_experts), w))


def _second_choice_lost(monkeypatch, call):
    monkeypatch.setattr(moe.Experts, "__call__", lambda self, x, e, w: call(self, x, e[:, :1], w[:, :1]))


def _gate_for_up(monkeypatch, call):
    def exchanged(self, x, e, w):
        self.gate_proj, self.up_proj = self.up_proj, self.gate_proj
        return call(self, x, e, w)

    monkeypatch.setattr(moe.Experts, "__call__", exchanged)


def _next_expert(monkeypatch, call):
    monkeypatch.setattr(moe.Experts, "__call__", lambda self, x, e, w: call(self, x, jnp.maximum(e - 1, 0), w))


@pytest.mark.parametrize("wrong", [_other_weights, _last_row_lost, _second_choice_lost, _gate_for_up, _next_expert])
def test_expert_mutants(monkeypatch, wrong):
    c = config()
    wrong(monkeypatch, moe.Experts.__call__)
    with pytest.raises(AssertionError):
        check_experts(make(c), c, choices("a tile and one row on one expert", c))


# Router -------------------------------------------------------------------------------------------------------------


def route_numpy(m: MoE, x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """-> experts, weights, margin of the choice; the lower index at a tie."""
    logits = x.astype(np.float64) @ np.asarray(m.router.weight.get_value()).astype(np.float64).T
    scores = 1 / (1 + np.exp(-logits))
    biased = scores + np.asarray(m.router.bias.get_value()).astype(np.float64)
    order = np.argsort(-biased, axis=-1, kind="stable")
    ranked = np.take_along_axis(biased, order, -1)
    weights = np.take_along_axis(scores, order[:, :k], -1)
    return order[:, :k], weights / weights.sum(-1, keepdims=True), ranked[:, k - 1] - ranked[:, k]


# Float32 noise of a sigmoid of a sum of 64 products.
ROUTER, ROUTER_MARGIN = 1e-5, 1e-5


def check_router(m: MoE, x) -> None:
    k = m.router.top_k
    experts, weights = m.router(x)
    theirs, their_weights, margin = route_numpy(m, np.asarray(x), k)
    clear = margin > ROUTER_MARGIN
    assert clear.mean() > 0.99
    np.testing.assert_array_equal(np.asarray(experts)[clear], theirs[clear])
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(weights)[clear], their_weights[clear], atol=ROUTER)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_router(dtype):
    """In bf16 too: its inputs are bf16 values, everything behind them is float32."""
    check_router(make(config()), jnp.asarray(rows(1000, 64)).astype(dtype))


def _wrong_router(*, dtype=jnp.float32, bias_in_weights=False, use_bias=True):
    def call(self, x):
        logits = (x.astype(dtype) @ self.weight.get_value().T.astype(dtype)).astype(jnp.float32)
        scores = jax.nn.sigmoid(logits)
        biased = scores + self.bias.get_value()[None]
        _, experts = jax.lax.top_k(biased if use_bias else scores, self.top_k)
        weights = jnp.take_along_axis(biased if bias_in_weights else scores, experts, axis=-1)
        return experts, weights / weights.sum(-1, keepdims=True)

    return call


@pytest.mark.parametrize(
    "options", [dict(dtype=jnp.bfloat16), dict(bias_in_weights=True), dict(use_bias=False)], ids=str
)
def test_router_mutants(monkeypatch, options):
    monkeypatch.setattr(moe.Router, "__call__", _wrong_router(**options))
    with pytest.raises(AssertionError):
        check_router(make(config()), jnp.asarray(rows(1000, 64)).astype(jnp.bfloat16))


def test_router_tie_goes_to_the_lower_expert():
    m = make(config(num_experts_per_token=3))
    m.router.weight.set_value(jnp.zeros((6, 64), jnp.float32))
    m.router.bias.set_value(jnp.asarray([0.0, 0.25, 0.25, 0.25, 0.0, 0.25], jnp.float32))
    experts, weights = m.router(jnp.asarray(rows(2, 64)))
    np.testing.assert_array_equal(experts, [[1, 2, 3]] * 2)
    np.testing.assert_allclose(weights, np.full((2, 3), 1 / 3), atol=1e-6)


def test_the_kernel_is_asked_for_and_gives_the_choice(monkeypatch):
    """With the form for any device in the kernel's place."""
    asked, real = [], moe.choose_experts

    def through_xla(*inputs, implementation, mutant=False, **static):
        asked.append(implementation)
        x, weight, bias = inputs
        return real(x, weight, bias * jnp.float32(not mutant), implementation="xla", **static)

    m = make(config(), kernels=Kernels(routing=None))
    check_router(m, jnp.asarray(rows(1000, 64)))  # no kernel serves a CPU
    monkeypatch.setattr(moe, "choose_experts", through_xla)
    check_router(m, jnp.asarray(rows(1000, 64)))
    assert asked == [None]
    monkeypatch.setattr(moe, "choose_experts", functools.partial(through_xla, mutant=True))
    with pytest.raises(AssertionError):
        check_router(m, jnp.asarray(rows(1000, 64)))
    monkeypatch.setattr(moe, "choose_experts", through_xla)
    check_router(make(config(), kernels=Kernels(routing="xla")), jnp.asarray(rows(1000, 64)))
    assert asked == [None, None, "xla"]


@pytest.mark.parametrize("kind", ["bf16", "mxfp8"])
def test_a_router_in_another_format_is_one_in_float32(kind):
    router = moe.Router(Scope("", {"weight": kind}, jax.random.key(0), Kernels(routing=None)), config())
    plain = moe.Router(Scope("", {}, jax.random.key(0), Kernels(routing=None)), config())
    plain.weight.set_value(formats.dequantize(router.weight.get_value()))
    plain.bias.set_value(router.bias.get_value())
    x = jnp.asarray(rows(9, 64))
    for found, wanted in zip(router(x), plain(x), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_lists_are_made_as_the_model_says(monkeypatch):
    asked, real = [], moe.grouped_experts

    def spy(*inputs, routing, **static):
        asked.append(routing)
        return real(*inputs, **static)

    monkeypatch.setattr(moe, "grouped_experts", spy)
    for routing in ("xla", None):
        c = config()
        check_moe(make(c, kernels=Kernels(routing=routing)), c)
    assert asked == ["xla", None]


# The whole ----------------------------------------------------------------------------------------------------------


def moe_numpy(m: MoE, c: TargetConfig, x: np.ndarray, live: np.ndarray) -> np.ndarray:
    experts, weights, _ = route_numpy(m, x, c.num_experts_per_token)
    routed = dense_loop(m, c, x, np.where(live[:, None], experts, c.num_experts), weights)
    shared = m.shared_expert
    gate, up, down = (float64(part) for part in (shared.gate_proj, shared.up_proj, shared.down_proj))
    return c.routed_scaling * routed + swiglu(x @ gate.T, x @ up.T, c) @ down.T


def check_moe(m: MoE, c: TargetConfig) -> None:
    x = rows(30, c.hidden_size).reshape(3, 10, -1)
    positions = np.where(np.arange(10)[None] < np.asarray([[10], [4], [0]]), np.arange(10)[None], -1).astype(np.int32)
    out, experts, weights = m(jnp.asarray(x), jnp.asarray(positions))
    assert experts.shape == weights.shape == (3, 10, 2)
    theirs = moe_numpy(m, c, x.reshape(30, -1), positions.reshape(-1) >= 0)
    np.testing.assert_allclose(out.reshape(30, -1), theirs, atol=FLOAT32)


def test_scaling_of_the_routed_part_and_shared_expert():
    c = config()
    check_moe(make(c), c)


def _scaled_shared(monkeypatch, m):
    shared = moe.SwigluMLP.__call__
    monkeypatch.setattr(moe.SwigluMLP, "__call__", lambda self, x: shared(self, x) * m.routed_scaling)


def _no_shared(monkeypatch, m):
    monkeypatch.setattr(moe.SwigluMLP, "__call__", lambda self, x: jnp.zeros_like(x))


def _unscaled(monkeypatch, m):
    m.routed_scaling = 1.0


def _padding_routed(monkeypatch, m):
    call = moe.MoE.__call__
    monkeypatch.setattr(moe.MoE, "__call__", lambda self, x, positions: call(self, x, jnp.maximum(positions, 0)))


@pytest.mark.parametrize("wrong", [_scaled_shared, _no_shared, _unscaled, _padding_routed])
def test_moe_mutants(monkeypatch, wrong):
    c = config()
    m = make(c)
    wrong(monkeypatch, m)
    with pytest.raises(AssertionError):
        check_moe(m, c)


def test_padding_takes_no_routed_expert():
    """A row at position -1 has the shared expert alone."""
    c = config()
    m = make(c)
    x = jnp.asarray(rows(4, c.hidden_size))[None]
    out, _, _ = m(x, jnp.full((1, 4), -1, jnp.int32))
    np.testing.assert_allclose(out, m.shared_expert(x), atol=1e-6)
    live, _, _ = m(x, jnp.arange(4, dtype=jnp.int32)[None])
    assert np.abs(np.asarray(live - out)).max() > 0.1
