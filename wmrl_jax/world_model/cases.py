"""Executed cases: what the world model learns from and is measured on.

A file of cases is JSON Lines, one object per case with the fields of `Case`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from wmrl_jax.errors import UserError
from wmrl_jax.models.rows import Row
from wmrl_jax.models.tokenizer import Tokenizer
from wmrl_jax.types import STATUSES, Outcome, Status, reward_of

log = logging.getLogger(__name__)

Split = Literal["train", "validation", "heldout"]
"""Learnt from; looked at to stop early; looked at only to report."""


class Case(NamedTuple):
    """One solution and what execution said of it.

    Attributes:
      task: the task's name.
      completion: what the agent wrote, as text.
      status: one of `STATUSES` but `unknown`.
      position: leaderboard position in [0, 1] where valid, else None.
      value: metric value where valid, else None.
      reward: by the ladder.
      seconds: slot-seconds that the execution took.
      split: see `Split`.
    """

    task: str
    completion: str
    status: Status
    position: float | None
    value: float | None
    reward: float
    seconds: float
    split: Split


def split_of(task: str, completion: str, heldout_fraction: float) -> Split:
    """The split of a case: decided by its text alone, so that equal cases never part.

    A share `heldout_fraction` is held out, and half as much again is for validation.
    """
    digest = hashlib.sha256(f"{task}\0{completion}".encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    if share < heldout_fraction:
        return "heldout"
    return "validation" if share < 1.5 * heldout_fraction else "train"


def make_cases(
    executed: Iterable[tuple[str, str, Outcome]], heldout_fraction: float = 0.2
) -> list[Case]:
    """Cases from (task name, completion, outcome); without ungraded outcomes and repetitions."""
    cases: dict[tuple[str, str], Case] = {}
    for task, completion, outcome in executed:
        if outcome.status != "unknown":
            cases[task, completion] = Case(
                task, completion, outcome.status, outcome.position, outcome.value,
                outcome.reward, outcome.seconds, split_of(task, completion, heldout_fraction),
            )  # fmt: skip
    return list(cases.values())


def save_cases(path: Path, cases: Sequence[Case]) -> None:
    """Writes the cases, replacing the file in one piece."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        for case in cases:
            file.write(json.dumps(case._asdict(), ensure_ascii=False, allow_nan=False) + "\n")
    os.replace(part, path)


def load_cases(path: Path) -> list[Case]:
    """Reads a file of cases.

    Raises:
      UserError: the file is missing or a line of it is not a case; the sentence names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise UserError(
            f"there is no file of executed cases at {path}; make one with `wmrl world-model cases`"
        ) from None
    return [
        _parse(line, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _parse(line: str, where: str) -> Case:
    try:
        fields: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg}); make the cases anew") from None
    if not isinstance(fields, dict) or set(fields) != set(Case._fields):
        raise UserError(f"{where}: a case has exactly the fields {', '.join(Case._fields)}")
    case = Case(**fields)
    if case.status not in STATUSES or case.status == "unknown":
        raise UserError(f"{where}: {case.status!r} is not the status of an executed case")
    if case.split not in get_args(Split):
        raise UserError(f"{where}: {case.split!r} is none of the splits {get_args(Split)}")
    has_position = isinstance(case.position, int | float) and 0.0 <= case.position <= 1.0
    if (case.status == "valid") != has_position:
        raise UserError(f"{where}: a valid case, and no other, has a position in [0, 1]")
    if abs(reward_of(case.status, case.position) - case.reward) > 1e-6:
        raise UserError(f"{where}: reward {case.reward} is not what the ladder gives")
    return case


def case_rows(
    tokenizer: Tokenizer,
    prompts: Mapping[str, str],
    cases: Sequence[Case],
    *,
    max_tokens: int | None = None,
) -> tuple[list[Row], list[Case]]:
    """The rows that the world model reads, as the sampler would have written them.

    Args:
      tokenizer: the model's.
      prompts: prompt text by task name.
      cases: the cases; those of more than `max_tokens` tokens are left out with a warning.
      max_tokens: prompt and completion together, end-of-text included.

    Returns:
      rows, and the cases that they are of.

    Raises:
      UserError: a case's task has no prompt.
    """
    missing = sorted({case.task for case in cases} - set(prompts))
    if missing:
        raise UserError(
            f"there are executed cases of {', '.join(missing)}, which this run's tasks do not "
            "include; make the cases anew or name the tasks"
        )
    ids = {task: tuple(tokenizer.encode_prompt(prompts[task])) for task in {c.task for c in cases}}
    pairs = [
        (Row(ids[case.task], (*tokenizer.encode(case.completion), tokenizer.eos_id)), case)
        for case in cases
    ]
    kept = [
        (row, case)
        for row, case in pairs
        if max_tokens is None or len(row.prompt) + len(row.completion) <= max_tokens
    ]
    if len(kept) < len(pairs):
        log.warning(
            "%d of %d executed cases have more than %d tokens and are left out",
            len(pairs) - len(kept), len(pairs), max_tokens,
        )  # fmt: skip
    return [row for row, _ in kept], [case for _, case in kept]
