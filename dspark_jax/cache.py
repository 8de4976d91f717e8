"""Key/value memory of the target and of the drafter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dspark_jax.config import DrafterConfig, TargetConfig
from dspark_jax.formats import Leaf

# Keys that the attention of a long cache reads at a time; see `attention.attend`.
KEY_CHUNK = 1024
# Slots of one page of a draft cache, the unit in which the attention kernels read it.
PAGE_SIZE = 64


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

    keys: tuple[Leaf, ...]
    values: tuple[Leaf, ...]
    index_keys: tuple[Leaf | None, ...]

    @classmethod
    def zeros(cls, config: TargetConfig, batch: int, capacity: int, dtype=jnp.bfloat16) -> "TargetCache":
        """An empty cache for `batch` rows of at least `capacity` tokens; S is rounded up to whole blocks.

        Raises:
          ValueError: `capacity` is not positive.
        """
        slots = cache_slots(config, capacity)
        kv = (batch, slots, config.num_kv_heads, config.head_dim)
        index = (batch, slots, config.index_head_dim)
        # One array each: a shared one could not be donated.
        return cls(
            keys=tuple(jnp.zeros(kv, dtype) for _ in range(config.num_layers)),
            values=tuple(jnp.zeros(kv, dtype) for _ in range(config.num_layers)),
            index_keys=tuple(jnp.zeros(index, dtype) if sparse else None for sparse in config.sparse_layers),
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
    """Store `rows` at `positions`; padding (-1) and positions past the end are dropped, never clamped."""
    slots = jnp.where(positions < 0, cache.shape[1], positions)
    batch = jnp.arange(cache.shape[0], dtype=jnp.int32)[:, None]
    return cache.at[batch, slots].set(rows.astype(cache.dtype), mode="drop")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftCache:
    """Context keys and values of every drafter layer, in a ring: slot p % R of a row holds position p.

    With a window W the ring has at least W - 1 + K slots whatever the length of the prompt: what a block of K slots can
    see, and K more, so that neither a block written behind the context nor rejected rows of a verification overwrite a
    key that is still visible. Like `TargetCache` it has no length of its own.

    Attributes:
      keys, values: per layer [B, R, Hkv, D]. Keys are normed and rotated.
      page_size: slots of a page; R is a multiple of it.
    """

    keys: tuple[Leaf, ...]
    values: tuple[Leaf, ...]
    page_size: int = dataclasses.field(default=PAGE_SIZE, metadata=dict(static=True))

    @classmethod
    def zeros(
        cls,
        config: DrafterConfig,
        batch: int,
        capacity: int | None = None,
        dtype=jnp.bfloat16,
        *,
        page_size: int = PAGE_SIZE,
    ) -> "DraftCache":
        """An empty ring for `batch` rows.

        Args:
          config: gives layers, heads, window and block size.
          batch: rows.
          capacity: tokens of the longest context. Only a drafter without a window needs it: its ring holds them all.
          dtype: of keys and values; the drafter's compute dtype.
          page_size: slots of a page; the ring is rounded up to whole pages.

        Raises:
          ValueError: the drafter has no window and `capacity` is missing or not positive.
        """
        pages = -(-ring_slots(config, capacity) // page_size)
        shape = (batch, pages * page_size, config.num_kv_heads, config.head_dim)
        # One array each: a shared one could not be donated.
        return cls(
            keys=tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)),
            values=tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)),
            page_size=page_size,
        )

    @property
    def slots(self) -> int:
        """Slots of the ring (R)."""
        return self.keys[0].shape[1]

    @property
    def page_table(self) -> Int[Array, "B P"]:
        """Page ids of each row for `pallas_kernels`: row b owns pages b · P ... b · P + P - 1 of the pool."""
        batch, pages = self.keys[0].shape[0], self.slots // self.page_size
        # A constant of the program; counted up there, each layer would count for itself.
        return jnp.asarray(np.arange(batch * pages, dtype=np.int32).reshape(batch, pages))

    def as_pages(self, ring: Float[Array, "B R Hkv D"]) -> Float[Array, "N page Hkv D"]:
        """One layer's keys or values as a pool of pages, without a copy."""
        return ring.reshape(-1, self.page_size, *ring.shape[2:])

    def write_layer(
        self,
        layer: int,
        keys: Float[Array, "B T Hkv D"],
        values: Float[Array, "B T Hkv D"],
        positions: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B R Hkv D"], Float[Array, "B R Hkv D"]]:
        """-> keys and values of `layer` with rows stored at absolute `positions`; -1 is dropped.

        No two positions of a row may be R or more apart: they could share a slot.
        """
        slots = jnp.where(positions < 0, -1, positions % self.slots)
        return write_rows(self.keys[layer], keys, slots), write_rows(self.values[layer], values, slots)


def ring_slots(config: DrafterConfig, capacity: int | None) -> int:
    """Slots that a draft cache needs at least: everything that a block can see, and the block."""
    if config.window is not None:
        return config.window - 1 + config.block_size
    if capacity is None or capacity <= 0:
        raise ValueError(
            f"this drafter attends to the whole context, so its cache needs a capacity of at least one token, "
            f"got {capacity}; pass the longest context in tokens"
        )
    return capacity + config.block_size
