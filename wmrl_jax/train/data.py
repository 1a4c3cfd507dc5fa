"""Which tasks a step draws: a grain pipeline whose position is part of the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import grain
import numpy as np

from wmrl_jax.errors import UserError


def task_iterator(n_tasks: int, groups: int, seed: int) -> grain.DatasetIterator:
    """Iterator over int arrays [groups] of task indices.

    Every pass over the tasks is a fresh permutation; passes follow each other without a gap, so
    that all tasks come up equally often whatever the number of groups.
    """
    if n_tasks < 1:
        raise UserError("there is no task to train on; name some under tasks.train")
    indices = grain.MapDataset.range(n_tasks).seed(seed).shuffle().repeat()
    return iter(indices.batch(groups).to_iter_dataset())


def pad_prompts(
    prompts: Sequence[Sequence[int]], length: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (int32 [n, length] right-padded prompts, int32 [n] lengths)."""
    rows = np.full((len(prompts), length), pad_id, np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    return rows, np.asarray([len(p) for p in prompts], np.int32)
