"""The choice of anchor groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wmrl_jax.method import anchors

KEY = jax.random.key(0)


def chosen(n_steps: int, n_groups: int, **arguments) -> np.ndarray:
    steps = jnp.arange(n_steps)
    select = lambda step: anchors.select(KEY, step, n_groups, **arguments)  # noqa: E731
    return np.asarray(jax.jit(jax.vmap(select))(steps))


@pytest.mark.parametrize(("n_groups", "fraction"), [(8, 0.1), (16, 0.3), (7, 0.5), (64, 0.013)])
def test_the_share_over_steps_is_the_fraction(n_groups: int, fraction: float) -> None:
    drawn = chosen(2000, n_groups, fraction=fraction, minimum=0)

    assert drawn.mean() == pytest.approx(fraction, abs=1e-3)
    assert set(np.abs(drawn.sum(1) - fraction * n_groups) < 1) == {True}


def test_every_group_is_chosen_equally_often() -> None:
    drawn = chosen(4000, 8, fraction=0.25)

    np.testing.assert_allclose(drawn.mean(0), 0.25, atol=0.03)


def test_the_choices_of_different_steps_are_independent_of_each_other() -> None:
    drawn = chosen(4000, 8, fraction=0.25).astype(float)

    again = (drawn[1:] * drawn[:-1]).mean(0)
    np.testing.assert_allclose(again, 0.25**2, atol=0.02)


def test_key_and_step_alone_decide() -> None:
    once = anchors.select(KEY, 5, 32, 0.5)

    assert (once == jax.jit(anchors.select, static_argnums=2)(KEY, jnp.int32(5), 32, 0.5)).all()
    assert (once != anchors.select(KEY, 6, 32, 0.5)).any()
    assert (once != anchors.select(jax.random.key(1), 5, 32, 0.5)).any()


def test_minimum_and_capacity_bound_the_number() -> None:
    assert (chosen(50, 8, fraction=0.01, minimum=2).sum(1) >= 2).all()
    assert (chosen(50, 8, fraction=0.9, capacity=3).sum(1) == 3).all()
    assert (chosen(50, 8, fraction=0.9, capacity=jnp.int32(0)).sum(1) == 0).all()
    assert (chosen(50, 8, fraction=0.9, capacity=-2).sum(1) == 0).all()
    assert (chosen(50, 8, fraction=0.5, minimum=20).sum(1) == 8).all()


def test_fraction_zero_is_none_and_fraction_one_is_all() -> None:
    assert not chosen(100, 8, fraction=0.0, minimum=1).any()
    assert chosen(100, 8, fraction=1.0).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((0, 0.1), "n_groups is 0"), ((8, 1.5), "fraction is 1.5"), ((8, -0.1), "fraction is -0.1")],
)
def test_impossible_arguments_are_refused_in_words(arguments, words) -> None:
    with pytest.raises(ValueError, match=words):
        anchors.select(KEY, 0, *arguments)
