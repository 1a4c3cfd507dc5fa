"""Solutions behind a leaderboard: dummies, the corpus's usual programs, and stronger ones.

The stronger ones combine what the corpus seldom or never combines (more trees, blends, joined
vectorisers), so that the top of a leaderboard leaves an agent room to climb.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from wmrl_jax.tasks.corpus.generate import CorpusProgram
from wmrl_jax.tasks.corpus.recipes import Recipe, draw_recipe, imported
from wmrl_jax.tasks.corpus.text import render, write
from wmrl_jax.tasks.corpus.traits import Traits, traits_of

if TYPE_CHECKING:
    from wmrl_jax.tasks.task import Task

STRONG = 0.12
"""Share of strong solutions."""

_TREES = ("HistGradientBoosting", "GradientBoosting", "ExtraTrees", "RandomForest")
_ENSEMBLE = "sklearn.ensemble"


def reference_programs(task: Task, n: int, seed: int) -> list[CorpusProgram]:
    """`n` different programs that all give a valid submission, from dummy to strong."""
    traits = traits_of(task)
    seen: set[str] = set()
    programs: list[CorpusProgram] = []
    rng = Random(f"{task.name}/{seed}/references")
    while len(programs) < n:
        if not programs:
            recipe = _dummy(traits, rng)
        elif rng.random() < STRONG:
            recipe = _strong(traits, rng)
        else:
            recipe = draw_recipe(traits, rng)
        text = render(write(recipe, traits))
        if text not in seen:
            seen.add(text)
            programs.append(CorpusProgram(task.name, text, "right", recipe.summary()))
    return programs


def _dummy(traits: Traits, rng: Random) -> Recipe:
    while True:
        recipe = draw_recipe(traits, rng)
        if recipe.family == "dummy":
            return recipe


def _strong(traits: Traits, rng: Random) -> Recipe:
    """A recipe whose estimator is a strong one for the kind of task."""
    value = traits.regression or (traits.ordinal and rng.random() < 0.6)
    kind = "Regressor" if value else "Classifier"
    members = [_member(traits, kind, rng)]
    if rng.random() < 0.5:
        members += [_member(traits, kind, rng) for _ in range(2)]
    estimator = members[0][0]
    imports = tuple({pair: None for _, pairs in members for pair in pairs})
    if len(members) > 1:
        named = ", ".join(
            f'("{name}", {source})' for name, (source, _) in zip("abc", members, strict=True)
        )
        soft = "" if value else ', voting="soft"'
        estimator = f"Voting{kind}([{named}]{soft})"
        imports += ((_ENSEMBLE, f"Voting{kind}"),)
    predict = {"number": "predict", "probability": "proba_1", "probabilities": "proba_all"}
    recipe = Recipe(
        family="forest",
        estimator=estimator,
        imports=imports,
        hard_target=traits.output == "probabilities",
        encode=_encode(traits, rng),
        impute="step" if traits.missing_numeric else "none",
        predict="round" if value and traits.ordinal else predict.get(traits.output, "predict"),
        log_target=traits.regression and traits.non_negative and rng.random() < 0.5,
        clip=traits.refuses_negative,
    )
    if traits.kind != "text":
        return recipe
    union = _union(traits, rng)
    return replace(
        recipe,
        vectorizer=union,
        imports=(
            *recipe.imports,
            ("sklearn.pipeline", "make_union"),
            ("sklearn.feature_extraction.text", "TfidfVectorizer"),
        ),
    )


def _encode(traits: Traits, rng: Random) -> str:
    if traits.kind != "tabular" or not traits.categorical:
        return "none"
    choices = ["onehot", "ordinal", "dummies", "counts"]
    return rng.choice([*choices, "means"] if traits.regression else choices)


def _union(traits: Traits, rng: Random) -> str:
    longest = rng.choice((3, 4, 5))
    char = f'TfidfVectorizer(analyzer="char_wb", ngram_range=(1, {longest}), sublinear_tf=True)'
    if traits.single_words:
        other = 'TfidfVectorizer(analyzer="char", ngram_range=(1, 3))'
    else:
        other = f"TfidfVectorizer(ngram_range=(1, {rng.choice((1, 2))}), sublinear_tf=True)"
    return f"make_union({char}, {other})"


def _member(traits: Traits, kind: str, rng: Random) -> tuple[str, tuple[tuple[str, str], ...]]:
    """One strong estimator as source text, with the imports that it needs."""
    value = kind == "Regressor"
    weighted = not value and traits.output == "label" and rng.random() < 0.6
    balanced = ', class_weight="balanced"' if weighted else ""
    if traits.kind == "text":
        return _text_member(value, balanced, rng)
    trees = _TREES if traits.kind == "tabular" and traits.classes < 6 else _TREES[2:]
    name = rng.choice((*trees, "SVM", "SVM", "Linear"))
    if name == "HistGradientBoosting":
        rounds, rate = rng.choice((("100", "0.05"), ("200", "0.03"), ("60", "0.1")))
        leaves = rng.choice(("6", "10"))
        source = f"{name}{kind}(max_iter={rounds}, learning_rate={rate}, max_leaf_nodes={leaves})"
        return source, imported(_ENSEMBLE, source)
    if name == "GradientBoosting":
        rounds, rate = rng.choice((("150", "0.05"), ("250", "0.03"), ("100", "0.1")))
        source = (
            f"{name}{kind}(n_estimators={rounds}, learning_rate={rate}, "
            f"max_depth={rng.choice('23')}, subsample=0.7, max_features=0.5)"
        )
        return source, imported(_ENSEMBLE, source)
    if name in _TREES:
        leaf, share = rng.choice("123"), rng.choice(("0.3", "0.5", '"sqrt"'))
        source = (
            f"{name}{kind}(n_estimators=200, min_samples_leaf={leaf}, "
            f"max_features={share}{balanced})"
        )
        return source, imported(_ENSEMBLE, source)
    scaler = rng.choice(("StandardScaler()", "StandardScaler()", "QuantileTransformer()"))
    if traits.kind == "image":
        scaler = "MinMaxScaler()"
    scaled = (*imported("sklearn.preprocessing", scaler), ("sklearn.pipeline", "make_pipeline"))
    if name == "SVM":
        strength = rng.choice(("1.0", "3", "10", "30"))
        inner = f"SVR(C={strength})" if value else f"SVC(C={strength}, probability=True{balanced})"
        module = "sklearn.svm"
    elif value:
        inner, module = rng.choice(("RidgeCV()", "LassoCV()")), "sklearn.linear_model"
    else:
        strength = rng.choice(("0.3", "1.0", "3"))
        inner = f"LogisticRegression(C={strength}, max_iter=2000{balanced})"
        module = "sklearn.linear_model"
    return f"make_pipeline({scaler}, {inner})", (*scaled, *imported(module, inner))


def _text_member(
    value: bool, balanced: str, rng: Random
) -> tuple[str, tuple[tuple[str, str], ...]]:
    strength = rng.choice(("1.0", "3", "10"))
    if value:
        weak = rng.choice(("0.3", "1.0"))
        choices = (
            (f"SVR(C={strength}0)", "sklearn.svm"),
            (f"Ridge(alpha={weak})", "sklearn.linear_model"),
        )
    else:
        choices = (
            (f"LogisticRegression(C={strength}, max_iter=1000{balanced})", "sklearn.linear_model"),
            (f"LogisticRegression(C={strength}0, max_iter=1000{balanced})", "sklearn.linear_model"),
            (f"MultinomialNB(alpha={rng.choice(('0.1', '0.3'))})", "sklearn.naive_bayes"),
        )
    source, module = rng.choice(choices)
    return source, imported(module, source)
