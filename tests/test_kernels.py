"""The choice of kernels reaches every module that has one, and each field governs the work it names."""

import dataclasses
import functools

import generation_cases as cases
import golden
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

import dspark_jax as ds
from dspark_jax import checkpoint
from dspark_jax.attention import Attention, Indexer
from dspark_jax.layers import Linear
from dspark_jax.moe import Experts, Router
from dspark_jax.speculation import target_law

CONFIG = ds.TargetConfig.from_hf(golden.hf_config("m3-mxfp8-tiny"))
NAMED = ds.Kernels(linear="triton", experts="mosaic", attention="triton")


def modules(model: nnx.Module) -> list:
    return [
        node for _, node in nnx.iter_graph(model) if isinstance(node, Linear | Experts | Router | Attention | Indexer)
    ]


def build(kernels: ds.Kernels | None) -> ds.Model:
    drafter = cases.drafter_config(cases.target_config())
    return ds.Model(
        target=nnx.eval_shape(lambda: ds.MiniMaxTarget(CONFIG, kernels=kernels)),
        drafter=nnx.eval_shape(lambda: ds.DSparkDrafter(drafter, kernels=kernels)),
    )


@pytest.mark.parametrize("kernels, carried", [(None, ds.Kernels()), (NAMED, NAMED)])
def test_every_module_carries_the_choice(kernels, carried) -> None:
    with cases.unchecked():
        model = build(kernels)
    assert model.drafter is not None
    assert {type(m) for m in modules(model.target)} == {Linear, Experts, Router, Attention, Indexer}
    assert len(modules(model.drafter)) > 7
    assert all(m.kernels == carried for m in [*modules(model.target), *modules(model.drafter), model.drafter])


def quantized_target(kernels: ds.Kernels) -> ds.MiniMaxTarget:
    """Every linear in MXFP8, bfloat16 activations."""
    plain = nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: ds.MiniMaxTarget(CONFIG))))
    paths = ["/".join(map(str, ("target", *path))) for path, _ in plain]
    kinds = {path: "mxfp8" for path in paths if path.endswith("_proj/weight")}
    return nnx.eval_shape(lambda: ds.MiniMaxTarget(CONFIG, formats=kinds, kernels=kernels))


def run(kernels: ds.Kernels) -> None:
    model = quantized_target(kernels)
    tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    jax.eval_shape(lambda model, t: model(t, t, model.make_cache(1, 64)).logits, model, tokens)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the named kernels can serve there")
@pytest.mark.parametrize(
    "field, name, function",
    [
        ("linear", "mosaic", "quantized_matmul"),
        ("linear", "triton", "quantized_matmul"),
        ("experts", "mosaic", "grouped_experts"),
        ("experts", "triton", "grouped_experts"),
        ("routing", "triton", "choose_experts"),
        ("attention", "triton", "windowed_decode"),  # of the dense layer, which comes first
    ],
)
def test_a_named_kernel_is_asked_for(field: str, name: str, function: str) -> None:
    with cases.unchecked():
        with pytest.raises(NotImplementedError, match=rf"{function}\(implementation='{name}'\).*NVIDIA"):
            run(ds.Kernels(**{field: name}))
        run(ds.Kernels(**{field: "xla"}))
        run(ds.Kernels())


@pytest.mark.parametrize("rotation", ["xla", None])
def test_a_block_sparse_layer_has_no_mosaic_form(rotation) -> None:
    """Said as of any kernel that cannot serve, wherever the program will run."""
    config = dataclasses.replace(CONFIG, sparse_layers=(True,) * CONFIG.num_layers)
    kernels = ds.Kernels(attention="mosaic", rotation=rotation)
    with cases.unchecked():
        model = nnx.eval_shape(lambda: ds.MiniMaxTarget(config, kernels=kernels))
        tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
        with pytest.raises(NotImplementedError, match="layer of the target is block-sparse: name 'triton', or None"):
            jax.eval_shape(lambda model, t: model(t, t, model.make_cache(1, 64)).logits, model, tokens)


def test_a_mesh_of_several_devices_takes_no_kernels() -> None:
    with cases.unchecked():
        check_meshes()


def check_meshes() -> None:
    one, two = (AbstractMesh((n,), ("model",)) for n in (1, 2))
    choose = functools.partial(checkpoint._kernels, None)
    assert choose(None) == choose(one) == ds.Kernels()
    assert choose(two) == checkpoint._kernels(ds.Kernels.xla(), two) == ds.Kernels.xla()
    assert checkpoint._kernels(NAMED, one) == checkpoint._kernels(NAMED, None) == NAMED
    with pytest.raises(ValueError, match=r"Kernels\.xla\(\) on a mesh of 2 devices, found .*triton"):
        checkpoint._kernels(NAMED, two)


@pytest.mark.parametrize("field", ["linear", "experts", "attention"])
def test_an_unknown_name_is_refused(field: str) -> None:
    with (
        cases.unchecked(),
        pytest.raises(ValueError, match=f"{field} must be None, 'mosaic', 'triton' or 'xla', found 'cuda'"),
    ):
        ds.Kernels(**{field: "cuda"})


@pytest.mark.parametrize("field", ["sampling", "routing"])
def test_filters_and_routing_have_no_mosaic_form(field: str) -> None:
    with cases.unchecked(), pytest.raises(ValueError, match=f"{field} must be None, 'triton' or 'xla', found 'mosaic'"):
        ds.Kernels(**{field: "mosaic"})  # pyright: ignore[reportArgumentType]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the kernel can serve there")
def test_the_filters_go_through_the_kernel_that_is_named() -> None:
    logits = jax.random.normal(jax.random.key(0), (2, 3, 50), jnp.float32)
    law = functools.partial(target_law, logits, ds.SamplingParams(top_k=9, top_p=0.8))
    with pytest.raises(NotImplementedError, match=r"filter_floors\(implementation='triton'\).*NVIDIA"):
        law(ds.Kernels(sampling="triton"))
    np.testing.assert_array_equal(law(ds.Kernels()), law(ds.Kernels.xla()))


def test_the_model_carries_the_choice_for_the_filters() -> None:
    with cases.unchecked():
        kernels = ds.Kernels(sampling="xla")
        assert build(kernels).target.kernels == kernels
