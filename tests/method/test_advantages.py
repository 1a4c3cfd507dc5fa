"""Group-relative advantages, whole and spread over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from wmrl_jax.method.advantages import ADVANTAGES, group_advantages, group_kinds

NAN = np.nan
G, N = 8, 16


def by_loop(name: str, rewards: np.ndarray, eps: float) -> np.ndarray:
    """Advantages in float64, group after group."""
    result = np.zeros(rewards.shape)
    used = []
    for g, group in enumerate(np.asarray(rewards, float)):
        graded = np.isfinite(group)
        if graded.sum() < 2:
            continue
        values = group[graded]
        centred = values - values.mean()
        if name == "standardized":
            scale = values.std() + eps
            result[g, graded] = centred / scale if scale > 0 else 0
        elif name == "rloo":
            others = [np.delete(values, i).mean() for i in range(len(values))]
            result[g, graded] = values - others
        else:
            result[g, graded] = centred
        if np.ptp(values) > 0:
            used.append(centred)
    if name == "batch" and used:
        result /= np.sqrt(np.mean(np.concatenate(used) ** 2)) + eps
    return result


def dirty_rewards(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rewards = rng.uniform(size=(G, N)).astype(np.float32)
    rewards[rng.uniform(size=rewards.shape) < 0.3] = NAN
    rewards[1] = 0.1
    rewards[2] = NAN
    rewards[3, 1:] = NAN
    rewards[4, 2:] = NAN
    rewards[4, :2] = [0.2, 0.7]
    return rewards


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("eps", [0.0, 1e-4])
def test_advantages_equal_a_loop(name: str, eps: float) -> None:
    rewards = dirty_rewards()

    got = jax.jit(lambda r: ADVANTAGES[name](r, eps=eps))(rewards)

    np.testing.assert_allclose(got, by_loop(name, rewards, eps), atol=2e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 1e-8, 1234.567])
@pytest.mark.parametrize("n", [2, 3, 8, 13])
def test_equal_rewards_give_exactly_zero(name: str, value: float, n: int) -> None:
    rewards = np.full((1, n), value, np.float32)

    for eps in (0.0, 1e-4):
        assert (np.asarray(ADVANTAGES[name](rewards, eps=eps)) == 0).all()


def test_a_spread_in_the_last_digits_keeps_its_scale() -> None:
    got = group_advantages(jnp.array([[1.00000, 1.00001]]), eps=0.0)

    np.testing.assert_allclose(got, [[-1, 1]], rtol=1e-6)


def test_the_standard_deviation_is_the_populations() -> None:
    got = group_advantages(jnp.array([[0.0, 0.0, 0.0, 1.0]]), eps=0.0)

    np.testing.assert_allclose(got, [[-1 / 3**0.5] * 3 + [3**0.5]], rtol=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_lone_graded_rollout_gets_zero_and_moves_nobody(name: str) -> None:
    with_lone = np.array([[0.2, 0.9, 0.4], [0.7, NAN, NAN], [NAN, NAN, NAN]], np.float32)

    got = np.asarray(ADVANTAGES[name](with_lone))

    assert (got[1:] == 0).all()
    np.testing.assert_array_equal(got[:1], ADVANTAGES[name](with_lone[:1]))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_ungraded_rollout_gets_zero_and_moves_nobody(name: str) -> None:
    got = np.asarray(ADVANTAGES[name](np.array([[0.2, NAN, 0.9, 0.4]], np.float32)))

    assert got[0, 1] == 0
    expected = ADVANTAGES[name](np.array([[0.2, 0.9, 0.4]], np.float32))
    np.testing.assert_allclose(got[:, [0, 2, 3]], expected, rtol=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_mask_is_the_same_as_nan(name: str) -> None:
    rewards = dirty_rewards()
    mask = np.random.default_rng(1).uniform(size=rewards.shape) < 0.6

    got = ADVANTAGES[name](rewards, mask=mask)

    np.testing.assert_array_equal(got, ADVANTAGES[name](np.where(mask, rewards, NAN)))


def test_kinds_of_groups_are_told_apart_and_counted() -> None:
    kinds = group_kinds(dirty_rewards())

    assert np.flatnonzero(kinds.degenerate).tolist() == [1]
    assert np.flatnonzero(kinds.ungraded).tolist() == [2, 3]
    assert np.flatnonzero(kinds.used).tolist() == [0, 4, 5, 6, 7]
    assert [int(x) for x in kinds.counts()] == [5, 1, 2]


def test_degenerate_groups_do_not_shrink_the_scale_of_the_batch() -> None:
    rewards = np.array([[0.0, 1.0], [0.3, 0.3], [0.3, 0.3]], np.float32)

    got = ADVANTAGES["batch"](rewards, eps=0.0)

    assert np.asarray(got).tolist() == [[-1, 1], [0, 0], [0, 0]]


@given(
    rewards=st.lists(st.floats(0, 1, width=32), min_size=N, max_size=N),
    shift=st.sampled_from([0.0, 0.5, 2.0]),
)
@settings(max_examples=50, deadline=None)
def test_advantages_sum_to_zero_and_ignore_a_shift(rewards, shift) -> None:
    # On a grid of exact binary fractions a shift is exact too.
    grid = np.round(np.array([rewards]) * 64) / 64

    got = np.asarray(group_advantages(grid.astype(np.float32)))

    assert abs(got.sum()) < 1e-4
    np.testing.assert_array_equal(got, group_advantages((grid + shift).astype(np.float32)))


def test_gradients_through_degenerate_and_ungraded_groups_are_finite() -> None:
    gradient = jax.grad(lambda r: jnp.sum(group_advantages(r, eps=0.0) ** 3))(dirty_rewards())

    assert np.isfinite(gradient).all()


def mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(shape), names)


@pytest.mark.parametrize("name", ADVANTAGES)
class TestShardedOverEightDevices:
    rewards = dirty_rewards(3)

    def expected(self, name: str) -> np.ndarray:
        return np.asarray(ADVANTAGES[name](self.rewards))

    def test_pmap_over_a_leading_device_axis(self, name: str) -> None:
        per_device = self.rewards.reshape(8, 1, N)

        got = jax.pmap(lambda r: ADVANTAGES[name](r, batch_axis_name="d"), axis_name="d")(
            per_device
        )

        np.testing.assert_allclose(got.reshape(G, N), self.expected(name), atol=1e-6)

    @pytest.mark.parametrize("shape", [(8, 1), (1, 8), (2, 4)])
    def test_shard_map_with_groups_whole_or_split(self, name: str, shape: tuple[int, int]) -> None:
        def local(rewards):
            return ADVANTAGES[name](rewards, axis_name="inside", batch_axis_name="across")

        both = P("across", "inside")
        sharded = jax.shard_map(
            local, mesh=mesh(shape, ("across", "inside")), in_specs=both, out_specs=both
        )
        got = jax.jit(sharded)(self.rewards)

        np.testing.assert_allclose(got, self.expected(name), atol=1e-6)

    @pytest.mark.parametrize("shape", [(8, 1), (1, 8), (2, 4)])
    def test_sharding_constraints_under_jit(self, name: str, shape: tuple[int, int]) -> None:
        split = NamedSharding(mesh(shape, ("across", "inside")), P("across", "inside"))

        @jax.jit
        def advantages(rewards):
            rewards = jax.lax.with_sharding_constraint(rewards, split)
            return jax.lax.with_sharding_constraint(ADVANTAGES[name](rewards), split)

        got = advantages(self.rewards)

        assert len(got.sharding.device_set) == 8
        np.testing.assert_allclose(got, self.expected(name), atol=1e-6)


def test_kinds_are_counted_over_all_devices() -> None:
    rewards = dirty_rewards(3)

    def local(rewards):
        kinds = group_kinds(rewards, axis_name="inside")
        return kinds.counts("across")

    counts = jax.shard_map(
        local,
        mesh=mesh((2, 4), ("across", "inside")),
        in_specs=P("across", "inside"),
        out_specs=P(),
    )(rewards)

    assert [int(x) for x in counts] == [int(x) for x in group_kinds(rewards).counts()]
