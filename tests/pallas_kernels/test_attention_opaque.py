"""What wraps kernels that XLA cannot look into: folding of vmap, and no derivative."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import REFERENCE, Case, random_case

from pallas_kernels import _dispatch

ROLES = ("row", "pages", "pages", "table", "row", "row")


def wrapped(seen: list | None = None):
    kernel = functools.partial(REFERENCE.decode, window=8, scale=0.3)

    def counting(*args):
        if seen is not None:
            seen.append(args[0].shape)
        return kernel(*args)

    return _dispatch.opaque("windowed_decode", counting, ROLES), kernel


def cases() -> list[Case]:
    return [
        random_case(
            i, q_start=[5 + i, 20], kv_length=[9 + i, 24], queries=4, heads=(2, 1), head_dim=8, page=4, window=8
        )
        for i in range(3)
    ]


def arguments(case: Case) -> tuple:
    return case.q, *case.pages, case.q_start, case.kv_length


@pytest.mark.parametrize(
    "batched",
    [
        (True, False, False, True, True, True),
        (False, False, False, False, True, True),
        (True, True, True, True, True, True),
        (True, True, False, False, True, False),
    ],
)
def test_vmap_folds_into_the_batch(batched: tuple[bool, ...]) -> None:
    seen: list = []
    function, kernel = wrapped(seen)
    each = [arguments(case) for case in cases()]
    mixed = [jnp.stack([a[i] for a in each]) if b else each[0][i] for i, b in enumerate(batched)]
    axes = tuple(0 if b else None for b in batched)
    out, lse = jax.jit(jax.vmap(function, in_axes=axes))(*mixed)
    assert seen[-1] == (6, 4, 2, 8)  # one launch over 3 * 2 rows
    for n in range(3):
        expected = kernel(*(x[n] if b else x for x, b in zip(mixed, batched, strict=True)))
        np.testing.assert_allclose(out[n], expected[0], atol=1e-6)
        np.testing.assert_allclose(lse[n], expected[1], atol=1e-6)


def test_nested_vmap_folds_twice() -> None:
    function, kernel = wrapped()
    q, kp, vp, table, start, _ = arguments(cases()[0])
    starts = start[None, None] + jnp.arange(6, dtype=jnp.int32).reshape(2, 3, 1)
    nested = jax.vmap(jax.vmap(lambda s: function(q, kp, vp, table, s, s + 4)))(starts)
    for i in range(2):
        for j in range(3):
            expected = kernel(q, kp, vp, table, starts[i, j], starts[i, j] + 4)
            np.testing.assert_allclose(nested[0][i, j], expected[0], atol=1e-6)


def test_folded_page_tables_point_into_their_own_pool() -> None:
    """The mutant of the fold: without the offset, every element of the batch reads the first pool."""
    function, kernel = wrapped()
    each = [arguments(case) for case in cases()]
    stacked = [jnp.stack(parts) for parts in zip(*each, strict=True)]
    out, _ = jax.vmap(function)(*stacked)
    wrong = kernel(each[1][0], each[0][1], each[0][2], *each[1][3:])[0]
    assert not np.allclose(out[1], wrong, atol=1e-3)


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd])
def test_a_derivative_raises_a_sentence(transform) -> None:
    function, _ = wrapped()
    q, *rest = arguments(cases()[0])
    with pytest.raises(NotImplementedError, match=re.escape("differentiate implementation='xla'")):
        transform(lambda q: function(q, *rest)[0].sum())(q)
    with pytest.raises(NotImplementedError, match=re.escape("windowed_decode has no derivative")):
        jax.jit(transform(lambda q: function(q, *rest)[1].sum()))(q)


def test_a_derivative_of_something_else_passes() -> None:
    function, _ = wrapped()
    args = arguments(cases()[0])
    assert jax.grad(lambda x: x * function(*args)[0].sum())(1.0) == function(*args)[0].sum()
