"""The first correction: a monotone map from world-model scores to rewards, refitted online.

The estimator is `init / observe / apply` over one state of fixed capacity. `observe` folds new
pairs into a first-in-first-out buffer and refits the map, all inside compiled code; `apply` only
reads the fitted knots. To measure something out of sample, use the state from before `observe`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from wmrl_jax.method.isotonic import isotonic_regression

_BINS = 10
_END_KNOTS = 2
_SAME = 1e-6  # rewards nearer than this are one block: rounding may split a block in two


class State(NamedTuple):
    """Pairs and the map fitted to them. P is the capacity, K = P + 2.

    Attributes:
      predicted: float32 [P], ring buffer of raw scores; meaningless beyond `count`.
      executed: float32 [P], the rewards by execution beside them.
      cursor: int32, where the next pair goes.
      count: int32, pairs held, at most P.
      min_pairs: int32, the map is the identity below.
      knots_x: float32 [K], non-decreasing; the last knot is repeated to the end.
      knots_y: float32 [K], non-decreasing, in [0, 1].
      knots: int32, number of distinct knots.
    """

    predicted: jax.Array
    executed: jax.Array
    cursor: jax.Array
    count: jax.Array
    min_pairs: jax.Array
    knots_x: jax.Array
    knots_y: jax.Array
    knots: jax.Array


class _Sorted(NamedTuple):
    """Pairs in the order of their score, those that count first."""

    x: jax.Array  # float32 [P]
    y: jax.Array  # float32 [P], the mean over equal x
    counts: jax.Array  # bool [P]


class _Knots(NamedTuple):
    x: jax.Array  # float32 [K]
    y: jax.Array  # float32 [K]
    n: jax.Array  # int32


def init(capacity: int = 4096, min_pairs: int = 200) -> State:
    """The state before any pair: the map is the identity.

    Args:
      capacity: pairs held; the oldest is dropped for a new one.
      min_pairs: fewest pairs for the map to be used.

    Raises:
      ValueError: `capacity` or `min_pairs` is below 1, or `min_pairs` exceeds `capacity`.
    """
    if capacity < 1 or min_pairs < 1:
        raise ValueError(f"capacity is {capacity} and min_pairs {min_pairs}: both must be >= 1")
    if min_pairs > capacity:
        raise ValueError(
            f"min_pairs is {min_pairs} but the buffer holds {capacity} pairs, so the map would "
            "never be used: raise capacity or lower min_pairs"
        )
    zero = jnp.zeros((), jnp.int32)
    return State(
        predicted=jnp.zeros((capacity,), jnp.float32),
        executed=jnp.zeros((capacity,), jnp.float32),
        cursor=zero,
        count=zero,
        min_pairs=jnp.asarray(min_pairs, jnp.int32),
        knots_x=jnp.zeros((capacity + _END_KNOTS,), jnp.float32),
        knots_y=jnp.zeros((capacity + _END_KNOTS,), jnp.float32),
        knots=zero,
    )


def observe(
    state: State, predicted: jax.Array, executed: jax.Array, *, map: str = "centred"
) -> State:
    """Add pairs and refit the map to all pairs held.

    Args:
      state: the state so far.
      predicted: raw scores of the world model, any shape.
      executed: rewards by execution, the same shape. A pair is skipped where either is not
        finite, so whole [G, N] arrays can be given with NaN where nothing was executed.
      map: which map to fit, one of `MAPS`: "centred" (linear between the pooled blocks' means,
        clamped to [0, 1]), "step" (scikit-learn's: flat over a block) or "bins" (the 10-bin
        map of the code of arXiv 2608.12564).

    Returns:
      The new state. Among more pairs than fit, the last ones stay.

    Raises:
      KeyError: an unknown map.
    """
    fit = MAPS[map]
    capacity = state.predicted.shape[0]
    x = jnp.ravel(jnp.asarray(predicted, jnp.float32))
    y = jnp.ravel(jnp.asarray(executed, jnp.float32))
    finite = jnp.isfinite(x) & jnp.isfinite(y)
    rank = jnp.cumsum(finite, dtype=jnp.int32) - 1
    n_new = jnp.sum(finite, dtype=jnp.int32)
    kept = finite & (rank >= n_new - capacity)
    slot = jnp.where(kept, (state.cursor + rank) % capacity, capacity)
    state = state._replace(
        predicted=state.predicted.at[slot].set(x, mode="drop"),
        executed=state.executed.at[slot].set(y, mode="drop"),
        cursor=(state.cursor + n_new) % capacity,
        count=jnp.minimum(state.count + n_new, capacity),
    )
    knots = fit(_sort(state))
    return state._replace(knots_x=knots.x, knots_y=knots.y, knots=knots.n)


def apply(state: State, predicted: jax.Array) -> jax.Array:
    """Recalibrate scores with the map fitted last.

    Args:
      state: from `observe`.
      predicted: raw scores, any shape; NaN stays NaN.

    Returns:
      float32, the shape of `predicted`: the identity below `min_pairs`, else a non-decreasing
      function of the score with values in [0, 1].
    """
    x = jnp.asarray(predicted, jnp.float32)
    right = jnp.searchsorted(state.knots_x, x, side="right", method="scan_unrolled")
    last = state.knots_x.shape[0] - 1
    low, high = jnp.clip(right - 1, 0, last), jnp.clip(right, 0, last)
    x0, y0 = state.knots_x[low], state.knots_y[low]
    dx, y1 = state.knots_x[high] - x0, state.knots_y[high]
    share = jnp.where(dx > 0, (x - x0) / jnp.where(dx > 0, dx, 1.0), 0.0)
    # The clip keeps the map monotone across knots in spite of rounding.
    mapped = jnp.clip(y0 + jnp.clip(share, 0.0, 1.0) * (y1 - y0), y0, y1)
    mapped = jnp.where(jnp.isnan(x), jnp.nan, mapped)
    return jnp.where(state.count >= state.min_pairs, mapped, x)


def curve(state: State) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The fitted map as (x, y, n): its knots are ``x[:n], y[:n]``; n is 0 while it is unused."""
    used = state.count >= state.min_pairs
    return state.knots_x, state.knots_y, jnp.where(used, state.knots, 0)


def _sort(state: State) -> _Sorted:
    capacity = state.predicted.shape[0]
    held = jnp.arange(capacity) < state.count
    key = jnp.where(held, state.predicted, jnp.inf)
    x, y = jax.lax.sort((key, state.executed), num_keys=1)
    y = jnp.where(held, y, 0.0)
    tie = jnp.cumsum(_starts(x)) - 1
    size = jax.ops.segment_sum(held.astype(jnp.float32), tie, capacity, indices_are_sorted=True)
    total = jax.ops.segment_sum(y, tie, capacity, indices_are_sorted=True)
    return _Sorted(x=x, y=(total / jnp.maximum(size, 1.0))[tie], counts=held)


def _starts(x: jax.Array) -> jax.Array:
    """True where a run of equal values starts; bool, the shape of x."""
    return jnp.concatenate([jnp.ones((1,), bool), x[1:] != x[:-1]])


def _finish(x: jax.Array, y: jax.Array, n: jax.Array) -> _Knots:
    """Repeat knot n - 1 to the end and clip to [0, 1]."""
    index = jnp.minimum(jnp.arange(x.shape[0]), jnp.maximum(n - 1, 0))
    return _Knots(x[index], jnp.clip(y[index], 0.0, 1.0), n.astype(jnp.int32))


def _fit_centred(pairs: _Sorted) -> _Knots:
    """Linear between the blocks' means of x and y, extended to the ends of the data.

    Beyond the first and the last mean the nearest segment goes on as far as there is data: a
    ranking within an end block is kept too, and its mean stays right.
    """
    capacity = pairs.x.shape[0]
    fitted = isotonic_regression(pairs.y, mask=pairs.counts)
    x = jnp.where(pairs.counts, pairs.x, 0.0)
    fitted = jnp.where(pairs.counts, fitted, 0.0)
    rises = jnp.concatenate([jnp.ones((1,), bool), fitted[1:] > fitted[:-1] + _SAME])
    starts = rises & pairs.counts
    block = jnp.maximum(jnp.cumsum(starts) - 1, 0)
    n = jnp.sum(starts, dtype=jnp.int32)
    weight = pairs.counts.astype(jnp.float32)

    def block_sum(values: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(values * weight, block, capacity, indices_are_sorted=True)

    size = jnp.maximum(block_sum(jnp.ones_like(x)), 1.0)
    slot = jnp.where(starts, block, capacity)
    first_x = jnp.zeros_like(x).at[slot].set(x, mode="drop")
    y = jnp.zeros_like(x).at[slot].set(fitted, mode="drop")
    mean_x = first_x + block_sum(x - first_x[block]) / size

    lowest, highest = x[0], jnp.max(jnp.where(pairs.counts, x, -jnp.inf))
    last = jnp.maximum(n - 1, 0)

    def extend(end: jax.Array, near: jax.Array, inner: jax.Array) -> jax.Array:
        dx = mean_x[inner] - mean_x[near]
        share = jnp.where(dx != 0, (end - mean_x[near]) / jnp.where(dx != 0, dx, 1.0), 0.0)
        return jnp.clip(y[near] + share * (y[inner] - y[near]), 0.0, 1.0)

    index = jnp.arange(capacity + _END_KNOTS) - 1
    inside = jnp.clip(index, 0, last)
    y = jnp.clip(y, 0.0, 1.0)
    low_y = extend(lowest, jnp.zeros_like(last), jnp.minimum(1, last))
    high_y = extend(highest, last, jnp.maximum(last - 1, 0))
    knots_x = jnp.where(index < 0, lowest, jnp.where(index >= n, highest, mean_x[inside]))
    knots_y = jnp.where(index < 0, low_y, jnp.where(index >= n, high_y, y[inside]))
    return _finish(knots_x, knots_y, jnp.where(n > 0, n + _END_KNOTS, 0))


def _fit_step(pairs: _Sorted) -> _Knots:
    """scikit-learn's prediction: flat over each block, linear across the gap to the next."""
    fitted = isotonic_regression(pairs.y, mask=pairs.counts)
    pad = (0, _END_KNOTS)
    return _finish(
        jnp.pad(jnp.where(pairs.counts, pairs.x, 0.0), pad),
        jnp.pad(jnp.where(pairs.counts, fitted, 0.0), pad),
        jnp.sum(pairs.counts, dtype=jnp.int32),
    )


def _fit_bins(pairs: _Sorted) -> _Knots:
    """Means of ten equal bins of [0, 1], pooled, linear between the centres of non-empty bins."""
    index = jnp.clip(jnp.floor(pairs.x * _BINS), 0, _BINS - 1)
    index = jnp.where(pairs.counts, index, 0).astype(jnp.int32)
    weight = pairs.counts.astype(jnp.float32)
    size = jax.ops.segment_sum(weight, index, _BINS)
    total = jax.ops.segment_sum(jnp.where(pairs.counts, pairs.y, 0.0), index, _BINS)
    filled = size > 0
    fitted = isotonic_regression(total / jnp.maximum(size, 1.0), size)
    centres = (jnp.arange(_BINS) + 0.5) / _BINS
    width = pairs.x.shape[0] + _END_KNOTS
    slot = jnp.where(filled, jnp.cumsum(filled) - 1, width)
    empty = jnp.zeros((width,), jnp.float32)
    return _finish(
        empty.at[slot].set(centres, mode="drop"),
        empty.at[slot].set(fitted, mode="drop"),
        jnp.sum(filled, dtype=jnp.int32),
    )


MAPS: dict[str, Callable[[_Sorted], _Knots]] = {
    "centred": _fit_centred,
    "step": _fit_step,
    "bins": _fit_bins,
}
"""Monotone maps by name."""
