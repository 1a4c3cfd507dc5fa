"""Loading task folders, and the one sentence that each fault of one gets."""

import re
import shutil

import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.tasks.task import load_task, load_tasks, select_tasks
from wmrl_jax.types import Limits


def test_a_good_folder_loads_with_its_leaderboard_best_first(make_folder):
    folder = make_folder(limits={"wall_seconds": 5}, board="value\n3\n1\n2\n")
    task = load_task(folder)
    assert task.leaderboard == (1.0, 2.0, 3.0)
    assert task.target_columns == ("y",)
    assert task.limits == Limits(wall_seconds=5)
    assert task.description == "Predict y.\n"
    assert task.public_dir == folder / "public"


def test_a_leaderboard_with_further_columns_and_a_single_entry_loads(make_folder):
    folder = make_folder(board='rank,value,recipe\n1,0.5,"a, b"\n')
    assert load_task(folder).leaderboard == (0.5,)


def test_a_byte_order_mark_in_a_table_is_read_over(make_folder):
    folder = make_folder()
    path = folder / "public/test.csv"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_task(folder).id_column == "id"


def test_a_description_of_more_than_a_megabyte_is_cut(make_folder):
    folder = make_folder()
    (folder / "description.md").write_text("ä" * 3_000_000)
    assert len(load_task(folder).description) <= 1 << 20


def test_the_leaderboard_may_be_missing_while_it_is_still_to_be_made(make_folder):
    folder = make_folder()
    (folder / "leaderboard.csv").unlink()
    assert load_task(folder, require_leaderboard=False).leaderboard == ()


def replace(name, text):
    return lambda folder: (folder / name).write_text(text)


def edit(name, old, new):
    def fault(folder):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return fault


def copy(source, target):
    return lambda folder: shutil.copy(folder / source, folder / target)


def remove(name):
    return lambda folder: (folder / name).unlink()


ANSWERS = "private/answers.csv"
SAMPLE = "public/sample_submission.csv"
FAULTS = {
    "no task.yaml": (remove("task.yaml"), "task.yaml is missing"),
    "yaml broken": (replace("task.yaml", "a: [1"), "task.yaml is not YAML"),
    "yaml a list": (replace("task.yaml", "- 1"), "must hold keys and values"),
    "unknown key": (edit("task.yaml", "split:", "splitt:"), "'splitt'; did you mean 'split'"),
    "key missing": (edit("task.yaml", "title: a toy\n", ""), "'title' must be a text"),
    "wrong metric": (edit("task.yaml", "rmse", "rmsd"), "'rmsd' is not known; did you mean 'rmse'"),
    "no direction": (edit("task.yaml", "minimize", "minimise"), "did you mean 'minimize'"),
    "wrong direction": (edit("task.yaml", "minimize", "maximize"), "write `direction: minimize`"),
    "wrong limit": (edit("task.yaml", "name:", "limits: {wall: 3}\nname:"), "unknown limit 'wall'"),
    "limit a text": (
        edit("task.yaml", "name:", "limits: {wall_seconds: soon}\nname:"),
        "above 0, not 'soon'",
    ),
    "no answers": (remove(ANSWERS), "answers.csv is missing"),
    "no sample": (remove(SAMPLE), "sample_submission.csv is missing"),
    "answers empty": (replace(ANSWERS, "id,y\n"), "answers.csv has no rows"),
    "answers without label": (edit(ANSWERS, "id,y", "id,z"), "answers.csv has no column 'y'"),
    "answers ragged": (edit(ANSWERS, "10,1.5", "10,1.5,7"), "a row of 3 cells"),
    "answers binary": (
        lambda folder: (folder / ANSWERS).write_bytes(b"id,y\n\xff\xfe\n"),
        "not a CSV table in UTF-8",
    ),
    "answer NaN": (edit(ANSWERS, "10,1.5", "10,nan"), "'nan' where rmse needs a finite number"),
    "id twice": (edit(ANSWERS, "11,", "10,"), "has the id '10' twice"),
    "ids differ": (edit(SAMPLE, "13,", "14,"), r"'13' is in one only"),
    "test ids differ": (edit("public/test.csv", "13,", "12,"), "'13' is in one only"),
    "wrong target": (edit(SAMPLE, "id,y", "id,target"), "has the columns target beside the id"),
    "no leaderboard": (remove("leaderboard.csv"), "leaderboard.csv is missing; make it again"),
    "leaderboard blank": (replace("leaderboard.csv", ""), "leaderboard.csv is empty"),
    "leaderboard empty": (replace("leaderboard.csv", "value\n"), "has no entries"),
    "leaderboard column": (replace("leaderboard.csv", "score\n1\n"), "has no column `value`"),
    "leaderboard NaN": (replace("leaderboard.csv", "value\n1\nnan\n"), "line 3 has 'nan'"),
    "leaderboard gap": (replace("leaderboard.csv", "value\n1\n\n2\n"), "line 3 has ''"),
    "leaderboard text": (replace("leaderboard.csv", "value\nbest\n"), "line 2 has 'best'"),
    "answers public": (copy(ANSWERS, "public/answers.csv"), "looks like the answers"),
    "answers renamed": (copy(ANSWERS, "public/extra.csv"), "extra.csv holds the answers"),
    "answers as sample": (copy(ANSWERS, SAMPLE), "sample_submission.csv holds the answers"),
    "label in test": (
        lambda folder: copy(ANSWERS, "public/test.csv")(folder),
        "test.csv has the label column 'y'",
    ),
    "link to answers": (
        lambda folder: (folder / "public/notes.txt").symlink_to(folder / ANSWERS),
        "notes.txt is a symbolic link",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_folder_is_one_sentence_that_names_the_file(make_folder, name):
    fault, message = FAULTS[name]
    folder = make_folder()
    fault(folder)
    with pytest.raises(UserError, match=message) as caught:
        load_task(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_probability_metric_needs_zeros_and_ones(make_folder):
    folder = make_folder("roc_auc", "maximize", ("1", "1", "1", "1"))
    with pytest.raises(UserError, match="must hold both 0 and 1"):
        load_task(folder)


def test_probabilities_of_several_classes_need_one_column_a_class(make_folder):
    labels = ("a", "b", "c", "a")
    assert load_task(make_folder("log_loss", "minimize", labels, "b,a,c")).target_columns == (
        "b",
        "a",
        "c",
    )
    with pytest.raises(UserError, match="one column a class, a, b, c"):
        load_task(make_folder("log_loss", "minimize", labels, "a,b"))
    with pytest.raises(UserError, match="roc_auc takes two classes"):
        load_task(make_folder("roc_auc", "maximize", labels, "a,b,c"))


def test_two_tasks_of_one_name_and_a_folder_without_tasks_are_refused(make_folder, tmp_path):
    folder = make_folder()
    assert list(load_tasks(tmp_path)) == ["toy"]
    shutil.copytree(folder, tmp_path / "twin")
    with pytest.raises(UserError, match="both name their task 'toy'"):
        load_tasks(tmp_path)
    with pytest.raises(UserError, match="holds no task folder"):
        load_tasks(tmp_path / "nowhere")


def test_a_wrong_task_name_gets_the_nearest_one(make_folder):
    task = load_task(make_folder())
    assert list(select_tasks({"toy": task}, ["toy"])) == ["toy"]
    with pytest.raises(UserError, match=re.escape("no task 'tox'; did you mean 'toy'?")):
        select_tasks({"toy": task}, ["tox"])
