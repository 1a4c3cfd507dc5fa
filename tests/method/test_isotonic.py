"""Isotonic regression against scikit-learn's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.isotonic import isotonic_regression as sklearn_regression

from wmrl_jax.method import isotonic
from wmrl_jax.method.isotonic import isotonic_regression

fit = jax.jit(isotonic_regression)
SIZES = [1, 2, 3, 16, 17, 250, 4096]


def arc(n: int) -> np.ndarray:
    return np.sqrt(1.0 - np.linspace(-1.0, 1.0, n) ** 2)


INPUTS = {
    "random": lambda n, rng: rng.normal(size=n),
    "trend": lambda n, rng: np.linspace(0, 4, n) + rng.normal(size=n),
    "ties": lambda n, rng: rng.integers(0, 5, size=n).astype(float),
    "ladder": lambda n, rng: rng.choice([0.0, 0.1, 0.2, 0.5, 0.75], size=n),
    "constant": lambda n, rng: np.full(n, 0.1),
    "increasing": lambda n, rng: np.linspace(0, 1, n),
    "decreasing": lambda n, rng: np.linspace(1, 0, n),
    "sawtooth on a concave arc": lambda n, rng: arc(n) + 0.02 * (np.arange(n) % 2),
    "coarse sawtooth on a concave arc": lambda n, rng: arc(n) + 0.2 * (np.arange(n) % 7),
    "far from zero": lambda n, rng: 1000.0 + rng.normal(size=n),
    "one outlier": lambda n, rng: np.where(np.arange(n) == n // 3, 50.0, rng.uniform(size=n)),
}


def close(got: jax.Array, expected: np.ndarray, y: np.ndarray) -> None:
    # Float32 inputs far from zero carry their own rounding, so the tolerance follows the values.
    tolerance = 1e-5 * max(1.0, float(np.abs(y).max()) / 100.0)
    np.testing.assert_allclose(np.asarray(got), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", INPUTS)
def test_it_equals_scikit_learn(kind: str, n: int) -> None:
    y = INPUTS[kind](n, np.random.default_rng(n)).astype(np.float32)

    got = fit(y)

    close(got, sklearn_regression(y.astype(float)), y)
    assert (np.diff(got) >= 0).all()


@pytest.mark.parametrize("n", [1, 17, 250])
@pytest.mark.parametrize("kind", INPUTS)
def test_it_equals_scikit_learn_with_weights(kind: str, n: int) -> None:
    rng = np.random.default_rng(n)
    y = INPUTS[kind](n, rng).astype(np.float32)
    weights = rng.uniform(0.01, 5.0, size=n).astype(np.float32)

    got = fit(y, weights)

    close(got, sklearn_regression(y.astype(float), sample_weight=weights.astype(float)), y)
    assert (np.diff(got) >= 0).all()


def test_a_light_entry_between_heavy_ones_keeps_its_digits() -> None:
    rng = np.random.default_rng(0)
    y = (np.linspace(0, 1, 250) + rng.normal(scale=0.01, size=250)).astype(np.float32)
    weights = (10.0 ** rng.uniform(-3, 3, size=250)).astype(np.float32)

    got = fit(y, weights)

    close(got, sklearn_regression(y.astype(float), sample_weight=weights.astype(float)), y)


@pytest.mark.parametrize("n", [1, 17, 250])
@pytest.mark.parametrize("kind", INPUTS)
def test_masked_entries_do_not_count_whatever_they_hold(kind: str, n: int) -> None:
    rng = np.random.default_rng(n)
    y = INPUTS[kind](n, rng).astype(np.float32)
    weights = rng.uniform(0.01, 5.0, size=n).astype(np.float32)
    mask = rng.uniform(size=n) < 0.5
    mask[n // 2] = True
    dirty = np.where(mask, y, rng.choice([np.nan, np.inf, -1e30], size=n)).astype(np.float32)

    got = fit(dirty, mask=mask)
    got_weighted = fit(dirty, weights, mask=mask)

    close(got[mask], sklearn_regression(y[mask].astype(float)), y)
    expected = sklearn_regression(y[mask].astype(float), sample_weight=weights[mask].astype(float))
    close(got_weighted[mask], expected, y)
    assert (np.diff(got) >= 0).all()


def test_a_masked_entry_takes_the_value_of_the_last_one_that_counts() -> None:
    y = jnp.array([9.0, 3.0, -7.0, 1.0, 0.0, 5.0, 4.0])
    mask = jnp.array([False, True, False, True, False, True, False])

    assert fit(y, mask=mask).tolist() == [2.0, 2.0, 2.0, 2.0, 2.0, 5.0, 5.0]


def test_weight_zero_is_the_same_as_a_mask() -> None:
    y = jnp.array([9.0, 3.0, -7.0, 1.0, 0.0, 5.0, 4.0])
    mask = jnp.array([False, True, False, True, False, True, False])

    np.testing.assert_array_equal(fit(y, mask.astype(jnp.float32)), fit(y, mask=mask))


def test_nothing_that_counts_gives_nan_and_no_entries_give_none() -> None:
    assert np.isnan(fit(jnp.ones(3), mask=jnp.zeros(3, bool))).all()
    assert isotonic_regression(jnp.zeros(0)).shape == (0,)


def test_an_unmasked_nan_does_not_hang() -> None:
    y = np.random.default_rng(0).normal(size=250).astype(np.float32)
    y[40] = np.nan

    assert np.isnan(fit(y)).any()


def test_rows_of_a_batch_do_not_touch_each_other() -> None:
    rng = np.random.default_rng(0)
    rows = [INPUTS[kind](250, rng).astype(np.float32) for kind in INPUTS]
    masks = rng.uniform(size=(len(rows), 250)) < rng.uniform(0.1, 1.0, size=(len(rows), 1))

    together = jax.jit(jax.vmap(lambda y, mask: isotonic_regression(y, mask=mask)))(
        np.stack(rows), masks
    )

    for got, y, mask in zip(together, rows, masks, strict=True):
        close(got[mask], sklearn_regression(y[mask].astype(float)), y)


def test_the_gradient_is_that_of_the_block_means() -> None:
    y = jnp.array([3.0, 1.0, 1.5, 5.0, 4.0, 7.0])
    weights = jnp.array([1.0, 2.0, 3.0, 1.0, 1.0, 2.0])
    slope = jnp.arange(6.0)

    by_y, by_weight = jax.jit(
        jax.grad(lambda y, w: jnp.sum(isotonic_regression(y, w) * slope), argnums=(0, 1))
    )(y, weights)

    # Blocks {0, 1, 2} and {3, 4} and {5}: mean w y / W moves by w / W and by (y - mean) / W.
    mean = 9.5 / 6.0
    np.testing.assert_allclose(by_y, [3 / 6, 3 * 2 / 6, 3 * 3 / 6, 7 / 2, 7 / 2, 5.0], rtol=1e-5)
    expected = [3 * (3 - mean) / 6, 3 * (1 - mean) / 6, 3 * (1.5 - mean) / 6, 7 / 4, -7 / 4, 0.0]
    np.testing.assert_allclose(by_weight, expected, atol=1e-5)


def test_bfloat16_is_fitted_in_float32() -> None:
    y = jnp.asarray(np.random.default_rng(0).normal(size=250), jnp.bfloat16)

    got = fit(y)

    assert got.dtype == jnp.float32
    close(got, sklearn_regression(np.asarray(y, float)), np.asarray(y, float))


@pytest.mark.parametrize("kind", ["random", "sawtooth on a concave arc", "decreasing"])
def test_loop_iterations_grow_with_the_square_of_log_n(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterations = 0

    def count() -> None:
        nonlocal iterations
        iterations += 1

    def counted(body):
        def counting(*arguments):
            jax.debug.callback(count)
            return body(*arguments)

        return counting

    while_loop, fori_loop = jax.lax.while_loop, jax.lax.fori_loop
    monkeypatch.setattr(
        isotonic.jax.lax, "while_loop", lambda c, body, x: while_loop(c, counted(body), x)
    )
    monkeypatch.setattr(
        isotonic.jax.lax, "fori_loop", lambda a, b, body, x: fori_loop(a, b, counted(body), x)
    )
    for n in (128, 2048):
        iterations = 0
        y = INPUTS[kind](n, np.random.default_rng(n)).astype(np.float32)
        jax.jit(lambda y: isotonic_regression(y))(y).block_until_ready()
        jax.effects_barrier()
        assert 32 < iterations <= 32 + np.log2(n) ** 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", INPUTS)
def test_a_hundred_thousand_points_equal_scikit_learn(kind: str) -> None:
    rng = np.random.default_rng(0)
    y = INPUTS[kind](100_000, rng).astype(np.float32)
    weights = rng.uniform(0.01, 5.0, size=y.size).astype(np.float32)

    close(fit(y), sklearn_regression(y.astype(float)), y)
    expected = sklearn_regression(y.astype(float), sample_weight=weights.astype(float))
    close(fit(y, weights), expected, y)
