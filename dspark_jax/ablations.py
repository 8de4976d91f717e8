"""Variants of a loaded model that differ in one point, to measure what that point is worth.

The weights stay what they were trained to be: a variant shows what a model loses when it is run in another way than it
was trained, not what another training would have given. Text remains that of the target: the drafter only proposes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.checkpoint import Model
from dspark_jax.drafter import DSparkDrafter
from dspark_jax.heads import MarkovHead


def causal_block(model: Model) -> Model:
    """`model` with a drafter whose block slots see only themselves and earlier slots.

    Raises:
      ValueError: there is no drafter, or its block is causal already.
    """
    drafter = _drafter(model)
    if drafter.config.causal:
        raise ValueError("the drafter's block is causal already; there is nothing to compare it with")
    return _with_config(model, causal=True)


def with_window(model: Model, window: int) -> Model:
    """`model` with a drafter that sees keys less than `window` tokens away.

    Raises:
      ValueError: there is no drafter, or `window` is not from 1 to the drafter's own window.
    """
    own = _drafter(model).config.window
    if window < 1 or (own is not None and window > own):
        raise ValueError(
            f"window is {window}; it must be at least 1 and at most the drafter's own window, which is {own}"
        )
    return _with_config(model, window=window)


def zeroed_markov(model: Model) -> Model:
    """`model` with a drafter whose Markov head adds nothing: each slot is drafted without the token before it.

    The confidence head still reads the Markov embeddings.

    Raises:
      ValueError: there is no drafter, or it has no Markov head.
    """
    drafter = nnx.clone(_drafter(model))
    if not isinstance(drafter.markov_head, MarkovHead):
        raise ValueError("the drafter has no Markov head; there is nothing to take away")
    table = drafter.markov_head.w2.weight
    table.set_value(jax.tree.map(jnp.zeros_like, table.get_value()))
    return dataclasses.replace(model, drafter=drafter)


def _drafter(model: Model) -> DSparkDrafter:
    if model.drafter is None:
        raise ValueError("the model has no drafter; load a checkpoint that has one")
    return model.drafter


def _with_config(model: Model, **changes: Any) -> Model:
    drafter = nnx.clone(_drafter(model))  # shares the arrays
    drafter.config = dataclasses.replace(drafter.config, **changes)
    for layer in drafter.layers:
        layer.attention.config = drafter.config
    return dataclasses.replace(model, drafter=drafter)
