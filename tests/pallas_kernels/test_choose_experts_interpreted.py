"""The Triton form of `choose_experts`, run by Triton's interpreter on the CPU.

TRITON_INTERPRET=1 pytest tests/pallas_kernels/test_choose_experts_interpreted.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from choose_experts_cases import arguments, check, oracle, special
from triton_interpreter import interpreted, requires_interpreter

from pallas_kernels.choose_experts import triton


def run(x: jax.Array, weight: jax.Array, bias: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    with interpreted(), np.errstate(all="ignore"):
        return triton.run(x, weight, bias, top_k=top_k)


@requires_interpreter
@pytest.mark.parametrize(
    "rows, experts, hidden, top_k",
    [(8, 128, 6144, 4), (1, 128, 640, 4), (64, 128, 640, 4), (70, 128, 256, 8), (5, 6, 64, 2), (9, 5, 33, 5),
     (3, 1, 8, 1), (17, 200, 136, 3), (128, 64, 128, 4), (2, 1000, 64, 2)],
)  # fmt: skip
def test_equals_the_oracle(rows: int, experts: int, hidden: int, top_k: int) -> None:
    given = arguments(rows, experts, hidden)
    check(run(*given, top_k), *given, top_k)


@requires_interpreter
@pytest.mark.parametrize("name", special(4, 16, 64))
def test_ties_never_and_nan(name: str) -> None:
    given = special(4, 16, 64)[name]
    experts, weights, _ = oracle(*given, 4)
    found = run(*given, 4)
    np.testing.assert_array_equal(found[0], experts)
    np.testing.assert_allclose(found[1], weights, atol=1e-5)


@requires_interpreter
def test_products_are_those_of_float32(monkeypatch) -> None:
    """Weights with all 24 bits in the mantissa, of which the logits are made alone or in pairs that nearly cancel."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**23, (64, 64)) | 1 | (rng.integers(100, 126, (64, 64)) << 23)
    half = (bits.astype(np.uint32) | (rng.integers(0, 2, (64, 64)).astype(np.uint32) << 31)).view(np.float32)
    weight = np.concatenate([half, half * np.float32(2**-20 - 1)], axis=1)
    for pair in (0.0, 1.0):
        x = np.concatenate([np.eye(64), pair * np.eye(64)], axis=1)
        exact = (weight[:, :64].astype(np.float64) + pair * weight[:, 64:]).T
        found = logits(jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight), monkeypatch)
        np.testing.assert_array_equal(found, exact.astype(np.float32))


def logits(x: jax.Array, weight: jax.Array, monkeypatch) -> np.ndarray:
    """What the second kernel is given by the first, summed."""
    import triton_interpreter

    seen, call = [], triton_interpreter.triton_call

    def spy(*args, **kwargs):
        seen.append(args)
        return call(*args, **kwargs)

    monkeypatch.setattr(triton_interpreter, "triton_call", spy)
    run(x, weight, jnp.zeros(weight.shape[0], jnp.float32), 1)
    return np.asarray(seen[1][0]).sum(axis=0)


@requires_interpreter
@pytest.mark.parametrize("form", ["rounded weights", "ranked without bias"])
def test_mutants(form: str) -> None:
    x, weight, bias = given = arguments(50, 128, 640)
    wrong = {
        "rounded weights": (x, weight.astype(jnp.bfloat16).astype(jnp.float32), bias),
        "ranked without bias": (x, weight, bias * 0),
    }[form]
    with pytest.raises(AssertionError):
        check(run(*wrong, 4), *given, 4)


@requires_interpreter
def test_a_row_depends_neither_on_others_nor_on_their_number() -> None:
    x, weight, bias = arguments(70, 128, 640)
    together, alone = run(x, weight, bias, 4), run(x[66:], weight, bias, 4)
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_array_equal(a[66:], b)
