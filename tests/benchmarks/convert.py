"""Conversion of one real-size MoE layer beside `cp` of the same bytes.

    python tests/benchmarks/convert.py [--workdir DIR] [--runs 5] [--experts 128]

Makes a checkpoint of one layer with 128 experts of 6144 x 3072 in MXFP8 (7.5 GB of random bytes), then alternates `cp`
of its shards and a conversion, each followed by a sync, and prints the median and the spread of both, and the peak of
anonymous memory. Needs twice those bytes on disk; removes everything that it made.
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "convert")]

import checkpoint_maker  # noqa: E402


def make_source(folder: Path, experts: int) -> int:
    """-> payload bytes."""
    config = checkpoint_maker.minimax_config(layers=1, hidden=6144, experts=experts, inner=3072, vocab=2048)
    config["text_config"].update(
        num_attention_heads=64, num_key_value_heads=4, head_dim=128, rotary_dim=64, partial_rotary_factor=0.5
    )
    config["text_config"]["sparse_attention_config"].update(sparse_index_dim=128)
    tensors = list(checkpoint_maker.minimax_tensors(config))
    checkpoint_maker.write_checkpoint(folder, config, tensors, shards=2)
    os.sync()
    return sum(t.nbytes for t in tensors)


def timed_copy(source: Path, target: Path) -> float:
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    os.sync()
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def timed_conversion(source: Path, target: Path, options: list[str]) -> tuple[float, str]:
    """-> seconds of the whole command, its own line on memory."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "convert.minimax", str(source), str(target), *options]
    done = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    os.sync()
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds, re.search(r"peak anonymous memory (\S+)", done.stdout)[1]


def report(what: str, seconds: list[float], nbytes: int) -> float:
    rates = sorted(nbytes / s / 1e6 for s in seconds)
    middle = statistics.median(rates)
    print(
        f"{what}: median {middle:.0f} MB/s, {rates[0]:.0f} to {rates[-1]:.0f}, seconds", *(f"{s:.1f}" for s in seconds)
    )
    return middle


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--workdir", type=Path, help="where to make the files (default: the temporary folder)")
    arguments.add_argument("--runs", type=int, default=5)
    arguments.add_argument("--experts", type=int, default=128)
    arguments.add_argument("--max-memory", default="8GiB")
    args = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=args.workdir) as folder:
        work = Path(folder)
        nbytes = make_source(work / "source", args.experts)
        print(f"one layer, {args.experts} experts of 6144 x 3072, MXFP8: {nbytes:,} bytes", flush=True)
        copies, conversions, peak = [], [], ""
        for run in range(args.runs):
            copies.append(timed_copy(work / "source", work / "copy"))
            seconds, peak = timed_conversion(work / "source", work / "converted", ["--max-memory", args.max_memory])
            conversions.append(seconds)
            print(f"run {run}: cp {copies[-1]:.1f} s, convert {seconds:.1f} s, peak {peak}", flush=True)
        ratio = report("convert", conversions, nbytes) / report("cp", copies, nbytes)
        print(f"convert / cp: {ratio:.2f}; peak anonymous memory {peak} of {args.max_memory}")


if __name__ == "__main__":
    main()
