"""System calls that Python lacks, and the confinement of one program made of them."""

from __future__ import annotations

import ctypes
import os
import resource

from . import seccomp

_libc = ctypes.CDLL(None, use_errno=True)

NEWNS, NEWUTS, NEWIPC, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _BIND = 1, 2, 4, 8, 4096
_REC, _PRIVATE, _DETACH = 16384, 1 << 18, 2
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_SECUREBITS = 4, 24, 28
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_NOROOT_LOCKED = 0b1111  # no capabilities from user id 0, none fixed up on setuid, both locked
_SCRATCH_INODES = 20_000
_MIB = 1 << 20

DATA, WORK, TMP = "/sandbox/data", "/sandbox/work", "/sandbox/tmp"
_TASKS, _SCRATCH = "/sandbox/tasks", "/sandbox/scratch"


def _check(result: int, what: str) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Moves this process (for NEWPID: its next child) into new namespaces."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    """Enters the namespace behind `fd`."""
    _check(_libc.setns(fd, kind), "setns")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2)."""
    arguments = (source.encode(), target.encode(), kind.encode(), flags, options.encode())
    _check(_libc.mount(*map(_as_c, arguments)), f"mount {target}")


def _as_c(value: bytes | int) -> ctypes.c_ulong | bytes:
    return ctypes.c_ulong(value) if isinstance(value, int) else value


def become_subreaper() -> None:
    """Orphaned descendants become children of this process instead of escaping."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "subreaper")


def forbid_inspection() -> None:
    """Keeps processes of the same user from tracing this one or reading its memory."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")


def enter_private_root(data_dir: str, scratch_mb: int, uid: int) -> None:
    """Gives this process mounts, IPC, network and host name of its own.

    Afterwards DATA is the task's folder, those of the others are gone, /proc shows only the new
    process namespace, and WORK, TMP (also as /tmp) and /dev/shm share one bounded tmpfs.
    """
    unshare(NEWNS | NEWIPC | NEWNET | NEWUTS)
    mount("none", "/", "", _REC | _PRIVATE)
    mount("proc", "/proc", "proc", _RDONLY | _NOSUID | _NODEV | _NOEXEC)
    mount(data_dir, DATA, "", _BIND | _REC)
    mount("none", _TASKS, "tmpfs", _RDONLY, "size=4k,mode=555")
    size = f"size={scratch_mb}m,nr_inodes={_SCRATCH_INODES},mode=755"
    mount("scratch", _SCRATCH, "tmpfs", _NOSUID | _NODEV, size)
    for name, target in (("work", WORK), ("tmp", TMP), ("shm", "/dev/shm")):
        folder = f"{_SCRATCH}/{name}"
        os.mkdir(folder)
        os.chmod(folder, 0o755 if name == "work" else 0o1777)
        if uid:
            os.chown(folder, uid, uid)
        mount(folder, target, "", _BIND)
    if not os.path.islink("/tmp"):
        _join_tmp()
    _check(_libc.umount2(_SCRATCH.encode(), _DETACH), "umount")  # only its parts stay in sight


def _join_tmp() -> None:
    """Makes TMP appear as /tmp where that is a folder, because the interpreter lies in it."""
    for name in os.listdir("/tmp"):
        os.mkdir(f"{TMP}/{name}")
        mount(f"/tmp/{name}", f"{TMP}/{name}", "", _BIND | _REC)
    mount(TMP, "/tmp", "", _BIND | _REC)


def limit_resources(limits: dict[str, float], *, count_processes: bool) -> None:
    """Sets the rlimits of this process and of all it starts.

    Args:
      limits: the fields of `Limits`.
      count_processes: false where the kernel would count the user's other processes too.
    """
    cpu = max(1, int(limits["cpu_seconds"] + 0.999))
    memory = int(limits["memory_mb"]) * _MIB
    file = int(limits["file_mb"]) * _MIB
    _set(resource.RLIMIT_CPU, cpu, cpu + 1)  # SIGXCPU, and SIGKILL for who ignores it
    # What was imported before the fork is not the program's.
    data, total = _own_memory()
    _set(resource.RLIMIT_DATA, memory + data)
    _set(resource.RLIMIT_AS, 2 * memory + total + 512 * _MIB)
    _set(resource.RLIMIT_FSIZE, file)
    _set(resource.RLIMIT_NOFILE, 512)
    _set(resource.RLIMIT_CORE, 0)
    _set(resource.RLIMIT_MEMLOCK, 0)
    if count_processes:
        _set(resource.RLIMIT_NPROC, int(limits["processes"]) + 2)  # supervisor and init


def _set(kind: int, soft: int, hard: int | None = None) -> None:
    _, ceiling = resource.getrlimit(kind)
    values = (soft, soft if hard is None else hard)
    if ceiling != resource.RLIM_INFINITY:
        values = (min(values[0], ceiling), min(values[1], ceiling))
    resource.setrlimit(kind, values)


def _own_memory() -> tuple[int, int]:
    """Bytes of (writable private, all) memory that is mapped now."""
    with open("/proc/self/statm") as file:
        fields = file.read().split()
    page = resource.getpagesize()
    return int(fields[5]) * page, int(fields[0]) * page


def drop_privileges(uid: int, *, filter_calls: bool) -> None:
    """Gives up every capability and the user id, for ever; filters system calls."""
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
            break  # past the last that this kernel knows, or none to drop
    _libc.prctl(_PR_SET_SECUREBITS, _NOROOT_LOCKED, 0, 0, 0)  # only possible with capabilities
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    # setresuid made /proc/self root's; the program may read its own.
    _check(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "dumpable")
    if filter_calls and seccomp.supported():
        seccomp.install(_libc)
