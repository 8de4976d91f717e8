"""Native weights and bfloat16 through each kernel give the golden float32 greedy tokens, as far as bfloat16 can."""

import functools

import golden
import greedy_cases as greedy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import CHECKPOINTS, NEW_TOKENS, PROMPTS
from test_target import BF16_MARGIN, REFERENCE_BF16

import dspark_jax as ds

on_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="kernels need a GPU")
CHOICES = {
    "automatic": ds.Kernels(),
    "xla": ds.Kernels.xla(),
    "triton": ds.Kernels(linear="triton", experts="triton", attention="triton"),
    "mosaic": ds.Kernels(linear="mosaic", experts="mosaic"),
}
ON_CPU = ("m3-mxfp8-tiny", "m31-flash-tiny")  # both quantised formats; each takes half a minute
CASES = [
    pytest.param(name, choice, id=f"{name}-{choice}", marks=[] if choice == "xla" and name in ON_CPU else on_gpu)
    for name in CHECKPOINTS
    for choice in CHOICES
]


@functools.lru_cache(maxsize=1)
def model(name: str, choice: str) -> ds.MiniMaxTarget:
    return ds.load(golden.converted(name), kernels=CHOICES[choice]).target


def far_off(m: ds.MiniMaxTarget, found: list[greedy.Difference]) -> list[greedy.Difference]:
    return [difference for difference in found if difference.gap >= greedy.tolerance(m)]


@pytest.mark.parametrize("name", ON_CPU)
def test_float32_gives_the_golden_tokens(name: str) -> None:
    assert not greedy.float32(name).differences(name)


@pytest.mark.parametrize("name, choice", CASES)
def test_greedy_tokens(name: str, choice: str) -> None:
    """With the experts and blocks of float32 a token differs only where the gap is under the tolerance; with its own,
    in no more places than the reference library in bfloat16, and as near to the golden logits as that."""
    m = model(name, choice)
    try:
        pinned = greedy.run(m, name, pin=True)
    except NotImplementedError as reason:
        assert choice == "mosaic", "the others take every size of these checkpoints"
        pytest.skip(str(reason).splitlines()[0])
    found = pinned.differences(name)
    print(greedy.report(found, f"{name}, {choice}, experts and blocks of float32", greedy.tolerance(m)))
    assert not far_off(m, found)

    free = greedy.run(m, name, pin=False)
    found = free.differences(name)
    print(greedy.report(found, f"{name}, {choice}, its own experts and blocks", greedy.tolerance(m)))
    mean, changed = REFERENCE_BF16[name]
    e, prompts = golden.expected(name), free.at_prompts(name)
    theirs = np.concatenate([e[f"p{i}_logits"] for i in PROMPTS])
    off, flipped = float(np.abs(prompts - theirs).mean()), int((prompts.argmax(-1) != theirs.argmax(-1)).sum())
    print(f"  the prompts: mean difference {off:.4f}, top-1 tokens that differ {flipped} of {len(theirs)}")
    assert off < BF16_MARGIN * mean and flipped < BF16_MARGIN * changed
    assert len(found) < BF16_MARGIN * changed * len(PROMPTS) * NEW_TOKENS / len(theirs)


@pytest.mark.parametrize("wrong", ["gate and up exchanged", "scales of the neighbouring block", "another row's keys"])
def test_a_wrong_model_gives_other_tokens(wrong: str) -> None:
    name = "m3-mxfp8-tiny"
    m = golden.copy(model(name, "xla"))
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
    assert far_off(m, greedy.run(m, name, pin=True).differences(name))
