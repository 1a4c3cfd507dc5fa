"""The gated delta rule by chunks and by steps, against a loop in NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wmrl_jax.models.delta_rule import delta_rule, delta_step


def some_inputs(batch=2, time=21, heads=3, key_dim=4, value_dim=5, seed=0):
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, batch, time, heads, key_dim))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.normal(size=(batch, time, heads, value_dim))
    g = -rng.exponential(0.5, size=(batch, time, heads))
    b = rng.uniform(size=(batch, time, heads))
    state = rng.normal(size=(batch, heads, key_dim, value_dim))
    return [x.astype(np.float32) for x in (q, k, v, g, b, state)]


def by_the_formula(q, k, v, g, b, state, starts=None):
    q, k, v, g, b, state = (x.astype(np.float64) for x in (q, k, v, g, b, state))
    batch, time, heads, _ = q.shape
    outputs, state = np.zeros(v.shape), state.copy()
    for i in range(batch):
        for h in range(heads):
            for t in range(time):
                if starts is not None and starts[i, t]:
                    state[i, h] = 0
                old = np.exp(g[i, t, h]) * state[i, h]
                delta = b[i, t, h] * (v[i, t, h] - k[i, t, h] @ old)
                state[i, h] = old + np.outer(k[i, t, h], delta)
                outputs[i, t, h] = q[i, t, h] @ state[i, h]
    return outputs, state


@pytest.mark.parametrize(("time", "chunk"), [(21, 8), (16, 8), (5, 64), (1, 4), (9, 1)])
def test_chunks_give_what_the_formula_gives(time, chunk):
    inputs = some_inputs(time=time)
    outputs, state = delta_rule(*inputs, chunk=chunk)
    expected, after = by_the_formula(*inputs)
    np.testing.assert_allclose(outputs, expected, atol=2e-5)
    np.testing.assert_allclose(state, after, atol=2e-5)


@settings(max_examples=12)
@given(data=st.data())
def test_any_shape_chunk_and_starts_give_what_the_formula_gives(data):
    """Few shapes, for each one compiles; decays from none to so much that all is forgotten."""
    batch, heads, key_dim, value_dim, time = data.draw(
        st.sampled_from([(1, 1, 2, 3, 7), (2, 3, 4, 2, 17), (3, 2, 1, 1, 12)])
    )
    chunk = data.draw(st.sampled_from([1, 3, 5, 16, 64]))
    seed = data.draw(st.integers(0, 2**16))
    sizes = dict(batch=batch, time=time, heads=heads, key_dim=key_dim, value_dim=value_dim)
    q, k, v, g, b, state = some_inputs(**sizes, seed=seed)
    rng = np.random.default_rng(seed)
    g *= rng.choice(np.array([0, 0.1, 1, 40], np.float32), g.shape)
    b *= rng.choice(np.array([0, 1], np.float32), b.shape, p=[0.2, 0.8])
    starts = rng.random((batch, time)) < data.draw(st.sampled_from([0.0, 0.2, 1.0]))
    outputs, after = delta_rule(q, k, v, g, b, state, starts=starts, chunk=chunk)
    expected, expected_after = by_the_formula(q, k, v, g, b, state, starts)
    np.testing.assert_allclose(outputs, expected, atol=3e-4)
    np.testing.assert_allclose(after, expected_after, atol=3e-4)


def test_texts_of_thousands_of_tokens_give_what_the_formula_gives():
    inputs = some_inputs(batch=1, time=2000, heads=1, seed=3)
    inputs[3] *= 0.02
    outputs, state = delta_rule(*inputs)
    expected, after = by_the_formula(*inputs)
    np.testing.assert_allclose(outputs, expected, atol=1e-4)
    np.testing.assert_allclose(state, after, atol=1e-4)


def test_where_a_text_starts_the_state_is_zero():
    inputs = some_inputs()
    starts = np.zeros((2, 21), bool)
    starts[0, [3, 9, 10]] = True
    starts[1, [0, 16]] = True
    outputs, state = delta_rule(*inputs, starts=starts, chunk=8)
    expected, after = by_the_formula(*inputs, starts=starts)
    np.testing.assert_allclose(outputs, expected, atol=2e-5)
    np.testing.assert_allclose(state, after, atol=2e-5)


def test_steps_give_what_chunks_give():
    *inputs, state = some_inputs()
    outputs, after = delta_rule(*inputs, state, chunk=8)
    for t in range(21):
        state, out = delta_step(state, *(x[:, t] for x in inputs))
        np.testing.assert_allclose(out, outputs[:, t], atol=2e-5)
    np.testing.assert_allclose(state, after, atol=2e-5)


def test_a_token_without_rate_and_decay_changes_nothing():
    q, k, v, g, b, state = some_inputs()
    g[:, 13:], b[:, 13:] = 0, 0
    _, after = delta_rule(q, k, v, g, b, state, chunk=8)
    _, expected = delta_rule(*(x[:, :13] for x in (q, k, v, g, b)), state, chunk=8)
    np.testing.assert_allclose(after, expected, atol=1e-6)


def test_gradients_of_chunks_are_those_of_steps():
    *inputs, state = some_inputs(batch=1, time=11, heads=2)
    starts = np.zeros((1, 11), bool)
    starts[0, 6] = True
    weight = np.random.default_rng(5).normal(size=(1, 11, 2, 5)).astype(np.float32)

    def by_chunks(inputs, state):
        return jnp.sum(delta_rule(*inputs, state, starts=starts, chunk=4)[0] * weight)

    def by_steps(inputs, state):
        def step(state, now):
            *x, fresh = now
            return delta_step(jnp.where(fresh[:, None, None, None], 0.0, state), *x)

        along = (*(jnp.moveaxis(x, 1, 0) for x in inputs), starts.T)
        return jnp.sum(jnp.moveaxis(jax.lax.scan(step, state, along)[1], 0, 1) * weight)

    gradient = partial(jax.grad, argnums=(0, 1))
    got, expected = (jax.jit(gradient(f))(inputs, state) for f in (by_chunks, by_steps))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), got, expected)
