"""The Triton form of `filter_floors`, run by Triton's interpreter on the CPU.

TRITON_INTERPRET=1 pytest tests/pallas_kernels/test_filter_floors_interpreted.py
"""

import jax.numpy as jnp
import numpy as np
import pytest
from filter_floors_cases import FILTERS, WRONG, problems, rows, settings
from triton_interpreter import interpreted, requires_interpreter

SMALL = 6147  # odd, and more than a chunk


def run(logits: np.ndarray, setting: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    from pallas_kernels.filter_floors import triton

    greedy = setting["temperature"] < 1e-5
    inverse = np.float32(1) / np.where(greedy, np.float32(1), setting["temperature"])
    with np.errstate(divide="ignore"):
        least = np.log(np.where(greedy, np.float32(0), setting["min_p"]))
    top_k, top_p = np.where(greedy, np.int32(0), setting["top_k"]), np.where(greedy, np.float32(1), setting["top_p"])
    packed = np.stack([a.astype(np.float32) for a in (inverse, top_k, top_p, least, greedy)], axis=-1)
    with interpreted(), np.errstate(all="ignore"):
        numbers, best = triton.run(jnp.asarray(logits), jnp.asarray(packed))
    return (*np.moveaxis(np.asarray(numbers), -1, 0), np.asarray(best))


def stacked(vocab: int, seed: int) -> np.ndarray:
    """[4, 4, V]: every request other rows, and other seeds other ones."""
    chosen = [list(rows(vocab, seed + b).values()) for b in range(4)]
    return np.stack([[made[(4 * b + n + seed) % len(made)] for n in range(4)] for b, made in enumerate(chosen)])


@requires_interpreter
@pytest.mark.parametrize("seed", [1, 6])
@pytest.mark.parametrize("name", FILTERS)
def test_floors_equal_the_oracle(name: str, seed: int) -> None:
    logits, setting = stacked(SMALL, seed), settings(name, SMALL)
    assert not problems(logits, run(logits, setting), setting)


@requires_interpreter
@pytest.mark.parametrize("name", ["top-p", "top-k, then top-p", "everything"])
def test_a_bracket_that_misses_costs_time_and_nothing_else(name: str, monkeypatch) -> None:
    from pallas_kernels.filter_floors import triton

    logits, setting = stacked(SMALL, 2)[:, :2], settings(name, SMALL)
    for changes in (dict(SIGMAS=0.0, SPARE=0.0), dict(SLOTS=2, FEW=1), dict(SIGMAS=-3.0, SPARE=-9.0)):
        with monkeypatch.context() as patch:
            for key, value in changes.items():
                patch.setattr(triton, key, value)
            assert not problems(logits, run(logits, setting), setting)


@requires_interpreter
@pytest.mark.parametrize("vocab", [1, 7, 4096])
def test_small_vocabularies(vocab: int) -> None:
    logits = np.random.default_rng(vocab).normal(size=(4, 2, vocab)).astype(np.float32)
    for name in ("top-p", "top-k", "everything", "some rows only"):
        setting = settings(name, vocab)
        assert not problems(logits, run(logits, setting), setting)


@requires_interpreter
@pytest.mark.parametrize("kind", ["normal", "peaked", "zipf in order", "steps"])
def test_the_real_vocabulary(kind: str) -> None:
    logits = np.broadcast_to(rows(200_064, 3)[kind], (2, 1, 200_064))
    for name in ("top-p", "top-k, then top-p"):
        setting = {key: values[:2] for key, values in settings(name, 200_064).items()}
        assert not problems(logits, run(logits, setting), setting)


@requires_interpreter
def test_bfloat16_logits_are_widened_first() -> None:
    logits = jnp.asarray(stacked(SMALL, 4)[:, :2]).astype(jnp.bfloat16)
    setting = settings("everything", SMALL)
    narrow, wide = run(logits, setting), run(np.asarray(logits.astype(jnp.float32)), setting)
    for a, b in zip(narrow, wide, strict=True):
        np.testing.assert_array_equal(a, b)


@requires_interpreter
@pytest.mark.parametrize("name", WRONG)
def test_the_comparison_sees_a_wrong_law(name: str) -> None:
    wrong, filters, kind = WRONG[name]
    logits, setting = np.stack([rows(SMALL, 5 + b)[kind] for b in range(4)])[:, None], settings(filters, SMALL)
    found = run(logits, setting)
    assert not problems(logits, found, setting)
    assert problems(logits, found, setting, keep=wrong)


@requires_interpreter
def test_a_row_does_not_depend_on_the_others() -> None:
    logits, setting = stacked(SMALL, 6), settings("everything", SMALL)
    together = run(logits, setting)
    alone = run(logits[2:3, 3:], {key: values[2:3] for key, values in setting.items()})
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_array_equal(a[2, 3], b[0, 0])
