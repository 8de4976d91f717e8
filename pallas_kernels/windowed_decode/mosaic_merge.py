"""The second kernel of a split run: merges the splits by their log-sum-exp."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _mosaic as gpu
from pallas_kernels._mosaic_softmax import LN_2, merge_rows


def part_shape(blocks: int, head_dim: int) -> tuple[int, ...]:
    """Shape of the result of one split, `blocks` of 64 rows.

    It lies in pieces of 64 rows x 8 columns, of which a warp writes and reads 256 bytes in one go, not 8 times 32.
    """
    return blocks, head_dim // 8, gpu.ROWS, 8


def load_part(part: Any, column: Any, columns: int, interpret: Any) -> Any:
    """The `column`-th share of so many columns of one block of 64 rows [head_dim / 8, 64, 8]."""
    return gpu.load_pieces(part.at[gpu.ds(column * (columns // 8), columns // 8)], interpret)


def merge_splits(
    part: jax.Array, part_lse: jax.Array, *, queries: int, group: int, dtype: Any, columns: int, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """part [B, Hkv, splits, *part_shape] and part_lse [B, Hkv, splits, rows] -> out [B, K, Hq, D], lse [B, K, Hq].

    A block merges so many `columns`.
    """
    batch, kv_heads, splits, rows = part_lse.shape
    head_dim = 8 * part.shape[4]
    per_block = gpu.ROWS // group

    def body(part: Any, part_lse: Any, out: Any, lse: Any, *, out_rows: Any, lse_rows: Any) -> None:
        row, head, rows, column = (lax.axis_index(x) for x in ("row", "head", "rows", "columns"))
        mine, share = gpu.ds(rows * gpu.ROWS, gpu.ROWS), gpu.ds(column * columns, columns)
        values, merged_lse = merge_rows(
            splits,
            lambda i: gpu.load_global(part_lse.at[row, head, i, mine], 1),
            lambda i: load_part(part.at[row, head, i, rows], column, columns, interpret),
        )
        out_rows[...] = values.astype(dtype)
        lse_rows[...] = merged_lse * LN_2
        gpu.commit_shared()
        heads = gpu.ds(head * group, group)
        for i in range(per_block):
            query, source = rows * per_block + i, gpu.ds(i * group, group)

            @gpu.when(query < queries)
            def _copy(query: Any = query, source: Any = source) -> None:
                gpu.copy_to_global(out_rows.at[source], out.at[row, query, heads, share])

                @gpu.when(column == 0)
                def _() -> None:
                    gpu.copy_to_global(lse_rows.at[source], lse.at[row, query, heads])

        gpu.wait_until_read()

    hq = kv_heads * group
    out, lse = gpu.kernel(
        body,
        name="windowed_decode_merge",
        out_type=[
            jax.ShapeDtypeStruct((batch, queries, hq, head_dim), dtype),
            jax.ShapeDtypeStruct((batch, queries, hq), jnp.float32),
        ],
        grid={"row": batch, "head": kv_heads, "rows": rows // gpu.ROWS, "columns": head_dim // columns},
        scratch=dict(out_rows=gpu.SMEM((gpu.ROWS, columns), dtype), lse_rows=gpu.SMEM((gpu.ROWS,), jnp.float32)),
        warpgroups=1,
        interpret=interpret,
    )(part, part_lse)
    return out, lse
