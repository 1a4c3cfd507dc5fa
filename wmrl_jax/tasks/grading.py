"""From an execution to an outcome: hostile submissions, metric values, leaderboard positions.

Nothing here runs inside a sandbox, and nothing that a sandbox wrote is trusted: a submission is
bytes, of bounded size, that are parsed as plain CSV. A fault of the agent's program is always a
grade; a fault of the grader (a metric that raises, say) never is: that outcome is `unknown`.
"""

from __future__ import annotations

import csv
import functools
import io
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from wmrl_jax.tasks.completion import extract_program as extract_program
from wmrl_jax.tasks.completion import precheck as precheck
from wmrl_jax.tasks.metrics import METRICS, Direction
from wmrl_jax.tasks.tables import read_table
from wmrl_jax.tasks.task import Task
from wmrl_jax.types import Execution, Outcome, Status, reward_of

DECIMALS = 6
"""Metric values are rounded to this many decimals, so that an equal solution ties with itself on
machines whose last bits differ."""

FEEDBACK_CHARS = 1024
"""Most characters of feedback; the head and the tail of a longer text are kept."""

_MAX_COLUMNS = 256
_BYTES_PER_CELL = 64
_SMALLEST_BYTE_LIMIT = 1 << 16
_LARGEST_NUMBER = 1e100  # squares of it can still be summed, so no submission overflows a metric


class SubmissionError(ValueError):
    """A submission that cannot be graded: the sentence is the agent's feedback."""


class Answers(NamedTuple):
    """The private side of a task, ready to grade.

    Attributes:
      rows: row number of each id.
      integer_ids: all ids are integers, so `7`, `7.0` and `07` are one id.
      classes: index of each class by its text; empty where numbers are predicted.
      truth: class indices, or numbers.
    """

    rows: dict[str, int]
    integer_ids: bool
    classes: dict[str, int]
    truth: np.ndarray


def grade(task: Task, execution: Execution) -> Outcome:
    """The outcome of one execution for a task whose leaderboard is there."""
    if execution.status == "unknown":
        return _outcome(execution, "unknown", "", cause=execution.cause or "the sandbox failed")
    if execution.status != "ok":
        return _outcome(execution, execution.status, _failure_text(task, execution))
    if execution.submission_fault:
        return _outcome(
            execution,
            "invalid_submission",
            f"The program ended, but the submission cannot be read: {execution.submission_fault}.",
        )
    if execution.submission is None:
        text = "The program ended without writing a submission."
        return _outcome(execution, "no_submission", _with_output(text, execution))
    try:
        prediction = parse_submission(task, execution.submission)
    except SubmissionError as error:
        return _outcome(execution, "invalid_submission", f"The submission is not valid: {error}.")
    try:
        value = metric_value(task, prediction)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        cause = f"metric {task.metric} of task {task.name} raised {type(error).__name__}: {error}"
        return _outcome(execution, "unknown", "", cause=cause)
    if not math.isfinite(value):
        cause = f"metric {task.metric} of task {task.name} gave {value}"
        return _outcome(execution, "unknown", "", cause=cause)
    place = position(value, task.leaderboard, task.direction)
    text = f"Valid submission: {task.metric} {value:.6g}, leaderboard position {place:.2f}."
    return _outcome(execution, "valid", text, place=place, value=value)


def position(value: float, leaderboard: Sequence[float], direction: Direction) -> float:
    """Share of the leaderboard that `value` ties or beats, in [0, 1].

    (n - number of entries strictly better) / n, as MLE-Dojo computes it on one board.

    Raises:
      ValueError: the leaderboard is empty.
    """
    if not leaderboard:
        raise ValueError("an empty leaderboard gives no position")
    if direction == "maximize":
        better = sum(entry > value for entry in leaderboard)
    else:
        better = sum(entry < value for entry in leaderboard)
    return (len(leaderboard) - better) / len(leaderboard)


def metric_value(task: Task, prediction: np.ndarray) -> float:
    """The task's metric of a parsed submission, rounded to `DECIMALS`; errors are the metric's."""
    value = METRICS[task.metric].compute(answers_of(task).truth, prediction)
    return round(float(value), DECIMALS)


@functools.lru_cache(maxsize=256)
def answers_of(task: Task) -> Answers:
    """The answers of a task, read once in the life of the process."""
    table = read_table(task.answers_path, (task.id_column, task.label_column))
    ids, labels = table[task.id_column], table[task.label_column]
    integer_ids = all(_integer(text) is not None for text in ids)
    rows = {_id_key(text, integer_ids): row for row, text in enumerate(ids)}
    if METRICS[task.metric].predicts == "value":
        return Answers(rows, integer_ids, {}, np.array([float(text) for text in labels]))
    if len(task.target_columns) > 1:
        known = list(task.target_columns)
    else:
        train = read_table(task.public_dir / "train.csv", (task.label_column,))
        known = _sorted_classes({*train[task.label_column], *labels})
    classes = {_class_key(text): index for index, text in enumerate(known)}
    truth = np.array([classes[_class_key(text)] for text in labels])
    return Answers(rows, integer_ids, classes, truth)


def _sorted_classes(classes: set[str]) -> list[str]:
    """By value where all are numbers (the order counts for quadratic_kappa), else by text."""
    numbers = {text: _number(text) for text in classes}
    if all(number is not None for number in numbers.values()):
        return sorted(classes, key=lambda text: numbers[text] or 0.0)
    return sorted(classes)


def parse_submission(task: Task, submission: bytes) -> np.ndarray:
    """The predictions in the order of the answers, as `Metric.predicts` says.

    Accepted: any order of rows and columns, further columns (ignored), a byte-order mark, Windows
    line ends, integer ids written as floats.

    Raises:
      SubmissionError: anything else, in a sentence without its full stop.
    """
    answers = answers_of(task)
    header, rows = _read_csv(submission, len(answers.rows), len(task.target_columns))
    wanted = (task.id_column, *task.target_columns)
    missing = [name for name in wanted if name not in header]
    if missing:
        raise SubmissionError(
            f"column {_shown(missing[0])} is missing; the header must be {_listed(wanted)}"
            f" and is {_listed(header)}"
        )
    where = [header.index(name) for name in wanted]
    cells: list[list[str] | None] = [None] * len(answers.rows)
    for line, row in rows:
        if len(row) != len(header):
            raise SubmissionError(
                f"line {line} has {len(row)} cells where the header has {len(header)}"
            )
        number = answers.rows.get(_id_key(row[where[0]], answers.integer_ids))
        if number is None:
            raise SubmissionError(f"id {_shown(row[where[0]])} of line {line} is not in test.csv")
        if cells[number] is not None:
            raise SubmissionError(f"line {line} repeats the id {_shown(row[where[0]])}")
        cells[number] = [row[column] for column in where[1:]]
    filled = [row for row in cells if row is not None]
    if len(filled) < len(cells):
        raise SubmissionError(
            f"{len(cells) - len(filled)} of {len(cells)} test rows have no prediction"
        )
    return _predictions(task, answers, filled)


def _read_csv(
    submission: bytes, answer_rows: int, targets: int
) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Header and numbered rows of a CSV of bounded size."""
    limit = max(_SMALLEST_BYTE_LIMIT, (answer_rows + 1) * (targets + 8) * _BYTES_PER_CELL)
    if len(submission) > limit:
        raise SubmissionError(f"the file has {len(submission)} bytes, more than {limit}")
    try:
        text = submission.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise SubmissionError("the file is not UTF-8 text") from None
    if "\0" in text:
        raise SubmissionError("the file holds NUL bytes; it is not a CSV text")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        table = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise SubmissionError(f"line {reader.line_num} is not CSV: {error}") from None
    if not table:
        raise SubmissionError("the file is empty")
    header = [name.strip() for name in table[0][1]]
    if len(header) > _MAX_COLUMNS:
        raise SubmissionError(f"it has {len(header)} columns, more than {_MAX_COLUMNS}")
    if len(header) == 1 and ";" in header[0]:
        raise SubmissionError("its columns are separated by semicolons; separate them by commas")
    repeated = [name for name in header if name and header.count(name) > 1]
    if repeated:
        raise SubmissionError(f"column {_shown(repeated[0])} appears twice")
    if len(table) - 1 > answer_rows:
        raise SubmissionError(f"it has {len(table) - 1} rows where test.csv has {answer_rows}")
    return header, table[1:]


def _predictions(task: Task, answers: Answers, cells: list[list[str]]) -> np.ndarray:
    metric = METRICS[task.metric]
    if metric.predicts == "label":
        return _labels(task, answers, [row[0] for row in cells])
    columns = task.target_columns
    values = np.array(
        [[_finite(name, text) for name, text in zip(columns, row, strict=True)] for row in cells]
    )
    if metric.predicts == "probability":
        outside = values[(values < 0) | (values > 1)]
        if outside.size:
            raise SubmissionError(f"{outside[0]:g} is not a probability; they lie from 0 to 1")
        if values.shape[1] > 1:
            totals = values.sum(axis=1, keepdims=True)
            if (totals <= 0).any():
                raise SubmissionError("a row gives every class the probability 0")
            return values / totals
    elif metric.nonnegative and (values < 0).any():
        raise SubmissionError(
            f"{values[values < 0][0]:g} is below zero, and {task.metric} has no value there"
        )
    return values[:, 0]


def _labels(task: Task, answers: Answers, texts: list[str]) -> np.ndarray:
    known = answers.classes
    keys = [_class_key(text) for text in texts]
    for text, key in zip(texts, keys, strict=True):
        if key not in known:
            column = _shown(task.target_columns[0])
            raise SubmissionError(
                f"{_shown(text)} is not a class of {column}; they are {_listed(list(known))}"
            )
    return np.array([known[key] for key in keys])


def _finite(column: str, text: str) -> float:
    value = _number(text)
    if value is None:
        raise SubmissionError(f"{_shown(text)} in column {_shown(column)} is not a number")
    if not math.isfinite(value):
        raise SubmissionError(f"{_shown(text)} in column {_shown(column)} is not finite")
    if abs(value) > _LARGEST_NUMBER:
        raise SubmissionError(f"{_shown(text)} in column {_shown(column)} is too large")
    return value


def _number(text: str) -> float | None:
    # float() also reads 1_000 and digits of other scripts, which no CSV writer means.
    if not text.isascii() or "_" in text:
        return None
    try:
        return float(text)
    except ValueError:
        return None


def _integer(text: str) -> int | None:
    value = _number(text)
    return int(value) if value is not None and value.is_integer() and abs(value) < 2**53 else None


def _id_key(text: str, integer_ids: bool) -> str:
    text = text.strip()
    value = _integer(text) if integer_ids else None
    return text if value is None else str(value)


def _class_key(text: str) -> str:
    """One key for `3`, `3.0` and ` 3`, so that a float column of labels is read as meant."""
    text = text.strip()
    value = _integer(text)
    return text if value is None else str(value)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(name if len(name) <= 40 else name[:37] + "..." for name in names[:8])
    return shown + (", ..." if len(names) > 8 else "")


def _failure_text(task: Task, execution: Execution) -> str:
    if execution.status == "timeout":
        text = f"The program was stopped after {execution.seconds:.0f} s: too slow."
    elif execution.status == "out_of_memory":
        text = f"The program needed more than {task.limits.memory_mb} MiB of memory."
    else:
        text = f"The program failed with {execution.exception or 'an error'}."
    return _with_output(text, execution)


def _with_output(text: str, execution: Execution) -> str:
    """The sentence and the program's output, cut in the middle: its last line says most."""
    output = execution.output.strip()
    if not output:
        return text
    room = FEEDBACK_CHARS - len(text) - 1
    if len(output) > room:
        head, tail = room // 4, room - room // 4 - 5
        output = f"{output[:head]}\n...\n{output[-tail:]}"
    return f"{text}\n{output}"


def _outcome(
    execution: Execution,
    status: Status,
    feedback: str,
    *,
    place: float | None = None,
    value: float | None = None,
    cause: str | None = None,
) -> Outcome:
    return Outcome(
        status=status,
        reward=reward_of(status, place),
        position=place,
        value=value,
        feedback=feedback[:FEEDBACK_CHARS],
        exception=execution.exception,
        seconds=execution.seconds,
        cause=cause,
    )
