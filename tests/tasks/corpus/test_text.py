from dataclasses import replace

from wmrl_jax.tasks.corpus.recipes import Recipe
from wmrl_jax.tasks.corpus.text import render, write
from wmrl_jax.tasks.corpus.traits import traits_of
from wmrl_jax.tasks.task import Task

EXPECTED = """\
import os
import numpy as np
import pandas as pd
from sklearn.impute import SimpleImputer
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
data = os.environ["DATA_DIR"]
train = pd.read_csv(data + "/train.csv")
test = pd.read_csv(data + "/test.csv")
sub = pd.read_csv(data + "/sample_submission.csv")
target = sub.columns[1]
y = np.log1p(train[target])
X = train.drop(columns=[sub.columns[0], target])
X_test = test.drop(columns=[sub.columns[0]])
X = X.select_dtypes("number")
X_test = X_test[X.columns]
model = make_pipeline(SimpleImputer(), StandardScaler(), Ridge(alpha=1.0))
model.fit(X, y)
pred = model.predict(X_test)
pred = np.expm1(pred)
sub[target] = pred
sub.to_csv(os.environ["SUBMISSION_PATH"], index=False)
"""


def test_a_recipe_is_written_as_the_usual_script(suite: dict[str, Task]) -> None:
    recipe = Recipe(
        family="ridge",
        estimator="Ridge(alpha=1.0)",
        imports=(
            ("sklearn.linear_model", "Ridge"),
            ("sklearn.preprocessing", "StandardScaler"),
        ),
        encode="numeric",
        impute="step",
        scale="StandardScaler()",
        log_target=True,
    )
    assert render(write(recipe, traits_of(suite["cars-mpg"]))) == EXPECTED


def test_numpy_is_imported_only_where_it_is_used(suite: dict[str, Task]) -> None:
    recipe = Recipe("dummy", "DummyRegressor()", (("sklearn.dummy", "DummyRegressor"),))
    text = render(write(recipe, traits_of(suite["cars-mpg"])))
    assert "numpy" not in text and "np." not in text


def test_a_vectorizer_can_be_a_step_or_stand_in_lines_of_its_own(suite: dict[str, Task]) -> None:
    recipe = Recipe("ridge", "Ridge()", vectorizer="TfidfVectorizer()")
    stepwise = replace(recipe, stepwise=True)
    traits = traits_of(suite["colour-lightness"])
    step = render(write(recipe, traits))
    lines = render(write(stepwise, traits))
    assert "model = make_pipeline(TfidfVectorizer(), Ridge())\n" in step
    assert "X_test = vec.transform(X_test)\nmodel = Ridge()\n" in lines
