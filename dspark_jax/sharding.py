"""Logical axis names of parameters, and how they map to the axes of a device mesh."""

import dataclasses

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from dspark_jax.formats import MXFP8Array, NVFP4Array, Weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """Mesh axis of each logical axis; None, or a name that the mesh lacks, leaves the dimension whole.

    Attributes:
      vocab: rows of the embedding and of the head.
      heads, kv_heads, index_heads: rows of attention projections.
      mlp, expert_mlp: inner size of a dense or shared MLP, and of a routed expert.
      experts: the stack of experts.
      embed: the residual stream.
      features: the target features that a drafter reads, side by side.
      norm: norm scales.
    """

    vocab: str | None = "model"
    heads: str | None = "model"
    kv_heads: str | None = "model"
    index_heads: str | None = None
    mlp: str | None = "model"
    expert_mlp: str | None = None
    experts: str | None = "model"
    embed: str | None = None
    features: str | None = None
    norm: str | None = None

    def spec(self, axes: tuple[str | None, ...], mesh: Mesh) -> PartitionSpec:
        """Partition of an array whose dims have these logical names.

        Raises:
          ValueError: a logical name is unknown, or two dims would land on the same mesh axis.
        """
        known = {field.name for field in dataclasses.fields(self)}
        unknown = [a for a in axes if a is not None and a not in known]
        if unknown:
            raise ValueError(f"unknown logical axis {unknown[0]!r}; known: {', '.join(sorted(known))}")
        physical = [getattr(self, a) if a is not None else None for a in axes]
        physical = [p if p in mesh.axis_names else None for p in physical]
        used = [p for p in physical if p is not None]
        if len(used) != len(set(used)):
            raise ValueError(f"two of the logical axes {axes} map to the same mesh axis in {tuple(physical)}")
        return PartitionSpec(*physical)


def check_mesh(mesh: Mesh | AbstractMesh, rules: ShardingRules) -> None:
    """Raise `ValueError` if the rules use no axis of a mesh of several devices: each would hold all weights."""
    named = {axis for axis in dataclasses.asdict(rules).values() if axis is not None}
    if mesh.size > 1 and not named & set(mesh.axis_names):
        raise ValueError(
            f"the mesh's axes {tuple(mesh.axis_names)} are none of {sorted(named)}, to which the sharding rules map: "
            "every device would hold all weights; name an axis 'model', or pass rules"
        )


def weight_sharding(weight: Weight, axes: tuple[str | None, ...], mesh: Mesh, rules: ShardingRules):
    """Shardings of a weight's arrays, as a pytree like the weight: scales are cut with the codes they belong to.

    Raises:
      ValueError: a dim cannot be cut evenly over its mesh axis.
    """
    spec = rules.spec(axes, mesh)

    def sharding(array, spec: PartitionSpec) -> NamedSharding:
        for size, axis in zip(array.shape, spec, strict=True):
            if axis is not None and size % mesh.shape[axis]:
                raise ValueError(
                    f"a dim of {size} in {tuple(array.shape)} {axes} cannot be cut over the {mesh.shape[axis]} "
                    f"devices of mesh axis {axis!r}; set that logical axis to None in ShardingRules"
                )
        return NamedSharding(mesh, spec)

    if isinstance(weight, NVFP4Array):
        return dataclasses.replace(
            weight,
            codes=sharding(weight.codes, spec),
            scale=sharding(weight.scale, spec),
            global_scale=sharding(weight.global_scale, PartitionSpec(*spec[:-2])),
        )
    if isinstance(weight, MXFP8Array):
        return MXFP8Array(codes=sharding(weight.codes, spec), scale=sharding(weight.scale, spec))
    return sharding(weight, spec)


def default_sharding() -> jax.sharding.Sharding:
    """Where arrays go without a mesh: the default device."""
    device = jax.config.jax_default_device or jax.devices()[0]
    return jax.sharding.SingleDeviceSharding(jax.devices(device)[0] if isinstance(device, str) else device)
