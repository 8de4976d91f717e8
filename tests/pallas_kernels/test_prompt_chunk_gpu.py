"""Chunks of prompts on an NVIDIA GPU: each form of attention and selection beside the loops, and whole models.

export XLA_FLAGS=--xla_gpu_autotune_level=0 XLA_PYTHON_CLIENT_PREALLOCATE=false
pytest -n 4 -o addopts= tests/pallas_kernels/test_prompt_chunk_gpu.py
"""

import dataclasses
import functools
import secrets

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_marks import MOSAIC, TRITON, needs_gpu, needs_triton
from sparse_cases import SCORE_TOLERANCE, scores_differ
from test_kernels_gpu import MARGIN, wide

import dspark_jax as ds
from dspark_jax import attention, attention_forms
from pallas_kernels import index_block_scores, select_blocks

FRESH = secrets.randbits(24)  # printed by a failing assertion
OUT_TOLERANCE = 6e-3  # relative norm: weights and output in bfloat16


@dataclasses.dataclass(frozen=True)
class Shape:
    tokens: int
    slots: int
    heads: tuple[int, int]
    dim: int
    block: int
    top_k: int

    @property
    def rows(self) -> list[tuple[int, int]]:
        """First position and tokens of each row: inside, at the end, past the end of the cache; ragged; nothing."""
        t, s = self.tokens, self.slots
        return [(s // 2 + 5, t), (s - t, t), (s - t // 2, t), (0, t // 3), (0, t), (0, 0)]

    @property
    def positions(self) -> jax.Array:
        offset = np.arange(self.tokens)
        return jnp.asarray([np.where(offset < n, start + offset, -1) for start, n in self.rows], jnp.int32)

    def normal(self, seed: int, *shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(FRESH + seed), (len(self.rows), *shape), jnp.bfloat16)


SHAPES = {
    "the model": Shape(tokens=512, slots=4096, heads=(64, 4), dim=128, block=128, top_k=16),
    "no multiple of a group": Shape(tokens=77, slots=1024, heads=(32, 4), dim=64, block=64, top_k=3),
    "other numbers": Shape(tokens=100, slots=640, heads=(12, 2), dim=128, block=128, top_k=2),
}


def relative(actual, expected, positions) -> float:
    """Norm of the difference over that of the expected; infinite where something is not finite, padding included."""
    if not np.isfinite(np.asarray(actual, np.float32)).all():
        return np.inf
    real = np.asarray(positions)[..., None, None] >= 0
    actual, expected = (np.where(real, np.asarray(x, np.float32), 0) for x in (actual, expected))
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("implementation", [MOSAIC, TRITON])
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_attention(name: str, sparse: bool, implementation: str) -> None:
    if sparse and implementation == "mosaic":
        pytest.skip("there is no block-sparse Mosaic form")
    s = SHAPES[name]
    at, (hq, hkv) = s.positions, s.heads
    q, k, v = (
        s.normal(i, n, heads, s.dim) for i, (n, heads) in enumerate([(s.tokens, hq), (s.slots, hkv), (s.slots, hkv)])
    )
    scores = s.normal(3, s.tokens, hkv, s.slots // s.block).astype(jnp.float32)
    blocks = attention.select_blocks(scores, at, block_size=s.block, top_k=s.top_k) if sparse else None
    loops = jax.jit(functools.partial(attention.attend, block_size=s.block, chunk=s.block))
    exact = tuple(x.astype(jnp.float32) for x in (q, k, v))
    run = functools.partial(attention_forms.attend_with_kernels, block_size=s.block, implementation=implementation)
    jax.block_until_ready([jnp.full(q.shape, jnp.nan, q.dtype) for _ in range(4)])  # what is not written shows
    actual = jax.jit(run)(q, k, v, at, blocks=blocks)
    assert relative(actual, loops(*exact, at, blocks=blocks), at) <= OUT_TOLERANCE, f"seed {FRESH}"
    mutants = [loops(exact[0], exact[1][:, :, ::-1], exact[2], at, blocks=blocks)]
    if blocks is not None:
        mutants += [loops(*exact, at, blocks=b) for b in (blocks[:, :, ::-1], jnp.roll(blocks, 1, axis=1), None)]
    assert min(relative(actual, m, at) for m in mutants) > 5 * OUT_TOLERANCE, f"seed {FRESH}"


@needs_triton
@pytest.mark.parametrize("name", SHAPES)
def test_selection(name: str) -> None:
    s = SHAPES[name]
    at, heads = s.positions, s.heads[1]
    q, k = s.normal(4, s.tokens, heads, s.dim), s.normal(5, s.slots, s.dim)
    static = dict(block_size=s.block, implementation="triton")
    loops = functools.partial(attention.block_scores, block_size=s.block, chunk=s.block)
    scores = jax.jit(functools.partial(index_block_scores, **static))(q, k, at)
    # Twice: the loops' sums are in yet another order than those of an oracle.
    assert scores_differ(scores, np.asarray(loops(q, k, at), np.float64)) <= 2 * SCORE_TOLERANCE, f"seed {FRESH}"
    late = np.asarray(loops(q, k, jnp.where(at < 0, -1, at + 1)), np.float64)
    assert scores_differ(scores, late) > 100 * SCORE_TOLERANCE
    kept = jax.jit(functools.partial(select_blocks, top_k=s.top_k, **static))(scores, at)
    np.testing.assert_array_equal(kept, attention.select_blocks(scores, at, block_size=s.block, top_k=s.top_k))
    assert not np.array_equal(kept, attention.select_blocks(-scores, at, block_size=s.block, top_k=s.top_k))


PROMPTS = [70, 33, 0, 61]  # tokens: several chunks of 24, and more blocks than a selection holds
CHOICES = {
    "automatic": ds.Kernels(),
    "attention": ds.Kernels(attention="triton"),
    "everything": ds.Kernels(linear="triton", experts="triton", attention="triton"),
}


def last_keys(dtype, kernels: ds.Kernels) -> np.ndarray:
    """Keys of the last layer after a prefill in chunks, which depend on all that came before."""
    m = wide(dtype, kernels)
    width, lengths = max(PROMPTS), jnp.asarray(PROMPTS, jnp.int32)
    tokens = jax.random.randint(jax.random.key(1), (len(PROMPTS), width), 0, m.config.vocab_size, jnp.int32)
    config = ds.GenerateConfig(max_new_tokens=8, draft="none", prefill_chunk=24)
    state = ds.prefill(
        ds.Model(target=m, drafter=None), tokens, lengths, ds.request_keys(range(len(PROMPTS))), ds.SamplingParams(),
        config=config,
    )  # fmt: skip
    keys = np.asarray(state.cache.keys[-1], np.float32)
    return np.concatenate([keys[row, :length] for row, length in enumerate(PROMPTS)])


@needs_gpu
@pytest.mark.parametrize("choice", [pytest.param(c, marks=needs_triton if c != "automatic" else ()) for c in CHOICES])
def test_a_prefill_in_chunks(choice: str) -> None:
    """As near to float32 as the loops in bfloat16 are, but for a few tokens with other experts or blocks."""
    exact = last_keys(jnp.float32, ds.Kernels.xla())

    def error(keys: np.ndarray) -> float:
        return float(np.median(np.abs(keys - exact).reshape(len(exact), -1).mean(-1)))  # over tokens

    found, noise = last_keys(jnp.bfloat16, CHOICES[choice]), error(last_keys(jnp.bfloat16, ds.Kernels.xla()))
    print(f"{choice}: {error(found):.4f} from float32, loops {noise:.4f}, exchanged tokens {error(found[::-1]):.3f}")
    assert error(found) < MARGIN * noise < error(found[::-1])
