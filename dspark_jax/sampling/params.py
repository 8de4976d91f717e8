"""What a request may ask of sampling."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

GREEDY_TEMPERATURE = 1e-5

_UNSUPPORTED = frozenset(
    "repetition_penalty presence_penalty frequency_penalty logit_bias bad_words min_tokens n best_of num_beams"
    " num_return_sequences typical_p epsilon_cutoff eta_cutoff no_repeat_ngram_size".split()
)

_Setting = int | float | np.ndarray | np.generic | Array


def is_greedy(temperature: Array) -> Bool[Array, "..."]:
    """True where a temperature means greedy decoding (below 1e-5): one rule for the drafter and the target."""
    return temperature.astype(jnp.float32) < jnp.float32(GREEDY_TEMPERATURE)


def inverse_temperature(temperature: Array) -> Float[Array, "..."]:
    """The fp32 factor of the logits: 1 / temperature, and 1 in greedy rows."""
    # A factor and not a divisor: XLA rewrites divisions in some places only, and thresholds need equal bits everywhere.
    # The cap keeps the factor a normal number: with a flushed one, -inf * 0 would be NaN.
    temperature = jnp.minimum(temperature.astype(jnp.float32), jnp.float32(1e37))
    return jnp.float32(1) / jnp.where(is_greedy(temperature), jnp.float32(1), temperature)


@dataclasses.dataclass(frozen=True, init=False, eq=False)
class SamplingParams:
    """Temperature and filters, each one number for the whole batch or one per request.

    The order is temperature, min-p, top-k, top-p (see `target_log_probs`). A pytree: values may change without
    recompiling.

    Attributes:
      temperature: divides the logits; finite and >= 0. Below 1e-5 the request is greedy and the filters do not matter.
      top_k: keep the k best tokens and those tied with the k-th; 0 keeps all.
      top_p: keep the likeliest tokens until their mass reaches top_p, in (0, 1]; 1 keeps all.
      min_p: keep tokens at least min_p times as likely as the likeliest, in [0, 1); 0 keeps all.

    Raises:
      ValueError: a value is out of its range or has more than one axis (checked where it is known, not under a trace).
      TypeError: an unknown name.
      NotImplementedError: the name of a setting that other libraries have and this one has not, such as
        repetition_penalty or n.
    """

    temperature: _Setting
    top_k: _Setting
    top_p: _Setting
    min_p: _Setting

    def __init__(
        self,
        *,
        temperature: _Setting | Sequence[float] = 1.0,
        top_k: _Setting | Sequence[int] = 0,
        top_p: _Setting | Sequence[float] = 1.0,
        min_p: _Setting | Sequence[float] = 0.0,
        **unsupported: Any,
    ):
        for name in unsupported:
            if name in _UNSUPPORTED:
                raise NotImplementedError(
                    f"{name} is not supported: sampling here knows temperature, top_k, top_p and min_p, and one"
                    " continuation per request. Leave it out."
                )
            raise TypeError(f"SamplingParams has no setting {name!r}: it knows temperature, top_k, top_p and min_p.")
        settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        for name, value in settings.items():
            object.__setattr__(self, name, _checked(name, value))

    @property
    def greedy(self) -> Bool[Array, "..."]:
        """True for greedy requests: [] or [B], as temperature is."""
        return is_greedy(jnp.asarray(self.temperature))

    def broadcast(self, batch_size: int) -> "SamplingParams":
        """The same settings with every value an array [B]: fp32, top_k int32.

        Raises:
          ValueError: a value has one entry per request, for another number of requests.
        """
        return _unflatten(None, [_row(name, getattr(self, name), batch_size) for name in _DTYPES])


_DTYPES = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}

_RANGES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "temperature": (lambda x: (x >= 0) & (x < math.inf), "finite and at least 0 (0 is greedy)"),
    "top_k": (lambda x: (x >= 0) & (x < 2**31), "at least 0 (0 keeps every token)"),
    "top_p": (lambda x: (x > 0) & (x <= 1), "in (0, 1] (1 keeps every token)"),
    "min_p": (lambda x: (x >= 0) & (x < 1), "in [0, 1) (0 keeps every token)"),
}


def _checked(name: str, value: Any) -> Any:
    traced = isinstance(value, Tracer)
    array = value if isinstance(value, Array) else np.asarray(value)
    if array.ndim > 1:
        raise ValueError(f"{name} has shape {array.shape}: pass one number, or one per request, shape [B].")
    if name == "top_k" and not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"top_k has dtype {array.dtype}: pass an integer.")
    if not (jnp.issubdtype(array.dtype, jnp.integer) or jnp.issubdtype(array.dtype, jnp.floating)):
        raise ValueError(f"{name} has dtype {array.dtype}: pass numbers.")
    if traced:
        return value
    within, words = _RANGES[name]
    with np.errstate(over="ignore"):
        # As it will be used: in fp32, a temperature of 1e300 is infinite and a top_p of 1e-50 zero.
        inside = within(np.asarray(array) if name == "top_k" else np.asarray(array).astype(np.float32))
    if not np.all(inside):
        raise ValueError(f"{name} is {np.asarray(value).tolist()}: it has to be {words}.")
    return value if isinstance(value, Array) else array.astype(_DTYPES[name])


def _row(name: str, value: Any, batch_size: int) -> Array:
    value = jnp.asarray(value).astype(_DTYPES[name])
    if value.ndim == 1 and value.shape[0] != batch_size:
        raise ValueError(
            f"{name} has {value.shape[0]} entries for a batch of {batch_size}: pass one, or one per request."
        )
    return jnp.broadcast_to(value, (batch_size,))


def _flatten_with_keys(params: SamplingParams) -> tuple[list[tuple[Any, Any]], None]:
    return [(jax.tree_util.GetAttrKey(name), getattr(params, name)) for name in _DTYPES], None


def _unflatten(_: None, leaves: Iterable[Any]) -> SamplingParams:
    # Around __init__: JAX also builds trees of things that are not numbers.
    params = object.__new__(SamplingParams)
    for name, leaf in zip(_DTYPES, leaves, strict=True):
        object.__setattr__(params, name, leaf)
    return params


jax.tree_util.register_pytree_with_keys(SamplingParams, _flatten_with_keys, _unflatten)
