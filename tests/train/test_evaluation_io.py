import json
import math

import pandas as pd
import pytest

from wmrl_jax.errors import UserError
from wmrl_jax.train.evaluate import Estimate, compare, summarise
from wmrl_jax.train.evaluation_io import (
    comparison_table,
    evaluation_table,
    format_estimate,
    load_json,
    plain,
    write_csv,
    write_json,
)


def records(offset):
    rows = []
    for task, split in (("iris", "train"), ("wine", "heldout")):
        for i in range(4):
            position = offset + 0.1 * i
            rows.append(
                {
                    "task": task,
                    "split": split,
                    "sample": i,
                    "status": "valid",
                    "reward": 0.5 + position / 2,
                    "position": position,
                    "value": 0.9,
                    "seconds": 0.25,
                    "completion": "```python\nprint('é')\n```",
                }
            )
    rows.append({**rows[0], "sample": 9, "status": "unknown", "reward": math.nan, "position": None})
    rows.append({**rows[0], "sample": 10, "status": "timeout", "reward": 0.1, "position": None})
    return rows


@pytest.fixture
def evaluation():
    return summarise(records(0.1), bootstrap=100, seed=3)


def test_json_comes_back_as_the_same_evaluation(evaluation, tmp_path):
    path = tmp_path / "deep" / "eval.json"
    write_json(evaluation, path)
    assert load_json(path) == evaluation


def test_json_is_strict_and_carries_the_statistics_for_other_readers(evaluation, tmp_path):
    path = tmp_path / "eval.json"
    write_json(evaluation, path)
    content = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert content["overall"]["reward"]["mean"] == pytest.approx(evaluation.overall.reward.mean)
    assert content["tasks"][0]["statuses"]["timeout"] == pytest.approx(0.2)
    assert [r["reward"] for r in content["records"] if r["status"] == "unknown"] == [None]
    assert [p.name for p in tmp_path.iterdir()] == ["eval.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "cannot read"), ("{", "not valid JSON"), ("[]", "not an evaluation")],
)
def test_a_file_that_is_no_evaluation_is_refused_by_name(text, message, tmp_path):
    path = tmp_path / "eval.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_json(path)
    assert "eval.json" in str(caught.value)


def test_csv_has_a_line_per_task_split_and_overall(evaluation, tmp_path):
    path = tmp_path / "eval.csv"
    write_csv(evaluation, path)
    frame = pd.read_csv(path).set_index("name")
    assert list(frame.index) == ["iris", "wine", "train", "heldout", "overall"]
    assert frame.loc["iris", "ungraded"] == 1
    assert frame.loc["iris", "share_timeout"] == pytest.approx(0.2)
    assert frame.loc["overall", "reward_low"] == pytest.approx(
        evaluation.overall.reward.low, rel=1e-5
    )


def test_csv_leaves_unknown_numbers_empty(tmp_path):
    path = tmp_path / "eval.csv"
    write_csv(summarise(records(0.1)[:1], bootstrap=10), path)
    assert pd.read_csv(path)["reward_low"].isna().all()


def test_the_tables_show_every_task_and_only_the_statuses_that_occur(evaluation):
    text = plain(evaluation_table(evaluation))
    assert all(name in text for name in ("iris", "wine", "train", "heldout", "overall", "timeout"))
    assert "out of memory" not in text
    assert "\x1b" not in text
    after = summarise(records(0.4), bootstrap=100, seed=3)
    assert "+0.150" in plain(comparison_table(compare(evaluation, after)))


def test_estimates_are_written_with_their_interval_and_unknown_ones_with_a_dash():
    assert format_estimate(Estimate(0.5, 0.45, 0.55)) == "0.500 [0.450, 0.550]"
    assert format_estimate(Estimate(0.1, -0.05, 0.25), signed=True) == "+0.100 [-0.050, +0.250]"
    assert format_estimate(Estimate(0.5, math.nan, math.nan)) == "0.500 [–]"
    assert format_estimate(Estimate(math.nan, math.nan, math.nan)) == "–"
