"""Killed conversions: after --resume the result equals that of an uninterrupted one, in every array and file."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint_maker import DATA, minimax_config, minimax_tensors, write_checkpoint
from convert_cases import copy_golden, digests, run

from convert import conversion, destination
from convert.plan import RESERVED, RESERVED_PER_TENSOR
from convert.sizes import MIB

CHILD = Path(__file__).with_name("kill_child.py")
BATCH = 300_000  # golden-sized: six batches


class Killer:
    """Runs conversions that are killed at chosen points, and keeps their log."""

    def __init__(self, source: Path, target: Path, log: Path, **options: object):
        self.source, self.target, self.log, self.options = source, target, log, options

    def run(self, event: str = "never", count: int = 1, delay: float = 0.0) -> None:
        options = json.dumps({**self.options, "resume": True})
        command = [CHILD, self.source, self.target, options, self.log, event, count, delay]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        done = subprocess.run([sys.executable, *map(str, command)], env=environment, capture_output=True, text=True)
        assert done.returncode == (0 if event == "never" else -signal.SIGKILL), done.stderr

    def kills(self) -> list[str]:
        """Where each kill fell: the last thing that the killed process said before."""
        lines = [line.split(" ", 2) for line in self.log.read_text().splitlines()]
        return [before[2] for before, line in itertools.pairwise(lines) if line[2] == "SIGKILL"]

    def finished_batches(self) -> int:
        folder = destination.partial_folder(self.target) / "batches"
        return len([p for p in folder.glob("*") if re.fullmatch(r"\d{4,}", p.name)])


def whole(source: Path, target: Path, **options: object) -> dict[str, str]:
    conversion.convert(str(source), target, conversion.Options(**options))
    return digests(target)


def test_killed_and_resumed(tmp_path):
    source, out = DATA / "m31-flash-tiny", tmp_path / "out"
    killer = Killer(source, out, tmp_path / "log", batch_bytes=BATCH)
    killer.run("save", 3)
    assert not out.exists() and killer.finished_batches() == 2
    killer.run("save", 2, 0.01)
    assert not out.exists() and killer.finished_batches() >= 3
    killer.run("finalize", 1, 0.004)
    assert not out.exists()
    killer.run("clean")
    # Killed between the appearance of DST and the end of the cleaning: DST is whole, DST.partial a leftover.
    assert out.exists() and destination.partial_folder(out).exists()
    killer.run()
    assert not destination.partial_folder(out).exists()
    assert len(killer.kills()) == 4
    assert digests(out) == whole(source, tmp_path / "whole", batch_bytes=BATCH)


def test_resume_writes_only_what_is_missing(tmp_path):
    source, out = DATA / "m3-mxfp8-tiny", tmp_path / "out"
    killer = Killer(source, out, tmp_path / "log", batch_bytes=BATCH)
    killer.run("rename", 3)
    kept = killer.finished_batches()
    killer.run()
    saves = re.findall(r"save (\d+)", (tmp_path / "log").read_text())
    total = len(conversion.make_plan(str(source), conversion.Options(batch_bytes=BATCH)).batches)
    assert total >= 4 and kept >= 1
    assert len(saves) == total + (len(saves) - len(set(saves)))
    assert sorted(set(map(int, saves))) == list(range(total))


def test_unfinished_conversion_needs_resume(tmp_path, capsys):
    source, out = DATA / "m3-mxfp8-tiny", tmp_path / "out"
    Killer(source, out, tmp_path / "log", batch_bytes=BATCH).run("save", 2)
    assert run(source, out) == 1
    err = capsys.readouterr().err
    assert "out.partial" in err and "--resume" in err and not out.exists()


@pytest.mark.parametrize("change", ["source data", "source config", "weights", "plan"])
def test_resume_refuses_another_conversion(change, tmp_path, capsys):
    source = copy_golden("m3-mxfp8-tiny", tmp_path / "source")
    out = tmp_path / "out"
    Killer(source, out, tmp_path / "log", batch_bytes=BATCH).run("save", 2)
    before = sorted(p.name for p in (tmp_path / "out.partial" / "batches").iterdir())
    options: dict[str, object] = {"batch_bytes": BATCH}
    match change:
        case "source data":
            shard = source / "model-00002-of-00003.safetensors"
            content = bytearray(shard.read_bytes())
            content[-1] ^= 1
            shard.write_bytes(content)
        case "source config":
            text = (source / "config.json").read_text()
            (source / "config.json").write_text(text.replace("1.702", "1.703"))
        case "weights":
            options["weights"] = "bf16"
        case "plan":
            options["batch_bytes"] = 2 * BATCH
    with pytest.raises(conversion.ConversionError, match="was begun with another"):
        conversion.convert(str(source), out, conversion.Options(**options, resume=True))
    kept = sorted(p.name for p in (tmp_path / "out.partial" / "batches").iterdir() if p.suffix != ".tmp")
    assert kept == [p for p in before if not p.endswith(".tmp")]
    assert not out.exists()


def test_a_shard_that_changes_between_the_runs(tmp_path, monkeypatch):
    """One byte that no sample sees, in a shard that is written already: what came from it is written again."""
    source, out = copy_golden("m3-mxfp8-tiny", tmp_path / "source"), tmp_path / "out"
    killer = Killer(source, out, tmp_path / "log", batch_bytes=BATCH)
    killer.run("rename", 4)
    kept, before = killer.finished_batches(), conversion.open_source(str(source)).fingerprint()
    shard = source / "model-00001-of-00003.safetensors"
    content = bytearray(shard.read_bytes())
    content[300_000] ^= 1
    shard.write_bytes(content)
    assert conversion.open_source(str(source)).fingerprint() == before and kept >= 3
    copied = Path(shutil.copytree(tmp_path / "out.partial", tmp_path / "mutant.partial")).with_name("mutant")
    (tmp_path / "log").write_text("")
    killer.run()
    again = len(re.findall(r"save \d+", (tmp_path / "log").read_text()))
    batches = len(conversion.make_plan(str(source), conversion.Options(batch_bytes=BATCH)).batches)
    assert batches - kept < again < batches
    right = whole(source, tmp_path / "whole", batch_bytes=BATCH)
    assert digests(out) == right
    # Mutant: every batch that is there is taken.
    from convert.writer import Writer

    monkeypatch.setattr(Writer, "has", lambda self, batch, stamps: (self._batches / f"{batch:04d}").is_dir())
    conversion.convert(str(source), copied, conversion.Options(batch_bytes=BATCH, resume=True))
    assert digests(copied) != right


@pytest.mark.parametrize("resume", [False, True])
def test_two_at_once(resume, tmp_path):
    from convert.writer import Writer

    first = Writer(tmp_path / "out", {"format_version": 1}, resume=False)
    with pytest.raises(conversion.ConversionError, match="another conversion is writing"):
        Writer(tmp_path / "out", {"format_version": 1}, resume=resume)
    first.close()
    with pytest.raises(conversion.ConversionError, match="unfinished conversion; go on with --resume"):
        Writer(tmp_path / "out", {"format_version": 1}, resume=False)
    Writer(tmp_path / "out", {"format_version": 1}, resume=True).close()


def test_resume_of_nothing_starts(tmp_path):
    assert run(DATA / "deepspec-qwen3-tiny/rnn", tmp_path / "out", "--resume") == 0
    assert run(DATA / "deepspec-qwen3-tiny/rnn", tmp_path / "out", "--resume") == 0


def test_comparison_sees_a_lost_batch(tmp_path):
    """The mutant: a resumption that takes a half-written batch for a whole one."""
    source, out = DATA / "m3-mxfp8-tiny", tmp_path / "out"
    right = whole(source, tmp_path / "whole", batch_bytes=BATCH)
    Killer(source, out, tmp_path / "log", batch_bytes=BATCH).run("rename", 3)
    batches = tmp_path / "out.partial" / "batches"
    last = max(p for p in batches.iterdir() if p.suffix != ".tmp")
    state = next(last.glob("arrays.partial_save/*pending*/state"))
    metadata = json.loads((state / "_METADATA").read_text())
    metadata["tree_metadata"].popitem()
    (state / "_METADATA").write_text(json.dumps(metadata))
    conversion.convert(str(source), out, conversion.Options(batch_bytes=BATCH, resume=True))
    assert digests(out) != right


@pytest.mark.slow
def test_twenty_kills(tmp_path):
    """20 SIGKILLs in a conversion of more than 500 MB, 15 or more between the first and the last array write."""
    config = minimax_config(layers=6, hidden=1024, experts=32, inner=1024, vocab=2048)
    tensors = list(minimax_tensors(config, seed=7))
    source, out = tmp_path / "source", tmp_path / "out"
    write_checkpoint(source, config, tensors, shards=4)
    (source / "tokenizer.json").write_text('{"version": "1.0"}')
    assert sum(t.nbytes for t in tensors) > 500_000_000
    # Stacks of 34 MB must be split, and every batch is small, so that there are many points to be killed at.
    options = {
        "max_memory": RESERVED + RESERVED_PER_TENSOR * len(tensors) + 20 * MIB,
        "batch_bytes": 12 * MIB,
    }
    plan = conversion.make_plan(str(source), conversion.Options(**options))
    assert plan.parts and len(plan.batches) > 36
    rng = np.random.default_rng(20)
    killer = Killer(source, out, tmp_path / "log", **options)
    for _ in range(16):
        # Somewhere inside the first or second array write of this process: in the data or in the commit.
        killer.run("save", int(rng.integers(1, 3)), float(rng.uniform(0.0005, 0.12)))
        assert not out.exists()
    killer.run("rename", 2)
    between = killer.finished_batches()
    assert 0 < between < len(plan.batches)
    killer.run("merge", 1, 0.002)
    killer.run("finalize", 1, 0.01)
    killer.run("publish", 1)
    assert not out.exists() and killer.finished_batches() == len(plan.batches)
    killer.run()
    where = killer.kills()
    print(*where, sep="\n")
    assert len(where) == 20
    assert sum(w.startswith(("save", "rename")) for w in where) >= 15
    assert any(w.startswith(("merge", "finalize", "publish")) for w in where)
    right = whole(source, tmp_path / "whole", **options)
    assert digests(out) == right
    assert not destination.partial_folder(out).exists()
