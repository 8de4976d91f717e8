"""MiniMax-M3 / M3.1-Flash and its DSpark speculative drafter in JAX.

    import jax, dspark_jax as ds

    model  = ds.load("ckpt/")                                   # what `python -m convert.minimax SRC ckpt/` wrote
    config = ds.GenerateConfig(max_new_tokens=256)
    run    = jax.jit(ds.generate, static_argnames="config")
    tokens, lengths = ds.pad_prompts([[1, 2, 3], [4, 5]])
    out    = run(model, tokens, lengths, ds.request_keys([0, 1]), ds.SamplingParams(temperature=1.0), config=config)

Shape letters, the same in every signature and einsum of the library:

    B   batch (requests)              Hq   query heads             E   experts
    T   tokens of one call            Hkv  key/value heads         F   inner size of an MLP
    S   cache slots                   D    head dimension          W   attention window
    K   block or draft length         H    hidden size             V   vocabulary
"""

import importlib
from typing import TYPE_CHECKING

from dspark_jax._version import __version__

if TYPE_CHECKING:
    from dspark_jax.checkpoint import CheckpointError, Layout, Model, load, load_drafter
    from dspark_jax.config import ConfigError, DrafterConfig, TargetConfig
    from dspark_jax.drafter import DSparkDrafter
    from dspark_jax.generate_config import FinishReason, GenerateConfig
    from dspark_jax.generation import generate, prefill, step, target_logits
    from dspark_jax.generation_state import Committed, Generation, GenerationState
    from dspark_jax.kernels import Kernels
    from dspark_jax.prompts import pad_prompts
    from dspark_jax.sampling import SamplingParams, request_keys
    from dspark_jax.saving import save
    from dspark_jax.sharding import ShardingRules
    from dspark_jax.stats import AcceptanceStats
    from dspark_jax.streaming import StreamEvent, generate_text, stream
    from dspark_jax.target import MiniMaxTarget
    from dspark_jax.text import Tokenizer

# Name -> module. Loaded on first use, so that the converter's command line starts without jax.
_PUBLIC = {
    name: module
    for module, names in {
        "checkpoint": "CheckpointError Layout Model load load_drafter",
        "config": "ConfigError DrafterConfig TargetConfig",
        "drafter": "DSparkDrafter",
        "generation": "generate prefill step target_logits",
        "generate_config": "FinishReason GenerateConfig",
        "generation_state": "Committed Generation GenerationState",
        "kernels": "Kernels",
        "prompts": "pad_prompts",
        "sampling": "SamplingParams request_keys",
        "saving": "save",
        "sharding": "ShardingRules",
        "stats": "AcceptanceStats",
        "streaming": "StreamEvent generate_text stream",
        "target": "MiniMaxTarget",
        "text": "Tokenizer",
    }.items()
    for name in names.split()
}

__all__ = [
    "AcceptanceStats",
    "CheckpointError",
    "Committed",
    "ConfigError",
    "DSparkDrafter",
    "DrafterConfig",
    "FinishReason",
    "GenerateConfig",
    "Generation",
    "GenerationState",
    "Kernels",
    "Layout",
    "MiniMaxTarget",
    "Model",
    "SamplingParams",
    "ShardingRules",
    "StreamEvent",
    "TargetConfig",
    "Tokenizer",
    "__version__",
    "generate",
    "generate_text",
    "load",
    "load_drafter",
    "pad_prompts",
    "prefill",
    "request_keys",
    "save",
    "step",
    "stream",
    "target_logits",
]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'dspark_jax' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"dspark_jax.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
