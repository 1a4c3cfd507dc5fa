"""What the report's pictures show. Each function draws one picture, wide and narrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from wmrl_jax.train.evaluate import Estimate
from wmrl_jax.train.report.page import Html
from wmrl_jax.train.report.svg import (
    NARROW,
    WIDE,
    axes,
    colour,
    draw,
    end_labels,
    grid_axes,
    note,
    smooth,
    step_axis,
    unit_axis,
)
from wmrl_jax.types import STATUSES

Pictures = tuple[Html, Html]
Series = Mapping[str, np.ndarray]

LIGHT_STATUSES = ("no_submission", "invalid_submission", "runtime_error")
"""Statuses on whose colour dark text is read best."""

MAP_SHADES = ("time0", "time1", "time2", "time3")


def window(steps: np.ndarray) -> int:
    """Steps over which the pictures average, an odd number: about a twelfth of the run."""
    return 1 if len(steps) < 6 else max(3, 2 * (len(steps) // 24) + 1)


def rewards(steps: np.ndarray, series: Series) -> Pictures:
    """Mean reward by step, one smoothed line for each of `predicted`, `calibrated`, `executed`."""
    names = {"predicted": "predicted", "calibrated": "recalibrated", "executed": "executed"}

    def paint(figure: Figure, narrow: bool) -> None:
        ax = axes(figure, 36, 88 if narrow else 110, 30, 44)
        ends = []
        for key, words in names.items():
            values = series[key]
            known = np.isfinite(values)
            if not known.any():
                continue
            line = smooth(values, window(steps))
            ax.plot(steps, values, "o", color=colour(key), alpha=0.3, markersize=4.5, mew=0)
            ax.plot(
                steps[np.isfinite(line)],
                line[np.isfinite(line)],
                color=colour(key),
                linewidth=2.6 if key == "executed" else 2.0,
                solid_capstyle="round",
            )
            ends.append((float(line[np.isfinite(line)][-1]), words, key))
        every = np.concatenate([v[np.isfinite(v)] for v in series.values()])
        unit_axis(ax, every.min(), every.max())
        step_axis(ax, steps, ticks=4 if narrow else 8)
        ax.set_title("mean reward")
        end_labels(ax, ends)

    return draw("reward", "Mean reward over training steps", paint, wide=380, narrow=300)


def calibration(
    predicted: np.ndarray, executed: np.ndarray, age: np.ndarray, curves: Sequence[Mapping]
) -> Pictures:
    """Anchor pairs, and the fitted map at several moments.

    Args:
      predicted: [P] scores of the world model.
      executed: [P] rewards by execution.
      age: [P] in [0, 1], 0 the first pair and 1 the last.
      curves: at most four, oldest first, each with `step`, `x`, `y`.
    """

    def paint(figure: Figure, narrow: bool) -> None:
        ax = axes(figure, 40, 104 if narrow else 160, 30, 48)
        ax.grid(axis="x")
        ax.plot([0, 1], [0, 1], color=colour("soft"), linewidth=1.2, dashes=(4, 4))
        if len(predicted):
            ax.scatter(
                predicted,
                executed,
                s=16 if narrow else 22,
                color=colour("executed"),
                alpha=list(0.12 + 0.3 * age),  # type: ignore[arg-type]
                linewidths=0,
            )
        ends = [(1.0, "no correction", "soft")]
        shades = MAP_SHADES[-len(curves) :] if curves else ()
        for curve, shade in zip(curves, shades, strict=True):
            x = np.concatenate([[0.0], curve["x"], [1.0]])
            y = np.concatenate([[curve["y"][0]], curve["y"], [curve["y"][-1]]])
            ax.plot(x, y, color=colour(shade), linewidth=2.6, solid_capstyle="round")
            ends.append((float(y[-1]), f"step {curve['step']}", shade))
        ax.set_xlim(-0.02, 1.02)
        ax.set_ylim(-0.02, 1.02)
        ax.set_title("reward by execution")
        ax.set_xlabel("score of the world model", loc="right")
        end_labels(ax, ends, marks=True)

    return draw(
        "calibration",
        "Executed reward against the world model's score, with the fitted map",
        paint,
        wide=470,
        narrow=330,
    )


def moments(steps: np.ndarray, series: Series) -> Pictures:
    """Left the within-group moments, right the correlation and the weights of the two streams."""
    left = {"moment_ff": ("S_ff scores", "calibrated"), "moment_fr": ("S_fr both", "soft")}
    left |= {"moment_rr": ("S_rr rewards", "executed")}
    right = {
        "correlation": ("correlation", "calibrated"),
        "weight_anchor": ("anchors", "executed"),
        "weight_world_model": ("world model", "predicted"),
    }

    def paint(figure: Figure, narrow: bool) -> None:
        shape = (2, 1) if narrow else (1, 2)
        panels = grid_axes(figure, *shape, left=44, right=92, top=30, bottom=44)
        titles = ("within-group moments", "correlation, weight of each stream")
        for ax, lines, title in zip(panels, (left, right), titles, strict=True):
            ends = []
            for key, (words, name) in lines.items():
                values = series[key]
                known = np.isfinite(values)
                if known.any():
                    ax.plot(steps[known], values[known], color=colour(name), linewidth=2.2)
                    ends.append((float(values[known][-1]), words, name))
            ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
            if lines is right:
                ax.set_ylim(top=1.0)
            ax.yaxis.set_major_locator(MaxNLocator(5))
            step_axis(ax, steps, ticks=4)
            ax.set_title(title)
            end_labels(ax, ends)

    label = "Within-group moments, their correlation and the weights of the two streams"
    return draw("moments", label, paint, wide=300, narrow=540)


def statuses(steps: np.ndarray, shares: Series) -> Pictures:
    """Share of each status among the executed programs, stacked, smoothed over steps."""
    order = [s for s in reversed(STATUSES) if s in shares and np.nansum(shares[s]) > 0]
    smoothed = [smooth(shares[s], window(steps)) for s in order]
    known = np.isfinite(np.sum(smoothed, axis=0))
    stack = np.array([s[known] for s in smoothed])
    stack = stack / stack.sum(axis=0)

    def paint(figure: Figure, narrow: bool) -> None:
        ax = axes(figure, 44, 150 if narrow else 160, 14, 44)
        ax.stackplot(
            steps[known],
            stack,
            colors=[colour(f"status_{s}") for s in order],
            linewidth=1.0,
            edgecolor=colour("paper"),
        )
        ax.set_ylim(0, 1)
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        step_axis(ax, steps[known], ticks=4 if narrow else 8)
        centres = np.cumsum(stack[:, -1]) - stack[:, -1] / 2
        end_labels(
            ax,
            [
                (float(y), f"{s.replace('_', ' ')} {100 * share:.0f}%", f"status_{s}")
                for s, y, share in zip(order, centres, stack[:, -1], strict=True)
            ],
            marks=True,
        )

    return draw("statuses", "Share of each status over steps", paint, wide=340, narrow=320)


class Panel(NamedTuple):
    """One of several small pictures.

    Attributes:
      title: stands above it.
      values: one a step, NaN where unknown.
      shade: name of a colour of the palette.
      kind: `bars` with a y axis of its own, `shared bars` with a common one, or `line`.
    """

    title: str
    values: np.ndarray
    shade: str
    kind: str


def small_multiples(name: str, label: str, steps: np.ndarray, panels: Sequence[Panel]) -> Pictures:
    """One small picture for each panel."""
    shared = [np.nanmax(p.values) for p in panels if p.kind == "shared bars"]
    columns = {True: 2, False: len(panels) if len(panels) <= 5 else 3}

    def paint(figure: Figure, narrow: bool) -> None:
        rows = -(-len(panels) // columns[narrow])
        cells = grid_axes(figure, rows, columns[narrow], left=44, right=10, top=30, bottom=30)
        for ax, panel in zip(cells, panels, strict=False):
            known = np.isfinite(panel.values)
            x, y = steps[known], panel.values[known]
            bars = panel.kind != "line"
            if bars:
                edges = np.append(steps - 0.5, steps[-1] + 0.5)
                ax.stairs(panel.values, edges, fill=True, color=colour(panel.shade), linewidth=0)
                ax.set_ylim(0, max([*shared] if panel.kind == "shared bars" else [y.max(), 1.0]))
                ax.yaxis.set_major_locator(MaxNLocator(3, integer=True))
            else:
                ax.plot(x, y, color=colour(panel.shade), linewidth=1.8)
                whole = bool((y == np.round(y)).all())
                ax.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10], integer=whole))
                ax.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
            step_axis(ax, steps, ticks=3, name="", bars=bars)
            ax.set_title(panel.title)
        for ax in cells[len(panels) :]:
            ax.set_axis_off()

    heights = [170 * -(-len(panels) // columns[narrow]) for narrow in (False, True)]
    return draw(name, label, paint, wide=heights[0], narrow=heights[1])


class Cost(NamedTuple):
    """A part of a bar of the ledger: its name, its colour in the palette, its seconds."""

    purpose: str
    shade: str
    seconds: float


def ledger(bars: Mapping[str, Sequence[Cost]]) -> Pictures:
    """Horizontal bars by name, each a stack of costs."""
    longest = max(sum(part.seconds for part in parts) for parts in bars.values())
    unit, divisor = ("minutes", 60.0) if longest >= 300 else ("seconds", 1.0)

    def paint(figure: Figure, narrow: bool) -> None:
        ax = axes(figure, 2, 16, 0, 44)
        pixels = (NARROW if narrow else WIDE) - 18
        for row, (name, parts) in enumerate(bars.items()):
            start = 0.0
            note(ax, name, 0, -row, shift=(0, 28))
            for part in parts:
                length = part.seconds / divisor
                ax.barh(
                    -row,
                    length,
                    left=start,
                    height=0.46,
                    color=colour(part.shade),
                    edgecolor=colour("paper"),
                    linewidth=1.0,
                )
                if part.seconds / longest * pixels > 7.0 * len(part.purpose) + 10:
                    note(ax, part.purpose, start + length / 2, -row, "paper", align="center")
                start += length
        ax.set_ylim(-len(bars) + 0.65, 0.7)
        ax.set_xlim(0, longest / divisor)
        ax.grid(axis="y", visible=False)
        ax.set_yticks([])
        ax.xaxis.set_major_locator(MaxNLocator(4 if narrow else 8, steps=[1, 2, 5, 10]))
        ax.set_xlabel(f"{unit} of cost", loc="right")

    height = 50 + 80 * len(bars)
    return draw("ledger", "Cost by purpose", paint, wide=height, narrow=height)


class TaskRow(NamedTuple):
    """A line of the picture of before and after.

    Attributes:
      name: of the task or the mean; the empty string leaves a gap.
      mean: whether it is a mean over tasks.
      before: mean reward with its interval, or None.
      after: the same after training.
      gain: the gain in words, or the empty string.
      shade: name of the gain's colour.
    """

    name: str
    mean: bool
    before: Estimate | None
    after: Estimate | None
    gain: str
    shade: str


def before_after(rows: Sequence[TaskRow]) -> Pictures:
    """Mean reward with its interval, before and after, one line for each row."""

    def paint(figure: Figure, narrow: bool) -> None:
        ax = axes(figure, 4 if narrow else 200, 58, 8, 44)
        ax.grid(axis="y", visible=False)
        ax.grid(axis="x")
        for i, row in enumerate(rows):
            name_at = (0, 11) if narrow else (-196, 0)
            shade = "ink" if row.mean else "soft"
            note(ax, row.name, 0, -i, shade, shift=name_at, bold=row.mean)
            gain_at = (54, 0)
            note(ax, row.gain, 1, -i, row.shade, shift=gain_at, align="right", bold=row.mean)
            middle = -i - 0.2 if narrow else -i
            sides = ((row.before, "before", 0.12), (row.after, "executed", -0.12))
            for estimate, name, offset in sides:
                if estimate is None or not np.isfinite(estimate.mean):
                    continue
                y = middle + offset
                ax.plot(
                    [estimate.low, estimate.high],
                    [y, y],
                    color=colour(name),
                    linewidth=3.0 if row.mean else 1.8,
                    alpha=0.5,
                    solid_capstyle="round",
                )
                ax.plot(
                    estimate.mean,
                    y,
                    "D" if row.mean else "o",
                    color=colour(name),
                    markersize=7.5 if row.mean else 6.5,
                    markeredgecolor=colour("paper"),
                    markeredgewidth=1.0,
                )
        ax.set_ylim(-len(rows) + 0.4, 0.6)
        ax.set_xlim(0, 1)
        ax.set_yticks([])
        ax.set_xlabel("mean reward by execution", loc="right")

    heights = [52 + row * len(rows) for row in (25, 36)]
    label = "Mean reward of each task before and after training, with 95 % intervals"
    return draw("evaluation", label, paint, wide=heights[0], narrow=heights[1])


def status_bars(rows: Sequence[tuple[str, Mapping[str, float]]]) -> Pictures:
    """Shares of the statuses as one horizontal bar for each (name, shares)."""
    order = status_order([shares for _, shares in rows])

    def paint(figure: Figure, narrow: bool) -> None:
        ax = axes(figure, 106 if narrow else 200, 20, 2, 28)
        ax.grid(visible=False)
        for i, (name, shares) in enumerate(rows):
            start = 0.0
            for status in order:
                share = shares.get(status, 0.0)
                ax.barh(
                    -i,
                    share,
                    left=start,
                    height=0.66,
                    color=colour(f"status_{status}"),
                    edgecolor=colour("paper"),
                    linewidth=1.0,
                )
                if share > (0.12 if narrow else 0.04):
                    shade = "on_tint" if status in LIGHT_STATUSES else "paper"
                    note(ax, f"{100 * share:.0f}", start + share / 2, -i, shade, align="center")
                start += share
            note(ax, name, 0, -i, shift=(-8, 0), align="right")
        ax.set_xlim(0, 1)
        ax.set_ylim(-len(rows) + 0.5, 0.5)
        ax.set_yticks([])
        ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))

    height = 30 + 34 * len(rows)
    label = "Share of each status before and after training"
    return draw("status-bars", label, paint, wide=height, narrow=height)


def status_order(shares: Sequence[Mapping[str, float]]) -> list[str]:
    """The statuses that occur, valid first."""
    return [s for s in reversed(STATUSES) if any(r.get(s, 0.0) > 0 for r in shares)]
