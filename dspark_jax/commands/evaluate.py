"""`python -m dspark_jax evaluate CKPT`: acceptance by draft length, drafting mode and verification rule."""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dspark_jax._words import counted
from dspark_jax.commands._common import token_ids, use_compilation_cache
from dspark_jax.generate_config import VERIFY_METHODS, GenerateConfig

# The others are lossless, too, but no better: one-hot drafts have the same acceptance with every rule.
_DEFAULT_RUNS = [("ancestral", "block"), ("ancestral", "standard"), ("greedy", "match")]

FEWEST_PROMPTS = 10  # below, intervals over prompts are not worth much


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("checkpoint", type=Path, help="folder that `python -m convert.minimax` wrote")
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE.jsonl",
        help='one {"prompt": text} or {"tokens": [ids]} a line',
    )
    parser.add_argument("--num-draft-tokens", default="1-7", metavar="K", help="lengths: 7, or 1,3,7, or 1-7 (default)")
    parser.add_argument(
        "--verify", help="rules, comma-separated; by default those that go with the mode: block, standard | match"
    )
    parser.add_argument("--draft", help="modes, comma-separated; default ancestral,greedy")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default 128")
    parser.add_argument("--temperature", type=float, default=1.0, help="default 1")
    parser.add_argument("--top-k", type=int, default=0, help="default 0: all")
    parser.add_argument("--top-p", type=float, default=0.95, help="default 0.95")
    parser.add_argument(
        "--passes", type=int, default=3, metavar="N", help="runs with fresh seeds, for the spread; default 3"
    )
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="prompts of one run; default 16")
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt of the first pass")
    parser.add_argument("--respect-eos", action="store_true", help="stop at end-of-sequence tokens (default: run on)")
    parser.add_argument("--weights", choices=("native", "bf16"), default="native", help="format of weights in memory")
    parser.add_argument("--compute-dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of activations")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="where to write the figures as JSON")


def parse_lengths(text: str) -> list[int]:
    """ "1-3,7" -> [1, 2, 3, 7].

    Raises:
      ValueError: not such a list, or a length below 1.
    """
    lengths: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            lengths.extend(range(int(first), int(last or first) + 1))
    except ValueError as error:
        raise ValueError(f"--num-draft-tokens must look like 7, 1,3,7 or 1-7, found {text!r}") from error
    if not lengths or min(lengths) < 1:
        raise ValueError(f"--num-draft-tokens must name lengths of at least 1, found {text!r}")
    return sorted(set(lengths))


def runs_of(drafts: str | None, rules: str | None) -> list[tuple[str, str]]:
    """Pairs of drafting mode and rule: all of what is named, or those that make sense where rules are not named.

    Raises:
      ValueError: a mode or rule that does not exist.
    """
    modes = ("ancestral", "greedy")
    for name, values, known in (("--draft", drafts, modes), ("--verify", rules, VERIFY_METHODS)):
        if values is not None and any(v not in known for v in values.split(",")):
            raise ValueError(f"{name} is {values!r}; known: {', '.join(known)}")
    chosen = modes if drafts is None else drafts.split(",")
    if rules is None:
        return [run for run in _DEFAULT_RUNS if run[0] in chosen]
    return [(d, v) for d in chosen for v in rules.split(",")]


def run(options: argparse.Namespace) -> int:
    """Run the command -> exit status."""
    lengths = parse_lengths(options.num_draft_tokens)
    runs = runs_of(options.draft, options.verify)
    if options.passes < 1 or options.batch_size < 1:
        raise ValueError("--passes and --batch-size must be at least 1")
    if options.output is not None and not options.output.parent.is_dir():
        raise ValueError(f"--output {options.output}: there is no folder {options.output.parent}; make it first")
    import dspark_jax as ds
    from dspark_jax.entropy import continuation_entropy
    from dspark_jax.measurement import batches, recording
    from dspark_jax.measurement_programs import Programs

    use_compilation_cache()
    ds.Layout.read(options.checkpoint)
    prompts = read_prompts(options.prompts, options.checkpoint)
    model = ds.load(options.checkpoint, weights=options.weights, compute_dtype=options.compute_dtype)
    if model.drafter is None:
        raise ValueError(f"{options.checkpoint} has no drafter, so there is nothing to evaluate")
    if lengths[-1] > model.drafter.config.block_size:
        raise ValueError(
            f"--num-draft-tokens asks for {lengths[-1]}, the drafter's block size is {model.drafter.config.block_size}"
        )
    params = ds.SamplingParams(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    configs = [
        recording(
            GenerateConfig(
                max_new_tokens=options.max_new_tokens,
                num_draft_tokens=length,
                draft=draft,
                verify=verify,
                stop_token_ids=None if options.respect_eos else (),
            )
        )
        for length in lengths
        for draft, verify in runs
    ]
    seeds = range(options.seed, options.seed + len(prompts))
    _, arguments = next(batches(model, prompts, params, seeds=seeds, batch_size=options.batch_size))
    rows, entropy = [], None
    with Programs() as programs:
        for config in configs:
            programs.order(arguments, config)
        sizes = [counted(len(prompts), "prompt"), counted(options.passes, "pass", "passes")]
        sizes += [counted(len(configs), "row"), counted(len(programs), "program") + " to compile"]
        print(", ".join(sizes))
        print(HEAD, flush=True)
        bar = tqdm(configs, unit="row", disable=None)  # None: silent unless stderr is a terminal
        for config in bar:
            row, passes = _row(model, prompts, params, config, options, programs)
            rows.append(row)
            bar.write(line(row))
            sys.stdout.flush()
            entropy = entropy or continuation_entropy(model, prompts, passes[0], params, batch_size=options.batch_size)
    print("±: half of the 95 % interval over prompts. E[...]: expected length of that rule over its coins, same drafts")
    print("Steps that the end of the budget shortens are left out.")
    if (few := min(row["num_prompts"] for row in rows)) < FEWEST_PROMPTS:
        print(
            f"Only {counted(few, 'prompt')}: steps of one prompt are alike, so "
            + ("± cannot be told" if few == 1 else "± is a guess itself, mostly too small")
            + f"; give {FEWEST_PROMPTS} prompts or more."
        )
    if entropy is not None:
        sampled, unfiltered = entropy["sampled"]["mean"], entropy["unfiltered"]["mean"]
        print(f"target entropy {sampled:.3f} nats a token as sampled, {unfiltered:.3f} unfiltered at temperature 1")
    if options.output is not None:
        report = {
            "command": [str(a) for a in sys.argv[1:]],
            "version": ds.__version__,
            "rows": rows,
            "target_entropy": entropy,
        }
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def read_prompts(file: Path, checkpoint: Path) -> list[list[int]]:
    """Prompts of a JSON-lines file as token ids.

    Raises:
      ValueError: no such file, one without prompts, or a line that is neither {"prompt": text} nor {"tokens": [ids]}.
    """
    from dspark_jax.prompts import read_prompt_lines
    from dspark_jax.text import Tokenizer

    prompts = read_prompt_lines(file)
    return token_ids(prompts, Tokenizer.load(checkpoint) if any(isinstance(p, str) for p in prompts) else None)


def _row(
    model, prompts, params, config: GenerateConfig, options: argparse.Namespace, programs
) -> tuple[dict[str, Any], list]:
    """All prompts, `passes` times with fresh seeds -> one row of the table, and the measurement of each pass."""
    from dspark_jax.measurement import calibration, measure

    start = time.perf_counter()
    passes = []
    for i in range(options.passes):
        first = options.seed + i * len(prompts)
        seeds = range(first, first + len(prompts))
        passes.append(
            measure(model, prompts, params, config=config, seeds=seeds, batch_size=options.batch_size, run=programs)
        )
    lengths = [p.acceptance_length for p in passes]
    everything = passes[0].joined(passes[1:])
    row = {
        "num_draft_tokens_per_step": config.num_draft_tokens,
        "draft": config.draft,
        "verify": config.verify,
        **everything.summary(),
        "num_prompts": len(np.unique(everything.prompt)),
        "passes": lengths,
        "spread": statistics.stdev(lengths) if len(lengths) > 1 else None,
        "seconds": time.perf_counter() - start,
    }
    if everything.confidence is not None:
        row["calibration"] = calibration(everything.confidence, everything.accepted)
    return row, passes


HEAD = (
    f"{'K':>2} {'draft':<10}{'verify':<10}{'length':>7} {'±':>6}{'steps':>7}{'prompts':>8}"
    f"{'E[std]':>8}{'E[block]':>9}  accepted by slot"
)


def line(row: dict[str, Any]) -> str:
    """One row as text, under `HEAD`."""
    expected = row["expected_acceptance_length"]
    rates = " ".join(f"{rate:.2f}" for rate in row["acceptance_rate_per_position"])
    low, high = row["interval"]
    spread = f"{(high - low) / 2:.3f}" if row["num_prompts"] > 1 else "?"
    return (
        f"{row['num_draft_tokens_per_step']:>2} {row['draft']:<10}{row['verify']:<10}"
        f"{row['mean_acceptance_length']:>7.3f} {spread:>6}{row['num_spec_steps']:>7}{row['num_prompts']:>8}"
        f"{expected['standard']:>8.3f}{expected['block']:>9.3f}  {rates}"
    )
