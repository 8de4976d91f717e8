"""Logical axes, the rules that map them to a mesh, and a checkpoint spread over two devices."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import generation_cases as cases
import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

import dspark_jax as ds
from dspark_jax.formats import MXFP8Array, NVFP4Array
from dspark_jax.sharding import check_mesh, weight_sharding

P = PartitionSpec
RULES = ds.ShardingRules()


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def test_specs_follow_the_rules(mesh):
    assert RULES.spec(("vocab", "embed"), mesh) == P("model", None)
    assert RULES.spec(("experts", "expert_mlp", "embed"), mesh) == P("model", None, None)
    assert RULES.spec((None, "norm"), mesh) == P(None, None)
    other = dataclasses.replace(RULES, experts=None, expert_mlp="model", embed="data")
    assert other.spec(("experts", "expert_mlp", "embed"), mesh) == P(None, "model", "data")


def test_axes_that_the_mesh_lacks_leave_a_dim_whole():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    assert RULES.spec(("vocab", "embed"), mesh) == P(None, None)


def test_a_mesh_that_would_hold_every_weight_everywhere():
    with pytest.raises(ValueError, match=r"axes \('x',\) are none of \['model'\].*pass rules"):
        check_mesh(AbstractMesh((2,), ("x",)), ds.ShardingRules())
    check_mesh(AbstractMesh((2,), ("x",)), ds.ShardingRules(experts="x"))
    check_mesh(AbstractMesh((1,), ("x",)), ds.ShardingRules())


def test_unknown_axes_and_collisions_are_refused(mesh):
    with pytest.raises(ValueError, match="unknown logical axis 'width'; known: embed, expert_mlp, experts"):
        RULES.spec(("width", "embed"), mesh)
    with pytest.raises(ValueError, match=r"two of the logical axes \('vocab', 'embed'\) map to the same mesh axis"):
        dataclasses.replace(RULES, embed="model").spec(("vocab", "embed"), mesh)


def names(module) -> dict[str, tuple]:
    state = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {"/".join(map(str, path)): (p.get_value(), p.get_metadata("logical_axes")) for path, p in state}


def test_every_parameter_has_axes_that_the_rules_know(mesh):
    """One name a dim, on models that have every kind of layer and head."""
    model = cases.golden_model(cases.TRACED)
    for kind in ("vanilla", "gated", "rnn"):
        toy = cases.toy(0, drafter=dict(markov_type=kind)).drafter
        for module in (model.target, model.drafter, toy):
            for path, (weight, axes) in names(module).items():
                assert len(axes) == len(weight.shape), path
                RULES.spec(axes, mesh)


@pytest.mark.parametrize("kind", ["plain", "mxfp8", "nvfp4"])
def test_uneven_cuts_are_refused(kind):
    mesh = AbstractMesh((2,), ("model",))
    with cases.unchecked():

        def cut(out: int, inner: int, axes):
            codes = jax.ShapeDtypeStruct((3, out, inner), jnp.bfloat16)
            scale = jax.ShapeDtypeStruct((3, out, inner // 32), jnp.uint8)
            weight = {
                "plain": codes,
                "mxfp8": MXFP8Array(codes=codes, scale=scale),
                "nvfp4": NVFP4Array(
                    codes=codes,
                    scale=scale,
                    global_scale=jax.ShapeDtypeStruct((3,), jnp.float32),
                    global_scale_op="divide",
                ),
            }[kind]
            return weight_sharding(weight, axes, mesh, dataclasses.replace(RULES, experts=None))

        specs = cut(8, 64, (None, "mlp", "embed"))
        leaves = [specs] if kind == "plain" else [specs.codes, specs.scale]
        assert {leaf.spec for leaf in leaves} == {P(None, "model", None)}
        if kind == "nvfp4":
            assert specs.global_scale.spec == P(None)
        message = (
            r"a dim of 7 in \(3, 7, 64\).* cannot be cut over the 2 devices of mesh axis 'model'; set that logical"
        )
        with pytest.raises(ValueError, match=message):
            cut(7, 64, (None, "mlp", "embed"))
        # Codes of 32 inputs can be cut in two, the one scale they share cannot.
        if kind != "plain":
            with pytest.raises(ValueError, match=r"a dim of 1 in \(3, 8, 1\).* cannot be cut"):
                cut(8, 32, (None, "embed", "mlp"))


_ON_TWO_DEVICES = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
import dspark_jax as ds
from flax import nnx

folder, tokens_file, out_file = sys.argv[1:]
assert len(jax.devices()) == 2
mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
model = ds.load(folder, compute_dtype=jnp.float32, mesh=mesh)
tokens = jnp.asarray(np.load(tokens_file))
options = {"xla_backend_optimization_level": 0}
logits = jax.jit(ds.target_logits, compiler_options=options)(model, tokens)
np.save(out_file, np.asarray(logits))
cut, bytes_of = {}, [0, 0]
for name in ("target", "drafter"):
    for path, p in nnx.to_flat_state(nnx.state(getattr(model, name), nnx.Param)):
        for leaf in jax.tree.leaves(p.get_value()):
            cut["/".join(map(str, (name, *path)))] = not leaf.sharding.is_fully_replicated
            for shard in leaf.addressable_shards:
                bytes_of[shard.device.id] += shard.data.nbytes
total = sum(a.nbytes for a in jax.tree.leaves(model))
try:
    ds.load(folder, mesh=mesh, rules=ds.ShardingRules(embed="model"))
    refused = ""
except ValueError as error:
    refused = str(error)
print(json.dumps({"cut": cut, "bytes": bytes_of, "total": total, "refused": refused}))
"""


def test_a_checkpoint_over_two_devices_gives_the_same_logits(tmp_path):
    name = cases.TRACED
    folder = cases.convert(golden.DATA / name, tmp_path / "ckpt")
    prompt = golden.prompt(name, 0)[None]
    np.save(tmp_path / "tokens.npy", prompt)
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(ds.__file__).parents[1]),
    }
    arguments = [str(folder), str(tmp_path / "tokens.npy"), str(tmp_path / "logits.npy")]
    done = subprocess.run(
        [sys.executable, "-c", _ON_TWO_DEVICES, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    difference = np.abs(np.load(tmp_path / "logits.npy")[0] - golden.expected(name)["p0_logits"]).max()
    assert difference < golden.TOLERANCE["logits"]
    # Heads, experts and vocabulary are cut; norms, routers' stream side and the drafter's projection are whole.
    for path, cut in {
        "target/embed_tokens/weight": True,
        "target/layers/2/moe/experts/gate_proj/weight": True,
        "target/layers/0/attention/q_proj/weight": True,
        "drafter/layers/0/mlp/down_proj/weight": True,
        "target/norm/weight": False,
        "drafter/fc/weight": False,
    }.items():
        assert found["cut"][path] == cut, path
    assert found["bytes"][0] == found["bytes"][1] < 0.75 * found["total"]
    assert "map to the same mesh axis" in found["refused"]
