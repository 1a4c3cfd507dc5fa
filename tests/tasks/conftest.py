"""A small task folder to spoil, and the built-in suite, made once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from wmrl_jax.tasks.suite import materialise
from wmrl_jax.tasks.task import Task, load_tasks

FolderFn = Callable[..., Path]


@pytest.fixture
def make_folder(tmp_path) -> FolderFn:
    """Writes a task of four test rows; `labels` are those of train and test rows."""

    def make(
        metric: str = "rmse",
        direction: str = "minimize",
        labels: tuple[str, ...] = ("1.5", "2.5", "3", "4"),
        targets: str = "y",
        board: str = "value\n1.0\n2.0\n3.0\n4.0\n",
        **extra: object,
    ) -> Path:
        folder = tmp_path / "toy"
        for part in ("public", "private"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        meta = {
            "name": "toy",
            "title": "a toy",
            "metric": metric,
            "direction": direction,
            "modality": "tabular",
            "split": "train",
            "id": "id",
            "label": "y",
            **extra,
        }
        (folder / "task.yaml").write_text(yaml.safe_dump(meta))
        (folder / "description.md").write_text("Predict y.\n")
        rows = list(enumerate(labels))
        write(folder / "public/train.csv", "id,x,y", [f"{i},{i}.5,{y}" for i, y in rows])
        write(folder / "public/test.csv", "id,x", [f"{10 + i},{i}.5" for i, _ in rows])
        zeros = ",".join("0" for _ in targets.split(","))
        sample = [f"{10 + i},{zeros}" for i, _ in rows]
        write(folder / "public/sample_submission.csv", f"id,{targets}", sample)
        write(folder / "private/answers.csv", "id,y", [f"{10 + i},{y}" for i, y in rows])
        (folder / "leaderboard.csv").write_text(board)
        return folder

    return make


def write(path: Path, header: str, rows: list[str]) -> None:
    """A CSV file of these lines."""
    path.write_text("\n".join([header, *rows]) + "\n")


@pytest.fixture(scope="session")
def suite_root(tmp_path_factory) -> Path:
    """The built-in suite, materialised."""
    root = tmp_path_factory.mktemp("suite")
    materialise(root)
    return root


@pytest.fixture(scope="session")
def suite(suite_root) -> dict[str, Task]:
    """The built-in tasks by name."""
    return load_tasks(suite_root)
