"""The report's HTML: elements that escape what they are given, the palette, the style sheet.

Text becomes HTML in one place only: `element` escapes every child that is not `Html`. So nothing
that a program, a task or a configuration says can become markup.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence

PALETTE: dict[str, tuple[str, str]] = {
    # name: (light, dark); the pictures and the text take their colours from here alone
    "paper": ("#fbfaf7", "#14171c"),
    "card": ("#ffffff", "#1c2027"),
    "ink": ("#1c2126", "#e7eaee"),
    "soft": ("#5a6470", "#a0aab6"),
    "line": ("#e2e0d9", "#323843"),
    "executed": ("#1f5aa8", "#7db4f5"),
    "predicted": ("#c4660e", "#f0a155"),
    "calibrated": ("#0d8a72", "#4fcdb0"),
    "on_tint": ("#1c2126", "#14171c"),
    "before": ("#8b939c", "#8a939e"),
    "good": ("#0d7a55", "#55d0a0"),
    "bad": ("#b3362b", "#f28b7d"),
    "time0": ("#b4cae6", "#3d5f85"),
    "time1": ("#85abd9", "#4d80b5"),
    "time2": ("#4a7fc1", "#74aee8"),
    "time3": ("#163f7a", "#cfe5ff"),
    "status_valid": ("#1f5aa8", "#6ea8ee"),
    "status_invalid_submission": ("#7fa6d3", "#3f6ea3"),
    "status_no_submission": ("#d9b64a", "#c9a63c"),
    "status_runtime_error": ("#d98233", "#d9863c"),
    "status_timeout": ("#b8552f", "#bd5b36"),
    "status_out_of_memory": ("#8c3a2d", "#8f4436"),
    "status_syntax_error": ("#6b4a78", "#8d6a9b"),
    "status_malformed": ("#3f3550", "#5f5478"),
    "sampling": ("#6f8f3f", "#a3c46f"),
    "training": ("#7a4f9a", "#b78fd8"),
    "preparing": ("#b58a5a", "#c79f70"),
    "idle": ("#c9c6bd", "#4a515c"),
    "compiling": ("#9b8fa6", "#7b7288"),
}
"""Every colour, for light and for dark; a CSS variable `--name` each."""


def minus(text: str) -> str:
    """The text of a number with a real minus sign."""
    return text.replace("-", "−")


class Html(str):
    """Text that is HTML already; `element` leaves it as it is."""


Child = str | int | float | None


def element(tag: str, *children: Child, **attributes: str | None) -> Html:
    """One HTML element; children that are not `Html` are escaped, None is left out.

    `class_` stands for the attribute `class`; an attribute that is None is left out.
    """
    names = {"class_": "class", "aria_label": "aria-label"}
    given = "".join(
        f' {names.get(name, name)}="{html.escape(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    inner = join(children)
    return Html(f"<{tag}{given}>{inner}</{tag}>")


def join(children: Iterable[Child], separator: str = "") -> Html:
    """The children one after the other, escaped unless they are `Html`."""
    return Html(
        separator.join(
            child if isinstance(child, Html) else html.escape(str(child))
            for child in children
            if child is not None
        )
    )


def section(anchor: str, title: str, *children: Child) -> Html:
    """A section with its heading."""
    return element("section", element("h2", title), *children, id=anchor)


def figure(wide: Html, narrow: Html, caption: Child, *, legend: Html | None = None) -> Html:
    """A picture drawn twice, for wide and for narrow windows, with its caption."""
    return element(
        "figure",
        legend,
        element("div", wide, class_="wide"),
        element("div", narrow, class_="narrow"),
        element("figcaption", caption),
    )


def missing(what: str) -> Html:
    """The note that stands where a part of the run folder is not there (yet)."""
    return element("p", what, class_="missing")


def table(
    header: Sequence[Child], rows: Iterable[Sequence[Child]], *, strong: Sequence[int] = ()
) -> Html:
    """A table whose first column is text and whose others are numbers, in a frame that scrolls.

    Args:
      header: one cell per column.
      rows: cells.
      strong: indices of rows that are sums or means of others, set apart.
    """
    head = element("tr", *(element("th", cell, scope="col") for cell in header))
    body = [
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(element("td", cell) for cell in row[1:]),
            class_="strong" if i in strong else None,
        )
        for i, row in enumerate(rows)
    ]
    return element(
        "div",
        element("table", element("thead", head), element("tbody", *body)),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=f"table by {header[0]}",
    )


def legend(names: Mapping[str, str]) -> Html:
    """A line of words, each after a mark in its colour of the palette."""
    marks = (join([swatch(shade), words]) for shade, words in names.items())
    return element("p", *(element("span", mark) for mark in marks), class_="legend")


def swatch(shade: str) -> Html:
    """A small mark in a colour of the palette."""
    return element("i", class_="swatch", style=f"background:var(--{shade.replace('_', '-')})")


def definitions(pairs: Mapping[str, Child]) -> Html:
    """Names and values in two columns."""
    rows = [element("div", element("dt", k), element("dd", v)) for k, v in pairs.items()]
    return element("dl", *rows)


def details(summary: Child, *children: Child, open_: bool = False) -> Html:
    """A part that folds."""
    return element("details", element("summary", summary), *children, open="" if open_ else None)


_PYTHON = re.compile(
    r"(?P<c>#[^\n]*)"
    r"|(?P<s>'''[\s\S]*?'''|\"\"\"[\s\S]*?\"\"\"|'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\")"
    r"|(?P<k>\b(?:and|as|assert|class|def|del|elif|else|except|False|finally|for|from|if|import|in|"
    r"is|lambda|None|not|or|pass|raise|return|True|try|while|with|yield)\b)"
    r"|(?P<n>\b\d[\d_.]*(?:e[+-]?\d+)?\b)"
)


def python_code(text: str) -> Html:
    """A program as text, with comments, strings, keywords and numbers marked."""
    parts: list[Child] = []
    end = 0
    for match in _PYTHON.finditer(text):
        parts.append(text[end : match.start()])
        parts.append(element("span", match.group(), class_=match.lastgroup))
        end = match.end()
    return element("pre", element("code", *parts, text[end:]))


def page(title: str, body: Html) -> str:
    """The whole document. Its policy forbids the browser to fetch anything or to run scripts."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_colours()}{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _colours() -> str:
    """The palette as CSS variables."""
    light, dark = (
        "".join(f"--{name.replace('_', '-')}:{pair[i]};" for name, pair in PALETTE.items())
        for i in (0, 1)
    )
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"


STYLE = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.55 Inter,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
font-variant-numeric:tabular-nums}
main{max-width:900px;margin:0 auto;padding:56px 20px 96px}
h1,h2{font-family:Charter,"Iowan Old Style","Palatino Linotype",Georgia,"Liberation Serif",serif;
font-weight:600;letter-spacing:-.01em;line-height:1.2;text-wrap:balance}
h1{font-size:2.3rem;margin:.15em 0 .35em}
h2{font-size:1.5rem;margin:0 0 .7em}h2+figure{margin-top:.4rem}
h3{font-size:1rem;margin:0}
p{margin:0 0 1em;max-width:68ch}
a{color:var(--executed);text-decoration:none}a:hover{text-decoration:underline}
section{margin-top:4rem;scroll-margin-top:1rem}
.over{margin:0;color:var(--soft);font-size:.875rem}
.badge{display:inline-block;border:1px solid var(--line);border-radius:99px;padding:0 .7em;
margin-left:.6em;background:var(--card)}
.lead{font-size:1.125rem;max-width:62ch}
nav{display:flex;flex-wrap:wrap;gap:.15rem 1.1rem;margin-top:1.6rem;padding-top:1rem;
border-top:1px solid var(--line);font-size:.875rem}
.tiles{display:grid;grid-template-columns:repeat(4,1fr);gap:12px;margin:1.8rem 0 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px 16px 14px}
.tile .name{font-size:.8125rem;color:var(--soft);line-height:1.35;min-height:2.7em}
.tile .value{font-size:1.75rem;font-weight:600;letter-spacing:-.02em;line-height:1.25;
margin:.15em 0 .1em}
.tile .note{font-size:.8125rem;color:var(--soft);line-height:1.4}
.good{color:var(--good)}.bad{color:var(--bad)}
figure{margin:1.6rem 0 0}
figcaption{font-size:.875rem;line-height:1.5;color:var(--soft);margin-top:.7rem;max-width:76ch}
svg{display:block;width:100%;height:auto;overflow:visible}
svg *{stroke-linejoin:round;stroke-linecap:butt}
svg text{font-family:Inter,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,
sans-serif!important}
.narrow{display:none}
.scroll{overflow-x:auto;margin-top:1.6rem}
table{border-collapse:collapse;width:100%;font-size:.875rem;line-height:1.4}
th,td{padding:.42em .9em .42em 0;text-align:right;white-space:nowrap;
border-bottom:1px solid var(--line);font-weight:400;vertical-align:baseline}
th:first-child{text-align:left;position:sticky;left:0;background:var(--paper)}
td:last-child,th:last-child{padding-right:0}
thead th{color:var(--soft);font-size:.8125rem;vertical-align:bottom;white-space:normal}
tr.strong th,tr.strong td{font-weight:600}
td small{color:var(--soft);font-weight:400;font-size:.75rem}
dl{margin:1.2rem 0 0;font-size:.875rem;columns:2;column-gap:48px}
dl div{display:flex;justify-content:space-between;gap:16px;break-inside:avoid;
border-bottom:1px solid var(--line);padding:.4em 0}
dt{color:var(--soft)}dd{margin:0;text-align:right;overflow-wrap:anywhere}
pre{margin:0;padding:14px 16px;overflow-x:auto;font:12.5px/1.55 ui-monospace,SFMono-Regular,Menlo,
Consolas,"Liberation Mono",monospace;tab-size:4;background:var(--card)}
pre .c{color:var(--soft);font-style:italic}pre .s{color:var(--good)}
pre .k{color:var(--executed)}pre .n{color:var(--predicted)}
article{border:1px solid var(--line);border-radius:10px;margin-top:1.4rem;overflow:hidden;
background:var(--card)}
article header{padding:14px 16px;border-bottom:1px solid var(--line)}
article header p{margin:.3em 0 0;font-size:.875rem;color:var(--soft);max-width:none}
article .feedback{border-top:1px solid var(--line)}
article .feedback p{margin:0;padding:10px 16px 0;font-size:.8125rem;color:var(--soft)}
article .feedback pre{padding-top:6px;white-space:pre-wrap;overflow-wrap:anywhere}
.legend{margin:0 0 .6rem;display:flex;flex-wrap:wrap;gap:.1rem 1.3rem;font-size:.875rem;
max-width:none}
.swatch{display:inline-block;width:.75em;height:.75em;border-radius:3px;margin-right:.5em}
.apart{margin-top:1.6rem}
.chip{display:inline-block;border:1.5px solid;border-radius:99px;padding:.05em .7em;
margin-right:.5em;color:var(--ink);font-size:.8125rem}
details{margin-top:1.2rem;border:1px solid var(--line);border-radius:10px;background:var(--card);
overflow:hidden}
summary{cursor:pointer;padding:10px 16px;font-size:.875rem}
details .scroll{margin:0;padding:0 16px 8px;border-top:1px solid var(--line)}
details th:first-child{background:var(--card)}
details tr:last-child>*{border-bottom:0}
details pre{border-top:1px solid var(--line)}
.missing{border-left:3px solid var(--line);padding:.1em 0 .1em 1em;color:var(--soft)}
.warning{border-left:3px solid var(--bad);padding:.1em 0 .1em 1em}
footer{margin-top:4rem;font-size:.8125rem;color:var(--soft)}
@media (max-width:680px){
main{padding:32px 16px 64px}h1{font-size:1.75rem}h2{font-size:1.3rem}
section{margin-top:3rem}.lead{font-size:1.0625rem}
.tiles{grid-template-columns:1fr 1fr;gap:8px}.tile{padding:12px}.tile .value{font-size:1.4rem}
.wide{display:none}.narrow{display:block}dl{columns:1}td small{display:block}
}
@media print{.scroll{overflow:visible}section,article{break-inside:avoid-page}}
"""
