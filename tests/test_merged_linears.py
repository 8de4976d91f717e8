"""Linears of the same x share a launch where a kernel serves them, and give what they give alone."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import generation_cases as cases
import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafter_cases import MINIMAX, hf_config
from flax import nnx

import dspark_jax as ds
import pallas_kernels
from dspark_jax import formats, layers
from dspark_jax.target import Embedding

CONFIG = dataclasses.replace(
    ds.TargetConfig.from_hf(golden.hf_config("m3-mxfp8-tiny")),
    num_layers=2, moe_layers=(False, True), sparse_layers=(False, True),
)  # fmt: skip
DRAFTER = dataclasses.replace(ds.DrafterConfig.from_hf(hf_config(MINIMAX)), num_layers=2)


def stored(module: nnx.Module, root: str, kind: str | None) -> dict[str, Any]:
    """`kind` for every linear but the experts."""
    paths = ["/".join(map(str, (root, *path))) for path, _ in nnx.to_flat_state(nnx.state(module))]
    linears = [p for p in paths if p.endswith("_proj/weight") and "/experts/" not in p]
    return {path: kind for path in linears} if kind else {}


def filled(abstract: Any) -> Any:
    """The module with random weights: MXFP8 codes below 2, one scale."""
    rng = np.random.default_rng(0)

    def draw(leaf: Any) -> jax.Array:
        if leaf.dtype == jnp.float8_e4m3fn:
            return jnp.asarray((rng.integers(0, 256, leaf.shape, np.uint8) & 0xBF).view(leaf.dtype))
        if leaf.dtype == jnp.uint8:
            return jnp.full(leaf.shape, 124, leaf.dtype)
        return jnp.asarray(0.2 * rng.standard_normal(leaf.shape, np.float32)).astype(leaf.dtype)

    return jax.tree.map(draw, abstract)


def target(kind: str | None = "mxfp8", **more: Any) -> ds.MiniMaxTarget:
    kinds = stored(nnx.eval_shape(lambda: ds.MiniMaxTarget(CONFIG)), "target", kind) | more.pop("formats", {})
    return filled(nnx.eval_shape(lambda: ds.MiniMaxTarget(CONFIG, formats=kinds, **more)))


def drafter() -> ds.DSparkDrafter:
    kinds = stored(nnx.eval_shape(lambda: ds.DSparkDrafter(DRAFTER, formats={})), "drafter", "mxfp8")
    return filled(nnx.eval_shape(lambda: ds.DSparkDrafter(DRAFTER, formats=kinds)))


def run_target(m: ds.MiniMaxTarget, check: Callable[[Any], None] = lambda m: None) -> list[np.ndarray]:
    """What comes out; `check` sees the model while it is traced, when its weights are those that a kernel is given."""
    tokens = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
    positions = jnp.tile(jnp.arange(4, dtype=jnp.int32), (2, 1))

    @jax.jit
    def run(m: ds.MiniMaxTarget) -> list[Any]:
        out = m(tokens, positions, m.make_cache(2, 64))
        check(m)
        return [out.logits, *jax.tree.leaves(out.cache)]

    return [np.asarray(a) for a in run(m)]


def run_drafter(m: ds.DSparkDrafter, check: Callable[[Any], None] = lambda m: None) -> list[np.ndarray]:
    size = len(DRAFTER.target_layer_ids) * DRAFTER.hidden_size
    features = jax.random.normal(jax.random.key(2), (2, 3, size), jnp.bfloat16)
    positions, ends = jnp.tile(jnp.arange(3, dtype=jnp.int32), (2, 1)), jnp.full(2, 3, jnp.int32)
    table = Embedding(layers.Scope("table", key=jax.random.key(3)), DRAFTER.vocab_size, DRAFTER.hidden_size)

    @jax.jit
    def run(m: ds.DSparkDrafter) -> list[Any]:
        cache = m.write_context(features, positions, m.make_cache(2, 64))
        out = m.block(jnp.array([1, 2], jnp.int32), ends, cache, embed=table, head=table)
        check(m)
        return [out.base_logits, *jax.tree.leaves(cache)]

    return [np.asarray(a) for a in run(m)]


class Kernels:
    """Stands in for the kernels and notes what they are asked for."""

    def __init__(self, patch: pytest.MonkeyPatch, *, exchange: bool = False):
        self.matmuls: list[list[Any]] = []
        self.mlps: list[tuple] = []
        self.exchange = exchange
        patch.setattr(formats, "quantized_matmuls", self.several)
        patch.setattr(layers, "quantized_mlp", self.mlp)

    def several(self, x: jax.Array, weights: Sequence[Any], *, implementation: str) -> tuple[jax.Array, ...]:
        assert implementation == "mosaic" and len(weights) > 1
        self.matmuls.append(list(weights))
        outs = list(pallas_kernels.quantized_matmuls(x, weights, implementation="xla"))
        if self.exchange and outs[1].shape == outs[2 % len(outs)].shape:
            outs[1], outs[2 % len(outs)] = outs[2 % len(outs)], outs[1]
        return tuple(outs)

    def mlp(self, x: jax.Array, *weights: Any, implementation: str, **constants: float) -> jax.Array:
        assert implementation == "mosaic"
        self.mlps.append((weights, constants))
        return pallas_kernels.quantized_mlp(x, *weights, implementation="xla", **constants)


def weights(*modules: Any) -> list[Any]:
    return [module.weight.get_value() for module in modules]


def same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(x.codes is y.codes for x, y in zip(a, b, strict=True))


def equal(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_target(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels(monkeypatch)

    def check(m: ds.MiniMaxTarget) -> None:
        asked = []
        for layer in m.layers:
            a = layer.attention
            index = [] if a.indexer is None else [a.indexer.q_proj, a.indexer.k_proj]
            asked.append(weights(a.q_proj, a.k_proj, a.v_proj, *index))
        assert [len(some) for some in asked] == [3, 5]
        assert len(kernels.matmuls) == len(asked) and all(map(same, kernels.matmuls, asked))
        mlps = [layer.moe.shared_expert if layer.is_moe else layer.mlp for layer in m.layers]
        for (given, constants), mlp in zip(kernels.mlps, mlps, strict=True):
            assert same(given, weights(mlp.gate_proj, mlp.up_proj, mlp.down_proj))
            assert constants == dict(alpha=CONFIG.swiglu_alpha, limit=CONFIG.swiglu_limit)

    with cases.unchecked():
        compare(target(), functools.partial(run_target, check=check), run_target, kernels, monkeypatch)


def test_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = Kernels(monkeypatch)

    def check(m: ds.DSparkDrafter) -> None:
        attentions = [layer.attention for layer in m.layers]
        context = weights(*(linear for a in attentions for linear in (a.k_proj, a.v_proj)))
        asked = [context, *(weights(a.q_proj, a.k_proj, a.v_proj) for a in attentions)]
        assert len(kernels.matmuls) == len(asked) and all(map(same, kernels.matmuls, asked))
        assert len(kernels.mlps) == len(attentions)

    with cases.unchecked():
        compare(drafter(), functools.partial(run_drafter, check=check), run_drafter, kernels, monkeypatch)


def compare(m: Any, checked: Any, run: Any, kernels: Kernels, patch: pytest.MonkeyPatch) -> None:
    together = checked(m)
    kernels.exchange = True
    wrong = run(m)
    patch.setattr(formats, "merges", lambda *_: False)
    alone = run(m)
    assert equal(together, alone) and not equal(wrong, alone)


@pytest.mark.parametrize("how", ["told to", "another kernel", "plain"])
def test_apart(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each linear by itself: without the switch, through another kernel, and where weights are plain."""
    kernels = Kernels(monkeypatch)
    with cases.unchecked():
        if how == "told to":
            monkeypatch.setattr(formats, "merges", lambda *_: False)
        run_target(
            target(None if how == "plain" else "mxfp8", kernels=ds.Kernels.xla() if how == "another kernel" else None)
        )
    assert not kernels.matmuls and not kernels.mlps


def test_what_no_kernel_serves_goes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain weight among quantised ones is told beforehand; what else does not fit, the kernel says."""
    mixed = {"target/layers/0/attention/k_proj/weight": "bf16"}
    with cases.unchecked():
        kernels = Kernels(monkeypatch)
        m = target(formats=mixed)
        run_target(m)
        assert len(kernels.matmuls) == len(m.layers) - 1

        def refuse(*_: Any, **__: Any) -> Any:
            raise NotImplementedError

        monkeypatch.setattr(formats, "quantized_matmuls", refuse)
        monkeypatch.setattr(layers, "quantized_mlp", refuse)
        refused = run_target(m)
        monkeypatch.setattr(formats, "merges", lambda *_: False)
        assert equal(refused, run_target(m))
