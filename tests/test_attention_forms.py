"""Attention through `pallas_kernels` gives what the loops over the cache give, for steps and for chunks of prompts, and
the choice between them."""

import functools
import types

import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_attention import TOP_K, attend_numpy
from test_attention import B as BLOCK
from test_target import CAPACITY, ROWS, assert_golden, in_chunks, prompts

from dspark_jax import attention, attention_forms
from dspark_jax.attention_forms import CHUNK_FORMS, LOOPS, STEP_TOKENS
from dspark_jax.kernels import Kernels, first_that_serves

SLOTS = 128
STEP, CHUNK = 4, 37  # 37: no group of queries that a kernel may cut has a divisor of it
# First position and number of tokens of each row; a row may be padding alone, and may go past the end of the cache.
CASES = {
    "step": (STEP, [(40, STEP), (7, 2), (0, 0), (15, 1), (SLOTS - 3, STEP)]),
    "first chunk": (CHUNK, [(0, CHUNK), (0, 20), (0, 1), (0, 0)]),
    "later chunks": (CHUNK, [(CHUNK, CHUNK), (40, 11), (SLOTS - CHUNK, CHUNK), (SLOTS - 9, CHUNK), (64, 1)]),
}
TOLERANCE = 2e-6  # float32, sums of up to 128 terms in another order


def inputs(name: str, sparse: bool, slots: int = SLOTS) -> tuple:
    tokens, rows = CASES[name]
    keys = jax.random.split(jax.random.key(3), 4)
    _, positions = golden.padded([np.zeros(n) for _, n in rows], tokens, [start for start, _ in rows])
    q = jax.random.normal(keys[0], (len(rows), tokens, 8, 16))
    k, v = (jax.random.normal(key, (len(rows), slots, 2, 16)) for key in keys[1:3])
    scores = jax.random.normal(keys[3], (len(rows), tokens, 2, slots // BLOCK))
    blocks = attention.select_blocks(scores, positions, block_size=BLOCK, top_k=TOP_K)
    return q, k, v, positions, blocks if sparse else None


def largest_difference(actual, expected, positions) -> float:
    assert np.isfinite(actual).all()
    return float(np.abs(np.where(np.asarray(positions)[..., None, None] < 0, 0, actual - expected)).max())


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_the_loops(name: str, sparse: bool) -> None:
    q, k, v, positions, blocks = inputs(name, sparse)
    kernels = jax.jit(functools.partial(attention_forms.attend_with_kernels, block_size=BLOCK, implementation="xla"))
    loops = jax.jit(functools.partial(attention.attend, block_size=BLOCK, chunk=16))
    expected = attend_numpy(*map(np.asarray, (q, k, v, positions)), None if blocks is None else np.asarray(blocks))
    actual = kernels(q, k, v, positions, blocks=blocks)
    assert largest_difference(actual, expected, positions) <= TOLERANCE
    assert largest_difference(loops(q, k, v, positions, blocks=blocks), expected, positions) <= TOLERANCE
    mutants = [
        kernels(q, k, v, positions + 1, blocks=blocks),
        kernels(q, k, v, jnp.where(positions < 0, -1, positions - positions[:, :1]), blocks=blocks)
        if name != "first chunk"
        else kernels(q[:, ::-1], k, v, positions, blocks=blocks),
        kernels(q, k[::-1], v[::-1], positions, blocks=blocks),
    ]
    if blocks is not None:
        mutants += [
            kernels(q, k, v, positions, blocks=blocks[:, :, ::-1]),
            kernels(q, k, v, positions, blocks=jnp.roll(blocks, 1, axis=1)),
            kernels(q, k, v, positions, blocks=None),
        ]
    assert min(largest_difference(m, expected, positions) for m in mutants) > 1000 * TOLERANCE


@pytest.mark.parametrize("slots, whole", [(TOP_K * BLOCK, True), ((TOP_K + 1) * BLOCK, False)])
def test_up_to_top_k_blocks_a_selection_is_the_whole_cache(slots: int, whole: bool) -> None:
    """Own block, padding and queries past the end of the cache included; one block more, and it is not."""
    size = dict(block_size=BLOCK, top_k=TOP_K)
    assert attention_forms.selects_everything(tokens=CHUNK, slots=slots, **size) == whole
    assert not attention_forms.selects_everything(tokens=STEP_TOKENS, slots=slots, **size), "steps are as measured"
    q, k, v, positions, blocks = inputs("first chunk", True, slots)
    expected = attend_numpy(*map(np.asarray, (q, k, v, positions, blocks)))
    dense = attention_forms.attend_with_kernels(q, k, v, positions, block_size=BLOCK, implementation="xla")
    assert (largest_difference(dense, expected, positions) <= TOLERANCE) == whole


def through(monkeypatch, form: attention_forms.Form, name: str, size: int | None = None, capacity: int = CAPACITY):
    """The golden prompts through a form of every layer, in one piece or in chunks -> output, forms' work in order."""
    m, asked = golden.model(name), []

    def choose(kernels, work, tokens, *arrays):
        asked.append(work)
        return (form,)

    monkeypatch.setattr(attention_forms, "choose", choose)
    # A function of its own: programs that were traced with another choice are not found again.
    forward = jax.jit(lambda m, *args: m(*args, capture=tuple(range(m.config.num_layers))))
    rows = [row[:capacity] for row in prompts(name)]
    cache = m.make_cache(len(ROWS), capacity)
    out = in_chunks(m, rows, size or capacity, cache, lambda m, *args: forward(m, *args))
    return out, asked


@pytest.mark.parametrize("name, size", [("m31-flash-tiny", None), ("m3-mxfp8-tiny", CHUNK)])
def test_golden_prompts_through_the_kernels(monkeypatch, name: str, size: int | None) -> None:
    out, asked = through(monkeypatch, None, name, size)
    assert_golden(out, name)
    sparse = sum(golden.model(name).config.sparse_layers)
    assert asked.count("selection") == asked.count("sparse") == sparse
    assert asked.count("dense") == golden.model(name).config.num_layers - sparse


def test_short_golden_prompts_are_attended_to_as_a_whole(monkeypatch) -> None:
    name = "m31-flash-tiny"
    c = golden.model(name).config
    length = c.top_k_blocks * c.block_size
    out, asked = through(monkeypatch, None, name, capacity=length)
    assert "sparse" not in asked and asked.count("dense") == c.num_layers
    differences = [
        np.abs(out.logits[b, :length] - golden.expected(name)[f"p{i}_logits"][:length]).max()
        for b, i in enumerate(ROWS)
        if i is not None and len(golden.prompt(name, i)) >= length
    ]
    assert differences and max(differences) <= golden.TOLERANCE["logits"]


FASTEST = dict(selection="triton", sparse="triton", dense="mosaic")  # as measured on an H200
GPU, CPU = (types.SimpleNamespace(platform=platform) for platform in ("gpu", "cpu"))


def test_the_choice(monkeypatch) -> None:
    """By name, device and number of tokens."""
    step, chunk = STEP_TOKENS, STEP_TOKENS + 1
    for device, work in ((d, w) for d in (GPU, CPU) for w in CHUNK_FORMS):
        monkeypatch.setattr(attention_forms, "device_of", lambda *_, device=device: device)
        choose = functools.partial(attention_forms.choose, work=work)
        for tokens in (step, chunk):
            assert choose(Kernels(attention="triton"), tokens=tokens) == ("triton",)
            assert choose(Kernels.xla(), tokens=tokens) == (LOOPS,)
        assert choose(Kernels(), tokens=step) == ((None,) if device is GPU else (LOOPS,))
        assert choose(Kernels(), tokens=chunk) == (CHUNK_FORMS[work] if device is GPU else (LOOPS,))
    assert all(forms[-1] == LOOPS for forms in CHUNK_FORMS.values())
    assert {work: forms[0] for work, forms in CHUNK_FORMS.items()} == FASTEST


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about a machine without a GPU")
def test_the_device_is_that_of_the_arrays(monkeypatch) -> None:
    """And not what the default backend would be; inside a compiled program the default device."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    seen = []

    def look(x):
        seen.append(attention_forms.choose(Kernels(), "dense", 1, x))
        return x

    look(jnp.zeros(3))
    jax.jit(look)(jnp.zeros(3))
    assert seen == [(LOOPS,), (LOOPS,)]


def test_the_first_form_that_serves() -> None:
    def run(form):
        if form in ("mosaic", "triton"):
            raise NotImplementedError(f"no {form}")
        return form

    assert first_that_serves(("mosaic", "triton", LOOPS), run) == LOOPS
    assert first_that_serves((None, LOOPS), run) is None
    with pytest.raises(NotImplementedError, match="no triton"):
        first_that_serves(("triton",), run)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there a GPU serves")
def test_a_chunk_that_no_kernel_takes_goes_through_the_loops(monkeypatch) -> None:
    """As float32 does on a GPU: the forms before the loops give their reasons, and the loops serve."""
    m = golden.model("m31-flash-tiny")
    args = (m, *golden.padded(prompts("m31-flash-tiny"), CAPACITY), m.make_cache(len(ROWS), CAPACITY))

    def program() -> str:
        return jax.jit(lambda m, *args: m(*args)).lower(*args).as_text()

    loops = program()
    asked = []
    monkeypatch.setattr(attention_forms, "device_of", lambda *_: asked.append(1) or GPU)
    monkeypatch.setattr(attention_forms, "CHUNK_FORMS", dict.fromkeys(CHUNK_FORMS, ("triton", LOOPS)))
    assert program() == loops and asked
    monkeypatch.setattr(attention_forms, "CHUNK_FORMS", dict.fromkeys(CHUNK_FORMS, (None, LOOPS)))
    assert program() != loops


@pytest.mark.parametrize("tokens", [STEP, 64])
def test_no_copy_of_the_cache(tokens: int) -> None:
    slots, shape = 65_536, jax.ShapeDtypeStruct
    q, k, positions, blocks = (
        shape((1, tokens, 8, 16), jnp.bfloat16), shape((1, slots, 2, 16), jnp.bfloat16), shape((1, tokens), jnp.int32),
        shape((1, tokens, 2, TOP_K), jnp.int32),
    )  # fmt: skip
    run = functools.partial(attention_forms.attend_with_kernels, block_size=BLOCK, implementation="xla")
    compiled = jax.jit(lambda *a: run(*a[:4], blocks=a[4])).lower(q, k, k, positions, blocks).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < slots * 2 * 16 * 2 / 4
