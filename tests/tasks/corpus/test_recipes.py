from collections import Counter
from random import Random

import pytest

from wmrl_jax.tasks.corpus.recipes import draw_recipe, pick
from wmrl_jax.tasks.corpus.traits import Traits, traits_of
from wmrl_jax.tasks.task import Task


def drawn(traits: Traits, n: int = 300) -> list:
    return [draw_recipe(traits, Random(seed)) for seed in range(n)]


def test_pick_follows_the_weights() -> None:
    counts = Counter(pick(Random(seed), {"often": 3.0, "seldom": 1.0}) for seed in range(2000))
    assert counts["often"] / 2000 == pytest.approx(0.75, abs=0.05)


def test_missing_values_are_filled_unless_the_model_takes_them(suite: dict[str, Task]) -> None:
    bare = [r for r in drawn(traits_of(suite["fertility-2010"])) if r.impute == "none"]
    assert bare and {r.family for r in bare} <= {
        "dummy",
        "tree",
        "forest",
        "extra_trees",
        "hist_boosting",
    }


def test_strings_are_encoded_or_dropped(suite: dict[str, Task]) -> None:
    recipes = drawn(traits_of(suite["fair-affairs"]))
    assert all(r.columns or r.encode != "none" for r in recipes)


def test_probabilities_are_asked_only_of_models_that_have_them(suite: dict[str, Task]) -> None:
    recipes = drawn(traits_of(suite["breast-cancer"]))
    assert not {"ridge", "ridge_cv", "linear_svm"} & {r.family for r in recipes}
    assert 0.05 < sum(r.predict == "predict" for r in recipes) / len(recipes) < 0.25


def test_predictions_that_may_be_negative_are_clipped_where_refused(
    suite: dict[str, Task],
) -> None:
    recipes = drawn(traits_of(suite["randhie-visits"]))
    linear = [r for r in recipes if r.family in ("linear", "ridge", "svm", "boosting", "mlp")]
    assert linear and all(r.clip for r in linear)


def test_ordered_classes_are_sometimes_predicted_by_a_rounded_regressor(
    suite: dict[str, Task],
) -> None:
    rounded = [r for r in drawn(traits_of(suite["anes96-party"])) if r.predict == "round"]
    assert rounded and not any("Classifier" in r.estimator for r in rounded)


def test_text_is_always_vectorised(suite: dict[str, Task]) -> None:
    recipes = drawn(traits_of(suite["names-gender"]))
    assert all("Vectorizer" in r.vectorizer for r in recipes)
    assert any("char" in r.vectorizer for r in recipes)
