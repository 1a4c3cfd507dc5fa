"""Pictures for the report: matplotlib's SVG, made to live inside the page.

The colours in the pictures are the page's CSS variables, so one picture serves light and dark. Text
stays text, in the page's font. Every picture is drawn twice, for wide and for narrow windows.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from wmrl_jax.train.report.page import PALETTE, Html

Paint = Callable[[Figure, bool], None]
"""(figure, narrow) -> None: draws on an empty figure."""

WIDE, NARROW = 860, 340  # pixels, which are also the user units of the SVG
LABEL = 12.5  # font size of labels, pixels

_DPI = 72  # one pixel is one point
_CODES = {name: f"#0102{i:02x}" for i, name in enumerate(PALETTE)}
_RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "wmrl",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": LABEL,
    "text.color": _CODES["ink"],
    "axes.edgecolor": _CODES["line"],
    "axes.labelcolor": _CODES["soft"],
    "axes.titlecolor": _CODES["soft"],
    "axes.titlesize": LABEL,
    "axes.titlelocation": "left",
    "axes.titlepad": 10.0,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _CODES["line"],
    "grid.linewidth": 1.0,
    "xtick.color": _CODES["line"],
    "xtick.labelcolor": _CODES["soft"],
    "ytick.color": _CODES["line"],
    "ytick.labelcolor": _CODES["soft"],
    "xtick.labelsize": LABEL,
    "ytick.labelsize": LABEL,
    "ytick.major.size": 0.0,
    "figure.facecolor": "none",
}


def colour(name: str) -> str:
    """The colour that stands for a name of the palette until the picture is written."""
    return _CODES[name]


def draw(name: str, label: str, paint: Paint, *, wide: int, narrow: int) -> tuple[Html, Html]:
    """Draws a picture for wide and for narrow windows.

    Args:
      name: unique in the page; the ids inside the picture start with it.
      label: says in words what is seen, for readers that do not see it.
      paint: draws.
      wide: height in pixels, `WIDE` across.
      narrow: height in pixels, `NARROW` across.
    """
    made = []
    for kind, width, height in (("w", WIDE, wide), ("n", NARROW, narrow)):
        with matplotlib.rc_context(_RC):
            drawing = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI)
            canvas = FigureCanvasSVG(drawing)
            paint(drawing, kind == "n")
            out = io.StringIO()
            canvas.print_svg(out, metadata={"Date": None, "Creator": None})
        made.append(_inline(out.getvalue(), f"{name}-{kind}-", label, width, height))
    return made[0], made[1]


def axes(figure: Figure, left: float, right: float, top: float, bottom: float) -> Axes:
    """Axes with these margins in pixels."""
    width, height = figure.get_size_inches() * _DPI
    return figure.add_axes(
        (
            left / width,
            bottom / height,
            (width - left - right) / width,
            (height - top - bottom) / height,
        )
    )


def grid_axes(
    figure: Figure,
    rows: int,
    columns: int,
    *,
    left: float,
    right: float,
    top: float,
    bottom: float,
) -> list[Axes]:
    """Axes in rows and columns, each with these margins in pixels inside its cell."""
    width, height = figure.get_size_inches() * _DPI
    w, h = width / columns, height / rows
    return [
        axes(
            figure,
            c * w + left,
            (columns - 1 - c) * w + right,
            r * h + top,
            (rows - 1 - r) * h + bottom,
        )
        for r in range(rows)
        for c in range(columns)
    ]


def step_axis(
    ax: Axes, steps: np.ndarray, *, ticks: int = 6, name: str = "step", bars: bool = False
) -> None:
    """The x axis of training steps, with room for the outer halves of bars where there are any."""
    low, high = float(steps.min()), float(steps.max())
    beside = 0.5 if bars or low == high else 0.0
    ax.set_xlim(low - beside, high + beside)
    ax.xaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 5, 10], integer=True))
    if name:
        ax.set_xlabel(name, loc="right")


def unit_axis(ax: Axes, low: float, high: float) -> None:
    """A y axis inside [0, 1] with a little room around [low, high]."""
    room = max(0.03, 0.08 * (high - low))
    ax.set_ylim(max(0.0, low - room), min(1.0, high + room))
    ax.yaxis.set_major_locator(MaxNLocator(5))


def end_labels(
    ax: Axes, labels: Sequence[tuple[float, str, str]], *, gap: float = 16.0, marks: bool = False
) -> None:
    """Texts (y, text, palette name) right of the axes, moved apart where they would overlap.

    Args:
      ax: its limits must be final.
      labels: y in data coordinates.
      gap: least distance of two labels in pixels.
      marks: show the colour as a mark before the text, for colours too light to be read.
    """
    low, high = ax.get_ylim()
    pixels = ax.get_window_extent().height * _DPI / ax.figure.dpi
    wanted = [(y - low) / (high - low) * pixels for y, _, _ in labels]
    for at, (_, text, name) in zip(spread(wanted, gap), labels, strict=True):
        y = low + at / pixels * (high - low)
        pieces = [(22, text, "soft"), (8, "■", name)] if marks else [(8, text, name)]
        for right, piece, shade in pieces:
            note(ax, piece, 1.0, y, shade, shift=(right, 0), across=True)


def note(
    ax: Axes,
    text: str,
    x: float,
    y: float,
    shade: str = "ink",
    *,
    shift: tuple[float, float] = (0, 0),
    align: Literal["left", "center", "right"] = "left",
    bold: bool = False,
    across: bool = False,
) -> None:
    """Text in or beside the axes, vertically centred.

    Args:
      ax: its limits need not be final.
      text: what it says.
      x: in data coordinates; with `across`, a share of the axes' width.
      y: in data coordinates.
      shade: name of its colour in the palette.
      shift: pixels to the right and up.
      align: which end of the text is at that place.
      bold: whether it is set apart.
      across: see `x`.
    """
    ax.annotate(
        text,
        (x, y),
        xycoords=("axes fraction" if across else "data", "data"),
        xytext=shift,
        textcoords="offset points",
        ha=align,
        va="center",
        color=colour(shade),
        fontweight="bold" if bold else "normal",
        annotation_clip=False,
    )


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Positions at least `gap` apart, in the order of `wanted`, nearest to it in least squares."""
    order = np.argsort(wanted, kind="stable")
    # With gap · rank taken off, "at least gap apart" reads "non-decreasing": pool what violates it.
    blocks: list[list[float]] = []
    for rank, i in enumerate(order):
        blocks.append([wanted[i] - gap * rank, 1.0])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, n), (b, m) = blocks[-2:]
            blocks[-2:] = [[(a * n + b * m) / (n + m), n + m]]
    flat = [value for value, count in blocks for _ in range(int(count))]
    placed = [0.0] * len(wanted)
    for rank, i in enumerate(order):
        placed[i] = flat[rank] + gap * rank
    return placed


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred moving mean over `window` entries, unknown ones left out; NaN where all are."""
    known = np.isfinite(values)
    kernel = np.ones(2 * (window // 2) + 1)
    total = np.convolve(np.where(known, values, 0.0), kernel, mode="full")
    count = np.convolve(known.astype(float), kernel, mode="full")
    half = len(kernel) // 2
    total, count = total[half : half + len(values)], count[half : half + len(values)]
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)


def _inline(svg: str, prefix: str, label: str, width: int, height: int) -> Html:
    """The SVG as an element of the page: no namespaces, no metadata, own ids, CSS variables."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'xlink:href="#', f'href="#{prefix}', svg)
    svg = svg.replace("url(#", f"url(#{prefix}")
    for name, code in _CODES.items():
        svg = svg.replace(code, f"var(--{name.replace('_', '-')})")
    words = label.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{words}">'
    return Html(head + svg[svg.index(">") + 1 :].strip())
