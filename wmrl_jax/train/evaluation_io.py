"""An evaluation on the outside: as a table for the terminal, as JSON, as CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from wmrl_jax.errors import UserError
from wmrl_jax.train.evaluate import CONFIDENCE, Comparison, Estimate, Evaluation, summarise
from wmrl_jax.train.files import write_whole
from wmrl_jax.types import STATUSES


def format_estimate(estimate: Estimate, *, signed: bool = False) -> str:
    """`0.512 [0.480, 0.544]`; a dash where the value or its interval is unknown."""
    form = "+.3f" if signed else ".3f"
    if math.isnan(estimate.mean):
        return "–"
    if math.isnan(estimate.low):
        return f"{estimate.mean:{form}} [–]"
    return f"{estimate.mean:{form}} [{estimate.low:{form}}, {estimate.high:{form}}]"


def evaluation_table(evaluation: Evaluation, *, title: str = "Evaluation") -> Table:
    """A rich table, one line per task, split and overall; shares of the statuses in percent."""
    seen = [s for s in STATUSES if evaluation.overall.statuses.get(s, 0.0) > 0.0]
    table = Table(title=title, caption="means with 95 % bootstrap intervals; shares in percent")
    for name in ("task", "split"):
        table.add_column(name, no_wrap=True)
    for name in ("n", "reward", "position", *(s.replace("_", " ") for s in seen), "ungraded"):
        table.add_column(name, justify="right")
    for row in evaluation.rows():
        shares = [row.statuses[s] for s in seen]
        table.add_row(
            row.name,
            row.split if row.split != row.name else "",
            str(row.samples),
            format_estimate(row.reward),
            format_estimate(row.position),
            *("–" if math.isnan(x) else f"{100 * x:.0f}" for x in shares),
            str(row.ungraded),
            end_section=row is evaluation.tasks[-1],
        )
    return table


def comparison_table(comparison: Comparison, *, title: str = "After against before") -> Table:
    """A rich table of rewards before and after, and the differences with their intervals."""
    table = Table(title=title, caption="differences with 95 % bootstrap intervals, paired by task")
    for name in ("task", "split"):
        table.add_column(name, no_wrap=True)
    for name in ("before", "after", "reward gain", "position gain"):
        table.add_column(name, justify="right")
    for row in comparison.rows():
        table.add_row(
            row.name,
            row.split if row.split != row.name else "",
            f"{row.before:.3f}",
            f"{row.after:.3f}",
            format_estimate(row.reward, signed=True),
            format_estimate(row.position, signed=True),
            end_section=row is comparison.tasks[-1],
        )
    return table


def plain(table: Table, *, width: int = 120) -> str:
    """The table as text without colour, for logs and files."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False).print(table)
    return out.getvalue()


def write_json(evaluation: Evaluation, path: Path) -> None:
    """Write statistics and records, unknown numbers as null; the file appears whole or not."""
    content = {
        "bootstrap": evaluation.bootstrap,
        "seed": evaluation.seed,
        "confidence": CONFIDENCE,
        "overall": _jsonable(evaluation.overall),
        "splits": [_jsonable(s) for s in evaluation.splits],
        "tasks": [_jsonable(s) for s in evaluation.tasks],
        "records": [_jsonable(r) for r in evaluation.records],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def load_json(path: Path) -> Evaluation:
    """Read what `write_json` wrote; the statistics are computed anew from its records and seed.

    Raises:
      UserError: the file is missing, is not such a file, or has bad records.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the evaluation {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"the evaluation {path} is not valid JSON: {error}") from error
    if not isinstance(content, dict) or not {"records", "bootstrap", "seed"} <= content.keys():
        raise UserError(f"{path} is not an evaluation: it lacks records, bootstrap or seed")
    return summarise(content["records"], bootstrap=content["bootstrap"], seed=content["seed"])


def write_csv(evaluation: Evaluation, path: Path) -> None:
    """Write one line per task, split and overall; unknown numbers are empty fields."""
    statuses = [s for s in STATUSES if s != "unknown"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["name", "split", "tasks", "samples", "ungraded"]
        + [f"{what}{end}" for what in ("reward", "position") for end in ("", "_low", "_high")]
        + [f"share_{s}" for s in statuses]
        + ["seconds"]
    )
    for row in evaluation.rows():
        numbers = [*row.reward, *row.position, *(row.statuses[s] for s in statuses), row.seconds]
        writer.writerow(
            [row.name, row.split, row.tasks, row.samples, row.ungraded]
            + ["" if math.isnan(x) else f"{x:.6g}" for x in numbers]
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, out.getvalue())


def _jsonable(value: Any) -> Any:
    """NamedTuples and mappings as dicts, NaN as None, numpy scalars as Python's."""
    if isinstance(value, Mapping):
        return {k: _jsonable(v) for k, v in value.items()}
    if hasattr(value, "_asdict"):
        return _jsonable(value._asdict())
    if isinstance(value, np.generic):
        return _jsonable(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
