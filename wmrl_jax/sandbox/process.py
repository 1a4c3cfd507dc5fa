"""The process backend: one warm supervisor per slot, one forked child per program."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from wmrl_jax.errors import UserError
from wmrl_jax.sandbox import cgroups, isolation
from wmrl_jax.sandbox.inside import seccomp, wire
from wmrl_jax.sandbox.isolation import Isolation, View
from wmrl_jax.types import Execution, Limits

PRELOAD = (
    "numpy.random", "scipy", "scipy.stats", "scipy.sparse", "scipy.optimize", "pandas", "sklearn",
    "sklearn.linear_model", "sklearn.ensemble", "sklearn.tree", "sklearn.neighbors", "sklearn.svm",
    "sklearn.naive_bayes", "sklearn.neural_network", "sklearn.preprocessing", "sklearn.impute",
    "sklearn.compose", "sklearn.pipeline", "sklearn.feature_extraction.text",
    "sklearn.decomposition", "sklearn.model_selection", "sklearn.metrics",
    "sklearn.feature_selection", "sklearn.dummy", "sklearn.discriminant_analysis",
    "sklearn.cluster", "sklearn.calibration", "sklearn.kernel_ridge", "sklearn.gaussian_process",
    "sklearn.random_projection", "sklearn.kernel_approximation", "sklearn.multiclass",
)  # fmt: skip
"""What a warm supervisor imports before the first program."""

_COLD_PRELOAD = ("numpy.random",)  # whose generator is seeded
_START_SECONDS = 120.0
_GRACE_SECONDS = 20.0  # beyond the wall clock limit, before the supervisor counts as dead
_CLOSE_SECONDS = 2.0

_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    # One thread each: equal programs give equal results, and slots do not fight for cores.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "LOKY_MAX_CPU_COUNT": "1",
    "MPLBACKEND": "Agg",
}

_STOPPED: dict[str, Literal["timeout", "out_of_memory", "runtime_error"]] = {
    "wall clock": "timeout",
    "processor time": "timeout",
    "memory": "out_of_memory",
    "processes": "runtime_error",
}


class ProcessBackend:
    """Executes programs on this host, each in an isolation of its own.

    `run` may be called from several threads; calls for one slot wait for each other. Use it as
    a context manager, or call `close`.
    """

    def __init__(
        self,
        slots: int = 2,
        *,
        data_dirs: Sequence[Path] = (),
        hidden: Sequence[Path] = (),
        warm: bool = True,
        isolation_kind: Isolation | None = None,
    ):
        """Starts the supervisors; their imports go on in the background.

        Args:
          slots: programs at one time.
          data_dirs: the public folders that `run` will be called with. Another one is accepted,
            at the price of restarting a slot's supervisor.
          hidden: files and folders to mask inside: data files of installed packages that hold
            the answers, say.
          warm: fork programs from a supervisor that has imported the usual libraries; false
            starts an interpreter for each.
          isolation_kind: None takes the best that this host allows.

        Raises:
          UserError: a data folder does not exist, or the isolation asked for is not possible.
        """
        self._warm = warm
        self._hidden = tuple(Path(path) for path in hidden)
        self._data_dirs = [_checked(Path(folder)) for folder in data_dirs]
        self._data_lock = threading.Lock()
        self.isolation: Isolation = isolation_kind or best_isolation()[0]
        self._closed = False
        self._slots = [_Slot(index, self.isolation, warm=warm) for index in range(slots)]
        for slot in self._slots:
            if warm and self._data_dirs:
                slot.start(self._view())

    def __enter__(self) -> ProcessBackend:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes."""
        self.close()

    def run(self, program: str, data_dir: Path, limits: Limits, slot: int = 0) -> Execution:
        """Executes a program as written; blocks until its whole process tree is gone.

        Args:
          program: Python text. It finds DATA_DIR and SUBMISSION_PATH in its environment.
          data_dir: folder that it sees, read-only, as DATA_DIR.
          limits: what it may use.
          slot: 0 .. slots - 1.

        Returns:
          What was seen; `unknown` with a cause where the sandbox itself failed.

        Raises:
          UserError: `data_dir` is no folder.
        """
        index = self._index_of(Path(data_dir))
        place = self._slots[slot]
        with place.lock:
            if self._closed:
                return _unknown("the sandbox was closed")
            try:
                execution = place.execute(program, index, self._view(), limits)
            except (OSError, EOFError, subprocess.SubprocessError) as fault:
                place.stop()
                cause = "the sandbox was closed" if self._closed else _cause(fault)
                return _unknown(cause)
            if not self._warm:
                place.stop()
        return execution

    def describe(self) -> str:
        """Which isolation is in force and what is missing, in plain words."""
        return describe(self.isolation, with_cgroups=any(slot.cgroup for slot in self._slots))

    def close(self) -> None:
        """Ends every supervisor and program, within a few seconds, also those at work."""
        self._closed = True
        for slot in self._slots:
            slot.stop()
            slot.release()

    def _view(self) -> View:
        with self._data_lock:
            return View(tuple(self._data_dirs), self._hidden)

    def _index_of(self, folder: Path) -> int:
        with self._data_lock:
            if folder not in self._data_dirs:
                self._data_dirs.append(_checked(folder))
            return self._data_dirs.index(folder)


def _checked(folder: Path) -> Path:
    if not folder.is_dir():
        raise UserError(f"the data folder {folder} does not exist; prepare the tasks first")
    return folder


def _unknown(cause: str) -> Execution:
    return Execution("unknown", "", None, None, None, 0.0, cause)


def _cause(fault: BaseException) -> str:
    if isinstance(fault, EOFError | ConnectionError):
        return "the sandbox's supervisor died"
    if isinstance(fault, TimeoutError):
        return "the sandbox's supervisor did not answer in time"
    return f"the sandbox failed: {fault}"


class _Slot:
    """One supervisor, restarted when it has died or must see another data folder."""

    def __init__(self, index: int, kind: Isolation, *, warm: bool):
        self.lock = threading.Lock()
        self._index = index
        self._kind: Isolation = kind
        self._warm = warm
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._view: View | None = None
        self._ready = False
        self._uid = 0
        self.cgroup = cgroups.create(index)

    def start(self, view: View) -> None:
        """Starts a supervisor without waiting for its imports."""
        ours, theirs = socket.socketpair()
        control = theirs.fileno()
        membership = self.cgroup.open_membership() if self.cgroup else []
        events = self.cgroup.open_events() if self.cgroup else -1
        inherited = [control, *membership, *([events] if self.cgroup else [])]
        self._uid = self._program_uid(view)
        setup = {
            "namespaces": self._kind != "none",
            "uid": self._uid,
            # The kernel counts per user id; only a foreign id or namespace is ours alone.
            "count_processes": self._uid != 0 or self._kind == "user",
            "filter_calls": True,
            "preload": list(PRELOAD if self._warm else _COLD_PRELOAD),
            "rehearse": self._warm,
            "environment": _ENVIRONMENT,
            "cgroup_fds": membership,
            "events_fd": events,
        }
        try:
            self._process = subprocess.Popen(
                isolation.command(self._kind, view, control),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_ENVIRONMENT,
                pass_fds=inherited,
                start_new_session=True,  # Ctrl-C is for the trainer, which then closes us
            )
        finally:
            theirs.close()
            for descriptor in inherited[1:]:
                os.close(descriptor)
        self._socket, self._view, self._ready = ours, view, False
        wire.send(ours, setup)

    def execute(self, program: str, data: int, view: View, limits: Limits) -> Execution:
        """Runs one program; raises OSError or EOFError where the supervisor fails."""
        start = time.monotonic()
        sock = self._started(data, view)
        sock.settimeout(_START_SECONDS)
        if not self._ready:
            wire.receive(sock)
            self._ready = True
        if self._warm:
            start = time.monotonic()  # one program is not charged with the imports for all
        if self.cgroup:
            self.cgroup.limit(limits.memory_mb + limits.scratch_mb, limits.processes)
        folder = str(view.data_dirs[data].resolve())
        job = {
            "data": folder if self._kind == "none" else isolation.guest_data_dir(data),
            "submission": "submission.csv",
            "limits": limits._asdict(),
        }
        sock.settimeout(limits.wall_seconds + _GRACE_SECONDS)
        wire.send(sock, job, program.encode(errors="surrogatepass"))
        result, payload = wire.receive(sock)
        execution = _read(result, payload, limits)
        return execution._replace(seconds=time.monotonic() - start)

    def stop(self) -> None:
        """Ends the supervisor and, with its namespaces, all below it."""
        process, sock = self._process, self._socket
        self._process = self._socket = None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for the answer
            sock.close()
        if process is not None:
            try:
                process.wait(_CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def release(self) -> None:
        """Removes what `stop` keeps for the next start."""
        if self.cgroup:
            self.cgroup.remove()

    def _started(self, data: int, view: View) -> socket.socket:
        dead = self._process is None or self._process.poll() is not None
        if dead or self._view is None or data >= len(self._view.data_dirs):
            self.stop()
            self.start(view)
        if self._socket is None:
            raise EOFError("the slot was stopped")
        return self._socket

    def _program_uid(self, view: View) -> int:
        """An id of its own as root, unless it could not read what it needs."""
        if self._kind != "root":
            return 0
        needed = [Path(os.__file__).parent, *view.data_dirs]
        shallow = all(os.stat(path).st_mode & 0o005 == 0o005 for path in needed)
        if not shallow or not all(map(isolation.readable_by_others, view.data_dirs)):
            return 0
        return isolation.program_uid(self._index)


def _read(result: dict[str, Any], payload: bytes, limits: Limits) -> Execution:
    """What a supervisor's answer says; the exit code decides, the rest is words."""
    output_bytes = result["output_bytes"]
    output = payload[:output_bytes].decode(errors="replace")
    stopped, code, exception = result["stopped"], result.get("code"), result.get("exception")
    out_of_memory = result["memory_kills"] > 0
    if stopped is None and code is None:
        if not out_of_memory:
            return _unknown(result["fault"])
        stopped = "memory"
    elif stopped is None and code:
        if exception == "MemoryError" or out_of_memory:
            stopped = "memory"
        elif code == -signal.SIGXCPU or (
            code == -signal.SIGKILL and result["cpu"] >= limits.cpu_seconds
        ):
            stopped = "processor time"
    if stopped is not None:
        note = f"[stopped: over the limit of {_limit_text(stopped, limits)}]"
        return Execution(_STOPPED[stopped], _with_note(output, note), exception, None, None, 0.0)
    if code:
        if code < 0:
            output = _with_note(output, f"[killed by {_signal_name(-code)}]")
        return Execution("runtime_error", output, exception, None, None, 0.0)
    submission = payload[output_bytes:] if result["submitted"] else None
    return Execution("ok", output, None, submission, result["submission_fault"], 0.0)


def _limit_text(stopped: str, limits: Limits) -> str:
    return {
        "wall clock": f"{limits.wall_seconds:g} s",
        "processor time": f"{limits.cpu_seconds:g} s of processor time",
        "memory": f"{limits.memory_mb} MB of memory",
        "processes": f"{limits.processes} processes",
    }[stopped]


def _with_note(output: str, note: str) -> str:
    return f"{output.rstrip()}\n{note}\n" if output.strip() else f"{note}\n"


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


# --- which isolation -----------------------------------------------------------------------

_best: tuple[Isolation, list[str]] | None = None
_best_lock = threading.Lock()


def best_isolation() -> tuple[Isolation, list[str]]:
    """The best isolation that really works here, and why better ones do not; tried once."""
    global _best
    with _best_lock:
        if _best is None:
            _best = _find_isolation()
            if _best[0] == "none":
                print(f"warning: sandbox: {describe(*_best[:1])}; {'; '.join(_best[1])}",
                      file=sys.stderr)  # fmt: skip
        return _best


def check() -> str:
    """Which isolation is in force on this host, and what is missing for a better one."""
    kind, reasons = best_isolation()
    with ProcessBackend(1, warm=False, isolation_kind=kind) as backend:
        lines = [f"in force: {backend.describe()}"]
    if not seccomp.supported():
        lines.append(f"missing: no seccomp filter for machine {platform.machine()}")
    lines += [f"not possible: {reason}" for reason in reasons]
    return "\n".join(lines)


def _find_isolation() -> tuple[Isolation, list[str]]:
    reasons = []
    kinds = isolation.candidates()
    if kinds == ["none"]:
        reasons.append("bubblewrap (the command bwrap) is not installed")
    for kind in kinds:
        fault = _try(kind)
        if fault is None:
            return kind, reasons
        reasons.append(f"{kind}: {fault}")
    raise UserError("no program can be executed on this host: " + "; ".join(reasons))


def _try(kind: Isolation) -> str | None:
    """Runs an empty program; None where it went well, else what failed."""
    with ProcessBackend(1, warm=False, isolation_kind=kind) as backend:
        execution = backend.run("", Path(__file__).parent / "inside", Limits())
    return None if execution.status == "ok" else execution.cause or execution.output.strip()


def describe(kind: Isolation, *, with_cgroups: bool | None = None) -> str:
    """One sentence on an isolation."""
    text = isolation.DESCRIPTIONS[kind]
    if with_cgroups is None:
        return text
    memory = "by control group" if with_cgroups else "by watching the process tree (no cgroup)"
    return f"{text}; memory limited {memory}"
