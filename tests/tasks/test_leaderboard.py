"""Leaderboards from executed reference solutions."""

import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.tasks import leaderboard
from wmrl_jax.tasks.corpus import CorpusProgram
from wmrl_jax.tasks.leaderboard import Entry, make_leaderboard, pick_entries, write_leaderboard
from wmrl_jax.tasks.task import load_task
from wmrl_jax.types import Execution


def constant_solutions(task, n, seed):
    return [CorpusProgram(task.name, f"{i}", "right", f"constant {i}") for i in range(n)]


def submit_the_constant(task, programs):
    """What a sandbox would see of a program that predicts one number everywhere."""
    rows = [
        f"id,y\n{''.join(f'{10 + row},{text}' + chr(10) for row in range(4))}" for text in programs
    ]
    return [Execution("ok", "", None, text.encode(), None, 0.1) for text in rows]


def test_the_board_holds_the_values_of_the_executions_best_first(
    make_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(leaderboard, "reference_programs", constant_solutions)
    task = load_task(make_folder("mae", labels=("0", "0", "0", "0.4")))
    entries = make_leaderboard(task, submit_the_constant)
    assert len(entries) == leaderboard.ENTRIES
    assert entries[0] == Entry(pytest.approx(0.1), "constant 0")
    assert entries == sorted(entries)
    write_leaderboard(task.folder / "leaderboard.csv", entries)
    assert load_task(task.folder).leaderboard == tuple(entry.value for entry in entries)
    assert [path.name for path in task.folder.iterdir() if path.name.startswith(".")] == []


def test_failed_and_invalid_executions_are_left_out_and_too_few_are_refused(
    make_folder, monkeypatch
):
    monkeypatch.setattr(leaderboard, "reference_programs", constant_solutions)
    task = load_task(make_folder())

    def mostly_failing(task, programs):
        good = submit_the_constant(task, programs)
        failed = Execution("runtime_error", "", "KeyError", None, None, 0.1)
        invalid = Execution("ok", "", None, b"nonsense", None, 0.1)
        return [*good[:7], failed, invalid, *[failed] * (len(good) - 9)]

    with pytest.raises(UserError, match="only 7 reference solutions of task toy"):
        make_leaderboard(task, mostly_failing)


def test_the_pick_is_dense_at_the_top_and_keeps_both_ends():
    entries = [Entry(float(i), f"r{i}") for i in range(200)]
    picked = pick_entries(entries, 60)
    values = [entry.value for entry in picked]
    assert values[0] == 0.0
    assert values[-1] == 199.0
    assert len(set(values)) == 60
    assert sorted(values) == values
    middling = sum(value >= 100 for value in values) / 60
    assert 0.3 < middling < 0.42


@pytest.mark.parametrize("count", [3, 60, 61, 75])
def test_the_pick_of_few_entries_repeats_none(count):
    entries = [Entry(float(i), "") for i in range(count)]
    picked = pick_entries(entries, 60)
    assert len(picked) == min(count, 60)
    assert len(set(picked)) == len(picked)
