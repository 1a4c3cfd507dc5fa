"""The decisions that make up a program, and chance draws of decisions that fit a task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import TypeVar

from wmrl_jax.tasks.corpus.families import FAMILIES, Family, draw_options
from wmrl_jax.tasks.corpus.traits import Traits

_T = TypeVar("_T")


@dataclass(frozen=True)
class Recipe:
    """One program's decisions; `write` turns them into text.

    Attributes:
      family: key of `FAMILIES`; of a voting ensemble, its most demanding member.
      estimator: the estimator as source text.
      imports: (module, name) pairs that the estimator and the steps need.
      loader: `plus` or `path`, how files are named.
      hard_target: the target's name is spelled out instead of read from the sample submission.
      columns: feature columns spelled out; empty for all.
      encode: `none`, `numeric` (drops the others), `dummies`, `ordinal`, `counts`, `means` or
        `onehot`.
      impute: `none`, `zero`, `mean`, `median`, or `step` (inside the pipeline).
      scale: `none`, or the scaler as source text.
      stepwise: scale in lines of its own instead of inside the pipeline.
      reduce: a step as source text, such as `PCA(n_components=5)`; empty for none.
      vectorizer: the text vectoriser as source text; empty for a task without prose.
      divide: divide pixels by their largest value.
      log_target: learn log1p of the target.
      predict: `predict`, `proba_1`, `proba_all`, or `round` (a regressor's value as a label).
      clip: negative predictions become 0.
      frame: the submission is built as a new frame instead of filled into the sample.
      score: print a cross-validated score first.
    """

    family: str
    estimator: str
    imports: tuple[tuple[str, str], ...] = ()
    loader: str = "plus"
    hard_target: bool = False
    columns: tuple[str, ...] = ()
    encode: str = "none"
    impute: str = "none"
    scale: str = "none"
    stepwise: bool = False
    reduce: str = ""
    vectorizer: str = ""
    divide: bool = False
    log_target: bool = False
    predict: str = "predict"
    clip: bool = False
    frame: bool = False
    score: bool = False

    def summary(self) -> str:
        """The decisions in one line."""
        parts = [self.estimator, self.encode, self.impute, self.scale]
        parts += [p for p in (self.vectorizer, self.reduce) if p]
        parts += ["log1p"] * self.log_target + [self.predict]
        return " | ".join(parts)


SCALERS = {
    "StandardScaler()": 0.6,
    "MinMaxScaler()": 0.2,
    "RobustScaler()": 0.1,
    "QuantileTransformer()": 0.1,
}


def pick(rng: Random, weights: dict[_T, float]) -> _T:
    """One key, with chance in proportion to its weight."""
    return rng.choices(list(weights), list(weights.values()))[0]


def imported(module: str, source: str) -> tuple[tuple[str, str], ...]:
    """The import that a step such as `PCA(n_components=5)` needs."""
    return ((module, source.split("(")[0]),)


def draw_recipe(traits: Traits, rng: Random) -> Recipe:
    """Decisions of a program that runs on the task and submits what its metric reads."""
    rounded = traits.ordinal and rng.random() < 0.25
    name, estimator, imports = _draw_estimator(traits, rng, traits.regression or rounded)
    family = FAMILIES[name]
    encode = _draw_encoding(traits, rng)
    recipe = Recipe(
        family=name,
        estimator=estimator,
        imports=imports,
        loader=pick(rng, {"plus": 0.75, "path": 0.25}),
        hard_target=rng.random() < 0.2 or traits.output == "probabilities",
        encode=encode,
        impute=_draw_imputation(traits, family, encode, rng),
        log_target=traits.regression and traits.non_negative and rng.random() < 0.3,
        clip=_draw_clip(traits, name, rng),
        predict="round" if rounded else _draw_prediction(traits, rng),
        score=rng.random() < 0.06,
        frame=traits.output != "probabilities" and rng.random() < 0.2,
    )
    if traits.kind == "text":
        return _with_vectorizer(recipe, traits, rng)
    return _with_preparation(recipe, traits, family, rng)


VOTING = 0.06
"""Share of programs whose estimator is a vote of two."""


def _draw_estimator(
    traits: Traits, rng: Random, regression: bool
) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """Family, source text and imports of one estimator, or of a vote of two."""
    name = _draw_family(traits, rng, regression=regression)
    source, pair = _draw_single(name, traits, rng, regression)
    if name == "dummy" or rng.random() > VOTING:
        return name, source, (pair,)
    second = _draw_family(traits, rng, regression=regression)
    second_source, second_pair = _draw_single(second, traits, rng, regression)
    vote = "VotingRegressor" if regression else "VotingClassifier"
    soft = ', voting="soft"' if traits.output.startswith("probabilit") else ""
    imports = (pair, second_pair, ("sklearn.ensemble", vote))
    # A vote is as demanding as its most demanding member.
    name, second = sorted((name, second), key=lambda n: (FAMILIES[n].accepts_nan, n in _AVERAGING))
    return name, f'{vote}([("a", {source}), ("b", {second_source})]{soft})', imports


def _draw_single(
    name: str, traits: Traits, rng: Random, regression: bool
) -> tuple[str, tuple[str, str]]:
    family = FAMILIES[name]
    cheap = traits.classes > 2 or traits.kind != "tabular"
    options = draw_options(family, rng, regression=regression, cheap=cheap)
    if name == "svm" and traits.output.startswith("probabilit"):
        options += ("probability=True",)
    if name == "linear_svm" or {'kernel="linear"', 'kernel="poly"'} & set(options):
        options += ("max_iter=2000",)  # unscaled features can keep these from ever converging
    class_name = family.name(regression)
    assert class_name is not None
    return f"{class_name}({', '.join(options)})", (family.module, class_name)


def _draw_family(traits: Traits, rng: Random, *, regression: bool) -> str:
    weights = {}
    for name, family in FAMILIES.items():
        if family.name(regression) is None:
            continue
        if traits.output.startswith("probabilit") and not family.probabilities:
            continue
        if name == "multinomial_bayes" and traits.kind == "tabular":
            continue
        if traits.kind == "text" and not _suits_text(name, family, traits, regression):
            continue
        if traits.kind == "image" and family.per_class:
            continue
        weights[name] = family.weight
    return pick(rng, weights)


def _draw_encoding(traits: Traits, rng: Random) -> str:
    if traits.kind != "tabular":
        return "none"
    if not traits.categorical:
        return pick(rng, {"none": 0.8, "numeric": 0.1, "dummies": 0.1})
    weights = {"dummies": 0.35, "ordinal": 0.15, "counts": 0.12, "onehot": 0.18}
    if traits.numeric:
        weights["numeric"] = 0.2
    if traits.regression:
        weights["means"] = 0.12
    return pick(rng, weights)


def _draw_imputation(traits: Traits, family: Family, encode: str, rng: Random) -> str:
    if traits.kind != "tabular":
        return "none"
    weights = {"zero": 0.2, "mean": 0.2, "median": 0.3, "step": 0.3}
    if not traits.missing_numeric:
        weights = {"none": 0.8, "zero": 0.05, "median": 0.1, "step": 0.05}
    elif family.accepts_nan:
        weights["none"] = 0.7
    if encode == "onehot":
        weights = {k: v for k, v in weights.items() if k in ("none", "step")}
    return pick(rng, weights)


def _suits_text(name: str, family: Family, traits: Traits, regression: bool) -> bool:
    """Leaves out what cannot read sparse counts, or is slow over thousands of them."""
    slow = name == "forest" if regression else name == "svm" and traits.output != "label"
    return (family.likes_text or name in ("dummy", "tree")) and not slow


_AVERAGING = ("dummy", "knn", "tree", "forest", "extra_trees")
"""Families whose predictions stay between the smallest and the largest target."""


def _draw_clip(traits: Traits, name: str, rng: Random) -> bool:
    if traits.refuses_negative and name not in _AVERAGING:
        return True
    return traits.regression and traits.non_negative and rng.random() < 0.15


def _draw_prediction(traits: Traits, rng: Random) -> str:
    if traits.output == "probability":
        # Hard labels run and score: the quiet mistake of a metric that reads probabilities.
        hard = not traits.text_labels and rng.random() < 0.15
        return "predict" if hard else "proba_1"
    return {"number": "predict", "label": "predict", "probabilities": "proba_all"}[traits.output]


_WORD = (
    "",
    "max_features=1000",
    "binary=True",
    "min_df=2",
    "min_df=5",
    "max_features=100",
    'stop_words="english"',
    "ngram_range=(1, 2)",
    "ngram_range=(1, 2), min_df=2",
)
_CHAR = (
    "ngram_range=(1, 1)",
    "ngram_range=(1, 2)",
    "ngram_range=(1, 3)",
    "ngram_range=(2, 4)",
    "ngram_range=(2, 4), min_df=2",
)


def _with_vectorizer(recipe: Recipe, traits: Traits, rng: Random) -> Recipe:
    name = rng.choice(("CountVectorizer", "TfidfVectorizer"))
    if rng.random() < (0.3 if traits.single_words else 0.6):
        options = rng.choice(_WORD[:2] if traits.single_words else _WORD)
    else:
        analyzer = rng.choice(("char", "char_wb"))
        options = f'analyzer="{analyzer}", {rng.choice(_CHAR)}'
    if name == "TfidfVectorizer" and rng.random() < 0.2:
        options = ", ".join(part for part in (options, "sublinear_tf=True") if part)
    vectorizer = f"{name}({options})"
    return replace(
        recipe,
        vectorizer=vectorizer,
        imports=recipe.imports + imported("sklearn.feature_extraction.text", vectorizer),
        stepwise=rng.random() < 0.4,
    )


def _with_preparation(recipe: Recipe, traits: Traits, family: Family, rng: Random) -> Recipe:
    """Adds columns, scaling and reduction to a recipe over a table of features."""
    columns: tuple[str, ...] = ()
    if traits.kind == "tabular" and len(traits.numeric) >= 3 and rng.random() < 0.12:
        count = rng.randint(2, min(4, len(traits.numeric)))
        chosen = set(rng.sample(traits.numeric, count))
        columns = tuple(c for c in traits.numeric if c in chosen)
        encode = "none"
        impute = "step" if recipe.impute == "none" and traits.missing_numeric else recipe.impute
        recipe = replace(recipe, columns=columns, encode=encode, impute=impute)
    scale = "none"
    if rng.random() < (0.6 if family.likes_scaling else 0.15):
        scale = pick(rng, SCALERS)
    if recipe.family == "multinomial_bayes":
        scale = "none"
    reduce = ""
    imports = recipe.imports
    width = len(columns or traits.numeric)
    if rng.random() < (0.3 if traits.kind == "image" else 0.15) and width > 5:
        reduce, module = _draw_reduction(recipe, traits, width, rng)
        if reduce:
            imports += imported(module, reduce)
            if "f_regression" in reduce:
                imports += ((module, "f_regression"),)
    if scale != "none":
        imports += imported("sklearn.preprocessing", scale)
    # Lines of its own cannot come before the pipeline's first steps.
    is_plain = recipe.impute != "step" and recipe.encode != "onehot"
    return replace(
        recipe,
        columns=columns,
        scale=scale,
        stepwise=scale != "none" and is_plain and rng.random() < 0.35,
        reduce=reduce,
        imports=imports,
        divide=traits.kind == "image" and rng.random() < 0.4,
    )


def _draw_reduction(recipe: Recipe, traits: Traits, width: int, rng: Random) -> tuple[str, str]:
    if recipe.family == "multinomial_bayes" or (recipe.impute == "none" and traits.missing_numeric):
        return "", ""
    sizes = [n for n in (2, 5, 10, 20, 30) if n < width]
    kind = pick(rng, {"pca": 0.5, "best": 0.35, "poly": 0.15 if width <= 12 else 0.0})
    if kind == "pca":
        return f"PCA(n_components={rng.choice(sizes)})", "sklearn.decomposition"
    if kind == "best":
        by = "f_regression, " if traits.regression else ""
        return f"SelectKBest({by}k={rng.choice(sizes)})", "sklearn.feature_selection"
    return "PolynomialFeatures(2)", "sklearn.preprocessing"
