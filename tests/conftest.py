import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

import jax
import pytest

# Strict modes: an implicit dtype promotion or rank broadcast in library code is a bug, so it raises here.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


class TritonKernels(MetaPathFinder):
    """Imports Triton kernels past jaxtyping's hook: Triton reads a kernel's source, and would find a wrapper's."""

    @classmethod
    def find_spec(cls, fullname, path, target=None):
        if fullname.startswith("pallas_kernels.") and fullname.endswith("triton_kernel"):
            return PathFinder.find_spec(fullname, path, target)
        return None


sys.meta_path.insert(0, TritonKernels())


@pytest.fixture
def rng_key(request: pytest.FixtureRequest) -> jax.Array:
    """A key that differs from test to test and is the same in every run."""
    return jax.random.key(sum(map(ord, request.node.name)))
