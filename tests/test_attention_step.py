"""The kernels' way through a target layer gives what the loops over the cache give."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import attention
from dspark_jax.kernels import Kernels

BLOCK, SLOTS = 8, 64
# Of each row: consecutive, padded at the end, padding alone, one token, past the end of the cache.
POSITIONS = [[40, 41, 42, 43], [7, 8, -1, -1], [-1] * 4, [15, -1, -1, -1], [61, 62, 63, 64]]
TOLERANCE = 2e-6  # float32, sums of up to 32 terms in another order


def inputs(sparse: bool) -> tuple:
    keys = jax.random.split(jax.random.key(3), 4)
    rows = len(POSITIONS)
    positions = jnp.asarray(POSITIONS, jnp.int32)
    q = jax.random.normal(keys[0], (rows, 4, 8, 16))
    k, v = (jax.random.normal(key, (rows, SLOTS, 2, 16)) for key in keys[1:3])
    scores = jax.random.normal(keys[3], (rows, 4, 2, SLOTS // BLOCK))
    blocks = attention.select_blocks(scores, positions, block_size=BLOCK, top_k=3)
    return q, k, v, positions, blocks if sparse else None


def largest_difference(actual, expected, positions) -> float:
    return float(np.abs(np.where(np.asarray(positions)[..., None, None] < 0, 0, actual - expected)).max())


@pytest.mark.parametrize("sparse", [True, False])
def test_a_step_equals_the_loop(sparse: bool) -> None:
    q, k, v, positions, blocks = inputs(sparse)
    step = jax.jit(functools.partial(attention.attend_step, block_size=BLOCK, implementation=None))
    loop = jax.jit(functools.partial(attention.attend, block_size=BLOCK, chunk=16))
    expected = loop(q, k, v, positions, blocks=blocks)
    actual = step(q, k, v, positions, blocks=blocks)
    assert np.isfinite(actual).all()
    assert largest_difference(actual, expected, positions) <= TOLERANCE
    mutants = [step(q, k, v, positions + 1, blocks=blocks), step(q, k[::-1], v[::-1], positions, blocks=blocks)]
    if blocks is not None:
        mutants += [step(q, k, v, positions, blocks=blocks[:, :, ::-1]), step(q, k, v, positions, blocks=None)]
    assert min(largest_difference(m, expected, positions) for m in mutants) > 1000 * TOLERANCE


def test_which_calls_are_steps(monkeypatch) -> None:
    most = attention.STEP_TOKENS
    assert attention.is_step(most, Kernels(attention="triton"))
    assert not attention.is_step(most + 1, Kernels(attention="triton")) and not attention.is_step(1, Kernels.xla())
    for backend in ("gpu", "cpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        assert attention.is_step(1, Kernels()) == (backend == "gpu")


def test_no_copy_of_the_cache() -> None:
    q, k, v, positions, blocks = (
        jax.ShapeDtypeStruct(s, d)
        for s, d in (
            ((1, 4, 8, 16), jnp.bfloat16), ((1, 65_536, 2, 16), jnp.bfloat16), ((1, 65_536, 2, 16), jnp.bfloat16),
            ((1, 4), jnp.int32), ((1, 4, 2, 3), jnp.int32),
        )
    )  # fmt: skip
    step = functools.partial(attention.attend_step, block_size=BLOCK, implementation=None)
    compiled = jax.jit(lambda *a: step(*a[:4], blocks=a[4])).lower(q, k, v, positions, blocks).compile()
    cache = 65_536 * 2 * 16 * 2
    assert compiled.memory_analysis().temp_size_in_bytes < cache / 4
