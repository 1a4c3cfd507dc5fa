"""Making the built-in suite's leaderboards: reference solutions, really executed in sandboxes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console

from wmrl_jax.sandbox.process import ProcessBackend
from wmrl_jax.tasks.leaderboard import ExecuteFn, make_leaderboard, write_leaderboard
from wmrl_jax.tasks.suite import default_root, leaderboards_dir, materialise, source_data_dirs
from wmrl_jax.tasks.task import Task, load_tasks, select_tasks
from wmrl_jax.train.progress import Progress
from wmrl_jax.types import Execution


def make_leaderboards(
    names: Iterable[str] | None, *, slots: int, folder: Path | None = None, seed: int = 0
) -> list[Path]:
    """Executes the reference solutions of the suite's tasks and writes their leaderboards.

    Args:
      names: tasks; None: all of the suite.
      slots: programs at one time.
      folder: where to; default: the package's own, from which the task folders are made.
      seed: of the choice of reference solutions.

    Returns:
      The files written.

    Raises:
      UserError: no such task, or too few reference solutions of one gave a distinct value.
    """
    folder = folder or leaderboards_dir()
    root = default_root()
    materialise(root)
    tasks = load_tasks(root, require_leaderboard=False)
    chosen = tasks if names is None else select_tasks(tasks, names)
    written = []
    with _executor(slots, chosen.values()) as execute:
        for task in chosen.values():
            path = folder / f"{task.name}.csv"
            write_leaderboard(path, make_leaderboard(task, execute, seed=seed))
            written.append(path)
    materialise(root)
    return written


@contextmanager
def _executor(slots: int, tasks: Iterable[Task]) -> Iterator[ExecuteFn]:
    """Executes programs of `tasks` in `slots` sandboxes, with a progress display for each task."""
    backend = ProcessBackend(
        slots=slots, data_dirs=[task.public_dir for task in tasks], hidden=source_data_dirs()
    )
    free: SimpleQueue[int] = SimpleQueue()
    for slot in range(slots):
        free.put(slot)

    def run(task: Task, program: str) -> Execution:
        slot = free.get()
        try:
            return backend.run(program, task.public_dir, task.limits, slot)
        finally:
            free.put(slot)

    def execute(task: Task, programs: Sequence[str]) -> list[Execution]:
        executions = []
        console = Console(stderr=True)
        with (
            ThreadPoolExecutor(slots) as pool,
            Progress(f"leaderboard of {task.name}", len(programs), console=console) as progress,
        ):
            for execution in pool.map(lambda program: run(task, program), programs):
                executions.append(execution)
                progress.update(len(executions))
        return executions

    try:
        yield execute
    finally:
        backend.close()
