"""What the agent reads of a task: a short brief in one fixed order, made from the public files."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple, cast

import pandas as pd

from wmrl_jax.tasks.metrics import METRICS
from wmrl_jax.tasks.task import Task


class Brief(NamedTuple):
    """What the public files hold.

    Attributes:
      train_rows, test_rows: numbers of rows.
      numeric, categorical, text: feature columns by kind, in the order of the file.
      missing: feature columns with empty cells in train.csv or test.csv.
      classes: the label's classes, sorted; empty where the label is a number to predict.
      imbalanced: the rarest class has less than half its fair share.
      skewed: the label is a number with a long right tail (skewness above 1.5).
    """

    train_rows: int
    test_rows: int
    numeric: tuple[str, ...]
    categorical: tuple[str, ...]
    text: tuple[str, ...]
    missing: tuple[str, ...]
    classes: tuple[str, ...]
    imbalanced: bool
    skewed: bool


def data_brief(task: Task) -> Brief:
    """Reads the public files of a task; the answer is kept while the process lives."""
    return _brief(
        task.public_dir, task.id_column, task.label_column, METRICS[task.metric].predicts == "value"
    )


@functools.lru_cache(maxsize=256)
def _brief(public: Path, id_column: str, label: str, is_value: bool) -> Brief:
    train = pd.read_csv(public / "train.csv", encoding="utf-8-sig")
    test = pd.read_csv(public / "test.csv", encoding="utf-8-sig")
    features = [c for c in test.columns if c != id_column and c in train.columns]
    numeric = [c for c in features if pd.api.types.is_numeric_dtype(train[c])]
    gaps = {c for c in features for table in (train, test) if table[c].isna().to_numpy().any()}
    words = [c for c in features if c not in numeric]
    # A column of words that hardly repeat is text; one whose words repeat is a category.
    text = [c for c in words if len(set(train[c])) > max(30, 0.2 * len(train))]
    labels = cast(pd.Series, train[label])
    shares = labels.value_counts(normalize=True)
    return Brief(
        train_rows=len(train),
        test_rows=len(test),
        numeric=tuple(numeric),
        categorical=tuple(c for c in words if c not in text),
        text=tuple(text),
        missing=tuple(c for c in features if c in gaps),
        classes=() if is_value else tuple(str(c) for c in sorted(shares.index)),
        imbalanced=not is_value and bool(shares.min() < 0.5 / len(shares)),
        skewed=is_value and bool(cast(float, labels.skew()) > 1.5),
    )


def prompt_text(task: Task, *, description_chars: int = 0, column_chars: int = 64) -> str:
    """The prompt of a task; the completion that follows begins with a Python fence.

    What decides the right program comes first and in few words: modality, what is to be
    predicted and by which metric, the columns to read and write. Column lists come last, each cut
    to `column_chars` characters, so that a long table never pushes the contract out.

    Args:
      task: the task.
      description_chars: how much of its description to add; 0 for none.
      column_chars: room for each list of column names.
    """
    brief = data_brief(task)
    better = "higher" if task.direction == "maximize" else "lower"
    missing = f"missing in {len(brief.missing)}" if brief.missing else "none missing"
    lines = [
        f"task: {task.title}",
        f"data: {task.modality}, train {brief.train_rows}, test {brief.test_rows} rows",
        f"predict: {_wanted(task, brief)}",
        f"metric: {task.metric}, {better} is better",
        f"submit: {', '.join((task.id_column, *_folded(task.target_columns, column_chars)))}",
        f"features: {len(brief.numeric)} numeric, {len(brief.categorical)} categorical,"
        f" {len(brief.text)} text, {missing}",
    ]
    for kind in ("text", "categorical", "numeric"):
        if names := getattr(brief, kind):
            lines.append(f"{kind}: {', '.join(_folded(names, column_chars))}")
    if description_chars > 0:
        lines.append(" ".join(task.description.split())[:description_chars])
    return "\n".join(lines) + "\n"


def _wanted(task: Task, brief: Brief) -> str:
    predicts = METRICS[task.metric].predicts
    rare = ", imbalanced" if brief.imbalanced else ""
    if predicts == "value":
        floor = " not below 0" if METRICS[task.metric].nonnegative else ""
        return f"number{floor}{', skewed' if brief.skewed else ''}"
    if predicts == "label":
        return f"class, {len(brief.classes)} classes{rare}"
    if len(task.target_columns) == 1:
        return f"probability of 1{rare}"
    return f"probability of each of {len(task.target_columns)} classes{rare}"


def _folded(names: tuple[str, ...], room: int) -> list[str]:
    """Names with numbered runs folded (p00 ... p63 to `p00..p63`), cut to `room` characters."""
    folded: list[str] = []
    start = 0
    while start < len(names):
        end = start
        while end + 1 < len(names) and _follows(names[end], names[end + 1]):
            end += 1
        run = names[start : end + 1]
        folded += [f"{run[0]}..{run[-1]}"] if len(run) > 2 else run
        start = end + 1
    shown: list[str] = []
    for name in folded:
        if sum(len(n) + 2 for n in shown) + len(name) > room:
            return [*shown, "..."]
        shown.append(name)
    return shown


def _follows(first: str, second: str) -> bool:
    a, b = (re.fullmatch(r"(.*?)(\d+)", name) for name in (first, second))
    if a is None or b is None:
        return False
    return a.group(1) == b.group(1) and int(b.group(2)) == int(a.group(2)) + 1
