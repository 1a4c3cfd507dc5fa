"""The built-in suite: real data sets that ship inside Python packages, made into task folders."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import uuid
from importlib import metadata, resources
from pathlib import Path
from typing import cast

import pandas as pd
import yaml

from wmrl_jax.errors import UserError
from wmrl_jax.tasks.builtin import images_text, tabular
from wmrl_jax.tasks.builtin.source import ID_COLUMN, TaskSource, cut
from wmrl_jax.tasks.metrics import METRICS
from wmrl_jax.types import Limits

SUITE: dict[str, TaskSource] = {task.name: task for task in tabular.TASKS + images_text.TASKS}
"""All built-in tasks by name."""

LIMITS = Limits(cpu_seconds=8.0, wall_seconds=12.0)
"""What one execution of a built-in task may use."""

_HIDDEN = (
    "sklearn/datasets/data",
    "statsmodels/datasets",
    "statsmodels/discrete/tests",  # fitted values and residuals of two data sets
    "statsmodels/regression/tests",
    "vega_datasets",
    "mlxtend",
    "palmerpenguins",
    "names",
    "matplotlib",
)
_PACKAGES = ("scikit-learn", "statsmodels", "vega_datasets", "mlxtend", "palmerpenguins", "names")


def default_root() -> Path:
    """Where the suite lies when no folder is configured: the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "wmrl_jax" / "tasks"


def leaderboards_dir() -> Path:
    """The folder of the package that holds the committed leaderboards, `<task>.csv` each."""
    return Path(str(resources.files("wmrl_jax.tasks"))) / "leaderboards"


def source_data_dirs() -> list[Path]:
    """Folders of installed packages that hold the suite's raw data, answers included.

    A sandbox must show them empty. Matplotlib is among them: a task is made from its colour names.
    """
    folders = []
    for name in _HIDDEN:
        package, _, inner = name.partition("/")
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            folder = Path(next(iter(spec.submodule_search_locations))) / inner
            if folder.is_dir():
                folders.append(folder)
    return folders


def materialise(root: Path, *, leaderboards: Path | None = None) -> list[Path]:
    """Writes the folder of every built-in task below `root`; the same bytes wherever it runs.

    A folder that is already as it would be written is left alone, so the call is cheap when
    repeated, and several processes may call it at one time.

    Args:
      root: made if missing.
      leaderboards: folder of `<task>.csv` files; the committed ones by default. A task without
        one gets no leaderboard.csv, and `load_task` then says so.

    Returns:
      The task folders, sorted by name.

    Raises:
      UserError: a package that holds data is missing, or `root` cannot be written.
    """
    boards = leaderboards or leaderboards_dir()
    folders = []
    try:
        Path(root).mkdir(parents=True, exist_ok=True)
        for name in sorted(SUITE):
            folder = Path(root) / name
            board = boards / f"{name}.csv"
            board_bytes = board.read_bytes() if board.is_file() else None
            fingerprint = _fingerprint(SUITE[name], board_bytes)
            if _fingerprint_of(folder) != fingerprint:
                _write_task(SUITE[name], folder, board_bytes, fingerprint)
            folders.append(folder)
    except ModuleNotFoundError as error:
        raise UserError(
            f"the package {error.name!r} holds the data of built-in tasks and is not installed;"
            f" run `pip install {error.name}`"
        ) from None
    except OSError as error:
        raise UserError(
            f"cannot write the built-in tasks to {root}: {error.strerror}; choose another folder"
        ) from error
    return folders


def _fingerprint(source: TaskSource, board: bytes | None) -> str:
    """Changes with everything that a task folder is made from."""
    digest = hashlib.sha256()
    for module in (tabular, images_text):
        digest.update(Path(str(module.__file__)).read_bytes())
    for file in ("suite.py", "builtin/source.py"):
        digest.update((resources.files("wmrl_jax.tasks") / file).read_bytes())
    digest.update(repr([(name, metadata.version(name)) for name in _PACKAGES]).encode())
    digest.update(f"{source.name}\0".encode() + (board or b"no leaderboard"))
    return digest.hexdigest()[:16]


def _fingerprint_of(folder: Path) -> str | None:
    try:
        meta = yaml.safe_load((folder / "task.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return None
    return meta.get("fingerprint") if isinstance(meta, dict) else None


def _write_task(source: TaskSource, folder: Path, board: bytes | None, fingerprint: str) -> None:
    """Brings the folder to what it should hold; files that are right already stay untouched.

    A run that has the folder open goes on undisturbed while only its leaderboard changes.
    """
    tables = cut(source)
    meta = {
        "name": source.name,
        "title": source.title,
        "metric": source.metric,
        "direction": METRICS[source.metric].direction,
        "modality": source.modality,
        "split": source.split,
        "id": ID_COLUMN,
        "label": source.label,
        "source": source.source,
        "licence": source.licence,
        "limits": LIMITS._asdict(),
        "fingerprint": fingerprint,
    }
    files = {
        "public/train.csv": _csv(tables.train),
        "public/test.csv": _csv(tables.test),
        "public/sample_submission.csv": _csv(_sample(source, tables.train, tables.test)),
        "private/answers.csv": _csv(tables.answers),
        "description.md": _description(source, tables.train).encode(),
        "task.yaml": yaml.safe_dump(meta, sort_keys=False, allow_unicode=True).encode(),
    }
    if board is not None:
        files["leaderboard.csv"] = board
    present = [path for path in folder.rglob("*") if not path.is_dir()]
    for path in present:
        if path.relative_to(folder).as_posix() not in files and not path.name.startswith("."):
            path.unlink(missing_ok=True)
    for name in sorted(files, key=lambda name: name == "task.yaml"):  # the fingerprint comes last
        path = folder / name
        if path not in present or path.read_bytes() != files[name]:
            _write_atomically(path, files[name])


def _write_atomically(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        aside.write_bytes(content)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _csv(table: pd.DataFrame) -> bytes:
    return table.to_csv(index=False, lineterminator="\n", float_format="%.10g").encode()


def _sample(source: TaskSource, train: pd.DataFrame, test: pd.DataFrame) -> pd.DataFrame:
    """A submission of the right form that knows nothing: the base rate, the mode or the mean."""
    label = cast(pd.Series, train[source.label])
    if METRICS[source.metric].predicts == "label":
        guess = label.mode().iloc[0]
    else:
        guess = round(float(cast(float, label.mean())), 4)
    return pd.DataFrame({ID_COLUMN: test[ID_COLUMN], source.label: guess})


def _description(source: TaskSource, train: pd.DataFrame) -> str:
    metric = METRICS[source.metric]
    better = "higher" if metric.direction == "maximize" else "lower"
    wanted = {
        "label": "the predicted class",
        "probability": "the predicted probability of 1",
        "value": "the predicted number",
    }[metric.predicts]
    return (
        f"# {source.title.capitalize()}\n\n{source.description}\n\n"
        f"Fit on `train.csv` ({len(train)} rows, label `{source.label}`), predict every row of"
        f" `test.csv`, and write a CSV with the columns `{ID_COLUMN}` and `{source.label}`"
        f" ({wanted}), as in `sample_submission.csv`. Submissions are graded by {source.metric};"
        f" {better} is better.\n\nData: {source.source}. Licence: {source.licence}.\n"
    )
