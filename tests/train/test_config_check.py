"""Values that do not fit together, and values that fit but deserve a remark."""

import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.train.config_check import anchors_per_step, config_notices
from wmrl_jax.train.config_loader import load_config

PURE = ["corrections.debias=off", "corrections.denoise=off"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.group_size=1"], ["train.group_size is 1", "no group-relative signal"]),
        (["train.microbatches=3"], ["train.microbatches is 3", "train.groups (8)"]),
        (["anchors.fraction=0"], ["anchors.fraction is 0", "corrections.debias"]),
        (
            ["anchors.fraction=0", "corrections.debias=off"],
            ["anchors.fraction is 0", "corrections.denoise"],
        ),
        (["anchors.fraction=0", *PURE], ["nothing would be executed", "world_model"]),
        (["reward.source=world_model"], ["corrections.debias is on", "nothing is executed"]),
        (["reward.source=execution"], ["corrections.debias is on", "nothing is predicted"]),
        (
            ["reward.source=execution", "corrections.debias=off"],
            ["corrections.denoise is on", "nothing is predicted"],
        ),
        (["corrections.capacity=32"], ["corrections.min_pairs is 64", "capacity (32)"]),
        (["anchors.minimum=9"], ["anchors.minimum is 9", "8 groups"]),
        (
            ["anchors.max_in_flight=3", "anchors.fraction=0.5"],
            ["anchors.max_in_flight is 3", "4 groups"],
        ),
        (
            ["reward.source=execution", *PURE, "anchors.max_in_flight=7"],
            ["anchors.max_in_flight is 7", "8 groups"],
        ),
        (["model.kv_heads=3"], ["model.kv_heads is 3", "model.heads (4)"]),
        (["model.head_dim=33"], ["model.head_dim is 33", "even"]),
        (["name=a/b"], ["name is 'a/b'"]),
        (["name=.."], ["name is '..'"]),
        (["name=''"], ["name is ''"]),
        (["tasks.train=[wine]", "tasks.heldout=[iris, wine]"], ["task wine", "tasks.heldout"]),
    ],
)
def test_a_combination_that_cannot_work_is_one_sentence(
    overrides: list[str], words: list[str]
) -> None:
    with pytest.raises(UserError) as fault:
        load_config(None, overrides)

    assert all(word in str(fault.value) for word in words), str(fault.value)
    assert "\n" not in str(fault.value)


def test_the_defaults_need_no_remark() -> None:
    assert config_notices(load_config()) == []


def test_anchor_fraction_one_works_and_is_remarked_on() -> None:
    (notice,) = config_notices(load_config(None, ["anchors.fraction=1"]))

    assert "every group is executed" in notice


def test_a_run_too_short_for_debiasing_is_remarked_on() -> None:
    (notice,) = config_notices(load_config(None, ["train.steps=2"]))

    assert "about 16 anchor pairs" in notice
    assert "never start" in notice


def test_waiting_for_anchors_is_remarked_on() -> None:
    (notice,) = config_notices(load_config(None, ["anchors.wait=on"]))

    assert "repeatable" in notice


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 1),
        (["anchors.fraction=0.25"], 2),
        (["anchors.fraction=0.3"], 3),
        (["anchors.fraction=0.1", "train.groups=10"], 1),
        (["anchors.minimum=2"], 2),
        (["reward.source=execution", *PURE], 8),
        (["reward.source=world_model", *PURE], 0),
    ],
)
def test_anchors_of_a_step_follow_source_fraction_and_minimum(
    overrides: list[str], expected: int
) -> None:
    assert anchors_per_step(load_config(None, overrides)) == expected
