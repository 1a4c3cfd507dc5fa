"""Recipes as program text: a short list of tagged lines in the order of a usual script."""

from __future__ import annotations

from typing import NamedTuple

from wmrl_jax.tasks.corpus.recipes import Recipe
from wmrl_jax.tasks.corpus.traits import Traits


class Line(NamedTuple):
    """One line of a program.

    Attributes:
      tag: what the line is for: `import`, `load`, `target`, `features`, `encode`, `impute`,
        `prepare`, `model`, `fit`, `predict`, `fill` or `save`.
      text: the line, without its newline.
    """

    tag: str
    text: str


def render(lines: list[Line]) -> str:
    """The program's text."""
    return "".join(f"{line.text}\n" for line in lines)


def write(recipe: Recipe, traits: Traits) -> list[Line]:
    """The lines of the program that carries out `recipe` on the task of `traits`."""
    body = [
        *_load(recipe),
        *_target(recipe, traits),
        *(_prose(recipe, traits) if recipe.vectorizer else _features(recipe, traits)),
        *_model(recipe),
        *_predict(recipe, traits),
        *_submit(recipe, traits),
    ]
    return [*_imports(recipe, body), *body]


def _imports(recipe: Recipe, body: list[Line]) -> list[Line]:
    text = render(body)
    plain = ["import os"]
    if "np." in text:
        plain.append("import numpy as np")
    plain.append("import pandas as pd")
    if recipe.loader == "path":
        plain.append("from pathlib import Path")
    names: dict[str, list[str]] = {}
    for module, name in sorted({*recipe.imports, *_implied_imports(text)}):
        names.setdefault(module, []).append(name)
    plain += [f"from {module} import {', '.join(used)}" for module, used in names.items()]
    return [Line("import", text) for text in plain]


_IMPLIED = {
    "make_pipeline(": ("sklearn.pipeline", "make_pipeline"),
    "make_column_transformer(": ("sklearn.compose", "make_column_transformer"),
    "OneHotEncoder(": ("sklearn.preprocessing", "OneHotEncoder"),
    "OrdinalEncoder(": ("sklearn.preprocessing", "OrdinalEncoder"),
    "SimpleImputer(": ("sklearn.impute", "SimpleImputer"),
    "cross_val_score(": ("sklearn.model_selection", "cross_val_score"),
}


def _implied_imports(text: str) -> list[tuple[str, str]]:
    return [pair for call, pair in _IMPLIED.items() if call in text]


def _load(recipe: Recipe) -> list[Line]:
    if recipe.loader == "path":
        folder, join = 'Path(os.environ["DATA_DIR"])', ' / "'
    else:
        folder, join = 'os.environ["DATA_DIR"]', ' + "/'
    files = (("train", "train"), ("test", "test"), ("sub", "sample_submission"))
    return [
        Line("load", f"data = {folder}"),
        *(Line("load", f'{var} = pd.read_csv(data{join}{file}.csv")') for var, file in files),
    ]


def _target(recipe: Recipe, traits: Traits) -> list[Line]:
    name = f'"{traits.target}"' if recipe.hard_target else "sub.columns[1]"
    y = "np.log1p(train[target])" if recipe.log_target else "train[target]"
    return [Line("target", f"target = {name}"), Line("target", f"y = {y}")]


def _prose(recipe: Recipe, traits: Traits) -> list[Line]:
    column = f'"{traits.text}"' if recipe.hard_target else f"test.columns[{traits.text_index}]"
    lines = [
        Line("features", f"text = {column}"),
        Line("features", "X, X_test = train[text], test[text]"),
    ]
    if recipe.stepwise:
        lines += [
            Line("prepare", f"vec = {recipe.vectorizer}"),
            Line("prepare", "X = vec.fit_transform(X)"),
            Line("prepare", "X_test = vec.transform(X_test)"),
        ]
    return lines


def _features(recipe: Recipe, traits: Traits) -> list[Line]:
    lines = []
    if recipe.columns:
        spelled = ", ".join(f'"{c}"' for c in recipe.columns)
        lines.append(Line("features", f"features = [{spelled}]"))
        lines.append(Line("features", "X, X_test = train[features], test[features]"))
    else:
        lines.append(Line("features", "X = train.drop(columns=[sub.columns[0], target])"))
        lines.append(Line("features", "X_test = test.drop(columns=[sub.columns[0]])"))
    lines += [Line("encode", text) for text in _ENCODERS[recipe.encode]]
    fill = {"zero": "0", "mean": "X.mean()", "median": "X.median()"}.get(recipe.impute)
    if fill:
        lines.append(Line("impute", f"X, X_test = X.fillna({fill}), X_test.fillna({fill})"))
    if recipe.divide:
        lines.append(Line("prepare", "X, X_test = X / X.max().max(), X_test / X.max().max()"))
    if recipe.stepwise:
        lines += [
            Line("prepare", f"scaler = {recipe.scale}"),
            Line("prepare", "X = scaler.fit_transform(X)"),
            Line("prepare", "X_test = scaler.transform(X_test)"),
        ]
    return lines


_CATS = 'cats = X.select_dtypes(exclude="number").columns'
_ENCODERS = {
    "none": (),
    "numeric": (
        'X = X.select_dtypes("number")',
        "X_test = X_test[X.columns]",
    ),
    "dummies": (
        "X, X_test = pd.get_dummies(X), pd.get_dummies(X_test)",
        "X_test = X_test.reindex(columns=X.columns, fill_value=0)",
    ),
    "ordinal": (
        _CATS,
        'enc = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)',
        "X[cats] = enc.fit_transform(X[cats].astype(str))",
        "X_test[cats] = enc.transform(X_test[cats].astype(str))",
    ),
    "counts": (
        'for c in X.select_dtypes(exclude="number").columns:',
        "    counts = X[c].value_counts()",
        "    X[c], X_test[c] = X[c].map(counts).fillna(0), X_test[c].map(counts).fillna(0)",
    ),
    "means": (
        'for c in X.select_dtypes(exclude="number").columns:',
        "    means = y.groupby(X[c]).mean()",
        "    X[c], X_test[c] = X[c].map(means), X_test[c].map(means).fillna(y.mean())",
    ),
    "onehot": (
        _CATS,
        'onehot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)',
    ),
}


def _model(recipe: Recipe) -> list[Line]:
    steps = []
    lines = []
    if recipe.encode == "onehot":
        rest = "SimpleImputer()" if recipe.impute == "step" else '"passthrough"'
        text = f"prep = make_column_transformer((onehot, cats), remainder={rest})"
        lines.append(Line("encode", text))
        steps.append("prep")
    elif recipe.impute == "step":
        steps.append("SimpleImputer()")
    if recipe.vectorizer and not recipe.stepwise:
        steps.append(recipe.vectorizer)
    if recipe.scale != "none" and not recipe.stepwise:
        steps.append(recipe.scale)
    if recipe.reduce:
        steps.append(recipe.reduce)
    steps.append(recipe.estimator)
    text = f"make_pipeline({', '.join(steps)})" if len(steps) > 1 else steps[0]
    lines.append(Line("model", f"model = {text}"))
    if recipe.score:
        lines.append(Line("score", "print(cross_val_score(model, X, y, cv=3).mean())"))
    lines.append(Line("fit", "model.fit(X, y)"))
    return lines


_PREDICT = {
    "predict": "model.predict(X_test)",
    "round": "model.predict(X_test)",
    "proba_1": "model.predict_proba(X_test)[:, 1]",
    "proba_all": "model.predict_proba(X_test)",
}


def _predict(recipe: Recipe, traits: Traits) -> list[Line]:
    lines = [Line("predict", f"pred = {_PREDICT[recipe.predict]}")]
    if recipe.predict == "round":
        text = f"pred = np.clip(pred.round(), 0, {traits.largest}).astype(int)"
        lines.append(Line("predict", text))
    if recipe.log_target:
        lines.append(Line("predict", "pred = np.expm1(pred)"))
    if recipe.clip:
        lines.append(Line("predict", "pred = np.clip(pred, 0, None)"))
    return lines


def _submit(recipe: Recipe, traits: Traits) -> list[Line]:
    if traits.output == "probabilities":
        fill = "sub[sub.columns[1:]] = pred"
    elif recipe.frame:
        ids = f'"{traits.id_column}"'
        fill = f"sub = pd.DataFrame({{{ids}: test[{ids}], target: pred}})"
    else:
        fill = "sub[target] = pred"
    return [
        Line("fill", fill),
        Line("save", 'sub.to_csv(os.environ["SUBMISSION_PATH"], index=False)'),
    ]
