import jax
import pytest

# Strict modes: an implicit dtype promotion or rank broadcast in library code is a bug, so it raises here.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def rng_key(request: pytest.FixtureRequest) -> jax.Array:
    """A key that differs from test to test and is the same in every run."""
    return jax.random.key(sum(map(ord, request.node.name)))
