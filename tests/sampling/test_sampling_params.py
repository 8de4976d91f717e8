"""What `SamplingParams` takes and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.sampling import GREEDY_TEMPERATURE, SamplingParams, is_greedy

BAD_VALUES = [
    ({"temperature": -0.1}, "temperature is -0.1.*finite and at least 0"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"temperature": 1e300}, "temperature is 1e.300.*finite"),
    ({"temperature": [1.0, -1.0]}, r"temperature is \[1.0, -1.0\]"),
    ({"temperature": jnp.asarray([0.5, jnp.inf])}, "temperature"),
    ({"top_k": -1}, "top_k is -1.*at least 0"),
    ({"top_k": 1.5}, "top_k has dtype float64: pass an integer"),
    ({"top_p": 0.0}, r"top_p is 0.0: .*\(0, 1\]"),
    ({"top_p": 1.1}, "top_p is 1.1"),
    ({"min_p": 1.0}, r"min_p is 1.0: .*\[0, 1\)"),
    ({"min_p": -0.5}, "min_p is -0.5"),
    ({"top_p": np.array([[0.5]])}, r"top_p has shape \(1, 1\)"),
    ({"temperature": np.array("hot")}, "temperature has dtype"),
]


@pytest.mark.parametrize(("settings", "words"), BAD_VALUES, ids=str)
def test_values_out_of_range(settings, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(**settings)


@pytest.mark.parametrize(
    "name", ["repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "n", "best_of"]
)
def test_settings_of_other_libraries_are_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=f"{name} is not supported"):
        SamplingParams(**{name: 1.0})


def test_unknown_settings_are_refused():
    with pytest.raises(TypeError, match=r"no setting 'temprature'.*temperature, top_k, top_p and min_p"):
        SamplingParams(temprature=1.0)


def test_defaults_sample_from_the_model():
    assert [leaf.item() for leaf in jax.tree.leaves(SamplingParams())] == [1.0, 0, 1.0, 0.0]


def test_values_are_broadcast_to_the_batch():
    rows = SamplingParams(temperature=[0.5, 0.0, 1.0], top_k=7, top_p=jnp.float32(0.5)).broadcast(3)
    np.testing.assert_array_equal(rows.temperature, np.array([0.5, 0, 1], np.float32))
    np.testing.assert_array_equal(rows.top_k, [7, 7, 7])
    assert [leaf.dtype for leaf in jax.tree.leaves(rows)] == [jnp.float32, jnp.int32, jnp.float32, jnp.float32]
    assert all(leaf.shape == (3,) for leaf in jax.tree.leaves(rows))
    with pytest.raises(ValueError, match="temperature has 2 entries for a batch of 3"):
        SamplingParams(temperature=[1.0, 1.0]).broadcast(3)


def test_it_is_a_pytree_of_anything():
    params = SamplingParams(temperature=0.5)
    assert jax.tree.map(lambda leaf: None, params).temperature is None
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    assert paths == [".temperature", ".top_k", ".top_p", ".min_p"]
    assert jax.jit(lambda p: p)(params).temperature == 0.5
    made_in_a_trace = jax.jit(lambda t: SamplingParams(temperature=t))(jnp.float32(2))
    assert made_in_a_trace.temperature == 2


def test_it_cannot_be_changed():
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 2.0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_greedy_is_a_temperature_under_the_threshold(dtype):
    temperature = jnp.asarray([0.0, 0.5 * GREEDY_TEMPERATURE, 2 * GREEDY_TEMPERATURE, 1.0], dtype)
    np.testing.assert_array_equal(is_greedy(temperature), [True, True, False, False])
    np.testing.assert_array_equal(SamplingParams(temperature=temperature).greedy, [True, True, False, False])
    assert not is_greedy(jnp.float32(GREEDY_TEMPERATURE))
    assert SamplingParams(temperature=0.0).greedy
