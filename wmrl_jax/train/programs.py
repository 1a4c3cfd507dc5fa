"""Programs of a policy outside the training loop: drawn for tasks, and their texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from wmrl_jax.models.tokenizer import Tokenizer
from wmrl_jax.train.mesh import put_by_group
from wmrl_jax.train.setting import Setting
from wmrl_jax.types import Rollouts


class Drawn(NamedTuple):
    """One completion of a policy: its task, its number among the task's, and its text."""

    task: str
    sample: int
    completion: str


def draw_programs(
    setting: Setting,
    params: Any,
    names: Sequence[str],
    samples: int,
    key: jax.Array,
    temperature: float,
) -> list[Drawn]:
    """`samples` completions of each task, ordered by block of tasks.

    Args:
      setting: its compiled sampler draws, `train.groups` tasks of `train.group_size` at a time.
      params: of the policy.
      names: of the tasks.
      samples: completions a task.
      key: alone decides the noise, so that two policies are compared on the same draws.
      temperature: of the sampler.
    """
    config = setting.config
    groups, size = config.train.groups, config.train.group_size
    drawn: list[Drawn] = []
    for round_ in range(math.ceil(samples / size)):
        for first in range(0, len(names), groups):
            block = [names[(first + i) % len(names)] for i in range(groups)]
            prompts, lengths = setting.prompt_arrays(block)
            rollouts = setting.sampler(
                params,
                put_by_group(setting.mesh, prompts),
                put_by_group(setting.mesh, lengths),
                jax.random.fold_in(jax.random.fold_in(key, round_), first),
                temperature=temperature,
                top_k=config.sampler.top_k,
                top_p=config.sampler.top_p,
            )
            texts = decode_completions(setting.tokenizer, rollouts)
            for name, group in zip(names[first : first + groups], texts, strict=False):
                drawn += [Drawn(name, round_ * size + j, text) for j, text in enumerate(group)]
    return [d for d in drawn if d.sample < samples]


def decode_completions(tokenizer: Tokenizer, rollouts: Rollouts) -> list[list[str]]:
    """Texts [G][N] of the completions, end-of-text left out."""
    tokens, lengths, starts = jax.device_get(
        (rollouts.tokens, rollouts.lengths, rollouts.prompt_lengths)
    )

    def text(row: np.ndarray, start: int, end: int) -> str:
        ids = row[start:end].tolist()
        return tokenizer.decode(ids[:-1] if ids and ids[-1] == tokenizer.eos_id else ids)

    return [
        [text(row, int(start), int(end)) for row, end in zip(group, ends, strict=True)]
        for group, ends, start in zip(tokens, lengths, starts, strict=True)
    ]
