"""examples/train_tiny: what it trains is the model that the library runs, and what it exports is what it trained."""

import dataclasses
import json
import math
import re
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "train_tiny"))

import checks
import corpus
import drafter_forward
import loop
import settings
import storage
import target_forward
import train_drafter
import train_target

import dspark_jax as ds
from convert.conversion import Options, convert
from convert.geometry import drafter_parameters, target_parameters
from convert.names import place
from dspark_jax.config import DrafterConfig, TargetConfig
from dspark_jax.drafter import DSparkDrafter
from dspark_jax.target import MiniMaxTarget

# float32 against float32 on logits of size 1: sums of at most 64 terms in another order.
TOLERANCE = 1e-4

MICRO = dataclasses.replace(
    settings.SMOKE,
    name="micro",
    vocab_size=320,
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    rotary_dim=8,
    index_dim=8,
    block_size=4,
    top_k_blocks=3,
    dense_size=64,
    draft_size=64,
    target_layer_ids=(0, 1),
    window=9,
    markov_rank=8,
    anchors=6,
    target=dataclasses.replace(settings.SMOKE.target, batch=4, length=32, warmup=4, steps_per_call=8),
    drafter=dataclasses.replace(settings.SMOKE.drafter, batch=4, length=32, warmup=4, steps_per_call=8),
)
TARGET = TargetConfig.from_hf(settings.target_json(MICRO))
GEOMETRY = target_parameters(TARGET)
DRAFTER = DrafterConfig.from_hf(settings.drafter_json(MICRO))
DRAFT_GEOMETRY = drafter_parameters(DRAFTER)


def random_target(seed: int) -> tuple[MiniMaxTarget, storage.Params]:
    target = MiniMaxTarget(
        TARGET, formats=dict.fromkeys(GEOMETRY, "f32"), key=jax.random.key(seed), compute_dtype=jnp.float32
    )
    return target, storage.values(storage.module_params(target, "target"))


def random_drafter(config: DrafterConfig, seed: int) -> tuple[DSparkDrafter, storage.Params]:
    formats = dict.fromkeys(drafter_parameters(config), "f32")
    drafter = DSparkDrafter(config, formats=formats, key=jax.random.key(seed), compute_dtype=jnp.float32)
    return drafter, storage.values(storage.module_params(drafter, "drafter"))


def tokens_of(key: jax.Array, rows: int, length: int) -> jax.Array:
    return jax.random.randint(key, (rows, length), 0, MICRO.vocab_size)


# --- target


@pytest.fixture(scope="module")
def target_case():
    target, params = random_target(3)
    tokens = tokens_of(jax.random.key(4), 2, 32)
    positions = jnp.broadcast_to(jnp.arange(32, dtype=jnp.int32)[None, :], tokens.shape)
    out = jax.jit(lambda m, t, p: m(t, p, m.make_cache(*t.shape), capture=(0, 1)))(target, tokens, positions)
    return params, tokens, out


def target_difference(case, config: TargetConfig = TARGET, **options) -> float:
    params, tokens, out = case
    run = jax.jit(lambda p, t: target_forward.forward(p, t, config, dtype=jnp.float32, capture=(0, 1), **options))
    found = run(params, tokens)
    pairs = [(target_forward.logits(params, found.hidden), out.logits), *zip(found.features, out.features, strict=True)]
    return max(float(jnp.max(jnp.abs(a - b))) for a, b in pairs)


def test_target_forward_is_the_library_s(target_case, monkeypatch):
    assert target_difference(target_case) < TOLERANCE
    # Mutants: every block kept, one block fewer; another factor on the experts; one choice of blocks for all heads.
    assert target_difference(target_case, full_attention=True) > 100 * TOLERANCE
    assert target_difference(target_case, dataclasses.replace(TARGET, top_k_blocks=2)) > 100 * TOLERANCE
    assert target_difference(target_case, dataclasses.replace(TARGET, routed_scaling=1.0)) > 100 * TOLERANCE
    right = target_forward.chosen_blocks
    with monkeypatch.context() as m:
        pooled = lambda s, **o: right(jnp.broadcast_to(jnp.max(s, 1, keepdims=True), s.shape), **o)  # noqa: E731
        m.setattr(target_forward, "chosen_blocks", pooled)
        assert target_difference(target_case) > 100 * TOLERANCE


def test_the_indexer_learns_from_its_own_loss_and_nothing_else_does(target_case):
    params, tokens, _ = target_case

    rows = jnp.pad(tokens, [(0, 0), (0, 1)])

    @jax.jit
    def both(params):
        def losses(params):
            nats, out = train_target.token_loss(params, rows, TARGET, dtype=jnp.float32)
            return jnp.stack([out.index_loss, jnp.mean(nats)])

        _, back = jax.vjp(losses, params)
        return back(jnp.array([1.0, 0.0]))[0], back(jnp.array([0.0, 1.0]))[0]

    for grads, is_index_loss in zip(both(params), (True, False), strict=True):
        for path, grad in grads.items():
            moved = bool(jnp.any(grad != 0))
            if path.endswith("router/bias"):
                assert not moved
            elif "/indexer/" in path:
                assert moved == is_index_loss, path
            elif is_index_loss:
                assert not moved, path


def test_index_loss_by_hand(rng_key):
    length, size, blocks = 12, 4, 3
    scores = np.asarray(jax.random.normal(rng_key, (1, 2, length, blocks)), np.float64)
    mass = np.asarray(jax.random.uniform(jax.random.fold_in(rng_key, 1), scores.shape), np.float64)
    terms = []
    for head in range(2):
        for t in range(size, length):
            past = range(t // size)
            p = mass[0, head, t, past] / mass[0, head, t, past].sum()
            q = np.exp(scores[0, head, t, past]) / np.exp(scores[0, head, t, past]).sum()
            terms.append((p * np.log(p / q)).sum())
    found = target_forward._index_loss(jnp.float32(scores), jnp.float32(mass), size)
    assert float(found) == pytest.approx(np.mean(terms), abs=1e-5)
    wrong = target_forward._index_loss(jnp.float32(scores), jnp.float32(mass[:, ::-1]), size)
    assert float(wrong) != pytest.approx(np.mean(terms), abs=1e-3)


def test_rounding_passes_gradients_through_and_can_be_off(rng_key):
    some = r"target/(embed_tokens/|layers/\d/(attention/k_proj|input_norm|moe/(router|experts)/))"
    geometry = {path: parameter for path, parameter in GEOMETRY.items() if re.match(some, path)}
    params = storage.stack(storage.initial(geometry, rng_key, layers=2))

    @jax.jit
    def results(params):
        grads = jax.grad(lambda p: sum(jnp.sum(v * v) for v in storage.rounded(p, geometry).values()))(params)
        by_path = storage.rounded(storage.unstack(params, geometry), geometry)
        off = storage.rounded(params, geometry, on=jnp.bool_(False))
        return grads, storage.rounded(params, geometry), by_path, off

    grads, rounded, by_path, off = results(params)
    for name, value in params.items():
        np.testing.assert_array_equal(grads[name], 2 * rounded[name])
        np.testing.assert_array_equal(off[name], value)
    assert any(bool(jnp.any(rounded[name] != value)) for name, value in params.items())
    for path, value in storage.unstack(rounded, geometry).items():
        np.testing.assert_array_equal(value, by_path[path])


# --- drafter


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [3, 9, 20])
def test_block_mask_by_brute_force(causal, window):
    config = dataclasses.replace(DRAFTER, window=window, causal=causal)
    anchors, length = np.array([[0, 1, 7, 20, 30]]), 32

    def expected(anchor: int, slot: int, key: int, *, own: bool) -> bool:
        place = anchor + slot
        if own:
            return abs(place - (anchor + key)) <= window - 1 and not (causal and key > slot)
        return key < anchor and abs(place - key) <= window - 1

    def agrees(config: DrafterConfig) -> bool:
        context, block = (np.asarray(m) for m in drafter_forward.block_mask(jnp.asarray(anchors), length, config))
        slots = range(config.block_size)
        return all(
            context[0, i, j, t] == expected(a, j, t, own=False)
            for i, a in enumerate(anchors[0].tolist())
            for j in slots
            for t in range(length)
        ) and all(block[j, i] == expected(0, j, i, own=True) for j in slots for i in slots)

    assert agrees(config)
    assert not agrees(dataclasses.replace(config, causal=not causal))
    assert not agrees(dataclasses.replace(config, window=window - 1))


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_are_the_library_s(causal, rng_key):
    config = dataclasses.replace(DRAFTER, causal=causal)
    drafter, params = random_drafter(config, 5)
    target, target_params = random_target(6)
    tokens = tokens_of(rng_key, 2, 32)
    features = jax.random.normal(rng_key, (2, 32, 2 * MICRO.hidden))
    anchors = jnp.array([[1, 6, 20, 24], [2, 9, 11, 23]], jnp.int32)
    embedding, dtype = target_params["target/embed_tokens/weight"], jnp.float32

    @jax.jit
    def library(drafter, target, start):
        time = jnp.arange(32, dtype=jnp.int32)[None, :]
        cache = drafter.write_context(features, jnp.where(time < start[:, None], time, -1), drafter.make_cache(2))
        anchor = jnp.take_along_axis(tokens, start[:, None], axis=1)[:, 0]
        return drafter.block(anchor, start, cache, embed=target.embed_tokens, head=target.lm_head).hidden

    def found(config: DrafterConfig) -> jax.Array:
        blocks = jax.jit(lambda p: drafter_forward.blocks(p, embedding, features, tokens, anchors, config, dtype=dtype))
        return blocks(params)

    wanted = jnp.stack([library(drafter, target, anchors[:, i]) for i in range(anchors.shape[1])], axis=1)
    assert float(jnp.max(jnp.abs(found(config) - wanted))) < TOLERANCE
    assert float(jnp.max(jnp.abs(found(dataclasses.replace(config, causal=not causal)) - wanted))) > 100 * TOLERANCE
    assert float(jnp.max(jnp.abs(found(dataclasses.replace(config, window=10)) - wanted))) > 10 * TOLERANCE


def test_anchors_are_drawn_from_the_labels_without_replacement(rng_key):
    mask = np.zeros((3, 40), bool)
    mask[0, 10:30], mask[1, :], mask[2, [5, 6, 9, 12, 13]] = True, True, True
    anchors, valid = drafter_forward.choose_anchors(rng_key, jnp.asarray(mask), 8)
    for row in range(3):
        chosen = np.asarray(anchors)[row][np.asarray(valid)[row]].tolist()
        candidates = [a for a in range(39) if mask[row, a] and mask[row, a + 1]]
        assert len(chosen) == min(8, len(candidates)) and chosen == sorted(set(chosen)) and set(chosen) <= {*candidates}
    again = [drafter_forward.choose_anchors(jax.random.key(i), jnp.asarray(mask), 8)[0] for i in range(64)]
    seen = np.bincount(np.stack(again)[:, 1].reshape(-1), minlength=40)[:39]
    # 64 draws of 8 out of 39: each is chosen 13 times on average, deviation 3.2.
    assert seen.min() >= 1 and seen.max() <= 28


def numpy_loss(params, frozen, drafted, hidden, tokens, mask, anchors, valid, *, decay=4.0, shift=0):
    """Section "training" of the DSpark paper, one slot at a time in float64."""
    f = lambda x: np.asarray(x, np.float64)  # noqa: E731
    softmax = lambda z: np.exp(z - z.max()) / np.exp(z - z.max()).sum()  # noqa: E731
    head, w1, w2 = (
        f(frozen["target/lm_head/weight"]),
        f(params["drafter/markov_head/w1/weight"]),
        f(params["drafter/markov_head/w2/weight"]),
    )
    wc, bc = f(params["drafter/confidence_head/weight"])[0], f(params["drafter/confidence_head/bias"])[0]
    sums, weights, survival, blocks = np.zeros(3), 0.0, 0.0, 0
    tokens, mask, drafted, hidden = np.asarray(tokens), np.asarray(mask), f(drafted), f(hidden)
    for b, i in np.argwhere(np.asarray(valid)):
        a, alive, product = int(anchors[b, i]), True, 1.0
        blocks += 1
        for k in range(drafted.shape[2]):
            alive = alive and a + 1 + k < tokens.shape[1] and bool(mask[b, a + 1 + k])
            if not alive:
                break
            e = w1[tokens[b, a + k]]
            q = softmax(head @ drafted[b, i, k] + w2 @ e)
            p = softmax(head @ hidden[b, a + k + shift])
            tv = 0.5 * np.abs(p - q).sum()
            c = 1 / (1 + np.exp(-(wc @ np.concatenate([drafted[b, i, k], e]) + bc)))
            w = np.exp(-k / decay)
            bce = -((1 - tv) * np.log(c) + tv * np.log(1 - c))
            sums += w * np.array([-np.log(q[tokens[b, a + 1 + k]]), 2 * tv, bce])
            weights += w
            product *= 1 - tv
            survival += product
    ce, l1, bce = sums / (weights + 1e-6)
    return {"ce": ce, "l1": l1, "bce": bce, "loss": 0.1 * ce + 0.9 * l1 + bce, "tau": 1 + survival / blocks}


def test_loss_is_the_recipe_s(rng_key):
    _, params = random_drafter(DRAFTER, 8)
    _, frozen = random_target(9)
    frozen = {k: 20 * v if "lm_head" in k else v for k, v in frozen.items()}
    tokens = tokens_of(rng_key, 2, 32)
    mask = jnp.ones((2, 32), bool).at[0, :9].set(False).at[1, 20].set(False)
    anchors, valid = drafter_forward.choose_anchors(rng_key, mask, 6)
    anchors, valid = anchors.at[0, 5].set(29), valid.at[1, 0].set(False)
    features = jax.random.normal(rng_key, (2, 32, 2 * MICRO.hidden))
    hidden = jax.random.normal(jax.random.fold_in(rng_key, 1), (2, 32, MICRO.hidden))

    def found(chunks: int) -> dict[str, jax.Array]:
        inputs = features, hidden, tokens, mask, anchors, valid
        loss = jax.jit(lambda p: drafter_forward.loss(p, frozen, *inputs, DRAFTER, dtype=jnp.float32, chunks=chunks))
        return loss(params)[1]

    drafted = drafter_forward.blocks(
        params, frozen["target/embed_tokens/weight"], features, tokens, anchors, DRAFTER, dtype=jnp.float32
    )
    case = (params, frozen, drafted, hidden, tokens, mask, anchors, valid)
    expected, decay, shift = (numpy_loss(*case, **o) for o in ({}, {"decay": 1e9}, {"shift": 1}))

    def agree(found: dict[str, jax.Array], wanted: dict[str, float]) -> bool:
        return all(float(found[name]) == pytest.approx(value, rel=1e-4) for name, value in wanted.items())

    result = found(1)
    assert agree(result, expected) and agree(found(3), expected)
    # Mutants: slots weighed alike; the target's law of one token later.
    assert not agree(result, decay) and not agree(result, shift)


# --- export


def test_names_are_those_that_the_converter_reads():
    for part, geometry in (("target", GEOMETRY), ("drafter", DRAFT_GEOMETRY)):
        for path in geometry:
            name = storage.published_name(path).format(expert=1)
            suffix = path.rpartition("/")[2]
            if path.endswith("router/bias"):
                continue
            placed = place(f"{name}.{suffix}", part)
            assert placed is not None and f"{placed.module}/{placed.suffix}" == path
            assert (placed.expert == 1) == ("/experts/" in path)
    with pytest.raises(ValueError, match="no name"):
        storage.published_name("target/other/weight")


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
    names = storage.published(weights)
    assert index["weight_map"].keys() == names.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in names.values())
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


def test_a_time_limit_stops_and_saves(tmp_path, capsys):
    state = {"step": jnp.int32(0), "planned": jnp.int32(0)}

    def run(state, planned):
        return {**state, "step": state["step"] + 8}, {"loss": jnp.float32(1.0)}

    job = loop.Job(
        name="x",
        file=tmp_path / "x.npz",
        options=MICRO.target,
        run=run,
        evaluate=lambda state: {},
        epoch_tokens=1000,
        steps=80,
    )
    log = loop.Log(tmp_path / "log.jsonl")
    stopped = loop.train(job, state, log, stop_at=time.monotonic())
    assert int(stopped["step"]) == 0 and job.file.exists()
    assert int(loop.train(job, state, log)["step"]) == 80
    failing = dataclasses.replace(job, file=tmp_path / "y.npz", run=lambda s, _: (s, {"loss": jnp.float32(math.nan)}))
    with pytest.raises(FloatingPointError, match="loss"):
        loop.train(failing, state, log)
    assert "time limit" in capsys.readouterr().out


def test_rate_warms_up_and_falls_along_a_cosine():
    options = dataclasses.replace(MICRO.target, warmup=10, peak_rate=2.0, final_rate=0.1)
    optimizer = loop.Optimizer(options, storage.decays)
    rates = [float(optimizer.rate(jnp.int32(s), jnp.int32(110))) for s in (0, 9, 10, 60, 110, 500)]
    assert rates == pytest.approx([0.2, 2.0, 2.0, 1.1, 0.2, 0.2], rel=1e-5)
    assert not storage.decays("target/layers/*/input_norm/weight") and storage.decays("target/lm_head/weight")
    assert not storage.decays("target/layers/*/moe/router/bias")


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
