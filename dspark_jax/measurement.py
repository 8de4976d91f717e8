"""Acceptance measured: verify steps of many prompts, intervals from a bootstrap over prompts, calibration.

Only full-length steps count: the last steps of a generation verify fewer drafts because its budget ends, and would pull
every figure down by an amount that depends on the budget.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax._words import counted
from dspark_jax.checkpoint import Model
from dspark_jax.generate_config import GenerateConfig
from dspark_jax.measurement_programs import generate_in_parts
from dspark_jax.prompts import check_vocabulary, pad_prompts
from dspark_jax.sampling import SamplingParams, request_keys

RESAMPLES = 2000
_LEVEL = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """Every full-length verify step of a batch of prompts, prompt by prompt. N steps, P prompts; numpy arrays.

    Attributes:
      num_draft_tokens: drafts of a step (K).
      prompt: int [N], which prompt a step belongs to.
      accepted: int [N], drafts that it accepted.
      expected: float [N, 2], drafts that `standard` and `block` accept on average over their coins.
      confidence: float [N, K], probability that the confidence head gives each draft if all before it are accepted;
        None without such a head.
      tokens: int [P, M], new tokens of each prompt, the pad id behind them (of several runs one after the other, where
        measurements were joined).
      lengths: int [P], how many they are.
      num_prompts: P.
    """

    num_draft_tokens: int
    prompt: np.ndarray
    accepted: np.ndarray
    expected: np.ndarray
    confidence: np.ndarray | None
    tokens: np.ndarray
    lengths: np.ndarray
    num_prompts: int

    @property
    def acceptance_length(self) -> float:
        """1 + accepted drafts per step."""
        return 1 + float(self.accepted.mean())

    @property
    def survived(self) -> np.ndarray:
        """float [N, K]: 1 where a step accepted the draft of slot j, and so all before it."""
        return (self.accepted[:, None] >= np.arange(1, self.num_draft_tokens + 1)).astype(float)

    def joined(self, others: Sequence["Measurement"]) -> "Measurement":
        """This measurement and others of the same prompts as one."""
        steps = {
            name: np.concatenate([getattr(m, name) for m in (self, *others)])
            for name in ("prompt", "accepted", "expected", "confidence", "tokens", "lengths")
            if getattr(self, name) is not None
        }
        return dataclasses.replace(self, **steps)

    def summary(self) -> dict[str, Any]:
        """Figures for printing and JSON, under the names of `AcceptanceStats`; intervals are of 95 %, over prompts."""
        accepted, survival = int(self.accepted.sum()), self.survived.mean(0)
        reached = np.concatenate([[1.0], survival[:-1]])
        conditional = np.divide(survival, reached, out=np.zeros_like(reached), where=reached > 0)
        expected = self.expected.astype(np.float64)
        gain = (expected[:, 1] - expected[:, 0])[:, None]
        drawn = self.bootstrap(np.concatenate([self.survived, expected, gain], axis=1))
        k = self.num_draft_tokens
        standard, block, block_gain = (interval(drawn[:, k + i] + one) for i, one in enumerate((1, 1, 0)))
        return {
            "num_spec_steps": len(self.accepted),
            "num_draft_tokens": k * len(self.accepted),
            "num_accepted_draft_tokens": accepted,
            "mean_acceptance_length": self.acceptance_length,
            "interval": interval(1 + drawn[:, :k].sum(1)),
            "draft_acceptance_rate": accepted / (k * len(self.accepted)),
            "acceptance_rate_per_position": survival.tolist(),
            "acceptance_rate_interval": np.transpose(interval(drawn[:, :k])).tolist(),
            "conditional_acceptance_rate_per_position": conditional.tolist(),
            "acceptance_histogram": np.bincount(self.accepted, minlength=k + 1).tolist(),
            "expected_acceptance_length": {
                "standard": 1 + float(expected[:, 0].mean()),
                "block": 1 + float(expected[:, 1].mean()),
            },
            "expected_interval": {"standard": standard, "block": block},
            "expected_block_gain": {"mean": float(gain.mean()), "interval": block_gain},
        }

    def bootstrap(self, values: np.ndarray, *, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
        """Means of `values` ([N, ...], one a step) over prompts drawn with replacement, [resamples, ...].

        Steps of one prompt are alike, so prompts are drawn and not steps. Measurements of the same prompts with the
        same seed draw the same ones: the difference of their results is a paired bootstrap.
        """
        count = np.bincount(self.prompt, minlength=self.num_prompts).astype(float)
        sums = np.zeros((self.num_prompts, *values.shape[1:]))
        np.add.at(sums, self.prompt, values)
        drawn = np.random.default_rng(seed).multinomial(
            self.num_prompts, np.full(self.num_prompts, 1 / self.num_prompts), size=resamples
        )
        weight = np.maximum(drawn @ count, 1).reshape(-1, *(1,) * (values.ndim - 1))
        return np.tensordot(drawn, sums, axes=1) / weight


def measure(
    model: Model,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    config: GenerateConfig,
    seeds: Sequence[int],
    batch_size: int = 64,
    run: Callable[..., Any] = generate_in_parts,
) -> Measurement:
    """Generate from each prompt and keep its full-length verify steps. All batches run the same compiled programs.

    Args:
      model: what `load` returned, with a drafter.
      prompts: token ids of each prompt.
      params: temperature and filters of all of them.
      config: `record_steps` and `expected_acceptance` are set here, whatever it says.
      seeds: one a prompt.
      batch_size: prompts of one run.
      run: takes the arguments of `generate` and gives what it gives; `Programs` of `measurement_programs`, for
        instance, which compiles ahead.

    Raises:
      ValueError: seeds that do not match the prompts, decoding without drafts, a confidence threshold, a budget
        without a full-length step, or what `generate` raises.
    """
    if len(seeds) != len(prompts):
        raise ValueError(f"{counted(len(seeds), 'seed')} for {counted(len(prompts), 'prompt')}; give one each")
    if config.draft == "none" or model.drafter is None:
        raise ValueError("acceptance needs drafts: a model with a drafter, and a config whose draft is not 'none'")
    if config.confidence_threshold > 0:
        raise ValueError(
            f"confidence_threshold {config.confidence_threshold} shortens the blocks that would do badly, and the "
            "steps left would be a selection; leave it at 0"
        )
    config = recording(config)
    drafts = config.num_draft_tokens or model.drafter.config.block_size
    steps: list[tuple[np.ndarray, ...]] = []
    confidence, texts = [], []
    for first, arguments in batches(model, prompts, params, seeds=seeds, batch_size=batch_size):
        out = run(*arguments, config=config)
        record, tokens, lengths = jax.tree.map(np.asarray, (out.steps, out.tokens, out.lengths))
        kept = min(batch_size, len(prompts) - first)
        row, step = np.nonzero(record.draft_tokens[:kept, :, drafts - 1] >= 0)
        steps.append((first + row, record.accepted[row, step], record.expected_accepted[row, step]))
        if record.confidence is not None:
            confidence.append(record.confidence[row, step])
        texts.append((tokens[:kept], lengths[:kept]))
    prompt, accepted, expected = (np.concatenate(parts) for parts in zip(*steps, strict=True))
    if not len(accepted):
        raise ValueError(
            f"no step verified {counted(drafts, 'draft')}: max_new_tokens {config.max_new_tokens} is too small, or "
            "texts end early"
        )
    return Measurement(
        num_draft_tokens=drafts,
        prompt=prompt,
        accepted=accepted,
        expected=expected,
        confidence=np.concatenate(confidence) if confidence else None,
        tokens=np.concatenate([t for t, _ in texts]),
        lengths=np.concatenate([n for _, n in texts]),
        num_prompts=len(prompts),
    )


def recording(config: GenerateConfig) -> GenerateConfig:
    """`config` with what `measure` needs switched on."""
    return dataclasses.replace(config, record_steps=True, expected_acceptance=True)


def batches(
    model: Model, prompts: Sequence[Sequence[int]], params: SamplingParams, *, seeds: Sequence[int], batch_size: int
):
    """Yield (index of the first prompt, arguments of `generate`), all of one shape.

    A batch that is not full gets empty prompts, which generate nothing.

    Raises:
      ValueError: as `pad_prompts`, or a token outside the vocabulary.
    """
    target = model.target.config
    tokens, lengths = pad_prompts(prompts, max_width=target.max_context)
    check_vocabulary(tokens, target.vocab_size)
    batch_size = min(batch_size, len(prompts))
    for first in range(0, len(prompts), batch_size):
        rows = slice(first, first + batch_size)
        missing = batch_size - len(prompts[rows])
        keys = request_keys([*seeds[rows], *range(missing)])
        yield (
            first,
            (
                model,
                jnp.pad(tokens[rows], [(0, missing), (0, 0)]),
                jnp.pad(lengths[rows], (0, missing)),
                keys,
                params,
            ),
        )


def interval(replicates: np.ndarray) -> list[Any]:
    """The central 95 % of bootstrap replicates [R, ...]: [low, high]."""
    tail = (1 - _LEVEL) / 2
    return np.quantile(replicates, [tail, 1 - tail], axis=0).tolist()


def calibration(confidence: np.ndarray, accepted: np.ndarray, *, bins: int = 10) -> list[dict[str, Any]]:
    """How well confidences foretell acceptance, slot by slot, over the steps that reached the slot.

    Args:
      confidence: float [N, K], probability of acceptance given that all drafts before were accepted.
      accepted: int [N].
      bins: equal parts of [0, 1].

    Returns:
      for each slot: steps that reached it, mean confidence and acceptance rate; `ece`, the expected calibration error
      (mean over steps of |confidence - rate| of their bin; 0 is perfect); `auc`, the chance that an accepted draft has
      the higher confidence of a pair (0.5: none); and the bins (number of steps, mean confidence, rate), empty ones
      left out.
    """
    slots = []
    for slot in range(confidence.shape[1]):
        reached = accepted >= slot
        c, hit = confidence[reached, slot].astype(np.float64), accepted[reached] > slot
        bin_of = np.minimum((c * bins).astype(int), bins - 1)
        rows = [(int((b := bin_of == i).sum()), float(c[b].mean()), float(hit[b].mean())) for i in np.unique(bin_of)]
        steps = len(c)
        slots.append(
            {
                "steps": steps,
                "mean_confidence": float(c.mean()) if steps else 0.0,
                "acceptance_rate": float(hit.mean()) if steps else 0.0,
                "ece": sum(n * abs(mean - rate) for n, mean, rate in rows) / max(steps, 1),
                "auc": _auc(c, hit),
                "bins": rows,
            }
        )
    return slots


def _auc(score: np.ndarray, hit: np.ndarray) -> float | None:
    positive, negative = int(hit.sum()), int((~hit).sum())
    if not positive or not negative:
        return None
    values, group = np.unique(score, return_inverse=True)
    count = np.bincount(group, minlength=len(values))
    rank = np.cumsum(count) - (count - 1) / 2  # equal scores share the mean of their ranks
    return float((rank[group][hit].sum() - positive * (positive + 1) / 2) / (positive * negative))
