"""The report's sections on the training itself: rewards, corrections, groups, ledger, health."""

from __future__ import annotations

import math

import numpy as np

from wmrl_jax.train.report import plots
from wmrl_jax.train.report.data import RunRecord, number
from wmrl_jax.train.report.page import Child, Html, figure, join, missing, swatch, table
from wmrl_jax.types import STATUSES

GROUP_SHADES = {
    "used": "executed",
    "degenerate": "before",
    "ungraded": "bad",
    "stale": "predicted",
}
"""Kinds of groups that metrics.jsonl counts as `groups_<kind>`, with their colours."""

REWARD_WORDS = {
    "executed": "Executed is the truth, known on the groups that were executed.",
    "predicted": "Predicted is the world model's raw score of the other groups.",
    "calibrated": "Recalibrated is that score after the fitted map.",
}
"""What the lines of the first picture are."""

NO_METRICS = "No step has been logged yet: metrics.jsonl is missing or empty."


def rewards_section(run: RunRecord) -> Html:
    """Predicted, recalibrated and executed reward over the steps."""
    series = {k: run.series(f"reward_{k}") for k in ("predicted", "calibrated", "executed")}
    if not any(np.isfinite(v).any() for v in series.values()):
        return missing("No rewards yet: metrics.jsonl is missing, or no step in it has a reward.")
    width = plots.window(run.steps)
    caption = (
        "Mean reward of each step's programs"
        + (". " if width == 1 else f" (dots), and its mean over {width} steps (lines). ")
        + " ".join(words for key, words in REWARD_WORDS.items() if np.isfinite(series[key]).any())
        + " "
    )
    caption += _rise(series["executed"])
    raw = run.series("reward_executed_predicted")
    caption += _offsets(raw, series["calibrated"], series["executed"])
    return figure(*plots.rewards(run.steps, series), caption)


def calibration_section(run: RunRecord) -> Html:
    """The anchor pairs and the map fitted to them at up to four moments."""
    if not run.pairs and not run.curves:
        return missing(
            _without_anchors(run)
            or "No anchor pairs yet: pairs.jsonl and curves.jsonl are missing or empty."
        )
    predicted = np.array([p["predicted"] for p in run.pairs], dtype=np.float64)
    executed = np.array([p["executed"] for p in run.pairs], dtype=np.float64)
    age = np.linspace(0.0, 1.0, len(run.pairs))
    last = len(run.curves) - 1
    chosen = sorted({round(f * last) for f in (0, 1 / 3, 2 / 3, 1)}) if run.curves else []
    curves = [run.curves[i] for i in chosen]
    caption = (
        f"Each dot is one of {len(run.pairs):,} executed programs of anchor groups, later ones "
        "stronger. "
    )
    if curves:
        caption += (
            "The lines are the map from score to expected reward as it stood at that step; "
            "the dashed line would be a world model that needs no correction. "
        )
    else:
        caption += "No map has been fitted yet. "
    if len(run.pairs) > 1:
        bias, error = (predicted - executed).mean(), np.abs(predicted - executed).mean()
        caption += (
            f"Over the whole run the raw score was {_too(bias)} on average, "
            f"with a mean absolute error of {error:.3f}."
        )
    return figure(*plots.calibration(predicted, executed, age, curves), caption)


def moments_section(run: RunRecord) -> Html:
    """Within-group moments, correlation, and the weights of the two streams."""
    keys = ("moment_ff", "moment_fr", "moment_rr", "correlation")
    series = {k: run.series(k) for k in (*keys, "weight_anchor", "weight_world_model")}
    if not any(np.isfinite(v).any() for v in series.values()):
        return missing(
            _without_anchors(run)
            or "No moments yet: no step in metrics.jsonl has moments or weights."
        )
    caption = (
        "First: variance of the recalibrated scores within a group (S_ff), of the executed rewards "
        "(S_rr), and their covariance (S_fr), measured on anchors before their pairs are added to "
        "the map. Second: the correlation that follows from them, and the share of the gradient "
        "that comes from each stream. "
    )
    correlation, anchor = (_last(series[k]) for k in ("correlation", "weight_anchor"))
    if not math.isnan(correlation):
        caption += f"At the end the correlation within groups is {correlation:.2f}"
        caption += (
            "." if math.isnan(anchor) else f" and anchors carry {100 * anchor:.0f} % of the step."
        )
    return figure(*plots.moments(run.steps, series), caption)


def statuses_section(run: RunRecord) -> Html:
    """Shares of the statuses of executed programs over the steps."""
    shares = {s: run.series(f"status_{s}") for s in STATUSES if s != "unknown"}
    if not any(np.nansum(v) > 0 for v in shares.values()):
        return missing("No executed programs yet: no step in metrics.jsonl has shares of statuses.")
    early, late = (_ends(shares["valid"])[i] for i in (0, 1))
    caption = "How the executed programs of each step ended, averaged over steps. "
    if not math.isnan(early):
        caption += (
            f"Valid submissions went from {100 * early:.0f} % in the first fifth of the run to "
            f"{100 * late:.0f} % in the last."
        )
    return figure(*plots.statuses(run.steps, shares), caption)


def groups_section(run: RunRecord) -> Html:
    """Groups used, degenerate, ungraded and stale, and anchors in flight."""
    if not run.metrics:
        return missing(NO_METRICS)
    panels, totals = [], {}
    for kind, shade in GROUP_SHADES.items():
        values = run.series(f"groups_{kind}")
        if np.isfinite(values).any():
            totals[kind] = float(np.nansum(values))
            title = f"{kind} · {totals[kind]:,.0f}"
            panels.append(plots.Panel(title, values, shade, "shared bars"))
    for key, title in (("anchors_in_flight", "in flight"), ("staleness", "steps late")):
        values = run.series(key)
        if np.isfinite(values).any():
            title = f"{title} · max {np.nanmax(values):.0f}"
            panels.append(plots.Panel(title, values, "calibrated", "bars"))
    if not panels:
        return missing("No step in metrics.jsonl counts its groups.")
    caption = (
        "Groups by step, with their sum over the run. A used group has a gradient; a degenerate "
        "one has equal rewards throughout, so there is nothing to learn from it; an ungraded one "
        "has fewer than two known grades, a place whose anchor was not back among them. In "
        "flight are anchors that wait for their execution; steps late tells how many steps "
        "after its own the oldest anchor joined."
    )
    if totals.get("ungraded") == 0:
        caption += " No group was left ungraded."
    pictures = plots.small_multiples("groups", "Groups by step", run.steps, panels)
    return figure(*pictures, caption)


def health_section(run: RunRecord) -> Html:
    """What tells whether the optimisation is in order."""
    keys = {
        "kl": "KL to reference",
        "entropy": "entropy, nats",
        "grad_norm": "gradient norm",
        "clip_fraction": "clipped tokens",
        "sampler_trainer_difference": "sampler − trainer",
        "truncation_rate": "cut at the limit",
        "completion_tokens": "tokens a program",
        "seconds_step": "seconds a step",
        "programs_compiled": "programs compiled",
    }
    panels = [
        plots.Panel(title, run.series(key), "executed", "line")
        for key, title in keys.items()
        if np.isfinite(run.series(key)).any()
    ]
    if not panels:
        return missing(NO_METRICS)
    caption = (
        "Each curve on its own scale. Sampler − trainer is the largest difference between the "
        "log-probabilities that the sampler recorded and those that the train step computes "
        "again; it should stay near zero."
    )
    pictures = plots.small_multiples("health", "Health of the optimisation", run.steps, panels)
    return figure(*pictures, caption)


def ledger_section(run: RunRecord) -> Html:
    """What the run cost, and what executing every group would have cost."""
    if run.ledger is None:
        return missing("No ledger yet: ledger.json is missing.")
    seconds, slots = run.ledger["seconds"], run.ledger["slot_seconds"]
    every = number(run.ledger["slot_seconds_every_group"])
    shared = [plots.Cost(k, k, seconds[k]) for k in ("sampling", "training", "compiling")]
    this_run = [
        plots.Cost("execution", "executed", slots["training"]),
        plots.Cost("world-model cases", "time1", slots["world_model"]),
        plots.Cost("preparing the world model", "preparing", seconds["world_model"]),
        plots.Cost("scoring", "predicted", seconds["scoring"]),
        *shared,
        plots.Cost("waiting", "idle", seconds["waiting"]),
    ]
    bars = {"this run": [part for part in this_run if part.seconds > 0]}
    if not math.isnan(every):
        everything = [plots.Cost("execution", "executed", every), *shared]
        bars["every group executed"] = [part for part in everything if part.seconds > 0]
    if not any(bars.values()):
        return missing("The ledger is still empty.")
    costs = {name: sum(part.seconds for part in bar) for name, bar in bars.items()}
    caption = (
        "Seconds of the loop by purpose, and slot-seconds of the sandbox. Slots run beside the "
        "loop, so these are costs and not the time on the clock; waiting is counted although the "
        "slots were busy meanwhile. The warm start and the evaluations, equal on both sides, are "
        "left out. "
    )
    if len(costs) == 2:
        ran, other = costs.values()
        executed = run.ledger["groups_executed"]
        caption += (
            f"The second bar is an estimate: {run.ledger['slot_seconds_per_group']:.1f} "
            f"slot-seconds, the mean of the {executed:,} executed groups, for each of all "
            f"{executed + run.ledger['groups_predicted']:,}, and no world model. This run cost "
            f"{duration(ran)}; executing everything would have cost {duration(other)}, "
            f"{_times(other / ran)}."
        )
    named = {f"{name} · {duration(costs[name])}": bar for name, bar in bars.items()}
    return join([figure(*plots.ledger(named), caption), _ledger_table(bars, costs)])


def _ledger_table(bars: dict[str, list[plots.Cost]], costs: dict[str, float]) -> Html:
    """The bars in numbers."""
    purposes = dict.fromkeys((part.purpose, part.shade) for bar in bars.values() for part in bar)
    by_name = [{part.purpose: part.seconds for part in bar} for bar in bars.values()]
    rows: list[list[Child]] = [
        [join([swatch(shade), purpose]), *(duration(bar.get(purpose, math.nan)) for bar in by_name)]
        for purpose, shade in purposes
    ]
    rows.append(["together", *(duration(cost) for cost in costs.values())])
    return table(["purpose", *bars], rows, strong=[len(rows) - 1])


def _without_anchors(run: RunRecord) -> str:
    """Why the run has no anchors, or the empty string where it should have some."""
    source = run.setting("reward.source", "mixed")
    if source == "mixed":
        return ""
    return f"There are no anchors in this run: reward.source is {source}."


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if math.isnan(seconds):
        return "–"
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _times(ratio: float) -> str:
    if ratio >= 1.05:
        return f"{ratio:.1f} times as much"
    return "about as much" if ratio > 0.95 else f"{ratio:.2f} times as much, so nothing was saved"


def _last(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else math.nan


def _ends(values: np.ndarray) -> tuple[float, float]:
    """Means of the first and the last fifth of what is known."""
    known = values[np.isfinite(values)]
    if len(known) < 2:
        return math.nan, math.nan
    part = max(1, len(known) // 5)
    return float(known[:part].mean()), float(known[-part:].mean())


def _rise(executed: np.ndarray) -> str:
    early, late = _ends(executed)
    if math.isnan(early):
        return ""
    return (
        f"Executed reward went from {early:.2f} in the first fifth of the run to {late:.2f} in "
        "the last. "
    )


def _offsets(raw: np.ndarray, calibrated: np.ndarray, executed: np.ndarray) -> str:
    """Bias of the raw score on the anchors, and of the recalibrated one of the other groups."""
    on_anchors = raw - executed
    if not np.isfinite(on_anchors).any():
        return ""
    text = f"On those same anchors the raw score was {_too(float(np.nanmean(on_anchors)))}"
    if np.isfinite(calibrated).any():
        gap = float(np.nanmean(calibrated) - np.nanmean(executed))
        text += f"; the recalibrated score of the other groups lies {abs(gap):.3f} "
        text += f"{'above' if gap > 0 else 'below'} the anchors' executed reward"
    return f"{text}, averaged over the run."


def _too(bias: float) -> str:
    if abs(bias) < 0.0005:
        return "unbiased to three digits"
    return f"{abs(bias):.3f} too {'high' if bias > 0 else 'low'}"
