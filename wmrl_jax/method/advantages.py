"""Group-relative advantages, and the forms of them whose groups are spread over devices.

A reward of NaN is *ungraded*. It is excluded from every sum and its advantage is exactly zero.
Groups fall in three kinds, told apart by `group_kinds`:

  used        at least two graded rollouts with different rewards
  degenerate  at least two graded rollouts, all with the same reward: advantages exactly zero
  ungraded    fewer than two graded rollouts: advantages exactly zero, in no denominator

All functions compute in float32 whatever the input's dtype. Under `shard_map` or `pmap`,
`axis_name` names the mapped axis (or axes) over which the rollouts of *one group* are split;
`batch_axis_name` the one over which *whole groups* are split, which only "batch" needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

AxisName = str | tuple[str, ...] | None


class GroupKinds(NamedTuple):
    """Which kind each group is; exactly one of the three is true.

    Attributes:
      used: bool [G].
      degenerate: bool [G].
      ungraded: bool [G].
    """

    used: jax.Array
    degenerate: jax.Array
    ungraded: jax.Array

    def counts(self, axis_name: AxisName = None) -> GroupKinds:
        """The number of groups of each kind, int32 scalars; summed over `axis_name` if given."""
        sums = jax.tree.map(lambda kind: jnp.sum(kind, dtype=jnp.int32), self)
        return sums if axis_name is None else jax.lax.psum(sums, axis_name)


class _Spread(NamedTuple):
    deviation: jax.Array  # [G, N], reward less the group's mean; 0 where ungraded
    graded: jax.Array  # bool [G, N]
    size: jax.Array  # float32 [G, 1], graded rollouts
    kinds: GroupKinds


def _spread(rewards: jax.Array, mask: jax.Array | None, axis_name: AxisName) -> _Spread:
    """Deviations from the group mean, accurate also where rewards differ in the last digits."""
    rewards = jnp.asarray(rewards, jnp.float32)
    graded = jnp.isfinite(rewards) if mask is None else jnp.isfinite(rewards) & (mask > 0)

    def total(x: jax.Array) -> jax.Array:
        x = jnp.sum(x, axis=-1, keepdims=True)
        return x if axis_name is None else jax.lax.psum(x, axis_name)

    lowest = jnp.min(jnp.where(graded, rewards, jnp.inf), axis=-1, keepdims=True)
    if axis_name is not None:
        lowest = jax.lax.pmin(jax.lax.stop_gradient(lowest), axis_name)
    size = total(graded.astype(jnp.float32))
    # Shifting by the lowest reward first makes equal rewards exactly zero and keeps the digits
    # that the rounding of a mean near the rewards would lose.
    shifted = jnp.where(graded, rewards - jnp.where(graded, lowest, 0.0), 0.0)
    shifted = jnp.where(graded, shifted, 0.0)
    mean = total(shifted) / jnp.maximum(size, 1.0)
    enough = size >= 2
    deviation = jnp.where(graded & enough, shifted - mean, 0.0)
    varied = total((shifted > 0).astype(jnp.float32)) > 0
    kinds = GroupKinds(
        used=(enough & varied)[..., 0],
        degenerate=(enough & ~varied)[..., 0],
        ungraded=~enough[..., 0],
    )
    return _Spread(deviation, graded, size, kinds)


def _deviation_sum(spread: _Spread, power: int, axis_name: AxisName) -> jax.Array:
    total = jnp.sum(spread.deviation**power, axis=-1, keepdims=True)
    return total if axis_name is None else jax.lax.psum(total, axis_name)


def _divide(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """Quotient, 0 where the denominator is 0, with gradients that stay finite."""
    positive = denominator > 0
    return jnp.where(positive, numerator / jnp.where(positive, denominator, 1.0), 0.0)


def _sqrt(x: jax.Array) -> jax.Array:
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1.0)), 0.0)


def group_kinds(
    rewards: jax.Array, *, mask: jax.Array | None = None, axis_name: AxisName = None
) -> GroupKinds:
    """Tell used, degenerate and ungraded groups apart.

    Args:
      rewards: [G, N], NaN where ungraded.
      mask: bool [G, N], false where a rollout is to be treated as ungraded.
      axis_name: see the module.
    """
    return _spread(rewards, mask, axis_name).kinds


def group_advantages(
    rewards: jax.Array,
    *,
    mask: jax.Array | None = None,
    standardize: bool = True,
    eps: float = 1e-4,
    axis_name: AxisName = None,
) -> jax.Array:
    """Advantage of each rollout relative to its group.

    ``(r - mean) / (std + eps)`` with the population standard deviation in two passes (GRPO,
    arXiv 2402.03300), or ``r - mean`` without `standardize` (Dr. GRPO, arXiv 2503.20783). A group
    whose rewards are all equal gets exactly zero; a small spread keeps its scale.

    Args:
      rewards: [G, N] (any leading axes), NaN where ungraded.
      mask: bool [G, N], false where a rollout is to be treated as ungraded.
      standardize: divide by the group's standard deviation.
      eps: added to the standard deviation; 0 is allowed.
      axis_name: mapped axis over which the rollouts of one group are split.

    Returns:
      float32 [G, N]; zero where ungraded and in groups with fewer than two graded rollouts.
    """
    spread = _spread(rewards, mask, axis_name)
    if not standardize:
        return spread.deviation
    variance = _deviation_sum(spread, 2, axis_name) / jnp.maximum(spread.size, 1.0)
    return _divide(spread.deviation, _sqrt(variance) + eps)


def standardized_advantages(
    rewards: jax.Array,
    *,
    mask: jax.Array | None = None,
    eps: float = 1e-4,
    axis_name: AxisName = None,
    batch_axis_name: AxisName = None,
) -> jax.Array:
    """``(r - mean) / (std + eps)`` within the group (GRPO, arXiv 2402.03300)."""
    del batch_axis_name
    return group_advantages(rewards, mask=mask, eps=eps, axis_name=axis_name)


def centred_advantages(
    rewards: jax.Array,
    *,
    mask: jax.Array | None = None,
    eps: float = 1e-4,
    axis_name: AxisName = None,
    batch_axis_name: AxisName = None,
) -> jax.Array:
    """``r - mean`` within the group (Dr. GRPO, arXiv 2503.20783)."""
    del eps, batch_axis_name
    return group_advantages(rewards, mask=mask, standardize=False, axis_name=axis_name)


def rloo_advantages(
    rewards: jax.Array,
    *,
    mask: jax.Array | None = None,
    eps: float = 1e-4,
    axis_name: AxisName = None,
    batch_axis_name: AxisName = None,
) -> jax.Array:
    """Reward less the mean of the group's *other* graded rollouts (RLOO, arXiv 2402.14740)."""
    del eps, batch_axis_name
    spread = _spread(rewards, mask, axis_name)
    return spread.deviation * _divide(spread.size, spread.size - 1.0)


def batch_advantages(
    rewards: jax.Array,
    *,
    mask: jax.Array | None = None,
    eps: float = 1e-4,
    axis_name: AxisName = None,
    batch_axis_name: AxisName = None,
) -> jax.Array:
    """``r - mean`` within the group over the deviation of the batch (arXiv 2501.03262).

    The scale is the root mean square of the centred rewards over all graded rollouts of *used*
    groups, so a batch full of degenerate groups does not blow up the rest.
    """
    spread = _spread(rewards, mask, axis_name)
    used = spread.kinds.used[..., None]
    squares = jnp.sum(jnp.where(used, _deviation_sum(spread, 2, axis_name), 0.0))
    size = jnp.sum(jnp.where(used, spread.size, 0.0))
    if batch_axis_name is not None:
        squares, size = jax.lax.psum((squares, size), batch_axis_name)
    return _divide(spread.deviation, _sqrt(_divide(squares, size)) + eps)


ADVANTAGES: dict[str, Callable[..., jax.Array]] = {
    "standardized": standardized_advantages,
    "centred": centred_advantages,
    "rloo": rloo_advantages,
    "batch": batch_advantages,
}
"""Advantages by name; every one takes (rewards, *, mask, eps, axis_name, batch_axis_name)."""
