"""Leaderboards: reference solutions, really executed, and their metric values."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from wmrl_jax.errors import UserError
from wmrl_jax.tasks.corpus import reference_programs
from wmrl_jax.tasks.grading import SubmissionError, metric_value, parse_submission
from wmrl_jax.tasks.task import Task
from wmrl_jax.types import Execution

ExecuteFn = Callable[[Task, Sequence[str]], Sequence[Execution]]
"""(task, programs) -> what a sandbox saw of each, in their order."""

ENTRIES = 60
"""Entries of a leaderboard."""

FEWEST = 40
"""Entries below which a leaderboard is not worth its name."""

_PROGRAMS = 120
"""Programs executed for one leaderboard; equal values count once."""


class Entry(NamedTuple):
    """One line of a leaderboard: a metric value and the recipe of the program that reached it."""

    value: float
    recipe: str


def make_leaderboard(task: Task, execute: ExecuteFn, *, seed: int = 0) -> list[Entry]:
    """Executes reference programs and picks the entries, best first.

    Raises:
      UserError: too few of the programs gave a valid submission of distinct value.
    """
    references = reference_programs(task, _PROGRAMS, seed)
    executions = execute(task, [reference.program for reference in references])
    recipes: dict[float, str] = {}
    for reference, execution in zip(references, executions, strict=True):
        value = _value(task, execution)
        if value is not None:
            recipes.setdefault(value, reference.recipe)
    entries = [Entry(value, recipe) for value, recipe in recipes.items()]
    entries.sort(key=lambda entry: entry.value, reverse=task.direction == "maximize")
    if len(entries) < FEWEST:
        raise UserError(
            f"only {len(entries)} reference solutions of task {task.name} have distinct metric"
            f" values, and a leaderboard needs {FEWEST}; give it another metric or more test rows"
        )
    return pick_entries(entries, ENTRIES)


def _value(task: Task, execution: Execution) -> float | None:
    if execution.status != "ok" or execution.submission is None:
        return None
    try:
        return metric_value(task, parse_submission(task, execution.submission))
    except SubmissionError:
        return None


def pick_entries(entries: Sequence[Entry], n: int) -> list[Entry]:
    """`n` of the entries, which are best first: dense at the top, thin at the bottom.

    The i-th of n lies at the share (i / (n - 1)) ** 1.5 of the way down. So a middling solution
    ties or beats about a third of the board, as a first try does on public leaderboards, and the
    best one and the worst one are on it.
    """
    if len(entries) <= n:
        return list(entries)
    last = len(entries) - 1
    picked: list[int] = []
    for i in range(n):
        wanted = round((i / (n - 1)) ** 1.5 * last)
        # Distinct, and room left for those that follow.
        picked.append(min(max(wanted, picked[-1] + 1 if picked else 0), last - (n - 1 - i)))
    return [entries[index] for index in picked]


def write_leaderboard(path: Path, entries: Sequence[Entry]) -> None:
    """Writes the CSV (columns `value`, `recipe`) aside and moves it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.new")
    with aside.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Entry._fields)
        writer.writerows(entries)
    os.replace(aside, path)
