import importlib
import inspect
from random import Random

import pytest

from wmrl_jax.tasks.corpus.families import FAMILIES, draw_options

CLASSES = [
    (name, regression)
    for name, family in FAMILIES.items()
    for regression in (False, True)
    if family.name(regression)
]


@pytest.mark.parametrize(("name", "regression"), CLASSES)
def test_scikit_learn_has_the_class_and_takes_its_options(name: str, regression: bool) -> None:
    family = FAMILIES[name]
    estimator = getattr(importlib.import_module(family.module), str(family.name(regression)))
    extra = family.regressor_options if regression else family.classifier_options
    assert {*family.options, *extra} <= set(inspect.signature(estimator).parameters)


@pytest.mark.parametrize("name", [n for n, r in CLASSES if not r])
def test_a_classifier_has_probabilities_where_its_family_says_so(name: str) -> None:
    family = FAMILIES[name]
    estimator = getattr(importlib.import_module(family.module), str(family.classifier))
    settings = {"probability": True} if name == "svm" else {}
    assert hasattr(estimator(**settings), "predict_proba") == family.probabilities


def test_cheap_options_spell_out_the_smallest_number_of_rounds() -> None:
    family = FAMILIES["boosting"]
    for seed in range(20):
        options = draw_options(family, Random(seed), regression=False, cheap=True)
        assert "n_estimators=20" in options
