"""What changes while tokens are generated, and what comes out."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.cache import DraftCache, TargetCache
from dspark_jax.formats import Leaf
from dspark_jax.sampling import SamplingParams
from dspark_jax.stats import AcceptanceStats


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Every verify step of every row, in order; -1 behind the last one.

    Attributes:
      draft_tokens: int32 [B, S, K], what was verified (-1 in slots that were not).
      accepted: int32 [B, S], how many of them were accepted.
      last_token: int32 [B, S], the correction or bonus token behind them.
      confidence: float32 [B, S, K], the confidence head's probability that each draft is accepted if all before it
        are, also for slots that were not verified; None where there is no such head.
      expected_accepted: float32 [B, S, 2], drafts that `standard` and `block` accept on average over their coins; None
        unless `GenerateConfig.expected_acceptance`.
    """

    draft_tokens: Leaf
    accepted: Leaf
    last_token: Leaf
    confidence: Leaf | None
    expected_accepted: Leaf | None

    @classmethod
    def empty(cls, batch: int, steps: int, drafts: int, *, confidence: bool, expected: bool) -> "StepRecord":
        """Room for `steps` steps of `drafts` drafts, none made."""
        return cls(
            draft_tokens=jnp.full((batch, steps, drafts), -1, jnp.int32),
            accepted=jnp.full((batch, steps), -1, jnp.int32),
            last_token=jnp.full((batch, steps), -1, jnp.int32),
            confidence=jnp.full((batch, steps, drafts), -1, jnp.float32) if confidence else None,
            expected_accepted=jnp.full((batch, steps, 2), -1, jnp.float32) if expected else None,
        )

    def put(
        self,
        index: Int[Array, " B"],
        running: Bool[Array, " B"],
        draft_tokens: Int[Array, "B K"],
        accepted: Int[Array, " B"],
        last: Int[Array, " B"],
        confidence: Float[Array, "B K"] | None,
        expected_accepted: Float[Array, "B 2"] | None,
    ) -> "StepRecord":
        """With step `index` of the rows that are running."""
        where = jnp.where(running, index, self.accepted.shape[1])
        rows = jnp.arange(where.shape[0], dtype=jnp.int32)
        step = StepRecord(
            draft_tokens=draft_tokens,
            accepted=accepted,
            last_token=last,
            confidence=confidence,
            expected_accepted=expected_accepted,
        )
        return jax.tree.map(lambda all_steps, one: all_steps.at[rows, where].set(one, mode="drop"), self, step)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationState:
    """All that changes while tokens are generated.

    Attributes:
      tokens: int32 [B, max_new_tokens], new tokens so far, the pad id behind them.
      num_tokens: int32 [B], how many there are.
      log_probs: float32 [B, max_new_tokens] if asked for: log-probability of each under the unfiltered target.
      anchor: int32 [B], the newest token.
      position: int32 [B], absolute position of the anchor, which is the number of tokens the target has seen.
      step: int32 [B], sampling steps made (the prefill's first token is step 0); random numbers are keyed by it.
      finish_reason: int32 [B], a `FinishReason`; a row that is not RUNNING changes no more.
      keys: typed keys [B], one a request.
      params: temperature and filters.
      cache, draft_cache: keys and values of the target and of the drafter's context (None without drafts).
      stats: acceptance counts of the verify steps.
      steps: the steps themselves if asked for.
    """

    tokens: Leaf
    num_tokens: Leaf
    log_probs: Leaf | None
    anchor: Leaf
    position: Leaf
    step: Leaf
    finish_reason: Leaf
    keys: Leaf
    params: SamplingParams
    cache: TargetCache
    draft_cache: DraftCache | None
    stats: AcceptanceStats
    steps: StepRecord | None

    def result(self) -> "Generation":
        """The generation as it stands. It shares arrays that the next `step` overwrites: copy it to keep it."""
        return Generation(
            tokens=self.tokens,
            lengths=self.num_tokens,
            finish_reason=self.finish_reason,
            log_probs=self.log_probs,
            stats=self.stats,
            steps=self.steps,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Committed:
    """What one step did.

    Attributes:
      tokens: int32 [B, K + 1], tokens that reached the output, -1 behind them.
      num_tokens: int32 [B], how many; 0 in rows that had finished.
      finish_reason: int32 [B], after the step.
    """

    tokens: Leaf
    num_tokens: Leaf
    finish_reason: Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """The result of `generate`.

    Attributes:
      tokens: int32 [B, max_new_tokens], new tokens only, a stop token included, then the pad id.
      lengths: int32 [B], how many of them are real.
      finish_reason: int32 [B], a `FinishReason`.
      log_probs: float32 [B, max_new_tokens] if asked for, 0 behind the end.
      stats: acceptance counts and rates.
      steps: every verify step, if asked for.
    """

    tokens: Leaf
    lengths: Leaf
    finish_reason: Leaf
    log_probs: Leaf | None
    stats: AcceptanceStats
    steps: StepRecord | None
