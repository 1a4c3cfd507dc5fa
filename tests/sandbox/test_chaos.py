"""Real programs through queue and sandbox while their supervisors are killed."""

import os
import random
import signal
import threading
import time

import pytest

from wmrl_jax.sandbox.process import ProcessBackend
from wmrl_jax.sandbox.queue import SandboxQueue
from wmrl_jax.types import Job, Limits, Outcome

PROGRAM = """
import os, time
time.sleep(0.3)
print({number} * {number})
"""


@pytest.mark.slow
def test_killed_supervisors_change_no_outcome(tasks, tmp_path):
    folder = tasks / "ours" / "public"
    backend = ProcessBackend(2, data_dirs=[folder], warm=False)

    def execute(job: Job, slot: int) -> Outcome:
        execution = backend.run(job.program, folder, Limits(wall_seconds=60), slot)
        if execution.status == "unknown":
            return Outcome("unknown", float("nan"), None, None, "", None, 0.0, execution.cause)
        return Outcome("valid", 0.5, 0.0, float(execution.output), "", None, execution.seconds)

    ended = threading.Event()
    killed = []

    def kill_at_random():
        draw = random.Random(0)
        while not ended.wait(draw.uniform(0.3, 1.5)) and len(killed) < 6:
            process = backend._slots[draw.randrange(2)]._process
            if process is not None and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                killed.append(process.pid)

    chaos = threading.Thread(target=kill_at_random)
    with SandboxQueue(
        execute, retries=8, journal=tmp_path / "journal.sqlite", stop=backend.close
    ) as queue:
        chaos.start()
        tickets = queue.submit([Job("ours", PROGRAM.format(number=i)) for i in range(12)])
        outcomes = queue.collect(tickets, None)
        ended.set()
        chaos.join()
        assert [outcomes[ticket].value for ticket in tickets] == [i * i for i in range(12)]
        assert killed
        assert queue.stats().unknown == {}


@pytest.mark.slow
def test_a_warm_sandbox_is_ten_times_faster_than_fresh_interpreters(tasks):
    program = """
import os
import pandas as pd, sklearn.linear_model
pd.DataFrame({"id": [1], "y": [0]}).to_csv(os.environ["SUBMISSION_PATH"], index=False)
"""
    folder = tasks / "ours" / "public"
    seconds = {}
    for warm, repeats in ((True, 20), (False, 2)):
        with ProcessBackend(1, data_dirs=[folder], warm=warm) as backend:
            backend.run(program, folder, Limits())
            start = time.monotonic()
            for _ in range(repeats):
                assert backend.run(program, folder, Limits()).status == "ok"
            seconds[warm] = (time.monotonic() - start) / repeats
    assert seconds[False] > 10 * seconds[True], seconds
