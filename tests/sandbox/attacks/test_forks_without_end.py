"""Starts processes or threads until there are no more."""


def test_a_fork_bomb_is_stopped(sandbox):
    execution = sandbox.run(
        """
        import os
        while True:
            os.fork()
        """,
        wall_seconds=15,
    )
    assert execution.status in ("runtime_error", "timeout", "out_of_memory")


def test_a_bomb_that_survives_refusals_ends_with_its_time(sandbox):
    execution = sandbox.run(
        """
        import os
        while True:
            try:
                os.fork()
            except OSError:
                pass
        """,
        wall_seconds=2,
        cpu_seconds=3,
    )
    assert execution.status == "timeout"


def test_the_number_of_processes_is_the_limit(sandbox):
    execution = sandbox.run(
        """
        import os, time
        for count in range(1000):
            if os.fork() == 0:
                time.sleep(60)
        """,
        processes=10,
    )
    assert execution.status == "runtime_error"
    assert execution.exception in ("BlockingIOError", None)


def test_a_thread_bomb_is_stopped(sandbox):
    execution = sandbox.run(
        """
        import threading, time
        while True:
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        """
    )
    assert execution.status == "runtime_error"
