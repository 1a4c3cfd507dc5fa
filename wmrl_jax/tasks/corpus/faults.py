"""The ways in which programs go wrong, each a local change of a right one.

A fault takes the right program's recipe and lines and returns the wrong program's lines, or None
where it cannot be made (there is nothing to encode, say). What it changes is one visible, avoidable
choice, so that a policy can unlearn it and a world model can learn to see it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import NamedTuple

from wmrl_jax.tasks.corpus.families import FAMILIES
from wmrl_jax.tasks.corpus.recipes import Recipe
from wmrl_jax.tasks.corpus.text import Line, write
from wmrl_jax.tasks.corpus.traits import Traits


class Draft(NamedTuple):
    """A right program that is about to be spoilt."""

    recipe: Recipe
    lines: list[Line]
    traits: Traits
    rng: Random


FaultFn = Callable[[Draft], "list[Line] | None"]


def _substitute(
    draft: Draft, tags: tuple[str, ...], pairs: tuple[tuple[str, str], ...]
) -> list[Line] | None:
    """Replaces, in one line of the given tags, one of the texts that occur there."""
    places = [
        (i, old, new)
        for i, line in enumerate(draft.lines)
        if line.tag in tags
        for old, new in pairs
        if old in line.text
    ]
    if not places:
        return None
    i, old, new = draft.rng.choice(places)
    line = draft.lines[i]
    changed = line._replace(text=line.text.replace(old, new, 1))
    return [*draft.lines[:i], changed, *draft.lines[i + 1 :]]


def _without(draft: Draft, tag: str, text: str = "") -> list[Line] | None:
    """Leaves out one line of the given tag that contains `text`."""
    places = [i for i, line in enumerate(draft.lines) if line.tag == tag and text in line.text]
    if not places:
        return None
    i = draft.rng.choice(places)
    return draft.lines[:i] + draft.lines[i + 1 :]


def missing_import(draft: Draft) -> list[Line] | None:
    """A name is used that was never imported: NameError."""
    return _without(draft, "import")


def wrong_module(draft: Draft) -> list[Line] | None:
    """A class is imported from a module that does not have it: ImportError."""
    moved = (
        ("sklearn.ensemble", "sklearn.tree"),
        ("sklearn.tree", "sklearn.ensemble"),
        ("sklearn.neighbors", "sklearn.cluster"),
        ("sklearn.svm", "sklearn.linear_model"),
        ("sklearn.linear_model", "sklearn.svm"),
        ("sklearn.impute", "sklearn.preprocessing"),
        ("sklearn.compose", "sklearn.pipeline"),
        ("sklearn.preprocessing", "sklearn.pipeline"),
        ("sklearn.pipeline", "sklearn.preprocessing"),
        ("sklearn.feature_extraction.text", "sklearn.text"),
    )
    return _substitute(draft, ("import",), moved)


def wrong_column(draft: Draft) -> list[Line] | None:
    """A column is named that the files lack: KeyError."""
    target = draft.traits.target
    lines = []
    if draft.rng.random() < 0.5:
        wrong = [w for w in ("target", "label", "y", "class") if w != target]
        named = f'target = "{draft.rng.choice(wrong)}"'
        for line in draft.lines:
            whole = line.tag == "target" and line.text.startswith("target = ")
            lines.append(line._replace(text=named) if whole else line)
        return lines
    pairs = (
        ("columns=[sub.columns[0]", 'columns=["Id"'),
        ("text = test.columns[1]", 'text = "content"'),
        ("train[target]", 'train["Target"]'),
    )
    return _substitute(draft, ("features", "target"), pairs)


def wrong_file(draft: Draft) -> list[Line] | None:
    """A file is read that the folder does not have: FileNotFoundError."""
    pairs = (
        ("train.csv", "training.csv"),
        ("train.csv", "data.csv"),
        ("test.csv", "testing.csv"),
        ("sample_submission.csv", "submission.csv"),
        ('data + "/', 'data + "'),
    )
    return _substitute(draft, ("load",), pairs)


_BAD_KEYWORDS = (
    ("n_estimators=", "n_trees="),
    ("max_depth=", "depth="),
    ("n_neighbors=", "k="),
    ("max_iter=", "n_iter="),
    ("alpha=", "C="),
    ("C=", "alpha="),
    ("learning_rate=", "lr="),
    ("hidden_layer_sizes=", "hidden_layers="),
    ("min_samples_leaf=", "min_leaf="),
    ("ngram_range=", "ngrams="),
    ("n_components=", "components="),
    ("sparse_output=", "sparse="),
)


def wrong_keyword(draft: Draft) -> list[Line] | None:
    """A keyword argument that the class does not take: TypeError."""
    pairs = [p for p in _BAD_KEYWORDS if not _touches_inside_word(draft, p[0])]
    return _substitute(draft, ("model", "encode", "prepare"), tuple(pairs))


def _touches_inside_word(draft: Draft, keyword: str) -> bool:
    """Whether `C=` would be found inside a longer keyword."""
    pattern = re.compile(rf"\w{re.escape(keyword)}")
    return any(pattern.search(line.text) for line in draft.lines)


def wrong_option(draft: Draft) -> list[Line] | None:
    """A value that the keyword does not allow: InvalidParameterError."""
    pairs = (
        ('"rbf"', '"gaussian"'),
        ('"linear"', '"lin"'),
        ('"poly"', '"polynomial"'),
        ('"balanced"', '"auto"'),
        ('"distance"', '"weighted"'),
        ('"char_wb"', '"chars"'),
        ('"char"', '"chars"'),
        ("SimpleImputer()", 'SimpleImputer(strategy="avg")'),
        ("n_estimators=10", 'max_features="auto", n_estimators=10'),
        ("min_samples_leaf=5", "min_samples_leaf=0"),
        ("C=1.0", "C=-1.0"),
        ('"absolute_error"', '"mae"'),
        ("cv=3)", 'cv=3, scoring="auc")'),
        ("n_neighbors=5", "n_neighbors=0"),
        ('remainder="passthrough"', 'remainder="keep"'),
        ('handle_unknown="ignore"', 'handle_unknown="skip"'),
    )
    return _substitute(draft, ("model", "encode", "prepare", "score"), pairs)


def no_encoding(draft: Draft) -> list[Line] | None:
    """Strings go into the model as they are: ValueError."""
    recipe, traits = draft.recipe, draft.traits
    if recipe.columns or recipe.family == "dummy":
        return None
    if recipe.vectorizer:
        return write(replace(recipe, vectorizer="", imports=recipe.imports[:1]), traits)
    if not traits.categorical:
        return None
    impute = "step" if recipe.impute in ("mean", "median") else recipe.impute
    return write(replace(recipe, encode="none", impute=impute), traits)


def no_imputation(draft: Draft) -> list[Line] | None:
    """Missing values go into a model that refuses them: ValueError."""
    recipe, traits = draft.recipe, draft.traits
    if not traits.missing_numeric or recipe.impute == "none":
        return None
    if FAMILIES[recipe.family].accepts_nan or set(recipe.columns):
        return None
    return write(replace(recipe, impute="none"), traits)


def dropped_rows(draft: Draft) -> list[Line] | None:
    """Rows with missing values leave the features but not the target: lengths differ."""
    pairs = ((".fillna(0)", ".dropna()"), (".fillna(X.mean())", ".dropna()"))
    if not draft.traits.missing_numeric or draft.recipe.encode in ("counts", "means"):
        return None
    return _substitute(draft, ("impute",), (*pairs, (".fillna(X.median())", ".dropna()")))


def shape(draft: Draft) -> list[Line] | None:
    """Train and test are confused, or an axis is: lengths or columns differ."""
    pairs = (
        ("predict(X_test)", "predict(X)"),
        ("predict_proba(X_test)", "predict_proba(X)"),
        ("[:, 1]", ""),
        ("[:, 1]", "[1]"),
        ("train.drop(columns=[sub.columns[0], target])", "train.drop(target)"),
        ("train.drop(columns=[sub.columns[0], target])", "train.drop([sub.columns[0], target])"),
        ("model.fit(X, y)", "model.fit(X_test, y)"),
        ("model.fit(X, y)", "model.fit(X)"),
        ("train[text]", "train[[text]]"),
        ("X_test = vec.transform", "X_test = vec.fit_transform"),
        ("test.drop(columns=[sub.columns[0]])", "test"),
    )
    return _substitute(draft, ("fit", "predict", "features", "prepare"), pairs)


def undefined_name(draft: Draft) -> list[Line] | None:
    """A variable is used under another name than it was given: NameError."""
    pairs = (
        ("predict(X_test)", "predict(T)"),
        ("model.fit(X, y)", "model.fit(X_train, y)"),
        ("model.fit(X, y)", "model.fit(X, y_train)"),
        ("model.fit(X, y)", "clf.fit(X, y)"),
        ("= pred", "= preds"),
        (": pred}", ": preds}"),
    )
    return _substitute(draft, ("fit", "predict", "fill"), pairs)


def no_fit(draft: Draft) -> list[Line] | None:
    """The model is asked before it is fitted: NotFittedError."""
    return _without(draft, "fit")


def no_probabilities(draft: Draft) -> list[Line] | None:
    """Probabilities are asked of a model that has none: AttributeError."""
    if not draft.traits.output.startswith("probabilit"):
        return None
    rng = draft.rng
    if "probability=True" in draft.recipe.estimator:
        pairs = ((", probability=True", ""), ("probability=True", ""))
        return _substitute(draft, ("model",), pairs)
    estimator, module = rng.choice(
        (
            (f"LinearSVC(C={rng.choice(('0.1', '1.0', '10'))})", "sklearn.svm"),
            (f"RidgeClassifier(alpha={rng.choice(('0.1', '1.0', '10'))})", "sklearn.linear_model"),
        )
    )
    name = estimator.split("(")[0]
    imports = ((module, name), *draft.recipe.imports[1:])
    predict = "proba_all" if draft.traits.output == "probabilities" else "proba_1"
    recipe = replace(
        draft.recipe, family="ridge", estimator=estimator, imports=imports, predict=predict
    )
    if recipe.impute == "none" and draft.traits.missing_numeric:
        recipe = replace(recipe, impute="zero")
    return write(recipe, draft.traits)


def wrong_estimator(draft: Draft) -> list[Line] | None:
    """A classifier learns quantities, or a regressor class names: ValueError."""
    recipe, traits = draft.recipe, draft.traits
    family = FAMILIES[recipe.family]
    old, new = family.name(traits.regression), family.name(not traits.regression)
    if old is None or new is None or recipe.family in ("dummy", "knn", "ridge"):
        return None
    # Whole numbers pass for classes, and numbered classes for quantities.
    if not (recipe.log_target if traits.regression else traits.text_labels):
        return None
    swap = ((old, new),)
    first = _substitute(draft, ("import",), swap)
    return first and _substitute(draft._replace(lines=first), ("model",), swap)


def labels_confused(draft: Draft) -> list[Line] | None:
    """Numbers that are no class are submitted where the metric reads class labels."""
    if draft.traits.output != "label":
        return None
    if draft.recipe.predict == "round":
        return _without(draft, "predict", "round()")
    has_method = FAMILIES[draft.recipe.family].probabilities and draft.recipe.family != "svm"
    if not has_method or "Voting" in draft.recipe.estimator:
        return None
    if draft.recipe.family in ("dummy", "tree", "knn"):
        return None  # their probabilities are often 0 and 1, which are classes of some tasks
    column = draft.rng.choice(("[:, 1]", ".max(axis=1)"))
    pairs = (("predict(X_test)", f"predict_proba(X_test){column}"),)
    return _substitute(draft, ("predict",), pairs)


def no_clip(draft: Draft) -> list[Line] | None:
    """Negative predictions are submitted to a metric that has no value for them."""
    if not draft.traits.refuses_negative:
        return None
    return _without(draft, "predict", "np.clip")


def wrong_header(draft: Draft) -> list[Line] | None:
    """The submission's columns are not those of the sample."""
    names = draft.rng.choice(('"id", "prediction"', '"id", "pred"', '"Id", "target"'))
    key, value = names.split(", ")
    text = f"sub = pd.DataFrame({{{key}: test.iloc[:, 0], {value}: pred}})"
    if draft.traits.output == "probabilities":
        text = "sub = pd.DataFrame(pred)"
    elif (key, value) == (f'"{draft.traits.id_column}"', f'"{draft.traits.target}"'):
        return None
    return [line._replace(text=text) if line.tag == "fill" else line for line in draft.lines]


def wrong_format(draft: Draft) -> list[Line] | None:
    """The file is written in another form than the sample's, so its columns are not found."""
    pairs = (("index=False", "header=False"), ("index=False", 'sep=";"'))
    return _substitute(draft, ("save",), pairs)


def wrong_rows(draft: Draft) -> list[Line] | None:
    """The submission does not have one row for each of the test's."""
    pairs = (("sub.to_csv", "sub.head(50).to_csv"), ("sub.to_csv", "sub.sample(50).to_csv"))
    return _substitute(draft, ("save",), pairs)


def misaligned(draft: Draft) -> list[Line] | None:
    """Predictions are matched by an index that the submission lacks, and become missing."""
    if draft.traits.output == "probabilities":
        return None
    text = "sub[target] = pd.Series(pred, index=test[sub.columns[0]].astype(str))"
    return [line._replace(text=text) if line.tag == "fill" else line for line in draft.lines]


def no_submission(draft: Draft) -> list[Line] | None:
    """Nothing is written, or not where the submission is looked for."""
    text = draft.rng.choice(
        (
            "print(sub.head())",
            "print(pred[:10])",
            'sub.to_csv("predictions.csv", index=False)',
            'sub.to_csv("out.csv", index=False)',
            'sub.to_csv("result.csv", index=False)',
        )
    )
    return [line._replace(text=text) if line.tag == "save" else line for line in draft.lines]


def syntax(draft: Draft) -> list[Line] | None:
    """Python cannot parse the text."""
    pairs = (
        ("columns=[sub.columns[0]", "columns=[sub.columns[0]]"),
        ('.csv")', ".csv)"),
        ("model.fit(X, y)", "model.fit(X, y"),
        ("pred = model.predict", "pred = = model.predict"),
        (".columns:", ".columns"),
        ("    counts", "counts"),
        ("    means", "means"),
        ("make_pipeline(", "make_pipeline(("),
        ("index=False)", "index=False"),
        ('os.environ["DATA_DIR"]', 'os.environ["DATA_DIR]'),
        ("import pandas as pd", "import pandas pd"),
    )
    tags = ("import", "load", "features", "encode", "model", "fit", "predict", "save")
    return _substitute(draft, tags, pairs)


def too_slow(draft: Draft) -> list[Line] | None:
    """An ensemble or a network so large that no limit of time allows it."""
    sizes = {
        "forest": "n_estimators=100000",
        "extra_trees": "n_estimators=100000",
        "boosting": "n_estimators=100000",
        "mlp": "hidden_layer_sizes=(2000, 2000), max_iter=5000, tol=0",
    }
    size = sizes.get(draft.recipe.family)
    if size is None or "Voting" in draft.recipe.estimator:
        return None
    name = draft.recipe.estimator.split("(")[0]
    return write(replace(draft.recipe, estimator=f"{name}({size})"), draft.traits)


def giant_search(draft: Draft) -> list[Line] | None:
    """A grid search over thousands of fits."""
    if draft.recipe.family not in ("forest", "extra_trees", "boosting"):
        return None
    model = next(i for i, line in enumerate(draft.lines) if line.tag == "model")
    load = next(i for i, line in enumerate(draft.lines) if line.tag == "load")
    if "make_pipeline" in draft.lines[model].text or "Voting" in draft.recipe.estimator:
        return None
    grid = '{"n_estimators": range(100, 1000), "max_depth": range(2, 20)}'
    return [
        *draft.lines[:load],
        Line("import", "from sklearn.model_selection import GridSearchCV"),
        *draft.lines[load : model + 1],
        Line("model", f"model = GridSearchCV(model, {grid}, cv=10)"),
        *draft.lines[model + 1 :],
    ]


FAULTS: dict[str, tuple[float, FaultFn]] = {
    "missing_import": (8, missing_import),
    "wrong_module": (4, wrong_module),
    "wrong_column": (8, wrong_column),
    "wrong_file": (4, wrong_file),
    "wrong_keyword": (9, wrong_keyword),
    "wrong_option": (4, wrong_option),
    "no_encoding": (16, no_encoding),
    "no_imputation": (16, no_imputation),
    "dropped_rows": (4, dropped_rows),
    "shape": (9, shape),
    "undefined_name": (5, undefined_name),
    "no_fit": (3, no_fit),
    "no_probabilities": (8, no_probabilities),
    "wrong_estimator": (6, wrong_estimator),
    "labels_confused": (8, labels_confused),
    "no_clip": (12, no_clip),
    "wrong_header": (5, wrong_header),
    "wrong_format": (3, wrong_format),
    "wrong_rows": (2, wrong_rows),
    "misaligned": (3, misaligned),
    "no_submission": (7, no_submission),
    "syntax": (5, syntax),
    "too_slow": (2, too_slow),
    "giant_search": (2, giant_search),
}
"""Each fault's weight and function."""
