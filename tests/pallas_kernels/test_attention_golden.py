"""Golden data against the reference and the XLA form, and the wrong variants that the data must catch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    GOLDEN_NAMES,
    GOLDEN_TOLERANCE,
    REFERENCE,
    Functions,
    golden_difference,
    load_golden,
    matches_golden,
    public,
)

from pallas_kernels._reference import dense_attention

RESULTS = ("decode", "merged", "block", "block_causal")


@pytest.mark.parametrize("name", GOLDEN_NAMES)
@pytest.mark.parametrize("functions", [REFERENCE, public("xla")], ids=["reference", "xla"])
def test_float32(functions: Functions, name: str) -> None:
    case, expected = load_golden(name)
    actual = functions.run(case)
    for result in RESULTS:
        assert matches_golden(actual[result], expected[result], "float32"), (
            result,
            golden_difference(actual[result], expected[result]),
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["h16_1_d64_k3_w16", "h16_1_d64_k7_w4", "h64_4_d64_k3_w16", "h16_1_d64_k3_full"])
def test_xla_half_precision(name: str, dtype: str) -> None:
    case, expected = load_golden(name)
    actual = public("xla").run(case.astype(dtype))
    for result in RESULTS:
        assert actual[result][0].dtype == dtype and actual[result][1].dtype == jnp.float32
        assert matches_golden(actual[result], expected[result], dtype), result


# Wrong variants of the reference. Each breaks one rule; the value says which results must show it in which case.


def _base_2(f):
    return lambda *args, **kw: (lambda out, lse: (out, lse / jnp.float32(np.log(2))))(*f(*args, **kw))


def _wider(f, by):
    def wrong(*args, window, **kw):
        return f(*args, window=None if window is None else window + by, **kw)

    return wrong


def _diagonal_twice(out, lse, q, k_block, v_block, *, window, scale):
    index = jnp.arange(q.shape[1])
    ahead = index[None] - index[:, None]
    visible = (ahead >= 0) & (ahead < (window or 2**30))
    visible = jnp.broadcast_to(visible[None], (q.shape[0], *visible.shape))
    future_out, future_lse = dense_attention(q, k_block, v_block, visible, scale)
    merged = jnp.logaddexp(lse, future_lse)
    past, future = (jnp.exp(x - merged)[..., None] for x in (lse, future_lse))
    return past * out + future * future_out, merged


def _identity_table(f, at):
    def wrong(*args, **kw):
        args = list(args)
        args[at] = jnp.broadcast_to(jnp.arange(args[at].shape[1], dtype=jnp.int32)[None], args[at].shape)
        return f(*args, **kw)

    return wrong


def _stale_slots(f):
    """Takes what a ring holds behind kv_length, left by an earlier lap or a rejected block, for keys."""

    def wrong(q, k_pages, v_pages, page_table, q_start, kv_length, **kw):
        return f(q, k_pages, v_pages, page_table, q_start, q_start + q.shape[1], **kw)

    return wrong


def _reads_cached_block(q, k_block, v_block, k_pages, v_pages, page_table, q_start, *, causal, **kw):
    out, lse = REFERENCE.decode(q, k_pages, v_pages, page_table, q_start, q_start + q.shape[1], **kw)
    return (out, lse) if causal else REFERENCE.merge(out, lse, q, k_block, v_block, **kw)


R = REFERENCE
MUTANTS = {
    "base 2": (dataclasses.replace(R, decode=_base_2(R.decode)), "h16_1_d64_k3_w16", {"decode", "merged"}),
    "window one too wide": (
        Functions(_wider(R.decode, 1), _wider(R.merge, 1), _wider(R.block, 1)),
        "h16_1_d64_k7_w4",
        {"decode", "merged", "block", "block_causal"},
    ),
    "window one too narrow": (
        Functions(_wider(R.decode, -1), _wider(R.merge, -1), _wider(R.block, -1)),
        "h16_1_d64_k7_w16",
        {"decode", "merged", "block", "block_causal"},
    ),
    "diagonal twice": (dataclasses.replace(R, merge=_diagonal_twice), "h64_4_d64_k7_w16", {"merged"}),
    "page order ignored": (
        dataclasses.replace(R, decode=_identity_table(R.decode, 3), block=_identity_table(R.block, 5)),
        "h16_1_d64_k3_full",
        {"decode", "merged", "block", "block_causal"},
    ),
    "stale slots of the ring": (
        dataclasses.replace(R, decode=_stale_slots(R.decode), block=_reads_cached_block),
        "h16_1_d64_k8_w16",
        {"decode", "merged", "block", "block_causal"},
    ),
    "scale ignored": (
        Functions(
            *(
                functools.partial(lambda f, *a, scale, **kw: f(*a, scale=64**-0.5, **kw), f)
                for f in (R.decode, R.merge, R.block)
            )
        ),
        "h16_1_d64_k7_w16_scale",
        {"decode", "merged", "block", "block_causal"},
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant: str) -> None:
    functions, name, broken = MUTANTS[mutant]
    case, expected = load_golden(name)
    actual = functions.run(case)
    # The loosest tolerance of any implementation has to catch it.
    caught = {result for result in RESULTS if not matches_golden(actual[result], expected[result], "bfloat16")}
    assert caught == broken


def test_wrong_grouping_is_caught() -> None:
    case, expected = load_golden("h64_4_d64_k8_w4")
    hq, hkv = case.q.shape[2], case.k_pages.shape[2]
    order = np.arange(hq).reshape(hq // hkv, hkv).T.reshape(-1)  # head h would read KV head h % Hkv
    actual = REFERENCE.run(dataclasses.replace(case, q=case.q[:, :, order]))
    back = np.argsort(order)
    for result in RESULTS:
        out, lse = actual[result]
        assert not matches_golden((out[:, :, back], lse[:, :, back]), expected[result], "bfloat16")


def test_tolerances_tell_neighbouring_precisions_apart() -> None:
    assert GOLDEN_TOLERANCE["float32"] < GOLDEN_TOLERANCE["bfloat16"]
    case, expected = load_golden("h16_1_d64_k7_w16")
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), REFERENCE.run(case))
    assert not matches_golden(rounded["decode"], expected["decode"], "float32")
    assert golden_difference(rounded["decode"], expected["decode"])[1] > GOLDEN_TOLERANCE["bfloat16"][1]
