"""Models in their own formats through each kernel, a few tokens at a time: golden checkpoints and a wide random one."""

import dataclasses
import functools

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden import CHECKPOINTS, PROMPTS
from test_target import BF16_MARGIN, REFERENCE_BF16

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
STEP = 8  # tokens of a call: few enough for the kernels of a step
on_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="kernels need a GPU")
CHOICES = {
    "automatic": ds.Kernels(),
    "xla": ds.Kernels.xla(),
    "triton": ds.Kernels(linear="triton", experts="triton", attention="triton"),
    "mosaic": ds.Kernels(linear="mosaic", experts="mosaic"),
}


@functools.lru_cache(maxsize=1)
def model(name: str, kernels: ds.Kernels) -> ds.MiniMaxTarget:
    return ds.load(golden.converted(name), kernels=kernels).target


def logits(m: ds.MiniMaxTarget, name: str) -> np.ndarray:
    """Logits of all positions of the three prompts [132, V], computed `STEP` tokens at a time."""
    rows = [golden.prompt(name, i) for i in PROMPTS]
    tokens, positions = golden.padded(rows, -(-max(map(len, rows)) // STEP) * STEP)
    cache, parts = m.make_cache(*tokens.shape), []
    for i in range(0, tokens.shape[1], STEP):
        out = golden.forward(m, tokens[:, i : i + STEP], positions[:, i : i + STEP], cache)
        cache = out.cache
        parts.append(np.asarray(out.logits))
    whole = np.concatenate(parts, axis=1)
    return np.concatenate([whole[i, : len(ids)] for i, ids in enumerate(rows)])


def differences(m: ds.MiniMaxTarget, name: str) -> tuple[float, int]:
    """-> mean |logit difference| from expected.npz, positions whose top-1 token differs."""
    e = golden.expected(name)
    ours, theirs = logits(m, name), np.concatenate([e[f"p{i}_logits"] for i in PROMPTS])
    return float(np.abs(ours - theirs).mean()), int((ours.argmax(-1) != theirs.argmax(-1)).sum())


def within(found: tuple[float, int], name: str) -> bool:
    mean, changed = REFERENCE_BF16[name]
    return found[0] < BF16_MARGIN * mean and found[1] < BF16_MARGIN * changed


@on_gpu
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_golden_logits(name: str, choice: str) -> None:
    try:
        found = differences(model(name, CHOICES[choice]), name)
    except NotImplementedError as reason:
        assert choice == "mosaic", "the others take every size of these checkpoints"
        pytest.skip(str(reason).splitlines()[0])
    print(f"{name}, {choice}: mean difference {found[0]:.4f}, top-1 tokens that differ {found[1]} of 132")
    assert within(found, name)


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


@pytest.mark.parametrize("wrong", ["gate and up exchanged", "scales of the neighbouring block", "another row's keys"])
def test_a_wrong_model_would_be_noticed(wrong: str) -> None:
    name = "m3-mxfp8-tiny"
    right = model(name, ds.Kernels())
    assert within(differences(right, name), name)
    m = golden.copy(right)
    for layer in m.layers:
        projections = layer.moe.experts if layer.is_moe else layer.mlp
        if wrong.startswith("gate"):
            projections.gate_proj, projections.up_proj = projections.up_proj, projections.gate_proj
        elif wrong.startswith("scales"):
            weight = projections.down_proj.weight.get_value()
            scale = jnp.roll(weight.scale, 1, axis=-1)
            projections.down_proj.weight.set_value(type(weight)(codes=weight.codes, scale=scale))
        else:
            k = layer.attention.k_proj.weight
            k.set_value(jax.tree.map(lambda a: jnp.roll(a, 1, axis=0), k.get_value()))
    assert not within(differences(m, name), name)
