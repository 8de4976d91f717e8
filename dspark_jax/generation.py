"""Generation as pure functions.

`prefill` makes a state, `step` advances it by one draft and one verification, `generate` loops over steps inside one
jitted program. A row's anchor is its newest token: it is in the output, but has not been through the target. It stands
at `position`, and everything before it has keys and values in the caches.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from dspark_jax import sampling
from dspark_jax.checkpoint import Model
from dspark_jax.drafter import DSparkDrafter
from dspark_jax.generate_config import FinishReason, GenerateConfig
from dspark_jax.generation_state import Committed, Generation, GenerationState, StepRecord
from dspark_jax.sampling import SamplingParams
from dspark_jax.speculation import Plan, draft_block, expected_accepted, records_confidence, target_law, verify_block
from dspark_jax.stats import AcceptanceStats
from dspark_jax.target import last_row, token_positions


def generate(
    model: Model,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    keys: Key[Array, " B"],
    params: SamplingParams,
    *,
    config: GenerateConfig,
) -> Generation:
    """Continue each prompt. Pure and jittable: `jax.jit(generate, static_argnames="config")`.

    Args:
      model: what `load` returned.
      tokens: int32 [B, T], right-padded prompts (see `pad_prompts`). Ids outside the vocabulary cannot be seen inside
        a compiled program and give nonsense; `stream` and the command line check them.
      lengths: int32 [B], tokens of each prompt, at most T; a row of length 0 starts finished.
      keys: typed keys [B] (see `request_keys`). A row's random numbers depend on its key alone, not on the batch.
      params: temperature and filters, per request or for all.
      config: everything that shapes the program.

    Raises:
      ValueError: shapes that do not belong together, a prompt longer than the target's context, or a config that the
        model cannot serve.
    """
    plan = Plan.of(model, config)
    state = _prefill(model, tokens, lengths, keys, params, config, plan)
    state = lax.while_loop(
        lambda s: jnp.any(s.finish_reason == FinishReason.RUNNING), lambda s: _step(model, s, config, plan)[0], state
    )
    return state.result()


@functools.partial(jax.jit, static_argnames="config")
def prefill(
    model: Model,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    keys: Key[Array, " B"],
    params: SamplingParams,
    *,
    config: GenerateConfig,
) -> GenerationState:
    """Run the prompts through the target, fill the caches, sample each first token. Arguments as for `generate`."""
    return _prefill(model, tokens, lengths, keys, params, config, Plan.of(model, config))


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def step(model: Model, state: GenerationState, *, config: GenerateConfig) -> tuple[GenerationState, Committed]:
    """One draft and one verification of every running row. `state` is donated: use the returned one from here on."""
    return _step(model, state, config, Plan.of(model, config))


def _prefill(
    model: Model,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    keys: Key[Array, " B"],
    params: SamplingParams,
    config: GenerateConfig,
    plan: Plan,
) -> GenerationState:
    target = model.target
    _check_inputs(tokens, lengths, keys, params, target.config.max_context)
    batch, width = tokens.shape
    lengths = jnp.clip(lengths.astype(jnp.int32), 0, width)
    # No row grows past the context, whatever its budget is.
    capacity = min(width + config.max_new_tokens + plan.num_drafts + 1, target.config.max_context)
    cache = target.make_cache(batch, capacity)
    drafter = model.drafter if plan.num_drafts else None
    draft_cache = None if drafter is None else drafter.make_cache(batch, cache.slots)
    chunk = min(config.prefill_chunk, width)
    padded = jnp.pad(tokens, [(0, 0), (0, -width % chunk)])

    def read(i: Int[Array, ""] | int, carry: tuple) -> tuple:
        cache, draft_cache, hidden = carry
        start = i * chunk
        here = jnp.clip(lengths - start, 0, chunk)
        positions = token_positions(jnp.full((batch,), start, jnp.int32), here, chunk)
        part = lax.dynamic_slice_in_dim(padded, start, chunk, axis=1)
        out = target(part, positions, cache, capture=plan.capture, logits="none")
        if drafter is not None and draft_cache is not None:
            draft_cache = drafter.write_context(out.features, positions, draft_cache)
        last = last_row(out.hidden, positions)[:, 0]
        return out.cache, draft_cache, jnp.where((here > 0)[:, None], last, hidden)

    carry = (cache, draft_cache, jnp.zeros((batch, target.config.hidden_size), target.compute_dtype))
    with jax.named_scope("prefill"):
        if chunk == padded.shape[1]:
            carry = read(0, carry)
        else:
            # Chunks behind the longest prompt are padding alone.
            carry = lax.fori_loop(0, (jnp.max(lengths) + chunk - 1) // chunk, read, carry)
    cache, draft_cache, hidden = carry
    logits = target.lm_head.logits(hidden)[:, None]
    log_p = target_law(logits, params, target.kernels)
    first = sampling.sample(log_p[:, 0], sampling.step_keys(keys, 0))[:, None]
    zeros = jnp.zeros((batch,), jnp.int32)
    new = config.max_new_tokens
    state = GenerationState(
        tokens=jnp.full((batch, new), target.config.pad_token_id, jnp.int32),
        num_tokens=zeros,
        log_probs=jnp.zeros((batch, new), jnp.float32) if config.log_probs else None,
        anchor=first[:, 0],
        position=lengths,
        step=jnp.ones((batch,), jnp.int32),
        finish_reason=jnp.where(lengths > 0, FinishReason.RUNNING.value, FinishReason.EMPTY.value),
        keys=keys,
        params=params,
        cache=cache,
        draft_cache=draft_cache,
        stats=AcceptanceStats.zeros(batch, plan.num_drafts),
        steps=no_steps(batch, config, plan, drafter) if config.record_steps else None,
    )
    state, _ = _emit(state, first, (lengths > 0).astype(jnp.int32), logits, plan.stop_ids)
    return _end_at_context(state, target.config.max_context)


def no_steps(batch: int, config: GenerateConfig, plan: Plan, drafter: DSparkDrafter | None) -> StepRecord:
    """The record of a state that has made no step; `drafter` is None without drafts."""
    return StepRecord.empty(
        batch,
        config.max_new_tokens,
        plan.num_drafts,
        confidence=records_confidence(drafter, config),
        expected=config.expected_acceptance and plan.num_drafts > 0,
    )


def _check_inputs(tokens: Array, lengths: Array, keys: Array, params: SamplingParams, max_context: int) -> None:
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params must be SamplingParams, found {type(params).__name__}; see dspark_jax.SamplingParams")
    if not all(hasattr(array, "dtype") for array in (tokens, lengths, keys)):
        raise ValueError("tokens, lengths and keys must be arrays: make them with pad_prompts and request_keys")
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be integers [B, T], found {tokens.dtype} {tokens.shape}; see pad_prompts")
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"lengths must be integers [B], found {lengths.dtype} {lengths.shape}; see pad_prompts")
    batch, width = tokens.shape
    if not batch or not width:
        raise ValueError(f"tokens has shape {tokens.shape}: at least one row and one column are needed")
    if lengths.shape != (batch,) or keys.shape != (batch,):
        raise ValueError(
            f"tokens {tokens.shape}, lengths {lengths.shape} and keys {keys.shape} must share their first axis; "
            "make keys with request_keys(seeds), one seed a row"
        )
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
        raise ValueError(f"keys must be typed keys, found dtype {keys.dtype}; make them with request_keys(seeds)")
    if "threefry" not in str(jax.random.key_impl(keys)):
        raise ValueError(
            f"keys are of the {jax.random.key_impl(keys)} implementation, whose numbers for a row change with the "
            "batch; make them with request_keys(seeds)"
        )
    if width > max_context:
        raise ValueError(
            f"tokens is {width} wide but the target's context is {max_context}; shorten the prompts, or pad them to a "
            "bucket inside the context"
        )


def _emit(
    state: GenerationState,
    tokens: Int[Array, "B N"],
    count: Int[Array, " B"],
    logits: Float[Array, "B N V"],
    stop_ids: tuple[int, ...],
) -> tuple[GenerationState, Committed]:
    """Append the first `count` of `tokens` to each row's output, up to a stop token, the row's budget or a draw that
    had no law to draw from (-1)."""
    batch, width = tokens.shape
    slot = jnp.arange(width, dtype=jnp.int32)[None, :]
    room = state.tokens.shape[1]
    stops = _is_in(tokens, stop_ids) & (slot < count[:, None])
    stopped = jnp.any(stops, axis=1)
    count = jnp.where(stopped, jnp.argmax(stops, axis=1).astype(jnp.int32) + 1, count)
    count = jnp.minimum(count, room - state.num_tokens)
    invalid = (tokens < 0) & (slot < count[:, None])
    broken = jnp.any(invalid, axis=1)
    count = jnp.where(broken, jnp.argmax(invalid, axis=1).astype(jnp.int32), count)
    kept = slot < count[:, None]
    where = jnp.where(kept, state.num_tokens[:, None] + slot, room)
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    log_probs = state.log_probs
    if log_probs is not None:
        chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[..., None], axis=-1)[..., 0]
        chosen = chosen - jax.nn.logsumexp(logits, axis=-1)
        log_probs = log_probs.at[rows, where].set(chosen, mode="drop")
    num_tokens = state.num_tokens + count
    ended = jnp.where(stopped, FinishReason.STOP.value, FinishReason.LENGTH.value)
    running = state.finish_reason == FinishReason.RUNNING
    reason = jnp.where(running & (stopped | (num_tokens >= room)), ended, state.finish_reason)
    reason = jnp.where(running & broken, FinishReason.INVALID.value, reason)
    state = dataclasses.replace(
        state,
        tokens=state.tokens.at[rows, where].set(tokens, mode="drop"),
        num_tokens=num_tokens,
        log_probs=log_probs,
        finish_reason=reason,
    )
    return state, Committed(tokens=jnp.where(kept, tokens, -1), num_tokens=count, finish_reason=reason)


def _is_in(tokens: Int[Array, "B N"], ids: tuple[int, ...]) -> Bool[Array, "B N"]:
    found = jnp.zeros(tokens.shape, bool)
    for token in ids:
        found = found | (tokens == token)
    return found


def _end_at_context(state: GenerationState, max_context: int) -> GenerationState:
    """End rows whose anchor stands on the last position of the context: nothing can follow it."""
    full = (state.finish_reason == FinishReason.RUNNING) & (state.position >= max_context - 1)
    return dataclasses.replace(state, finish_reason=jnp.where(full, FinishReason.CONTEXT.value, state.finish_reason))


def _step(
    model: Model, state: GenerationState, config: GenerateConfig, plan: Plan
) -> tuple[GenerationState, Committed]:
    target, drafts = model.target, plan.num_drafts
    if (state.draft_cache is None) != (drafts == 0):
        raise ValueError("the state was made by a prefill with other drafting; prefill and step take the same config")
    drafter = model.drafter if drafts else None
    running = state.finish_reason == FinishReason.RUNNING
    keys = sampling.step_keys(state.keys, state.step)
    # Room for the drafts and the token behind them, in the row's budget and in the target's context.
    budget = state.tokens.shape[1] - state.num_tokens - 1
    context = target.config.max_context - 2 - state.position
    lengths = jnp.clip(jnp.minimum(budget, context), 0, drafts)
    log_q = confidence = None
    draft_tokens = jnp.zeros((state.anchor.shape[0], 0), jnp.int32)
    if drafter is not None and state.draft_cache is not None:
        with jax.named_scope("draft"):
            draft_tokens, log_q, lengths, confidence = draft_block(
                drafter, target, state, state.draft_cache, keys, lengths, config, drafts
            )
    lengths = jnp.where(running, lengths, 0)
    slot = jnp.arange(drafts, dtype=jnp.int32)[None, :]
    draft_tokens = jnp.where(slot < lengths[:, None], draft_tokens, -1)
    with jax.named_scope("verify"):
        block = jnp.concatenate([state.anchor[:, None], jnp.maximum(draft_tokens, 0)], axis=1)
        positions = token_positions(state.position, jnp.where(running, lengths + 1, 0), drafts + 1)
        out = target(block, positions, state.cache, capture=plan.capture, logits="none")
        logits = target.lm_head.logits(out.hidden)
        log_p = target_law(logits, state.params, target.kernels)
        tokens, accepted = verify_block(draft_tokens, log_q, log_p, keys, lengths, state, config, plan)
        expected = None
        if config.expected_acceptance and drafts:
            expected = expected_accepted(draft_tokens, log_q, log_p, lengths)
    draft_cache = state.draft_cache
    if drafter is not None and draft_cache is not None:
        with jax.named_scope("draft_context"):
            kept = token_positions(state.position, jnp.where(running, accepted + 1, 0), drafts + 1)
            draft_cache = drafter.write_context(out.features, kept, draft_cache)
    emitted = jnp.where(running, accepted + 1, 0)
    last = jnp.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0]
    steps = state.steps
    if steps is not None:
        sure = confidence if records_confidence(drafter, config) else None
        steps = steps.put(state.step - 1, running, draft_tokens, accepted, last, sure, expected)
    state = dataclasses.replace(
        state,
        anchor=jnp.where(running, last, state.anchor),
        position=state.position + emitted,
        step=state.step + running.astype(jnp.int32),
        cache=out.cache,
        draft_cache=draft_cache,
        steps=steps,
    )
    state, committed = _emit(state, tokens, emitted, logits, plan.stop_ids)
    stats = state.stats.add(
        running=running,
        draft_lengths=lengths,
        num_accepted=accepted,
        num_emitted=committed.num_tokens,
        expected_accepted=expected,
    )
    state = _end_at_context(dataclasses.replace(state, stats=stats), target.config.max_context)
    return state, dataclasses.replace(committed, finish_reason=state.finish_reason)


def target_logits(model: Model, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
    """Teacher-forced target logits, float32 [B, T, V]: row t scores the token behind tokens[:, :t + 1].

    Raises:
      ValueError: tokens are not integers [B, T], or wider than the target's context.
    """
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens must be integers [B, T], found {tokens.dtype} {tokens.shape}; see pad_prompts")
    batch, width = tokens.shape
    if not 0 < width <= model.target.config.max_context:
        raise ValueError(f"tokens is {width} wide, the target's context is {model.target.config.max_context}")
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None, :], (batch, width))
    out = model.target(tokens, positions, model.target.make_cache(batch, width), logits="none")
    return model.target.lm_head.logits(out.hidden)
