"""The drafter: wrong variants that the comparison with golden forwards must catch."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafter_cases import (
    MINIMAX,
    context_differences,
    deepspec_golden,
    hf_config,
    make_drafter,
    minimax_golden,
    patched,
    run,
    wrong,
)

from dspark_jax import drafter as drafter_module
from dspark_jax import layers
from dspark_jax.config import DrafterConfig
from dspark_jax.drafter import DSparkDrafter
from dspark_jax.layers import GemmaRMSNorm, RMSNorm

CONFIG = DrafterConfig.from_hf(hf_config(MINIMAX))


# --- mutants: each must be seen in the named arrays of the golden comparison


def _base_2(decode: Any) -> Any:
    def wrong_decode(*args: Any, **options: Any) -> Any:
        out, lse = decode(*args, **options)
        return out, lse / jnp.float32(np.log(2))

    return wrong_decode


def _diagonal_twice(merge: Any) -> Any:
    def wrong_merge(out: Any, lse: Any, q: Any, k: Any, v: Any, **options: Any) -> Any:
        # One more key in front of each query's later ones: its own.
        k, v = (jnp.concatenate([x[:, :1], x], axis=1)[:, : x.shape[1]] for x in (k, v))
        return merge(out, lse, q, k, v, **options)

    return wrong_merge


def _interleaved(rotate: Any) -> Any:
    def wrong_rotate(x: Any, positions: Any, *, rotary_dim: int, theta: float) -> Any:
        order = np.concatenate([np.arange(0, rotary_dim, 2), np.arange(1, rotary_dim, 2)])
        order = np.concatenate([order, np.arange(rotary_dim, x.shape[-1])])
        turned = rotate(x[..., order], positions, rotary_dim=rotary_dim, theta=theta)
        return turned[..., np.argsort(order)]

    return wrong_rotate


def _ring_index(rotate: Any) -> Any:
    return lambda x, positions, **options: rotate(x, positions % 22, **options)


def _folded(call: Any) -> Any:
    def wrong_norm(self: Any, x: Any, dtype: Any = None) -> Any:
        # XLA drops a cast to bfloat16 and back; this rounding stays.
        scale = jax.lax.reduce_precision(1.0 + self.weight.get_value().astype(jnp.float32), 8, 7)
        return layers.rms_normalize(x, scale, self.eps, dtype or x.dtype)

    return wrong_norm


def _modulo_heads(attend: Any) -> Any:
    def wrong_attention(q: Any, *args: Any, **options: Any) -> Any:
        group = q.shape[2] // args[0].shape[2]
        order = np.arange(q.shape[2]).reshape(group, -1).T.reshape(-1)
        out, lse = attend(q[:, :, order], *args, **options)
        return out[:, :, np.argsort(order)], lse[:, :, np.argsort(order)]

    return wrong_attention


def _shifted_block(block: Any) -> Any:
    return lambda self, anchor, p0, *args, **options: block(self, anchor, p0 + 1, *args, **options)


def _config(**changes: Any) -> dict[str, Any]:
    return {"config": changes}


# name -> (how it is made wrong, arrays that must show it)
BLOCK = ("hidden", "base_logits", "drafts", "confidence")
MUTANTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "causal block": (_config(causal=True), BLOCK),
    "window one too wide": (_config(window=17), BLOCK),
    "window one too narrow": (_config(window=15), BLOCK),
    "no window": (_config(window=None), BLOCK),
    "target's theta": (_config(rope_theta=5e6), ("context_k", *BLOCK)),
    "target's epsilon": (_config(norm_eps=1e-6), ("context_k", *BLOCK)),
    "target's swiglu limit": (_config(swiglu_limit=7.0), BLOCK),
    "rope over the whole head": (_config(rotary_dim=32), ("context_k", *BLOCK)),
    "noise token off by one": (_config(mask_token_id=501), BLOCK),
    "interleaved rope": ({"patch": (drafter_module, "rotate", _interleaved)}, ("context_k", *BLOCK)),
    "ring index instead of position": ({"patch": (drafter_module, "rotate", _ring_index)}, ("context_k", *BLOCK)),
    "norm folded in bfloat16": (
        {"patch": (GemmaRMSNorm, "__call__", _folded)},
        ("context_k", "context_v", "hidden", "base_logits", "confidence"),
    ),
    "query head h reads KV head h % Hkv": ({"patch": (drafter_module, "block_attention", _modulo_heads)}, BLOCK),
    "block one position too far": ({"patch": (DSparkDrafter, "block", _shifted_block)}, BLOCK),
    "base-2 log-sum-exp": (
        {"patch": (drafter_module, "windowed_decode", _base_2), "lowering": "decode_merge"},
        BLOCK,
    ),
    "merge shifted by one": (
        {"patch": (drafter_module, "merge_future_block", _diagonal_twice), "lowering": "decode_merge"},
        BLOCK,
    ),
    "first prev is not the anchor": ({"first_prev": 500}, ("logits", "drafts", "confidence")),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_goldens_catch(name: str) -> None:
    how, visible = MUTANTS[name]
    golden = minimax_golden()
    drafter = make_drafter(MINIMAX, dataclasses.replace(CONFIG, **how.get("config", {})))
    options = {key: how[key] for key in ("lowering", "first_prev") if key in how}
    module, attribute, replace = how.get("patch", (drafter_module, "rotate", lambda rotate: rotate))
    with patched(module, attribute, replace):
        actual = run(golden, drafter, **options)
    caught = wrong(golden, actual)
    context = context_differences(golden, actual["cache"], CONFIG.window)
    caught |= {k: v for k, v in context.items() if v > golden.tolerance[k]}
    assert set(visible) <= set(caught), caught
    assert "hidden" in visible or "hidden" not in caught


def _plus_one(call: Any) -> Any:
    def wrong_norm(self: Any, x: Any, dtype: Any = None) -> Any:
        return layers.rms_normalize(x, 1.0 + self.weight.get_value().astype(jnp.float32), self.eps, dtype or x.dtype)

    return wrong_norm


def _embedding_as_head(drafter: DSparkDrafter) -> None:
    drafter.lm_head = drafter.embed_tokens


DEEPSPEC_MUTANTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "norm with +1": ({"patch": (RMSNorm, "__call__", _plus_one)}, ("context_k", "context_v", *BLOCK)),
    "epsilon of the releases": (_config(norm_eps=1e-6), ("context_k", *BLOCK)),
    "theta of the releases": (_config(rope_theta=1e6), ("context_k", *BLOCK)),
    "causal block": (_config(causal=True), BLOCK),
    "embedding used as head": ({"change": _embedding_as_head}, ("base_logits", "drafts")),
}


@pytest.mark.parametrize("name", DEEPSPEC_MUTANTS)
def test_deepspec_goldens_catch(name: str) -> None:
    how, visible = DEEPSPEC_MUTANTS[name]
    golden = deepspec_golden("vanilla")
    config = DrafterConfig.from_hf(hf_config(golden.folder))
    drafter = make_drafter(golden.folder, dataclasses.replace(config, **how.get("config", {})))
    how.get("change", lambda drafter: None)(drafter)
    module, attribute, replace = how.get("patch", (drafter_module, "rotate", lambda rotate: rotate))
    with patched(module, attribute, replace):
        actual = run(golden, drafter)
    context = context_differences(golden, actual["cache"], None)
    caught = wrong(golden, actual) | {k: v for k, v in context.items() if v > golden.tolerance[k]}
    assert set(visible) <= set(caught), caught
