"""examples/train_tiny as it runs: names and export, training that learns and resumes, corpus, checks."""

import dataclasses
import json
import math
from pathlib import Path

import checks
import corpus
import jax
import jax.numpy as jnp
import loop
import numpy as np
import pytest
import settings
import storage
import target_forward
import train_drafter
import train_target
from train_tiny_cases import (
    DRAFT_GEOMETRY,
    GEOMETRY,
    MICRO,
    TARGET,
    TOLERANCE,
    tokens_of,
)

import dspark_jax as ds
from convert.conversion import Options, convert
from convert.names import place

# --- export


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    words = [f"def function_{i}(argument_{i}):\n    return {i} + argument_{i}\n\n\n" for i in range(400)]
    documents = [corpus.Document(f"{i}.py", "".join(words[i : i + 40]), i == 0) for i in range(0, 400, 40)]
    corpus.write_tokenizer(corpus.train_tokenizer(documents, MICRO.vocab_size), folder)
    return folder


@pytest.fixture(scope="module")
def pair(tokenizer_folder, tmp_path_factory):
    """A random pair, exported and converted -> folder, stored weights of target and drafter."""
    folder = tmp_path_factory.mktemp("pair")
    params = storage.initial(GEOMETRY, jax.random.key(1), layers=2)
    weights = train_target.export(params, MICRO, tokenizer_folder, folder / "pair")
    draft = storage.initial(DRAFT_GEOMETRY, jax.random.key(2), layers=1)
    draft_weights = train_drafter.export(draft, settings.drafter_json(MICRO), folder / "pair" / "dspark")
    convert(str(folder / "pair"), folder / "converted", Options(verify=True))
    return folder, params, weights, draft_weights


def test_export_loads_as_it_was_trained(pair):
    folder, params, weights, draft_weights = pair
    index = json.loads((folder / "pair" / "model.safetensors.index.json").read_text())
    placed = [p for name in index["weight_map"] if (p := place(name, "target"))]
    assert len(placed) == len(index["weight_map"])
    assert {f"{p.module}/{'bias' if p.suffix == 'bias' else 'weight'}" for p in placed} == weights.keys()
    # Runtimes that quantise activations ask for an input scale beside each expert's global scale.
    suffixes = [p.suffix for p in placed]
    assert suffixes.count("input_global_scale") == suffixes.count("weight_global_scale") == 3 * MICRO.experts
    model = ds.load(folder / "converted", compute_dtype=jnp.float32)
    assert model.drafter is not None
    loaded = storage.module_params(model.target, "target")
    assert storage.differences(weights, loaded) == []
    assert storage.differences(draft_weights, storage.module_params(model.drafter, "drafter")) == []
    trained = jax.jit(lambda p: storage.rounded(p, GEOMETRY))(params)
    tokens = tokens_of(jax.random.key(3), 1, 32)
    ours = target_forward.logits(trained, target_forward.forward(trained, tokens, TARGET, dtype=jnp.float32).hidden)
    assert float(jnp.max(jnp.abs(ours - ds.target_logits(model, tokens)))) < TOLERANCE
    # Mutant: one bit of one code of one expert.
    path = "target/layers/1/moe/experts/up_proj/weight"
    damaged = dataclasses.replace(loaded[path], codes=loaded[path].codes.at[1, 0, 0].add(jnp.uint8(1)))
    assert storage.differences(weights, loaded | {path: damaged}) == [path]
    tokenizer = ds.Tokenizer.load(folder / "converted")
    text = "def f(x):\n\treturn 'é\U0001f600' + x  \n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert model.target.config.eos_token_ids == (settings.END_OF_TEXT_ID,)


def test_gate_and_up_share_a_global_scale(pair):
    _, _, weights, _ = pair
    gate, up, down = (weights[f"target/layers/1/moe/experts/{n}_proj/weight"] for n in ("gate", "up", "down"))
    np.testing.assert_array_equal(gate.global_scale, up.global_scale)
    assert not np.array_equal(gate.global_scale, down.global_scale)


# --- training


def stream_of(seed: int, count: int) -> np.ndarray:
    """Tokens with something to learn: each follows from the one before."""
    rng = np.random.default_rng(seed)
    tokens, steps = [5], rng.integers(1, 4, count)
    for step in steps.tolist():
        tokens.append(2 + (3 * tokens[-1] + step) % 100)
    return np.array(tokens, np.uint16)


def entries(log: loop.Log, name: str) -> list[dict]:
    return [e for e in map(json.loads, log.file.read_text().splitlines()) if e["kind"] == name and "loss" in e]


@pytest.mark.slow
def test_target_learns_and_resumes_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    run = train_target.make_run(MICRO, TARGET, GEOMETRY, seed=0, dtype=jnp.float32)
    stream = jnp.asarray(stream_of(0, 4000))
    monkeypatch.setattr(loop, "_REPORT_SECONDS", 0.0)
    monkeypatch.setattr(loop, "_SAVE_SECONDS", 0.0)

    def job(folder: Path, *, calls: int) -> tuple[loop.Job, loop.Log]:
        left = [calls]

        def limited(state, planned):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return run(state, stream, planned)

        folder.mkdir(exist_ok=True)
        return (
            loop.Job(
                name="target",
                file=folder / "target.npz",
                options=MICRO.target,
                run=limited,
                evaluate=lambda state: {},
                epoch_tokens=4000,
                steps=32,
            ),
            loop.Log(folder / "log.jsonl"),
        )

    def initial():
        return train_target.initial_state(GEOMETRY, MICRO.target, 0, layers=2)

    whole_job, whole_log = job(tmp_path / "whole", calls=9)
    whole = loop.train(whole_job, initial(), whole_log)
    losses = [e["loss"] for e in entries(whole_log, "target")]
    assert losses[-1] < losses[0] - 0.5 and int(whole["step"]) == 32
    cut_job, cut_log = job(tmp_path / "cut", calls=2)
    with pytest.raises(KeyboardInterrupt):
        loop.train(cut_job, initial(), cut_log)
    rest_job, rest_log = job(tmp_path / "cut", calls=9)
    resumed = loop.train(rest_job, initial(), rest_log)
    assert [e["step"] for e in entries(rest_log, "target")] == [8, 16, 24, 32]
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)
    # Mutant: a resumption that forgets the optimizer's moments ends elsewhere.
    forgetful_job, forgetful_log = job(tmp_path / "forgetful", calls=2)
    with pytest.raises(KeyboardInterrupt):
        loop.train(forgetful_job, initial(), forgetful_log)
    half = loop.restore(forgetful_job.file, initial())
    loop.save(forgetful_job.file, {**half, "optimizer": initial()["optimizer"]})
    forgetful = loop.train(dataclasses.replace(forgetful_job, run=rest_job.run), initial(), forgetful_log)
    assert any(bool(jnp.any(v != whole["params"][name])) for name, v in forgetful["params"].items())
    with pytest.raises(ValueError, match="expected"):
        loop.restore(tmp_path / "whole" / "target.npz", {"step": jnp.zeros((2,), jnp.int32)})
    assert "[target]" in capsys.readouterr().out


@pytest.mark.slow
def test_drafter_learns_on_the_exported_target(pair, tmp_path, monkeypatch, capsys):
    folder, *_ = pair
    model = ds.load(folder / "converted", compute_dtype=jnp.float32)
    monkeypatch.setattr(loop, "_REPORT_SECONDS", 0.0)
    stream, log = stream_of(1, 3000), loop.Log(tmp_path / "log.jsonl")
    teacher = train_drafter.Teacher.of(model, jnp.float32)
    rows = np.stack([stream[i : i + 32] for i in range(0, 640, 32)])
    data = train_drafter.Data(stream=stream, rows=rows, mask=np.broadcast_to(np.arange(32) >= 8, rows.shape))
    train_drafter.train(
        teacher,
        settings.drafter_json(MICRO),
        MICRO.drafter,
        data,
        stream,
        tmp_path / "drafter.npz",
        log,
        anchors=6,
        eval_rows=8,
        minutes=None,
        steps=32,
        seed=0,
    )
    losses = [e["loss"] for e in entries(log, "drafter")]
    assert losses[-1] < losses[0] - 0.1
    # The same features by the library's own forward, as for a target of many experts.
    arrays = teacher.arrays()
    tokens = jnp.asarray(rows[:2].astype(np.int32))
    few = {k: arrays[0][k] for k in ("target/embed_tokens/weight", "target/lm_head/weight")}
    features = jax.jit(lambda a, t: teacher.features(a, t, (0, 1)))
    ours, theirs = features(arrays, tokens), features((few, arrays[1]), tokens)
    for a, b in zip(ours, theirs, strict=True):
        assert float(jnp.max(jnp.abs(a - b))) < TOLERANCE
    capsys.readouterr()


# --- corpus and checks


def test_corpus_is_split_by_path_and_leaves_tables_out(tmp_path):
    body = "def function(argument):\n    return argument\n"
    for i in range(60):
        (tmp_path / f"file_{i}.py").write_text(f"# file number {i}\n{body}")
    (tmp_path / "copy.py").write_text((tmp_path / "file_1.py").read_text())
    (tmp_path / "table.py").write_text("x = [" + ", ".join(map(str, range(3000))) + "]\n")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "encodings").mkdir()
    (tmp_path / "encodings" / "cp1.py").write_text(body)
    documents = corpus.read_documents(tmp_path)
    paths = [d.path for d in documents]
    assert paths == sorted(paths) and len(documents) == 60
    assert not {"table.py", "latin.py", "encodings/cp1.py"} & set(paths) and ("copy.py" in paths) != (
        "file_1.py" in paths
    )
    assert {d.path: d.held_out for d in documents} == {d.path: d.held_out for d in corpus.read_documents(tmp_path)}
    assert 1 <= sum(d.held_out for d in documents) <= 12
    with pytest.raises(ValueError, match="too few"):
        corpus.read_documents(tmp_path / "encodings")


def test_token_bytes_add_up_to_the_text(tokenizer_folder):
    tokenizer = ds.Tokenizer.load(tokenizer_folder)
    text = "def f(x):\n    return 'é' * 12345\n"
    sizes = corpus.token_bytes(tokenizer.backend)
    assert sizes[tokenizer.encode(text)].sum() == len(text.encode())


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("def f(x):\n    return x\n", True),
        ("def f(x,\n      y", True),
        ('def f(x):\n    """Cut here\n', True),
        ("x = (1,\n", True),
        ("def f(x):\n    return 'cut\n", False),
        ("def f(x):\n        y = 1\n    return y\n", False),
        ("x = 0b12\ny = 1\n", False),
    ],
)
def test_is_python(text, good):
    assert checks.is_python(text) == good


def test_bootstrap_interval_holds_the_mean():
    rng = np.random.default_rng(0)
    lengths = [rng.integers(1, 9, 40) for _ in range(50)]
    mean, low, high = checks.bootstrap(lengths)
    assert mean == pytest.approx(np.concatenate(lengths).mean()) and low < mean < high
    # 2.29 is the deviation of one length, over 2000 of them.
    assert high - low == pytest.approx(2 * 1.96 * 2.29 / math.sqrt(2000), rel=0.3)
