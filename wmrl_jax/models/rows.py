"""Token rows in batches of few static shapes, completions of one prompt side by side.

A row is a prompt, a completion and the end-of-text. Compiled programs want static shapes, padding
costs as much as text, and a prompt that many rows share need be computed only once: so rows are
batched in groups of one prompt, with others whose completions are of about their length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wmrl_jax.errors import UserError


class Row(NamedTuple):
    """One text as token ids.

    Attributes:
      prompt: what is read only.
      completion: what was written, end-of-text included where it has one.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]


class GroupedRows(NamedTuple):
    """Rows of G prompts with N completions each.

    Attributes:
      prompts: int32 [G, P], padded on the right.
      prompt_lengths: int32 [G].
      completions: int32 [G, N, S], padded on the right.
      lengths: int32 [G, N], of the completions; 0 for a place without a row.
    """

    prompts: jax.Array
    prompt_lengths: jax.Array
    completions: jax.Array
    lengths: jax.Array


def pad_groups(
    groups: Sequence[Sequence[Row]],
    *,
    prompt_tokens: int,
    new_tokens: int,
    pad_id: int,
) -> GroupedRows:
    """Pads groups of rows to one shape.

    Args:
      groups: each N rows of one prompt.
      prompt_tokens: P.
      new_tokens: S.
      pad_id: fills up.

    Raises:
      UserError: a prompt or a completion does not fit.
    """
    prompts = np.full((len(groups), prompt_tokens), pad_id, np.int32)
    completions = np.full((len(groups), len(groups[0]), new_tokens), pad_id, np.int32)
    lengths = np.zeros((len(groups), len(groups[0])), np.int32)
    for g, group in enumerate(groups):
        prompt = group[0].prompt
        longest = max(len(row.completion) for row in group)
        if len(prompt) > prompt_tokens or longest > new_tokens:
            raise UserError(
                f"a prompt of {len(prompt)} tokens with a completion of {longest} does not fit "
                f"into {prompt_tokens} and {new_tokens}; raise model.prompt_tokens or "
                "model.new_tokens"
            )
        prompts[g, : len(prompt)] = prompt
        for n, row in enumerate(group):
            completions[g, n, : len(row.completion)] = row.completion
            lengths[g, n] = len(row.completion)
    prompt_lengths = np.asarray([len(group[0].prompt) for group in groups], np.int32)
    return GroupedRows(
        *(jnp.asarray(part) for part in (prompts, prompt_lengths, completions, lengths))
    )


def round_up(tokens: int, multiple: int = 16) -> int:
    """The next static length."""
    return -(-tokens // multiple) * multiple


def bucket_lengths(lengths: Sequence[int], *, count: int) -> tuple[int, ...]:
    """The at most `count` static lengths, ascending, that hold all rows with the least padding.

    Exact, by dynamic programming over the distinct lengths rounded up.
    """
    values, numbers = np.unique([round_up(length) for length in lengths], return_counts=True)
    before = np.concatenate([[0], np.cumsum(numbers)])
    # best[j]: the least padded area of the j shortest distinct lengths, and the buckets behind it.
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())] + [(np.inf, ())] * len(values)
    for _ in range(min(count, len(values))):
        best = [(0.0, ())] + [
            min(
                (
                    area + float((before[end] - before[start]) * values[end - 1]),
                    (*buckets, int(values[end - 1])),
                )
                for start, (area, buckets) in enumerate(best[:end])
            )
            for end in range(1, len(values) + 1)
        ]
    return best[-1][1]


def choose_group_size(rows: Sequence[Row], batch_size: int, devices: int = 1) -> int:
    """Rows of one prompt in a batch: 8, 4, 2 or 1.

    The largest that the batch and the devices divide into and of which a typical prompt has rows
    enough for four groups, so that groups mix.
    """
    counts: dict[tuple[int, ...], int] = {}
    for row in rows:
        counts[row.prompt] = counts.get(row.prompt, 0) + 1
    typical = float(np.median(list(counts.values())))
    return next((n for n in (8, 4, 2) if batch_size % (n * devices) == 0 and typical >= 4 * n), 1)


def grouped_batches(
    rows: Sequence[Row], buckets: Sequence[int], batch_size: int, group_size: int, seed: int
) -> Iterator[tuple[np.ndarray, int]]:
    """Endless batches of groups of one prompt and about one length, decided by the arguments alone.

    Rows come in a fresh permutation per epoch and wait, by prompt and by the shortest bucket that
    holds their completion, for a group to fill; groups wait for a batch to fill. So every batch
    is complete, and each row comes up once per epoch but for those that wait over its end.

    Yields:
      row indices, int [G, N] with G * N = batch_size, and the batch's bucket.

    Raises:
      ValueError: there are no rows, or a completion fits no bucket.
    """
    if not rows:
        raise ValueError("there are no rows to batch")
    edges = np.sort(np.asarray(buckets))
    bucket_of = np.searchsorted(edges, [len(row.completion) for row in rows])
    if bucket_of.max() == len(edges):
        raise ValueError(f"a completion is longer than the longest bucket, {edges[-1]} tokens")
    waiting: dict[tuple[tuple[int, ...], int], list[int]] = {}
    groups: list[list[list[int]]] = [[] for _ in edges]
    epoch = 0
    while True:
        for index in np.random.default_rng([seed, epoch]).permutation(len(rows)):
            bucket = int(bucket_of[index])
            group = waiting.setdefault((rows[index].prompt, bucket), [])
            group.append(int(index))
            if len(group) < group_size:
                continue
            del waiting[rows[index].prompt, bucket]
            groups[bucket].append(group)
            if len(groups[bucket]) * group_size == batch_size:
                yield np.asarray(groups[bucket]), int(edges[bucket])
                groups[bucket] = []
        epoch += 1


def key_seed(key: jax.Array) -> int:
    """A NumPy seed out of a JAX key."""
    return int(np.asarray(jax.random.bits(key, (), np.uint32)))
