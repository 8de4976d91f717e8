"""Every implementation on an NVIDIA GPU: golden data, fresh data over many shapes, loops, vmap, derivatives.

    export XLA_FLAGS=--xla_gpu_autotune_level=0 XLA_PYTHON_CLIENT_PREALLOCATE=false
    pytest -n 12 --dist load tests/pallas_kernels/test_attention_gpu.py
    compute-sanitizer --tool racecheck python -m pytest tests/pallas_kernels/test_attention_gpu.py -k "vmap and mosaic"

Without the first variable XLA tries many ways to multiply the matrices of each reference.
"""

import dataclasses
import functools
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    GOLDEN_NAMES,
    REFERENCE,
    RESULTS,
    Case,
    assert_close,
    assert_lost,
    load_golden,
    matches_golden,
    public,
    random_case,
    repaged,
    with_nan,
)
from gpu_marks import MARKS, MOSAIC, TRITON, XLA, needs_gpu

from pallas_kernels import block_attention, merge_future_block, windowed_decode

KERNELS = [MOSAIC, TRITON]


def poison(case: Case) -> None:
    """Leaves NaN where the next results will probably be allocated: what a kernel does not write shows."""
    shapes = [(case.q.shape, case.q.dtype), (case.q.shape[:3], jnp.float32)] * 4
    jax.block_until_ready([jnp.full(shape, jnp.nan, dtype) for shape, dtype in shapes])


@pytest.mark.parametrize("implementation", [*KERNELS, XLA])
@pytest.mark.parametrize(
    "name, dtype", [(n, "bfloat16") for n in GOLDEN_NAMES] + [(n, "float16") for n in GOLDEN_NAMES[::5]]
)
def test_golden(name: str, implementation: str, dtype: str) -> None:
    case, expected = load_golden(name)
    if implementation == "mosaic" and case.k_pages.shape[1] < 8:
        case = repaged(case)
    case = case.astype(dtype)
    poison(case)
    actual = public(implementation).run(case)
    for result in RESULTS:
        assert matches_golden(actual[result], expected[result], dtype), result


@needs_gpu
@pytest.mark.parametrize("name", GOLDEN_NAMES[::4])
def test_golden_float32_goes_through_xla(name: str) -> None:
    case, expected = load_golden(name)
    actual = public(None).run(case)
    for result in RESULTS:
        assert matches_golden(actual[result], expected[result], "float32"), result


def edge(window: int, queries: int) -> list[int]:
    return [window - queries - 1, window - queries, window - 1, window, window + 1, 3 * window + 5]


# queries, heads, head size, page, window, q_start, dtype; the longest first
SHAPES = [
    (7, (64, 4), 128, 64, 512, list(range(200, 712)), "bfloat16"),
    *((k, (16, 1), 128, 64, 256, edge(256, k), "bfloat16") for k in (1, 8, 16)),
    *((k, (16, 1), 128, 64, 256, list(range(256 - k - 1, 256 + 2)), "bfloat16") for k in (3, 7)),
    *((k, (64, 4), 128, 64, 4096, edge(4096, k)[:3], "bfloat16") for k in (3, 7)),
    *((k, (64, 4), 128, 64, 4096, edge(4096, k)[3:], "bfloat16") for k in (3, 7)),
    *(
        (7, heads, 64, 32, 100, edge(100, 7), "bfloat16")
        for heads in ((1, 1), (2, 1), (3, 1), (8, 2), (12, 4), (16, 16))
    ),
    *((7, (16, 2), 128, page, 300, edge(300, 7), "bfloat16") for page in (16, 32, 128, 256)),
    *((8, (16, 2), d, 64, 200, edge(200, 8), "bfloat16") for d in (72, 80, 96, 192, 256)),
    *((8, (16, 1), 128, 64, window, [0, 1, 63, 64, 200], "bfloat16") for window in (1, 2, 3, 7, 64, None)),
    *((7, (64, 4), d, 64, None, [0, 5, 1000, 3000], "float16") for d in (64, 128)),
    (8, (16, 1), 128, 16, None, [30000], "bfloat16"),
    (5, (32, 2), 128, 48, 333, [0, 332, 333, 5000], "bfloat16"),
    (7, (64, 4), 128, 64, 4096, [6000], "bfloat16"),
    (7, (64, 4), 128, 64, 4096, [6000] * 8, "bfloat16"),
    (7, (16, 1), 128, 64, 4096, [6000] * 64, "bfloat16"),
]


@functools.lru_cache(maxsize=1)
def fresh(index: int) -> tuple[int, Case, tuple[str, ...], dict[str, Any]]:
    """Fresh data for a shape: seed, inputs, which results (programs take seconds to compile) and what they should be.

    Tests of one shape follow one another, and the reference takes as long to compile as a kernel.
    """
    queries, heads, head_dim, page, window, starts, dtype = SHAPES[index]
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    lengths = [max(0, s + int(rng.choice([queries, 0, 1, -queries, -1000, 2 * queries]))) for s in starts]
    lengths = [min(n, s + queries) for n, s in zip(lengths, starts, strict=True)]
    case = random_case(
        seed, q_start=starts, kv_length=lengths, queries=queries, heads=heads, head_dim=head_dim, page=page,
        window=window, dtype=dtype, num_pages=300 if len(starts) > 64 else None,
    )  # fmt: skip
    results = ("decode", "merged", ("block", "block_causal")[index % 2])
    return seed, case, results, REFERENCE.run(case, results)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("shape", range(len(SHAPES)), ids=lambda i: "-".join(map(str, SHAPES[i][:5])))
def test_fresh_data(shape: int, implementation: str) -> None:
    _, _, head_dim, page, _, _, dtype = SHAPES[shape]
    seed, case, results, expected = fresh(shape)
    print(f"seed {seed}")
    poison(case)
    program = public(implementation).program(case, results)
    try:
        actual = program(case)
    except NotImplementedError as reason:
        unsupported = head_dim not in (64, 128, 192, 256) or page == 48
        assert implementation == "mosaic" and unsupported, reason
        pytest.skip(str(reason))
    for result in results:
        assert_close(actual[result], expected[result], dtype, f"{result}, seed {seed}:")
    jax.tree.map(np.testing.assert_array_equal, program(case), actual)  # a moving error is a race


def small_case() -> Case:
    return random_case(
        3, q_start=[2, 70, 300], kv_length=[10, 78, 308], queries=8, heads=(32, 2), head_dim=128, page=64, window=200,
        dtype="bfloat16",
    )  # fmt: skip


def loop_program(implementation: str) -> tuple[Case, Callable[..., Any], tuple[Any, ...]]:
    """Five rounds of all three functions inside `lax.while_loop`, whose end depends on data; and its arguments."""
    case = small_case()
    static = dict(window=200, implementation=implementation)

    def loop(q, k_pages, v_pages, table, k_block, v_block, start):
        def body(carry):
            start, q = carry
            out, lse = windowed_decode(q, k_pages, v_pages, table, start, start + 8, **static)
            out, lse = merge_future_block(out, lse, q, k_block, v_block, **static)
            whole, _ = block_attention(q, k_block, v_block, k_pages, v_pages, table, start, **static)
            return start + 8, (out + whole) * jnp.asarray(0.5, q.dtype)

        return jax.lax.while_loop(lambda carry: carry[0][0] < 42, body, (start, q))

    return case, loop, (case.q, *case.pages, *case.block, case.q_start)


@pytest.mark.parametrize("implementation", KERNELS)
def test_runs_inside_a_while_loop(implementation: str) -> None:
    case, loop, args = loop_program(implementation)
    compiled = jax.jit(loop).lower(*args).compile()
    text = compiled.as_text()
    assert not re.search(r"\b(infeed|outfeed|send|recv|host-?transfer)\b", text)
    with jax.transfer_guard("disallow"):
        start, q = compiled(*args)
    expected = (case.q_start, case.q)
    for _ in range(5):
        one = public(implementation)
        out = one.decode(expected[1], *case.pages, expected[0], expected[0] + 8, window=200, scale=None)
        out, _ = one.merge(*out, expected[1], *case.block, window=200, scale=None)
        whole, _ = one.block(expected[1], *case.block, *case.pages, expected[0], window=200, scale=None, causal=False)
        expected = expected[0] + 8, (out + whole) * jnp.asarray(0.5, q.dtype)
    np.testing.assert_array_equal(start, expected[0])
    # The sum of two bfloat16 numbers is rounded once in the loop and twice outside, five times over.
    np.testing.assert_allclose(np.float32(q), np.float32(expected[1]), atol=0.02)


RECORD_A_LOOP = """
import sys
import jax, numpy as np
from test_attention_gpu import loop_program
_, loop, args = loop_program(sys.argv[1])
run = jax.jit(loop)
runs = [run(*args) for _ in range(5)]  # a graph is warmed up, recorded, and launched again and again
np.savez(sys.argv[2], start=[start for start, _ in runs], q=[np.asarray(q, np.float32) for _, q in runs])
"""


def outside_of_graphs(thunks: str) -> list[str]:
    """The thunks of XLA's list that it does not run inside of a command buffer.

    Those inside are indented below it. Only numbered lines are thunks: the "condition:" of a loop starts its line
    wherever the loop stands.
    """
    outside, graph = [], None
    for line in thunks.splitlines():
        numbered = re.match(r"( *)\d+: k", line)
        if numbered is None:
            continue
        indent = len(numbered[1])
        if graph is not None and indent > graph:
            continue
        graph = indent if "kCommandBuffer" in line else None
        outside.append(line)
    return outside


LOOP = """\
: kWhile [prev=001 (1) | sink]
condition:
        003: kCustomKernel [source | sink] loop_compare_fusion
      body:
        004: kCustomCall [source | sink] kCustomCall
"""


def test_what_is_outside_of_graphs() -> None:
    def numbers(thunks: str) -> list[int]:
        return [int(line.split(":")[0]) for line in outside_of_graphs(thunks)]

    assert numbers("000: kCommandBuffer [source | sink]\n    001: kCopy\n    002" + LOOP) == [0]
    assert numbers("001: kCopy\n002" + LOOP) == [1, 2, 3, 4]
    split = LOOP.replace("004: kCustomCall", "004: kCommandBuffer\n          005: kCopy\n        006: kCustomCall")
    assert numbers("000: kCommandBuffer\n    001: kCopy\n002" + split) == [0, 2, 3, 4, 6]


@pytest.mark.parametrize("implementation", KERNELS)
def test_a_loop_as_a_cuda_graph(implementation: str, tmp_path: Path) -> None:
    """The same results with command buffers and without; shows what XLA records of a loop around the kernels.

    XLA records a custom call when its kind is enabled and its handler is registered as fit for it, and a loop when all
    inside is. The handler of Mosaic GPU is; jax-triton 0.3.1 makes calls of an older kind, which never are.
    """
    kinds = {"off": "", "on": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"}
    here = Path(__file__).parent
    children = {}
    for way, kind in kinds.items():
        (tmp_path / way).mkdir()
        flags = (
            f"--xla_gpu_enable_command_buffer={kind} --xla_gpu_graph_min_graph_size=1 --xla_dump_to={tmp_path / way}"
        )
        path = os.pathsep.join([str(here), str(here.parent.parent), os.environ.get("PYTHONPATH", "")])
        env = os.environ | dict(
            PYTHONPATH=path, XLA_FLAGS=f"--xla_gpu_autotune_level=0 {flags}", XLA_PYTHON_CLIENT_PREALLOCATE="false"
        )
        command = [sys.executable, "-c", RECORD_A_LOOP, implementation, str(tmp_path / f"{way}.npz")]
        children[way] = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for way, child in children.items():
        said, _ = child.communicate(timeout=150)
        assert child.returncode == 0, f"command buffers {way}: {said[-3000:]}"
    with np.load(tmp_path / "off.npz") as off, np.load(tmp_path / "on.npz") as on:
        for name in off:
            np.testing.assert_array_equal(off[name], np.broadcast_to(off[name][:1], off[name].shape))
            np.testing.assert_array_equal(on[name], off[name])
    off_text, on_text = (
        "\n".join(path.read_text() for path in sorted((tmp_path / way).glob(f"*jit_loop*{name}.txt")))
        for way, name in (("off", "thunk_sequence*"), ("on", "after_thunk_passes"))
    )
    outside = outside_of_graphs(on_text)
    print(on_text, "outside of graphs:", *outside, sep="\n")
    assert "kWhile" in off_text and "kCommandBuffer" not in off_text
    assert "kCustomCall" in on_text
    assert not re.search(r"kHost|kInfeed|kOutfeed|kSend|kRecv", off_text + on_text)
    if implementation == "mosaic":
        assert any("kCommandBuffer" in line for line in outside)
        assert not [line for line in outside if "kCustomCall" in line or "kWhile" in line]


OTHER_TUNINGS = [
    dict(splits=5, evict_first=True),
    dict(splits=3, merge="kernel", merge_columns=8),
    dict(splits=2, warpgroups=1, evict_first=True),
    dict(evict_first=True),
]


@MARKS["mosaic"]
@pytest.mark.parametrize("tuning", OTHER_TUNINGS, ids=str)
def test_other_tunings(tuning: dict[str, Any]) -> None:
    from pallas_kernels.windowed_decode import mosaic_sm90
    from pallas_kernels.windowed_decode.tuning import Tuning

    starts, queries = [0, 63, 250, 333, 640, 1500], 8
    case = random_case(
        secrets.randbits(32), q_start=starts, kv_length=[8, 60, 258, 0, 648, 1100], queries=queries, heads=(64, 4),
        head_dim=128, page=64, window=450, table_length=24, dtype="bfloat16",
    )  # fmt: skip
    static, args = dict(window=450, scale=0.1), (case.q, *case.pages, case.q_start, case.kv_length)
    run = jax.jit(functools.partial(mosaic_sm90.attend, tuning=Tuning(**tuning), **static))
    actual = run(*args)
    assert_close(actual, REFERENCE.decode(*args, **static), "bfloat16")
    for _ in range(4):
        jax.tree.map(np.testing.assert_array_equal, run(*args), actual)


@pytest.mark.parametrize("implementation", KERNELS)
def test_vmap_folds(implementation: str) -> None:
    case = small_case()
    starts = case.q_start[None] + jnp.arange(2, dtype=jnp.int32)[:, None]

    def one(start):
        return windowed_decode(case.q, *case.pages, start, start + 8, window=200, implementation=implementation)

    mapped = jax.jit(jax.vmap(one))(starts)
    for i, start in enumerate(starts):
        assert_close(jax.tree.map(lambda x, i=i: x[i], mapped), one(start), "bfloat16")


@pytest.mark.parametrize("implementation", KERNELS)
def test_a_derivative_raises(implementation: str) -> None:
    case = small_case()

    def loss(q):
        out, _ = windowed_decode(
            q, *case.pages, case.q_start, case.kv_length, window=200, implementation=implementation
        )  # fmt: skip
        return out.sum()

    with pytest.raises(NotImplementedError, match="differentiate implementation='xla'"):
        jax.grad(loss)(case.q)


@needs_gpu
def test_none_takes_what_mosaic_refuses() -> None:
    case = random_case(
        5, q_start=[5], kv_length=[9], queries=4, heads=(4, 2), head_dim=72, page=5, window=9, dtype="bfloat16"
    )  # fmt: skip
    expected = REFERENCE.run(case)
    actual = public(None).run(case)
    for result in RESULTS:
        assert_close(actual[result], expected[result], "bfloat16", result)


@pytest.mark.parametrize("implementation", KERNELS)
def test_pages_without_a_visible_key_are_not_read(implementation: str) -> None:
    case = random_case(
        2, q_start=[3, 640, 1290], kv_length=[5, 0, 1294], queries=4, heads=(8, 1), head_dim=128, page=64, window=130,
        table_length=24, dtype="bfloat16",
    )  # fmt: skip
    program = public(implementation).program(case)
    clean = program(case)
    table, touched = np.asarray(case.page_table), set()
    for row, (start, length) in enumerate(zip(case.q_start.tolist(), case.kv_length.tolist(), strict=True)):
        for end in (length, start):  # the cache as the decode reads it, and as the block attention does
            touched |= {table[row, p // 64 % 24] for p in range(max(0, start - 129), min(end, start + 4))}
    others = np.array([n for n in range(case.k_pages.shape[0]) if n not in touched])
    dirty = dataclasses.replace(
        case, k_pages=case.k_pages.at[others].set(jnp.nan), v_pages=case.v_pages.at[others].set(jnp.nan)
    )
    jax.tree.map(np.testing.assert_array_equal, program(dirty), clean)


@pytest.mark.parametrize("implementation", [*KERNELS, XLA])
@pytest.mark.parametrize("rows", [2, 70])  # many splits, and none
def test_a_query_that_is_no_number_is_seen(rows: int, implementation: str) -> None:
    """In its own row alone; a query that sees no key keeps 0 and -inf, whatever it is."""
    case = random_case(
        4, q_start=[490, 3] * (rows // 2), kv_length=[494, 0] * (rows // 2), queries=4, heads=(64, 4), head_dim=128,
        page=64, window=450, dtype="bfloat16",
    )  # fmt: skip
    results = ("decode", "merged", "block")
    expected = REFERENCE.run(case, results)
    in_context, last, without_context = (0, 1, 5), (0, 3, 37), (1, 2, 63)
    places = [in_context, last, without_context]
    case = dataclasses.replace(case, q=with_nan(case.q, places))
    actual = public(implementation).run(case, results)
    for result in results:
        lost = places[:2] if result == "decode" else places
        assert_lost(actual[result], expected[result], lost, "bfloat16", result)
