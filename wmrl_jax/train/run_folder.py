"""The folder of a run: its configuration is saved there, and it takes no other one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from wmrl_jax.errors import UserError
from wmrl_jax.train.config import Config
from wmrl_jax.train.config_loader import config_listing, config_values, load_config
from wmrl_jax.train.files import write_whole

CONFIG_FILE = "config.yaml"

FREE_KEYS = frozenset({"name", "out", "sandbox.slots", "checkpoint.every", "checkpoint.keep"})
"""Keys that may change between a run and its resumption: none of them changes what is computed."""


def run_folder(config: Config) -> Path:
    """The folder of the run, whether it exists or not."""
    return Path(config.out) / config.name


def claim_run_folder(config: Config) -> Path:
    """Creates the run's folder and saves the configuration in it, or finds it there.

    Raises:
      UserError: the folder was made by another configuration (its text names the keys that
        differ), or holds something that is no run.
    """
    folder = run_folder(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(
            f"{folder} is in the way: a file stands where the run's folder goes"
        ) from None
    saved = folder / CONFIG_FILE
    if saved.exists():
        _refuse_another_configuration(folder, config_values(load_config(saved)), config)
    elif any(folder.iterdir()):
        raise UserError(
            f"{folder} is not empty and holds no {CONFIG_FILE}, so it is no run's folder: "
            "choose another name"
        )
    write_whole(saved, config_listing(config))
    return folder


def load_run_config(folder: Path | str) -> Config:
    """The configuration that a run's folder was made by, wherever the folder is now.

    Raises:
      UserError: there is no such folder, or it holds no configuration.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: give a run's folder, runs/quickstart for instance")
    if not (folder / CONFIG_FILE).exists():
        raise UserError(f"{folder} holds no {CONFIG_FILE}, so it is no run's folder")
    place = folder.resolve()
    config = load_config(folder / CONFIG_FILE)
    return dataclasses.replace(config, out=str(place.parent), name=place.name)


def _refuse_another_configuration(folder: Path, saved: dict, config: Config) -> None:
    now = config_values(config)
    differing = [
        f"{key} ({saved[key]!r} there, {now[key]!r} here)"
        for key in now
        if key not in FREE_KEYS and saved[key] != now[key]
    ]
    if not differing:
        return
    shown = ", ".join(differing[:4])
    more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
    raise UserError(
        f"{folder} was made by another configuration, which differs in {shown}{more}: give this "
        "run another name (--set name=...) or move that folder away"
    )
