import html
import re

import pytest

from wmrl_jax.train.report.page import PALETTE, Html, element, join, page, python_code


def test_an_element_escapes_text_and_attributes_and_leaves_html_alone():
    made = element("p", "<b>&", element("i", "x"), None, 3, title='"<')
    assert made == '<p title="&quot;&lt;">&lt;b&gt;&amp;<i>x</i>3</p>'


def test_a_joined_text_is_escaped_and_a_joined_element_is_not():
    assert join(["<", Html("<br>")], ", ") == "&lt;, <br>"


@pytest.mark.parametrize(
    "text",
    [
        "import os  # <script>\nx = '''a\nb''' + \"c\\\"\" if not 1e-3 else f'{x}'\n",
        "'''" * 500,
        "'unclosed \\",
        "",
        "é ∑ \x00 </code>",
    ],
)
def test_marked_code_is_the_code_when_its_marks_are_taken_off(text):
    assert html.unescape(re.sub(r"<[^>]+>", "", python_code(text))) == text


def test_code_marks_comments_strings_keywords_and_numbers():
    made = python_code("import a  # if\nb = 'for' + 1.5")
    assert made.count("<span") == 4
    assert '<span class="k">import</span>' in made
    assert '<span class="c"># if</span>' in made
    assert '<span class="s">&#x27;for&#x27;</span>' in made
    assert '<span class="n">1.5</span>' in made


def test_the_style_uses_no_colour_that_the_palette_lacks():
    text = page("t", Html(""))
    used = set(re.findall(r"var\(--([a-z0-9-]+)\)", text))
    assert used <= {name.replace("_", "-") for name in PALETTE}


def luminance(code):
    channels = [int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("ground", ["paper", "card"])
@pytest.mark.parametrize(
    ("name", "least"),
    [("ink", 7), ("soft", 4.5), ("executed", 4.5), ("good", 4.5), ("bad", 4.5)]
    + [("predicted", 3.5), ("calibrated", 3.5)],
)
def test_text_stands_out_from_its_ground_as_the_web_guidelines_ask(name, least, ground, mode):
    a, b = sorted(luminance(PALETTE[n][mode]) for n in (name, ground))
    assert (b + 0.05) / (a + 0.05) >= least
