"""Generation for measurements, with as little to compile as there can be: prompts and steps are programs of their own.

How a prompt is read does not depend on draft length, mode or rule, so that program is the same for all of them.
"""

import concurrent.futures
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Key

from dspark_jax.checkpoint import Model
from dspark_jax.generate_config import FinishReason, GenerateConfig
from dspark_jax.generation import no_steps, prefill, step
from dspark_jax.generation_state import Generation, GenerationState, StepRecord
from dspark_jax.sampling import SamplingParams
from dspark_jax.speculation import Plan
from dspark_jax.stats import AcceptanceStats


def generate_in_parts(
    model: Model,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    keys: Key[Array, " B"],
    params: SamplingParams,
    *,
    config: GenerateConfig,
) -> Generation:
    """What the jitted `generate` gives, from two programs; the one for the prompts serves other configs too.

    Raises:
      ValueError: as `generate`.
    """
    state = prefill(model, tokens, lengths, keys, params, config=_of_the_prompts(config))
    return _steps(model, _begin(model, state, config), config=config).result()


class Programs:
    """The programs of `generate_in_parts`, compiled ahead: several at once, each once. Call it as `generate`.

    A context manager: leaving it drops what has been ordered and not begun.
    """

    def __init__(self, workers: int | None = None):
        """workers: programs to compile at once; by default one for each core, at most four."""
        self._pool = concurrent.futures.ThreadPoolExecutor(workers or min(4, os.cpu_count() or 1))
        self._tracing = threading.Lock()  # Python's part runs one at a time anyway; XLA's does not
        self._made: dict[Hashable, tuple[concurrent.futures.Future, Any]] = {}

    def __enter__(self) -> "Programs":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __len__(self) -> int:
        """How many programs have been ordered."""
        return len(self._made)

    def order(self, arguments: tuple, config: GenerateConfig) -> None:
        """Begin to compile for positional arguments of `generate` like these and `config`.

        Raises:
          ValueError: as `generate`.
        """
        self._order(arguments, config)

    def __call__(self, *arguments: Any, config: GenerateConfig) -> Generation:
        """As `generate`. Waits for its programs, and orders them where nobody has."""
        model, read, steps = arguments[0], *self._order(arguments, config)
        state = _begin(model, read.result()(*arguments), config)
        return steps.result()(model, state).result()

    def _order(
        self, arguments: tuple, config: GenerateConfig
    ) -> tuple[concurrent.futures.Future, concurrent.futures.Future]:
        # Other weights, another temperature: other arguments of the same program.
        leaves = jax.tree.leaves(arguments)
        like = jax.tree.structure(arguments), tuple((jnp.shape(a), jnp.result_type(a)) for a in leaves)
        shared = _of_the_prompts(config)
        if (like, config, "steps") not in self._made:
            Plan.of(arguments[0], config)  # raises here and not where it compiles
        if (like, shared) not in self._made:
            with self._tracing:
                read = prefill.trace(*arguments, config=shared)
            self._made[like, shared] = self._pool.submit(self._compile, lambda: read), read.out_info
        ready, state = self._made[like, shared]
        if (like, config, "steps") not in self._made:

            def trace():
                begun = jax.eval_shape(lambda state: _begin(arguments[0], state, config), state)
                return _steps.trace(arguments[0], begun, config=config)

            self._made[like, config, "steps"] = self._pool.submit(self._compile, trace), None
        return ready, self._made[like, config, "steps"][0]

    def _compile(self, trace: Callable[[], Any]) -> Any:
        with self._tracing:
            lowered = trace().lower()
        return lowered.compile()


def _of_the_prompts(config: GenerateConfig) -> GenerateConfig:
    """`config` without what only the steps depend on: the longest blocks if there are any, no record."""
    config = dataclasses.replace(config, record_steps=False, expected_acceptance=False)
    if config.draft == "none":
        return config
    return dataclasses.replace(config, num_draft_tokens=None, draft="ancestral", verify="block")


def _begin(model: Model, state: GenerationState, config: GenerateConfig) -> GenerationState:
    """The state behind the prompts, with counts and a record for blocks of this length."""
    stats, steps = _no_steps(model, config, state.tokens.shape[0])
    return dataclasses.replace(state, stats=stats, steps=steps)


@functools.partial(jax.jit, static_argnames=("config", "batch"))
def _no_steps(model: Model, config: GenerateConfig, batch: int) -> tuple[AcceptanceStats, StepRecord | None]:
    plan = Plan.of(model, config)
    drafter = model.drafter if plan.num_drafts else None
    stats = AcceptanceStats.zeros(batch, plan.num_drafts)
    return stats, no_steps(batch, config, plan, drafter) if config.record_steps else None


# The caches go in and out, so that they are changed where they lie.
@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def _steps(model: Model, state: GenerationState, *, config: GenerateConfig) -> GenerationState:
    return lax.while_loop(
        lambda s: jnp.any(s.finish_reason == FinishReason.RUNNING), lambda s: step(model, s, config=config)[0], state
    )
