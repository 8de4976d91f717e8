"""Entropy of the target where it wrote: how much there was to guess in what a measurement drafted for."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from dspark_jax.checkpoint import Model
from dspark_jax.measurement import Measurement, batches, interval
from dspark_jax.sampling import SamplingParams
from dspark_jax.speculation import target_law
from dspark_jax.target import token_positions


@jax.jit
def token_entropies(
    model: Model, tokens: Int[Array, "B T"], params: SamplingParams
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Entropy in nats of the target's law of the token behind each prefix of `tokens`.

    Returns:
      float32 [B, T] of the unfiltered law at temperature 1, and of the law that `params` samples from.

    Raises:
      ValueError: tokens is wider than the target's context.
    """
    batch, width = tokens.shape
    target = model.target
    if not 0 < width <= target.config.max_context:
        raise ValueError(f"tokens is {width} wide, the target's context is {target.config.max_context}")
    positions = token_positions(jnp.zeros((batch,), jnp.int32), jnp.full((batch,), width, jnp.int32), width)
    hidden = target(tokens, positions, target.make_cache(batch, width), logits="none").hidden

    def one(row: Float[Array, "B H"]) -> tuple[Array, Array]:
        logits = target.lm_head.logits(row)[:, None]  # a position at a time: all logits would be T times as large
        laws = (target_law(logits, p, target.kernels) for p in (SamplingParams(), params))
        raw, filtered = (-jnp.sum(jnp.where(p > -jnp.inf, jnp.exp(p) * p, 0.0), axis=-1)[:, 0] for p in laws)
        return raw, filtered

    raw, filtered = lax.map(one, jnp.swapaxes(hidden, 0, 1))
    return raw.T, filtered.T


def continuation_entropy(
    model: Model,
    prompts: Sequence[Sequence[int]],
    measurement: Measurement,
    params: SamplingParams,
    *,
    batch_size: int = 64,
) -> dict[str, Any]:
    """Mean entropy of the target, in nats, where it wrote the tokens of `measurement`, with bootstrap intervals.

    Returns:
      "unfiltered" (temperature 1) and "sampled" (what `params` leave of it), each with "mean" and "interval".
    """
    new = [row[:n].tolist() for row, n in zip(measurement.tokens, measurement.lengths, strict=True)]
    texts = [[*p, *n] for p, n in zip(prompts, new, strict=True)]
    found, owner = [], []
    for first, (_, tokens, *_) in batches(model, texts, params, seeds=range(len(texts)), batch_size=batch_size):
        both = np.stack([np.asarray(e) for e in token_entropies(model, tokens, params)], axis=-1)
        for i in range(first, min(first + batch_size, len(texts))):
            start = len(prompts[i]) - 1  # the law behind the prompt's last token gave the first new one
            found.append(both[i - first, start : start + len(new[i])])
            owner.append(np.full(len(new[i]), i))
    values = np.concatenate(found).astype(np.float64)
    replicates = dataclasses.replace(measurement, prompt=np.concatenate(owner)).bootstrap(values)
    return {
        name: {"mean": float(values[:, i].mean()), "interval": interval(replicates[:, i])}
        for i, name in enumerate(("unfiltered", "sampled"))
    }
