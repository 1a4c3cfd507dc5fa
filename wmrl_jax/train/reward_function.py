"""The corrections as a reward function, for trainers that take one: `google-tunix`, TRL.

Such a trainer hands over prompts and completions and wants a number for each. This grades the
anchor groups by execution and the others by recalibrated predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from wmrl_jax.errors import UserError
from wmrl_jax.method import anchors, debias, denoise

GradeFn = Callable[[Sequence[str], Sequence[str]], Sequence[float]]
"""(prompts, completions) -> a reward in [0, 1] of each; NaN where there is none."""


class CorrectedRewards:
    """Callable as `(prompts, completions, **ignored) -> list of rewards`.

    The completions of a group stand together, `group_size` of them. In a trainer that centres the
    rewards of a group without dividing by their deviation (Dr. GRPO), the two streams are fused as
    well: a group's rewards are stretched about their mean by its fusion weight, and so is its
    gradient. Where the trainer standardizes, it undoes any stretching, and only the bias is
    corrected.

    Args:
      execute: grades completions for real; asked for anchor groups only.
      predict: the world model's grades; asked for every group.
      group_size: completions of a prompt, at least 2.
      key: decides which groups are anchors.
      fraction: share of the groups that are executed.
      capacity: pairs that the debiaser holds.
      min_pairs: pairs from which its map is used.
      standardized: whether the trainer divides by the group's deviation.

    Attributes:
      debias: the `debias.State`.
      denoise: the `denoise.State`.
      calls: how often it was called; with `key` it decides the anchors.
      executed: groups that were executed so far.
      predicted: groups that were not.

    Raises:
      UserError: `group_size` is below 2; at a call, a number of completions that it does not
        divide, or a grader that returns another number of grades.
    """

    __name__ = "corrected_rewards"  # trainers log a reward function under its name

    def __init__(
        self,
        execute: GradeFn,
        predict: GradeFn,
        group_size: int,
        key: jax.Array,
        *,
        fraction: float = 0.1,
        capacity: int = 4096,
        min_pairs: int = 64,
        standardized: bool = True,
    ) -> None:
        if group_size < 2:
            raise UserError(
                f"group_size is {group_size}, and a group of one has no group-relative signal: "
                "give at least 2"
            )
        self._execute, self._predict = execute, predict
        self._size, self._key, self._fraction = group_size, key, fraction
        self._standardized = standardized
        self.debias = debias.init(capacity, min_pairs)
        self.denoise = denoise.init()
        self.calls = self.executed = self.predicted = 0

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **ignored: object
    ) -> list[float]:
        """Rewards of the completions, in their order."""
        if len(completions) % self._size:
            raise UserError(
                f"{len(completions)} completions are no groups of {self._size}: make group_size "
                "the trainer's number of generations"
            )
        groups = len(completions) // self._size
        predicted = _graded("predict", self._predict, prompts, completions)
        predicted = jnp.asarray(predicted.reshape(groups, self._size))
        chosen = np.asarray(anchors.select(self._key, self.calls, groups, self._fraction))
        executed = np.full((groups, self._size), np.nan, np.float32)
        if chosen.any():
            rows = np.flatnonzero(np.repeat(chosen, self._size)).tolist()
            executed[chosen] = _graded(
                "execute", self._execute, [prompts[i] for i in rows], [completions[i] for i in rows]
            ).reshape(-1, self._size)
        rewards, self.debias, self.denoise = _correct(
            self.debias, self.denoise, predicted, executed, chosen, self._standardized
        )
        self.calls += 1
        self.executed += int(chosen.sum())
        self.predicted += int((~chosen).sum())
        return np.asarray(rewards).reshape(-1).tolist()


def _graded(
    name: str, grade: GradeFn, prompts: Sequence[str], completions: Sequence[str]
) -> np.ndarray:
    grades = np.asarray(grade(prompts, completions), np.float32)
    if grades.shape != (len(completions),):
        raise UserError(
            f"{name} was asked for {len(completions)} grades and returned an array of shape "
            f"{grades.shape}"
        )
    return grades


def _rewards(
    debias_state: debias.State,
    denoise_state: denoise.State,
    predicted: jax.Array,
    executed: jax.Array,
    is_anchor: jax.Array,
    standardized: bool,
) -> tuple[jax.Array, debias.State, denoise.State]:
    denoise_state = denoise.observe(denoise_state, debias.apply(debias_state, predicted), executed)
    debias_state = debias.observe(debias_state, predicted, executed)
    rewards = jnp.where(is_anchor[:, None], executed, debias.apply(debias_state, predicted))
    if standardized:
        return rewards, debias_state, denoise_state
    n_anchor = jnp.sum(is_anchor)
    weights = denoise.weights(
        denoise_state, n_anchor, is_anchor.size - n_anchor, standardized=False
    )
    stretch = denoise.group_weights(weights, is_anchor, jnp.ones_like(is_anchor))[:, None]
    mean = jnp.nanmean(rewards, axis=1, keepdims=True)
    return mean + stretch * (rewards - mean), debias_state, denoise_state


_correct = jax.jit(_rewards, static_argnums=5)
