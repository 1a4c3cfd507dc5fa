"""The one compiled train step: both corrections, the policy loss in microbatches, the update."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from wmrl_jax.method import denoise
from wmrl_jax.method.losses import LossMetrics, loss_count, policy_loss
from wmrl_jax.models.model import Model
from wmrl_jax.rollout.compact import prompt_lengths_of, split_rows
from wmrl_jax.train.completion_logprobs import (
    completion_lengths,
    completion_logprobs,
    make_capacity,
)
from wmrl_jax.train.config import Config
from wmrl_jax.train.corrections import Corrected, correct, init_corrections
from wmrl_jax.train.mesh import by_group, check_divisible, replicated
from wmrl_jax.train.policy import Policy
from wmrl_jax.types import ScoredBatch, TrainState

TrainStepFn = Callable[[TrainState, ScoredBatch], tuple[TrainState, "Metrics"]]


class Metrics(NamedTuple):
    """What one step reports: float32 scalars, NaN where there was nothing to measure.

    Attributes:
      loss: the policy loss with its KL and entropy terms.
      reward: mean of the rewards that the advantages were formed of, over graded rollouts.
      reward_predicted: mean raw score of the groups that are no anchors.
      reward_calibrated: mean recalibrated score of the groups that are no anchors.
      reward_executed: mean reward of the anchors by execution.
      reward_executed_predicted: mean raw score of those same anchors.
      groups_used: groups with a gradient.
      groups_degenerate: groups whose rewards are all equal.
      groups_ungraded: groups with fewer than two graded rollouts, empty slots included.
      weight_anchor: weight of the anchors' mean gradient in the fusion.
      weight_world_model: of the world model's; the two sum to 1.
      moment_ff: within-group variance of calibrated scores on the anchors, out of sample.
      moment_fr: covariance of calibrated scores and true rewards.
      moment_rr: variance of true rewards.
      correlation: of scores and rewards within groups, clipped to [0, 1].
      debias_pairs: pairs in the debiaser's buffer.
      kl: k3 estimate of the KL to the reference per token, 0 without one.
      entropy: of the policy per token, nats.
      clip_fraction: share of tokens whose ratio was clipped.
      sampler_trainer_difference: largest |log-prob now - behaviour log-prob| of fresh tokens; of a
        fresh batch it is the difference between the sampler's arithmetic and the trainer's.
      grad_norm: global norm of the fused gradient before clipping.
      tokens: completion tokens in the batch.
    """

    loss: jax.Array
    reward: jax.Array
    reward_predicted: jax.Array
    reward_calibrated: jax.Array
    reward_executed: jax.Array
    reward_executed_predicted: jax.Array
    groups_used: jax.Array
    groups_degenerate: jax.Array
    groups_ungraded: jax.Array
    weight_anchor: jax.Array
    weight_world_model: jax.Array
    moment_ff: jax.Array
    moment_fr: jax.Array
    moment_rr: jax.Array
    correlation: jax.Array
    debias_pairs: jax.Array
    kl: jax.Array
    entropy: jax.Array
    clip_fraction: jax.Array
    sampler_trainer_difference: jax.Array
    grad_norm: jax.Array
    tokens: jax.Array


class _Rows(NamedTuple):
    """One microbatch: groups taken apart at the end of their prompts; arrays [g, N, S]."""

    prompts: jax.Array  # int32 [g, P]
    prompt_lengths: jax.Array  # int32 [g]
    completions: jax.Array
    mask: jax.Array
    behaviour_logprobs: jax.Array
    reference_logprobs: jax.Array | None
    advantages: jax.Array  # float32 [g, N]
    keep: jax.Array  # bool [g]
    fresh: jax.Array  # bool [g], sampled by the parameters of this step


class _Sums(NamedTuple):
    """What adds up over microbatches, and the one maximum."""

    loss: LossMetrics
    total: jax.Array
    difference: jax.Array


def init_state(
    params: Any, optimizer: optax.GradientTransformation, config: Config, key: jax.Array, mesh: Mesh
) -> TrainState:
    """The state before the first step, replicated over the mesh.

    Args:
      params: the policy's parameters; copied, since the step donates its state.
      optimizer: the one given to `make_train_step`.
      config: its section corrections sizes the two correction states.
      key: the run's key.
      mesh: the devices.
    """

    def build(params: Any, key: jax.Array) -> TrainState:
        debias_state, denoise_state = init_corrections(config)
        return TrainState(
            params=params,
            opt_state=optimizer.init(params),
            debias=debias_state,
            denoise=denoise_state,
            key=key,
            step=jnp.zeros((), jnp.int32),
        )

    whole = replicated(mesh)
    copied = jax.tree.map(jnp.copy, jax.device_put(params, whole))
    return jax.jit(build, out_shardings=whole)(copied, key)


def make_train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    config: Config,
    mesh: Mesh,
    policy: Policy | None = None,
) -> TrainStepFn:
    """Compiles the update: corrections, loss, gradient, optimizer, in one program.

    The state is donated and replicated; the batch is sharded over the mesh along its groups, and
    goes through the backbone in `train.microbatches` parts of as many groups. Prompts are
    computed once per group. With `train.packing` padding is not computed: the step looks at the
    batch's lengths, and is compiled for each of a few capacities that comes up. The result does not
    depend on the number of devices, microbatches or packing, but for the order of float32 sums.

    Args:
      model: the policy's backbone.
      optimizer: an optax optimizer.
      config: its sections reward, corrections, loss, sampler, model and train are read.
      mesh: the devices; `train.groups` must be a multiple of microbatches times devices.
      policy: whose base the state's parameters are adapters of; None: they are all there is.

    Returns:
      `(TrainState, ScoredBatch) -> (TrainState, Metrics)`, compiled at its first call.

    Raises:
      UserError: the groups cannot be divided.
    """
    check_divisible(config.train.groups, config.train.microbatches, mesh)

    base, scale = (None, 1.0) if policy is None else (policy.base, policy.scale)

    def step(
        state: TrainState, base: Any, batch: ScoredBatch, capacity: int | None
    ) -> tuple[TrainState, Metrics]:
        full = Policy(state.params, base, scale).full
        corrected = correct(
            state.debias,
            state.denoise,
            batch.predicted,
            batch.executed,
            batch.is_anchor,
            _group_sizes(batch.loss_mask, config),
            config,
        )
        grads, sums, count = _gradient(
            model, config, full, state.params, batch, corrected, mesh, capacity
        )
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        new_state = TrainState(
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            debias=corrected.debias,
            denoise=corrected.denoise,
            key=state.key,
            step=state.step + 1,
        )
        return new_state, _metrics(batch, corrected, sums, count, optax.tree.norm(grads))

    whole = replicated(mesh)

    @cache
    def compiled(capacity: int | None) -> Callable[..., tuple[TrainState, Metrics]]:
        return jax.jit(
            partial(step, capacity=capacity),
            in_shardings=(whole, whole, by_group(mesh)),
            out_shardings=(whole, whole),
            donate_argnums=0,
        )

    capacity_of = make_capacity(config, mesh)
    # The base is an argument of the program: closed over, it would be a constant in it.
    return lambda state, batch: compiled(capacity_of(batch.loss_mask))(state, base, batch)


def _gradient(
    model: Model,
    config: Config,
    full: Callable[[Any], Any],
    params: Any,
    batch: ScoredBatch,
    corrected: Corrected,
    mesh: Mesh,
    capacity: int | None,
) -> tuple[Any, _Sums, jax.Array]:
    """Gradient of the whole batch's loss, its sums, and its denominator."""
    every = jnp.broadcast_to(corrected.keep[:, None], batch.predicted.shape)
    count = loss_count(
        batch.loss_mask, name=config.loss.name, keep=every, max_tokens=config.model.new_tokens
    )
    rows = _take_apart(batch, corrected, config)
    parts = config.train.microbatches
    # Microbatch m takes the groups m, m + parts, ...: each device then keeps the groups it holds.
    split = jax.tree.map(
        lambda x: jax.lax.with_sharding_constraint(
            x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), by_group(mesh, leading=1)
        ),
        rows,
    )

    def loss(params: Any, part: _Rows) -> tuple[jax.Array, _Sums]:
        logprobs, entropy = completion_logprobs(
            model, config, full(params), part.prompts, part.prompt_lengths, part.completions,
            completion_lengths(part.mask), capacity,
        )  # fmt: skip
        got = policy_loss(
            logprobs,
            part.behaviour_logprobs,
            part.advantages,
            part.mask,
            name=config.loss.name,
            clip_low=config.loss.clip_low,
            clip_high=config.loss.clip_high,
            importance_cap=config.loss.importance_cap,
            keep=jnp.broadcast_to(part.keep[:, None], part.advantages.shape),
            max_tokens=config.model.new_tokens,
            reference_logprobs=part.reference_logprobs,
            kl_coef=config.loss.kl_coef,
            entropy=entropy,
            entropy_coef=config.loss.entropy_coef,
        )
        gap = jnp.abs(jax.lax.stop_gradient(logprobs) - part.behaviour_logprobs)
        difference = jnp.max(jnp.where(part.mask & part.fresh[:, None, None], gap, 0.0))
        return got.total / jnp.maximum(count, 1.0), _Sums(got.metrics, got.total, difference)

    def accumulate(carry: tuple[Any, _Sums], part: _Rows) -> tuple[tuple[Any, _Sums], None]:
        grads, sums = carry
        (_, more), new = jax.value_and_grad(loss, has_aux=True)(params, part)
        added = jax.tree.map(jnp.add, sums, more)
        added = added._replace(difference=jnp.maximum(sums.difference, more.difference))
        return (jax.tree.map(jnp.add, grads, new), added), None

    if parts == 1:
        only = jax.tree.map(lambda x: x[0], split)
        (_, sums), grads = jax.value_and_grad(loss, has_aux=True)(params, only)
        return grads, sums, count
    zero = jnp.zeros((), jnp.float32)
    none = _Sums(LossMetrics(*[zero] * len(LossMetrics._fields)), zero, zero)
    start = (jax.tree.map(jnp.zeros_like, params), none)
    (grads, sums), _ = jax.lax.scan(accumulate, start, split)
    return grads, sums, count


def _take_apart(batch: ScoredBatch, corrected: Corrected, config: Config) -> _Rows:
    width = config.model.prompt_tokens
    lengths = prompt_lengths_of(batch.loss_mask, width)

    def suffixes(rows: jax.Array) -> jax.Array:
        return split_rows(rows, lengths, width)[1]

    prompts, completions = split_rows(batch.tokens, lengths, width)
    return _Rows(
        prompts=prompts,
        prompt_lengths=lengths,
        completions=completions,
        mask=suffixes(batch.loss_mask),
        behaviour_logprobs=suffixes(batch.behaviour_logprobs),
        reference_logprobs=None
        if batch.reference_logprobs is None
        else suffixes(batch.reference_logprobs),
        advantages=corrected.advantages,
        keep=corrected.keep,
        fresh=~batch.is_anchor | (config.anchors.wait or config.reward.source == "world_model"),
    )


def _group_sizes(mask: jax.Array, config: Config) -> jax.Array:
    """float32 [G], each group's share in the denominator of the configured loss."""
    count = lambda rows: loss_count(  # noqa: E731
        rows, name=config.loss.name, max_tokens=config.model.new_tokens
    )
    return jax.vmap(count)(mask)


def _metrics(
    batch: ScoredBatch, corrected: Corrected, sums: _Sums, count: jax.Array, norm: jax.Array
) -> Metrics:
    tokens = jnp.maximum(sums.loss.tokens, 1.0)
    kinds = corrected.kinds.counts()
    s_ff, s_fr, s_rr = denoise.moments(corrected.denoise)
    others, anchors = ~batch.is_anchor[:, None], batch.is_anchor[:, None]
    return Metrics(
        loss=sums.total / jnp.maximum(count, 1.0),
        reward=_mean(corrected.rewards),
        reward_predicted=_mean(batch.predicted, others),
        reward_calibrated=_mean(corrected.rewards, others),
        reward_executed=_mean(batch.executed, anchors),
        reward_executed_predicted=_mean(batch.predicted, anchors),
        groups_used=kinds.used,
        groups_degenerate=kinds.degenerate,
        groups_ungraded=kinds.ungraded,
        weight_anchor=corrected.weights[0],
        weight_world_model=corrected.weights[1],
        moment_ff=s_ff,
        moment_fr=s_fr,
        moment_rr=s_rr,
        correlation=jnp.where(jnp.isnan(s_ff), jnp.nan, denoise.correlation(corrected.denoise)),
        debias_pairs=corrected.debias.count,
        kl=sums.loss.reference_kl / tokens,
        entropy=sums.loss.entropy / tokens,
        clip_fraction=(sums.loss.clipped_low + sums.loss.clipped_high) / tokens,
        sampler_trainer_difference=sums.difference,
        grad_norm=norm,
        tokens=jnp.sum(batch.loss_mask),
    )


def _mean(x: jax.Array, where: jax.Array | bool = True) -> jax.Array:
    """Mean of the finite entries that `where` chooses, NaN where there is none."""
    chosen = jnp.isfinite(x) & where
    number = jnp.sum(chosen)
    total = jnp.sum(jnp.where(chosen, x, 0.0))
    return jnp.where(number > 0, total / jnp.maximum(number, 1), jnp.nan)
