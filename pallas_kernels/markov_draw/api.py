"""The public function `markov_draw`."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from pallas_kernels import _arguments, _dispatch
from pallas_kernels.markov_draw.reference import markov_draw_reference


class MarkovDraw(NamedTuple):
    """A drawn slot.

    The log-probability of a token with logit x (of `logits`) is (x - peak) * inverse temperature - log_mass.

    Attributes:
      logits: those given; with `keep`, row `slot` holds logit + bias, -inf where not allowed or NaN. In the memory of
        those given where XLA can.
      token: what was drawn, -1 in a row without a finite logit.
      peak: the largest logit of the slot; 0 in a row without a finite one.
      log_mass: the log of the sum of exp((logit - peak) * inverse temperature); 0 in such a row.
    """

    logits: Float32[Array, "B K V"]
    token: Int32[Array, " B"]
    peak: Float32[Array, " B"]
    log_mass: Float32[Array, " B"]


def markov_draw(
    logits: Float32[Array, "B K V"],
    latents: Float[Array, "N r"],
    index: Int32[Array, " B"],
    table: Float[Array, "V r"],
    allowed: Bool[Array, " V"],
    words: UInt32[Array, "B K 2"],
    inverse_temperature: Float32[Array, " B"],
    drawn: Bool[Array, " B"],
    *,
    slot: int,
    keep: bool = True,
    implementation: str | None = None,
) -> MarkovDraw:
    """Draws slot `slot` of a block of drafts: from softmax((logits[:, slot] + table · latents[index]) / temperature).

    By Gumbel-max with the numbers of `jax.random.gumbel(key, [V], float32, mode="high")`, the threefry key of row b
    being `words[b, slot]`; rows that are not drawn take their first largest logit. Sums are in float32 and in an order
    of their own that depends on no other row. For the bias: DSpark, arXiv 2607.05147, section 3.1.

    Args:
      latents, index: what the table is multiplied by in row b is `latents[index[b]]`. -N..N-1; -1 is the last one.
      allowed: tokens that may be drawn at all.
      inverse_temperature: positive and finite.
      slot: 0..K-1.
      keep: write the slot's logits. Without it that row may hold anything, and only the token is of use.
      implementation: None for the best one for this device, or "triton", "xla".

    Raises:
      TypeError, ValueError: an argument does not fit.
      NotImplementedError: the named implementation cannot serve this call; the message says why. Or the call is
        differentiated through a kernel.
    """
    _arguments.check_arrays(
        logits=logits, latents=latents, index=index, table=table, allowed=allowed, words=words,
        inverse_temperature=inverse_temperature, drawn=drawn,
    )  # fmt: skip
    if logits.ndim != 3 or 0 in logits.shape:
        raise ValueError(f"logits must be [B, K, V] with no empty axis, got {logits.shape}.")
    batch, slots, vocab = logits.shape
    keep = _arguments.check_flag("keep", keep)
    if not 0 <= (slot := _arguments.check_integer("slot", slot)) < slots:
        raise ValueError(f"slot must be in 0..{slots - 1} for logits {logits.shape}, got {slot}.")
    if latents.ndim != 2 or 0 in latents.shape:
        raise ValueError(f"latents must be [N, r] with no empty axis, got {latents.shape}.")
    if str(latents.dtype) not in _arguments.FLOAT_DTYPES:
        raise TypeError(f"latents must be one of {', '.join(_arguments.FLOAT_DTYPES)}, got {latents.dtype}.")
    given: dict[str, tuple[Any, tuple[int, ...], Any]] = dict(
        logits=(logits, logits.shape, jnp.float32), index=(index, (batch,), jnp.int32),
        table=(table, (vocab, latents.shape[1]), latents.dtype), allowed=(allowed, (vocab,), jnp.bool_),
        words=(words, (batch, slots, 2), jnp.uint32), inverse_temperature=(inverse_temperature, (batch,), jnp.float32),
        drawn=(drawn, (batch,), jnp.bool_),
    )  # fmt: skip
    for name, (array, shape, dtype) in given.items():
        if array.shape != shape:
            raise ValueError(
                f"{name} must have shape {shape} for logits {logits.shape} and latents {latents.shape}, got "
                f"{array.shape}."
            )
        if array.dtype != dtype:
            raise TypeError(f"{name} must be {jnp.dtype(dtype)}, got {array.dtype}; cast it.")

    def triton_form() -> Any:
        from pallas_kernels.markov_draw import triton

        return triton.build(logits, latents)

    def xla_form() -> Any:
        return markov_draw_reference

    run: Any = _dispatch.choose("markov_draw", implementation, {"triton": triton_form, "xla": xla_form})
    arrays = map(jnp.asarray, (logits, latents, index, table, allowed, words, inverse_temperature, drawn))
    return MarkovDraw(*run(*arrays, slot=slot, keep=keep))
