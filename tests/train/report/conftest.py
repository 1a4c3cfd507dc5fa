"""A run folder as a run of 60 steps would leave it, with made-up numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from wmrl_jax.train.evaluate import summarise
from wmrl_jax.train.evaluation_io import write_json
from wmrl_jax.train.report import write_report
from wmrl_jax.types import STATUSES, reward_of

STEPS, GROUPS, SIZE = 60, 8, 8
TRAIN = (
    "iris-species",
    "wine-cultivar",
    "breast-cancer-recall",
    "digits-pixels",
    "diabetes-progression",
    "penguin-sex",
    "fair-affairs-count",
    "spector-grade",
    "cars-horsepower",
)
HELDOUT = ("movies-rating", "names-gender", "copper-price")

PROGRAM = """```python
import os
import pandas as pd
from sklearn.ensemble import HistGradientBoostingClassifier  # handles missing values itself

data = os.environ["DATA_DIR"]
train = pd.read_csv(os.path.join(data, "train.csv"))
test = pd.read_csv(os.path.join(data, "test.csv"))
features = [c for c in train.columns if c not in ("id", "target")]
model = HistGradientBoostingClassifier(max_iter=200, learning_rate=0.08, random_state=0)
model.fit(train[features], train["target"])
out = pd.DataFrame({"id": test["id"], "target": model.predict_proba(test[features])[:, 1]})
out.to_csv(os.environ["SUBMISSION_PATH"], index=False)
```"""

CONFIG = f"""name: quickstart
seed: 0
model:
  layers: 4
  width: 256  # of the residual stream
reward:
  source: mixed
corrections:
  debias: on
  denoise: on
train:
  steps: {STEPS}
  groups: {GROUPS}
  group_size: {SIZE}
"""

MakeRun = Callable[..., Path]


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its report; not to be changed."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "quickstart")
    write_report(folder)
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Makes a run folder below the test's own; see `write_run`."""
    return lambda **options: write_run(tmp_path / "quickstart", **options)


def write_run(folder: Path, *, steps: int = STEPS, seed: int = 0, program: str = PROGRAM) -> Path:
    """Writes every file of a run that has made `steps` steps."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    (folder / "config.yaml").write_text(CONFIG)
    packages = {"jax": "0.10.2", "flax": "0.12.1", "numpy": "2.3.1"}
    versions = [{"python": "3.11.7", "cpus": 2, "devices": ["cpu: cpu"], "packages": packages}]
    (folder / "versions.json").write_text(json.dumps(versions))

    metrics, pairs, curves, samples = [], [], [], []
    names = ("valid", "runtime_error", "no_submission", "invalid_submission", "syntax_error")
    for step in range(1, steps + 1):
        done = step / STEPS
        truth = 0.36 + 0.2 * (1 - math.exp(-2.5 * done))
        shares = np.array([0.5 + 0.35 * done, 0.26 - 0.16 * done, 0.1, 0.06, 0.08 - 0.05 * done])
        drawn = rng.multinomial(2 * SIZE, shares / shares.sum()) / (2 * SIZE)
        executed = truth + 0.05 * rng.standard_normal()
        metrics.append(
            {
                "step": step,
                "reward": truth + 0.02 * rng.standard_normal(),
                "reward_predicted": truth + 0.1 + 0.05 * done + 0.02 * rng.standard_normal(),
                "reward_calibrated": truth + 0.1 * (step < 8) + 0.02 * rng.standard_normal(),
                "reward_executed": None if step % 7 == 3 else executed,
                "reward_executed_predicted": None if step % 7 == 3 else executed + 0.1,
                "groups_used": GROUPS - rng.binomial(3, 0.3) - (step % 9 == 0),
                "groups_degenerate": int(rng.binomial(3, 0.3)),
                "groups_ungraded": int(step % 9 == 0),
                "weight_anchor": 0.16 + 0.03 * math.sin(done * 9),
                "weight_world_model": 0.84 - 0.03 * math.sin(done * 9),
                "moment_ff": 0.021 + 0.003 * done,
                "moment_fr": 0.017 + 0.004 * done + 0.001 * rng.standard_normal(),
                "moment_rr": 0.036 + 0.002 * rng.standard_normal(),
                "correlation": 0.58 + 0.12 * done + 0.01 * rng.standard_normal(),
                "kl": None,
                "entropy": 0.62 - 0.2 * done + 0.01 * rng.standard_normal(),
                "grad_norm": 0.8 + 0.2 * rng.standard_normal() ** 2,
                "clip_fraction": 0.002 + 0.001 * rng.standard_normal() ** 2,
                "sampler_trainer_difference": 2e-6 * (1 + rng.random()),
                "truncation_rate": 0.04 * rng.random(),
                "completion_tokens": 92 + 3 * rng.standard_normal(),
                "anchors_in_flight": int(rng.integers(0, 4)),
                "staleness": int(rng.integers(0, 3)),
                "seconds_step": 4 + rng.random(),
                "programs_compiled": 14 if step > 1 else 11,
                **dict.fromkeys((f"status_{s}" for s in STATUSES), 0.0),
                **{f"status_{s}": float(x) for s, x in zip(names, drawn, strict=True)},
            }
        )
        task = TRAIN[step % len(TRAIN)]
        for _ in range(SIZE):
            status = str(rng.choice(names, p=shares / shares.sum()))
            reward = reward_of(status, float(rng.beta(2, 3)))  # type: ignore[arg-type]
            predicted = float(np.clip(0.22 + 0.75 * reward + 0.1 * rng.standard_normal(), 0, 1))
            pairs.append({"step": step, "task": task, "predicted": predicted, "executed": reward})
        samples.append(
            {
                "step": step,
                "task": task,
                "completion": program,
                "status": status,
                "reward": reward,
                "position": None,
                "predicted": predicted,
                "feedback": "Traceback (most recent call last):\n  KeyError: 'target'"
                if status == "runtime_error"
                else "valid submission, roc_auc 0.874, position 0.52",
            }
        )
        if step == 1 or step % 10 == 0:
            x = np.linspace(0.1, 0.95, 12)
            y = x if step < 10 else np.clip((x - 0.2 - 0.05 * done) / 0.75, 0.02, 0.97)
            curve = {"step": step, "x": x.tolist(), "y": y.tolist(), "n": 12}
            curves.append(curve)
    for name, lines in (
        ("metrics", metrics),
        ("pairs", pairs),
        ("curves", curves),
        ("samples", samples),
    ):
        text = "".join(json.dumps(line, default=float) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)

    seconds = {"sampling": 96.0, "scoring": 21.0, "training": 88.0, "compiling": 41.0}
    seconds |= {"waiting": 6.0, "evaluation": 70.0, "warm_start": 240.0, "world_model": 75.0}
    state = {
        "seconds": seconds,
        "slot_seconds": {"training": 118.0, "world_model": 160.0, "evaluation": 90.0},
        "groups": {"executed": steps, "predicted": steps * (GROUPS - 1)},
        "compiled": 14,
    }
    (folder / "ledger.json").write_text(json.dumps(state))
    write_json(summarise(evaluation_records(rng, 0.0), bootstrap=300), folder / "eval_before.json")
    write_json(summarise(evaluation_records(rng, 1.0), bootstrap=300), folder / "eval_after.json")
    (folder / "fidelity.json").write_text(json.dumps(FIDELITY))
    return folder


def evaluation_records(rng: np.random.Generator, trained: float) -> list[dict]:
    """Eight samples a task; a trained agent is valid more often and better placed."""
    records = []
    for task in (*TRAIN, *HELDOUT):
        for sample in range(8):
            failing = rng.random() > 0.52 + 0.3 * trained
            status = str(rng.choice(["runtime_error", "no_submission"])) if failing else "valid"
            position = None if failing else float(rng.beta(2 + trained, 3))
            if task == "copper-price" and sample == 7:
                status, position = "unknown", None
            records.append(
                {
                    "task": task,
                    "split": "train" if task in TRAIN else "heldout",
                    "sample": sample,
                    "status": status,
                    "reward": reward_of(status, position),  # type: ignore[arg-type]
                    "position": position,
                    "value": None,
                    "seconds": 0.3,
                    "completion": PROGRAM,
                }
            )
    return records


def _measured(value: float, half: float) -> dict[str, float]:
    return {"value": value, "low": value - half, "high": value + half}


FIDELITY = {
    "cases": 96,
    "ungraded": 0,
    "tasks": 9,
    "status": {
        "accuracy_at_1": _measured(0.81, 0.07),
        "accuracy_at_2": _measured(0.95, 0.04),
        "most_frequent": 0.53,
        "confusion": {"valid": {"valid": 48, "runtime_error": 3}},
        "calibration_error": 0.06,
        "curve": [],
    },
    "reward": {
        "task_mean_mae": 0.231,
        "raw": {
            "mae": _measured(0.121, 0.02),
            "bias": _measured(0.034, 0.03),
            "rank_correlation": _measured(0.66, 0.09),
            "calibration_error": 0.05,
        },
    },
    "by_task": {
        name: {
            "cases": 11,
            "accuracy_at_1": 0.7 + 0.02 * i,
            "mae": 0.1 + 0.01 * i,
            "bias": 0.03 - 0.01 * i,
            "rank_correlation": None if i == 4 else 0.6,
        }
        for i, name in enumerate(TRAIN)
    },
}
