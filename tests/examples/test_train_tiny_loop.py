"""The training loop of examples/train_tiny: its plan, its time limits, its learning rate."""

import dataclasses
import math
import time

import jax
import jax.numpy as jnp
import loop
import pytest
import storage
from train_tiny_cases import MICRO


def test_a_time_limit_stops_and_saves(tmp_path, capsys):
    state = {"step": jnp.int32(0), "planned": jnp.int32(0)}

    def run(state, planned):
        return {**state, "step": state["step"] + 8}, {"loss": jnp.float32(1.0)}

    job = loop.Job(
        name="x",
        file=tmp_path / "x.npz",
        options=MICRO.target,
        run=run,
        evaluate=lambda state: {},
        epoch_tokens=1000,
        steps=80,
    )
    log = loop.Log(tmp_path / "log.jsonl")
    stopped = loop.train(job, state, log, stop_at=time.monotonic())
    assert int(stopped["step"]) == 0 and job.file.exists()
    assert int(loop.train(job, state, log)["step"]) == 80
    failing = dataclasses.replace(job, file=tmp_path / "y.npz", run=lambda s, _: (s, {"loss": jnp.float32(math.nan)}))
    with pytest.raises(FloatingPointError, match="loss"):
        loop.train(failing, state, log)
    assert "time limit" in capsys.readouterr().out


def test_rate_warms_up_and_falls_along_a_cosine():
    options = dataclasses.replace(MICRO.target, warmup=10, peak_rate=2.0, final_rate=0.1)
    optimizer = loop.Optimizer(options, storage.decays)
    rates = [float(optimizer.rate(jnp.int32(s), jnp.int32(110))) for s in (0, 9, 10, 60, 110, 500)]
    assert rates == pytest.approx([0.2, 2.0, 2.0, 1.1, 0.2, 0.2], rel=1e-5)
    assert not storage.decays("target/layers/*/input_norm/weight") and storage.decays("target/lm_head/weight")
    assert not storage.decays("target/layers/*/moe/router/bias")


class Clock:
    """Time that passes by as much as each call of a training is said to take."""

    def __init__(self, monkeypatch, seconds_at):
        self.now, self.seconds_at = 1000.0, seconds_at
        monkeypatch.setattr(loop.time, "monotonic", lambda: self.now)

    def run(self, state, planned):
        step = int(state["step"])
        # The first call compiles.
        self.now += self.seconds_at(step) + 20 * (step == 0)
        self.rate = float(RATE(jnp.int32(step + 9), planned))
        return {**state, "step": state["step"] + 10}, {"loss": jnp.float32(1.0)}


OPTIONS = dataclasses.replace(MICRO.drafter, warmup=20, peak_rate=1.0, final_rate=0.0, steps_per_call=10)
RATE = jax.jit(loop.Optimizer(OPTIONS, storage.decays).rate)


def timed(tmp_path, clock: Clock, *, minutes=None, steps=None, stop_at=None, epoch_tokens=10**9):
    job = loop.Job(
        name="x",
        file=tmp_path / "x.npz",
        options=OPTIONS,
        run=clock.run,
        evaluate=lambda state: {},
        epoch_tokens=epoch_tokens,
        minutes=minutes,
        steps=steps,
    )
    began = clock.now
    state = {"step": jnp.int32(0), "planned": jnp.int32(0)}
    state = loop.train(job, state, loop.Log(tmp_path / "log.jsonl"), stop_at=stop_at and began + stop_at)
    return int(state["step"]), int(state["planned"]), clock.now - began


SLOWER = {
    "at one speed": lambda step: 0.5,
    "three times slower later": lambda step: 0.5 if step < 1000 else 1.5,
    "slower and slower": lambda step: 0.5 + step / 4000,
    "slow at first": lambda step: 2.0 if step < 300 else 0.5,
}


@pytest.mark.parametrize("limit", [{"minutes": 5.0}, {"stop_at": 300.0}, {"minutes": 60.0, "stop_at": 300.0}])
@pytest.mark.parametrize("seconds_at", SLOWER.values(), ids=SLOWER)
def test_the_rate_falls_to_its_end_within_the_time(seconds_at, limit, tmp_path, monkeypatch, capsys):
    clock = Clock(monkeypatch, seconds_at)
    step, planned, seconds = timed(tmp_path, clock, **limit)
    assert 0.85 * 300 < seconds <= 300
    assert planned <= step < planned + 10
    assert clock.rate < 1e-3
    if seconds_at(0) != seconds_at(4000):
        # Mutant: the plan of the first calls alone does not end in time.
        monkeypatch.setattr(loop, "_REPORT_SECONDS", math.inf)
        other = Clock(monkeypatch, seconds_at)
        (tmp_path / "x.npz").unlink()
        _, _, seconds = timed(tmp_path, other, **limit)
        assert not 0.85 * 300 < seconds <= 300 or other.rate > 0.05
    capsys.readouterr()


def test_epochs_and_given_steps_are_not_shortened(tmp_path, monkeypatch, capsys):
    clock = Clock(monkeypatch, SLOWER["three times slower later"])
    tokens = OPTIONS.batch * OPTIONS.length
    assert timed(tmp_path, clock, minutes=60.0, epoch_tokens=round(1000 * tokens / OPTIONS.epochs))[:2] == (1000, 1000)
    (tmp_path / "x.npz").unlink()
    assert timed(tmp_path, clock, minutes=1.0, steps=3000)[:2] == (3000, 3000)
    capsys.readouterr()


def test_a_resumed_training_keeps_its_plan(tmp_path, monkeypatch, capsys):
    """Cut after the plan was made: the rest follows it, although the clock starts anew."""
    clock = Clock(monkeypatch, SLOWER["at one speed"])
    right, calls = clock.run, []

    def cut(state, planned):
        calls.append(int(planned))
        if len(calls) == 300:
            raise KeyboardInterrupt
        return right(state, planned)

    clock.run = cut
    with pytest.raises(KeyboardInterrupt):
        timed(tmp_path, clock, minutes=5.0)
    planned = calls[-1]
    clock.run = right
    step, kept, _ = timed(tmp_path, clock, minutes=5.0)
    assert kept == planned and step < planned + 10 and clock.rate < 1e-3
    capsys.readouterr()
