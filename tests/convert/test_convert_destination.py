"""Destinations that cannot take the result: not empty, too small, full while it is written, of a newer version."""

import errno
import json
import os
from pathlib import Path

import pytest
from checkpoint_maker import DATA
from convert_cases import digests, edit_json, fails, run

from convert import conversion, writer


def test_destination_not_empty(tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    assert run(DATA / "m3-mxfp8-tiny", out) == 1
    assert "not empty" in capsys.readouterr().err
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "mine.txt"]
    assert run(DATA / "m3-mxfp8-tiny", out / "mine.txt") == 1
    assert (out / "mine.txt").read_text() == "keep"


def test_empty_destination_is_fine(tmp_path):
    (tmp_path / "out").mkdir()
    assert run(DATA / "deepspec-qwen3-tiny/rnn", tmp_path / "out") == 0


def test_disk_too_small_is_said_before(tmp_path, capsys, monkeypatch):
    class Usage:
        free = 1 << 20

    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda path: Usage)
    assert "1MiB free" in fails(capsys, DATA / "m3-mxfp8-tiny", tmp_path / "out")


@pytest.mark.parametrize(
    ("code", "wrapped", "words"),
    [
        (errno.ENOSPC, False, "the disk is full"),
        (errno.ENOSPC, True, "the disk is full"),
        (errno.EDQUOT, True, "cannot write"),
        (errno.EFBIG, True, "cannot write"),
    ],
)
def test_disk_full_while_writing(code, wrapped, words, tmp_path, capsys, monkeypatch):
    """An error at the third write: a clear message, DST untouched, and a resumption that ends with the same arrays."""
    source, out = DATA / "m3-mxfp8-tiny", tmp_path / "out"
    right, calls = writer.ocp.partial.save, []

    def full(path, tree):
        calls.append(path)
        if len(calls) == 3:
            (Path(path).parent / "half").write_bytes(b"x" * 100)
            if wrapped:
                raise ValueError(f"RESOURCE_EXHAUSTED: Failed to write: {os.strerror(code)}")
            raise OSError(code, os.strerror(code))
        right(path, tree)

    monkeypatch.setattr(writer.ocp.partial, "save", full)
    options = conversion.Options(batch_bytes=300_000)
    with pytest.raises(conversion.ConversionError, match=f"{words}.*--resume"):
        conversion.convert(str(source), out, options)
    assert not out.exists() and (tmp_path / "out.partial").exists()
    written = len(calls) - 1
    conversion.convert(str(source), out, conversion.Options(batch_bytes=300_000, resume=True))
    total = len(calls)
    calls.clear()
    monkeypatch.setattr(writer.ocp.partial, "save", right)
    conversion.convert(str(source), tmp_path / "whole", options)
    assert digests(out) == digests(tmp_path / "whole")
    assert total - written - 1 == len(list_batches(source)) - written
    assert not (tmp_path / "out.partial").exists()


def list_batches(source: Path) -> tuple:
    return conversion.make_plan(str(source), conversion.Options(batch_bytes=300_000)).batches


def test_newer_format_version(tmp_path, capsys):
    out = tmp_path / "out"
    assert run(DATA / "deepspec-qwen3-tiny/rnn", out) == 0
    edit_json(out / "layout.json", lambda layout: layout.update(format_version=99))
    before = (out / "layout.json").read_bytes()
    assert run(DATA / "deepspec-qwen3-tiny/rnn", out, "--verify") == 1
    err = capsys.readouterr().err
    assert "format_version is 99" in err and "newer" in err
    assert (out / "layout.json").read_bytes() == before


def test_newer_unfinished_conversion(tmp_path, capsys):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "marker.json").write_text(json.dumps({"format_version": 99}))
    assert run(DATA / "deepspec-qwen3-tiny/rnn", tmp_path / "out", "--resume") == 1
    assert "format_version is 99" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
