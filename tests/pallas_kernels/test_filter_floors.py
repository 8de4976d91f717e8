"""`filter_floors` through XLA against the oracle, its arguments, and the Triton kernels compiled ahead of time."""

import inspect
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filter_floors_cases import FILTERS, WRONG, problems, rows, settings
from test_attention_triton import F32, I32, compile_for

from pallas_kernels import filter_floors

VOCAB = 501


def arguments(logits: np.ndarray, setting: dict[str, np.ndarray]) -> tuple[jax.Array, ...]:
    """Greedy requests filter nothing and want their best token."""
    greedy = setting["temperature"] < 1e-5
    inverse = np.float32(1) / np.where(greedy, np.float32(1), setting["temperature"])
    off = {"top_k": np.int32(0), "top_p": np.float32(1), "min_p": np.float32(0)}
    filters = [np.where(greedy, off[name], setting[name]) for name in off]
    return tuple(jnp.asarray(a) for a in (logits, inverse, *filters, greedy))


def everything(vocab: int, seed: int) -> np.ndarray:
    return np.stack([np.stack(list(rows(vocab, seed + b).values())) for b in range(4)])


@pytest.mark.parametrize("name", FILTERS)
def test_xla_equals_the_oracle(name: str) -> None:
    logits, setting = everything(VOCAB, 0), settings(name, VOCAB)
    found = jax.jit(filter_floors)(*arguments(logits, setting))
    assert not problems(logits, found, setting)


@pytest.mark.parametrize("name", WRONG)
def test_the_comparison_sees_a_wrong_law(name: str) -> None:
    wrong, filters, kind = WRONG[name]
    logits, setting = np.stack([rows(6147, 5 + b)[kind] for b in range(4)])[:, None], settings(filters, 6147)
    found = filter_floors(*arguments(logits, setting))
    assert not problems(logits, found, setting)
    assert problems(logits, found, setting, keep=wrong)


def test_arguments_that_do_not_fit() -> None:
    logits, *rest = arguments(everything(VOCAB, 0), settings("everything", VOCAB))
    call = inspect.unwrap(filter_floors)  # the test run's shape checker would speak first
    with pytest.raises(ValueError, match=r"top_k must have shape \[B\] = \(4,\)"):
        call(logits, rest[0], rest[1][:2], *rest[2:])
    with pytest.raises(TypeError, match="top_p must be float32, got int32"):
        call(logits, rest[0], rest[1], rest[1], *rest[3:])
    with pytest.raises(ValueError, match="no empty axis"):
        call(logits[:, :0], *rest)
    with pytest.raises(TypeError, match="got int32; cast them"):
        call(jnp.zeros(logits.shape, jnp.int32), *rest)
    with pytest.raises(NotImplementedError, match="filter_floors has no form 'mosaic', only 'triton' and 'xla'"):
        call(logits, *rest, implementation="mosaic")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the kernel may serve there")
def test_without_a_gpu_the_kernel_says_so() -> None:
    given = arguments(everything(VOCAB, 0), settings("top-p", VOCAB))
    with pytest.raises(NotImplementedError, match="runs on NVIDIA GPUs"):
        filter_floors(*given, implementation="triton")


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton compiles nothing with TRITON_INTERPRET=1")
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("vocab, logits", [(200_064, F32), (200_064, "*bf16"), (6147, F32)])
def test_the_kernels_compile(vocab: int, logits: str, capability: int) -> None:
    pytest.importorskip("triton", reason="triton is not installed: dspark-jax[triton]")
    from pallas_kernels.filter_floors import triton, triton_kernel

    kinds = {"logits": logits} | dict.fromkeys(("best", "chunk_best", "over_count", "count"), I32)
    chunks = -(-vocab // (triton.DEPTH * triton.WIDTH))
    padded = 1 << (chunks - 1).bit_length()
    known = dict(
        ROWS=8, VOCAB=vocab, CHUNKS=chunks, CHUNKS_PADDED=padded, DEPTH=triton.DEPTH, WIDTH=triton.WIDTH,
        RUN=triton.RUN, SLOTS=triton.SLOTS, FEW=triton.FEW, SAMPLE=triton.SAMPLE, STEPS=triton.STEPS,
        SIGMAS=triton.SIGMAS, SPARE=triton.SPARE, MOST=triton.FULL * chunks * triton.SLOTS, TILE=triton.TILE,
        FLOORS=triton.FLOORS,
    )  # fmt: skip
    scans = -(-vocab // (triton.SCAN_DEPTH * triton.WIDTH))
    scanned = dict(CHUNKS=scans, CHUNKS_PADDED=1 << (scans - 1).bit_length())
    for name, warps in (("scan", 8), ("bracket", 16), ("collect", 8), ("finish", 16)):
        kernel = getattr(triton_kernel, name)
        names = [parameter.name for parameter in kernel.params]
        pointers = {n: kinds.get(n.removesuffix("_ptr"), F32) for n in names if n.endswith("_ptr")}
        sizes = known | (scanned if name in ("scan", "bracket") else {})
        sizes["DEPTH"] = triton.SCAN_DEPTH if name == "scan" else triton.DEPTH
        constants = {n: sizes[n] for n in names if n not in pointers}
        assert compile_for(kernel, capability, pointers, constants, warps=warps)
