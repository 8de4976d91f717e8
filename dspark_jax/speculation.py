"""The two halves of a step: drafting a block and verifying it; and what a config means for a model."""

import dataclasses
import functools
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax import sampling
from dspark_jax.cache import DraftCache
from dspark_jax.checkpoint import Model
from dspark_jax.drafter import DSparkDrafter
from dspark_jax.generate_config import GenerateConfig
from dspark_jax.generation_state import GenerationState
from dspark_jax.kernels import Kernels, first_that_serves
from dspark_jax.target import MiniMaxTarget
from pallas_kernels import filter_floors

log = logging.getLogger("dspark_jax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What follows from model and config before anything runs.

    Attributes:
      num_drafts: drafts of a step; 0 decodes without the drafter.
      capture: target layers whose residual streams the drafter reads.
      stop_ids: tokens that end a row.
      verify: the verification rule in effect.
    """

    num_drafts: int
    capture: tuple[int, ...]
    stop_ids: tuple[int, ...]
    verify: str

    @classmethod
    def of(cls, model: Model, config: GenerateConfig) -> "Plan":
        """Check that `model` can serve `config`, and say in the log how it will.

        Raises:
          ValueError: it cannot.
        """
        if not isinstance(model, Model):
            raise ValueError(f"model must be what dspark_jax.load returned, found {type(model).__name__}")
        if not isinstance(config, GenerateConfig):
            raise ValueError(f"config must be a GenerateConfig, found {type(config).__name__}")
        target = model.target.config
        stop = target.eos_token_ids if config.stop_token_ids is None else config.stop_token_ids
        beyond = [i for i in stop if i >= target.vocab_size]
        if beyond:
            raise ValueError(f"stop token {beyond[0]} lies outside the vocabulary of {target.vocab_size}")
        if config.draft == "none":
            log.info("decoding without drafts, prefill chunks of %d tokens", config.prefill_chunk)
            return cls(num_drafts=0, capture=(), stop_ids=stop, verify="match")
        if model.drafter is None:
            raise ValueError(f"draft={config.draft!r} needs a drafter and this checkpoint has none; use draft='none'")
        drafter = model.drafter.config
        drafts = drafter.block_size if config.num_draft_tokens is None else config.num_draft_tokens
        if drafts > drafter.block_size:
            raise ValueError(f"num_draft_tokens {drafts} exceeds the drafter's block size {drafter.block_size}")
        if config.confidence_threshold > 0 and not drafter.confidence_head:
            raise ValueError("confidence_threshold needs a confidence head and this drafter has none; leave it at 0")
        # A block that the threshold may shorten is a scheduled, ragged one.
        ragged = config.confidence_threshold > 0 and config.verify == "block"
        verify = config.ragged_verify if ragged else config.verify
        forced = config.benchmark_forced_acceptance
        if forced is not None:
            if forced > drafts:
                raise ValueError(f"benchmark_forced_acceptance {forced} exceeds the {drafts} drafts of a step")
            log.warning(
                "BENCHMARK ONLY: %s drafts a step are accepted whatever they are; the text means nothing", forced
            )
        log.info(
            "speculative decoding: %d %s drafts a step, %s verification, drafter attention: %s",
            drafts,
            config.draft,
            verify,
            config.draft_attention or "best on this device",
        )
        return cls(num_drafts=drafts, capture=drafter.target_layer_ids, stop_ids=stop, verify=verify)


class DraftedBlock(NamedTuple):
    """What the drafter gives a step.

    Attributes:
      tokens: int32 [B, K].
      log_q: the law each was drawn from, None for the one-hot rule.
      lengths: int32 [B], how many of them to verify.
      confidence: float32 [B, K], where it is needed or recorded and there is a head for it.
    """

    tokens: Int[Array, "B K"]
    log_q: Float[Array, "B K V"] | None
    lengths: Int[Array, " B"]
    confidence: Float[Array, "B K"] | None


def records_confidence(drafter: DSparkDrafter | None, config: GenerateConfig) -> bool:
    """Whether the confidence of each draft is part of the recorded steps."""
    return config.record_steps and drafter is not None and drafter.confidence_head is not None


def draft_block(
    drafter: DSparkDrafter,
    target: MiniMaxTarget,
    state: GenerationState,
    draft_cache: DraftCache,
    keys: Array,
    lengths: Int[Array, " B"],
    config: GenerateConfig,
    drafts: int,
) -> DraftedBlock:
    """Draft a block, and shorten it where the drafter is not sure."""
    own = drafter.config.own_embeddings
    block = drafter.block(
        state.anchor,
        state.position,
        draft_cache,
        num_slots=drafts,
        embed=None if own else target.embed_tokens,
        head=None if own else target.lm_head,
        implementation=config.draft_attention,
    )
    # The mask token marks a slot to be filled; a draft of it would only confuse the next block.
    allowed = jnp.arange(block.base_logits.shape[-1]) != drafter.config.mask_token_id
    draft = draft_tokens(
        drafter,
        block.base_logits,
        block.hidden,
        state.anchor,
        temperature=jnp.asarray(state.params.temperature),
        keys=keys,
        method=config.draft,
        allowed=allowed,
    )
    confidence = None
    if drafter.confidence_head is not None and (config.confidence_threshold > 0 or config.record_steps):
        confidence = jax.nn.sigmoid(drafter.confidence_head(block.hidden, draft.prev_embeddings))
    if confidence is not None and config.confidence_threshold > 0:
        # Slot k's confidence is known before draft k is drawn, so cutting there cannot favour any token.
        sure = confidence >= config.confidence_threshold
        cut = jnp.where(jnp.all(sure, axis=1), drafts, jnp.argmin(sure, axis=1).astype(jnp.int32))
        lengths = jnp.minimum(lengths, cut)
    return DraftedBlock(draft.tokens, draft.log_q, lengths, confidence)


def draft_tokens(
    drafter: DSparkDrafter,
    base_logits: Float[Array, "B K V"],
    hidden: Float[Array, "B K H"],
    anchor: Int[Array, " B"],
    **options: Any,
) -> sampling.Draft:
    """`sampling.draft` with the drafter's Markov head, through the kernel that its `kernels` name or the best one."""
    head, named = drafter.markov_head, drafter.kernels.sampling
    draw_slot = getattr(head, "draw_slot", None)  # a head without tables to multiply has none

    def run(form: str | None) -> sampling.Draft:
        draw = None if form == "xla" or draw_slot is None else functools.partial(draw_slot, implementation=form)
        return sampling.draft(base_logits, hidden, anchor, markov=head, draw_slot=draw, **options)

    return first_that_serves(("triton", "xla") if named is None else (named,), run)


def target_law(
    logits: Float[Array, "B N V"], params: sampling.SamplingParams, kernels: Kernels
) -> Float[Array, "B N V"]:
    """`sampling.target_log_probs` with the search for the floors that `kernels` names, or the best on this device."""

    def run(form: str | None) -> Float[Array, "B N V"]:
        floors = None if form == "xla" else functools.partial(filter_floors, implementation=form)
        return sampling.target_log_probs(logits, params, floors=floors)

    return first_that_serves(("triton", "xla") if kernels.sampling is None else (kernels.sampling,), run)


def expected_accepted(
    draft_tokens: Int[Array, "B K"],
    log_q: Float[Array, "B K V"] | None,
    log_p: Float[Array, "B N V"],
    lengths: Int[Array, " B"],
) -> Float[Array, "B 2"]:
    """Drafts that `standard` and `block` accept on average over the coins."""
    means = []
    for method in ("standard", "block"):
        _, h = sampling.acceptance(draft_tokens, log_q, log_p, method=method, draft_lengths=lengths)
        means.append(sampling.expected_acceptance_length(h, method=method) - 1.0)
    return jnp.stack(means, axis=-1)


def verify_block(
    draft_tokens: Int[Array, "B K"],
    log_q: Float[Array, "B K V"] | None,
    log_p: Float[Array, "B N V"],
    keys: Array,
    lengths: Int[Array, " B"],
    state: GenerationState,
    config: GenerateConfig,
    plan: Plan,
) -> tuple[Int[Array, "B N"], Int[Array, " B"]]:
    """-> tokens (accepted drafts, the correction or bonus token, then -1), accepted drafts.

    `log_p` is one-hot in greedy rows, so the rules that draw once need not be told which they are: a condition would
    have the device ask the host, and hold all of `log_p` in memory. "match" draws every row, and is told.
    """
    if not plan.num_drafts:
        return sampling.sample(log_p[:, 0], keys)[:, None], jnp.zeros_like(lengths)
    if config.benchmark_forced_acceptance is not None:
        rate = config.benchmark_forced_acceptance
        done = state.step.astype(jnp.float32) * rate
        accepted = jnp.minimum((jnp.floor(done) - jnp.floor(done - rate)).astype(jnp.int32), lengths)
        row = jnp.take_along_axis(log_p, accepted[:, None, None], axis=1)[:, 0]
        last = sampling.sample(row, keys)[:, None]
        slot = jnp.arange(plan.num_drafts + 1, dtype=jnp.int32)[None, :]
        tokens = jnp.pad(draft_tokens, [(0, 0), (0, 1)], constant_values=-1)
        tokens = jnp.where(slot == accepted[:, None], last, jnp.where(slot < accepted[:, None], tokens, -1))
        return tokens, accepted
    greedy = jnp.broadcast_to(sampling.is_greedy(jnp.asarray(state.params.temperature)), lengths.shape)
    verified = sampling.verify(
        draft_tokens,
        None if plan.verify == "match" else log_q,
        log_p,
        keys=keys,
        method=plan.verify,
        draft_lengths=lengths,
        greedy=greedy if plan.verify == "match" else None,
    )
    return verified.tokens, verified.num_accepted
