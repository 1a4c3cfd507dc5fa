"""Writes more than the scratch folder holds: large files, many files, deep folders, long names."""

import pytest

FILL = """
import os
try:
    for i in range(10_000):
        with open(f"{where}/f{{i}}", "wb") as file:
            file.write(bytes(1 << 20))
except OSError as fault:
    used = os.statvfs("{where}")
    print("stopped", fault.errno, (used.f_blocks - used.f_bfree) * used.f_frsize >> 20)
"""


@pytest.mark.parametrize("where", ["/sandbox/work", "/tmp", "/dev/shm"])
def test_the_scratch_folders_share_one_bounded_space(sandbox, where):
    execution = sandbox.run(FILL.format(where=where))
    assert execution.output == "stopped 28 24\n", execution


def test_one_file_may_not_exceed_its_limit(sandbox):
    execution = sandbox.run("open('/tmp/f', 'wb').write(bytes(12 << 20))")
    assert (execution.status, execution.exception) == ("runtime_error", "OSError")


def test_a_million_files_are_refused(sandbox):
    execution = sandbox.run(
        """
        for i in range(1_000_000):
            open(f"/tmp/{i}", "w").close()
        """
    )
    assert (execution.status, execution.exception) == ("runtime_error", "OSError")


def test_deep_folders_do_not_hinder_the_clearing_up(sandbox):
    execution = sandbox.run(
        """
        import os
        while True:
            os.mkdir("d" * 200)
            os.chdir("d" * 200)
        """
    )
    assert execution.status == "runtime_error"


@pytest.mark.parametrize(
    "where", ["/", "/sandbox", "/sandbox/data", "/sandbox/tasks", "/sandbox/scratch", "/dev",
              "/dev/pts", "/proc", "/usr/lib", "/etc"],
)  # fmt: skip
def test_nothing_else_can_be_written(sandbox, where):
    execution = sandbox.run(f"open('{where}/f', 'w')")
    assert execution.status == "runtime_error"
    assert execution.exception in ("OSError", "PermissionError", "FileNotFoundError")


def test_installed_packages_cannot_be_changed(sandbox):
    execution = sandbox.run(
        """
        import sklearn.metrics
        open(sklearn.metrics.__file__, "a").write("accuracy_score = lambda *_: 1.0")
        """
    )
    assert execution.status == "runtime_error"
