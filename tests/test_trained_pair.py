"""The pair that comes with the package: what it does here, and what the committed study claims about it.

The figures come from examples/acceptance/study.json, measured over hundreds of prompts; here is a small sample of the
same prompts with fixed seeds.
"""

import hashlib
import io
import itertools
import json
import tokenize
from pathlib import Path

import generation_cases as cases
import numpy as np
import pytest

import dspark_jax as ds
from dspark_jax import ablations
from dspark_jax.commands.demo import BUNDLED
from dspark_jax.measurement import Measurement, measure, recording

ACCEPTANCE = Path(__file__).parent.parent / "examples" / "acceptance"
LIKE_THE_STUDY = ds.SamplingParams(temperature=1.0, top_p=0.95)
NEW = 64
RUNS = (("ancestral", "block"), ("ancestral", "standard"), ("greedy", "match"))
# Standard errors (of the sample here, drawn by prompts) that a length may be away from the study's: four in a direction
# are one false alarm in 30,000.
STANDARD_ERRORS = 4
MOST_BYTES = 12_000_000
# At 7 drafts the study found 3.14 with top-p 0.95 and 3.05 without, lower ends of the intervals 3.07 and 2.97: what is
# below 2.9 would be another pair or another study.
LEAST_LENGTH = 2.9
WIDEST_INTERVAL = 0.17
LEAST_STEPS = 5000
# Of 20. The samples of five seeds passed 75 times of 80: 14 or fewer of 20 happen once in 900. Shuffled ones passed 32
# times of 80, that is 8 of 20 with a standard deviation of 2.2, and must stay below the bar of the samples.
LEAST_SAMPLES_THAT_TOKENIZE = 15
MOST_SHUFFLED_THAT_TOKENIZE = 14
LEAST_LOSS_WITHOUT_CONTEXT = 0.95  # seen: 1.77 with a standard error of 0.195, and four of these less is 0.99
# Differences of the study whose whole 95 % interval is above 0, at its longest block. Block and standard rule are
# also compared on the same drafts, further down: the texts of two runs differ, which moves the length, too.
CLAIMS = (
    "ancestral/block - ancestral/standard",
    "ancestral/block - greedy/match",
    "as trained - causal block",
    "as trained - Markov zeroed",
    "as trained - window 16",
    "as trained - window 64",
)


@pytest.fixture(scope="module")
def study() -> dict:
    return json.loads((ACCEPTANCE / "study.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return cases.convert(BUNDLED, tmp_path_factory.mktemp("pair") / "ckpt")


@pytest.fixture(scope="module")
def model(checkpoint) -> ds.Model:
    return ds.load(checkpoint, compute_dtype="float32")


@pytest.fixture(scope="module")
def tokenizer(checkpoint) -> ds.Tokenizer:
    return ds.Tokenizer.load(checkpoint)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Every 16th held-out prompt."""
    lines = (ACCEPTANCE / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[::16]]


@pytest.fixture(scope="module")
def prompts(texts, tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text)[:128] for text in texts]


def config_of(draft: str, verify: str) -> ds.GenerateConfig:
    return ds.GenerateConfig(max_new_tokens=NEW, draft=draft, verify=verify, stop_token_ids=())


@pytest.fixture(scope="module")
def small(model, prompts) -> dict[tuple[str, str], Measurement]:
    """The table of the study at the longest block, from a few prompts."""
    return {
        run: measure(model, prompts, LIKE_THE_STUDY, config=config_of(*run), seeds=range(len(prompts)), run=cases.run)
        for run in RUNS
    }


def standard_error(m: Measurement) -> float:
    return float(m.bootstrap(m.survived).sum(1).std())


def test_the_study_is_of_this_pair_and_these_prompts(study, checkpoint):
    assert ds.Layout.read(checkpoint).record["source"]["fingerprint"] == study["checkpoint"]["fingerprint"]
    digest = hashlib.sha256((ACCEPTANCE / "held_out.jsonl").read_bytes()).hexdigest()
    assert digest == study["settings"]["prompts_sha256"]


def test_the_pair_is_small():
    assert sum(f.stat().st_size for f in BUNDLED.rglob("*") if f.is_file()) <= MOST_BYTES


@pytest.mark.parametrize("run", RUNS, ids=["-".join(r) for r in RUNS])
def test_acceptance_length_is_that_of_the_study(study, small, run):
    (cell,) = cells(study, run)
    found = small[run]
    far = abs(found.acceptance_length - cell["mean_acceptance_length"])
    assert len(found.accepted) > 50
    assert far < STANDARD_ERRORS * standard_error(found), f"{found.acceptance_length:.3f}"


def test_expected_lengths_of_the_two_rules(small):
    for run in RUNS[:2]:
        m = small[run]
        # For given drafts either rule may accept more; on average over drafts it is the block rule.
        gain = (m.expected[:, 1] - m.expected[:, 0]).astype(float)
        assert gain.any()
        assert gain.mean() > -STANDARD_ERRORS * m.bootstrap(gain[:, None]).std()
    # Greedy drafts: one-hot proposals, for which the two rules are one.
    np.testing.assert_allclose(*small["greedy", "match"].expected.T, atol=1e-4)


@pytest.mark.slow
def test_a_drafter_without_context_is_seen(study, small, model, prompts):
    """Mutant: a window of 1 hides all context. The comparison above must tell it from the pair as it was trained."""
    run = RUNS[0]
    blind = measure(
        ablations.with_window(model, 1),
        prompts,
        LIKE_THE_STUDY,
        config=config_of(*run),
        seeds=range(len(prompts)),
        run=cases.run,
    )
    assert small[run].acceptance_length - blind.acceptance_length > LEAST_LOSS_WITHOUT_CONTEXT


@pytest.mark.slow  # test_generate and test_speculative show it on the golden checkpoints
def test_greedy_text_is_the_same_with_and_without_drafts(model, prompts, small):
    tokens, lengths = ds.pad_prompts(prompts, (128,))
    inputs = (tokens, lengths, ds.request_keys(range(len(prompts))), ds.SamplingParams(temperature=0.0))
    drafted = cases.run(model, *inputs, config=recording(config_of("ancestral", "block")))
    plain = cases.run(model, *inputs, config=config_of("none", "block"))
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    assert int(drafted.stats.num_steps.sum()) < int(plain.stats.num_steps.sum())
    # Mutant: the drafts of the first step, taken without a look at the target.
    taken = np.concatenate([plain.tokens[:, :1], drafted.steps.draft_tokens[:, 0]], axis=1)
    assert not np.array_equal(taken, plain.tokens[:, : taken.shape[1]])


def tokenizes(text: str) -> bool:
    """Whether Python's tokenizer finds nothing wrong but what the end of the text cuts off."""
    last = text.count("\n") + 1
    try:
        list(tokenize.generate_tokens(io.StringIO(text).readline))
    except IndentationError as error:
        return (error.lineno or 0) >= last
    except tokenize.TokenError as error:
        message, (line, _) = error.args
        return "EOF in multi-line" in message or "unterminated triple-quoted" in message or line >= last
    except (SyntaxError, SystemError, UnicodeDecodeError):  # 3.12.1 knows no better for some characters
        return False
    return True


def test_samples_are_python(model, prompts, tokenizer):
    whole, shuffled = [], []
    rng = np.random.default_rng(0)
    for seed in (100, 200):
        # The batch of the test above, so that they share a program.
        tokens, lengths = ds.pad_prompts(prompts, (128,))
        out = cases.run(
            model,
            tokens,
            lengths,
            ds.request_keys(range(seed, seed + len(prompts))),
            ds.SamplingParams(temperature=0.8),
            config=config_of("none", "block"),
        )
        for prompt, new in zip(prompts, np.asarray(out.tokens), strict=True):
            whole.append(tokenizer.decode([*prompt, *new.tolist()]))
            # Mutant: the tokens of a sample in another order are not Python.
            shuffled.append(tokenizer.decode([*prompt, *rng.permutation(new).tolist()]))
    assert sum(map(tokenizes, whole[:20])) >= LEAST_SAMPLES_THAT_TOKENIZE
    assert sum(map(tokenizes, shuffled[:20])) <= MOST_SHUFFLED_THAT_TOKENIZE


def test_tokenizes_forgives_the_cut_only():
    for good in ("x = 1\n", "def f(a,\n", 'x = """open', "x = 'open", "    a = 1\nb = 2\n", "if x:\n    y = ("):
        assert tokenizes(good), good
    for bad in ("x = 'open\ny = 2\n", "if x:\n        a\n    b\nc\n"):
        assert not tokenizes(bad), bad


# What the study claims


def cells(study: dict, run: tuple[str, str], **wanted) -> list[dict]:
    wanted = {
        "variant": "as trained",
        "draft": run[0],
        "verify": run[1],
        "top_p": study["settings"]["top_p"],
        "k": study["settings"]["block_size"],
    } | wanted
    return [c for c in study["cells"] if all(c[k] == v for k, v in wanted.items())]


def test_the_study_adds_up(study):
    for cell in study["cells"]:
        rates, histogram = cell["acceptance_rate_per_position"], cell["acceptance_histogram"]
        steps = cell["num_spec_steps"]
        assert sum(histogram) == steps and len(rates) == cell["k"]
        assert cell["mean_acceptance_length"] == pytest.approx(
            1 + sum(j * n for j, n in enumerate(histogram)) / steps, abs=1e-3
        )
        assert cell["mean_acceptance_length"] == pytest.approx(1 + sum(rates), abs=1e-3)
        assert all(a >= b for a, b in itertools.pairwise(rates))
        low, high = cell["interval"]
        assert low <= cell["mean_acceptance_length"] <= high
    for law, slots in study["calibration"].items():
        assert all(0 <= s["ece"] <= 1 for s in slots), law


def test_the_rules_coincide_for_one_draft(study):
    lengths = [cells(study, run, k=1)[0]["mean_acceptance_length"] for run in RUNS[:2]]
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("top_p", [0.95, 1.0])
def test_length_and_size_of_the_study(study, top_p):
    (cell,) = cells(study, RUNS[0], top_p=top_p)
    low, high = cell["interval"]
    assert low > LEAST_LENGTH
    assert high - low < WIDEST_INTERVAL
    assert cell["num_spec_steps"] > LEAST_STEPS


@pytest.mark.parametrize("claim", CLAIMS)
def test_the_order_that_the_study_claims(study, claim):
    (difference,) = [
        d for d in study["differences"] if d["name"] == claim and d["k"] == study["settings"]["block_size"]
    ]
    low, high = difference["interval"]
    assert 0 < low <= difference["mean"] <= high
    ((first,), (second,)) = (named(study, name) for name in claim.split(" - "))
    apart = first["mean_acceptance_length"] - second["mean_acceptance_length"]
    assert difference["mean"] == pytest.approx(apart, abs=1e-3)


def test_the_block_rule_gains_on_the_same_drafts(study):
    gains = []
    for k in sorted({c["k"] for c in study["cells"]} - {1}):
        (cell,) = cells(study, RUNS[0], k=k)
        low, high = cell["expected_block_gain"]["interval"]
        assert 0 < low <= cell["expected_block_gain"]["mean"] <= high
        gains.append(cell["expected_block_gain"]["mean"])
        # The runs of the two rules, with texts of their own, do not contradict it.
        (apart,) = [
            d for d in study["differences"] if d["name"] == "ancestral/block - ancestral/standard" and d["k"] == k
        ]
        assert apart["interval"][0] < high and low < apart["interval"][1]
    assert gains == sorted(gains) and len(gains) > 1  # a longer block, more to make good for


def named(study: dict, name: str) -> list[dict]:
    """The cell that a side of a difference names."""
    if "/" in name:
        return cells(study, tuple(name.split("/")))
    return cells(study, RUNS[0], variant=name)
