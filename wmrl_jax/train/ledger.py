"""Where the time of a run goes, and what executing every group for real would have cost.

Seconds of the loop are exclusive: a purpose inside another one is taken out of it, and what XLA
spends on compiling is taken out of whatever it interrupted. Executions run beside the loop, so
they are counted apart, in slot-seconds.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import jax

from wmrl_jax.errors import did_you_mean

Purpose = Literal[
    "sampling",
    "scoring",
    "training",
    "compiling",
    "waiting",
    "evaluation",
    "warm_start",
    "world_model",
]
"""What seconds of the loop are spent on; `world_model` is its preparation: cases and tuning."""

PURPOSES: tuple[Purpose, ...] = get_args(Purpose)

Role = Literal["training", "world_model", "evaluation"]
"""What programs are executed for; only `training` enters the estimate of the saving."""

ROLES: tuple[Role, ...] = get_args(Role)

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
LOWER_EVENT = "/jax/core/compile/jaxpr_to_mlir_module_duration"


class Ledger:
    """Seconds by purpose, slot-seconds by role, groups executed and predicted.

    Safe to use from several threads; each thread's purposes nest on their own.

    Args:
      clock: returns seconds; only differences count.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open = threading.local()
        self._seconds: dict[str, float] = dict.fromkeys(PURPOSES, 0.0)
        self._slot_seconds: dict[str, float] = dict.fromkeys(ROLES, 0.0)
        self._groups = {"executed": 0, "predicted": 0}

    @contextmanager
    def time(self, purpose: Purpose) -> Iterator[None]:
        """Adds the seconds of the block to `purpose`, less those that the block gave to others.

        Raises:
          ValueError: no such purpose.
        """
        _check("purpose", purpose, PURPOSES)
        inner = self._inner()
        inner.append(0.0)
        start = self._clock()
        try:
            yield
        finally:
            elapsed = self._clock() - start
            given_away = inner.pop()
            self._add(purpose, elapsed - given_away)
            if inner:
                inner[-1] += elapsed

    def count_groups(self, *, executed: Sequence[float] = (), predicted: int = 0) -> None:
        """Counts groups of training rollouts that were graded.

        Args:
          executed: slot-seconds of each executed group's programs together.
          predicted: groups that the world model alone graded.
        """
        with self._lock:
            self._slot_seconds["training"] += sum(executed)
            self._groups["executed"] += len(executed)
            self._groups["predicted"] += predicted

    def count_execution(self, role: Role, slot_seconds: float) -> None:
        """Counts slot-seconds of programs that were executed for something else than training.

        Raises:
          ValueError: no such role.
        """
        _check("role", role, ROLES)
        with self._lock:
            self._slot_seconds[role] += slot_seconds

    def count_compilation(self, seconds: float) -> None:
        """Moves the seconds of a compilation out of the purpose under way."""
        self._add("compiling", seconds)
        inner = self._inner()
        if inner:
            inner[-1] += seconds

    def summary(self) -> dict[str, Any]:
        """The ledger as a person wants to read it.

        Returns:
          `seconds` by purpose; `slot_seconds` by role; `groups_executed`, `groups_predicted` and
          `predicted_share`; `slot_seconds_per_group`, the mean over executed groups;
          `slot_seconds_every_group`, what executing all of them would have cost, and
          `slot_seconds_saved`, the part of it that was predicted instead. NaN where nothing was
          executed or graded that would tell.
        """
        executed, predicted = self._groups["executed"], self._groups["predicted"]
        graded = executed + predicted
        per_group = self._slot_seconds["training"] / executed if executed else math.nan
        return {
            "seconds": dict(self._seconds),
            "slot_seconds": dict(self._slot_seconds),
            "groups_executed": executed,
            "groups_predicted": predicted,
            "predicted_share": predicted / graded if graded else math.nan,
            "slot_seconds_per_group": per_group,
            "slot_seconds_every_group": per_group * graded,
            "slot_seconds_saved": per_group * predicted,
        }

    def state(self) -> dict[str, Any]:
        """Everything to remember, as JSON types; `load` gives it back exactly."""
        with self._lock:
            return {
                "seconds": dict(self._seconds),
                "slot_seconds": dict(self._slot_seconds),
                "groups": dict(self._groups),
            }

    def load(self, state: dict[str, Any]) -> None:
        """Replaces what was counted by a saved `state`."""
        with self._lock:
            self._seconds.update(state["seconds"])
            self._slot_seconds.update(state["slot_seconds"])
            self._groups.update(state["groups"])

    def _add(self, purpose: Purpose, seconds: float) -> None:
        with self._lock:
            self._seconds[purpose] += seconds

    def _inner(self) -> list[float]:
        """This thread's open blocks: the seconds that each has given to others."""
        if not hasattr(self._open, "inner"):
            self._open.inner = []
        return self._open.inner


class CompileClock:
    """Counts the programs that XLA compiles and books their seconds; a context manager.

    Programs found in JAX's cache on disk count too: what must not grow is how many there are.

    Attributes:
      count: programs compiled while it was running.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.count = 0
        self._ledger = ledger

    def __enter__(self) -> CompileClock:
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE_EVENT:
            self.count += 1
        if event in (COMPILE_EVENT, LOWER_EVENT):
            self._ledger.count_compilation(duration_secs)


def _check(what: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ValueError(f"no {what} {name!r} in the ledger{did_you_mean(name, known)}")
