"""The command line: help, dry runs of the full-size inventories, hub repositories, progress, verification."""

import collections
import fcntl
import fnmatch
import hashlib
import importlib.util
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import huggingface_hub
import pytest
from checkpoint_maker import DATA
from convert_cases import digests, fails, run

EXPAND = DATA / "inventory" / "expand.py"
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu"}


def test_help_imports_no_jax():
    code = (
        "import runpy, sys; sys.argv = ['minimax', '--help']\n"
        "try: runpy.run_module('convert.minimax', run_name='__main__')\n"
        "except SystemExit as e: assert e.code == 0\n"
        "print(sorted({'jax', 'flax', 'orbax', 'tensorstore'} & {m.split('.')[0] for m in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert done.stdout.splitlines()[-1] == "[]"
    for word in ("SRC", "DST", "--weights", "--dry-run", "--resume", "--verify", "--max-memory", "--ignore-config-key"):
        assert word in done.stdout


# --- dry runs ---------------------------------------------------------------------------------------------------------

TENSORS = {"m3-mxfp8": 45_838, "m31-flash": 89_632}
DRAFTER_TENSORS = {"m3-mxfp8": 0, "m31-flash": 97}
DRY_SECONDS, DRY_BYTES = 30, 1 << 30


def expanded(rules: str) -> list[tuple[str, str, list[int]]]:
    """Every tensor of an inventory, from the script beside it, its drafter included."""
    spec = importlib.util.spec_from_file_location("expand", EXPAND)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    content = json.loads((EXPAND.parent / f"{rules}.json").read_text())
    tensors = list(module.expand(content["rules"], content["formats"]))
    for other in content.get("subfolders", {}).values():
        tensors += expanded(other.removesuffix(".json"))
    return tensors


def expected_table(tensors: list[tuple[str, str, list[int]]]) -> dict[str, tuple[int, int]]:
    """Format -> tensors and bytes that a native conversion writes."""
    sizes = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}
    table: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    nvfp4 = {n.rpartition(".")[0] for n, _, _ in tensors if n.endswith(".weight_packed")}
    mxfp8 = {n.rpartition(".")[0] for n, _, _ in tensors if n.endswith(".weight_scale_inv")}
    for name, dtype, shape in tensors:
        if name.startswith(("vision_tower", "multi_modal", "patch_merge")) or name.endswith("input_global_scale"):
            continue
        module = name.rpartition(".")[0]
        kind = "nvfp4" if module in nvfp4 else "mxfp8" if module in mxfp8 else {"BF16": "bf16", "F32": "f32"}[dtype]
        size = sizes[dtype]
        for n in shape:
            size *= n
        table[kind][0] += 1
        table[kind][1] += size
    return {k: (c, b) for k, (c, b) in table.items()}


@pytest.mark.parametrize("rules", ["m3-mxfp8", "m31-flash"])
def test_dry_run_of_the_full_size(rules, tmp_path):
    source = tmp_path / "source"
    command = [sys.executable, EXPAND, EXPAND.parent / f"{rules}.json", "--sparse-checkpoint", source]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    with open(tmp_path / "stdout", "w") as out:
        command = [sys.executable, "-m", "convert.minimax", str(source), str(tmp_path / "out"), "--dry-run"]
        start = time.monotonic()
        child = subprocess.Popen(command, stdout=out, env=ENVIRONMENT)
        peak = 0
        while child.poll() is None:
            status = Path(f"/proc/{child.pid}/status").read_text()
            peak = max([peak, *(int(kib) * 1024 for kib in re.findall(r"VmHWM:\s+(\d+)", status))])
            time.sleep(0.01)
    assert child.returncode == 0
    assert time.monotonic() - start < DRY_SECONDS
    assert 0 < peak < DRY_BYTES
    text = (tmp_path / "stdout").read_text()
    tensors = expanded(rules)
    assert len(tensors) == TENSORS[rules] + DRAFTER_TENSORS[rules]
    assert f"source: {len(tensors):,} tensors" in text
    table = expected_table(tensors)
    assert text.count("skipped: ") == (4 if rules == "m31-flash" else 3)
    for name, (count, size) in table.items():
        assert re.search(rf"^{name} +{count:,} +[\d,]+ +{size:,}$", text, re.MULTILINE), name
    total = sum(c for c, _ in table.values()), sum(b for _, b in table.values())
    assert re.search(rf"^total +{total[0]:,} +[\d,]+ +{total[1]:,}$", text, re.MULTILINE)
    assert "skipped: 515 tensors" in text and "expected peak" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "stdout"]


def test_dry_run_reports_errors_and_writes_nothing(tmp_path, capsys):
    assert "no such folder" in fails(capsys, tmp_path / "nothing", tmp_path / "out", "--dry-run")
    assert run(DATA / "m3-mxfp8-tiny", tmp_path / "out", "--dry-run", "--weights", "bf16") == 0
    assert "mxfp8 -> bf16" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


# --- hub --------------------------------------------------------------------------------------------------------------


def cached(golden: Path, cache: Path, repo: str, patterns: list[str] | None = None) -> Path:
    """The hub client's cache of a repository: snapshots of symbolic links to blobs."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / "0123abc"
    (folder / "blobs").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0123abc")
    for file in sorted(golden.rglob("*")):
        relative = file.relative_to(golden)
        if file.is_file() and (patterns is None or any(fnmatch.fnmatch(str(relative), p) for p in patterns)):
            content = file.read_bytes()
            blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
            blob.write_bytes(content)
            link = snapshot / relative
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def test_hub_repository(tmp_path, monkeypatch):
    calls = []

    def snapshot_download(repo_id, *, revision, allow_patterns, local_files_only):
        calls.append((repo_id, revision, local_files_only))
        return str(cached(DATA / "m31-flash-tiny", tmp_path / "cache", repo_id, allow_patterns))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert run("org/model@v1", tmp_path / "hub", "--verify") == 0
    assert calls == [("org/model", "v1", False)]
    assert run(DATA / "m31-flash-tiny", tmp_path / "local") == 0
    hub, local = digests(tmp_path / "hub"), digests(tmp_path / "local")
    assert {k for k in hub if hub[k] != local.get(k)} == {"layout.json"}
    assert json.loads((tmp_path / "hub/layout.json").read_text())["source"]["name"] == "org/model@v1"
    fetched = {str(p.relative_to(tmp_path)) for p in (tmp_path / "cache").rglob("*.npz")}
    assert not fetched, "only what a conversion needs is downloaded"


def test_dry_run_of_a_hub_repository_downloads_nothing(tmp_path, monkeypatch, capsys):
    """With the real client: the cache is read, and without it the error says so."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    real = huggingface_hub.snapshot_download

    def here(*args, **kwargs):
        return real(*args, cache_dir=tmp_path / "cache", **kwargs)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", here)
    err = fails(capsys, "org/model", tmp_path / "out", "--dry-run")
    assert "org/model" in err and "without --dry-run" in err
    cached(DATA / "m3-mxfp8-tiny", tmp_path / "cache", "org/model")
    assert run("org/model", tmp_path / "out", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "source: 270 tensors" in out and re.search(r"^\d+ arrays in 1 batch$", out, re.MULTILINE)


def test_hub_error_is_one_sentence(tmp_path, monkeypatch, capsys):
    def refuse(repo_id, **_):
        raise OSError("401 Client Error.\n\nRepository Not Found for url")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    err = fails(capsys, "org/model", tmp_path / "out")
    assert "no such folder here" in err and "401" in err


# --- progress ---------------------------------------------------------------------------------------------------------


def test_quiet_without_a_terminal(tmp_path):
    command = [sys.executable, "-m", "convert.minimax", str(DATA / "m3-mxfp8-tiny"), str(tmp_path / "out"), "--verify"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert done.stderr == ""
    assert "done: " in done.stdout and "peak anonymous memory" in done.stdout


def test_bar_on_a_terminal(tmp_path):
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    command = [sys.executable, "-m", "convert.minimax", str(DATA / "m3-mxfp8-tiny"), str(tmp_path / "out")]
    child = subprocess.Popen(command, stderr=side, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    os.close(side)
    shown = b""
    while True:
        try:
            piece = os.read(main, 4096)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        shown += piece
    os.close(main)
    assert child.wait() == 0
    text = shown.decode()
    assert "convert: 100%" in text and "243/243 tensors" in text and "GiB" in text and "B/s" in text
    assert "<" in text, "time left"


# --- verification -----------------------------------------------------------------------------------------------------


def test_verify_finds_one_changed_byte(tmp_path, capsys):
    source, out = DATA / "m3-mxfp8-tiny", tmp_path / "out"
    assert run(source, out) == 0
    assert run(source, out, "--verify") == 0
    biggest = max((out / "arrays").rglob("d/*"), key=lambda p: p.stat().st_size)
    content = bytearray(biggest.read_bytes())
    content[len(content) // 2] ^= 1
    biggest.write_bytes(content)
    capsys.readouterr()
    assert run(source, out, "--verify") == 1
    assert re.search(r"differs from the source|cannot be read", capsys.readouterr().err)
    os.truncate(biggest, 100)
    assert run(source, out, "--verify") == 1
    err = capsys.readouterr().err
    assert "cannot be read" in err and err.count("\n") == 1


def test_verify_refuses_another_source_and_other_weights(tmp_path, capsys):
    out = tmp_path / "out"
    assert run(DATA / "m3-mxfp8-tiny", out) == 0
    assert run(DATA / "m3-nvfp4-modelopt-tiny", out, "--verify") == 1
    assert "another source" in capsys.readouterr().err
    assert run(DATA / "m3-mxfp8-tiny", out, "--verify", "--weights", "bf16") == 1
    assert "--weights native" in capsys.readouterr().err
    (out / "config.json").write_text("{}")
    assert run(DATA / "m3-mxfp8-tiny", out, "--verify") == 1
    assert "config.json differs" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["other operation", "dropped entry", "parts", "extra config"])
def test_verify_reads_the_description_too(tmp_path, capsys, damage):
    """The loader computes what layout.json says, so a wrong one is a wrong result whatever the arrays hold."""
    out = tmp_path / "out"
    assert run(DATA / "m3-nvfp4-modelopt-tiny", out) == 0
    layout = json.loads((out / "layout.json").read_text())
    path = "target/layers/1/moe/experts/gate_proj/weight"
    if damage == "other operation":
        layout["arrays"][path]["global_scale"] = "divide"
    elif damage == "dropped entry":
        del layout["arrays"][path]
    elif damage == "parts":
        layout["arrays"][path]["parts"] = 10**9
    else:
        (out / "generation_config.json").write_text('{"eos_token_id": 3}')
    (out / "layout.json").write_text(json.dumps(layout))
    assert run(DATA / "m3-nvfp4-modelopt-tiny", out, "--verify") == 1
    assert ("generation_config.json" if damage == "extra config" else path) in capsys.readouterr().err
