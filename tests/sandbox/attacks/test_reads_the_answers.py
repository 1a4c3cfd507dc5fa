"""Looks for the answers, the leaderboard, other tasks, the trainer's files and environment."""

import os


def test_the_answers_beside_the_public_folder_are_not_there(sandbox, tasks):
    places = [
        "os.environ['DATA_DIR'] + '/../private/answers.csv'",
        "os.environ['DATA_DIR'] + '/../leaderboard.csv'",
        repr(str(tasks / "ours" / "private" / "answers.csv")),
        repr(str(tasks / "ours" / "leaderboard.csv")),
        repr(str(tasks / "other" / "public" / "train.csv")),
        repr(__file__),
        "'/etc/passwd'",
        "'/etc/shadow'",
    ]
    for place in places:
        execution = sandbox.run(f"import os\nprint(open({place}).read())")
        assert execution.status == "runtime_error", place
        assert execution.exception == "FileNotFoundError", (place, execution.output)


def test_a_search_of_every_file_finds_neither_answers_nor_other_tasks(sandbox, secret):
    execution = sandbox.run(
        """
        import os
        for folder, _, names in os.walk("/"):
            if folder.startswith(("/proc", "/usr/lib", "/dev")) or "/lib/python" in folder:
                continue
            for name in names:
                if name.endswith(".csv"):
                    print(os.path.join(folder, name), open(os.path.join(folder, name)).read())
        """
    )
    assert execution.status == "ok", execution.output
    assert "ours" in execution.output
    assert "other" not in execution.output
    assert secret not in execution.output


def test_the_trainers_environment_is_not_inherited(sandbox, secret, monkeypatch):
    monkeypatch.setenv("WMRL_TEST_TOKEN", secret)
    execution = sandbox.run(
        """
        import os, glob
        print(dict(os.environ))
        for path in glob.glob("/proc/[0-9]*/environ"):
            try:
                print(open(path, "rb").read())
            except OSError as fault:
                print(fault)
        """
    )
    assert execution.status == "ok"
    assert secret not in execution.output
    assert str(os.environ["PATH"]) not in execution.output


def test_processes_of_the_host_are_not_visible(sandbox):
    execution = sandbox.run(
        """
        import os
        print(sorted(int(name) for name in os.listdir("/proc") if name.isdigit()))
        """
    )
    assert execution.output == "[1, 2]\n"


def test_the_memory_of_the_first_process_cannot_be_read(sandbox):
    execution = sandbox.run('open("/proc/1/mem", "rb").read(1)')
    assert execution.exception == "PermissionError"


def test_data_files_of_packages_that_hold_answers_are_masked(sandbox, packaged_data):
    execution = sandbox.run(f"import os\nprint(os.listdir({str(packaged_data)!r}))")
    assert execution.output == "[]\n"
