"""The report's section on how far the world model agrees with execution."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from wmrl_jax.train.evaluate import Estimate
from wmrl_jax.train.evaluation_io import format_estimate
from wmrl_jax.train.report.data import RunRecord, number
from wmrl_jax.train.report.page import (
    Child,
    Html,
    definitions,
    element,
    join,
    minus,
    missing,
    table,
)


def fidelity_section(run: RunRecord) -> Html:
    """How far the world model agrees with execution on cases it never saw."""
    if run.fidelity is None:
        return missing("Fidelity was not measured yet: fidelity.json is missing.")
    flat = dict(_flatten(run.fidelity))
    known = {
        words: _metric(run.fidelity, path)
        for path, words in _FIDELITY_WORDS.items()
        if _find(run.fidelity, path) is not None
    }
    intro = element(
        "p",
        "Measured on executed cases that were held out of the world model's tuning. Intervals are "
        "95 % bootstrap intervals over the cases.",
    )
    parts: list[Child] = [intro]
    if known:
        parts.append(definitions(known))
    by_task = _find(run.fidelity, "by_task")
    if isinstance(by_task, Mapping) and all(isinstance(v, Mapping) for v in by_task.values()):
        columns = {
            "cases": "cases",
            "status accuracy": "accuracy_at_1",
            "reward error": "mae",
            "bias": "bias",
            "rank correlation": "rank_correlation",
        }
        rows = [
            [task, *(_figure(part.get(key), signed=key == "bias") for key in columns.values())]
            for task, part in by_task.items()
        ]
        parts.append(table(["task", *columns], rows))
    if not known:
        parts.append(definitions({k: str(v) for k, v in flat.items()}))
    return join(parts)


_FIDELITY_WORDS = {
    "cases": "held-out cases",
    "ungraded": "ungraded",
    "status.accuracy_at_1": "status accuracy, first guess",
    "status.accuracy_at_2": "status accuracy, two guesses",
    "status.most_frequent": "share of the most frequent status",
    "status.calibration_error": "calibration error of the status",
    "reward.raw.mae": "reward error, raw (mean absolute)",
    "reward.recalibrated.mae": "reward error, recalibrated",
    "reward.task_mean_mae": "reward error of each task's mean",
    "reward.raw.bias": "bias, raw",
    "reward.recalibrated.bias": "bias, recalibrated",
    "reward.raw.rank_correlation": "rank correlation within a task",
    "reward.raw.calibration_error": "calibration error of the reward",
}


def _find(content: Mapping[str, Any], path: str) -> Any:
    value: Any = content
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _metric(content: Mapping[str, Any], path: str) -> str:
    return _figure(_find(content, path), signed=path.endswith("bias"))


def _figure(value: Any, *, signed: bool = False) -> str:
    """A number, or {value, low, high}, as text."""
    if isinstance(value, Mapping):
        ends = [number(value.get(k)) for k in ("value", "low", "high")]
        return minus(format_estimate(Estimate(*ends), signed=signed))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    known = number(value)
    return "–" if math.isnan(known) else minus(f"{known:{'+.3f' if signed else '.3f'}}")


def _flatten(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in content.items():
        if isinstance(value, Mapping):
            flat += _flatten(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            flat.append((f"{prefix}{key}", value))
    return flat
