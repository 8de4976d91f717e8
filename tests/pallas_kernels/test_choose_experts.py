"""`choose_experts` without a kernel against float64 in numpy, its arguments, and how the kernels compile."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from choose_experts_cases import arguments, check, oracle, special
from test_attention_triton import BF16, F32, I32, compiled

from pallas_kernels import choose_experts
from pallas_kernels.choose_experts import triton

xla = functools.partial(choose_experts, implementation="xla")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize(
    "rows, experts, hidden, top_k", [(1, 128, 640, 4), (50, 6, 64, 2), (9, 5, 33, 5), (3, 1, 8, 1)]
)
def test_equals_the_oracle(rows: int, experts: int, hidden: int, top_k: int, dtype) -> None:
    given = arguments(rows, experts, hidden, dtype=dtype)
    check(xla(*given, top_k=top_k), *given, top_k)
    check(choose_experts(*given, top_k=top_k), *given, top_k)


# The NaN that a CPU makes of a product has a sign.
@pytest.mark.parametrize("name", [name for name in special(4, 16, 64) if name != "one NaN weight"])
def test_ties_never_and_nan(name: str) -> None:
    given = special(4, 16, 64)[name]
    experts, weights, _ = oracle(*given, 4)
    found = xla(*given, top_k=4)
    np.testing.assert_array_equal(found.experts, experts)
    np.testing.assert_allclose(found.weights, weights, atol=1e-5)


def _biased_weights(x, weight, bias, top_k):
    biased = jax.nn.sigmoid(x.astype(jnp.float32) @ weight.T) + bias[None]
    best, experts = jax.lax.top_k(biased, top_k)
    return experts, best / best.sum(-1, keepdims=True)


def _no_bias(x, weight, bias, top_k):
    return xla(x, weight, bias * 0, top_k=top_k)


def _rounded(x, weight, bias, top_k):
    return xla(x, weight.astype(jnp.bfloat16).astype(jnp.float32), bias, top_k=top_k)


def _higher_index(x, weight, bias, top_k):
    experts, weights = xla(x, weight[::-1], bias[::-1], top_k=top_k)
    return weight.shape[0] - 1 - experts, weights


def _other_order(x, weight, bias, top_k):
    return tuple(a[:, ::-1] for a in xla(x, weight, bias, top_k=top_k))


@pytest.mark.parametrize("wrong", [_biased_weights, _no_bias, _rounded, _other_order])
def test_mutants(wrong) -> None:
    given = arguments(50, 128, 640)
    with pytest.raises(AssertionError):
        check(wrong(*given, 4), *given, 4)


def test_a_tie_that_goes_to_the_higher_index_is_seen() -> None:
    given = special(4, 16, 64)["pairs equal"]
    assert not np.array_equal(_higher_index(*given, 4)[0], oracle(*given, 4)[0])


def test_loops_batches_and_derivatives() -> None:
    x, weight, bias = arguments(6, 16, 64)
    whole = xla(x, weight, bias, top_k=2)
    mapped = jax.vmap(lambda x: xla(x, weight, bias, top_k=2))(x.reshape(2, 3, -1))
    np.testing.assert_array_equal(mapped.experts.reshape(6, 2), whole.experts)

    def body(carry):
        count, _ = carry
        return count + 1, xla(x, weight, bias, top_k=2).weights

    _, looped = jax.jit(lambda: jax.lax.while_loop(lambda c: c[0] < 2, body, (0, jnp.zeros((6, 2)))))()
    np.testing.assert_allclose(looped, whole.weights, atol=1e-6)
    slope = jax.grad(lambda w: xla(x, w, bias, top_k=2).weights[:, 0].sum())(weight)
    assert np.isfinite(slope).all() and np.abs(slope).max() > 0


def test_kernels_have_a_rule_for_batches_and_none_for_derivatives(monkeypatch) -> None:
    monkeypatch.setattr(triton, "MOST_ROWS", 128)
    calls = []

    def kernel(x, weight, bias):
        calls.append(x.shape[0])
        return xla(x, weight, bias, top_k=2)

    opaque = triton._opaque(kernel)
    x, weight, bias = arguments(400, 16, 64)
    whole = xla(x, weight, bias, top_k=2)
    mapped = jax.vmap(lambda x: opaque(x, weight, bias))(x.reshape(4, 100, -1))
    assert max(calls) <= triton.MOST_ROWS
    np.testing.assert_array_equal(mapped[0].reshape(400, 2), whole.experts)
    np.testing.assert_allclose(mapped[1].reshape(400, 2), whole.weights, atol=1e-6)
    with pytest.raises(NotImplementedError, match="derivative"):
        jax.grad(lambda w: opaque(x, w, bias)[1].sum())(weight)
    with pytest.raises(NotImplementedError, match="routers"):
        jax.vmap(opaque, (None, 0, None))(x, weight[None], bias)


def test_arguments_are_checked() -> None:
    x, weight, bias = arguments(6, 16, 64)
    for changed, error, text in (
        (dict(x=x[0]), ValueError, "x must have shape"),
        (dict(x=x.astype(jnp.int32)), TypeError, "x must be one of"),
        (dict(weight=weight[:, 1:]), ValueError, "weight must be"),
        (dict(weight=weight.astype(jnp.bfloat16)), TypeError, "weight must be float32"),
        (dict(bias=bias[1:]), ValueError, "bias must be"),
        (dict(bias=bias.astype(jnp.bfloat16)), TypeError, "bias must be float32"),
        (dict(top_k=17), ValueError, "top_k must be"),
        (dict(top_k=0), ValueError, "top_k must be"),
        (dict(top_k=2.0), TypeError, "top_k must be a Python int, got float"),
        (dict(top_k=jnp.int32(2)), TypeError, "top_k must be a Python int, got Array.*part of the program"),
        (dict(top_k=True), TypeError, "top_k must be a Python int, got bool"),
        (dict(implementation="mosaic"), NotImplementedError, "has no"),
    ):
        with pytest.raises(error, match=text):
            choose_experts.__wrapped__(**(dict(x=x, weight=weight, bias=bias, top_k=2) | changed))
    if jax.default_backend() != "gpu":
        with pytest.raises(NotImplementedError, match="NVIDIA"):
            choose_experts(x, weight, bias, top_k=2, implementation="triton")


def test_what_the_kernels_do_not_take(monkeypatch) -> None:
    monkeypatch.setattr(triton, "require_triton", lambda *_: 132)
    x, weight, _ = arguments(triton.MOST_ROWS, 16, 64)
    triton.build(x, weight, 2)
    with pytest.raises(NotImplementedError, match="rows"):
        triton.build(jnp.concatenate([x, x]), weight, 2)
    with pytest.raises(NotImplementedError, match="bfloat16"):
        triton.build(x.astype(jnp.float32), weight, 2)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile(capability: int) -> None:
    pytest.importorskip("triton", reason="triton is not installed: dspark-jax[triton]")
    from pallas_kernels.choose_experts import triton_kernel

    for rows in (8, 64):
        shape = dict(ROWS=rows, EXPERTS=128)
        pointers = dict(x_ptr=BF16, weight_ptr=F32, parts_ptr=F32)
        constants = shape | dict(HIDDEN=6144, ROW_TILE=max(rows, 16), EXPERT_TILE=64, STEP=128)
        assert compiled(triton_kernel.multiply, capability, pointers, constants, num_warps=4).asm["cubin"]
        pointers = dict(parts_ptr=F32, bias_ptr=F32, experts_ptr=I32, weights_ptr=F32)
        constants = shape | dict(
            EXPERTS_PADDED=128, SLICES=48, SLICES_PADDED=64, SLICES_AT_ONCE=64, CHOICES=4, CHOICES_PADDED=4
        )
        assert compiled(triton_kernel.choose, capability, pointers, constants, num_warps=8).asm["cubin"]
