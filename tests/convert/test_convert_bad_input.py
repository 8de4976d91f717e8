"""Bad input: one sentence with file, key and remedy, a non-zero status, and no trace at the destination."""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from checkpoint_maker import DATA, Tensor, read_shard, write_shard
from convert_cases import copy_golden, edit_json, edit_tensors, fails, golden_tensors, index_map, run, shard_of

from convert import export, formats

LAYER = "language_model.model.layers.1."
EXPERT = LAYER + "block_sparse_moe.experts.0.w1"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def mxfp8(tmp_path) -> Path:
    return copy_golden("m3-mxfp8-tiny", tmp_path / "source")


@pytest.fixture
def nvfp4(tmp_path) -> Path:
    return copy_golden("m31-flash-tiny", tmp_path / "source")


def header_of(path: Path) -> tuple[dict, bytes]:
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_raw(path: Path, header: dict | bytes, body: bytes) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + body)


# --- files and headers ------------------------------------------------------------------------------------------------


def test_missing_shard(mxfp8, tmp_path, capsys):
    (mxfp8 / "model-00002-of-00003.safetensors").unlink()
    err = fails(capsys, mxfp8, tmp_path / "out")
    assert "model-00002-of-00003.safetensors" in err and "missing" in err and "download" in err


@pytest.mark.parametrize("cut", [1, 1000])
def test_truncated_shard(cut, mxfp8, tmp_path, capsys):
    shard = mxfp8 / "model-00002-of-00003.safetensors"
    os.truncate(shard, shard.stat().st_size - cut)
    err = fails(capsys, mxfp8, tmp_path / "out")
    assert shard.name in err and "truncated" in err and "download it again" in err


@pytest.mark.parametrize("length", [0, 1 << 20, 1 << 63, (1 << 64) - 1])
def test_header_beyond_the_file(length, mxfp8, tmp_path, capsys):
    shard = mxfp8 / "model-00001-of-00003.safetensors"
    raw = shard.read_bytes()[: 1 << 19]
    shard.write_bytes(struct.pack("<Q", length) + raw[8:])
    err = fails(capsys, mxfp8, tmp_path / "out")
    assert shard.name in err and "header" in err and "download" in err


def test_empty_shard(mxfp8, tmp_path, capsys):
    (mxfp8 / "model-00001-of-00003.safetensors").write_bytes(b"")
    assert "header" in fails(capsys, mxfp8, tmp_path / "out")


@pytest.mark.parametrize(
    ("shift", "words"), [((-8, -8), "overlap"), ((0, 10**9), "truncated"), ((-(10**9), 0), "malformed")]
)
def test_offsets(shift, words, mxfp8, tmp_path, capsys):
    shard = mxfp8 / "model-00002-of-00003.safetensors"
    header, body = header_of(shard)
    name = sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])[3]
    begin, end = header[name]["data_offsets"]
    header[name]["data_offsets"] = [begin + shift[0], end + shift[1]]
    write_raw(shard, header, body)
    err = fails(capsys, mxfp8, tmp_path / "out")
    assert shard.name in err and name in err and words in err


def test_shape_and_offsets_disagree(mxfp8, tmp_path, capsys):
    shard = mxfp8 / "model-00002-of-00003.safetensors"
    header, body = header_of(shard)
    name = next(n for n in header if n.endswith("gate.weight"))
    header[name]["shape"] = [8, 127]
    write_raw(shard, header, body)
    err = fails(capsys, mxfp8, tmp_path / "out")
    assert name in err and "[8, 127]" in err and "offsets span" in err


def test_bytes_of_no_tensor(mxfp8, tmp_path, capsys):
    shard = mxfp8 / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes() + b"12345678")
    assert "8 bytes at the end belong to no tensor" in fails(capsys, mxfp8, tmp_path / "out")


@pytest.mark.parametrize("header", [b"{", b"[]", b'{"a": {"dtype": "F32"}}', b'{"a": 3}'])
def test_malformed_header(header, mxfp8, tmp_path, capsys):
    write_raw(mxfp8 / "model-00002-of-00003.safetensors", header, b"")
    assert "model-00002-of-00003.safetensors" in fails(capsys, mxfp8, tmp_path / "out")


def test_unknown_dtype(mxfp8, tmp_path, capsys):
    shard = mxfp8 / "model-00002-of-00003.safetensors"
    header, body = header_of(shard)
    name = next(n for n in header if n.endswith("gate.weight"))
    header[name]["dtype"] = "F4"
    write_raw(shard, header, body)
    err = fails(capsys, mxfp8, tmp_path / "out")
    assert name in err and "F4" in err


@pytest.mark.parametrize("place", ["/etc/passwd", "../model.safetensors", "a/../../b.safetensors"])
def test_index_leads_outside(place, mxfp8, tmp_path, capsys):
    name = next(iter(index_map(mxfp8)))
    edit_json(mxfp8 / INDEX, lambda i: i["weight_map"].update({name: place}))
    err = fails(capsys, mxfp8, tmp_path / "out")
    assert INDEX in err and name in err and place in err and "outside" in err


def test_key_in_the_index_but_not_in_its_shard(mxfp8, tmp_path, capsys):
    name = f"{LAYER}input_layernorm.weight"
    later = max(s for s in index_map(mxfp8).values())
    first = min(n for n, s in index_map(mxfp8).items() if s == later)
    edit_json(mxfp8 / INDEX, lambda i: i["weight_map"].update({first: "model-00001-of-00003.safetensors"}))
    assert "in the index but not in this shard" in fails(capsys, mxfp8, tmp_path / "out")
    edit_json(mxfp8 / INDEX, lambda i: i["weight_map"].update({first: later, name: later}))
    err = fails(capsys, mxfp8, tmp_path / "out")
    assert name in err and "download the index" in err


def test_key_in_a_shard_but_not_in_the_index(mxfp8, tmp_path, capsys):
    name = f"{LAYER}input_layernorm.weight"
    edit_json(mxfp8 / INDEX, lambda i: i["weight_map"].pop(name))
    err = fails(capsys, mxfp8, tmp_path / "out")
    assert name in err and "index does not say so" in err


def test_key_in_two_shards(mxfp8, tmp_path, capsys):
    name = f"{LAYER}input_layernorm.weight"
    home = shard_of(mxfp8, name)
    other = mxfp8 / "model-00003-of-00003.safetensors"
    assert other != home
    twin = next(t for t in read_shard(home) if t.name == name)
    write_shard(other, [*read_shard(other), twin])
    err = fails(capsys, mxfp8, tmp_path / "out")
    assert name in err and home.name in err and other.name in err


def test_key_twice_in_the_index(mxfp8, tmp_path, capsys):
    name = f"{LAYER}input_layernorm.weight"
    text = (mxfp8 / INDEX).read_text()
    (mxfp8 / INDEX).write_text(text.replace('"weight_map": {', f'"weight_map": {{"{name}": "x.safetensors", ', 1))
    err = fails(capsys, mxfp8, tmp_path / "out")
    assert INDEX in err and name in err and "twice" in err


def test_key_twice_in_a_header(mxfp8, tmp_path, capsys):
    shard = mxfp8 / "model-00002-of-00003.safetensors"
    header, body = header_of(shard)
    name = next(n for n in header if n.endswith("gate.weight"))
    text = json.dumps(header)
    write_raw(shard, (text[:-1] + f', "{name}": {json.dumps(header[name])}}}').encode(), body)
    err = fails(capsys, mxfp8, tmp_path / "out")
    assert name in err and "twice" in err


def test_no_checkpoint_at_all(tmp_path, capsys):
    empty = tmp_path / "source"
    empty.mkdir()
    assert "config.json is missing" in fails(capsys, empty, tmp_path / "out")
    (empty / "config.json").write_bytes((DATA / "m3-mxfp8-tiny/config.json").read_bytes())
    assert INDEX in fails(capsys, empty, tmp_path / "out")
    assert "no such folder" in fails(capsys, "./nothing/here", tmp_path / "out")
    (empty / "config.json").write_text("{,}")
    assert "not valid JSON" in fails(capsys, empty, tmp_path / "out")


# --- weights and scales -----------------------------------------------------------------------------------------------


def _with(dtype: str, shape: tuple[int, ...], content: bytes | None = None):
    def edit(t: Tensor) -> Tensor:
        new = Tensor(t.name, dtype, shape, lambda: [])
        new.data = lambda: [content if content is not None else bytes(new.nbytes)]
        return new

    return edit


def _renamed(name: str):
    return lambda t: Tensor(name, t.dtype, t.shape, t.data)


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        (f"{EXPERT}.weight_scale_inv", _with("F32", (64, 4)), ["F32", "U8 or F8_E8M0"]),
        (f"{EXPERT}.weight_scale_inv", _with("BF16", (64, 4)), ["BF16", "U8 or F8_E8M0"]),
        (f"{EXPERT}.weight_scale_inv", _with("U8", (64, 3)), ["[64, 3]", "[64, 4]"]),
        (f"{EXPERT}.weight_scale_inv", _with("U8", (4, 64)), ["[4, 64]", "[64, 4]"]),
        (f"{EXPERT}.weight", _with("F8_E5M2", (64, 128)), ["F8_E5M2", "F8_E4M3"]),
        (f"{EXPERT}.weight", _with("F8_E4M3", (128, 64)), ["[128, 64]", "[64, 128]"]),
        (f"{EXPERT}.weight_scale_inv", lambda t: None, ["no scale lies beside it"]),
        (f"{EXPERT}.weight", lambda t: None, ["has no", ".weight beside it"]),
        (f"{LAYER}self_attn.q_proj.weight", lambda t: None, ["weight_scale_inv", "beside it"]),
        (f"{LAYER}self_attn.q_norm.weight", lambda t: None, ["no tensor for target/layers/1/attention/q_norm/weight"]),
        (f"{LAYER}self_attn.q_norm.weight", _with("F16", (32,)), ["F16", "BF16"]),
        (f"{LAYER}self_attn.q_norm.weight", _with("BF16", (33,)), ["[33]", "[32]"]),
        (f"{LAYER}block_sparse_moe.gate.weight", _with("F32", (8, 64)), ["[8, 64]", "[8, 128]"]),
        (f"{LAYER}self_attn.q_norm.weight", _renamed(f"{LAYER}self_attn.v_norm.weight"), ["v_norm", "no tensor of a"]),
        (f"{EXPERT}.weight", _renamed(f"{EXPERT}.weight_zero_point"), ["weight_zero_point", "no tensor of a known"]),
    ],
)
def test_tensor_that_does_not_fit(name, edit, words, mxfp8, tmp_path, capsys):
    edit_tensors(mxfp8, name, edit)
    err = fails(capsys, mxfp8, tmp_path / "out")
    assert all(w in err for w in words), err
    assert name.rpartition(".")[0].split("layers.1.")[1].split(".")[0] in err or "layers/1" in err


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        (f"{EXPERT}.weight_scale", lambda t: None, ["weight_packed", "weight_scale beside it"]),
        (f"{EXPERT}.weight_packed", lambda t: None, ["weight beside it"]),
        (f"{EXPERT}.weight_global_scale", lambda t: None, ["weight_global_scale beside it"]),
        (f"{EXPERT}.weight_scale", _with("U8", (64, 8)), ["U8", "F8_E4M3"]),
        (f"{EXPERT}.weight_scale", _with("F8_E4M3", (64, 4)), ["[64, 4]", "[64, 8]"]),
        (f"{EXPERT}.weight_packed", _with("U8", (64, 128)), ["[64, 128]", "[64, 64]"]),
        (f"{EXPERT}.weight_global_scale", _with("F32", (2,)), ["one F32 value"]),
        (f"{EXPERT}.weight_global_scale", _with("BF16", (1,)), ["one F32 value"]),
    ],
)
def test_nvfp4_tensor_that_does_not_fit(name, edit, words, tmp_path, capsys):
    source = copy_golden("m31-flash-tiny", tmp_path / "source")
    name = name.replace("layers.1.", "layers.2.")
    edit_tensors(source, name, edit)
    err = fails(capsys, source, tmp_path / "out")
    assert "experts.0.w1" in err and all(w in err for w in words), err


def test_f8_e8m0_scales_are_the_same_bytes(mxfp8, tmp_path):
    from convert_cases import load_arrays

    edit_tensors(mxfp8, f"{EXPERT}.weight_scale_inv", lambda t: Tensor(t.name, "F8_E8M0", t.shape, t.data))
    assert run(mxfp8, tmp_path / "out") == 0
    content = golden_tensors(DATA / "m3-mxfp8-tiny")[f"{EXPERT}.weight_scale_inv"][2]
    stored = load_arrays(tmp_path / "out")["target/layers/1/moe/experts/gate_proj/weight/scale"]
    assert stored.dtype == np.uint8 and stored[0].tobytes() == content


def spoiled(golden: str, name: str, content: bytes, folder: Path) -> Path:
    """A copy of golden data in which the first bytes of the tensor whose name ends so are these."""
    source = copy_golden(golden, folder)

    def spoil(t: Tensor) -> Tensor:
        data = content + b"".join(t.data())[len(content) :]
        return Tensor(t.name, t.dtype, t.shape, lambda: [data])

    edit_tensors(source, next(n for n in index_map(source) if n.endswith(name)), spoil)
    return source


@pytest.mark.parametrize("weights", ["native", "bf16"])
@pytest.mark.parametrize(
    ("golden", "name", "content", "words"),
    [
        ("m3-mxfp8-tiny", "experts.0.w1.weight_scale_inv", b"\xff", "scale byte 255"),
        ("m3-mxfp8-tiny", "self_attn.q_proj.weight_scale_inv", b"\xff", "scale byte 255"),
        ("m3-mxfp8-tiny", "experts.0.w1.weight", b"\x7f", "NaN code"),
        ("m3-mxfp8-tiny", "self_attn.q_proj.weight", b"\xff", "NaN code"),
        ("m31-flash-tiny", "experts.0.w1.weight_scale", b"\x7f", "NaN block scale"),
        ("m31-flash-tiny", "experts.0.w1.weight_scale", b"\xb8", "negative block scale"),
        ("m31-flash-tiny", "experts.0.w1.weight_global_scale", struct.pack("<f", 0), "global scale 0"),
        ("m31-flash-tiny", "experts.0.w1.weight_global_scale", struct.pack("<f", float("nan")), "global scale nan"),
        ("m31-flash-tiny", "experts.0.w1.weight_global_scale", struct.pack("<f", 2.0**-127), "from 2^-126"),
        ("m31-flash-tiny", "experts.0.w1.weight_global_scale", struct.pack("<f", 2.0**127), "to 2^126"),
    ],
)
def test_nan_and_other_bad_values(golden, name, content, words, weights, tmp_path, capsys):
    """Found while the data are read: DST stays untouched, and what was written before stays resumable."""
    source = spoiled(golden, name, content, tmp_path / "source")
    assert run(source, tmp_path / "out", "--weights", weights) == 1
    err = capsys.readouterr().err
    assert words in err and name.rpartition(".")[0] in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("golden", "name", "content"),
    [
        ("m3-mxfp8-tiny", "experts.0.w1.weight_scale_inv", b"\xfe" * 64),
        ("m31-flash-tiny", "experts.0.w1.weight_global_scale", struct.pack("<f", 2.0**-126)),
    ],
)
def test_weights_beyond_bfloat16(golden, name, content, tmp_path, capsys):
    """Kept in their format they convert; as bfloat16 they would be infinite. Mutant: the check left out."""
    source = spoiled(golden, name, content, tmp_path / "source")
    assert run(source, tmp_path / "native") == 0
    capsys.readouterr()
    assert run(source, tmp_path / "out", "--weights", "bf16") == 1
    err = capsys.readouterr().err
    assert "too large for bfloat16" in err and "experts.0.w1" in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert export.main([str(tmp_path / "native"), str(tmp_path / "back"), "--weights", "bf16"]) == 1
    assert "too large for bfloat16" in capsys.readouterr().err and not (tmp_path / "back").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "check_finite", lambda values, where: None)
        assert run(source, tmp_path / "infinite", "--weights", "bf16") == 0


def test_files_and_folders_of_the_wrong_kind(tmp_path, capsys):
    source = copy_golden("m3-mxfp8-tiny", tmp_path / "source")
    (source / "dspark").write_text("")
    assert "dspark is a file" in fails(capsys, source, tmp_path / "out")
    (source / "dspark").unlink()
    (source / "tokenizer.json").mkdir()
    assert "tokenizer.json is no file" in fails(capsys, source, tmp_path / "out")


def test_experts_of_one_layer_in_two_formats(mxfp8, tmp_path, capsys):
    edit_tensors(mxfp8, f"{EXPERT}.weight_scale_inv", lambda t: None)
    edit_tensors(mxfp8, f"{EXPERT}.weight", _with("BF16", (64, 128)))
    err = fails(capsys, mxfp8, tmp_path / "out")
    assert "experts.1.w1" in err and "one format" in err


def test_shared_expert_stored_as_routed(mxfp8, tmp_path, capsys):
    new = [Tensor(t.name.replace("experts.0.", "experts.8."), t.dtype, t.shape, t.data) for t in read_shard_with(mxfp8)]
    shard = mxfp8 / "model-00003-of-00003.safetensors"
    write_shard(shard, [*read_shard(shard), *new])
    edit_json(mxfp8 / INDEX, lambda i: i["weight_map"].update({t.name: shard.name for t in new}))
    err = fails(capsys, mxfp8, tmp_path / "out")
    assert "experts.8" in err and "shared expert stored as an extra routed expert" in err


def read_shard_with(folder: Path) -> list[Tensor]:
    prefix = f"{LAYER}block_sparse_moe.experts.0."
    return [t for s in sorted(folder.glob("*.safetensors")) for t in read_shard(s) if t.name.startswith(prefix)]


def test_missing_expert(mxfp8, tmp_path, capsys):
    for suffix in ("weight", "weight_scale_inv"):
        edit_tensors(mxfp8, f"{LAYER}block_sparse_moe.experts.5.w2.{suffix}", lambda t: None)
    err = fails(capsys, mxfp8, tmp_path / "out")
    assert "target/layers/1/moe/experts/down_proj/weight of expert 5" in err


def test_layer_beyond_the_config(mxfp8, tmp_path, capsys):
    edit_json(mxfp8 / "config.json", _fewer_layers)
    err = fails(capsys, mxfp8, tmp_path / "out")
    assert "layers.3." in err and "left over" in err


def _fewer_layers(config: dict) -> None:
    text = config["text_config"]
    text["num_hidden_layers"] = 3
    text["moe_layer_freq"].pop()
    for key in ("sparse_attention_freq", "sparse_disable_index_value"):
        text["sparse_attention_config"][key].pop()


# --- configurations ---------------------------------------------------------------------------------------------------


def _text(key: str, value: object):
    def edit(config: dict) -> None:
        if value is None:
            del config["text_config"][key]
        else:
            config["text_config"][key] = value

    return edit


def _quantization(**entry: object):
    return lambda config: config.update(quantization_config=entry)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (_text("rope_theta", None), ["rope_theta", "missing"]),
        (_text("hidden_act", "gelu_new"), ["hidden_act", "gelu_new"]),
        (_text("layer_types", ["full_attention", "linear_attention"] * 2), ["layer_types", "linear_attention"]),
        (_text("some_new_switch", 1), ["some_new_switch", "--ignore-config-key"]),
        (_text("vocab_size", 511), ["[512, 128]", "[511, 128]"]),
        (_quantization(quant_method="fp8", weight_block_size=[128, 128]), ["quant_method", "fp8"]),
        (_quantization(quant_method="awq"), ["quant_method", "awq"]),
        (_quantization(quant_method="mxfp8", weight_block_size=[1, 16]), ["weight_block_size", "[1, 16]"]),
        (_quantization(quant_method="modelopt", quant_algo="INT4_AWQ"), ["quant_algo", "INT4_AWQ"]),
        (lambda c: c.update(architectures=["LlamaForCausalLM"]), ["architectures", "LlamaForCausalLM"]),
    ],
)
def test_config(edit, words, mxfp8, tmp_path, capsys):
    edit_json(mxfp8 / "config.json", edit)
    err = fails(capsys, mxfp8, tmp_path / "out")
    assert all(w in err for w in words), err
    assert "config.json" in err or "[511, 128]" in err


def test_unknown_key_can_be_accepted(mxfp8, tmp_path):
    edit_json(mxfp8 / "config.json", _text("some_new_switch", 1))
    assert run(mxfp8, tmp_path / "out", "--ignore-config-key", "some_new_switch") == 0
    assert json.loads((tmp_path / "out/layout.json").read_text())["ignored_config_keys"] == ["some_new_switch"]


def test_sparse_layers_and_config_disagree(mxfp8, tmp_path, capsys):
    """The released M3.1 trap: a layer that the config calls full attention but that holds an indexer."""
    edit_json(
        mxfp8 / "config.json",
        lambda c: c["text_config"]["sparse_attention_config"]["sparse_attention_freq"].__setitem__(2, 0),
    )
    err = fails(capsys, mxfp8, tmp_path / "out")
    assert "layer 2" in err and "index_q_proj" in err


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size"])
def test_drafter_of_another_target(key, nvfp4, tmp_path, capsys):
    edit_json(nvfp4 / "dspark" / "config.json", _text(key, 1024))
    err = fails(capsys, nvfp4, tmp_path / "out")
    assert key in err and "dspark/config.json" in err


def test_drafter_without_a_config(nvfp4, tmp_path, capsys):
    (nvfp4 / "dspark" / "config.json").unlink()
    assert "dspark/config.json is missing" in fails(capsys, nvfp4, tmp_path / "out")


def test_drafter_reads_a_layer_that_is_not_there(nvfp4, tmp_path, capsys):
    edit_json(nvfp4 / "dspark" / "config.json", _text("dspark_target_layer_ids", [0, 2, 3, 6]))
    assert "layer 6" in fails(capsys, nvfp4, tmp_path / "out")


# --- the destination --------------------------------------------------------------------------------------------------
