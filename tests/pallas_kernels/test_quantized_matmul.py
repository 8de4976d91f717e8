"""`quantized_matmul` on any device: against float64 values from the definition of the formats."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantized_matmul_cases import (
    MX,
    NV,
    assert_mlp,
    assert_product,
    mlp_oracle,
    mutants,
    random_weight,
    random_x,
    values,
)

from pallas_kernels import _dispatch
from pallas_kernels.quantized_matmul.api import quantized_matmul, quantized_matmuls, quantized_mlp
from pallas_kernels.quantized_matmul.reference import (
    quantized_matmul_reference,
    quantized_matmuls_reference,
    quantized_mlp_reference,
)

FORMS = ["mxfp8", "nvfp4"]
SUBNORMAL = 2.0**-126  # smaller values may be flushed to zero


def xla(x, weight):
    return quantized_matmul(x, weight, implementation="xla")


@pytest.mark.parametrize("function", [xla, quantized_matmul_reference, quantized_matmul], ids=["xla", "ref", "any"])
@pytest.mark.parametrize("form, op", [("mxfp8", "multiply"), ("nvfp4", "multiply"), ("nvfp4", "divide")])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 64, 65])
def test_equals_the_definition(function, form: str, op: str, rows: int) -> None:
    weight, x = random_weight(form, rows, 96, 320, op=op), random_x(rows, rows, 320)
    assert_product(function(x, weight), x, weight)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(512, 64, 96), (3, 1, 32), (2, 130, 1056)])
def test_shapes(form: str, shape: tuple[int, int, int]) -> None:
    rows, out, inputs = shape
    weight, x = random_weight(form, 1, out, inputs), random_x(1, rows, inputs)
    assert_product(jax.jit(xla)(x, weight), x, weight)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("form", FORMS)
def test_other_dtypes_go_through_xla(form: str, dtype: str) -> None:
    weight, x = random_weight(form, 5, 64, 256), random_x(5, 2, 3, 256, dtype=dtype)
    assert_product(quantized_matmul(x, weight), x, weight)


@pytest.mark.parametrize("form", FORMS)
def test_mutants_are_caught(form: str) -> None:
    weight, x = random_weight(form, 2, 64, 256, plain=True), random_x(2, 8, 256)
    for mutant in mutants(form):
        with pytest.raises(AssertionError, match="of the elements are wrong"):
            assert_product(xla(x, mutant(weight)), x, weight)


@pytest.mark.parametrize("byte", [0, 1, 2, 62, 63, 127, 194, 195, 240, 254])
def test_every_mxfp8_scale_is_exact_in_xla(byte: int) -> None:
    weight = random_weight("mxfp8", byte, 64, 128, scales=(byte, byte))
    if byte > 240:  # sums stay below the largest float
        weight = dataclasses.replace(weight, codes=weight.codes * jnp.float8_e4m3fn(2.0**-8))
    x = random_x(byte, 4, 128) * jnp.bfloat16(2.0**-9 if byte > 200 else 1)
    assert_product(xla(x, weight), x, weight, tiny=2 * SUBNORMAL)


@pytest.mark.parametrize("factor", [2.0**-20, 1.0, 3.0, 2.0**20])
def test_every_nvfp4_scale_is_exact_in_xla(factor: float) -> None:
    """All 127 scales that are not negative times all 16 codes, each alone in its row."""
    scales, codes = np.meshgrid(np.arange(127, dtype=np.uint8), np.arange(16, dtype=np.uint8), indexing="ij")
    first = np.zeros((127 * 16, 8), np.uint8)
    first[:, 0] = codes.reshape(-1)
    weight = NV(
        jnp.asarray(first), jnp.asarray(scales.reshape(-1, 1)).view(jnp.float8_e4m3fn), jnp.float32(factor), "multiply"
    )
    x = jnp.zeros((1, 16), jnp.float32).at[0, 0].set(1)
    assert np.array_equal(np.asarray(xla(x, weight)[0], np.float64), values(weight)[:, 0])


def test_leading_axes_and_no_rows() -> None:
    weight = random_weight("mxfp8", 3, 64, 64)
    for shape in ((64,), (2, 3, 64), (1, 1, 1, 64), (0, 64), (2, 0, 64)):
        x = random_x(3, *shape)
        assert_product(quantized_matmul(x, weight), x, weight) if x.size else None
        assert quantized_matmul(x, weight).shape == (*shape[:-1], 64)


@pytest.mark.parametrize("form", FORMS)
def test_vmap_over_x_and_over_weights(form: str) -> None:
    stack, x = random_weight(form, 4, 64, 128, lead=(3,)), random_x(4, 3, 5, 128)
    each = [jax.tree.map(lambda a, i=i: a[i], stack) for i in range(3)]
    out = jax.jit(jax.vmap(quantized_matmul))(x, stack)
    for i in range(3):
        assert_product(out[i], x[i], each[i])
    shared = jax.vmap(lambda x: quantized_matmul(x, each[0]))(x)
    assert_product(shared, x, each[0])


def test_derivative_of_xla() -> None:
    weight, x = random_weight("mxfp8", 6, 64, 128), random_x(6, 4, 128, dtype="float32")
    gradient = jax.grad(lambda x: quantized_matmul(x, weight, implementation="xla").sum())(x)
    np.testing.assert_allclose(gradient, np.tile(values(weight).sum(0), (4, 1)), rtol=1e-5, atol=1e-4)


def opaque():
    """What wraps the kernels, around a product that counts its launches."""
    seen: list = []

    def kernel(x, *weights):
        seen.append(x.shape)
        return x @ weights[0].T

    return _dispatch.opaque_rows("quantized_matmul", kernel), seen


def test_vmap_of_a_kernel_folds_into_the_rows() -> None:
    function, seen = opaque()
    x, w = random_x(7, 3, 5, 8, dtype="float32"), random_x(8, 4, 8, dtype="float32")
    out = jax.jit(jax.vmap(lambda x: function(x, w)))(x)
    assert seen[-1] == (15, 8)  # one launch
    np.testing.assert_allclose(out, x @ w.T, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.vmap(lambda x: function(x[None], w)[0]))(x), x @ w.T, rtol=1e-6)


@pytest.mark.parametrize("axes", [(0, 0), (None, 0)])
def test_vmap_of_a_kernel_over_weights_runs_one_after_the_other(axes: tuple) -> None:
    function, seen = opaque()
    x, w = random_x(7, 3, 5, 8, dtype="float32"), random_x(8, 3, 4, 8, dtype="float32")
    x = x if axes[0] == 0 else x[0]
    out = jax.vmap(function, in_axes=axes)(x, w)
    assert seen[-1] == (5, 8)
    for i in range(3):
        np.testing.assert_allclose(out[i], (x[i] if axes[0] == 0 else x) @ w[i].T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd])
def test_a_derivative_of_a_kernel_raises_a_sentence(transform) -> None:
    function, _ = opaque()
    x, w = random_x(7, 5, 8, dtype="float32"), random_x(8, 4, 8, dtype="float32")
    with pytest.raises(NotImplementedError, match=re.escape("quantized_matmul has no derivative")):
        transform(lambda x: function(x, w).sum())(x)


several_xla, mlp_xla = (functools.partial(f, implementation="xla") for f in (quantized_matmuls, quantized_mlp))


@pytest.mark.parametrize(
    "function", [several_xla, quantized_matmuls_reference, quantized_matmuls], ids=["xla", "ref", "any"]
)
def test_several_weights_and_one_x(function) -> None:
    """Any number, sizes and formats; each result is that of its own weight."""
    weights = [
        random_weight(form, i, out, 128) for i, (form, out) in enumerate([("mxfp8", 96), ("nvfp4", 32), ("mxfp8", 96)])
    ]
    x = random_x(9, 2, 3, 128)
    for some in (weights, weights[:1], weights[1:]):
        outs = jax.jit(function)(x, some)
        assert isinstance(outs, tuple) and len(outs) == len(some)
        for out, weight in zip(outs, some, strict=True):
            assert_product(out, x, weight)
    with pytest.raises(AssertionError, match="of the elements are wrong"):
        assert_product(function(x, weights)[0], x, weights[2])


@pytest.mark.parametrize("function", [mlp_xla, quantized_mlp_reference, quantized_mlp], ids=["xla", "ref", "any"])
@pytest.mark.parametrize(
    "forms", [("mxfp8", "mxfp8", "mxfp8"), ("mxfp8", "nvfp4", "mxfp8"), ("nvfp4", "nvfp4", "mxfp8")]
)
def test_mlp(forms: tuple, function) -> None:
    gate, up = (random_weight(form, i, 128, 64) for i, form in enumerate(forms[:2]))
    down, x = random_weight(forms[2], 2, 96, 128), random_x(3, 2, 3, 64)
    run = functools.partial(function, alpha=1.702, limit=7.0)
    assert_mlp(jax.jit(run)(x, gate, up, down), x, gate, up, down)
    for wrong in (run(x, up, gate, down), run(x, gate, up, down, alpha=1.0), run(x, gate, up, down, limit=70.0)):
        with pytest.raises(AssertionError, match="too far"):
            assert_mlp(wrong, x, gate, up, down)


@pytest.mark.parametrize("rounded", ["up, inner", "gate, inner", "gate, up", "inner"])
def test_a_rounding_that_is_left_out_is_seen(rounded: str) -> None:
    """XLA may take two conversions together on GPUs: it must be told that a gate in bfloat16 is meant."""
    gate, up, down = (random_weight("mxfp8", i, *size) for i, size in enumerate([(512, 512), (512, 512), (128, 512)]))
    x = random_x(3, 64, 512) * jnp.bfloat16(2.0**-5)
    wrong = jnp.asarray(mlp_oracle(x, gate, up, down, rounded)).astype(jnp.bfloat16)
    with pytest.raises(AssertionError, match="too far"):
        assert_mlp(wrong, x, gate, up, down)
    assert_mlp(mlp_xla(x, gate, up, down, alpha=1.702, limit=7.0), x, gate, up, down)
    text = jax.jit(functools.partial(mlp_xla, alpha=1.702, limit=7.0)).lower(x, gate, up, down).as_text()
    assert len(re.findall(r"reduce_precision .*e8m7", text)) == 2


def test_the_mlp_is_the_products_and_the_activation() -> None:
    """Bit for bit, rounded in between: what a model does with linears of its own."""
    gate, up, down = (
        random_weight("mxfp8", 1, 96, 64),
        random_weight("mxfp8", 2, 96, 64),
        random_weight("mxfp8", 3, 64, 96),
    )
    x = random_x(4, 5, 64)
    g, u = (xla(x, weight).astype(jnp.float32) for weight in (gate, up))
    g, u = jnp.minimum(g, 7.0), jnp.clip(u, -7.0, 7.0)
    inner = (g * jax.nn.sigmoid(1.702 * g) * (u + 1)).astype(jnp.bfloat16)
    assert jnp.array_equal(quantized_mlp(x, gate, up, down, alpha=1.702, limit=7.0), xla(inner, down))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about machines without an NVIDIA GPU")
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_a_named_kernel_does_not_fall_back(implementation: str) -> None:
    weight, x = random_weight("mxfp8", 1, 512, 512), random_x(1, 1, 512)
    with pytest.raises(NotImplementedError, match=f"'{implementation}'.*NVIDIA GPUs, and this call runs on cpu"):
        quantized_matmul(x, weight, implementation=implementation)
    with pytest.raises(NotImplementedError, match=f"'{implementation}'.*NVIDIA GPUs, and this call runs on cpu"):
        quantized_matmuls(x, [weight, weight], implementation=implementation)
    with pytest.raises(NotImplementedError, match=f"'{implementation}'.*NVIDIA GPUs, and this call runs on cpu"):
        quantized_mlp(x, weight, weight, weight, alpha=1.0, limit=7.0, implementation=implementation)


def test_arguments_of_several_weights_are_checked_in_words() -> None:
    a, b, x = random_weight("mxfp8", 1, 64, 128), random_weight("mxfp8", 1, 64, 96), random_x(1, 2, 128)
    mlp = functools.partial(quantized_mlp, x, alpha=1.7, limit=7.0)
    with pytest.raises(ValueError, match="at least one weight, got none"):
        quantized_matmuls(x, [])
    with pytest.raises(ValueError, match=re.escape("weights[1]'s 96 inputs as its last axis, got x (2, 128)")):
        quantized_matmuls(x, [a, b])
    with pytest.raises(TypeError, match="weights"):
        quantized_matmuls(x, [a, x])
    with pytest.raises(ValueError, match="unknown implementation 'cuda'; known: None, 'mosaic', 'triton', 'xla'"):
        quantized_matmuls(x, [a], implementation="cuda")
    with pytest.raises(ValueError, match="unknown implementation 'cuda'; known: None, 'mosaic', 'triton', 'xla'"):
        mlp(a, a, random_weight("mxfp8", 1, 32, 64), implementation="cuda")
    with pytest.raises(ValueError, match=re.escape("up must be [64, 128] for gate [64, 128], got [64, 96]")):
        mlp(a, b, b)
    with pytest.raises(ValueError, match=re.escape("down must be [O, 64] for gate [64, 128], got [64, 96]")):
        mlp(a, a, b)
    with pytest.raises(TypeError, match="alpha"):
        mlp(a, a, b, alpha=jnp.float32(1))
    with pytest.raises(ValueError, match=r"limit must be positive, got -1\.0"):
        mlp(a, a, b, limit=-1.0)
    with pytest.raises(ValueError, match="limit must be finite in float32, got inf"):
        mlp(a, a, b, limit=float("inf"))


def test_arguments_are_checked_in_words() -> None:
    mx, nv, x = random_weight("mxfp8", 1, 64, 128), random_weight("nvfp4", 1, 64, 128), random_x(1, 2, 128)
    stack = random_weight("mxfp8", 1, 64, 128, lead=(2,))
    with pytest.raises(ValueError, match="unknown implementation 'cuda'"):
        quantized_matmul(x, mx, implementation="cuda")
    with pytest.raises(ValueError, match=re.escape("128 inputs as its last axis, got x (2, 64)")):
        quantized_matmul(x[:, :64], mx)
    with pytest.raises(ValueError, match=re.escape("one matrix [out, in], got codes (2, 64, 128)")):
        quantized_matmul(x, stack)
    with pytest.raises(TypeError, match=r"float8_e4m3fn and uint8.*got uint8 and uint8"):
        quantized_matmul(x, MX(mx.codes.view(jnp.uint8), mx.scale))
    with pytest.raises(TypeError, match="lacks global_scale and global_scale_op"):
        quantized_matmul(x, MX(nv.codes, nv.scale))
    with pytest.raises(ValueError, match=re.escape("scale must be [..., out, in / 32]") + ".*" + re.escape("(64, 3)")):
        quantized_matmul(x, MX(mx.codes, mx.scale[:, :3]))
    with pytest.raises(ValueError, match='must be "multiply" or "divide", got \'add\''):
        quantized_matmul(x, dataclasses.replace(nv, global_scale_op="add"))
    with pytest.raises(ValueError, match=re.escape("global_scale must be float32 (), got float32 (1,)")):
        quantized_matmul(x, dataclasses.replace(nv, global_scale=nv.global_scale[None]))


def test_a_gate_below_float16_closes() -> None:
    """Each of 64 inputs of 2,000 takes 4 away: -512,000 is -inf in float16, and its activation 0 all the same."""
    one, down = random_weight("mxfp8", 1, 32, 64), random_weight("mxfp8", 2, 8, 32)
    codes, scale = jnp.full((32, 64), -4, jnp.float8_e4m3fn), jnp.full((32, 2), 127, jnp.uint8)
    minus = dataclasses.replace(one, codes=codes, scale=scale)
    x = jnp.full((1, 64), 2000, jnp.float16)
    out = quantized_mlp(x, minus, one, down, alpha=1.702, limit=7.0, implementation="xla")
    assert (np.asarray(out, np.float32) == 0).all()
