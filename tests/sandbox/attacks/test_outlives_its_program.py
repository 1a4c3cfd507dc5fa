"""Leaves processes behind by double fork and a session of its own."""

import time
from pathlib import Path


def test_a_daemon_is_gone_when_the_program_has_ended(sandbox):
    marker = f"outliving{time.monotonic_ns()}"
    execution = sandbox.run(
        f"""
        import os, signal, time, ctypes
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ctypes.CDLL(None).prctl(15, b"{marker[-12:]}", 0, 0, 0)
            print("daemon", flush=True)
            time.sleep(1000)
        os.wait()
        time.sleep(0.5)
        """
    )
    assert (execution.status, execution.output) == ("ok", "daemon\n")
    assert names_of_processes().isdisjoint({marker[-12:]})


def test_a_background_process_that_holds_the_output_does_not_delay_the_end(sandbox):
    start = time.monotonic()
    execution = sandbox.run("import os, time\nif os.fork() == 0: time.sleep(1000)",
                            wall_seconds=30)  # fmt: skip
    assert execution.status == "ok"
    assert time.monotonic() - start < 20


def test_a_daemon_cannot_write_the_submission_later(sandbox):
    execution = sandbox.run(
        """
        import os, time
        if os.fork() == 0:
            os.setsid()
            time.sleep(0.3)
            open(os.environ["SUBMISSION_PATH"], "w").write("late")
        """
    )
    assert (execution.status, execution.submission) == ("ok", None)


def names_of_processes() -> set[str]:
    names = set()
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            names.add(path.read_text().strip())
        except OSError:
            continue
    return names
