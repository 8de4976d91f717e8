"""Every wrong implementation that data/mutants.md lists, injected into the library or into the weights.

A mutant gets a monkeypatch, a copy of the golden model and the checkpoint's name, and returns the model to run.
Functions are patched where the library looks them up, so that all code around them is the library's own.
"""

import functools
from collections.abc import Callable

import golden
import jax
import pytest
from flax import nnx

from dspark_jax import attention, formats, layers, moe, target
from dspark_jax.target import MiniMaxTarget
from pallas_kernels.grouped_experts import xla as xla_experts

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch, MiniMaxTarget, str], MiniMaxTarget]
MUTANTS: dict[tuple[str, str], Mutant] = {}

# The library's own, whatever is patched later.
ROTATE, NORM, ATTEND = layers.rotate, layers.GemmaRMSNorm.__call__, attention.attend
SCORES, SELECT, INDEXER = attention.block_scores, attention.select_blocks, attention.Indexer.__call__
EXPERTS, LOOKUP, DEQUANTIZE = moe.Experts.__call__, target.Embedding.lookup, formats.dequantize
LINEAR = formats.linear


def mutant(section: str, row: str, *arguments):
    def register(make):
        MUTANTS[section, row] = functools.partial(make, *arguments)
        return make

    return register


@functools.lru_cache(maxsize=8)
def _compiled_experts(*_):
    def experts(self, *inputs):
        if formats.dequantize is not DEQUANTIZE:  # as in `dequantize_by`
            for part in (self.gate_proj, self.up_proj, self.down_proj):
                part.weight.set_value(formats.dequantize(part.weight.get_value()))
        return EXPERTS(self, *inputs)

    return jax.jit(experts)


def compile_experts(patch: Patch) -> None:
    """Compile the loop over experts where all else runs op by op; again once a function that it calls is replaced."""

    def experts(self, *inputs):
        return _compiled_experts(xla_experts.swiglu_oai, formats.dequantize)(self, *inputs)

    patch.setattr(moe.Experts, "__call__", experts)


def dequantize_by(patch: Patch, dequantize) -> None:
    """Replace `formats.dequantize`, also in products, which read stored formats by themselves."""
    patch.setattr(formats, "dequantize", dequantize)
    patch.setattr(formats, "linear", lambda x, weight, **_: LINEAR(x, dequantize(weight, x.dtype)))


def run_op_by_op(patch: Patch, model: MiniMaxTarget, name: str) -> dict[str, float]:
    """`golden.errors`, the largest over the three prompts, of a forward without jit.

    Without jit a mutant compiles only the operations that it changes, not a whole model.
    """
    compile_experts(patch)
    out = golden.run(model, [golden.prompt(name, i) for i in golden.PROMPTS], jit=False)
    found = [golden.errors(out, name, i, row=i) for i in golden.PROMPTS]
    return {key: max(f[key] for f in found) for key in found[0]}


class Call(nnx.Module):
    """A function in the place of a module; `parts` are what others use of it."""

    def __init__(self, function, **parts):
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def __call__(self, *inputs):
        return self.function(*inputs)


def unchanged(x, dtype=None):
    return x if dtype is None else x.astype(dtype)


def remember(norm, memory):
    """`norm`, which also leaves its input in `memory`."""

    def call(x, *rest):
        memory[:] = [x]
        return norm(x, *rest)

    return Call(call)


def moe_layers(model):
    return [layer.moe for layer in model.layers if layer.is_moe]
