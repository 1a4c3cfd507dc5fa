"""Tries what needs privileges: mounts, namespaces, user ids, tracing, devices, kernel keys."""

import pytest

CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
result = {call}
print(result, ctypes.get_errno())
"""


@pytest.mark.parametrize(
    "call",
    [
        "libc.umount2(b'/sandbox/tasks', 2)",
        "libc.mount(b'none', b'/tmp', b'tmpfs', 0, 0)",
        "libc.unshare(0x10000000)",
        "libc.unshare(0x20000)",
        "libc.chroot(b'/tmp')",
        "libc.ptrace(16, 1, 0, 0)",
        "libc.syscall(425, 8, 0)",
        "libc.sethostname(b'x', 1)",
        "libc.setuid(0) or (os.getuid() and -1) or -1",
    ],
)
def test_the_call_is_refused(sandbox, call):
    execution = sandbox.run(CALL.format(call=call))
    assert execution.status == "ok"
    assert execution.output.startswith("-1 ")


def test_it_has_no_capabilities_and_cannot_get_any(sandbox):
    execution = sandbox.run(
        """
        for line in open("/proc/self/status"):
            if line.startswith(("Cap", "NoNewPrivs", "Seccomp:")):
                print(*line.split())
        """
    )
    words = dict(line.split() for line in execution.output.splitlines())
    assert {int(value, 16) for name, value in words.items() if name.startswith("Cap")} == {0}
    assert words["NoNewPrivs:"] == "1"
    assert words["Seccomp:"] == "2"


def test_kernel_settings_cannot_be_written(sandbox):
    execution = sandbox.run("open('/proc/sys/kernel/core_pattern', 'w').write('|/tmp/x')")
    assert execution.status == "runtime_error"
