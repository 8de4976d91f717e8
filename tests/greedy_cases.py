"""Greedy tokens of the golden checkpoints in bfloat16 beside those of float32, and which differences are allowed.

The prompts and their golden greedy tokens are fed a verify step at a time, so that a token that differs does not change
those after it. Rounding has two effects. It moves every logit a little: that changes the greedy token only where
float32 is nearly undecided between two. And it lets another expert or block win a near tie, which moves the logits
behind it by units; such flips are counted, and a second run, given the experts and blocks of float32, is without them.
"""

import dataclasses
import functools

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import NEW_TOKENS, PROMPTS

import dspark_jax as ds
from dspark_jax import formats
from dspark_jax.attention import Indexer
from dspark_jax.moe import Router

STEP = 8  # tokens of a call: few enough for the kernels of a step


@dataclasses.dataclass(frozen=True)
class Difference:
    """A greedy token that is not the golden one."""

    prompt: int
    step: int
    token: int
    golden_token: int
    gap: float  # by which float32 prefers its token to the next best
    flips: int  # layers whose experts or blocks are others than in float32, at this position

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt}, greedy token {self.step}: {self.token}, in float32 {self.golden_token} by a gap of "
            f"{self.gap:.3f}, {self.flips} layers with other experts or blocks"
        )


@functools.cache
def rows(name: str) -> list[np.ndarray]:
    """Each prompt with its golden greedy tokens but the last, behind which nothing is asked."""
    e = golden.expected(name)
    return [np.concatenate([golden.prompt(name, i), e[f"p{i}_greedy_ids"][:-1]]).astype(np.int32) for i in PROMPTS]


def inputs(name: str) -> tuple[jax.Array, jax.Array]:
    longest = max(map(len, rows(name)))
    return golden.padded(rows(name), -(-longest // STEP) * STEP)


Choices = tuple[jax.Array | None, jax.Array | None]  # of a layer: blocks [B, T, Hkv, top_k], experts [B, T, k]


@dataclasses.dataclass(frozen=True)
class Run:
    """Teacher-forced logits [B, T, V] and the choices of each layer."""

    logits: np.ndarray
    choices: tuple[Choices, ...]

    def at_prompts(self, name: str) -> np.ndarray:
        """Logits of all positions of the three prompts [132, V]."""
        return np.concatenate([self.logits[i, : len(golden.prompt(name, i))] for i in PROMPTS])

    def differences(self, name: str) -> list[Difference]:
        """Greedy tokens that are not the golden ones."""
        e, found, flips = golden.expected(name), [], count_flips(self.choices, float32(name).choices)
        for i in PROMPTS:
            ids, gaps, first = e[f"p{i}_greedy_ids"], e[f"p{i}_greedy_gap"], len(golden.prompt(name, i)) - 1
            tokens = self.logits[i, first : first + NEW_TOKENS].argmax(-1)
            for step in np.flatnonzero(tokens != ids):
                at = dict(prompt=i, step=int(step), flips=int(flips[i, first + step]))
                tokens_there = dict(token=int(tokens[step]), golden_token=int(ids[step]), gap=float(gaps[step]))
                found.append(Difference(**at, **tokens_there))
        return found


def count_flips(ours: tuple[Choices, ...], theirs: tuple[Choices, ...]) -> np.ndarray:
    """How many layers choose other sets, [B, T]."""
    count = np.zeros(jax.tree.leaves(ours)[0].shape[:2], int)
    for mine, right in zip(ours, theirs, strict=True):
        differ = np.zeros(count.shape, bool)
        for a, b in zip(mine, right, strict=True):
            if a is not None and b is not None:
                unequal = np.sort(np.asarray(a), axis=-1) != np.sort(np.asarray(b), axis=-1)
                differ |= unequal.reshape(*count.shape, -1).any(-1)
        count += differ
    return count


@functools.cache
def float32(name: str) -> Run:
    """The model in float32."""
    tokens, positions = inputs(name)
    m = golden.model(name)
    return in_one_piece(m, tokens, positions)


def in_one_piece(m: ds.MiniMaxTarget, tokens: jax.Array, positions: jax.Array) -> Run:
    out = golden.forward(m, tokens, positions, m.make_cache(*tokens.shape))
    return Run(np.asarray(out.logits), tuple((record.blocks, record.experts) for record in out.records))


@jax.jit
def _forward(m: ds.MiniMaxTarget, tokens, positions, cache, given: tuple[Choices, ...], pin):
    """One call, in which layers take the choices `given` them if the scalar `pin` says so."""
    blocks = iter([chosen for chosen, _ in given if chosen is not None])
    experts = iter([chosen for _, chosen in given if chosen is not None])
    own_selection, own_routing = Indexer.__call__, Router.__call__

    def select(self: Indexer, *inputs):
        own, index_keys = own_selection(self, *inputs)
        return jnp.where(pin, next(blocks), own), index_keys

    def route(self: Router, x):
        own, _ = own_routing(self, x)
        chosen = jnp.where(pin, next(experts).reshape(own.shape), own)
        scores = jax.nn.sigmoid(formats.linear(x.astype(jnp.float32), self.weight.get_value()))
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        return chosen, weights / jnp.sum(weights, axis=-1, keepdims=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Indexer, "__call__", select)
        patch.setattr(Router, "__call__", route)
        return m(tokens, positions, cache)


@dataclasses.dataclass(frozen=True)
class Feed:
    """Tokens that a model takes `STEP` at a time, with the choices that it is given if asked to."""

    tokens: jax.Array
    positions: jax.Array
    slots: int  # of the cache
    given: Run

    def rows(self, count: int) -> "Feed":
        """The first rows."""
        given = jax.tree.map(lambda a: a[:count], self.given.choices)
        return Feed(self.tokens[:count], self.positions[:count], self.slots, Run(self.given.logits[:count], given))

    def arguments(self, start: int, pin: bool) -> tuple:
        here = slice(start, start + STEP)
        part = jax.tree.map(lambda a: a[:, here], self.given.choices)
        return self.tokens[:, here], self.positions[:, here], part, jnp.asarray(pin)

    def lower(self, m: ds.MiniMaxTarget) -> jax.stages.Lowered:
        """What `run` runs. One at a time: choices are given by a patch."""
        tokens, positions, part, pin = self.arguments(0, True)
        return _forward.lower(m, tokens, positions, m.make_cache(len(tokens), self.slots), part, pin)

    def run(self, m: ds.MiniMaxTarget, program=_forward, *, pin: bool) -> Run:
        """With the choices that are given if `pin`, else with its own."""
        cache, parts = m.make_cache(len(self.tokens), self.slots), []
        for start in range(0, self.tokens.shape[1], STEP):
            tokens, positions, part, pinned = self.arguments(start, pin)
            out = program(m, tokens, positions, cache, part, pinned)
            cache = out.cache
            parts.append((out.logits, tuple((record.blocks, record.experts) for record in out.records)))
        return Run(*jax.tree.map(lambda *each: np.concatenate(each, axis=1), *parts))


def run(m: ds.MiniMaxTarget, name: str, *, pin: bool) -> Run:
    """`STEP` tokens at a time; with the experts and blocks of float32 if `pin`."""
    tokens, positions = inputs(name)
    return Feed(tokens, positions, tokens.shape[1], float32(name)).run(m, pin=pin)


def noise(layers: int) -> float:
    """Standard deviation of a logit's error that bf16 rounding alone explains: about ten roundings a layer, each of
    relative size 2^-8 / sqrt(3), independent, seen in logits of deviation 2.3."""
    return 2.3 * 2**-8 / 3**0.5 * (10 * layers) ** 0.5


# A token changes where the errors of two logits differ by more than the gap. Measured errors are up to 1.6 times that
# estimate; the largest of the differences of 72 tokens to their few rivals is at 3 deviations.
MARGIN = 3 * 2**0.5 * 1.6


def tolerance(m: ds.MiniMaxTarget) -> float:
    """The gap of float32 logits up to which bfloat16 may choose another token."""
    return MARGIN * noise(m.config.num_layers)


def report(found: list[Difference], what: str, limit: float) -> str:
    lines = [f"{what}: {len(found)} of {len(PROMPTS) * NEW_TOKENS} greedy tokens differ, tolerance {limit:.3f}"]
    return "\n".join([*lines, *(f"  {difference}" for difference in found)])
