"""The bounds of arXiv 2608.12564 (section on theory), and a simulator small enough to check them.

The simulator is a softmax policy over K actions of a family of tasks, trained by policy gradients
on groups of draws with an entropy bonus, its rewards chosen so that the optimum is known in closed
form: with features phi and rewards r = tau * phi . theta_star + c, the entropy-regularised value

    J(theta) = mean over tasks of  sum_k pi_k r_k + tau * H(pi)

is greatest at theta_star, where it is the mean of tau * logsumexp(r / tau). A simulated world model
scores an action by its reward, a bias of a chosen shape and size, and noise. Everything is a pure
function of arrays: thousands of runs go side by side by `vmap`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from wmrl_jax.method import anchors, debias, denoise
from wmrl_jax.method.advantages import rloo_advantages

BIAS_SHAPES = ("affine", "saturating", "rank_breaking", "drifting")
"""What a simulated world model gets wrong; see `bias`."""

_SPREAD = 0.9  # of the rewards over the whole family, centred in [0, 1]


class Family(NamedTuple):
    """A family of M tasks with K actions each, and its optimum.

    Attributes:
      features: float32 [M, K, D].
      rewards: float32 [M, K], in [0, 1].
      scores: float32 [M, K], the world model's mean scores before `bias`; `make_family` gives it
        the rewards themselves.
      offsets: float32 [M, K], in [-1, 1]: the pattern of the rank-breaking bias.
      temperature: float32, weight tau of the entropy.
      optimum: float32 [D], the parameters of the best policy.
      best_value: float32, J at the optimum.
    """

    features: jax.Array
    rewards: jax.Array
    scores: jax.Array
    offsets: jax.Array
    temperature: jax.Array
    optimum: jax.Array
    best_value: jax.Array


class Arm(NamedTuple):
    """What one run does; every field may be traced and batched.

    Attributes:
      bias_shape: int32, index into `BIAS_SHAPES`.
      bias_size: B, the largest error of the world model's mean score.
      noise: deviation of a score about its mean.
      execution_noise: deviation of an executed reward about the true one.
      learning_rate: gamma.
      fraction: share of groups that are anchors.
      world_model: bool; false leaves the other groups out (the anchors alone train).
      denoise: bool, weight the streams by inverse variance; else every group counts the same.
      frozen_after: int32, steps after which the map is no longer refitted.
    """

    bias_shape: jax.Array | int = 0
    bias_size: jax.Array | float = 0.0
    noise: jax.Array | float = 0.0
    execution_noise: jax.Array | float = 0.0
    learning_rate: jax.Array | float = 1.0
    fraction: jax.Array | float = 0.125
    world_model: jax.Array | bool = True
    denoise: jax.Array | bool = False
    frozen_after: jax.Array | int = 2**30


class Sizes(NamedTuple):
    """Static sizes of a simulation.

    Attributes:
      steps: gradient steps.
      groups: tasks a step.
      rollouts: actions a task.
      refit_every: steps from one fit of the debiaser's map to the next; divides `steps`.
      capacity: pairs that the debiaser holds; 0: scores are used as they are.
      min_pairs: pairs from which the map is used.
    """

    steps: int = 400
    groups: int = 16
    rollouts: int = 8
    refit_every: int = 20
    capacity: int = 0
    min_pairs: int = 32


class Trace(NamedTuple):
    """What a run leaves.

    Attributes:
      gap: float32 [steps], J* - J before each step.
      pairs: int32 [steps], executed pairs that a debiaser had been given before each step.
      world_model_weight: float32 [steps], of one world-model group, an anchor group being 1.
      theta: float32 [D], the parameters at the end.
    """

    gap: jax.Array
    pairs: jax.Array
    world_model_weight: jax.Array
    theta: jax.Array


class Streams(NamedTuple):
    """Estimates of one gradient, each float32 [D]: of the anchors, of the rest, and fused."""

    anchor: jax.Array
    world_model: jax.Array
    fused: jax.Array


def make_family(
    key: jax.Array,
    *,
    tasks: int = 64,
    actions: int = 8,
    dimension: int = 6,
    temperature: float = 0.1,
) -> Family:
    """Draws a family whose rewards a linear softmax policy can match exactly.

    Args:
      key: decides features, optimum and the rank-breaking pattern.
      tasks: M.
      actions: K.
      dimension: D, of the parameters that the tasks share.
      temperature: tau > 0; the smaller, the nearer the optimum is to the best action.
    """
    feature_key, optimum_key, offset_key = jax.random.split(key, 3)
    features = jax.random.normal(feature_key, (tasks, actions, dimension))
    direction = jax.random.normal(optimum_key, (dimension,))
    utility = features @ direction
    scale = _SPREAD / (temperature * (jnp.max(utility) - jnp.min(utility)))
    optimum = scale * direction
    rewards = temperature * scale * (utility - jnp.min(utility)) + (1.0 - _SPREAD) / 2
    offsets = jax.random.uniform(offset_key, (tasks, actions), minval=-1.0, maxval=1.0)
    best = jnp.mean(temperature * jax.nn.logsumexp(rewards / temperature, axis=-1))
    tau = jnp.asarray(temperature, jnp.float32)
    return Family(features, rewards, rewards, offsets, tau, optimum, best)


def log_policy(family: Family, theta: jax.Array) -> jax.Array:
    """Log-probabilities [M, K] of the actions."""
    return jax.nn.log_softmax(family.features @ theta, axis=-1)


def value(family: Family, theta: jax.Array) -> jax.Array:
    """J: the expected reward with its entropy bonus, exactly. Float32 scalar."""
    logp = log_policy(family, theta)
    soft = family.rewards - family.temperature * logp
    return jnp.mean(jnp.sum(jnp.exp(logp) * soft, axis=-1))


def curvature(family: Family, points: int = 64) -> jax.Array:
    """mu, the Polyak-Lojasiewicz constant on the way from the uniform policy to the optimum.

    The least |grad J|^2 / (2 (J* - J)) over `points` policies between them. Float32 scalar.
    """

    def ratio(share: jax.Array) -> jax.Array:
        theta = share * family.optimum
        slope = jax.grad(lambda t: value(family, t))(theta)
        return jnp.sum(slope**2) / (2.0 * (family.best_value - value(family, theta)))

    return jnp.min(jax.vmap(ratio)(jnp.linspace(0.0, 0.95, points)))


def bias(
    shape: jax.Array | int,
    size: jax.Array | float,
    rewards: jax.Array,
    offsets: jax.Array,
    moved: jax.Array,
) -> jax.Array:
    """Error of the world model's mean score, between -size and size; elementwise.

    ``affine`` shrinks the scale, -size * r. ``saturating`` flattens the top, -size * r^2.
    ``rank_breaking`` adds `offsets` times the size, which no monotone map can undo.
    ``drifting`` is the saturating one, growing from 0 as the policy moves away from its start.

    Args:
      shape: index into `BIAS_SHAPES`; may be traced.
      size: B.
      rewards: true rewards in [0, 1].
      offsets: in [-1, 1], of the same shape.
      moved: in [0, 1], the policy's distance from its start, which broadcasts to the rewards.
    """
    errors = jnp.stack(
        [-rewards, -(rewards**2), offsets, -(rewards**2) * moved + jnp.zeros_like(rewards)]
    )
    return size * errors[shape]


def total_variation(logp: jax.Array, logq: jax.Array) -> jax.Array:
    """Mean total variation distance over tasks, in [0, 1]. Float32 scalar."""
    return 0.5 * jnp.mean(jnp.sum(jnp.abs(jnp.exp(logp) - jnp.exp(logq)), axis=-1))


def simulate(family: Family, arm: Arm, key: jax.Array, sizes: Sizes) -> Trace:
    """Trains one policy from the uniform one; `vmap` over `arm` and `key` for many.

    A step draws `groups` tasks and `rollouts` actions of each, grades the anchor groups by
    execution and the others by the simulated world model, and takes one gradient step: leave-one-
    out advantages (their expectation is the gradient itself) and the exact entropy gradient.

    Raises:
      ValueError: `refit_every` does not divide `steps`.
    """
    if sizes.steps % sizes.refit_every:
        raise ValueError(
            f"{sizes.steps} steps are no multiple of refit_every, which is {sizes.refit_every}"
        )
    start = log_policy(family, jnp.zeros_like(family.optimum))

    def step(carry: _Run, number: jax.Array) -> tuple[_Run, tuple[jax.Array, ...]]:
        theta = carry.theta
        graded = _grade(family, arm, theta, start, jax.random.fold_in(key, number), number, sizes)
        calibrated = graded.predicted
        if carry.calibration is not None:
            calibrated = debias.apply(carry.calibration, graded.predicted)
        executed = jnp.where(graded.is_anchor[:, None], graded.executed, jnp.nan)
        moments = denoise.observe(carry.moments, calibrated, executed)
        streams = _streams(family, arm, graded, calibrated, moments)
        ascent = streams.fused + _entropy_gradient(family, theta)
        measured = (
            family.best_value - value(family, theta),
            jnp.where(arm.denoise, denoise.slope(moments), 1.0),
        )
        after = carry._replace(theta=theta + arm.learning_rate * ascent, moments=moments)
        return after, (*measured, graded.predicted, executed)

    def block(carry: _Run, first: jax.Array) -> tuple[_Run, tuple[jax.Array, ...]]:
        seen = jnp.full((sizes.refit_every,), carry.seen)
        numbers = first + jnp.arange(sizes.refit_every)
        carry, (gap, weight, predicted, executed) = jax.lax.scan(step, carry, numbers)
        executed = jnp.where(first < arm.frozen_after, executed, jnp.nan)
        carry = carry._replace(seen=carry.seen + jnp.sum(jnp.isfinite(executed), dtype=jnp.int32))
        if carry.calibration is not None:
            calibration = debias.observe(
                carry.calibration, predicted.reshape(-1), executed.reshape(-1)
            )
            carry = carry._replace(calibration=calibration)
        return carry, (gap, weight, seen)

    run = _Run(
        jnp.zeros_like(family.optimum),
        denoise.init(),
        debias.init(sizes.capacity, sizes.min_pairs) if sizes.capacity else None,
        jnp.zeros((), jnp.int32),
    )
    run, (gap, weight, seen) = jax.lax.scan(
        block, run, jnp.arange(0, sizes.steps, sizes.refit_every)
    )
    return Trace(gap.reshape(-1), seen.reshape(-1), weight.reshape(-1), run.theta)


def estimate_gradient(
    family: Family,
    arm: Arm,
    theta: jax.Array,
    moments: denoise.State,
    key: jax.Array,
    sizes: Sizes,
) -> Streams:
    """One draw of the streams' estimates of the reward gradient at fixed parameters and moments.

    Without recalibration and without the entropy's gradient, which is exact and the same in each.
    """
    start = log_policy(family, jnp.zeros_like(family.optimum))
    graded = _grade(family, arm, theta, start, key, jnp.zeros((), jnp.int32), sizes)
    return _streams(family, arm, graded, graded.predicted, moments)


def measured_moments(
    family: Family, arm: Arm, theta: jax.Array, key: jax.Array, sizes: Sizes, steps: int = 64
) -> denoise.State:
    """The moments after observing the anchors of `steps` steps at fixed parameters."""
    start = log_policy(family, jnp.zeros_like(family.optimum))

    def step(moments: denoise.State, number: jax.Array) -> tuple[denoise.State, None]:
        graded = _grade(family, arm, theta, start, jax.random.fold_in(key, number), number, sizes)
        executed = jnp.where(graded.is_anchor[:, None], graded.executed, jnp.nan)
        return denoise.observe(moments, graded.predicted, executed), None

    return jax.lax.scan(step, denoise.init(half_life=float(steps)), jnp.arange(steps))[0]


def fused_variance(world_model: jax.Array | float, execution: jax.Array | float) -> jax.Array:
    """V_WM V_E / (V_WM + V_E), the variance of the inverse-variance weighted mean."""
    v_wm, v_e = jnp.asarray(world_model), jnp.asarray(execution)
    total = v_wm + v_e
    return jnp.where(total > 0, v_wm * v_e / jnp.where(total > 0, total, 1.0), 0.0)


def optimisation_term(
    steps: jax.Array | float,
    initial_gap: jax.Array | float,
    learning_rate: jax.Array | float,
    curvature: jax.Array | float,
) -> jax.Array:
    """epsilon(T) = (1 - gamma mu / 4)^T Delta_0: what is left of the initial gap after T steps.

    Args:
      steps: T.
      initial_gap: Delta_0 = J* - J at the start.
      learning_rate: gamma.
      curvature: mu, the Polyak-Lojasiewicz constant.
    """
    rate = 1.0 - jnp.asarray(learning_rate) * curvature / 4.0
    return jnp.clip(rate, 0.0, 1.0) ** jnp.asarray(steps) * initial_gap


def uncorrected_bound(
    optimisation: jax.Array | float,
    bias_size: jax.Array | float,
    variance: jax.Array | float,
    *,
    bias_factor: jax.Array | float,
    variance_factor: jax.Array | float,
) -> jax.Array:
    """epsilon(T) + c_B B^2 + c_V V_WM: the expected gap without corrections.

    Args:
      optimisation: epsilon(T), see `optimisation_term`.
      bias_size: B.
      variance: V_WM, of the world-model stream's gradient.
      bias_factor: c_B, the constant in O(M^2 B^2).
      variance_factor: c_V, the constant in O(gamma V), gamma included.
    """
    return optimisation + bias_factor * jnp.square(bias_size) + variance_factor * variance


def corrected_bound(
    optimisation: jax.Array | float,
    bias_size: jax.Array | float,
    variance: jax.Array | float,
    execution_variance: jax.Array | float,
    anchors_seen: jax.Array | float,
    anchors_needed: jax.Array | float,
    *,
    bias_factor: jax.Array | float,
    variance_factor: jax.Array | float,
) -> jax.Array:
    """epsilon(T) + c_B B^2 / (1 + T / T0) + c_V V_WM / (1 + V_WM / V_E): with both corrections.

    Args:
      optimisation: epsilon(T).
      bias_size: B.
      variance: V_WM.
      execution_variance: V_E, of the anchors' gradient.
      anchors_seen: T, in any unit that `anchors_needed` shares.
      anchors_needed: T0, anchors after which the bias term is halved.
      bias_factor: c_B.
      variance_factor: c_V.
    """
    left = bias_factor * jnp.square(bias_size) / (1.0 + anchors_seen / anchors_needed)
    return optimisation + left + variance_factor * fused_variance(variance, execution_variance)


class _Run(NamedTuple):
    theta: jax.Array  # float32 [D]
    moments: denoise.State
    calibration: debias.State | None
    seen: jax.Array  # int32, pairs offered to the debiaser


class _Graded(NamedTuple):
    tasks: jax.Array  # int32 [G]
    actions: jax.Array  # int32 [G, N]
    executed: jax.Array  # float32 [G, N], used for anchors only
    predicted: jax.Array  # float32 [G, N]
    is_anchor: jax.Array  # bool [G]


def _grade(
    family: Family,
    arm: Arm,
    theta: jax.Array,
    start: jax.Array,
    key: jax.Array,
    number: jax.Array,
    sizes: Sizes,
) -> _Graded:
    task_key, action_key, score_key, run_key, anchor_key = jax.random.split(key, 5)
    logp = log_policy(family, theta)
    tasks = jax.random.randint(task_key, (sizes.groups,), 0, family.rewards.shape[0])
    shape = (sizes.groups, sizes.rollouts)
    actions = jax.random.categorical(action_key, logp[tasks][:, None, :], shape=shape)
    moved = total_variation(logp, start)
    error = bias(arm.bias_shape, arm.bias_size, family.rewards, family.offsets, moved)
    mean = family.scores + error
    rows = tasks[:, None]
    executed = family.rewards[rows, actions] + arm.execution_noise * jax.random.normal(
        run_key, shape
    )
    predicted = mean[rows, actions] + arm.noise * jax.random.normal(score_key, shape)
    is_anchor = anchors.select(anchor_key, number, sizes.groups, arm.fraction)
    return _Graded(tasks, actions, executed, predicted, is_anchor)


def _streams(
    family: Family,
    arm: Arm,
    graded: _Graded,
    calibrated: jax.Array,
    moments: denoise.State,
) -> Streams:
    rewards = jnp.where(graded.is_anchor[:, None], graded.executed, calibrated)
    # The score function is features less their mean; advantages that sum to zero need no mean.
    taken = family.features[graded.tasks[:, None], graded.actions]
    by_group = jnp.mean(rloo_advantages(rewards)[..., None] * taken, axis=1)

    def mean_over(groups: jax.Array) -> jax.Array:
        return groups @ by_group / jnp.maximum(jnp.sum(groups), 1.0)

    is_anchor = graded.is_anchor.astype(jnp.float32)
    anchor, world_model = mean_over(is_anchor), mean_over(1.0 - is_anchor)
    n_anchor = jnp.sum(is_anchor)
    counts = (n_anchor, is_anchor.size - n_anchor)
    by_variance = denoise.weights(moments, *counts, standardized=False)[1]
    equal = denoise.weights(moments, *counts, standardized=False, rule="fixed")[1]
    weight = jnp.where(arm.world_model, jnp.where(arm.denoise, by_variance, equal), 0.0)
    fused = denoise.combine(anchor, world_model, (1.0 - weight, weight))
    # The entropy's gradient is exact: beside it, a fused gradient that is too short on average
    # moves the optimum. Adaptive optimisers take the length out in real training.
    signal = jnp.where(arm.denoise, 1.0 - weight + weight * _signal(moments, arm), 1.0)
    return Streams(anchor, world_model, fused / signal)


def _signal(moments: denoise.State, arm: Arm) -> jax.Array:
    """S_fr / S_rr: mean length of a world-model gradient, an anchor's being 1; 1 if unmeasured.

    S_rr is that of the true rewards, without the noise of executions.
    """
    _, s_fr, s_rr = denoise.moments(moments)
    s_rr = s_rr - jnp.square(arm.execution_noise)
    return jnp.where(s_rr > 0, jnp.clip(s_fr / jnp.where(s_rr > 0, s_rr, 1.0), 0.0, 1.0), 1.0)


def _entropy_gradient(family: Family, theta: jax.Array) -> jax.Array:
    """Gradient of tau times the mean entropy, exactly."""
    logp = log_policy(family, theta)
    probability = jnp.exp(logp)
    surprise = -(logp + jnp.sum(-probability * logp, axis=-1, keepdims=True))
    expected = jnp.einsum("mk,mkd->md", probability, family.features)
    centred = family.features - expected[:, None]
    gradient = jnp.einsum("mk,mkd->d", probability * surprise, centred)
    return family.temperature * gradient / family.rewards.shape[0]
