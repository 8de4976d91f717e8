"""Lists and rows of few pairs by the Triton kernel, run by Triton's interpreter, against a loop in Python.

TRITON_INTERPRET=1 pytest tests/pallas_kernels/test_grouped_experts_spreading_interpreted.py
"""

import jax.numpy as jnp
import numpy as np
import pytest
from test_grouped_experts_routing import route_by_hand
from triton_interpreter import interpreted, requires_interpreter

from pallas_kernels._quantized import MXFP8, NVFP4, Format
from pallas_kernels.grouped_experts import routing, spreading


def run(x: np.ndarray, experts: np.ndarray, positions: np.ndarray, form: Format, num_experts: int, tile: int):
    given = jnp.asarray(x, jnp.bfloat16), jnp.asarray(experts, jnp.int32), jnp.asarray(positions, jnp.int32)
    with interpreted(), np.errstate(all="ignore"):
        return spreading.spread_by_expert(*given, form=form, num_experts=num_experts, tile=tile)


def check(found, x: np.ndarray, experts: np.ndarray, positions: np.ndarray, form: Format, num_experts: int, tile: int):
    """Raises AssertionError where tiles, places, counts or rows are wrong."""
    tiles, places, counts, rows = (np.asarray(a) for a in found)
    live = np.where(positions[:, None] >= 0, experts, num_experts)
    used, pieces = route_by_hand(live, num_experts, tile)
    bound = routing.most_tiles(experts.size, num_experts, tile)
    np.testing.assert_array_equal(tiles, [len(used), *used, *[0] * (bound - len(used))])
    full = [sum(pair >= 0 for pair in piece) for piece in pieces]
    np.testing.assert_array_equal(counts, full + [0] * (bound - len(used)))
    wanted = np.zeros(experts.size, int)
    # Of each slab of 32 pairs of inputs (NVFP4: 64): pair j of a quarter follows pair j of the quarter before.
    quarter = 8 if form is MXFP8 else 16
    ordered = x.reshape(len(x), -1, 4, quarter, 2).transpose(0, 1, 3, 2, 4).reshape(x.shape)
    for place, pair in enumerate(pair for piece in pieces for pair in piece):
        if pair >= 0:
            wanted[pair] = place
            np.testing.assert_array_equal(rows[place].astype(np.float32), ordered[pair // experts.shape[1]])
    np.testing.assert_array_equal(places, wanted.reshape(experts.shape))
    assert rows.shape == (bound * tile, x.shape[1])


def case(rows: int, choices: int, num_experts: int, hidden: int, spread: str) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng([rows, choices, num_experts])
    x = rng.integers(-128, 128, (rows, hidden)).astype(np.float32)  # bfloat16 holds them
    experts = {
        "even": lambda: np.argsort(rng.normal(size=(rows, max(num_experts, choices))))[:, :choices],
        "two experts": lambda: rng.choice([num_experts // 2, num_experts - 1], (rows, choices)),
        "outside too": lambda: rng.integers(-2, num_experts + 3, (rows, choices)),
        "none": lambda: np.full((rows, choices), num_experts),
    }[spread]()
    positions = np.where(rng.random(rows) < 0.3, -1, rng.integers(0, 99, rows)) if spread != "even" else np.arange(rows)
    return x, experts.astype(np.int32), positions.astype(np.int32)


@requires_interpreter
@pytest.mark.parametrize("spread", ["even", "two experts", "outside too", "none"])
@pytest.mark.parametrize(
    "rows, choices, num_experts, hidden, form, tile",
    [(8, 4, 128, 256, NVFP4, 8), (64, 4, 128, 128, NVFP4, 8), (1, 4, 128, 2560, MXFP8, 8), (13, 3, 6, 64, MXFP8, 24),
     (128, 4, 128, 128, NVFP4, 16), (5, 1, 1, 192, MXFP8, 3), (9, 2, 200, 384, NVFP4, 32),
     (60, 3, 2, 64, MXFP8, 40), (100, 2, 2, 128, NVFP4, 96)],
)  # fmt: skip
def test_lists_and_rows_equal_the_loop(rows, choices, num_experts, hidden, form, tile, spread) -> None:
    given = case(rows, choices, num_experts, hidden, spread)
    check(run(*given, form, num_experts, tile), *given, form, num_experts, tile)


def replaced(found: tuple, at: int) -> tuple:
    """With the values of the neighbour at one place."""
    return *found[:at], jnp.roll(found[at], 1, axis=0), *found[at + 1 :]


@requires_interpreter
@pytest.mark.parametrize("wrong", ["padding", "tile", "order", "last pair", "counts"])
def test_the_comparison_sees_wrong_lists(wrong: str) -> None:
    x, experts, positions = given = case(13, 3, 6, 128, "two experts")
    right: tuple = (NVFP4, 6, 8)
    check(run(*given, *right), *given, *right)
    found = {
        "padding": lambda: run(x, experts, positions * 0, *right),
        "tile": lambda: run(*given, NVFP4, 6, 16),
        "order": lambda: run(*given, MXFP8, 6, 8),
        "counts": lambda: replaced(run(*given, *right), 2),
        "last pair": lambda: run(x, np.where(np.arange(39).reshape(13, 3) == 36, 6, experts), positions, *right),
    }[wrong]()
    with pytest.raises(AssertionError):
        check(found, *given, *right)
