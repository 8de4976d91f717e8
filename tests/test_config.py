"""Configurations: what the published and golden configs mean, and other spellings of the same."""

import dataclasses
from typing import Any

import pytest
from config_cases import DELETED, DSPARK, FLASH, M3, NO_WINDOW, QWEN, RESAVED_SPARSE, changed, read
from golden import CHECKPOINTS

from dspark_jax.config import MARKOV_TYPES, DrafterConfig, TargetConfig

# What they mean -----------------------------------------------------------------------------------------------------

# From the tables of the golden data and of the published configs, not from the parser.
RELEASED = dict(
    vocab_size=200064,
    hidden_size=6144,
    num_layers=60,
    num_heads=64,
    num_kv_heads=4,
    head_dim=128,
    rotary_dim=64,
    rope_theta=5e6,
    norm_eps=1e-6,
    dense_mlp_size=12288,
    expert_mlp_size=3072,
    shared_mlp_size=3072,
    num_experts=128,
    num_experts_per_token=4,
    routed_scaling=2.0,
    swiglu_alpha=1.702,
    swiglu_limit=7.0,
    moe_layers=(False,) * 3 + (True,) * 57,
    sparse_layers=(False,) * 3 + (True,) * 57,
    index_heads=4,
    index_head_dim=128,
    block_size=128,
    top_k_blocks=16,
    max_context=1048576,
    eos_token_ids=(200020,),
    pad_token_id=200000,
)
TINY = dict(
    vocab_size=512,
    hidden_size=128,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    rotary_dim=16,
    rope_theta=5e6,
    norm_eps=1e-6,
    dense_mlp_size=128,
    expert_mlp_size=64,
    shared_mlp_size=96,
    num_experts=8,
    num_experts_per_token=2,
    routed_scaling=2.0,
    swiglu_alpha=1.702,
    swiglu_limit=7.0,
    moe_layers=(False,) + (True,) * 3,
    sparse_layers=(False,) + (True,) * 3,
    index_heads=4,
    index_head_dim=32,
    block_size=8,
    top_k_blocks=3,
    max_context=4096,
    eos_token_ids=(),
    pad_token_id=0,
)
TARGETS = {
    "m3": (M3, RELEASED),
    "m31-flash": (FLASH, RELEASED | dict(sparse_layers=(True,) * 60)),
    "m3-mxfp8-tiny": (read("m3-mxfp8-tiny", "config.json"), TINY),
    "m31-flash-tiny": (
        read("m31-flash-tiny", "config.json"),
        TINY | dict(num_layers=6, shared_mlp_size=64, moe_layers=(False,) * 2 + (True,) * 4, sparse_layers=(True,) * 6),
    ),
    "m3-nvfp4-modelopt-tiny": (read("m3-nvfp4-modelopt-tiny", "config.json"), TINY | dict(num_experts=12)),
    "m3-bf16-tiny": (
        read("m3-bf16-tiny", "config.json"),
        TINY
        | dict(
            vocab_size=320,
            hidden_size=64,
            num_layers=11,
            head_dim=16,
            rotary_dim=8,
            index_head_dim=16,
            rope_theta=1e4,
            norm_eps=1e-4,
            dense_mlp_size=64,
            expert_mlp_size=32,
            shared_mlp_size=48,
            routed_scaling=1.5,
            swiglu_alpha=1.25,
            swiglu_limit=1.5,
            moe_layers=(False,) + (True,) * 10,
            sparse_layers=(False,) + (True,) * 10,
        ),
    ),
}
MINIMAX_DRAFTER = dict(
    architecture="DSparkMiniMaxDraftModel",
    vocab_size=200064,
    hidden_size=6144,
    num_layers=5,
    num_heads=64,
    num_kv_heads=4,
    head_dim=128,
    rotary_dim=64,
    rope_theta=5e6,
    norm_eps=1e-6,
    mlp_size=12288,
    swiglu_alpha=1.702,
    swiglu_limit=7.0,
    block_size=7,
    mask_token_id=200058,
    target_layer_ids=(3, 17, 31, 45, 59),
    markov_type="vanilla",
    markov_rank=256,
    confidence_head=True,
    confidence_with_markov=True,
    window=4096,
    causal=False,
    max_context=1048576,
    quantized=True,
)
QWEN_DRAFTER = dict(
    architecture="Qwen3DSparkModel",
    vocab_size=192,
    hidden_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rotary_dim=32,
    rope_theta=5e4,
    norm_eps=1e-5,
    mlp_size=96,
    swiglu_alpha=None,
    swiglu_limit=None,
    block_size=7,
    mask_token_id=187,
    target_layer_ids=(1, 4, 7),
    markov_type="vanilla",
    markov_rank=8,
    confidence_head=True,
    confidence_with_markov=True,
    window=None,
    causal=False,
    max_context=1024,
    quantized=False,
)
DRAFTERS = {
    "m31": (DSPARK, MINIMAX_DRAFTER),
    "m31-tiny": (
        read("m31-flash-tiny", "dspark", "config.json"),
        MINIMAX_DRAFTER
        | dict(
            vocab_size=512,
            hidden_size=128,
            num_layers=3,
            num_heads=8,
            num_kv_heads=2,
            head_dim=32,
            rotary_dim=16,
            rope_theta=2e4,
            norm_eps=1e-5,
            mlp_size=256,
            swiglu_limit=2.5,
            mask_token_id=500,
            target_layer_ids=(0, 2, 3, 5),
            markov_rank=16,
            window=16,
            max_context=4096,
        ),
    ),
    **{
        head: (read("deepspec-qwen3-tiny", head, "config.json"), QWEN_DRAFTER | dict(markov_type=head))
        for head in MARKOV_TYPES
    },
}


@pytest.mark.parametrize("name", TARGETS)
def test_target_configs(name):
    config, fields = TARGETS[name]
    assert dataclasses.asdict(TargetConfig.from_hf(config)) == fields


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafter_configs(name):
    config, fields = DRAFTERS[name]
    assert dataclasses.asdict(DrafterConfig.from_hf(config)) == fields


def test_every_golden_checkpoint_is_covered():
    assert set(CHECKPOINTS) <= set(TARGETS)


def test_architecture_decides_norms_and_embeddings():
    minimax, qwen = DrafterConfig.from_hf(DSPARK), DrafterConfig.from_hf(QWEN)
    assert (minimax.gemma_norm, minimax.own_embeddings) == (True, False)
    assert (qwen.gemma_norm, qwen.own_embeddings) == (False, True)


# Other spellings of the same ----------------------------------------------------------------------------------------

FLAT_M3 = {**M3["text_config"], "architectures": M3["architectures"]}
SAME_TARGET = {
    "flat": (FLAT_M3, {}),
    "text model alone": (FLAT_M3, {"architectures": ["MiniMaxM3SparseForCausalLM"]}),
    "rotary_dim alone": (M3, {"partial_rotary_factor": DELETED}),
    "factor alone": (M3, {"rotary_dim": DELETED}),
    "rope_parameters": (
        M3,
        {
            "rope_theta": DELETED,
            "partial_rotary_factor": DELETED,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        },
    ),
    "rope_scaling null": (M3, {"rope_scaling": None}),
    "rope_scaling default": (M3, {"rope_scaling": {"rope_type": "default"}}),
    "the same at top level": (M3, {"top.vocab_size": 200064, "top.rope_theta": 5000000}),
    "re-saved sparse layers": (M3, RESAVED_SPARSE),
    "re-saved MLPs": (M3, {"moe_layer_freq": DELETED, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57}),
    "mtp keys dropped": (M3, {"num_mtp_modules": DELETED}),
    "beta said": (M3, {"swiglu_beta": 1.0}),
    "no quantization_config": (M3, {"top.quantization_config": DELETED}),
}


@pytest.mark.parametrize("name", SAME_TARGET)
def test_other_spellings_of_a_target(name):
    config, changes = SAME_TARGET[name]
    assert dataclasses.asdict(TargetConfig.from_hf(changed(config, changes))) == RELEASED


FLAT_DSPARK = {**DSPARK["text_config"], "architectures": DSPARK["architectures"]}


def spelled(style: str, **fields: Any) -> dict[str, Any]:
    """A drafter's own fields flat, with the dspark_ prefix, or nested under one of two groups."""
    if style in ("dspark_config", "dflash_config"):
        return {f"{style}.{key}": value for key, value in fields.items()}
    return {f"{style}{key}": value for key, value in fields.items()}


STYLES = ("", "dspark_", "dspark_config", "dflash_config")
NO_OWN = {f"dspark_{key}": DELETED for key in ("block_size", "target_layer_ids", "markov_rank", "markov_head_type")}


@pytest.mark.parametrize("style", STYLES)
def test_other_spellings_of_a_drafter(style):
    own = spelled(
        style, block_size=7, target_layer_ids=[3, 17, 31, 45, 59], markov_rank=256, markov_head_type="vanilla"
    )
    for config in (DSPARK, FLAT_DSPARK):
        quantized = "quantization_config" in config
        found = dataclasses.asdict(DrafterConfig.from_hf(changed(config, NO_OWN | own)))
        assert found == MINIMAX_DRAFTER | dict(quantized=quantized)


def test_mask_token_by_either_name():
    config = changed(DSPARK, {"dspark_noise_token_id": DELETED, "mask_token_id": 200063})
    assert DrafterConfig.from_hf(config).mask_token_id == 200063


def test_drafter_without_heads():
    changes = {"dspark_markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    config = DrafterConfig.from_hf(changed(DSPARK, changes))
    assert (config.markov_type, config.markov_rank, config.confidence_head) == (None, 0, False)


@pytest.mark.parametrize("style", STYLES)
def test_window_spelled_as_swa(style):
    config = changed(DSPARK, NO_WINDOW | spelled(style, use_swa=True, swa_window_size=512))
    assert DrafterConfig.from_hf(config).window == 512
    off = changed(DSPARK, NO_WINDOW | spelled(style, use_swa=False, swa_window_size=512))
    assert DrafterConfig.from_hf(off).window is None


def test_no_window():
    assert DrafterConfig.from_hf(changed(DSPARK, NO_WINDOW)).window is None


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("fields", "causal"),
    [
        ({}, False),
        ({"is_causal": True}, True),
        ({"is_causal": False}, False),
        ({"causal": True}, True),
        ({"causal": False}, False),
        ({"sliding_window_non_causal": True}, False),
        ({"sliding_window_non_causal": False}, True),
        ({"is_causal": True, "sliding_window_non_causal": False}, True),
        ({"is_causal": False, "sliding_window_non_causal": True}, False),
    ],
    ids=str,
)
def test_causality_is_what_explicit_metadata_says(style, fields, causal):
    """A sliding window says nothing about it, however the window is spelled."""
    for window in ({}, NO_WINDOW, NO_WINDOW | spelled(style, use_swa=True, swa_window_size=512)):
        assert DrafterConfig.from_hf(changed(DSPARK, window | spelled(style, **fields))).causal is causal


# Tokens -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "generation", "eos"),
    [
        ({}, None, (200020,)),
        ({"eos_token_id": 7}, None, (7,)),
        ({"top.eos_token_id": [7, 9]}, None, (7, 9)),
        ({"eos_token_id": 7}, {"eos_token_id": [5, 6]}, (5, 6)),
        ({}, {"eos_token_id": 5}, (5,)),
        ({}, {"do_sample": True}, (200020,)),
    ],
)
def test_end_of_sequence_ids(changes, generation, eos):
    config = TargetConfig.from_hf(changed(M3, changes), generation_config=generation)
    assert config.eos_token_ids == eos


def test_small_vocabularies_have_no_default_end_of_sequence():
    config = TargetConfig.from_hf(read("m3-mxfp8-tiny", "config.json"))
    assert (config.eos_token_ids, config.pad_token_id) == ((), 0)


def test_pad_token():
    assert TargetConfig.from_hf(changed(M3, {"pad_token_id": 3})).pad_token_id == 3
