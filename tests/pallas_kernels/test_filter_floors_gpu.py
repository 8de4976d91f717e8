"""`filter_floors` on a GPU: the Triton kernels against the oracle, at the size of the real vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filter_floors_cases import FILTERS, WRONG, problems, rows, settings
from gpu_marks import needs_triton
from test_filter_floors import arguments

from pallas_kernels import filter_floors

VOCAB = 200_064


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    """[4, 4, V]: all kinds of rows."""
    kinds = [list(rows(VOCAB, seed).values()) for seed in range(2)]
    flat = [row for made in kinds for row in made]
    return np.stack([flat[4 * b : 4 * b + 4] for b in range(4)])


def triton(*given: jax.Array):
    return filter_floors(*given, implementation="triton")


@needs_triton
@pytest.mark.parametrize("name", FILTERS)
def test_floors_equal_the_oracle(name: str, logits: np.ndarray) -> None:
    setting = settings(name, VOCAB)
    found = jax.jit(triton)(*arguments(logits, setting))
    assert not problems(logits, found, setting)


@needs_triton
@pytest.mark.parametrize("vocab", [7, 4096, 6147, 200_061])
def test_other_vocabularies(vocab: int) -> None:
    made = np.stack(
        [np.stack([rows(max(vocab, 60), b)[kind][:vocab] for kind in ("normal", "steps")]) for b in range(4)]
    )
    for name in ("top-p", "everything"):
        setting = settings(name, vocab)
        assert not problems(made, jax.jit(triton)(*arguments(made, setting)), setting)


@needs_triton
@pytest.mark.parametrize("name", WRONG)
def test_the_comparison_sees_a_wrong_law(name: str) -> None:
    wrong, filters, kind = WRONG[name]
    made, setting = np.stack([rows(6147, 5 + b)[kind] for b in range(4)])[:, None], settings(filters, 6147)
    found = jax.jit(triton)(*arguments(made, setting))
    assert not problems(made, found, setting)
    assert problems(made, found, setting, keep=wrong)


@needs_triton
def test_a_row_depends_neither_on_others_nor_on_the_run(logits: np.ndarray) -> None:
    setting = settings("everything", VOCAB)
    given = arguments(logits, setting)
    first, again = (jax.jit(triton)(*given) for _ in range(2))
    alone = jax.jit(triton)(given[0][1:2, 2:3], *(a[1:2] for a in given[1:]))
    for a, b, c in zip(first, again, alone, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(np.asarray(a)[1, 2], np.asarray(c)[0, 0])


@needs_triton
def test_loops_and_batches(logits: np.ndarray) -> None:
    given = arguments(logits[:, :2], settings("top-k, then top-p", VOCAB))
    once = jax.jit(triton)(*given)

    def body(state):
        i, floor = state
        return i + 1, floor + triton(*given).floor

    _, summed = jax.jit(lambda: jax.lax.while_loop(lambda s: s[0] < 3, body, (0, jnp.zeros_like(once.floor))))()
    np.testing.assert_allclose(summed, 3 * once.floor, rtol=1e-6)
    batched = jax.jit(jax.vmap(triton))(*(a[:, None] for a in given))
    for a, b in zip(once, batched, strict=True):
        np.testing.assert_array_equal(a, np.asarray(b)[:, 0])
    with pytest.raises(NotImplementedError, match="has no derivative"):
        jax.grad(lambda x: triton(x, *given[1:]).log_mass.sum())(given[0])
