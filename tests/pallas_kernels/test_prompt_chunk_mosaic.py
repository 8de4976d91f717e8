"""A chunk of a prompt through the dense Mosaic form, interpreted with race detection: several thread blocks a head."""

import functools

import jax
import jax.numpy as jnp
import pytest
from attention_cases import REFERENCE, assert_close, random_case, random_difference

from pallas_kernels import _mosaic
from pallas_kernels.windowed_decode import mosaic_sm90
from pallas_kernels.windowed_decode.mosaic_problem import describe
from pallas_kernels.windowed_decode.tuning import Tuning

pytestmark = pytest.mark.filterwarnings("ignore:.*os.fork.*:RuntimeWarning")  # the interpreter's threads, harmless


def test_attention_of_a_chunk() -> None:
    """The end of the cache, its beginning with padding behind 20 tokens, and padding alone."""
    tokens = 37
    case = random_case(
        7, q_start=[91, 0, -tokens], kv_length=[128, 20, 0], queries=tokens, heads=(16, 2), head_dim=64, page=64,
        window=None, table_length=2, dtype="bfloat16", scale=0.125,
    )  # fmt: skip
    args = (case.q, *case.pages, case.q_start, case.kv_length)
    static = dict(window=None, scale=0.125)
    problem = describe(case.q, case.pages[0], case.pages[2], block=False, **static)
    assert problem.chunks == 3 and problem.warpgroups == 2, "tokens are cut into several blocks, and not evenly"
    run = functools.partial(
        mosaic_sm90.attend, **static, tuning=Tuning(tile=64), interpret=_mosaic.interpreter(detect_races=True)
    )
    actual = jax.jit(run)(*args)
    reference = functools.partial(REFERENCE.decode, **static)
    assert_close(actual, reference(*args), "bfloat16")
    late = (*args[:4], jnp.asarray(case.q_start) - 8, args[5])
    assert random_difference(actual, reference(*late))[0] > 0.05
