"""`target_log_probs` against a sort of the vocabulary in float64."""

from functools import partial

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampling_oracles as oracles
from hypothesis import strategies as st

import pallas_kernels
from dspark_jax import sampling

# fp32 exponentials and one logarithm of a sum: relative to |log p|, plus one rounding.
LOG_PROB_TOLERANCE = 3e-6
# Masses are fp32 sums: within this of top_p (and, in log space, of min_p) a token may fall on either side.
MASS_TOLERANCE = 2e-6
# The same for sums of 200,064 terms.
LARGE_MASS_TOLERANCE = 2e-5

BATCH, ROWS, VOCAB = 2, 2, 11
run = jax.jit(sampling.target_log_probs)
# Steps of 1/8 bring equal logits; the rest of the list, what a broken model may return.
ordinary = st.integers(-80, 80).map(lambda i: i / 8)
special = st.sampled_from([-np.inf, np.nan, np.inf, 3e38, -3e38, 1e-30])


def rows_of(elements):
    return st.lists(elements, min_size=VOCAB, max_size=VOCAB)


@st.composite
def settings(draw):
    per_row = {
        "temperature": st.sampled_from([0.05, 0.3, 0.7, 1.0, 2.5, 40.0]),
        "top_k": st.integers(0, VOCAB + 2),
        "top_p": st.one_of(st.just(1.0), st.floats(2**-20, 1.0, width=32)),
        "min_p": st.one_of(st.just(0.0), st.floats(0.0, 1 - 2**-10, width=32)),
    }
    return {name: [draw(values) for _ in range(BATCH)] for name, values in per_row.items()}


def check_row(log_p, logits, allowed, *, temperature, top_k, top_p, min_p, mass_tolerance=MASS_TOLERANCE):
    """One row: the kept set lies between the oracle's at slightly stricter and laxer thresholds, and is normalised."""
    logits = np.where(allowed & ~np.isnan(logits), logits, -np.inf)
    kept = log_p > -np.inf
    sets = [
        oracles.kept_tokens(
            logits,
            temperature=temperature,
            top_k=top_k,
            top_p=1.0 if top_p >= 1 else float(np.clip(top_p + sign * mass_tolerance, 1e-12, 1.0)),
            min_p=float(np.clip(min_p * (1 - sign * 10 * mass_tolerance), 0, 1)),
        )
        for sign in (-1, 1)
    ]
    assert not (sets[0] & ~kept).any(), "a token is missing"
    assert not (kept & ~sets[1]).any(), "a token should have been filtered out"
    wanted = oracles.log_softmax(np.where(kept, (logits.astype(np.float64) - logits.max()) / temperature, -np.inf))
    np.testing.assert_allclose(log_p[kept], wanted[kept], rtol=LOG_PROB_TOLERANCE, atol=LOG_PROB_TOLERANCE)


def check(log_p, logits, allowed, params, **options):
    for b in range(logits.shape[0]):
        for n in range(logits.shape[1]):
            check_row(log_p[b, n], logits[b, n], allowed, **{k: v[b] for k, v in params.items()}, **options)


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
@hypothesis.given(
    rows=st.lists(rows_of(ordinary), min_size=BATCH * ROWS, max_size=BATCH * ROWS),
    allowed=st.lists(st.booleans(), min_size=VOCAB - 1, max_size=VOCAB - 1),
    params=settings(),
)
def test_against_sorting(rows, allowed, params):
    logits = np.array(rows, np.float32).reshape(BATCH, ROWS, VOCAB)
    allowed = np.array([True, *allowed])
    log_p = run(jnp.asarray(logits), sampling.SamplingParams(**params), allowed=jnp.asarray(allowed))
    check(np.asarray(log_p), logits, allowed, params)


@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
@hypothesis.given(
    rows=st.lists(rows_of(st.one_of(ordinary, special)), min_size=BATCH * ROWS, max_size=BATCH * ROWS),
    temperature=st.lists(
        st.sampled_from([0.0, 1e-30, 9.9e-6, 1e-5, 1e-4, 1.0, 1e6, 1e20, 3e38]), min_size=BATCH, max_size=BATCH
    ),
    params=settings(),
)
def test_no_nan_and_no_impossible_token(rows, temperature, params):
    logits = np.array(rows, np.float32).reshape(BATCH, ROWS, VOCAB)
    log_p = np.asarray(run(jnp.asarray(logits), sampling.SamplingParams(**params | {"temperature": temperature})))
    drawable = ~np.isnan(logits) & (logits > -np.inf)
    assert not np.isnan(log_p).any()
    assert (log_p[~drawable] == -np.inf).all()
    mass = np.exp(log_p.astype(np.float64)).sum(-1)
    np.testing.assert_allclose(mass, drawable.any(-1).astype(float), atol=1e-5)
    best = np.where(drawable, np.minimum(logits, np.finfo(np.float32).max), -np.inf).argmax(-1)
    greedy = np.array(temperature)[:, None] < 1e-5
    one_hot = (log_p == 0).sum(-1) == 1
    assert (one_hot | ~greedy | ~drawable.any(-1)).all()
    assert ((log_p.argmax(-1) == best) | ~greedy | ~drawable.any(-1)).all()


def grid(seed: int = 0) -> np.ndarray:
    """Logits with many equal ones, so that every rule about ties matters."""
    return np.random.default_rng(seed).integers(-12, 12, size=(8, 4, 40)).astype(np.float32) / 4


FILTERS = [
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 0.6, "top_k": 9, "top_p": 0.7},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.1},
]


def full(filters):
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
    return {name: [value] * 8 for name, value in settings.items()}


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_each_filter(filters):
    log_p = np.asarray(run(jnp.asarray(grid()), sampling.SamplingParams(**filters)))
    check(log_p, grid(), np.ones(40, bool), full(filters))


def wide(*arguments):
    """A search that finds the next lower score."""
    found = pallas_kernels.filter_floors(*arguments)
    return found._replace(floor=found.floor - 0.5)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_search_from_elsewhere(filters):
    allowed = np.arange(40) % 9 != 2
    narrow, wider = (
        np.asarray(
            sampling.target_log_probs(
                jnp.asarray(grid()), sampling.SamplingParams(**filters), allowed=jnp.asarray(allowed), floors=floors
            )
        )
        for floors in (pallas_kernels.filter_floors, wide)
    )
    check(narrow, grid(), allowed, full(filters))
    with pytest.raises(AssertionError, match="should have been filtered out"):
        check(wider, grid(), allowed, full(filters))


def test_a_search_from_elsewhere_finds_the_token_of_greedy_rows():
    params = sampling.SamplingParams(temperature=[0.0, 1.0] * 4, top_k=3, min_p=0.5)
    ours, theirs = (
        sampling.target_log_probs(jnp.asarray(grid()), params, floors=f) for f in (None, pallas_kernels.filter_floors)
    )
    np.testing.assert_allclose(theirs, ours, rtol=1e-6)


def wrong_oracles():
    right = oracles.kept_tokens

    def top_p_before_top_k(logits, *, top_k, top_p, **rest):
        return right(logits, top_p=top_p, **rest) & right(logits, top_k=top_k, **rest)

    def without_the_token_that_crosses(logits, *, top_p, **rest):
        kept = right(logits, top_p=top_p, **rest)
        lowest = kept & (logits == logits[kept].min())
        return kept if top_p >= 1 or (lowest == kept).all() else kept & ~lowest

    def ties_cut_by_index(logits, *, top_k, **rest):
        order = np.argsort(-logits, kind="stable")
        first = np.isin(np.arange(len(logits)), order[: top_k or len(logits)])
        return right(np.where(first, logits, -np.inf), top_k=0, **rest)

    def temperature_after_the_filters(logits, *, temperature, **rest):
        return right(logits, temperature=1.0, **rest)

    def min_p_of_the_mass(logits, *, min_p, **rest):
        kept = right(logits, min_p=0.0, **rest)
        probs = np.exp(oracles.log_softmax(logits.astype(np.float64)))
        return kept & (probs >= min_p)

    return {
        "top-p before top-k": (top_p_before_top_k, FILTERS[3]),
        "top-p without the token that crosses": (without_the_token_that_crosses, FILTERS[1]),
        "top-k ties cut by index": (ties_cut_by_index, FILTERS[0]),
        "temperature after the filters": (temperature_after_the_filters, FILTERS[3]),
        "min-p of the whole mass": (min_p_of_the_mass, FILTERS[2]),
    }


@pytest.mark.parametrize("name", wrong_oracles())
def test_the_comparison_sees_wrong_filters(name, monkeypatch):
    wrong, filters = wrong_oracles()[name]
    log_p = np.asarray(run(jnp.asarray(grid()), sampling.SamplingParams(**filters)))
    monkeypatch.setattr(oracles, "kept_tokens", wrong)
    with pytest.raises(AssertionError):
        check(log_p, grid(), np.ones(40, bool), full(filters))


def test_equal_tokens_stand_or_fall_together():
    logits = jnp.asarray([[[1.0, 2.0, 2.0, 2.0, 0.0]]], jnp.float32)
    for filters in ({"top_k": 2}, {"top_p": 0.3}):
        kept = np.asarray(run(logits, sampling.SamplingParams(**filters)))[0, 0] > -np.inf
        np.testing.assert_array_equal(kept, [False, True, True, True, False])


def test_greedy_rows_are_one_hot_at_the_first_of_equal_logits():
    logits = jnp.asarray([[[0.0, 3.0, 3.0]], [[0.0, 3.0, 3.0]]], jnp.float32)
    log_p = np.exp(np.asarray(run(logits, sampling.SamplingParams(temperature=[0.0, 1.0], top_p=0.5))))
    np.testing.assert_allclose(log_p[:, 0], [[0, 1, 0], [0, 0.5, 0.5]], atol=1e-6)


def test_a_greedy_row_does_not_lose_its_token_to_rounding():
    """The argmax is that of the logits: after normalisation the two best are equal in fp32."""
    logits = np.full((1, 1, 4096), 1.0, np.float32)
    logits[0, 0, 7] = np.nextafter(np.float32(1.0), np.float32(2.0))
    log_p = np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))[0, 0]
    assert log_p[6] == log_p[7]
    greedy = run(jnp.asarray(logits), sampling.SamplingParams(temperature=0.0))
    assert int(jnp.argmax(greedy[0, 0])) == 7


def test_filters_of_one_row_leave_the_others_alone():
    logits = jnp.asarray(grid())
    mixed = {"temperature": [1.0, 0.0] * 4, "top_k": [0, 0, 3, 0] * 2, "top_p": [1.0, 1.0, 1.0, 0.6] * 2}
    log_p = np.asarray(run(logits, sampling.SamplingParams(**mixed)))
    for b in range(8):
        alone = run(logits[b : b + 1], sampling.SamplingParams(**{k: v[b] for k, v in mixed.items()}))
        np.testing.assert_allclose(log_p[b], np.asarray(alone)[0], rtol=1e-6)


def test_bfloat16_logits_are_widened_first():
    logits = jnp.asarray(grid()).astype(jnp.bfloat16)
    narrow, wide = (run(x, sampling.SamplingParams(top_p=0.9)) for x in (logits, logits.astype(jnp.float32)))
    assert narrow.dtype == jnp.float32
    np.testing.assert_array_equal(narrow, wide)


@pytest.mark.parametrize("filters", [{"top_p": 0.95}, {"top_k": 1000}, {"top_k": 5000, "top_p": 0.5}], ids=str)
def test_real_vocabulary(filters):
    """200,064 tokens with a heavy tail and, as rounded to bfloat16, thousands of equal logits."""
    logits = (np.random.default_rng(1).normal(size=(2, 1, 200_064)) * 2).astype(np.float32)
    logits[1] = np.asarray(jnp.asarray(logits[1]).astype(jnp.bfloat16).astype(jnp.float32))
    log_p = np.asarray(run(jnp.asarray(logits), sampling.SamplingParams(**filters)))
    allowed = np.ones(logits.shape[-1], bool)
    check(log_p, logits, allowed, full(filters), mass_tolerance=LARGE_MASS_TOLERANCE)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU: 102 million logits")
def test_real_vocabulary_and_batch():
    logits = jax.random.normal(jax.random.key(0), (64, 8, 200_064), jnp.float32) * 3
    log_p = run(logits, sampling.SamplingParams(top_p=0.95, top_k=100_000))
    allowed = np.ones(logits.shape[-1], bool)
    for b in (0, 31, 63):
        rows = {"temperature": [1.0], "top_k": [100_000], "top_p": [0.95], "min_p": [0.0]}
        part, found = np.asarray(logits[b : b + 1]), np.asarray(log_p[b : b + 1])
        check(found, part, allowed, rows, mass_tolerance=LARGE_MASS_TOLERANCE)


def primitives(jaxpr):
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from primitives(inner)


def test_the_vocabulary_is_never_sorted():
    logits = jnp.zeros((2, 3, 50), jnp.float32)
    params = sampling.SamplingParams(top_k=[3, 0], top_p=0.9, min_p=0.1)
    used = set(primitives(jax.make_jaxpr(sampling.target_log_probs)(logits, params).jaxpr))
    assert "reduce" in used and "cond" in used
    assert not used & {"sort", "top_k", "approx_top_k", "cumsum"}
    assert "sort" in set(primitives(jax.make_jaxpr(jnp.sort)(logits).jaxpr))


def test_searches_run_only_where_a_row_asks_for_them():
    """Every reading of the logits beyond the maximum, the sum and the result is in a branch."""
    logits = jnp.zeros((2, 3, 50), jnp.float32)
    jaxpr = jax.make_jaxpr(sampling.target_log_probs)(logits, sampling.SamplingParams(top_p=0.9)).jaxpr
    outside = [equation.primitive.name for equation in jaxpr.eqns]
    assert not {"scan", "while", "reduce", "argmax"} & set(outside)


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9, "min_p": 0.2, "temperature": 0.0}], ids=str)
def test_without_filters_it_is_a_log_softmax_and_values_do_not_recompile(filters):
    compiled = jax.jit(partial(sampling.target_log_probs))
    logits = jnp.asarray(grid())
    plain = compiled(logits, sampling.SamplingParams())
    np.testing.assert_allclose(plain, jax.nn.log_softmax(logits), rtol=1e-6, atol=1e-6)
    compiled(logits, sampling.SamplingParams(**filters))
    assert compiled._cache_size() == 1
