"""Sleeps, loops, stops itself, or plays with signals so as not to end."""

import time

import pytest


def test_a_sleeper_is_stopped_by_the_wall_clock(sandbox):
    start = time.monotonic()
    execution = sandbox.run("import time\nprint('begun', flush=True)\ntime.sleep(1000)",
                            wall_seconds=1)  # fmt: skip
    assert execution.status == "timeout"
    assert execution.output == "begun\n[stopped: over the limit of 1 s]\n"
    assert time.monotonic() - start < 15


def test_a_loop_is_stopped_by_processor_time(sandbox):
    execution = sandbox.run("while True: pass", cpu_seconds=1)
    assert execution.status == "timeout"
    assert execution.output == "[stopped: over the limit of 1 s of processor time]\n"


def test_processor_time_of_children_counts(sandbox):
    execution = sandbox.run(
        """
        import os
        while True:
            child = os.fork()
            if child == 0:
                for _ in range(10_000_000): pass
                os._exit(0)
            os.waitpid(child, 0)
        """,
        cpu_seconds=2,
    )
    assert execution.status == "timeout"
    assert "processor time" in execution.output


@pytest.mark.parametrize("name", ["SIGXCPU", "SIGTERM", "SIGALRM"])
def test_ignoring_signals_does_not_help(sandbox, name):
    execution = sandbox.run(
        f"""
        import signal
        signal.signal(signal.{name}, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 1000)
        while True: pass
        """,
        cpu_seconds=1,
    )
    assert execution.status == "timeout"


def test_a_program_that_stops_itself_is_ended(sandbox):
    execution = sandbox.run(
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", wall_seconds=1
    )
    assert execution.status == "timeout"


def test_a_submission_written_before_the_time_was_over_does_not_count(sandbox):
    execution = sandbox.run(
        """
        import os, time
        open(os.environ["SUBMISSION_PATH"], "w").write("id,y\\n")
        time.sleep(1000)
        """,
        wall_seconds=1,
    )
    assert (execution.status, execution.submission) == ("timeout", None)


def test_raising_the_limits_is_refused(sandbox):
    execution = sandbox.run(
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (9999, 9999))"
    )
    assert (execution.status, execution.exception) == ("runtime_error", "ValueError")
