"""CSV files of a task folder, read as text."""

from __future__ import annotations

import csv
from pathlib import Path

from wmrl_jax.errors import UserError

Table = dict[str, list[str]]
"""The cells of each column, exactly as they stand; blank lines are left out."""


def read_table(path: Path, needed: tuple[str, ...] = ()) -> Table:
    """Reads a CSV file in UTF-8, with or without a byte-order mark.

    Raises:
      UserError: it is no such table, a column of `needed` is missing, or it has no rows.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = [row for row in csv.reader(file) if row]
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a CSV table in UTF-8: {error}; replace the file") from None
    header = rows[0] if rows else []
    for column in needed:
        if column not in header:
            raise UserError(f"{path} has no column {column!r}; add it, or mend task.yaml")
    repeated = [name for name in header if header.count(name) > 1]
    if repeated:
        raise UserError(f"{path} has the column {repeated[0]!r} twice; rename one")
    if len(rows) < 2:
        raise UserError(f"{path} has no rows; replace the file")
    for row in rows:
        if len(row) != len(header):
            raise UserError(
                f"{path} has a row of {len(row)} cells under a header of {len(header)}"
                f" ({','.join(row)[:40]}); mend the row"
            )
    return {name: [row[i] for row in rows[1:]] for i, name in enumerate(header)}


def read_header(path: Path) -> list[str]:
    """The column names of a CSV file; empty where it has no readable first line."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            return next(csv.reader(file), [])
    except csv.Error:
        return []
