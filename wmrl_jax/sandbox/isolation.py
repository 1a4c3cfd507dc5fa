"""Which isolation this host allows, and the bubblewrap command line that makes it."""

from __future__ import annotations

import os
import shutil
import site
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

Isolation = Literal["root", "user", "none"]
"""`root`: namespaces made by root, programs run under a user id of their own. `user`: namespaces
inside an unprivileged user namespace. `none`: resource limits and process kill only."""

INSIDE = Path(__file__).parent / "inside"
_GUEST = "/sandbox"
_GUEST_INSIDE = f"{_GUEST}/inside"
_CAPABILITIES = (
    "CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_CHOWN", "CAP_KILL",
    "CAP_SYS_PTRACE", "CAP_SYS_RESOURCE", "CAP_DAC_OVERRIDE",
)  # fmt: skip
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
_SYSTEM_LIBRARIES = ("/lib", "/lib32", "/lib64", "/libx32")

DESCRIPTIONS: dict[Isolation, str] = {
    "root": (
        "bubblewrap as root: private mounts, processes, network, IPC; own user id, no "
        "capabilities, seccomp filter"
    ),
    "user": (
        "bubblewrap in an unprivileged user namespace: private mounts, processes, network, IPC; "
        "no capabilities, seccomp filter"
    ),
    "none": (
        "NO ISOLATION: resource limits and process kill only; programs can read this user's "
        "files and reach the network"
    ),
}


class View(NamedTuple):
    """What a supervisor's isolation shows of the host.

    Attributes:
      data_dirs: the tasks' public folders; a program sees the one of its own task.
      hidden: files and folders to mask, wherever they appear.
    """

    data_dirs: tuple[Path, ...]
    hidden: tuple[Path, ...]


def candidates() -> list[Isolation]:
    """The kinds of isolation to try on this host, best first."""
    if shutil.which("bwrap") is None:
        return ["none"]
    return ["root", "user", "none"] if os.geteuid() == 0 else ["user", "none"]


def command(isolation: Isolation, view: View, control_fd: int) -> list[str]:
    """The command that starts a supervisor serving the socket `control_fd`."""
    if isolation == "none":
        return [sys.executable, "-s", "-B", str(INSIDE), str(control_fd)]
    arguments = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    arguments += ["--unshare-cgroup-try", "--hostname", "sandbox"]
    if isolation == "user":
        # User id 0 inside keeps bubblewrap from nesting a second user namespace, in which
        # the supervisor could make no mounts.
        arguments += ["--unshare-user", "--uid", "0", "--gid", "0"]
    arguments += ["--cap-drop", "ALL"]
    for capability in _CAPABILITIES:
        arguments += ["--cap-add", capability]
    arguments += _root(view)
    arguments += ["--chdir", "/", "--"]
    return [*arguments, sys.executable, "-s", "-B", _GUEST_INSIDE, str(control_fd)]


def _root(view: View) -> list[str]:
    """A read-only root with the interpreter, its libraries and the data folders, no more."""
    arguments: list[str] = []
    for library in _SYSTEM_LIBRARIES:
        if os.path.islink(library):
            arguments += ["--symlink", os.readlink(library), library]
        elif os.path.isdir(library):
            arguments += ["--ro-bind", library, library]
    shown = interpreter_paths()
    # Bubblewrap would make them closed to any user but root.
    inner = [*shown, Path(_GUEST_INSIDE), *map(Path, _SYSTEM_FILES)]
    for parent in sorted({parent for path in inner for parent in path.parents}):
        if parent != Path("/"):
            arguments += ["--perms", "0755", "--dir", str(parent)]
    for path in shown:
        arguments += ["--ro-bind", str(path), str(path)]
    for file in _SYSTEM_FILES:
        arguments += ["--ro-bind-try", file, file]
    for path in masked(view.hidden, shown):
        if path.is_dir():
            arguments += ["--perms", "0555", "--size", "4096", "--tmpfs", str(path)]
            arguments += ["--remount-ro", str(path)]
        else:
            arguments += ["--ro-bind", os.devnull, str(path)]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    arguments += ["--ro-bind", str(INSIDE), _GUEST_INSIDE]
    for folder in ("data", "work", "tmp", "scratch", "tasks"):
        arguments += ["--perms", "0755", "--dir", f"{_GUEST}/{folder}"]
    if not any(Path("/tmp") in path.parents for path in shown):  # where no interpreter lies
        arguments += ["--symlink", f"{_GUEST}/tmp", "/tmp"]
    for i, folder in enumerate(view.data_dirs):
        arguments += ["--ro-bind", str(folder.resolve()), guest_data_dir(i)]
    return [*arguments, "--remount-ro", "/"]


def guest_data_dir(index: int) -> str:
    """Where the supervisor, not a program, sees the data folder of that index."""
    return f"{_GUEST}/tasks/{index}"


def interpreter_paths() -> list[Path]:
    """The host paths that this interpreter and its installed packages need, none nested."""
    paths = {Path(sys.prefix), *map(Path, ("/usr/lib", "/usr/lib32", "/usr/lib64"))}
    base = Path(sys.base_prefix)
    if base in (Path("/usr"), Path("/usr/local")):
        paths |= {base / "lib", base / "lib64"}
    else:
        paths.add(base)
    paths |= {Path(entry) for entry in site.getsitepackages()}
    paths |= {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    executable = Path(sys.executable)
    paths.add(executable)
    while executable.is_symlink():  # every link on the way must exist inside
        executable = executable.parent / os.readlink(executable)
        paths.add(executable)
    existing = sorted(path for path in paths if path.exists() and path not in _TOO_WIDE)
    return [path for path in existing if not any(other in path.parents for other in existing)]


_TOO_WIDE = (Path("/"), Path("/usr"), Path("/usr/local"), Path.home())


def masked(hidden: Sequence[Path], shown: Sequence[Path]) -> list[Path]:
    """Where inside `shown` those of `hidden` appear, and this package: leaderboards, metrics."""
    own_package = Path(__file__).parents[1]
    places = set()
    for path in (own_package, *hidden):
        real = path.resolve()  # either may have been named through a link
        for folder in shown:
            real_folder = folder.resolve()
            if real_folder in real.parents and real.exists():
                places.add(folder / real.relative_to(real_folder))
    return sorted(places)


def program_uid(slot: int) -> int:
    """A user id that no one else has, for the programs of one slot of this process."""
    return 1_500_000_000 + (os.getpid() % (1 << 22)) * 64 + slot % 64


def readable_by_others(folder: Path) -> bool:
    """Whether every file and folder below `folder` can be read under a foreign user id."""
    for parent, _, files in os.walk(folder):
        if os.stat(parent).st_mode & 0o005 != 0o005:
            return False
        if any(not os.stat(os.path.join(parent, name)).st_mode & 0o004 for name in files):
            return False
    return True
