"""Tuning the warm-started backbone into a world model, on a few hundred executed cases.

Cross-entropy on the outcome token at the slot. A valid case's target is shared by the two quality
levels next to its position, so that the expected position under the target is the position itself
and the expectation that scoring takes is an unbiased regression. The epoch whose expected rewards
are nearest to the validation cases' is kept.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from wmrl_jax.errors import UserError
from wmrl_jax.models.microbatch import summed_gradients
from wmrl_jax.models.model import Model
from wmrl_jax.models.rows import (
    GroupedRows,
    Row,
    bucket_lengths,
    choose_group_size,
    grouped_batches,
    key_seed,
    pad_groups,
    round_up,
)
from wmrl_jax.models.tokenizer import Tokenizer
from wmrl_jax.world_model.cases import Case, case_rows
from wmrl_jax.world_model.readout import (
    FAILURES,
    Prediction,
    ScoreFn,
    WorldModel,
    level_positions,
    make_scorer,
    outcome_count,
    outcome_token_ids,
    slot_logits,
)

log = logging.getLogger(__name__)


class TuningConfig(Protocol):
    """The fields of a configuration that tuning reads."""

    @property
    def epochs(self) -> float: ...  # noqa: D102
    @property
    def batch_size(self) -> int: ...  # noqa: D102
    @property
    def learning_rate(self) -> float: ...  # noqa: D102
    @property
    def quality_levels(self) -> int: ...  # noqa: D102


class Tuned(NamedTuple):
    """What tuning gives.

    Attributes:
      world_model: the best epoch's.
      history: one dict per look at the validation cases, after each epoch: `epoch`, `loss` (mean
        over the epoch's batches, nats), `validation_rmse`, `validation_mae` of the expected
        reward, and `best`, true where it was the best so far.
    """

    world_model: WorldModel
    history: list[dict[str, float | bool]]


def outcome_targets(cases: Sequence[Case], levels: int) -> np.ndarray:
    """Targets float32 [n, K]; a valid case is shared by the two levels beside its position."""
    targets = np.zeros((len(cases), outcome_count(levels)), np.float32)
    for row, case in zip(targets, cases, strict=True):
        if case.position is None:
            row[FAILURES.index(case.status)] = 1.0
            continue
        place = case.position * (levels - 1)
        lower = min(int(place), levels - 2)
        row[len(FAILURES) + lower] = 1.0 - (place - lower)
        row[len(FAILURES) + lower + 1] = place - lower
    return targets


def predict_rows(
    model: Model, tokenizer: Tokenizer, world_model: WorldModel, rows: Sequence[Row]
) -> Prediction:
    """Predictions of rows in any order, as NumPy arrays [n] and [n, K]."""
    return _Batch(rows, tokenizer).predict(
        make_scorer(model, tokenizer, len(world_model.positions)), world_model
    )


class _Batch:
    """Rows laid out for the scorer: groups of up to eight rows of one prompt."""

    def __init__(self, rows: Sequence[Row], tokenizer: Tokenizer, group_size: int = 8) -> None:
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for index, row in enumerate(rows):
            by_prompt.setdefault(row.prompt, []).append(index)
        groups = [
            members[start : start + group_size]
            for members in by_prompt.values()
            for start in range(0, len(members), group_size)
        ]
        width = max(len(row.prompt) + len(row.completion) for row in rows)
        self._tokens = np.full((len(groups), group_size, width), tokenizer.pad_id, np.int32)
        self._lengths = np.zeros((len(groups), group_size), np.int32)
        self._place = np.zeros(len(rows), int)
        for g, members in enumerate(groups):
            for n, index in enumerate(members):
                ids = (*rows[index].prompt, *rows[index].completion)
                self._tokens[g, n, : len(ids)] = ids
                self._lengths[g, n] = len(ids)
                self._place[index] = g * group_size + n

    def predict(self, score: ScoreFn, world_model: WorldModel) -> Prediction:
        tokens, lengths = jnp.asarray(self._tokens), jnp.asarray(self._lengths)
        prediction = jax.device_get(score(world_model, tokens, lengths))
        return Prediction(
            *(part.reshape(self._lengths.size, *part.shape[2:])[self._place] for part in prediction)
        )


def tune(
    model: Model,
    tokenizer: Tokenizer,
    params: Any,
    cases: Sequence[Case],
    prompts: Mapping[str, str],
    config: TuningConfig,
    key: jax.Array,
    on_step: Callable[[int, int, float], None] | None = None,
    *,
    max_tokens: int | None = None,
    weight_decay: float = 0.05,
    patience: int = 3,
) -> Tuned:
    """Tunes a copy of the agent's backbone on the cases whose split is `train`.

    Args:
      model: the backbone.
      tokenizer: its tokenizer.
      params: the warm-started parameters; left as they are.
      cases: executed cases; those of the split `heldout` are not looked at.
      prompts: prompt text by task name.
      config: epochs, batch size, learning rate, quality levels.
      key: decides the order of the batches.
      on_step: progress: (steps done, steps in all, mean loss of the batch).
      max_tokens: longest row.
      weight_decay: of AdamW.
      patience: epochs without a better validation error after which tuning ends.

    Raises:
      UserError: no case to learn from or to validate on, or a case's task has no prompt.
    """
    levels = config.quality_levels
    ids = outcome_token_ids(tokenizer, levels)
    chosen = [case for case in cases if case.split != "heldout"]
    all_rows, chosen = case_rows(tokenizer, prompts, chosen, max_tokens=max_tokens)
    train = [i for i, case in enumerate(chosen) if case.split == "train"]
    check = [i for i, case in enumerate(chosen) if case.split == "validation"]
    if not train or not check:
        raise UserError(
            f"tuning needs executed cases to learn from ({len(train)}) and to validate on "
            f"({len(check)}); raise world_model.cases or world_model.heldout_fraction"
        )
    rows = [all_rows[i] for i in train]
    targets = outcome_targets([chosen[i] for i in train], levels)
    batch_size = min(config.batch_size, len(rows))
    group_size = choose_group_size(rows, batch_size)
    widths = bucket_lengths([len(row.completion) for row in rows], count=2)
    prompt_width = round_up(max(len(row.prompt) for row in rows))
    per_epoch = max(1, len(rows) // batch_size)
    total = max(1, round(config.epochs * per_epoch))
    optimizer = _optimizer(config.learning_rate, weight_decay, total)

    def step(params: Any, opt_state: Any, batch: GroupedRows, targets: jax.Array) -> Any:
        def loss(params: Any, part: tuple[GroupedRows, jax.Array]) -> tuple[jax.Array, jax.Array]:
            logits = slot_logits(
                model, params, part[0], outcome_id=tokenizer.outcome_id, outcome_ids=ids
            )
            losses = optax.softmax_cross_entropy(logits, part[1])
            return jnp.sum(losses), jnp.asarray(losses.size, jnp.float32)

        total_loss, count, grads = summed_gradients(loss, params, (batch, targets))
        grads = jax.tree.map(lambda x: x / count, grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, total_loss / count

    update = jax.jit(step, donate_argnums=(0, 1))
    scorer = make_scorer(model, tokenizer, levels)
    positions = level_positions(levels)
    validation = _Batch([all_rows[i] for i in check], tokenizer)
    truth = np.asarray([chosen[i].reward for i in check])

    started = time.perf_counter()
    params = jax.tree.map(jnp.copy, params)  # the agent's own arrays must outlive the donation
    opt_state = optimizer.init(params)
    best, best_error, since_best = jax.tree.map(jnp.copy, params), math.inf, 0
    history: list[dict[str, float | bool]] = []
    losses: list[float] = []
    order = grouped_batches(rows, widths, batch_size, group_size, key_seed(key))
    for done, (indices, width) in enumerate(itertools.islice(order, total), start=1):
        batch = pad_groups(
            [[rows[i] for i in group] for group in indices],
            prompt_tokens=prompt_width,
            new_tokens=width,
            pad_id=tokenizer.pad_id,
        )
        params, opt_state, loss = update(params, opt_state, batch, targets[indices])
        losses.append(float(loss))
        if on_step is not None:
            on_step(done, total, losses[-1])
        if done % per_epoch and done < total:
            continue
        score = validation.predict(scorer, WorldModel(params, positions)).score
        error = float(np.sqrt(np.mean((score - truth) ** 2)))
        since_best = 0 if error < best_error else since_best + 1
        history.append(
            {
                "epoch": done / per_epoch,
                "loss": float(np.mean(losses)),
                "validation_rmse": error,
                "validation_mae": float(np.mean(np.abs(score - truth))),
                "best": since_best == 0,
            }
        )
        losses = []
        if since_best == 0:
            best, best_error = jax.tree.map(jnp.copy, params), error
        if since_best >= patience:
            break
    log.info(
        "world model: %d cases learnt, %d to validate on, reward error (rms) %.3f, %.0f s",
        len(rows), len(check), best_error, time.perf_counter() - started,
    )  # fmt: skip
    return Tuned(WorldModel(best, positions), history)


def _optimizer(
    learning_rate: float, weight_decay: float, total: int
) -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(
        0.1 * learning_rate, learning_rate, total // 10, max(total, 2)
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=weight_decay))
