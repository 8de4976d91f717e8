"""One training loop for target and drafter: compiled calls of many steps, a plan in steps, progress, resumption."""

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from settings import Training

Tree = Any
# Share of the minutes that is planned for steps; the rest is for evaluation and saving.
_PLANNED = 0.93
_REPORT_SECONDS, _SAVE_SECONDS = 10.0, 60.0
_EVALUATIONS = 12


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """AdamW with clipping, on a dict of parameters. The rate depends on the number of planned steps.

    Attributes:
      options: rates and decay.
      decays: name -> whether weight decay applies.
    """

    options: Training
    decays: Callable[[str], bool]

    def _transform(self) -> optax.GradientTransformation:
        o = self.options
        return optax.chain(
            optax.clip_by_global_norm(o.clip),
            optax.scale_by_adam(b1=o.betas[0], b2=o.betas[1], eps=1e-8),
            optax.add_decayed_weights(o.weight_decay, mask=lambda params: {name: self.decays(name) for name in params}),
        )

    def init(self, params: Tree) -> Tree:
        """State for `params`."""
        return self._transform().init(params)

    def rate(self, step: jax.Array, planned: jax.Array) -> jax.Array:
        """Linear warm-up, then a cosine from the peak to `final_rate` of it."""
        o = self.options
        at = step.astype(jnp.float32)
        length = jnp.maximum(planned.astype(jnp.float32) - o.warmup, 1.0)
        progress = jnp.clip((at - o.warmup) / length, 0.0, 1.0)
        cosine = o.final_rate + (1 - o.final_rate) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        return o.peak_rate * jnp.minimum((at + 1.0) / o.warmup, 1.0) * cosine

    def update(self, grads: Tree, state: Tree, params: Tree, rate: jax.Array) -> tuple[Tree, Tree]:
        """-> new params, new state."""
        # optax mixes dtypes on purpose (counts and rates).
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, state = self._transform().update(grads, state, params)
        return jax.tree.map(lambda p, u: p - rate * u, params, updates), state


@dataclasses.dataclass
class Log:
    """Lines of JSON in a file, and the same as text on the screen."""

    file: Path

    def write(self, kind: str, **fields: Any) -> None:
        """Append one entry."""
        plain = {k: np.asarray(v).tolist() if isinstance(v, jax.Array | np.ndarray) else v for k, v in fields.items()}
        with open(self.file, "a", encoding="utf-8") as f:
            f.write(json.dumps({"kind": kind, **plain}) + "\n")
        print(f"[{kind}] " + "  ".join(f"{k} {_shown(v)}" for k, v in plain.items()), flush=True)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def save(file: Path, tree: Tree) -> None:
    """Write a tree of arrays; the file is replaced at once or not at all."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    partial = file.with_suffix(".partial.npz")
    with open(partial, "wb") as f:
        np.savez(f, **{jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in flat})
    os.replace(partial, file)


def restore(file: Path, like: Tree) -> Tree:
    """The tree that `save` wrote, in the structure of `like`.

    Raises:
      ValueError: the file holds another tree.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(like)
    with np.load(file) as stored:
        names = [jax.tree_util.keystr(path) for path, _ in flat]
        shapes = {name: stored[name].shape if name in stored.files else None for name in names}
        for name, (_, leaf) in zip(names, flat, strict=True):
            if shapes[name] != np.shape(leaf):
                raise ValueError(f"{file}: {name} is {shapes[name]}, expected {np.shape(leaf)}; delete the file")
        return jax.tree_util.tree_unflatten(structure, [jnp.asarray(stored[name]) for name in names])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What `train` needs to know of one training.

    Attributes:
      name: for the log.
      file: checkpoint to write and to go on from.
      options: sizes and rates.
      run: (state, planned steps) -> state, metrics; `options.steps_per_call` steps. state["step"] counts.
      evaluate: state -> metrics on held-out data.
      epoch_tokens: training tokens of one epoch.
      minutes: time for the training, compilation included; None for no limit.
      steps: steps to take, or None to plan them from epochs and minutes.
    """

    name: str
    file: Path
    options: Training
    run: Callable[[Tree, jax.Array], tuple[Tree, dict[str, jax.Array]]]
    evaluate: Callable[[Tree], dict[str, Any]]
    epoch_tokens: int
    minutes: float | None = None
    steps: int | None = None


def train(job: Job, state: Tree, log: Log, *, stop_at: float | None = None) -> Tree:
    """Train from `state`, or from the job's file where there is one.

    The number of steps is planned by the speed so far: what the epochs ask for, or what fits into the minutes and ends
    before `stop_at`. The plan follows where the speed changes, so that the rate always falls to its end. It is kept in
    the checkpoint. Given `steps` are taken exactly, to repeat a training.

    Args:
      job: the training.
      state: a tree with "step" and "planned" (int32 scalars) beside what `job.run` needs.
      log: where progress goes.
      stop_at: time.monotonic() at which to stop and save, whatever is planned.
    """
    began = time.monotonic()
    ends = [t for t in (stop_at, None if job.minutes is None else began + 60 * job.minutes) if t is not None]
    deadline = began + _PLANNED * (min(ends) - began) if ends else None
    if job.file.exists():
        state = restore(job.file, state)
        log.write(job.name, event="resumed", step=int(state["step"]), planned=int(state["planned"]))
    # Bound to a device from the start: the second call would otherwise be compiled anew.
    state = jax.device_put(state, jax.devices()[0])
    o = job.options
    tokens = o.batch * o.length
    wanted = job.steps or max(1, round(o.epochs * job.epoch_tokens / tokens))
    planned = int(state["planned"]) or job.steps
    most = planned or wanted  # a resumed training does not grow with its new minutes
    step, calls, reported, saved = int(state["step"]), 0, began, began
    since, since_step, evaluated = began, step, step

    def plan(count: int, speed: float) -> None:
        nonlocal planned
        planned = count
        state["planned"] = jax.device_put(jnp.int32(count), jax.devices()[0])
        epochs = count * tokens / job.epoch_tokens
        log.write(job.name, event="planned", steps=count, epochs=epochs, steps_per_second=speed, wanted=wanted)

    while step < (planned or wanted):
        now = time.monotonic()
        if stop_at is not None and now >= stop_at:
            log.write(job.name, event="time limit", step=step, planned=planned or wanted)
            break
        state, metrics = job.run(state, jnp.int32(planned or wanted))
        metrics = jax.tree.map(np.asarray, metrics)
        if not np.isfinite(metrics["loss"]):
            raise FloatingPointError(f"{job.name}: the loss is {metrics['loss']} at step {step}; lower the rate")
        step, calls, now = int(state["step"]), calls + 1, time.monotonic()
        if calls == 1:
            log.write(job.name, event="compiled", seconds=now - began)
            since, since_step = now, step
        if planned is None and calls >= 3 and step >= min(o.warmup // 2, 3 * o.steps_per_call):
            speed = (step - since_step) / (now - since)
            fits = wanted if deadline is None else step + int((deadline - now) * speed)
            # A slow compilation must not leave a schedule that ends inside its warm-up.
            plan(max(step, min(wanted, max(fits, 2 * o.warmup))), speed)
        if now - reported >= _REPORT_SECONDS or step >= (planned or wanted):
            speed = (step - since_step) / max(now - since, 1e-9)
            log.write(
                job.name,
                step=step,
                planned=planned or wanted,
                seconds=round(now - began, 1),
                tokens_per_second=tokens * speed,
                **metrics,
            )
            if deadline is not None and planned is not None and job.steps is None and speed > 0:
                fits = min(most, max(step, 2 * o.warmup, step + int((deadline - now) * speed)))
                # Speeds differ from report to report: a plan that almost fits is kept. None grows once the rate
                # falls steeply.
                if abs(fits - planned) > max(0.03 * (planned - step), o.steps_per_call) and (
                    fits < planned or step < planned // 2
                ):
                    plan(fits, speed)
            reported = since = now
            since_step = step
        due = step - evaluated >= max(o.steps_per_call, (planned or wanted) // _EVALUATIONS)
        if due or step >= (planned or wanted):
            log.write(job.name, step=step, **job.evaluate(state))
            evaluated, since, since_step = step, time.monotonic(), step
        if time.monotonic() - saved >= _SAVE_SECONDS:
            save(job.file, state)
            saved = time.monotonic()
            since, since_step = saved, step
    if not int(state["planned"]):
        state["planned"] = jnp.int32(planned or wanted)
    save(job.file, state)
    log.write(job.name, event="finished", step=step, seconds=time.monotonic() - began)
    return state


def windows(stream: jax.Array, key: jax.Array, rows: int, length: int) -> jax.Array:
    """Random windows of a token stream, int32 [rows, length]."""
    starts = jax.random.randint(key, (rows,), 0, stream.shape[0] - length + 1)
    return jax.vmap(lambda s: jax.lax.dynamic_slice(stream, (s,), (length,)))(starts).astype(jnp.int32)


def fixed_windows(stream: np.ndarray, rows: int, length: int) -> np.ndarray:
    """`rows` windows spread evenly over a stream, int32 [rows, length]."""
    rows = min(rows, max(1, len(stream) // length))
    starts = np.linspace(0, len(stream) - length, rows).astype(np.int64)
    return np.stack([stream[s : s + length] for s in starts]).astype(np.int32)
