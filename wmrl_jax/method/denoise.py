"""The second correction: fuse the anchor stream with the world-model stream.

Within-group moments of calibrated scores f and true rewards r, measured out of sample on the
anchor groups, say how much signal and how much noise a world-model group carries. From them come
the fusion weights, the authors' rule, and the coefficient of a control variate. The estimator is
`init / observe / weights` over one state; the choices by name never change the state's tree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

Tree = TypeVar("Tree")
Weights = tuple[jax.Array, jax.Array]
Moments = tuple[jax.Array, jax.Array, jax.Array]


class State(NamedTuple):
    """Exponentially averaged within-group moments, float32 scalars throughout.

    The sums are decayed sums over anchor groups; divide by `total` for the average.

    Attributes:
      s_ff: sum of the within-group variance of calibrated scores.
      s_fr: sum of the within-group covariance of calibrated scores and true rewards.
      s_rr: sum of the within-group variance of true rewards.
      total: sum of the decay factors, 0 before the first group.
      decay: factor by which one more group shrinks the sums.
      groups: groups observed so far, saturating at 2**24.
      calibration: the constant c of the authors' rule, NaN until it is set.
    """

    s_ff: jax.Array
    s_fr: jax.Array
    s_rr: jax.Array
    total: jax.Array
    decay: jax.Array
    groups: jax.Array
    calibration: jax.Array


_AUTHORS_WARMUP_GROUPS = 32.0
_AUTHORS_MAX_WEIGHT = 4.0


def init(half_life: float = 64.0) -> State:
    """The state before any anchor group.

    Args:
      half_life: groups after which a group's share in the average has halved; positive.

    Raises:
      ValueError: `half_life` is not positive.
    """
    if not half_life > 0:
        raise ValueError(f"half_life is {half_life}: it must be a positive number of groups")
    zero = jnp.zeros((), jnp.float32)
    return State(
        s_ff=zero,
        s_fr=zero,
        s_rr=zero,
        total=zero,
        decay=jnp.asarray(0.5 ** (1.0 / half_life), jnp.float32),
        groups=zero,
        calibration=jnp.asarray(jnp.nan, jnp.float32),
    )


def _centred(x: jax.Array, both: jax.Array, size: jax.Array) -> jax.Array:
    lowest = jnp.min(jnp.where(both, x, jnp.inf), axis=-1, keepdims=True)
    shifted = jnp.where(both, x - jnp.where(both, lowest, 0.0), 0.0)
    return jnp.where(both, shifted - jnp.sum(shifted, axis=-1, keepdims=True) / size, 0.0)


def observe(state: State, calibrated: jax.Array, executed: jax.Array) -> State:
    """Fold anchor groups into the moments.

    `calibrated` must come from the map fitted *before* these pairs were added to the debiaser:
    in sample, the map would have learned the noise that is to be measured.

    Args:
      state: the state so far.
      calibrated: [A, N] recalibrated world-model scores.
      executed: [A, N] rewards by execution. An entry that is NaN in either is skipped, and a
        group with fewer than two entries left is skipped; rows of NaN stand for "no group".

    Returns:
      The new state. Rows count as groups in their order, the last one being the newest.
    """
    f = jnp.asarray(calibrated, jnp.float32)
    r = jnp.asarray(executed, jnp.float32)
    both = jnp.isfinite(f) & jnp.isfinite(r)
    f, r = jnp.where(both, f, 0.0), jnp.where(both, r, 0.0)
    size = jnp.sum(both, axis=-1, keepdims=True, dtype=jnp.float32)
    df, dr = (_centred(x, both, jnp.maximum(size, 1.0)) for x in (f, r))
    usable = size[..., 0] >= 2
    freedom = jnp.maximum(size[..., 0] - 1.0, 1.0)
    newer = jnp.cumsum(usable[::-1].astype(jnp.float32))[::-1] - usable
    share = jnp.where(usable, state.decay**newer, 0.0)
    n_new = jnp.sum(usable, dtype=jnp.float32)
    kept = state.decay**n_new

    def fold(old: jax.Array, products: jax.Array) -> jax.Array:
        return kept * old + jnp.sum(share * jnp.sum(products, axis=-1) / freedom)

    state = state._replace(
        s_ff=fold(state.s_ff, df * df),
        s_fr=fold(state.s_fr, df * dr),
        s_rr=fold(state.s_rr, dr * dr),
        total=kept * state.total + jnp.sum(share),
        groups=jnp.minimum(state.groups + n_new, 2.0**24),
    )
    noise = _relative_residual(state)
    due = jnp.isnan(state.calibration) & (state.groups >= _AUTHORS_WARMUP_GROUPS) & (noise > 0)
    fresh = 1.0 / jnp.where(noise > 0, noise, 1.0)
    return state._replace(calibration=jnp.where(due, fresh, state.calibration))


def moments(state: State) -> Moments:
    """The averages (S_ff, S_fr, S_rr), float32 scalars; NaN before the first group."""
    total = jnp.where(state.total > 0, state.total, jnp.nan)
    return state.s_ff / total, state.s_fr / total, state.s_rr / total


def _relative_residual(state: State) -> jax.Array:
    """The authors' s^2: centred squared residual over the variance of the true rewards."""
    residual = jnp.maximum(state.s_ff - 2.0 * state.s_fr + state.s_rr, 0.0)
    return jnp.where(state.s_rr > 0, residual / jnp.where(state.s_rr > 0, state.s_rr, 1.0), 0.0)


def _measured(state: State) -> jax.Array:
    return (state.s_ff > 0) & (state.s_rr > 0)


def slope(state: State) -> jax.Array:
    """S_fr / S_ff clipped at 0 below; 1 while it is not measurable. Float32 scalar."""
    measured = _measured(state)
    ratio = state.s_fr / jnp.where(measured, state.s_ff, 1.0)
    return jnp.where(measured, jnp.maximum(ratio, 0.0), 1.0)


def correlation(state: State) -> jax.Array:
    """S_fr / sqrt(S_ff S_rr) clipped to [0, 1]; 1 while it is not measurable. Float32 scalar."""
    measured = _measured(state)
    scale = jnp.sqrt(jnp.where(measured, state.s_ff, 1.0)) * jnp.sqrt(
        jnp.where(measured, state.s_rr, 1.0)
    )
    return jnp.where(measured, jnp.clip(state.s_fr / scale, 0.0, 1.0), 1.0)


def _inverse_variance(state: State, standardized: bool) -> jax.Array:
    return correlation(state) if standardized else slope(state)


def _authors(state: State, standardized: bool) -> jax.Array:
    del standardized
    c = jnp.where(jnp.isnan(state.calibration), 0.0, state.calibration)
    return 1.0 / jnp.clip(1.0 + c * _relative_residual(state), 1.0, _AUTHORS_MAX_WEIGHT)


def _fixed(state: State, standardized: bool) -> jax.Array:
    del standardized
    return jnp.ones_like(state.total)


RULES: dict[str, Callable[[State, bool], jax.Array]] = {
    "inverse_variance": _inverse_variance,
    "authors": _authors,
    "fixed": _fixed,
}
"""Weight of one world-model group, an anchor group being 1, by rule: (state, standardized)."""


def weights(
    state: State,
    n_anchor: int | jax.Array,
    n_world_model: int | jax.Array,
    standardized: bool = True,
    *,
    rule: str = "inverse_variance",
) -> Weights:
    """Weights of the two streams' *mean* gradients.

    With n_a anchor groups, n_w world-model groups and the rule's weight rho of one world-model
    group: ``(n_a, rho * n_w) / (n_a + rho * n_w)``.

    ``inverse_variance``: a linear combination of estimates with means a*mu and variances V has
    least error when each is weighted by a/V, which here is the regression slope S_fr / S_ff for
    centred advantages and the correlation S_fr / sqrt(S_ff S_rr) for standardized ones. For
    calibrated scores these are the weights of arXiv 2608.12564. ``authors``: the rule of its
    code, an anchor weight of clip(1 + c s^2, 1, 4) with c set after 32 groups so that the weight
    is 2 then. ``fixed``: every group counts the same.

    Args:
      state: the moments; while they cannot be measured, rho is 1.
      n_anchor: groups that contribute to the anchor gradient.
      n_world_model: groups that contribute to the world-model gradient.
      standardized: whether advantages are divided by the group's deviation.
      rule: one of `RULES`.

    Returns:
      (w_anchor, w_world_model), float32 scalars that sum to 1. A stream without groups has
      weight 0; with neither, the anchor weight is 1.

    Raises:
      KeyError: an unknown rule.
    """
    n_a = jnp.asarray(n_anchor, jnp.float32)
    n_w = jnp.asarray(n_world_model, jnp.float32)
    share_w = RULES[rule](state, standardized) * n_w
    total = n_a + share_w
    w_world_model = jnp.where(total > 0, share_w / jnp.where(total > 0, total, 1.0), 0.0)
    # A useless world model without any anchor: there is nothing better to follow.
    w_world_model = jnp.where((n_a == 0) & (n_w > 0), 1.0, w_world_model)
    return 1.0 - w_world_model, w_world_model


def combine(anchor_grads: Tree, world_model_grads: Tree, w: Weights) -> Tree:
    """The fused gradient ``w[0] * anchor_grads + w[1] * world_model_grads``, leaf by leaf.

    A stream of weight 0 is ignored also where its gradient is NaN (the mean over no groups).
    Sums are made in float32 and cast back to the leaf's dtype.
    """
    w_anchor, w_world_model = w

    def scaled(weight: jax.Array, leaf: jax.Array) -> jax.Array:
        return jnp.where(weight == 0, 0.0, weight * jnp.where(weight == 0, 0.0, leaf))

    def fuse(a: jax.Array, b: jax.Array) -> jax.Array:
        a32, b32 = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
        return (scaled(w_anchor, a32) + scaled(w_world_model, b32)).astype(jnp.asarray(a).dtype)

    return jax.tree.map(fuse, anchor_grads, world_model_grads)


def group_weights(
    w: Weights,
    is_anchor: jax.Array,
    usable: jax.Array,
    *,
    size: jax.Array | None = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> jax.Array:
    """Per-group multipliers by which weighting the loss equals `combine` of gradients.

    Let the loss be the sum of the groups' losses over the sum of their sizes. Multiplying each
    group's advantages by these gives ``w[0]`` times the loss of the anchor stream alone plus
    ``w[1]`` times that of the world-model stream alone, each normalised by its own size.

    Args:
      w: from `weights`.
      is_anchor: bool [G].
      usable: bool [G], groups that contribute; the others get multiplier 0.
      size: float [G], each group's share in the loss's denominator: its tokens for a token mean;
        None for 1 each, as when the denominator counts groups of equal size.
      axis_name: mapped axis over which groups are split, if any.

    Returns:
      float32 [G].
    """
    size = jnp.ones(usable.shape, jnp.float32) if size is None else size.astype(jnp.float32)
    size = jnp.where(usable, size, 0.0)
    in_anchor = jnp.sum(jnp.where(is_anchor, size, 0.0))
    in_total = jnp.sum(size)
    if axis_name is not None:
        in_anchor, in_total = jax.lax.psum((in_anchor, in_total), axis_name)
    in_world_model = in_total - in_anchor

    def multiplier(weight: jax.Array, stream: jax.Array) -> jax.Array:
        return jnp.where(stream > 0, weight * in_total / jnp.where(stream > 0, stream, 1.0), 0.0)

    chosen = jnp.where(is_anchor, multiplier(w[0], in_anchor), multiplier(w[1], in_world_model))
    return jnp.where(usable, chosen, 0.0)


def control_variate(
    executed_advantages: jax.Array,
    predicted_advantages: jax.Array,
    is_anchor: jax.Array,
    usable_executed: jax.Array,
    usable_predicted: jax.Array,
    coefficient: jax.Array,
    *,
    size: jax.Array | None = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> jax.Array:
    """Advantages whose gradient is the world-model gradient corrected by the anchors.

    With g_E(anchors) the mean gradient of anchor groups under true rewards, and g_WM the mean
    gradient under predicted ones over the same groups or over all::

        g = g_E(anchors) + coefficient * (g_WM(all) - g_WM(anchors))

    Its mean is that of g_E for *every* coefficient and whatever the world model's bias, for the
    anchors are a random sample of the groups. At coefficient 1 it is the familiar
    ``g_WM(all) + (g_E(anchors) - g_WM(anchors))``. The variance is least at the measured
    covariance over the variance of the world-model gradient: `slope` for centred advantages,
    `correlation` for standardized ones. The policy gradient is linear in advantages, so the three
    means become one weighted sum per rollout and one backward pass.

    Args:
      executed_advantages: [G, N], from true rewards; read where `usable_executed` anchors.
      predicted_advantages: [G, N], from recalibrated scores of *all* groups, anchors included.
      is_anchor: bool [G].
      usable_executed: bool [G], anchors that have a true grade and count.
      usable_predicted: bool [G], groups that have a score and count.
      coefficient: float32 scalar, `slope(state)` or `correlation(state)`.
      size: float [G], each group's share in the loss's denominator; None for 1 each.
      axis_name: mapped axis over which groups are split, if any.

    Returns:
      float32 [G, N]: use it as the advantages of a loss normalised over the groups for which
      ``usable_predicted | (is_anchor & usable_executed)`` holds. Without a usable anchor it is
      the plain world-model gradient.
    """
    size = jnp.ones(is_anchor.shape, jnp.float32) if size is None else size.astype(jnp.float32)
    true_anchor = is_anchor & usable_executed
    paired = is_anchor & usable_predicted
    members = jnp.stack([true_anchor, paired, usable_predicted, usable_predicted | true_anchor])
    sums = jnp.sum(jnp.where(members, size, 0.0), axis=-1)
    if axis_name is not None:
        sums = jax.lax.psum(sums, axis_name)
    in_true, in_paired, in_predicted, in_all = sums

    def share(member: jax.Array, total: jax.Array) -> jax.Array:
        return jnp.where(member & (total > 0), in_all / jnp.where(total > 0, total, 1.0), 0.0)

    # With no pair to subtract, the correction of the world-model mean is unknown.
    correctable = (in_true > 0) & (in_paired > 0)
    coefficient = jnp.where(correctable, coefficient, jnp.where(in_true > 0, 0.0, 1.0))
    predicted_share = share(usable_predicted, in_predicted) - jnp.where(
        correctable, share(paired, in_paired), 0.0
    )
    executed = jnp.where(true_anchor[:, None], executed_advantages, 0.0)
    predicted = jnp.where(usable_predicted[:, None], predicted_advantages, 0.0)
    return (
        share(true_anchor, in_true)[:, None] * executed
        + (coefficient * predicted_share)[:, None] * predicted
    )
