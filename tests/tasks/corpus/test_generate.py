from collections import Counter

import pytest

from wmrl_jax.sandbox.process import ProcessBackend
from wmrl_jax.tasks.corpus import CorpusProgram, completion_text, generate, reference_programs
from wmrl_jax.tasks.grading import parse_submission, precheck
from wmrl_jax.tasks.task import Task

RUNTIME = {"runtime_error"}
STATUSES = {
    "right": {"valid"},
    "no_submission": {"no_submission"},
    "labels_confused": {"invalid_submission"},
    "wrong_header": {"invalid_submission"},
    "wrong_format": {"invalid_submission"},
    "wrong_rows": {"invalid_submission"},
    "misaligned": {"invalid_submission"},
    "no_clip": {"invalid_submission", "valid"},  # not every model goes below zero
    "too_slow": {"timeout"},
    "giant_search": {"timeout"},
}
"""What becomes of each kind; the others end with an exception."""


def test_equal_arguments_give_equal_programs_and_fewer_are_the_first(
    suite: dict[str, Task],
) -> None:
    task = suite["cars-mpg"]
    assert generate(task, 30, 7) == generate(task, 30, 7)
    assert generate(task, 10, 7) == generate(task, 30, 7)[:10]
    assert generate(task, 10, 7) != generate(task, 10, 8)


def test_nearly_all_programs_differ_and_about_half_are_right(suite: dict[str, Task]) -> None:
    for task in suite.values():
        programs = generate(task, 200, 0)
        assert len({p.program for p in programs}) > 195
        right = sum(p.kind == "right" for p in programs)
        assert 75 < right < 125
        assert len(Counter(p.kind for p in programs)) > 10


def test_programs_are_short_and_whole(suite: dict[str, Task]) -> None:
    for task in suite.values():
        for program in generate(task, 50, 0):
            lines = program.program.splitlines()
            assert 10 < len(lines) < 34
            if program.kind == "right":
                assert 'os.environ["DATA_DIR"]' in program.program
                assert 'os.environ["SUBMISSION_PATH"]' in lines[-1]


def test_the_completion_holds_the_program_exactly(suite: dict[str, Task]) -> None:
    for program in generate(suite["digits"], 100, 0):
        checked = precheck(completion_text(program))
        if isinstance(checked, str):
            assert checked == program.program
        else:
            assert checked.status == ("malformed" if program.kind == "unfenced" else "syntax_error")
            assert program.kind in ("unfenced", "syntax")


def executed(task: Task, programs: list[CorpusProgram], backend: ProcessBackend) -> list[str]:
    """What became of each program: the execution's status, and whether its submission parses."""
    statuses = []
    for program in programs:
        result = backend.run(program.program, task.public_dir, task.limits)
        status: str = result.status
        if status == "ok":
            status = "no_submission" if result.submission is None else "valid"
        if result.submission is not None:
            try:
                parse_submission(task, result.submission)
            except ValueError:
                status = "invalid_submission"
        statuses.append(status)
    return statuses


@pytest.mark.slow
def test_executed_programs_end_as_their_kind_says(suite: dict[str, Task]) -> None:
    with ProcessBackend(1, data_dirs=[task.public_dir for task in suite.values()]) as backend:
        for task in suite.values():
            slow = {"syntax", "unfenced", "too_slow", "giant_search"}
            programs = [p for p in generate(task, 12, 3) if p.kind not in slow]
            for program, status in zip(programs, executed(task, programs, backend), strict=True):
                assert status in STATUSES.get(program.kind, RUNTIME), program


@pytest.mark.slow
def test_executed_references_are_valid(suite: dict[str, Task]) -> None:
    with ProcessBackend(1, data_dirs=[task.public_dir for task in suite.values()]) as backend:
        for task in suite.values():
            programs = reference_programs(task, 6, 1)
            assert executed(task, programs, backend) == ["valid"] * 6
