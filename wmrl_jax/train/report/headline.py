"""The report's headline: what was trained, what it gained, what that cost."""

from __future__ import annotations

import math

import numpy as np

from wmrl_jax.train.evaluate import Comparison, Difference, Estimate
from wmrl_jax.train.report.data import RunRecord, number
from wmrl_jax.train.report.evaluation import SPLIT_WORDS, comparison_of, gain_shade
from wmrl_jax.train.report.page import Child, Html, element, join, minus
from wmrl_jax.train.report.training import duration

TRUNCATION_WARNING = 0.5


def headline(run: RunRecord) -> Html:
    """What was trained, what it gained, what graded it, and what that saved."""
    done = int(run.steps[-1]) if len(run.metrics) else 0
    total = run.setting("train.steps")
    finished = run.after is not None and total is not None and done >= total
    badge = "finished" if finished else f"in progress: step {done:,} of {total or '?'}"
    comparison = comparison_of(run)
    return join(
        [
            element("p", "WMRL run report", element("span", badge, class_="badge"), class_="over"),
            element("h1", f"{run.name}: {arm(run)}"),
            element("p", join([_what(run, done), *_gains(comparison)], " "), class_="lead"),
            _truncation(run),
            element("div", *_tiles(run, comparison), class_="tiles"),
        ],
        "\n",
    )


def arm(run: RunRecord) -> str:
    """Which of the arms the configuration is."""
    source = run.setting("reward.source")
    if source == "execution":
        return "GRPO on real execution"
    if source == "world_model":
        return "the world model alone"
    if source != "mixed":
        return "configuration unknown"
    debias, denoise = (run.setting(f"corrections.{c}") for c in ("debias", "denoise"))
    words = {
        (True, True): "both corrections",
        (True, False): "debiasing, no denoising",
        (False, True): "denoising, no debiasing",
        (False, False): "no corrections",
    }
    return f"world model and anchors, {words[bool(debias), bool(denoise)]}"


def _what(run: RunRecord, done: int) -> str:
    get = run.setting
    agent = "An agent"
    if get("model.layers") and get("model.width"):
        agent = f"An agent of {get('model.layers')} layers and width {get('model.width')}"
    shape = ""
    if get("train.groups") and get("train.group_size"):
        shape = f", each of {get('train.groups')} groups of {get('train.group_size')} programs"
    tasks = len({p.get("task") for p in run.pairs})
    if run.before is not None:
        tasks = sum(s.split == "train" for s in run.before.tasks)
    on = f" on {tasks} tasks" if tasks else ""
    return f"{agent} was trained{on} for {done:,} step{'s' * (done != 1)}{shape}."


def _gains(comparison: Comparison | None) -> list[Child]:
    if comparison is None:
        return []
    clauses = [
        join(
            [
                f"{'it' if i else 'Its reward by real execution'} {_verb(row.reward)} by ",
                element("strong", minus(f"{row.reward.mean:+.3f}")),
                f" on the {SPLIT_WORDS[row.split]} (from {row.before:.3f} to {row.after:.3f})",
            ]
        )
        for i, row in enumerate(comparison.splits)
    ]
    return [join([join(clauses, "; "), "."])] if clauses else []


def _verb(gain: Estimate) -> str:
    if gain.low > 0:
        return "rose"
    return "fell" if gain.high < 0 else "moved, within its uncertainty,"


def _truncation(run: RunRecord) -> Html | None:
    rates = run.series("truncation_rate")
    late = rates[np.isfinite(rates)][-10:]
    if not len(late) or late.mean() <= TRUNCATION_WARNING:
        return None
    words = (
        f"{100 * late.mean():.0f} % of the latest programs were cut at the token limit before they "
        "ended: raise model.new_tokens."
    )
    return element("p", words, class_="warning")


def _tiles(run: RunRecord, comparison: Comparison | None) -> list[Html]:
    tiles = []
    for split, words in SPLIT_WORDS.items():
        row = next((r for r in comparison.splits if r.name == split), None) if comparison else None
        name = f"Gain in executed reward, {words}"
        tiles.append(_gain_tile(name, row))
    ledger = run.ledger or {}
    share = number(ledger.get("predicted_share"))
    saved, every = (number(ledger.get(f"slot_seconds_{k}")) for k in ("saved", "every_group"))
    predicted, executed = ledger.get("groups_predicted", 0), ledger.get("groups_executed", 0)
    tiles.append(
        _tile(
            "Groups graded by the world model alone",
            _percent(share),
            "nothing graded so far"
            if math.isnan(share)
            else f"{predicted:,} of {predicted + executed:,}",
        )
    )
    tiles.append(
        _tile(
            "Sandbox time saved",
            _percent(saved / every if every > 0 else math.nan),
            "nothing executed so far"
            if not every > 0
            else f"{duration(every - saved)} instead of {duration(every)}",
        )
    )
    return tiles


def _gain_tile(name: str, row: Difference | None) -> Html:
    if row is None:
        return _tile(name, "–", "not evaluated before and after yet")
    gain = row.reward
    interval = "interval unknown"
    if not math.isnan(gain.low):
        interval = f"95 %: {gain.low:+.3f} … {gain.high:+.3f}"
    return _tile(name, minus(f"{gain.mean:+.3f}"), minus(interval), gain_shade(gain))


def _tile(name: str, value: str, note: str, shade: str | None = None) -> Html:
    return element(
        "div",
        element("div", name, class_="name"),
        element("div", value, class_=f"value {shade}" if shade else "value"),
        element("div", note, class_="note"),
        class_="tile",
    )


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.1f} %"
