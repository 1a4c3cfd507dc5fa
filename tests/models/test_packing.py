"""Packing against loops over the rows' tokens."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wmrl_jax.models.packing import capacities, capacity_for, make_packing, pack, unpack

ROWS = st.integers(1, 4)
NEW = 5


@st.composite
def problems(draw):
    rows = draw(ROWS)
    lengths = draw(
        st.lists(
            st.lists(st.integers(0, NEW), min_size=rows, max_size=rows), min_size=1, max_size=3
        )
    )
    fullest = max(map(sum, lengths))
    return np.asarray(lengths), draw(st.integers(max(fullest, 1), rows * NEW + 3))


@given(problems())
def test_tokens_stand_row_behind_row_and_come_back_to_their_slots(problem):
    lengths, capacity = problem
    slots = np.arange(1, lengths.size * NEW + 1).reshape(len(lengths), -1)
    packing = make_packing(jnp.asarray(lengths), NEW, capacity)

    packed = np.asarray(pack(packing, jnp.asarray(slots)))

    by_row = slots.reshape(*lengths.shape, NEW)
    for row, group, ns in zip(packed, by_row, lengths, strict=True):
        expected = [token for tokens, n in zip(group, ns, strict=True) for token in tokens[:n]]
        assert row.tolist() == expected + [0] * (capacity - len(expected))
    real = (np.arange(NEW) < lengths[..., None]).reshape(len(lengths), -1)
    np.testing.assert_array_equal(unpack(packing, jnp.asarray(packed)), np.where(real, slots, 0))


@given(problems(), st.integers(0, 9))
def test_gradients_are_the_transposes(problem, seed):
    lengths, capacity = problem
    packing = make_packing(jnp.asarray(lengths), NEW, capacity)
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(len(lengths), lengths.shape[1] * NEW, 2)).astype(np.float32)
    y = rng.normal(size=(len(lengths), capacity, 2)).astype(np.float32)

    forward = np.sum(np.asarray(pack(packing, jnp.asarray(x))) * y)
    gradient = jax.grad(lambda x: jnp.sum(pack(packing, x) * y))(jnp.asarray(x))
    backward = jax.grad(lambda y: jnp.sum(unpack(packing, y) * x))(jnp.asarray(y))

    np.testing.assert_allclose(np.sum(np.asarray(gradient) * x), forward, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(np.sum(np.asarray(backward) * y), forward, rtol=1e-3, atol=1e-4)


def test_the_least_capacity_that_holds_the_tokens_is_taken():
    assert capacities(64) == (16, 24, 32, 40, 48, 56, 64)
    assert [capacity_for(n, 64) for n in (0, 16, 17, 64)] == [16, 16, 24, 64]
