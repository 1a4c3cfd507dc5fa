"""What defines a built-in task, and its deterministic cut into train and test rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Literal, NamedTuple

import pandas as pd

ID_COLUMN = "id"


class TaskSource(NamedTuple):
    """One built-in task.

    Attributes:
      name: folder name.
      title: a few words.
      description: plain text, without the part that all tasks share.
      metric: a name in `METRICS`.
      modality: `tabular`, `image` or `text`.
      split: `train` or `heldout`.
      label: the column to predict.
      train_rows, test_rows: sizes; what the data set has beyond both is left out.
      source: package, data set and origin.
      licence: terms of the data.
      frame: returns the whole table, one row an example, in an order that is always the same.
    """

    name: str
    title: str
    description: str
    metric: str
    modality: Literal["tabular", "image", "text"]
    split: Literal["train", "heldout"]
    label: str
    train_rows: int
    test_rows: int
    source: str
    licence: str
    frame: Callable[[], pd.DataFrame]


class Cut(NamedTuple):
    """The tables of a task: `train` has the label, `test` lacks it, `answers` has id and label."""

    train: pd.DataFrame
    test: pd.DataFrame
    answers: pd.DataFrame


def cut(source: TaskSource) -> Cut:
    """Orders the rows by a hash of task name and row number, numbers them, and cuts.

    The ids follow the hashed order, so that they say nothing of the order in the source.
    """
    frame = source.frame()

    def rank(row: int) -> str:
        return hashlib.sha256(f"{source.name}:{row}".encode()).hexdigest()

    order = sorted(range(len(frame)), key=rank)[: source.train_rows + source.test_rows]
    rows = frame.iloc[order].reset_index(drop=True)
    rows.insert(0, ID_COLUMN, range(len(rows)))
    rows[source.label] = rows.pop(source.label)  # the label goes last
    train, test = rows.iloc[: source.train_rows], rows.iloc[source.train_rows :]
    return Cut(train, test.drop(columns=source.label), test[[ID_COLUMN, source.label]])


def package_file(package: str, *parts: str) -> Path:
    """The path of a data file inside an installed package."""
    return Path(str(resources.files(package))).joinpath(*parts)
