import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wmrl_jax.models.model import Model, build_model
from wmrl_jax.models.packing import make_packing
from wmrl_jax.models.shared_prefix import completion_states, packed_states
from wmrl_jax.train.config import ModelConfig

TINY = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp_width=48)
PROMPT_LENGTHS, LENGTHS = np.asarray([5, 2]), np.asarray([[3, 7, 1], [6, 4, 7]])
P, S = 6, 7


def batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 40, (2, P)), rng.integers(0, 40, (2, 3, S))


def row_states(
    model: Model, params: object, prompts: np.ndarray, completions: np.ndarray
) -> list[jax.Array]:
    """The same states by `hidden` on compact rows, one row for each completion."""
    rows = np.zeros((6, P + S), np.int32)
    for row, (g, n) in zip(rows, np.ndindex(2, 3), strict=True):
        start, end = PROMPT_LENGTHS[g], PROMPT_LENGTHS[g] + LENGTHS[g, n]
        row[:start] = prompts[g][:start]
        row[start:end] = completions[g, n][: end - start]
    hidden = jax.jit(model.hidden)(params, jnp.asarray(rows))
    return [
        states[PROMPT_LENGTHS[g] - 1 : PROMPT_LENGTHS[g] + LENGTHS[g, n]]
        for states, (g, n) in zip(hidden, np.ndindex(2, 3), strict=True)
    ]


@pytest.mark.parametrize("remat", ["none", "matmuls"])
def test_states_equal_those_of_rows_with_prompts_of_their_own(remat: str) -> None:
    model = build_model(TINY, 40, remat=remat)
    params = model.init(jax.random.key(0))
    prompts, completions = batch()

    states = jax.jit(partial(completion_states, model.arch))(
        params, prompts, jnp.asarray(PROMPT_LENGTHS), completions
    )

    expected = row_states(model, params, prompts, completions)
    for (g, n), row in zip(np.ndindex(2, 3), expected, strict=True):
        np.testing.assert_allclose(states[g, n, : len(row)], row, atol=2e-5)


def test_gradients_equal_those_of_rows_with_prompts_of_their_own() -> None:
    model = build_model(TINY, 40)
    params = model.init(jax.random.key(1))
    prompts, completions = batch()
    real = np.arange(S + 1) <= LENGTHS[..., None]

    def shared(params: object) -> jax.Array:
        states = completion_states(
            model.arch, params, prompts, jnp.asarray(PROMPT_LENGTHS), completions
        )
        return jnp.sum(jnp.sin(states) * real[..., None])

    def alone(params: object) -> jax.Array:
        rows = row_states(model, params, prompts, completions)
        return sum((jnp.sum(jnp.sin(row)) for row in rows), start=jnp.zeros(()))

    found, expected = jax.jit(jax.grad(shared))(params), jax.jit(jax.grad(alone))(params)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3, rtol=1e-3), found, expected
    )


@pytest.mark.parametrize("capacity", [14, 18])  # the fullest group has 17
def test_packed_states_and_gradients_equal_those_of_rows(capacity: int) -> None:
    model = build_model(TINY, 40)
    params = model.init(jax.random.key(1))
    prompts, completions = batch()
    lengths = np.minimum(LENGTHS, 4 if capacity == 14 else S)
    packing = make_packing(jnp.asarray(lengths), S, capacity)
    scored = np.arange(S) < lengths[..., None]

    def packed(params: object) -> jax.Array:
        return packed_states(
            model.arch, params, prompts, jnp.asarray(PROMPT_LENGTHS), completions, packing
        )

    def shared(params: object) -> jax.Array:
        return completion_states(
            model.arch, params, prompts, jnp.asarray(PROMPT_LENGTHS), completions
        )[:, :, :-1]

    found, expected = jax.jit(packed)(params), jax.jit(shared)(params)
    for g in range(2):
        total = int(lengths[g].sum())
        np.testing.assert_allclose(found[g, :total], expected[g][scored[g]], atol=2e-5)

    real = np.arange(capacity) < lengths.sum(1)[:, None]
    of_packed = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(packed(p)) * real[..., None])))(params)
    of_rows = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(shared(p)) * scored[..., None])))(params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3, rtol=1e-3), of_packed, of_rows
    )


def test_bfloat16_compute_stays_near_float32() -> None:
    model = build_model(TINY, 40)
    low = build_model(dataclasses.replace(TINY, dtype="bfloat16"), 40)
    params = model.init(jax.random.key(2))
    prompts, completions = batch()
    lengths = jnp.asarray(PROMPT_LENGTHS)

    states = jax.jit(partial(completion_states, low.arch))(params, prompts, lengths, completions)

    assert states.dtype == jnp.bfloat16
    exact = jax.jit(partial(completion_states, model.arch))(params, prompts, lengths, completions)
    assert float(jnp.mean(jnp.abs(states.astype(jnp.float32) - exact))) < 0.02
