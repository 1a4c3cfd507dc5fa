"""The online debiaser."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.isotonic import IsotonicRegression

from wmrl_jax.method import debias

CAPACITY, PAIRS = 24, 40
observe = jax.jit(debias.observe, static_argnames="map")
apply = jax.jit(debias.apply)
MAPS = sorted(debias.MAPS)


def pairs(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Scores of a world model that flatters, and noisy rewards."""
    rng = np.random.default_rng(seed)
    reward = rng.uniform(size=n)
    score = np.clip(np.sqrt(reward) + rng.normal(scale=0.15, size=n), 0, 1)
    return score.astype(np.float32), reward.astype(np.float32)


def fitted(x: np.ndarray, y: np.ndarray, map: str = "centred", capacity: int = 256) -> debias.State:
    return observe(debias.init(capacity, min_pairs=1), x, y, map=map)


number = st.one_of(
    st.floats(0.0, 1.0, width=32),
    st.sampled_from([0.0, 0.1, 0.2, 0.5, 1.0]),
    st.sampled_from([float("nan"), float("inf"), -float("inf"), -3.0, 7.5]),
)
buffers = st.lists(st.tuples(number, number), min_size=0, max_size=PAIRS)


def padded(content: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    array = np.full((PAIRS, 2), np.nan, np.float32)
    array[: len(content)] = np.array(content, np.float32).reshape(-1, 2)
    return array[:, 0], array[:, 1]


@pytest.mark.parametrize("map", MAPS)
@given(content=buffers)
@settings(max_examples=60, deadline=None)
def test_the_map_is_monotone_and_bounded_for_every_buffer(map, content) -> None:
    x, y = padded(content)
    grid = np.unique(np.concatenate([x[np.isfinite(x)], np.linspace(-4, 8, 481, dtype=np.float32)]))
    queries = np.full(600, np.nan, np.float32)
    queries[: grid.size] = grid

    state = observe(debias.init(CAPACITY, min_pairs=1), x, y, map=map)
    mapped = np.asarray(apply(state, queries))[: grid.size]

    assert (np.diff(mapped) >= 0).all()
    if (np.isfinite(x) & np.isfinite(y)).any():
        assert ((mapped >= 0) & (mapped <= 1)).all()
    else:
        np.testing.assert_array_equal(mapped, grid)


@given(content=st.lists(st.tuples(st.floats(0, 1, width=32), st.floats(0, 1, width=32)), min_size=2,
                        max_size=CAPACITY))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_the_centred_map_keeps_a_ranking_wherever_blocks_differ(content) -> None:
    x, y = padded([(round(a, 2), round(b, 2)) for a, b in content])
    state = observe(debias.init(CAPACITY, min_pairs=1), x, y)
    held = np.unique(x[np.isfinite(x)])

    mapped = np.asarray(apply(state, np.resize(held, PAIRS)))[: held.size]

    flat_fit = IsotonicRegression().fit(x[np.isfinite(x)], y[np.isfinite(y)]).predict(held)
    if np.ptp(flat_fit) < 1e-3:
        return
    inner = (mapped > 0) & (mapped < 1)  # the clamp to [0, 1] may flatten the ends
    assert (np.diff(mapped[inner]) > 0).all()


def test_the_step_map_is_scikit_learns_prediction() -> None:
    x, y = pairs(200)
    x = np.round(x, 2)  # ties
    grid = np.linspace(-0.5, 1.5, 401, dtype=np.float32)

    got = apply(fitted(x, y, "step"), grid)

    expected = IsotonicRegression(out_of_bounds="clip").fit(x, y).predict(grid)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_the_centred_map_joins_the_means_of_the_pooled_blocks() -> None:
    x, y = pairs(200)
    x = np.round(x, 2)
    order = np.argsort(x, kind="stable")
    xs, ys = x[order].astype(float), IsotonicRegression().fit(x, y).predict(x[order])
    edges = np.flatnonzero(np.diff(ys) > 1e-6) + 1
    mean_x = np.array([part.mean() for part in np.split(xs, edges)])
    mean_y = np.array([part.mean() for part in np.split(ys, edges)])
    # Beyond the outer means the outer segments go on to the ends of the data.
    low = mean_y[0] - (mean_x[0] - xs[0]) * (mean_y[1] - mean_y[0]) / (mean_x[1] - mean_x[0])
    high = mean_y[-1] + (xs[-1] - mean_x[-1]) * (mean_y[-1] - mean_y[-2]) / (
        mean_x[-1] - mean_x[-2]
    )
    knots_x = np.concatenate([xs[:1], mean_x, xs[-1:]])
    knots_y = np.clip(np.concatenate([[low], mean_y, [high]]), 0, 1)
    grid = np.linspace(-0.5, 1.5, 401, dtype=np.float32)

    state = fitted(x, y)
    got = apply(state, grid)
    curve_x, curve_y, n = debias.curve(state)

    np.testing.assert_allclose(got, np.interp(grid, knots_x, knots_y), atol=1e-5)
    np.testing.assert_allclose(curve_x[:n], knots_x, atol=1e-6)
    np.testing.assert_allclose(curve_y[:n], knots_y, atol=1e-5)


def test_the_bins_map_pools_the_means_of_ten_bins() -> None:
    x, y = pairs(200)
    x = np.where((x > 0.3) & (x < 0.4), 0.45, x)  # an empty bin
    index = np.minimum(np.floor(x * 10), 9).astype(int)
    filled = np.unique(index)
    means = np.array([y[index == b].mean() for b in filled])
    counts = np.bincount(index)[filled]
    levels = IsotonicRegression().fit(filled, means, sample_weight=counts).predict(filled)
    grid = np.linspace(-0.5, 1.5, 401, dtype=np.float32)

    got = apply(fitted(x, y, "bins"), grid)

    np.testing.assert_allclose(got, np.interp(grid, (filled + 0.5) / 10, levels), atol=1e-5)


def test_the_map_is_exactly_the_identity_below_min_pairs() -> None:
    x, y = pairs(20)
    scores = np.array([-2.0, 0.3, np.nan, 5.0], np.float32)

    state = observe(debias.init(256, min_pairs=21), x, y)

    np.testing.assert_array_equal(apply(state, scores), scores)
    assert debias.curve(state)[2] == 0
    state = observe(state, np.float32([0.5] + [np.nan] * 19), np.float32([0.5] * 20))
    assert (apply(state, scores)[:2] != scores[:2]).all()


def test_a_nan_score_stays_nan() -> None:
    mapped = apply(fitted(*pairs(50)), jnp.array([0.5, jnp.nan]))

    assert np.isfinite(mapped[0]) and np.isnan(mapped[1])


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_the_buffer_holds_the_newest_finite_pairs(steps: int) -> None:
    rng = np.random.default_rng(steps)
    state = debias.init(CAPACITY, min_pairs=1)
    expected: list[tuple[float, float]] = []
    for _ in range(steps):
        x, y = rng.uniform(size=(2, PAIRS)).astype(np.float32)
        x[rng.uniform(size=PAIRS) < 0.5] = np.nan
        y[rng.uniform(size=PAIRS) < 0.2] = np.inf
        state = observe(state, x, y)
        expected += [(a, b) for a, b in zip(x, y, strict=True) if np.isfinite(a + b)]

    n = int(state.count)
    assert n == min(len(expected), CAPACITY)
    held = zip(state.predicted[:n].tolist(), state.executed[:n].tolist(), strict=True)
    assert set(held) == {(float(a), float(b)) for a, b in expected[-CAPACITY:]}


def test_of_more_pairs_than_fit_the_last_ones_stay() -> None:
    x = np.linspace(0, 1, PAIRS, dtype=np.float32)

    state = observe(debias.init(CAPACITY, min_pairs=1), x, 1 - x)

    assert sorted(state.predicted.tolist()) == x[-CAPACITY:].tolist()
    assert sorted(state.executed.tolist()) == (1 - x)[-CAPACITY:][::-1].tolist()


def test_the_map_does_not_depend_on_how_pairs_were_cut_into_calls() -> None:
    x, y = pairs(40)
    whole = fitted(x, y)

    state = debias.init(256, min_pairs=1)
    for part in (slice(0, 1), slice(1, 9), slice(9, 40)):
        state = observe(state, x[part], y[part])

    for got, expected in zip(state, whole, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_ties_are_averaged_before_the_fit() -> None:
    # By order of arrival 0.9, 0.1 would be a violation inside the tie, and 0.1, 0.9 none.
    x = np.float32([0.2, 0.5, 0.5, 0.8])
    one = fitted(x, np.float32([0.0, 0.9, 0.1, 1.0]), "step", CAPACITY)
    other = fitted(x, np.float32([0.0, 0.1, 0.9, 1.0]), "step", CAPACITY)

    assert apply(one, 0.5) == apply(other, 0.5) == 0.5


@pytest.mark.parametrize("map", MAPS)
def test_it_removes_the_bias_of_a_flattering_world_model(map: str) -> None:
    x, y = pairs(2000, seed=1)
    fresh, truth = pairs(2000, seed=2)

    state = fitted(x, y, map, 2048)

    bias = np.abs(apply(state, fresh).mean() - truth.mean())
    assert np.abs(fresh.mean() - truth.mean()) > 0.1
    assert bias < 0.02


def test_refitting_follows_a_drift_that_a_frozen_map_misses() -> None:
    steps, per_step, warm = 200, 8, 30
    rng = np.random.default_rng(0)
    power = np.linspace(1.0, 0.35, steps)  # the score of reward r is r ** power, and drifts up
    rewards = rng.uniform(size=(steps, per_step))
    noise = rng.normal(scale=0.03, size=(steps, per_step))
    scores = (np.clip(rewards ** power[:, None] + noise, 0, 1)).astype(np.float32)
    rewards = rewards.astype(np.float32)
    grid = np.linspace(0.1, 0.95, 18)

    def step(state, batch):
        state = debias.observe(state, *batch)
        return state, debias.apply(state, jnp.asarray(grid, jnp.float32))

    start = debias.init(capacity=160, min_pairs=20)
    frozen, _ = jax.lax.scan(step, start, (scores[:warm], rewards[:warm]))
    _, refitted = jax.lax.scan(step, frozen, (scores[warm:], rewards[warm:]))

    truth = grid[None] ** (1.0 / power[warm:, None])
    error = np.sqrt(np.mean((refitted - truth) ** 2))
    frozen_error = np.sqrt(np.mean((apply(frozen, grid.astype(np.float32)) - truth) ** 2))
    assert error < 0.5 * frozen_error


@pytest.mark.parametrize("map", MAPS)
def test_the_state_keeps_its_tree_whatever_the_map(map: str) -> None:
    state = debias.init(CAPACITY, min_pairs=1)
    x = jnp.zeros((3, 4), jnp.bfloat16)

    after = jax.eval_shape(lambda state: debias.observe(state, x, x, map=map), state)

    assert jax.tree.map(lambda a: (a.shape, a.dtype), state) == jax.tree.map(
        lambda a: (a.shape, a.dtype), after
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"capacity": 0}, "capacity is 0"),
        ({"min_pairs": 0}, "min_pairs 0"),
        ({"capacity": 100, "min_pairs": 200}, "raise capacity or lower min_pairs"),
    ],
)
def test_impossible_sizes_are_refused_in_words(arguments, words) -> None:
    with pytest.raises(ValueError, match=words):
        debias.init(**arguments)
