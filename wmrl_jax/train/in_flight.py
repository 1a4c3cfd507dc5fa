"""Anchor groups whose executions are not back: carried on the host until they join a step.

A group waits with its tokens, its behaviour log-probs and its predictions. Groups leave oldest
first. In a checkpoint they are arrays of a fixed capacity and a short JSON record; after a resume
their jobs are submitted again, and the journal answers those that had ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from wmrl_jax.types import Job, Outcome

Arrays = dict[str, np.ndarray]
"""One group's rows: tokens, loss_mask, behaviour_logprobs, reference_logprobs [N, T], and
predicted [N]."""


class Pending(NamedTuple):
    """One anchor group in flight.

    Attributes:
      step: the step that sampled it.
      task: the task's name.
      arrays: its rows, see `Arrays`.
      completions: [N] texts.
      work: [N]; the job of each rollout, or its outcome once that is known.
      tickets: [N]; the queue's ticket of each job, None where there is none.
    """

    step: int
    task: str
    arrays: Arrays
    completions: list[str]
    work: list[Job | Outcome]
    tickets: list[int | None]


class Executed(NamedTuple):
    """An anchor group that came back: the pending group and its N outcomes."""

    group: Pending
    outcomes: list[Outcome]

    @property
    def rewards(self) -> np.ndarray:
        """float32 [N], NaN where ungraded."""
        return np.asarray([o.reward for o in self.outcomes], np.float32)

    @property
    def slot_seconds(self) -> float:
        """Slot-seconds that the executions took; 0 for a repeated job."""
        return math.fsum(o.seconds for o in self.outcomes)


def blank(capacity: int, group_size: int, length: int) -> Arrays:
    """Zero arrays of the shapes that a checkpoint stores for `capacity` groups."""
    rows = (capacity, group_size, length)
    return {
        "tokens": np.zeros(rows, np.int32),
        "loss_mask": np.zeros(rows, np.bool_),
        "behaviour_logprobs": np.zeros(rows, np.float32),
        "reference_logprobs": np.zeros(rows, np.float32),
        "predicted": np.full(rows[:2], np.nan, np.float32),
    }


def pack(pending: Sequence[Pending], like: Arrays) -> tuple[Arrays, list[dict[str, Any]]]:
    """Returns the arrays and the JSON record that `unpack` reads; `like` comes from `blank`."""
    arrays = {name: value.copy() for name, value in like.items()}
    record = []
    for i, group in enumerate(pending):
        for name in arrays:
            arrays[name][i] = group.arrays[name]
        record.append(
            {
                "step": group.step,
                "task": group.task,
                "completions": group.completions,
                "work": [w.program if isinstance(w, Job) else list(w) for w in group.work],
            }
        )
    return arrays, record


def unpack(arrays: Arrays, record: Sequence[dict[str, Any]]) -> list[Pending]:
    """The pending groups of a checkpoint, their jobs not yet submitted (every ticket is None)."""
    pending = []
    for i, entry in enumerate(record):
        pending.append(
            Pending(
                step=entry["step"],
                task=entry["task"],
                arrays={name: np.asarray(value[i]) for name, value in arrays.items()},
                completions=entry["completions"],
                work=[
                    Job(entry["task"], w) if isinstance(w, str) else Outcome(*w)
                    for w in entry["work"]
                ],
                tickets=[None] * len(entry["work"]),
            )
        )
    return pending
