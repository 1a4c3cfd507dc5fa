"""The simulator against closed forms and exact gradients, and the bounds against their limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wmrl_jax.method import denoise, theory
from wmrl_jax.method.theory import BIAS_SHAPES, Arm, Sizes

SMALL = Sizes(steps=40, groups=8, rollouts=4, refit_every=20)


@pytest.fixture(scope="module")
def family():
    return theory.make_family(jax.random.key(3), tasks=16, actions=5, dimension=4)


def brute_force_value(family, theta):
    total = 0.0
    for phi, r in zip(np.asarray(family.features), np.asarray(family.rewards), strict=True):
        logits = phi @ np.asarray(theta)
        p = np.exp(logits - logits.max())
        p /= p.sum()
        total += np.sum(p * (r - float(family.temperature) * np.log(p)))
    return total / len(family.features)


def arm_of(**fields):
    return jax.tree.map(jnp.asarray, Arm(**fields))


def test_rewards_span_the_unit_interval_and_no_more(family):
    assert 0.0 <= float(family.rewards.min()) < 0.1 < 0.9 < float(family.rewards.max()) <= 1.0


def test_value_equals_a_loop_over_tasks(family):
    theta = jnp.array([0.3, -0.2, 0.5, 1.0])
    assert float(theory.value(family, theta)) == pytest.approx(brute_force_value(family, theta))


def test_the_optimum_has_no_gradient_and_the_value_of_the_closed_form(family):
    gradient = jax.grad(lambda t: theory.value(family, t))(family.optimum)
    np.testing.assert_allclose(gradient, 0.0, atol=1e-6)
    assert float(family.best_value) == pytest.approx(
        brute_force_value(family, family.optimum), abs=1e-6
    )


@pytest.mark.parametrize("shape", range(len(BIAS_SHAPES)))
def test_a_bias_never_exceeds_its_size(family, shape):
    error = theory.bias(shape, 0.3, family.rewards, family.offsets, jnp.float32(0.7))
    assert float(jnp.abs(error).max()) <= 0.3 + 1e-6
    assert float(jnp.abs(error).max()) > 0.05


def test_each_bias_is_what_its_name_says():
    rewards = jnp.array([0.0, 0.2, 0.5, 1.0])
    offsets = jnp.array([1.0, -0.5, 0.0, -1.0])
    expected = {
        "affine": [0.0, -0.06, -0.15, -0.3],
        "saturating": [0.0, -0.012, -0.075, -0.3],
        "rank_breaking": [0.3, -0.15, 0.0, -0.3],
        "drifting": [0.0, -0.006, -0.0375, -0.15],
    }
    assert set(expected) == set(BIAS_SHAPES)
    for shape, error in expected.items():
        got = theory.bias(BIAS_SHAPES.index(shape), 0.3, rewards, offsets, jnp.float32(0.5))
        np.testing.assert_allclose(got, error, atol=1e-6)


def test_the_drifting_bias_is_absent_at_the_start(family):
    drifting = BIAS_SHAPES.index("drifting")
    error = theory.bias(drifting, 0.3, family.rewards, family.offsets, jnp.float32(0.0))
    np.testing.assert_array_equal(error, jnp.zeros_like(error))


def test_only_the_rank_breaking_bias_breaks_rankings(family):
    for index, shape in enumerate(BIAS_SHAPES):
        error = theory.bias(index, 0.4, family.rewards, family.offsets, jnp.float32(1.0))
        order = jnp.argsort(family.rewards.reshape(-1))
        scores = (family.rewards + error).reshape(-1)[order]
        increasing = bool(jnp.all(jnp.diff(scores) >= -1e-6))
        assert increasing == (shape != "rank_breaking")


def test_each_stream_estimates_the_exact_gradient_without_bias(family):
    theta = 0.4 * family.optimum
    arm = arm_of(noise=0.2, execution_noise=0.1, fraction=0.25, denoise=True)
    moments = theory.measured_moments(family, arm, theta, jax.random.key(0), SMALL, steps=16_384)
    keys = jax.random.split(jax.random.key(1), 40_000)
    estimate = lambda k: theory.estimate_gradient(family, arm, theta, moments, k, SMALL)  # noqa: E731
    streams = jax.jit(jax.vmap(estimate))(keys)

    def reward_alone(t):
        p = jnp.exp(theory.log_policy(family, t))
        return jnp.mean(jnp.sum(p * family.rewards, axis=-1))

    exact = jax.grad(reward_alone)(theta)
    for stream in streams:
        error = jnp.std(stream, axis=0) / np.sqrt(len(keys))
        assert bool(jnp.all(jnp.abs(jnp.mean(stream, axis=0) - exact) < 5 * error))


def test_the_fused_gradient_varies_less_than_either_stream(family):
    theta = 0.4 * family.optimum
    arm = arm_of(noise=0.4, fraction=0.25, denoise=True)
    moments = theory.measured_moments(family, arm, theta, jax.random.key(0), SMALL)
    keys = jax.random.split(jax.random.key(2), 8_000)
    estimate = lambda k: theory.estimate_gradient(family, arm, theta, moments, k, SMALL)  # noqa: E731
    anchor, world_model, fused = (
        float(jnp.sum(jnp.var(g, axis=0))) for g in jax.jit(jax.vmap(estimate))(keys)
    )
    assert fused < 0.9 * min(anchor, world_model)
    assert fused == pytest.approx(float(theory.fused_variance(world_model, anchor)), rel=0.35)


def test_under_an_affine_bias_training_settles_where_the_closed_form_says(family):
    """With scores (1 - B) r the best policy is softmax(phi (1 - B) theta_star)."""
    size = 0.3
    sizes = Sizes(steps=400, groups=64, rollouts=32, refit_every=20)
    arm = arm_of(bias_size=size, learning_rate=2.0, fraction=0.0)
    trace = jax.jit(lambda k: theory.simulate(family, arm, k, sizes))(jax.random.key(0))
    expected = family.best_value - theory.value(family, (1 - size) * family.optimum)
    assert float(trace.gap[0]) == pytest.approx(
        float(family.best_value - theory.value(family, jnp.zeros(4)))
    )
    assert float(trace.gap[-100:].mean()) == pytest.approx(float(expected), rel=0.15)


def test_debiasing_removes_most_of_a_monotone_bias(family):
    keys = jax.random.split(jax.random.key(5), 16)
    base = dict(bias_shape=1, bias_size=0.4, learning_rate=1.0, fraction=0.25)

    def floor(capacity):
        sizes = Sizes(steps=200, groups=8, rollouts=8, capacity=capacity)
        run = jax.jit(jax.vmap(lambda k: theory.simulate(family, arm_of(**base), k, sizes)))
        return float(run(keys).gap[:, -50:].mean())

    assert floor(128) < 0.5 * floor(0)


def test_a_frozen_map_is_given_no_more_pairs(family):
    arm = arm_of(fraction=0.5, frozen_after=20)
    trace = jax.jit(lambda k: theory.simulate(family, arm, k, SMALL))(jax.random.key(0))
    assert trace.pairs[19] == 0
    assert trace.pairs[-1] == 20 * 4 * 4


def test_without_the_world_model_its_scores_do_not_matter(family):
    def theta(noise):
        arm = arm_of(noise=noise, fraction=0.25, world_model=False)
        run = jax.jit(lambda k: theory.simulate(family, arm, k, SMALL))
        return run(jax.random.key(0)).theta

    np.testing.assert_array_equal(theta(0.0), theta(5.0))


def test_steps_that_refits_do_not_divide_are_refused(family):
    with pytest.raises(ValueError, match="no multiple of refit_every, which is 20"):
        theory.simulate(family, Arm(), jax.random.key(0), Sizes(steps=30))


def test_curvature_bounds_the_gap_by_the_squared_gradient_on_the_way(family):
    mu = float(theory.curvature(family))
    for share in (0.1, 0.5, 0.9):
        theta = share * family.optimum
        gradient = jax.grad(lambda t: theory.value(family, t))(theta)
        gap = float(family.best_value - theory.value(family, theta))
        assert float(jnp.sum(gradient**2)) >= 2 * mu * gap * 0.999
    assert mu > 0


def test_fused_variance_is_the_harmonic_one_and_zero_with_a_perfect_stream():
    assert float(theory.fused_variance(2.0, 6.0)) == pytest.approx(1.5)
    assert float(theory.fused_variance(0.0, 0.0)) == 0.0
    assert float(theory.fused_variance(3.0, 0.0)) == 0.0


def test_the_optimisation_term_contracts_from_the_initial_gap():
    assert float(theory.optimisation_term(0, 0.7, 1.0, 0.4)) == pytest.approx(0.7)
    assert float(theory.optimisation_term(10, 0.7, 1.0, 0.4)) == pytest.approx(0.7 * 0.9**10)


def test_the_corrected_bound_meets_the_uncorrected_one_without_anchors_and_falls_with_them():
    factors = dict(bias_factor=2.0, variance_factor=0.5)
    plain = float(theory.uncorrected_bound(0.1, 0.3, 0.2, **factors))
    assert plain == pytest.approx(0.1 + 2 * 0.09 + 0.5 * 0.2)
    none = float(theory.corrected_bound(0.1, 0.3, 0.2, 1e9, 0.0, 50.0, **factors))
    assert none == pytest.approx(plain, rel=1e-4)
    half = float(theory.corrected_bound(0.1, 0.3, 0.2, 0.2, 50.0, 50.0, **factors))
    assert half == pytest.approx(0.1 + 0.09 + 0.5 * 0.1)


def test_the_moments_at_fixed_parameters_are_those_of_a_closed_form(family):
    """Unbiased scores with noise: S_ff - S_rr is the noise's variance, S_fr is S_rr."""
    sizes = Sizes(groups=64, rollouts=16)
    arm = arm_of(noise=0.3, fraction=1.0)
    moments = theory.measured_moments(
        family, arm, family.optimum * 0.2, jax.random.key(0), sizes, steps=200
    )
    s_ff, s_fr, s_rr = (float(m) for m in denoise.moments(moments))
    assert s_ff - s_rr == pytest.approx(0.09, rel=0.05)
    assert s_fr == pytest.approx(s_rr, rel=0.05)
