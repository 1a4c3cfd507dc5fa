"""Takes more memory than allowed: by one process, by many, by shared memory, by files in RAM."""

import time


def test_one_process_gets_a_memory_error(sandbox):
    execution = sandbox.run("kept = []\nwhile True: kept.append(bytearray(1 << 24))")
    assert execution.status == "out_of_memory"


def test_one_large_array_is_refused(sandbox):
    execution = sandbox.run("import numpy as np\nnp.ones((10_000, 100_000))")
    assert execution.status == "out_of_memory"
    assert execution.exception in ("MemoryError", "_ArrayMemoryError")


def test_many_processes_count_together(sandbox):
    execution = sandbox.run(
        """
        import os, time
        for _ in range(8):
            if os.fork() == 0:
                kept = bytearray(os.urandom(1 << 10)) * (100 << 10)
                time.sleep(30)
                os._exit(0)
        statuses = [os.wait()[1] for _ in range(8)]
        raise RuntimeError(f"children ended with {statuses}")
        """,
        wall_seconds=25,
    )
    assert execution.status == "out_of_memory", execution


def test_shared_memory_counts(sandbox):
    execution = sandbox.run(
        """
        import mmap
        kept = []
        while True:
            kept.append(mmap.mmap(-1, 1 << 24))
            for at in range(0, 1 << 24, 4096):
                kept[-1][at] = 1
        """
    )
    assert execution.status == "out_of_memory", execution


def test_a_program_just_inside_the_limit_runs(sandbox):
    execution = sandbox.run("kept = bytearray(b'x') * (200 << 20)\nprint(len(kept))")
    assert execution.status == "ok", execution.output


def test_memory_is_given_back(sandbox):
    start = time.monotonic()
    for _ in range(3):
        sandbox.run("kept = bytearray(b'x') * (200 << 20)")
    assert time.monotonic() - start < 60
