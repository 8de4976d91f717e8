"""Which form of `pallas_kernels` the work of a model goes through: one choice, made where a model is built."""

import dataclasses
import typing
from collections.abc import Callable
from typing import Literal

Implementation = Literal["mosaic", "triton", "xla"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernels:
    """Implementation of each kind of work: None is the best one for the device and the shapes, "xla" has derivatives.

    A named kernel never falls back: where it cannot serve a call, that call raises NotImplementedError. XLA cannot
    split a kernel, so a model on a mesh of several devices takes `Kernels.xla()`.

    Attributes:
      linear: `quantized_matmul`, for linears with MXFP8 or NVFP4 weights; others are XLA's in any case. Linears of the
        same x, and those of an MLP, share a launch where "mosaic" can serve them so (None or "mosaic").
      experts: `grouped_experts`.
      attention: attention and block selection, of a step and of a chunk of a prompt alike. "mosaic" has no block-sparse
        form and serves dense layers and drafters alone. "xla" in the target: loops over the whole cache. None in the
        target: by device and shape, in `dspark_jax.attention_forms`. On a GPU a step and a chunk, of more than 16
        tokens a row, each go through the fastest kernel that serves them, else through the loops; without a GPU both
        take the loops.
      sampling: `filter_floors`, for the filters of sampling, and `markov_draw`, for drafts of a Markov head; have no
        "mosaic" form. "xla": a search without a sort, `dspark_jax.sampling.search_floors`, and `sampling.draft` alone.
      routing: `choose_experts`, for up to 1,024 rows, and how `grouped_experts` makes its lists, for up to 512 choices;
        has no "mosaic" form. "xla": several small kernels, as XLA fuses them.
      rotation: `rotate_heads`, between the projections and attention; has no "triton" form. "xla": norms, rotation and
        the writes into the caches as XLA fuses them.
    """

    linear: Implementation | None = None
    experts: Implementation | None = None
    attention: Implementation | None = None
    sampling: Literal["triton", "xla"] | None = None
    routing: Literal["triton", "xla"] | None = None
    rotation: Literal["mosaic", "xla"] | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            known = typing.get_args(typing.get_args(field.type)[0])  # the names in its annotation
            if (value := getattr(self, field.name)) not in (None, *known):
                names = f"{', '.join(['None', *map(repr, known[:-1])])} or {known[-1]!r}"
                raise ValueError(f"{field.name} must be {names}, found {value!r}")

    @classmethod
    def xla(cls) -> "Kernels":
        """No kernels at all."""
        return cls(linear="xla", experts="xla", attention="xla", sampling="xla", routing="xla", rotation="xla")


def first_that_serves[Form, Result](forms: tuple[Form, ...], run: Callable[[Form], Result]) -> Result:
    """`run` of the first form that does not raise NotImplementedError; the last one's error is passed on."""
    *others, last = forms
    for form in others:
        try:
            return run(form)
        except NotImplementedError:
            continue
    return run(last)
