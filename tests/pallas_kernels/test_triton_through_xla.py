"""Triton kernels that XLA compiles: what it is handed, without a GPU; the results, with one."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from choose_experts_cases import arguments, check
from gpu_marks import needs_triton

from pallas_kernels import _dispatch, _triton, choose_experts
from pallas_kernels.choose_experts import triton


class Hopper:
    platform, compute_capability, device_kind, core_count = "gpu", "9.0", "H200", 132


@pytest.fixture
def through_xla(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_triton, "THROUGH_XLA", True)
    triton._program.cache_clear()
    yield monkeypatch
    triton._program.cache_clear()


def test_what_xla_is_handed(through_xla: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed: dspark-jax[triton]")
    through_xla.setattr(_dispatch, "device_of", lambda *_: Hopper)
    run = functools.partial(triton.run, top_k=4)
    text = jax.jit(run).trace(*arguments(8, 128, 640)).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "__gpu$xla.gpu.triton" in line]
    wanted = ("multiply", (5, 2, 1), 4, 3), ("choose", (8, 1, 1), 8, 4)
    for call, (name, grid, warps, pointers) in zip(calls, wanted, strict=True):
        assert f'name = "{name}"' in call and f"tt.func public @{name}(" in call
        assert re.findall(r"grid_[xyz] = (\d+) : i32", call) == [str(n) for n in grid]
        assert f"num_warps = {warps} : i32" in call
        assert call.count("tt.divisibility = 16") == pointers


def test_numbers_among_the_arguments_and_aliases(through_xla: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed: dspark-jax[triton]")
    from pallas_kernels.markov_draw import triton_kernel

    through_xla.setattr(_dispatch, "device_of", lambda *_: Hopper)
    shape = jax.ShapeDtypeStruct
    inputs = (
        shape((1, 2, 256), jnp.float32), shape((1,), jnp.int32), shape((1, 2, 2), jnp.uint32),
        shape((1, 2), jnp.float32), shape((9, 16), jnp.bfloat16), shape((256, 16), jnp.bfloat16),
        shape((256,), jnp.int8),
    )  # fmt: skip

    def call(*arrays):
        return _triton.triton_call(
            *arrays, 3, kernel=triton_kernel.score,
            out_shape=[inputs[0], shape((1, 3, 2), jnp.float32), shape((1, 2), jnp.int32)], grid=(1, 2),
            input_output_aliases={0: 0}, name="score", num_warps=4, BATCH=1, SLOTS=2, LATENTS=9, VOCAB=256, RANK=16,
            CHUNKS=2, ROWS=16, KEPT=1, WIDTH=128, STEP=16, KEEP=True,
        )  # fmt: skip

    text = jax.jit(call).trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
    (line,) = [line for line in text.splitlines() if "__gpu$xla.gpu.triton" in line]
    assert "output_operand_alias<output_tuple_indices = [0], operand_index = 0" in line
    assert "slot" not in re.findall(r"tt\.func public @score\((.*?)\) attributes", line)[0]


@needs_triton
@pytest.mark.parametrize("rows", [8, 70])
def test_gives_the_same_as_jax_triton(through_xla: pytest.MonkeyPatch, rows: int) -> None:
    given = arguments(rows, 128, 6144)
    found = jax.jit(functools.partial(choose_experts, top_k=4, implementation="triton"))(*given)
    check(found, *given, 4)
    through_xla.setattr(_triton, "THROUGH_XLA", False)
    triton._program.cache_clear()
    other = jax.jit(functools.partial(choose_experts, top_k=4, implementation="triton"))(*given)
    np.testing.assert_array_equal(found.experts, other.experts)
    np.testing.assert_allclose(found.weights, other.weights, rtol=1e-6)
