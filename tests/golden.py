"""Golden checkpoints: reading them, running the target on them, and the comparison that right and wrong ones face."""

import dataclasses
import functools
import json
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from convert.conversion import Options, convert
from dspark_jax.checkpoint import load
from dspark_jax.config import TargetConfig
from dspark_jax.formats import MXFP8Array, NVFP4Array
from dspark_jax.target import MiniMaxTarget, TargetOutput

DATA = Path(__file__).parent / "data"
CHECKPOINTS = ("m3-mxfp8-tiny", "m31-flash-tiny", "m3-nvfp4-modelopt-tiny", "m3-bf16-tiny")
PROMPTS = (0, 1, 2)
NEW_TOKENS = 24

# Largest absolute difference from expected.npz in float32 (data/README.md, "Tolerances"). The expected values are
# themselves float32: an independent float64 forward is up to 5.4e-5 (logits), 1.2e-4 (residual), 2.2e-5 (final),
# 2.1e-6 (weights) away from them. The nearest wrong implementation moves a logit by 0.175 (data/mutants.md).
TOLERANCE = dict(logits=5e-4, residual=1e-3, final=2e-4, expert_weights=2e-5, blocks=0, experts=0)

_DTYPES = dict(BF16=ml_dtypes.bfloat16, F32=np.float32, U8=np.uint8, F8_E4M3=ml_dtypes.float8_e4m3fn)


@functools.cache
def expected(name: str) -> Mapping[str, np.ndarray]:
    with np.load(DATA / name / "expected.npz") as file:
        return dict(file)


def prompt(name: str, i: int) -> np.ndarray:
    return expected(name)[f"p{i}_ids"].astype(np.int32)


@functools.cache
def tensors(name: str) -> Mapping[str, np.ndarray]:
    """Every tensor of the checkpoint, read without the library."""
    found = {}
    for shard in sorted((DATA / name).glob("*.safetensors")):
        data = shard.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        for key, entry in json.loads(data[8 : 8 + size]).items():
            if key != "__metadata__":
                start, end = entry["data_offsets"]
                raw = data[8 + size + start : 8 + size + end]
                found[key] = np.frombuffer(raw, _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


def hf_config(name: str) -> dict:
    return json.loads((DATA / name / "config.json").read_text())


def weight(name: str, key: str) -> np.ndarray | MXFP8Array | NVFP4Array:
    """The linear `key` in the format that its suffixes say."""
    t = tensors(name)
    if f"{key}.weight_packed" in t:
        return NVFP4Array(
            codes=t[f"{key}.weight_packed"],
            scale=t[f"{key}.weight_scale"],
            global_scale=t[f"{key}.weight_global_scale"].reshape(()),
            global_scale_op="divide",
        )
    if f"{key}.weight_scale_2" in t:
        return NVFP4Array(
            codes=t[f"{key}.weight"],
            scale=t[f"{key}.weight_scale"],
            global_scale=t[f"{key}.weight_scale_2"],
            global_scale_op="multiply",
        )
    if f"{key}.weight_scale_inv" in t:
        return MXFP8Array(codes=t[f"{key}.weight"], scale=t[f"{key}.weight_scale_inv"])
    return t[f"{key}.weight"]


EXPERT_NAMES = dict(gate_proj="w1", up_proj="w3", down_proj="w2")


@functools.cache
def _converted() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="golden-")


@functools.cache
def converted(name: str) -> Path:
    """The golden checkpoint as the converter writes it; made once a run."""
    folder = Path(_converted().name) / name
    convert(str(DATA / name), folder, Options())
    return folder


@functools.cache
def model(name: str) -> MiniMaxTarget:
    """The golden checkpoint, converted and loaded, with float32 activations. It is shared: write to a `copy`."""
    return load(converted(name), compute_dtype=jnp.float32).target


def model_without_converter(name: str) -> MiniMaxTarget:
    """The same model with every weight put in its place here, by name: what converter and loader must arrive at."""
    config = TargetConfig.from_hf(hf_config(name))
    result = MiniMaxTarget(config, compute_dtype=jnp.float32)
    t, root = tensors(name), "language_model."

    def put(parameter, value) -> None:
        parameter.set_value(jax.tree.map(jnp.asarray, value))

    put(result.embed_tokens.weight, t[f"{root}model.embed_tokens.weight"])
    put(result.lm_head.weight, t[f"{root}lm_head.weight"])
    put(result.norm.weight, t[f"{root}model.norm.weight"])
    for i, layer in enumerate(result.layers):
        here = f"{root}model.layers.{i}."
        put(layer.input_norm.weight, t[f"{here}input_layernorm.weight"])
        put(layer.post_attention_norm.weight, t[f"{here}post_attention_layernorm.weight"])
        attention = layer.attention
        for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            put(getattr(attention, part).weight, weight(name, f"{here}self_attn.{part}"))
        if attention.indexer is not None:
            for part in ("q_proj", "k_proj", "q_norm", "k_norm"):
                put(getattr(attention.indexer, part).weight, weight(name, f"{here}self_attn.index_{part}"))
        if not layer.is_moe:
            for part in EXPERT_NAMES:
                put(getattr(layer.mlp, part).weight, weight(name, f"{here}mlp.{part}"))
            continue
        sparse = f"{here}block_sparse_moe."
        put(layer.moe.router.weight, t[f"{sparse}gate.weight"])
        put(layer.moe.router.bias, t[f"{sparse}e_score_correction_bias"])
        for part, theirs in EXPERT_NAMES.items():
            put(getattr(layer.moe.shared_expert, part).weight, weight(name, f"{sparse}shared_experts.{part}"))
            experts = [weight(name, f"{sparse}experts.{e}.{theirs}") for e in range(config.num_experts)]
            put(getattr(layer.moe.experts, part).weight, jax.tree.map(lambda *leaves: np.stack(leaves), *experts))
    return result


def copy(module: MiniMaxTarget, **attributes) -> MiniMaxTarget:
    """A copy that shares the arrays, with some attributes replaced; modules and parameters in it may be written to."""
    result = jax.tree.map(lambda leaf: leaf, module)
    for key, value in attributes.items():
        setattr(result, key, value)
    return result


def padded(rows: Sequence[np.ndarray], tokens: int, starts: Sequence[int] | None = None) -> tuple[jax.Array, jax.Array]:
    """Rows of different lengths, right-padded -> tokens, positions [B, T]; each row starts at its `starts` (0)."""
    ids = np.zeros((len(rows), tokens), np.int32)
    positions = np.full((len(rows), tokens), -1, np.int32)
    for b, row in enumerate(rows):
        start = 0 if starts is None else starts[b]
        ids[b, : len(row)] = row
        positions[b, : len(row)] = np.arange(start, start + len(row))
    return jnp.asarray(ids), jnp.asarray(positions)


@functools.partial(jax.jit, static_argnames=("capture", "logits"))
def forward(m: MiniMaxTarget, tokens, positions, cache, *, capture=(), logits="all") -> TargetOutput:
    return m(tokens, positions, cache, capture=capture, logits=logits)


def run(m: MiniMaxTarget, rows: Sequence[np.ndarray], *, jit: bool = True) -> TargetOutput:
    """Prompts in one piece and one right-padded batch, with every layer captured."""
    tokens, positions = padded(rows, max(map(len, rows)))
    call = forward if jit else MiniMaxTarget.__call__
    return call(m, tokens, positions, m.make_cache(*tokens.shape), capture=tuple(range(m.config.num_layers)))


@functools.cache
def right(name: str, i: int) -> TargetOutput:
    """What the library computes for prompt `i`, under jit."""
    return run(model(name), [prompt(name, i)])


def row(tree, b: int):
    """Row `b` of every array in a tree, as a batch of one."""
    return jax.tree.map(lambda a: a[b : b + 1], tree)


def errors(out: TargetOutput, name: str, i: int, *, row: int = 0) -> dict[str, float]:
    """Distance of one row of an output from expected.npz, by the keys of `TOLERANCE`.

    Floats: largest absolute difference (infinite where one is not finite). Blocks and experts: how many sets differ.
    """
    e, found = expected(name), {}
    length = len(e[f"p{i}_ids"])

    def worst(ours, theirs) -> float:
        difference = np.abs(np.asarray(ours, np.float64) - theirs)
        return float(np.where(np.isfinite(difference), difference, np.inf).max())

    if out.logits is not None:
        found["logits"] = worst(out.logits[row, :length], e[f"p{i}_logits"])
    if out.features:
        found["residual"] = worst(np.stack([f[row, :length] for f in out.features]), e[f"p{i}_resid"])
    found["final"] = worst(out.hidden[row, :length], e[f"p{i}_final"])
    chosen = [
        np.asarray(out.records[layer].blocks) for layer in e["sparse_layers"] if out.records[layer].blocks is not None
    ]
    # Chosen blocks are compared as sets: ascending, unused ones (-1) behind.
    blocks = np.stack([c[row, :length].transpose(1, 0, 2) for c in chosen]) if chosen else np.empty((0, 0, 0, 0), int)
    last = np.iinfo(np.int32).max
    ordered = np.sort(np.where(blocks < 0, last, blocks), axis=-1)
    ordered = np.where(ordered == last, -1, ordered)
    theirs = e[f"p{i}_blocks"]
    same = ordered.shape == theirs.shape
    found["blocks"] = int((ordered != theirs).any(-1).sum()) if same else theirs[..., 0].size
    experts = np.stack([np.asarray(out.records[layer].experts)[row, :length] for layer in e["moe_layers"]])
    weights = np.stack([np.asarray(out.records[layer].expert_weights)[row, :length] for layer in e["moe_layers"]])
    order = np.argsort(experts, axis=-1)
    found["experts"] = int((np.take_along_axis(experts, order, -1) != e[f"p{i}_experts"]).any(-1).sum())
    found["expert_weights"] = worst(np.take_along_axis(weights, order, -1), e[f"p{i}_expert_weights"])
    return found


def failures(found: Mapping[str, float]) -> dict[str, float]:
    """The part of `errors` that is out of tolerance: empty for a right implementation."""
    return {key: value for key, value in found.items() if not value <= TOLERANCE[key]}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One number of a table in data/mutants.md: largest logit difference and share of changed top-1 tokens."""

    section: str
    row: str
    checkpoint: str
    difference: float


@functools.cache
def mutant_cells() -> tuple[Cell, ...]:
    """Every number of the tables of data/mutants.md, `-` left out."""
    cells, section, columns = [], "", []
    for line in (DATA / "mutants.md").read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        if not line.startswith("|") or line.startswith("|---"):
            continue
        first, *rest = (part.strip().strip("*") for part in line.strip("|").split("|"))
        if rest[0] in CHECKPOINTS:
            columns = rest
            continue
        for checkpoint, text in zip(columns, rest, strict=True):
            if text != "-":
                number = text.split("(")[0].strip()
                cells.append(Cell(section, first, checkpoint, np.inf if "inf" in number else float(number)))
    return tuple(cells)
