"""What a run writes down: metrics.jsonl, TensorBoard events, and the versions it ran with."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tensorboardX import SummaryWriter

from wmrl_jax.train.files import write_whole

METRICS_FILE = "metrics.jsonl"
VERSIONS_FILE = "versions.json"
TENSORBOARD_FOLDER = "tensorboard"

VERSIONED_PACKAGES = (
    "wmrl-jax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "pandas",
    "scikit-learn",
    "tokenizers",
)


class JsonLines:
    """A file of JSON records, one a line, each with the `step` that it belongs to.

    Keys are sorted; NaN and infinities become null, because JSON has neither. A record is with the
    operating system when `append` returns.

    Args:
      path: the file; it is made by the first record.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, record: Mapping[str, Any]) -> None:
        """Appends a record of numbers, text, None, arrays, lists and mappings of these."""
        line = json.dumps(_plain(record), sort_keys=True, allow_nan=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def read(self) -> list[dict[str, Any]]:
        """The records in order, null read as NaN; a last line that a kill cut short is left out."""
        if not self._path.exists():
            return []
        lines = self._path.read_text(encoding="utf-8").split("\n")[:-1]
        return [_unknown_as_nan(json.loads(line)) for line in lines]

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Drops every record after `step`, so that a resumed run writes none twice.

        Returns:
          The records that are left, null read as NaN.
        """
        kept = [record for record in self.read() if record["step"] <= step]
        lines = [json.dumps(_plain(record), sort_keys=True, allow_nan=False) for record in kept]
        write_whole(self._path, "".join(f"{line}\n" for line in lines))
        return kept


class MetricsWriter:
    """One line a step in metrics.jsonl, and the same numbers as TensorBoard events.

    TensorBoard gets the finite numbers only, for it would draw a NaN as a point.

    Args:
      run_dir: the run's folder, which must exist.
    """

    def __init__(self, run_dir: Path) -> None:
        self._lines = JsonLines(run_dir / METRICS_FILE)
        self._events_dir = run_dir / TENSORBOARD_FOLDER
        self._events: SummaryWriter | None = None

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes a step; the values are those of a `JsonLines` record."""
        self._lines.append({**metrics, "step": step})
        if self._events is None:
            self._events = self._open_events(step)
        for name, value in _plain(metrics).items():
            if isinstance(value, int | float):
                self._events.add_scalar(name, value, step)
        self._events.flush()

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Forgets every step after `step`; returns the records of those that are left."""
        kept = self._lines.rewind(step)
        self.close()
        self._events = self._open_events(step + 1)
        return kept

    def close(self) -> None:
        """Closes the event file."""
        if self._events is not None:
            self._events.close()
            self._events = None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_events(self, first_step: int) -> SummaryWriter:
        """An event file at which TensorBoard drops what older ones have from that step on."""
        return SummaryWriter(str(self._events_dir), purge_step=first_step)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The steps of a run in order, null read as NaN; empty where nothing was written yet."""
    return JsonLines(run_dir / METRICS_FILE).read()


def versions() -> dict[str, Any]:
    """Python, platform, devices, package versions, and the git commit where there is one."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "devices": [f"{device.platform}: {device.device_kind}" for device in jax.devices()],
        "packages": {name: _version(name) for name in VERSIONED_PACKAGES},
        "git_commit": _git_commit(Path(__file__).parent),
    }


def write_versions(run_dir: Path) -> None:
    """Adds `versions()` to the list in versions.json, unless its last entry says the same.

    A run that is resumed on another machine or after an upgrade so has one entry for each.
    """
    path = run_dir / VERSIONS_FILE
    entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    now = versions()
    if entries[-1:] == [now]:
        return
    write_whole(path, json.dumps([*entries, now], indent=2, sort_keys=True) + "\n")


def _plain(value: Any) -> Any:
    """The value as JSON types, non-finite numbers as None."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        value = np.asarray(value).tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _unknown_as_nan(value: Any) -> Any:
    if value is None:
        return math.nan
    if isinstance(value, dict):
        return {name: _unknown_as_nan(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_unknown_as_nan(item) for item in value]
    return value


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit(folder: Path) -> str | None:
    """The commit of the checkout that holds `folder`, with `+changes` where files differ."""
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty=+changes"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
