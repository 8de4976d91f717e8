"""What a kernel of `grouped_experts` is built for."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels._quantized import Format


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Shapes and formats of one call.

    Attributes:
      rows, choices: N and k.
      experts, hidden, inner: E, H and F.
      dtype: that of x.
      formats: of gate, up and down; None: plain.
      dtypes: of their codes.
      alpha, limit: constants of the activation.
    """

    rows: int
    choices: int
    experts: int
    hidden: int
    inner: int
    dtype: Any
    formats: tuple[Format | None, Format | None, Format | None]
    dtypes: tuple[Any, Any, Any]
    alpha: float
    limit: float

    @property
    def pairs(self) -> int:
        return self.rows * self.choices

    @property
    def rows_an_expert(self) -> float:
        """Rows of an expert that has some, if choices spread evenly."""
        return self.pairs / min(self.experts, self.pairs)

    def require_uniform(self, what: str) -> Format | None:
        """The format of gate and up, or NotImplementedError where a kernel that reads both at once cannot serve."""
        gate, up, _ = self.formats
        names = [form.name if form else "plain" for form in (gate, up)]
        if names[0] != names[1]:
            raise NotImplementedError(f"{what} takes gate and up of one format, got {' and '.join(names)}.")
        for form, dtype in zip(self.formats, self.dtypes, strict=True):
            if form is None and dtype != self.dtype:
                raise NotImplementedError(f"{what} takes plain stacks of x's dtype {self.dtype}, got {dtype}.")
        if jnp.dtype(self.dtype) != jnp.bfloat16:
            raise NotImplementedError(f"{what} takes bfloat16 rows, got {self.dtype}.")
        return gate
