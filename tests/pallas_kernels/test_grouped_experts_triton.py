"""The Triton kernels of `grouped_experts` compile ahead of time for architectures that no test machine has."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._quantized import FORMATS, Format
from pallas_kernels._quantized_triton import reorder
from pallas_kernels.grouped_experts import tuning

NAMES = ("bf16", "mxfp8", "nvfp4")
HIDDEN, INNER = 6144, 3072
# Types of codes, scale and global scale. Triton knows the 8-bit floats from sm_89 on; before that they come as bytes.
POINTERS = {"bf16": ("*bf16",) * 3, "mxfp8": ("*fp8e4nv", "*u8", "*fp32"), "nvfp4": ("*u8", "*fp8e4nv", "*fp32")}
SHARED_MEMORY = {80: 166_912, 90: 232_448, 100: 232_448}


def compile_for(kernel: Any, capability: int, pointers: dict[str, str], constants: dict[str, Any], chosen: Any) -> Any:
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = [parameter.name for parameter in kernel.params]
    assert set(names) == set(pointers) | set(constants)
    source = ASTSource(
        fn=kernel,
        signature={name: pointers.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in pointers},
    )
    options = dict(num_warps=chosen.warps, num_stages=chosen.stages)
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def stack(name: str, form: str, capability: int) -> dict[str, str]:
    types = [t if capability >= 89 else t.replace("fp8e4nv", "u8") for t in POINTERS[form]]
    return dict(zip((f"{name}_ptr", f"{name}_scale_ptr", f"{name}_global_ptr"), types, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("form, tile", tuning.TRITON)
def test_kernels_compile(form: str, tile: int, capability: int) -> None:
    pytest.importorskip("triton", reason="triton is not installed: dspark-jax[triton]")
    from pallas_kernels.grouped_experts import triton_kernel

    quantised: Format | None = FORMATS.get(form)  # pyright: ignore[reportArgumentType, reportCallIssue]
    for part, (outputs, inputs) in enumerate([(INNER, HIDDEN), (HIDDEN, INNER)]):
        chosen = tuning.triton_tuning(quantised, tile, part, outputs, inputs)
        constants: dict[str, Any] = dict(
            HIDDEN=HIDDEN, INNER=INNER, FORMAT=form, PAIRS=tile >= 16, TILE=tile, FEATURES=chosen.features,
            STEP=chosen.step, STAGES=chosen.stages, TILES_FIRST=chosen.tiles_first,
        )  # fmt: skip
        pointers = dict(expert_ptr="*i32")
        if part == 0:
            pointers |= dict(x_ptr="*bf16", pairs_ptr="*i32", inner_ptr="*bf16")
            pointers |= stack("gate", form, capability) | stack("up", form, capability)
            constants |= dict(CHOICES=4, ALPHA=1.702, LIMIT=7.0, NEXT_FORMAT=form, GATE_DIVIDES=False, UP_DIVIDES=True)
            kernel = triton_kernel.gate_up
        else:
            pointers |= dict(inner_ptr="*bf16", out_ptr="*bf16") | stack("down", form, capability)
            constants |= dict(DIVIDES=True)
            kernel = triton_kernel.down
        compiled = compile_for(kernel, capability, pointers, constants, chosen)
        assert compiled.asm["cubin"] and compiled.metadata.shared <= SHARED_MEMORY[capability]


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("form", NAMES)
def test_gate_up_writes_in_the_order_that_down_reads(form: str, pairs: bool) -> None:
    pytest.importorskip("triton", reason="triton is not installed: dspark-jax[triton]")
    from pallas_kernels.grouped_experts import triton_kernel

    feature = np.arange(96)
    place = triton_kernel.position.fn(feature, 96, form, pairs)
    read = np.asarray(reorder(form, pairs, jnp.arange(96)))
    np.testing.assert_array_equal(read[place], feature)
    if form != "bf16" and pairs:
        assert (place != feature).any()
