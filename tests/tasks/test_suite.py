"""The built-in suite: real data, cut the same way everywhere, with boards worth climbing."""

import hashlib
import statistics
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.tasks.grading import grade
from wmrl_jax.tasks.suite import SUITE, materialise, source_data_dirs
from wmrl_jax.tasks.tables import read_table
from wmrl_jax.tasks.task import load_task, load_tasks
from wmrl_jax.types import Execution


def digests(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def graded(task, submission: bytes):
    return grade(task, Execution("ok", "", None, submission, None, 0.0))


def test_the_suite_is_as_wide_as_it_says(suite):
    assert len(suite) >= 14
    assert len({task.source.split("(")[0] for task in suite.values()}) >= 8
    assert len({task.metric for task in suite.values()}) >= 6
    for split, fewest in (("train", 10), ("heldout", 4)):
        chosen = [task for task in suite.values() if task.split == split]
        assert len(chosen) >= fewest
        assert {task.modality for task in chosen} == {"tabular", "image", "text"}


def test_no_data_set_is_in_both_splits(suite):
    sources = {
        split: {task.source for task in suite.values() if task.split == split}
        for split in ("train", "heldout")
    }
    assert not sources["train"] & sources["heldout"]


def test_every_task_names_source_and_licence_where_the_agent_and_a_reader_find_them(suite):
    for task in suite.values():
        assert task.source and task.licence
        assert task.source in task.description


def test_two_materialisations_are_the_same_bytes(suite_root, tmp_path):
    materialise(tmp_path)
    assert digests(tmp_path) == digests(suite_root)


def test_the_answers_are_those_that_the_leaderboards_were_made_from(suite_root):
    public = digests(suite_root)
    answers = {k: v for k, v in public.items() if k.endswith("private/answers.csv")}
    total = hashlib.sha256("".join(answers[k] for k in sorted(answers)).encode()).hexdigest()
    assert total[:16] == "34394e757b530447"


def test_a_second_call_writes_nothing_and_a_spoilt_folder_is_made_again(tmp_path):
    folders = materialise(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert materialise(tmp_path) == folders
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    (folders[0] / "task.yaml").write_text("name: spoilt\n")
    materialise(tmp_path)
    assert load_task(folders[0]).name == folders[0].name


def test_callers_at_one_time_do_not_disturb_each_other(tmp_path):
    with ThreadPoolExecutor(3) as pool:
        for folders in pool.map(materialise, [tmp_path] * 3):
            assert len(folders) == len(SUITE)
    assert len(load_tasks(tmp_path)) == len(SUITE)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(SUITE)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the built-in tasks to"):
        materialise(tmp_path / "file" / "tasks")


def test_train_and_test_rows_are_apart_and_small(suite):
    for task in suite.values():
        train = read_table(task.public_dir / "train.csv")
        test = read_table(task.public_dir / "test.csv")
        assert set(train["id"]).isdisjoint(test["id"])
        assert set(train) - set(test) == {task.label_column}
        assert len(train["id"]) <= 1500 and len(test["id"]) <= 1500
        assert len(train) <= 66


def test_ids_say_nothing_of_the_label(suite):
    for task in suite.values():
        answers = read_table(task.answers_path)
        labels = answers[task.label_column]
        codes = {text: i for i, text in enumerate(sorted(set(labels)))}
        ranks = [float(codes[text]) for text in labels]
        correlation = statistics.correlation(range(len(ranks)), ranks)
        assert abs(correlation) < 4 / len(ranks) ** 0.5


def test_the_answers_take_the_first_place_and_the_sample_almost_the_last(suite):
    for task in suite.values():
        assert graded(task, task.answers_path.read_bytes()).position == 1.0
        sample = (task.public_dir / "sample_submission.csv").read_bytes()
        outcome = graded(task, sample)
        assert outcome.status == "valid"
        assert outcome.position is not None and outcome.position < 0.35


def test_every_leaderboard_has_forty_entries_of_very_different_quality(suite):
    for task in suite.values():
        assert len(task.leaderboard) >= 40
        best, middle, worst = (
            task.leaderboard[0],
            statistics.median(task.leaderboard),
            task.leaderboard[-1],
        )
        assert abs(best - worst) > 2 * abs(best - middle) > 0
        assert len(set(task.leaderboard)) > 0.9 * len(task.leaderboard)


def test_no_raw_data_lies_in_the_package():
    package = Path(str(resources.files("wmrl_jax.tasks")))
    data = [p for p in package.rglob("*") if p.suffix in (".csv", ".gz", ".npz", ".json")]
    assert {path.parent.name for path in data} == {"leaderboards"}
    assert {path.stem for path in data} == set(SUITE)
    assert sum(path.stat().st_size for path in data) < 400_000


def test_the_folders_with_raw_data_exist_and_hold_it():
    folders = source_data_dirs()
    assert len(folders) == 9
    assert any((folder / "wine_data.csv").is_file() for folder in folders)
    assert all(folder.is_dir() for folder in folders)
