"""The queue: nothing lost, nothing done twice, nothing made up."""

import json
import math
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter

import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.sandbox.queue import SandboxQueue
from wmrl_jax.types import Job, Outcome


def valid(position: float, seconds: float = 0.1) -> Outcome:
    return Outcome("valid", 0.5 + position / 2, position, position, "", None, seconds)


UNKNOWN = Outcome("unknown", math.nan, None, None, "", None, 0.0, "the sandbox burnt down")


class Executor:
    """Counts executions; the program's text is the position that it reaches."""

    def __init__(self, seconds: float = 0.0):
        self.runs: Counter[str] = Counter()
        self.slots: set[int] = set()
        self.seconds = seconds

    def __call__(self, job: Job, slot: int) -> Outcome:
        self.runs[job.program] += 1
        self.slots.add(slot)
        time.sleep(self.seconds)
        return valid(float(job.program))


@pytest.fixture
def journal(tmp_path):
    return tmp_path / "run" / "journal.sqlite"


def jobs(*positions: float) -> list[Job]:
    return [Job("iris", str(position)) for position in positions]


# --- submit and collect --------------------------------------------------------------------


def test_outcomes_come_back_under_their_tickets(journal):
    with SandboxQueue(Executor(), journal=journal) as queue:
        tickets = queue.submit(jobs(0.1, 0.2, 0.3))
        outcomes = queue.collect(tickets, None)
        assert [outcomes[ticket].position for ticket in tickets] == [0.1, 0.2, 0.3]
        assert queue.in_flight == 0


def test_collect_without_waiting_gives_only_what_is_ready(journal):
    gate = threading.Event()

    def execute(job, slot):
        if job.program == "0.9":
            gate.wait(20)
        return valid(float(job.program))

    with SandboxQueue(execute, slots=2, journal=journal) as queue:
        slow, quick = queue.submit(jobs(0.9, 0.1))
        assert list(queue.collect([quick], None)) == [quick]
        assert queue.collect([slow]) == {}
        assert queue.collect([slow], 0.05) == {}
        gate.set()
        assert queue.collect([slow], None)[slow].position == 0.9


def test_a_ticket_is_given_up_by_collecting_it(journal):
    with SandboxQueue(Executor(), journal=journal) as queue:
        tickets = queue.submit(jobs(0.1))
        queue.collect(tickets, None)
        with pytest.raises(KeyError, match="ticket 0 is unknown, or was collected before"):
            queue.collect(tickets)


def test_an_outcome_already_known_gets_a_ready_ticket(journal):
    known = Outcome("syntax_error", 0.0, None, None, "bad", "SyntaxError", 0.0)
    execute = Executor()
    with SandboxQueue(execute, journal=journal) as queue:
        first, second = queue.submit([known, *jobs(0.4)])
        assert queue.collect([first]) == {first: known}
        assert queue.collect([second], None)[second].position == 0.4
        assert (queue.stats().settled, sum(execute.runs.values())) == (1, 1)


def test_all_slots_work(journal):
    execute = Executor(seconds=0.05)
    with SandboxQueue(execute, slots=3, journal=journal) as queue:
        queue.collect(queue.submit(jobs(*(i / 100 for i in range(12)))), None)
    assert execute.slots == {0, 1, 2}


def test_a_full_queue_refuses_and_says_so(journal):
    with SandboxQueue(Executor(0.2), slots=1, capacity=3, journal=journal) as queue:
        queue.submit(jobs(0.1, 0.2))
        with pytest.raises(RuntimeError, match="holds . jobs and 2 more exceed its capacity of 3"):
            queue.submit(jobs(0.3, 0.4))


def test_a_number_out_of_range_is_one_sentence(journal):
    with pytest.raises(UserError, match="give at least 1 slot"):
        SandboxQueue(Executor(), slots=0, journal=journal)


def test_an_unusable_journal_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="journal .* cannot be opened"):
        SandboxQueue(Executor(), journal=tmp_path / "file" / "journal.sqlite")


# --- equal jobs ----------------------------------------------------------------------------


def test_equal_jobs_run_once_and_only_one_ticket_pays(journal):
    execute = Executor(seconds=0.05)
    with SandboxQueue(execute, journal=journal) as queue:
        tickets = queue.submit(jobs(0.5, 0.5, 0.5) + [Job("wine", "0.5")])
        outcomes = queue.collect(tickets, None)
        assert execute.runs == {"0.5": 2}  # one for each task
        assert [outcomes[ticket].seconds for ticket in tickets] == [0.1, 0.0, 0.0, 0.1]
        again = queue.submit(jobs(0.5))
        assert queue.collect(again)[again[0]] == valid(0.5, 0.0)
        assert queue.stats().cached == 3


def test_an_outcome_is_remembered_by_the_next_run(journal):
    execute = Executor()
    for _ in range(2):
        with SandboxQueue(execute, journal=journal) as queue:
            tickets = queue.submit(jobs(0.5))
            assert queue.collect(tickets, None)[tickets[0]].position == 0.5
    assert execute.runs == {"0.5": 1}


def test_submitting_from_many_threads_runs_each_job_once(journal):
    execute = Executor(seconds=0.001)
    with SandboxQueue(execute, slots=4, journal=journal) as queue:

        def submit():
            for position in range(20):
                queue.collect(queue.submit(jobs(position / 20)), None)

        threads = [threading.Thread(target=submit) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert set(execute.runs.values()) == {1}
    assert len(execute.runs) == 20


# --- faults --------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [UNKNOWN, OSError("no space"), SystemExit(3)])
def test_a_fault_is_retried_and_its_end_is_the_true_outcome(journal, fault):
    attempts = []

    def execute(job, slot):
        attempts.append(slot)
        if len(attempts) < 3:
            if isinstance(fault, Outcome):
                return fault
            raise fault
        return valid(0.5)

    with SandboxQueue(execute, retries=2, journal=journal) as queue:
        tickets = queue.submit(jobs(0.5))
        assert queue.collect(tickets, None)[tickets[0]] == valid(0.5)
        assert (len(attempts), queue.stats().retried, queue.stats().unknown) == (3, 2, {})


def test_a_lasting_fault_is_unknown_with_its_cause_and_never_cached(journal):
    broken = [True]

    def execute(job, slot):
        if broken[0]:
            raise OSError("no space")
        return valid(0.5)

    with SandboxQueue(execute, retries=1, journal=journal) as queue:
        tickets = queue.submit(jobs(0.5))
        outcome = queue.collect(tickets, None)[tickets[0]]
        assert (outcome.status, outcome.cause) == ("unknown", "OSError: no space")
        assert math.isnan(outcome.reward)
        assert queue.stats().unknown == {"OSError: no space": 1}
        broken[0] = False
        tickets = queue.submit(jobs(0.5))
        assert queue.collect(tickets, None)[tickets[0]] == valid(0.5)


def test_a_streak_of_faults_ends_the_run(journal):
    with SandboxQueue(lambda job, slot: UNKNOWN, retries=0, streak=3, journal=journal) as queue:
        tickets = queue.submit(jobs(0.1, 0.2, 0.3, 0.4))
        with pytest.raises(RuntimeError, match="[34] executions in a row.*the sandbox burnt down"):
            for ticket in tickets:
                queue.collect([ticket], None)


def test_waiting_without_progress_names_whom_it_waits_for(journal):
    gate = threading.Event()
    queue = SandboxQueue(
        lambda job, slot: valid(0.5) if gate.wait(30) else UNKNOWN,
        slots=1,
        patience=0.3,
        journal=journal,
    )
    tickets = queue.submit(jobs(0.1, 0.2))
    with pytest.raises(TimeoutError) as caught:
        queue.collect(tickets, None)
    assert "no execution has ended for 0 s" in str(caught.value)
    assert "ticket 0 (task iris, in slot 0 for" in str(caught.value)
    assert "ticket 1 (task iris, waiting for a slot)" in str(caught.value)
    gate.set()
    queue.close()


# --- cancel, snapshot, close ---------------------------------------------------------------


def test_a_cancelled_job_does_not_run_unless_another_wants_it(journal):
    gate = threading.Event()
    execute = Executor()

    def gated(job, slot):
        gate.wait(20)
        return execute(job, slot)

    with SandboxQueue(gated, slots=1, journal=journal) as queue:
        running, dropped, shared, wanted = queue.submit(jobs(0.1, 0.2, 0.3, 0.3))
        while queue._pending and queue._entries[jobs(0.1)[0].key].slot is None:
            time.sleep(0.01)
        queue.cancel([dropped, shared])
        gate.set()
        assert queue.collect([running, wanted], None)[wanted].position == 0.3
        assert execute.runs == {"0.1": 1, "0.3": 1}
        with pytest.raises(KeyError):
            queue.collect([dropped])


def test_a_snapshot_survives_json_and_keeps_tickets(journal):
    gate = threading.Event()
    execute = Executor()

    def gated(job, slot):
        if job.program != "0.1":
            gate.wait(0.5)
        return execute(job, slot)

    queue = SandboxQueue(gated, slots=1, journal=journal)
    known = Outcome("malformed", 0.0, None, None, "", None, 0.0)
    done, collected, waiting, settled = queue.submit([*jobs(0.1, 0.1, 0.2), known])
    queue.collect([collected], None)
    snapshot = json.loads(json.dumps(queue.snapshot()))
    queue.close()
    with SandboxQueue.restore(snapshot, execute, journal=journal) as queue:
        outcomes = queue.collect([done, waiting, settled], None)
        assert [outcomes[t].reward for t in (done, waiting, settled)] == [0.55, 0.6, 0.0]
        assert queue.submit(jobs(0.7)) == [settled + 1]
        with pytest.raises(KeyError):
            queue.collect([collected])
    assert execute.runs["0.1"] == 1


def test_close_ends_running_work_within_five_seconds(journal):
    stopped = threading.Event()

    def execute(job, slot):
        stopped.wait(60)
        return UNKNOWN

    queue = SandboxQueue(execute, journal=journal, stop=stopped.set)
    tickets = queue.submit(jobs(0.1, 0.2, 0.3))
    start = time.monotonic()
    queue.close()
    assert time.monotonic() - start < 5
    with pytest.raises(RuntimeError, match="closed"):
        queue.collect(tickets, None)
    queue.close()


def test_a_killed_trainer_loses_and_doubles_nothing(journal, tmp_path):
    program = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from wmrl_jax.sandbox.queue import SandboxQueue
        from wmrl_jax.types import Job, Outcome
        def execute(job, slot):
            time.sleep(0.01)
            with open({str(tmp_path / "log")!r}, "a") as log:
                log.write(job.program + "\\n")
            return Outcome("valid", 0.75, 0.5, 0.5, "", None, 0.01)
        queue = SandboxQueue(execute, journal=Path({str(journal)!r}))
        tickets = queue.submit([Job("iris", str(i)) for i in range(60)])
        print("submitted", flush=True)
        queue.collect(tickets, None)
        print(queue.stats().executed, flush=True)
    """)
    command = [sys.executable, "-c", program]
    for moment in (0.05, 0.1, 0.05):
        trainer = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert trainer.stdout is not None
        trainer.stdout.readline()
        time.sleep(moment)
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    last = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(last.stdout.split()[-1]) < 60
    runs = Counter((tmp_path / "log").read_text().split())
    assert set(runs) == {str(i) for i in range(60)}
    # At each kill the two slots may have been between execution and journal.
    assert sum(runs.values()) <= 60 + 3 * 2
