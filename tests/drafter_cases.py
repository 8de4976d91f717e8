"""Golden drafters: checkpoints read without the converter, forwards over every stored p0, how far a result is off."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from dspark_jax.cache import DraftCache
from dspark_jax.config import DrafterConfig
from dspark_jax.drafter import DSparkDrafter, Lowering
from dspark_jax.formats import MXFP8Array
from dspark_jax.layers import Scope
from dspark_jax.target import Embedding

DATA = Path(__file__).parent / "data"
TARGET = DATA / "m31-flash-tiny"
MINIMAX = TARGET / "dspark"
DEEPSPEC = DATA / "deepspec-qwen3-tiny"

# Absolute, float32, from the golden READMEs: ten times or more what a float32 numpy evaluation is off by.
TOLERANCE = {
    "context_k": 5e-5,
    "context_v": 3e-4,
    "hidden": 5e-5,
    "base_logits": 2e-4,
    "logits": 2e-4,
    "confidence": 2e-5,
}
DEEPSPEC_TOLERANCE = TOLERANCE | {"context_k": 3e-5, "context_v": 3e-5, "base_logits": 1e-4, "logits": 1e-4}
# bfloat16 activations (same source): the chain is not compared, one different draft changes all later logits.
BF16_TOLERANCE = {"context_k": 0.1, "context_v": 0.5, "hidden": 0.15, "base_logits": 0.4}
DEEPSPEC_BF16_TOLERANCE = {"context_k": 0.1, "context_v": 0.1, "hidden": 0.25, "base_logits": 0.6}

_DTYPES = {"BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "U8": np.uint8, "F32": np.float32}
_RENAMED = {
    "decoder_layer.": "",
    "final_norm": "norm",
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn": "attention",
    "markov_w": "w",
    "confidence_head.proj": "confidence_head",
}


def read_safetensors(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder of safetensors files."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = (start + offset for offset in entry["data_offsets"])
                tensors[name] = np.frombuffer(data[begin:end], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


@functools.cache
def drafter_weights(folder: Path) -> dict[str, Any]:
    """Weights of a drafter by parameter path, without the leading "drafter/"."""
    tensors = read_safetensors(folder)
    weights = {}
    for name, tensor in tensors.items():
        path = name.removeprefix("language_model.model.dspark.")
        for old, new in _RENAMED.items():
            path = path.replace(old, new)
        scale = tensors.get(f"{name}_scale_inv")
        if not name.endswith("_scale_inv"):
            value = jnp.asarray(tensor)
            weights[path.replace(".", "/")] = (
                value if scale is None else MXFP8Array(codes=value, scale=jnp.asarray(scale))
            )
    return weights


def fill(module: Any, weights: Mapping[str, Any]) -> None:
    """Give `module` exactly these weights: one for each parameter, of its shape."""
    state = nnx.state(module, nnx.Param)
    params = {"/".join(map(str, path)): param for path, param in nnx.to_flat_state(state)}
    assert params.keys() == weights.keys(), sorted(params.keys() ^ weights.keys())
    for path, param in params.items():
        assert param.get_value().shape == weights[path].shape, path
        param.set_value(weights[path])
    nnx.update(module, state)


def hf_config(folder: Path, **overrides: Any) -> dict[str, Any]:
    """The parsed config.json with `overrides` merged into its model fields."""
    config = json.loads((folder / "config.json").read_text())
    fields = config.get("text_config", config)
    fields.update(overrides)
    return config


def make_drafter(folder: Path, config: DrafterConfig | None = None, dtype: Any = jnp.float32) -> DSparkDrafter:
    """The golden drafter, under another config if one is given."""
    if config is None:
        config = DrafterConfig.from_hf(hf_config(folder))
    drafter = DSparkDrafter(config, formats={}, compute_dtype=dtype)
    fill(drafter, drafter_weights(folder))
    return drafter


@functools.cache
def target_tables() -> tuple[Embedding, Embedding]:
    """Embedding and head of the tiny MiniMax target."""
    tensors = read_safetensors(TARGET)
    result = []
    for name in ("model.embed_tokens", "lm_head"):
        weight = jnp.asarray(tensors[f"language_model.{name}.weight"])
        table = Embedding(Scope("table"), *weight.shape)
        fill(table, {"weight": weight})
        result.append(table)
    return result[0], result[1]


@functools.cache
def load_npz(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


@dataclasses.dataclass(frozen=True)
class Golden:
    """What is stored for one drafter, one sequence and one config."""

    folder: Path
    features: np.ndarray  # [T, n x H]
    context_k: np.ndarray  # [layers, T, Hkv, D]
    context_v: np.ndarray
    p0: np.ndarray  # [B]
    anchor: np.ndarray  # [B]
    expected: dict[str, np.ndarray]  # "hidden" [B, K, H], "base_logits", "logits" [B, K, V], "drafts", "confidence"
    tolerance: dict[str, float]


def minimax_golden(prompt: int = 2, case: str = "shipped") -> Golden:
    data, prefix = load_npz(MINIMAX / "expected.npz"), f"p{prompt}_{case}_"
    return _golden(MINIMAX, data, f"p{prompt}_", prefix, TOLERANCE)


def deepspec_golden(head: str) -> Golden:
    data = load_npz(DEEPSPEC / head / "expected.npz")
    return _golden(DEEPSPEC / head, data, "", "", DEEPSPEC_TOLERANCE)


def _golden(folder: Path, data: dict[str, np.ndarray], sequence: str, case: str, tolerance: dict[str, float]) -> Golden:
    names = {"hidden": "hidden", "base_logits": "base_logits", "logits": "logits", "drafts": "drafts"}
    names["confidence"] = "confidence_logits"
    return Golden(
        folder=folder,
        features=data[f"{sequence}features"],
        context_k=data[f"{sequence}context_k"],
        context_v=data[f"{sequence}context_v"],
        p0=data[f"{case}p0"],
        anchor=data[f"{case}anchor"],
        expected={ours: data[case + theirs] for ours, theirs in names.items() if case + theirs in data},
        tolerance=tolerance,
    )


def batch_of(golden: Golden) -> tuple[jax.Array, jax.Array]:
    """Features [B, T, n x H] and positions [B, T], right-padded: a row per p0 holds the first p0 tokens."""
    tokens = len(golden.features)
    features = jnp.broadcast_to(jnp.asarray(golden.features), (len(golden.p0), *golden.features.shape))
    position = np.arange(tokens, dtype=np.int32)[None]
    return features, jnp.asarray(np.where(position < golden.p0[:, None], position, -1))


def jit_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.jit` for a program that runs a few times: compiling it is most of the work."""
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(function, compiler_options=options)


@jit_once
def greedy_chain(
    heads: tuple[Any, Any], hidden: jax.Array, base_logits: jax.Array, first_prev: jax.Array
) -> dict[str, jax.Array]:
    """Corrected logits, argmax drafts and confidence of Markov and confidence head, slot by slot."""
    markov, confidence = heads
    prev, carry = first_prev, markov.init_carry(first_prev.shape[0])
    logits, drafts, embeddings = [], [], []
    for k in range(hidden.shape[1]):
        bias, embedding, carry = markov(prev, hidden[:, k], carry)
        logits.append(base_logits[:, k] + bias)
        embeddings.append(embedding)
        prev = jnp.argmax(logits[-1], axis=-1).astype(jnp.int32)
        drafts.append(prev)
    return {
        "logits": jnp.stack(logits, axis=1),
        "drafts": jnp.stack(drafts, axis=1),
        "confidence": confidence(hidden, jnp.stack(embeddings, axis=1)),
    }


def run(
    golden: Golden,
    drafter: DSparkDrafter,
    *,
    num_slots: int | None = None,
    lowering: Lowering = "one_pass",
    page_size: int = 1,
    first_prev: int | None = None,
) -> dict[str, Any]:
    """Context, block, greedy chain and confidence of a golden batch. `first_prev` replaces the anchor in the chain."""
    embed, head = (None, None) if drafter.config.own_embeddings else target_tables()
    num_slots = num_slots or golden.expected["hidden"].shape[1]
    capacity = 1 + int(golden.p0.max())

    # Compiled anew each time: a kept program would not see what a test monkeypatches.
    @jit_once
    def forward(drafter: DSparkDrafter, features: jax.Array, positions: jax.Array, anchor: jax.Array, p0: jax.Array):
        cache = DraftCache.zeros(drafter.config, anchor.shape[0], capacity, drafter.compute_dtype, page_size=page_size)
        cache = drafter.write_context(features, positions, cache)
        return cache, drafter.block(anchor, p0, cache, num_slots=num_slots, embed=embed, head=head, lowering=lowering)

    anchor = jnp.asarray(golden.anchor)
    cache, block = forward(drafter, *batch_of(golden), anchor, jnp.asarray(golden.p0))
    prev = anchor if first_prev is None else jnp.full_like(anchor, first_prev)
    chain = greedy_chain((drafter.markov_head, drafter.confidence_head), block.hidden, block.base_logits, prev)
    return {"hidden": block.hidden, "base_logits": block.base_logits, "cache": cache, **chain}


def differences(golden: Golden, actual: Mapping[str, Any]) -> dict[str, float]:
    """Largest absolute difference of each stored array; for drafts, how many differ."""
    result = {}
    for name, expected in golden.expected.items():
        value = np.asarray(actual[name], np.float64 if name != "drafts" else np.int64)
        assert value.shape == expected.shape, (name, value.shape, expected.shape)
        result[name] = float(np.sum(value != expected)) if name == "drafts" else float(np.abs(value - expected).max())
    return result


def wrong(golden: Golden, actual: Mapping[str, Any]) -> dict[str, float]:
    """Those of `differences` that exceed their tolerance; empty for a right result."""
    return {k: v for k, v in differences(golden, actual).items() if not v <= golden.tolerance.get(k, 0)}


def context_differences(golden: Any, cache: Any, window: int | None) -> dict[str, float]:
    """Largest difference of the stored context keys and values at the positions that the next block can see."""
    result = {}
    for name, rings, expected in (
        ("context_k", cache.keys, golden.context_k),
        ("context_v", cache.values, golden.context_v),
    ):
        worst = 0.0
        for layer, ring in enumerate(rings):
            for row, p0 in enumerate(golden.p0):
                seen = np.arange(0 if window is None else max(0, p0 - window + 1), p0)
                stored = np.asarray(ring[row])[seen % ring.shape[1]]
                worst = max(worst, float(np.abs(stored - expected[layer, seen]).max(initial=0)))
        result[name] = worst
    return result


@contextmanager
def patched(module: Any, name: str, replace: Callable[[Any], Any]) -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setattr(module, name, replace(getattr(module, name)))
    try:
        yield
    finally:
        patch.undo()
