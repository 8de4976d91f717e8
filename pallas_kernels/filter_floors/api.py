"""The public function `filter_floors`."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels import _arguments, _dispatch
from pallas_kernels.filter_floors.reference import filter_floors_reference


class FilterFloors(NamedTuple):
    """What the filters make of each row of logits.

    The log-probability of a token with score z = (logit - peak) * inverse temperature is z - log_mass where z >= floor
    and z > -inf, and -inf elsewhere.

    Attributes:
      peak: the largest logit; 0 in a row without a finite one.
      floor: the least score that is kept.
      log_mass: the log of the sum of exp(z) over the tokens that are kept.
      best: the first of the largest logits; meaningless in rows that did not ask for it.
    """

    peak: Float32[Array, "B N"]
    floor: Float32[Array, "B N"]
    log_mass: Float32[Array, "B N"]
    best: Int32[Array, "B N"]


def filter_floors(
    logits: Float[Array, "B N V"],
    inverse_temperature: Float32[Array, " B"],
    top_k: Int32[Array, " B"],
    top_p: Float32[Array, " B"],
    min_p: Float32[Array, " B"],
    find_best: Bool[Array, " B"],
    *,
    implementation: str | None = None,
) -> FilterFloors:
    """The score from which tokens are kept by min-p, top-k and top-p, in this order, and the mass of the kept ones.

    min-p keeps tokens with exp(z) >= min_p; top-k keeps the k best; top-p keeps the smallest set of likeliest tokens
    whose mass reaches top_p of what is left. Tokens with the score of the last one kept are kept too. Sums are in
    float32 and in an order of their own that does not depend on other rows, so top-p may keep a token more or less than
    another implementation where the mass comes within rounding of its target.

    Args:
      logits: bfloat16, float16 or float32. NaN counts as -inf, inf as the largest float32.
      inverse_temperature: what the logits are multiplied by, positive and finite.
      top_k: 0 keeps all.
      top_p: in (0, 1]; 1 keeps all.
      min_p: in [0, 1); 0 keeps all.
      find_best: rows whose first largest logit is wanted.
      implementation: None for the best one for this device, or "triton", "xla". "xla" sorts the vocabulary.

    Raises:
      TypeError, ValueError: an argument does not fit.
      NotImplementedError: the named implementation cannot serve this call; the message says why. Or the call is
        differentiated through a kernel.
    """
    _arguments.check_arrays(
        logits=logits, inverse_temperature=inverse_temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        find_best=find_best,
    )  # fmt: skip
    if logits.ndim != 3 or 0 in logits.shape:
        raise ValueError(f"logits must be [B, N, V] with no empty axis, got {logits.shape}.")
    if logits.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise TypeError(f"logits must be bfloat16, float16 or float32, got {logits.dtype}; cast them.")
    rows: dict[str, tuple[Any, Any]] = dict(
        inverse_temperature=(inverse_temperature, jnp.float32), top_k=(top_k, jnp.int32), top_p=(top_p, jnp.float32),
        min_p=(min_p, jnp.float32), find_best=(find_best, jnp.bool_),
    )  # fmt: skip
    for name, (array, dtype) in rows.items():
        if array.shape != logits.shape[:1]:
            raise ValueError(
                f"{name} must have shape [B] = {logits.shape[:1]} for logits {logits.shape}, got {array.shape}."
            )
        if array.dtype != dtype:
            raise TypeError(f"{name} must be {jnp.dtype(dtype)}, got {array.dtype}; cast it.")

    def triton_form() -> Any:
        from pallas_kernels.filter_floors import triton

        return triton.build(logits)

    def xla_form() -> Any:
        return filter_floors_reference

    run: Any = _dispatch.choose("filter_floors", implementation, {"triton": triton_form, "xla": xla_form})
    arrays = map(jnp.asarray, (logits, inverse_temperature, top_k, top_p, min_p, find_best))
    return FilterFloors(*run(*arrays))
