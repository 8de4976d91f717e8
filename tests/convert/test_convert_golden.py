"""Conversion of the golden checkpoints: every byte, against decoders written here from the format's description."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from checkpoint_maker import DATA
from convert_cases import copy_golden, golden_tensors, load_arrays, run

from convert import formats, names

TARGETS = ("m3-mxfp8-tiny", "m31-flash-tiny", "m3-nvfp4-modelopt-tiny", "m3-bf16-tiny")
DRAFTERS = (
    "m31-flash-tiny/dspark",
    "deepspec-qwen3-tiny/vanilla",
    "deepspec-qwen3-tiny/gated",
    "deepspec-qwen3-tiny/rnn",
)
# Tensors that reach the destination, counted from the golden folders' own description and headers.
EXPECTED_SKIPPED = {"m3-mxfp8-tiny": 27, "m31-flash-tiny": 123, "m3-nvfp4-modelopt-tiny": 135, "m3-bf16-tiny": 33}

# The published names, read from the format's description: (path pattern, module of the source).
_TARGET_NAMES = [
    (r"target/embed_tokens", "language_model.model.embed_tokens"),
    (r"target/norm", "language_model.model.norm"),
    (r"target/lm_head", "language_model.lm_head"),
    (r"target/layers/(\d+)/input_norm", r"language_model.model.layers.\1.input_layernorm"),
    (r"target/layers/(\d+)/post_attention_norm", r"language_model.model.layers.\1.post_attention_layernorm"),
    (r"target/layers/(\d+)/attention/indexer/(\w+)", r"language_model.model.layers.\1.self_attn.index_\2"),
    (r"target/layers/(\d+)/attention/(\w+)", r"language_model.model.layers.\1.self_attn.\2"),
    (r"target/layers/(\d+)/mlp/(\w+)", r"language_model.model.layers.\1.mlp.\2"),
    (r"target/layers/(\d+)/moe/router", r"language_model.model.layers.\1.block_sparse_moe.gate"),
    (
        r"target/layers/(\d+)/moe/shared_expert/(\w+)",
        r"language_model.model.layers.\1.block_sparse_moe.shared_experts.\2",
    ),
    (r"target/layers/(\d+)/moe/experts/gate_proj", r"language_model.model.layers.\1.block_sparse_moe.experts.*.w1"),
    (r"target/layers/(\d+)/moe/experts/up_proj", r"language_model.model.layers.\1.block_sparse_moe.experts.*.w3"),
    (r"target/layers/(\d+)/moe/experts/down_proj", r"language_model.model.layers.\1.block_sparse_moe.experts.*.w2"),
]
_DRAFTER_NAMES = [
    (r"drafter/(fc|hidden_norm|embed_tokens|lm_head)", r"\1"),
    (r"drafter/norm", "final_norm"),
    (r"drafter/layers/(\d+)/input_norm", r"layers.\1.decoder_layer.input_layernorm"),
    (r"drafter/layers/(\d+)/post_attention_norm", r"layers.\1.decoder_layer.post_attention_layernorm"),
    (r"drafter/layers/(\d+)/attention/(\w+)", r"layers.\1.decoder_layer.self_attn.\2"),
    (r"drafter/layers/(\d+)/mlp/(\w+)", r"layers.\1.decoder_layer.mlp.\2"),
    (r"drafter/markov_head/(w\d)", r"markov_head.markov_\1"),
    (r"drafter/markov_head/(\w+)", r"markov_head.\1"),
    (r"drafter/confidence_head", "confidence_head.proj"),
]


def source_module(path: str, deepspec: bool) -> str:
    """Module in the source of a parameter `path` without its last part."""
    table = _TARGET_NAMES if path.startswith("target") else _DRAFTER_NAMES
    for pattern, module in table:
        if re.fullmatch(pattern, path):
            found = re.sub(pattern, module, path)
            if path.startswith("target"):
                return found
            if deepspec:
                return found.replace("decoder_layer.", "").replace("final_norm", "norm")
            return "language_model.model.dspark." + found
    raise AssertionError(path)


# --- decoders, from the bit layouts -----------------------------------------------------------------------------------


def decode_e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, (byte >> 3) & 0xF, byte & 7
    if (byte & 0x7F) == 0x7F:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def decode_e2m1(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, (code >> 1) & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


E4M3 = np.array([decode_e4m3(b) for b in range(256)])
E2M1 = np.array([decode_e2m1(c) for c in range(16)])


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """Round float32 values to bf16, to nearest even -> their 16 bits."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Oracle:
    """Stored bytes of every array that a conversion of `folder` must hold."""

    def __init__(self, folder: Path, weights: str):
        self.tensors = golden_tensors(folder)
        if (folder / "dspark").is_dir():
            self.tensors |= golden_tensors(folder / "dspark")
        self.deepspec = "deepspec" in str(folder)
        self.weights = weights

    def one(self, module: str) -> dict[str, bytes]:
        """Array name ("" for a dense one) -> bytes of one weight of the source."""
        parts = {n.rpartition(".")[2]: t for n, t in self.tensors.items() if n.rpartition(".")[0] == module}
        if "weight_scale_inv" in parts:
            (_, shape, codes), (_, _, scale) = parts["weight"], parts["weight_scale_inv"]
            if self.weights == "native":
                return {"codes": codes, "scale": scale}
            values = E4M3[np.frombuffer(codes, np.uint8)].reshape(*shape[:-1], -1, 32)
            factors = 2.0 ** (np.frombuffer(scale, np.uint8).astype(np.float64) - 127)
            return {"": bf16_bits(values * factors.reshape(*shape[:-1], -1, 1)).tobytes()}
        if "weight_scale" in parts:
            codes = parts.get("weight_packed", parts["weight"] if "weight" in parts else None)
            divide = "weight_global_scale" in parts
            scale = parts["weight_scale"][2]
            factor = np.frombuffer(parts["weight_global_scale" if divide else "weight_scale_2"][2], np.float32)
            if self.weights == "native":
                return {"codes": codes[2], "scale": scale, "global_scale": factor.tobytes()}
            raw = np.frombuffer(codes[2], np.uint8)
            values = E2M1[np.stack([raw % 16, raw // 16], axis=-1)].reshape(-1, 16)
            product = (values * E4M3[np.frombuffer(scale, np.uint8)][:, None]).astype(np.float32)
            return {"": bf16_bits(product / factor if divide else product * factor).tobytes()}
        return {"": parts["weight"][2]}

    def bytes_of(self, path: str) -> dict[str, bytes]:
        module, _, leaf = path.rpartition("/")
        source = source_module(module, self.deepspec)
        if leaf == "bias":
            name = f"{source}.bias" if "router" not in path else source.replace(".gate", ".e_score_correction_bias")
            return {"": self.tensors[name][2]}
        if "*" not in source:
            return self.one(source)
        stacks: dict[str, bytes] = {}
        expert = 0
        while any(n.startswith(source.replace("*", str(expert)) + ".") for n in self.tensors):
            for key, value in self.one(source.replace("*", str(expert))).items():
                stacks[key] = stacks.get(key, b"") + value
            expert += 1
        return stacks


def differences(destination: Path, oracle: Oracle) -> list[str]:
    """Paths of arrays whose stored bytes are not the oracle's, or that are missing or left over."""
    stored = load_arrays(destination)
    arrays = json.loads((destination / "layout.json").read_text())["arrays"]
    wanted = {f"{p}/{k}" if k else p: v for p in arrays for k, v in oracle.bytes_of(p).items()}
    wrong = [p for p in wanted if p not in stored or stored[p].tobytes() != wanted[p]]
    return wrong + sorted(stored.keys() - wanted.keys())


@pytest.mark.parametrize("weights", ["native", "bf16"])
@pytest.mark.parametrize("name", [*TARGETS, *DRAFTERS])
def test_every_byte(name, weights, tmp_path, capsys):
    assert run(DATA / name, tmp_path / "out", "--weights", weights, "--verify") == 0
    out = capsys.readouterr().out
    assert "verified" in out and "MB/s" in out
    oracle = Oracle(DATA / name, weights)
    assert differences(tmp_path / "out", oracle) == []
    layout = json.loads((tmp_path / "out" / "layout.json").read_text())
    # Exactly once: what is stored and what is skipped make up the whole source.
    skipped = sum(s["count"] for s in layout["skipped"])
    assert skipped == EXPECTED_SKIPPED.get(name, 0)
    assert layout["source"]["tensors"] == len(oracle.tensors)
    if weights == "native":
        unused = re.compile(r"vision_tower|multi_modal_projector|patch_merge_mlp|\.mtp\.|\.input_(global_)?scale$")
        used = sum(len(content) for n, (_, _, content) in oracle.tensors.items() if not unused.search(n))
        assert sum(a.nbytes for a in load_arrays(tmp_path / "out").values()) == used
    assert layout["weights"] == weights and layout["format_version"] == 1
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("name", TARGETS)
def test_logical_shapes_and_formats(name, tmp_path):
    assert run(DATA / name, tmp_path / "out") == 0
    layout = json.loads((tmp_path / "out" / "layout.json").read_text())
    stored = load_arrays(tmp_path / "out")
    for path, entry in layout["arrays"].items():
        shape = tuple(entry["shape"])
        match entry["format"]:
            case "mxfp8":
                assert stored[f"{path}/codes"].shape == shape
                assert stored[f"{path}/codes"].dtype.name == "float8_e4m3fn"
                assert stored[f"{path}/scale"].shape == (*shape[:-1], shape[-1] // 32)
                assert stored[f"{path}/scale"].dtype == np.uint8
            case "nvfp4":
                assert stored[f"{path}/codes"].shape == (*shape[:-1], shape[-1] // 2)
                assert stored[f"{path}/scale"].dtype.name == "float8_e4m3fn"
                assert stored[f"{path}/global_scale"].shape == shape[:-2]
                assert stored[f"{path}/global_scale"].dtype == np.float32
                assert entry["global_scale"] == ("divide" if name == "m31-flash-tiny" else "multiply")
            case "bf16" | "f32":
                assert stored[path].shape == shape
                assert stored[path].dtype.name == ("bfloat16" if entry["format"] == "bf16" else "float32")
                assert (entry["format"] == "f32") == ("router" in path)
    has_index = {
        int(m[1]) for n in golden_tensors(DATA / name) if (m := re.search(r"layers\.(\d+)\..*index_q_proj", n))
    }
    assert [i for i, s in enumerate(layout["sparse_layers"]) if s] == sorted(has_index)


def test_configs_and_tokenizer_go_along(tmp_path):
    source = copy_golden("m31-flash-tiny", tmp_path / "source")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (source / name).write_bytes(b'{"x": "\xc3\xa9"}')
    assert run(source, tmp_path / "out") == 0
    out = tmp_path / "out"
    copied = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()} - {"layout.json"}
    copied = {p for p in copied if not p.startswith("arrays/")}
    assert copied == {
        "config.json",
        "dspark/config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    }
    assert all((out / p).read_bytes() == (source / p).read_bytes() for p in copied)


def test_drafter_alone_has_only_a_drafter(tmp_path):
    assert run(DATA / "deepspec-qwen3-tiny/gated", tmp_path / "out") == 0
    assert not (tmp_path / "out" / "config.json").exists() and (tmp_path / "out" / "dspark" / "config.json").exists()
    layout = json.loads((tmp_path / "out" / "layout.json").read_text())
    assert all(p.startswith("drafter/") for p in layout["arrays"])
    assert {"drafter/embed_tokens/weight", "drafter/markov_head/gate_proj/bias"} <= layout["arrays"].keys()


def test_nvfp4_scale_of_a_linear_is_a_scalar(tmp_path):
    from checkpoint_maker import read_shard, write_shard
    from convert_cases import edit_json, shard_of

    source = copy_golden("m3-nvfp4-modelopt-tiny", tmp_path / "source")
    module = "language_model.model.layers.1.block_sparse_moe.shared_experts.gate_proj"
    expert = "language_model.model.layers.1.block_sparse_moe.experts.0.w1"
    tensors = {t.name: t for s in source.glob("*.safetensors") for t in read_shard(s)}
    rows = tensors[f"{module}.weight"].shape[0]
    shard = shard_of(source, f"{module}.weight")
    new = []
    for suffix in ("weight", "weight_scale", "weight_scale_2"):
        old = tensors[f"{expert}.{suffix}"]
        # More rows than the expert has: repeat its bytes.
        repeats, rest = divmod(rows, old.shape[0]) if old.shape else (1, 0)
        content = b"".join(old.data())
        content = content * repeats + content[: len(content) * rest // (old.shape[0] if old.shape else 1)]
        shape = (rows, *old.shape[1:]) if old.shape else ()
        new.append(type(old)(f"{module}.{suffix}", old.dtype, shape, lambda c=content: [c]))
    other = shard_of(source, f"{module}.weight_scale_inv")
    for path in {shard, other}:
        kept = [t for t in read_shard(path) if t.name.rpartition(".")[0] != module]
        write_shard(path, kept + new if path == shard else kept)

    def fix(index):
        del index["weight_map"][f"{module}.weight_scale_inv"]
        index["weight_map"] |= {t.name: shard.name for t in new}

    edit_json(source / "model.safetensors.index.json", fix)
    for weights in ("native", "bf16"):
        assert run(source, tmp_path / weights, "--weights", weights, "--verify") == 0
        assert differences(tmp_path / weights, Oracle(source, weights)) == []


def test_router_in_bf16_is_widened(tmp_path):
    from convert_cases import edit_tensors

    source = copy_golden("m3-bf16-tiny", tmp_path / "source")
    name = "language_model.model.layers.1.block_sparse_moe.gate.weight"
    wide = np.frombuffer(golden_tensors(source)[name][2], np.float32)
    narrow = bf16_bits(wide)
    edit_tensors(source, name, lambda t: type(t)(t.name, "BF16", t.shape, lambda: [narrow.tobytes()]))
    assert run(source, tmp_path / "out", "--verify") == 0
    stored = load_arrays(tmp_path / "out")["target/layers/1/moe/router/weight"]
    assert stored.dtype == np.float32
    assert (stored.ravel().view(np.uint32) == narrow.astype(np.uint32) << 16).all()


@pytest.mark.parametrize("weights", ["native", "bf16"])
def test_tensors_at_odd_offsets(weights, tmp_path):
    from checkpoint_maker import read_shard, write_shard

    source = copy_golden("m31-flash-tiny", tmp_path / "source")
    for shard in source.rglob("*.safetensors"):
        write_shard(shard, read_shard(shard), odd=True)
    assert run(source, tmp_path / "out", "--verify", "--weights", weights) == 0
    assert differences(tmp_path / "out", Oracle(DATA / "m31-flash-tiny", weights)) == []


# --- the comparison above must fail for these -------------------------------------------------------------------------


def _divide_and_multiply_swapped(monkeypatch):
    right = formats.dequantize_nvfp4
    monkeypatch.setattr(formats, "dequantize_nvfp4", lambda c, s, g, divide, out: right(c, s, g, not divide, out))


def _nibbles_swapped(monkeypatch):
    right = formats.dequantize_nvfp4
    swap = lambda c: (c << 4) | (c >> 4)  # noqa: E731
    monkeypatch.setattr(formats, "dequantize_nvfp4", lambda c, s, g, divide, out: right(swap(c), s, g, divide, out))


def _exponent_bias_126(monkeypatch):
    right = formats.exponents
    monkeypatch.setattr(formats, "exponents", lambda s: right(s) * np.float32(2))


def _byte_zero_is_zero(monkeypatch):
    right = formats.exponents
    monkeypatch.setattr(formats, "exponents", lambda s: np.where(s == 0, np.float32(0), right(s)))


def _w1_and_w3_swapped(monkeypatch):
    right = names.place

    def wrong(name, part):
        return right(re.sub(r"\.w([13])\.", lambda m: f".w{4 - int(m[1])}.", name), part)

    monkeypatch.setattr(names, "place", wrong)


def _rounded_toward_zero(monkeypatch):
    class Truncate:
        def __call__(self, codes, scale, global_scale, divide, out):
            wide = np.empty(out.shape, np.float32)
            values = formats.E2M1[np.stack([codes & 15, codes >> 4], -1)].reshape(*out.shape[:-1], -1, 16)
            wide[...] = (values * scale.astype(np.float32)[..., None]).reshape(out.shape)
            wide = wide / global_scale if divide else wide * global_scale
            out[...] = (wide.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(out.dtype)

    monkeypatch.setattr(formats, "dequantize_nvfp4", Truncate())


@pytest.mark.parametrize(
    ("mutant", "name", "weights"),
    [
        (_divide_and_multiply_swapped, "m31-flash-tiny", "bf16"),
        (_nibbles_swapped, "m3-nvfp4-modelopt-tiny", "bf16"),
        (_rounded_toward_zero, "m31-flash-tiny", "bf16"),
        (_exponent_bias_126, "m3-mxfp8-tiny", "bf16"),
        (_w1_and_w3_swapped, "m3-mxfp8-tiny", "native"),
    ],
    ids=lambda x: x.__name__.strip("_") if callable(x) else x,
)
def test_mutants_are_caught(mutant, name, weights, tmp_path, monkeypatch):
    mutant(monkeypatch)
    assert run(DATA / name, tmp_path / "out", "--weights", weights) == 0
    assert differences(tmp_path / "out", Oracle(DATA / name, weights)) != []


def test_smallest_scale_is_subnormal(monkeypatch):
    """Byte 0 is 2^-127, which float32 only has as a subnormal number; every other byte is a power of two."""
    bytes_ = np.arange(255, dtype=np.uint8)
    assert (formats.exponents(bytes_) == 2.0 ** (bytes_.astype(np.float64) - 127)).all()
    _byte_zero_is_zero(monkeypatch)
    assert formats.exponents(bytes_)[0] != 2.0**-127
