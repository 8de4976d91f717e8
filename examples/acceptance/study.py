"""The acceptance study of a converted checkpoint: one command, one small JSON.

    python examples/acceptance/study.py ckpt/ --prompts examples/acceptance/held_out.jsonl --out study.json

Measures acceptance length by draft length K, drafting mode and verification rule; per-position rates; the calibration
of the confidence head; the target's entropy; what the drafter loses when it is run in another way than it was trained:
with a causal block, without its Markov head, with short windows; and other drafters (--also). Only steps that verify
all K drafts count; intervals are bootstrapped over prompts, and differences are of the same prompts and seeds. --quick
makes a rough version on a CPU. `plots.py` draws the result.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

import dspark_jax as ds
from dspark_jax import ablations
from dspark_jax.commands.evaluate import read_prompts
from dspark_jax.entropy import continuation_entropy
from dspark_jax.measurement import Measurement, batches, calibration, interval, measure, recording
from dspark_jax.measurement_programs import Programs

RUNS = (("ancestral", "block"), ("ancestral", "standard"), ("greedy", "match"))


@dataclasses.dataclass(frozen=True)
class Cell:
    """One setting: `variant` of the drafter, draft length, drafting mode, verification rule, law of the target."""

    variant: str
    k: int
    draft: str
    verify: str
    top_p: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder that `python -m convert.minimax` wrote")
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE.jsonl", help="as for evaluate")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--quick", action="store_true", help="few prompts, short texts, K = 1 and the block size")
    parser.add_argument("--max-new-tokens", type=int, help="default 256; with --quick 48")
    parser.add_argument("--max-prompts", type=int, help="default all; with --quick 16")
    parser.add_argument("--batch-size", type=int, default=256, help="prompts of one run; default 256")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--draft-lengths", help="K to measure besides the block size, comma-separated; default all")
    parser.add_argument("--windows", default="16,64", help="short windows to try, comma-separated; default 16,64")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="NAME=CKPT",
        help="another drafter for the same target, for instance one trained without a Markov head (may be repeated)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt; the others count up")
    parser.add_argument("--compute-dtype", choices=("bfloat16", "float32"), help="default: float32 on a CPU")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="programs to compile at once; default all")
    options = parser.parse_args()
    start = time.perf_counter()
    study = run(options)
    study["seconds"] = round(time.perf_counter() - start, 1)
    options.out.write_text(dumps(study), encoding="utf-8")
    print(f"{options.out}: {options.out.stat().st_size:,} bytes, {study['seconds']} s")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole study."""
    on_cpu = jax.default_backend() == "cpu"
    dtype = options.compute_dtype or ("float32" if on_cpu else "bfloat16")
    new_tokens = options.max_new_tokens or (48 if options.quick else 256)
    layout = ds.Layout.read(options.checkpoint)
    model = ds.load(options.checkpoint, compute_dtype=dtype)
    if model.drafter is None:
        raise SystemExit(f"{options.checkpoint} has no drafter")
    prompts = read_prompts(options.prompts, options.checkpoint)
    most = options.max_prompts or (16 if options.quick else len(prompts))
    prompts = prompts[:: max(1, len(prompts) // most)][:most]
    seeds = range(options.seed, options.seed + len(prompts))
    variants = make_variants(model, [int(w) for w in options.windows.split(",")])
    for name, _, path in (other.partition("=") for other in options.also):
        drafter = ds.load_drafter(path, compute_dtype=dtype)
        drafter.config.check_target(model.target.config)
        variants[name] = ds.Model(target=model.target, drafter=drafter)
    top = model.drafter.config.block_size
    lengths = draft_lengths(options, top)
    cells = [Cell("as trained", k, d, v, options.top_p) for k in lengths for d, v in RUNS]
    cells += [Cell(name, top, "ancestral", "block", options.top_p) for name in variants if name != "as trained"]
    if options.top_p != 1:  # the law without a filter is what confidence heads are trained on
        cells += [Cell("as trained", top, "ancestral", v, 1.0) for v in ("block", "standard")]
    with Programs(options.workers) as programs:
        found = measure_all(cells, variants, prompts, seeds, new_tokens, options, programs)
    entropies = {}
    for top_p in sorted({options.top_p, 1.0}):
        cell = Cell("as trained", top, "ancestral", "block", top_p)
        entropies[f"top_p {top_p:g}"] = continuation_entropy(
            model, prompts, found[cell], params_of(cell, options), batch_size=min(64, options.batch_size)
        )
    rows = [dataclasses.asdict(cell) | found[cell].summary() for cell in cells]
    return {
        "command": shlex.join(["python", "examples/acceptance/study.py", *sys.argv[1:]]),
        "versions": {
            "dspark_jax": ds.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "python": sys.version.split()[0],
        },
        "hardware": f"{jax.device_count()} x {jax.devices()[0].device_kind}" + f", {os.cpu_count()} cores" * on_cpu,
        "checkpoint": {"name": layout.record["source"]["name"], "fingerprint": layout.record["source"]["fingerprint"]},
        "settings": {
            "temperature": options.temperature,
            "top_p": options.top_p,
            "max_new_tokens": new_tokens,
            "compute_dtype": dtype,
            "seeds": [seeds[0], seeds[-1]],
            "prompts": len(prompts),
            "prompt_tokens": sum(map(len, prompts)),
            "prompts_sha256": hashlib.sha256(options.prompts.read_bytes()).hexdigest(),
            "block_size": top,
            "window": model.drafter.config.window,
            "bootstrap": "2000 resamples of prompts, 95 % percentile intervals",
        },
        "target_entropy_nats": entropies,
        "cells": rows,
        "differences": differences(found, lengths, options.top_p, list(variants)),
        "calibration": {
            f"top_p {p:g}": calibration(m.confidence, m.accepted)
            for p in sorted({options.top_p, 1.0})
            if (m := found[Cell("as trained", top, "ancestral", "standard", p)]).confidence is not None
        },
    }


def draft_lengths(options: argparse.Namespace, top: int) -> list[int]:
    """The K to measure, the block size last."""
    if options.draft_lengths is None:
        return sorted({1, top}) if options.quick else list(range(1, top + 1))
    wanted = {int(k) for k in options.draft_lengths.split(",")}
    if not wanted <= set(range(1, top + 1)):
        raise SystemExit(f"--draft-lengths {options.draft_lengths}: each must be from 1 to the block size, {top}")
    return sorted(wanted | {top})


def make_variants(model: ds.Model, windows: list[int]) -> dict[str, ds.Model]:
    """The drafter as it is, and what can be done to it at inference."""
    config = model.drafter.config
    variants = {"as trained": model}
    if not config.causal:
        variants["causal block"] = ablations.causal_block(model)
    if config.markov_type is not None:
        variants["Markov zeroed"] = ablations.zeroed_markov(model)
    for window in windows:
        if config.window is None or window < config.window:
            variants[f"window {window}"] = ablations.with_window(model, window)
    return variants


def config_of(cell: Cell, new_tokens: int) -> ds.GenerateConfig:
    return recording(
        ds.GenerateConfig(
            max_new_tokens=new_tokens,
            num_draft_tokens=cell.k,
            draft=cell.draft,
            verify=cell.verify,
            stop_token_ids=(),
        )
    )


def params_of(cell: Cell, options: argparse.Namespace) -> ds.SamplingParams:
    return ds.SamplingParams(temperature=options.temperature, top_p=cell.top_p)


def measure_all(cells, variants, prompts, seeds, new_tokens, options, programs) -> dict[Cell, Measurement]:
    """Every cell, printed as it is done. All programs are ordered before the first one runs."""
    start = time.perf_counter()
    size = options.batch_size
    for cell in cells:
        params = params_of(cell, options)
        _, arguments = next(batches(variants[cell.variant], prompts, params, seeds=seeds, batch_size=size))
        programs.order(arguments, config_of(cell, new_tokens))
    print(f"{len(cells)} settings, {len(programs)} programs to compile", flush=True)
    print(f"{'variant':<16}{'K':>2} {'draft':<10}{'rule':<9}{'top-p':>6}{'length':>8}{'95 % interval':>17}{'steps':>8}")
    found: dict[Cell, Measurement] = {}
    for cell in cells:
        params, config = params_of(cell, options), config_of(cell, new_tokens)
        found[cell] = measure(
            variants[cell.variant], prompts, params, config=config, seeds=seeds, batch_size=size, run=programs
        )
        row = found[cell].summary()
        low, high = row["interval"]
        left = (time.perf_counter() - start) / len(found) * (len(cells) - len(found))
        print(
            f"{cell.variant:<16}{cell.k:>2} {cell.draft:<10}{cell.verify:<9}{cell.top_p:>6}"
            f"{row['mean_acceptance_length']:>8.3f}   [{low:.3f}, {high:.3f}]{row['num_spec_steps']:>8}"
            f"   about {left / 60:.0f} min left",
            flush=True,
        )
    return found


def differences(
    found: dict[Cell, Measurement], lengths: list[int], top_p: float, variants: list[str]
) -> list[dict[str, Any]]:
    """Differences in acceptance length, paired by prompt."""

    def compare(name: str, a: Cell, b: Cell) -> dict[str, Any]:
        drawn = [found[c].bootstrap(found[c].survived).sum(1) for c in (a, b)]
        mean = found[a].acceptance_length - found[b].acceptance_length
        return {"name": name, "k": a.k, "mean": mean, "interval": interval(drawn[0] - drawn[1])}

    rows = []
    for k in lengths:
        block, standard, match = (Cell("as trained", k, d, v, top_p) for d, v in RUNS)
        rows += [
            compare("ancestral/block - ancestral/standard", block, standard),
            compare("ancestral/block - greedy/match", block, match),
        ]
    top = lengths[-1]
    own = Cell("as trained", top, "ancestral", "block", top_p)
    rows += [
        compare(f"as trained - {name}", own, dataclasses.replace(own, variant=name))
        for name in variants
        if name != "as trained"
    ]
    return rows


def dumps(study: dict[str, Any]) -> str:
    """JSON with four decimals and one line a cell: small, and its changes can be read."""

    def rounded(value: Any) -> Any:
        if isinstance(value, float | np.floating):
            return round(float(value), 4)
        if isinstance(value, dict):
            return {k: rounded(v) for k, v in value.items()}
        return [rounded(v) for v in value] if isinstance(value, list | tuple) else value

    parts = []
    for key, value in rounded(study).items():
        if isinstance(value, list):
            body = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        elif key == "calibration":
            inner = [
                f"  {json.dumps(k)}: [\n   " + ",\n   ".join(map(json.dumps, v)) + "\n  ]" for k, v in value.items()
            ]
            body = "{\n" + ",\n".join(inner) + "\n }"
        else:
            body = json.dumps(value)
        parts.append(f" {json.dumps(key)}: {body}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
