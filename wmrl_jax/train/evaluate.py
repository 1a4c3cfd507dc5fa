"""What an evaluation by real execution says: means, intervals, differences.

Everything here is computed from *records*, one plain dict per executed sample:

| key | meaning |
|---|---|
| `task`, `split` | the task's name, and `train` or `heldout` |
| `sample` | number of the sample within its task |
| `status` | one of `wmrl_jax.types.STATUSES` |
| `reward` | by the reward ladder; None or NaN where `unknown` |
| `position` | leaderboard position in [0, 1] where valid, else None |
| `value` | metric value where valid, else None |
| `seconds` | slot-seconds of the execution |
| `completion` | the agent's text |

The tasks are fixed and their samples are random: a split's mean is the mean of its tasks' means,
and the intervals come from resampling the samples within each task. Samples whose grade is unknown
are left out and counted.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from wmrl_jax.errors import UserError
from wmrl_jax.types import STATUSES

Record = Mapping[str, Any]

RECORD_KEYS = ("task", "split", "sample", "status", "reward", "position", "value", "seconds")
"""Keys that every record has; `completion` is optional."""

SPLITS = ("train", "heldout")
"""The splits, in the order of every table."""

CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A mean with its bootstrap interval.

    Attributes:
      mean: NaN where nothing was graded.
      low: lower end of the 95 % interval; NaN where one sample of a task leaves the spread unknown.
      high: upper end.
    """

    mean: float
    low: float
    high: float


class Summary(NamedTuple):
    """One task, one split, or everything.

    Attributes:
      name: the task's name, the split's, or `overall`.
      split: `train` or `heldout`; the empty string for `overall`.
      tasks: how many tasks had a graded sample.
      samples: graded samples.
      ungraded: samples whose grade is unknown, excluded everywhere else.
      reward: mean reward, of tasks' means where there are several tasks.
      position: the same of the leaderboard position, a failure counting 0.
      statuses: share of each status but `unknown` among the graded samples (mean over the tasks).
      seconds: slot-seconds of all executions together.
    """

    name: str
    split: str
    tasks: int
    samples: int
    ungraded: int
    reward: Estimate
    position: Estimate
    statuses: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """The statistics of one evaluation, and the records they were computed from.

    Attributes:
      tasks: one summary per task, training tasks first.
      splits: one summary per split that occurs.
      overall: all tasks together.
      records: the records, sorted by split, task and sample.
      bootstrap: resamples behind every interval.
      seed: of the resampling.
    """

    tasks: tuple[Summary, ...]
    splits: tuple[Summary, ...]
    overall: Summary
    records: tuple[Record, ...]
    bootstrap: int
    seed: int

    def rows(self) -> tuple[Summary, ...]:
        """Every summary: tasks, splits, overall."""
        return (*self.tasks, *self.splits, self.overall)


class Difference(NamedTuple):
    """After minus before, for one task, one split, or everything.

    Attributes:
      name: as in `Summary`.
      split: as in `Summary`.
      tasks: tasks that both evaluations graded.
      before: mean reward before, over those tasks.
      after: mean reward after.
      reward: difference of the mean rewards.
      position: difference of the mean positions.
    """

    name: str
    split: str
    tasks: int
    before: float
    after: float
    reward: Estimate
    position: Estimate


@dataclass(frozen=True)
class Comparison:
    """Two evaluations, paired by task.

    Attributes:
      tasks: one difference per task that both graded.
      splits: one per split.
      overall: all those tasks together.
      unpaired: names of tasks that only one evaluation graded, left out everywhere.
    """

    tasks: tuple[Difference, ...]
    splits: tuple[Difference, ...]
    overall: Difference
    unpaired: tuple[str, ...]

    def rows(self) -> tuple[Difference, ...]:
        """Every difference: tasks, splits, overall."""
        return (*self.tasks, *self.splits, self.overall)


class _Draws(NamedTuple):
    """Graded samples of one task: values [n, 2] (reward, position) and resampled means [B, 2]."""

    values: np.ndarray
    means: np.ndarray


def summarise(records: Iterable[Record], *, bootstrap: int = 2000, seed: int = 0) -> Evaluation:
    """Statistics of one evaluation.

    Args:
      records: one per executed sample, in any order; see the module's table.
      bootstrap: resamples behind each interval.
      seed: of the resampling; a task's interval depends on it and on that task's records alone.

    Raises:
      UserError: no records, a record with a missing key, an unknown status or split, a reward that
        contradicts its status, a task in two splits, or fewer than one resample.
    """
    if bootstrap < 1:
        raise UserError(f"eval.bootstrap is {bootstrap}; it must be at least 1")
    checked = _check(records)
    names = list(dict.fromkeys(r["task"] for r in checked))
    groups = {name: [r for r in checked if r["task"] == name] for name in names}
    draws = {
        name: _draw(group, bootstrap, (seed, zlib.crc32(name.encode())))
        for name, group in groups.items()
    }

    def summary(name: str, split: str, members: Sequence[str]) -> Summary:
        graded = [m for m in members if len(draws[m].values)]
        reward, position = _estimates([draws[m] for m in graded])
        return Summary(
            name=name,
            split=split,
            tasks=len(graded),
            samples=sum(len(draws[m].values) for m in members),
            ungraded=sum(r["status"] == "unknown" for m in members for r in groups[m]),
            reward=reward,
            position=position,
            statuses=_mean_shares([groups[m] for m in graded]),
            seconds=math.fsum(r["seconds"] for m in members for r in groups[m]),
        )

    split_of = {name: groups[name][0]["split"] for name in names}
    by_split = {s: [n for n in names if split_of[n] == s] for s in SPLITS}
    return Evaluation(
        tasks=tuple(summary(n, split_of[n], [n]) for n in names),
        splits=tuple(summary(s, s, members) for s, members in by_split.items() if members),
        overall=summary("overall", "", names),
        records=tuple(checked),
        bootstrap=bootstrap,
        seed=seed,
    )


def compare(before: Evaluation, after: Evaluation) -> Comparison:
    """After minus before, with intervals, over the tasks that both evaluations graded.

    Pairing by task takes the differences between tasks out of the interval. The samples of the two
    sides are independent, so they are resampled independently.

    Raises:
      UserError: the evaluations have no graded task in common.
    """
    split_of = {s.name: s.split for s in (*before.tasks, *after.tasks)}
    graded = [{s.name for s in side.tasks if s.samples} for side in (before, after)]
    common = [name for name in split_of if name in graded[0] & graded[1]]
    if not common:
        raise UserError("the two evaluations have no graded task in common to be compared by")
    bootstrap = min(before.bootstrap, after.bootstrap)
    draws = [
        {
            name: _draw(
                [r for r in side.records if r["task"] == name],
                bootstrap,
                (side.seed, zlib.crc32(name.encode()), role),
            )
            for name in common
        }
        for role, side in ((1, before), (2, after))
    ]

    def difference(name: str, split: str, members: Sequence[str]) -> Difference:
        values = [
            [(d[m].values.mean(axis=0), d[m].means) for m in members] for d in draws
        ]  # [side][task]
        means = [np.mean([v for v, _ in side], axis=0) for side in values]
        resampled = np.mean([a for _, a in values[1]], axis=0) - np.mean(
            [b for _, b in values[0]], axis=0
        )
        shift = means[1] - means[0]
        return Difference(
            name=name,
            split=split,
            tasks=len(members),
            before=float(means[0][0]),
            after=float(means[1][0]),
            reward=_interval(shift[0], resampled[:, 0]),
            position=_interval(shift[1], resampled[:, 1]),
        )

    by_split = {s: [n for n in common if split_of[n] == s] for s in SPLITS}
    return Comparison(
        tasks=tuple(difference(n, split_of[n], [n]) for n in common),
        splits=tuple(difference(s, s, members) for s, members in by_split.items() if members),
        overall=difference("overall", "", common),
        unpaired=tuple(sorted(set(split_of) - set(common))),
    )


def _check(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Copies of the records with unknown rewards as None, sorted; every fault is a `UserError`."""
    checked, split_of = [], {}
    for number, record in enumerate(records):
        missing = [k for k in RECORD_KEYS if k not in record]
        if missing:
            raise UserError(f"evaluation record {number} lacks {', '.join(missing)}")
        task, status, reward = record["task"], record["status"], record["reward"]
        if status not in STATUSES:
            raise UserError(
                f"evaluation record {number} of {task} has the status {status!r}; "
                f"allowed are {', '.join(STATUSES)}"
            )
        if record["split"] not in SPLITS:
            raise UserError(
                f"evaluation record {number} of {task} has the split {record['split']!r}; "
                f"allowed are {' and '.join(SPLITS)}"
            )
        if split_of.setdefault(task, record["split"]) != record["split"]:
            raise UserError(f"the evaluation has {task} in both splits; a task belongs to one")
        reward = math.nan if reward is None else float(reward)
        if math.isnan(reward) != (status == "unknown"):
            raise UserError(
                f"evaluation record {number} of {task} has the status {status} and the reward "
                f"{reward}; a reward is missing exactly where the status is unknown"
            )
        position = record["position"]
        if status == "valid" and (position is None or not 0.0 <= position <= 1.0):
            raise UserError(
                f"evaluation record {number} of {task} is valid and has the position {position}; "
                "it must lie in [0, 1]"
            )
        checked.append({**record, "reward": None if status == "unknown" else reward})
    if not checked:
        raise UserError("the evaluation has no records, so there is nothing to summarise")
    return sorted(checked, key=lambda r: (SPLITS.index(r["split"]), r["task"], r["sample"]))


def _draw(records: Sequence[Record], bootstrap: int, entropy: Sequence[int]) -> _Draws:
    """Resampled means of one task's reward and position.

    Each resample draws n - 1 of the n samples with replacement (Rao and Wu 1988, JASA 83:231):
    its variance is then the unbiased estimate s²/n, where resamples of n samples would fall short
    by the factor (n - 1)/n, an eighth at eight samples a task. One sample says nothing of its
    spread: its resampled means are NaN, and so are intervals that need them.
    """
    values = np.array(
        [
            (r["reward"], r["position"] if r["status"] == "valid" else 0.0)
            for r in records
            if r["status"] != "unknown"
        ],
        dtype=np.float64,
    ).reshape(-1, 2)
    n = len(values)
    if n < 2:
        return _Draws(values, np.full((bootstrap, 2), np.nan))
    chosen = np.random.default_rng(list(entropy)).integers(n, size=(bootstrap, n - 1))
    return _Draws(values, values[chosen].mean(axis=1))


def _estimates(draws: Sequence[_Draws]) -> list[Estimate]:
    """Reward and position, averaged over tasks."""
    if not draws:
        return [Estimate(math.nan, math.nan, math.nan)] * 2
    mean = np.mean([d.values.mean(axis=0) for d in draws], axis=0)
    resampled = np.mean([d.means for d in draws], axis=0)
    return [_interval(mean[i], resampled[:, i]) for i in range(2)]


def _interval(mean: float, resampled: np.ndarray) -> Estimate:
    """Percentile interval; NaN ends where the resampled values are NaN."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Estimate(float(mean), float(low), float(high))


def _mean_shares(groups: Sequence[Sequence[Record]]) -> dict[str, float]:
    """Share of each status among the graded samples, averaged over tasks."""
    shares = {}
    for status in STATUSES:
        if status == "unknown":
            continue
        per_task = []
        for group in groups:
            graded = [r for r in group if r["status"] != "unknown"]
            per_task.append(sum(r["status"] == status for r in graded) / len(graded))
        shares[status] = float(np.mean(per_task)) if per_task else math.nan
    return shares
