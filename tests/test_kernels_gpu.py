"""A wide random model in the release's formats through each kernel, a step at a time."""

import dataclasses
import functools
from collections.abc import Mapping

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


@functools.cache
def weights() -> ds.MiniMaxTarget:
    """Random weights at widths that every kernel takes: experts NVFP4, other linears MXFP8, as in the release."""
    plain = nnx.eval_shape(lambda: ds.MiniMaxTarget(WIDE))
    paths = ["/".join(map(str, ("target", *path))) for path, _ in nnx.to_flat_state(nnx.state(plain))]
    linears = [path for path in paths if path.endswith("_proj/weight")]
    kinds = {path: "nvfp4/divide" if "/experts/" in path else "mxfp8" for path in linears}
    return jax.jit(lambda: ds.MiniMaxTarget(WIDE, formats=kinds, key=jax.random.key(0)))()


def wide(dtype, kernels: ds.Kernels) -> ds.MiniMaxTarget:
    m = golden.copy(weights(), compute_dtype=jnp.dtype(dtype))
    for _, node in nnx.iter_graph(m):
        if hasattr(node, "kernels"):
            node.kernels = kernels
    return m


def logits(rows: int, m: ds.MiniMaxTarget) -> np.ndarray:
    tokens = jax.random.randint(jax.random.key(1), (rows, 3 * STEP), 0, WIDE.vocab_size, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(3 * STEP, dtype=jnp.int32)[None], tokens.shape)
    cache, parts = m.make_cache(rows, 256), []
    for i in range(0, 3 * STEP, STEP):
        out = golden.forward(m, tokens[:, i : i + STEP], positions[:, i : i + STEP], cache)
        cache = out.cache
        parts.append(np.asarray(out.logits))
    return np.concatenate(parts, axis=1)


def compare(rows: int, choices: Mapping[str, ds.Kernels]) -> dict[str, tuple[float, float, float]]:
    """-> by choice: mean |logit difference| from float32, that of XLA in bfloat16, that of exchanged tokens."""
    exact = logits(rows, wide(jnp.float32, ds.Kernels.xla()))
    noise = float(np.abs(logits(rows, wide(jnp.bfloat16, ds.Kernels.xla())) - exact).mean())
    found = {}
    for choice, kernels in choices.items():
        ours = logits(rows, wide(jnp.bfloat16, kernels))
        changed = ours.argmax(-1) != exact.argmax(-1)
        best = np.sort(exact[changed], axis=-1)[:, -2:]
        gap = float(np.max(best[:, 1] - best[:, 0], initial=0.0))
        error, exchanged = (float(np.abs(a - exact).mean()) for a in (ours, ours[:, ::-1]))
        found[choice] = error, noise, exchanged
        print(
            f"{rows} rows, {choice}: mean difference {error:.4f}, of XLA {noise:.4f}, of exchanged tokens "
            f"{exchanged:.3f}; {changed.sum()} of {changed.size} top-1 tokens differ, largest gap {gap:.3f}"
        )
    return found


@on_gpu
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_wide_model(rows: int) -> None:
    """A step's logits are as near to float32 as those of XLA in bfloat16, up to experts and blocks that flip."""
    for choice, (error, noise, exchanged) in compare(rows, CHOICES).items():
        assert error < WIDE_MARGIN * noise < exchanged, choice


@pytest.mark.slow
def test_the_comparison_of_the_wide_model() -> None:
    [(error, noise, exchanged)] = compare(1, {"xla": ds.Kernels.xla()}).values()
    assert error == noise and WIDE_MARGIN * noise < exchanged
