"""Sends by TCP, UDP and Unix sockets to a listener of the test's own; nothing may arrive."""

import contextlib
import socket

import pytest

PROGRAM = """
import socket
kind, family, address = {kind!r}, {family!r}, {address!r}
sender = socket.socket(getattr(socket, family), getattr(socket, kind))
sender.settimeout(2)
sender.connect(address)
sender.send(b"secret")
"""


@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_DGRAM"])
def test_loopback_services_of_the_host_are_out_of_reach(sandbox, kind):
    with socket.socket(socket.AF_INET, getattr(socket, kind)) as listener:
        listener.bind(("127.0.0.1", 0))
        if kind == "SOCK_STREAM":
            listener.listen()
        program = PROGRAM.format(kind=kind, family="AF_INET", address=listener.getsockname())
        execution = sandbox.run(program)
        assert execution.status == "runtime_error"
        assert execution.exception in ("OSError", "ConnectionRefusedError"), execution.output
        nothing_arrived(listener, kind)


@pytest.mark.parametrize("abstract", [True, False])
def test_unix_sockets_of_the_host_are_out_of_reach(sandbox, tmp_path, abstract):
    name = "\0wmrl-test-listener" if abstract else str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(name)
        listener.listen()
        program = PROGRAM.format(kind="SOCK_STREAM", family="AF_UNIX", address=name)
        assert sandbox.run(program).status == "runtime_error"
        nothing_arrived(listener, "SOCK_STREAM")


def nothing_arrived(listener: socket.socket, kind: str) -> None:
    listener.settimeout(0.2)
    with contextlib.suppress(TimeoutError):
        got = listener.accept() if kind == "SOCK_STREAM" else listener.recv(100)
        pytest.fail(f"something arrived: {got!r}")
