"""Marks that let a test run where its kernel can: each skips one test, with the reason."""

import importlib.util

import jax
import pytest


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def hopper() -> bool:
    return on_gpu() and str(getattr(jax.devices()[0], "compute_capability", "")) == "9.0"


needs_gpu = pytest.mark.skipif(not on_gpu(), reason="needs an NVIDIA GPU")
needs_sm90 = pytest.mark.skipif(not hopper(), reason="the Mosaic kernels need sm_90")
needs_triton = pytest.mark.skipif(
    not on_gpu() or importlib.util.find_spec("jax_triton") is None, reason="needs an NVIDIA GPU and jax-triton"
)
MARKS = {"mosaic": needs_sm90, "triton": needs_triton, "xla": needs_gpu}
MOSAIC, TRITON, XLA = (pytest.param(name, marks=mark) for name, mark in MARKS.items())
