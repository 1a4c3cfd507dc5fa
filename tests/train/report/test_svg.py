import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.isotonic import isotonic_regression

from wmrl_jax.train.report.page import PALETTE
from wmrl_jax.train.report.svg import axes, colour, draw, note, smooth, spread


@given(st.lists(st.floats(-100, 100), max_size=12), st.floats(0.1, 30))
def test_spread_labels_keep_their_order_and_their_distance_and_stay_nearest(wanted, gap):
    placed = np.array(spread(wanted, gap))
    order = np.argsort(wanted, kind="stable")
    assert (np.diff(placed[order]) >= gap * (1 - 1e-6) - 1e-6).all()
    if wanted:
        shift = gap * np.arange(len(wanted))
        nearest = isotonic_regression(np.array(wanted)[order] - shift) + shift
        np.testing.assert_allclose(placed[order], nearest, atol=1e-6)


def test_a_smoothed_series_is_the_mean_of_what_is_known_in_the_window():
    values = np.array([1.0, np.nan, 3.0, 5.0, np.nan, np.nan, np.nan])
    np.testing.assert_allclose(smooth(values, 3), [1, 2, 4, 4, 5, np.nan, np.nan])
    np.testing.assert_allclose(smooth(values, 1), values)


@pytest.fixture(scope="module")
def picture():
    def paint(figure, narrow):
        ax = axes(figure, 10, 10, 10, 10)
        ax.plot([0, 1], [0, 1], color=colour("executed"))
        ax.scatter([0.5], [0.5], color=colour("predicted"))
        note(ax, "<b> & $x_1$" + " narrow" * narrow, 0.5, 0.5)

    return draw("test", 'a "label" <', paint, wide=100, narrow=90)


def test_a_picture_is_drawn_for_both_widths_at_one_unit_a_pixel(picture):
    assert [re.search(r'viewBox="([^"]+)"', p).group(1) for p in picture] == [
        "0 0 860 100",
        "0 0 340 90",
    ]
    assert ["narrow" in p for p in picture] == [False, True]


def test_a_picture_takes_its_colours_from_the_page_and_keeps_none_of_its_own(picture):
    assert re.findall(r"#[0-9a-f]{6}", picture[0]) == []
    used = set(re.findall(r"var\(--([a-z0-9-]+)\)", picture[0]))
    assert {"executed", "predicted", "ink"} <= used <= {n.replace("_", "-") for n in PALETTE}


def test_a_picture_keeps_text_as_text_and_escapes_it(picture):
    assert "&lt;b&gt; &amp; $x_1$" in picture[0]
    assert 'aria-label="a &quot;label&quot; &lt;"' in picture[0]


def test_a_picture_carries_no_namespace_style_or_metadata(picture):
    for words in ("xmlns", "xlink", "http", "<style", "<metadata", "<?xml", "<!DOCTYPE"):
        assert words not in picture[0]
