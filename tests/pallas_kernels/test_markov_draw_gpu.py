"""`markov_draw` on a GPU: the Triton kernels against the oracle, at the size of the real vocabulary."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_marks import needs_triton
from markov_draw_cases import NAMES, arguments, equal_tokens, problems

from pallas_kernels import markov_draw

VOCAB = 200_064


@functools.partial(jax.jit, static_argnames=("slot", "keep"))
def triton(given: dict[str, jax.Array], *, slot: int, keep: bool = True):
    return markov_draw(*(given[name] for name in NAMES), slot=slot, keep=keep, implementation="triton")


@needs_triton
@pytest.mark.parametrize("batch, vocab, rank", [(1, VOCAB, 256), (3, 200_061, 256), (8, VOCAB, 256), (8, 6147, 16),
                                                (20, 5001, 256), (64, VOCAB, 256), (70, 5001, 24)])  # fmt: skip
def test_slots_equal_the_oracle(batch: int, vocab: int, rank: int) -> None:
    given = arguments(batch, vocab, rank)
    for slot in range(2):
        found = triton(given, slot=slot)
        assert not problems(given, found, slot)
        token, wanted = np.asarray(found.token), equal_tokens(given, slot)
        np.testing.assert_array_equal(token[wanted >= -1], wanted[wanted >= -1])
    greedy = given | dict(
        drawn=jnp.zeros(batch, bool), inverse_temperature=jnp.ones(batch, jnp.float32)
    )  # fmt: skip
    assert not problems(greedy, triton(greedy, slot=0, keep=False), 0, keep=False)


@needs_triton
def test_rows_without_a_finite_logit() -> None:
    for batch in (5, 20):
        given = arguments(batch, VOCAB, 256)
        given["logits"] = given["logits"].at[1].set(-jnp.inf).at[3].set(jnp.nan)
        found = triton(given, slot=1)
        assert not problems(given, found, 1)
        np.testing.assert_array_equal(np.flatnonzero(np.asarray(found.token) == -1), [1, 3])


@needs_triton
def test_a_run_is_as_the_last_one() -> None:
    given = arguments(8, VOCAB, 256)
    for a, b in zip(triton(given, slot=1), triton(given, slot=1), strict=True):
        np.testing.assert_array_equal(a, b)


@needs_triton
def test_batches_and_derivatives() -> None:
    given = arguments(4, 6147, 256)
    once = triton(given, slot=0)
    shared = ("latents", "table", "allowed")
    split = {name: a if name in shared else a.reshape(2, 2, *a.shape[1:]) for name, a in given.items()}
    batched = jax.vmap(functools.partial(triton, slot=0), in_axes=({n: None if n in shared else 0 for n in given},))
    for a, b in zip(once, batched(split), strict=True):
        np.testing.assert_array_equal(a, np.asarray(b).reshape(a.shape))
    with pytest.raises(NotImplementedError, match="has no derivative"):
        jax.grad(lambda x: triton(given | dict(logits=x), slot=0).log_mass.sum())(given["logits"])
