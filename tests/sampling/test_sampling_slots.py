"""`draft` with a `draw_slot`, which does a slot's bias, law and draw in one go, against `draft` alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafter_cases import MINIMAX, hf_config

from dspark_jax import sampling
from dspark_jax.config import DrafterConfig
from dspark_jax.heads import MARKOV_HEADS, MarkovHead
from dspark_jax.layers import Format, Scope
from dspark_jax.sampling import DrawnSlot

B, K, V, H = 6, 3, 203, 12
# float32 sums of V exponentials in another order, times temperatures down to 0.3.
LOG_PROB_TOLERANCE = 5e-6
TEMPERATURE = np.array([1.0, 0.0, 0.7, 1.5, 0.3, 0.0], np.float32)


CONFIG = dataclasses.replace(
    DrafterConfig.from_hf(hf_config(MINIMAX)), vocab_size=V, hidden_size=H, mask_token_id=7, markov_rank=16
)


def head_of(kind: str, table: Format = "f32") -> MarkovHead:
    formats: dict[str, Format] = {"head/w1/weight": table, "head/w2/weight": table}
    config = dataclasses.replace(CONFIG, markov_type=kind)
    return MARKOV_HEADS[kind](Scope("head", formats, jax.random.key(5)), config)


def program(head: MarkovHead, method: str = "ancestral", draw=None):
    @jax.jit
    def drafts(base, hidden, anchor):
        return sampling.draft(
            base, hidden, anchor, markov=head, temperature=jnp.asarray(TEMPERATURE),
            keys=sampling.request_keys(range(B)), method=method, allowed=jnp.arange(V) != 7, draw_slot=draw,
        )  # fmt: skip

    return drafts


def inputs(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    base, hidden = ((2 * rng.normal(size=(B, K, n))).astype(np.float32) for n in (V, H))
    return base, hidden, rng.integers(0, V, B).astype(np.int32)


def fused(head: MarkovHead, change=lambda drawn: drawn):
    def draw(logits, slot, *rest):
        return change(functools.partial(head.draw_slot, implementation="xla")(logits, slot, *rest))

    return draw


def differs(plain, other) -> bool:
    if not np.array_equal(plain.tokens, other.tokens) or not np.array_equal(
        plain.prev_embeddings, other.prev_embeddings
    ):
        return True
    if plain.log_q is None:
        return other.log_q is not None
    a, b = np.asarray(plain.log_q), np.asarray(other.log_q)
    finite = np.isfinite(a)
    return not (
        np.array_equal(finite, np.isfinite(b))
        and np.allclose(a[finite], b[finite], atol=LOG_PROB_TOLERANCE, rtol=LOG_PROB_TOLERANCE)
        and np.array_equal(a[~finite], b[~finite])
    )


@pytest.mark.parametrize("kind", MARKOV_HEADS)
@pytest.mark.parametrize("method", ["ancestral", "greedy"])
def test_the_drafts_are_those_of_slots_drawn_step_by_step(kind: str, method: str) -> None:
    head = head_of(kind)
    plain, other = program(head, method), program(head, method, fused(head))
    for seed in range(3):
        assert not differs(plain(*inputs(seed)), other(*inputs(seed)))


def test_rows_that_are_empty() -> None:
    head = head_of("vanilla")
    base, *rest = inputs()
    base[0, 1], base[1, 2], base[2] = -np.inf, np.nan, -np.inf
    plain = program(head)(base, *rest)
    assert (np.asarray(plain.tokens) == -1).sum() == 2 + K
    assert not differs(plain, program(head, draw=fused(head))(base, *rest))


MUTANTS = {
    "the mass of half the tokens": lambda d: d._replace(log_mass=d.log_mass - jnp.float32(np.log(2))),
    "a peak that is off": lambda d: d._replace(peak=d.peak + jnp.float32(0.01)),
    "another token": lambda d: d._replace(token=(d.token + 1) % V),
    "logits without their bias": None,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_comparison_sees_a_wrong_slot(name: str) -> None:
    head = head_of("vanilla")
    change = MUTANTS[name]

    def forgets(logits, *rest) -> DrawnSlot:
        return fused(head)(logits, *rest)._replace(logits=logits)

    wrong = program(head, draw=forgets if change is None else fused(head, change))
    assert differs(program(head)(*inputs()), wrong(*inputs()))


def test_other_keys_than_threefry_are_refused() -> None:
    head = head_of("vanilla")
    with pytest.raises(NotImplementedError, match="threefry"):
        sampling.draft(
            jnp.zeros((1, K, V)), jnp.zeros((1, K, H)), jnp.zeros(1, jnp.int32), markov=head, temperature=1.0,
            keys=jax.random.split(jax.random.key(0, impl="rbg"), 1), method="ancestral", draw_slot=fused(head),
        )  # fmt: skip


def test_tables_in_another_dtype_are_refused() -> None:
    head = head_of("vanilla", "bf16")
    with pytest.raises(NotImplementedError, match="a table of float32"):
        program(head, draw=fused(head))(*inputs())


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the kernel may serve there")
def test_without_a_gpu_the_named_kernel_says_so() -> None:
    head = head_of("vanilla")
    with pytest.raises(NotImplementedError, match=r"markov_draw\(implementation='triton'\)"):
        program(head, draw=functools.partial(head.draw_slot, implementation="triton"))(*inputs())
