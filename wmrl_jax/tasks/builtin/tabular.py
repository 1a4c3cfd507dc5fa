"""The built-in tabular tasks."""

from __future__ import annotations

import json
from typing import Any, cast

import pandas as pd

from wmrl_jax.tasks.builtin.source import TaskSource, package_file


def _statsmodels(name: str) -> pd.DataFrame:
    return pd.read_csv(package_file("statsmodels.datasets", name, f"{name}.csv"))


def _fair() -> pd.DataFrame:
    jobs = {1: "student", 2: "farming", 3: "clerical", 4: "teaching", 5: "managerial", 6: "expert"}
    frame = _statsmodels("fair")
    for column in ("occupation", "occupation_husb"):
        frame[column] = [jobs[code] for code in frame[column]]
    frame["affair"] = (frame.pop("affairs") > 0).astype(int)
    return frame


def _anes96() -> pd.DataFrame:
    path = package_file("statsmodels.datasets", "anes96", "anes96.csv")
    frame = pd.read_csv(path, sep="\t", quotechar="'")
    frame["vote"] = ["Dole" if vote else "Clinton" for vote in frame["vote"]]
    return frame.rename(columns={"PID": "party"})


def _randhie() -> pd.DataFrame:
    frame = _statsmodels("randhie")
    health = frame[["hlthg", "hlthf", "hlthp"]]
    frame["health"] = "excellent"
    for column, word in (("hlthg", "good"), ("hlthf", "fair"), ("hlthp", "poor")):
        frame.loc[health[column] == 1, "health"] = word
    return frame.drop(columns=list(health)).rename(columns={"mdvis": "visits"})


def _grunfeld() -> pd.DataFrame:
    return _statsmodels("grunfeld")


def _fertility() -> pd.DataFrame:
    frame = _statsmodels("fertility")
    years = {str(year): f"y{year}" for year in range(1960, 1986)}
    frame = frame.rename(columns={**years, "2010": "fertility_2010"})
    frame = frame.dropna(subset=["fertility_2010"])
    return cast(pd.DataFrame, frame[[*years.values(), "fertility_2010"]])


def _seattle_weather() -> pd.DataFrame:
    frame = pd.read_csv(package_file("vega_datasets", "_data", "seattle-weather.csv"))
    frame["month"] = pd.to_datetime(frame.pop("date")).dt.month
    return frame


def _cars() -> pd.DataFrame:
    path = package_file("vega_datasets", "_data", "cars.json")
    frame = pd.DataFrame(json.loads(path.read_text(encoding="utf-8")))
    frame.columns = [c.lower() for c in frame.columns]
    frame = frame.rename(columns={"miles_per_gallon": "mpg", "weight_in_lbs": "weight"})
    frame["year"] = [int(date[:4]) for date in frame["year"]]
    return frame.dropna(subset=["mpg"])


def _breast_cancer() -> pd.DataFrame:
    from sklearn.datasets import load_breast_cancer

    frame = cast(Any, load_breast_cancer(as_frame=True)).frame
    frame.columns = [c.replace(" ", "_") for c in frame.columns]
    return frame.rename(columns={"target": "benign"})


def _diabetes() -> pd.DataFrame:
    from sklearn.datasets import load_diabetes

    frame = cast(Any, load_diabetes(as_frame=True, scaled=False)).frame
    return frame.rename(columns={"target": "progress"})


def _penguins() -> pd.DataFrame:
    frame = pd.read_csv(package_file("palmerpenguins", "data", "penguins-raw.csv"))
    names = {
        "Species": "species",
        "Island": "island",
        "Clutch Completion": "clutch",
        "Culmen Length (mm)": "culmen_length",
        "Culmen Depth (mm)": "culmen_depth",
        "Flipper Length (mm)": "flipper_length",
        "Body Mass (g)": "body_mass",
        "Delta 15 N (o/oo)": "delta_15_n",
        "Delta 13 C (o/oo)": "delta_13_c",
        "Sex": "male",
    }
    frame = frame.rename(columns=names).dropna(subset=["male"])
    frame = cast(pd.DataFrame, frame[list(names.values())])
    male = [int(sex.lower() == "male") for sex in frame["male"]]
    return frame.assign(species=[name.split()[0] for name in frame["species"]], male=male)


TASKS: tuple[TaskSource, ...] = (
    TaskSource(
        "fair-affairs",
        "extramarital affairs",
        "Redbook magazine asked married women in 1974 about themselves and their marriage. Predict"
        " the probability that a woman had an extramarital affair. A third of them had.",
        "roc_auc",
        "tabular",
        "train",
        "affair",
        1200,
        1000,
        "statsmodels, data set fair (Fair 1978, A Theory of Extramarital Affairs)",
        "included in statsmodels with permission of the author",
        _fair,
    ),
    TaskSource(
        "anes96-party",
        "party identification",
        "American National Election Study of 1996: news habits, self-placement, placement of the"
        " candidates, age, education, income and vote. Predict party identification on the ordered"
        " scale from 0 (strong Democrat) to 6 (strong Republican).",
        "quadratic_kappa",
        "tabular",
        "train",
        "party",
        560,
        384,
        "statsmodels, data set anes96 (American National Election Study 1996)",
        "public domain",
        _anes96,
    ),
    TaskSource(
        "randhie-visits",
        "doctor visits",
        "RAND Health Insurance Experiment: the terms of a person's insurance and state of health."
        " Predict the number of outpatient visits to a doctor in the year; many people have none,"
        " a few have dozens.",
        "rmsle",
        "tabular",
        "train",
        "visits",
        1400,
        1000,
        "statsmodels, data set randhie (RAND Health Insurance Experiment, 1974-1982)",
        "public domain",
        _randhie,
    ),
    TaskSource(
        "seattle-weather",
        "weather of a day",
        "Daily observations in Seattle from 2012 to 2015. Predict the kind of weather of a day:"
        " drizzle, fog, rain, snow or sun. Snow, drizzle and fog are rare.",
        "f1_macro",
        "tabular",
        "train",
        "weather",
        800,
        661,
        "vega_datasets, data set seattle-weather (NOAA daily climate data)",
        "public domain (NOAA); package MIT",
        _seattle_weather,
    ),
    TaskSource(
        "breast-cancer",
        "breast cancer diagnosis",
        "Measurements of cell nuclei in a fine-needle aspirate of a breast mass (Wisconsin,"
        " diagnostic). Predict the probability that the mass is benign.",
        "log_loss",
        "tabular",
        "train",
        "benign",
        220,
        349,
        "scikit-learn, load_breast_cancer (UCI, Wolberg, Street and Mangasarian 1995)",
        "CC BY 4.0",
        _breast_cancer,
    ),
    TaskSource(
        "diabetes-progress",
        "diabetes progression",
        "Age, sex, body mass index, blood pressure and six blood serum measurements of diabetes"
        " patients. Predict the progression of the disease one year later, a number.",
        "rmse",
        "tabular",
        "train",
        "progress",
        260,
        182,
        "scikit-learn, load_diabetes, unscaled (Efron, Hastie, Johnstone and Tibshirani 2004)",
        "published with the paper for free use; package BSD-3-Clause",
        _diabetes,
    ),
    TaskSource(
        "cars-mpg",
        "fuel economy of cars",
        "Cars of the model years 1970 to 1982: engine, weight, acceleration, origin and name."
        " Predict miles per gallon. Some values are missing.",
        "mape",
        "tabular",
        "train",
        "mpg",
        240,
        158,
        "vega_datasets, data set cars (UCI Auto MPG, StatLib 1983)",
        "CC BY 4.0; package MIT",
        _cars,
    ),
    TaskSource(
        "penguins-sex",
        "sex of penguins",
        "Penguins of three species on three Antarctic islands: body measures, isotopes in the"
        " blood, nest. Predict the probability that a penguin is male. Some values are missing.",
        "log_loss",
        "tabular",
        "heldout",
        "male",
        170,
        163,
        "palmerpenguins, penguins_raw (Gorman, Williams and Fraser 2014)",
        "CC0",
        _penguins,
    ),
    TaskSource(
        "fertility-2010",
        "fertility of countries",
        "Births per woman of countries and regions in each year from 1960 to 1985; some years are"
        " missing. Predict the births per woman in 2010.",
        "r2",
        "tabular",
        "heldout",
        "fertility_2010",
        110,
        94,
        "statsmodels, data set fertility (World Bank, World Development Indicators)",
        "World Bank terms of use, CC BY 4.0",
        _fertility,
    ),
    TaskSource(
        "grunfeld-invest",
        "investment of firms",
        "Eleven large US firms from 1935 to 1954: market value and stock of plant and equipment."
        " Predict the gross investment of a firm in a year, in millions of dollars. Firms differ"
        " a thousandfold.",
        "rmsle",
        "tabular",
        "heldout",
        "invest",
        120,
        100,
        "statsmodels, data set grunfeld (Grunfeld 1958)",
        "public domain",
        _grunfeld,
    ),
)
