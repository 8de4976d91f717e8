"""`python -m dspark_jax demo`: the bundled checkpoint, converted and run, with and without speculation."""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from dspark_jax._version import __version__
from dspark_jax.commands._common import cache_folder, describe, use_compilation_cache
from dspark_jax.generate_config import GenerateConfig

BUNDLED = Path(__file__).parent.parent / "assets" / "tiny"
_PROMPTS = ("def quicksort(items):\n", "import json\n\n\nclass Reader", "for name in ")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--folder", type=Path, help="where to put the converted checkpoint (default: the user's cache)")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default 64")
    parser.add_argument("--temperature", type=float, default=1.0, help="default 1")
    parser.add_argument("--top-p", type=float, default=0.95, help="default 0.95")


def run(options: argparse.Namespace) -> int:
    """Run the command -> exit status."""
    folder = options.folder or cache_folder() / f"demo-{__version__}"
    if not (folder / "layout.json").is_file():
        _convert(folder)
    import jax

    import dspark_jax as ds

    use_compilation_cache()
    print(f"loading {folder}")
    model, tokenizer = ds.load(folder, compute_dtype="float32"), ds.Tokenizer.load(folder)
    prompts = [tokenizer.encode(p) for p in _PROMPTS]
    params = ds.SamplingParams(temperature=options.temperature, top_p=options.top_p)
    speculative = GenerateConfig(max_new_tokens=options.max_new_tokens)
    print(f"{jax.devices()[0].device_kind}, random weights: the mechanism is real, the text is noise\n")
    print(f"--- {_PROMPTS[0]!r}, streamed")
    for event in ds.stream(model, prompts[:1], config=speculative, params=params, tokenizer=tokenizer):
        print(event.text[0], end="", flush=True)
        if event.generation is not None:
            print(f"\n\n{describe(event.generation.stats)}\n")
    print("--- all prompts as one jitted batch, with and without drafts (compiled before timing)")
    tokens, lengths = ds.pad_prompts(prompts)
    run_batch = jax.jit(ds.generate, static_argnames="config")
    rates = {}
    for name, config in {
        "speculative": speculative,
        "plain": GenerateConfig(max_new_tokens=options.max_new_tokens, draft="none"),
    }.items():
        inputs = (model, tokens, lengths, ds.request_keys(range(len(prompts))), params)
        jax.block_until_ready(run_batch(*inputs, config=config))
        start = time.perf_counter()
        out = jax.block_until_ready(run_batch(*inputs, config=config))
        count = int(out.lengths.sum())
        rates[name] = count / (time.perf_counter() - start)
        steps = int(out.stats.num_steps.max())
        print(f"{name:<12} {count} tokens in {steps} target forwards, {rates[name]:.0f} tokens/s")
        if describe(out.stats):
            print(describe(out.stats))
    ratio = rates["speculative"] / rates["plain"]
    print(f"speculative / plain on this machine: {ratio:.2f}x (a drafter of random weights is rarely right)")
    return 0


def _convert(folder: Path) -> None:
    """Convert the bundled checkpoint the way a user converts his own."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    leftover = folder.with_name(folder.name + ".partial")
    if leftover.exists():
        shutil.rmtree(leftover)
    command = [sys.executable, "-m", "convert.minimax", str(BUNDLED), str(folder)]
    print("$ " + " ".join(["python", *command[1:]]), flush=True)
    if subprocess.run(command, check=False).returncode:
        raise OSError(f"the bundled checkpoint could not be converted to {folder}")
