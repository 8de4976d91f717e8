"""Acceptance statistics, under the names that serving engines share.

A verify step checks n drafts of a request and accepts a of them; it then emits a + 1 tokens. Everything here counts
such steps, n and a. A generation that stops at a token inside an accepted block emits less than that: the `emitted`
figures are cut there, all others are not, because the drafter was right about tokens that the caller did not want.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.formats import Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptanceStats:
    """Counts per request, and the rates that follow from them.

    Properties give one value per request, or one for all after `total`. A rate without a step behind it is 0.

    Attributes:
      num_steps: int32 [B], target forwards behind the prefill, with drafts or without.
      num_spec_steps: int32 [B], steps that verified at least one draft; everything below counts these alone.
      acceptance_histogram: int32 [B, K + 1], steps that accepted exactly j drafts.
      drafted_per_position: int32 [B, K], steps that verified a draft in slot j.
      reached_per_position: int32 [B, K], steps that verified slot j and accepted all drafts before it.
      num_emitted_tokens: int32 [B], tokens of verify steps that reached the output (the first token, which the prompt
        gives, is not one of them).
      expected_accepted: float32 [B, 2], summed over steps: drafts that `standard` and `block` verification accept on
        average over their coins, given the same drafts and laws. 0 unless `GenerateConfig.expected_acceptance`.
    """

    num_steps: Leaf
    num_spec_steps: Leaf
    acceptance_histogram: Leaf
    drafted_per_position: Leaf
    reached_per_position: Leaf
    num_emitted_tokens: Leaf
    expected_accepted: Leaf

    @classmethod
    def zeros(cls, batch: int, num_draft_tokens: int) -> "AcceptanceStats":
        """No steps yet."""
        count, slots = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, num_draft_tokens), jnp.int32)
        return cls(
            num_steps=count,
            num_spec_steps=count,
            acceptance_histogram=jnp.zeros((batch, num_draft_tokens + 1), jnp.int32),
            drafted_per_position=slots,
            reached_per_position=slots,
            num_emitted_tokens=count,
            expected_accepted=jnp.zeros((batch, 2), jnp.float32),
        )

    def add(
        self,
        *,
        running: Array,
        draft_lengths: Int[Array, " B"],
        num_accepted: Int[Array, " B"],
        num_emitted: Int[Array, " B"],
        expected_accepted: Float[Array, "B 2"] | None = None,
    ) -> "AcceptanceStats":
        """Count one step of the rows that are `running` (bool [B])."""
        active = running & (draft_lengths > 0)
        slots = jnp.arange(self.acceptance_histogram.shape[-1], dtype=jnp.int32)[None, :]
        one = active.astype(jnp.int32)
        hit = (num_accepted[:, None] == slots) & active[:, None]
        drafted = (slots[:, :-1] < draft_lengths[:, None]) & active[:, None]
        reached = slots[:, :-1] <= num_accepted[:, None]
        return AcceptanceStats(
            num_steps=self.num_steps + running.astype(jnp.int32),
            num_spec_steps=self.num_spec_steps + one,
            acceptance_histogram=self.acceptance_histogram + hit.astype(jnp.int32),
            drafted_per_position=self.drafted_per_position + drafted.astype(jnp.int32),
            reached_per_position=self.reached_per_position + (drafted & reached).astype(jnp.int32),
            num_emitted_tokens=self.num_emitted_tokens + one * num_emitted,
            expected_accepted=(
                self.expected_accepted
                if expected_accepted is None
                else self.expected_accepted + jnp.where(active[:, None], expected_accepted, 0.0)
            ),
        )

    def total(self) -> "AcceptanceStats":
        """The counts of all requests together."""
        return jax.tree.map(lambda a: jnp.sum(a, axis=0), self)

    @property
    def num_draft_tokens(self) -> Int[Array, "*B"]:
        """Drafts that were verified."""
        return jnp.sum(self.drafted_per_position, axis=-1)

    @property
    def accepted_per_position(self) -> Int[Array, "*B K"]:
        """Steps that accepted the draft in slot j (and so all before it)."""
        more = jnp.cumsum(self.acceptance_histogram[..., ::-1], axis=-1)[..., ::-1]
        return more[..., 1:]

    @property
    def num_accepted_draft_tokens(self) -> Int[Array, "*B"]:
        """Drafts that were accepted."""
        return jnp.sum(self.accepted_per_position, axis=-1)

    @property
    def mean_acceptance_length(self) -> Float[Array, "*B"]:
        """1 + accepted drafts per verify step: what a step would emit if nothing were cut off."""
        accepted = _ratio(self.num_accepted_draft_tokens, self.num_spec_steps)
        return accepted + (self.num_spec_steps > 0).astype(jnp.float32)

    @property
    def expected_acceptance_length(self) -> Float[Array, "*B 2"]:
        """Acceptance length of `standard` and `block` averaged over their coins: less noisy than the counted one."""
        steps = self.num_spec_steps[..., None]
        return _ratio(self.expected_accepted, steps) + (steps > 0).astype(jnp.float32)

    @property
    def mean_emitted_length(self) -> Float[Array, "*B"]:
        """Tokens per verify step that reached the output: cut at stop tokens."""
        return _ratio(self.num_emitted_tokens, self.num_spec_steps)

    @property
    def draft_acceptance_rate(self) -> Float[Array, "*B"]:
        """Accepted over verified drafts."""
        return _ratio(self.num_accepted_draft_tokens, self.num_draft_tokens)

    @property
    def acceptance_rate_per_position(self) -> Float[Array, "*B K"]:
        """Of the steps that verified a draft in slot j, the share that accepted it (and so all before it)."""
        return _ratio(self.accepted_per_position, self.drafted_per_position)

    @property
    def conditional_acceptance_rate_per_position(self) -> Float[Array, "*B K"]:
        """Of the steps that verified slot j and accepted all before it, the share that accepted it too."""
        return _ratio(self.accepted_per_position, self.reached_per_position)

    def summary(self) -> dict[str, Any]:
        """Totals as plain numbers for printing and JSON."""
        t = self.total() if self.num_spec_steps.ndim else self
        names = (
            "num_steps num_spec_steps num_draft_tokens num_accepted_draft_tokens num_emitted_tokens "
            "mean_acceptance_length mean_emitted_length draft_acceptance_rate acceptance_rate_per_position "
            "conditional_acceptance_rate_per_position acceptance_histogram"
        ).split()
        return {name: getattr(t, name).tolist() for name in names}


def _ratio(part: Array, whole: Array) -> Array:
    return jnp.where(whole > 0, part.astype(jnp.float32) / jnp.maximum(whole, 1).astype(jnp.float32), 0.0)
