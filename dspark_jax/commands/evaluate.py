"""`python -m dspark_jax evaluate CKPT`: acceptance by draft length, drafting mode and verification rule."""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from dspark_jax.commands._common import use_compilation_cache
from dspark_jax.generate_config import VERIFY_METHODS, GenerateConfig

# The others are lossless, too, but no better: one-hot drafts have the same acceptance with every rule.
_DEFAULT_RUNS = [("ancestral", "block"), ("ancestral", "standard"), ("greedy", "match")]


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
    import dspark_jax as ds
    from dspark_jax.measurement import continuation_entropy

    use_compilation_cache()
    prompts = read_prompts(options.prompts, options.checkpoint)
    model = ds.load(options.checkpoint, weights=options.weights, compute_dtype=options.compute_dtype)
    if model.drafter is None:
        raise ValueError(f"{options.checkpoint} has no drafter, so there is nothing to evaluate")
    if lengths[-1] > model.drafter.config.block_size:
        raise ValueError(
            f"--num-draft-tokens asks for {lengths[-1]}, the drafter's block size is {model.drafter.config.block_size}"
        )
    params = ds.SamplingParams(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    rows, entropy = [], None
    print(HEAD)
    for length, draft, verify in _progress([(k, d, v) for k in lengths for d, v in runs]):
        config = GenerateConfig(
            max_new_tokens=options.max_new_tokens,
            num_draft_tokens=length,
            draft=draft,
            verify=verify,
            stop_token_ids=None if options.respect_eos else (),
        )
        row, passes = _row(model, prompts, params, config, options)
        rows.append(row)
        print(line(row), flush=True)
        entropy = entropy or continuation_entropy(model, prompts, passes[0], params, batch_size=options.batch_size)
    print("±: half of the 95 % interval over prompts. E[...]: expected length of that rule over its coins, same drafts")
    print("Steps that the end of the budget shortens are left out.")
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
      ValueError: a line that is neither {"prompt": text} nor {"tokens": [ids]}, or a file without prompts.
    """
    from dspark_jax.text import Tokenizer

    tokenizer = None
    prompts = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f'{file}:{number} is not valid JSON ({error}); every line is {{"prompt": text}} or {{"tokens": [ids]}}'
            ) from error
        if isinstance(entry, dict) and isinstance(entry.get("tokens"), list):
            prompts.append(entry["tokens"])
        elif isinstance(entry, dict) and isinstance(entry.get("prompt"), str):
            tokenizer = tokenizer or Tokenizer.load(checkpoint)
            prompts.append(tokenizer.encode(entry["prompt"]))
        else:
            raise ValueError(f'{file}:{number} must be {{"prompt": text}} or {{"tokens": [ids]}}')
        if not prompts[-1]:
            raise ValueError(f"{file}:{number} is an empty prompt; give it some text or remove the line")
    if not prompts:
        raise ValueError(f"{file} holds no prompt")
    return prompts


def _progress(items: list):
    from tqdm import tqdm

    # None: silent unless stderr is a terminal.
    return tqdm(items, unit="run", disable=None)


def _row(model, prompts, params, config: GenerateConfig, options: argparse.Namespace) -> tuple[dict[str, Any], list]:
    """All prompts, `passes` times with fresh seeds -> one row of the table, and the measurement of each pass."""
    from dspark_jax.measurement import calibration, measure

    start = time.perf_counter()
    passes = []
    for i in range(options.passes):
        first = options.seed + i * len(prompts)
        seeds = range(first, first + len(prompts))
        passes.append(measure(model, prompts, params, config=config, seeds=seeds, batch_size=options.batch_size))
    lengths = [p.acceptance_length for p in passes]
    everything = passes[0].joined(passes[1:])
    row = {
        "num_draft_tokens_per_step": config.num_draft_tokens,
        "draft": config.draft,
        "verify": config.verify,
        **everything.summary(),
        "passes": lengths,
        "spread": statistics.stdev(lengths) if len(lengths) > 1 else None,
        "seconds": time.perf_counter() - start,
    }
    if everything.confidence is not None:
        row["calibration"] = calibration(everything.confidence, everything.accepted)
    return row, passes


HEAD = (
    f"{'K':>2} {'draft':<10}{'verify':<10}{'length':>7} {'±':>6}"
    f"{'E[std]':>8}{'E[block]':>9}{'steps':>7}  accepted by slot"
)


def line(row: dict[str, Any]) -> str:
    """One row as text, under `HEAD`."""
    expected = row["expected_acceptance_length"]
    rates = " ".join(f"{rate:.2f}" for rate in row["acceptance_rate_per_position"])
    low, high = row["interval"]
    drafts, steps = row["num_draft_tokens_per_step"], row["num_spec_steps"]
    return (
        f"{drafts:>2} {row['draft']:<10}{row['verify']:<10}{row['mean_acceptance_length']:>7.3f} "
        f"{(high - low) / 2:>6.3f}{expected['standard']:>8.3f}{expected['block']:>9.3f}{steps:>7}  {rates}"
    )
