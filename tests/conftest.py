import gc
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path

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


# A compiled program holds about 6 memory mappings, and Linux gives a process 65,530 unless told otherwise.
# The suite has more programs than that, and XLA ends with a segmentation fault where no mapping is left.
MOST_MAPPINGS = 25_000


@pytest.fixture(scope="module", autouse=True)
def let_go_of_programs():
    """Drops compiled programs between test files once there are many."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def rng_key(request: pytest.FixtureRequest) -> jax.Array:
    """A key that differs from test to test and is the same in every run."""
    return jax.random.key(sum(map(ord, request.node.name)))
