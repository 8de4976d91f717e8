"""Export: what comes back is the checkpoint that was converted, byte for byte; errors leave nothing behind."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors
from checkpoint_maker import DATA, minimax_config, minimax_tensors, read_shard, write_checkpoint, write_shard
from convert_cases import copy_golden, edit_json, edit_tensors, golden_tensors, run
from test_convert_golden import Oracle, bf16_bits

from convert import export, names, published, safetensors_writer
from convert.conversion import Options, convert
from convert.formats import Format
from convert.geometry import drafter_parameters, target_parameters
from dspark_jax.checkpoint import Layout

BUNDLED = Path(__file__).parents[2] / "dspark_jax" / "assets" / "tiny"
CHECKPOINTS = {
    name: DATA / name
    for name in (
        "m3-mxfp8-tiny",
        "m31-flash-tiny",
        "m3-nvfp4-modelopt-tiny",
        "m3-bf16-tiny",
        "m31-flash-tiny/dspark",
        "deepspec-qwen3-tiny/vanilla",
        "deepspec-qwen3-tiny/gated",
        "deepspec-qwen3-tiny/rnn",
    )
} | {"bundled": BUNDLED}


def export_run(*argv: object) -> int:
    """The command line -> exit status."""
    return export.main([str(a) for a in argv])


def is_used(name: str) -> bool:
    """Whether a text model stores the tensor, by the description of the published checkpoints."""
    parts = name.split(".")
    beside = {"vision_tower", "multi_modal_projector", "patch_merge_mlp", "mtp"}
    return not beside & set(parts) and parts[-1] not in ("input_scale", "input_global_scale")


def differences(source: Path, found: Path) -> list[str]:
    """Tensors whose dtype, shape or bytes are not the source's, that are missing or left over."""
    wrong = []
    for folder in ("", "dspark") if (source / "dspark").is_dir() else ("",):
        a = {n: t for n, t in golden_tensors(source / folder).items() if is_used(n)}
        b = golden_tensors(found / folder)
        wrong += [n for n in sorted(a.keys() | b.keys()) if a.get(n) != b.get(n)]
    return wrong


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Name of a checkpoint -> its native conversion."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("converted") / "ckpt"
            convert(str(CHECKPOINTS[name]), made[name], Options())
        return made[name]

    return get


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_native_conversions_come_back_byte_for_byte(name, converted, tmp_path):
    assert export_run(converted(name), tmp_path / "hf", "--shard-size", "300KB") == 0
    assert differences(CHECKPOINTS[name], tmp_path / "hf") == []
    for folder in ("", "dspark") if (CHECKPOINTS[name] / "dspark").is_dir() else ("",):
        there = {p.name for p in (tmp_path / "hf" / folder).iterdir() if p.suffix != ".safetensors"} - {"dspark"}
        copied = there - {"model.safetensors.index.json"}
        assert "config.json" in copied
        for file in copied:
            assert (tmp_path / "hf" / folder / file).read_bytes() == (CHECKPOINTS[name] / folder / file).read_bytes()
    assert (name == "bundled") == ((tmp_path / "hf" / "tokenizer.json").exists())
    assert (name == "m3-nvfp4-modelopt-tiny") == ((tmp_path / "hf" / "hf_quant_config.json").exists())


@pytest.mark.parametrize("name", ["m31-flash-tiny", "m3-nvfp4-modelopt-tiny"])
@pytest.mark.parametrize("when", ["in the conversion", "in the export"])
def test_bf16_is_what_the_format_says(name, when, tmp_path):
    converts = "bf16" if when == "in the conversion" else "native"
    assert run(DATA / name, tmp_path / "ckpt", "--weights", converts) == 0
    assert export_run(tmp_path / "ckpt", tmp_path / "hf", "--weights", "native" if converts == "bf16" else "bf16") == 0
    oracle = Oracle(DATA / name, "bf16")
    found = golden_tensors(tmp_path / "hf")
    if (tmp_path / "hf" / "dspark").exists():
        found |= golden_tensors(tmp_path / "hf" / "dspark")
    wanted = {n for n in oracle.tensors if is_used(n) and n.endswith((".weight", ".weight_packed", "bias"))}
    assert found.keys() == {n.replace("weight_packed", "weight") for n in wanted}
    for tensor, (dtype, _, content) in found.items():
        module, _, suffix = tensor.rpartition(".")
        assert content == (oracle.one(module)[""] if suffix == "weight" else oracle.tensors[tensor][2]), tensor
        assert dtype == ("F32" if tensor.endswith(("gate.weight", "score_correction_bias")) else "BF16")
    for config in (tmp_path / "hf").rglob("config.json"):
        assert "quantization_config" not in config.read_text()
    assert not (tmp_path / "hf" / "hf_quant_config.json").exists()
    # Mutant: the nibbles of a code swapped in the oracle.
    packed = next(n for n in oracle.tensors if n.endswith(("weight_packed", "experts.0.w1.weight")))
    kind, shape, content = oracle.tensors[packed]
    swapped = np.frombuffer(content, np.uint8)
    oracle.tensors[packed] = (kind, shape, (swapped << 4 | swapped >> 4).tobytes())
    module = packed.rpartition(".")[0]
    assert oracle.one(module)[""] != found[f"{module}.weight"][2]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_written_names_are_read_as_the_same_parameter(name, converted):
    layout = Layout.read(converted(name))
    parameters = target_parameters(layout.target) if layout.target else {}
    parameters |= drafter_parameters(layout.drafter) if layout.drafter else {}
    source = golden_tensors(CHECKPOINTS[name]) | (
        golden_tensors(CHECKPOINTS[name] / "dspark") if (CHECKPOINTS[name] / "dspark").is_dir() else {}
    )
    for path, parameter in parameters.items():
        expert = 1 if len(parameter.shape) == 3 else None
        written = names.published(path, expert=expert)
        placed = names.place(written, path.split("/")[0])
        assert placed == names.Placed(*path.rsplit("/", 1), expert)
        if "deepspec" not in name:
            assert written in source or written.replace("weight", "weight_packed") in source
    for path in ("target/other/weight", "target/layers/0/moe/experts/up_proj/weight", "target/norm/scale"):
        with pytest.raises(ValueError, match="has no name"):
            names.published(path)


def test_spellings_of_the_source_come_back(tmp_path):
    source = copy_golden("m3-mxfp8-tiny", tmp_path / "source")
    narrow = "language_model.model.layers.1.block_sparse_moe.gate.weight"
    bits = bf16_bits(np.frombuffer(golden_tensors(source)[narrow][2], np.float32))
    edit_tensors(source, narrow, lambda t: type(t)(t.name, "BF16", t.shape, lambda: [bits.tobytes()]))
    scale = "language_model.model.layers.1.self_attn.q_proj.weight_scale_inv"
    edit_tensors(source, scale, lambda t: type(t)(t.name, "F8_E8M0", t.shape, t.data))
    for shard in source.glob("*.safetensors"):
        shorter = [type(t)(t.name.replace("language_model.", ""), t.dtype, t.shape, t.data) for t in read_shard(shard)]
        write_shard(shard, shorter)
    edit_json(
        source / "model.safetensors.index.json",
        lambda i: i.update(weight_map={k.replace("language_model.", ""): v for k, v in i["weight_map"].items()}),
    )
    assert run(source, tmp_path / "ckpt", "--verify") == 0
    assert export_run(tmp_path / "ckpt", tmp_path / "hf") == 0
    assert differences(source, tmp_path / "hf") == []
    layout = json.loads((tmp_path / "ckpt" / "layout.json").read_text())["arrays"]
    for path, key in (
        ("attention/q_proj", "scale_dtype"),
        ("moe/router", "source_format"),
        ("attention/q_proj", "source"),
    ):
        damaged = tmp_path / f"without {key}"
        damaged.mkdir()
        for entry in (tmp_path / "ckpt").iterdir():
            (damaged / entry.name).symlink_to(entry)
        (damaged / "layout.json").unlink()
        content = json.loads((tmp_path / "ckpt" / "layout.json").read_text())
        del content["arrays"][f"target/layers/1/{path}/weight"][key]
        (damaged / "layout.json").write_text(json.dumps(content))
        assert export_run(damaged, tmp_path / f"hf without {key}") == 0
        assert differences(source, tmp_path / f"hf without {key}") != [], key
    assert layout["target/layers/1/moe/router/weight"]["source_format"] == "bf16"


# --- mutants: the comparison above must fail for them -----------------------------------------------------------------


def _gate_and_up_swapped(monkeypatch):
    right = published.tensors
    swap = {"gate_proj": "up_proj", "up_proj": "gate_proj"}

    def wrong(path, shape, stored, *, bf16=False, entry=None):
        if "/experts/" in path and "down" not in path:
            name = path.split("/")[-2]
            path, entry = path.replace(name, swap[name]), None
        return right(path, shape, stored, bf16=bf16, entry=entry)

    monkeypatch.setattr(export, "tensors", wrong)


def _experts_reversed(monkeypatch):
    right = published.Tensor.value
    monkeypatch.setattr(
        published.Tensor,
        "value",
        lambda t, arrays, *, start=0: right(
            t, {k: a[::-1] if t.expert is not None else a for k, a in arrays.items()}, start=start
        ),
    )


def _offsets_in_plan_order(monkeypatch):
    monkeypatch.setattr(
        safetensors_writer, "sorted", lambda x, key=None: sorted(x, key=lambda t: t.name), raising=False
    )
    right = safetensors_writer._write_shard
    monkeypatch.setattr(
        safetensors_writer, "_write_shard", lambda path, shard, values: right(path, list(shard)[::-1], values)
    )


def _global_scale_inverted(monkeypatch):
    right = export.read_arrays
    monkeypatch.setattr(
        export,
        "read_arrays",
        lambda *a: {k: 1 / v if k.endswith("global_scale") else v for k, v in right(*a).items()},
    )


@pytest.mark.parametrize(
    "mutant", [_gate_and_up_swapped, _experts_reversed, _offsets_in_plan_order, _global_scale_inverted]
)
def test_mutants_are_caught(mutant, converted, tmp_path, monkeypatch):
    mutant(monkeypatch)
    try:
        assert export_run(converted("m31-flash-tiny"), tmp_path / "hf") == 0
    except ValueError:
        return
    assert differences(CHECKPOINTS["m31-flash-tiny"], tmp_path / "hf") != []


# --- shards -----------------------------------------------------------------------------------------------------------


def test_shards_are_bounded_aligned_and_readable(converted, tmp_path):
    assert export_run(converted("m31-flash-tiny"), tmp_path / "hf", "--shard-size", "200KB") == 0
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    sizes, seen = 0, {}
    shards = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert [s.name for s in shards] == [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
    ]
    for shard in shards:
        with safetensors.safe_open(shard, framework="np") as f:
            names_here = list(f.keys())
        tensors = read_shard(shard)
        assert sorted(names_here) == sorted(t.name for t in tensors)
        total = sum(t.nbytes for t in tensors)
        assert total <= 200_000 or len(tensors) == 1
        sizes += total
        seen |= dict.fromkeys(names_here, shard.name)
        raw = shard.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:start])
        for t in tensors:
            item = {"BF16": 2, "F32": 4}.get(t.dtype, 1)
            assert (start + header[t.name]["data_offsets"][0]) % item == 0
    assert index["weight_map"] == seen and index["metadata"]["total_size"] == sizes
    # The result is a source again, for the same arrays.
    assert run(tmp_path / "hf", tmp_path / "again", "--verify") == 0


def test_values_are_as_many_as_tensors(tmp_path):
    tensors = published.tensors("target/norm/weight", (4,), Format("f32"))
    value = np.arange(4, dtype=np.float32)
    for values in ([], [value, value]):
        with pytest.raises(ValueError, match=r"shorter|more values than the 1 tensors"):
            safetensors_writer.write_shards(tmp_path, tensors, values, shard_bytes=10**6)
    assert safetensors_writer.write_shards(tmp_path, tensors, [value], shard_bytes=10**6) == 1


def test_progress_ends_with_everything(converted, tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(export.Progress, "advance", lambda self, *, tensors, nbytes: done.append((tensors, nbytes)))
    report = export.export(converted("m31-flash-tiny"), tmp_path / "hf", export.Options())
    assert [sum(column) for column in zip(*done, strict=True)] == [report.tensors, report.nbytes]
    assert report.tensors == len(golden_tensors(tmp_path / "hf")) + len(golden_tensors(tmp_path / "hf" / "dspark"))


def test_stacks_in_parts_and_memory(tmp_path, capsys):
    config = minimax_config(layers=1, hidden=1024, experts=24, inner=1024, vocab=512)
    write_checkpoint(tmp_path / "source", config, list(minimax_tensors(config)))
    convert(str(tmp_path / "source"), tmp_path / "ckpt", Options(max_memory=(256 + 20) << 20))
    parts = {e["parts"] for e in json.loads((tmp_path / "ckpt" / "layout.json").read_text())["arrays"].values()}
    assert max(parts) > 1
    assert export_run(tmp_path / "ckpt", tmp_path / "hf", "--max-memory", "600MiB", "--shard-size", "20MB") == 0
    assert differences(tmp_path / "source", tmp_path / "hf") == []
    capsys.readouterr()
    assert export_run(tmp_path / "ckpt", tmp_path / "no", "--max-memory", "300MiB") == 1
    err = capsys.readouterr().err
    assert "pass at least --max-memory" in err and not (tmp_path / "no").exists()
    assert export_run(tmp_path / "ckpt", tmp_path / "yes", "--max-memory", err.split()[-1]) == 0


# --- errors: one sentence, nothing left behind ------------------------------------------------------------------------


def fails(capsys, checkpoint: Path, destination: Path, *argv: object) -> str:
    capsys.readouterr()
    assert export_run(checkpoint, destination, *argv) == 1
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1 and out == "", err
    return err


def damaged(converted, tmp_path: Path) -> Path:
    return Path(shutil.copytree(converted("m31-flash-tiny"), tmp_path / "ckpt"))


def test_folders_that_cannot_be_exported(converted, tmp_path, capsys):
    good = converted("m31-flash-tiny")
    assert "is not a folder" in fails(capsys, tmp_path / "none", tmp_path / "out")
    assert "these are safetensors" in fails(capsys, DATA / "m31-flash-tiny", tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    assert "not empty" in fails(capsys, good, tmp_path / "full")
    (tmp_path / "out.partial").mkdir()
    assert "in the way" in fails(capsys, good, tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"full", "out.partial"}
    (tmp_path / "empty").mkdir()
    assert export_run(good, tmp_path / "empty") == 0


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        ("target/norm/weight", lambda arrays, p: arrays.pop(p), "target/norm/weight is missing"),
        ("target/norm/weight", lambda arrays, p: arrays[p].update(shape=[3]), "has shape [3]"),
        ("target/norm/weight", lambda arrays, p: arrays[p].update(format="f32"), "pass --weights bf16"),
        ("target/norm/weight", lambda arrays, p: arrays[p].update(source="lm_head.weight"), "another parameter"),
        ("target/layers/2/moe/experts/up_proj/weight", lambda arrays, p: arrays[p].update(parts=2), "is missing"),
        ("target/layers/2/moe/experts/up_proj/weight", lambda arrays, p: arrays[p].update(parts=99), "is damaged"),
        ("target/extra/weight", lambda arrays, p: arrays.update({p: arrays["target/norm/weight"]}), "call for no"),
    ],
)
def test_layouts_that_do_not_fit(path, change, words, converted, tmp_path, capsys):
    folder = damaged(converted, tmp_path)
    edit_json(folder / "layout.json", lambda layout: change(layout["arrays"], path))
    assert words in fails(capsys, folder, tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"ckpt"}


def test_damaged_arrays_leave_nothing_behind(converted, tmp_path, capsys):
    folder = damaged(converted, tmp_path)
    data = max((p for p in (folder / "arrays").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    assert "convert again" in fails(capsys, folder, tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"ckpt"}


def test_full_disk_leaves_nothing_behind(converted, tmp_path, capsys, monkeypatch):
    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_writer.os, "fsync", full)
    assert "the disk is full" in fails(capsys, converted("m3-bf16-tiny"), tmp_path / "out")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(export.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 20}))
    assert "free some space" in fails(capsys, converted("m3-bf16-tiny"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_interrupt_leaves_nothing_behind(converted, tmp_path, capsys, monkeypatch):
    right, count = published.Tensor.value, []

    def interrupted(tensor, arrays, *, start=0):
        count.append(tensor)
        if len(count) == 100:
            raise KeyboardInterrupt
        return right(tensor, arrays, start=start)

    monkeypatch.setattr(published.Tensor, "value", interrupted)
    assert export_run(converted("m3-bf16-tiny"), tmp_path / "out") == 130
    assert "nothing was written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_help_imports_no_jax():
    code = (
        "import runpy, sys; sys.argv = ['export', '--help']\n"
        "try: runpy.run_module('convert.export', run_name='__main__')\n"
        "except SystemExit as e: assert e.code == 0\n"
        "print(sorted({'jax', 'flax', 'orbax', 'tensorstore'} & {m.split('.')[0] for m in sys.modules}))"
    )
    environment = os.environ | {"PYTHONPATH": str(BUNDLED.parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines()[-1] == "[]"
    for word in ("CKPT", "DST", "--weights", "--shard-size", "--max-memory"):
        assert word in done.stdout
