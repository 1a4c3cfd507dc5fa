import json
import math

import numpy as np
import pytest

from wmrl_jax.train.report.data import number, read_run

FILES = (
    "versions.json",
    "metrics.jsonl",
    "pairs.jsonl",
    "curves.jsonl",
    "samples.jsonl",
    "ledger.json",
    "eval_before.json",
    "eval_after.json",
    "fidelity.json",
)


def test_a_whole_run_is_read_without_a_fault(whole_run):
    run = read_run(whole_run)
    assert run.faults == {}
    assert run.name == "quickstart"
    assert run.setting("train.steps") == 60
    assert run.setting("corrections.debias") is True
    assert run.setting("train.nothing", "fallback") == "fallback"
    assert list(run.steps) == list(range(1, 61))
    assert run.before is not None
    assert run.ledger is not None
    assert run.ledger["predicted_share"] == pytest.approx(7 / 8)


@pytest.mark.parametrize("name", FILES)
def test_a_broken_file_is_named_and_spoils_no_other(make_run, name):
    folder = make_run(steps=2)
    (folder / name).write_text('{"half\n{"more": 1}\n')
    assert set(read_run(folder).faults) == {name}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_there_is_no_fault(make_run, name):
    folder = make_run(steps=2)
    (folder / name).unlink()
    assert read_run(folder).faults == {}


def test_a_line_that_a_kill_cut_short_is_left_out_silently(make_run):
    folder = make_run(steps=4)
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    run = read_run(folder)
    assert list(run.steps) == [1, 2, 3]
    assert run.faults == {}


def test_of_a_step_that_was_written_twice_the_last_counts_and_steps_are_in_order(make_run):
    folder = make_run(steps=1)
    lines = [{"step": 2, "kl": 1.0}, {"step": 1, "kl": 2.0}, {"step": 2, "kl": 3.0}]
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(x) for x in lines))
    assert list(read_run(folder).series("kl")) == [2.0, 3.0]


def test_what_is_no_finite_number_is_unknown(make_run):
    folder = make_run(steps=1)
    values = ["1.5", "null", '"1.5"', "true", "NaN", "Infinity", "[1]"]
    lines = [f'{{"step": {i}, "kl": {v}}}' for i, v in enumerate(values)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    run = read_run(folder)
    np.testing.assert_array_equal(run.series("kl"), [1.5] + [math.nan] * 6)
    assert np.isnan(run.series("absent")).all()
    assert number(3) == 3.0


def test_pairs_without_both_numbers_and_curves_without_points_are_left_out(make_run):
    folder = make_run(steps=1)
    pairs = [{"step": 1, "predicted": 0.5, "executed": None}, {"step": 1, "predicted": 0.5}]
    (folder / "pairs.jsonl").write_text("\n".join(json.dumps(p) for p in pairs))
    curves = [{"step": 1, "x": [], "y": []}, {"step": 2, "x": [0.1], "y": [None]}, {"step": 3}]
    (folder / "curves.jsonl").write_text("\n".join(json.dumps(c) for c in curves))
    run = read_run(folder)
    assert (run.pairs, run.curves) == ([], [])
