"""Prompts of any width through a small set of compiled samplers.

Attention over a prompt's padding costs as much as over its text, and every width is a compiled
program: so prompts are rounded up to one of few widths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wmrl_jax.errors import UserError
from wmrl_jax.rollout.sampler import SampleFn
from wmrl_jax.types import Rollouts


class BucketedSampler(NamedTuple):
    """A sampler for prompts of any width.

    Attributes:
      sample: as `SampleFn`, with prompts of any width P and lengths that are known on the host;
        rows come back as wide as those of the widest bucket, T = max(widths) + new_tokens, so that
        what reads them has one shape.
      programs: () -> how many programs were compiled so far: one for each bucket and number of
        groups that came up.
    """

    sample: SampleFn
    programs: Callable[[], int]


def bucket_prompts(
    make: Callable[[int], SampleFn], widths: Sequence[int], *, pad_id: int
) -> BucketedSampler:
    """A sampler that rounds the width of its prompts up.

    Args:
      make: a bucket's width -> the sampler of prompts of this width; called when the bucket first
        comes up: `lambda width: make_sampler(model, prompt_tokens=width, ...)`.
      widths: of the buckets; `models.rows.bucket_lengths` finds those with the least padding.
      pad_id: what prompts and rows are padded with.

    Raises:
      UserError: no width, or one below 1.
    """
    if not widths or min(widths) < 1:
        raise UserError(f"prompt buckets must be widths of at least 1 token, not {list(widths)}")
    buckets = sorted(set(widths))
    sampler_of = cache(make)
    compiled: set[tuple[int, int]] = set()

    def sample(
        params: Any, prompts: Any, prompt_lengths: Any, key: jax.Array, **settings: Any
    ) -> Rollouts:
        longest = int(np.max(prompt_lengths))
        width = next((bucket for bucket in buckets if bucket >= longest), None)
        if width is None:
            raise UserError(
                f"a prompt has {longest} tokens and the widest bucket {buckets[-1]}; "
                "shorten the prompt or add a bucket"
            )
        if longest > prompts.shape[1]:
            raise UserError(
                f"a prompt's length is {longest} and the prompts are {prompts.shape[1]} wide"
            )
        prompts = jnp.asarray(prompts, jnp.int32)[:, :width]
        prompts = _widen(prompts, width, pad_id)
        compiled.add((width, prompts.shape[0]))
        rollouts = sampler_of(width)(params, prompts, prompt_lengths, key, **settings)
        total = rollouts.tokens.shape[-1] + buckets[-1] - width
        return rollouts._replace(
            tokens=_widen(rollouts.tokens, total, pad_id),
            loss_mask=_widen(rollouts.loss_mask, total, False),
            behaviour_logprobs=_widen(rollouts.behaviour_logprobs, total, 0.0),
        )

    return BucketedSampler(sample, lambda: len(compiled))


def _widen(rows: jax.Array, width: int, fill: float) -> jax.Array:
    """Rows [..., T] padded on the right."""
    more = [(0, 0)] * (rows.ndim - 1) + [(0, width - rows.shape[-1])]
    return jnp.pad(rows, more, constant_values=fill)
