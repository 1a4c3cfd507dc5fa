"""Fills its output streams."""

import pytest


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_without_end_is_cut_and_ends_with_the_time(sandbox, stream):
    execution = sandbox.run(
        f"import sys\nwhile True: sys.{stream}.write('x' * 10_000)", cpu_seconds=1
    )
    assert execution.status == "timeout"
    assert len(execution.output) < 17_000
    assert "bytes ...]" in execution.output


def test_the_head_and_the_tail_are_kept(sandbox):
    execution = sandbox.run(
        """
        print("first")
        for i in range(100_000): print("line", i)
        raise KeyError("the last word")
        """
    )
    assert (execution.status, execution.exception) == ("runtime_error", "KeyError")
    assert execution.output.startswith("first\nline 0\n")
    assert execution.output.endswith("KeyError: 'the last word'\n")


def test_bytes_that_are_no_text_are_replaced(sandbox):
    execution = sandbox.run("import os\nos.write(1, b'\\xff\\xfe\\x1b[2J')")
    assert (execution.status, execution.output) == ("ok", "\ufffd\ufffd\x1b[2J")
