"""Which groups of a step are anchors: graded by real execution besides the world model."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_GOLDEN = 0x9E3779B9  # 2**32 divided by the golden ratio: the most even rotation of the unit circle


def select(
    key: jax.Array,
    step: int | jax.Array,
    n_groups: int,
    fraction: float | jax.Array = 0.1,
    minimum: int | jax.Array = 1,
    capacity: int | jax.Array | None = None,
) -> jax.Array:
    """Draw the anchor groups of one step, from the key and the step number alone.

    Nothing about the groups enters, so anchors are a random sample whatever the scores turn out
    to be. The number of anchors is ``fraction * n_groups`` rounded up or down so that the
    share over steps is exact (a golden-ratio rotation of the rounding threshold, which is more
    even than independent draws), then raised to `minimum` and lowered to `capacity`.

    Args:
      key: the run's key; it is folded with `step` here and never advanced.
      step: step number, int32; may be traced.
      n_groups: G, static.
      fraction: share of groups to anchor, in [0, 1]; 0 means none at all, also with `minimum`.
      minimum: fewest anchors of a step, if `fraction` is above 0.
      capacity: most anchors of this step, for instance the free places in the sandbox queue; may
        be traced; None for no limit.

    Returns:
      bool [G], true for anchors.

    Raises:
      ValueError: `n_groups` is below 1, or a Python `fraction` lies outside [0, 1].
    """
    if n_groups < 1:
        raise ValueError(f"n_groups is {n_groups}: there must be at least 1 group")
    if isinstance(fraction, int | float) and not 0.0 <= fraction <= 1.0:
        raise ValueError(f"the anchor fraction is {fraction}: it must lie in [0, 1]")
    start_key, _ = jax.random.split(key)
    start = jax.random.bits(start_key, (), jnp.uint32)
    turned = start + jnp.asarray(step).astype(jnp.uint32) * jnp.uint32(_GOLDEN)
    threshold = (turned >> 8).astype(jnp.float32) / 2**24
    fraction = jnp.asarray(fraction, jnp.float32)
    count = jnp.floor(fraction * n_groups + threshold).astype(jnp.int32)
    count = jnp.maximum(count, jnp.where(fraction > 0, minimum, 0))
    count = jnp.minimum(count, n_groups if capacity is None else jnp.maximum(capacity, 0))
    order_key = jax.random.fold_in(jax.random.split(key)[1], step)
    return jax.random.permutation(order_key, n_groups) < count
