"""A wide random model in the release's formats through each kernel, a step at a time."""

import dataclasses
import functools

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from greedy_cases import STEP
from test_kernels_greedy import CHOICES, on_gpu

import dspark_jax as ds

WIDE = dataclasses.replace(
    ds.TargetConfig.from_hf(golden.hf_config("m31-flash-tiny")),
    hidden_size=1024,
    num_heads=32,
    head_dim=64,
    rotary_dim=32,
    index_head_dim=128,
    dense_mlp_size=1024,
    expert_mlp_size=1024,
    shared_mlp_size=1024,
)
# Which near ties flip is chance, and moves a mean of thousands of logits by much less than this.
WIDE_MARGIN = 1.5


def wide(kinds: dict, dtype, kernels: ds.Kernels) -> ds.MiniMaxTarget:
    """Random weights at widths that every kernel takes; the same ones whatever the dtype and the kernels."""
    return ds.MiniMaxTarget(WIDE, formats=kinds, key=jax.random.key(0), compute_dtype=dtype, kernels=kernels)


def wide_formats() -> dict:
    """Experts NVFP4, other linears MXFP8, as in the release."""
    model = nnx.eval_shape(lambda: ds.MiniMaxTarget(WIDE))
    paths = ["/".join(map(str, ("target", *path))) for path, _ in nnx.to_flat_state(nnx.state(model))]
    linears = [path for path in paths if path.endswith("_proj/weight")]
    return {path: "nvfp4/divide" if "/experts/" in path else "mxfp8" for path in linears}


@on_gpu
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_wide_model(rows: int, choice: str) -> None:
    """A step's logits are as near to float32 as those of XLA in bfloat16, up to experts and blocks that flip."""
    kinds = wide_formats()
    tokens = jax.random.randint(jax.random.key(1), (rows, 3 * STEP), 0, WIDE.vocab_size, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(3 * STEP, dtype=jnp.int32)[None], tokens.shape)

    def run(dtype, kernels: ds.Kernels) -> np.ndarray:
        m = jax.jit(functools.partial(wide, kinds, dtype, kernels))()
        cache, parts = m.make_cache(rows, 256), []
        for i in range(0, 3 * STEP, STEP):
            out = golden.forward(m, tokens[:, i : i + STEP], positions[:, i : i + STEP], cache)
            cache = out.cache
            parts.append(np.asarray(out.logits))
        return np.concatenate(parts, axis=1)

    exact = run(jnp.float32, ds.Kernels.xla())
    noise = float(np.abs(run(jnp.bfloat16, ds.Kernels.xla()) - exact).mean())
    found = run(jnp.bfloat16, CHOICES[choice])
    error = float(np.abs(found - exact).mean())
    other = float(np.abs(found[:, ::-1] - exact).mean())  # the tokens' logits exchanged
    print(f"{rows} rows, {choice}: mean difference {error:.4f}, of XLA {noise:.4f}, of exchanged tokens {other:.3f}")
    assert error < WIDE_MARGIN * noise < other
