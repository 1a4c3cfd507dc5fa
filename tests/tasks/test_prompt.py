"""The prompt: what decides the right program, in few words and one order."""

from dataclasses import replace

import pytest

from wmrl_jax.tasks.prompt import data_brief, prompt_text
from wmrl_jax.tasks.task import load_task


def test_the_prompt_of_a_tabular_task_reads_as_written_here(suite):
    assert prompt_text(suite["penguins-sex"]) == (
        "task: sex of penguins\n"
        "data: tabular, train 170, test 163 rows\n"
        "predict: probability of 1\n"
        "metric: log_loss, lower is better\n"
        "submit: id, male\n"
        "features: 6 numeric, 3 categorical, 0 text, missing in 2\n"
        "categorical: species, island, clutch\n"
        "numeric: culmen_length, culmen_depth, flipper_length, body_mass, ...\n"
    )


def test_pixels_are_folded_into_one_run(suite):
    lines = prompt_text(suite["digits"]).splitlines()
    assert lines[1].startswith("data: image")
    assert lines[2] == "predict: class, 10 classes"
    assert lines[-1] == "numeric: p00..p63"


def test_text_columns_imbalance_skew_and_a_floor_are_said(suite):
    assert "text: name\n" in prompt_text(suite["names-gender"])
    assert "predict: probability of 1, imbalanced\n" in prompt_text(suite["names-gender"])
    assert "predict: number not below 0, skewed\n" in prompt_text(suite["randhie-visits"])


def test_the_brief_counts_what_the_files_hold(suite):
    brief = data_brief(suite["cars-mpg"])
    assert brief.text == ("name",)
    assert brief.categorical == ("origin",)
    assert brief.missing == ("horsepower",)
    assert brief.classes == ()
    assert data_brief(suite["seattle-weather"]).classes == ("drizzle", "fog", "rain", "snow", "sun")


def test_classes_of_probabilities_are_counted(make_folder):
    task = load_task(make_folder("log_loss", "minimize", ("a", "b", "c", "a"), "a,b,c"))
    assert "predict: probability of each of 3 classes" in prompt_text(task)
    assert "submit: id, a, b, c\n" in prompt_text(task)


@pytest.mark.parametrize("chars", [0, 50])
def test_every_prompt_is_short_and_every_line_of_the_contract_in_it(suite, chars):
    for task in suite.values():
        text = prompt_text(task, description_chars=chars)
        assert len(text) <= 360 + chars
        assert f"metric: {task.metric}," in text
        assert f"submit: id, {task.label_column}\n" in text
        assert text.endswith("\n")


def test_thousands_of_columns_and_a_description_of_a_megabyte_stay_bounded(make_folder):
    folder = make_folder()
    names = ",".join(f"column {i} é" for i in range(3000))
    cells = ",".join("1" for _ in range(3000))
    for file, label in (("train", ",y"), ("test", "")):
        rows = [f"{10 + i},{cells}{',2' if label else ''}" for i in range(4)]
        path = folder / f"public/{file}.csv"
        path.write_text("\n".join([f"id,{names}{label}", *rows]) + "\n")
    task = replace(load_task(folder), description="long words " * 100_000)
    text = prompt_text(task, description_chars=100)
    assert len(text) < 500
    assert "3000 numeric" in text
