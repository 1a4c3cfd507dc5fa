"""A seccomp filter that refuses the system calls a data-science program never needs.

It is a second wall: namespaces, an own user id and dropped capabilities already deny most of
these. The list follows the calls that Docker's default profile withholds from containers.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

# Numbers per machine; a call that an architecture lacks has no number.
_COMMON_64 = {  # numbers from 424 on are the same on every architecture
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "fspick": 433, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "mount_setattr": 442, "pidfd_getfd": 438, "process_madvise": 440, "open_tree_attr": 467,
}  # fmt: skip
_X86_64 = {
    "ptrace": 101, "syslog": 103, "personality": 135, "pivot_root": 155, "adjtimex": 159,
    "chroot": 161, "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167,
    "swapoff": 168, "reboot": 169, "sethostname": 170, "setdomainname": 171, "iopl": 172,
    "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179, "clock_settime": 227,
    "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272,
    "perf_event_open": 298, "name_to_handle_at": 303, "open_by_handle_at": 304, "setns": 308,
    "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313,
    "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "modify_ldt": 154,
}  # fmt: skip
_AARCH64 = {
    "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "quotactl": 60, "acct": 89,
    "personality": 92, "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106,
    "clock_settime": 112, "syslog": 116, "ptrace": 117, "reboot": 142, "sethostname": 161,
    "setdomainname": 162, "settimeofday": 170, "adjtimex": 171, "add_key": 217,
    "request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225, "perf_event_open": 241,
    "name_to_handle_at": 264, "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270,
    "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "bpf": 280, "userfaultfd": 282,
    "kexec_file_load": 294,
}  # fmt: skip
# machine: (audit architecture, refused calls, number of clone)
_MACHINES = {
    "x86_64": (0xC000003E, {**_X86_64, **_COMMON_64}, 56),
    "aarch64": (0xC00000B7, {**_AARCH64, **_COMMON_64}, 220),
}
_CLONE3 = 435
_NAMESPACE_FLAGS = 0x7E020080  # the CLONE_NEW* flags, time namespace included
_X32_BIT = 0x40000000

_LOAD, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2


def supported() -> bool:
    """True where the filter knows this machine's call numbers."""
    return platform.machine() in _MACHINES


def filter_program() -> list[tuple[int, int, int, int]]:
    """The filter as (code, jump if true, jump if false, operand) rows of classic BPF."""
    arch, refused, clone = _MACHINES[platform.machine()]
    numbers = sorted(refused.values())
    rows = [
        (_LOAD, 0, 0, 4),  # architecture
        (_JEQ, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # call number
        (_JGE, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        # glibc falls back from clone3 to clone, whose flags a filter can read.
        (_JEQ, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_JEQ, 0, 4, clone),
        (_LOAD, 0, 0, 16),  # low half of the first argument
        (_JSET, 0, 1, _NAMESPACE_FLAGS),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for i, number in enumerate(numbers):
        rows.append((_JEQ, len(numbers) - i, 0, number))
    rows.append((_RETURN, 0, 0, _ALLOW))
    rows.append((_RETURN, 0, 0, _ERRNO | errno.EPERM))
    return rows


def install(libc: ctypes.CDLL) -> None:
    """Puts the filter on this process for ever; needs no_new_privs. Raises OSError."""
    rows = filter_program()
    code = b"".join(struct.pack("HBBI", *row) for row in rows)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(rows), ctypes.addressof(buffer))
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(program), 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel refused the seccomp filter")
