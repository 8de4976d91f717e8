"""The Triton form of `markov_draw`, run by Triton's interpreter on the CPU.

TRITON_INTERPRET=1 pytest tests/pallas_kernels/test_markov_draw_interpreted.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from markov_draw_cases import LOGIT_TOLERANCE, arguments, equal_tokens, noise, problems
from test_markov_draw import WRONG
from triton_interpreter import interpreted, requires_interpreter

from dspark_jax import sampling
from pallas_kernels import markov_draw


def run(given: dict[str, jax.Array], slot: int, keep: bool = True):
    from pallas_kernels.markov_draw import triton

    settings = jnp.stack([given["inverse_temperature"], given["drawn"].astype(jnp.float32)], axis=-1)
    rest = given["latents"], given["table"], given["allowed"].astype(jnp.int8)
    with interpreted(), np.errstate(all="ignore"):
        logits, token, numbers = triton.run(
            given["logits"], given["index"], given["words"], settings, *rest, slot=slot, keep=keep
        )
    return logits, token, numbers[:, 0], numbers[:, 1]


def same(given: dict[str, jax.Array], found, slot: int) -> None:
    token, wanted = np.asarray(found[1]), equal_tokens(given, slot)
    assert (wanted >= -1).any()
    np.testing.assert_array_equal(token[wanted >= -1], wanted[wanted >= -1])


@requires_interpreter
@pytest.mark.parametrize("rank", [16, 256])
@pytest.mark.parametrize("batch, vocab", [(1, 1001), (3, 1000), (8, 517), (16, 515), (64, 515), (70, 260)])
def test_slots_equal_the_oracle(batch: int, vocab: int, rank: int) -> None:
    given = arguments(batch, vocab, rank, seed=batch)
    for slot in range(2):
        found = run(given, slot)
        assert not problems(given, found, slot)
        same(given, found, slot)


@requires_interpreter
@pytest.mark.parametrize("vocab", [1, 7, 64, 128])
def test_small_vocabularies_and_ranks(vocab: int) -> None:
    for rank in (8, 24):
        given = arguments(5, vocab, rank, seed=vocab)
        if vocab == 1:
            given["logits"], given["allowed"] = jnp.ones((5, 2, 1), jnp.float32), jnp.ones(1, bool)
        assert not problems(given, run(given, 1), 1)


@requires_interpreter
@pytest.mark.parametrize("spread", [0.0, 1e-3, 30.0])
def test_flat_and_peaked_rows(spread: float) -> None:
    """Equal scores, of which greedy rows take the first, and laws on one token."""
    given = arguments(10, 1001, 16, spread=spread)
    given["table"] = given["table"] * jnp.bfloat16(spread > 0)
    for slot in range(2):
        assert not problems(given, run(given, slot), slot)
        same(given, run(given, slot), slot)


@requires_interpreter
@pytest.mark.parametrize("batch", [5, 20])
def test_rows_without_a_finite_logit(batch: int) -> None:
    given = arguments(batch, 260, 16)
    given["logits"] = given["logits"].at[1].set(-jnp.inf).at[3].set(jnp.nan).at[4, :, :200].set(-jnp.inf)
    found = run(given, 1)
    assert not problems(given, found, 1)
    np.testing.assert_array_equal(np.flatnonzero(np.asarray(found[1]) == -1), [1, 3])


@requires_interpreter
@pytest.mark.parametrize("distance", [1, 2000])
@pytest.mark.parametrize("ahead", [-0.05, 0.05])
def test_the_second_word_decides_among_the_smallest_numbers(distance: int, ahead: float, monkeypatch) -> None:
    """Against a token whose first word is 0 stands another one, in its chunk or not, with a score a little apart."""
    from triton.language import constexpr

    from pallas_kernels.markov_draw import triton_kernel

    vocab = 4000
    given = arguments(1, vocab, 16, slots=1) | dict(drawn=jnp.ones(1, bool), inverse_temperature=jnp.ones(1))
    given["table"], given["allowed"] = jnp.zeros_like(given["table"]), jnp.ones(vocab, bool)
    words = np.array([[[0, key_with_a_zero_word(vocab)]]], np.uint32)
    gumbels = noise(words[:, 0], vocab)[0]
    rare = int(gumbels.argmax())
    rival = (rare + distance) % vocab
    logits = np.zeros((1, 1, vocab), np.float32)
    logits[..., rival] = gumbels[rare] - gumbels[rival] + ahead
    given |= dict(words=jnp.asarray(words), logits=jnp.asarray(logits))
    found = run(given, 0)
    assert not problems(given, found, 0)
    assert found[1][0] == (rival if ahead > 0 else rare)
    if ahead > 0:  # without that word the rare token would have more noise than any other can
        monkeypatch.setattr(triton_kernel, "ULP_23", constexpr(0.0))
        assert problems(given, run(given, 0), 0)


def key_with_a_zero_word(vocab: int) -> int:
    """The first key under which one of `vocab` numbers starts with 23 zeros."""
    first = jax.jit(lambda key: jnp.min(jax.random.uniform(jax.random.wrap_key_data(key), (2, vocab))[0]))
    for low in range(50_000):
        if first(jnp.asarray([0, low], jnp.uint32)) == 0:
            return low
    raise AssertionError("no such key")


@requires_interpreter
def test_a_greedy_block_needs_no_logits() -> None:
    given = arguments(20, 515, 16) | dict(drawn=jnp.zeros(20, bool), inverse_temperature=jnp.ones(20, jnp.float32))
    found = run(given, 1, keep=False)
    assert not problems(given, found, 1, keep=False)
    same(given, found, 1)
    np.testing.assert_array_equal(found[0], given["logits"])


@requires_interpreter
@pytest.mark.parametrize("batch", [1, 5, 20])
def test_tokens_alone(batch: int) -> None:
    """Without the logits, of requests some of which draw."""
    given = arguments(batch, 515, 16)
    for slot in range(2):
        found = run(given, slot, keep=False)
        assert not problems(given, found, slot, keep=False)
        same(given, found, slot)


@requires_interpreter
@pytest.mark.parametrize("batch", [1, 5, 20])
def test_huge_logits(batch: int) -> None:
    """Differences and products that overflow; infinity counts as the largest number."""
    given = arguments(batch, 515, 16)
    logits = given["logits"] * jnp.float32(1e37)
    logits = logits.at[::2, :, 77].set(jnp.inf).at[:, :, 300].set(-3.4e38)
    given |= dict(
        logits=logits.at[1::2, :, 400].set(3.4e38), allowed=given["allowed"].at[jnp.asarray([77, 400])].set(True)
    )
    found = run(given, 1)
    np.testing.assert_array_equal(found[1], np.where(np.arange(batch) % 2 == 0, 77, 400))
    np.testing.assert_array_equal(found[3], 0.0)
    assert np.isfinite(np.asarray(found[2])).all()


@requires_interpreter
def test_a_bound_is_never_below_the_noise() -> None:
    """Of many first words, with the second word that makes most of it."""
    from pallas_kernels.markov_draw import triton_kernel

    high = np.unique(np.concatenate([np.arange(2**12), np.arange(0, 2**23, 509), 2**23 - 1 - np.arange(2**12)]))
    uniform = np.where(high >= 2**22, high * 2.0**-23, high * 2.0**-23 + 2.0**-47)
    noise = -np.log(-np.log1p(-uniform))

    def bound(below: float, above: float) -> np.ndarray:
        bits = (high << 9).astype(np.uint32).astype(np.float32).view(np.int32).astype(np.float32)
        return np.float32(above) - np.float32(below) * bits

    below, above = triton_kernel.BELOW.value, triton_kernel.ABOVE.value
    slack = bound(below, above) - noise
    assert slack.min() > 5e-4  # scores of the tile and of the row are rounded apart, by less than this
    assert slack[(high > 0) & (high < 2**18)].max() < 0.08  # or too many chunks would be looked at
    assert (bound(below, above - 2.0**-9) - noise).min() < 0


@requires_interpreter
@pytest.mark.parametrize("name", WRONG)
def test_the_comparison_sees_a_wrong_draw(name: str) -> None:
    given = arguments(5, 501, 16)
    assert problems(given, run(WRONG[name](given), 0), 0)


@requires_interpreter
def test_a_bound_that_is_too_low_is_seen(monkeypatch) -> None:
    from triton.language import constexpr

    from pallas_kernels.markov_draw import triton_kernel

    given = arguments(40, 501, 16)
    assert not problems(given, run(given, 0), 0)
    monkeypatch.setattr(triton_kernel, "ABOVE", constexpr(-5.0))
    monkeypatch.setattr(triton_kernel, "BELOW", constexpr(0.0))
    assert problems(given, run(given, 0), 0)


@requires_interpreter
def test_a_row_depends_neither_on_others_nor_on_their_number() -> None:
    given = arguments(70, 515, 256)
    together = run(given, 1)
    alone = run({name: a if name in ("latents", "table", "allowed") else a[66:70] for name, a in given.items()}, 1)
    np.testing.assert_array_equal(np.asarray(together[1])[66:], alone[1])


@requires_interpreter
@pytest.mark.slow
def test_the_real_vocabulary() -> None:
    given = arguments(3, 200_064, 256, slots=1)
    found = run(given, 0)
    assert not problems(given, found, 0)
    same(given, found, 0)


@requires_interpreter
@pytest.mark.parametrize("method", ["ancestral", "greedy"])
def test_a_block_of_drafts(method: str, monkeypatch) -> None:
    """`sampling.draft` through the kernels, against itself without them."""
    from pallas_kernels.markov_draw import triton

    batch, slots, vocab, rank = 3, 3, 300, 16
    rng = np.random.default_rng(0)
    first, second = (jnp.asarray(rng.normal(size=(vocab, rank)), jnp.bfloat16) for _ in range(2))
    base = jnp.asarray(2 * rng.normal(size=(batch, slots, vocab)), jnp.float32)

    def markov(previous, hidden, carry):
        embedding = first[previous]
        return jnp.einsum("br,vr->bv", embedding, second, preferred_element_type=jnp.float32), embedding, carry

    def draw_slot(logits, slot, previous, hidden, carry, settings):
        drawn = markov_draw(
            logits, first, previous, second, settings.allowed, settings.words, settings.inverse_temperature,
            settings.drawn, slot=slot, keep=settings.keep, implementation="triton",
        )  # fmt: skip
        return sampling.DrawnSlot(*drawn, first[previous], carry)

    def draft(draw=None) -> sampling.Draft:
        return sampling.draft(
            base, jnp.zeros((batch, slots, 1)), jnp.asarray([1, 200, 17], jnp.int32), markov=markov,
            temperature=jnp.asarray([1.0, 0.0, 0.6]), keys=sampling.request_keys(range(batch)), method=method,
            allowed=jnp.arange(vocab) != 5, draw_slot=draw,
        )  # fmt: skip

    plain = draft()
    monkeypatch.setattr(triton, "require_triton", lambda *_: 132)
    monkeypatch.setattr(triton, "_opaque", lambda kernel: kernel)
    with interpreted(), np.errstate(all="ignore"):
        found = draft(draw_slot)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    np.testing.assert_array_equal(found.prev_embeddings, plain.prev_embeddings)
    if method == "ancestral":
        np.testing.assert_allclose(found.log_q, plain.log_q, rtol=LOGIT_TOLERANCE, atol=LOGIT_TOLERANCE)
    else:
        assert found.log_q is None
