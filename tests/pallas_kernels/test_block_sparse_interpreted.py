"""The Triton form of `block_sparse_decode`, run by Triton's interpreter on the CPU.

TRITON_INTERPRET=1 pytest tests/pallas_kernels/test_block_sparse_interpreted.py
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import RANDOM_TOLERANCE, assert_close, assert_lost, random_difference, with_nan
from sparse_cases import Case, attention_oracle, random_case, with_untouched
from triton_interpreter import interpreted, requires_interpreter, rewrite

SHAPES = {
    "as the model": dict(queries=8, heads=(32, 2), head_dim=64, page=32, block_size=32, top_k=4),
    "one query": dict(queries=1, heads=(16, 1), head_dim=32, page=32, block_size=32, top_k=4),
    "blocks of several pages": dict(queries=3, heads=(6, 2), head_dim=32, page=16, block_size=64, top_k=2),
    "pages of several blocks": dict(queries=4, heads=(4, 2), head_dim=24, page=64, block_size=8, top_k=3),
    "neither divides": dict(queries=5, heads=(4, 4), head_dim=32, page=24, block_size=40, top_k=2),
    "more queries than a program takes": dict(queries=11, heads=(16, 2), head_dim=32, page=32, block_size=16, top_k=3),
}


def attend(case: Case, *, multiprocessors: int = 4, tuning=None):
    from pallas_kernels.block_sparse_decode import triton

    with interpreted():
        return triton.attend(*case.arrays, **case.static, multiprocessors=multiprocessors, tuning=tuning)


@requires_interpreter
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_oracle(name: str, dtype: str) -> None:
    case = random_case(3, q_start=[131, 40, -3], dtype=dtype, **SHAPES[name])
    expected = attention_oracle(case)
    for multiprocessors in (1, 40):  # no splits, and many
        assert_close(attend(case, multiprocessors=multiprocessors), expected, dtype, name)


@requires_interpreter
@pytest.mark.parametrize("together", [1, 2, 4, 8])
def test_every_tuning(together: int) -> None:
    from pallas_kernels.block_sparse_decode.triton import Tuning

    case = random_case(4, q_start=[70, 9], dtype="float16", **SHAPES["as the model"])
    for splits, tile in ((1, 16), (3, 32)):
        tuning = Tuning(queries=together, splits=splits, tile=tile, stages=2, warps=4)
        assert_close(attend(case, tuning=tuning), attention_oracle(case), "float16")


@requires_interpreter
def test_mutants() -> None:
    case = random_case(5, q_start=[75, 31], dtype="float16", **SHAPES["as the model"])
    result, allowed = attend(case), RANDOM_TOLERANCE["float16"]
    assert_close(result, attention_oracle(case), "float16")
    ids = np.asarray(case.block_ids)
    for wrong in (np.where(ids < 0, 0, ids), ids[:, :, ::-1], np.roll(ids, 1, axis=1)):
        expected = attention_oracle(dataclasses.replace(case, block_ids=wrong))
        assert random_difference(result, expected)[0] > 10 * allowed[0]
    for expected in (attention_oracle(case, causal=False), attention_oracle(case, base=2.0)):
        assert random_difference(result, expected)[1] > 10 * allowed[1]


@requires_interpreter
def test_blocks_that_nobody_selected_are_not_read() -> None:
    case = random_case(6, q_start=[100, 31], dtype="float16", **SHAPES["one query"])
    jax.tree.map(np.testing.assert_array_equal, attend(with_untouched(case, np.nan)), attend(case))


@requires_interpreter
def test_a_row_without_a_key_is_written() -> None:
    case = random_case(7, q_start=[100, 31], dtype="float16", **SHAPES["as the model"])
    case = dataclasses.replace(case, block_ids=case.block_ids.at[1].set(-1).at[0, 2].set(1000))
    out, lse = attend(case)
    for nothing in (lse[1], lse[0, 2]):
        assert np.isneginf(nothing).all()
    assert not np.isnan(out).any() and (np.asarray(out[1]) == 0).all() and (np.asarray(out[0, 2]) == 0).all()


@requires_interpreter
def test_a_repeated_block_counts_once() -> None:
    case = random_case(8, q_start=[100, 31], dtype="float16", **SHAPES["as the model"])
    once = case.block_ids.at[..., 2:].set(-1)
    twice = once.at[..., 2:].set(once[..., :2])
    a, b = (attend(dataclasses.replace(case, block_ids=jnp.asarray(ids))) for ids in (once, twice))
    jax.tree.map(np.testing.assert_array_equal, a, b)


@requires_interpreter
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # numpy's word on such a maximum
@pytest.mark.parametrize("mutant", [False, True])
@pytest.mark.parametrize("multiprocessors", [1, 40])
def test_a_query_that_is_no_number_is_seen(multiprocessors: int, mutant: bool, monkeypatch, tmp_path) -> None:
    if mutant:
        for kernel in ("windowed_decode", "block_sparse_decode"):
            rewrite(monkeypatch, tmp_path, f"pallas_kernels.{kernel}.triton_kernel", "total != 0", "total > 0")
    case = random_case(7, q_start=[100, 31], dtype="float16", **SHAPES["as the model"])
    ids = jnp.broadcast_to(jnp.asarray([2, 0, -1, 3], jnp.int32), case.block_ids.shape)
    case = dataclasses.replace(case, block_ids=ids.at[1].set(-1))
    seen, also_seen, without_a_key = (0, 1, 5), (0, 7, 31), (1, 2, 3)
    poisoned = dataclasses.replace(case, q=with_nan(case.q, [seen, also_seen, without_a_key]))
    actual, expected = attend(poisoned, multiprocessors=multiprocessors), attention_oracle(case)
    if mutant:
        with pytest.raises(AssertionError, match="lse"):
            assert_lost(actual, expected, [seen, also_seen], "float16")
    else:
        assert_lost(actual, expected, [seen, also_seen], "float16")
