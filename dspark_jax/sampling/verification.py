"""Which drafts stand, and the token after them."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from dspark_jax.sampling.drafting import draw, draw_greedy
from dspark_jax.sampling.keys import Purpose, coins, purpose_keys, row_keys
from dspark_jax.sampling.laws import acceptance, check_rows, check_shapes, residual_scores, verified_lengths
from dspark_jax.sampling.methods import verification_rule


class Verified(NamedTuple):
    """What a step emits.

    Attributes:
      tokens: i32 [B,K+1], the accepted drafts, then the correction or bonus token, then -1.
      num_accepted: i32 [B], accepted drafts, 0..draft_lengths; num_accepted + 1 tokens are emitted.
    """

    tokens: Int[Array, "B K+1"]
    num_accepted: Int[Array, " B"]


def verify(
    draft_tokens: Int[Array, "B K"],
    log_q: Float[Array, "B K V"] | None,
    log_p: Float[Array, "B K+1 V"],
    *,
    keys: Key[Array, " B"],
    method: str,
    draft_lengths: Int[Array, " B"] | None = None,
    proposal_valid: Bool[Array, " B"] | None = None,
    greedy: Bool[Array, " B"] | None = None,
) -> Verified:
    """Accepts drafts and draws one more token, so that the emitted tokens have exactly the target's law.

    "standard": token by token (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318). "block":
      all drafts together,
    never fewer accepted on average (Sun et al. 2024, arXiv 2403.10444, Algorithm 2). "match": the target draws every
    row, drafts stand as long as they equal it; needs no proposal and never accepts more on average than "standard" with
    one.

    Lossless on three conditions: log_q is what the drafts were drawn from (or the one-hot rule is used); keys are fresh
      in every step, never
    keyed by position; `draft_lengths` was decided without looking at the first draft left out or any after it.

    Args:
      draft_tokens: slots from `draft_lengths` on may hold -1 and do not matter.
      log_q: row i is what draft i was drawn from. None: the one-hot rule; required for "match".
      log_p: row i is the target after i drafts, with the filters applied (`target_log_probs`).
      keys: the step's keys, the ones that `draft` got: each takes its own purpose from them.
      method: "standard", "block" or "match".
      draft_lengths: how many drafts to verify, 0..K. None: K.
      proposal_valid: rows where False have no usable log_q: the one-hot rule there.
      greedy: rows that accept while the draft is the argmax of log_p (first index of equal ones) and end with the
        argmax. One-hot rows of `target_log_probs` come out so without being named.

    Returns:
      `Verified`. A row whose last law is empty (all -inf, a broken target) ends in -1.

    Raises:
      ValueError: an unknown method (the known ones are listed), a log_q given to "match", or shapes that do not fit.
    """
    rule = verification_rule(method)
    check_shapes(draft_tokens, log_q, log_p, method=method)
    check_rows(draft_tokens, keys=keys, proposal_valid=proposal_valid, greedy=greedy)
    draft_tokens = draft_tokens.astype(jnp.int32)
    lengths = verified_lengths(draft_tokens, draft_lengths)
    if rule.uses_proposal:
        log_rho, h = acceptance(
            draft_tokens, log_q, log_p, method=method, draft_lengths=lengths, proposal_valid=proposal_valid
        )
        num_accepted = rule.accepted(coins(keys, draft_tokens.shape[1]), h)
        law = residual_scores(
            log_q,
            log_p,
            log_rho,
            num_accepted,
            method=method,
            draft_lengths=lengths,
            draft_tokens=None if log_q is not None and proposal_valid is None else draft_tokens,
            proposal_valid=proposal_valid,
        )
        last = draw(law, purpose_keys(keys, Purpose.FINAL), greedy)
    else:
        num_accepted, last = _matched(draft_tokens, _draw_rows(log_p, keys, greedy), lengths)
    if greedy is not None and rule.uses_proposal:
        num_accepted, last = lax.cond(
            jnp.any(greedy),
            lambda: _where_greedy(greedy, _matched(draft_tokens, draw_greedy(log_p), lengths), (num_accepted, last)),
            lambda: (num_accepted, last),
        )
    return Verified(_emitted(draft_tokens, num_accepted, last), num_accepted)


def _matched(draft_tokens: Array, target_tokens: Array, lengths: Array) -> tuple[Array, Array]:
    """Accepts the drafts that equal the target's own tokens [B,K+1]; the last token is the target's behind them."""
    slot = jnp.arange(draft_tokens.shape[1], dtype=jnp.int32)[None]
    equal = (draft_tokens == target_tokens[:, :-1]) & (draft_tokens >= 0) & (slot < lengths[:, None])
    num_accepted = jnp.sum(jnp.cumprod(equal.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    return num_accepted, jnp.take_along_axis(target_tokens, num_accepted[:, None], axis=1)[:, 0]


def _where_greedy(greedy: Array, decided: tuple[Array, Array], drawn: tuple[Array, Array]) -> tuple[Array, Array]:
    return jnp.where(greedy, decided[0], drawn[0]), jnp.where(greedy, decided[1], drawn[1])


def _draw_rows(log_p: Array, keys: Array, greedy: Array | None) -> Array:
    # Row by row, or the noise of all rows would be K + 1 times a [B, V] buffer.
    rows = jnp.arange(log_p.shape[1], dtype=jnp.int32)
    tokens = lax.map(
        lambda row: draw(lax.dynamic_index_in_dim(log_p, row, 1, keepdims=False), row_keys(keys, row), greedy), rows
    )
    return tokens.T


def _emitted(draft_tokens: Array, num_accepted: Array, last: Array) -> Array:
    position = jnp.arange(draft_tokens.shape[1] + 1, dtype=jnp.int32)[None]
    drafts = jnp.pad(draft_tokens, ((0, 0), (0, 1)))
    end = num_accepted[:, None]
    return jnp.where(position < end, drafts, jnp.where(position == end, last[:, None], -1))
