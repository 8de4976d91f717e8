"""What verification does, as probabilities and without random numbers.

Enumerating these functions over all drafts gives the exact law of the emitted tokens, so losslessness can be checked to
rounding. All of them compute in the dtype of their inputs, at least fp32, and are free of NaN for any pattern of -inf.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.nn import logsumexp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.sampling.methods import verification_rule


def acceptance(
    draft_tokens: Int[Array, "B K"],
    log_q: Float[Array, "B K V"] | None,
    log_p: Float[Array, "B K+1 V"],
    *,
    method: str,
    draft_lengths: Int[Array, " B"] | None = None,
    proposal_valid: Bool[Array, " B"] | None = None,
) -> tuple[Float[Array, "B K"], Float[Array, "B K"]]:
    """The acceptance law of given drafts, before any coin is drawn.

    "standard": Leviathan et al. 2023, Chen et al. 2023. "block": Sun et al. 2024, arXiv 2403.10444, Algorithm 2.
    "match": the law of drawing the target's rows and comparing. `dspark_jax.sampling.methods` has the formulas.

    Args:
      draft_tokens: slots from `draft_lengths` on may hold -1.
      log_q: row i is what draft i was drawn from, normalised. None: the one-hot rule, which is right however drafts
        were made.
      log_p: row i is the target after i drafts, normalised.
      method: "standard", "block" or "match" (which needs log_q=None).
      draft_lengths: how many drafts to verify, 0..K. None: K. It may depend on the drafts before the first one left
        out, never on that one or later ones.
      proposal_valid: rows where False use the one-hot rule in place of log_q. None: all valid.

    Returns:
      log_rho [B,K]: log Pr(num_accepted >= i | drafts 1..i); -inf from `draft_lengths` on.
      h [B,K]: acceptance thresholds; 0 from `draft_lengths` on.

    Raises:
      ValueError: an unknown method, a log_q given to "match", or shapes that do not fit.
    """
    rule = verification_rule(method)
    check_shapes(draft_tokens, log_q, log_p, method=method)
    check_rows(draft_tokens, proposal_valid=proposal_valid)
    log_q, log_p = _common_dtype(log_q, log_p)
    draft_tokens = draft_tokens.astype(jnp.int32)
    lengths = verified_lengths(draft_tokens, draft_lengths)
    inside = jnp.arange(draft_tokens.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
    log_p_draft = _at_drafts(log_p, draft_tokens, inside)
    log_q_draft = jnp.zeros_like(log_p_draft)
    if log_q is not None:
        given = _at_drafts(log_q, draft_tokens, inside)
        log_q_draft = given if proposal_valid is None else jnp.where(proposal_valid[:, None], given, 0.0)
    # p = 0 rejects whatever q is; q = 0 < p, which only rounding can bring about, accepts.
    impossible = log_p_draft == -jnp.inf
    log_ratio = jnp.where(impossible, -jnp.inf, log_p_draft - jnp.where(impossible, 0.0, log_q_draft))
    log_rho = jnp.where(inside, rule.log_survival(log_ratio), -jnp.inf)
    mass = _residual_mass(log_q, log_p, log_p_draft, log_rho, proposal_valid) if rule.uses_residual_mass else log_rho
    h = jnp.where(inside, rule.thresholds(log_ratio, log_rho, mass, lengths), 0.0)
    return log_rho, h


def residual_log_probs(
    log_q: Float[Array, "B K V"] | None,
    log_p: Float[Array, "B N V"],
    log_rho: Float[Array, "B K"],
    num_accepted: Int[Array, " B"],
    *,
    method: str,
    draft_lengths: Int[Array, " B"] | None = None,
    draft_tokens: Int[Array, "B K"] | None = None,
    proposal_valid: Bool[Array, " B"] | None = None,
) -> Float[Array, "B V"]:
    """The law of the token after the accepted drafts: the residual, or the target's row when all were accepted.

    Args:
      log_q, log_p (N = K + 1), method, draft_lengths, proposal_valid: as for `acceptance`.
      log_rho: from `acceptance` with the same method.
      num_accepted: 0..`draft_lengths`.
      draft_tokens: needed where the one-hot rule applies (log_q None or proposal_valid given).

    Returns:
      Normalised log-probabilities. Where the residual has no mass, which rejection never reaches but by rounding, the
      target's row.

    Raises:
      ValueError: an unknown method, a log_q given to "match", no draft_tokens where they are needed, or shapes that do
        not fit.
    """
    residual, target = _residual(
        log_q,
        log_p,
        log_rho,
        num_accepted,
        method=method,
        draft_lengths=draft_lengths,
        draft_tokens=draft_tokens,
        proposal_valid=proposal_valid,
    )
    log_mass = logsumexp(residual, axis=-1, keepdims=True)
    return jnp.where(log_mass > -jnp.inf, residual - jnp.where(log_mass > -jnp.inf, log_mass, 0.0), target)


def residual_scores(
    log_q: Array | None, log_p: Array, log_rho: Array, num_accepted: Array, **options: Any
) -> Float[Array, "B V"]:
    """`residual_log_probs` but for a constant in each row, which takes a reading less: a draw does not see it."""
    residual, target = _residual(log_q, log_p, log_rho, num_accepted, **options)
    return jnp.where(jnp.max(residual, axis=-1, keepdims=True) > -jnp.inf, residual, target)


def _residual(
    log_q: Array | None,
    log_p: Array,
    log_rho: Array,
    num_accepted: Array,
    *,
    method: str,
    draft_lengths: Array | None,
    draft_tokens: Array | None,
    proposal_valid: Array | None,
) -> tuple[Array, Array]:
    """-> the residual, not normalised and perhaps empty, and the target's row [B,V]."""
    rule = verification_rule(method)
    check_shapes(log_rho, log_q, log_p, method=method)
    check_rows(log_rho, num_accepted=num_accepted, proposal_valid=proposal_valid)
    if draft_tokens is None and (log_q is None or proposal_valid is not None):
        raise ValueError(
            "residual_log_probs needs draft_tokens for the one-hot rule (log_q=None or proposal_valid given)."
        )
    log_q, log_p = _common_dtype(log_q, log_p)
    batch, slots = log_rho.shape
    num_accepted = num_accepted.astype(jnp.int32)
    lengths = verified_lengths(log_rho, draft_lengths)
    rows = jnp.arange(batch, dtype=jnp.int32)
    slot = jnp.minimum(num_accepted, slots - 1)
    rejected = (num_accepted < lengths)[:, None]
    target = log_p[rows, num_accepted]
    residual = target
    if draft_tokens is not None:
        refused = draft_tokens[rows, slot][:, None].astype(jnp.int32)
        vocabulary = jnp.arange(log_p.shape[-1], dtype=jnp.int32)[None]
        residual = jnp.where(rejected & (vocabulary == refused), -jnp.inf, target)
    if log_q is not None:
        log_scale = rule.residual_log_scale(log_rho.astype(log_p.dtype), num_accepted)[:, None]
        difference = _log_positive_part(target, log_q[rows, slot], jnp.where(rejected, log_scale, 0.0))
        difference = jnp.where(rejected, difference, target)
        residual = difference if proposal_valid is None else jnp.where(proposal_valid[:, None], difference, residual)
    return residual, target


def num_accepted_probs(h: Float[Array, "B K"], *, method: str) -> Float[Array, "B K+1"]:
    """Pr(num_accepted = 0..K | drafts), from the h of `acceptance` with the same method."""
    survival = verification_rule(method).survival(h)
    one = jnp.ones_like(survival[:, :1])
    return jnp.concatenate([one, survival], axis=1) - jnp.concatenate([survival, jnp.zeros_like(one)], axis=1)


def expected_acceptance_length(h: Float[Array, "B K"], *, method: str) -> Float[Array, " B"]:
    """1 + E[num_accepted | drafts]: the acceptance length of a step, averaged over the coins.

    Its mean over steps has the same expectation as the counted acceptance length and less variance, and one run gives
    it for every method from the same drafts. h is that of `acceptance` with the same method; it knows the draft
    lengths.
    """
    return 1.0 + jnp.sum(verification_rule(method).survival(h), axis=1)


def verified_lengths(slots: Array, draft_lengths: Int[Array, " B"] | None) -> Int[Array, " B"]:
    """The draft lengths as int32 [B], inside 0..K, all slots [B,K] where none are given."""
    if draft_lengths is None:
        return jnp.full((slots.shape[0],), slots.shape[1], jnp.int32)
    check_rows(slots, draft_lengths=draft_lengths)
    return jnp.clip(draft_lengths.astype(jnp.int32), 0, slots.shape[1])


def check_rows(slots: Array, **rows: Array | None) -> None:
    """Raises ValueError unless every named array that is given has one entry a request, [B] for slots [B,K]."""
    for name, row in rows.items():
        if row is not None and row.shape != slots.shape[:1]:
            raise ValueError(f"{name} has shape {row.shape} for drafts {slots.shape}: it has to be [B].")


def check_shapes(slots: Array, log_q: Array | None, log_p: Array, *, method: str) -> None:
    """Raises ValueError unless [B,K] slots, log_q and log_p fit together and the method may have a log_q."""
    if slots.ndim != 2 or slots.shape[1] < 1:
        raise ValueError(f"draft_tokens has shape {slots.shape}: it has to be [B, K] with K >= 1.")
    batch, num_slots = slots.shape
    if log_p.ndim != 3 or log_p.shape[:2] != (batch, num_slots + 1):
        raise ValueError(f"log_p has shape {log_p.shape} for drafts {slots.shape}: it has to be [B, K+1, V].")
    if log_q is None:
        return
    if not verification_rule(method).uses_proposal:
        raise ValueError(
            f'log_q was given to method "{method}", which ignores what drafts were drawn from: pass log_q=None.'
        )
    if log_q.shape != (batch, num_slots, log_p.shape[-1]):
        raise ValueError(f"log_q has shape {log_q.shape} beside log_p {log_p.shape}: it has to be [B, K, V].")


def _common_dtype(log_q: Array | None, log_p: Array) -> tuple[Array | None, Array]:
    dtype = log_p.dtype if jnp.finfo(log_p.dtype).bits > 32 else jnp.float32
    return (None if log_q is None else log_q.astype(dtype)), log_p.astype(dtype)


def _at_drafts(log_probs: Array, draft_tokens: Array, inside: Array) -> Array:
    """log_probs[b, i, draft_tokens[b, i]], -inf for slots that hold no draft and tokens that do not exist."""
    batch, slots = draft_tokens.shape
    real = inside & (draft_tokens >= 0) & (draft_tokens < log_probs.shape[-1])
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    columns = jnp.arange(slots, dtype=jnp.int32)[None]
    return jnp.where(real, log_probs[rows, columns, jnp.where(real, draft_tokens, 0)], -jnp.inf)


def _residual_mass(
    log_q: Array | None, log_p: Array, log_p_draft: Array, log_rho: Array, proposal_valid: Array | None
) -> Array:
    """Z of block verification for slots 1..K-1, and a column that no rule reads."""
    rho = jnp.exp(log_rho[:, :-1])
    mass = -rho * jnp.expm1(log_p_draft[:, 1:])
    if log_q is not None:
        excess = rho[..., None] * jnp.exp(log_p[:, 1:-1]) - jnp.exp(log_q[:, 1:])
        # A GPU sums a row in two kernels. Without the barrier the second one would be part of what follows, where one
        # thread a slot does it.
        general = lax.optimization_barrier(jnp.sum(jnp.maximum(excess, 0.0), axis=-1))
        mass = general if proposal_valid is None else jnp.where(proposal_valid[:, None], general, mass)
    return jnp.concatenate([mass, jnp.zeros_like(log_rho[:, :1])], axis=1)


def _log_positive_part(log_p: Array, log_q: Array, log_scale: Array) -> Array:
    """log (scale * p - q)+ without leaving the log domain."""
    covered = (log_p == -jnp.inf) | (log_q == -jnp.inf)
    # Rounds exactly as the running ratio does (log_ratio + log_rho), so that a rejected draft is never drawn again.
    excess = jnp.where(covered, 1.0, jnp.where(covered, 0.0, log_p) - jnp.where(covered, 0.0, log_q) + log_scale)
    positive = excess > 0
    gap = jnp.where(positive, excess, 1.0)
    # log(1 - exp(-gap)), by the form that does not cancel.
    remainder = jnp.where(gap < math.log(2), jnp.log(-jnp.expm1(-gap)), jnp.log1p(-jnp.exp(-gap)))
    return jnp.where(positive, log_p + log_scale + jnp.where(covered, 0.0, remainder), -jnp.inf)
