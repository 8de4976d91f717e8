"""What the finished pair is worth: bits per byte, entropy, whether samples are Python, acceptance length."""

import io
import math
import tokenize
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import loop
import numpy as np
import storage
from corpus import Document
from settings import Preset
from train_target import make_evaluate

import dspark_jax as ds

# Words of an error that only says that the text was cut.
_CUT = ("EOF in multi-line", "unterminated triple-quoted string", "unexpected EOF", "unexpected end of")


def is_python(text: str) -> bool:
    """Whether Python's own tokenizer takes `text` up to its last full line."""
    text = text[: text.rfind("\n") + 1]
    try:
        for _ in tokenize.generate_tokens(io.StringIO(text).readline):
            pass
    except (tokenize.TokenError, SyntaxError) as error:
        return isinstance(error, tokenize.TokenError) and any(words in str(error) for words in _CUT)
    return True


def file_starts(documents: Sequence[Document], tokenizer: ds.Tokenizer, tokens: int, count: int) -> list[list[int]]:
    """Beginnings of held-out files, whole lines of at most `tokens` tokens, that are Python themselves."""
    prompts = []
    for document in documents:
        if not document.held_out:
            continue
        ids = tokenizer.encode(document.text)[:tokens]
        text = tokenizer.decode(ids)
        text = text[: text.rfind("\n") + 1]
        if text.strip() and is_python(text):
            prompts.append(tokenizer.encode(text))
        if len(prompts) == count:
            break
    return prompts


def held_out_prompts(stream: np.ndarray, count: int, tokens: int) -> list[list[int]]:
    """Windows spread evenly over the held-out stream."""
    return [row.tolist() for row in loop.fixed_windows(stream, count, tokens)]


def bootstrap(lengths: Sequence[np.ndarray], *, draws: int = 2000, seed: int = 0) -> tuple[float, float, float]:
    """Mean over steps and its 95 % interval, prompts drawn with replacement."""
    sums, counts = np.array([x.sum() for x in lengths], float), np.array([len(x) for x in lengths], float)
    picks = np.random.default_rng(seed).integers(0, len(sums), (draws, len(sums)))
    means = sums[picks].sum(1) / np.maximum(counts[picks].sum(1), 1)
    low, high = np.quantile(means, [0.025, 0.975])
    return sums.sum() / max(1.0, counts.sum()), float(low), float(high)


def acceptance(out: ds.Generation, drafts: int) -> dict[str, Any]:
    """Acceptance over the steps that verified a full block."""
    assert out.steps is not None
    full = np.asarray(out.steps.draft_tokens)[:, :, drafts - 1] >= 0
    accepted = np.asarray(out.steps.accepted)
    lengths = [accepted[row][full[row]] + 1 for row in range(len(accepted))]
    mean, low, high = bootstrap(lengths)
    flat = np.concatenate(lengths) - 1
    return {
        "acceptance_length": mean,
        "interval_95": [low, high],
        "full_steps": len(flat),
        "accepted_by_slot": [float(np.mean(flat > slot)) if len(flat) else math.nan for slot in range(drafts)],
    }


def run(
    pair: Path,
    preset: Preset,
    documents: Sequence[Document],
    streams: Mapping[str, np.ndarray],
    bytes_of: np.ndarray,
    log: loop.Log,
    *,
    dtype: Any,
) -> dict[str, Any]:
    """Measure a converted pair -> the figures, which are also logged."""
    model, tokenizer = ds.load(pair, compute_dtype=dtype), ds.Tokenizer.load(pair)
    target = model.target.config
    weights = storage.module_params(model.target, "target")
    evaluate = make_evaluate(target, bytes_of, batch=preset.target.batch, dtype=dtype, prepare=storage.values)
    length = preset.target.length + 1
    every = loop.fixed_windows(streams["held_out"], len(streams["held_out"]) // length, length)
    figures: dict[str, Any] = {"held_out": evaluate(weights, every)}
    log.write("check", **figures["held_out"])
    if model.drafter is None:
        return figures
    drafts = model.drafter.config.block_size
    rows, width = preset.check_prompts, preset.sample_prompt
    config = ds.GenerateConfig(max_new_tokens=preset.check_tokens, stop_token_ids=(), record_steps=True, log_probs=True)
    generate = jax.jit(ds.generate, static_argnames="config")

    def continued(prompts: list[list[int]], temperature: float, seed: int) -> ds.Generation:
        batch = (prompts * rows)[:rows]
        tokens, lengths = ds.pad_prompts(batch, buckets=(width,))
        keys = ds.request_keys(range(seed, seed + rows))
        return generate(model, tokens, lengths, keys, ds.SamplingParams(temperature=temperature), config=config)

    out = continued(held_out_prompts(streams["held_out"], rows, width), 1.0, 0)
    figures["acceptance"] = acceptance(out, drafts)
    # Of the target's own text, the mean surprise is an estimate of its entropy.
    figures["acceptance"]["own_text_bits_per_token"] = -float(jnp.mean(out.log_probs)) / math.log(2)
    log.write("check", **figures["acceptance"])
    starts = file_starts(documents, tokenizer, width, 20)
    texts, tokens = [], np.asarray(continued(starts, 0.8, 10_000).tokens)
    for prompt, new in zip(starts, tokens, strict=False):
        texts.append(tokenizer.decode([*prompt, *new.tolist()]))
    passed = [is_python(text) for text in texts]
    figures["samples"] = {"python": sum(passed), "of": len(passed)}
    log.write("check", **figures["samples"])
    log.write("texts", passed=passed, texts=texts)
    return figures


def table(figures: Mapping[str, Any]) -> str:
    """The figures as text."""
    held_out = figures["held_out"]
    lines = [
        ("held-out bits per byte", f"{held_out['bits_per_byte']:.3f}"),
        ("held-out bits per token", f"{held_out['bits_per_token']:.3f}"),
        ("target's entropy there, bits per token", f"{held_out['entropy_bits_per_token']:.3f}"),
        ("attention mass of chosen blocks", f"{held_out['held_out_kept_mass']:.3f}"),
    ]
    if "acceptance" in figures:
        a, s = figures["acceptance"], figures["samples"]
        low, high = a["interval_95"]
        lines += [
            ("own text, bits per token", f"{a['own_text_bits_per_token']:.3f}"),
            ("acceptance length, K full, T = 1, ancestral + block", f"{a['acceptance_length']:.3f}"),
            ("  95 % interval over prompts", f"{low:.3f} .. {high:.3f}"),
            ("  full-length steps", f"{a['full_steps']:,}"),
            ("  accepted up to slot", " ".join(f"{r:.2f}" for r in a["accepted_by_slot"])),
            ("samples at T = 0.8 that are Python", f"{s['python']} of {s['of']}"),
        ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)
