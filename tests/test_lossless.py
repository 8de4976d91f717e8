"""Generation as a whole emits exactly the target's law: chi-square of joints of tokens, with the mutants that fail."""

import dataclasses

import generation_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax as ds
from dspark_jax import generation, sampling
from dspark_jax.sampling import drafting

# Enough to see a total variation of 0.05 among 242 degrees of freedom (23,000 for a power of 0.999). Noise keyed by
# position moves the law by less and gets more.
STREAMS = 25_000
MANY_STREAMS = 50_000
PROMPT = (1, 2, 0)
# With K = 2 a step emits 3 tokens at most, and the first token comes from the prompt: 5 tokens are 2 steps or more.
TOKENS = 5
DRAFTS = 2


@pytest.fixture(scope="module")
def model() -> ds.Model:
    return cases.law_toy()


@pytest.fixture(scope="module")
def law(model) -> np.ndarray:
    return cases.joint_law(model, PROMPT, TOKENS)


def sample(model, run=cases.run, streams: int = STREAMS, params: ds.SamplingParams | None = None, **options):
    tokens = jnp.broadcast_to(jnp.asarray([[*PROMPT, 0]], jnp.int32), (streams, 4))
    config = ds.GenerateConfig(**({"max_new_tokens": TOKENS} | options))
    lengths = jnp.full((streams,), len(PROMPT), jnp.int32)
    return run(model, tokens, lengths, ds.request_keys(range(streams)), params or ds.SamplingParams(), config=config)


def is_lossless(out: ds.Generation, law: np.ndarray) -> bool:
    """Whether drafts were accepted and rejected, and the joint of all tokens has the law."""
    stats = out.stats.total()
    drafted, accepted = int(stats.num_draft_tokens), int(stats.num_accepted_draft_tokens)
    return 0 < accepted < drafted and cases.passes(np.asarray(out.tokens), law)


def test_law_depends_on_the_context(law):
    # An implementation that is off by a row would pass if it did not.
    second = law.sum(axis=(2, 3, 4)) / law.sum(axis=(1, 2, 3, 4))[:, None]
    assert np.abs(second[0] - second[2])[:3].max() > 0.04
    assert law.sum() == pytest.approx(1)


@pytest.mark.parametrize(
    "options",
    [
        dict(verify="standard"),
        dict(verify="block"),
        dict(verify="match"),
        pytest.param(dict(verify="block", draft="greedy"), marks=pytest.mark.slow),
        dict(verify="block", confidence_threshold=0.5, ragged_verify="block"),
        dict(verify="block", confidence_threshold=0.5),
    ],
    ids=lambda o: "-".join(map(str, o.values())),
)
def test_generate_is_lossless(model, law, options):
    streams = MANY_STREAMS if options == dict(verify="block") else STREAMS
    out = sample(model, streams=streams, num_draft_tokens=DRAFTS, **options)
    assert is_lossless(out, law), cases.chi_square(np.asarray(out.tokens), law)
    if "confidence_threshold" in options:
        drafted = np.asarray(out.stats.total().drafted_per_position)
        assert 0 < drafted[1] < drafted[0], "the threshold cuts some blocks and not others"


def test_a_run_without_drafts_is_no_proof(model, law):
    out = sample(model, draft="none")
    assert cases.passes(np.asarray(out.tokens), law)
    assert not is_lossless(out, law)


def test_sampling_params_of_each_row_shape_its_law(model):
    filters = [dict(temperature=0.7, top_p=0.8), dict(temperature=1.4, top_k=2), dict(temperature=1.0, min_p=0.45)]
    streams = 24_000
    of_row = np.arange(streams) % len(filters)
    defaults = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    values = {k: np.asarray([(defaults | f)[k] for f in filters])[of_row] for k in defaults}
    out = sample(model, streams=streams, params=ds.SamplingParams(**values), draft="none", max_new_tokens=3)
    laws = [cases.joint_law(model, PROMPT, 3, **f) for f in filters]
    tokens = np.asarray(out.tokens)
    for i, own in enumerate(laws):
        for j, law in enumerate(laws):
            assert cases.passes(tokens[of_row == i], law) == (i == j), (i, j, own.shape)


def draft_argmax(patch: pytest.MonkeyPatch) -> None:
    """Drafts that were not drawn from the law they are verified against."""
    right = sampling.draft

    def draft(*args, **options):
        drawn = right(*args, **options)
        return drawn._replace(tokens=jnp.argmax(drawn.log_q, axis=-1).astype(jnp.int32))

    patch.setattr(sampling, "draft", draft)


def key_drafts_by_position(patch: pytest.MonkeyPatch) -> None:
    """Draft noise that depends on the absolute position: a position that is drafted again gets the same noise.

    The key of a step becomes (position, seed) itself, unhashed, so that the key of a slot can be made from the sum of
    position and slot. Coins and final tokens keep fresh noise.
    """
    right = generation._step

    def step(model, state, config, plan):
        return right(model, dataclasses.replace(state, step=state.position), config, plan)

    def step_keys(keys, step):
        seed = jax.random.key_data(keys)[:, 1]
        position = jnp.broadcast_to(jnp.asarray(step).astype(jnp.uint32), seed.shape)
        return jax.random.wrap_key_data(jnp.stack([position, seed], axis=-1), impl="threefry2x32")

    def draft_keys(keys, slot):
        position, seed = jax.random.key_data(keys).T
        fixed = jnp.full_like(seed, 1 << 31)
        base = jax.random.wrap_key_data(jnp.stack([fixed, seed], axis=-1), impl="threefry2x32")
        return jax.vmap(jax.random.fold_in)(base, position + jnp.uint32(slot))

    patch.setattr(generation, "_step", step)
    patch.setattr(sampling, "step_keys", step_keys)
    patch.setattr(drafting, "draft_keys", draft_keys)


def anticipate(patch: pytest.MonkeyPatch) -> None:
    """A threshold that looks at the token of the slot it decides about."""
    right = sampling.draft

    def draft(*args, markov, **options):
        drawn = right(*args, markov=markov, **options)
        slots = drawn.tokens.shape[1]
        own = [markov(drawn.tokens[:, k], args[1][:, k], None)[1] for k in range(slots)]
        return drawn._replace(prev_embeddings=jnp.stack(own, axis=1))

    patch.setattr(sampling, "draft", draft)


@pytest.mark.parametrize(
    ("mutant", "options"),
    [
        (draft_argmax, dict(verify="standard")),
        (key_drafts_by_position, dict(verify="block")),
        (anticipate, dict(verify="standard", confidence_threshold=0.5)),
    ],
    ids=["argmax drafts", "position-keyed drafts", "anticipating threshold"],
)
def test_lossy_variants_are_caught(model, law, monkeypatch, mutant, options):
    mutant(monkeypatch)
    streams = MANY_STREAMS if mutant is key_drafts_by_position else STREAMS
    out = sample(model, cases.jit_generate(), streams=streams, num_draft_tokens=DRAFTS, **options)
    stats = out.stats.total()
    assert 0 < int(stats.num_accepted_draft_tokens) < int(stats.num_draft_tokens)
    assert not cases.passes(np.asarray(out.tokens), law)
