"""Leaderboards are made of executions, one sandbox slot each, in the order of the programs."""

import threading
import time
import types
from pathlib import Path

import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.tasks.leaderboard import Entry
from wmrl_jax.train import leaderboards
from wmrl_jax.types import Execution, Limits


class Backend:
    """A process backend that answers with the program's own text and sees how it is used."""

    def __init__(self, *, slots: int, data_dirs: object, hidden: object) -> None:
        self.busy: set[int] = set()
        self.shared_a_slot = False
        self.used: set[int] = set()
        self.closed = False
        self._lock = threading.Lock()
        opened.append(self)

    def run(self, program: str, data_dir: Path, limits: object, slot: int) -> Execution:
        with self._lock:
            self.shared_a_slot |= slot in self.busy
            self.busy.add(slot)
            self.used.add(slot)
        time.sleep(0.01 if program.endswith("0") else 0.002)
        with self._lock:
            self.busy.remove(slot)
        return Execution("ok", program, None, b"", None, 0.0)

    def close(self) -> None:
        self.closed = True


opened: list[Backend] = []

SUITE = {
    name: types.SimpleNamespace(name=name, public_dir=Path(name), limits=Limits())
    for name in ("digits", "wine")
}


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Output of the executed programs by task, where ten programs are executed for each task."""
    seen: dict[str, list[str]] = {}
    opened.clear()

    def make(task, execute, *, seed: int) -> list[Entry]:
        programs = [f"{task.name} {i}" for i in range(10)]
        seen[task.name] = [execution.output for execution in execute(task, programs)]
        return [Entry(0.5, "a"), Entry(0.25, "b")]

    monkeypatch.setattr(leaderboards, "ProcessBackend", Backend)
    monkeypatch.setattr(leaderboards, "make_leaderboard", make)
    monkeypatch.setattr(leaderboards, "materialise", lambda root: [])
    monkeypatch.setattr(leaderboards, "load_tasks", lambda root, require_leaderboard: SUITE)
    return seen


def test_executions_come_in_the_order_of_the_programs_and_share_no_slot(
    outputs: dict[str, list[str]], tmp_path: Path
) -> None:
    (path,) = leaderboards.make_leaderboards(["digits"], slots=3, folder=tmp_path)

    assert outputs == {"digits": [f"digits {i}" for i in range(10)]}
    (backend,) = opened
    assert not backend.shared_a_slot
    assert backend.used == {0, 1, 2}
    assert backend.closed
    assert path.read_text() == "value,recipe\n0.5,a\n0.25,b\n"


def test_an_unknown_task_is_named_before_anything_runs(
    outputs: dict[str, list[str]], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="digits"):
        leaderboards.make_leaderboards(["digitz"], slots=1, folder=tmp_path)

    assert opened == []
