"""Loading converted checkpoints: the same model as one built by hand, and what is said when a folder is not one."""

import json
import shutil

import generation_cases as cases
import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dspark_jax as ds
from convert import conversion
from dspark_jax.formats import MXFP8Array, NVFP4Array


@pytest.fixture(scope="module")
def toy() -> ds.Model:
    return cases.toy(1, vocab_size=512)


@pytest.fixture(scope="module")
def source(toy, tmp_path_factory):
    return cases.write_source(tmp_path_factory.mktemp("toy") / "source", toy)


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    return cases.convert(source, tmp_path_factory.mktemp("toy") / "ckpt")


@pytest.fixture
def folder(converted, tmp_path):
    """A copy to break."""
    return shutil.copytree(converted, tmp_path / "ckpt")


def values(module) -> dict[str, np.ndarray]:
    state = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {"/".join(map(str, path)): p.get_value() for path, p in state}


def edit(folder, change) -> None:
    record = json.loads((folder / "layout.json").read_text())
    change(record)
    (folder / "layout.json").write_text(json.dumps(record))


# What is loaded


def test_a_converted_toy_is_the_toy(toy, converted):
    model = ds.load(converted, compute_dtype=jnp.float32)
    for ours, theirs in ((model.target, toy.target), (model.drafter, toy.drafter)):
        assert ours.compute_dtype == jnp.float32
        expected, found = values(theirs), values(ours)
        assert expected.keys() == found.keys()
        for path in expected:
            np.testing.assert_array_equal(found[path], expected[path], path)
    assert model.drafter.config == toy.drafter.config
    # The configs differ in what the toy's config.json does not have: pad and end-of-sequence ids are its defaults.
    assert model.target.config.hidden_size == toy.target.config.hidden_size
    drafter = ds.load_drafter(converted)
    assert drafter.compute_dtype == jnp.bfloat16
    np.testing.assert_array_equal(drafter.fc.weight.get_value(), toy.drafter.fc.weight.get_value())


def test_golden_checkpoints_load_in_both_formats(tmp_path):
    name = "m3-nvfp4-modelopt-tiny"
    folder = cases.convert(golden.DATA / name, tmp_path / "ckpt")
    model = ds.load(folder, compute_dtype=jnp.float32)
    assert model.drafter is None
    kinds = {type(p.get_value()) for _, p in nnx.to_flat_state(nnx.state(model.target, nnx.Param))}
    assert {MXFP8Array, NVFP4Array} <= kinds
    tokens = jnp.asarray(golden.prompt(name, 0))[None]
    expected = golden.expected(name)["p0_logits"]
    assert np.abs(np.asarray(cases.target_logits(model, tokens))[0] - expected).max() < golden.TOLERANCE["logits"]
    # This checkpoint's values are exact in bf16, so that format gives the same logits.
    wide = ds.load(folder, compute_dtype=jnp.float32, weights="bf16")
    arrays = jax.tree.leaves(wide.target)
    assert {a.dtype for a in arrays} == {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}
    assert np.abs(np.asarray(cases.target_logits(wide, tokens))[0] - expected).max() < golden.TOLERANCE["logits"]


def test_stacks_that_were_stored_in_parts_are_joined(tmp_path, monkeypatch):
    """Experts that exceed the converter's memory lie in several arrays, of unequal size where 12 is cut into 5."""
    name, plan = "m3-nvfp4-modelopt-tiny", conversion._plan
    whole = ds.load(cases.convert(golden.DATA / name, tmp_path / "whole"))
    stacks = [path for path in values(whole.target) if "/experts/" in path]
    split = {f"target/{path}": 5 for path in stacks}
    monkeypatch.setattr(conversion, "_plan", lambda source, options: plan(source, options, parts=split))
    folder = cases.convert(golden.DATA / name, tmp_path / "parts")
    assert ds.Layout.read(folder).arrays[f"target/{stacks[0]}"]["parts"] == 5
    jax.tree.map(np.testing.assert_array_equal, ds.load(folder), whole)


def test_a_folder_with_a_drafter_alone(source, tmp_path):
    folder = cases.convert(source / "dspark", tmp_path / "drafter")
    with pytest.raises(ds.CheckpointError, match=r"holds a drafter only: .*load it with load_drafter"):
        ds.load(folder)
    drafter = ds.load_drafter(folder, compute_dtype=jnp.float32)
    assert drafter.config.block_size == 4
    layout = ds.Layout.read(folder)
    assert layout.target is None and layout.drafter == drafter.config


def test_a_folder_without_a_drafter(folder):
    shutil.rmtree(folder / "dspark")
    for load in (ds.load, ds.load_drafter):
        with pytest.raises(ds.CheckpointError, match=r"has the arrays of a drafter, but dspark/config.json is missing"):
            load(folder)
    edit(folder, lambda r: [r["arrays"].pop(name) for name in list(r["arrays"]) if name.startswith("drafter/")])
    assert ds.load(folder).drafter is None
    with pytest.raises(ds.CheckpointError, match=r"has no drafter: dspark/config.json is missing; .*draft='none'"):
        ds.load_drafter(folder)


def test_an_unfinished_conversion(folder):
    partial = folder.rename(folder.with_name("ckpt.partial"))
    (partial / "layout.json").unlink()
    for path in (partial, folder):
        with pytest.raises(ds.CheckpointError, match=r"was interrupted, finish it with --resume"):
            ds.load(path)


# What is refused


def test_folders_that_are_not_converted_checkpoints(tmp_path):
    with pytest.raises(ds.CheckpointError, match=r"is not a folder; name what `python -m convert\.minimax"):
        ds.load(tmp_path / "nothing")
    with pytest.raises(ds.CheckpointError, match=r"is not a converted checkpoint: it has no layout\.json$"):
        (tmp_path / "empty").mkdir()
        ds.load(tmp_path / "empty")
    with pytest.raises(ds.CheckpointError, match="these are safetensors, convert them first: python -m convert"):
        ds.load(golden.DATA / "m3-bf16-tiny")
    (tmp_path / "ckpt.partial").mkdir()
    with pytest.raises(ds.CheckpointError, match="its conversion was interrupted, finish it with --resume"):
        ds.load(tmp_path / "ckpt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(format_version=99), "format_version is 99, this library reads up to 1; update the library"),
        (lambda r: r.update(format_version="1"), "format_version is missing or of the wrong type"),
        (lambda r: r.pop("arrays"), "arrays is missing or of the wrong type; convert the checkpoint again"),
        (lambda r: r.pop("sparse_layers"), "sparse_layers is missing"),
        (
            lambda r: r["arrays"].pop("target/norm/weight"),
            r"1 missing \(first \['target/norm/weight'\]\), 0 unexpected",
        ),
        (
            lambda r: r["arrays"].update({"target/extra/weight": r["arrays"]["target/norm/weight"]}),
            r"0 missing \(first \[\]\), 1 unexpected \(first \['target/extra/weight'\]\)",
        ),
        (
            lambda r: r["arrays"]["target/norm/weight"].update(shape=[17]),
            r"target/norm/weight has shape \(17,\), the config asks for \(16,\); convert the checkpoint again",
        ),
        (
            lambda r: r["arrays"]["drafter/fc/weight"].update(shape=[16, 17]),
            r"drafter/fc/weight has shape \(16, 17\), the config asks for \(16, 16\)",
        ),
        (
            lambda r: r.update(sparse_layers=[False]),
            "sparse_attention_freq says 1 for layer 0, but the checkpoint has no",
        ),
    ],
)
def test_layouts_that_do_not_fit(folder, change, message):
    edit(folder, change)
    with pytest.raises(ValueError, match=message):
        ds.load(folder)


def test_a_layout_that_is_no_json(folder):
    (folder / "layout.json").write_text("{")
    with pytest.raises(ds.CheckpointError, match=r"layout\.json is not valid JSON"):
        ds.load(folder)
    (folder / "layout.json").write_text("[1]")
    with pytest.raises(ds.CheckpointError, match="missing or of the wrong type"):
        ds.load(folder)


def test_a_drafter_of_another_target(folder):
    file = folder / "dspark" / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["dspark_target_layer_ids"] = [3]
    file.write_text(json.dumps(config))
    with pytest.raises(ds.ConfigError, match=r"reads target layer 3, but the target has layers 0\.\.0"):
        ds.load(folder)


def test_weights_in_an_unknown_format(converted):
    with pytest.raises(ValueError, match="weights must be 'native' or 'bf16', found 'fp8'"):
        ds.load(converted, weights="fp8")


def test_missing_arrays_are_an_expected_error(folder):
    """Whatever the array library says, it is one of the errors that the command line prints as one line."""
    shutil.rmtree(folder / "arrays")
    with pytest.raises((ValueError, OSError)):
        ds.load(folder)


def test_a_relative_path_loads(converted, monkeypatch):
    monkeypatch.chdir(converted.parent)
    assert ds.load(converted.name, compute_dtype=jnp.float32).target.config.num_layers > 0


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.int32, "float8"])
def test_other_compute_dtypes_are_refused(converted, dtype):
    with pytest.raises(ValueError, match="compute_dtype must be bfloat16 or float32"):
        ds.load(converted, compute_dtype=dtype)
