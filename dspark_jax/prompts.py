"""Prompts of different lengths as one right-padded array, and files of prompts."""

import json
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

# Every width is a program of its own: prompts share one per bucket. Longer prompts go to multiples of the last.
DEFAULT_BUCKETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


def pad_prompts(
    prompts: Sequence[Sequence[int]], buckets: Sequence[int] = DEFAULT_BUCKETS, *, max_width: int | None = None
) -> tuple[Int[Array, "B T"], Int[Array, " B"]]:
    """Right-pad prompts to the smallest bucket that holds the longest.

    Args:
      prompts: token ids of each prompt; a prompt may be empty.
      buckets: widths to choose from, ascending. Beyond the last, the width is a multiple of it.
      max_width: widest array to make, usually the target's context: a bucket beyond it is cut to it.

    Returns:
      tokens int32 [B, T], padded with 0, and lengths int32 [B].

    Raises:
      ValueError: no prompt, a token that is not an id, a prompt longer than max_width, or buckets that do not ascend.
    """
    if not len(prompts):
        raise ValueError("pad_prompts needs at least one prompt")
    widths = [int(b) for b in buckets]
    if not widths or widths[0] <= 0 or sorted(set(widths)) != widths:
        raise ValueError(f"buckets must be positive and ascending, found {list(buckets)}")
    rows = [_ids(prompt, i) for i, prompt in enumerate(prompts)]
    longest = max(len(row) for row in rows)
    width = next((w for w in widths if w >= longest), -(-longest // widths[-1]) * widths[-1])
    if max_width is not None:
        if longest > max_width:
            index = max(range(len(rows)), key=lambda i: len(rows[i]))
            raise ValueError(f"prompt {index} has {longest} tokens, the target's context holds {max_width}; shorten it")
        width = min(width, max_width)
    tokens = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return jnp.asarray(tokens), jnp.asarray([len(row) for row in rows], jnp.int32)


def check_vocabulary(tokens: Int[Array, "B T"], vocab_size: int) -> None:
    """Raise `ValueError` if a token lies outside the vocabulary: an embedding look-up would clamp it to another."""
    worst = np.asarray(tokens).max(axis=1)
    for i, token in enumerate(worst.tolist()):
        if token >= vocab_size:
            raise ValueError(f"prompt {i} holds token {token}, outside the vocabulary of {vocab_size}")


def read_text(file: Path) -> str:
    """What a file of prompts holds, or ValueError with its name."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start}); save it as such") from error
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror}); name a file of prompts") from error


def read_prompt_lines(file: Path) -> list[str | list[int]]:
    """Prompts of a JSON-lines file: a line is {"prompt": text} or {"tokens": [ids]}; other keys are left alone.

    Raises:
      ValueError: no such file, a line that is neither, or a file without prompts.
    """
    prompts: list[str | list[int]] = []
    # Not splitlines: JSON may hold a line separator of Unicode as it is.
    for number, line in enumerate(read_text(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f'{file}:{number} is not valid JSON ({error}); every line is {{"prompt": text}} or {{"tokens": [ids]}}'
            ) from error
        if isinstance(entry, dict) and isinstance(entry.get("tokens"), list):
            if not all(type(token) is int and token >= 0 for token in entry["tokens"]):
                raise ValueError(f"{file}:{number} must hold token ids, integers from 0, found {entry['tokens']!r}")
            prompts.append(entry["tokens"])
        elif isinstance(entry, dict) and isinstance(entry.get("prompt"), str):
            prompts.append(entry["prompt"])
        else:
            raise ValueError(f'{file}:{number} must be {{"prompt": text}} or {{"tokens": [ids]}}')
        if not prompts[-1]:
            raise ValueError(f"{file}:{number} is an empty prompt; give it some text or remove the line")
    if not prompts:
        raise ValueError(f"{file} holds no prompt")
    return prompts


def _ids(prompt: Sequence[int], index: int) -> np.ndarray:
    if isinstance(prompt, str):
        raise ValueError(f"prompt {index} is text; encode it first (Tokenizer.encode) or use generate_text")
    row = np.asarray(prompt)
    if row.size == 0:
        return np.zeros((0,), np.int32)
    if row.ndim != 1 or row.dtype.kind not in "iu" or row.min() < 0 or row.max() > np.iinfo(np.int32).max:
        raise ValueError(f"prompt {index} must be a flat list of token ids, found {prompt!r}")
    return row.astype(np.int32)
