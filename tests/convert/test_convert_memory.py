"""Memory: a conversion stays under --max-memory, measured from outside as the process's anonymous memory."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoint_maker import minimax_config, minimax_tensors, write_checkpoint
from convert_cases import digests, fails, load_arrays, run

from convert import conversion
from convert.plan import RESERVED
from convert.sizes import MIB, format_bytes, parse_bytes


def peak_of(source: Path, out: Path, *options: str) -> int:
    """Largest RssAnon of a conversion, sampled from /proc."""
    command = [sys.executable, "-m", "convert.minimax", str(source), str(out), *options]
    child = subprocess.Popen(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, stdout=subprocess.DEVNULL)
    peak = 0
    while child.poll() is None:
        try:
            lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
        except OSError:
            break
        peak = max([peak, *(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))])
        time.sleep(0.003)
    assert child.wait() == 0
    return peak


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """One layer whose stacks of experts have 104 MB each."""
    config = minimax_config(layers=1, hidden=1024, experts=48, inner=2048, vocab=512)
    folder = tmp_path_factory.mktemp("memory") / "source"
    write_checkpoint(folder, config, list(minimax_tensors(config)), shards=2)
    return folder


def test_stacks_are_split_to_fit(source, tmp_path):
    limit = RESERVED + 48 * MIB
    assert peak_of(source, tmp_path / "split", "--max-memory", str(limit)) < limit
    layout = json.loads((tmp_path / "split" / "layout.json").read_text())
    stacks = {p: e["parts"] for p, e in layout["arrays"].items() if "/experts/" in p}
    assert set(stacks.values()) == {3}
    # The mutant: without the split, the same measurement is over the limit.
    assert peak_of(source, tmp_path / "whole") > limit
    parts, one = load_arrays(tmp_path / "split"), load_arrays(tmp_path / "whole")
    for path, count in stacks.items():
        for name in ("codes", "scale"):
            pieces = [parts.pop(f"{path}/part_{i:03d}/{name}") for i in range(count)]
            joined = np.concatenate([p.view(np.uint8) for p in pieces])
            assert (joined == one.pop(f"{path}/{name}").view(np.uint8)).all()
    assert parts.keys() == one.keys()
    assert all(parts[p].tobytes() == one[p].tobytes() for p in one)


def test_dequantised_stacks_are_split_too(source, tmp_path):
    limit = RESERVED + 64 * MIB
    assert peak_of(source, tmp_path / "out", "--max-memory", str(limit), "--weights", "bf16") < limit
    layout = json.loads((tmp_path / "out" / "layout.json").read_text())
    assert {e["parts"] for p, e in layout["arrays"].items() if "/experts/" in p} == {4}


def test_too_little_says_what_is_needed(source, tmp_path, capsys):
    err = fails(capsys, source, tmp_path / "out", "--max-memory", "100MiB")
    needed = err.rpartition("--max-memory ")[2].strip()
    # What it asks for is enough, and one MiB less is not.
    conversion.make_plan(str(source), conversion.Options(max_memory=parse_bytes(needed)))
    with pytest.raises(conversion.ConversionError, match="pass at least"):
        conversion.make_plan(str(source), conversion.Options(max_memory=parse_bytes(needed) - 2 * MIB))


@pytest.mark.parametrize(
    ("text", "value"),
    [("8GiB", 8 << 30), ("8G", 8 * 10**9), ("500 MB", 5 * 10**8), ("1.5GiB", 3 << 29), ("77", 77), ("2k", 2000)],
)
def test_sizes(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "lots", "8XB", "-1", "GiB"])
def test_bad_sizes(text, capsys):
    with pytest.raises(ValueError, match="no size"):
        parse_bytes(text)


def test_shown_sizes_can_be_passed():
    for n in (1, MIB, 3 * MIB + 1, (11 << 30) + 5):
        assert parse_bytes(format_bytes(n, up=True)) >= n


@pytest.mark.slow
def test_big_tables_and_chunks(tmp_path, capsys):
    """Arrays big enough to be chunked: embeddings are written without a copy, stacks with one; the plan knows both."""
    config = minimax_config(layers=1, hidden=2048, experts=64, inner=2560, vocab=98_304)
    source = tmp_path / "source"
    write_checkpoint(source, config, list(minimax_tensors(config)), shards=2)
    plan = conversion.make_plan(str(source), conversion.Options())
    peak = peak_of(source, tmp_path / "out", "--max-memory", str(plan.memory))
    assert peak < plan.memory
    assert peak_of(source, tmp_path / "out", "--verify", "--max-memory", str(plan.verify_memory)) < plan.verify_memory
    small = RESERVED + 96 * MIB
    assert peak_of(source, tmp_path / "small", "--max-memory", str(small)) < small
    assert run(source, tmp_path / "small", "--verify") == 0
    assert digests(tmp_path / "out").keys() != digests(tmp_path / "small").keys()
    capsys.readouterr()
    assert run(source, tmp_path / "small", "--verify", "--max-memory", str(small)) == 1
    assert "--verify needs more" in capsys.readouterr().err
