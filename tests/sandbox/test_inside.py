"""The parts of the supervisor that need no sandbox."""

import os
import socket
import subprocess
import sys
import time

import pytest

from wmrl_jax.sandbox.inside import seccomp, tree, wire
from wmrl_jax.sandbox.inside.submission import read_submission
from wmrl_jax.sandbox.inside.watch import HeadAndTail


@pytest.fixture
def folder(tmp_path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_a_regular_file_is_read(tmp_path, folder):
    (tmp_path / "s.csv").write_bytes(b"id,y\n1,2\n")
    assert read_submission(folder, "s.csv", 100) == (b"id,y\n1,2\n", None)


def test_a_missing_file_is_neither_content_nor_fault(folder):
    assert read_submission(folder, "s.csv", 100) == (None, None)


def test_a_link_to_a_good_file_is_not_followed(tmp_path, folder):
    (tmp_path / "good").write_text("answers")
    (tmp_path / "s.csv").symlink_to("good")
    assert read_submission(folder, "s.csv", 100) == (None, "the submission is a symbolic link")


def test_a_fifo_is_not_waited_for(tmp_path, folder):
    os.mkfifo(tmp_path / "s.csv")
    assert read_submission(folder, "s.csv", 100) == (None, "the submission is a FIFO")


def test_a_sparse_giant_is_not_read(tmp_path, folder):
    with open(tmp_path / "s.csv", "wb") as file:
        file.truncate(10 << 30)
    start = time.monotonic()
    content, fault = read_submission(folder, "s.csv", 1 << 40)
    assert content is None
    assert fault == "the submission has 10737 MB, more than the 67 MB allowed"
    assert time.monotonic() - start < 1


def test_the_limit_itself_is_allowed(tmp_path, folder):
    (tmp_path / "s.csv").write_bytes(b"x" * 100)
    assert read_submission(folder, "s.csv", 100)[0] == b"x" * 100
    assert read_submission(folder, "s.csv", 99)[0] is None


@pytest.mark.parametrize("pieces", [[b"abcdefgh"], [b"abc", b"defgh"], [b"a"] * 8])
def test_a_short_stream_is_kept_whole(pieces):
    kept = HeadAndTail(10)
    for piece in pieces:
        kept.add(piece)
    assert kept.content() == b"".join(pieces)


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_long_stream_keeps_its_first_and_last_bytes(size):
    stream = b"0123456789" * 100
    kept = HeadAndTail(20)
    for at in range(0, len(stream), size):
        kept.add(stream[at : at + size])
    assert kept.content() == b"0123456789\n[... 980 bytes ...]\n0123456789"


def test_a_frame_comes_back_as_it_was_sent():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire.send(ours, {"a": [1, None]}, b"\0" * 1000)
        assert wire.receive(theirs) == ({"a": [1, None]}, b"\0" * 1000)
        ours.close()
        with pytest.raises(EOFError):
            wire.receive(theirs)


@pytest.mark.skipif(not seccomp.supported(), reason="no call numbers for this machine")
def test_every_jump_of_the_filter_lands_inside_it():
    rows = seccomp.filter_program()
    for i, (code, if_true, if_false, _) in enumerate(rows):
        assert 0 <= if_true < 256 and 0 <= if_false < 256
        if code & 7 == 5:  # jumps
            assert i + 1 + max(if_true, if_false) < len(rows)
    assert rows[-1][0] == 6


def test_descendants_are_found_and_killed():
    script = (
        "import subprocess, sys, time; sys.path.insert(0, '.')\n"
        "from wmrl_jax.sandbox.inside import tree, confine\n"
        "confine.become_subreaper()\n"
        "subprocess.Popen([sys.executable, '-c', 'import os, time\\nif os.fork(): os._exit(0)\\n"
        "os.setsid(); time.sleep(100)']).wait()\n"
        "print(len(tree.descendants()), tree.usage_of_descendants().resident_mb > 1)\n"
        "tree.kill_descendants()\n"
        "print(len(tree.descendants()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "1 True\n0\n"


def test_this_process_tree_can_be_measured():
    usage = tree.usage_of_descendants()
    assert usage.cpu_seconds >= 0
    assert tree.unshared_mb() >= 0
