"""The device mesh of a run: one axis, `data`, over which the groups are sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from wmrl_jax.errors import UserError

AXIS = "data"


def make_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the one axis `data` over `devices`, JAX devices (default: all of them)."""
    return Mesh(np.asarray(devices if devices is not None else jax.devices()), (AXIS,))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of what every device holds whole: parameters, states, scalars."""
    return NamedSharding(mesh, PartitionSpec())


def by_group(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """Sharding of an array whose axis `leading` counts groups."""
    return NamedSharding(mesh, PartitionSpec(*([None] * leading), AXIS))


def put_by_group(mesh: Mesh, tree: Any) -> Any:
    """Places every array of `tree` with its leading axis sharded over the groups."""
    return jax.device_put(tree, by_group(mesh))


def check_divisible(groups: int, microbatches: int, mesh: Mesh) -> None:
    """Raises UserError unless every device gets the same number of groups in each microbatch."""
    parts = microbatches * mesh.size
    if groups % parts:
        raise UserError(
            f"train.groups is {groups}, which {microbatches} microbatches on {mesh.size} devices "
            f"do not divide; choose a multiple of {parts}"
        )
