"""A run's folder belongs to one configuration."""

import dataclasses
from pathlib import Path

import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.train.config import Config
from wmrl_jax.train.config_loader import load_config
from wmrl_jax.train.run_folder import claim_run_folder, load_run_config


def configure(out: Path, *overrides: str) -> Config:
    return load_config(None, [f"out={out}", "name=first", *overrides])


def test_a_new_folder_is_made_with_the_configuration_in_it(tmp_path: Path) -> None:
    config = configure(tmp_path / "runs", "train.steps=7")

    folder = claim_run_folder(config)

    assert folder == tmp_path / "runs" / "first"
    assert load_config(folder / "config.yaml") == config


def test_the_same_configuration_finds_its_folder_again(tmp_path: Path) -> None:
    config = configure(tmp_path)

    assert claim_run_folder(config) == claim_run_folder(config)


def test_another_configuration_is_refused_with_the_keys_that_differ(tmp_path: Path) -> None:
    claim_run_folder(configure(tmp_path))

    with pytest.raises(UserError) as fault:
        claim_run_folder(configure(tmp_path, "train.groups=4", "seed=3"))

    text = str(fault.value)
    assert "another configuration" in text
    assert "seed (0 there, 3 here)" in text
    assert "train.groups (8 there, 4 here)" in text
    assert "\n" not in text


def test_many_differing_keys_are_cut_to_four_and_counted(tmp_path: Path) -> None:
    claim_run_folder(configure(tmp_path))
    changes = ["seed=1", "train.groups=4", "train.steps=3", "eval.samples=2", "model.layers=2"]

    with pytest.raises(UserError, match="and 1 more"):
        claim_run_folder(configure(tmp_path, *changes))


def test_what_changes_no_result_may_change_and_is_saved(tmp_path: Path) -> None:
    folder = claim_run_folder(configure(tmp_path))

    claim_run_folder(configure(tmp_path, "sandbox.slots=5", "checkpoint.every=2"))

    assert load_run_config(folder).sandbox.slots == 5


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "thesis.txt").write_text("mine")

    with pytest.raises(UserError, match=r"holds no config\.yaml"):
        claim_run_folder(configure(tmp_path))

    assert [path.name for path in (tmp_path / "first").iterdir()] == ["thesis.txt"]


def test_a_file_in_the_way_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "first").write_text("")

    with pytest.raises(UserError, match="a file stands where the run's folder goes"):
        claim_run_folder(configure(tmp_path))


def test_a_moved_folder_is_found_where_it_is_now(tmp_path: Path) -> None:
    config = configure(tmp_path / "runs")
    claim_run_folder(config).rename(tmp_path / "kept")

    loaded = load_run_config(tmp_path / "kept")

    assert loaded == dataclasses.replace(config, out=str(tmp_path), name="kept")


@pytest.mark.parametrize(("name", "words"), [("gone", "is no folder"), ("", "no run's folder")])
def test_what_is_no_run_cannot_be_loaded(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_run_config(tmp_path / name)
