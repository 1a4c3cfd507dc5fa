"""The planner: which anchor fraction reaches a target with the least compute.

It simulates corrected training (`method.theory`) at several fractions with a world model of the
given bias and noise, or with one fitted to the anchor pairs of a finished run, and prices the
steps that each fraction needs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wmrl_jax.errors import UserError, did_you_mean
from wmrl_jax.method import theory
from wmrl_jax.method.isotonic import isotonic_regression
from wmrl_jax.method.theory import BIAS_SHAPES, Arm, Family, Sizes
from wmrl_jax.train.simulation import OnRuns, run_arms

FRACTIONS = (0.0, 1 / 32, 1 / 16, 0.1, 1 / 8, 1 / 4, 1 / 2, 1.0)
_SMOOTH = 20  # steps: a single lucky step is no arrival
_RESAMPLES = 1000
_FEWEST_PAIRS = 32
_SIZES = Sizes(steps=400, groups=32, capacity=512)
_RATE = 1.0


class PlanRow(NamedTuple):
    """One anchor fraction.

    Attributes:
      fraction: share of groups that are executed.
      steps: until the target is reached; infinite if it is not.
      cost: seconds of compute until then.
      cost_low: lower end of its 95 % bootstrap interval over simulated runs.
      cost_high: its upper end.
      saving: share of the cost of executing every group that is saved.
      best: share of the resamples in which this fraction is the cheapest.
      final_gap: share of the initial gap that is left after the last step.
    """

    fraction: float
    steps: float
    cost: float
    cost_low: float
    cost_high: float
    saving: float
    best: float
    final_gap: float


class Plan(NamedTuple):
    """The answer.

    Attributes:
      fraction: the cheapest that reaches the target; NaN if none does.
      saving: against executing every group.
      saving_low: lower end of its 95 % interval.
      saving_high: upper end.
      sure: share of the resamples in which `fraction` is the cheapest.
      rows: one for each fraction.
    """

    fraction: float
    saving: float
    saving_low: float
    saving_high: float
    sure: float
    rows: list[PlanRow]


def scores_from_pairs(path: Path) -> tuple[np.ndarray, np.ndarray, float]:
    """A world model fitted to the anchor pairs of a run.

    Returns:
      Rewards and the mean score of each, both increasing, for interpolation; and the deviation
      of scores about it. What the score gets wrong of a program counts as noise, though part of
      it is the same for like programs: the plan is on the hopeful side then.

    Raises:
      UserError: the run has no pairs, or too few.
    """
    file = path / "pairs.jsonl"
    if not file.exists():
        raise UserError(f"{path} has no pairs.jsonl, so it is no folder of a run with anchors")
    pairs = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    if len(pairs) < _FEWEST_PAIRS:
        raise UserError(
            f"{file} holds {len(pairs)} anchor pairs, a plan needs {_FEWEST_PAIRS}; let the run go "
            "on, or give --bias and --noise"
        )
    predicted = np.array([pair["predicted"] for pair in pairs])
    executed = np.array([pair["executed"] for pair in pairs])
    rewards, inverse, counts = np.unique(executed, return_inverse=True, return_counts=True)
    means = np.bincount(inverse, predicted) / counts
    fitted = np.asarray(isotonic_regression(jnp.asarray(means), jnp.asarray(counts, jnp.float32)))
    return rewards, fitted, float(np.std(predicted - fitted[inverse]))


def make_plan(
    *,
    cost_execution: float,
    cost_score: float,
    cost_rollout: float = 0.0,
    target: float = 0.05,
    bias_shape: str = "saturating",
    bias_size: float = 0.0,
    noise: float = 0.0,
    run: Path | None = None,
    runs: int = 128,
    seed: int = 0,
    on_runs: OnRuns = lambda n: None,
) -> Plan:
    """Finds the anchor fraction.

    Args:
      cost_execution: seconds of one execution.
      cost_score: seconds of one world-model score.
      cost_rollout: seconds of sampling one program and training on it, whatever grades it.
      target: share of the initial gap to the best policy that may be left.
      bias_shape: of the world model, one of `BIAS_SHAPES`; not looked at with `run`.
      bias_size: B.
      noise: deviation of a score.
      run: folder of a finished run whose anchor pairs give the world model instead.
      runs: simulated runs for each fraction.
      seed: of the simulation.
      on_runs: progress.

    Raises:
      UserError: an unknown shape; see also `scores_from_pairs`.
    """
    if bias_shape not in BIAS_SHAPES:
        raise UserError(
            f"{bias_shape!r} is no shape of a bias{did_you_mean(bias_shape, BIAS_SHAPES)}; "
            f"there are {', '.join(BIAS_SHAPES)}"
        )
    family = theory.make_family(jax.random.key(seed))
    arm = Arm(BIAS_SHAPES.index(bias_shape), bias_size, noise, learning_rate=_RATE, denoise=True)
    if run is not None:
        family, noise = _fitted(family, run)
        arm = Arm(noise=noise, learning_rate=_RATE, denoise=True)
    arms = [arm._replace(fraction=fraction) for fraction in FRACTIONS]
    gap = np.asarray(run_arms(family, arms, runs, _SIZES, seed, on_runs).gap)
    prices = np.array(
        [cost_rollout + f * cost_execution + cost_score * (f < 1.0) for f in FRACTIONS]
    ) * (_SIZES.groups * _SIZES.rollouts)
    return _priced(gap, prices, target, seed)


def planned_runs(runs: int) -> int:
    """How many runs `make_plan` simulates."""
    return runs * len(FRACTIONS)


def _fitted(family: Family, run: Path) -> tuple[Family, float]:
    rewards, means, noise = scores_from_pairs(run)
    scores = jnp.interp(family.rewards, jnp.asarray(rewards), jnp.asarray(means))
    return family._replace(scores=scores), noise


def _priced(gap: np.ndarray, prices: np.ndarray, target: float, seed: int) -> Plan:
    """The plan from gaps [fractions, runs, steps] and the price of a step of each fraction."""
    initial = float(gap[:, :, 0].mean())
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(gap.shape[1], np.full(gap.shape[1], 1 / gap.shape[1]), _RESAMPLES)
    steps = _arrival(gap.mean(1), target * initial)
    resampled = np.stack([_arrival(weights @ g / gap.shape[1], target * initial) for g in gap])
    cost, costs = steps * prices, resampled * prices[:, None]
    reached = np.isfinite(costs).any(0)
    cheapest = np.where(reached, costs.argmin(0), -1)
    real = len(prices) - 1
    rows = []
    for i, fraction in enumerate(FRACTIONS):
        low, high = np.quantile(costs[i], [0.025, 0.975], method="nearest")
        rows.append(
            PlanRow(
                fraction=fraction,
                steps=float(steps[i]),
                cost=float(cost[i]),
                cost_low=float(low),
                cost_high=float(high),
                saving=_saving(cost[i], cost[real]),
                best=float(np.mean(cheapest == i)),
                final_gap=float(gap[i, :, -_SMOOTH:].mean() / initial),
            )
        )
    if not np.isfinite(cost).any():
        return Plan(np.nan, np.nan, np.nan, np.nan, 0.0, rows)
    best = int(np.argmin(cost))
    savings = [_saving(a, b) for a, b in zip(costs[best], costs[real], strict=True)]
    low, high = np.nanquantile(savings, [0.025, 0.975])
    return Plan(FRACTIONS[best], rows[best].saving, float(low), float(high), rows[best].best, rows)


def _saving(cost: Any, real: Any) -> float:
    """Share of `real` that is saved; NaN where either never arrives."""
    if not (np.isfinite(cost) and np.isfinite(real)):
        return float("nan")
    return float(1.0 - cost / real)


def _arrival(gap: np.ndarray, target: float) -> np.ndarray:
    """First step [n] at which the moving mean of gaps [n, steps] is at most `target`, or inf."""
    kernel = np.ones(_SMOOTH) / _SMOOTH
    smooth = np.stack([np.convolve(row, kernel, mode="valid") for row in gap])
    there = smooth <= target
    return np.where(there.any(-1), there.argmax(-1) + _SMOOTH, np.inf)
