"""The supervisor of one slot: imports the usual libraries once, forks a child per program.

Three processes serve one program. The supervisor watches limits from outside. The init, a fork
of it, is the first process of fresh namespaces, holds the scratch folder and reads the
submission after all others there are dead. The program, a fork of the init, has
authority over neither: other user id or no capabilities, and no descriptor but its output and a
report pipe, of whose content only the first line, written before the program, is trusted.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from typing import Any, NamedTuple, NoReturn

from . import confine, program, rehearsal, tree, wire
from .submission import read_submission
from .watch import Watch

_READY = b"ready\n"
_REPORT_BYTES = 4096


class Setup(NamedTuple):
    """How this supervisor confines programs; sent once by the host.

    Attributes:
      namespaces: whether it runs inside bubblewrap, with the right to make namespaces.
      uid: user id of programs, 0 to keep the supervisor's.
      count_processes: whether RLIMIT_NPROC would count this sandbox's processes only.
      filter_calls: whether to install the seccomp filter.
      preload: modules to import before the first program.
      rehearse: whether to fit a model of each usual kind before the first program.
      environment: the whole environment of programs, but for the paths.
      cgroup_fds: open `cgroup.procs` files that programs join.
      events_fd: open file in which their control group counts kills for memory, or -1.
    """

    namespaces: bool
    uid: int
    count_processes: bool
    filter_calls: bool
    preload: list[str]
    rehearse: bool
    environment: dict[str, str]
    cgroup_fds: list[int]
    events_fd: int


class Paths(NamedTuple):
    """Where one program finds things."""

    data: str
    work: str
    tmp: str


def main(control_fd: int) -> NoReturn:
    """Serves programs from the control socket until the host closes it."""
    control = socket.socket(fileno=control_fd)
    # The first process of a namespace ignores what it does not handle, but for this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        setup = Setup(**wire.receive(control)[0])
        failed = _preload(setup.preload)
        if setup.rehearse:
            _rehearse()
        # The children must not copy, and the collector not touch, what was imported.
        gc.collect()
        gc.freeze()
        confine.forbid_inspection()
        confine.become_subreaper()
        own_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY) if setup.namespaces else -1
        wire.send(control, {"ready": True, "failed": failed})
        while True:
            job, text = wire.receive(control)
            result, payload = _serve(setup, control, own_namespace, job, text.decode())
            wire.send(control, result, payload)
    except (EOFError, ConnectionError):
        os._exit(0)  # the host closed the slot, or is gone


def _preload(names: list[str]) -> list[str]:
    """Imports what can be imported; a library that is not installed is the program's affair."""
    failed = []
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                importlib.import_module(name)
            except ImportError:
                failed.append(name)
    return failed


def _rehearse() -> None:
    with warnings.catch_warnings(), contextlib.suppress(ImportError):
        warnings.simplefilter("ignore")
        rehearsal.rehearse()


def _serve(
    setup: Setup, control: socket.socket, own_namespace: int, job: dict[str, Any], text: str
) -> tuple[dict[str, Any], bytes]:
    output_read, output_write = os.pipe()
    ours, theirs = socket.socketpair()
    scratch = "" if setup.namespaces else tempfile.mkdtemp(prefix="wmrl-scratch-")
    paths = Paths(job["data"], scratch, scratch)
    if setup.namespaces:
        paths = Paths(confine.DATA, confine.WORK, confine.TMP)
        confine.unshare(confine.NEWPID)
    try:
        pid = os.fork()
        if pid == 0:
            for descriptor in (control.fileno(), output_read, ours.fileno()):
                os.close(descriptor)
            _be_init(setup, theirs, output_write, job, text, paths)
        if setup.namespaces:
            confine.setns(own_namespace, confine.NEWPID)
        os.close(output_write)
        theirs.close()
        watch = Watch(pid, job["limits"], output_read, ours, control, setup.events_fd)
        return watch.until_end()
    finally:
        tree.kill_descendants()
        ours.close()
        os.close(output_read)
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)


# --- the init ------------------------------------------------------------------------------


def _be_init(
    setup: Setup,
    status: socket.socket,
    output: int,
    job: dict[str, Any],
    text: str,
    paths: Paths,
) -> NoReturn:
    """Makes the private root, runs the program, reports how it ended. Never returns."""
    try:
        header, payload = _run_confined(setup, output, job, text, paths)
        wire.send(status, header, payload)
    except OSError as fault:
        wire.send(status, {"fault": f"the sandbox could not be set up: {fault}"})
    finally:
        os._exit(0)


def _run_confined(
    setup: Setup, output: int, job: dict[str, Any], text: str, paths: Paths
) -> tuple[dict[str, Any], bytes]:
    limits = job["limits"]
    # The kernel should choose the program when memory ends, never who looks after it. The
    # program inherits the mark; its own /proc cannot be written to.
    mark = _open_mark()
    _write_mark(mark, b"1000")
    if setup.namespaces:
        confine.enter_private_root(job["data"], int(limits["scratch_mb"]), setup.uid)
    else:
        confine.become_subreaper()
    source = os.path.join(paths.work, "program.py")
    with open(source, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
    folder = os.open(paths.work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    report_read, report_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(report_read)
        _be_program(setup, output, report_write, limits, text, source, paths)
    _write_mark(mark, b"0")
    os.close(report_write)
    os.close(output)
    code = _wait_for(child)
    if setup.namespaces:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all of this process namespace but us
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
    os.set_blocking(report_read, False)  # in the plain mode a survivor may still hold it
    try:
        report = os.read(report_read, _REPORT_BYTES)
    except BlockingIOError:
        report = b""
    if not report.startswith(_READY):
        return {"fault": f"the program was not started: {report.decode(errors='replace')}"}, b""
    name = report[len(_READY) :].decode(errors="replace").strip()
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    header: dict[str, Any] = {
        "code": code,
        "exception": name[:64] if name.isidentifier() else None,
        "cpu": usage.ru_utime + usage.ru_stime,
        "submission_fault": None,
    }
    submission = None
    if code == 0:
        most = int(limits["file_mb"]) << 20
        submission, header["submission_fault"] = read_submission(folder, job["submission"], most)
    header["submitted"] = submission is not None
    return header, submission or b""


def _open_mark() -> int:
    with contextlib.suppress(OSError):  # closed to an ordinary user who forbade inspection
        return os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    return -1


def _write_mark(mark: int, value: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(mark, value)


def _wait_for(child: int) -> int:
    """Reaps whatever dies until `child` does; its exit code, or minus the signal's number."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


# --- the program ---------------------------------------------------------------------------


def _be_program(
    setup: Setup,
    output: int,
    report: int,
    limits: dict[str, float],
    text: str,
    source: str,
    paths: Paths,
) -> NoReturn:
    code = 1
    try:
        _confine_program(setup, output, report, limits, paths)
    except OSError as fault:
        os.write(report, str(fault).encode())
        os._exit(1)
    os.write(report, _READY)

    def tell(name: str) -> None:
        with contextlib.suppress(OSError):
            os.write(report, name.encode(errors="replace")[:256])

    try:
        code = program.execute(text, source, tell)
    except BaseException:  # raised by what the program left for the end, such as atexit functions
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _confine_program(
    setup: Setup, output: int, report: int, limits: dict[str, float], paths: Paths
) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor in setup.cgroup_fds:
        os.write(descriptor, b"0")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, report)
    os.closerange(report + 1, 65536)
    os.chdir(paths.work)
    os.umask(0o022)
    os.environ.clear()
    os.environ.update(setup.environment)
    os.environ.update(
        DATA_DIR=paths.data,
        SUBMISSION_PATH=os.path.join(paths.work, "submission.csv"),
        HOME=paths.work,
        TMPDIR=paths.tmp,
    )
    confine.limit_resources(limits, count_processes=setup.count_processes)
    confine.drop_privileges(setup.uid, filter_calls=setup.filter_calls)
