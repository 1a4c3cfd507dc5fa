"""Optimizers and schedules by name: closed forms, contracts, and what is decayed."""

from dataclasses import replace
from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from wmrl_jax.train.config import TrainConfig
from wmrl_jax.train.optimizer import OPTIMIZERS, SCHEDULES, make_optimizer, make_schedule

CONFIG = TrainConfig(steps=20, warmup_steps=4, learning_rate=0.1, max_grad_norm=1e9)
NAMES = sorted(OPTIMIZERS)


def some_params():
    rng = np.random.default_rng(0)
    shapes = {
        "embed": (7, 4), "final_norm": (4,),
        "layers": {"q": (2, 4, 6), "input_norm": (2, 4), "conv": (2, 6, 3)},
    }  # fmt: skip
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def test_the_configuration_offers_exactly_what_there_is():
    hints = get_type_hints(TrainConfig, include_extras=True)
    assert set(get_args(hints["optimizer"])) == set(OPTIMIZERS)
    assert set(get_args(hints["schedule"])) == {"constant", *SCHEDULES}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", lambda p: 1.0),
        ("linear", lambda p: 1 - p),
        ("cosine", lambda p: (1 + np.cos(np.pi * p)) / 2),
        ("wsd", lambda p: 1.0 if p < 0.8 else (1 - p) / 0.2),
    ],
)
def test_a_schedule_warms_up_and_then_follows_its_formula(name, expected):
    rate = make_schedule(replace(CONFIG, schedule=name))
    for step in range(20):
        warm = 0.1 * min(1.0, (step + 1) / 4)
        factor = 1.0 if step < 4 else expected((step - 4) / 16)
        assert float(rate(step)) == pytest.approx(warm * factor, rel=1e-5)
    assert float(rate(1000)) == pytest.approx(0.1 if name == "constant" else 0.0, abs=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_each_optimizer_brings_a_quadratic_down(name):
    optimizer = make_optimizer(replace(CONFIG, optimizer=name, learning_rate=0.03))
    goal = some_params()
    start = jax.tree.map(lambda x: x + 0.5, goal)

    def distance(params):
        return sum(jnp.sum((a - b) ** 2) for a, b in
                   zip(jax.tree.leaves(params), jax.tree.leaves(goal), strict=True))  # fmt: skip

    @jax.jit
    def run(params):
        def step(carry, _):
            params, state = carry
            updates, state = optimizer.update(jax.grad(distance)(params), state, params)
            return (optax.apply_updates(params, updates), state), distance(params)

        return jax.lax.scan(step, (params, optimizer.init(params)), None, length=150)[1]

    losses = run(start)
    assert float(losses[-1]) < 0.1 * float(losses[0])


@pytest.mark.parametrize("name", NAMES)
def test_one_update_is_the_same_compiled_and_not(name):
    optimizer = make_optimizer(replace(CONFIG, optimizer=name, weight_decay=0.1))
    params = some_params()
    grads = jax.tree.map(lambda x: jnp.cos(3 * x), params)
    state = optimizer.init(params)
    plain = optimizer.update(grads, state, params)[0]
    compiled = jax.jit(optimizer.update)(grads, state, params)[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), plain, compiled)


@pytest.mark.parametrize("name", NAMES)
def test_only_matrices_of_layers_are_decayed(name):
    params = some_params()
    grads = jax.tree.map(lambda x: jnp.cos(3 * x), params)

    def update(decay):
        optimizer = make_optimizer(replace(CONFIG, optimizer=name, weight_decay=decay))
        return optimizer.update(grads, optimizer.init(params), params)[0]

    difference = jax.tree.map(lambda a, b: a - b, update(0.5), update(0.0))
    rate = 0.1 / 4  # the first of four steps of warm-up
    expected = -rate * 0.5 * params["layers"]["q"]
    np.testing.assert_allclose(difference["layers"]["q"], expected, atol=1e-5)
    difference["layers"].pop("q")
    for leaf in jax.tree.leaves(difference):
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


def test_gradients_are_clipped_by_their_global_norm():
    config = replace(CONFIG, optimizer="sgd", beta1=0.0, max_grad_norm=0.5, warmup_steps=0)
    optimizer = make_optimizer(config)
    params = some_params()
    grads = jax.tree.map(lambda x: 10 * x, params)
    updates = optimizer.update(grads, optimizer.init(params), params)[0]
    length = np.sqrt(sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(updates)))
    assert length == pytest.approx(0.1 * 0.5, rel=1e-5)


def test_muon_moves_each_layers_matrix_by_an_orthogonal_one():
    config = replace(CONFIG, optimizer="muon", warmup_steps=0)
    optimizer = make_optimizer(config)
    params = some_params()
    grads = jax.tree.map(lambda x: jnp.cos(3 * x), params)
    updates = optimizer.update(grads, optimizer.init(params), params)[0]
    for matrix in np.asarray(updates["layers"]["q"]):
        values = np.linalg.svd(matrix, compute_uv=False)
        assert values.min() > 0.6 * values.max()
