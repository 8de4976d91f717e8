"""Configurations: what the published and golden configs mean, and one sentence for everything that is wrong."""

import copy
import dataclasses
import json
import re
from typing import Any

import pytest
from golden import CHECKPOINTS, DATA

from dspark_jax.config import MARKOV_TYPES, ConfigError, DrafterConfig, TargetConfig

INVENTORY = DATA / "inventory" / "configs"
DELETED = "<deleted>"  # a string: an object's address would differ between test processes


def read(*path: str) -> dict[str, Any]:
    return json.loads(DATA.joinpath(*path).read_text())


M3, FLASH, DSPARK = (
    json.loads((INVENTORY / f"{n}.config.json").read_text()) for n in ("m3-mxfp8", "m31-flash", "m31-dspark")
)
QWEN = read("deepspec-qwen3-tiny", "vanilla", "config.json")


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy with "a.b" keys set or, where the value is `DELETED`, removed; unprefixed keys go to the text fields."""
    result = copy.deepcopy(config)
    for key, value in changes.items():
        *parents, name = key.split(".")
        if parents[:1] == ["top"]:
            node, parents = result, parents[1:]
        else:
            node = result.get("text_config", result)
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is DELETED:
            del node[name]
        else:
            node[name] = value
    return result


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
RESAVED_SPARSE = {
    "sparse_attention_config": DELETED,
    "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_block_size": 128,
    "index_topk_blocks": 16,
    "index_local_blocks": 1,
}
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
NO_WINDOW = {"layer_types": ["full_attention"] * 5, "sliding_window": None}


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
