"""The Mosaic kernels without a GPU: interpreted with race detection, and lowered to CUDA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from attention_cases import (
    GOLDEN_NAMES,
    REFERENCE,
    Case,
    assert_close,
    assert_lost,
    load_golden,
    matches_golden,
    random_case,
    repaged,
    with_nan,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels import _mosaic, _mosaic_hints, _mosaic_softmax, windowed_decode
from pallas_kernels.block_attention.mosaic_sm90 import block_attention_mosaic
from pallas_kernels.block_merge import mosaic_sm90 as mosaic_merge
from pallas_kernels.block_merge.mosaic_sm90 import merge_future_block_mosaic
from pallas_kernels.windowed_decode import mosaic_sm90
from pallas_kernels.windowed_decode.mosaic_memory import Memory
from pallas_kernels.windowed_decode.mosaic_problem import describe, plan
from pallas_kernels.windowed_decode.tuning import PIPELINES, Tuning, choose_tuning

pytestmark = pytest.mark.filterwarnings("ignore:.*os.fork.*:RuntimeWarning")  # the interpreter's threads, harmless

RACES = _mosaic.interpreter(detect_races=True)
QUICK = ["h16_1_d64_k1_w4", "h16_1_d64_k3_w16", "h16_1_d64_k7_w4", "h16_1_d128_k3_w16"]


def golden_parameters() -> list:
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in GOLDEN_NAMES]


@pytest.mark.parametrize("name", golden_parameters())
def test_golden_interpreted(name: str) -> None:
    case, expected = load_golden(name)
    case = repaged(case).astype("bfloat16")
    static = dict(window=case.window, scale=case.scale, interpret=RACES)
    tuning = Tuning(tile=64, splits=2 if case.window and case.window > 16 else 1, merge="kernel")
    pages = tuple(map(jnp.asarray, case.pages))
    start, length = jnp.asarray(case.q_start), jnp.asarray(case.kv_length)
    decoded = jax.jit(functools.partial(mosaic_sm90.attend, **static, tuning=tuning))(case.q, *pages, start, length)
    assert matches_golden(decoded, expected["decode"], "bfloat16")
    merged = jax.jit(functools.partial(merge_future_block_mosaic, **static))(*decoded, case.q, *case.block)
    assert matches_golden(merged, expected["merged"], "bfloat16")
    for result in ("block", "block_causal") if name not in QUICK else ("block",):
        whole = functools.partial(block_attention_mosaic, **static, tuning=tuning, causal=result == "block_causal")
        actual = jax.jit(whole)(case.q, *case.block, *pages, start)
        assert matches_golden(actual, expected[result], "bfloat16"), result


SHAPES = [  # queries, heads, page, entries, window, splits, block (None, or whether it is causal)
    (4, (16, 1), 16, 6, 70, 1, None),
    (7, (16, 1), 64, 3, 100, 2, False),
    (3, (6, 2), 8, 17, 120, 1, True),
]


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_scale_that_is_not_positive(scale: float) -> None:
    case = random_case(
        2, q_start=[90], kv_length=[92], queries=4, heads=(16, 1), head_dim=64, page=16, window=70, dtype="bfloat16",
        scale=scale,
    )  # fmt: skip
    static, run = dict(window=70, scale=scale), dict(tuning=Tuning(tile=64), interpret=_mosaic.interpreter())
    args = (case.q, *case.block, *case.pages, case.q_start)
    actual = block_attention_mosaic(*args, **static, **run, causal=False)
    assert_close(actual, REFERENCE.block(*args, **static, causal=False), "bfloat16")
    args = (case.q, *case.pages, case.q_start, case.kv_length)
    decoded = REFERENCE.decode(*args, **static)
    assert_close(mosaic_sm90.attend(*args, **static, **run), decoded, "bfloat16")
    args = (*decoded, case.q, *case.block)
    merged = merge_future_block_mosaic(*args, **static, interpret=_mosaic.interpreter())
    assert_close(merged, REFERENCE.merge(*args, **static), "bfloat16")


@functools.cache
def interpreted(shape: int):
    *_, window, splits, causal = SHAPES[shape]
    static = dict(window=window, scale=0.1, tuning=Tuning(tile=64, splits=splits, merge="kernel"), interpret=RACES)
    if causal is None:
        return jax.jit(functools.partial(mosaic_sm90.attend, **static))
    return jax.jit(functools.partial(block_attention_mosaic, **static, causal=causal))


@functools.cache
def referenced(shape: int):
    *_, window, _, causal = SHAPES[shape]
    if causal is None:
        return jax.jit(functools.partial(REFERENCE.decode, window=window, scale=0.1))
    return jax.jit(functools.partial(REFERENCE.block, window=window, scale=0.1, causal=causal))


@st.composite
def drawn_cases(draw: st.DrawFn) -> tuple[int, Case]:
    shape = draw(st.integers(0, len(SHAPES) - 1))
    queries, heads, page, entries, window, _, _ = SHAPES[shape]
    starts = draw(
        st.lists(
            st.sampled_from([0, 1, window - queries - 1, window - 1, window, window + 1, 500]), min_size=1, max_size=1
        )
    )
    length = [max(0, s + draw(st.sampled_from([queries, 0, -3, -1000]))) for s in starts]
    case = random_case(
        draw(st.integers(0, 2**32 - 1)), q_start=starts, kv_length=length, queries=queries, heads=heads, head_dim=64,
        page=page, window=window, table_length=entries, dtype="bfloat16", scale=0.1,
    )  # fmt: skip
    return shape, case


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(drawn_cases())
def test_interpreted_equals_the_reference(drawn: tuple[int, Case]) -> None:
    shape, case = drawn
    if SHAPES[shape][-1] is None:
        args = (case.q, *case.pages, case.q_start, case.kv_length)
    else:
        args = (case.q, *case.block, *case.pages, case.q_start)
    assert_close(interpreted(shape)(*args), referenced(shape)(*args), "bfloat16")


def _unordered(self, step):
    return tuple(self.row * 0 + piece for piece in range(self.p.pages_of(self.t.tile)))


def _one_key_too_many(mask):
    def wrong(self, scores, step):
        length, self.length = self.length, self.length + 1
        masked = mask(self, scores, step)
        self.length = length
        return masked

    return wrong


@pytest.mark.parametrize("mutant", ["base 2", "page order ignored", "one key too many"])
def test_mutants_are_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutant == "base 2":
        monkeypatch.setattr(_mosaic_softmax, "LN_2", 1.0)
    elif mutant == "page order ignored":
        monkeypatch.setattr(Memory, "pages", _unordered)
    else:
        monkeypatch.setattr(mosaic_sm90.Compute, "mask", _one_key_too_many(mosaic_sm90.Compute.mask))
    case = random_case(
        3, q_start=[90], kv_length=[91], queries=4, heads=(16, 1), head_dim=64, page=16, window=70, dtype="bfloat16"
    )  # fmt: skip
    args = (case.q, *case.pages, case.q_start, case.kv_length)
    static = dict(window=70, scale=0.1)
    actual = mosaic_sm90.attend(*args, **static, tuning=Tuning(tile=64), interpret=_mosaic.interpreter())
    with pytest.raises(AssertionError):
        assert_close(actual, REFERENCE.decode(*args, **static), "bfloat16")


def _only_above_zero(state):
    values, maximum, total = state
    seen = total > 0
    safe = jnp.where(seen, total, 1.0)
    lse = jnp.where(seen, maximum + jnp.log2(safe), -jnp.inf)
    return values * _mosaic.along_rows(1.0 / safe, values.shape), lse


@pytest.mark.parametrize("mutant", [False, True])
@pytest.mark.parametrize("way", ["one split", "two splits", "block"])
def test_a_query_that_is_no_number_is_seen(way: str, mutant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own row alone; a query that sees no key keeps 0 and -inf, whatever it is."""
    if mutant:
        monkeypatch.setattr(_mosaic_softmax, "finish", _only_above_zero)
    case = random_case(
        4, q_start=[90, 3], kv_length=[94, 0], queries=4, heads=(16, 1), head_dim=64, page=16, window=70,
        dtype="bfloat16",
    )  # fmt: skip
    in_context, last, without_context = (0, 1, 5), (0, 3, 7), (1, 2, 3)
    q = with_nan(case.q, [in_context, last, without_context])
    static = dict(window=70, scale=0.1)
    tuning = Tuning(tile=64, splits=2, merge="kernel") if way == "two splits" else Tuning(tile=64)
    run = dict(static, interpret=_mosaic.interpreter())
    if way == "block":
        decoded = REFERENCE.decode(case.q, *case.pages, case.q_start, case.kv_length, **static)
        expected = REFERENCE.merge(*decoded, case.q, *case.block, **static)
        actual = merge_future_block_mosaic(*decoded, q, *case.block, **run)
        lost = [in_context, without_context]  # no key comes after the last query
        args = (*case.block, *case.pages, case.q_start)
        whole = block_attention_mosaic(q, *args, **run, causal=False, tuning=tuning)
        calls = [
            (actual, expected, lost),
            (whole, REFERENCE.block(case.q, *args, **static, causal=False), [*lost, last]),
        ]
    else:
        args = (*case.pages, case.q_start, case.kv_length)
        actual = mosaic_sm90.attend(q, *args, **run, tuning=tuning)
        calls = [(actual, REFERENCE.decode(case.q, *args, **static), [in_context, last])]
    for actual, expected, lost in calls:
        if mutant:
            with pytest.raises(AssertionError, match="lse"):
                assert_lost(actual, expected, lost, "bfloat16")
        else:
            assert_lost(actual, expected, lost, "bfloat16")


def abstract(batch, queries, heads, head_dim, page, entries, dtype=jnp.bfloat16):
    """q, k_block, v_block, k_pages, v_pages, page_table, q_start, kv_length; out and lse go with them."""
    (hq, hkv), shape, pages = heads, jax.ShapeDtypeStruct, batch * entries
    block, pool = shape((batch, queries, hkv, head_dim), dtype), shape((pages, page, hkv, head_dim), dtype)
    rows = shape((batch,), jnp.int32)
    q = shape((batch, queries, hq, head_dim), dtype)
    return q, block, block, pool, pool, shape((batch, entries), jnp.int32), rows, rows


LOWERED = [  # batch, queries, heads, head size, page, entries, window
    (64, 8, (64, 4), 128, 64, 128, 4096),
    (8, 7, (64, 4), 128, 64, 65, 4096),
    (1, 8, (16, 1), 128, 16, 4096, 300),
    (1, 8, (16, 1), 128, 16, 300, None),
    (2, 16, (16, 16), 64, 256, 5, 64),
    (512, 7, (64, 4), 128, 128, 33, 4096),
    (2, 1, (48, 4), 256, 32, 9, 300),
    (3, 16, (6, 2), 192, 8, 30, 1),
]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", LOWERED)
def test_lowers_to_cuda(shape: tuple, dtype) -> None:
    *sizes, window = shape
    q, kb, vb, kp, vp, table, start, length = abstract(*sizes, dtype)
    static = dict(window=window, scale=0.1)
    lse = jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    if dtype == jnp.bfloat16:
        calls = [
            (functools.partial(mosaic_sm90.attend, **static), (q, kp, vp, table, start, length)),
            (functools.partial(merge_future_block_mosaic, **static), (q, lse, q, kb, vb)),
        ]
    else:
        calls = [(functools.partial(block_attention_mosaic, **static, causal=False), (q, kb, vb, kp, vp, table, start))]
    for function, args in calls:
        text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        assert "mosaic_gpu" in text


OTHER_TUNINGS = [
    dict(evict_first=True),
    dict(splits=1, evict_first=True),
    dict(merge="kernel", merge_columns=8, warpgroups=1),
]


@pytest.mark.parametrize("tuning", OTHER_TUNINGS)
def test_other_tunings_lower_to_cuda(tuning: dict) -> None:
    q, kb, vb, kp, vp, table, start, length = abstract(8, 8, (64, 4), 128, 64, 128)
    static = dict(window=4096, scale=0.1, tuning=Tuning(**dict(splits=4) | tuning))
    for function, args in (
        (functools.partial(mosaic_sm90.attend, **static), (q, kp, vp, table, start, length)),
        (functools.partial(block_attention_mosaic, **static, causal=False), (q, kb, vb, kp, vp, table, start)),
    ):
        assert "mosaic_gpu" in jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("evict_first", [True, False])
def test_loads_leave_the_cache_first_when_asked(evict_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, _, _, kp, vp, table, start, length = abstract(2, 8, (16, 1), 128, 64, 16)
    counts, right = [], _mosaic_hints.hint_copies

    def counted(block) -> None:
        plain = len(list(_mosaic_hints.plain_copies(block)))
        right(block)
        counts.append((plain, len(list(_mosaic_hints.plain_copies(block)))))

    monkeypatch.setattr(_mosaic_hints, "hint_copies", counted)
    run = functools.partial(mosaic_sm90.attend, window=99, scale=0.1, tuning=Tuning(evict_first=evict_first))
    jax.jit(run).trace(q, kp, vp, table, start, length).lower(lowering_platforms=("cuda",))
    # Each of two warpgroups loads 4 queries; a tile has 2 pages of keys and 2 of values; none is left without the hint.
    assert (sum(plain for plain, _ in counts), sum(left for _, left in counts)) == (8 * evict_first, 0)


# queries, heads, head size, page, entries, window, q_start, keys short of the queries, splits, columns
def _whole_last_tile(page_tiles):
    def wrong(self, state):
        stop, self.stop = self.stop, self.stop + self.t.tile // 2
        state = page_tiles(self, state)
        self.stop = stop
        return state

    return wrong


CUTS = [
    (4, (16, 1), 64, 16, 30, 300, 400, 0, 4, 8),
    pytest.param((7, (16, 1), 64, 32, 16, None, 455, 0, 4, 32), marks=pytest.mark.slow),
    (3, (16, 2), 64, 64, 5, 257, 700, 5, 2, 16),
    (8, (16, 1), 64, 128, 4, 200, 330, 0, 2, 64),  # pages too long to be cut within
    (8, (16, 1), 64, 64, 4, 64, 60, 0, 3, 8),  # splits without keys
]


def cut_within_tiles(cut: tuple) -> tuple[Case, dict]:
    queries, heads, head_dim, page, entries, window, start, short, splits, columns = cut
    case = random_case(
        7, q_start=[start], kv_length=[start + queries - short], queries=queries, heads=heads, head_dim=head_dim,
        page=page, window=window, table_length=entries, dtype="bfloat16",
    )  # fmt: skip
    tuning = Tuning(splits=splits, merge="kernel", merge_columns=columns)
    return case, dict(window=window, scale=0.1, tuning=tuning, interpret=RACES)


def reference_of(function, *args, tuning, interpret, **static):
    return function(*args, **static)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_splits_cut_within_tiles(cut: tuple) -> None:
    case, static = cut_within_tiles(cut)
    args = (case.q, *case.pages, case.q_start, case.kv_length)
    assert_close(mosaic_sm90.attend(*args, **static), reference_of(REFERENCE.decode, *args, **static), "bfloat16")


def test_block_keys_with_splits_cut_within_tiles() -> None:
    case, static = cut_within_tiles(CUTS[0])
    args = (case.q, *case.block, *case.pages, case.q_start)
    actual = block_attention_mosaic(*args, **static, causal=False)
    assert_close(actual, reference_of(REFERENCE.block, *args, **static, causal=False), "bfloat16")


def test_one_warpgroup_interpreted() -> None:
    case, static = cut_within_tiles(CUTS[-1])
    static["tuning"] = dataclasses.replace(static["tuning"], warpgroups=1)
    args = (case.q, *case.pages, case.q_start, case.kv_length)
    assert_close(mosaic_sm90.attend(*args, **static), reference_of(REFERENCE.decode, *args, **static), "bfloat16")


def test_a_mutant_of_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    case, static = cut_within_tiles(CUTS[0])
    static["interpret"] = _mosaic.interpreter()
    args = (case.q, *case.pages, case.q_start, case.kv_length)
    expected = reference_of(REFERENCE.decode, *args, **static)
    monkeypatch.setattr(mosaic_sm90.Compute, "page_tiles", _whole_last_tile(mosaic_sm90.Compute.page_tiles))
    with pytest.raises(AssertionError):
        assert_close(mosaic_sm90.attend(*args, **static), expected, "bfloat16")


REFUSED = [
    ((1, 4, (16, 1), 72, 16, 4, jnp.bfloat16), "head sizes 64, 128, 192, 256, got 72"),
    ((1, 4, (16, 1), 64, 4, 4, jnp.bfloat16), "multiple of 128 slots, got 4"),
    ((1, 4, (16, 1), 64, 48, 4, jnp.bfloat16), "multiple of 128 slots, got 48"),
    ((1, 4, (16, 1), 64, 16, 4, jnp.float32), "takes bfloat16 and float16, got float32"),
    ((1, 4, (128, 1), 64, 16, 4, jnp.bfloat16), "at most 64 query heads a KV head, got 128"),
    ((1, 80, (16, 1), 64, 16, 4, jnp.bfloat16), "blocks of at most 64, got 80"),
]


@pytest.mark.parametrize("shape, reason", REFUSED)
def test_refuses_in_words(shape: tuple, reason: str) -> None:
    q, _, _, kp, _, table, *_ = abstract(*shape)
    with pytest.raises(NotImplementedError, match=reason):
        plan(describe(q, kp, table, window=8, scale=1.0, block=True))


def test_merge_refuses_in_words() -> None:
    q, kb, *_ = abstract(1, 4, (16, 1), 80, 16, 4)
    with pytest.raises(NotImplementedError, match="head sizes 64, 128, 192, 256, got 80"):
        mosaic_merge.check(q, kb)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about machines without an NVIDIA GPU")
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
def test_a_named_kernel_does_not_fall_back(implementation: str) -> None:
    case = random_case(1, q_start=[5], kv_length=[9], queries=4, heads=(2, 1), head_dim=64, page=16, window=8)
    with pytest.raises(
        NotImplementedError, match=f"'{implementation}'.*runs on NVIDIA GPUs, and this call runs on cpu"
    ):
        windowed_decode(
            case.q, *case.pages, case.q_start, case.kv_length, window=8, implementation=implementation
        )  # fmt: skip


@pytest.mark.parametrize(
    "field, value",
    [
        *(("tile", 32), ("stages", 1), ("splits", 0), ("merge", "atomic"), ("merge_columns", 12), ("warpgroups", 3)),
    ],
)
def test_tuning_is_validated(field: str, value) -> None:
    with pytest.raises(Exception, match=field):
        Tuning(**{field: value})


@pytest.mark.parametrize("heads", [1, 4, 8, 32, 64, 131, 132, 256, 2048])
@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("head_dim", PIPELINES)
def test_splits_fill_the_chip_once(heads: int, warpgroups: int, head_dim: int) -> None:
    tuning = choose_tuning(heads=heads, head_dim=head_dim, keys=4103, warpgroups=warpgroups)
    tiles = -(-4103 // tuning.tile)
    blocks = heads * warpgroups // tuning.warpgroups
    # Fused splits wait for each other: all have to be resident.
    assert tuning.splits == 1 or tuning.splits * blocks <= 132
    assert tuning.splits <= tiles
    most = max(1, min(132 // blocks, tiles, 64))
    longest = -(-tiles // most)  # with all multiprocessors
    assert -(-tiles // tuning.splits) == longest or (tuning.splits, tuning.merge) == (16, "fused")


@pytest.mark.parametrize(
    "heads, head_dim, keys, splits, merge, warpgroups",
    [
        (1, 128, 4103, 33, "kernel", 1),
        (4, 128, 4103, 16, "fused", 1),
        (4, 64, 4103, 16, "fused", 1),
        (5, 128, 4103, 16, "fused", 2),
        (8, 128, 4103, 16, "fused", 2),
        (32, 128, 4103, 4, "fused", 2),
        (64, 128, 4103, 2, "fused", 2),
        (256, 128, 4103, 1, "fused", 2),
        (1, 128, 300, 3, "fused", 1),
        (4, 128, 2048, 16, "fused", 1),
        (4, 128, 32768, 32, "kernel", 2),
        (4, 128, 131072, 32, "kernel", 2),
    ],
)
def test_the_choice_of_splits(
    heads: int, head_dim: int, keys: int, splits: int, merge: str, warpgroups: int
) -> None:  # fmt: skip
    tuning = choose_tuning(heads=heads, head_dim=head_dim, keys=keys)
    assert (tuning.splits, tuning.merge, tuning.warpgroups) == (splits, merge, warpgroups)


@pytest.mark.parametrize(
    "batch, heads, entries, window, evict_first",
    [
        (8, (64, 4), 128, 4096, True),
        (1, (64, 4), 128, 4096, False),  # two blocks read the same keys
        (64, (64, 4), 128, 4096, False),  # no splits
        (64, (16, 1), 128, 4096, True),
        (8, (64, 4), 512, None, False),  # many times the cache
    ],
)
def test_what_leaves_the_cache_first(
    batch: int, heads: tuple, entries: int, window: int | None, evict_first: bool
) -> None:  # fmt: skip
    q, _, _, kp, _, table, *_ = abstract(batch, 8, heads, 128, 64, entries)
    assert plan(describe(q, kp, table, window=window, scale=1.0, block=False)).evict_first == evict_first
