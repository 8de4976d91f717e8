"""Saving a model in memory: it loads again as it was, and it goes back into the published layout."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dspark_jax as ds
from convert.conversion import Options, convert
from convert.export import Options as ExportOptions
from convert.export import export
from convert.safetensors_reader import Checkpoint
from dspark_jax import saving
from dspark_jax.checkpoint import CheckpointError
from dspark_jax.saving import save

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("save") / "ckpt"
    convert(str(DATA / "m31-flash-tiny"), folder, Options())
    return folder


@pytest.fixture(scope="module")
def model(converted) -> ds.Model:
    return ds.load(converted, compute_dtype=jnp.float32)


def raw(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    read = Checkpoint(folder)
    return {n: (t.dtype, t.shape, read.array(n).tobytes()) for n, t in read.tensors.items()}


def differences(a, b) -> int:
    """Leaves that are not bit-equal; the trees must have one structure."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    bits = [[np.ascontiguousarray(x).tobytes() for x in jax.tree.leaves(tree)] for tree in (a, b)]
    return sum(x != y for x, y in zip(*bits, strict=True))


def test_a_saved_model_loads_as_it_was(model, converted, tmp_path):
    save(model, tmp_path / "saved", like=converted)
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]
    loaded = ds.load(tmp_path / "saved", compute_dtype=jnp.float32)
    assert loaded.drafter is not None and differences(loaded, model) == 0
    assert loaded.target.config == model.target.config and loaded.drafter.config == model.drafter.config
    for file in ("config.json", "dspark/config.json"):
        assert (tmp_path / "saved" / file).read_bytes() == (converted / file).read_bytes()
    # Mutant: one changed element is seen.
    changed = jax.tree.map(lambda x: x, model)
    changed.drafter.norm.weight.set_value(changed.drafter.norm.weight.get_value().at[3].add(1))
    assert differences(loaded, changed) == 1


def test_a_saved_model_goes_back_into_the_published_layout(model, converted, tmp_path):
    save(model, tmp_path / "saved", like=converted)
    export(tmp_path / "saved", tmp_path / "hf", ExportOptions())
    for folder in ("", "dspark"):
        source, found = raw(DATA / "m31-flash-tiny" / folder), raw(tmp_path / "hf" / folder)
        assert len(found) > 50 and all(source[name] == tensor for name, tensor in found.items())


def test_what_was_fine_tuned_is_what_is_saved(converted, tmp_path):
    model = ds.load(converted, weights="bf16")
    weight = model.target.layers[1].attention.q_proj.weight
    weight.set_value(weight.get_value() * jnp.bfloat16(2))
    save(dataclasses.replace(model, drafter=None), tmp_path / "saved", like=converted)
    loaded = ds.load(tmp_path / "saved")
    assert loaded.drafter is None and not (tmp_path / "saved" / "dspark").exists()
    before = ds.load(converted, weights="bf16").target.layers[1].attention.q_proj.weight.get_value()
    after = loaded.target.layers[1].attention.q_proj.weight.get_value()
    np.testing.assert_array_equal(np.asarray(after, np.float32), 2 * np.asarray(before, np.float32))
    assert differences(loaded.target, model.target) == 0


def test_a_drafter_alone(model, converted, tmp_path):
    save(model.drafter, tmp_path / "saved", like=converted)
    assert not (tmp_path / "saved" / "config.json").exists()
    assert differences(ds.load_drafter(tmp_path / "saved", compute_dtype=jnp.float32), model.drafter) == 0


def test_saving_that_is_refused_leaves_nothing(model, converted, tmp_path, monkeypatch):
    def refused(match: str, model=model, path=tmp_path / "out", like=converted):
        before = sorted(tmp_path.iterdir())
        with pytest.raises(CheckpointError, match=match):
            save(model, path, like=like)
        assert sorted(tmp_path.iterdir()) == before

    refused(r"is not a folder", like=tmp_path / "none")
    refused(r"target/\S+ is ShapeDtypeStruct, which holds no values", model=jax.eval_shape(lambda: model))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    refused(r"is not empty", path=tmp_path / "full")
    for name in ("a[1]", "b*", "c?"):  # Orbax would write no data to the first and say nothing
        refused(r"takes \* \? \[ \] in a path for a pattern", path=tmp_path / name)
    (tmp_path / "out.partial").mkdir()
    refused(r"is in the way")
    (tmp_path / "out.partial").rmdir()
    shutil.copytree(converted, tmp_path / "other")
    config = json.loads((tmp_path / "other" / "dspark" / "config.json").read_text())
    config["text_config"]["dspark_block_size"] = 5
    (tmp_path / "other" / "dspark" / "config.json").write_text(json.dumps(config))
    refused(r"another drafter: block_size is 5 there and 7 in the model", like=tmp_path / "other")
    shutil.rmtree(tmp_path / "other" / "dspark")
    refused(r"has no drafter, but the model has", like=tmp_path / "other")
    wide = nnx.clone(model.drafter)
    wide.norm.weight.set_value(wide.norm.weight.get_value().astype(jnp.float16))
    refused(r"drafter/norm/weight is float16", model=wide)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving.ocp, "save", full)
    with pytest.raises(OSError, match="No space"):
        save(model, tmp_path / "out", like=converted)
    assert {p.name for p in tmp_path.iterdir()} == {"full", "other"}
