"""Generation driven from the host: the step of `generate`, one event for each, with text where there is a tokenizer."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from dspark_jax._words import counted
from dspark_jax.checkpoint import CheckpointError, Layout, Model, load
from dspark_jax.generate_config import FinishReason, GenerateConfig
from dspark_jax.generation import prefill, step
from dspark_jax.generation_state import Generation, GenerationState
from dspark_jax.prompts import DEFAULT_BUCKETS, check_vocabulary, pad_prompts
from dspark_jax.sampling import SamplingParams, request_keys
from dspark_jax.text import TextStream, Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamEvent:
    """What one step added to each row.

    Attributes:
      tokens: new tokens of each row; empty for rows that had finished.
      text: new text of each row, if a tokenizer was given. It can lag behind the tokens by an unfinished character or
        by what may become a stop string.
      finish_reason: of each row, after the step.
      generation: the whole result, as `generate` returns it; in the last event only, None before.
    """

    tokens: tuple[tuple[int, ...], ...]
    text: tuple[str, ...]
    finish_reason: tuple[FinishReason, ...]
    generation: Generation | None


def stream(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    config: GenerateConfig,
    params: SamplingParams | None = None,
    seeds: Sequence[int] | None = None,
    tokenizer: Tokenizer | None = None,
    stop_strings: Sequence[str] = (),
    buckets: Sequence[int] = DEFAULT_BUCKETS,
) -> Iterator[StreamEvent]:
    """Yield what each step committed. The tokens are those of `generate` with the same arguments.

    Args:
      model: what `load` returned.
      prompts: token ids of each prompt.
      config: as for `generate`.
      params: temperature and filters, `SamplingParams()` by default.
      seeds: one a prompt; 0, 1, 2, ... by default.
      tokenizer: gives the events their text.
      stop_strings: texts that end a row, found in its decoded output; the text ends before them. The tokens that spell
        them have been committed and stay.
      buckets: widths to pad prompts to, as for `pad_prompts`.

    Raises:
      ValueError: a token outside the vocabulary, stop strings without a tokenizer, an empty stop string, seeds that do
        not match the prompts, or what `generate` raises.
    """
    if stop_strings and tokenizer is None:
        raise ValueError("stop_strings need a tokenizer; without one use GenerateConfig.stop_token_ids")
    if isinstance(stop_strings, str) or any(not s for s in stop_strings):
        raise ValueError(f"stop_strings must be a list of texts that are not empty, found {stop_strings!r}")
    seeds = range(len(prompts)) if seeds is None else seeds
    if len(seeds) != len(prompts):
        raise ValueError(f"{counted(len(seeds), 'seed')} for {counted(len(prompts), 'prompt')}; give one each")
    tokens, lengths = pad_prompts(prompts, buckets, max_width=model.target.config.max_context)
    check_vocabulary(tokens, model.target.config.vocab_size)
    return _events(model, tokens, lengths, list(seeds), params or SamplingParams(), config, tokenizer, stop_strings)


def _events(model, tokens, lengths, seeds, params, config, tokenizer, stop_strings) -> Iterator[StreamEvent]:
    state = prefill(model, tokens, lengths, request_keys(seeds), params, config=config)
    texts = [TextStream(tokenizer, stop_strings) for _ in seeds] if tokenizer is not None else []
    done = np.zeros(len(seeds), np.int32)
    while True:
        count, reason = np.asarray(state.num_tokens), np.array(state.finish_reason)
        output = np.asarray(state.tokens)
        new = [tuple(int(t) for t in output[i, done[i] : count[i]]) for i in range(len(seeds))]
        done = count
        text = tuple(t.feed(n, last=bool(r)) for t, n, r in zip(texts, new, reason, strict=False))
        for i, t in enumerate(texts):
            if t.stopped:
                reason[i] = FinishReason.STOP
        state = _with_reasons(state, reason)
        finished = bool((reason != FinishReason.RUNNING).all())
        yield StreamEvent(
            tokens=tuple(new),
            text=text,
            finish_reason=tuple(FinishReason(r) for r in reason.tolist()),
            # Earlier than the end it would hold buffers that the next step is given to overwrite.
            generation=state.result() if finished else None,
        )
        if finished:
            return
        state, _ = step(model, state, config=config)


def _with_reasons(state: GenerationState, reason: np.ndarray) -> GenerationState:
    return dataclasses.replace(state, finish_reason=jnp.asarray(reason, jnp.int32))


def generate_text(
    model: str | Path | Model,
    texts: Sequence[str],
    *,
    tokenizer: Tokenizer | None = None,
    params: SamplingParams | None = None,
    config: GenerateConfig | None = None,
    seeds: Sequence[int] | None = None,
    chat: bool = False,
    stop_strings: Sequence[str] = (),
) -> list[str]:
    """Continue each text.

    Args:
      model: a converted checkpoint's folder, or a loaded model together with `tokenizer`.
      texts: one prompt a request; with `chat`, one user message each, put through the chat template.
      tokenizer: needed where `model` is not a folder.
      params: temperature and filters, `SamplingParams()` by default.
      config: `GenerateConfig(max_new_tokens=128)` by default, without drafts where the checkpoint has no drafter.
      seeds: one a request; 0, 1, 2, ... by default.
      stop_strings: texts that end a request; neither they nor what follows is returned.

    Returns:
      the new text of each request.

    Raises:
      CheckpointError: no tokenizer, no chat template, or not a converted checkpoint.
      ValueError: as `generate`.
    """
    if isinstance(texts, str):
        raise ValueError("texts must be a list of prompts; put a single one in a list")
    if not isinstance(model, Model):
        Layout.read(model)  # before the tokenizer, which says less about a folder that is no checkpoint
        tokenizer = tokenizer or Tokenizer.load(model)
        model = load(model)
    if tokenizer is None:
        raise CheckpointError("generate_text needs a tokenizer beside a loaded model: Tokenizer.load(path)")
    if config is None:
        config = GenerateConfig(max_new_tokens=128, draft="ancestral" if model.drafter is not None else "none")
    encode = tokenizer.encode
    prompts = [encode(tokenizer.chat([{"role": "user", "content": t}]) if chat else t) for t in texts]
    pieces = [""] * len(prompts)
    for event in stream(
        model, prompts, params=params, seeds=seeds, config=config, tokenizer=tokenizer, stop_strings=stop_strings
    ):
        pieces = [a + b for a, b in zip(pieces, event.text, strict=True)]
    return pieces
