"""The model families that programs choose from, with hyperparameters from poor to good."""

from __future__ import annotations

from random import Random
from typing import NamedTuple


class Family(NamedTuple):
    """One kind of estimator.

    Attributes:
      module: where scikit-learn keeps it.
      classifier: class name for classification, else None.
      regressor: class name for regression, else None.
      options: keyword -> the values that programs give it, as source text.
      weight: how often it is chosen, relative to the others.
      accepts_nan: fits with missing values.
      probabilities: the classifier has `predict_proba`.
      likes_scaling: much better on scaled features.
      likes_text: suits the sparse counts of a text vectoriser.
      per_class: cost grows with classes times features, so images use fewer rounds.
      keep: chance of spelling each option out.
      classifier_options: further options of the classifier alone, seldom spelled out.
      regressor_options: further options of the regressor alone, seldom spelled out.
    """

    module: str
    classifier: str | None
    regressor: str | None
    options: dict[str, tuple[str, ...]]
    weight: float
    accepts_nan: bool = False
    probabilities: bool = True
    likes_scaling: bool = False
    likes_text: bool = False
    per_class: bool = False
    keep: float = 0.6
    classifier_options: dict[str, tuple[str, ...]] = {}
    regressor_options: dict[str, tuple[str, ...]] = {}

    def name(self, regression: bool) -> str | None:
        """Class name for the kind of target."""
        return self.regressor if regression else self.classifier


_FOREST = {
    "n_estimators": ("10", "50", "100", "200"),
    "max_depth": ("2", "4", "8", "16"),
    "min_samples_leaf": ("2", "5", "20"),
}
_BALANCED = {"class_weight": ('"balanced"',)}
_LOSSES = {"loss": ('"absolute_error"',)}

FAMILIES: dict[str, Family] = {
    "dummy": Family(
        "sklearn.dummy", "DummyClassifier", "DummyRegressor", {}, 0.4, accepts_nan=True
    ),
    "linear": Family("sklearn.linear_model", None, "LinearRegression", {}, 1.0, likes_text=True),
    "ridge": Family(
        "sklearn.linear_model",
        "RidgeClassifier",
        "Ridge",
        {"alpha": ("0.1", "1.0", "10", "100")},
        1.0,
        probabilities=False,
        likes_scaling=True,
        likes_text=True,
        keep=0.8,
    ),
    "ridge_cv": Family(
        "sklearn.linear_model",
        "RidgeClassifierCV",
        "RidgeCV",
        {},
        0.4,
        probabilities=False,
        likes_scaling=True,
    ),
    "lasso": Family(
        "sklearn.linear_model",
        None,
        "Lasso",
        {"alpha": ("0.001", "0.01", "0.1", "1.0")},
        0.7,
        likes_scaling=True,
        keep=0.8,
    ),
    "logistic": Family(
        "sklearn.linear_model",
        "LogisticRegression",
        None,
        {
            "C": ("0.001", "0.01", "0.1", "1.0", "10"),
            "max_iter": ("200", "500"),
        },
        1.6,
        likes_scaling=True,
        likes_text=True,
        classifier_options=_BALANCED,
    ),
    "knn": Family(
        "sklearn.neighbors",
        "KNeighborsClassifier",
        "KNeighborsRegressor",
        {"n_neighbors": ("1", "3", "5", "10", "25", "100"), "weights": ('"distance"',)},
        1.4,
        likes_scaling=True,
        likes_text=True,
    ),
    "tree": Family(
        "sklearn.tree",
        "DecisionTreeClassifier",
        "DecisionTreeRegressor",
        {"max_depth": ("1", "2", "3", "5", "8"), "min_samples_leaf": ("5", "20")},
        1.2,
        accepts_nan=True,
        classifier_options=_BALANCED,
    ),
    "forest": Family(
        "sklearn.ensemble",
        "RandomForestClassifier",
        "RandomForestRegressor",
        _FOREST,
        1.6,
        accepts_nan=True,
        likes_text=True,
        classifier_options=_BALANCED,
    ),
    "extra_trees": Family(
        "sklearn.ensemble",
        "ExtraTreesClassifier",
        "ExtraTreesRegressor",
        _FOREST,
        1.0,
        accepts_nan=True,
        classifier_options=_BALANCED,
    ),
    "boosting": Family(
        "sklearn.ensemble",
        "GradientBoostingClassifier",
        "GradientBoostingRegressor",
        {
            "n_estimators": ("20", "50", "100"),
            "learning_rate": ("0.01", "0.1", "0.3"),
            "max_depth": ("1", "2", "4"),
        },
        1.1,
        per_class=True,
        regressor_options=_LOSSES,
    ),
    "hist_boosting": Family(
        "sklearn.ensemble",
        "HistGradientBoostingClassifier",
        "HistGradientBoostingRegressor",
        {
            "max_iter": ("20", "50", "100"),
            "learning_rate": ("0.01", "0.05", "0.2"),
            "max_leaf_nodes": ("4", "8", "16"),
        },
        1.2,
        accepts_nan=True,
        per_class=True,
        classifier_options=_BALANCED,
        regressor_options=_LOSSES,
    ),
    "svm": Family(
        "sklearn.svm",
        "SVC",
        "SVR",
        {"kernel": ('"linear"', '"poly"', '"rbf"'), "C": ("0.01", "0.1", "1.0", "10")},
        1.2,
        likes_scaling=True,
        likes_text=True,
        classifier_options=_BALANCED,
    ),
    "linear_svm": Family(
        "sklearn.svm",
        "LinearSVC",
        "LinearSVR",
        {"C": ("0.01", "0.1", "1.0", "10")},
        0.6,
        probabilities=False,
        likes_scaling=True,
        likes_text=True,
        classifier_options=_BALANCED,
    ),
    "gaussian_bayes": Family("sklearn.naive_bayes", "GaussianNB", None, {}, 0.7),
    "multinomial_bayes": Family(
        "sklearn.naive_bayes",
        "MultinomialNB",
        None,
        {"alpha": ("0.01", "0.1", "1.0", "10")},
        1.2,
        likes_text=True,
    ),
    "discriminant": Family(
        "sklearn.discriminant_analysis", "LinearDiscriminantAnalysis", None, {}, 0.8
    ),
    "mlp": Family(
        "sklearn.neural_network",
        "MLPClassifier",
        "MLPRegressor",
        {"hidden_layer_sizes": ("8", "32", "(64, 32)"), "max_iter": ("20", "50", "100")},
        0.7,
        likes_scaling=True,
        keep=0.9,
    ),
}
"""Every family by the name that recipes use."""


_EXTRA_KEEP = 0.25


def draw_options(
    family: Family, rng: Random, *, regression: bool, cheap: bool = False
) -> tuple[str, ...]:
    """Keyword arguments as source text, in the family's order.

    Args:
      family: whose options.
      rng: source of chance.
      regression: of the regressor, not of the classifier.
      cheap: spell out the number of boosting rounds, and keep it small.
    """
    chosen = []
    for keyword, values in family.options.items():
        rounds = family.per_class and keyword in ("n_estimators", "max_iter")
        if cheap and rounds:
            chosen.append(f"{keyword}={values[0]}")
        elif rng.random() < family.keep:
            chosen.append(f"{keyword}={rng.choice(values)}")
    extra = family.regressor_options if regression else family.classifier_options
    for keyword, values in extra.items():
        if rng.random() < _EXTRA_KEEP:
            chosen.append(f"{keyword}={rng.choice(values)}")
    return tuple(chosen)
