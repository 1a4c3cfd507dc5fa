"""Control groups for the programs of one slot, where the host lets this process make them."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "wmrl"
_serial = itertools.count()


class Cgroup:
    """One group per slot that bounds memory and process count of a whole process tree."""

    def __init__(self, folders: dict[str, Path], version: int):
        self._folders = folders
        self._version = version
        self._limits: tuple[int, int] | None = None

    def open_membership(self) -> list[int]:
        """Descriptors of `cgroup.procs`; a process that writes 0 to them becomes a member."""
        folders = set(self._folders.values())
        return [os.open(folder / "cgroup.procs", os.O_WRONLY) for folder in sorted(folders)]

    def limit(self, memory_mb: int, processes: int) -> None:
        """Sets the limits of the next program. Raises OSError."""
        if self._limits == (memory_mb, processes):
            return
        memory = self._folders["memory"]
        size = str(memory_mb << 20)
        if self._version == 2:
            (memory / "memory.max").write_text(size)
            with contextlib.suppress(OSError):
                (memory / "memory.swap.max").write_text("0")
        else:
            with contextlib.suppress(OSError):  # or the new limit would exceed the old total
                (memory / "memory.memsw.limit_in_bytes").write_text("-1")
            (memory / "memory.limit_in_bytes").write_text(size)
            with contextlib.suppress(OSError):  # absent where swap is not accounted
                (memory / "memory.memsw.limit_in_bytes").write_text(size)
        if "pids" in self._folders:
            (self._folders["pids"] / "pids.max").write_text(str(processes + 1))
        self._limits = (memory_mb, processes)

    def open_events(self) -> int:
        """Descriptor of the file that counts, as `oom_kill`, processes killed for memory."""
        name = "memory.events" if self._version == 2 else "memory.oom_control"
        return os.open(self._folders["memory"] / name, os.O_RDONLY)

    def remove(self) -> None:
        """Removes the groups; one that still has members is left to a later run."""
        for folder in set(self._folders.values()):
            with contextlib.suppress(OSError):
                folder.rmdir()


def create(slot: int) -> Cgroup | None:
    """A new group for one slot of this process, or None where the host does not allow it."""
    name = f"{_PREFIX}-{os.getpid()}-{slot}-{next(_serial)}"
    if (_ROOT / "cgroup.controllers").exists():
        folder = _make(_ROOT, _own_path(""), name, "memory.max")
        if folder is None:
            return None
        folders = {"memory": folder}
        if (folder / "pids.max").exists():
            folders["pids"] = folder
        return Cgroup(folders, 2)
    folders = {}
    for controller, file in (("memory", "memory.limit_in_bytes"), ("pids", "pids.max")):
        folder = _make(_ROOT / controller, _own_path(controller), name, file)
        if folder is not None:
            folders[controller] = folder
    return Cgroup(folders, 1) if "memory" in folders else None


def _own_path(controller: str) -> str:
    """This process's place in the hierarchy of `controller` ("" for version 2)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if controller in names.split(","):
                return path.lstrip("/")
    return ""


def _remove_orphans(parent: Path) -> None:
    """Removes groups whose trainer was killed before it could."""
    for folder in parent.glob(f"{_PREFIX}-*"):
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _make(root: Path, own: str, name: str, needed: str) -> Path | None:
    """A writable group below our own place or the root that has the file `needed`."""
    for parent in (root / own, root):
        _remove_orphans(parent)
        folder = parent / name
        try:
            folder.mkdir()
        except OSError:
            continue
        if os.access(folder / needed, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK):
            return folder
        folder.rmdir()
    return None
