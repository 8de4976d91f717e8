"""Configurations: one sentence for everything that is wrong."""

import dataclasses
import re
from typing import Any

import pytest
from config_cases import DELETED, DSPARK, FLASH, M3, NO_WINDOW, QWEN, RESAVED_SPARSE, changed

from dspark_jax.config import MARKOV_TYPES, ConfigError, DrafterConfig, TargetConfig

# What is wrong ------------------------------------------------------------------------------------------------------

NEEDED = {
    "target": """vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    intermediate_size shared_intermediate_size dense_intermediate_size max_position_embeddings rope_theta rms_norm_eps
    use_gemma_norm use_qk_norm qk_norm_type hidden_act swiglu_alpha swiglu_limit num_local_experts num_experts_per_tok
    n_shared_experts scoring_func use_routing_bias routed_scaling_factor moe_layer_freq sparse_attention_config
    sparse_attention_config.use_sparse_attention sparse_attention_config.sparse_index_dim
    sparse_attention_config.sparse_num_index_heads sparse_attention_config.sparse_topk_blocks
    sparse_attention_config.sparse_block_size sparse_attention_config.sparse_disable_index_value
    sparse_attention_config.sparse_score_type sparse_attention_config.sparse_local_block
    sparse_attention_config.sparse_attention_freq""".split(),
    "drafter": """vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    dense_intermediate_size max_position_embeddings rope_theta rms_norm_eps use_gemma_norm use_qk_norm qk_norm_type
    hidden_act swiglu_alpha swiglu_limit moe_layer_freq dspark_block_size dspark_target_layer_ids""".split(),
}


def refused(kind: type, config: Any, *names: str, **options: Any) -> str:
    """The error's message, which is one line and names every one of `names`."""
    with pytest.raises(ConfigError) as caught:
        kind.from_hf(config, **options)
    message = str(caught.value)
    assert "\n" not in message
    for name in names:
        assert re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", message), (name, message)
    return message


@pytest.mark.parametrize("key", NEEDED["target"])
def test_missing_key_of_a_target(key):
    assert "missing" in refused(TargetConfig, changed(M3, {key: DELETED}), key.split(".")[-1])
    refused(TargetConfig, changed(M3, {key: None}), key.split(".")[-1])


@pytest.mark.parametrize("key", NEEDED["drafter"])
def test_missing_key_of_a_drafter(key):
    assert "missing" in refused(DrafterConfig, changed(DSPARK, {key: DELETED}), key.removeprefix("dspark_"))


def test_missing_mask_token():
    assert "missing" in refused(DrafterConfig, changed(DSPARK, {"dspark_noise_token_id": DELETED}), "mask_token_id")


def test_missing_rotary_size():
    changes = {"rotary_dim": DELETED, "partial_rotary_factor": DELETED}
    refused(TargetConfig, changed(M3, changes), "rotary_dim", "partial_rotary_factor")
    refused(DrafterConfig, changed(DSPARK, changes), "rotary_dim", "partial_rotary_factor")


# Changes, then what the message must name.
WRONG_TARGETS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown key": ({"query_rescale": 2}, ("unknown key 'query_rescale'", "--ignore-config-key query_rescale")),
    "unknown sparse key": ({"sparse_attention_config.sparse_stride": 2}, ("unknown key 'sparse_stride'",)),
    "inert name at the wrong place": ({"sparse_attention_config.use_cache": True}, ("unknown key 'use_cache'",)),
    "contradiction": ({"top.hidden_size": 4096}, ("hidden_size", "6144", "4096", "top level")),
    "contradicting rope": ({"top.rope_theta": 10000}, ("rope_theta", "5000000", "10000")),
    "float for int": ({"hidden_size": 6144.5}, ("hidden_size", "int", "6144.5")),
    "text for int": ({"num_hidden_layers": "60"}, ("num_hidden_layers", "'60'")),
    "bool for int": ({"head_dim": True}, ("head_dim", "True")),
    "text for number": ({"rms_norm_eps": "1e-6"}, ("rms_norm_eps", "'1e-6'")),
    "list for object": ({"sparse_attention_config": [1]}, ("sparse_attention_config", "Mapping")),
    "zero size": ({"vocab_size": 0}, ("vocab_size", "positive")),
    "negative size": ({"num_local_experts": -1}, ("num_local_experts", "positive")),
    "zero eps": ({"rms_norm_eps": 0}, ("rms_norm_eps", "positive")),
    "infinite theta": ({"rope_theta": float("inf")}, ("rope_theta",)),
    "nan alpha": ({"swiglu_alpha": float("nan")}, ("swiglu_alpha",)),
    "unknown architecture": ({"top.architectures": ["LlamaForCausalLM"]}, ("architectures", "LlamaForCausalLM")),
    "two architectures": ({"top.architectures": ["MiniMaxM3SparseForCausalLM"] * 2}, ("architectures",)),
    "unknown activation": ({"hidden_act": "silu"}, ("hidden_act", "'silu'", "'swigluoai'")),
    "plain norm": ({"use_gemma_norm": False}, ("use_gemma_norm",)),
    "no head norm": ({"use_qk_norm": False}, ("use_qk_norm",)),
    "joint head norm": ({"qk_norm_type": "full"}, ("qk_norm_type", "'full'")),
    "output gate": ({"attention_output_gate": True}, ("attention_output_gate",)),
    "tied head": ({"tie_word_embeddings": True}, ("tie_word_embeddings",)),
    "other beta": ({"swiglu_beta": 0.5}, ("swiglu_beta", "0.5")),
    "softmax router": ({"scoring_func": "softmax"}, ("scoring_func", "'softmax'")),
    "no routing bias": ({"use_routing_bias": False}, ("use_routing_bias",)),
    "two shared experts": ({"n_shared_experts": 2}, ("n_shared_experts", "2")),
    "heads do not divide": ({"num_attention_heads": 62}, ("num_attention_heads", "num_key_value_heads")),
    "scaled rope": ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, ("rope_scaling", "yarn")),
    "scaled rope, newer": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e6}}, ("rope_type", "'yarn'")),
    "two thetas": ({"rope_parameters": {"rope_theta": 1e4}}, ("rope_theta", "rope_parameters.rope_theta")),
    "theta missing, newer": ({"rope_theta": DELETED, "rope_parameters": {"rope_type": "default"}}, ("rope_theta",)),
    "rotary contradiction": ({"rotary_dim": 128}, ("rotary_dim", "partial_rotary_factor")),
    "odd rotary": ({"rotary_dim": 63, "partial_rotary_factor": DELETED}, ("rotary_dim", "even")),
    "rotary too large": ({"rotary_dim": 256, "partial_rotary_factor": DELETED}, ("rotary_dim", "head_dim")),
    "moe list too short": ({"moe_layer_freq": [1] * 59}, ("moe_layer_freq", "60")),
    "moe list of twos": ({"moe_layer_freq": [2] * 60}, ("moe_layer_freq",)),
    "unknown MLP type": ({"mlp_layer_types": ["dense"] * 59 + ["wide"]}, ("mlp_layer_types",)),
    "more choices than experts": ({"num_experts_per_tok": 129}, ("num_experts_per_token", "num_experts")),
    "sparse list too long": (
        {"sparse_attention_config.sparse_attention_freq": [1] * 61},
        ("sparse_attention_freq", "60"),
    ),
    "sparse switched off": ({"sparse_attention_config.use_sparse_attention": False}, ("use_sparse_attention",)),
    "other block score": ({"sparse_attention_config.sparse_score_type": "lse"}, ("sparse_score_type", "'lse'")),
    "first block forced": ({"sparse_attention_config.sparse_init_block": 1}, ("sparse_init_block", "1")),
    "two local blocks": ({"sparse_attention_config.sparse_local_block": 2}, ("sparse_local_block", "2")),
    "index values": ({"sparse_attention_config.sparse_disable_index_value": [0] * 60}, ("sparse_disable_index_value",)),
    "index heads": ({"sparse_attention_config.sparse_num_index_heads": 8}, ("index_heads", "num_kv_heads")),
    "index head too small": ({"sparse_attention_config.sparse_index_dim": 32}, ("rotary_dim", "index_head_dim")),
    "unknown layer type": (
        RESAVED_SPARSE | {"layer_types": ["full_attention"] * 59 + ["linear_attention"]},
        ("layer_types", "'linear_attention'"),
    ),
    "too few layer types": (RESAVED_SPARSE | {"layer_types": ["full_attention"] * 59}, ("layer_types", "59", "60")),
    "text_config is a list": ({"top.text_config": [1]}, ("text_config",)),
    "eos outside": ({"eos_token_id": 200064}, ("200064", "vocabulary")),
    "eos is text": ({"eos_token_id": "</s>"}, ("eos_token_id",)),
    "negative pad": ({"pad_token_id": -1}, ("pad_token_id",)),
}
WRONG_DRAFTERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown key": ({"query_rescale": 2}, ("unknown key 'query_rescale'",)),
    "unknown architecture": ({"top.architectures": ["EagleModel"]}, ("architectures", "EagleModel")),
    "unknown activation": ({"hidden_act": "gelu"}, ("hidden_act", "'gelu'")),
    "experts": ({"moe_layer_freq": [0, 0, 1, 0, 0]}, ("moe_layer_freq",)),
    "sparse attention": ({"sparse_attention_config": {"use_sparse_attention": True}}, ("sparse_attention_config",)),
    "two inner sizes": ({"dspark_ffn_hidden_size": 3072}, ("dspark_ffn_hidden_size", "3072")),
    "no dense FFN": ({"dspark_use_dense_ffn": False}, ("dspark_use_dense_ffn",)),
    "hybrid fusion": ({"dspark_hybrid_context_fusion": True}, ("hybrid_context_fusion",)),
    "fields disagree": ({"block_size": 5}, ("block_size", "dspark_block_size", "5", "7")),
    "window null": ({"sliding_window": None}, ("sliding_window", "None")),
    "window switched off": ({"use_sliding_window": False}, ("sliding_window",)),
    "window without layers": (
        {"layer_types": ["full_attention"] * 5, "use_sliding_window": True},
        ("use_sliding_window", "layer_types"),
    ),
    "zero window": ({"sliding_window": 0}, ("window", "positive", "0")),
    "swa without a size": (NO_WINDOW | {"dspark_config.use_swa": True}, ("swa_window_size",)),
    "swa of zero": (NO_WINDOW | {"dspark_config.use_swa": True, "dspark_config.swa_window_size": 0}, ("window",)),
    "mixed layers": ({"layer_types": ["sliding_attention"] * 4 + ["full_attention"]}, ("layer_types", "mixes")),
    "unknown layer type": ({"layer_types": ["chunked_attention"] * 5}, ("layer_types", "'chunked_attention'")),
    "too few layer types": ({"layer_types": ["sliding_attention"] * 4}, ("layer_types", "4", "5")),
    "causal contradiction": (
        {"dspark_config.is_causal": True, "dspark_config.sliding_window_non_causal": True},
        ("is_causal", "sliding_window_non_causal"),
    ),
    "mask outside": ({"dspark_noise_token_id": 200064}, ("mask token id 200064", "200064")),
    "negative mask": ({"dspark_noise_token_id": -1}, ("mask token id -1",)),
    "unknown Markov head": ({"dspark_markov_head_type": "lstm"}, ("'lstm'", *MARKOV_TYPES)),
    "negative rank": ({"dspark_markov_rank": -4}, ("-4",)),
    "confidence without Markov": ({"dspark_markov_rank": 0}, ("confidence_with_markov",)),
    "no target layers": ({"dspark_target_layer_ids": []}, ("target layer ids",)),
    "descending layers": ({"dspark_target_layer_ids": [3, 17, 5]}, ("target layer ids", "ascending")),
    "a layer twice": ({"dspark_target_layer_ids": [3, 3]}, ("target layer ids", "distinct")),
    "negative layer": ({"dspark_target_layer_ids": [-1, 3]}, ("target_layer_ids",)),
    "layer of text": ({"dspark_target_layer_ids": ["3"]}, ("target_layer_ids",)),
    "layers not listed": ({"dspark_target_layer_ids": 5}, ("target_layer_ids",)),
    "text for a size": ({"dspark_block_size": "7"}, ("block_size", "'7'")),
    "block of none": ({"dspark_block_size": 0}, ("block_size", "0")),
    "theta missing": ({"rope_theta": DELETED}, ("rope_theta",)),
    "scaled rope": ({"rope_scaling": {"type": "linear", "factor": 2}}, ("rope_scaling", "linear")),
}


@pytest.mark.parametrize("case", WRONG_TARGETS)
def test_wrong_target(case):
    changes, names = WRONG_TARGETS[case]
    message = refused(TargetConfig, changed(M3, changes))
    assert all(name in message for name in names), message


@pytest.mark.parametrize("case", WRONG_DRAFTERS)
def test_wrong_drafter(case):
    changes, names = WRONG_DRAFTERS[case]
    message = refused(DrafterConfig, changed(DSPARK, changes))
    assert all(name in message for name in names), message


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"hidden_act": "swigluoai"}, ("hidden_act", "'silu'")),
        ({"attention_bias": True}, ("attention_bias",)),
        ({"tie_word_embeddings": True}, ("tie_word_embeddings",)),
        ({"rope_parameters": DELETED}, ("rope_theta",)),
        ({"query_rescale": 2}, ("query_rescale",)),
    ],
    ids=str,
)
def test_wrong_deepspec_drafter(changes, names):
    message = refused(DrafterConfig, changed(QWEN, changes))
    assert all(name in message for name in names), message


def test_ignored_keys_are_accepted():
    config = changed(M3, {"query_rescale": 2})
    assert TargetConfig.from_hf(config, ignore=("query_rescale",)) == TargetConfig.from_hf(M3)
    drafter = changed(DSPARK, {"query_rescale": 2})
    assert DrafterConfig.from_hf(drafter, ignore=("query_rescale",)) == DrafterConfig.from_hf(DSPARK)


def test_sparse_layers_must_be_those_that_carry_an_indexer():
    real = (False,) * 3 + (True,) * 57
    assert TargetConfig.from_hf(M3, sparse_layers=real).sparse_layers == real
    message = refused(TargetConfig, M3, "sparse_attention_freq", "index_q_proj", sparse_layers=(True,) * 60)
    assert "layer 0" in message and "has index_q_proj" in message
    message = refused(TargetConfig, FLASH, "sparse_attention_freq", sparse_layers=real)
    assert "layer 0" in message and "has no index_q_proj" in message


def test_drafter_must_fit_its_target():
    target, drafter = TargetConfig.from_hf(FLASH), DrafterConfig.from_hf(DSPARK)
    drafter.check_target(target)
    for field in ("hidden_size", "vocab_size"):
        other = dataclasses.replace(target, **{field: getattr(target, field) + 1})
        with pytest.raises(ConfigError, match=rf"{field} of the drafter .* the target"):
            drafter.check_target(other)
    short = dataclasses.replace(
        target, num_layers=59, moe_layers=target.moe_layers[:59], sparse_layers=target.sparse_layers[:59]
    )
    with pytest.raises(ConfigError, match=r"target layer 59, .* layers 0\.\.58"):
        drafter.check_target(short)


@pytest.mark.parametrize("config", [TargetConfig.from_hf(M3), DrafterConfig.from_hf(DSPARK)], ids=["target", "drafter"])
def test_configs_are_values(config):
    assert hash(config) == hash(dataclasses.replace(config)) and config == dataclasses.replace(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 3
    with pytest.raises(TypeError):
        type(config)(*dataclasses.astuple(config))
