"""The task format: a folder with everything that one research question needs.

    task.yaml               the keys of `_KEYS`
    description.md          what the agent may read
    public/                 train.csv, test.csv, sample_submission.csv: all that a sandbox sees
    private/answers.csv     id and label of every test row
    leaderboard.csv         a column `value`: metric values of reference solutions

A submission has the columns of sample_submission.csv: the id, then the predictions. For a
probability metric over more than two classes these are one column a class, named as the classes.
"""

from __future__ import annotations

import csv
import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from wmrl_jax.errors import UserError
from wmrl_jax.tasks.metrics import METRICS, Direction
from wmrl_jax.tasks.tables import Table, read_header, read_table
from wmrl_jax.types import Limits

Modality = Literal["tabular", "image", "text"]
Split = Literal["train", "heldout"]

_KEYS = ("name", "title", "metric", "direction", "modality", "split", "id", "label")
_OPTIONAL = ("source", "licence", "limits", "fingerprint")
_FILES = (
    "description.md",
    "public/train.csv",
    "public/test.csv",
    "public/sample_submission.csv",
    "private/answers.csv",
)
_LARGEST_DESCRIPTION = 1 << 20


@dataclass(frozen=True)
class Task:
    """One research question.

    Attributes:
      name: the folder's name; unique in a run.
      title: a few words.
      description: the text of description.md.
      metric: a name in `METRICS`.
      direction: `maximize` or `minimize`.
      modality: `tabular`, `image` or `text`.
      split: `train` or `heldout`.
      limits: what one execution may use.
      folder: where the task lies.
      id_column: names the test rows in test.csv, answers and submission.
      label_column: what is to be predicted, as train.csv and the answers name it.
      target_columns: what a submission holds after the id.
      leaderboard: metric values of the reference solutions, best first.
      source: where the data comes from.
      licence: terms of the data.
    """

    name: str
    title: str
    description: str
    metric: str
    direction: Direction
    modality: Modality
    split: Split
    limits: Limits
    folder: Path
    id_column: str
    label_column: str
    target_columns: tuple[str, ...]
    leaderboard: tuple[float, ...]
    source: str = ""
    licence: str = ""

    @property
    def public_dir(self) -> Path:
        """The folder that a sandbox may read."""
        return self.folder / "public"

    @property
    def answers_path(self) -> Path:
        """The file that no sandbox may read."""
        return self.folder / "private" / "answers.csv"


def load_task(folder: Path, *, require_leaderboard: bool = True) -> Task:
    """Reads and checks a task folder.

    Args:
      folder: the task's folder.
      require_leaderboard: false while the leaderboard is still to be made; `leaderboard` is then
        empty.

    Raises:
      UserError: one sentence on the first fault found, with the file and the remedy.
    """
    folder = Path(folder)
    meta = _read_meta(folder)
    for name in _FILES:
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing; a task folder needs it: add the file")
    id_column, label = meta["id"], meta["label"]
    train = read_table(folder / "public/train.csv", (label,))
    test = read_table(folder / "public/test.csv", (id_column,))
    answers = read_table(folder / "private/answers.csv", (id_column, label))
    sample = read_table(folder / "public/sample_submission.csv", (id_column,))
    _check_ids(folder, id_column, test, answers, sample)
    _check_no_leak(folder, id_column, label, answers)
    targets = tuple(name for name in sample if name != id_column)
    _check_labels(folder, meta, train[label], answers[label], targets)
    description = (folder / "description.md").read_bytes()[:_LARGEST_DESCRIPTION]
    return Task(
        name=meta["name"],
        title=meta["title"],
        description=description.decode("utf-8", errors="replace"),
        metric=meta["metric"],
        direction=meta["direction"],
        modality=meta["modality"],
        split=meta["split"],
        limits=_limits(folder, meta.get("limits") or {}),
        folder=folder,
        id_column=id_column,
        label_column=label,
        target_columns=targets,
        leaderboard=_read_leaderboard(folder, meta["direction"], require_leaderboard),
        source=str(meta.get("source", "")),
        licence=str(meta.get("licence", "")),
    )


def load_tasks(root: Path, *, require_leaderboard: bool = True) -> dict[str, Task]:
    """All tasks of the folders below `root` that hold a task.yaml, by name, sorted.

    Raises:
      UserError: a fault in one of them, two of the same name, or none at all.
    """
    root = Path(root)
    tasks: dict[str, Task] = {}
    for path in sorted(root.glob("*/task.yaml")):
        task = load_task(path.parent, require_leaderboard=require_leaderboard)
        if task.name in tasks:
            other = tasks[task.name].folder
            raise UserError(f"{path} and {other} both name their task {task.name!r}; rename one")
        tasks[task.name] = task
    if not tasks:
        raise UserError(
            f"{root} holds no task folder (a folder with a task.yaml); check the path, or make the"
            " built-in suite with `wmrl tasks prepare`"
        )
    return tasks


def select_tasks(tasks: dict[str, Task], names: Iterable[str]) -> dict[str, Task]:
    """The tasks of these names, in this order.

    Raises:
      UserError: a name that is not there, with the nearest that is.
    """
    chosen = {}
    for name in names:
        if name not in tasks:
            raise UserError(f"there is no task {name!r}; {_nearest(name, tasks)}")
        chosen[name] = tasks[name]
    return chosen


def _nearest(name: str, allowed: Iterable[str]) -> str:
    allowed = list(allowed)
    close = difflib.get_close_matches(str(name), allowed, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose among {', '.join(allowed)}"


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "task.yaml"
    try:
        meta = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {folder} is not a task folder") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        detail = " ".join(str(error).split())
        raise UserError(f"{path} is not YAML: {detail}; mend the file") from None
    if not isinstance(meta, dict):
        raise UserError(f"{path} must hold keys and values such as `name: digits`; mend the file")
    for key in meta:
        if key not in (*_KEYS, *_OPTIONAL):
            raise UserError(f"{path}: unknown key {key!r}; {_nearest(key, (*_KEYS, *_OPTIONAL))}")
    for key in _KEYS:
        if not isinstance(meta.get(key), str) or not meta[key]:
            raise UserError(f"{path}: {key!r} must be a text; add `{key}: ...`")
    allowed: dict[str, Iterable[str]] = {
        "metric": METRICS,
        "direction": get_args(Direction),
        "modality": get_args(Modality),
        "split": get_args(Split),
    }
    for key, values in allowed.items():
        if meta[key] not in values:
            nearest = _nearest(meta[key], values)
            raise UserError(f"{path}: {key} {meta[key]!r} is not known; {nearest}")
    right = METRICS[meta["metric"]].direction
    if meta["direction"] != right:
        raise UserError(
            f"{path}: direction {meta['direction']!r} is wrong for metric {meta['metric']!r};"
            f" write `direction: {right}`"
        )
    return meta


def _limits(folder: Path, given: Any) -> Limits:
    path = folder / "task.yaml"
    if not isinstance(given, dict):
        raise UserError(f"{path}: limits must be keys and numbers such as `wall_seconds: 30`")
    for key, value in given.items():
        if key not in Limits._fields:
            raise UserError(f"{path}: unknown limit {key!r}; {_nearest(key, Limits._fields)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise UserError(f"{path}: limit {key} must be a number above 0, not {value!r}; mend it")
    return Limits(**given)


def _check_ids(folder: Path, id_column: str, test: Table, answers: Table, sample: Table) -> None:
    answers_path = folder / "private/answers.csv"
    ids = answers[id_column]
    if len(set(ids)) < len(ids):
        twice = next(text for i, text in enumerate(ids) if text in ids[:i])
        raise UserError(f"{answers_path} has the id {twice!r} twice; keep one row an id")
    for name, table in (("test.csv", test), ("sample_submission.csv", sample)):
        path = folder / "public" / name
        if sorted(table[id_column]) == sorted(ids):
            continue
        different = sorted(set(table[id_column]) ^ set(ids))
        detail = f"{different[0]!r} is in one only" if different else "one repeats an id"
        raise UserError(
            f"the ids of {path} and {answers_path} differ ({detail}); both need the same test rows"
        )


def _check_no_leak(folder: Path, id_column: str, label: str, answers: Table) -> None:
    """Refuses a public folder from which the answers can be read off."""
    public = folder / "public"
    remedy = "remove it, or sandboxed programs could read the answers"
    truth = dict(zip(answers[id_column], answers[label], strict=True))
    for path in sorted(public.rglob("*")):
        if path.is_symlink():
            raise UserError(f"{path} is a symbolic link; replace it by the file itself")
        if not path.is_file() or path == public / "train.csv":
            continue
        if path.stem.lower() in ("answers", "test_answer", "test_answers", "test_labels"):
            raise UserError(f"{path} looks like the answers, in the public folder; {remedy}")
        header = read_header(path) if path.suffix.lower() == ".csv" else []
        if path == public / "test.csv" and label in header:
            raise UserError(f"{path} has the label column {label!r}; {remedy}")
        if len(set(truth.values())) < 2 or not {id_column, label} <= set(header):
            continue
        table = read_table(path)
        shown = dict(zip(table[id_column], table[label], strict=True))
        if all(shown.get(row) == value for row, value in truth.items()):
            raise UserError(f"{path} holds the answers of private/answers.csv; {remedy}")


def _check_labels(
    folder: Path,
    meta: dict[str, Any],
    train: list[str],
    answers: list[str],
    targets: tuple[str, ...],
) -> None:
    answers_path = folder / "private/answers.csv"
    sample_path = folder / "public/sample_submission.csv"
    metric, label = meta["metric"], meta["label"]
    for path, column in ((answers_path, answers), (folder / "public/train.csv", train)):
        if METRICS[metric].predicts == "value":
            bad = [v for v in column if not _is_finite(v)]
            kind = "a finite number"
        else:
            bad = [v for v in column if not v.strip()]
            kind = "a class"
        if bad:
            raise UserError(
                f"{path}: {label!r} has {bad[0]!r} where {metric} needs {kind}; mend that row"
            )
    classes = sorted({*train, *answers})
    if METRICS[metric].predicts == "probability" and len(targets) > 1:
        if sorted(targets) != classes:
            raise UserError(
                f"{sample_path} must have one column a class, {', '.join(classes)}, for {metric}"
                " over several classes; mend its header"
            )
        if metric != "log_loss":
            raise UserError(
                f"{folder / 'task.yaml'}: metric {metric} takes two classes, and {sample_path} has"
                f" {len(targets)}; use log_loss, or a metric of labels"
            )
        return
    if targets != (label,):
        raise UserError(
            f"{sample_path} has the columns {', '.join(targets) or 'none'} beside the id, where"
            f" {label!r} is needed; mend its header"
        )
    if METRICS[metric].predicts == "probability" and set(answers) != {"0", "1"}:
        raise UserError(
            f"{answers_path}: {label!r} must hold both 0 and 1, and nothing else, for {metric};"
            " mend the answers"
        )


def _is_finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _read_leaderboard(folder: Path, direction: str, required: bool) -> tuple[float, ...]:
    path = folder / "leaderboard.csv"
    make = "make it again with `wmrl tasks leaderboard`"
    if not path.is_file():
        if required:
            raise UserError(f"{path} is missing; {make}")
        return ()
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    if not lines:
        raise UserError(f"{path} is empty; {make}")
    header, *entries = csv.reader(lines)
    if "value" not in header:
        raise UserError(f"{path} has no column `value`; {make}")
    if not entries:
        raise UserError(f"{path} has no entries, so nothing has a position; {make}")
    column = header.index("value")
    values = [row[column] if column < len(row) else "" for row in entries]
    for number, text in enumerate(values, start=2):
        if not _is_finite(text):
            raise UserError(
                f"{path}: line {number} has {text!r} where a finite number is needed; {make}"
            )
    return tuple(sorted(map(float, values), reverse=direction == "maximize"))
