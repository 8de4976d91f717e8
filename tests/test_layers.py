"""Norms, rotary embedding, activation and parameters against numpy in float64, written from the formulas."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax import formats, layers
from dspark_jax.formats import MXFP8Array, NVFP4Array
from dspark_jax.layers import GemmaRMSNorm, Linear, RMSNorm, Scope, SwigluMLP

few = settings(max_examples=25, deadline=None)
# A handful of float32 roundings (2^-24 each) of values of size one.
ELEMENTWISE = 1e-6
# cos and sin of an angle in float32 are as good as the angle: 2^-24 of 1000 radians, times the largest element.
ROTATION = 5e-4
# Sums of 64 products in float32.
MATMUL = 1e-4


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# Activation ---------------------------------------------------------------------------------------------------------


def swiglu_numpy(gate: np.ndarray, up: np.ndarray, alpha: float, limit: float) -> np.ndarray:
    g, u = np.minimum(gate.astype(np.float64), limit), np.clip(up.astype(np.float64), -limit, limit)
    return g / (1 + np.exp(-np.clip(alpha * g, -700, 700))) * (u + 1)


def gates() -> tuple[np.ndarray, np.ndarray]:
    """Both sides of both clamps, their edges, far below the gate's missing lower one, and negative zero."""
    at = np.asarray(
        [-1e4, -60, -20, -7.01, -7, -3, -1.5, -1.49, -0.0, 0, 0.3, 1.5, 1.51, 3, 7, 7.01, 20, 1e4], np.float32
    )
    gate, up = np.meshgrid(at, at)
    return gate.reshape(-1), up.reshape(-1)


def check_swiglu(activation, alpha: float, limit: float) -> None:
    gate, up = gates()
    ours = np.asarray(activation(jnp.asarray(gate), jnp.asarray(up), alpha=alpha, limit=limit))
    theirs = swiglu_numpy(gate, up, alpha, limit)
    np.testing.assert_allclose(ours, theirs, rtol=4 * ELEMENTWISE, atol=ELEMENTWISE)


@pytest.mark.parametrize(("alpha", "limit"), [(1.702, 7.0), (1.25, 1.5)])
def test_swiglu(alpha, limit):
    check_swiglu(layers.swiglu_oai, alpha, limit)


def wrong_swiglu(g_bounds, u_bounds, *, plus=1.0, scale=None):
    """Bounds in units of the limit, None for open."""

    def call(gate, up, *, alpha, limit):
        def clip(x, bounds):
            low, high = (None if b is None else b * limit for b in bounds)
            return x if low is high is None else jnp.clip(x, low, high)

        g, u = clip(gate, g_bounds), clip(up, u_bounds)
        return g * jax.nn.sigmoid((scale or alpha) * g) * (u + plus)

    return call


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(wrong_swiglu((-1, 1), (-1, 1)), id="symmetric gate clamp"),
        pytest.param(wrong_swiglu((None, None), (-1, 1)), id="no gate clamp"),
        pytest.param(wrong_swiglu((None, 1), (None, 1)), id="up clamped from above only"),
        pytest.param(wrong_swiglu((None, 1), (-1, 1), plus=0.0), id="no plus one"),
        pytest.param(wrong_swiglu((None, 1), (-1, 1), scale=1.0), id="no alpha"),
    ],
)
def test_swiglu_mutants(wrong):
    with pytest.raises(AssertionError):
        check_swiglu(wrong, 1.25, 1.5)
    with pytest.raises(AssertionError):
        check_swiglu(wrong, 1.702, 7.0)


def test_swiglu_computes_bf16_in_float32():
    gate, up = (jnp.asarray(a).astype(jnp.bfloat16) for a in (normal(1, 4000), normal(2, 4000)))
    ours = layers.swiglu_oai(gate, up, alpha=1.702, limit=7.0)
    assert ours.dtype == jnp.bfloat16
    exact = swiglu_numpy(np.asarray(gate).astype(np.float64), np.asarray(up).astype(np.float64), 1.702, 7.0)
    theirs = exact.astype(np.float32).astype(ml_dtypes.bfloat16)
    # A float32 result that lies next to a rounding boundary may fall on its other side: once in a thousand is plenty.
    assert (np.asarray(ours) != theirs).mean() < 1e-3
    stepwise = gate * jax.nn.sigmoid(gate * jnp.bfloat16(1.702)) * (up + jnp.bfloat16(1))
    assert (np.asarray(stepwise) != theirs).mean() > 0.1


# Rotary embedding ---------------------------------------------------------------------------------------------------


def rotate_numpy(x: np.ndarray, positions: np.ndarray, rotary_dim: int, theta: float) -> np.ndarray:
    """Pair (i, i + rotary_dim / 2) turned by position · theta^(-2i / rotary_dim), one pair at a time."""
    out = x.astype(np.float64).copy()
    for i in range(rotary_dim // 2):
        j = i + rotary_dim // 2
        angle = positions.astype(np.float64)[..., None] * theta ** (-2 * i / rotary_dim)
        out[..., i] = x[..., i] * np.cos(angle) - x[..., j] * np.sin(angle)
        out[..., j] = x[..., j] * np.cos(angle) + x[..., i] * np.sin(angle)
    return out


def check_rotation(rotate) -> None:
    x = normal(3, 2, 5, 3, 16)
    positions = np.asarray([[0, 1, 2, 3, 4], [100, 7, 1023, 500, 31]], np.int32)
    for rotary_dim, theta in ((8, 5e6), (16, 1e4), (4, 10.0)):
        ours = rotate(jnp.asarray(x), jnp.asarray(positions), rotary_dim=rotary_dim, theta=theta)
        np.testing.assert_allclose(ours, rotate_numpy(x, positions, rotary_dim, theta), atol=ROTATION, rtol=0)


def test_rotation():
    check_rotation(layers.rotate)


def test_rotation_of_bf16_is_rounded_once():
    x = jnp.asarray(normal(4, 1, 6, 2, 16)).astype(jnp.bfloat16)
    positions = jnp.arange(6, dtype=jnp.int32)[None]
    turn = functools.partial(layers.rotate, rotary_dim=16, theta=1e4)
    np.testing.assert_array_equal(turn(x, positions), turn(x.astype(jnp.float32), positions).astype(jnp.bfloat16))


def _pairs_swapped(x, positions, **options):
    return layers.rotate(x, -positions, **options)


def _interleaved(x, positions, *, rotary_dim, theta):
    order = np.arange(x.shape[-1])
    order[:rotary_dim] = np.concatenate([np.arange(0, rotary_dim, 2), np.arange(1, rotary_dim, 2)])
    turned = layers.rotate(x[..., order], positions, rotary_dim=rotary_dim, theta=theta)
    return turned[..., np.argsort(order)]


def _head_frequencies(x, positions, *, rotary_dim, theta):
    return layers.rotate(x, positions, rotary_dim=rotary_dim, theta=theta ** (rotary_dim / x.shape[-1]))


def _off_by_one(x, positions, **options):
    return layers.rotate(x, positions + 1, **options)


@pytest.mark.parametrize("wrong", [_pairs_swapped, _interleaved, _head_frequencies, _off_by_one])
def test_rotation_mutants(wrong):
    with pytest.raises(AssertionError):
        check_rotation(wrong)


@few
@given(st.integers(0, 2000), st.integers(0, 2000))
def test_only_the_distance_of_positions_counts(p, d):
    q, k = jnp.asarray(normal(5, 1, 1, 1, 16)), jnp.asarray(normal(6, 1, 1, 1, 16))
    turn = functools.partial(layers.rotate, rotary_dim=8, theta=1e4)

    def score(a, b):
        a, b = (jnp.full((1, 1), at, jnp.int32) for at in (a, b))
        return float((turn(q, a) * turn(k, b)).sum())

    # 16 products, each as far off as the angles are.
    assert score(p + d, p) == pytest.approx(score(d, 0), abs=16 * ROTATION)


# Norms --------------------------------------------------------------------------------------------------------------


def norm_numpy(x: np.ndarray, w: np.ndarray, eps: float, plus: float) -> np.ndarray:
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (plus + w.astype(np.float64))


def make_norm(kind, w: np.ndarray, eps: float):
    norm = kind(Scope("norm"), w.size, eps)
    norm.weight.set_value(jnp.asarray(w).astype(jnp.bfloat16))
    return norm


# Weights that bf16 loses beside 1: its step there is 2^-7 above and 2^-8 below.
TINY_W = np.tile(np.asarray([0.0016, -0.0017, 0.0031, -0.0009], np.float32), 8)


def check_gemma(norm_of, scale: float) -> None:
    x, eps = scale * normal(7, 5, 32), 1e-5
    w = np.asarray(TINY_W.astype(ml_dtypes.bfloat16), np.float64)
    theirs = norm_numpy(x, w, eps, 1.0)
    np.testing.assert_allclose(norm_of(make_norm(GemmaRMSNorm, TINY_W, eps), x), theirs, rtol=5 * ELEMENTWISE)


@pytest.mark.parametrize("scale", [1.0, 3e-3, 1e4])
def test_gemma_norm_adds_one_in_float32(scale):
    check_gemma(lambda norm, x: norm(jnp.asarray(x)), scale)


def _folded(norm, x):
    scale = (jnp.bfloat16(1) + norm.weight.get_value()).astype(jnp.float32)
    return layers.rms_normalize(jnp.asarray(x), scale, norm.eps, jnp.float32)


def _without_one(norm, x):
    return layers.rms_normalize(jnp.asarray(x), norm.weight.get_value().astype(jnp.float32), norm.eps, jnp.float32)


def _without_eps(norm, x):
    scale = 1.0 + norm.weight.get_value().astype(jnp.float32)
    return layers.rms_normalize(jnp.asarray(x), scale, 1e-6, jnp.float32)


def _mean_removed(norm, x):
    return norm(jnp.asarray(x - x.mean(-1, keepdims=True)))


@pytest.mark.parametrize("wrong", [_folded, _without_one, _without_eps, _mean_removed])
def test_gemma_norm_mutants(wrong):
    with pytest.raises(AssertionError):
        check_gemma(wrong, 3e-3)


def test_plain_norm_scales_by_w():
    x, w = normal(8, 5, 32), normal(9, 32)
    stored = np.asarray(w.astype(ml_dtypes.bfloat16), np.float64)
    norm = make_norm(RMSNorm, w, 1e-6)
    np.testing.assert_allclose(norm(jnp.asarray(x)), norm_numpy(x, stored, 1e-6, 0.0), rtol=5 * ELEMENTWISE)
    gemma = make_norm(GemmaRMSNorm, w, 1e-6)
    assert np.abs(np.asarray(gemma(jnp.asarray(x))) - norm_numpy(x, stored, 1e-6, 0.0)).max() > 0.1


@pytest.mark.parametrize("kind", [GemmaRMSNorm, RMSNorm])
def test_norm_of_bf16_is_float32_rounded_once(kind):
    """Twice the product of bf16 factors (normalise, round, scale, round) would differ in a third of the elements."""
    x, w = jnp.asarray(normal(10, 200, 32)).astype(jnp.bfloat16), normal(11, 32) / 4
    norm = make_norm(kind, w, 1e-6)
    stored = np.asarray(w.astype(ml_dtypes.bfloat16), np.float64)
    plus = 1.0 if kind is GemmaRMSNorm else 0.0
    theirs = norm_numpy(np.asarray(x), stored, 1e-6, plus).astype(np.float32).astype(ml_dtypes.bfloat16)
    ours = norm(x)
    assert ours.dtype == jnp.bfloat16 and norm(x, jnp.float32).dtype == jnp.float32
    assert (np.asarray(ours) != theirs).mean() < 1e-3
    once = layers.rms_normalize(x, jnp.ones(32, jnp.float32), 1e-6, jnp.bfloat16)
    twice = once * jnp.broadcast_to(jnp.asarray(plus + stored, jnp.bfloat16), once.shape)
    assert (np.asarray(twice) != theirs).mean() > 0.1


# Modules and parameters ---------------------------------------------------------------------------------------------


def test_linear_and_mlp():
    scope = Scope("mlp", key=jax.random.key(0))
    mlp = SwigluMLP(scope, 64, 48, alpha=1.702, limit=7.0)
    x = normal(12, 3, 64)
    gate, up, down = (
        np.asarray(part.weight.get_value()).astype(np.float64) for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    )
    assert (gate.shape, up.shape, down.shape) == ((48, 64), (48, 64), (64, 48))
    inner = swiglu_numpy(x @ gate.T, x @ up.T, 1.702, 7.0)
    np.testing.assert_allclose(mlp(jnp.asarray(x)), inner @ down.T, atol=MATMUL)
    assert np.abs(np.asarray(mlp(jnp.asarray(x))) - swiglu_numpy(x @ up.T, x @ gate.T, 1.702, 7.0) @ down.T).max() > 0.1
    plain = Linear(scope / "plain", 5, 64, ("mlp", "embed"))
    w = np.asarray(plain.weight.get_value()).astype(np.float64)
    np.testing.assert_allclose(plain(jnp.asarray(x)), x @ w.T, atol=MATMUL)


FORMATS = {
    "bf16": lambda a: a.dtype == jnp.bfloat16,
    "f32": lambda a: a.dtype == jnp.float32,
    "mxfp8": lambda a: isinstance(a, MXFP8Array),
    "nvfp4/multiply": lambda a: isinstance(a, NVFP4Array) and a.global_scale_op == "multiply",
    "nvfp4/divide": lambda a: isinstance(a, NVFP4Array) and a.global_scale_op == "divide",
}
# A half step of each format's largest code, relative to the largest element.
STORED = {"bf16": 2.0**-8, "f32": 0.0, "mxfp8": 2.0**-4, "nvfp4/multiply": 0.25, "nvfp4/divide": 0.25}


@pytest.mark.parametrize("name", FORMATS)
def test_scope_stores_a_path_in_its_format(name):
    scope = Scope("model", {"model/a/weight": name}, jax.random.key(5))
    value = (scope / "a").param("weight", (8, 32), ("mlp", "embed"), scale=0.5)
    assert FORMATS[name](value.get_value()) and tuple(value.get_value().shape) == (8, 32)
    assert value.get_metadata("logical_axes") == ("mlp", "embed")
    exact = (Scope("model", {"model/a/weight": "f32"}, jax.random.key(5)) / "a").param(
        "weight", (8, 32), ("mlp", "embed"), scale=0.5
    )
    exact = np.asarray(exact.get_value())
    assert 0.4 < exact.std() < 0.6
    ours = np.asarray(formats.dequantize(value.get_value()))
    assert np.abs(ours - exact).max() <= STORED[name] * np.abs(exact).max()
    other = (scope / "b").param("weight", (8, 32), ("mlp", "embed"), scale=0.5)
    assert other.get_value().dtype == jnp.bfloat16, "a path that is not listed is bf16"
    assert np.abs(np.asarray(other.get_value()).astype(np.float32) - exact).max() > 0.1


def test_scope_without_a_key_makes_zeros():
    value = Scope("m").param("weight", (2, 4), ("mlp", "embed"), scale=1.0).get_value()
    np.testing.assert_array_equal(value, np.zeros((2, 4), ml_dtypes.bfloat16))


def test_scope_paths():
    assert (Scope() / "target" / "layers" / 3).path == "target/layers/3"
