"""The drafter against golden forwards and a dense float64 evaluation; wrong variants are in test_drafter_mutants.py."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafter_cases import (
    BF16_TOLERANCE,
    DATA,
    DEEPSPEC,
    DEEPSPEC_BF16_TOLERANCE,
    MINIMAX,
    TOLERANCE,
    Golden,
    batch_of,
    context_differences,
    deepspec_golden,
    differences,
    drafter_weights,
    hf_config,
    jit_once,
    load_npz,
    make_drafter,
    minimax_golden,
    patched,
    run,
    target_tables,
    wrong,
)
from flax import nnx

from dspark_jax import drafter as drafter_module
from dspark_jax import formats, layers
from dspark_jax.config import ConfigError, DrafterConfig, TargetConfig
from dspark_jax.drafter import DSparkDrafter
from dspark_jax.target import Embedding

# Absolute, float32: as context keys, as context values, and the rounding of scores of the order of 10.
LOWERED = {name: TOLERANCE["context_k"] for name in ("q", "k", "decode_lse", "merged_lse")}
LOWERED |= {name: TOLERANCE["context_v"] for name in ("v", "decode_out", "merged_out")}
GOLDEN_CASES = ("shipped", "is_causal", "window_null", "use_swa", "use_swa_causal", "causal_full", "shipped_k3")
LOWERINGS = ("one_pass", "decode_merge")
METADATA = json.loads((MINIMAX / "attention_metadata.json").read_text())["cases"]
OVERRIDES = {case["name"]: case["text_config_overrides"] for case in METADATA}
CONFIG = DrafterConfig.from_hf(hf_config(MINIMAX))
# Two float32 evaluations of the same block in another batch or another order of additions; goldens are met to 5e-6.
SAME = 2e-5


def config_of(case: str) -> DrafterConfig:
    return DrafterConfig.from_hf(hf_config(MINIMAX, **OVERRIDES[case.removesuffix("_k3")]))


# --- goldens


@pytest.mark.parametrize(
    ("case", "lowering"),
    [(case, "one_pass") for case in GOLDEN_CASES] + [(case, "decode_merge") for case in GOLDEN_CASES[:4]],
)
def test_minimax_golden(case: str, lowering: str) -> None:
    golden, config = minimax_golden(2, case), config_of(case)
    actual = run(golden, make_drafter(MINIMAX, config), lowering=lowering)
    assert not wrong(golden, actual)
    context = context_differences(golden, actual["cache"], config.window)
    assert all(context[name] <= golden.tolerance[name] for name in context), context


@pytest.mark.parametrize("prompt", [0, 1])
def test_minimax_golden_of_other_prompts(prompt: int) -> None:
    golden = minimax_golden(prompt)
    actual = run(golden, make_drafter(MINIMAX))
    assert not wrong(golden, actual)
    context = context_differences(golden, actual["cache"], CONFIG.window)
    assert all(context[name] <= golden.tolerance[name] for name in context), context


@pytest.mark.parametrize(
    ("head", "lowering"),
    [("vanilla", "one_pass"), ("gated", "one_pass"), ("rnn", "one_pass"), ("rnn", "decode_merge")],
)
def test_deepspec_golden(head: str, lowering: str) -> None:
    golden = deepspec_golden(head)
    actual = run(golden, make_drafter(golden.folder), lowering=lowering)
    assert not wrong(golden, actual)
    context = context_differences(golden, actual["cache"], None)
    assert all(context[name] <= golden.tolerance[name] for name in context), context


@pytest.mark.parametrize(
    ("golden", "tolerance", "window"),
    [(minimax_golden(), BF16_TOLERANCE, 16), (deepspec_golden("rnn"), DEEPSPEC_BF16_TOLERANCE, None)],
    ids=["minimax", "deepspec"],
)
def test_bfloat16_golden(golden: Golden, tolerance: dict[str, float], window: int | None) -> None:
    actual = run(golden, make_drafter(golden.folder, dtype=jnp.bfloat16))
    assert actual["hidden"].dtype == jnp.bfloat16 and actual["cache"].keys[0].dtype == jnp.bfloat16
    assert actual["base_logits"].dtype == actual["logits"].dtype == actual["confidence"].dtype == jnp.float32
    off = differences(golden, actual) | context_differences(golden, actual["cache"], window)
    assert all(off[name] <= tolerance[name] for name in tolerance), off


@pytest.mark.parametrize("p0", [9, 23])
def test_attention_decomposed_golden(p0: int) -> None:
    """Queries, keys and values of every layer, the causal part, the later keys, and both merged."""
    golden, seen = minimax_golden(), []
    row = list(golden.p0).index(p0)

    def recorded(name: str) -> Callable[[Any], Any]:
        def record(function: Any) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                result = function(*args, **options)
                inputs = args[:3] if name == "decode" else args[2:5]
                seen.append((name, inputs, result))
                return result

            return call

        return record

    drafter, (embed, head) = make_drafter(MINIMAX), target_tables()
    anchor, start = jnp.asarray(golden.anchor[row : row + 1]), jnp.asarray(golden.p0[row : row + 1])

    @jit_once
    def forward(features: jax.Array) -> Any:
        cache = drafter.write_context(features, jnp.arange(p0, dtype=jnp.int32)[None], drafter.make_cache(1))
        drafter.block(anchor, start, cache, embed=embed, head=head, lowering="decode_merge")
        return [(inputs, result) for _, inputs, result in seen]

    with (
        patched(drafter_module, "windowed_decode", recorded("decode")),
        patched(drafter_module, "merge_future_block", recorded("merge")),
    ):
        calls = forward(jnp.asarray(golden.features[None, :p0]))
    stored = {
        name: load_npz(MINIMAX / "expected.npz")[f"lowering_p0_{p0}_{name}"]
        for name in ("q", "k", "v", "decode_out", "decode_lse", "future_lse", "merged_out", "merged_lse")
    }
    assert len(calls) == 2 * CONFIG.num_layers
    for layer in range(CONFIG.num_layers):
        (_, decode), (block, merged) = calls[2 * layer : 2 * layer + 2]
        actual = dict(zip(("q", "k", "v"), (x[0] for x in block), strict=True))
        actual |= {"decode_out": decode[0][0], "decode_lse": decode[1][0]}
        actual |= {"merged_out": merged[0][0], "merged_lse": merged[1][0]}
        for name, value in actual.items():
            np.testing.assert_allclose(value, stored[name][layer], atol=LOWERED[name], rtol=0, err_msg=name)
        # The share of the later keys is what the causal part leaves; the last slot has none.
        share = 1 - np.exp(np.asarray(decode[1][0]) - np.asarray(merged[1][0]))
        expected = np.exp(stored["future_lse"][layer] - stored["merged_lse"][layer])
        np.testing.assert_allclose(share, expected, atol=LOWERED["decode_lse"], rtol=0)
        assert np.all(expected[-1] == 0) and np.all(share[-1] == 0)


@pytest.mark.parametrize("case", METADATA, ids=[case["name"] for case in METADATA])
def test_window_and_causality_come_from_the_effective_window(case: dict[str, Any]) -> None:
    if len(set(case["windows"])) > 1:
        with pytest.raises(ConfigError, match="one window for all layers"):
            config_of(case["name"])
        return
    config = config_of(case["name"])
    assert (config.window, config.causal) == (case["windows"][0], case["causal"])


# --- every p0, K, window and causality against a dense evaluation in float64


@functools.cache
def dense_weights() -> dict[str, np.ndarray]:
    weights = drafter_weights(MINIMAX) | {
        name: table.weight.get_value() for name, table in zip(("embed", "head"), target_tables(), strict=True)
    }
    return {path: np.asarray(formats.dequantize(weight), np.float64) for path, weight in weights.items()}


def dense_block(
    config: DrafterConfig, features: np.ndarray, anchor: int, p0: int, num_slots: int
) -> tuple[np.ndarray, np.ndarray]:
    """Hidden [K, H] and base logits [K, V] of one block in float64: one softmax under one explicit mask."""
    w = dense_weights()
    embed, head = w["embed"], w["head"]
    c, heads, kv_heads = config, config.num_heads, config.num_kv_heads

    def norm(x: np.ndarray, path: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + c.norm_eps) * (1 + w[f"{path}/weight"])

    def rope(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        half = c.rotary_dim // 2
        angle = positions[:, None, None] * c.rope_theta ** (-np.arange(half) / half)
        z = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag, x[..., 2 * half :]], -1)

    def proj(x: np.ndarray, path: str, count: int) -> np.ndarray:
        return (x @ w[f"{path}/weight"].T).reshape(len(x), count, c.head_dim)

    context = norm(features[:p0].astype(np.float64) @ w["fc/weight"].T, "hidden_norm")
    h = embed[[anchor] + [c.mask_token_id] * (num_slots - 1)]
    positions = np.arange(p0 + num_slots)
    q_position, in_block = positions[p0:, None], positions[None] >= p0
    visible = np.ones((num_slots, len(positions)), bool)
    if c.window is not None:
        visible &= np.abs(q_position - positions[None]) < c.window
    if c.causal:
        visible &= ~in_block | (positions[None] <= q_position)
    for i in range(c.num_layers):
        at = f"layers/{i}/attention"
        x = norm(h, f"layers/{i}/input_norm")
        kv_input = np.concatenate([context, x])
        q = rope(norm(proj(x, f"{at}/q_proj", heads), f"{at}/q_norm"), positions[p0:])
        k = rope(norm(proj(kv_input, f"{at}/k_proj", kv_heads), f"{at}/k_norm"), positions)
        v = proj(kv_input, f"{at}/v_proj", kv_heads)
        k, v = (np.repeat(a, heads // kv_heads, axis=1) for a in (k, v))
        scores = np.where(visible[None], np.einsum("qhd,shd->hqs", q, k) * c.head_dim**-0.5, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hqs,shd->qhd", weights, v).reshape(num_slots, -1)
        h = h + out @ w[f"{at}/o_proj/weight"].T
        x = norm(h, f"layers/{i}/post_attention_norm")
        gate = np.minimum(x @ w[f"layers/{i}/mlp/gate_proj/weight"].T, c.swiglu_limit)
        up = np.clip(x @ w[f"layers/{i}/mlp/up_proj/weight"].T, -c.swiglu_limit, c.swiglu_limit)
        h = h + (gate / (1 + np.exp(-c.swiglu_alpha * gate)) * (up + 1)) @ w[f"layers/{i}/mlp/down_proj/weight"].T
    hidden = norm(h, "norm")
    return hidden, hidden @ head.T


def test_dense_evaluation_meets_the_golden() -> None:
    golden = minimax_golden()
    for row, (anchor, p0) in enumerate(zip(golden.anchor, golden.p0, strict=True)):
        hidden, logits = dense_block(CONFIG, golden.features, anchor, p0, 7)
        # Both are float64; the stored values are rounded to float32.
        np.testing.assert_allclose(hidden, golden.expected["hidden"][row], atol=2e-6, rtol=0)
        np.testing.assert_allclose(logits, golden.expected["base_logits"][row], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("window", "causal", "num_slots", "lowering"),
    [
        (16, False, 7, "one_pass"),
        (16, False, 7, "decode_merge"),
        (16, False, 1, "one_pass"),
        (5, False, 7, "one_pass"),
        (5, False, 7, "decode_merge"),
        (1, False, 4, "decode_merge"),
        (3, True, 7, "one_pass"),
        (3, True, 7, "decode_merge"),
        (None, False, 2, "decode_merge"),
    ],
)
def test_every_p0_around_the_window_edge(window: int | None, causal: bool, num_slots: int, lowering: str) -> None:
    golden = minimax_golden()
    config = dataclasses.replace(CONFIG, window=window, causal=causal)
    edge = window or 16
    p0 = np.array(sorted({*range(4), *range(max(0, edge - 2), edge + num_slots + 3), 60}), np.int32)
    anchor = load_npz(MINIMAX / "expected.npz")["p2_tokens"][p0]
    golden = dataclasses.replace(golden, p0=p0, anchor=anchor)
    actual = run(golden, make_drafter(MINIMAX, config), num_slots=num_slots, lowering=lowering)
    for row in range(len(p0)):
        hidden, logits = dense_block(config, golden.features, anchor[row], p0[row], num_slots)
        np.testing.assert_allclose(actual["hidden"][row], hidden, atol=golden.tolerance["hidden"], rtol=0)
        np.testing.assert_allclose(actual["base_logits"][row], logits, atol=golden.tolerance["base_logits"], rtol=0)


# --- who sees what


class Disturbed(Embedding):
    """The target's embedding with `amount` added to slot 6 of every block."""

    def lookup(self, tokens, dtype):
        x = super().lookup(tokens, dtype)
        return x.at[:, 6].add(jnp.broadcast_to(self.amount.get_value(), x[:, 6].shape))


def disturbed_embedding() -> Disturbed:
    table = target_tables()[0].weight.get_value()
    result = Disturbed(layers.Scope("table"), *table.shape)
    result.weight.set_value(table)
    result.amount = nnx.Variable(jnp.float32(0))
    return result


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("causal", [False, True])
def test_last_slot_reaches_the_first_unless_the_block_is_causal(causal: bool, lowering: str) -> None:
    drafter = make_drafter(MINIMAX, dataclasses.replace(CONFIG, causal=causal))
    cache, embed, head = drafter.make_cache(1), disturbed_embedding(), target_tables()[1]

    @jit_once
    def hidden(embed: Embedding) -> jax.Array:
        anchor, p0 = jnp.array([7], jnp.int32), jnp.array([0], jnp.int32)
        return drafter.block(anchor, p0, cache, embed=embed, head=head, lowering=lowering).hidden[0]

    before = hidden(embed)
    embed.amount.set_value(jnp.float32(1))
    moved = np.abs(hidden(embed) - before).max(axis=1)
    assert moved[6] > 1e-2
    assert np.all(moved[:6] == 0) if causal else np.all(moved[:6] > 1e-2)


def test_a_token_outside_the_window_changes_nothing() -> None:
    golden, drafter = minimax_golden(), make_drafter(MINIMAX)
    p0, window = 40, 16
    embed, head = target_tables()

    @jit_once
    def hidden(features: jax.Array, start: jax.Array) -> jax.Array:
        positions = jnp.arange(p0, dtype=jnp.int32)[None]
        cache = drafter.write_context(features[None, :p0], positions, drafter.make_cache(1))
        return drafter.block(jnp.array([7], jnp.int32), start, cache, embed=embed, head=head).hidden[0]

    features, start = jnp.asarray(golden.features), jnp.array([p0], jnp.int32)
    moved = {
        back: np.abs(hidden(features, start) - hidden(features.at[p0 - back].multiply(-1.0), start)).max(axis=1)
        for back in (window - 1, window, window + 1)
    }
    assert np.all(moved[window] == 0) and np.all(moved[window + 1] == 0)
    # The oldest visible token is seen by slot 0 and reaches the others through it.
    assert np.all(moved[window - 1] > 1e-3)
    # The control: one position earlier the same token is inside the window again.
    control = hidden(features, start - 1) - hidden(features.at[p0 - window].multiply(-1.0), start - 1)
    assert np.abs(control).max() > 1e-3


def test_a_row_depends_neither_on_its_batch_nor_on_the_page_size() -> None:
    golden, drafter = minimax_golden(), make_drafter(MINIMAX)
    together = run(golden, drafter)
    for row, page_size in ((4, 8), (8, 64)):
        alone = dataclasses.replace(golden, p0=golden.p0[row : row + 1], anchor=golden.anchor[row : row + 1])
        hidden = run(alone, drafter, page_size=page_size)["hidden"][0]
        np.testing.assert_allclose(hidden, together["hidden"][row], atol=SAME, rtol=0)


def test_features_by_layer_equal_concatenated_features() -> None:
    golden, drafter = minimax_golden(), make_drafter(MINIMAX)
    features, positions = batch_of(golden)
    write = jit_once(lambda parts, cache: drafter.write_context(parts, positions, cache))
    cache = drafter.make_cache(len(golden.p0))
    by_layer = write(tuple(jnp.split(features, 4, axis=-1)), cache)
    jax.tree.map(np.testing.assert_array_equal, by_layer, write(features, cache))
    backwards = write(tuple(jnp.split(features, 4, axis=-1)[::-1]), cache)
    assert float(jnp.abs(backwards.keys[0] - by_layer.keys[0]).max()) > 1


# --- construction and errors


def paths_of(module: nnx.Module) -> dict[str, nnx.Param]:
    return {"/".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(module, nnx.Param))}


def test_every_parameter_names_its_axes() -> None:
    for config in (CONFIG, *(DrafterConfig.from_hf(hf_config(DEEPSPEC / head)) for head in ("gated", "rnn"))):
        for path, param in paths_of(nnx.eval_shape(lambda c=config: DSparkDrafter(c, formats={}))).items():
            assert len(param.get_metadata()["logical_axes"]) == len(param.get_value().shape), path


def test_released_sizes() -> None:
    config = DrafterConfig.from_hf(json.loads((DATA / "inventory/configs/m31-dspark.config.json").read_text()))
    shapes = {
        path: param.get_value().shape
        for path, param in paths_of(nnx.eval_shape(lambda: DSparkDrafter(config, formats={}))).items()
    }
    # 97 tensors in the release, 35 of them scales of quantised weights.
    assert len(shapes) == 62
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 291_257_857 + 1_667_235_840
    assert shapes["fc/weight"] == (6144, 30720) and shapes["markov_head/w1/weight"] == (200064, 256)
    assert shapes["confidence_head/weight"] == (1, 6400) and shapes["layers/4/attention/k_proj/weight"] == (512, 6144)


def test_random_weights_are_finite_and_formats_apply() -> None:
    names = {"drafter/layers/0/mlp/up_proj/weight": "mxfp8"}
    config = dataclasses.replace(CONFIG, num_layers=1)
    drafter = DSparkDrafter(config, key=jax.random.key(3), formats=names, compute_dtype=jnp.float32)
    assert isinstance(drafter.layers[0].mlp.up_proj.weight.get_value(), formats.MXFP8Array)
    embed, head = target_tables()
    anchor, p0 = jnp.array([1, 2], jnp.int32), jnp.array([0, 5], jnp.int32)
    block = jit_once(lambda *args: drafter.block(*args, embed=embed, head=head, num_slots=2))
    out = block(anchor, p0, drafter.make_cache(2))
    assert out.base_logits.shape == (2, 2, 512) and bool(jnp.isfinite(out.base_logits).all())


def test_errors_say_what_to_change() -> None:
    drafter = make_drafter(MINIMAX)
    embed, head = target_tables()
    anchor, cache = jnp.array([1], jnp.int32), drafter.make_cache(1)
    for k in (0, -1, 8):
        with pytest.raises(ConfigError, match=rf"between 1 and the drafter's block size 7, found {k}"):
            drafter.block(anchor, anchor, cache, embed=embed, head=head, num_slots=k)
    with pytest.raises(ValueError, match="pass those of the target"):
        drafter.block(anchor, anchor, cache)
    short = dataclasses.replace(CONFIG, window=4)
    with pytest.raises(ValueError, match=r"has 10 slots a row, but a window of 16 and a block of 7 need 22"):
        small = type(cache).zeros(short, 1, dtype=jnp.float32, page_size=1)
        drafter.block(anchor, anchor, small, embed=embed, head=head)
    with pytest.raises(ValueError, match=r"capture target layers \[0, 2, 3, 5\]"):
        drafter.write_context(jnp.zeros((1, 2, 384)), jnp.zeros((1, 2), jnp.int32), cache)


def test_a_drafter_refuses_another_target() -> None:
    target = TargetConfig.from_hf(json.loads((DATA / "m31-flash-tiny/config.json").read_text()))
    CONFIG.check_target(target)
    for change, message in (
        ({"hidden_size": 256}, "hidden_size of the drafter is 256"),
        ({"vocab_size": 600}, "vocab_size of the drafter is 600"),
        ({"target_layer_ids": (0, 6)}, "reads target layer 6"),
    ):
        with pytest.raises(ConfigError, match=message):
            dataclasses.replace(CONFIG, **change).check_target(target)


# --- kernels


@pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="the GPU kernels run on a GPU; elsewhere XLA serves this call"
)
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_gpu_kernels_agree_with_xla(lowering: str, rng_key: jax.Array) -> None:
    config = dataclasses.replace(
        CONFIG, num_heads=16, num_kv_heads=1, head_dim=128, rotary_dim=64, window=512, max_context=4096
    )
    drafter = DSparkDrafter(config, key=rng_key, formats={})
    features = jax.random.normal(rng_key, (3, 700, 512), jnp.bfloat16)
    lengths = jnp.array([3, 511, 700], jnp.int32)
    position = jnp.arange(700, dtype=jnp.int32)[None]
    cache = drafter.write_context(features, jnp.where(position < lengths[:, None], position, -1), drafter.make_cache(3))
    embed, head = target_tables()

    def hidden(implementation: str | None) -> np.ndarray:
        anchor = jnp.array([5, 6, 7], jnp.int32)
        options = {"embed": embed, "head": head, "lowering": lowering, "implementation": implementation}
        return np.asarray(drafter.block(anchor, lengths, cache, **options).hidden, np.float32)

    assert np.abs(hidden(None) - hidden("xla")).max() <= BF16_TOLERANCE["hidden"]


def test_a_quantised_config_needs_formats() -> None:
    quantised = json.loads((Path(__file__).parent / "data/m31-flash-tiny/dspark/config.json").read_text())
    config = DrafterConfig.from_hf(quantised)
    with pytest.raises(ConfigError, match=r"quantization_config[\s\S]*load_drafter"):
        nnx.eval_shape(lambda: DSparkDrafter(config))
    plain = DrafterConfig.from_hf({k: v for k, v in quantised.items() if k != "quantization_config"})
    nnx.eval_shape(lambda: DSparkDrafter(plain))
