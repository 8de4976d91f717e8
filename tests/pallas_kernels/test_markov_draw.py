"""`markov_draw` through XLA against the oracle, its arguments, and the Triton kernels compiled ahead of time."""

import inspect
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from markov_draw_cases import NAMES, arguments, equal_tokens, noise, problems
from test_attention_triton import BF16, F32, I32, compiled

from pallas_kernels import markov_draw


def run(given: dict[str, jax.Array], slot: int, **options):
    return markov_draw(*(given[name] for name in NAMES), slot=slot, **options)


@pytest.mark.parametrize("batch, vocab, rank", [(1, 501, 16), (7, 500, 24), (20, 333, 256)])
def test_xla_equals_the_oracle(batch: int, vocab: int, rank: int) -> None:
    given = arguments(batch, vocab, rank)
    for slot in range(2):
        found = jax.jit(run, static_argnames="slot")(given, slot=slot)
        assert not problems(given, found, slot)
        token, wanted = np.asarray(found.token), equal_tokens(given, slot)
        np.testing.assert_array_equal(token[wanted >= -1], wanted[wanted >= -1])
    assert not problems(given, run(given, 0, keep=False), 0, keep=False)


def test_rows_without_a_finite_logit() -> None:
    given = arguments(5, 60, 16)
    given["logits"] = given["logits"].at[1].set(-jnp.inf).at[3].set(jnp.nan)
    found = run(given, 1)
    assert not problems(given, found, 1)
    np.testing.assert_array_equal(np.asarray(found.token) == -1, [False, True, False, True, False])


WRONG = {
    "the bias of another row": lambda g: g | dict(index=jnp.roll(g["index"], 1)),
    "every token allowed": lambda g: g | dict(allowed=jnp.ones_like(g["allowed"])),
    "one temperature": lambda g: g | dict(inverse_temperature=jnp.ones_like(g["inverse_temperature"])),
    "keys of another slot": lambda g: g | dict(words=g["words"][:, ::-1]),
    "nothing greedy": lambda g: g | dict(drawn=jnp.ones_like(g["drawn"])),
    "a table that is 1 % off": lambda g: g | dict(table=(g["table"] * 1.01).astype(jnp.bfloat16)),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_comparison_sees_a_wrong_draw(name: str) -> None:
    given = arguments(5, 501, 16)
    assert not problems(given, run(given, 0), 0)
    assert problems(given, run(WRONG[name](given), 0), 0)


def test_the_comparison_sees_noise_of_23_bits() -> None:
    """What `jax.random.gumbel` draws in its other mode."""
    given = arguments(5, 501, 16)

    def coarse(words: np.ndarray, vocab: int) -> np.ndarray:
        keys = jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")
        return np.asarray(jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32, mode="low"))(keys))

    assert np.abs(coarse(np.asarray(given["words"])[:, 0], 501) - noise(np.asarray(given["words"])[:, 0], 501)).max()
    assert problems(given, run(given, 0), 0, gumbels=coarse)


def test_arguments_that_do_not_fit() -> None:
    given = arguments(4, 100, 16)
    plain = inspect.unwrap(markov_draw)  # the test run's shape checker would speak first

    def call(slot: Any = 0, keep: Any = True, implementation: str | None = None, **changes) -> None:
        plain(*((given | changes)[name] for name in NAMES), slot=slot, keep=keep, implementation=implementation)

    with pytest.raises(ValueError, match=r"index must have shape \(4,\) for logits \(4, 2, 100\)"):
        call(index=given["index"][:2])
    with pytest.raises(TypeError, match="table must be bfloat16, got float32"):
        call(table=given["table"].astype(jnp.float32))
    with pytest.raises(ValueError, match="no empty axis"):
        call(logits=given["logits"][:, :0])
    with pytest.raises(ValueError, match=r"slot must be in 0\.\.1"):
        call(slot=2)
    for slot in (True, 1.0, jnp.int32(1)):
        with pytest.raises(TypeError, match=r"slot must be a Python int, got .*: it is part of the program"):
            call(slot=slot)
    with pytest.raises(TypeError, match="keep must be True or False, got NoneType"):
        call(keep=None)
    with pytest.raises(TypeError, match="latents must be one of bfloat16, float16, float32, got int32"):
        call(latents=given["latents"].astype(jnp.int32), table=given["table"].astype(jnp.int32))
    with pytest.raises(NotImplementedError, match="markov_draw has no form 'mosaic', only 'triton' and 'xla'"):
        call(implementation="mosaic")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the kernel may serve there")
def test_without_a_gpu_the_kernel_says_so() -> None:
    with pytest.raises(NotImplementedError, match="runs on NVIDIA GPUs"):
        run(arguments(2, 100, 16), 0, implementation="triton")


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton compiles nothing with TRITON_INTERPRET=1")
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    "batch, vocab, rank", [(1, 200_064, 256), (8, 200_064, 256), (20, 200_064, 256), (64, 200_064, 256), (3, 1001, 24)]
)
def test_the_kernels_compile(batch: int, vocab: int, rank: int, capability: int) -> None:
    pytest.importorskip("triton", reason="triton is not installed: dspark-jax[triton]")
    from pallas_kernels._triton import power_of_two
    from pallas_kernels.markov_draw import triton, triton_kernel

    kinds = {"latents": BF16, "table": BF16, "index": I32, "token": I32, "words": "*u32", "allowed": "*i8"}
    tile = triton.tile(batch)
    chunks = -(-vocab // tile.tokens)
    known = dict(
        BATCH=batch, SLOTS=7, LATENTS=vocab, VOCAB=vocab, RANK=rank, CHUNKS=chunks, ROWS=tile.rows, AXIS=tile.axis,
        WIDTH=tile.tokens, STEP=min(tile.step, power_of_two(rank)), KEEP=True, CHUNKS_PADDED=power_of_two(chunks, 1),
    )  # fmt: skip
    for kernel, options in (
        (triton_kernel.score, dict(num_warps=tile.warps, num_stages=tile.stages)),
        (triton_kernel.pick, {}),
    ):
        names = [parameter.name for parameter in kernel.params]
        pointers = {n: kinds.get(n.removesuffix("_ptr"), F32) for n in names if n.endswith("_ptr")} | {
            "slot_plus_2": "i32"
        }
        constants = {n: known[n] for n in names if n not in pointers}
        assert compiled(kernel, capability, pointers, constants, **options).asm["cubin"]
