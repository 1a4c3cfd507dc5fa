import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.calibration import calibration_curve as sklearn_curve
from sklearn.metrics import (
    accuracy_score,
    mean_absolute_error,
    root_mean_squared_error,
    top_k_accuracy_score,
)

from wmrl_jax.errors import UserError
from wmrl_jax.types import STATUSES, reward_of
from wmrl_jax.world_model.cases import Case
from wmrl_jax.world_model.fidelity import (
    calibration_curve,
    measure,
    rank_correlation,
    save_report,
    table,
)
from wmrl_jax.world_model.readout import FAILURES, Prediction

LEVELS = 5


@pytest.fixture(scope="module")
def sample() -> tuple[Prediction, list[Case]]:
    """Predictions that are related to the truth, over four tasks; rewards with ties."""
    rng = np.random.default_rng(0)
    n = 120
    probs = rng.dirichlet(np.full(len(FAILURES) + LEVELS, 0.3), n)
    cases, score = [], np.zeros(n)
    for i in range(n):
        grouped = np.append(probs[i, : len(FAILURES)], probs[i, len(FAILURES) :].sum())
        index = int(rng.choice(8, p=grouped))
        status = "valid" if index == len(FAILURES) else FAILURES[index]
        position = round(float(rng.random()), 1) if status == "valid" else None
        reward = reward_of(status, position)
        score[i] = np.clip(reward + rng.normal(0, 0.2), 0, 1)
        cases.append(Case(f"task {i % 4}", str(i), status, position, None, reward, 0.1, "heldout"))
    status = np.zeros(n, int)
    return Prediction(score, probs, status), cases  # type: ignore[arg-type]


def test_the_metrics_equal_those_of_scikit_learn_and_scipy(
    sample: tuple[Prediction, list[Case]],
) -> None:
    prediction, cases = sample
    report = measure(prediction, cases, bootstrap=20)

    probs, score = np.asarray(prediction.probs), np.asarray(prediction.score)
    grouped = np.c_[probs[:, : len(FAILURES)], probs[:, len(FAILURES) :].sum(1)]
    truth = [STATUSES.index(case.status) for case in cases]
    reward = np.asarray([case.reward for case in cases])
    names = np.asarray([case.task for case in cases])
    status, raw = report["status"], report["reward"]["raw"]
    assert status["accuracy_at_1"]["value"] == pytest.approx(
        accuracy_score(truth, grouped.argmax(1))
    )
    assert status["accuracy_at_2"]["value"] == pytest.approx(
        top_k_accuracy_score(truth, grouped, k=2, labels=range(8))
    )
    assert raw["mae"]["value"] == pytest.approx(mean_absolute_error(reward, score))
    assert raw["rmse"]["value"] == pytest.approx(root_mean_squared_error(reward, score))
    assert raw["bias"]["value"] == pytest.approx(np.mean(score - reward))
    by_task = [spearmanr(score[names == t], reward[names == t]).statistic for t in np.unique(names)]
    assert raw["rank_correlation"]["value"] == pytest.approx(np.mean(by_task))
    for task, expected in zip(np.unique(names), by_task, strict=True):
        assert report["by_task"][str(task)]["rank_correlation"] == pytest.approx(expected)
    assert sum(part["cases"] for part in report["by_status"].values()) == len(cases)
    for name, part in report["by_status"].items():
        assert part["cases"] == sum(case.status == name for case in cases)
    assert sum(sum(row.values()) for row in status["confusion"].values()) == len(cases)


def test_the_curve_equals_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(1)
    confidence = rng.random(400)
    hit = rng.random(400) < confidence**2

    error, curve = calibration_curve(confidence, hit.astype(float))

    true, predicted = sklearn_curve(hit, confidence, n_bins=10)
    np.testing.assert_allclose([point["true"] for point in curve], true)
    np.testing.assert_allclose([point["predicted"] for point in curve], predicted)
    shares = np.histogram(confidence, bins=10, range=(0, 1))[0] / 400
    np.testing.assert_allclose(error, np.sum(shares * np.abs(true - predicted)))


def test_rank_correlation_handles_ties_batches_and_constants() -> None:
    rng = np.random.default_rng(2)
    x, y = rng.integers(0, 4, (6, 15)).astype(float), rng.integers(0, 4, (6, 15)).astype(float)

    found = rank_correlation(x, y)

    np.testing.assert_allclose(
        found, [spearmanr(a, b).statistic for a, b in zip(x, y, strict=True)]
    )
    assert np.isnan(rank_correlation(np.ones(4), np.arange(4.0)))


def test_intervals_hold_the_value_and_narrow_with_more_cases(
    sample: tuple[Prediction, list[Case]],
) -> None:
    prediction, cases = sample
    few = Prediction(*(np.asarray(part)[:40] for part in prediction))  # type: ignore[arg-type]

    wide = measure(few, cases[:40], bootstrap=300)["reward"]["raw"]["mae"]
    narrow = measure(prediction, cases, bootstrap=300)["reward"]["raw"]["mae"]

    for interval in (wide, narrow):
        assert interval["low"] < interval["value"] < interval["high"]
    assert narrow["high"] - narrow["low"] < wide["high"] - wide["low"]


def test_a_map_is_reported_beside_the_raw_scores(sample: tuple[Prediction, list[Case]]) -> None:
    prediction, cases = sample
    shifted = prediction._replace(score=np.asarray(prediction.score) + 0.2)

    report = measure(shifted, cases, bootstrap=20, recalibrate=lambda score: score - 0.2)

    plain = measure(prediction, cases, bootstrap=20)["reward"]["raw"]
    raw, mapped = report["reward"]["raw"], report["reward"]["recalibrated"]
    assert raw["bias"]["value"] == pytest.approx(plain["bias"]["value"] + 0.2)
    assert mapped["bias"]["value"] == pytest.approx(plain["bias"]["value"], abs=1e-6)
    assert mapped["mae"]["value"] == pytest.approx(plain["mae"]["value"], abs=1e-6)
    assert "reward, recalibrated" in table(report)


def test_ungraded_cases_are_counted_and_left_out(sample: tuple[Prediction, list[Case]]) -> None:
    prediction, cases = sample
    score = np.asarray(prediction.score).copy()
    score[:7] = np.nan

    report = measure(prediction._replace(score=score), cases, bootstrap=20)

    rest = Prediction(*(np.asarray(part)[7:] for part in prediction))  # type: ignore[arg-type]
    assert (report["cases"], report["ungraded"]) == (113, 7)
    assert report["reward"] == measure(rest, cases[7:], bootstrap=20)["reward"]


def test_a_perfect_world_model_is_measured_as_one(sample: tuple[Prediction, list[Case]]) -> None:
    _, cases = sample
    probs = np.zeros((len(cases), len(FAILURES) + LEVELS))
    for row, case in zip(probs, cases, strict=True):
        row[STATUSES.index(case.status)] = 1.0
    score = np.asarray([case.reward for case in cases])

    report = measure(Prediction(score, probs, score), cases, bootstrap=20)  # type: ignore[arg-type]

    assert report["status"]["accuracy_at_1"]["value"] == 1.0
    assert report["status"]["calibration_error"] == 0.0
    raw = report["reward"]["raw"]
    assert (raw["mae"]["value"], raw["bias"]["value"]) == (0.0, 0.0)
    assert raw["rank_correlation"]["value"] == pytest.approx(1.0)


def test_the_report_is_json_and_a_table(
    tmp_path: Path, sample: tuple[Prediction, list[Case]]
) -> None:
    prediction, cases = sample
    alike = [
        case._replace(task="same", status="timeout", position=None, reward=0.1) for case in cases
    ]

    for group in (cases, alike):
        report = measure(prediction, group, bootstrap=20)
        save_report(tmp_path / "fidelity.json", report)
        assert json.loads((tmp_path / "fidelity.json").read_text()) == report
    # Rewards that are all equal determine no rank.
    assert report["reward"]["raw"]["rank_correlation"]["value"] is None
    text = table(report)
    assert "120 held-out executed cases of 1 tasks" in text
    assert "rank correlation within a task  not determined" in text


def test_nothing_graded_is_refused(sample: tuple[Prediction, list[Case]]) -> None:
    prediction, cases = sample
    nothing = prediction._replace(score=np.full(len(cases), np.nan))

    with pytest.raises(UserError, match="no held-out executed case"):
        measure(nothing, cases)
