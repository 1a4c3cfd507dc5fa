"""The processes below this one, as /proc tells: what they use, and their end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import NamedTuple

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / (1 << 20)
_END_SECONDS = 5.0


class Usage(NamedTuple):
    """Of all descendants together.

    Attributes:
      cpu_seconds: processor time, of those already waited for too.
      resident_mb: sum of resident memory, pages shared between processes counted for each.
      threads: threads of all processes, without the init's one.
    """

    cpu_seconds: float
    resident_mb: float
    threads: int


class _Stat(NamedTuple):
    pid: int
    parent: int
    state: str
    cpu_seconds: float
    threads: int
    resident_mb: float


def _stats() -> Iterator[_Stat]:
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                line = file.read()
        except OSError:
            continue  # it ended meanwhile
        fields = line[line.rindex(b")") + 2 :].split()  # a name may hold anything but this
        yield _Stat(
            pid=int(name),
            parent=int(fields[1]),
            state=fields[0].decode(),
            cpu_seconds=sum(map(int, fields[11:15])) / _TICK,
            threads=int(fields[17]),
            resident_mb=int(fields[21]) * _PAGE_MB,
        )


def descendants() -> list[_Stat]:
    """Every process below this one; orphans included, for it is a subreaper."""
    children: dict[int, list[_Stat]] = {}
    for stat in _stats():
        children.setdefault(stat.parent, []).append(stat)
    found: list[_Stat] = []
    frontier = [os.getpid()]
    while frontier:
        below = children.pop(frontier.pop(), [])
        found += below
        frontier += [stat.pid for stat in below]
    return found


def usage_of_descendants() -> Usage:
    """What all descendants use now."""
    stats = descendants()
    return Usage(
        cpu_seconds=sum(stat.cpu_seconds for stat in stats),
        resident_mb=sum(stat.resident_mb for stat in stats),
        threads=sum(stat.threads for stat in stats) - 1,
    )


def unshared_mb() -> float:
    """Resident memory of all descendants, MiB, without what they share with this process.

    Each shared page is divided among its users (the kernel's proportional set size), so the
    shares that we gave away stand in the descendants' sums once and are taken off again.
    """
    ours = _rollup("self")
    given_away = ours["Rss"] - ours["Pss"] if ours else 0.0
    total = -given_away
    for stat in descendants():
        rollup = _rollup(str(stat.pid))
        total += rollup["Pss"] if rollup else 0.0
    return max(0.0, total)


def _rollup(pid: str) -> dict[str, float] | None:
    """Memory sums of one process in MiB; None where it has ended, or is closed to us."""
    sums = {}
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            for line in file:
                name, _, rest = line.partition(":")
                if name in ("Rss", "Pss"):
                    sums[name] = int(rest.split()[0]) / 1024
    except OSError:
        return None
    return sums if len(sums) == 2 else None


def kill_descendants() -> None:
    """Kills and reaps until none is left; raises TimeoutError where one will not die."""
    deadline = time.monotonic() + _END_SECONDS
    while True:
        stats = descendants()
        for stat in stats:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(stat.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not stats:
            return
        if time.monotonic() > deadline:
            names = ", ".join(str(stat.pid) for stat in stats[:5])
            raise TimeoutError(f"processes {names} of a program cannot be killed")
        time.sleep(0.0005)
