"""What commands share: cache folders, the printing of prompts and statistics."""

import os
from pathlib import Path

from dspark_jax._words import counted
from dspark_jax.stats import AcceptanceStats


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/dspark_jax, or ~/.cache/dspark_jax."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dspark_jax"


def use_compilation_cache() -> None:
    """Keep compiled programs between runs, unless the user has configured JAX's cache himself."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def token_ids(prompts: list[str | list[int]], tokenizer) -> list[list[int]]:
    """Prompts as token ids; `tokenizer` may be None where none is text."""
    return [tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]


def quoted(text: str, most: int = 12) -> str:
    """A prompt as it is shown: each line behind "> ", the first ones of a long prompt left out."""
    lines = text.split("\n")
    left_out = len(lines) - most
    above = [f"> ... {counted(left_out, 'more line')} above ..."] if left_out > 0 else []
    return "\n".join([*above, *(f"> {line}" for line in lines[-most:])])


def describe(stats: AcceptanceStats) -> str:
    """Acceptance statistics in a few lines; empty where nothing was drafted."""
    s = stats.summary()
    if not s["num_draft_tokens"]:
        return "no draft was verified" if stats.acceptance_histogram.shape[-1] > 1 else ""
    rates = "  ".join(f"{rate:.2f}" for rate in s["acceptance_rate_per_position"])
    drafts, steps = counted(s["num_draft_tokens"], "draft"), counted(s["num_spec_steps"], "step")
    return (
        f"acceptance length   {s['mean_acceptance_length']:.2f} tokens a verify step "
        f"({s['num_accepted_draft_tokens']:,} of {drafts} accepted in {steps})\n"
        f"accepted by slot    {rates}  of the steps that drafted it; the end of a text may shorten a block\n"
        f"steps by accepted   {'  '.join(map(str, s['acceptance_histogram']))}"
    )
