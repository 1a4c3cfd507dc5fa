"""Sends signals to its parent, to the first process, to everything."""

import pytest


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGTERM", "SIGSTOP", "SIGINT"])
@pytest.mark.parametrize("target", ["os.getppid()", "1"])
def test_the_parent_does_not_notice(sandbox, signal, target):
    execution = sandbox.run(
        f"""
        import os, signal
        try:
            os.kill({target}, signal.{signal})
        except PermissionError:
            pass
        print("alive")
        """
    )
    assert (execution.status, execution.output) == ("ok", "alive\n")


def test_killing_everything_kills_only_itself(sandbox):
    execution = sandbox.run("import os, signal\nos.kill(-1, signal.SIGKILL)\nprint('alive')")
    assert execution.status in ("ok", "runtime_error")


def test_killing_itself_is_a_runtime_error(sandbox):
    execution = sandbox.run("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert (execution.status, execution.output) == ("runtime_error", "[killed by SIGKILL]\n")


def test_a_crash_of_the_interpreter_is_a_runtime_error(sandbox):
    execution = sandbox.run("import ctypes\nctypes.string_at(0)")
    assert (execution.status, execution.output) == ("runtime_error", "[killed by SIGSEGV]\n")
