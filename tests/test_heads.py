"""Markov and confidence heads against golden chains, and the wrong variants these must catch."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafter_cases import DEEPSPEC, MINIMAX, drafter_weights, fill, hf_config, load_npz

from dspark_jax import heads as heads_module
from dspark_jax import sampling
from dspark_jax.config import ConfigError, DrafterConfig
from dspark_jax.heads import ConfidenceHead, GatedMarkov, NoMarkov, RnnMarkov, VanillaMarkov, check_head_tensors
from dspark_jax.layers import Scope

GOLDEN = load_npz(MINIMAX / "heads.npz")
TYPES = ("none", "vanilla", "gated", "rnn")
# Absolute, float32: logits are of the order of 5 and the stored values are rounded float64 (5e-7).
LOGITS, CONFIDENCE = 2e-5, 2e-5
SLOTS = GOLDEN["forced"].shape[1]


def config_of(markov_type: str, *, with_markov: bool = True) -> DrafterConfig:
    config = DrafterConfig.from_hf(hf_config(MINIMAX))
    kind = None if markov_type == "none" else markov_type
    return dataclasses.replace(
        config,
        vocab_size=GOLDEN["base_logits"].shape[-1],
        hidden_size=GOLDEN["hidden"].shape[-1],
        mask_token_id=60,
        markov_type=kind,
        markov_rank=8 if kind else 0,
        confidence_with_markov=bool(kind) and with_markov,
    )


def golden_weights(*names: str) -> dict[str, jax.Array]:
    """Stored weights, in bfloat16 (which they are exact in), by parameter path."""
    found = {}
    for key, value in GOLDEN.items():
        path = key.removeprefix("weights/").replace("markov_w", "w").replace(".", "/")
        if key.startswith("weights/") and path.split("/")[0] in names:
            found[path] = jnp.asarray(value, jnp.bfloat16)
    return found


def markov_of(markov_type: str) -> Any:
    config, scope = config_of(markov_type), Scope("markov_head")
    extra = {"none": (), "vanilla": ("w1", "w2"), "gated": ("w1", "w2", "gate_proj"), "rnn": ("w1", "w2", "joint_proj")}
    head = heads_module.make_markov_head(scope, config)
    fill(head, golden_weights(*extra[markov_type]))
    return head


def confidence_of(name: str = "confidence") -> ConfidenceHead:
    head = ConfidenceHead(Scope("confidence_head"), config_of("vanilla", with_markov=name == "confidence"))
    fill(head, {path.removeprefix(f"{name}/proj/"): value for path, value in golden_weights(name).items()})
    return head


def chain(
    markov: Callable[..., Any],
    forced: np.ndarray | None = None,
    *,
    prev_of: Callable[[int, list[jax.Array]], jax.Array] | None = None,
) -> tuple[np.ndarray, np.ndarray, jax.Array]:
    """Corrected logits [B, K, V], drafts [B, K] and embeddings [B, K, r], slot by slot.

    `prev_of(slot, drafts)` is the token that a slot sees: the anchor, then each slot's predecessor.
    """
    anchor = jnp.asarray(GOLDEN["anchor"])
    prev_of = prev_of or (lambda slot, drafts: drafts[slot - 1] if slot else anchor)
    carry, logits, drafts, embeddings = None, [], [], []
    for slot in range(SLOTS):
        hidden = jnp.asarray(GOLDEN["hidden"][:, slot])
        bias, embedding, carry = markov(prev_of(slot, drafts), hidden, carry)
        logits.append(jnp.asarray(GOLDEN["base_logits"][:, slot]) + bias)
        chosen = jnp.argmax(logits[-1], axis=-1).astype(jnp.int32)
        drafts.append(chosen if forced is None else jnp.asarray(forced[:, slot]))
        embeddings.append(embedding)
    return np.stack(logits, axis=1), np.stack(drafts, axis=1), jnp.stack(embeddings, axis=1)


def off(actual: Any, name: str) -> float:
    return float(np.abs(np.asarray(actual) - GOLDEN[name]).max())


@pytest.mark.parametrize("markov_type", TYPES)
@pytest.mark.parametrize("mode", ["greedy", "forced"])
def test_golden_chain(mode: str, markov_type: str) -> None:
    logits, drafts, embeddings = chain(markov_of(markov_type), GOLDEN["forced"] if mode == "forced" else None)
    assert off(logits, f"{markov_type}/{mode}/logits") <= LOGITS
    if mode == "greedy":
        np.testing.assert_array_equal(drafts, GOLDEN[f"{markov_type}/greedy/drafts"])
    if markov_type != "none":
        confidence = confidence_of()(jnp.asarray(GOLDEN["hidden"]), embeddings)
        assert confidence.dtype == jnp.float32
        assert off(confidence, f"{markov_type}/{mode}/confidence_logits") <= CONFIDENCE


def test_confidence_without_markov() -> None:
    head, hidden = confidence_of("confidence_plain"), jnp.asarray(GOLDEN["hidden"])
    assert off(head(hidden), "confidence_plain_logits") <= CONFIDENCE
    # `draft` returns embeddings whatever the confidence head reads.
    np.testing.assert_array_equal(head(hidden, jnp.ones((6, 7, 8))), head(hidden))
    with pytest.raises(ValueError, match=r"pass Draft\.prev_embeddings"):
        confidence_of()(hidden)


@pytest.mark.parametrize("markov_type", TYPES)
def test_heads_drive_the_sampler(markov_type: str) -> None:
    markov = markov_of(markov_type)
    drafts = jax.jit(
        lambda base, hidden, anchor: sampling.draft(
            base,
            hidden,
            anchor,
            markov=markov,
            temperature=1.0,
            keys=sampling.request_keys(range(6)),
            method="greedy",
        )
    )(jnp.asarray(GOLDEN["base_logits"]), jnp.asarray(GOLDEN["hidden"]), jnp.asarray(GOLDEN["anchor"]))
    np.testing.assert_array_equal(drafts.tokens, GOLDEN[f"{markov_type}/greedy/drafts"])
    if markov_type != "none":
        confidence = confidence_of()(jnp.asarray(GOLDEN["hidden"]), drafts.prev_embeddings)
        assert off(confidence, f"{markov_type}/greedy/confidence_logits") <= CONFIDENCE


def test_chain_equals_an_argmax_loop_over_a_dense_bias_table() -> None:
    w1, w2 = (GOLDEN[f"weights/markov_w{i}.weight"].astype(np.float64) for i in (1, 2))
    table = w1 @ w2.T
    prev, expected = GOLDEN["anchor"], []
    for slot in range(SLOTS):
        prev = np.argmax(GOLDEN["base_logits"][:, slot] + table[prev], axis=-1)
        expected.append(prev)
    np.testing.assert_array_equal(chain(markov_of("vanilla"))[1], np.stack(expected, axis=1))


@pytest.mark.parametrize("markov_type", TYPES)
def test_a_missing_carry_starts_a_block(markov_type: str) -> None:
    markov = markov_of(markov_type)
    hidden, anchor = jnp.asarray(GOLDEN["hidden"][:, 0]), jnp.asarray(GOLDEN["anchor"])
    explicit, implicit = markov(anchor, hidden, markov.init_carry(6)), markov(anchor, hidden, None)
    jax.tree.map(np.testing.assert_array_equal, explicit, implicit)
    # The same structure comes out as went in, so the chain can also be a scan.
    assert jax.tree.structure(explicit[2]) == jax.tree.structure(markov.init_carry(6))


@pytest.mark.parametrize("markov_type", ["vanilla", "gated", "rnn"])
def test_bfloat16_hidden_gives_float32_bias(markov_type: str) -> None:
    markov = markov_of(markov_type)
    hidden = jnp.asarray(GOLDEN["hidden"][:, 0], jnp.bfloat16)
    exact, _, _ = markov(jnp.asarray(GOLDEN["anchor"]), hidden.astype(jnp.float32), None)
    bias, embedding, _ = markov(jnp.asarray(GOLDEN["anchor"]), hidden, None)
    assert bias.dtype == jnp.float32 and embedding.dtype == jnp.bfloat16
    # One rounding of what W2 multiplies, 2^-9 relative; none at all where that is a stored embedding.
    largest = 0 if markov_type == "vanilla" else 2**-8 * float(jnp.abs(exact).max()) * 2
    assert float(jnp.abs(bias - exact).max()) <= max(largest, 1e-6)


# --- mutants


def _swapped(head: Any) -> Any:
    head.w1, head.w2 = head.w2, head.w1
    return head


def _latent(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """The head with another formula in front of W2."""

    def change(head: Any) -> Any:
        def call(prev: Any, hidden: Any, carry: Any) -> Any:
            embedding = head.w1.lookup(prev, hidden.dtype)
            carry = head.init_carry(prev.shape[0]) if carry is None else carry
            latent, carry = function(head, embedding, hidden, carry)
            return head.w2.scores(latent), embedding, carry

        return call

    return change


def _gate_input_reversed(head, e, h, s):
    return jax.nn.sigmoid(head.gate_proj(jnp.concatenate([e, h], axis=-1))) * e, s


def _tanh_gate(head, e, h, s):
    return jnp.tanh(head.gate_proj(jnp.concatenate([h, e], axis=-1))) * e, s


def _rnn(order: str = "seh", chunks: tuple[int, int, int] = (0, 1, 2), carried: bool = True, output: str = "output"):
    def wrong(head, e, h, s):
        inputs = {"s": s, "e": e, "h": h}
        parts = jnp.split(head.joint_proj(jnp.concatenate([inputs[name] for name in order], axis=-1)), 3, axis=-1)
        gate, candidate, out = (parts[i] for i in chunks)
        keep = jax.nn.sigmoid(gate)
        state = keep * s + (1 - keep) * jnp.tanh(candidate)
        return jnp.tanh(out) if output == "output" else state, state if carried else s

    return wrong


def _keep_the_other_side(head, e, h, s):
    gate, candidate, out = jnp.split(head.joint_proj(jnp.concatenate([s, e, h], axis=-1)), 3, axis=-1)
    keep = jax.nn.sigmoid(gate)
    return jnp.tanh(out), (1 - keep) * s + keep * jnp.tanh(candidate)


MARKOV_MUTANTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "W1 and W2 swapped": ("vanilla", _swapped),
    "gate input [e; h]": ("gated", _latent(_gate_input_reversed)),
    "tanh gate": ("gated", _latent(_tanh_gate)),
    "gated read as vanilla": ("gated", _latent(lambda head, e, h, s: (e, s))),
    "state not carried": ("rnn", _latent(_rnn(carried=False))),
    "chunks read as output, gate, candidate": ("rnn", _latent(_rnn(chunks=(1, 2, 0)))),
    "joint input [h; e; s]": ("rnn", _latent(_rnn(order="hes"))),
    "joint input [e; s; h]": ("rnn", _latent(_rnn(order="esh"))),
    "bias from the new state": ("rnn", _latent(_rnn(output="state"))),
    "sigmoid on the candidate side": ("rnn", _latent(_keep_the_other_side)),
}


@pytest.mark.parametrize("name", MARKOV_MUTANTS)
def test_goldens_catch_a_wrong_markov_head(name: str) -> None:
    markov_type, change = MARKOV_MUTANTS[name]
    logits, _, _ = chain(change(markov_of(markov_type)), GOLDEN["forced"])
    assert off(logits, f"{markov_type}/forced/logits") > 100 * LOGITS
    # Its counterpart, made the same way, is right: the difference is the formula and nothing else.
    if markov_type == "rnn":
        right, _, _ = chain(_latent(_rnn())(markov_of("rnn")), GOLDEN["forced"])
        assert off(right, "rnn/forced/logits") <= LOGITS


def test_goldens_catch_a_wrong_previous_token() -> None:
    anchor, vanilla = jnp.asarray(GOLDEN["anchor"]), markov_of("vanilla")
    mask = jnp.full_like(anchor, 60)
    variants: dict[str, Callable[[int, list[jax.Array]], jax.Array]] = {
        "always the anchor": lambda slot, drafts: anchor,
        "first prev is the mask token": lambda slot, drafts: drafts[slot - 1] if slot else mask,
        "two tokens back": lambda slot, drafts: drafts[slot - 2] if slot > 1 else anchor,
    }
    for name, prev_of in variants.items():
        logits, _, embeddings = chain(vanilla, GOLDEN["forced"], prev_of=prev_of)
        assert off(logits, "vanilla/forced/logits") > 100 * LOGITS, name
        confidence = confidence_of()(jnp.asarray(GOLDEN["hidden"]), embeddings)
        assert off(confidence, "vanilla/forced/confidence_logits") > 100 * CONFIDENCE, name


def test_goldens_catch_a_wrong_confidence_input() -> None:
    head, hidden = confidence_of(), jnp.asarray(GOLDEN["hidden"])
    _, _, embeddings = chain(markov_of("vanilla"), GOLDEN["forced"])
    own = jnp.concatenate([embeddings[:, 1:], embeddings[:, :1]], axis=1)
    reversed_input = super(ConfidenceHead, head).__call__(jnp.concatenate([embeddings, hidden], axis=-1))[..., 0]
    for name, logits in {"token of the same slot": head(hidden, own), "embedding first": reversed_input}.items():
        assert off(logits, "vanilla/forced/confidence_logits") > 100 * CONFIDENCE, name


# --- a checkpoint whose heads are not those of its config


def shapes_of(folder: Any) -> dict[str, tuple[int, ...]]:
    return {f"drafter/{path}": weight.shape for path, weight in drafter_weights(folder).items()}


@pytest.mark.parametrize("folder", [MINIMAX, *(DEEPSPEC / head for head in ("vanilla", "gated", "rnn"))])
def test_checkpoints_hold_the_heads_of_their_config(folder: Any) -> None:
    check_head_tensors(DrafterConfig.from_hf(hf_config(folder)), shapes_of(folder))


@pytest.mark.parametrize(
    ("head", "overrides", "message"),
    [
        (
            "vanilla",
            {"markov_rank": 0, "confidence_head_with_markov": False},
            "ask for no Markov head, but the checkpoint",
        ),
        ("vanilla", {"markov_head_type": "gated"}, "'gated', but the checkpoint holds .* 'vanilla'"),
        ("gated", {"markov_head_type": "vanilla"}, "'vanilla', but the checkpoint holds .* 'gated'"),
        ("rnn", {"markov_head_type": "gated"}, "'gated', but the checkpoint holds .* 'rnn'"),
        ("rnn", {"markov_rank": 16}, r"markov_rank is 16, but drafter/markov_head/w1/weight has shape \(192, 8\)"),
        ("rnn", {"enable_confidence_head": False}, "enable_confidence_head is False, but the checkpoint holds one"),
        (
            "rnn",
            {"confidence_head_with_markov": False},
            r"confidence_head/weight has shape \(1, 56\) .* asks for \(1, 48\)",
        ),
    ],
)
def test_a_config_that_does_not_match_the_tensors(head: str, overrides: dict[str, Any], message: str) -> None:
    config = DrafterConfig.from_hf(hf_config(DEEPSPEC / head, **overrides))
    with pytest.raises(ConfigError, match=message):
        check_head_tensors(config, shapes_of(DEEPSPEC / head))


def test_tensors_that_are_missing_or_unknown() -> None:
    config, shapes = DrafterConfig.from_hf(hf_config(DEEPSPEC / "gated")), shapes_of(DEEPSPEC / "gated")
    without_heads = {path: shape for path, shape in shapes.items() if "_head/" not in path}
    with pytest.raises(ConfigError, match="holds the tensors of no Markov head"):
        check_head_tensors(config, without_heads)
    without_confidence = {path: shape for path, shape in shapes.items() if "confidence" not in path}
    with pytest.raises(ConfigError, match="enable_confidence_head is True, but the checkpoint has none"):
        check_head_tensors(config, without_confidence)
    for path in ("drafter/markov_head/gate_proj/bias", "drafter/markov_head/w2/weight"):
        with pytest.raises(ConfigError, match=rf"{path} has shape none \(it is missing\)"):
            check_head_tensors(config, {p: shape for p, shape in shapes.items() if p != path})
    with pytest.raises(ConfigError, match="the config asks for no such tensor"):
        check_head_tensors(config, shapes | {"drafter/confidence_head/scale": (1,)})


def test_heads_by_type() -> None:
    kinds = {"none": NoMarkov, "vanilla": VanillaMarkov, "gated": GatedMarkov, "rnn": RnnMarkov}
    for markov_type, kind in kinds.items():
        assert type(markov_of(markov_type)) is kind
