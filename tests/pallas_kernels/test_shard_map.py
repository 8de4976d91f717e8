"""The XLA forms inside `shard_map` with its default checks, whichever argument is split over the devices."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import pallas_kernels
from pallas_kernels.block_sparse_decode import xla as sparse_xla
from pallas_kernels.grouped_experts import xla as experts_xla
from pallas_kernels.index_scores import xla as index_xla
from pallas_kernels.windowed_decode import xla as decode_xla

I32 = jnp.int32
Q, KV, BLOCK = jnp.ones((2, 3, 4, 8)), jnp.ones((9, 128, 2, 8)), jnp.ones((2, 3, 2, 8))
PAGES = dict(k_pages=KV, v_pages=KV, page_table=jnp.zeros((2, 20), I32))  # more than one step of a loop
ROWS, AT = jnp.full(2, 4, I32), jnp.full((2, 3), 4, I32)
STACK = jnp.ones((3, 8, 8))
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = dict(
    windowed_decode=(dict(q=Q, **PAGES, q_start=ROWS, kv_length=ROWS), dict(window=None)),
    block_attention=(dict(q=Q, k_block=BLOCK, v_block=BLOCK, **PAGES, q_start=ROWS), dict(window=None)),
    block_sparse_decode=(
        dict(q=Q, **PAGES, block_ids=jnp.zeros((2, 3, 2, 2), I32), q_start=ROWS), dict(block_size=4),
    ),
    index_block_scores=(dict(q=Q, k=jnp.ones((2, 2048, 8)), positions=AT), dict(block_size=128)),
    grouped_experts=(
        dict(
            x=jnp.ones((2, 8)), experts=jnp.zeros((2, 1), I32), weights=jnp.ones((2, 1)), gate=STACK, up=STACK,
            down=STACK, positions=ROWS,
        ),
        dict(alpha=1.702, limit=7.0),
    ),
)  # fmt: skip


def trace(name: str, split: str) -> Any:
    """The result's shapes where each of 4 devices has its own `split`, and all else is the same on all."""
    arrays, static = CALLS[name]

    def one(own: jax.Array, rest: dict[str, jax.Array]) -> Any:
        function = inspect.unwrap(getattr(pallas_kernels, name))
        return function(**rest, **{split: own[0]}, **static, implementation="xla")

    rest = {key: value for key, value in arrays.items() if key != split}
    everywhere, own = PartitionSpec(), PartitionSpec("x")
    mesh = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
    run = jax.shard_map(one, mesh=mesh, in_specs=(own, everywhere), out_specs=own)
    return jax.eval_shape(run, jnp.broadcast_to(arrays[split][None], (4, *arrays[split].shape)), rest)


@pytest.mark.parametrize("name", CALLS)
def test_any_argument_may_be_split(name: str) -> None:
    for split in CALLS[name][0]:
        trace(name, split)


@pytest.mark.parametrize("name", CALLS)
def test_a_state_of_a_loop_that_does_not_vary_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: JAX says so where the state is made of constants."""
    for module in (decode_xla, sparse_xla, index_xla, experts_xla):
        monkeypatch.setattr(module, "varying_like", lambda state, *arrays: state)
    with pytest.raises(TypeError, match=r"manual axis types|varying|pcast"):
        trace(name, next(iter(CALLS[name][0])))


SPLIT_BY_EXPERT = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from pallas_kernels import grouped_experts

rng = np.random.default_rng(0)
rows, hidden, inner, experts, choices = 6, 16, 24, 8, 3
x, gate, up, down = (
    jnp.asarray(rng.normal(size=shape), jnp.float32)
    for shape in ((rows, hidden), *[(experts, inner, hidden)] * 2, (experts, hidden, inner))
)
chosen = jnp.asarray(np.stack([rng.permutation(experts)[:choices] for _ in range(rows)]), jnp.int32)
weights = jnp.asarray(rng.random((rows, choices)), jnp.float32)

def one(x, chosen, weights, *stacks):
    own = chosen - jax.lax.axis_index("x") * (experts // 4)  # those of other devices are padding
    out = grouped_experts(x, own, weights, *stacks, alpha=1.702, limit=7.0, implementation="xla")
    return jax.lax.psum(out, "x")

mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
run = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=(P(), P(), P(), *[P("x")] * 3), out_specs=P()))

def loss(x, gate):
    return (run(x, chosen, weights, gate, up, down) ** 2).sum()

def dense(x, gate):  # every expert on every row
    g = jnp.minimum(jnp.einsum("nh,efh->nef", x, gate), 7.0)
    u = jnp.clip(jnp.einsum("nh,efh->nef", x, up), -7.0, 7.0)
    out = jnp.einsum("nef,ehf->neh", g * jax.nn.sigmoid(1.702 * g) * (u + 1), down)
    return jnp.einsum("nk,nkh->nh", weights, jnp.take_along_axis(out, chosen[..., None], axis=1))

def off(a, b):
    return float(np.abs(a - b).max() / np.abs(b).max())

actual, expected = run(x, chosen, weights, gate, up, down), dense(x, gate)
slopes = [jax.grad(f, argnums=(0, 1))(x, gate) for f in (loss, lambda *a: (dense(*a) ** 2).sum())]
swapped = run(x, chosen[:, ::-1], weights, gate, up, down)
print(json.dumps([off(actual, expected), *map(off, *slopes), off(swapped, expected)]))
"""
TOLERANCE = 1e-5  # of float32 sums of up to 24 products, and of their squares


def test_experts_split_over_devices() -> None:
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(pallas_kernels.__file__).parents[1]),
    }
    command = [sys.executable, "-c", SPLIT_BY_EXPERT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    *differences, mutant = json.loads(done.stdout.splitlines()[-1])
    assert max(differences) <= TOLERANCE
    assert mutant > 1000 * TOLERANCE  # weights of other choices
