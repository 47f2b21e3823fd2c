"""Submeshes, and how parameters and activations lie on them: logical axis names to mesh axes, by rules."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hetjax.errors import UserError
from hetjax.plan import AXES

BATCH_AXES = ("dp", "fsdp")

# Logical names as the flax models of this field use them. What no rule names is not sharded over tp.
RULES: dict[str, str] = {
    "heads": "tp",
    "kv": "tp",
    "kv_heads": "tp",
    "q_heads": "tp",
    "mlp": "tp",
    "vocab": "tp",
    "expert_mlp": "tp",
}


@dataclasses.dataclass(frozen=True)
class Submesh:
    """A group's devices, or a part of them, as a mesh.

    Attributes:
        mesh: Axes `dp`, `fsdp`, `tp`.
        rules: Logical axis name to mesh axis.
    """

    mesh: Mesh
    rules: tuple[tuple[str, str], ...] = tuple(RULES.items())

    @property
    def num_shards(self) -> int:
        """Into how many parts the rows are divided."""
        return self.mesh.shape["dp"] * self.mesh.shape["fsdp"]

    @property
    def tp(self) -> int:
        """Size of the tensor axis."""
        return self.mesh.shape["tp"]

    @property
    def fsdp(self) -> int:
        """Size of the parameter-shard axis."""
        return self.mesh.shape["fsdp"]

    @property
    def client(self) -> Any:
        """The JAX client (backend instance) of the devices."""
        return self.mesh.devices.flat[0].client

    @property
    def shard_devices(self) -> np.ndarray:
        """Devices as `[num_shards, tp]`."""
        return self.mesh.devices.reshape(self.num_shards, self.tp)

    @functools.cached_property
    def replicated(self) -> NamedSharding:
        """Whole on every device."""
        return NamedSharding(self.mesh, P())

    @functools.cached_property
    def stacked(self) -> NamedSharding:
        """A leading dim of one entry a shard."""
        return NamedSharding(self.mesh, P(BATCH_AXES))

    def along(self, dim: int) -> NamedSharding:
        """Rows along a dim, divided over the shards."""
        return NamedSharding(self.mesh, P(*[None] * dim, BATCH_AXES))


def make_submesh(devices: Sequence[jax.Device], axes: Mapping[str, int]) -> Submesh:
    """Arrange devices as a submesh.

    Args:
        devices: In mesh order, `dp` major.
        axes: Sizes of `dp`, `fsdp`, `tp`; one that is missing is 1.

    Raises:
        UserError: The product of the sizes is not the number of devices, or the devices are of unlike kinds.
    """
    sizes = [int(axes.get(a, 1)) for a in AXES]
    if math.prod(sizes) != len(devices):
        text = " x ".join(f"{a}={n}" for a, n in zip(AXES, sizes, strict=True))
        raise UserError(
            f"{text} needs {math.prod(sizes)} devices and {len(devices)} are given. Change an axis or the "
            f"devices."
        )
    kinds = {(d.platform, d.device_kind) for d in devices}
    if len(kinds) > 1:
        raise UserError(
            f"One submesh can't join unlike devices {sorted(kinds)}. Give each kind a group of its own."
        )
    return Submesh(Mesh(np.asarray(devices, dtype=object).reshape(sizes), AXES))


def logical_names(params_spec: Any) -> list[tuple[str | None, ...]]:
    """Logical axis names of every parameter leaf from flax metadata; all None where there is none.

    Args:
        params_spec: Parameters (or their shapes) with linen `Partitioned` boxes or nnx variable metadata, or
            without.
    """
    leaves = jax.tree.leaves(params_spec)
    none: list[tuple[str | None, ...]] = [(None,) * leaf.ndim for leaf in leaves]
    try:
        if isinstance(params_spec, nnx.State | nnx.Module):
            specs = nnx.get_partition_spec(params_spec)
        else:
            specs = nn.get_partition_spec(params_spec)
        found = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P) or x is None)
    except (ValueError, TypeError, AttributeError):
        return none
    found = [f for f in found if isinstance(f, P)]
    if len(found) != len(leaves):
        return none
    out = []
    for spec, leaf in zip(found, leaves, strict=True):
        names = tuple(n if isinstance(n, str) else None for n in spec)[: leaf.ndim]
        out.append(names + (None,) * (leaf.ndim - len(names)))
    return out


def compute_spec(shape: Sequence[int], names: Sequence[str | None], submesh: Submesh) -> P:
    """Layout of a parameter while it is used: over `tp` by its logical names, whole along the rest."""
    rules, out, used = dict(submesh.rules), [], False
    for size, name in zip(shape, names, strict=True):
        axis = rules.get(name or "")
        fits = axis == "tp" and not used and submesh.tp > 1 and size % submesh.tp == 0
        out.append("tp" if fits else None)
        used = used or fits
    return P(*out)


def stored_spec(shape: Sequence[int], names: Sequence[str | None], submesh: Submesh) -> P:
    """Layout of a stored parameter and its optimizer state: as computed with, and over `fsdp`.

    The largest dim that divides is taken, one named `embed` before others. What no dim of divides evenly
    stays whole.
    """
    spec = list(compute_spec(shape, names, submesh))
    if submesh.fsdp > 1:
        free = [
            d for d, s in enumerate(shape) if spec[d] is None and s % submesh.fsdp == 0 and s >= submesh.fsdp
        ]
        if free:
            spec[max(free, key=lambda d: (names[d] == "embed", shape[d]))] = "fsdp"
    return P(*spec)


def activation_spec(shape: Sequence[int], names: Sequence[str | None], submesh: Submesh) -> P:
    """Layout of an activation with named dims over the tensor axis; rows are divided elsewhere."""
    return compute_spec(shape, names, submesh)
