"""A wide random model in the release's formats through each kernel, a step at a time."""

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor

import golden
import greedy_cases as greedy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_kernels_greedy import CHOICES, on_gpu

import dspark_jax as ds

# Few layers, as compiling them takes all the time: a dense one, and two with experts and a selection of blocks.
WIDE = dataclasses.replace(
    ds.TargetConfig.from_hf(golden.hf_config("m31-flash-tiny")),
    hidden_size=1024,
    num_layers=3,
    moe_layers=(False, True, True),
    sparse_layers=(False, True, True),
    top_k_blocks=2,
    num_heads=32,
    head_dim=64,
    rotary_dim=32,
    index_head_dim=128,
    dense_mlp_size=1024,
    expert_mlp_size=1024,
    shared_mlp_size=1024,
)
ROWS = (1, 8, 40)
TOKENS, SLOTS = 3 * greedy.STEP, 256
# Given the same experts and blocks, two ways to round differ by chance alone, and thousands of logits average it out.
# Kernels keep more in float32 than XLA does, so they are rather nearer.
MARGIN = 1.25
# Near ties that fall otherwise: as many as with XLA, give or take what chance does to a handful.
ROWS_APART = 0.2  # of a token's error, as products of 1 and of 40 rows may be summed in another order
FLIPS_MARGIN, FLIPS_BY_CHANCE = 3, 6


@functools.cache
def weights() -> ds.MiniMaxTarget:
    """Random weights at widths that every kernel takes: experts NVFP4, other linears MXFP8, as in the release."""
    plain = nnx.eval_shape(lambda: ds.MiniMaxTarget(WIDE))
    paths = ["/".join(map(str, ("target", *path))) for path, _ in nnx.to_flat_state(nnx.state(plain))]
    linears = [path for path in paths if path.endswith("_proj/weight")]
    kinds = {path: "nvfp4/divide" if "/experts/" in path else "mxfp8" for path in linears}
    return jax.jit(lambda: ds.MiniMaxTarget(WIDE, formats=kinds, key=jax.random.key(0)))()


def wide(dtype, kernels: ds.Kernels) -> ds.MiniMaxTarget:
    m = golden.copy(weights(), compute_dtype=jnp.dtype(dtype))
    for _, node in nnx.iter_graph(m):
        if hasattr(node, "kernels"):
            node.kernels = kernels
    return m


@functools.cache
def feed() -> greedy.Feed:
    """Tokens of `ROWS[-1]` rows and what float32 makes of them."""
    tokens = jax.random.randint(jax.random.key(1), (ROWS[-1], TOKENS), 0, WIDE.vocab_size, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(TOKENS, dtype=jnp.int32)[None], tokens.shape)
    exact = greedy.in_one_piece(wide(jnp.float32, ds.Kernels.xla()), tokens, positions)
    return greedy.Feed(tokens, positions, SLOTS, exact)


@dataclasses.dataclass(frozen=True)
class Found:
    """Mean |logit difference| from float32 for each token [B, T], with its choices and with a run's own; flips [B, T].

    Of the own choices only tokens count that no flip is at or before: what comes behind one is moved by it.
    """

    given: np.ndarray
    own: np.ndarray
    flips: np.ndarray

    @property
    def untouched(self) -> np.ndarray:
        return np.cumsum(self.flips, axis=1) == 0

    def rows(self, count: int) -> "Found":
        return Found(self.given[:count], self.own[:count], self.flips[:count])


def find(part: greedy.Feed, m: ds.MiniMaxTarget, program) -> Found:
    exact = part.given
    given, own = (part.run(m, program, pin=pin) for pin in (True, False))
    assert not greedy.count_flips(given.choices, exact.choices).any()
    errors = (np.abs(run.logits - exact.logits).mean(-1) for run in (given, own))
    return Found(*errors, greedy.count_flips(own.choices, exact.choices))


@functools.cache
def noise() -> Found:
    """XLA in bfloat16."""
    m = wide(jnp.bfloat16, ds.Kernels.xla())
    return find(feed(), m, feed().lower(m).compile())


def check(what: str, found: Found, xla: Found) -> None:
    """`found` is as near to float32 as `xla`, the same rows through XLA in bfloat16."""
    error, usual, own = found.given.mean(), xla.given.mean(), found.own[found.untouched]
    flips, flips_of_xla = int(found.flips.sum()), int(xla.flips.sum())
    print(
        f"{what}: mean difference {error:.4f}, of XLA {usual:.4f}; with its own experts and blocks "
        f"{found.own.mean():.4f}, {own.mean():.4f} before a flip; {flips} flips, of XLA {flips_of_xla}"
    )
    assert error < MARGIN * usual, what
    assert own.mean() < MARGIN * usual, what
    assert flips < FLIPS_MARGIN * flips_of_xla + FLIPS_BY_CHANCE, what


@on_gpu
@pytest.mark.parametrize("choice", CHOICES)
def test_wide_model(choice: str) -> None:
    """A step's logits are as near to float32 as those of XLA in bfloat16, experts and blocks being the same."""
    m = wide(jnp.bfloat16, CHOICES[choice])
    parts = [feed().rows(count) for count in ROWS]
    lowered = [part.lower(m) for part in parts]
    with ThreadPoolExecutor() as pool:
        programs = list(pool.map(jax.stages.Lowered.compile, lowered))
    for part, program in zip(parts, programs, strict=True):
        count = len(part.tokens)
        check(f"{choice}, {count} rows", find(part, m, program), noise().rows(count))


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["nothing", "scales", "an expert"])
def test_the_comparison_of_the_wide_model(wrong: str) -> None:
    m, part = wide(jnp.bfloat16, ds.Kernels.xla()), feed().rows(1)
    if wrong == "scales":  # of the first block of inputs of one layer's experts, where those of the second are taken
        parameter = m.layers[-1].moe.experts.down_proj.weight
        weight = parameter.get_value()
        parameter.set_value(dataclasses.replace(weight, scale=weight.scale.at[:, :, 0].set(weight.scale[:, :, 1])))
    if wrong == "an expert":  # of one token in one layer: what one flip does
        *before, (blocks, experts) = part.given.choices
        other = np.setdiff1d(np.arange(WIDE.num_experts), experts[0, -1])[0]
        given = (*before, (blocks, experts.at[0, -1, -1].set(other)))
        part = dataclasses.replace(part, given=greedy.Run(part.given.logits, given))
    found, usual = find(part, m, part.lower(m).compile()), noise().rows(1)
    if wrong == "nothing":
        check(wrong, found, usual)
        np.testing.assert_allclose(found.given, usual.given, rtol=ROWS_APART)
        return
    with pytest.raises(AssertionError, match=wrong):
        check(wrong, found, usual)
