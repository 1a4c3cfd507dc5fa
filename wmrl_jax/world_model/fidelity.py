"""How far the world model's predictions agree with execution, on cases that it never saw.

Everything is computed from a `Prediction` and the executed cases: no model here. Intervals are 95 %
bootstrap percentiles over the cases, drawn within each task. A metric that the cases do not
determine (a rank correlation where all rewards are equal) is None.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import rankdata

from wmrl_jax.errors import UserError
from wmrl_jax.types import STATUSES
from wmrl_jax.world_model.cases import Case
from wmrl_jax.world_model.readout import FAILURES, Prediction

Recalibrate = Callable[[np.ndarray], Any]
"""Scores [n] -> recalibrated scores [n]: the debiaser's map, say."""

BINS = 10


def rank_correlation(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Spearman correlation over the last axis, ties at their mean rank; NaN where one is constant.

    Args:
      x: [..., n].
      y: [..., n].

    Returns:
      float64 [...].
    """
    ranks = [rankdata(values, axis=-1) for values in (x, y)]
    centred = [r - r.mean(-1, keepdims=True) for r in ranks]
    product = (centred[0] * centred[1]).sum(-1)
    scale = np.sqrt((centred[0] ** 2).sum(-1) * (centred[1] ** 2).sum(-1))
    return np.divide(product, scale, out=np.full(np.shape(scale), np.nan), where=scale > 0)


def calibration_curve(
    confidence: np.ndarray, truth: np.ndarray, bins: int = BINS
) -> tuple[float, list[dict[str, float]]]:
    """Expected calibration error over equal-width bins of [0, 1], and the curve behind it.

    Args:
      confidence: [n], what was predicted, in [0, 1].
      truth: [n], what came out, in [0, 1].
      bins: number of bins.

    Returns:
      the mean over cases of |mean truth - mean confidence| of their bin (Guo et al. 2017), and per
      occupied bin `predicted`, `true` (means) and `cases`.
    """
    index = np.minimum((np.asarray(confidence) * bins).astype(int), bins - 1)
    curve = [
        {
            "predicted": float(confidence[index == b].mean()),
            "true": float(truth[index == b].mean()),
            "cases": int((index == b).sum()),
        }
        for b in np.unique(index)
    ]
    error = sum(abs(p["predicted"] - p["true"]) * p["cases"] for p in curve) / len(confidence)
    return float(error), curve


def measure(
    prediction: Prediction,
    cases: Sequence[Case],
    *,
    recalibrate: Recalibrate | None = None,
    bootstrap: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Fidelity of predictions [n] on n executed cases.

    Args:
      prediction: the world model's; cases with a NaN score are counted as ungraded and left out.
      cases: what execution said, in the same order.
      recalibrate: a map from raw to recalibrated scores; the reward metrics are then given before
        and after it.
      bootstrap: resamples behind the intervals.
      seed: of the resamples.

    Returns:
      A dict that JSON can hold: `cases`, `ungraded`, `tasks`; `status` (accuracy at 1 and 2, the
      share of the most frequent status, confusion counts, calibration); `reward` with `raw` and,
      with a map, `recalibrated` (MAE, RMSE, bias = mean predicted - true, calibration, mean
      within-task rank correlation, and the MAE and RMSE of predicting each task's mean reward);
      `by_status` and `by_task`. A metric with an interval is {value, low, high}.

    Raises:
      UserError: no graded case.
    """
    graded = np.isfinite(np.asarray(prediction.score, np.float64))
    if not graded.any():
        raise UserError("there is no held-out executed case that the world model graded")
    kept = [case for case, ok in zip(cases, graded, strict=True) if ok]
    score = np.asarray(prediction.score, np.float64)[graded]
    probs = np.asarray(prediction.probs, np.float64)[graded]
    reward = np.asarray([case.reward for case in kept])
    truth = np.asarray([STATUSES.index(case.status) for case in kept])
    names = np.asarray([case.task for case in kept])
    members = {str(task): np.flatnonzero(names == task) for task in np.unique(names)}

    failures = len(FAILURES)
    by_status = np.concatenate([probs[:, :failures], probs[:, failures:].sum(1, keepdims=True)], 1)
    ranked = np.argsort(-by_status, axis=1, kind="stable")
    first = ranked[:, 0] == truth
    second = first | (ranked[:, 1] == truth)

    rng = np.random.default_rng(seed)
    draws = {t: m[rng.integers(len(m), size=(bootstrap, len(m)))] for t, m in members.items()}
    drawn = np.concatenate(list(draws.values()), axis=1)

    def mean(values: np.ndarray) -> dict[str, float | None]:
        return _interval(values.mean(), values[drawn].mean(1))

    def rewards(predicted: np.ndarray) -> dict[str, Any]:
        error = predicted - reward
        squared = error**2
        own = {t: rank_correlation(predicted[m], reward[m]) for t, m in members.items()}
        resampled = np.stack([rank_correlation(predicted[d], reward[d]) for d in draws.values()])
        ece, curve = calibration_curve(np.clip(predicted, 0.0, 1.0), reward)
        return {
            "mae": mean(np.abs(error)),
            "rmse": _interval(np.sqrt(squared.mean()), np.sqrt(squared[drawn].mean(1))),
            "bias": mean(error),
            "rank_correlation": _interval(_mean(np.stack(list(own.values()))), _mean(resampled)),
            "calibration_error": ece,
            "curve": curve,
        }

    confidence = np.take_along_axis(by_status, ranked[:, :1], 1)[:, 0]
    status_ece, status_curve = calibration_curve(confidence, first.astype(float))
    task_mean = np.empty_like(reward)
    for m in members.values():
        task_mean[m] = reward[m].mean()
    report: dict[str, Any] = {
        "cases": len(kept),
        "ungraded": int((~graded).sum()),
        "tasks": len(members),
        "status": {
            "accuracy_at_1": mean(first),
            "accuracy_at_2": mean(second),
            "most_frequent": float(np.bincount(truth).max() / len(truth)),
            "confusion": _confusion(truth, ranked[:, 0]),
            "calibration_error": status_ece,
            "curve": status_curve,
        },
        "reward": {
            "task_mean_mae": float(np.abs(task_mean - reward).mean()),
            "task_mean_rmse": float(np.sqrt(((task_mean - reward) ** 2).mean())),
            "raw": rewards(score),
        },
        "by_status": {
            STATUSES[s]: _part(score, reward, first, truth == s) for s in np.unique(truth)
        },
        "by_task": {task: _part(score, reward, first, m) for task, m in members.items()},
    }
    if recalibrate is not None:
        mapped = np.asarray(recalibrate(score.astype(np.float32)), np.float64)
        report["reward"]["recalibrated"] = rewards(mapped)
    return report


def save_report(path: Path, report: dict[str, Any]) -> None:
    """Writes the dict of `measure` as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def table(report: dict[str, Any]) -> str:
    """The dict of `measure` as text for a terminal."""
    status, reward = report["status"], report["reward"]
    lines = [
        f"{report['cases']} held-out executed cases of {report['tasks']} tasks, "
        f"{report['ungraded']} ungraded",
        "",
        f"{'status accuracy at 1':34}{_show(status['accuracy_at_1'])}   "
        f"(most frequent status: {status['most_frequent']:.3f})",
        f"{'status accuracy at 2':34}{_show(status['accuracy_at_2'])}",
        f"{'status calibration error':34}{status['calibration_error']:.3f}",
    ]
    for name in ("raw", "recalibrated"):
        if name not in reward:
            continue
        part = reward[name]
        lines += [
            "",
            f"reward, {name}",
            f"{'  mean absolute error':34}{_show(part['mae'])}   "
            f"(each task's mean: {reward['task_mean_mae']:.3f})",
            f"{'  root mean square error':34}{_show(part['rmse'])}   "
            f"(each task's mean: {reward['task_mean_rmse']:.3f})",
            f"{'  bias':34}{_show(part['bias'])}",
            f"{'  rank correlation within a task':34}{_show(part['rank_correlation'])}",
            f"{'  calibration error':34}{part['calibration_error']:.3f}",
        ]
    for title, key in (("status", "by_status"), ("task", "by_task")):
        lines += ["", f"{'by ' + title:34}{'cases':>6}{'acc@1':>8}{'MAE':>8}{'bias':>8}{'rank':>8}"]
        for name, part in report[key].items():
            rank = part["rank_correlation"]
            lines.append(
                f"{'  ' + name:34}{part['cases']:>6}{part['accuracy_at_1']:>8.3f}"
                f"{part['mae']:>8.3f}{part['bias']:>8.3f}"
                + (f"{'-':>8}" if rank is None else f"{rank:>8.3f}")
            )
    return "\n".join(lines)


def _part(score: np.ndarray, reward: np.ndarray, first: np.ndarray, chosen: np.ndarray) -> Any:
    error = (score - reward)[chosen]
    return {
        "cases": len(error),
        "accuracy_at_1": float(first[chosen].mean()),
        "mae": float(np.abs(error).mean()),
        "bias": float(error.mean()),
        "rank_correlation": _plain(rank_correlation(score[chosen], reward[chosen])),
    }


def _confusion(truth: np.ndarray, predicted: np.ndarray) -> dict[str, dict[str, int]]:
    return {
        STATUSES[t]: {
            STATUSES[p]: int(((truth == t) & (predicted == p)).sum())
            for p in np.unique(predicted[truth == t])
        }
        for t in np.unique(truth)
    }


def _mean(correlations: np.ndarray) -> np.ndarray:
    """Mean over the first axis of what is known; NaN where nothing is."""
    known = np.isfinite(correlations)
    total = np.where(known, correlations, 0.0).sum(0)
    return np.divide(
        total, known.sum(0), out=np.full(np.shape(total), np.nan), where=known.sum(0) > 0
    )


def _interval(value: Any, resampled: np.ndarray) -> dict[str, float | None]:
    known = resampled[np.isfinite(resampled)]
    low, high = np.percentile(known, [2.5, 97.5]) if len(known) else (math.nan, math.nan)
    return {"value": _plain(value), "low": _plain(low), "high": _plain(high)}


def _plain(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


def _show(metric: dict[str, float | None]) -> str:
    if metric["value"] is None:
        return "not determined"
    return f"{metric['value']:.3f} [{metric['low']:.3f}, {metric['high']:.3f}]"
