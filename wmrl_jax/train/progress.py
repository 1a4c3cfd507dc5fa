"""The progress display: a live line on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping

from rich import progress as rich_progress
from rich.console import Console
from rich.markup import escape

RATE_WINDOW = 20
"""Updates from which the time left is judged: few, since the first steps compile, and none from
before the first, since a resumed phase begins in its middle."""


class Progress:
    """Shows how far a phase of a run is, from its making to `close`. A context manager, too.

    Args:
      title: name of the phase.
      total: units of work in it.
      start: units done before, in an earlier process say.
      console: where to; standard error where None.
      every: seconds between two plain lines; a terminal is refreshed all the time.
      clock: returns seconds; only differences count.
    """

    def __init__(
        self,
        title: str,
        total: int,
        *,
        start: int = 0,
        console: Console | None = None,
        every: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title, self._total, self._every, self._clock = title, total, every, clock
        self._console = console or Console(stderr=True)
        self._marks: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)
        self._last_line = -math.inf
        self._executed = self._predicted = 0
        self._live: rich_progress.Progress | None = None
        self._bar = rich_progress.TaskID(0)
        if self._console.is_terminal:
            self._live = rich_progress.Progress(
                rich_progress.TextColumn("[bold]{task.description}"),
                rich_progress.BarColumn(bar_width=16),
                rich_progress.MofNCompleteColumn(),
                rich_progress.TextColumn("{task.fields[values]}"),
                console=self._console,
            )
            self._bar = self._live.add_task(
                escape(title), total=total, completed=start, values="starting"
            )
            self._live.start()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the display; what it showed last stays."""
        if self._live is not None:
            self._live.stop()

    def count(self, *, executed: int, predicted: int) -> None:
        """Adds groups that were graded before, in an earlier process say."""
        self._executed += executed
        self._predicted += predicted

    def step(
        self, step: int, *, reward: float, executed: int, predicted: int, in_flight: int
    ) -> None:
        """Shows a training step; the two counts are added up over the steps.

        Args:
          step: updates made.
          reward: mean reward of the step, NaN where nothing was graded.
          executed: groups of this step graded by execution.
          predicted: groups of this step graded by the world model alone.
          in_flight: anchor groups whose executions are not back.
        """
        self.count(executed=executed, predicted=predicted)
        self.update(
            step,
            {
                "reward": reward,
                "executed / predicted": f"{self._executed} / {self._predicted}",
                "anchors in flight": in_flight,
            },
        )

    def update(self, done: int, fields: Mapping[str, float | int | str] | None = None) -> None:
        """Shows `done` units of work and the fields, in their order.

        A plain line is printed for the first and the last unit, and otherwise when `every`
        seconds have gone by since the line before.
        """
        now = self._clock()
        self._marks.append((now, done))
        shown = [f"{name} {_number(value)}" for name, value in (fields or {}).items()]
        left = self.seconds_left()
        if left is not None and done < self._total:
            shown.append(f"left {duration(left)}")
        text = "  ".join(shown)
        if self._live is not None:
            self._live.update(self._bar, completed=done, values=escape(text))
        elif done >= self._total or now - self._last_line >= self._every:
            self._last_line = now
            self._console.print(
                f"{self._title} {done}/{self._total}  {text}".rstrip(),
                markup=False,
                highlight=False,
                soft_wrap=True,
            )

    def of_total(self, done: int, total: int, loss: float) -> None:
        """Shows a step of supervised training, which tells its total itself."""
        if total != self._total:
            self._total = total
            if self._live is not None:
                self._live.update(self._bar, total=total)
        self.update(done, {"loss": loss})

    def seconds_left(self) -> float | None:
        """Seconds to the end at the recent pace; None until two updates were seen."""
        if not self._marks:
            return None
        (first_time, first_done), (last_time, last_done) = self._marks[0], self._marks[-1]
        if last_done <= first_done:
            return None
        pace = (last_time - first_time) / (last_done - first_done)
        return pace * max(0, self._total - last_done)


def duration(seconds: float) -> str:
    """`1:02:03`, or `2:03` below an hour."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _number(value: float | int | str) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
