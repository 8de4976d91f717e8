"""`markov_draw` for NVIDIA GPUs from Ampere on, in Triton through jax-triton."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch
from pallas_kernels._triton import power_of_two, require_triton

LARGEST_VOCABULARY = 2**21  # one program of the second kernel holds what all chunks of a row left


class Tile(NamedTuple):
    """How the first kernel cuts its work.

    Attributes:
      rows: that read a tile of the table together.
      axis: along which tokens run; few rows are the columns of a matrix product, many its rows.
      tokens: of a tile.
      step: of the rank at a time.
      warps, stages: of a program, and how many steps of a product are under way.
    """

    rows: int
    axis: int
    tokens: int
    step: int
    warps: int
    stages: int


TILES = (
    Tile(1, 1, 128, 64, 4, 1),  # no matrix product: one row is a sum of products
    Tile(8, 0, 128, 128, 4, 2),
    Tile(16, 1, 128, 64, 4, 4),
    Tile(32, 1, 128, 64, 4, 4),
    Tile(64, 1, 64, 64, 4, 4),
)


def build(logits: Any, latents: Any) -> Callable[..., tuple[jax.Array, ...]]:
    """The kernels for arguments like these on their device, or NotImplementedError with the reason."""
    require_triton(jnp.bfloat16, _dispatch.device_of(logits, latents))
    if latents.dtype != jnp.bfloat16:
        raise NotImplementedError(f"the Triton kernel takes a bfloat16 table, got {latents.dtype}.")
    if logits.shape[2] > LARGEST_VOCABULARY:
        raise NotImplementedError(f"the Triton kernel takes up to {LARGEST_VOCABULARY} tokens, got {logits.shape[2]}.")

    def draw(
        logits: jax.Array,
        latents: jax.Array,
        index: jax.Array,
        table: jax.Array,
        allowed: jax.Array,
        words: jax.Array,
        inverse: jax.Array,
        drawn: jax.Array,
        *,
        slot: int,
        keep: bool,
    ) -> tuple[jax.Array, ...]:
        kernel = _opaque(functools.partial(run, slot=slot, keep=keep))
        settings = jnp.stack([inverse, drawn.astype(jnp.float32)], axis=-1)
        out, token, numbers = kernel(logits, index, words, settings, latents, table, allowed.astype(jnp.int8))
        return out, token, numbers[:, 0], numbers[:, 1]

    return draw


def tile(batch: int) -> Tile:
    """The tile for so many rows."""
    return next((each for each in TILES if batch <= each.rows), TILES[-1])


def run(
    logits: jax.Array,
    index: jax.Array,
    words: jax.Array,
    settings: jax.Array,
    latents: jax.Array,
    table: jax.Array,
    allowed: jax.Array,
    *,
    slot: int,
    keep: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """-> logits; int32 [B]: the token; float32 [B, 2]: peak, log of the mass.

    Args:
      settings: float32 [B, 2]; inverse temperature, whether to draw.
      allowed: int8 [V].
    """
    import jax_triton  # pyright: ignore[reportMissingImports]

    from pallas_kernels.markov_draw import triton_kernel

    batch, slots, vocab = logits.shape
    form = tile(batch)
    rank, chunks = table.shape[1], -(-vocab // form.tokens)
    shape = jax.ShapeDtypeStruct
    # Slots count from 2 in the kernels: an argument of 1 would be compiled anew, as a constant.
    out, part = jax_triton.triton_call(
        logits, index, words, settings, latents, table, allowed, slot + 2, kernel=triton_kernel.score,
        out_shape=[shape(logits.shape, jnp.float32), shape((batch, 3, chunks), jnp.float32)],
        grid=(-(-batch // form.rows), chunks), input_output_aliases={0: 0}, name="markov_draw_score_triton",
        num_warps=form.warps, num_stages=form.stages, BATCH=batch, SLOTS=slots, LATENTS=latents.shape[0], VOCAB=vocab,
        RANK=rank, CHUNKS=chunks, ROWS=form.rows, AXIS=form.axis, WIDTH=form.tokens,
        STEP=min(form.step, power_of_two(rank)), KEEP=keep,
    )  # fmt: skip
    token, numbers = jax_triton.triton_call(
        out, words, settings, part, slot + 2, kernel=triton_kernel.pick,
        out_shape=[shape((batch,), jnp.int32), shape((batch, 2), jnp.float32)], grid=(batch,),
        name="markov_draw_pick_triton", num_warps=8, SLOTS=slots, VOCAB=vocab, CHUNKS=chunks,
        CHUNKS_PADDED=power_of_two(chunks, 1), WIDTH=form.tokens,
    )  # fmt: skip
    return out, token, numbers


def _opaque(kernel: Callable[..., tuple[jax.Array, ...]]) -> Callable[..., tuple[jax.Array, ...]]:
    """`kernel(logits, index, words, settings, *shared)` with a vmap rule and without a derivative.

    A batch is folded into the rows; batches that have latents, a table or a mask of their own run one after the other.
    """
    rows = 4

    @jax.custom_batching.custom_vmap
    def folded(*args: jax.Array) -> tuple[jax.Array, ...]:
        return kernel(*args)

    @folded.def_vmap
    def fold(axis_size: int, batched: list[bool], *args: jax.Array) -> tuple[Any, Any]:
        if any(batched[rows:]):
            each = [a for a, is_batched in zip(args, batched, strict=True) if is_batched]

            def one(own: list[jax.Array]) -> tuple[jax.Array, ...]:
                rest = iter(own)
                return folded(*(next(rest) if b else a for a, b in zip(args, batched, strict=True)))

            outs = jax.lax.map(one, each)
        else:
            whole = [
                a if b else jnp.broadcast_to(a[None], (axis_size, *a.shape))
                for a, b in zip(args[:rows], batched[:rows], strict=True)
            ]
            outs = folded(*(a.reshape(-1, *a.shape[2:]) for a in whole), *args[rows:])
            outs = tuple(o.reshape(axis_size, -1, *o.shape[1:]) for o in outs)
        return tuple(outs), (True,) * len(outs)

    return _dispatch.without_derivative("markov_draw", folded)
