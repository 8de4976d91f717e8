"""Norms, rotation and cache writes in one call, in a target and in a drafter: as without it."""

import dataclasses
import functools
from typing import Any

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafter_cases import MINIMAX, hf_config

import dspark_jax as ds
import pallas_kernels
from dspark_jax import layers
from dspark_jax.attention import LayerCache
from dspark_jax.cache import TargetCache
from dspark_jax.rotation import rotate_together
from dspark_jax.target import Embedding

CONFIG = dataclasses.replace(
    ds.TargetConfig.from_hf(golden.hf_config("m3-mxfp8-tiny")),
    num_layers=2, moe_layers=(False, True), sparse_layers=(False, True),
)  # fmt: skip
DRAFTER = dataclasses.replace(ds.DrafterConfig.from_hf(hf_config(MINIMAX)), num_layers=2)
# Both are float32 throughout; XLA joins products and sums differently.
TOLERANCE = 1e-5
POSITIONS = jnp.asarray([[0, 1, 2, 3], [0, 1, -1, -1]], jnp.int32)


def run_target(kernels: ds.Kernels) -> list[np.ndarray]:
    model = ds.MiniMaxTarget(CONFIG, key=jax.random.key(0), compute_dtype=jnp.float32, kernels=kernels)
    tokens = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
    out = jax.jit(lambda m: m(tokens, POSITIONS, m.make_cache(2, 64)))(model)
    seen = np.asarray(POSITIONS) >= 0
    return [np.asarray(out.logits)[seen], *map(np.asarray, jax.tree.leaves(out.cache))]


def run_drafter(kernels: ds.Kernels) -> list[np.ndarray]:
    model = ds.DSparkDrafter(DRAFTER, formats={}, key=jax.random.key(1), compute_dtype=jnp.float32, kernels=kernels)
    size = len(DRAFTER.target_layer_ids) * DRAFTER.hidden_size
    features = jax.random.normal(jax.random.key(2), (2, 4, size), jnp.float32)
    table = Embedding(layers.Scope("table", key=jax.random.key(3)), DRAFTER.vocab_size, DRAFTER.hidden_size)
    start = jnp.asarray([4, 2], jnp.int32)

    @jax.jit
    def run(m: ds.DSparkDrafter) -> list[Any]:
        cache = m.write_context(features, POSITIONS, m.make_cache(2))
        out = m.block(start, start, cache, embed=table, head=table)
        return [out.base_logits, *jax.tree.leaves(cache)]

    return [np.asarray(a) for a in run(model)]


def differs(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return any(np.max(np.abs(x - y)) > TOLERANCE * max(1.0, np.max(np.abs(y))) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("run", [run_target, run_drafter])
def test_gives_what_the_layers_give_apart(run, monkeypatch: pytest.MonkeyPatch) -> None:
    apart, real, calls = run(ds.Kernels(rotation="xla")), pallas_kernels.rotate_heads, []

    def through_xla(*args: Any, mutant: Any = None, **static: Any) -> Any:
        calls.append(static["implementation"])
        return real(*args, **static | dict(implementation="xla") | (mutant or {}))

    monkeypatch.setattr(pallas_kernels, "rotate_heads", through_xla)
    assert not differs(run(ds.Kernels(rotation="mosaic")), apart)
    assert calls == ["mosaic"] * (2 if run is run_target else 3)
    for mutant in (dict(theta=100.0), dict(plus_one=False)):
        monkeypatch.setattr(pallas_kernels, "rotate_heads", functools.partial(through_xla, mutant=mutant))
        assert differs(run(ds.Kernels(rotation=None)), apart), mutant


@pytest.mark.parametrize("other", ["cache", "index"])
def test_what_the_kernel_cannot_take_together_goes_apart(other: str) -> None:
    """A cache of another dtype than the model's, index heads of another size than those of attention."""
    config = dataclasses.replace(CONFIG, index_head_dim=2 * CONFIG.head_dim) if other == "index" else CONFIG
    dtype = jnp.bfloat16 if other == "cache" else jnp.float32
    tokens = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)

    def run(rotation: Any) -> list[np.ndarray]:
        kernels = ds.Kernels(rotation=rotation)
        model = ds.MiniMaxTarget(config, key=jax.random.key(0), compute_dtype=jnp.float32, kernels=kernels)
        out = jax.jit(lambda m: m(tokens, POSITIONS, TargetCache.zeros(config, 2, 64, dtype)))(model)
        return [np.asarray(out.logits)[np.asarray(POSITIONS) >= 0]]

    assert not differs(run(None), run("xla"))
    if other == "cache":
        with pytest.raises(NotImplementedError, match="into caches of their dtype, found bfloat16"):
            run("mosaic")
    else:
        layer = ds.MiniMaxTarget(config, kernels=ds.Kernels(rotation="mosaic")).layers[1].attention
        with pytest.raises(NotImplementedError, match="rotate_heads takes an Indexer and heads of one size"):
            layer._together([], POSITIONS, layer_cache(config))


def layer_cache(config: ds.TargetConfig) -> LayerCache:
    cache = TargetCache.zeros(config, 2, 64)
    return LayerCache(keys=cache.keys[1], values=cache.values[1], index_keys=cache.index_keys[1])


def test_positions_of_any_integer_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    real, given = pallas_kernels.rotate_heads, []

    def through_xla(x: Any, positions: Any, *args: Any, **static: Any) -> Any:
        given.append(positions.dtype)
        return real(x, positions, *args, **static | dict(implementation="xla"))

    monkeypatch.setattr(pallas_kernels, "rotate_heads", through_xla)
    projected, place = [jnp.ones((2, 4, CONFIG.head_dim))], [(None, None)]
    for dtype in (jnp.int8, jnp.int32):
        rotate_together(ds.Kernels(), projected, place, POSITIONS.astype(dtype), CONFIG, plus_one=True)
    assert given == [jnp.int32] * 2


def test_a_named_kernel_does_not_fall_back() -> None:
    with pytest.raises(NotImplementedError, match="rotate_heads"):
        run_target(ds.Kernels(rotation="mosaic"))
    assert not differs(run_target(ds.Kernels(rotation=None)), run_target(ds.Kernels(rotation="xla")))
