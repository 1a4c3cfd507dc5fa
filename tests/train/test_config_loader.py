"""Loading a configuration: what is read, and one sentence for each fault."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from wmrl_jax.errors import UserError
from wmrl_jax.train.config import Config
from wmrl_jax.train.config_loader import (
    config_from_values,
    config_listing,
    config_values,
    load_config,
    schema,
)


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_what_a_file_does_not_say_keeps_its_default(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "train:\n  steps: 7\nanchors:\n"))

    assert config.train.steps == 7
    assert config.train.groups == Config().train.groups
    assert config.anchors == Config().anchors


def test_an_override_wins_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "train:\n  steps: 7\n")

    assert load_config(path, ["train.steps=9", "name=other"]).train.steps == 9


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001", "1E-04"])
def test_an_exponent_without_a_point_is_a_number(text: str) -> None:
    assert load_config(None, [f"train.learning_rate={text}"]).train.learning_rate == 1e-4


@pytest.mark.parametrize(("text", "expected"), [("on", True), ("off", False), ("true", True)])
def test_switches_are_on_and_off(text: str, expected: bool) -> None:
    assert load_config(None, [f"anchors.wait={text}"]).anchors.wait is expected


def test_a_whole_number_serves_where_a_fraction_is_wanted() -> None:
    epochs = load_config(None, ["warm_start.epochs=2"]).warm_start.epochs

    assert (epochs, type(epochs)) == (2.0, float)


def test_a_list_of_names_becomes_a_tuple() -> None:
    assert load_config(None, ["tasks.train=[wine, iris]"]).tasks.train == ("wine", "iris")


def test_a_file_extends_another_beside_it(tmp_path: Path) -> None:
    write(tmp_path, "name: base\ntrain:\n  steps: 7\n  groups: 4\n", "base.yaml")

    config = load_config(write(tmp_path, "extends: base.yaml\ntrain:\n  steps: 9\n"))

    assert (config.name, config.train.steps, config.train.groups) == ("base", 9, 4)


def test_the_listing_holds_every_field_and_reads_back_to_the_same_configuration(
    tmp_path: Path,
) -> None:
    config = load_config(
        None, ["train.learning_rate=3.3e-5", "tasks.train=[a, b]", "tasks.folder=/data/my tasks"]
    )

    listing = config_listing(config)

    assert load_config(write(tmp_path, listing)) == config
    for path in schema():
        assert f"{path.rpartition('.')[2]}: " in listing
    assert "fraction: 0.1  # between 0 and 1" in listing
    assert "out: runs  # the run's folder is out/name" in listing
    assert "source: mixed  # execution | world_model | mixed" in listing


@example({"tasks.heldout": ("a#\x85b", "ç"), "tasks.folder": "/größe\u2028x"})
@given(
    st.fixed_dictionaries(
        {
            "train.learning_rate": st.floats(1e-12, 1e6),
            "seed": st.integers(0, 2**40),
            "name": st.text("abcXYZ019_", min_size=1, max_size=8),
            "tasks.heldout": st.lists(st.text(max_size=8), max_size=3).map(tuple),
            "tasks.folder": st.none() | st.text(max_size=12),
        }
    )
)
def test_any_values_survive_listing_and_loading(tmp_path_factory, values: dict) -> None:
    config = config_from_values(values)
    folder = tmp_path_factory.mktemp("listing")

    loaded = load_config(write(folder, config_listing(config)))

    assert config_values(loaded) == config_values(config)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "train.group_sizee=4",
            "--set train.group_sizee=4: unknown key train.group_sizee; did you mean "
            "'train.group_size'?",
        ),
        (
            "group_size=4",
            "--set group_size=4: unknown key group_size; did you mean 'train.group_size'?",
        ),
        (
            "achors.fraction=0.2",
            "--set achors.fraction=0.2: unknown key achors.fraction; did you mean "
            "'anchors.fraction'?",
        ),
        (
            "qqq=1",
            "--set qqq=1: unknown key qqq; `wmrl config` lists them all",
        ),
        (
            "train=3",
            "--set train=3: train is a section; set one of its keys, train.steps for instance",
        ),
        ("train.steps", "--set train.steps: write it as name=value, train.steps=20 say"),
        (
            "train.steps=many",
            "--set train.steps=many: train.steps must be a whole number, not 'many'",
        ),
        ("train.steps=2.5", "--set train.steps=2.5: train.steps must be a whole number, not 2.5"),
        ("train.steps=on", "--set train.steps=on: train.steps must be a whole number, not on"),
        ("train.steps=", "--set train.steps=: train.steps must be a whole number, not empty"),
        ("train.steps=0", "--set train.steps=0: train.steps is 0 but must be at least 1"),
        (
            "anchors.fraction=1.5",
            "--set anchors.fraction=1.5: anchors.fraction is 1.5 but must be between 0 and 1",
        ),
        (
            "train.learning_rate=.nan",
            "--set train.learning_rate=.nan: train.learning_rate is nan but must be above 0",
        ),
        (
            "sampler.top_p=0",
            "--set sampler.top_p=0: sampler.top_p is 0 but must be above 0 and at most 1",
        ),
        (
            "reward.source=mixd",
            "--set reward.source=mixd: reward.source must be one of execution, world_model, mixed, "
            "not 'mixd'; did you mean 'mixed'?",
        ),
        (
            "corrections.debias=maybe",
            "--set corrections.debias=maybe: corrections.debias must be on or off, not 'maybe'",
        ),
        (
            "tasks.train=wine",
            "--set tasks.train=wine: tasks.train must be a list of names such as [wine, iris], "
            "not 'wine'",
        ),
        ("name=2024", "--set name=2024: name must be text (put it in quotes), not 2024"),
        (
            "train.steps=[1",
            "--set train.steps=[1: not valid YAML: line 1: expected ',' or ']', but got "
            "'<stream end>'",
        ),
    ],
)
def test_a_wrong_override_gets_one_sentence(override: str, sentence: str) -> None:
    with pytest.raises(UserError) as fault:
        load_config(None, [override])

    assert str(fault.value) == sentence


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("trian:\n  steps: 3\n", "unknown key trian; did you mean 'train'?"),
        ("train:\n  stepps: 3\n", "unknown key train.stepps; did you mean 'train.steps'?"),
        ("train: 3\n", "train is a section and needs its keys below it, not 3"),
        ("train:\n  steps: 3\n  steps: 4\n", "not valid YAML: line 3: steps stands twice"),
        ("train:\n  steps: [3\n", "not valid YAML: line 3: expected ',' or ']', but got"),
        ("- train\n", "must be a mapping of sections, not a list"),
        ("extends: [a]\n", "extends must name a file, not a list"),
        ("extends: run.yaml\n", "the files that extend each other go in a circle"),
        ("extends: gone.yaml\n", "gone.yaml: no such file"),
    ],
)
def test_a_wrong_file_gets_one_sentence_that_names_it(
    tmp_path: Path, text: str, sentence: str
) -> None:
    path = write(tmp_path, text)

    with pytest.raises(UserError) as fault:
        load_config(path)

    assert sentence in str(fault.value)
    assert str(fault.value).startswith(str(tmp_path))
    assert "\n" not in str(fault.value)


def test_a_missing_file_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    write(tmp_path, "name: x\n", "quickstart.yaml")

    with pytest.raises(UserError, match=r"no such file; did you mean '.*quickstart\.yaml'\?"):
        load_config(tmp_path / "quickstat.yaml")


def test_a_file_that_is_no_text_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(UserError, match="cannot be read as text"):
        load_config(path)


def test_a_folder_in_place_of_a_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_config(tmp_path)
