"""Drawing tokens: one from a given law, and a block of drafts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from dspark_jax.sampling.filters import row_peak, scale
from dspark_jax.sampling.keys import Purpose, draft_keys, gumbels, purpose_keys
from dspark_jax.sampling.params import inverse_temperature, is_greedy

Markov = Callable[[Array, Array, Any], tuple[Array, Array, Any]]


class SlotDraw(NamedTuple):
    """What a slot of a block is drawn with, beside what `markov` gets.

    Attributes:
      allowed: bool [V], tokens that may be drawn.
      words: uint32 [B,K,2], threefry keys of the slots' Gumbel numbers, those of `keys.gumbels`.
      inverse_temperature: fp32 [B].
      drawn: bool [B]; rows where False take the argmax, the first index of equal ones.
      keep: whether the logits are read afterwards.
    """

    allowed: Bool[Array, " V"]
    words: UInt32[Array, "B K 2"]
    inverse_temperature: Float[Array, " B"]
    drawn: Bool[Array, " B"]
    keep: bool


class DrawnSlot(NamedTuple):
    """A slot drawn in one go.

    Attributes:
      logits: fp32 [B,K,V], those given, but for the slot's row where they are kept: logit + bias, -inf where not
        allowed.
      token: i32 [B], -1 in rows without a finite logit.
      peak: fp32 [B], the slot's largest logit, 0 in such rows.
      log_mass: fp32 [B], the log of the sum of exp((logit - peak) * inverse temperature), 0 in such rows.
      embedding, carry: as of `markov`.
    """

    logits: Float[Array, "B K V"]
    token: Int[Array, " B"]
    peak: Float[Array, " B"]
    log_mass: Float[Array, " B"]
    embedding: Float[Array, "B r"]
    carry: Any


# (logits fp32 [B,K,V], slot, previous tokens [B], hidden of the slot [B,H], carry, SlotDraw) -> DrawnSlot
DrawSlot = Callable[[Array, int, Array, Array, Any, SlotDraw], DrawnSlot]


class Draft(NamedTuple):
    """A block of drafts.

    Attributes:
      tokens: i32 [B,K]; -1 where a row had no finite logit.
      log_q: fp32 [B,K,V], what each token was drawn from: one-hot in greedy rows. None for method "greedy", whose
        tokens were not drawn at all: `verify` then uses the one-hot rule.
      prev_embeddings: [B,K,r], the Markov embedding of the token before each draft, which the confidence head reads.
    """

    tokens: Int[Array, "B K"]
    log_q: Float[Array, "B K V"] | None
    prev_embeddings: Float[Array, "B K r"]


def draft(
    base_logits: Float[Array, "B K V"],
    hidden: Float[Array, "B K H"],
    anchor: Int[Array, " B"],
    *,
    markov: Markov,
    temperature: float | int | Float[Array, ""] | Float[Array, " B"],
    keys: Key[Array, " B"],
    method: str,
    allowed: Bool[Array, " V"] | None = None,
    draw_slot: DrawSlot | None = None,
) -> Draft:
    """Draws a block of drafts from left to right: each slot sees the token drawn before it.

    Draft k comes from softmax((base_logits[k] + bias(draft k-1)) / temperature), the first one after the anchor
    (DSpark, arXiv 2607.05147, section 3.1). No other filter: any proposal is lossless as long as it is the one that was
    drawn from, and that one is returned.

    Args:
      base_logits, hidden: the drafter's output at each slot, any float dtype; sampling is in fp32.
      anchor: the last committed token.
      markov: (previous tokens [B], hidden of the slot [B,H], carry) -> bias [B,V], embedding of the previous token
        [B,r], carry. The first call gets carry None; later ones get what the call before returned, of one structure.
      temperature: one or one per request; below 1e-5 a row drafts its argmax chain, the first index of equal logits.
      keys: the step's keys, the same ones that `verify` gets.
      method: "ancestral" draws each token; "greedy" takes the argmax in every row.
      allowed: tokens that may be drafted (False for padded vocabulary and mask ids). None: all.
      draw_slot: adds the bias and draws in one go, for instance through `pallas_kernels.markov_draw`, in place of
        `markov`. Its scores are not the stored log_q but those less a constant, so that a draw rounds differently.

    Raises:
      ValueError: an unknown method; the known ones are listed.
      NotImplementedError: a draw_slot with keys that are not threefry's.
    """
    if method not in DRAFTING_METHODS:
        raise ValueError(f"drafting method {method!r} does not exist: choose one of {', '.join(DRAFTING_METHODS)}.")
    choose = DRAFTING_METHODS[method]
    batch, slots, vocab = base_logits.shape
    temperature = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (batch,))
    if allowed is None:
        allowed = jnp.ones((vocab,), bool)
    # All at once, outside of the chain of slots that wait for each other.
    slot_keys = jax.vmap(draft_keys, in_axes=(None, 0))(keys, jnp.arange(slots, dtype=jnp.int32))
    if draw_slot is not None:
        keep = choose is _ancestral
        return _draft_slots(draw_slot, base_logits, hidden, anchor, temperature, slot_keys, allowed, keep=keep)

    def draft_slot(slot: int | Array, rows: Array, previous: Array, carry: object) -> tuple[Draft, object]:
        bias, embedding, carry = markov(previous, _slot(hidden, slot), carry)
        logits = _slot(rows, slot).astype(jnp.float32) + bias.astype(jnp.float32)
        token, log_q = choose(logits, temperature, slot_keys[slot], allowed)
        return Draft(token, log_q, embedding), carry

    def draft_next(slot: Array, state: tuple[Draft, Array, object]) -> tuple[Draft, Array, object]:
        block, previous, carry = state
        drafted, carry = draft_slot(slot, base_logits if block.log_q is None else block.log_q, previous, carry)
        block = jax.tree.map(lambda rows, row: lax.dynamic_update_index_in_dim(rows, row, slot, 1), block, drafted)
        return block, drafted.tokens, carry

    # The first slot stands alone, because only there the carry is None. The loop writes log_q over the logits that it
    # has read: anywhere else it would have to be filled first, and would be in memory beside them.
    first, carry = draft_slot(0, base_logits, anchor, None)
    block = jax.tree.map(lambda row: jnp.repeat(row[:, None], slots, axis=1), first._replace(log_q=None))
    if first.log_q is not None:
        rows = base_logits.astype(jnp.float32)
        block = block._replace(log_q=lax.dynamic_update_index_in_dim(rows, first.log_q, 0, 1))
    return lax.fori_loop(1, slots, draft_next, (block, first.tokens, carry))[0]


def _draft_slots(
    draw_slot: DrawSlot,
    base_logits: Array,
    hidden: Array,
    anchor: Array,
    temperature: Array,
    slot_keys: Array,
    allowed: Array,
    *,
    keep: bool,
) -> Draft:
    """`draft` where bias, law and draw of a slot are one piece of work."""
    if "threefry" not in str(jax.random.key_impl(slot_keys)):
        raise NotImplementedError(f"draw_slot needs threefry keys, got {jax.random.key_impl(slot_keys)}.")
    words = jnp.swapaxes(jax.random.key_data(slot_keys), 0, 1)
    greedy = is_greedy(temperature) if keep else jnp.ones(temperature.shape, bool)
    inverse = inverse_temperature(temperature) if keep else jnp.ones(temperature.shape, jnp.float32)
    settings = SlotDraw(allowed, words, inverse, ~greedy, keep)
    logits, previous, carry, drawn = base_logits.astype(jnp.float32), anchor.astype(jnp.int32), None, []
    for slot in range(base_logits.shape[1]):
        found = draw_slot(logits, slot, previous, hidden[:, slot], carry, settings)
        logits, previous, carry = found.logits, found.token, found.carry
        drawn.append((found.token, found.peak, found.log_mass, found.embedding))
    tokens, peak, log_mass, embeddings = (jnp.stack(each, axis=1) for each in zip(*drawn, strict=True))
    if not keep:
        return Draft(tokens, None, embeddings)
    vocabulary = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None]
    one_hot = jnp.where(vocabulary == tokens[..., None], 0.0, -jnp.inf).astype(jnp.float32)
    # The bits of `scale`. Who reads these numbers can compute them as they are read, from the logits.
    sampled = (logits - peak[..., None]) * inverse[:, None, None] - log_mass[..., None]
    return Draft(tokens, jnp.where(greedy[:, None, None], one_hot, sampled), embeddings)


def _slot(rows: Array, slot: int | Array) -> Array:
    return lax.dynamic_index_in_dim(rows, slot, axis=1, keepdims=False)


def _ancestral(logits: Array, temperature: Array, keys: Array, allowed: Array) -> tuple[Array, Array]:
    greedy = is_greedy(temperature)
    scores = scale(logits, row_peak(logits, allowed), inverse_temperature(temperature), allowed)
    log_mass = jnp.log(jnp.sum(jnp.exp(scores), axis=-1, keepdims=True))
    sampled = scores - jnp.where(log_mass > -jnp.inf, log_mass, 0.0)
    best = jnp.argmax(scores, axis=-1).astype(jnp.int32)[:, None]
    vocabulary = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None]
    one_hot = jnp.where((vocabulary == best) & (scores == 0), 0.0, -jnp.inf).astype(jnp.float32)
    log_q = jnp.where(greedy[:, None], one_hot, sampled)
    # Drawn from the very numbers that are stored: another rounding of the same softmax would not be lossless. A one-hot
    # row is drawn too: a condition would have the device ask the host in every slot.
    return draw(log_q, keys), log_q


def _greedy(logits: Array, temperature: Array, keys: Array, allowed: Array) -> tuple[Array, None]:
    del temperature, keys
    scores = scale(logits, row_peak(logits, allowed), jnp.ones(logits.shape[:1], jnp.float32), allowed)
    return draw_greedy(scores), None


DRAFTING_METHODS: dict[str, Callable[[Array, Array, Array, Array], tuple[Array, Array | None]]] = {
    "ancestral": _ancestral,
    "greedy": _greedy,
}


def sample(
    log_p: Float[Array, "B V"], keys: Key[Array, " B"], *, greedy: Bool[Array, " B"] | None = None
) -> Int[Array, " B"]:
    """One token per row: what a step without drafts emits.

    Args:
      log_p: log-probabilities, for instance a row of `target_log_probs`; they need not be normalised.
      keys: the step's keys. The draw is the one that `verify` makes for its last token.
      greedy: rows that take the argmax, the first index of equal ones. One-hot rows do so without being named.

    Returns:
      i32 tokens; entries of -inf are never drawn, and a row of nothing else gives -1.
    """
    return draw(log_p, purpose_keys(keys, Purpose.FINAL), greedy)


def draw(
    log_p: Float[Array, "B V"], keys: Key[Array, " B"], greedy: Bool[Array, " B"] | None = None
) -> Int[Array, " B"]:
    """Draws by Gumbel-max with keys of one purpose; -1 from a row that is all -inf."""

    def sampled() -> Array:
        # Finite noise leaves -inf where it is; argmax(log p + Gumbel) has law p.
        noisy = log_p + gumbels(keys, log_p.shape[-1]).astype(log_p.dtype)
        return _best(noisy if greedy is None else jnp.where(greedy[:, None], log_p, noisy), log_p)

    if greedy is None:
        return sampled()
    return lax.cond(jnp.all(greedy), lambda: draw_greedy(log_p), sampled)


def draw_greedy(log_p: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """The argmax, the first index of equal ones; -1 from a row that is all -inf."""
    return _best(log_p, log_p)


def _best(scores: Array, log_p: Array) -> Array:
    best = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    return jnp.where(jnp.take_along_axis(log_p, best[..., None], axis=-1)[..., 0] > -jnp.inf, best, -1)
