"""out = x W^T with W in MXFP8 or NVFP4, for Hopper, in Pallas Mosaic GPU: what the linear and the grouped kernel share.

The operands are swapped: output features are the M of the matrix units and rows of x their N, so that W comes from
registers, where it is made from its bytes, and is read once for up to 256 rows. A block takes tiles of (64 features a
warpgroup) x (`tokens` rows of x) in turn. One more warpgroup keeps the copy engine busy with codes, scales and x; the
others compute, `split` of them sharing a tile by every split-th step along K. x has to be in the order of `reorder`.

    linear    `multiply(x, [weight, ...])`: the outputs of one weight after those of the other
    grouped   `multiply(x, [weight [E, ...]], experts=int32 [1 + tiles])`: the rows of x gathered so that those of a
              tile, `tokens` of them, belong to one expert; experts[0] is how many tiles are used, then comes the expert
              of each
    SwiGLU    `multiply(x, [gate, up], swiglu=Swiglu(...))`: of a pair of warpgroups each makes gate or up, one of them
              the product; with or without experts

With a `unit` in the tiling and no experts, blocks share the tiles evenly, also where that cuts a tile.
With `order` the next kernel's x comes out in the order in which that kernel reads it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _mosaic as gpu
from pallas_kernels._mosaic_fragments import reorder
from pallas_kernels._quantized import MXFP8, Format, Operands
from pallas_kernels._quantized_mosaic_block import Block
from pallas_kernels._quantized_mosaic_cut import part_shape
from pallas_kernels._quantized_mosaic_tiling import (
    Problem,
    Swiglu,
    Tiling,
    plan,
    scale_steps,
    shared_memory_bytes,
    spare_rows,
)

__all__ = ["Swiglu", "Tiling", "multiply", "plan", "reorder", "scale_steps", "shared_memory_bytes", "spare_rows"]


def multiply(
    x: jax.Array,
    weights: Sequence[Operands],
    *,
    tiling: Tiling,
    rows: int | None = None,
    experts: jax.Array | None = None,
    counts: jax.Array | None = None,
    swiglu: Swiglu | None = None,
    order: Format | None = None,
    spare: int = 0,
    multiprocessors: int = 132,
    name: str = "quantized_matmul",
    interpret: Any = None,
) -> jax.Array:
    """-> bfloat16 [rows, out]; see the module's docstring.

    Args:
      x: bfloat16 [blocks * tokens + spare_rows, in], in the order of `reorder`; the spare rows are zero.
      weights: gate and up if there is a `swiglu`, else any number without and one with `experts`, of one format and
        input size; codes [out, ...], or [E, out, ...] with `experts`.
      rows: rows of the result if x has only one tile; those after are not written. None: all of x.
      experts: int32 [1 + blocks]: how many tiles are used and the expert of each. Rows of unused tiles are not written.
      counts: int32 [blocks], rows of each tile, if the tiling has `few`; of such tiles the rest is not written.
      spare: rows of zeros to write behind the result.
      order: format of the weight that reads the result: its columns are in the order of `reorder(order, result)`.
    """
    padded, inputs = x.shape[0] - spare_rows(tiling, x.shape[1], multiprocessors), x.shape[1]
    first, sizes = weights[0], tuple(weight.out_size for weight in weights)
    for size in sizes:
        plan(first.format, tiling, inputs, size, swiglu is not None)
    uniform = {(weight.format.name, weight.in_size) for weight in weights} == {(first.format.name, inputs)}
    fitting = len(weights) == 2 and sizes[0] == sizes[1] if swiglu else len(weights) == 1 or experts is None
    if not uniform or not fitting or padded % tiling.tokens:
        raise ValueError(f"weights of {sizes} outputs and {padded} rows do not fit {swiglu} and {tiling}.")
    rows = padded if rows is None else rows
    if rows != padded and (padded != tiling.tokens or not 0 < rows < padded):
        raise ValueError(f"only one tile may be cut short, got {rows} of {padded} rows with {tiling}.")
    if tiling.unit and experts is not None:
        raise ValueError(f"tiles are shared where there are no experts, got {tiling}.")
    problem = Problem(
        form=first.format, divides=tuple(weight.format.divides for weight in weights), inputs=inputs, sizes=sizes,
        blocks=padded // tiling.tokens, rows=rows, steps_a_scale=scale_steps(first.format, tiling, inputs),
        swiglu=swiglu, order=order, spare=spare, grouped=experts is not None, multiprocessors=multiprocessors,
    )  # fmt: skip
    if order is not None and problem.outputs % (gpu.ROWS * order.per_byte):
        raise ValueError(f"{problem.outputs} outputs are not in whole slabs of {order.name}.")
    operands, names = ([], []) if tiling.unit else ([x], ["x"])
    for i, weight in enumerate(weights):
        flat = [a.reshape(-1, a.shape[-1]) for a in (weight.codes, weight.scale)]
        operands += flat
        names += [f"codes{i}", f"scale{i}"]
        if weight.format is not MXFP8:  # whose ones XLA would write down in a kernel of their own
            operands.append(weight.global_scale.reshape(-1))
            names.append(f"global_scale{i}")
    if experts is not None:
        operands.append(experts)
        names.append("experts")
    if tiling.few is not None:
        if counts is None:
            raise ValueError(f"the rows of each tile decide how it is multiplied with {tiling}: counts are missing.")
        operands.append(counts)
        names.append("counts")

    p, t = problem, tiling
    if t.unit:
        names.append("x")  # not with the others: its spare rows are written
    outputs = dict(out=jax.ShapeDtypeStruct((rows + spare, p.outputs), jnp.bfloat16))
    if t.unit:
        left = jax.ShapeDtypeStruct((p.grid(t), t.warpgroups, *part_shape(t.tokens)), jnp.float32)
        outputs |= dict(left=left)
        if interpret is not None:  # two launches; `Exchange` says why
            outputs |= dict(seen=left)
            operands.append(jnp.full(left.shape, jnp.nan, left.dtype))
            names.insert(-1, "given")

    def body(*refs: Any, **shared: Any) -> None:
        Block(problem, tiling, interpret, dict(zip([*names, *outputs], refs, strict=True)), shared).run()

    scratch = dict(
        x=gpu.tiled((t.stages, t.tokens, t.step), jnp.bfloat16),
        codes=gpu.SMEM((t.stages, t.warpgroups, gpu.ROWS, p.form.bytes(t.step)), first.codes.dtype),
        scale=gpu.SMEM((t.scale_stages, t.warpgroups, gpu.ROWS, p.scale_bytes(t)), first.scale.dtype),
        ready=gpu.Barrier(num_arrivals=t.warpgroups + 1, num_barriers=t.stages),
        free=gpu.Barrier(num_arrivals=t.warpgroups, num_barriers=t.stages),
        scale_ready=gpu.Barrier(num_arrivals=t.warpgroups, num_barriers=t.scale_stages),
        scale_free=gpu.Barrier(num_arrivals=t.warpgroups * t.split, num_barriers=t.scale_stages),
    )
    if helpers := p.helpers(t):
        scratch.update(
            parts=gpu.SMEM((helpers, gpu.ROWS * t.tokens), jnp.float32),
            parts_ready=gpu.Barrier(num_arrivals=helpers),
            parts_free=gpu.Barrier(num_arrivals=p.finishers(t)),
        )
    if t.unit:
        scratch.update(others_ready=gpu.Barrier())
    static: dict[str, Any] = dict(
        name=name, out_type=list(outputs.values()), grid={"block": p.grid(t)}, scratch=scratch,
        warpgroups=t.warpgroups * t.split + 1, interpret=interpret,
    )  # fmt: skip
    if not t.unit:
        return gpu.kernel(body, **static)(*operands)[0]
    launch = gpu.kernel_into(body, [x], **static)
    (out, *exchanged), _ = launch(*operands)
    if interpret is not None:
        (out, *_), _ = launch(*operands[:-1], exchanged[-1])
    return out
