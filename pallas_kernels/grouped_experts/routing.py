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
      expert: int32 [tiles], the expert of a tile; -1: the tile is not used, and neither is any after it.
      pairs: int32 [tiles, tile], -1 where a tile is not full.
      used: int32 [], the number of tiles in use.
      places: int32 [N, k], where a pair is in `pairs`, counted through; 0 for a pair that is nowhere.
    """

    expert: jax.Array
    pairs: jax.Array
    used: jax.Array
    places: jax.Array


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
    num_pairs = flat.shape[0]
    each = jnp.arange(num_experts, dtype=jnp.int32)
    counts = jnp.sum(flat[None] == each[:, None], axis=1, dtype=jnp.int32)
    tiles = (counts + (tile - 1)) // tile
    # A sum over a triangle: one kernel, where a cumulative sum is several.
    tile_ends = jnp.sum(jnp.where(each[None] <= each[:, None], tiles[None], 0), axis=1, dtype=jnp.int32)
    used = tile_ends[-1]

    index = jnp.arange(most_tiles(num_pairs, num_experts, tile), dtype=jnp.int32)
    before = tile_ends[None] <= index[:, None]
    expert = jnp.sum(before, axis=1, dtype=jnp.int32)
    first_tile = jnp.max(jnp.where(before, tile_ends[None], 0), axis=1)
    expert = jnp.where(index < used, expert, -1)
    rank = (index - first_tile)[:, None] * tile + jnp.arange(tile, dtype=jnp.int32)[None]  # among its expert's pairs
    starts = (tile_ends - tiles) * tile  # place of an expert's first pair
    if num_pairs <= most_compared:
        pairs, places = _by_comparison(flat, starts, expert, rank)
    else:
        pairs, places = _by_sorting(flat, counts, expert, rank)
    return Routing(expert, pairs, used, places.reshape(experts.shape))


def _by_comparison(
    flat: jax.Array, starts: jax.Array, expert: jax.Array, rank: jax.Array
) -> tuple[jax.Array, jax.Array]:
    pair = jnp.arange(flat.shape[0], dtype=jnp.int32)
    earlier = (flat[None] == flat[:, None]) & (pair[None] < pair[:, None])
    own_rank = jnp.sum(earlier, axis=1, dtype=jnp.int32)
    live = exists(flat, starts.shape[0])
    here = (expert[:, None, None] == flat[None, None]) & (rank[:, :, None] == own_rank[None, None])
    # Unused tiles have expert -1: a negative choice must not land in them.
    pairs = jnp.max(jnp.where(here & live[None, None], pair[None, None], -1), axis=2)
    return pairs, jnp.where(live, starts[jnp.where(live, flat, 0)] + own_rank, 0)


def _by_sorting(flat: jax.Array, counts: jax.Array, expert: jax.Array, rank: jax.Array) -> tuple[jax.Array, jax.Array]:
    (num_experts,), (num_pairs,) = counts.shape, flat.shape
    pair = jnp.arange(num_pairs, dtype=jnp.int32)
    key = jnp.where(exists(flat, num_experts), flat, num_experts)
    order = lax.sort((key, pair), num_keys=1, is_stable=True)[1]
    each = jnp.arange(num_experts, dtype=jnp.int32)
    starts = jnp.sum(jnp.where(each[None] < each[:, None], counts[None], 0), axis=1, dtype=jnp.int32)
    safe = jnp.maximum(expert, 0)
    slot = jnp.minimum(starts[safe][:, None] + rank, num_pairs - 1)
    inside = (expert >= 0)[:, None] & (rank < counts[safe][:, None])
    pairs = jnp.where(inside, order[slot], -1)
    target = jnp.where(inside, pairs, num_pairs).reshape(-1)  # beyond the end: dropped
    places = jnp.zeros((num_pairs,), jnp.int32)
    return pairs, places.at[target].set(jnp.arange(target.shape[0], dtype=jnp.int32), mode="drop")
