"""What a run writes of its steps: metrics, anchor pairs, fitted curves, sample programs."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from wmrl_jax.sandbox.queue import SandboxQueue
from wmrl_jax.train.files import write_whole
from wmrl_jax.train.in_flight import Executed
from wmrl_jax.train.ledger import CompileClock, Ledger
from wmrl_jax.train.metrics import JsonLines, MetricsWriter
from wmrl_jax.train.progress import Progress
from wmrl_jax.types import STATUSES, Rollouts

CURVE_EVERY = 10
SMOOTHING = 0.9


class StepEnd(NamedTuple):
    """What the loop knows of a step when it has ended.

    Attributes:
      step: updates made, this one included.
      is_anchor: bool [G].
      rollouts: the step's rollouts, on the devices.
      back: anchor groups that joined the step.
      in_flight: groups whose executions are not back.
      metrics: the compiled step's metrics, a NamedTuple of scalars, on the devices.
      curve: (x, y, n) of the debiaser after the step.
      seconds: wall-clock seconds of the step.
    """

    step: int
    is_anchor: np.ndarray
    rollouts: Rollouts
    back: list[Executed]
    in_flight: int
    metrics: Any
    curve: tuple[np.ndarray, np.ndarray, np.ndarray]
    seconds: float


class RunLog:
    """Writes the records of a run folder and feeds the progress display.

    Attributes:
      smoothed_reward: exponential mean of the training reward; the best checkpoint goes by it.
    """

    def __init__(
        self,
        folder: Path,
        ledger: Ledger,
        queue: SandboxQueue,
        progress: Progress,
        compiles: CompileClock,
    ) -> None:
        self._metrics = MetricsWriter(folder)
        self._pairs = JsonLines(folder / "pairs.jsonl")
        self._curves = JsonLines(folder / "curves.jsonl")
        self._samples = JsonLines(folder / "samples.jsonl")
        self._ledger_file = folder / "ledger.json"
        self._ledger, self._queue, self._progress = ledger, queue, progress
        self._compiles = compiles
        self.smoothed_reward = math.nan

    def rewind(self, step: int) -> None:
        """Drops what was written of later steps, so that a resumed run has each step once."""
        for file in (self._pairs, self._curves, self._samples):
            file.rewind(step)
        self._progress.count(**self._ledger.state()["groups"])
        self.smoothed_reward = math.nan
        for record in self._metrics.rewind(step):
            self._smooth(record["reward"])

    def write(self, end: StepEnd) -> None:
        """Appends the step's records."""
        record = step_record(end)
        record["seconds_step"] = end.seconds
        record["programs_compiled"] = self._compiles.count
        stats = self._queue.stats()
        record["seconds_anchor_queued"] = stats.wait_seconds / max(1, stats.executed)
        self._smooth(record["reward"])
        self._metrics.write(end.step, record)
        for entry in pair_records(end):
            self._pairs.append(entry)
        if end.step % CURVE_EVERY == 0 or end.step == 1:
            x, y, n = (np.asarray(a) for a in end.curve)
            self._curves.append(
                {"step": end.step, "x": x[:n].tolist(), "y": y[:n].tolist(), "n": int(n)}
            )
        for entry in sample_records(end):
            self._samples.append(entry)
        write_whole(self._ledger_file, json.dumps(self._ledger.state(), indent=2))
        self._progress.step(
            end.step,
            reward=record["reward"],
            executed=len(end.back),
            predicted=int((~end.is_anchor).sum()),
            in_flight=end.in_flight,
        )

    def close(self) -> None:
        """Flushes the files and ends the display."""
        self._metrics.close()
        self._progress.close()

    def _smooth(self, reward: float | None) -> None:
        if reward is None or math.isnan(reward):
            return
        old = self.smoothed_reward
        self.smoothed_reward = (
            reward if math.isnan(old) else SMOOTHING * old + (1 - SMOOTHING) * reward
        )


def step_record(end: StepEnd) -> dict[str, float]:
    """One line of metrics.jsonl: the compiled step's scalars and the host's counts."""
    record = {name: float(value) for name, value in end.metrics._asdict().items()}
    lengths, starts, finished = jax.device_get(
        (end.rollouts.lengths, end.rollouts.prompt_lengths, end.rollouts.finished)
    )
    outcomes = [o for group in end.back for o in group.outcomes]
    counts = Counter(o.status for o in outcomes)
    record |= {
        "anchors_selected": float(end.is_anchor.sum()),
        "anchors_joined": float(len(end.back)),
        "anchors_in_flight": float(end.in_flight),
        "staleness": max((end.step - 1 - group.group.step for group in end.back), default=0.0),
        "truncation_rate": float(1 - finished.mean()),
        "completion_tokens": float((lengths - starts[:, None]).mean()),
    }
    for status in STATUSES:
        record[f"status_{status}"] = counts[status] / len(outcomes) if outcomes else math.nan
    return record


def pair_records(end: StepEnd) -> Iterable[dict[str, Any]]:
    """The anchor pairs that reached the debiaser in this step."""
    for group in end.back:
        for predicted, outcome in zip(
            group.group.arrays["predicted"].tolist(), group.outcomes, strict=True
        ):
            if not math.isnan(outcome.reward) and not math.isnan(predicted):
                yield {
                    "step": end.step,
                    "task": group.group.task,
                    "predicted": predicted,
                    "executed": outcome.reward,
                    "status": outcome.status,
                }


def sample_records(end: StepEnd) -> Iterable[dict[str, Any]]:
    """One executed program of each anchor group: the first of its rollouts."""
    for group in end.back:
        outcome = group.outcomes[0]
        yield {
            "step": end.step,
            "task": group.group.task,
            "completion": group.group.completions[0],
            "status": outcome.status,
            "reward": outcome.reward,
            "position": outcome.position,
            "predicted": float(group.group.arrays["predicted"][0]),
            "feedback": outcome.feedback,
        }
