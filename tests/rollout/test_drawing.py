"""Draws follow the exact softmax, cut as a reference that sorts cuts it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from wmrl_jax.errors import UserError
from wmrl_jax.rollout.drawing import by_row, draw, invert, truncate

DRAWS = 20_000


def reference(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities after truncation by sorting, for one row."""
    p = np.exp((logits - logits.max()) / temperature)
    p = p / p.sum()
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0.0
        p = p / p.sum()
    reached = np.cumsum(p[order])
    p[order[1:][reached[:-1] >= top_p]] = 0.0
    p[p < min_p * p.max()] = 0.0
    return p / p.sum()


def draws(logits, seed=0, **settings):
    uniforms = jax.random.uniform(jax.random.key(seed), (DRAWS, 2))
    rows = jnp.broadcast_to(logits, (DRAWS, len(logits)))
    return jax.jit(draw)(
        rows, uniforms, **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, **settings}
    )


@pytest.mark.parametrize("vocabulary", [2, 37, 300])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.8},
        {"top_k": 5},
        {"top_p": 0.6},
        {"top_k": 12, "top_p": 0.8, "temperature": 1.3},
        {"min_p": 0.2},
        {"top_p": 0.9, "min_p": 0.1, "temperature": 1.5},
    ],
)
def test_drawn_tokens_follow_the_exact_distribution(vocabulary, settings):
    logits = 1.5 * np.random.default_rng(vocabulary).normal(size=vocabulary)
    expected = reference(logits, **settings)

    tokens, _ = draws(jnp.asarray(logits, jnp.float32), **settings)

    assert_follows(tokens, expected)


def assert_follows(tokens, expected):
    """Nothing excluded was drawn, and a chi-square test does not tell the draws from `expected`."""
    counts = np.bincount(tokens, minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    likely = expected * len(tokens) >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely], expected[~likely].sum()) * len(tokens)
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) > 1:
        assert stats.chisquare(observed, wanted).pvalue > 1e-4


def test_log_probabilities_are_those_before_truncation():
    logits = jax.random.normal(jax.random.key(4), (300,))

    tokens, logprobs = draws(logits, temperature=0.7, top_k=5, top_p=0.9)

    expected = jax.nn.log_softmax(logits / 0.7)[tokens]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_log_probabilities_after_truncation_are_those_of_what_was_drawn_from():
    logits = np.random.default_rng(3).normal(size=40)
    settings = {"top_k": 9, "min_p": 0.1, "temperature": 1.2}
    expected = reference(logits, **settings)
    uniforms = jax.random.uniform(jax.random.key(0), (500, 2))
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (500, 40))
    tokens, logprobs = draw(rows, uniforms, **settings, top_p=1.0, convention="after")
    np.testing.assert_allclose(np.exp(logprobs), expected[tokens], rtol=1e-4)


def test_each_row_has_its_own_settings():
    logits = jnp.asarray(np.random.default_rng(4).normal(size=(6, 30)), jnp.float32)
    uniforms = jax.random.uniform(jax.random.key(0), (6, 2))
    settings = {
        "temperature": jnp.array([0.0, 1.0, 0.7, 1.0, 2.0, 0.0]),
        "top_k": jnp.array([0, 3, 0, 0, 5, 2]),
        "top_p": jnp.array([1.0, 1.0, 0.5, 1.0, 0.9, 1.0]),
        "min_p": jnp.array([0.0, 0.0, 0.0, 0.3, 0.0, 0.9]),
    }
    together = draw(logits, uniforms, **settings)
    for i in range(6):
        own = {name: float(values[i]) for name, values in settings.items()}
        own["top_k"] = int(own["top_k"])
        alone = draw(logits[i : i + 1], uniforms[i : i + 1], **own)
        assert int(together[0][i]) == int(alone[0][0])
        assert float(together[1][i]) == pytest.approx(float(alone[1][0]), abs=1e-6)


def test_rows_with_settings_of_their_own_follow_their_own_distributions():
    each = [
        {},
        {"temperature": 0.6},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.15, "temperature": 1.4},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.02},
    ]
    default = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    kinds, count = np.arange(DRAWS) % len(each), 25
    logits = 1.5 * np.random.default_rng(8).normal(size=count)
    settings = {
        name: jnp.asarray([{**default, **own}[name] for own in each])[kinds] for name in default
    }

    tokens, _ = draws(jnp.asarray(logits, jnp.float32), seed=1, **settings)

    for kind, own in enumerate(each):
        assert_follows(np.asarray(tokens)[kinds == kind], reference(logits, **own))


def test_a_setting_is_one_value_or_one_a_group_or_one_a_row():
    def broadcast(setting):
        return np.asarray(by_row("top_p", setting, jnp.float32, 2, 3))

    np.testing.assert_array_equal(broadcast(0.5), np.full((2, 3), 0.5))
    np.testing.assert_array_equal(broadcast([0.0, 1.0]), [[0, 0, 0], [1, 1, 1]])
    np.testing.assert_array_equal(broadcast([[0, 1, 2], [3, 4, 5]]), [[0, 1, 2], [3, 4, 5]])
    with pytest.raises(UserError, match=r"top_p has the shape \(3,\)"):
        broadcast([0.1, 0.2, 0.3])


def test_temperature_zero_takes_the_most_probable_token_with_its_log_probability_at_one():
    logits = jax.random.normal(jax.random.key(4), (300,))

    tokens, logprobs = draws(logits, temperature=0.0)

    assert set(np.asarray(tokens)) == {int(jnp.argmax(logits))}
    np.testing.assert_allclose(logprobs, jax.nn.log_softmax(logits).max(), atol=1e-5)


@pytest.mark.parametrize(
    "settings", [(1, 1.0), (7, 1.0), (0, 0.05), (0, 0.9), (20, 0.5), (0, 1e-9)]
)
def test_truncation_keeps_what_a_sort_keeps(settings):
    top_k, top_p = settings
    logits = np.random.default_rng(0).normal(size=(40, 61)) * 2

    kept = jax.jit(truncate)(jnp.exp(jnp.asarray(logits, jnp.float32)), top_k=top_k, top_p=top_p)

    expected = np.stack([reference(row, top_k=top_k, top_p=top_p) for row in logits])
    np.testing.assert_array_equal(np.asarray(kept) > 0, expected > 0)


def test_tokens_that_tie_with_the_last_one_kept_are_kept():
    kept = jax.jit(truncate)(jnp.array([[4.0, 2.0, 2.0, 1.0]]), top_k=2, top_p=1.0)

    np.testing.assert_array_equal(kept, [[4.0, 2.0, 2.0, 0.0]])


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2.0**-24])
@pytest.mark.parametrize("vocabulary", [1, 3, 17, 1000])
def test_a_token_without_mass_is_never_drawn(vocabulary, uniform):
    mass = jax.random.uniform(jax.random.key(0), (50, vocabulary))
    mass = jnp.where(jax.random.bernoulli(jax.random.key(1), 0.1, mass.shape), mass, 0.0)
    mass = mass.at[:, vocabulary // 2].set(1e-3)

    tokens = jax.jit(invert)(mass, jnp.full((50, 2), uniform, jnp.float32))

    assert (jnp.take_along_axis(mass, tokens[:, None], 1) > 0).all()


def test_rows_do_not_touch_each_other():
    logits = jax.random.normal(jax.random.key(0), (6, 50))
    uniforms = jax.random.uniform(jax.random.key(1), (6, 2))
    settings = {"temperature": 1.0, "top_k": 9, "top_p": 0.8}

    together, _ = draw(logits, uniforms, **settings)

    alone = [draw(logits[i : i + 1], uniforms[i : i + 1], **settings)[0][0] for i in range(6)]
    np.testing.assert_array_equal(together, jnp.stack(alone))
