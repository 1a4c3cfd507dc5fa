"""Scores by one forward pass: a distribution over outcome tokens, whose expectation is the score.

The world model reads prompt, completion, and a slot token placed directly behind the row's last
token. The logits there, restricted to the outcome tokens, are a distribution over K = 7 + levels
outcomes: every status but `unknown`, with `valid` split in quality levels by leaderboard position.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from wmrl_jax.errors import UserError
from wmrl_jax.models.model import Model
from wmrl_jax.models.rows import GroupedRows
from wmrl_jax.models.tokenizer import Tokenizer
from wmrl_jax.types import REWARD_LADDER, STATUSES, Status

FAILURES: tuple[Status, ...] = tuple(s for s in STATUSES if s not in ("valid", "unknown"))
"""The first outcomes, in the order of their tokens; the quality levels follow, worst first."""


class WorldModel(NamedTuple):
    """The tuned world model: all that scoring needs, a pytree to save as one.

    Attributes:
      params: the backbone's parameters.
      positions: float32 [levels], the leaderboard position that each quality level stands for.
    """

    params: Any
    positions: jax.Array


class Prediction(NamedTuple):
    """What the world model says of a solution.

    Attributes:
      score: float32 [...], expected reward; NaN for a row of no tokens.
      probs: float32 [..., K], over `FAILURES` and then the quality levels; NaN likewise.
      status: int32 [...], index in `STATUSES` of the likeliest status; `unknown` likewise.
    """

    score: jax.Array
    probs: jax.Array
    status: jax.Array


ScoreFn = Callable[[WorldModel, jax.Array, jax.Array], Prediction]
"""(world model, tokens [G, N, T], lengths [G, N]) -> Prediction [G, N]."""


def level_positions(levels: int) -> jax.Array:
    """Positions float32 [levels], evenly from 0 to 1: the knots of `level_targets`."""
    return jnp.linspace(0.0, 1.0, levels, dtype=jnp.float32)


def outcome_count(levels: int) -> int:
    """K, the number of outcomes."""
    return len(FAILURES) + levels


def outcome_token_ids(tokenizer: Tokenizer, levels: int) -> np.ndarray:
    """Token ids int32 [K] of the outcomes.

    Raises:
      UserError: the tokenizer has fewer outcome tokens than that.
    """
    ids = np.asarray(tokenizer.outcome_ids, np.int32)
    if levels < 2 or outcome_count(levels) > len(ids):
        raise UserError(
            f"world_model.quality_levels is {levels}; this tokenizer has outcome tokens for 2 to "
            f"{len(ids) - len(FAILURES)} levels"
        )
    return ids[: outcome_count(levels)]


def outcome_rewards(positions: jax.Array) -> jax.Array:
    """Reward float32 [K] of each outcome, by the ladder; `positions` [levels] of the levels."""
    failures = jnp.asarray([REWARD_LADDER[s] for s in FAILURES], jnp.float32)
    return jnp.concatenate([failures, REWARD_LADDER["valid"] + 0.5 * positions])


def status_probs(probs: jax.Array) -> jax.Array:
    """Probabilities [..., 8] of the statuses but `unknown`, in their order, from [..., K]."""
    failures, valid = jnp.split(probs, [len(FAILURES)], axis=-1)
    return jnp.concatenate([failures, valid.sum(-1, keepdims=True)], axis=-1)


def predict(logits: jax.Array, positions: jax.Array) -> Prediction:
    """Prediction [...] from outcome logits [..., K] and the levels' positions [levels]."""
    probs = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    # `FAILURES` and `valid` are the first statuses in order, so the index is one into STATUSES.
    status = jnp.argmax(status_probs(probs), axis=-1).astype(jnp.int32)
    return Prediction(probs @ outcome_rewards(positions), probs, status)


def slot_logits(
    model: Model, params: Any, rows: GroupedRows, *, outcome_id: int, outcome_ids: np.ndarray
) -> jax.Array:
    """Outcome logits float32 [G, N, K] at the slot behind each row's last token.

    Args:
      model: the backbone.
      params: its parameters.
      rows: G prompts with N completions; what stands at and behind `lengths` has no influence.
      outcome_id: the slot token.
      outcome_ids: int32 [K].
    """
    lengths = rows.lengths[..., None]
    with_slot = jnp.pad(rows.completions, ((0, 0), (0, 0), (0, 1)))
    with_slot = jnp.where(jnp.arange(with_slot.shape[-1]) == lengths, outcome_id, with_slot)
    states = model.completion_states(params, rows.prompts, rows.prompt_lengths, with_slot)
    behind_slot = jnp.take_along_axis(states, lengths[..., None] + 1, axis=2)[:, :, 0]
    unembedding = model.unembedding(params)[:, outcome_ids]
    return jnp.matmul(behind_slot, unembedding, preferred_element_type=jnp.float32)


def split_prompts(tokens: jax.Array, lengths: jax.Array) -> GroupedRows:
    """Parts compact rows into what all rows of a group begin with, and the rest.

    The common beginning holds the prompt, and more where the completions begin alike; it is cut at
    half the rows' width, so that it is a static shape.

    Args:
      tokens: int32 [G, N, T].
      lengths: int32 [G, N], at most T; 0 for a place without a row.

    Returns:
      prompts [G, ceil(T / 2)] and completions [G, N, T], with what is behind the end undefined.
    """
    total = tokens.shape[-1]
    real = lengths > 0
    model_row = jnp.take_along_axis(tokens, jnp.argmax(real, axis=1)[:, None, None], axis=1)
    alike = jnp.all((tokens == model_row) | ~real[..., None], axis=1)
    common = jnp.sum(jnp.cumprod(alike, axis=-1), axis=-1)
    shortest = jnp.min(jnp.where(real, lengths, total), axis=1)
    width = -(-total // 2)
    common = jnp.clip(jnp.minimum(common, shortest), 1, width)
    rest = jnp.minimum(common[:, None, None] + jnp.arange(total), total - 1)
    return GroupedRows(
        model_row[:, 0, :width],
        common.astype(jnp.int32),
        jnp.take_along_axis(tokens, jnp.broadcast_to(rest, tokens.shape), axis=-1),
        jnp.maximum(lengths - common[:, None], 0).astype(jnp.int32),
    )


def make_scorer(
    model: Model,
    tokenizer: Tokenizer,
    levels: int,
    *,
    microbatch: int = 32,
    widths: tuple[float, ...] = (0.4, 0.6, 1.0),
    mesh: Mesh | None = None,
) -> ScoreFn:
    """Makes the function that scores groups of rollouts, jitted and usable inside other programs.

    What the rows of a group begin with, their prompt at least, is computed once. The groups are
    ordered by their longest rest and go through the model about `microbatch` rows at a time, each
    time in the narrowest of a few static widths that holds them: one compiled program in which
    short rows cost little. Scores depend on neither, nor on the padding.

    Args:
      model: the backbone.
      tokenizer: its tokenizer.
      levels: quality levels.
      microbatch: rows in one forward pass of one device.
      widths: the static widths as shares of T, ascending, 1.0 last.
      mesh: where given, G is sharded over its axis `data`, each device scoring its own groups.

    Returns:
      `score(world_model, tokens[G, N, T], lengths[G, N]) -> Prediction[G, N]`, a row of length 0
      ungraded.

    Raises:
      UserError: the tokenizer has too few outcome tokens.
    """
    ids = outcome_token_ids(tokenizer, levels)

    def score(world_model: WorldModel, tokens: jax.Array, lengths: jax.Array) -> Prediction:
        groups, rows, total = tokens.shape
        steps = sorted({math.ceil(total * share) for share in widths})

        def in_width(width: int, block: GroupedRows) -> jax.Array:
            cut = block._replace(completions=block.completions[:, :, :width])
            return slot_logits(
                model, world_model.params, cut,
                outcome_id=tokenizer.outcome_id, outcome_ids=ids,
            )  # fmt: skip

        def forward(block: GroupedRows) -> jax.Array:
            narrowest = jnp.searchsorted(jnp.asarray(steps), jnp.max(block.lengths))
            return jax.lax.switch(narrowest, [partial(in_width, w) for w in steps], block)

        split = split_prompts(tokens, lengths)
        size = min(max(microbatch // rows, 1), groups)
        order = jnp.argsort(jnp.max(split.lengths, axis=1))
        # Full blocks only: the first group comes up again, with the same result.
        order = jnp.concatenate([jnp.repeat(order[:1], -groups % size), order])
        blocks = order.reshape(-1, size)
        logits = jax.lax.map(forward, jax.tree.map(lambda x: x[blocks], split))
        logits = (
            jnp.zeros((groups, rows, len(ids))).at[order].set(logits.reshape(-1, rows, len(ids)))
        )
        prediction = predict(logits, world_model.positions)
        empty = lengths <= 0
        return Prediction(
            jnp.where(empty, jnp.nan, prediction.score),
            jnp.where(empty[..., None], jnp.nan, prediction.probs),
            jnp.where(empty, STATUSES.index("unknown"), prediction.status),
        )

    if mesh is None:
        return jax.jit(score)
    by_group, whole = PartitionSpec("data"), PartitionSpec()
    return jax.jit(
        jax.shard_map(score, mesh=mesh, in_specs=(whole, by_group, by_group), out_specs=by_group)
    )
