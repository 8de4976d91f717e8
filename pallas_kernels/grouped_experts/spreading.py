"""Tiles of few pairs and the rows of the tiles, in one launch, through jax-triton: what `routing` and copies make."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._quantized import Format
from pallas_kernels._triton import power_of_two
from pallas_kernels.grouped_experts.routing import most_tiles

MOST_PAIRS = 512  # every program counts them all
THREADS = 128  # of a program
WIDTH = 1024  # 32-bit words of a row that a program copies


def spread_by_expert(
    x: jax.Array, experts: jax.Array, positions: jax.Array, *, form: Format, num_experts: int, tile: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """bfloat16 x [N, H] -> the `tiles`, `places` and `counts` of `routing.Routing`, and rows [tiles * tile, H].

    Row n, in the order of `_quantized_mosaic.reorder`, is at places[n, j] for each choice j that names an expert, if
    its position is not negative. The other rows are never written and hold anything.
    """
    import jax_triton  # pyright: ignore[reportMissingImports]

    from pallas_kernels.grouped_experts import spreading_kernel

    (num_rows, choices), hidden = experts.shape, x.shape[1]
    most, words = most_tiles(experts.size, num_experts, tile), hidden // 2
    padded, width = power_of_two(num_experts), min(WIDTH, power_of_two(words))
    shape = jax.ShapeDtypeStruct
    tiles, places, counts, rows = jax_triton.triton_call(
        lax.bitcast_convert_type(x.reshape(num_rows, words, 2), jnp.int32), experts, positions,
        kernel=spreading_kernel.spread,
        out_shape=[
            shape((1 + most,), jnp.int32), shape(experts.shape, jnp.int32), shape((most,), jnp.int32),
            shape((most * tile, words), jnp.int32),
        ],
        grid=(1 + num_rows * -(-words // width),), name="grouped_experts_spread_triton", num_warps=THREADS // 32,
        CHOICES=choices, CHOICES_PADDED=power_of_two(choices, 1), PAIRS=experts.size,
        PAIRS_PADDED=power_of_two(experts.size, THREADS),
        EXPERTS=num_experts, EXPERTS_PADDED=padded, TILE=tile, MOST=most, MOST_PADDED=power_of_two(most),
        WORDS=words, WIDTH=width, SWAPPED=8 * form.per_byte,
    )  # fmt: skip
    return tiles, places, counts, lax.bitcast_convert_type(rows, x.dtype).reshape(most * tile, hidden)
