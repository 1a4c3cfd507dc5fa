"""Leaves a symbolic link, a FIFO, a device, a folder, a socket or a giant at the path."""

import pytest

PLACE = "import os, socket\npath = os.environ['SUBMISSION_PATH']\n"


@pytest.mark.parametrize(
    ("act", "word"),
    [
        ("os.symlink(os.environ['DATA_DIR'] + '/train.csv', path)", "a symbolic link"),
        ("os.symlink('/proc/1/environ', path)", "a symbolic link"),
        ("os.symlink(path, path)", "a symbolic link"),
        ("os.mkfifo(path)", "a FIFO"),
        ("os.mkdir(path)", "a folder"),
        ("socket.socket(socket.AF_UNIX).bind(path)", "a socket"),
    ],
)
def test_what_is_no_regular_file_is_named_and_not_read(sandbox, act, word):
    execution = sandbox.run(PLACE + act)
    assert (execution.status, execution.submission) == ("ok", None)
    assert execution.submission_fault == f"the submission is {word}"


def test_a_sparse_file_of_ten_gigabytes_is_not_read(sandbox):
    execution = sandbox.run(PLACE + "open(path, 'wb').truncate(10 << 30)", file_mb=20_000)
    assert (execution.status, execution.submission) == ("ok", None)
    assert execution.submission_fault == (
        "the submission has 10737 MB, more than the 67 MB allowed"
    )


def test_a_sparse_file_beyond_the_file_limit_is_refused_to_the_program(sandbox):
    execution = sandbox.run(PLACE + "open(path, 'wb').truncate(10 << 30)")
    assert (execution.status, execution.exception) == ("runtime_error", "OSError")


def test_a_device_cannot_be_made(sandbox):
    execution = sandbox.run(PLACE + "os.mknod(path, 0o020666, os.makedev(1, 5))")
    assert (execution.status, execution.exception) == ("runtime_error", "PermissionError")


def test_a_hard_link_to_the_data_cannot_be_made(sandbox):
    execution = sandbox.run(PLACE + "os.link(os.environ['DATA_DIR'] + '/train.csv', path)")
    assert (execution.status, execution.exception) == ("runtime_error", "OSError")


def test_an_unreadable_submission_is_still_read(sandbox):
    execution = sandbox.run(PLACE + "open(path, 'w').write('a')\nos.chmod(path, 0)")
    assert execution.submission == b"a"
