"""`wmrl simulate` on the outside: runs it, says what it found, and writes table and figure."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

from wmrl_jax.train import planning, simulation
from wmrl_jax.train.files import write_whole
from wmrl_jax.train.planning import Plan
from wmrl_jax.train.progress import Progress
from wmrl_jax.train.simulation import Findings, Fit, Row

_SMALLEST = 1e-7  # a floor below it is drawn there: the axes are logarithmic


def simulate(folder: Path, *, runs: int, seed: int) -> Findings:
    """Runs all experiments, prints what they found and writes it to `folder`."""
    with _counted("simulating", simulation.planned_runs(runs)) as on_runs:
        found = simulation.study(runs, seed, on_runs)
    write_findings(folder, found)
    console = Console()
    for sentence in found.sentences:
        console.print(f"- {sentence}", highlight=False)
    console.print(f"table and figure: {folder}")
    return found


def plan(folder: Path, *, runs: int, **question: Any) -> Plan:
    """Makes a plan (`planning.make_plan` says of what), prints it and writes it to `folder`."""
    with _counted("simulating", planning.planned_runs(runs)) as on_runs:
        made = planning.make_plan(runs=runs, on_runs=on_runs, **question)
    write_plan(folder, made)
    console = Console()
    table = Table("anchor fraction", "steps", "compute", "95 % interval", "saving", "cheapest in")
    for row in made.rows:
        table.add_row(
            f"{row.fraction:.3f}",
            f"{row.steps:.0f}" if math.isfinite(row.steps) else f"{100 * row.final_gap:.0f} % left",
            _hours(row.cost),
            f"{_hours(row.cost_low)} to {_hours(row.cost_high)}",
            "" if math.isnan(row.saving) else f"{100 * row.saving:.0f} %",
            f"{100 * row.best:.0f} %",
        )
    console.print(table)
    console.print(_answer(made))
    console.print(f"table and figure: {folder}")
    return made


def _answer(made: Plan) -> str:
    if math.isnan(made.fraction):
        return "No anchor fraction reaches the target; allow more with --target."
    saving = (
        f"saves {100 * made.saving:.0f} % [{100 * made.saving_low:.0f}, "
        f"{100 * made.saving_high:.0f}] of what executing every group costs"
        if not math.isnan(made.saving)
        else "and executing every group does not reach the target in time"
    )
    return (
        f"Anchor fraction {made.fraction:.3g} reaches the target with the least compute: {saving}; "
        f"it is the cheapest in {100 * made.sure:.0f} % of the resamples."
    )


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} h" if math.isfinite(seconds) else "never"


@contextmanager
def _counted(title: str, total: int) -> Iterator[Callable[[int], None]]:
    done = 0
    with Progress(title, total) as progress:

        def on_runs(more: int) -> None:
            nonlocal done
            done += more
            progress.update(done)

        yield on_runs


def write_findings(folder: Path, found: Findings) -> None:
    """Writes simulate.csv, simulate.json and simulate.png."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_csv(folder / "simulate.csv", Row._fields, found.rows)
    record = {
        "sentences": found.sentences,
        "fits": [fit._asdict() for fit in found.fits],
        "rows": [row._asdict() for row in found.rows],
    }
    write_whole(folder / "simulate.json", json.dumps(record, indent=2))
    figure, panels = plt.subplots(2, 3, figsize=(13, 7.5), layout="constrained")
    _against_square(panels[0, 0], found, "bias", "B²", "uncorrected: the floor grows as B²")
    _against_square(panels[0, 1], found, "noise", "σ²", "uncorrected: the floor grows as σ²")
    _pairs(panels[0, 2], found)
    _by_arm(panels[1, 0], found, "variance", "gradient variance, by stream")
    _by_arm(panels[1, 1], found, "fusion", "floor, by stream")
    _curves(panels[1, 2], found)
    figure.savefig(folder / "simulate.png", dpi=120)
    plt.close(figure)


def write_plan(folder: Path, plan: Plan) -> None:
    """Writes plan.csv, plan.json and plan.png."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_csv(folder / "plan.csv", plan.rows[0]._fields, plan.rows)
    record = _known(plan._asdict()) | {"rows": [_known(row._asdict()) for row in plan.rows]}
    write_whole(folder / "plan.json", json.dumps(record, indent=2, allow_nan=False))
    figure, ax = plt.subplots(figsize=(6.5, 4), layout="constrained")
    reached = [row for row in plan.rows if np.isfinite(row.cost)]
    x = [row.fraction for row in reached]
    y = np.array([[row.cost, row.cost_low, row.cost_high] for row in reached]).T / 3600
    if reached:
        ax.fill_between(x, y[1], y[2], alpha=0.2, linewidth=0)
        ax.plot(x, y[0], "o-")
        ax.set_yscale("log")
    ax.set_xlabel("anchor fraction")
    ax.set_ylabel("compute to the target, hours")
    ax.set_title("compute until the target is reached (95 % interval)")
    figure.savefig(folder / "plan.png", dpi=120)
    plt.close(figure)


def _known(record: dict[str, Any]) -> dict[str, Any]:
    """JSON knows neither infinity nor NaN: null stands for both."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }


def _write_csv(path: Path, fields: Sequence[str], rows: Sequence[tuple]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(fields)
    writer.writerows(rows)
    write_whole(path, text.getvalue())


def _points(found: Findings, experiment: str) -> dict[str, list[Row]]:
    arms: dict[str, list[Row]] = {}
    for row in found.rows:
        if row.experiment == experiment:
            arms.setdefault(row.arm, []).append(row)
    return arms


def _against_square(ax: Axes, found: Findings, experiment: str, name: str, title: str) -> None:
    fits: dict[str, Fit] = {f.arm: f for f in found.fits if f.experiment == experiment}
    for arm, rows in _points(found, experiment).items():
        square = np.array([row.x for row in rows]) ** 2
        errors = [2 * row.error for row in rows]
        drawn = ax.errorbar(square, [row.floor for row in rows], errors, fmt="o", ms=4)
        fit = fits[arm]
        ax.plot(
            square,
            fit.intercept + fit.slope * square,
            color=drawn[0].get_color(),
            label=f"{arm.replace('_', '-')} (R² {fit.r_squared:.3f})",
        )
    _finish(ax, name, title)


def _pairs(ax: Axes, found: Findings) -> None:
    arms = _points(found, "pairs")
    rows = [row for row in arms["debiased"] if row.x > 0]
    ax.loglog([r.x for r in rows], [max(r.floor, _SMALLEST) for r in rows], "o-", label="debiased")
    for label, row in (("no map", arms["debiased"][0]), ("no bias", arms["unbiased"][0])):
        ax.axhline(max(row.floor, _SMALLEST), linestyle=":", color="gray")
        ax.annotate(label, (rows[0].x, row.floor), va="bottom")
    _finish(ax, "anchor pairs that the map was fitted to", "debiased: the floor falls with pairs")


def _by_arm(ax: Axes, found: Findings, experiment: str, title: str) -> None:
    for arm, rows in _points(found, experiment).items():
        style = "k:" if arm == "theory" else "o-"
        label = "V_WM V_E / (V_WM + V_E)" if arm == "theory" else arm
        ax.semilogy([row.x for row in rows], [row.floor for row in rows], style, label=label)
    _finish(ax, "noise σ of the scores", title)


def _curves(ax: Axes, found: Findings) -> None:
    for curve in found.curves:
        ax.semilogy(curve.gap, label=f"{curve.arm}: mean gap")
        ax.semilogy(curve.bound, "--", label=f"{curve.arm}: bound")
    _finish(ax, "step", "learning curves under their bounds")


def _finish(ax: Axes, x_name: str, title: str) -> None:
    ax.set_xlabel(x_name)
    ax.set_ylabel("variance" if "variance" in title else "J* − J")
    ax.set_title(title, fontsize=10)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=8, frameon=False)
