"""A list, a number or nothing in place of an array is said in words by every public function, whatever the argument."""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from markov_draw_cases import arguments
from quantized_matmul_cases import random_weight

import pallas_kernels
from pallas_kernels import _arguments

F, I32 = jnp.float32, jnp.int32
Q, KV, BLOCK = jnp.ones((2, 3, 4, 8)), jnp.ones((5, 4, 2, 8)), jnp.ones((2, 3, 2, 8))
TABLE, ROWS, LSE = jnp.zeros((2, 2), I32), jnp.full(2, 4, I32), jnp.zeros((2, 3, 4))
PAGES = dict(k_pages=KV, v_pages=KV, page_table=TABLE)
IDS, AT = jnp.zeros((2, 3, 2, 1), I32), jnp.full((2, 3), 4, I32)
MXFP8, NVFP4 = random_weight("mxfp8", 1, 64, 64), random_weight("nvfp4", 2, 64, 64)
STACK, X = jnp.ones((3, 8, 8)), jnp.ones((2, 64))
MARKOV = arguments(2, 100, 16)

# The arrays of a call that is right, and the rest of its arguments.
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = dict(
    windowed_decode=(dict(q=Q, **PAGES, q_start=ROWS, kv_length=ROWS), dict(window=None)),
    merge_future_block=(dict(out=Q, lse=LSE, q=Q, k_block=BLOCK, v_block=BLOCK), {}),
    block_attention=(dict(q=Q, k_block=BLOCK, v_block=BLOCK, **PAGES, q_start=ROWS), dict(window=None)),
    block_sparse_decode=(dict(q=Q, **PAGES, block_ids=IDS, q_start=ROWS), dict(block_size=4)),
    index_block_scores=(dict(q=Q, k=jnp.ones((2, 8, 8)), positions=AT), dict(block_size=4)),
    select_blocks=(dict(scores=Q, positions=AT), dict(block_size=4, top_k=2)),
    quantized_matmul=(dict(x=X), dict(weight=MXFP8)),
    quantized_matmuls=(dict(x=X), dict(weights=[MXFP8, NVFP4])),
    quantized_mlp=(dict(x=X), dict(gate=MXFP8, up=NVFP4, down=MXFP8, alpha=1.702, limit=7.0)),
    choose_experts=(dict(x=X, weight=jnp.ones((3, 64)), bias=jnp.zeros(3)), dict(top_k=2)),
    grouped_experts=(
        dict(x=jnp.ones((2, 8)), experts=jnp.zeros((2, 1), I32), weights=jnp.ones((2, 1)), positions=ROWS),
        dict(gate=STACK, up=STACK, down=STACK, alpha=1.702, limit=7.0),
    ),
    filter_floors=(
        dict(
            logits=jnp.ones((2, 1, 9)), inverse_temperature=jnp.ones(2), top_k=ROWS, top_p=jnp.ones(2),
            min_p=jnp.zeros(2), find_best=jnp.ones(2, bool),
        ),
        {},
    ),
    markov_draw=({name: array for name, array in MARKOV.items() if np.ndim(array)}, dict(slot=0)),
    rotate_heads=(
        dict(x=jnp.ones((2, 3, 8)), positions=AT),
        dict(
            heads=[pallas_kernels.Heads(count=1)], head_dim=8, rotary_dim=4, theta=1e4, eps=1e-6, plus_one=True,
        ),
    ),
)  # fmt: skip


def call(name: str, **changes: Any) -> Any:
    arrays, rest = CALLS[name]
    function = inspect.unwrap(getattr(pallas_kernels, name))  # the test run's shape checker would speak first
    return function(**arrays | rest | changes, implementation="xla")


@pytest.mark.parametrize("name", [name for name in pallas_kernels.__all__ if name[0].islower()])
def test_a_list_is_named(name: str) -> None:
    arrays, _ = CALLS[name]
    jax.tree.map(np.testing.assert_array_equal, call(name), call(name, **jax.tree.map(np.asarray, arrays)))
    for argument, array in arrays.items():
        for value, kind in ((np.asarray(array).tolist(), "list"), (1.5, "float"), (None, "NoneType")):
            if (name, argument, value) == ("grouped_experts", "positions", None):
                continue  # no row is padding
            with pytest.raises(TypeError, match=f"^{argument} must be a JAX or NumPy array, found {kind}.$"):
                call(name, **{argument: value})


def test_a_list_inside_a_weight_or_a_head_is_named() -> None:
    @dataclasses.dataclass
    class Plain:
        codes: Any
        scale: Any
        global_scale: Any
        global_scale_op: str = "multiply"

    whole = Plain(NVFP4.codes, NVFP4.scale, NVFP4.global_scale, NVFP4.global_scale_op)
    head = pallas_kernels.Heads(count=1, weight=jnp.ones(8), cache=jnp.zeros((2, 5, 8)))
    calls: list[tuple[str, Callable[..., Any], Any, tuple[str, ...]]] = [
        ("weight", functools.partial(call, "quantized_matmul"), whole, ("codes", "scale", "global_scale")),
        ("heads[0]", lambda **x: call("rotate_heads", heads=[x["heads[0]"]]), head, ("weight", "cache")),
    ]
    for name, function, right, attributes in calls:
        function(**{name: right})
        for attribute in attributes:
            wrong = dataclasses.replace(right, **{attribute: np.asarray(getattr(right, attribute)).tolist()})
            with pytest.raises(TypeError, match=re.escape(f"{name}.{attribute} must be a JAX or NumPy array, found ")):
                function(**{name: wrong})


def test_the_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check it is an error from within."""
    monkeypatch.setattr(_arguments, "check_arrays", lambda **arrays: None)
    for name, (arrays, _) in CALLS.items():
        argument, array = next(iter(arrays.items()))
        with pytest.raises(AttributeError):
            call(name, **{argument: np.asarray(array).tolist()})


@pytest.mark.parametrize("name", ["quantized_matmuls", "rotate_heads"])
def test_a_generator_is_read_once(name: str) -> None:
    """As a list is; one weight alone is no list of them."""
    argument = dict(quantized_matmuls="weights", rotate_heads="heads")[name]
    several = CALLS[name][1][argument]
    results = call(name, **{argument: (each for each in several)})
    assert len(results) == len(several)
    jax.tree.map(np.testing.assert_array_equal, results, call(name))
    with pytest.raises(ValueError, match=r"at least one (weight|group of heads)"):
        call(name, **{argument: (each for each in [])})
    if name == "quantized_matmuls":
        for wrong in (MXFP8, 3):
            with pytest.raises(TypeError, match="weights must be several weights, such as a list, found"):
                call(name, weights=wrong)
