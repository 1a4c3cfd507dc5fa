"""Gradients of a sum over groups, a few groups at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

LossFn = Callable[[Any, Any], tuple[jax.Array, jax.Array]]
"""(params, part of the batch) -> (sum over it, count), float32 scalars."""


def summed_gradients(
    loss: LossFn, params: Any, batch: Any, *, rows: int = 8, devices: int = 1
) -> tuple[jax.Array, jax.Array, Any]:
    """A loss's sum, count and gradient of the sum, adding up parts of the batch in a loop.

    What a part needs for its backward pass fits into the processor's cache and is reused by the
    next part; the result is that of the whole batch, to rounding.

    Args:
      loss: must be a sum over the groups.
      params: what to differentiate by.
      batch: `GroupedRows`, or a tuple that begins with them; every array has G in front.
      rows: rows of a part on one device, if the number of groups divides so.
      devices: those that G is sharded over in equal contiguous shares; a part has a piece of each.

    Returns:
      (sum, count, gradient of the sum).
    """
    groups, group_size = jax.tree.leaves(batch)[2].shape[:2]
    share = groups // devices
    wanted = max(rows // group_size, 1)
    size = next(n for n in range(wanted, 0, -1) if share % n == 0)

    def parted(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x.reshape(devices * size, share // size, *x.shape[1:]), 0, 1)

    def add(total: Any, part: Any) -> tuple[Any, None]:
        (value, count), grads = jax.value_and_grad(loss, has_aux=True)(params, part)
        return jax.tree.map(jnp.add, total, (value, count, grads)), None

    nothing = (jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    return jax.lax.scan(add, nothing, jax.tree.map(parted, batch))[0]
