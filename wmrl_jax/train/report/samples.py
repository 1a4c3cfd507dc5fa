"""The report's last sections: programs with their outcomes, configuration and versions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from wmrl_jax.train.report.data import Line, RunRecord, number
from wmrl_jax.train.report.page import (
    Child,
    Html,
    definitions,
    details,
    element,
    join,
    missing,
    python_code,
)
from wmrl_jax.types import STATUSES

PROGRAM_CHARACTERS = 6000
FEEDBACK_CHARACTERS = 1200


def samples_section(run: RunRecord) -> Html:
    """Three executed programs: an early one, the best late one, the worst prediction."""
    chosen = choose_samples(run.samples)
    if not chosen:
        return missing("No sample programs yet: samples.jsonl is missing or empty.")
    return join(_article(title, sample) for title, sample in chosen)


def choose_samples(samples: list[Line] | tuple[Line, ...] | Any) -> list[tuple[str, Line]]:
    """Up to three different samples, each with what it was chosen for."""
    graded = [s for s in samples if not math.isnan(number(s.get("reward")))]
    if not graded:
        return []
    chosen: list[tuple[str, Line]] = [("An early program", graded[0])]

    def left() -> list[Line]:
        taken = [s for _, s in chosen]
        return [s for s in graded if not any(s is t for t in taken)]

    late = left()[-max(1, len(graded) // 3) :]
    if late:
        best = max(late, key=lambda s: (s["reward"], s["step"]))
        chosen.append(("The best of the last third", best))
    missed = [s for s in left() if not math.isnan(number(s.get("predicted")))]
    if missed:
        worst = max(missed, key=lambda s: abs(s["predicted"] - s["reward"]))
        chosen.append(("Where the world model was furthest off", worst))
    return chosen


def configuration_section(run: RunRecord) -> Html:
    """config.yaml as it stands, and the versions that the run was made with."""
    parts: list[Child] = []
    if run.config_text:
        parts.append(details("config.yaml", element("pre", element("code", run.config_text))))
    else:
        parts.append(missing("The configuration is not there: config.yaml is missing."))
    if not run.versions:
        parts.append(missing("The versions are not there: versions.json is missing."))
    for i, entry in enumerate(run.versions):
        if len(run.versions) > 1:
            parts.append(element("h3", f"Machine {i + 1} of {len(run.versions)}", class_="apart"))
        parts.append(definitions(_version_pairs(entry)))
    return join(parts)


def _version_pairs(entry: Mapping[str, Any]) -> dict[str, Child]:
    pairs: dict[str, Child] = {}
    for key, value in entry.items():
        if isinstance(value, Mapping):
            pairs |= {str(k): _plain(v) for k, v in value.items()}
        else:
            pairs[str(key).replace("_", " ")] = _plain(value)
    return pairs


def _plain(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        return ", ".join(str(v) for v in value)
    return value if isinstance(value, str) else json.dumps(value)


def _article(title: str, sample: Line) -> Html:
    status = str(sample.get("status", ""))
    shade = f"status-{status.replace('_', '-')}" if status in STATUSES else "soft"
    numbers = [
        f"reward {number(sample.get('reward')):.2f}",
        _optional("position", sample.get("position")),
        _optional("the world model said", sample.get("predicted")),
    ]
    border = f"border-color:var(--{shade})"
    chip = element("span", status.replace("_", " "), class_="chip", style=border)
    head = element(
        "header",
        element("h3", title),
        element("p", chip, " · ".join(n for n in numbers if n)),
        element("p", f"{sample.get('task', 'unknown task')}, step {sample['step']:,.0f}"),
    )
    program = _cut(str(sample.get("completion", "")), PROGRAM_CHARACTERS)
    feedback = _cut(str(sample.get("feedback") or ""), FEEDBACK_CHARACTERS).strip()
    told = None
    if feedback:
        told = element(
            "div",
            element("p", "What execution said"),
            element("pre", feedback),
            class_="feedback",
        )
    return element("article", head, python_code(program), told)


def _optional(words: str, value: Any) -> str:
    known = number(value)
    return "" if math.isnan(known) else f"{words} {known:.2f}"


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n… {len(text) - limit:,} more characters"
