"""The process backend: what a program sees, how it ends, what its supervisor survives."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.sandbox import process
from wmrl_jax.sandbox.isolation import Isolation, candidates
from wmrl_jax.sandbox.process import ProcessBackend, best_isolation
from wmrl_jax.types import Limits


@pytest.fixture(params=candidates())
def cold(request, tasks):
    """A backend without preloading in each isolation that this host allows."""
    kind: Isolation = request.param
    if process._try(kind) is not None:
        pytest.skip(f"isolation {kind} is not possible here: {process._try(kind)}")
    folder = tasks / "ours" / "public"
    with ProcessBackend(1, data_dirs=[folder], warm=False, isolation_kind=kind) as backend:
        yield lambda text, **limits: backend.run(
            textwrap.dedent(text), folder, Limits(memory_mb=300, wall_seconds=60)._replace(**limits)
        )


# --- what a program sees -------------------------------------------------------------------


def test_a_program_reads_its_data_and_writes_its_submission(cold):
    execution = cold(
        """
        import os
        text = open(os.path.join(os.environ["DATA_DIR"], "train.csv")).read()
        open(os.environ["SUBMISSION_PATH"], "w").write(text.upper())
        print("done")
        """
    )
    assert execution.status == "ok", execution
    assert execution.submission == b"X,Y\n1,OURS\n"
    assert execution.output == "done\n"
    assert 0 < execution.seconds < 60


def test_a_program_is_the_main_module(sandbox):
    execution = sandbox.run(
        """
        import sys, __main__
        x = 1
        print(__name__, __main__.x, sys.argv == [__file__], open(__file__).read()[1:7])
        """
    )
    assert execution.output == "__main__ 1 True import\n", execution


def test_a_traceback_shows_the_programs_own_lines_and_nothing_of_ours(sandbox):
    execution = sandbox.run("def f():\n    return {}['missing']\nprint('before')\nf()")
    assert execution.exception == "KeyError"
    assert execution.output == (
        "before\n"
        "Traceback (most recent call last):\n"
        '  File "/sandbox/work/program.py", line 4, in <module>\n'
        "    f()\n"
        '  File "/sandbox/work/program.py", line 2, in f\n'
        "    return {}['missing']\n"
        "           ~~^^^^^^^^^^^\n"
        "KeyError: 'missing'\n"
    )


def test_a_file_left_open_is_written_and_atexit_and_threads_are_honoured(sandbox):
    execution = sandbox.run(
        """
        import atexit, os, threading, time
        file = open(os.environ["SUBMISSION_PATH"], "w")
        file.write("id,y")
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
        """
    )
    assert (execution.output, execution.submission) == ("thread\nat exit\n", b"id,y")


def test_equal_programs_give_equal_results(sandbox):
    program = """
        import random, numpy as np
        from sklearn.ensemble import RandomForestClassifier
        x = np.random.rand(60, 3)
        model = RandomForestClassifier(5).fit(x, x[:, 0] > random.random())
        print(model.predict_proba(x).tobytes().hex(), hash("text"))
        """
    assert sandbox.run(program).output == sandbox.run(program).output


def test_the_usual_libraries_need_no_import_time(sandbox):
    execution = sandbox.run(
        """
        import time
        start = time.process_time()
        import numpy, pandas, scipy.stats, sklearn.ensemble, sklearn.feature_extraction.text
        print(time.process_time() - start)
        """
    )
    assert float(execution.output) < 0.2


def test_a_program_may_use_processes_of_its_own(sandbox):
    execution = sandbox.run(
        """
        from multiprocessing import Pool
        with Pool(2) as pool:
            print(pool.map(abs, [-1, -2]))
        """
    )
    assert execution.output == "[1, 2]\n", execution


def test_another_data_folder_is_shown_after_a_restart(tasks, tmp_path):
    (tmp_path / "a.csv").write_text("new")
    program = "import os\nprint(os.listdir(os.environ['DATA_DIR']))"
    folders = [tasks / "ours" / "public"]
    with ProcessBackend(1, data_dirs=folders, warm=False) as backend:
        assert backend.run(program, folders[0], Limits()).output == "['train.csv']\n"
        assert backend.run(program, tmp_path, Limits()).output == "['a.csv']\n"


def test_a_data_folder_that_others_may_not_read_still_serves(tmp_path):
    (tmp_path / "a.csv").write_text("private")
    (tmp_path / "a.csv").chmod(0o600)
    program = "import os\nprint(open(os.environ['DATA_DIR'] + '/a.csv').read())"
    with ProcessBackend(1, data_dirs=[tmp_path], warm=False) as backend:
        assert backend.run(program, tmp_path, Limits()).output == "private\n"


def test_a_missing_data_folder_is_one_sentence():
    with pytest.raises(UserError, match="data folder /nowhere does not exist"):
        ProcessBackend(1, data_dirs=[Path("/nowhere")], warm=False)


# --- limits, in every isolation ------------------------------------------------------------


def test_time_is_limited(cold):
    assert cold("import time; time.sleep(100)", wall_seconds=1).status == "timeout"
    assert cold("while True: pass", cpu_seconds=1).status == "timeout"


def test_memory_of_one_process_is_limited(cold):
    assert cold("x = bytearray(600 << 20)").status == "out_of_memory"


@pytest.mark.parametrize("kind", candidates())
def test_memory_of_a_tree_is_limited_also_without_control_groups(kind, tasks, monkeypatch):
    monkeypatch.setattr(process.cgroups, "create", lambda slot: None)
    if process._try(kind) is not None:
        pytest.skip(f"isolation {kind} is not possible here")
    folder = tasks / "ours" / "public"
    program = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        kept = bytearray(b"x") * (120 << 20)
        time.sleep(60)
time.sleep(60)
"""
    with ProcessBackend(1, data_dirs=[folder], warm=False, isolation_kind=kind) as backend:
        execution = backend.run(program, folder, Limits(memory_mb=300, wall_seconds=40))
        assert execution.status == "out_of_memory"
        assert "no cgroup" in backend.describe()


def test_what_a_program_leaves_behind_is_gone(cold):
    execution = cold(
        """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execv(__import__("sys").executable, ["wmrl-left-behind", "-c",
                         "import time; time.sleep(1000)"])
            os._exit(0)
        os.wait()
        time.sleep(0.3)
        """
    )
    assert execution.status == "ok", execution
    assert "wmrl-left-behind" not in command_lines()


# --- faults of the machinery ---------------------------------------------------------------


def test_a_killed_supervisor_is_unknown_and_the_next_program_runs(tasks):
    folder = tasks / "ours" / "public"
    with ProcessBackend(1, data_dirs=[folder], warm=False) as backend:
        results = []
        thread = threading.Thread(
            target=lambda: results.append(
                backend.run("import time; time.sleep(100)", folder, Limits(wall_seconds=90))
            )
        )
        thread.start()
        supervisor = wait_for(lambda: backend._slots[0]._process)
        time.sleep(1)
        os.killpg(supervisor.pid, signal.SIGKILL)
        thread.join(20)
        assert results[0].status == "unknown"
        assert results[0].cause == "the sandbox's supervisor died"
        assert backend.run("print(1)", folder, Limits()).output == "1\n"


def test_closing_ends_a_running_program_quickly(tasks):
    folder = tasks / "ours" / "public"
    backend = ProcessBackend(1, data_dirs=[folder], warm=False)
    results = []
    thread = threading.Thread(
        target=lambda: results.append(
            backend.run("import time; time.sleep(100)", folder, Limits(wall_seconds=90))
        )
    )
    thread.start()
    supervisor = wait_for(lambda: backend._slots[0]._process)
    time.sleep(1)
    start = time.monotonic()
    backend.close()
    thread.join(5)
    assert time.monotonic() - start < 5
    assert (results[0].status, results[0].cause) == ("unknown", "the sandbox was closed")
    assert supervisor.poll() is not None


def test_nothing_is_left_when_the_trainer_is_killed(tasks):
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(f"""
            from pathlib import Path
            from wmrl_jax.sandbox.process import ProcessBackend
            from wmrl_jax.types import Limits
            folder = Path({str(tasks / "ours" / "public")!r})
            backend = ProcessBackend(1, data_dirs=[folder], warm=False)
            backend.run("", folder, Limits())
            print(backend._slots[0].cgroup is not None, flush=True)
            backend.run("import os, sys, time\\n"
                        "if os.fork() == 0: os.execv(sys.executable, ['wmrl-orphan-sought', '-c',"
                        "'import time; time.sleep(1000)'])\\n"
                        "time.sleep(1000)", folder, Limits(wall_seconds=500))
        """)],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert trainer.stdout is not None
        trainer.stdout.readline()
        wait_for(lambda: "wmrl-orphan-sought" in command_lines())
    finally:
        trainer.kill()
        trainer.wait()
    wait_for(lambda: "wmrl-orphan-sought" not in command_lines())


# --- which isolation -----------------------------------------------------------------------


def test_without_bubblewrap_there_is_one_clear_warning(monkeypatch, capsys, tasks):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(process, "_best", None)
    assert best_isolation() == ("none", ["bubblewrap (the command bwrap) is not installed"])
    best_isolation()
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "NO ISOLATION" in error
    assert "bubblewrap (the command bwrap) is not installed" in error


def test_the_description_says_what_is_in_force(warm_backend):
    text = warm_backend.describe()
    assert "bubblewrap" in text
    assert "memory limited by" in text


def command_lines() -> str:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_text(errors="replace").replace("\0", " "))
        except OSError:
            continue
    return "\n".join(lines)


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"nothing came of {condition} in {seconds} s")
