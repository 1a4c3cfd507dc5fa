import math

import numpy as np
import pytest
from scipy import stats

from wmrl_jax.errors import UserError
from wmrl_jax.train.evaluate import compare, summarise
from wmrl_jax.types import STATUSES, reward_of


def record(task, sample, *, split="train", status="valid", position=None, reward=None):
    return {
        "task": task,
        "split": split,
        "sample": sample,
        "status": status,
        "reward": reward_of(status, position) if reward is None else reward,
        "position": position,
        "value": None,
        "seconds": 0.5,
        "completion": f"{task} {sample}",
    }


def valid_records(task, positions, *, split="train"):
    return [record(task, i, split=split, position=float(p)) for i, p in enumerate(positions)]


def find(rows, name):
    return next(r for r in rows if r.name == name)


def test_means_positions_and_shares_are_those_of_hand_arithmetic():
    records = [
        record("a", 0, position=0.4),  # reward 0.7
        record("a", 1, status="runtime_error"),  # 0.1
        record("a", 2, status="no_submission"),  # 0.2
        record("a", 3, status="syntax_error"),  # 0.0
        record("b", 0, split="heldout", position=1.0),  # 1.0
        record("b", 1, split="heldout", position=0.0),  # 0.5
    ]
    evaluation = summarise(records, bootstrap=50, seed=0)
    a, b = find(evaluation.tasks, "a"), find(evaluation.tasks, "b")
    assert a.reward.mean == pytest.approx(0.25)
    assert a.position.mean == pytest.approx(0.1)
    assert {s: x for s, x in a.statuses.items() if x} == {
        "valid": 0.25,
        "runtime_error": 0.25,
        "no_submission": 0.25,
        "syntax_error": 0.25,
    }
    assert b.reward.mean == pytest.approx(0.75)
    assert b.position.mean == pytest.approx(0.5)
    # The overall mean is that of the two tasks, not of the six samples (which would be 0.4167).
    assert evaluation.overall.reward.mean == pytest.approx(0.5)
    assert evaluation.overall.statuses["valid"] == pytest.approx((0.25 + 1.0) / 2)
    assert [s.name for s in evaluation.splits] == ["train", "heldout"]
    assert evaluation.overall.seconds == pytest.approx(3.0)


def test_every_status_but_unknown_has_a_share_and_the_shares_sum_to_one():
    statuses = [s for s in STATUSES if s != "unknown"]
    records = [
        record("a", i, status=s, position=0.3 if s == "valid" else None)
        for i, s in enumerate(statuses)
    ]
    shares = summarise(records, bootstrap=10).overall.statuses
    assert list(shares) == statuses
    assert sum(shares.values()) == pytest.approx(1.0)


def test_ungraded_samples_are_left_out_of_every_mean_and_counted():
    graded = valid_records("a", [0.2, 0.6])
    lost = [record("a", 2, status="unknown"), record("a", 3, status="unknown", reward=math.nan)]
    row = summarise([*graded, *lost], bootstrap=10).overall
    assert (row.samples, row.ungraded) == (2, 2)
    assert row.reward.mean == pytest.approx(0.7)
    assert row.position.mean == pytest.approx(0.4)
    assert row.statuses["valid"] == 1.0


def test_a_task_without_any_grade_is_nan_and_does_not_enter_its_splits_mean():
    records = [*valid_records("a", [0.2, 0.6]), record("b", 0, status="unknown")]
    evaluation = summarise(records, bootstrap=10)
    assert math.isnan(find(evaluation.tasks, "b").reward.mean)
    assert evaluation.overall.reward.mean == pytest.approx(0.7)
    assert evaluation.overall.tasks == 1
    assert evaluation.overall.ungraded == 1


def test_the_interval_of_one_task_is_the_normal_one_with_the_unbiased_variance():
    positions = np.random.default_rng(0).uniform(size=400)
    estimate = summarise(valid_records("a", positions), bootstrap=20_000).overall.position
    half = 1.96 * positions.std(ddof=1) / math.sqrt(len(positions))
    assert estimate.low == pytest.approx(positions.mean() - half, abs=0.02 * half)
    assert estimate.high == pytest.approx(positions.mean() + half, abs=0.02 * half)


def test_the_interval_of_a_few_samples_has_the_unbiased_variance_too():
    positions = np.array([0.0, 0.1, 0.2, 0.9, 0.8, 0.4, 0.5, 0.3])
    estimate = summarise(valid_records("a", positions), bootstrap=50_000).overall.position
    # Eight samples: resamples of size seven are close to normal, whose 95 % width is 3.92 s / √8.
    expected = 3.92 * positions.std(ddof=1) / math.sqrt(8)
    assert estimate.high - estimate.low == pytest.approx(expected, rel=0.03)


def test_the_interval_agrees_with_scipys_percentile_bootstrap():
    positions = np.random.default_rng(1).beta(0.5, 2.0, size=300)
    estimate = summarise(valid_records("a", positions), bootstrap=20_000, seed=3).overall.position
    reference = stats.bootstrap(
        (positions,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(5)
    ).confidence_interval
    width = reference.high - reference.low
    assert estimate.low == pytest.approx(reference.low, abs=0.03 * width)
    assert estimate.high == pytest.approx(reference.high, abs=0.03 * width)


def test_the_interval_of_a_split_keeps_the_tasks_fixed():
    """Tasks that differ widely among themselves but not within widen nothing."""
    rng = np.random.default_rng(2)
    tasks = {f"t{i}": 0.1 * i + 0.02 * rng.standard_normal(16) for i in range(1, 9)}
    records = [r for name, p in tasks.items() for r in valid_records(name, p)]
    estimate = summarise(records, bootstrap=10_000).overall.position
    error = math.sqrt(sum(p.var(ddof=1) / 16 for p in tasks.values())) / len(tasks)
    assert estimate.high - estimate.low == pytest.approx(3.92 * error, rel=0.05)


@pytest.mark.slow
def test_the_interval_of_a_difference_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(4)
    covered, trials = 0, 400
    for _ in range(trials):
        sides = [
            [r for t in "abcd" for r in valid_records(t, rng.beta(2 + shift, 4, size=8))]
            for shift in (0, 1)
        ]
        before, after = (summarise(s, bootstrap=400) for s in sides)
        gain = compare(before, after).overall.position
        covered += gain.low <= 3 / 7 - 2 / 6 <= gain.high
    assert 0.91 <= covered / trials <= 0.98


def test_a_task_with_one_sample_has_a_mean_and_no_interval():
    estimate = summarise([record("a", 0, position=0.5)], bootstrap=10).overall.reward
    assert estimate.mean == pytest.approx(0.75)
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.high)


def test_equal_rewards_give_an_interval_of_no_width():
    estimate = summarise(valid_records("a", [0.3] * 8), bootstrap=100).overall.reward
    assert estimate == pytest.approx((0.65, 0.65, 0.65))


def test_the_same_seed_gives_the_same_intervals_in_any_order_and_another_seed_others():
    records = [r for t in "ab" for r in valid_records(t, np.linspace(0, 1, 8))]
    first = summarise(records, bootstrap=200, seed=1)
    assert summarise(records[::-1], bootstrap=200, seed=1) == first
    assert summarise(records, bootstrap=200, seed=2).overall.reward != first.overall.reward


def test_a_tasks_interval_does_not_depend_on_the_other_tasks():
    a, b = valid_records("a", np.linspace(0, 1, 8)), valid_records("b", np.linspace(0, 0.5, 8))
    alone = find(summarise(a, bootstrap=200).tasks, "a")
    assert find(summarise([*b, *a], bootstrap=200).tasks, "a") == alone


def test_a_difference_is_paired_by_task_and_signed_after_minus_before():
    rng = np.random.default_rng(7)
    base = {f"t{i}": 0.08 * i for i in range(10)}
    noise = {name: 0.02 * rng.standard_normal((2, 32)) for name in base}
    before, after = (
        summarise(
            [
                r
                for n, p in base.items()
                for r in valid_records(n, np.clip(p + 0.05 * side + 0.1 + noise[n][side], 0, 1))
            ],
            bootstrap=4000,
        )
        for side in (0, 1)
    )
    overall = compare(before, after).overall
    error = math.sqrt(sum(n.var(axis=1, ddof=1).sum() / 32 for n in noise.values())) / len(noise)
    assert overall.position.mean == pytest.approx(0.05, abs=4 * error)
    assert overall.reward.mean == pytest.approx(overall.position.mean / 2)
    assert overall.after - overall.before == pytest.approx(overall.reward.mean)
    assert overall.position.high - overall.position.low == pytest.approx(3.92 * error, rel=0.06)


def test_a_difference_resamples_the_two_sides_independently():
    records = valid_records("a", np.linspace(0, 1, 16))
    same = summarise(records, bootstrap=4000)
    gain = compare(same, same).overall.position
    expected = 3.92 * math.sqrt(2 * np.linspace(0, 1, 16).var(ddof=1) / 16)
    assert gain.mean == 0.0
    assert gain.high - gain.low == pytest.approx(expected, rel=0.06)


def test_tasks_that_only_one_side_graded_are_named_and_left_out():
    before = summarise([*valid_records("a", [0.1, 0.3]), *valid_records("b", [0.9, 0.9])])
    after = summarise(
        [
            *valid_records("a", [0.5, 0.7]),
            record("b", 0, status="unknown"),
            record("c", 0, position=1),
        ]
    )
    comparison = compare(before, after)
    assert comparison.unpaired == ("b", "c")
    assert [d.name for d in comparison.tasks] == ["a"]
    assert comparison.overall.position.mean == pytest.approx(0.4)


def test_evaluations_without_a_common_task_cannot_be_compared():
    with pytest.raises(UserError, match="no graded task in common"):
        compare(summarise(valid_records("a", [0.1])), summarise(valid_records("b", [0.1])))


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "no records"),
        ([{"task": "a"}], "lacks split, sample, status"),
        ([{**record("a", 0, position=1.0), "status": "fine"}], "'fine'"),
        ([{**record("a", 0, position=1.0), "split": "dev"}], "'dev'"),
        ([{**record("a", 0, position=1.0), "position": None}], r"position None"),
        ([{**record("a", 0, position=1.0), "reward": math.nan}], "missing exactly where"),
        ([{**record("a", 0, status="unknown"), "reward": 0.0}], "missing exactly where"),
        ([record("a", 0, position=1.0), record("a", 1, position=1.0, split="heldout")], "both"),
    ],
)
def test_a_bad_record_is_refused_in_one_sentence(records, message):
    with pytest.raises(UserError, match=message):
        summarise(records)


def test_a_bootstrap_of_nothing_is_refused():
    with pytest.raises(UserError, match="eval.bootstrap is 0"):
        summarise(valid_records("a", [0.1, 0.2]), bootstrap=0)
