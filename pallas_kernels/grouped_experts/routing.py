"""Rows sorted by expert and cut into tiles, on the device, in arrays of static shape."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Up to here a GPU compares every pair with every other: a few small kernels, where a sort alone takes many.
MOST_COMPARED = 2048


class Routing(NamedTuple):
    """Tiles of pairs. Pair n * k + j is choice j of row n; all pairs of a tile chose the same expert.

    Tiles are in the order of their experts and pairs of an expert in their own order, so nothing depends on chance.

    Attributes:
      tiles: int32 [1 + tiles], the number of tiles in use and the expert of each; 0 for those after them.
      pairs: int32 [tiles, tile], -1 where a tile is not full.
      places: int32 [N, k], where a pair is in `pairs`, counted through; 0 for a pair that is nowhere.
      counts: int32 [tiles], how many pairs a tile has.
    """

    tiles: jax.Array
    pairs: jax.Array
    places: jax.Array
    counts: jax.Array

    @property
    def used(self) -> jax.Array:
        return self.tiles[0]

    @property
    def expert(self) -> jax.Array:
        """int32 [tiles], the expert of a tile; -1: the tile is not used, and neither is any after it."""
        index = jnp.arange(self.tiles.shape[0] - 1, dtype=jnp.int32)
        return jnp.where(index < self.tiles[0], self.tiles[1:], -1)


def most_tiles(num_pairs: int, num_experts: int, tile: int) -> int:
    """The largest number of tiles that any choice of experts can need."""
    # A first pair opens a tile for each expert that has one; every further tile takes `tile` more.
    active = min(num_experts, num_pairs)
    return active + (num_pairs - active) // tile


def exists(experts: jax.Array, num_experts: int) -> jax.Array:
    """Which choices name an expert; others are padding."""
    return (experts >= 0) & (experts < num_experts)


def route(experts: jax.Array, *, num_experts: int, tile: int, most_compared: int = MOST_COMPARED) -> Routing:
    """Tiles for experts int32 [N, k]; pairs that name no expert are in none.

    More than `most_compared` pairs are sorted. Comparing takes tiles x tile x pairs steps, which a GPU fuses into one
    reduction and a CPU would write down: pass 0 there.
    """
    flat = experts.reshape(-1)
    most = most_tiles(flat.shape[0], num_experts, tile)
    route = _by_comparison if flat.shape[0] <= most_compared else _by_sorting
    routing = route(flat, num_experts, tile, most)
    return routing._replace(places=routing.places.reshape(experts.shape))


def _by_comparison(flat: jax.Array, num_experts: int, tile: int, most: int) -> Routing:
    """Three reductions over the pairs, and no more kernels, up to `tiles` and `places`."""
    num_pairs = flat.shape[0]
    pair, last = jnp.arange(num_pairs, dtype=jnp.int32), jnp.int32(2**31 - 1)
    live = exists(flat, num_experts)
    earlier = (flat[None] == flat[:, None]) & (pair[None] < pair[:, None])
    rank = jnp.sum(earlier, axis=1, dtype=jnp.int32)  # among its expert's pairs
    inside = lax.rem(rank, jnp.int32(tile))
    key = jnp.where(live, flat * num_pairs + rank, last)  # in the order of `pairs`
    opening = jnp.where(inside == 0, key, last)  # of pairs that open a tile
    # XLA would rather write down the comparisons below than make these in them.
    flat, key, opening = lax.optimization_barrier((flat, key, opening))
    number = jnp.sum(opening[None] <= key[:, None], axis=1, dtype=jnp.int32)  # of tiles up to its own
    places = jnp.where(live, (number - 1) * tile + inside, 0)
    # The count and the experts as one sum: two would be kernels of their own, and a third to join them.
    number = lax.optimization_barrier(jnp.where(opening == last, 0, number))
    index = jnp.arange(1 + most, dtype=jnp.int32)[:, None]
    found = jnp.where(index == 0, jnp.minimum(number, 1)[None], jnp.where(number[None] == index, flat[None], 0))
    tiles = jnp.sum(found, axis=1, dtype=jnp.int32)
    place = jnp.arange(most * tile, dtype=jnp.int32)[:, None]
    pairs = jnp.max(jnp.where((places[None] == place) & live[None], pair[None], -1), axis=1)
    own = jnp.where(live, lax.div(places, jnp.int32(tile)), -1)
    counts = jnp.sum(own[None] == jnp.arange(most, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)
    return Routing(tiles, pairs.reshape(most, tile), places, counts)


def _by_sorting(flat: jax.Array, num_experts: int, tile: int, most: int) -> Routing:
    num_pairs = flat.shape[0]
    each, pair = (jnp.arange(n, dtype=jnp.int32) for n in (num_experts, num_pairs))
    counts = jnp.sum(flat[None] == each[:, None], axis=1, dtype=jnp.int32)
    tile_ends = _sums((counts + (tile - 1)) // tile)
    used = tile_ends[-1]
    index = jnp.arange(most, dtype=jnp.int32)
    before = tile_ends[None] <= index[:, None]
    expert = jnp.where(index < used, jnp.sum(before, axis=1, dtype=jnp.int32), 0)
    first_tile = jnp.max(jnp.where(before, tile_ends[None], 0), axis=1)
    rank = (index - first_tile)[:, None] * tile + jnp.arange(tile, dtype=jnp.int32)[None]  # among its expert's pairs
    key = jnp.where(exists(flat, num_experts), flat, num_experts)
    order = lax.sort((key, pair), num_keys=1, is_stable=True)[1]
    starts = _sums(counts) - counts
    slot = jnp.minimum(starts[expert][:, None] + rank, num_pairs - 1)
    inside = (index < used)[:, None] & (rank < counts[expert][:, None])
    pairs = jnp.where(inside, order[slot], -1)
    target = jnp.where(inside, pairs, num_pairs).reshape(-1)  # beyond the end: dropped
    places = jnp.zeros((num_pairs,), jnp.int32)
    places = places.at[target].set(jnp.arange(target.shape[0], dtype=jnp.int32), mode="drop")
    in_use = jnp.sum(inside, axis=1, dtype=jnp.int32)
    return Routing(jnp.concatenate([used[None], expert]), pairs, places, in_use)


def _sums(counts: jax.Array) -> jax.Array:
    """Cumulative sums, over a triangle: one kernel, where a cumulative sum is several."""
    index = jnp.arange(counts.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(index[None] <= index[:, None], counts[None], 0), axis=1, dtype=jnp.int32)
