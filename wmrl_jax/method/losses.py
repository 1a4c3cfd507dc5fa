"""Policy losses over tokens, by name.

A loss is a surrogate (what one token contributes) and a normaliser (what the sum is divided by):

  name     surrogate                                      divided by            source
  grpo     clipped token ratio                            tokens of each row,   arXiv 2402.03300
                                                          then rows
  dapo     clipped token ratio                            tokens of the batch   arXiv 2503.14476
  dr_grpo  clipped token ratio                            rows x constant       arXiv 2503.20783
  gspo     clipped ratio of the row, the geometric mean   tokens of each row,   arXiv 2507.18071
           of its token ratios                            then rows
  cispo    clipped ratio as a constant weight of the      tokens of the batch   arXiv 2506.13585
           log-probability

Results travel as (total, count) and are divided last, so that micro-batches and shards add up
exactly: sum the totals, divide by the count of the whole batch (`loss_count`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

_MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: beyond it a ratio would overflow, and says nothing more


class LossMetrics(NamedTuple):
    """Sums over the tokens that count; divide by `tokens` for means. Float32 scalars.

    Attributes:
      tokens: tokens that count.
      ratio: importance ratio against the behaviour policy.
      clipped_low: ratio below 1 - clip_low.
      clipped_high: ratio above 1 + clip_high.
      truncated: importance weight above the cap.
      logprob_difference: absolute difference of `logprobs` and `behaviour_logprobs`.
      behaviour_kl: k3 estimate of the divergence of the policy from the behaviour policy.
      reference_kl: the KL term, before its coefficient; 0 without a reference.
      entropy: entropy; 0 where none was given.
    """

    tokens: jax.Array
    ratio: jax.Array
    clipped_low: jax.Array
    clipped_high: jax.Array
    truncated: jax.Array
    logprob_difference: jax.Array
    behaviour_kl: jax.Array
    reference_kl: jax.Array
    entropy: jax.Array


class LossSum(NamedTuple):
    """A loss before its division.

    Attributes:
      total: float32 scalar, differentiable.
      count: float32 scalar; the loss is total / count.
      metrics: `LossMetrics`.
    """

    total: jax.Array
    count: jax.Array
    metrics: LossMetrics


def k1(logprobs: jax.Array, reference_logprobs: jax.Array) -> jax.Array:
    """``log p - log q``: unbiased, but as a loss its expected gradient on-policy is zero."""
    return logprobs - reference_logprobs


def k2(logprobs: jax.Array, reference_logprobs: jax.Array) -> jax.Array:
    """``(log p - log q)**2 / 2``: biased, low variance, the right gradient on-policy."""
    return 0.5 * jnp.square(logprobs - reference_logprobs)


def k3(logprobs: jax.Array, reference_logprobs: jax.Array) -> jax.Array:
    """``q/p - 1 - log(q/p)``: unbiased and never negative (Schulman 2020; GRPO uses it)."""
    log_ratio = jnp.clip(reference_logprobs - logprobs, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return jnp.expm1(log_ratio) - log_ratio


KL: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {"k1": k1, "k2": k2, "k3": k3}
"""Estimators of KL(policy, reference) per token, for tokens drawn from the policy."""


class _Terms(NamedTuple):
    logprobs: jax.Array  # [..., T], 0 where masked
    log_ratio: jax.Array  # [..., T], of the clipped ratio, 0 where masked
    advantages: jax.Array  # [..., 1]
    mask: jax.Array  # float32 [..., T]
    clip_low: float | jax.Array
    clip_high: float | jax.Array


def _pessimistic(ratio: jax.Array, terms: _Terms) -> jax.Array:
    clipped = jnp.clip(ratio, 1.0 - terms.clip_low, 1.0 + terms.clip_high)
    return -jnp.minimum(ratio * terms.advantages, clipped * terms.advantages)


def _token_surrogate(terms: _Terms) -> jax.Array:
    return _pessimistic(jnp.exp(terms.log_ratio), terms)


def _sequence_surrogate(terms: _Terms) -> jax.Array:
    length = jnp.maximum(jnp.sum(terms.mask, axis=-1, keepdims=True), 1.0)
    ratio = jnp.exp(jnp.sum(terms.log_ratio, axis=-1, keepdims=True) / length)
    return jnp.broadcast_to(_pessimistic(ratio, terms), terms.mask.shape)


def _weighted_surrogate(terms: _Terms) -> jax.Array:
    weight = jnp.clip(jnp.exp(terms.log_ratio), 1.0 - terms.clip_low, 1.0 + terms.clip_high)
    return -jax.lax.stop_gradient(weight) * terms.advantages * terms.logprobs


def _per_token(mask: jax.Array, max_tokens: int | None) -> tuple[jax.Array, jax.Array]:
    del max_tokens
    return mask, jnp.sum(mask)


def _per_sequence(mask: jax.Array, max_tokens: int | None) -> tuple[jax.Array, jax.Array]:
    del max_tokens
    length = jnp.sum(mask, axis=-1, keepdims=True)
    return mask / jnp.maximum(length, 1.0), jnp.sum(length > 0, dtype=jnp.float32)


def _per_constant(mask: jax.Array, max_tokens: int | None) -> tuple[jax.Array, jax.Array]:
    rows = jnp.sum(jnp.any(mask > 0, axis=-1), dtype=jnp.float32)
    return mask, rows * (mask.shape[-1] if max_tokens is None else max_tokens)


_Surrogate = Callable[[_Terms], jax.Array]
_Normaliser = Callable[[jax.Array, int | None], tuple[jax.Array, jax.Array]]

LOSSES: dict[str, tuple[_Surrogate, _Normaliser]] = {
    "grpo": (_token_surrogate, _per_sequence),
    "dapo": (_token_surrogate, _per_token),
    "dr_grpo": (_token_surrogate, _per_constant),
    "gspo": (_sequence_surrogate, _per_sequence),
    "cispo": (_weighted_surrogate, _per_token),
}
"""Losses by name: (surrogate, normaliser)."""


def _counted(mask: jax.Array, keep: jax.Array | None) -> jax.Array:
    mask = mask > 0 if keep is None else (mask > 0) & (keep > 0)[..., None]
    return mask


def loss_count(
    mask: jax.Array,
    *,
    name: str = "dapo",
    keep: jax.Array | None = None,
    max_tokens: int | None = None,
) -> jax.Array:
    """The denominator of a loss over a whole batch, before it is cut into micro-batches.

    Args:
      mask: bool [..., T].
      name: one of `LOSSES`.
      keep: bool [...], as in `policy_loss`.
      max_tokens: as in `policy_loss`.

    Returns:
      float32 scalar.
    """
    _, normalise = LOSSES[name]
    return normalise(_counted(mask, keep).astype(jnp.float32), max_tokens)[1]


def policy_loss(
    logprobs: jax.Array,
    behaviour_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    name: str = "dapo",
    clip_low: float | jax.Array = 0.2,
    clip_high: float | jax.Array = 0.28,
    importance_cap: float | None = None,
    proximal_logprobs: jax.Array | None = None,
    keep: jax.Array | None = None,
    max_tokens: int | None = None,
    reference_logprobs: jax.Array | None = None,
    kl: str = "k3",
    kl_coef: float | jax.Array = 0.0,
    entropy: jax.Array | None = None,
    entropy_coef: float | jax.Array = 0.0,
) -> LossSum:
    """Policy loss of a (micro-)batch as (total, count, metrics); minimise total / count.

    Without `proximal_logprobs` the ratio that is clipped is that of policy and behaviour policy.
    With it (log-probabilities of the trainer's own policy before the update) the ratio is that of
    policy and proximal policy, and proximal over behaviour is a constant weight (decoupled PPO,
    arXiv 2110.00641). Either way `importance_cap` bounds the weight against the behaviour policy
    as truncated importance sampling does: the weight stops growing, the gradient stays.

    Args:
      logprobs: [..., T], of the policy, differentiable.
      behaviour_logprobs: [..., T], recorded by the sampler.
      advantages: [...], per rollout, fusion weights included; constants to the gradient.
      mask: bool [..., T], true where the agent wrote the token. Values under a false entry are
        never read, so they may be NaN.
      name: one of `LOSSES`.
      clip_low: the ratio is clipped at 1 - clip_low.
      clip_high: the ratio is clipped at 1 + clip_high.
      importance_cap: largest importance weight; None for no cap.
      proximal_logprobs: [..., T] or None.
      keep: bool [...], rollouts that count. The others are left out of every term, the KL and
        the denominators included. None for all.
      max_tokens: the constant of "dr_grpo"; None for T, which is only right for unbucketed rows.
      reference_logprobs: [..., T] of the KL reference, or None.
      kl: one of `KL`.
      kl_coef: coefficient of the KL term.
      entropy: [..., T] from `token_logprobs`, or None.
      entropy_coef: coefficient of the entropy, which is subtracted.

    Returns:
      `LossSum`. The count depends on `mask`, `keep` and `name` alone; take it from `loss_count`
      over the whole batch when this call sees a part.

    Raises:
      KeyError: unknown `name` or `kl`.
    """
    surrogate, normalise = LOSSES[name]
    counted = _counted(mask, keep)
    mask = counted.astype(jnp.float32)

    def clean(x: jax.Array) -> jax.Array:
        return jnp.where(counted, x.astype(jnp.float32), 0.0)

    def limited(log_ratio: jax.Array) -> jax.Array:
        return jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)

    policy, behaviour = clean(logprobs), jax.lax.stop_gradient(clean(behaviour_logprobs))
    proximal = (
        behaviour if proximal_logprobs is None else jax.lax.stop_gradient(clean(proximal_logprobs))
    )
    row_counts = jnp.any(counted, axis=-1)
    advantages = jnp.where(row_counts, jax.lax.stop_gradient(advantages), 0.0)
    log_ratio = limited(policy - proximal)
    per_token = surrogate(
        _Terms(
            logprobs=policy,
            log_ratio=log_ratio,
            advantages=advantages.astype(jnp.float32)[..., None],
            mask=mask,
            clip_low=clip_low,
            clip_high=clip_high,
        )
    )
    behaviour_ratio = jnp.exp(limited(jax.lax.stop_gradient(policy) - behaviour))
    if proximal_logprobs is None:
        weight, correction = behaviour_ratio, jnp.ones_like(behaviour_ratio)
    else:
        weight = correction = jnp.exp(limited(proximal - behaviour))
    if importance_cap is not None:
        correction = correction * jnp.minimum(1.0, importance_cap / weight)
    per_token = per_token * correction

    nothing = jnp.zeros_like(mask)
    reference_kl, entropies = nothing, nothing
    if reference_logprobs is not None:
        reference_kl = KL[kl](policy, jax.lax.stop_gradient(clean(reference_logprobs)))
        per_token = per_token + kl_coef * reference_kl
    if entropy is not None:
        entropies = clean(entropy)
        per_token = per_token - entropy_coef * entropies

    weights, count = normalise(mask, max_tokens)
    ratio = jnp.exp(jax.lax.stop_gradient(log_ratio))
    sums = LossMetrics(
        tokens=mask,
        ratio=behaviour_ratio,
        clipped_low=ratio < 1.0 - clip_low,
        clipped_high=ratio > 1.0 + clip_high,
        truncated=nothing if importance_cap is None else weight > importance_cap,
        logprob_difference=jnp.abs(policy - behaviour),
        behaviour_kl=k3(policy, behaviour),
        reference_kl=reference_kl,
        entropy=entropies,
    )
    metrics = LossMetrics(*(jnp.sum(mask * jax.lax.stop_gradient(x)) for x in sums))
    return LossSum(jnp.sum(weights * per_token), count, metrics)
