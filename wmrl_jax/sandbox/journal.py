"""The queue's memory on disk: which jobs were submitted, and what came of them."""

from __future__ import annotations

import json
import sqlite3
import threading
from pathlib import Path

from wmrl_jax.errors import UserError
from wmrl_jax.types import Job, Outcome

_SCHEMA = """
create table if not exists jobs (
    key text primary key,
    task text not null,
    program text not null,
    attempts integer not null default 0,
    outcome text,
    submitted real not null default (julianday('now'))
)
"""


class Journal:
    """One SQLite file; every job is in it before it runs, its outcome when it is known.

    Several processes may share the file. An `unknown` outcome is never written.
    """

    def __init__(self, path: Path):
        """Opens or makes the file. Raises UserError where that is not possible."""
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # autocommit, so that each statement is durable when it returns
            self._db = sqlite3.connect(
                path, timeout=30.0, isolation_level=None, check_same_thread=False
            )
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma synchronous = normal")
            self._db.execute(_SCHEMA)
        except (sqlite3.Error, OSError) as fault:
            raise UserError(f"the execution journal {path} cannot be opened: {fault}") from fault

    def add(self, jobs: list[Job]) -> None:
        """Writes jobs that are not in it yet."""
        rows = [(job.key, job.task, job.program) for job in jobs]
        with self._lock:
            self._db.execute("begin")
            try:
                self._db.executemany(
                    "insert or ignore into jobs (key, task, program) values (?, ?, ?)", rows
                )
            finally:
                self._db.execute("commit")

    def begin(self, job: Job) -> None:
        """Counts an attempt, before it starts."""
        with self._lock:
            self._db.execute("update jobs set attempts = attempts + 1 where key = ?", (job.key,))

    def finish(self, job: Job, outcome: Outcome) -> None:
        """Writes a known outcome."""
        with self._lock:
            self._db.execute(
                "update jobs set outcome = ? where key = ?",
                (json.dumps(outcome._asdict()), job.key),
            )

    def outcome(self, job: Job) -> Outcome | None:
        """What is known of an equal job."""
        with self._lock:
            row = self._db.execute("select outcome from jobs where key = ?", (job.key,)).fetchone()
        return None if row is None or row[0] is None else Outcome(**json.loads(row[0]))

    def unfinished(self) -> list[Job]:
        """Jobs without an outcome, oldest first."""
        with self._lock:
            rows = self._db.execute(
                "select task, program from jobs where outcome is null order by submitted, rowid"
            ).fetchall()
        return [Job(*row) for row in rows]

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._db.close()
