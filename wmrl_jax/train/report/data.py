"""What the report reads of a run folder: every file is optional, and may be half written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from wmrl_jax.errors import UserError
from wmrl_jax.train.evaluate import Evaluation
from wmrl_jax.train.evaluation_io import load_json
from wmrl_jax.train.ledger import Ledger

Line = Mapping[str, Any]


class RunRecord(NamedTuple):
    """A run folder's content; what is missing is empty or None.

    Attributes:
      name: of the run.
      config_text: config.yaml as it stands.
      config: config.yaml as nested dicts.
      versions: versions.json, one entry for each machine and set of packages the run has used.
      metrics: metrics.jsonl, by step.
      pairs: pairs.jsonl, by step.
      curves: curves.jsonl, by step.
      samples: samples.jsonl, by step.
      ledger: `Ledger.summary` of ledger.json.
      before: eval_before.json.
      after: eval_after.json.
      fidelity: fidelity.json.
      faults: by file name, why it could not be used; a file that is absent is not in it.
    """

    name: str
    config_text: str
    config: Mapping[str, Any]
    versions: Sequence[Line]
    metrics: Sequence[Line]
    pairs: Sequence[Line]
    curves: Sequence[Line]
    samples: Sequence[Line]
    ledger: Mapping[str, Any] | None
    before: Evaluation | None
    after: Evaluation | None
    fidelity: Mapping[str, Any] | None
    faults: Mapping[str, str]

    def setting(self, path: str, default: Any = None) -> Any:
        """The value of the configuration at a dotted path."""
        value: Any = self.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return default if value is None else value

    @property
    def steps(self) -> np.ndarray:
        """Steps of `metrics`, float64."""
        return np.array([line["step"] for line in self.metrics], dtype=np.float64)

    def series(self, key: str) -> np.ndarray:
        """One number a step, NaN where unknown or absent."""
        return np.array([number(line.get(key)) for line in self.metrics], dtype=np.float64)


def number(value: Any) -> float:
    """The value as a float; NaN for whatever is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return math.nan
    return float(value)


def read_run(run_dir: Path) -> RunRecord:
    """Reads what is there.

    Raises:
      UserError: the folder does not exist.
    """
    if not run_dir.is_dir():
        raise UserError(
            f"{run_dir} is no folder: give a run's folder, runs/quickstart for instance"
        )
    faults: dict[str, str] = {}
    config_text = _text(run_dir / "config.yaml", faults)
    versions = _json(run_dir / "versions.json", faults)
    fidelity = _json(run_dir / "fidelity.json", faults)
    return RunRecord(
        name=run_dir.resolve().name,
        config_text=config_text,
        config=_yaml(config_text, faults),
        versions=[v for v in _as_list(versions) if isinstance(v, Mapping)],
        metrics=_lines(run_dir / "metrics.jsonl", ("step",), faults),
        pairs=_lines(run_dir / "pairs.jsonl", ("step", "predicted", "executed"), faults),
        curves=[c for c in _lines(run_dir / "curves.jsonl", ("step",), faults) if _is_curve(c)],
        samples=_lines(run_dir / "samples.jsonl", ("step",), faults),
        ledger=_ledger(run_dir / "ledger.json", faults),
        before=_evaluation(run_dir / "eval_before.json", faults),
        after=_evaluation(run_dir / "eval_after.json", faults),
        fidelity=fidelity if isinstance(fidelity, Mapping) else None,
        faults=faults,
    )


def _text(path: Path, faults: dict[str, str]) -> str:
    if not path.exists():
        return ""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        faults[path.name] = f"{path.name} cannot be read: {error.strerror}"
        return ""


def _yaml(text: str, faults: dict[str, str]) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:
        faults["config.yaml"] = "config.yaml is not valid YAML"
        return {}
    return content if isinstance(content, Mapping) else {}


def _json(path: Path, faults: dict[str, str]) -> Any:
    text = _text(path, faults)
    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError:
        faults[path.name] = f"{path.name} is not valid JSON"
        return None


def _lines(path: Path, numbers: Sequence[str], faults: dict[str, str]) -> list[Line]:
    """The objects of a JSON-lines file that have these numbers; the last write of a step counts.

    A run that is killed while it writes leaves half a line behind: lines that are no JSON are left
    out, and said in `faults` unless it is the last.
    """
    kept: list[Line] = []
    text = _text(path, faults).rstrip("\n").split("\n")
    for i, line in enumerate(text):
        try:
            entry = json.loads(line)
        except ValueError:
            if i + 1 < len(text):
                faults[path.name] = f"{path.name} has a line {i + 1} that is not valid JSON"
            continue
        if isinstance(entry, Mapping) and all(np.isfinite(number(entry.get(k))) for k in numbers):
            kept.append(entry)
    if path.name == "metrics.jsonl":
        kept = list({entry["step"]: entry for entry in kept}.values())
    return sorted(kept, key=lambda entry: entry["step"])


def _is_curve(entry: Line) -> bool:
    x, y = entry.get("x"), entry.get("y")
    return (
        isinstance(x, list)
        and isinstance(y, list)
        and 0 < len(x) == len(y)
        and bool(np.isfinite([number(v) for v in (*x, *y)]).all())
    )


def _ledger(path: Path, faults: dict[str, str]) -> Mapping[str, Any] | None:
    state = _json(path, faults)
    if state is None:
        return None
    ledger = Ledger()
    try:
        ledger.load(state)
        return ledger.summary()
    except (KeyError, TypeError, ValueError, AttributeError):
        faults[path.name] = f"{path.name} is not a ledger's state"
        return None


def _evaluation(path: Path, faults: dict[str, str]) -> Evaluation | None:
    if not path.exists():
        return None
    try:
        return load_json(path)
    except UserError as error:
        faults[path.name] = str(error)
        return None


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
