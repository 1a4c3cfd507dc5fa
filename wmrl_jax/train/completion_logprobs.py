"""Log-probs of a batch's completions: the train step's and the KL reference's, packed or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh

from wmrl_jax.method.logprobs import token_logprobs
from wmrl_jax.models.model import Model
from wmrl_jax.models.packing import capacity_for, make_packing, pack, unpack
from wmrl_jax.rollout.compact import join_rows, prompt_lengths_of, split_rows
from wmrl_jax.train.config import Config
from wmrl_jax.train.mesh import by_group, replicated
from wmrl_jax.types import Rollouts


def completion_logprobs(
    model: Model,
    config: Config,
    params: Any,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    completions: jax.Array,
    lengths: jax.Array,
    capacity: int | None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies float32 [G, N, S] of completions, at the sampler's temperature.

    Args:
      model: the backbone.
      config: its sections sampler and train are read.
      params: the backbone's parameters.
      prompts: int32 [G, P].
      prompt_lengths: int32 [G].
      completions: int32 [G, N, S].
      lengths: int32 [G, N], tokens of each completion that matter.
      capacity: tokens of a group to pack them in, from `make_capacity`; None: not packed. Where
        packed, entries behind a completion's length are 0.
    """
    score = partial(token_logprobs, temperature=config.sampler.temperature)
    head, chunk = model.unembedding(params), config.train.logprob_chunk
    groups, rows, new_tokens = completions.shape
    if capacity is None:
        states = model.completion_states(params, prompts, prompt_lengths, completions)
        return score(states[:, :, :-1], head, completions, chunk=chunk)
    packing = make_packing(lengths, new_tokens, capacity)
    states = model.packed_states(params, prompts, prompt_lengths, completions, packing)
    targets = pack(packing, completions.reshape(groups, -1))
    logprobs, entropy = score(states, head, targets, chunk=rows * chunk)
    return (
        unpack(packing, logprobs).reshape(completions.shape),
        unpack(packing, entropy).reshape(completions.shape),
    )


def make_capacity(config: Config, mesh: Mesh) -> Callable[[jax.Array], int | None]:
    """The function that finds a batch's capacity for packing, of its loss mask [G, N, T].

    It is None where `train.packing` is off, and inside another program, where lengths are unknown.
    """

    def tokens(mask: jax.Array) -> jax.Array:
        width = config.model.prompt_tokens
        completions = split_rows(mask, prompt_lengths_of(mask, width), width)[1]
        return jnp.max(jnp.sum(completion_lengths(completions), axis=1))

    fullest = jax.jit(tokens, out_shardings=replicated(mesh))

    def capacity(mask: jax.Array) -> int | None:
        if not config.train.packing or isinstance(mask, Tracer):
            return None
        slots = mask.shape[1] * (mask.shape[2] - config.model.prompt_tokens)
        return capacity_for(int(fullest(mask)), slots)

    return capacity


def completion_lengths(mask: jax.Array) -> jax.Array:
    """Tokens int32 [G, N] up to the last that counts, of masks [G, N, S]."""
    return jnp.max(jnp.where(mask, jnp.arange(1, mask.shape[-1] + 1), 0), axis=-1)


def make_reference(
    model: Model, config: Config, mesh: Mesh
) -> Callable[[Any, Rollouts], jax.Array] | None:
    """`(params, rollouts) -> log-probs float32 [G, N, T]` under a KL reference; None without one.

    Args:
      model: the backbone.
      config: without `loss.kl_coef` there is no reference.
      mesh: the devices.
    """
    if config.loss.kl_coef == 0.0:
        return None

    width, split = config.model.prompt_tokens, by_group(mesh)

    def reference(params: Any, rollouts: Rollouts, capacity: int | None) -> jax.Array:
        lengths = rollouts.prompt_lengths
        prompts, completions = split_rows(rollouts.tokens, lengths, width)
        _, mask = split_rows(rollouts.loss_mask, lengths, width)
        logprobs, _ = completion_logprobs(
            model, config, params, prompts, lengths, completions, completion_lengths(mask), capacity
        )
        joined = join_rows(logprobs, lengths, width)
        return jnp.where(rollouts.loss_mask, joined, 0.0)

    @cache
    def compiled(capacity: int | None) -> Callable[[Any, Rollouts], jax.Array]:
        return jax.jit(
            partial(reference, capacity=capacity),
            in_shardings=(replicated(mesh), split),
            out_shardings=split,
        )

    capacity_of = make_capacity(config, mesh)
    return lambda params, rollouts: compiled(capacity_of(rollouts.loss_mask))(params, rollouts)
