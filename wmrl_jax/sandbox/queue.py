"""The queue between a trainer and its sandboxes: submit jobs, collect outcomes.

Nothing is lost and nothing done twice: a job is journalled before it runs and its outcome when
it is known, equal jobs are executed once, a fault of the machinery is retried and in the end
`unknown`, which is never cached and never a grade.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from wmrl_jax.errors import UserError
from wmrl_jax.sandbox.journal import Journal
from wmrl_jax.types import Job, Outcome

ExecuteFn = Callable[[Job, int], Outcome]
"""Executes and grades one job in one slot; blocks. `unknown` or an exception means retry."""

_CLOSE_SECONDS = 3.0
_RETRY_PAUSE = 0.2  # seconds, doubled at each retry of a job


class QueueStats(NamedTuple):
    """Counts since the queue was opened (restored ones included).

    Attributes:
      submitted: tickets given.
      executed: jobs whose execution gave a known outcome.
      cached: tickets served by another's execution, or by the journal.
      settled: tickets of outcomes that were known at submission.
      retried: attempts after a fault of the machinery.
      unknown: causes of the outcomes that stayed unknown, with their counts.
      slot_seconds: time that slots worked, failed attempts included.
      wait_seconds: sum over executed jobs of the time from submission to start.
    """

    submitted: int
    executed: int
    cached: int
    settled: int
    retried: int
    unknown: dict[str, int]
    slot_seconds: float
    wait_seconds: float


class _Entry:
    """One job that is waiting or running, and who wants to know."""

    def __init__(self, job: Job):
        self.job = job
        self.tickets: list[int] = []
        self.submitted = time.monotonic()
        self.slot: int | None = None
        self.started = 0.0


class SandboxQueue:
    """A pool of slots that execute jobs in the order of submission.

    All methods may be called from any thread.
    """

    def __init__(
        self,
        execute: ExecuteFn,
        *,
        slots: int = 2,
        retries: int = 2,
        journal: Path,
        capacity: int = 20_000,
        patience: float = 600.0,
        streak: int = 32,
        stop: Callable[[], None] | None = None,
    ):
        """Opens the journal and starts a worker per slot.

        Args:
          execute: executes one job.
          slots: jobs at one time.
          retries: further attempts after a fault of the machinery.
          journal: the SQLite file; made where there is none.
          capacity: most jobs waiting or running at one time.
          patience: seconds without any outcome after which `collect` gives up waiting.
          streak: outcomes in a row that stay unknown, after which `collect` raises: the sandbox
            is broken, and going on would only lose grades.
          stop: makes running `execute` calls end soon (a backend's `close`); called by `close`.

        Raises:
          UserError: the journal cannot be opened, or a number is out of range.
        """
        if slots < 1 or retries < 0:
            raise UserError(f"sandbox.slots is {slots} and sandbox.retries {retries}; "
                            "give at least 1 slot and 0 retries")  # fmt: skip
        self._execute = execute
        self._retries = retries
        self._capacity = capacity
        self._patience = patience
        self._streak = streak
        self._stop = stop
        self._journal = Journal(journal)
        self._changed = threading.Condition()
        self._pending: deque[_Entry] = deque()
        self._entries: dict[str, _Entry] = {}  # by job key: waiting or running
        self._jobs: dict[int, Job] = {}  # by ticket: not yet collected
        self._outcomes: dict[int, Outcome] = {}  # by ticket: known, not yet collected
        self._next_ticket = 0
        self._closed = False
        self._progress = time.monotonic()
        self._failed_in_a_row = 0
        self._counts: Counter[str] = Counter()
        self._unknown: Counter[str] = Counter()
        self._slot_seconds = self._wait_seconds = 0.0
        # Daemons: a trainer that ends without `close` must not wait for a program.
        self._workers = [
            threading.Thread(target=self._work, args=(slot,), name=f"slot-{slot}", daemon=True)
            for slot in range(slots)
        ]
        for worker in self._workers:
            worker.start()

    def __enter__(self) -> SandboxQueue:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes."""
        self.close()

    # --- submit and collect ----------------------------------------------------------------

    def submit(self, jobs: Sequence[Job | Outcome]) -> list[int]:
        """Takes jobs; one ticket each. Does not wait.

        Args:
          jobs: what to execute. An `Outcome` in its place is one already known (a program that
            does not compile): it gets a ticket that is ready at once.

        Raises:
          RuntimeError: the queue is closed, or would hold more than its capacity.
        """
        new = list({job.key: job for job in jobs if isinstance(job, Job)}.values())
        with self._changed:
            self._check_open()
            unseen = [job for job in new if job.key not in self._entries]
            if len(self._entries) + len(unseen) > self._capacity:
                raise RuntimeError(
                    f"the sandbox queue holds {len(self._entries)} jobs and {len(unseen)} more "
                    f"exceed its capacity of {self._capacity}; collect before submitting"
                )
            # Workers write the journal before they give up an entry, so that under this lock a
            # job is either among the entries or, where it has ended, in the journal.
            known = {job.key: self._journal.outcome(job) for job in unseen}
            self._journal.add([job for job in unseen if known[job.key] is None])
            tickets = [self._issue(job, known) for job in jobs]
            self._changed.notify_all()
        return tickets

    def collect(self, tickets: Sequence[int], timeout: float | None = 0.0) -> dict[int, Outcome]:
        """Gives the outcomes that are there; each ticket is given up by being collected.

        Args:
          tickets: what to look for.
          timeout: seconds to wait until all are there; None waits as long as the queue makes
            progress.

        Returns:
          Outcome by ticket, of those ready. `seconds` is 0.0 where another ticket, or an
          earlier run, paid for the execution.

        Raises:
          KeyError: a ticket that was never given, or was collected before.
          TimeoutError: with timeout None, no job has ended for `patience` seconds.
          RuntimeError: the queue was closed while waiting, or `streak` jobs in a row failed.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._check_streak()
            for ticket in tickets:
                if ticket not in self._jobs and ticket not in self._outcomes:
                    raise KeyError(f"ticket {ticket} is unknown, or was collected before")
            self._progress = max(self._progress, time.monotonic())
            while any(ticket not in self._outcomes for ticket in tickets):
                now = time.monotonic()
                if now >= deadline:
                    break
                self._check_open()
                self._check_streak()
                if timeout is None and now - self._progress > self._patience:
                    raise TimeoutError(self._whom_we_wait_for(tickets))
                self._changed.wait(min(deadline - now, 1.0))
            ready = [ticket for ticket in tickets if ticket in self._outcomes]
            for ticket in ready:
                self._jobs.pop(ticket, None)
            return {ticket: self._outcomes.pop(ticket) for ticket in dict.fromkeys(ready)}

    def cancel(self, tickets: Sequence[int]) -> None:
        """Gives tickets up; a job that no one waits for and that has not begun will not run."""
        with self._changed:
            given_up = set(tickets)
            for ticket in given_up:
                self._jobs.pop(ticket, None)
                self._outcomes.pop(ticket, None)
            for entry in list(self._entries.values()):
                entry.tickets = [ticket for ticket in entry.tickets if ticket not in given_up]
                if not entry.tickets and entry.slot is None:
                    self._pending.remove(entry)
                    del self._entries[entry.job.key]

    @property
    def in_flight(self) -> int:
        """Jobs that are waiting or running."""
        with self._changed:
            return len(self._entries)

    def stats(self) -> QueueStats:
        """What happened since the queue was opened."""
        with self._changed:
            count = self._counts
            return QueueStats(
                submitted=count["submitted"], executed=count["executed"], cached=count["cached"],
                settled=count["settled"], retried=count["retried"], unknown=dict(self._unknown),
                slot_seconds=self._slot_seconds, wait_seconds=self._wait_seconds,
            )  # fmt: skip

    # --- checkpoints -----------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """What `restore` needs, as JSON values: every ticket not yet collected."""
        with self._changed:
            return {
                "next_ticket": self._next_ticket,
                "jobs": {str(ticket): list(job) for ticket, job in self._jobs.items()},
                "settled": {
                    str(ticket): outcome._asdict()
                    for ticket, outcome in self._outcomes.items()
                    if ticket not in self._jobs
                },
            }

    @classmethod
    def restore(cls, snapshot: dict[str, Any], execute: ExecuteFn, **options: Any) -> SandboxQueue:
        """A queue with the tickets of `snapshot`; the journal tells which jobs are done.

        Args:
          snapshot: from `snapshot`.
          execute: as for the constructor, like `options`.
        """
        queue = cls(execute, **options)
        jobs = {int(ticket): Job(*fields) for ticket, fields in snapshot["jobs"].items()}
        for ticket, job in sorted(jobs.items()):
            queue._next_ticket = ticket
            queue.submit([job])
        for ticket, fields in snapshot["settled"].items():
            queue._outcomes[int(ticket)] = Outcome(**fields)
        queue._next_ticket = snapshot["next_ticket"]
        return queue

    def close(self) -> None:
        """Ends the workers, within 5 seconds. Jobs without an outcome stay in the journal."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        if self._stop is not None:
            self._stop()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        self._journal.close()

    # --- inside ----------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the sandbox queue is closed")

    def _check_streak(self) -> None:
        if self._failed_in_a_row >= self._streak:
            cause = self._unknown.most_common(1)[0][0]
            raise RuntimeError(
                f"{self._failed_in_a_row} executions in a row failed by the sandbox's fault, not "
                f"the programs'; most often: {cause}"
            )

    def _issue(self, job: Job | Outcome, known: dict[str, Outcome | None]) -> int:
        ticket = self._next_ticket
        self._next_ticket += 1
        self._counts["submitted"] += 1
        if isinstance(job, Outcome):
            self._counts["settled"] += 1
            self._outcomes[ticket] = job
            return ticket
        self._jobs[ticket] = job
        outcome = known.get(job.key)
        if outcome is not None:
            self._counts["cached"] += 1
            self._outcomes[ticket] = outcome._replace(seconds=0.0)
            return ticket
        entry = self._entries.get(job.key)
        if entry is None:
            entry = self._entries[job.key] = _Entry(job)
            self._pending.append(entry)
        else:
            self._counts["cached"] += 1
        entry.tickets.append(ticket)
        return ticket

    def _work(self, slot: int) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                entry = self._pending.popleft()
                entry.slot, entry.started = slot, time.monotonic()
                self._wait_seconds += entry.started - entry.submitted
            outcome = self._attempt(entry.job, slot)
            with self._changed:
                if self._closed:
                    return  # whatever came back from a sandbox being closed is no result
                self._deliver(entry, outcome)

    def _attempt(self, job: Job, slot: int) -> Outcome:
        """Executes until there is a known outcome or the retries are used up."""
        cause = ""
        for attempt in range(self._retries + 1):
            if attempt:
                with self._changed:
                    self._counts["retried"] += 1
                    self._changed.wait_for(lambda: self._closed, _RETRY_PAUSE * 2 ** (attempt - 1))
                    if self._closed:
                        break
            start = time.monotonic()
            try:
                self._journal.begin(job)
                outcome = self._execute(job, slot)
                if outcome.status != "unknown":
                    self._journal.finish(job, outcome)
                    return outcome
                cause = outcome.cause or "no cause given"
            except BaseException as fault:  # the border: a fault of any kind is the machinery's
                cause = f"{type(fault).__name__}: {fault}"
            finally:
                with self._changed:
                    self._slot_seconds += time.monotonic() - start
        return Outcome("unknown", math.nan, None, None, "", None, 0.0, cause)

    def _deliver(self, entry: _Entry, outcome: Outcome) -> None:
        if outcome.status == "unknown":
            self._unknown[outcome.cause or ""] += 1
            self._failed_in_a_row += 1
        else:
            self._failed_in_a_row = 0
            self._counts["executed"] += 1
        for i, ticket in enumerate(entry.tickets):
            self._outcomes[ticket] = outcome if i == 0 else outcome._replace(seconds=0.0)
        del self._entries[entry.job.key]
        self._progress = time.monotonic()
        self._changed.notify_all()

    def _whom_we_wait_for(self, tickets: Sequence[int]) -> str:
        now = time.monotonic()
        wanted = set(tickets)
        lines = []
        for entry in self._entries.values():
            for ticket in wanted.intersection(entry.tickets):
                where = "waiting for a slot"
                if entry.slot is not None:
                    where = f"in slot {entry.slot} for {now - entry.started:.0f} s"
                lines.append(f"ticket {ticket} (task {entry.job.task}, {where})")
        shown = ", ".join(lines[:5]) + (f" and {len(lines) - 5} more" if len(lines) > 5 else "")
        return f"no execution has ended for {self._patience:.0f} s; still waiting for {shown}"
