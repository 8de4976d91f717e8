"""`python -m dspark_jax generate CKPT`: continue prompts, streaming."""

import argparse
import json
import sys
import time
from pathlib import Path

from dspark_jax._words import counted
from dspark_jax.commands._common import describe, quoted, token_ids, use_compilation_cache
from dspark_jax.generate_config import DRAFT_METHODS, VERIFY_METHODS, FinishReason, GenerateConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("checkpoint", type=Path, help="folder that `python -m convert.minimax` wrote")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; repeat for a batch")
    prompt.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help='a text file that is the prompt, or .jsonl: one {"prompt": text} or {"tokens": [ids]} a line, for a batch',
    )
    prompt.add_argument(
        "--tokens", action="append", metavar="IDS", help="token ids, comma-separated; repeat for a batch"
    )
    parser.add_argument("--chat", action="store_true", help="put each prompt through the checkpoint's chat template")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default 128")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy; default 1")
    parser.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0 keeps all")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this mass; default 1")
    parser.add_argument("--min-p", type=float, default=0.0, help="drop tokens below this share of the likeliest")
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt; the next ones count up from it")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end a row at this text; repeatable"
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="do not stop at the checkpoint's end-of-sequence token"
    )
    parser.add_argument("--draft", choices=DRAFT_METHODS, help="default: ancestral where there is a drafter, else none")
    parser.add_argument("--verify", choices=VERIFY_METHODS, default="block", help="default block")
    parser.add_argument("--num-draft-tokens", type=int, metavar="K", help="default: the drafter's block size")
    parser.add_argument(
        "--confidence-threshold", type=float, default=0.0, help="cut a block at the first less sure draft"
    )
    parser.add_argument("--weights", choices=("native", "bf16"), default="native", help="format of weights in memory")
    parser.add_argument("--compute-dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of activations")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of streaming text")


def run(options: argparse.Namespace) -> int:
    """Run the command -> exit status."""
    import dspark_jax as ds

    use_compilation_cache()
    layout = ds.Layout.read(options.checkpoint)
    has_tokenizer = (options.checkpoint / "tokenizer.json").is_file()
    if layout.target is None:
        raise ValueError(f"{options.checkpoint} holds a drafter only; convert its target too and name that folder")
    given = _given(options)
    if not has_tokenizer and (any(isinstance(p, str) for p in given) or options.stop):
        raise ValueError(f"{options.checkpoint} has no tokenizer.json; give --tokens instead of text, and no --stop")
    tokenizer = ds.Tokenizer.load(options.checkpoint) if has_tokenizer else None
    prompts = token_ids(_chat(given, options, tokenizer), tokenizer)
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} is empty; give it some text")
    config = GenerateConfig(
        max_new_tokens=options.max_new_tokens,
        num_draft_tokens=options.num_draft_tokens,
        draft=options.draft or ("none" if layout.drafter is None else "ancestral"),
        verify=options.verify,
        stop_token_ids=() if options.ignore_eos else None,
        confidence_threshold=options.confidence_threshold,
    )
    params = ds.SamplingParams(
        temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p
    )
    model = ds.load(options.checkpoint, weights=options.weights, compute_dtype=options.compute_dtype)
    events = ds.stream(
        model,
        prompts,
        config=config,
        params=params,
        seeds=range(options.seed, options.seed + len(prompts)),
        tokenizer=tokenizer,
        stop_strings=options.stop,
    )
    return _report(events, options, tokenizer, given)


def _given(options: argparse.Namespace) -> list:
    """Prompts as the user wrote them: texts or token ids."""
    if options.tokens is not None:
        if options.chat:
            raise ValueError("--chat needs text; give --prompt or --prompt-file instead of --tokens")
        try:
            return [[int(t) for t in row.replace(",", " ").split()] for row in options.tokens]
        except ValueError as error:
            raise ValueError(f"--tokens must be integers separated by commas, found {options.tokens!r}") from error
    if options.prompt is not None:
        return options.prompt
    from dspark_jax.prompts import read_prompt_lines, read_text

    if options.prompt_file.suffix != ".jsonl":
        return [read_text(options.prompt_file)]
    prompts = read_prompt_lines(options.prompt_file)
    if options.chat and not all(isinstance(p, str) for p in prompts):
        raise ValueError(f"--chat needs text, and {options.prompt_file} has lines of tokens; leave --chat out")
    return prompts


def _chat(given: list, options: argparse.Namespace, tokenizer) -> list:
    if not options.chat:
        return given
    return [tokenizer.chat([{"role": "user", "content": text}]) for text in given]


def _report(events, options: argparse.Namespace, tokenizer, given: list) -> int:
    rows = len(given)
    pieces, tokens = [""] * rows, [[] for _ in range(rows)]
    streaming = rows == 1 and not options.json
    # What is asked goes to stderr, so that stdout is what the model wrote and nothing else.
    shown = [quoted(p if isinstance(p, str) else " ".join(map(str, p))) for p in given]
    clock = _Clock()
    event = None
    for event in events:
        if streaming and not clock.events:
            print(f"{shown[0]}\n--- the model goes on", file=sys.stderr, flush=True)
        clock.tick(sum(map(len, event.tokens)))
        for i, new in enumerate(event.tokens):
            tokens[i].extend(new)
            piece = event.text[i] if tokenizer is not None else "".join(f"{t} " for t in new)
            pieces[i] += piece
            if streaming:
                print(piece, end="", flush=True)
    assert event is not None and event.generation is not None  # the last one
    reasons = [FinishReason(r).name.lower() for r in event.finish_reason]
    stats = event.generation.stats
    if options.json:
        report = {
            "rows": [
                {"text": p, "tokens": t, "finish_reason": r} for p, t, r in zip(pieces, tokens, reasons, strict=True)
            ]
        }
        print(json.dumps(report | {"stats": stats.summary()}))
        return 0
    if streaming:
        print(flush=True)
    else:
        for i, (prompt, piece) in enumerate(zip(shown, pieces, strict=True)):
            print(prompt, file=sys.stderr, flush=True)
            print(f"[{i}] {piece}", flush=True)
    lines = describe(stats)
    print(f"\n{counted(sum(map(len, tokens)), 'token')}, finished by {', '.join(reasons)}", file=sys.stderr)
    print(clock.describe(), file=sys.stderr)
    if lines:
        print(lines, file=sys.stderr)
    return 0


class _Clock:
    """When tokens came. The prompt's program and the step's are compiled, or loaded, before the first two events."""

    def __init__(self):
        self.start = time.perf_counter()
        self.events: list[tuple[float, int]] = []

    def tick(self, count: int) -> None:
        """`count` tokens came just now."""
        self.events.append((time.perf_counter(), count))

    def describe(self) -> str:
        """The time until both programs had run, and the speed from there on."""
        ready, (end, _) = self.events[:2][-1][0], self.events[-1]
        before = f"{ready - self.start:.1f} s to compile or load the programs and to read the prompt"
        count = sum(c for _, c in self.events[2:])
        if not count:
            return f"{before}; too short a text to measure the speed"
        return f"{before}; then {count / (end - ready):.1f} tokens/s over {counted(len(self.events) - 2, 'step')}"
