"""examples/train_tiny: what it trains is the model that the library runs, and what it exports is what it trained."""

import dataclasses
import re

import drafter_forward
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import storage
import target_forward
import train_target
from train_tiny_cases import (
    DRAFTER,
    GEOMETRY,
    MICRO,
    TARGET,
    TOLERANCE,
    random_drafter,
    random_target,
    tokens_of,
)

from dspark_jax.config import DrafterConfig, TargetConfig

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
