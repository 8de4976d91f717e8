"""Host side of `_quantized_triton_kernel.py`: how its programs cut their work, and the order of x."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels._quantized import MXFP8, FormatName


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """One way to run the kernel.

    Attributes:
      features: output features of a program.
      tokens: rows of x of a program; from 16 on the weights are read as pairs of bytes.
      step: inputs of one step.
      splits: programs that share the inputs of a tile; their parts are summed by XLA.
      warps, stages: of a program.
    """

    features: int
    tokens: int
    step: int
    splits: int = 1
    warps: int = 4
    stages: int = 4

    def __post_init__(self) -> None:
        for name, least in (("features", 16), ("tokens", 8), ("step", 64), ("splits", 1), ("warps", 1)):
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise ValueError(f"{name} must be a power of two from {least} on, got {value}.")
        if not 1 <= self.stages <= 8:
            raise ValueError(f"stages must be from 1 to 8, got {self.stages}.")

    @property
    def pairs(self) -> bool:
        """Whether weights are read as pairs of bytes (what wgmma wants), not as single ones."""
        return self.tokens >= 16


def reorder(form: FormatName | str, pairs: bool, x: Any) -> Any:
    """x [..., K] in the order along K in which the kernel takes it; "bf16" as it is."""
    lead, inputs = x.shape[:-1], x.shape[-1]
    if form == MXFP8.name and pairs:  # even inputs, odd inputs
        return jnp.swapaxes(x.reshape(*lead, inputs // 2, 2), -1, -2).reshape(x.shape)
    if form == "nvfp4" and pairs:  # by the remainder of 4
        return jnp.swapaxes(x.reshape(*lead, inputs // 4, 4), -1, -2).reshape(x.shape)
    if form == "nvfp4":  # of each 8: 0 4 2 6 in the first half, 1 5 3 7 in the second
        n = len(lead)
        eights = x.reshape(*lead, inputs // 8, 2, 2, 2)  # 4 e + 2 h + o
        return eights.transpose(*range(n), n + 3, n, n + 2, n + 1).reshape(x.shape)
    return x
