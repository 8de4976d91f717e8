"""Checkpoints in the published layout, made of random bytes, for the converter's tests and benchmark.

Written with nothing but json and struct, so that it shares no code with the reader under test.
"""

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parents[1] / "data"
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U8": 1}
_PIECE = 64 << 20


@dataclasses.dataclass
class Tensor:
    """One tensor of a checkpoint; `data` gives its bytes when they are written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], Iterable[bytes]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def write_shard(path: Path, tensors: list[Tensor], *, odd: bool = False) -> None:
    """Write one safetensors file; `odd` makes every tensor start at an odd offset of the file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for t in tensors:
        header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8 + odd)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(raw)) + raw)
        for t in tensors:
            for piece in t.data():
                f.write(piece)


def read_shard(path: Path) -> list[Tensor]:
    """The tensors of a safetensors file, with their bytes in memory."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    body = raw[8 + length :]
    result = []
    for name, e in header.items():
        content = body[e["data_offsets"][0] : e["data_offsets"][1]]
        result.append(Tensor(name, e["dtype"], tuple(e["shape"]), lambda c=content: [c]))
    return result


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: list[Tensor], *, shards: int = 1) -> None:
    """Write config, index and shards; tensors go to shards in order, about equal in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    total, weight_map, done = sum(t.nbytes for t in tensors), {}, 0
    groups: list[list[Tensor]] = [[] for _ in range(shards)]
    for t in tensors:
        groups[min(shards - 1, done * shards // max(1, total))].append(t)
        done += t.nbytes
    for i, group in enumerate(groups):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        write_shard(folder / name, group)
        weight_map |= {t.name: name for t in group}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def minimax_config(
    *, layers: int, hidden: int, experts: int, inner: int, vocab: int = 512, dense_layers: int = 0
) -> dict[str, Any]:
    """A config like the golden one, with other sizes; every layer is sparse."""
    config = json.loads((DATA / "m31-flash-tiny" / "config.json").read_text())
    text = config["text_config"]
    text.update(num_hidden_layers=layers, hidden_size=hidden, num_local_experts=experts, intermediate_size=inner)
    text.update(shared_intermediate_size=inner, dense_intermediate_size=inner, vocab_size=vocab)
    text.update(moe_layer_freq=[0] * dense_layers + [1] * (layers - dense_layers))
    sparse = text["sparse_attention_config"]
    sparse.update(sparse_attention_freq=[1] * layers, sparse_disable_index_value=[1] * layers)
    return config


def minimax_tensors(config: dict[str, Any], *, expert_format: str = "mxfp8", seed: int = 0) -> Iterator[Tensor]:
    """Every tensor that `config` calls for: linears in MXFP8, experts in MXFP8 or NVFP4, all of random bytes."""
    c, rng = config["text_config"], np.random.default_rng(seed)
    h, inner, d = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    sparse = c["sparse_attention_config"]
    index = sparse["sparse_num_index_heads"] * sparse["sparse_index_dim"], sparse["sparse_index_dim"]

    def raw(dtype: str, shape: tuple[int, ...]) -> Iterator[bytes]:
        left = math.prod(shape) * ITEM_BYTES[dtype]
        while left:
            n = min(left, _PIECE)
            words = rng.integers(0, 2**63, -(-n // 8), dtype=np.uint64).view(np.uint8)[:n]
            if dtype == "U8" and shape[-1] < h // 4:
                words = words % 40 + 100
            elif dtype == "F8_E4M3":
                words &= 0x77
            elif dtype in ("BF16", "F32"):
                words[ITEM_BYTES[dtype] - 1 :: ITEM_BYTES[dtype]] = 0x3C
            yield words.tobytes()
            left -= n

    def tensor(name: str, dtype: str, *shape: int) -> Tensor:
        return Tensor(name, dtype, shape, lambda: raw(dtype, shape))

    def mxfp8(name: str, o: int, i: int) -> Iterator[Tensor]:
        yield tensor(f"{name}.weight", "F8_E4M3", o, i)
        yield tensor(f"{name}.weight_scale_inv", "U8", o, i // 32)

    def expert(name: str, o: int, i: int) -> Iterator[Tensor]:
        if expert_format == "mxfp8":
            yield from mxfp8(name, o, i)
            return
        if expert_format == "bf16":
            yield tensor(f"{name}.weight", "BF16", o, i)
            return
        yield tensor(f"{name}.weight_packed", "U8", o, i // 2)
        yield tensor(f"{name}.weight_scale", "F8_E4M3", o, i // 16)
        yield tensor(f"{name}.weight_global_scale", "F32", 1)
        yield tensor(f"{name}.input_global_scale", "F32", 1)

    def norm(name: str, n: int) -> Tensor:
        return tensor(f"{name}.weight", "BF16", n)

    yield tensor("language_model.lm_head.weight", "BF16", c["vocab_size"], h)
    yield tensor("language_model.model.embed_tokens.weight", "BF16", c["vocab_size"], h)
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    for layer in range(c["num_hidden_layers"]):
        p = f"language_model.model.layers.{layer}."
        yield norm(p + "input_layernorm", h)
        yield norm(p + "post_attention_layernorm", h)
        for name, (o, i) in {"q": (q, h), "k": (kv, h), "v": (kv, h), "o": (h, q)}.items():
            yield from mxfp8(f"{p}self_attn.{name}_proj", o, i)
        for name in ("q_norm", "k_norm"):
            yield norm(f"{p}self_attn.{name}", d)
        for name, o in zip(("q", "k"), index, strict=True):
            yield from mxfp8(f"{p}self_attn.index_{name}_proj", o, h)
            yield norm(f"{p}self_attn.index_{name}_norm", index[1])
        if not c["moe_layer_freq"][layer]:
            for name, (o, i) in {"gate": (inner, h), "up": (inner, h), "down": (h, inner)}.items():
                yield from mxfp8(f"{p}mlp.{name}_proj", o, i)
            continue
        m = p + "block_sparse_moe."
        yield tensor(m + "gate.weight", "F32", c["num_local_experts"], h)
        yield tensor(m + "e_score_correction_bias", "F32", c["num_local_experts"])
        for name, (o, i) in {"gate": (inner, h), "up": (inner, h), "down": (h, inner)}.items():
            yield from mxfp8(f"{m}shared_experts.{name}_proj", o, i)
        for e in range(c["num_local_experts"]):
            for name, (o, i) in {"w1": (inner, h), "w2": (h, inner), "w3": (inner, h)}.items():
                yield from expert(f"{m}experts.{e}.{name}", o, i)
    yield norm("language_model.model.norm", h)
