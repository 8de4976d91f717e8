"""`python -m dspark_jax demo`: the bundled checkpoint, converted and run, with and without speculation."""

import argparse
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dspark_jax._version import __version__
from dspark_jax._words import counted
from dspark_jax.commands._common import cache_folder, describe, quoted, use_compilation_cache
from dspark_jax.generate_config import GenerateConfig

BUNDLED = Path(__file__).parent.parent / "assets" / "tiny"
# None ends with a newline: with the indentation behind it that is one token, and alone it says that none follows.
_PROMPTS = (
    'def read_lines(path):\n    """Return the lines of a text file."""\n    with open(path',
    "class Reader:\n    def __init__(self, file, encoding=None):",
    "    for name in sorted(os.listdir(path)):",
)
_REPEATS = 3
_NAMES = {"ancestral": "speculative", "none": "plain"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--folder", type=Path, help="where to put the converted checkpoint (default: the user's cache)")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="of each prompt; default 96")
    parser.add_argument("--temperature", type=float, default=0.8, help="default 0.8")
    parser.add_argument("--top-p", type=float, default=0.95, help="default 0.95")
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt; default 0")


def run(options: argparse.Namespace) -> int:
    """Run the command -> exit status."""
    folder = options.folder or cache_folder() / f"demo-{__version__}"
    _provide(folder, replace=options.folder is None)
    import jax

    import dspark_jax as ds

    use_compilation_cache()
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"  # a CPU emulates bfloat16
    model, tokenizer = ds.load(folder, compute_dtype=dtype), ds.Tokenizer.load(folder)
    layout = ds.Layout.read(folder)
    device = jax.devices()[0].device_kind
    print(f"target {_millions(layout, 'target')}, drafter {_millions(layout, 'drafter')}, on {device}")
    prompts = [tokenizer.encode(p) for p in _PROMPTS]
    params = ds.SamplingParams(temperature=options.temperature, top_p=options.top_p)
    # Both ways write the same number of tokens.
    speculative = GenerateConfig(max_new_tokens=options.max_new_tokens, stop_token_ids=())
    plain = GenerateConfig(max_new_tokens=options.max_new_tokens, stop_token_ids=(), draft="none")
    print("compiling, about 20 s the first time ...", flush=True)
    parts = []
    for i, (text, prompt) in enumerate(zip(_PROMPTS, prompts, strict=True)):
        print(f"\n--- prompt {i + 1}\n{quoted(text)}\n--- the model goes on", flush=True)
        events = ds.stream(
            model, [prompt], config=speculative, params=params, seeds=[options.seed + i], tokenizer=tokenizer
        )
        for event in events:
            print(event.text[0], end="", flush=True)
            if event.generation is not None:
                parts.append(event.generation.stats)
        print()
    stats = jax.tree.map(lambda *counts: sum(counts), *parts)
    print(f"\n--- drafts, temperature {options.temperature:g}, top-p {options.top_p:g}\n{describe(stats)}")
    emitted = float(stats.total().mean_emitted_length)
    print(f"tokens a verify step {emitted:.2f} in the text, whose end cuts the last block")
    batches = [(*ds.pad_prompts([p]), ds.request_keys([options.seed + i])) for i, p in enumerate(prompts)]
    print(
        f"\n--- speed: the same {counted(len(prompts), 'prompt')} one after another, "
        f"{counted(options.max_new_tokens, 'token')} each, median of {_REPEATS} runs, compiled before",
        flush=True,
    )
    generate = jax.jit(ds.generate, static_argnames="config")
    seconds: dict[GenerateConfig, list[float]] = {speculative: [], plain: []}
    for repeat in range(1 + _REPEATS):  # the first one compiles; in turns, so that other work hits both alike
        for config, times in seconds.items():
            start = time.perf_counter()
            outs = [jax.block_until_ready(generate(model, *batch, params, config=config)) for batch in batches]
            times.append(time.perf_counter() - start)
            if repeat == 0:
                tokens, steps = sum(int(o.lengths[0]) for o in outs), sum(int(o.stats.num_steps[0]) for o in outs)
                print(
                    f"{_NAMES[config.draft]:<12}{counted(tokens, 'token')} in {counted(steps, 'target forward')}",
                    flush=True,
                )
    rates = {c: len(prompts) * options.max_new_tokens / statistics.median(t[1:]) for c, t in seconds.items()}
    print("   ".join(f"{_NAMES[c.draft]} {rate:.0f} tokens/s" for c, rate in rates.items()))
    print(f"speculative / plain on this machine: {rates[speculative] / rates[plain]:.2f}")
    print(f"\nThe checkpoint is in {folder}; go on with\n  python -m dspark_jax generate {folder} --prompt import")
    return 0


def _millions(layout, part: str) -> str:
    count = sum(math.prod(e["shape"]) for path, e in layout.arrays.items() if path.startswith(f"{part}/"))
    return f"{count / 1e6:.1f} M parameters"


def _provide(folder: Path, *, replace: bool) -> None:
    """Convert the bundled checkpoint the way a user converts his own, unless `folder` holds just that.

    What else is there is replaced in the cache, and refused in a folder that the user has named.
    """
    if (folder / "layout.json").is_file():
        # Compares every array: the bundled checkpoint may have changed since, the folder may be damaged.
        if _convert(folder, "--verify").returncode == 0:
            print(f"found in {folder}")
            return
    if not replace and folder.is_dir() and any(folder.iterdir()):
        raise OSError(f"{folder} holds something else than the bundled checkpoint; name another --folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"$ python -m convert.minimax {BUNDLED} {folder}", flush=True)
    # Made beside its place and moved there whole: a demo that is interrupted or runs twice leaves no half one.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as beside:
        made = Path(beside) / folder.name
        done = _convert(made)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
            raise OSError(f"the bundled checkpoint could not be converted to {folder}: {reason[0]}")
        print(next((line for line in done.stdout.splitlines() if line.startswith("wrote")), "converted"))
        if folder.exists():
            shutil.move(folder, Path(beside) / "old")
        os.replace(made, folder)


def _convert(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "convert.minimax", str(BUNDLED), str(folder), *options]
    return subprocess.run(command, check=False, capture_output=True, text=True)
