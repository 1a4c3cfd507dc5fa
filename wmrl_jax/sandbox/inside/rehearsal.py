"""A small model of each usual kind, fitted in the supervisor before the first program.

Libraries finish much of their set-up at first use: modules loaded late, readers of thread pools,
compiled expressions. What the supervisor has done once, its forks need not do again.
"""

from __future__ import annotations

import io


def rehearse() -> None:
    """Reads, transforms, fits, predicts and writes; ImportError where a library is missing."""
    import numpy as np
    import pandas as pd
    from sklearn.compose import make_column_transformer
    from sklearn.decomposition import PCA, TruncatedSVD
    from sklearn.ensemble import (
        ExtraTreesClassifier,
        GradientBoostingClassifier,
        HistGradientBoostingClassifier,
        HistGradientBoostingRegressor,
        RandomForestClassifier,
        RandomForestRegressor,
    )
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import Lasso, LinearRegression, LogisticRegression, Ridge
    from sklearn.model_selection import cross_val_score, train_test_split
    from sklearn.naive_bayes import GaussianNB, MultinomialNB
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler
    from sklearn.svm import SVC
    from sklearn.tree import DecisionTreeClassifier

    rows = "".join(
        f"{i},{i % 7 / 7 if i % 5 else ''},{'abc'[i % 3]},w{i % 4} v\n" for i in range(40)
    )
    frame = pd.read_csv(io.StringIO("number,share,kind,text\n" + rows))
    label, target = frame["number"] % 2, frame["number"] * 0.5
    numeric = ["number", "share"]
    columns = make_column_transformer(
        (make_pipeline(SimpleImputer(strategy="median"), StandardScaler()), numeric),
        (OneHotEncoder(handle_unknown="ignore"), ["kind"]),
    )
    make_pipeline(columns, LogisticRegression()).fit(frame, label).predict_proba(frame)
    x = frame[numeric].fillna(0).to_numpy()
    for model in (
        RandomForestClassifier(2), ExtraTreesClassifier(2),
        GradientBoostingClassifier(n_estimators=2), HistGradientBoostingClassifier(max_iter=2),
        KNeighborsClassifier(3), SVC(), GaussianNB(), DecisionTreeClassifier(),
        MLPClassifier((2,), max_iter=2),
    ):  # fmt: skip
        model.fit(x, label).predict(x)
    for model in (LinearRegression(), Ridge(), Lasso(), RandomForestRegressor(2),
                  HistGradientBoostingRegressor(max_iter=2)):  # fmt: skip
        model.fit(x, target).predict(x)
    words = TfidfVectorizer().fit_transform(frame["text"])
    MultinomialNB().fit(words, label)
    TruncatedSVD(2).fit_transform(words)
    PCA(1).fit_transform(x)
    OrdinalEncoder().fit_transform(frame[["kind"]])
    train_test_split(x, label, stratify=label)
    cross_val_score(Ridge(), x, target, cv=2)
    pd.get_dummies(frame["kind"]).astype(float).describe()
    frame.groupby("kind")["number"].mean()
    frame.merge(frame, on="number").to_csv(io.StringIO(), index=False)
    np.log1p(x)
