"""The report's section on evaluation by real execution, before and after training."""

from __future__ import annotations

import math
from collections.abc import Mapping

from wmrl_jax.errors import UserError
from wmrl_jax.train.evaluate import Comparison, Estimate, Summary, compare
from wmrl_jax.train.report import plots
from wmrl_jax.train.report.data import RunRecord
from wmrl_jax.train.report.page import (
    Child,
    Html,
    details,
    element,
    figure,
    join,
    legend,
    minus,
    missing,
    table,
)

SPLIT_WORDS = {"train": "training tasks", "heldout": "held-out tasks"}


def comparison_of(run: RunRecord) -> Comparison | None:
    """After against before, where both are there and share a task."""
    if run.before is None or run.after is None:
        return None
    try:
        return compare(run.before, run.after)
    except UserError:
        return None  # no task in common: the section shows the two sides without a difference


def evaluation_section(run: RunRecord) -> Html:
    """Reward by real execution before and after training, per task."""
    if run.before is None and run.after is None:
        return missing("No evaluation yet: eval_before.json and eval_after.json are missing.")
    parts: list[Child] = []
    for side, name in ((run.before, "eval_before.json"), (run.after, "eval_after.json")):
        if side is None:
            parts.append(missing(f"{name} is missing, so there is no comparison yet."))
    marks = legend({"before": "before training", "executed": "after training"})
    parts.append(figure(*plots.before_after(_dots(run)), _dots_caption(run), legend=marks))
    rows = _status_rows(run)
    statuses = plots.status_order([shares for _, shares in rows])
    if rows:
        marks = legend({f"status_{s}": s.replace("_", " ") for s in statuses})
        parts.append(figure(*plots.status_bars(rows), _STATUS_CAPTION, legend=marks))
    parts.append(_task_table(run))
    return join(parts)


_STATUS_CAPTION = (
    "How the evaluated programs ended, in percent; mean over the tasks of each split. Ungraded "
    "programs are left out."
)


def _sides(run: RunRecord) -> list[dict[str, Summary]]:
    """Summaries by name, before and after."""
    return [
        {} if side is None else {s.name: s for s in side.rows()} for side in (run.before, run.after)
    ]


def _dots(run: RunRecord) -> list[plots.TaskRow]:
    before, after = _sides(run)
    comparison = comparison_of(run)
    gains = {row.name: row.reward for row in comparison.rows()} if comparison else {}

    def row(name: str, words: str, mean: bool) -> plots.TaskRow:
        gain = gains.get(name)
        sides = (before.get(name), after.get(name))
        return plots.TaskRow(
            words,
            mean,
            sides[0] and sides[0].reward,
            sides[1] and sides[1].reward,
            "" if gain is None else minus(f"{gain.mean:+.3f}"),
            gain_shade(gain) or "soft",
        )

    rows: list[plots.TaskRow] = []
    for split, words in SPLIT_WORDS.items():
        names = [n for n, s in {**before, **after}.items() if s.split == split and n != split]
        if not names:
            continue
        if rows:
            rows.append(plots.TaskRow("", False, None, None, "", "soft"))
        rows.append(row(split, f"mean of {words}", True))
        names.sort(key=lambda n: -gains[n].mean if n in gains else 1.0)
        rows += [row(name, name, False) for name in names]
    return rows


def gain_shade(gain: Estimate | None) -> str | None:
    """`good` or `bad` where the interval of a gain excludes zero, else None."""
    if gain is None:
        return None
    return "good" if gain.low > 0 else "bad" if gain.high < 0 else None


def _dots_caption(run: RunRecord) -> str:
    samples = {s.samples + s.ungraded for e in (run.before, run.after) if e for s in e.tasks}
    per_task = f"{min(samples)}" if len(samples) == 1 else f"{min(samples)} to {max(samples)}"
    words = (
        f"Mean reward of {per_task} programs a task, each executed for real, with 95 % bootstrap "
        "intervals; diamonds are means over tasks. "
    )
    comparison = comparison_of(run)
    if comparison is not None:
        up = sum(row.reward.low > 0 for row in comparison.tasks)
        down = sum(row.reward.high < 0 for row in comparison.tasks)
        words += (
            "The numbers at the right are the gains, by which the tasks are sorted. The interval "
            f"of the gain lies above zero on {up} of {len(comparison.tasks)} tasks and below on "
            f"{down}."
        )
    return words


def _status_rows(run: RunRecord) -> list[tuple[str, Mapping[str, float]]]:
    names = {"train": "training", "heldout": "held-out"}
    return [
        (f"{names[split]}, {when}", side[split].statuses)
        for split in SPLIT_WORDS
        for when, side in zip(("before", "after"), _sides(run), strict=True)
        if split in side and side[split].tasks
    ]


def _task_table(run: RunRecord) -> Html:
    before, after = _sides(run)
    comparison = comparison_of(run)
    gains = {row.name: row for row in comparison.rows()} if comparison else {}
    order = {**before, **after}
    strong = ("train", "heldout", "overall")
    names = [n for n in order if n not in strong] + [n for n in strong if n in order]
    rows: list[list[Child]] = []
    for name in names:
        words = SPLIT_WORDS.get(name, "all tasks" if name == "overall" else name)
        b, a, gain = before.get(name), after.get(name), gains.get(name)
        rows.append(
            [
                words,
                _value(b and b.reward),
                _value(a and a.reward),
                _value(gain and gain.reward, signed=True),
                _arrow(b and b.position.mean, a and a.position.mean, ".2f"),
                _arrow(b and 100 * b.statuses["valid"], a and 100 * a.statuses["valid"], ".0f"),
                f"{(b.ungraded if b else 0) + (a.ungraded if a else 0)}",
            ]
        )
    header = ["task", "reward before", "reward after", "gain", "position", "valid, %", "ungraded"]
    marked = [i for i, name in enumerate(names) if name in strong]
    summary = "Every task in numbers, with 95 % intervals"
    return details(summary, table(header, rows, strong=marked), open_=True)


def _value(estimate: Estimate | None, *, signed: bool = False) -> Child:
    if estimate is None or math.isnan(estimate.mean):
        return "–"
    form = "+.3f" if signed else ".3f"
    if math.isnan(estimate.low):
        return minus(f"{estimate.mean:{form}}")
    ends = element("small", minus(f" {estimate.low:{form}} … {estimate.high:{form}}"))
    return join([minus(f"{estimate.mean:{form}}"), ends])


def _arrow(before: float | None, after: float | None, form: str) -> str:
    ends = ["–" if x is None or math.isnan(x) else f"{x:{form}}" for x in (before, after)]
    return " → ".join(ends)
