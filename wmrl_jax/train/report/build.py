"""Puts the report together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from wmrl_jax.train.files import write_whole
from wmrl_jax.train.report.data import RunRecord, read_run
from wmrl_jax.train.report.evaluation import evaluation_section
from wmrl_jax.train.report.fidelity import fidelity_section
from wmrl_jax.train.report.headline import headline
from wmrl_jax.train.report.page import Html, element, join, missing, page, section
from wmrl_jax.train.report.samples import configuration_section, samples_section
from wmrl_jax.train.report.training import (
    calibration_section,
    groups_section,
    health_section,
    ledger_section,
    moments_section,
    rewards_section,
    statuses_section,
)

REPORT_FILE = "report.html"

SECTIONS: dict[str, tuple[str, Callable[[RunRecord], Html]]] = {
    "reward": ("Reward over time", rewards_section),
    "evaluation": ("Before and after", evaluation_section),
    "calibration": ("Recalibration", calibration_section),
    "fusion": ("Moments and fusion weights", moments_section),
    "statuses": ("How programs end", statuses_section),
    "groups": ("Groups", groups_section),
    "ledger": ("Ledger", ledger_section),
    "fidelity": ("Fidelity of the world model", fidelity_section),
    "samples": ("Three programs", samples_section),
    "health": ("Health of the optimisation", health_section),
    "configuration": ("Configuration and versions", configuration_section),
}
"""Anchor -> (title, what draws it), in the order of the page."""


def write_report(run_dir: Path) -> Path:
    """Writes report.html into a run's folder and returns its path.

    It reads the files of that folder and nothing else, and works on a run in progress: a section
    whose files are not there says what is missing. The page has its style and pictures inside,
    asks for nothing from outside, and runs no script.

    Raises:
      UserError: there is no such folder.
    """
    run = read_run(run_dir)
    links = [element("a", title, href=f"#{anchor}") for anchor, (title, _) in SECTIONS.items()]
    faults = [missing(f"{text}; it was left out.") for text in run.faults.values()]
    body = join(
        [
            element("header", headline(run), *faults, element("nav", *links)),
            *(section(anchor, title, draw(run)) for anchor, (title, draw) in SECTIONS.items()),
            element("footer", f"Made from the files of {run.name} by wmrl report."),
        ],
        "\n",
    )
    path = run_dir / REPORT_FILE
    write_whole(path, page(f"{run.name} · WMRL report", body))
    return path
