"""Key/value memory of the target."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.config import TargetConfig

# Keys that the attention of a long cache reads at a time; see `attention.attend`.
KEY_CHUNK = 1024


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetCache:
    """Keys, values and index keys of every layer; slot p of a row holds position p.

    The cache has no length of its own: a query at position p reads slots 0..p and nothing else, so slots behind the
    committed tokens may hold rejected ones until they are written again.

    Attributes:
      keys, values: per layer [B, S, Hkv, D]. Keys are normed and rotated.
      index_keys: per layer [B, S, D_index], or None where attention is not block-sparse.
    """

    keys: tuple[Float[Array, "B S Hkv D"], ...]
    values: tuple[Float[Array, "B S Hkv D"], ...]
    index_keys: tuple[Float[Array, "B S I"] | None, ...]

    @classmethod
    def zeros(cls, config: TargetConfig, batch: int, capacity: int, dtype=jnp.bfloat16) -> Self:
        """An empty cache for `batch` rows of at least `capacity` tokens; S is rounded up to whole blocks.

        Raises:
          ValueError: `capacity` is not positive.
        """
        slots = cache_slots(config, capacity)
        kv = jnp.zeros((batch, slots, config.num_kv_heads, config.head_dim), dtype)
        index = jnp.zeros((batch, slots, config.index_head_dim), dtype)
        layers = range(config.num_layers)
        return cls(
            keys=tuple(kv for _ in layers),
            values=tuple(kv for _ in layers),
            index_keys=tuple(index if sparse else None for sparse in config.sparse_layers),
        )

    @property
    def slots(self) -> int:
        """Positions that a row has room for (S)."""
        return self.keys[0].shape[1]


def key_chunk(config: TargetConfig) -> int:
    """Keys of one step of the attention loop: whole blocks, about `KEY_CHUNK` of them."""
    return config.block_size * max(1, KEY_CHUNK // config.block_size)


def cache_slots(config: TargetConfig, capacity: int) -> int:
    """Slots of a cache for `capacity` tokens: whole blocks, and whole chunks once there is more than one."""
    if capacity <= 0:
        raise ValueError(f"a cache needs room for at least one token, asked for {capacity}")
    unit = config.block_size if capacity <= key_chunk(config) else key_chunk(config)
    return -(-capacity // unit) * unit


def write_rows(
    cache: Float[Array, "B S *rest"], rows: Float[Array, "B T *rest"], positions: Int[Array, "B T"]
) -> Float[Array, "B S *rest"]:
    """Store `rows` at `positions`; padding (-1) and positions past the end are dropped, never clamped onto good ones."""
    slots = jnp.where(positions < 0, cache.shape[1], positions)
    batch = jnp.arange(cache.shape[0], dtype=jnp.int32)[:, None]
    return cache.at[batch, slots].set(rows.astype(cache.dtype), mode="drop")
