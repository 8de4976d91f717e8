"""Training of the target and its export to the published layout."""

import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import loop
import numpy as np
import storage
from settings import END_OF_TEXT_ID, Preset, target_json
from target_forward import Dropout, forward, logits

from convert.geometry import Parameter, target_parameters
from dspark_jax.config import TargetConfig

REPOSITORY = Path(__file__).resolve().parents[2]
Tree = Any


def initial_state(geometry: Mapping[str, Parameter], options, seed: int, *, layers: int) -> Tree:
    """Random parameters by group and an empty optimizer."""
    params = storage.stack(storage.initial(geometry, jax.random.key(seed), layers=layers))
    moments = loop.Optimizer(options, storage.decays).init(params)
    return {"step": jnp.int32(0), "planned": jnp.int32(0), "params": params, "optimizer": moments}


def token_loss(params: storage.Params, rows: jax.Array, config: TargetConfig, **options: Any) -> tuple[jax.Array, Any]:
    """Cross-entropy in nats of rows[:, 1:], [B, T], and the forward's result."""
    out = forward(params, rows[:, :-1], config, **options)
    scores = logits(params, out.hidden)
    picked = jnp.take_along_axis(scores, rows[:, 1:, None], axis=-1)[..., 0]
    return jax.nn.logsumexp(scores, axis=-1) - picked, out


def make_run(
    preset: Preset, config: TargetConfig, geometry: Mapping[str, Parameter], *, seed: int, dtype
) -> Callable[..., tuple[Tree, dict[str, jax.Array]]]:
    """(state, stream, planned) -> state, metrics; `steps_per_call` steps in one compiled call."""
    options, optimizer = preset.target, loop.Optimizer(preset.target, storage.decays)
    bias = "target/layers/*/moe/router/bias"
    # The hardware generator: dropout draws more numbers than anything else here computes.
    key = jax.random.key(seed, impl="rbg")

    def step(state: Tree, stream: jax.Array, planned: jax.Array) -> tuple[Tree, dict[str, jax.Array]]:
        here = jax.random.fold_in(key, state["step"])
        rows = loop.windows(stream, jax.random.fold_in(here, 0), options.batch, options.length + 1)
        early = state["step"].astype(jnp.float32) < options.early * planned.astype(jnp.float32)

        def objective(params: storage.Params) -> tuple[jax.Array, tuple]:
            weights = storage.unstack(storage.rounded(params, geometry, on=~early), geometry)
            dropout = Dropout(jax.random.fold_in(here, 1), options.dropout) if options.dropout else None
            nats, out = token_loss(weights, rows, config, dtype=dtype, full_attention=early, dropout=dropout)
            loss = jnp.mean(nats)
            return loss + preset.index_weight * out.index_loss, (loss, out)

        grads, (loss, out) = jax.grad(objective, has_aux=True)(state["params"])
        rate = optimizer.rate(state["step"], planned)
        params, moments = optimizer.update(grads, state["optimizer"], state["params"], rate)
        # Experts that get less than their share become easier to choose. The choice alone feels the bias.
        nudge = preset.balance_rate * rate / options.peak_rate
        load = out.expert_load
        params[bias] = params[bias] + nudge * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
        metrics = {
            "loss": loss,
            "index_loss": out.index_loss,
            "kept_mass": out.kept_mass,
            "largest_load": jnp.max(out.expert_load, initial=0.0) * config.num_experts,
            "rate": rate,
        }
        state = {"step": state["step"] + 1, "planned": state["planned"], "params": params, "optimizer": moments}
        return state, metrics

    @functools.partial(jax.jit, donate_argnums=0)
    def run(state: Tree, stream: jax.Array, planned: jax.Array) -> tuple[Tree, dict[str, jax.Array]]:
        state, metrics = jax.lax.scan(
            lambda state, _: step(state, stream, planned), state, length=options.steps_per_call
        )
        return state, jax.tree.map(lambda m: jnp.mean(m, axis=0), metrics)

    return run


def make_evaluate(
    config: TargetConfig, bytes_of: np.ndarray, *, batch: int, dtype, prepare: Callable[[Tree], storage.Params]
) -> Callable[..., dict[str, float]]:
    """(weights, rows [N, T + 1]) -> bits per byte, bits per token, entropy and kept mass.

    `prepare` makes float32 values by path of the weights, inside the compiled program.
    """
    sizes = jnp.asarray(bytes_of, jnp.int32)

    @jax.jit
    def sums(given: Tree, rows: jax.Array) -> jax.Array:
        weights = prepare(given)

        def part(rows: jax.Array) -> jax.Array:
            out = forward(weights, rows[:, :-1], config, dtype=dtype)
            log_p = jax.nn.log_softmax(logits(weights, out.hidden), axis=-1)
            nats = -jnp.sum(jnp.take_along_axis(log_p, rows[:, 1:, None], axis=-1))
            entropy = -jnp.sum(jnp.exp(log_p) * log_p)
            size = jnp.sum(sizes[rows[:, 1:]]).astype(jnp.float32)
            return jnp.stack([nats, entropy, size, out.kept_mass * rows.shape[0]])

        return jnp.sum(jax.lax.map(part, rows), axis=0)

    def evaluate(weights: Tree, rows: np.ndarray) -> dict[str, float]:
        width = min(batch, len(rows))
        rows = rows[: len(rows) // width * width]
        nats, entropy, size, kept = np.asarray(
            sums(weights, jnp.asarray(rows).reshape(-1, width, rows.shape[1])), np.float64
        )
        count = rows.shape[0] * (rows.shape[1] - 1)
        return {
            "bits_per_byte": nats / math.log(2) / size,
            "bits_per_token": nats / math.log(2) / count,
            "entropy_bits_per_token": entropy / math.log(2) / count,
            "held_out_kept_mass": kept / rows.shape[0],
            "tokens_scored": count,
        }

    return evaluate


def train(
    preset: Preset,
    streams: Mapping[str, np.ndarray],
    bytes_of: np.ndarray,
    folder: Path,
    log: loop.Log,
    *,
    minutes: float | None,
    steps: int | None,
    seed: int,
    dtype,
    stop_at: float | None = None,
) -> storage.Params:
    """Train, or go on from `folder`/target.npz -> the target's parameters, float32 by path."""
    config = TargetConfig.from_hf(target_json(preset))
    geometry = target_parameters(config)
    run = make_run(preset, config, geometry, seed=seed, dtype=dtype)
    evaluate = make_evaluate(
        config,
        bytes_of,
        batch=preset.target.batch,
        dtype=dtype,
        prepare=lambda params: storage.unstack(storage.rounded(params, geometry), geometry),
    )
    rows = loop.fixed_windows(streams["held_out"], preset.eval_rows, preset.target.length + 1)
    stream = jnp.asarray(streams["train"])
    job = loop.Job(
        name="target",
        file=folder / "target.npz",
        options=preset.target,
        run=lambda state, planned: run(state, stream, planned),
        evaluate=lambda state: evaluate(state["params"], rows),
        epoch_tokens=len(streams["train"]),
        minutes=minutes,
        steps=steps,
    )
    state = initial_state(geometry, preset.target, seed, layers=preset.layers)
    return storage.unstack(loop.train(job, state, log, stop_at=stop_at)["params"], geometry)


def export(params: storage.Params, preset: Preset, tokenizer_folder: Path, destination: Path) -> dict[str, Any]:
    """Write the target in the published layout -> its weights as stored."""
    geometry = target_parameters(TargetConfig.from_hf(target_json(preset)))
    weights = jax.jit(lambda params: storage.stored(params, geometry))(params)
    storage.write_checkpoint(destination, target_json(preset), weights)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (destination / name).write_bytes((tokenizer_folder / name).read_bytes())
    generation = {
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
    }
    (destination / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n", encoding="utf-8")
    return weights


def convert(source: Path, destination: Path) -> None:
    """`python -m convert.minimax`, in a process of its own that leaves the accelerator alone.

    Raises:
      RuntimeError: the conversion failed.
    """
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "convert.minimax", str(source), str(destination), "--verify"]
    done = subprocess.run(
        command, env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
