"""Reading what a hostile program left at the submission path."""

from __future__ import annotations

import errno
import os
import stat

MOST_BYTES = 64 << 20
"""No submission may be larger, whatever the limit on files."""


def read_submission(folder: int, name: str, most: int) -> tuple[bytes | None, str | None]:
    """The content of a regular file, or why there is none that can be read.

    Never follows a link, never waits on a FIFO or a device, never reads more than `most`.

    Args:
      folder: descriptor of the folder it lies in.
      name: file name.
      most: largest size accepted, bytes.

    Returns:
      (content, fault): one of the two, or both None where nothing is there.
    """
    most = min(most, MOST_BYTES)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        kind = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        if not stat.S_ISREG(kind):
            return None, f"the submission is {_KINDS.get(stat.S_IFMT(kind), 'no regular file')}"
        descriptor = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        return None, None
    except OSError as fault:
        code = errno.errorcode.get(fault.errno or 0, "?")
        return None, f"the submission cannot be opened ({code})"
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):  # exchanged since
            return None, "the submission is no regular file"
        if status.st_size > most:
            return None, (
                f"the submission has {status.st_size / 1e6:.0f} MB, "
                f"more than the {most / 1e6:.0f} MB allowed"
            )
        content = file.read(most + 1)
    if len(content) > most:
        return None, f"the submission has more than the {most / 1e6:.0f} MB allowed"
    return content, None


_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
