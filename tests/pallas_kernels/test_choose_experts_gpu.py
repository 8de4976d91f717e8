"""`choose_experts` on a GPU: the Triton kernels against float64 in numpy, at real sizes."""

import functools

import jax
import numpy as np
import pytest
from choose_experts_cases import arguments, check, oracle, special
from gpu_marks import needs_triton

from pallas_kernels import choose_experts


@functools.partial(jax.jit, static_argnames="top_k")
def triton(x: jax.Array, weight: jax.Array, bias: jax.Array, *, top_k: int):
    return choose_experts(x, weight, bias, top_k=top_k, implementation="triton")


@needs_triton
@pytest.mark.parametrize(
    "rows, experts, hidden, top_k",
    [(8, 128, 6144, 4), (64, 128, 6144, 4), (128, 128, 6144, 4), (512, 128, 6144, 4), (1024, 128, 640, 4),
     (1, 128, 6144, 4), (70, 200, 136, 8), (5, 6, 64, 2),
     (9, 5, 33, 5), (3, 1, 8, 1), (2, 1000, 640, 2)],
)  # fmt: skip
def test_equals_the_oracle(rows: int, experts: int, hidden: int, top_k: int) -> None:
    given = arguments(rows, experts, hidden)
    found = triton(*given, top_k=top_k)
    check(found, *given, top_k)
    for a, b in zip(found, triton(*given, top_k=top_k), strict=True):
        np.testing.assert_array_equal(a, b)


@needs_triton
@pytest.mark.parametrize("name", special(4, 128, 256))
def test_ties_never_and_nan(name: str) -> None:
    given = special(4, 128, 256)[name]
    experts, weights, _ = oracle(*given, 4)
    found = triton(*given, top_k=4)
    np.testing.assert_array_equal(found.experts, experts)
    np.testing.assert_allclose(found.weights, weights, atol=1e-5)
    np.testing.assert_array_equal(choose_experts(*given, top_k=4, implementation="xla").experts, experts)


@needs_triton
def test_batches_loops_and_derivatives() -> None:
    x, weight, bias = arguments(300, 128, 640)
    mapped = jax.jit(jax.vmap(lambda x: triton(x, weight, bias, top_k=4)))(x.reshape(3, 100, -1))
    check([a.reshape(300, 4) for a in mapped], x, weight, bias, 4)
    first = triton(x[:100], weight, bias, top_k=4)
    body = lambda i, w: w + triton(x[:100], weight, bias, top_k=4).weights  # noqa: E731
    looped = jax.jit(lambda: jax.lax.fori_loop(0, 3, body, 0 * first.weights))()
    np.testing.assert_allclose(looped, 3 * first.weights, rtol=1e-6)
    with pytest.raises(NotImplementedError, match="derivative"):
        jax.grad(lambda w: triton(x[:8], w, bias, top_k=4).weights.sum())(weight)
