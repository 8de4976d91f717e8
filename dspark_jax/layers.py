"""Layers that target and drafter share: norms, partial rotary embedding, linear, clamped SwiGLU, parameters."""

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from dspark_jax import formats
from dspark_jax.kernels import Kernels, first_that_serves
from pallas_kernels import quantized_mlp

Format = Literal["bf16", "f32", "mxfp8", "nvfp4/multiply", "nvfp4/divide"]


@dataclasses.dataclass(frozen=True)
class Scope:
    """What a module is built from: the path so far, the storage format of each path, a key for random weights, kernels.

    Attributes:
      path: "/"-joined path of the module under construction; the same path names its arrays in a checkpoint.
      formats: storage format by parameter path; a path that is not listed is bf16.
      key: random weights come from it, one draw a path; None makes zeros (enough for `nnx.eval_shape`).
      kernels: what the modules' work goes through.
    """

    path: str = ""
    formats: Mapping[str, Format] = dataclasses.field(default_factory=dict)
    key: jax.Array | None = None
    kernels: Kernels = dataclasses.field(default_factory=Kernels)

    def __truediv__(self, name: object) -> "Scope":
        return dataclasses.replace(self, path=f"{self.path}/{name}" if self.path else str(name))

    def param(self, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], *, scale: float) -> nnx.Param:
        """A parameter of `shape` with one logical axis name per dim; random normal of standard deviation `scale`."""
        path = (self / name).path
        if self.key is None:
            value = jnp.zeros(shape, jnp.float32)
        else:
            value = scale * jax.random.normal(jax.random.fold_in(self.key, zlib.crc32(path.encode())), shape)
        return nnx.Param(_store(value, self.formats.get(path, "bf16")), logical_axes=axes)


def _store(value: jax.Array, format: Format) -> formats.Weight:
    match format:
        case "bf16":
            return value.astype(jnp.bfloat16)
        case "f32":
            return value
        case "mxfp8":
            return formats.quantize_mxfp8(value)
        case "nvfp4/multiply":
            return formats.quantize_nvfp4(value, global_scale_op="multiply")
        case "nvfp4/divide":
            return formats.quantize_nvfp4(value, global_scale_op="divide")
    raise ValueError(f"unknown storage format {format!r}; known: bf16, f32, mxfp8, nvfp4/multiply, nvfp4/divide")


class Linear(nnx.Module):
    """y = x W^T; W [out, in] in any storage format, no bias."""

    def __init__(self, scope: Scope, out_size: int, in_size: int, axes: tuple[str | None, str | None]):
        self.weight = scope.param("weight", (out_size, in_size), axes, scale=in_size**-0.5)
        self.kernels = scope.kernels

    def __call__(self, x: Float[Array, "*batch I"]) -> Float[Array, "*batch O"]:
        return formats.linear(x, self.weight.get_value(), implementation=self.kernels.linear)


def project(x: Float[Array, "*batch I"], *linears: Linear) -> tuple[Float[Array, "*batch _"], ...]:
    """(linear(x) for each), in one launch where a kernel can."""
    weights = [linear.weight.get_value() for linear in linears]
    return formats.linears(x, weights, implementation=linears[0].kernels.linear)


def rms_normalize(
    x: Float[Array, "*batch H"], scale: Float[Array, " H"], eps: float, dtype
) -> Float[Array, "*batch H"]:
    """x / rms(x) · scale over the last axis, all in float32, rounded once to `dtype`."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * jnp.broadcast_to(scale, x32.shape)).astype(dtype)


class GemmaRMSNorm(nnx.Module):
    """RMS norm that scales by 1 + w. The 1 is added in float32: folded into bf16 it would swallow |w| below 0.004."""

    def __init__(self, scope: Scope, size: int, eps: float):
        self.weight = scope.param("weight", (size,), ("norm",), scale=0.1)
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch H"], dtype=None) -> Float[Array, "*batch H"]:
        """-> normalised x in `dtype`, x's own by default."""
        scale = 1.0 + self.weight.get_value().astype(jnp.float32)
        return rms_normalize(x, scale, self.eps, dtype or x.dtype)


class RMSNorm(nnx.Module):
    """RMS norm that scales by w."""

    def __init__(self, scope: Scope, size: int, eps: float):
        self.weight = scope.param("weight", (size,), ("norm",), scale=1.0)
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch H"], dtype=None) -> Float[Array, "*batch H"]:
        """-> normalised x in `dtype`, x's own by default."""
        return rms_normalize(x, self.weight.get_value().astype(jnp.float32), self.eps, dtype or x.dtype)


def rotate(
    x: Float[Array, "B T N D"], positions: Int[Array, "B T"], *, rotary_dim: int, theta: float
) -> Float[Array, "B T N D"]:
    """Rotary embedding of the first `rotary_dim` dims, NeoX halves (i pairs with i + rotary_dim / 2), in float32."""
    # Elementwise over all dims, with frequency 0 where nothing turns: joined from pieces it would be several kernels.
    half, lane = rotary_dim // 2, np.arange(x.shape[-1])
    frequency = np.where(lane < rotary_dim, theta ** (-(lane % half) / half), 0.0)
    sign = np.select([lane < half, lane < rotary_dim], [-1.0, 1.0], 0.0)
    angle = positions.astype(jnp.float32)[..., None] * jnp.asarray(frequency, jnp.float32)[None, None, :]
    sin = jnp.sin(angle) * jnp.asarray(sign, jnp.float32)[None, None, :]
    x32 = x.astype(jnp.float32)
    behind, before = (lax.pad(x32, jnp.float32(0), [(0, 0, 0)] * 3 + [(-by, by, 0)]) for by in (half, -half))
    partner = jnp.where(jnp.broadcast_to(lane < half, x.shape), behind, before)
    cos, sin = (jnp.broadcast_to(a[:, :, None, :], x.shape) for a in (jnp.cos(angle), sin))
    return (x32 * cos + partner * sin).astype(x.dtype)


def swiglu_oai(
    gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"], *, alpha: float, limit: float
) -> Float[Array, "*batch F"]:
    """g · sigmoid(alpha · g) · (u + 1) with g = min(gate, limit), u = clip(up, ±limit), in float32, in gate's dtype.

    The gate has no lower clamp. Source: the SwiGLU of gpt-oss, as MiniMax-M3 uses it.
    """
    g = jnp.minimum(gate.astype(jnp.float32), limit)
    u = jnp.clip(up.astype(jnp.float32), -limit, limit)
    return (g * jax.nn.sigmoid(alpha * g) * (u + 1.0)).astype(gate.dtype)


class SwigluMLP(nnx.Module):
    """down(swiglu_oai(gate(x), up(x)))."""

    def __init__(self, scope: Scope, hidden_size: int, size: int, *, alpha: float, limit: float):
        self.gate_proj = Linear(scope / "gate_proj", size, hidden_size, ("mlp", "embed"))
        self.up_proj = Linear(scope / "up_proj", size, hidden_size, ("mlp", "embed"))
        self.down_proj = Linear(scope / "down_proj", hidden_size, size, ("embed", "mlp"))
        self.alpha, self.limit = alpha, limit

    def __call__(self, x: Float[Array, "*batch H"]) -> Float[Array, "*batch H"]:
        weights = [linear.weight.get_value() for linear in (self.gate_proj, self.up_proj, self.down_proj)]
        constants = dict(alpha=self.alpha, limit=self.limit)

        def run(together: bool) -> Array:
            if together:
                return quantized_mlp(x, *weights, **constants, implementation="mosaic")
            gate, up = project(x, self.gate_proj, self.up_proj)
            return self.down_proj(swiglu_oai(gate, up, **constants))

        merged = formats.merges(self.gate_proj.kernels.linear, *weights)
        return first_that_serves((True, False) if merged else (False,), run)
