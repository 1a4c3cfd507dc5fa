"""What of a task decides which program is right, read from its public files alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import pandas as pd

from wmrl_jax.tasks.metrics import METRICS
from wmrl_jax.tasks.prompt import data_brief

if TYPE_CHECKING:
    from wmrl_jax.tasks.task import Task

Output = Literal["number", "label", "probability", "probabilities"]


class Traits(NamedTuple):
    """The facts that a writer of programs has to mind.

    Attributes:
      task: the task's name.
      kind: `tabular`, `text` or `image`.
      output: what the submission holds: a `number`, a class `label`, the `probability` of the
        positive class, or the `probabilities` of all classes, one column each.
      id_column: name of the identifier column.
      target: name of the target column in the training file.
      numeric: names of the numeric feature columns.
      categorical: names of the non-numeric feature columns that are not prose.
      text: name of the prose column, else None.
      text_index: its place among the columns of test.csv.
      single_words: most entries of the prose column are one word.
      missing_numeric: some numeric feature lacks values.
      text_labels: the target's classes are strings.
      non_negative: no target is below 0, so that its logarithm can be learnt.
      refuses_negative: the metric has no value for predictions below 0.
      ordinal: classes are numbers whose distance counts.
      largest: the largest label of an ordinal task, else 0.
      classes: number of distinct targets of a classification, 0 for a regression.
    """

    task: str
    kind: Literal["tabular", "text", "image"]
    output: Output
    id_column: str
    target: str
    numeric: tuple[str, ...]
    categorical: tuple[str, ...]
    text: str | None
    text_index: int
    single_words: bool
    missing_numeric: bool
    text_labels: bool
    non_negative: bool
    refuses_negative: bool
    ordinal: bool
    largest: int
    classes: int

    @property
    def regression(self) -> bool:
        """Whether the target is a quantity."""
        return self.output == "number"


def traits_of(task: Task) -> Traits:
    """Reads the traits of `task` from its public files."""
    brief = data_brief(task)
    train = pd.read_csv(task.public_dir / "train.csv", encoding="utf-8-sig")
    columns = list(pd.read_csv(task.public_dir / "test.csv", encoding="utf-8-sig", nrows=0))
    text = brief.text[0] if task.modality == "text" and brief.text else None
    label = train[task.label_column]
    is_number = pd.api.types.is_numeric_dtype(label)
    ordinal = is_number and task.metric == "quadratic_kappa"
    words = (*brief.categorical, *brief.text)
    return Traits(
        task=task.name,
        kind="text" if text else "image" if task.modality == "image" else "tabular",
        output=_output(task),
        id_column=task.id_column,
        target=task.label_column,
        numeric=brief.numeric,
        categorical=tuple(c for c in words if c != text),
        text=text,
        text_index=columns.index(text) if text else 0,
        single_words=text is not None and _is_single_words(train[text]),
        missing_numeric=bool(set(brief.missing) & set(brief.numeric)),
        text_labels=not is_number,
        non_negative=is_number and bool((label >= 0).all()),
        refuses_negative=METRICS[task.metric].nonnegative,
        ordinal=ordinal,
        largest=max(map(int, label)) if ordinal else 0,
        classes=len(brief.classes),
    )


def _is_single_words(column: pd.Series | pd.DataFrame) -> bool:
    """Whether most entries are one word, so that only their letters can be learnt from."""
    return sum(" " not in str(entry) for entry in column) > 0.5 * len(column)


def _output(task: Task) -> Output:
    if len(task.target_columns) > 1:
        return "probabilities"
    outputs: dict[str, Output] = {"value": "number", "label": "label", "probability": "probability"}
    return outputs[METRICS[task.metric].predicts]
