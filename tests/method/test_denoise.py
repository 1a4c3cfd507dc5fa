"""The fusion of the anchor stream with the world-model stream."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wmrl_jax.method import denoise
from wmrl_jax.method.advantages import group_advantages
from wmrl_jax.method.losses import policy_loss

N, D = 8, 16
UNBOUNDED = 1e9  # a half-life so long that the moments are plain means


def simulate(n_groups: int, noise: float, scale: float, seed: int):
    """Rewards [G, N], scores [G, N] and score functions [G, N, D] of a linear policy gradient.

    The reward is a weak linear signal in the score function beside much else, as in a real
    policy gradient; a world model sees it with noise and on a scale of its own.
    """
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n_groups, N, D)).astype(np.float32)
    rewards = 0.15 * features[..., 0] + rng.normal(size=(n_groups, N))
    scores = scale * (rewards + noise * rng.normal(size=(n_groups, N)))
    return rewards.astype(np.float32), scores.astype(np.float32), features


def gradients(rewards: np.ndarray, features: np.ndarray, standardized: bool) -> np.ndarray:
    """Policy gradient of each group [G, D]."""
    advantages = np.asarray(group_advantages(rewards, standardize=standardized))
    return np.einsum("gn,gnd->gd", advantages, features) / N


def signal_and_variance(group_gradients: np.ndarray) -> tuple[float, float]:
    return group_gradients.mean(0)[0], group_gradients.var(0).sum()


@pytest.mark.parametrize("standardized", [False, True], ids=["centred", "standardized"])
@pytest.mark.parametrize("calibrated", [False, True], ids=["uncalibrated", "calibrated"])
@pytest.mark.parametrize("noise", [0.3, 1.0, 2.0])
def test_the_weights_are_the_best_ones_by_monte_carlo(standardized, calibrated, noise) -> None:
    scale = 1 / (1 + noise**2) if calibrated else 1.7
    rewards, scores, features = simulate(60_000, noise, scale, seed=1)
    signal_e, variance_e = signal_and_variance(gradients(rewards, features, standardized))
    signal_w, variance_w = signal_and_variance(gradients(scores, features, standardized))
    n_a, n_w = 2, 6

    def error(w_anchor: float, w_world_model: float) -> float:
        """Variance over squared signal of the fused gradient."""
        signal = w_anchor * signal_e + w_world_model * signal_w
        variance = w_anchor**2 * variance_e / n_a + w_world_model**2 * variance_w / n_w
        return variance / signal**2

    state = denoise.observe(denoise.init(UNBOUNDED), scores[:4000], rewards[:4000])
    w = [float(x) for x in denoise.weights(state, n_a, n_w, standardized)]

    assert sum(w) == pytest.approx(1)
    best = min(error(1 - x, x) for x in np.linspace(0, 1, 2001))
    assert error(*w) <= 1.005 * best
    assert error(*w) < 0.999 * min(error(1, 0), error(0, 1))


@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_uncorrelated_noise_gives_the_papers_weight(noise: float) -> None:
    rewards, scores, _ = simulate(20_000, noise, 1.0, seed=2)
    paper = 1 / (1 + noise**2 / rewards.var())

    state = denoise.observe(denoise.init(UNBOUNDED), scores, rewards)

    assert float(denoise.slope(state)) == pytest.approx(paper, rel=0.02)
    assert float(denoise.correlation(state)) == pytest.approx(paper**0.5, rel=0.02)


def moments_by_loop(groups, half_life: float) -> np.ndarray:
    """Exponential average of the unbiased within-group moments, group after group."""
    sums, total = np.zeros(3), 0.0
    for scores, rewards in groups:
        both = np.isfinite(scores) & np.isfinite(rewards)
        if both.sum() < 2:
            continue
        covariance = np.cov(scores[both], rewards[both])
        decay = 0.5 ** (1 / half_life)
        sums = decay * sums + np.array([covariance[0, 0], covariance[0, 1], covariance[1, 1]])
        total = decay * total + 1
    return sums / total


def dirty_groups(n_groups: int):
    rewards, scores, _ = simulate(n_groups, 1.0, 1.0, seed=3)
    rng = np.random.default_rng(4)
    rewards[rng.uniform(size=rewards.shape) < 0.3] = np.nan
    scores[rng.uniform(size=scores.shape) < 0.3] = np.nan
    rewards[5] = np.nan
    rewards[9, 1:] = np.nan
    return scores, rewards


def test_moments_are_an_exponential_average_over_groups_without_nan() -> None:
    scores, rewards = dirty_groups(30)

    state = jax.jit(denoise.observe)(denoise.init(7.0), scores, rewards)

    expected = moments_by_loop(zip(scores.astype(float), rewards.astype(float), strict=True), 7.0)
    np.testing.assert_allclose(denoise.moments(state), expected, rtol=1e-4)


def test_moments_do_not_depend_on_how_groups_were_cut_into_calls() -> None:
    scores, rewards = dirty_groups(30)
    whole = denoise.observe(denoise.init(7.0), scores, rewards)

    state = denoise.init(7.0)
    for part in (slice(0, 1), slice(1, 12), slice(12, 30)):
        state = denoise.observe(state, scores[part], rewards[part])

    np.testing.assert_allclose(
        denoise.moments(state), np.asarray(denoise.moments(whole)), rtol=1e-5
    )
    assert state.groups == whole.groups


def test_moments_survive_rewards_far_from_zero_with_a_small_spread() -> None:
    rng = np.random.default_rng(0)
    rewards = (0.9 + 1e-4 * rng.normal(size=(50, N))).astype(np.float32)

    state = denoise.observe(denoise.init(UNBOUNDED), rewards, rewards)

    expected = np.mean([np.var(group.astype(float), ddof=1) for group in rewards])
    np.testing.assert_allclose(denoise.moments(state), [expected] * 3, rtol=1e-4)
    assert float(denoise.correlation(state)) == pytest.approx(1, abs=1e-5)


def observed(scores, rewards) -> denoise.State:
    return denoise.observe(denoise.init(UNBOUNDED), jnp.asarray(scores), jnp.asarray(rewards))


def numbers(w: denoise.Weights) -> list[float]:
    return [float(x) for x in w]


@pytest.mark.parametrize("standardized", [False, True])
class TestLimits:
    rewards, scores, _ = simulate(2000, 1.0, 1.0, seed=5)

    def test_a_perfect_world_model_counts_like_an_execution(self, standardized) -> None:
        state = observed(self.rewards, self.rewards)
        assert numbers(denoise.weights(state, 2, 6, standardized)) == pytest.approx([0.25, 0.75])

    def test_a_useless_world_model_leaves_grpo_on_the_anchors(self, standardized) -> None:
        state = observed(-self.scores, self.rewards)
        assert numbers(denoise.weights(state, 2, 6, standardized)) == [1.0, 0.0]

    def test_no_anchors_is_plain_world_model_training(self, standardized) -> None:
        for scores in (self.scores, -self.scores):
            state = observed(scores, self.rewards)
            assert numbers(denoise.weights(state, 0, 6, standardized)) == [0.0, 1.0]
        assert numbers(denoise.weights(denoise.init(), 0, 6, standardized)) == [0.0, 1.0]

    def test_only_anchors_is_grpo(self, standardized) -> None:
        state = observed(self.scores, self.rewards)
        assert numbers(denoise.weights(state, 2, 0, standardized)) == [1.0, 0.0]

    def test_no_groups_at_all_still_sum_to_one(self, standardized) -> None:
        assert numbers(denoise.weights(denoise.init(), 0, 0, standardized)) == [1.0, 0.0]

    def test_one_anchor_of_one_graded_rollout_measures_nothing(self, standardized) -> None:
        rewards = np.full((1, N), np.nan, np.float32)
        rewards[0, 3] = 0.7
        state = observed(self.scores[:1], rewards)
        known, untouched = (s._replace(calibration=0.0) for s in (state, denoise.init(UNBOUNDED)))
        assert jax.tree.all(jax.tree.map(jnp.array_equal, known, untouched))
        assert numbers(denoise.weights(state, 1, 7, standardized)) == pytest.approx([1 / 8, 7 / 8])

    def test_equal_rewards_in_every_anchor_measure_no_signal(self, standardized) -> None:
        state = observed(self.scores[:3], np.full((3, N), 0.1, np.float32))
        assert numbers(denoise.weights(state, 1, 7, standardized)) == pytest.approx([1 / 8, 7 / 8])


def test_a_shrunken_score_counts_more_than_an_execution_where_advantages_are_centred() -> None:
    rewards, _, _ = simulate(500, 0.0, 1.0, seed=6)

    state = observed(rewards / 2, rewards)

    assert float(denoise.slope(state)) == pytest.approx(2, rel=1e-4)
    assert float(denoise.correlation(state)) == pytest.approx(1, rel=1e-4)


def test_the_authors_rule_weighs_anchors_by_two_when_its_warm_up_ends() -> None:
    rewards, scores, _ = simulate(200, 1.0, 1.0, seed=7)
    rule = {"rule": "authors"}
    state = denoise.observe(denoise.init(UNBOUNDED), scores[:31], rewards[:31])
    assert numbers(denoise.weights(state, 1, 1, **rule)) == pytest.approx([0.5, 0.5])

    state = denoise.observe(state, scores[31:32], rewards[31:32])
    assert numbers(denoise.weights(state, 1, 1, **rule)) == pytest.approx([2 / 3, 1 / 3])

    c = float(state.calibration)
    state = denoise.observe(state, scores[32:], rewards[32:])
    residual = (
        np.var(scores - rewards, axis=1, ddof=1).mean() / np.var(rewards, axis=1, ddof=1).mean()
    )
    anchor = np.clip(1 + c * residual, 1, 4)
    assert float(state.calibration) == c
    assert numbers(denoise.weights(state, 1, 1, **rule)) == pytest.approx(
        [anchor / (anchor + 1), 1 / (anchor + 1)], rel=1e-4
    )
    far = denoise.observe(state, 100 * scores, rewards)
    assert numbers(denoise.weights(far, 1, 1, **rule)) == pytest.approx([0.8, 0.2])


def test_fixed_weights_count_every_group_alike() -> None:
    rewards, scores, _ = simulate(50, 1.0, 1.0, seed=8)

    w = denoise.weights(observed(scores, rewards), 1, 7, rule="fixed")

    assert numbers(w) == pytest.approx([1 / 8, 7 / 8])


def test_combine_is_the_weighted_sum_and_keeps_each_leafs_type() -> None:
    a = {"x": jnp.array([1.0, 2.0]), "y": (jnp.array(4.0, jnp.bfloat16),)}
    b = {"x": jnp.array([3.0, -2.0]), "y": (jnp.array(8.0, jnp.bfloat16),)}

    fused = denoise.combine(a, b, (jnp.float32(0.25), jnp.float32(0.75)))

    assert fused["x"].tolist() == [2.5, -1.0]
    assert fused["y"][0] == 7.0 and fused["y"][0].dtype == jnp.bfloat16


def test_combine_ignores_a_stream_of_weight_zero_even_if_it_is_nan() -> None:
    good, bad = jnp.array([1.0, 2.0]), jnp.array([jnp.nan, jnp.inf])

    assert denoise.combine(good, bad, (jnp.float32(1), jnp.float32(0))).tolist() == [1, 2]
    assert denoise.combine(bad, good, (jnp.float32(0), jnp.float32(1))).tolist() == [1, 2]


def token_problem(seed: int = 0):
    """A softmax policy over 5 tokens and 6 groups of 4 rollouts of up to 7 tokens."""
    rng = np.random.default_rng(seed)
    params = {"w": jnp.asarray(rng.normal(size=(3, 5)), jnp.float32), "b": jnp.zeros(5)}
    inputs = jnp.asarray(rng.normal(size=(6, 4, 7, 3)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, 5, size=(6, 4, 7)))
    mask = jnp.arange(7) < rng.integers(1, 8, size=(6, 4, 1))
    behaviour = jnp.asarray(-1.6 + 0.1 * rng.normal(size=(6, 4, 7)), jnp.float32)

    def total_and_count(params, advantages, keep, name):
        logits = inputs @ params["w"] + params["b"]
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)[..., 0]
        loss = policy_loss(
            logprobs, behaviour, advantages, mask, name=name, max_tokens=7,
            keep=jnp.broadcast_to(keep[:, None], (6, 4)),
        )  # fmt: skip
        return loss.total, loss.count

    return params, total_and_count, mask


@pytest.mark.parametrize("name", ["dapo", "grpo", "dr_grpo", "gspo", "cispo"])
def test_weighting_the_loss_equals_combining_the_gradients(name: str) -> None:
    params, total_and_count, mask = token_problem()
    rng = np.random.default_rng(1)
    advantages = group_advantages(jnp.asarray(rng.uniform(size=(6, 4)), jnp.float32))
    is_anchor = jnp.array([False, True, False, False, True, False])
    usable = jnp.array([True, True, True, False, True, True])
    w = (jnp.float32(0.4), jnp.float32(0.6))

    def mean_gradient(advantages, keep):
        def loss(params):
            total, count = total_and_count(params, advantages, keep, name)
            return total / count

        return jax.grad(loss)(params)

    combined = denoise.combine(
        mean_gradient(advantages, usable & is_anchor),
        mean_gradient(advantages, usable & ~is_anchor),
        w,
    )
    size = jnp.sum(mask, axis=(1, 2)) if name in ("dapo", "cispo") else None
    multipliers = denoise.group_weights(w, is_anchor, usable, size=size)
    weighted = mean_gradient(advantages * multipliers[:, None], usable)

    for got, expected in zip(jax.tree.leaves(weighted), jax.tree.leaves(combined), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-7)


def test_group_weights_are_zero_for_a_group_or_a_stream_that_does_not_contribute() -> None:
    w = (jnp.float32(0.5), jnp.float32(0.5))
    is_anchor = jnp.array([True, False, False])

    got = denoise.group_weights(w, is_anchor, jnp.array([False, True, False]))
    nothing = denoise.group_weights(w, is_anchor, jnp.zeros(3, bool))

    assert got.tolist() == [0.0, 0.5, 0.0]
    assert nothing.tolist() == [0.0, 0.0, 0.0]


def control_variate_gradients(coefficient: float, repeats: int, standardized: bool = False):
    """[repeats, D] control-variate gradients of batches of 2 anchors among 10 groups, and g_E.

    The world model is badly biased: it rewards a feature that has no true value.
    """
    groups, anchors = 10, 2
    rewards, scores, features = simulate(groups * repeats, 0.7, 1.0, seed=9)
    scores = scores + 0.8 * features[..., 1]

    def shaped(x):
        return x.reshape(repeats, groups, *x.shape[1:])

    executed = np.asarray(group_advantages(rewards, standardize=standardized))
    predicted = np.asarray(group_advantages(scores, standardize=standardized))
    is_anchor = jnp.arange(groups) < anchors
    usable = jnp.ones(groups, bool)
    advantages = jax.vmap(
        lambda e, p: denoise.control_variate(e, p, is_anchor, is_anchor, usable, coefficient)
    )(shaped(executed), shaped(predicted))
    fused = np.einsum("rgn,rgnd->rd", np.asarray(advantages), shaped(features)) / (groups * N)
    true = gradients(rewards, features, standardized).mean(0)
    return fused, true, denoise.observe(denoise.init(UNBOUNDED), scores, rewards)


@pytest.mark.parametrize("coefficient", [0.0, 0.4, 1.0])
def test_the_control_variate_is_unbiased_whatever_the_world_models_bias(coefficient) -> None:
    fused, true, _ = control_variate_gradients(coefficient, 6000)

    error = fused.std(0) / np.sqrt(len(fused))
    assert (np.abs(fused.mean(0) - true) < 5 * error + 2e-3).all()
    assert np.abs(fused.mean(0)[1]) < 0.1 * 0.8 * (N - 1) / N  # of the bias of plain scores


@pytest.mark.parametrize("standardized", [False, True])
def test_the_measured_coefficient_has_the_least_variance(standardized: bool) -> None:
    def variance(coefficient: float) -> float:
        return control_variate_gradients(coefficient, 4000, standardized)[0].var(0).sum()

    state = control_variate_gradients(0.0, 4000)[2]
    measured = float((denoise.correlation if standardized else denoise.slope)(state))

    best = min(variance(c) for c in np.linspace(0, 1.2, 13))
    assert variance(measured) <= 1.01 * best
    assert variance(measured) < 0.9 * variance(0.0)


def test_the_control_variate_is_the_sum_of_three_mean_gradients() -> None:
    params, total_and_count, mask = token_problem(2)
    rng = np.random.default_rng(3)
    executed, predicted = (
        group_advantages(jnp.asarray(rng.uniform(size=(6, 4)), jnp.float32)) for _ in range(2)
    )
    is_anchor = jnp.array([True, False, False, True, False, False])
    executed_ok = jnp.array([True, False, False, True, False, False])
    predicted_ok = jnp.array([True, True, True, True, False, True])
    size = jnp.sum(mask, axis=(1, 2)).astype(jnp.float32)
    coefficient = 0.3

    def mean_gradient(advantages, keep):
        def loss(params):
            # CISPO is linear in the advantages, whatever their sign.
            total, count = total_and_count(params, advantages, keep, "cispo")
            return total / count

        return jax.grad(loss)(params)

    anchored = mean_gradient(executed, is_anchor & executed_ok)
    everywhere = mean_gradient(predicted, predicted_ok)
    paired = mean_gradient(predicted, is_anchor & predicted_ok)
    advantages = denoise.control_variate(
        executed, predicted, is_anchor, executed_ok, predicted_ok, coefficient, size=size
    )
    got = mean_gradient(advantages, predicted_ok)

    for name in params:
        expected = anchored[name] + coefficient * (everywhere[name] - paired[name])
        np.testing.assert_allclose(got[name], expected, rtol=2e-5, atol=1e-6)


def test_the_control_variate_without_a_usable_anchor_is_the_world_models_gradient() -> None:
    nan = jnp.full((3, 2), jnp.nan)
    predicted = jnp.array([[1.0, -1.0], [2.0, -2.0], [3.0, -3.0]])
    none, every = jnp.zeros(3, bool), jnp.ones(3, bool)

    got = denoise.control_variate(nan, predicted, none, none, every, 0.5)

    np.testing.assert_allclose(got, predicted)


def test_a_half_life_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="half_life is 0"):
        denoise.init(0)
