"""The watch over one program from outside: its output, its end, the limits of its tree."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from typing import Any

from . import tree, wire

_POLL_SECONDS = 0.05
_END_SECONDS = 5.0  # for the init to bury its dead and read the submission


class Watch:
    """Follows one program from outside: its output, its end, and the limits of its tree."""

    def __init__(
        self,
        pid: int,
        limits: dict[str, float],
        output: int,
        status: socket.socket,
        control: socket.socket,
        events: int,
    ):
        self._pid = pid
        self._limits = limits
        self._output = output
        self._status = status
        self._control = control
        self._events = events
        self._killed_before = _memory_kills(events)
        self._kept = HeadAndTail(int(limits["output_kb"]) << 10)
        self._stopped: str | None = None  # the limit for which the tree was killed
        self._peak_mb = 0.0
        os.set_blocking(output, False)

    def until_end(self) -> tuple[dict[str, Any], bytes]:
        """Blocks until the whole tree is gone; the init's report with what was seen from here.

        Raises EOFError where the host closed the slot meanwhile.
        """
        start = time.monotonic()
        deadline = start + self._limits["wall_seconds"]
        header: dict[str, Any] = {"fault": "the first process of the sandbox died"}
        submission = b""
        poller = select.poll()
        for descriptor in (self._output, self._status.fileno(), self._control.fileno()):
            poller.register(descriptor, select.POLLIN | select.POLLHUP)
        next_check = start + _POLL_SECONDS
        while True:
            now = time.monotonic()
            if now >= deadline:
                self._stop("wall clock")
                break
            if now >= next_check:
                next_check = now + _POLL_SECONDS
                if self._over_limit():
                    break
            pause = max(0.0, min(next_check, deadline) - now)
            events = dict(poller.poll(pause * 1000.0 + 1.0))
            if self._control.fileno() in events and self._host_is_gone():
                raise EOFError("the host closed the slot")
            if self._output in events and not self._read_output():
                poller.unregister(self._output)
            if self._status.fileno() in events:
                self._status.settimeout(_END_SECONDS)
                with contextlib.suppress(EOFError, OSError):
                    header, submission = wire.receive(self._status)
                break
        tree.kill_descendants()
        while self._read_output():
            pass
        output = self._kept.content()
        header.update(
            stopped=self._stopped,
            peak_mb=self._peak_mb,
            memory_kills=_memory_kills(self._events) - self._killed_before,
            output_bytes=len(output),
            truncated=self._kept.dropped,
        )
        return header, output + submission

    def _host_is_gone(self) -> bool:
        return not self._control.recv(1, socket.MSG_PEEK)

    def _read_output(self) -> bool:
        """Takes what is there; false at the end or when there is nothing more."""
        try:
            piece = os.read(self._output, 1 << 16)
        except BlockingIOError:
            return False
        self._kept.add(piece)
        return bool(piece)

    def _over_limit(self) -> bool:
        usage = tree.usage_of_descendants()
        self._peak_mb = max(self._peak_mb, usage.resident_mb)
        if usage.cpu_seconds > self._limits["cpu_seconds"] + 0.5:
            self._stop("processor time")
        elif usage.resident_mb > self._limits["memory_mb"] and (
            # The cheap figure counts what was imported before the fork, for every process.
            tree.unshared_mb() > self._limits["memory_mb"]
        ):
            self._stop("memory")
        elif _memory_kills(self._events) > self._killed_before:
            # The kernel took one process; the rest of the tree may wait for it for ever.
            self._stop("memory")
        elif usage.threads > self._limits["processes"] + 1:
            self._stop("processes")
        return self._stopped is not None

    def _stop(self, limit: str) -> None:
        self._stopped = limit
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


def _memory_kills(events: int) -> int:
    """How many processes of the control group the kernel has killed so far, for memory."""
    if events >= 0:
        for line in os.pread(events, 4096, 0).splitlines():
            key, _, value = line.partition(b" ")
            if key == b"oom_kill":
                return int(value)
    return 0


class HeadAndTail:
    """Keeps the first and the last `size / 2` bytes of a stream: an exception is at its end."""

    def __init__(self, size: int):
        self._half = max(1, size // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self.dropped = 0

    def add(self, piece: bytes) -> None:
        """Appends to the stream."""
        room = self._half - len(self._head)
        self._head += piece[:room]
        self._tail += piece[room:] if room < len(piece) else b""
        if len(self._tail) > 4 * self._half:  # not at every piece: that would copy each byte
            self._trim()

    def content(self) -> bytes:
        """What was kept, with a line in place of what was not."""
        self._trim()
        if not self.dropped:
            return bytes(self._head + self._tail)
        return bytes(self._head) + b"\n[... %d bytes ...]\n" % self.dropped + bytes(self._tail)

    def _trim(self) -> None:
        surplus = len(self._tail) - self._half
        if surplus > 0:
            self.dropped += surplus
            del self._tail[:surplus]
