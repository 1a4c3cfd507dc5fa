"""Grading: hostile submissions, positions, and whose fault a missing grade is."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wmrl_jax.tasks import grading
from wmrl_jax.tasks.grading import (
    FEEDBACK_CHARS,
    SubmissionError,
    grade,
    parse_submission,
    position,
)
from wmrl_jax.tasks.metrics import METRICS
from wmrl_jax.tasks.task import load_task
from wmrl_jax.types import Execution

GOOD = b"id,y\n10,1.5\n11,2.5\n12,3\n13,4\n"


def ran(submission: bytes | None, **changes) -> Execution:
    return Execution("ok", "", None, submission, None, 0.5)._replace(**changes)


@pytest.fixture
def task(make_folder):
    """Four numbers by rmse; the board is 1, 2, 3, 4."""
    return load_task(make_folder())


def test_a_perfect_submission_takes_the_first_place(task):
    outcome = grade(task, ran(GOOD))
    assert (outcome.status, outcome.value, outcome.position, outcome.reward) == (
        "valid",
        0.0,
        1.0,
        1.0,
    )
    assert outcome.seconds == 0.5
    assert "rmse 0" in outcome.feedback


def test_a_valid_submission_that_beats_nobody_is_valid(task):
    outcome = grade(task, ran(GOOD.replace(b"10,1.5", b"10,99")))
    assert (outcome.status, outcome.position, outcome.reward) == ("valid", 0.0, 0.5)


def test_position_counts_ties_as_beaten_in_both_directions():
    board = [0.9, 0.8, 0.8, 0.5]
    assert position(0.8, board, "maximize") == 0.75
    assert position(0.95, board, "maximize") == 1.0
    assert position(0.4, board, "maximize") == 0.0
    assert position(0.8, board, "minimize") == 0.75
    assert position(0.5, board, "minimize") == 1.0
    with pytest.raises(ValueError, match="empty"):
        position(0.5, [], "minimize")


ACCEPTED = {
    "shuffled ids": b"id,y\n13,4\n11,2.5\n10,1.5\n12,3\n",
    "further columns": b",id,note,y\n0,10,a,1.5\n1,11,b,2.5\n2,12,c,3\n3,13,d,4\n",
    "columns swapped": b"y,id\n1.5,10\n2.5,11\n3,12\n4,13\n",
    "byte-order mark": b"\xef\xbb\xbf" + GOOD,
    "windows line ends": GOOD.replace(b"\n", b"\r\n"),
    "old mac line ends": GOOD.replace(b"\n", b"\r"),
    "no last line end": GOOD.rstrip(),
    "blank lines": GOOD.replace(b"\n", b"\n\n"),
    "scientific notation": GOOD.replace(b"1.5", b"15e-1"),
    "ids as floats": GOOD.replace(b"10,", b"10.0,"),
    "quoted": GOOD.replace(b"10,1.5", b'"10","1.5"'),
    "spaces": b" id , y\n10, 1.5\n11,2.5 \n 12,3\n13,4\n",
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_same_table_written_otherwise_has_the_same_grade(task, name):
    assert grade(task, ran(ACCEPTED[name])).value == 0.0


REFUSED = {
    "empty": (b"", "is empty"),
    "blank": (b"\n\n", "is empty"),
    "header only": (b"id,y\n", "4 of 4 test rows have no prediction"),
    "binary": (b"\x80\x81\xfe", "not UTF-8"),
    "utf-16": ("id,y\n10,1".encode("utf-16"), "not UTF-8"),
    "NUL": (GOOD + b"\0", "NUL"),
    "parquet": (b"PAR1\0\0", "NUL"),
    "too long": (GOOD + b" " * 70_000, "bytes, more than"),
    "semicolons": (GOOD.replace(b",", b";"), "separated by semicolons"),
    "wrong column": (GOOD.replace(b"y", b"target"), "column 'y' is missing"),
    "no id": (b"y\n1.5\n2.5\n3\n4\n", "column 'id' is missing"),
    "column twice": (b"id,y,y\n10,1,2\n", "'y' appears twice"),
    "thousands of columns": (b"id,y" + b",z" * 3000 + b"\n", "3002 columns"),
    "row missing": (GOOD[:-5], "1 of 4 test rows"),
    "row too many": (GOOD + b"14,1\n", "5 rows where test.csv has 4"),
    "foreign id": (GOOD.replace(b"13,", b"99,"), "id '99' of line 5 is not in test.csv"),
    "id twice": (GOOD.replace(b"13,", b"12,"), "line 5 repeats the id '12'"),
    "ragged": (GOOD.replace(b"12,3", b"12"), "line 4 has 1 cells"),
    "open quote": (GOOD.replace(b"12,3", b'12,"3'), "not CSV|cells"),
    "text": (GOOD.replace(b"1.5", b"much"), "'much' in column 'y' is not a number"),
    "gap": (GOOD.replace(b"1.5", b""), "'' in column 'y' is not a number"),
    "nan": (GOOD.replace(b"1.5", b"nan"), "not finite"),
    "infinite": (GOOD.replace(b"1.5", b"-inf"), "not finite"),
    "overflow": (GOOD.replace(b"1.5", b"1e999"), "not finite"),
    "huge": (GOOD.replace(b"1.5", b"1e300"), "too large"),
    "underscore": (GOOD.replace(b"1.5", b"1_5"), "not a number"),
    "other digits": (GOOD.replace(b"1.5", "١".encode()), "not a number"),
    "formula": (GOOD.replace(b"1.5", b"=1+1"), "not a number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_submission_that_is_not_the_table_is_invalid_and_told_why(task, name):
    submission, message = REFUSED[name]
    with pytest.raises(SubmissionError, match=message):
        parse_submission(task, submission)
    outcome = grade(task, ran(submission))
    assert (outcome.status, outcome.reward) == ("invalid_submission", 0.2)
    assert outcome.position is None
    assert outcome.value is None
    assert "\n" not in outcome.feedback


def test_what_a_submission_quotes_is_cut(task):
    outcome = grade(task, ran(GOOD.replace(b"1.5", b"x" * 40_000)))
    assert outcome.status == "invalid_submission"
    assert len(outcome.feedback) < 300


@settings(max_examples=200, deadline=None)
@given(junk=st.binary(max_size=60))
def test_no_bytes_make_the_grader_fail(tmp_path_factory, junk):
    task = _shared_task(tmp_path_factory)
    for submission in (junk, b"id,y\n" + junk, GOOD.replace(b"1.5", junk)):
        assert grade(task, ran(submission)).status in ("valid", "invalid_submission")


_SHARED: list = []


def _shared_task(tmp_path_factory):
    if not _SHARED:
        _SHARED.append(load_task(_folder(tmp_path_factory.mktemp("shared"))))
    return _SHARED[0]


def _folder(root):
    for name, text in {
        "task.yaml": "name: t\ntitle: t\nmetric: mae\ndirection: minimize\nmodality: tabular\n"
        "split: train\nid: id\nlabel: y\n",
        "description.md": "t\n",
        "public/train.csv": "id,x,y\n1,2,3\n",
        "public/test.csv": "id,x\n10,1\n11,1\n12,1\n13,1\n",
        "public/sample_submission.csv": "id,y\n10,0\n11,0\n12,0\n13,0\n",
        "private/answers.csv": GOOD.decode(),
        "leaderboard.csv": "value\n1\n",
    }.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return root


def test_labels_are_read_as_classes_also_when_written_as_floats(make_folder):
    task = load_task(make_folder("accuracy", "maximize", ("0", "1", "2", "1")))
    right = b"id,y\n10,0.0\n11,1.0\n12,2.0\n13,0.0\n"
    assert grade(task, ran(right)).value == 0.75
    for wrong in (b"0.5", b"7", b"cat", b""):
        outcome = grade(task, ran(b"id,y\n10," + wrong + b"\n11,1\n12,2\n13,0\n"))
        assert outcome.status == "invalid_submission"
        assert "is not a class of 'y'; they are 0, 1, 2" in outcome.feedback


def test_labels_may_be_words_in_any_script(make_folder):
    task = load_task(make_folder("accuracy", "maximize", ("ja", "nein", "ça va", "nein")))
    submission = "id,y\n10,ja\n11,nein\n12,ça va\n13,ja\n".encode()
    assert grade(task, ran(submission)).value == 0.75


def test_ordered_classes_are_ordered_by_value_and_not_by_spelling(make_folder):
    task = load_task(make_folder("quadratic_kappa", "maximize", ("2", "10", "2", "10")))
    assert list(grading.answers_of(task).classes) == ["2", "10"]


def test_probabilities_lie_between_zero_and_one(make_folder):
    task = load_task(make_folder("roc_auc", "maximize", ("0", "1", "0", "1")))
    assert grade(task, ran(b"id,y\n10,0\n11,1\n12,0.5\n13,0.25\n")).value == 0.75
    for wrong in (b"-0.1", b"1.5"):
        outcome = grade(task, ran(b"id,y\n10," + wrong + b"\n11,1\n12,0\n13,1\n"))
        assert "is not a probability" in outcome.feedback


def test_probabilities_of_classes_are_brought_to_sum_one(make_folder):
    labels = ("a", "b", "a", "b")
    task = load_task(make_folder("log_loss", "minimize", labels, "b,a"))
    rows = b"10,1,3\n11,0.75,0.25\n12,0.25,0.75\n13,0.75,0.25\n".replace(b"1,3", b"0.2,0.6")
    assert grade(task, ran(b"id,b,a\n" + rows)).value == pytest.approx(-math.log(0.75), abs=1e-6)
    zero = b"id,b,a\n10,0,0\n11,1,0\n12,0,1\n13,1,0\n"
    assert "probability 0" in grade(task, ran(zero)).feedback


def test_a_metric_of_logarithms_takes_nothing_below_zero(make_folder):
    task = load_task(make_folder("rmsle"))
    outcome = grade(task, ran(GOOD.replace(b"1.5", b"-0.5")))
    assert outcome.status == "invalid_submission"
    assert "-0.5 is below zero, and rmsle has no value there" in outcome.feedback


def test_a_metric_that_raises_is_no_grade(task, monkeypatch):
    def raises(truth, prediction):
        raise ZeroDivisionError("no rows of class 3")

    monkeypatch.setitem(METRICS, "rmse", METRICS["rmse"]._replace(compute=raises))
    outcome = grade(task, ran(GOOD))
    assert outcome.status == "unknown"
    assert math.isnan(outcome.reward)
    assert outcome.cause == "metric rmse of task toy raised ZeroDivisionError: no rows of class 3"


def test_a_metric_without_a_finite_value_is_no_grade(task, monkeypatch):
    metric = METRICS["rmse"]._replace(compute=lambda truth, prediction: math.nan)
    monkeypatch.setitem(METRICS, "rmse", metric)
    outcome = grade(task, ran(GOOD))
    assert (outcome.status, outcome.cause) == ("unknown", "metric rmse of task toy gave nan")


def test_a_fault_of_the_sandbox_is_no_grade(task):
    outcome = grade(task, ran(GOOD, status="unknown", cause="supervisor died"))
    assert outcome.status == "unknown"
    assert math.isnan(outcome.reward)
    assert outcome.cause == "supervisor died"


@pytest.mark.parametrize(
    ("execution", "status", "reward"),
    [
        (ran(None), "no_submission", 0.2),
        (ran(None, submission_fault="it is a FIFO"), "invalid_submission", 0.2),
        (ran(GOOD, status="runtime_error", exception="KeyError"), "runtime_error", 0.1),
        (ran(GOOD, status="timeout"), "timeout", 0.1),
        (ran(GOOD, status="out_of_memory"), "out_of_memory", 0.1),
    ],
)
def test_every_other_end_of_a_program_has_its_place_on_the_ladder(task, execution, status, reward):
    outcome = grade(task, execution)
    assert (outcome.status, outcome.reward, outcome.exception) == (
        status,
        reward,
        execution.exception,
    )
    assert outcome.feedback


def test_long_output_keeps_its_head_and_its_last_line_in_the_feedback(task):
    output = "start\n" + "x" * 10_000_000 + "\nKeyError: 'age'\n"
    execution = ran(None, status="runtime_error", exception="KeyError", output=output)
    feedback = grade(task, execution).feedback
    assert len(feedback) <= FEEDBACK_CHARS
    assert "\nstart\n" in feedback
    assert feedback.endswith("\nKeyError: 'age'")


def test_values_are_rounded_so_that_equal_solutions_tie_on_every_machine(task):
    outcome = grade(task, ran(GOOD.replace(b"1.5", b"1.5000000002")))
    assert (outcome.value, outcome.position) == (0.0, 1.0)


def test_grading_takes_milliseconds(suite):
    task = suite["digits"]
    sample = (task.public_dir / "sample_submission.csv").read_bytes()
    grade(task, ran(sample))
    start = time.perf_counter()
    for _ in range(20):
        grade(task, ran(sample))
    assert (time.perf_counter() - start) / 20 < 0.1


def test_predictions_come_in_the_order_of_the_answers(task):
    parsed = parse_submission(task, b"id,y\n13,4\n12,3\n11,2\n10,1\n")
    np.testing.assert_array_equal(parsed, [1.0, 2.0, 3.0, 4.0])
