"""From scores and executions to weighted advantages: the order of a step, DESIGN section 5.

The moments are measured with the map fitted before this step's pairs are added, then the pairs
are added and the map refitted, then the other groups are recalibrated and advantages formed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from wmrl_jax.method import debias, denoise
from wmrl_jax.method.advantages import ADVANTAGES, GroupKinds, group_kinds
from wmrl_jax.train.config import Config


class Corrected(NamedTuple):
    """What the corrections make of a batch's grades.

    Attributes:
      advantages: float32 [G, N], fusion weights included; zero where a rollout contributes nothing.
      keep: bool [G], groups that count in the loss.
      rewards: float32 [G, N] that the advantages were formed of, NaN where ungraded.
      kinds: used, degenerate and ungraded groups, bool [G] each.
      weights: (anchor, world model) weights of the two streams' mean gradients.
      debias: the new `debias.State`.
      denoise: the new `denoise.State`.
    """

    advantages: jax.Array
    keep: jax.Array
    rewards: jax.Array
    kinds: GroupKinds
    weights: denoise.Weights
    debias: debias.State
    denoise: denoise.State


def init_corrections(config: Config) -> tuple[debias.State, denoise.State]:
    """The two states before any anchor."""
    chosen = config.corrections
    return (
        debias.init(capacity=chosen.capacity, min_pairs=chosen.min_pairs),
        denoise.init(half_life=chosen.half_life),
    )


def correct(
    debias_state: debias.State,
    denoise_state: denoise.State,
    predicted: jax.Array,
    executed: jax.Array,
    is_anchor: jax.Array,
    size: jax.Array,
    config: Config,
) -> Corrected:
    """Corrects a batch.

    The moments and the map are kept up in every arm that has both kinds of grades, so that an
    ablation shows in its record what it leaves unused.

    Args:
      debias_state: before the step.
      denoise_state: before the step.
      predicted: float32 [G, N] raw scores, NaN where ungraded.
      executed: float32 [G, N], NaN where not executed.
      is_anchor: bool [G].
      size: float32 [G], each group's share in the loss's denominator.
      config: its sections reward, corrections and loss are read.
    """
    chosen = config.corrections
    advantages_of = ADVANTAGES[config.loss.advantages]
    standardized = config.loss.advantages == "standardized"

    def calibrate(state: debias.State) -> jax.Array:
        return debias.apply(state, predicted) if chosen.debias else predicted

    calibrated = predicted
    if config.reward.source == "mixed":
        true_rewards = jnp.where(is_anchor[:, None], executed, jnp.nan)
        denoise_state = denoise.observe(denoise_state, calibrate(debias_state), true_rewards)
        debias_state = debias.observe(debias_state, predicted, true_rewards, map=chosen.map)
        calibrated = calibrate(debias_state)
        rewards = jnp.where(is_anchor[:, None], executed, calibrated)
    else:
        is_anchor = jnp.full_like(is_anchor, config.reward.source == "execution")
        rewards = executed if config.reward.source == "execution" else predicted
    kinds = group_kinds(rewards)
    advantages = advantages_of(rewards)

    if chosen.denoise and chosen.fusion == "control_variate" and config.reward.source == "mixed":
        scored = group_kinds(calibrated).used
        coefficient = (denoise.correlation if standardized else denoise.slope)(denoise_state)
        advantages = denoise.control_variate(
            advantages,
            advantages_of(calibrated),
            is_anchor,
            kinds.used,
            scored,
            coefficient,
            size=size,
        )
        keep = scored | (is_anchor & kinds.used)
        weights = (1.0 - coefficient, coefficient)
    else:
        rule = chosen.fusion if chosen.denoise else "fixed"
        weights = denoise.weights(
            denoise_state,
            jnp.sum(kinds.used & is_anchor),
            jnp.sum(kinds.used & ~is_anchor),
            standardized,
            rule=rule,
        )
        multipliers = denoise.group_weights(weights, is_anchor, kinds.used, size=size)
        advantages = advantages * multipliers[:, None]
        keep = kinds.used
    return Corrected(advantages, keep, rewards, kinds, weights, debias_state, denoise_state)
