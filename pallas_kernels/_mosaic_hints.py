"""What Pallas Mosaic GPU cannot say of a copy: how long its lines are to stay in the L2 cache.

Like `_mosaic_fragments.py` it works on the level below Pallas, on the operations that a copy becomes, and none of it
runs in the interpreter. A hint changes no result.
"""

from collections.abc import Iterator
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm

from pallas_kernels._mosaic import plgpu

EVICT_FIRST = 0x12F0000000000000  # the cache policy "evict first" for all of an access
COPY = "nvvm.cp.async.bulk.tensor.shared.cluster.global"  # of jax 0.11; 0.12 writes the assembly itself
PLAIN, HINTED = "mbarrier::complete_tx::bytes [", "mbarrier::complete_tx::bytes.L2::cache_hint ["


def evict_first() -> None:
    """What this kernel copies to shared memory through tensor maps from here on is the first to leave the L2 cache."""

    def start(context: Any) -> None:
        copy = context.async_copy

        def hinted(**arguments: Any) -> None:
            copy(**arguments)
            hint_copies(ir.InsertionPoint.current.block)

        context.async_copy = hinted  # of this kernel alone

    plgpu.inline_mgpu()(start)()


def hint_copies(block: Any) -> None:
    """Gives all copies of a block that have no hint one."""
    for copy in list(plain_copies(block)):
        with ir.InsertionPoint(copy):
            policy = utils.c(EVICT_FIRST, ir.IntegerType.get_signless(64))
            if copy.name == COPY:
                of = copy.opview
                nvvm.cp_async_bulk_tensor_shared_cluster_global(
                    of.dstMem, of.tmaDescriptor, list(of.coordinates), of.mbar, [], l2_cache_hint=policy,
                    predicate=of.predicate,
                )  # fmt: skip
            else:
                operands, constraints = list(copy.operands), ir.StringAttr(copy.attributes["constraints"]).value
                text = _assembly(copy).replace(PLAIN, HINTED).replace("];", f"], ${len(operands)};")
                nothing = ir.Type.parse("!llvm.void")
                llvm.inline_asm(nothing, [*operands, policy], text, constraints + ",l", has_side_effects=True)
        copy.erase()


def _assembly(operation: Any) -> str:
    return ir.StringAttr(operation.attributes["asm_string"]).value


def plain_copies(block: Any) -> Iterator[Any]:
    """The copies of a block, and of blocks in it, that have no hint."""
    for op in block.operations:
        operation = op.operation
        for region in operation.regions:
            for inner in region.blocks:
                yield from plain_copies(inner)
        if operation.name == COPY:
            if op.l2CacheHint is None:
                yield operation
        elif operation.name == "llvm.inline_asm":
            text = _assembly(operation)
            if "cp.async.bulk.tensor." in text and PLAIN in text:
                yield operation
