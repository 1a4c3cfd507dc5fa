"""Executing and grading completions: the queue of a run, composed of sandbox and grader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from wmrl_jax.sandbox.process import ProcessBackend
from wmrl_jax.sandbox.queue import SandboxQueue
from wmrl_jax.tasks.grading import grade, precheck
from wmrl_jax.tasks.suite import source_data_dirs
from wmrl_jax.tasks.task import Task
from wmrl_jax.train.config import Config
from wmrl_jax.types import Job, Outcome


@contextmanager
def open_queue(config: Config, tasks: Mapping[str, Task], journal: Path) -> Iterator[SandboxQueue]:
    """The queue of a run, closed with everything that it started.

    Args:
      config: its section `sandbox`.
      tasks: every task that may be executed, by name.
      journal: the SQLite file of outcomes; made if missing.
    """
    backend = ProcessBackend(
        slots=config.sandbox.slots,
        data_dirs=[task.public_dir for task in tasks.values()],
        hidden=source_data_dirs(),
        warm=config.sandbox.warm,
    )

    def execute(job: Job, slot: int) -> Outcome:
        task = tasks[job.task]
        return grade(task, backend.run(job.program, task.public_dir, task.limits, slot))

    queue = SandboxQueue(
        execute,
        slots=config.sandbox.slots,
        retries=config.sandbox.retries,
        journal=journal,
        stop=backend.close,
    )
    with queue:
        yield queue


def execute_completions(
    queue: SandboxQueue,
    completions: Sequence[tuple[str, str]],
    on_done: Callable[[int], None] = lambda done: None,
) -> list[Outcome]:
    """Outcomes of (task name, completion) pairs, in their order; what needs no execution gets none.

    Args:
      queue: executes them.
      completions: the pairs.
      on_done: called with the number of outcomes known, from time to time.
    """
    checked = [precheck(text) for _, text in completions]
    work = [
        program if isinstance(program, Outcome) else Job(task, program)
        for (task, _), program in zip(completions, checked, strict=True)
    ]
    tickets = queue.submit(work)
    outcomes = []
    for ticket in tickets:
        outcomes.append(queue.collect([ticket], timeout=None)[ticket])
        on_done(len(outcomes))
    return outcomes
