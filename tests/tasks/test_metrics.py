"""The metrics against their formulas, written out here."""

import math

import numpy as np
import pytest

from wmrl_jax.tasks.metrics import METRICS

TRUTH = np.array([0, 0, 0, 1, 2, 2])
LABELS = np.array([0, 0, 1, 1, 2, 0])
BINARY = np.array([0, 1, 0, 1])
PROBABILITY = np.array([0.1, 0.9, 0.6, 0.4])
VALUES = np.array([1.0, 2.0, 4.0])
GUESSES = np.array([1.5, 2.0, 2.0])

EXPECTED = {
    "accuracy": (TRUTH, LABELS, 4 / 6),
    "balanced_accuracy": (TRUTH, LABELS, (2 / 3 + 1 + 1 / 2) / 3),
    # Per class 2 TP / (2 TP + FP + FN).
    "f1_macro": (TRUTH, LABELS, (4 / 6 + 2 / 3 + 2 / 3) / 3),
    # (c s - sum p t) / sqrt((s^2 - sum p^2) (s^2 - sum t^2)).
    "mcc": (TRUTH, LABELS, (4 * 6 - 13) / math.sqrt((36 - 14) * (36 - 14))),
    # 1 - sum of squared distances / those expected of independent marginals.
    "quadratic_kappa": (
        TRUTH,
        LABELS,
        1 - (1 + 4) / (sum((a - b) ** 2 for a in TRUTH for b in LABELS) / 6),
    ),
    # Of the four pairs (a one, a zero), three are in the right order.
    "roc_auc": (BINARY, PROBABILITY, 3 / 4),
    # Precision at each one, by falling score: 1 at 0.9, then 2 of 3 at 0.4.
    "average_precision": (BINARY, PROBABILITY, (1 + 2 / 3) / 2),
    "log_loss": (BINARY, PROBABILITY, -(2 * math.log(0.9) + 2 * math.log(0.4)) / 4),
    "brier": (BINARY, PROBABILITY, (0.01 + 0.01 + 0.36 + 0.36) / 4),
    "rmse": (VALUES, GUESSES, math.sqrt((0.25 + 4) / 3)),
    "mae": (VALUES, GUESSES, 2.5 / 3),
    "median_ae": (VALUES, GUESSES, 0.5),
    "mape": (VALUES, GUESSES, (0.5 + 0.5) / 3),
    "r2": (VALUES, GUESSES, 1 - 4.25 / (16 / 9 + 1 / 9 + 25 / 9)),
    "rmsle": (
        VALUES,
        GUESSES,
        math.sqrt((math.log(2 / 2.5) ** 2 + math.log(5 / 3) ** 2) / 3),
    ),
}


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_equals_its_formula(name):
    truth, prediction, expected = EXPECTED[name]
    assert METRICS[name].compute(truth, prediction) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", METRICS)
def test_the_truth_itself_is_at_least_as_good_as_any_other_prediction(name):
    truth, prediction, _ = EXPECTED[name]
    metric = METRICS[name]
    best, other = metric.compute(truth, truth), metric.compute(truth, prediction)
    assert best >= other if metric.direction == "maximize" else best <= other


def test_log_loss_over_classes_reads_one_column_a_class():
    prediction = np.array([[0.7, 0.2, 0.1], [0.2, 0.3, 0.5]])
    value = METRICS["log_loss"].compute(np.array([0, 2]), prediction)
    assert value == pytest.approx(-(math.log(0.7) + math.log(0.5)) / 2)


def test_a_class_that_only_the_submission_has_costs_balanced_accuracy_nothing_more():
    truth, prediction = np.array([0, 0, 1]), np.array([0, 5, 1])
    assert METRICS["balanced_accuracy"].compute(truth, prediction) == pytest.approx(0.75)
