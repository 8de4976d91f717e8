"""Routing lists against a loop in Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_experts import routing


def route_by_hand(chosen: np.ndarray, num_experts: int, tile: int) -> tuple[list[int], list[list[int]]]:
    """Expert and pairs of every used tile."""
    experts, tiles = [], []
    flat = chosen.reshape(-1).tolist()
    for expert in range(num_experts):
        pairs = [pair for pair, e in enumerate(flat) if e == expert]
        for start in range(0, len(pairs), tile):
            piece = pairs[start : start + tile]
            experts.append(expert)
            tiles.append(piece + [-1] * (tile - len(piece)))
    return experts, tiles


@functools.cache
def program(num_experts: int, tile: int, most_compared: int = routing.MOST_COMPARED):
    static = dict(num_experts=num_experts, tile=tile, most_compared=most_compared)
    return jax.jit(functools.partial(routing.route, **static))


def check(found: routing.Routing, chosen: np.ndarray, num_experts: int, tile: int) -> None:
    experts, tiles = route_by_hand(chosen, num_experts, tile)
    used = len(experts)
    bound = routing.most_tiles(chosen.size, num_experts, tile)
    assert found.expert.shape == (bound,) and found.pairs.shape == (bound, tile) and used <= bound
    assert {field.dtype for field in found} == {jnp.dtype(jnp.int32)}
    assert int(found.used) == used
    np.testing.assert_array_equal(found.tiles, [used, *experts, *[0] * (bound - used)])
    np.testing.assert_array_equal(found.expert, experts + [-1] * (bound - used))
    np.testing.assert_array_equal(found.pairs, tiles + [[-1] * tile] * (bound - used))
    rows = [sum(pair >= 0 for pair in piece) for piece in tiles]
    np.testing.assert_array_equal(found.counts, rows + [0] * (bound - used))
    places = np.zeros(chosen.size, int)
    for place, pair in enumerate(pair for piece in tiles for pair in piece):
        if pair >= 0:
            places[pair] = place
    np.testing.assert_array_equal(found.places, places.reshape(chosen.shape))


@st.composite
def drawn(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    num_experts, tile = draw(st.sampled_from([(1, 8), (5, 8), (16, 16), (128, 8), (7, 3)]))
    shape = draw(st.sampled_from([(1, 1), (1, 4), (9, 2), (40, 4), (33, 1)]))
    ids = st.integers(-2, num_experts + 2) if draw(st.booleans()) else st.sampled_from([0, num_experts - 1])
    flat = draw(st.lists(ids, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    return np.asarray(flat, np.int32).reshape(shape), num_experts, tile


@settings(max_examples=60, deadline=None, derandomize=True)
@given(drawn(), st.booleans())
def test_tiles_equal_the_loop(case: tuple[np.ndarray, int, int], sort: bool) -> None:
    chosen, num_experts, tile = case
    found = program(num_experts, tile, 0 if sort else routing.MOST_COMPARED)(jnp.asarray(chosen))
    check(found, chosen, num_experts, tile)


@pytest.mark.parametrize("rows, tile", [(1, 8), (8, 8), (64, 8), (100, 16), (512, 32), (513, 32), (4096, 64)])
@pytest.mark.parametrize("spread", ["even", "skewed", "one expert"])
def test_real_sizes(rows: int, tile: int, spread: str) -> None:
    rng = np.random.default_rng(rows)
    if spread == "one expert":
        chosen = np.full((rows, 4), 77)
    else:
        chosen = np.argsort(rng.normal(size=(rows, 128)) + (np.arange(128) / 30 if spread == "skewed" else 0))[:, -4:]
    chosen = chosen.astype(np.int32)
    check(program(128, tile)(jnp.asarray(chosen)), chosen, 128, tile)


@pytest.mark.parametrize("num_pairs", range(1, 60, 7))
def test_the_bound_is_reached_and_not_passed(num_pairs: int) -> None:
    num_experts, tile = 5, 4
    worst = 0
    for first in range(num_pairs + 1):  # the first expert takes so many, the rest spread over the others
        chosen = np.asarray([0] * first + [1 + i % 4 for i in range(num_pairs - first)])
        worst = max(worst, len(route_by_hand(chosen, num_experts, tile)[0]))
    bound = routing.most_tiles(num_pairs, num_experts, tile)
    assert worst <= bound <= worst + 3  # the spread above does not try every way to open tiles
    assert routing.most_tiles(8 * tile, 1, tile) == 8


@pytest.mark.parametrize("field", ["tiles", "pairs", "places", "counts"])
def test_a_routing_off_by_one_tile_is_caught(field: str) -> None:
    chosen = np.random.default_rng(0).integers(0, 6, (20, 2)).astype(np.int32)
    right = program(6, 8)(jnp.asarray(chosen))
    check(right, chosen, 6, 8)
    with pytest.raises(AssertionError):
        check(right._replace(**{field: jnp.roll(getattr(right, field), 1, axis=0)}), chosen, 6, 8)
