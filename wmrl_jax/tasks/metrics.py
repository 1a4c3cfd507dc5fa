"""The metrics that tasks are graded by, by name; from scikit-learn where it has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, cast

import numpy as np
from sklearn import metrics as skm

Direction = Literal["maximize", "minimize"]
Predicts = Literal["label", "probability", "value"]
MetricFn = Callable[[np.ndarray, np.ndarray], float]
"""(truth, prediction) -> metric value; what the arrays hold is said by `Metric.predicts`."""


class Metric(NamedTuple):
    """A metric and what a submission must hold for it.

    Attributes:
      direction: whether a higher or a lower value is better.
      predicts: `label`: truth and prediction are class indices, int [n]. `probability`: truth is
        int [n], prediction is [n] (binary, of class 1) or [n, K]. `value`: both are float [n].
      compute: the function.
      nonnegative: true where predictions below zero have no metric value.
    """

    direction: Direction
    predicts: Predicts
    compute: MetricFn
    nonnegative: bool = False


def _log_loss(truth: np.ndarray, prediction: np.ndarray) -> float:
    classes = 2 if prediction.ndim == 1 else prediction.shape[1]
    return skm.log_loss(truth, prediction, labels=np.arange(classes))


def _f1_macro(truth: np.ndarray, prediction: np.ndarray) -> float:
    return skm.f1_score(truth, prediction, average="macro", zero_division=cast(str, 0.0))


def _balanced_accuracy(truth: np.ndarray, prediction: np.ndarray) -> float:
    # Equal to skm.balanced_accuracy_score, which warns of every class that only the submission has.
    return skm.recall_score(truth, prediction, labels=np.unique(truth), average="macro")


def _quadratic_kappa(truth: np.ndarray, prediction: np.ndarray) -> float:
    labels = np.arange(max(truth.max(), prediction.max()) + 1)
    return skm.cohen_kappa_score(truth, prediction, labels=labels, weights="quadratic")


METRICS: dict[str, Metric] = {
    "accuracy": Metric("maximize", "label", skm.accuracy_score),
    "balanced_accuracy": Metric("maximize", "label", _balanced_accuracy),
    "f1_macro": Metric("maximize", "label", _f1_macro),
    "mcc": Metric("maximize", "label", skm.matthews_corrcoef),
    "quadratic_kappa": Metric("maximize", "label", _quadratic_kappa),
    "roc_auc": Metric("maximize", "probability", skm.roc_auc_score),
    "average_precision": Metric("maximize", "probability", skm.average_precision_score),
    "log_loss": Metric("minimize", "probability", _log_loss),
    "brier": Metric("minimize", "probability", skm.brier_score_loss),
    "rmse": Metric("minimize", "value", skm.root_mean_squared_error),
    "mae": Metric("minimize", "value", skm.mean_absolute_error),
    "median_ae": Metric("minimize", "value", skm.median_absolute_error),
    "mape": Metric("minimize", "value", skm.mean_absolute_percentage_error),
    "r2": Metric("maximize", "value", skm.r2_score),
    "rmsle": Metric("minimize", "value", skm.root_mean_squared_log_error, nonnegative=True),
}
