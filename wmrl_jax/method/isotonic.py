"""Exact weighted isotonic regression in compiled code.

The fit is the slope of the greatest convex minorant of the cumulative sums. It is built bottom
up: short chunks by the max-min formula, then neighbouring segments are merged by finding the
common tangent of their two minorants. All merges of one level are searched at once by a bisection
that narrows both ends of the tangent together (after Overmars and van Leeuwen, 1981). So n values
take O(log n) levels of O(log n) loop iterations and O(n log n) work, whatever the input.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

# Chosen by measurement on a CPU: they change the time, never the result.
_CHUNK = 32  # longest chunk that the max-min formula fits
_MANY_LANES = 512  # with more merges than this, every level is compiled for its own number
_FEW_LANES = 16  # with no more than this, one loop serves all the levels that are left
_LEVELS_PER_LOOP = 3  # levels that share a loop, and its number of lanes, in between

Pair = tuple[jax.Array, jax.Array]
Result = TypeVar("Result")


class _Fit(NamedTuple):
    """The fit of all segments of one level.

    Position p of the input lies in row p % C and column p // C: a segment is then a run of whole
    columns, and elementwise work runs along the long axis. Sums count from a position, inclusive,
    to the segment's end and from its start to the position. Both are kept because a sum is only
    accurate relative to itself: a short one may not be had as the difference of two long ones.
    """

    value: jax.Array  # [C, M]
    sums: Pair  # weighted sums of fitted values (to the end, from the start), [C, M]
    weights: Pair | None  # sums of weights alike; None for unit weights


class _Plan(NamedTuple):
    """What one level of merges changes, for each column: arrays [M].

    It is made in one loop iteration and applied in the next. That keeps it a buffer of its own;
    within an iteration the compiler would compute it anew for every position.
    """

    first: jax.Array  # int32, first position of the segment's pool
    stop: jax.Array  # int32, the one after its last
    value: jax.Array  # of the pool
    sum_gain: Pair  # what the sums gain from the segment that this one is merged with
    sum_rest: Pair  # sums of what lies beyond the pool
    weight_gain: Pair | None  # the same of weights
    weight_rest: Pair | None


def _as_varying(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x`, typed as varying over the mapped axes of `like`: shard_map wants it of a loop's carry.

    A selection between equals has the type of its condition, and compiles to nothing.
    """
    return jnp.where(like.reshape(-1)[0] > 0, x, x)


def _once(compute: Callable[[], Result], level: jax.Array, like: jax.Array) -> Result:
    """Results of ``compute()`` as buffers of their own, which no reader computes anew.

    A loop of one iteration does what an optimization barrier is for, on every backend; that
    the number is one follows from `level` being at least 0, which the compiler cannot know.
    """
    empty = jax.tree.map(
        lambda x: _as_varying(jnp.zeros(x.shape, x.dtype), like), jax.eval_shape(compute)
    )
    start = jnp.minimum(level, 0)
    return jax.lax.while_loop(
        lambda carry: carry[0] < 1, lambda carry: (carry[0] + 1, compute()), (start, empty)
    )[1]


def _totals(x: jax.Array) -> Pair:
    """Sums of the rows of [C, M], to the end and from the start."""
    none = _as_varying(jnp.zeros(x.shape[1:], jnp.float32), x)

    def add(total: jax.Array, row: jax.Array) -> Pair:
        return total + row, total + row

    return jax.lax.scan(add, none, x, reverse=True)[1], jax.lax.scan(add, none, x)[1]


def _prefix_sums(x: jax.Array, exact: bool) -> tuple[jax.Array, ...]:
    """Sums of rows before each row of [C, M] and of all: [C + 1, M], and their rounding errors.

    A light entry between heavy ones is had as a difference of sums, so with weights the errors
    are carried along (the two-sum of Knuth); without, they do not matter.
    """
    none = _as_varying(jnp.zeros(x.shape[1:], jnp.float32), x)

    def add(carry: tuple[jax.Array, jax.Array], row: jax.Array):
        total, error = carry
        new = total + row
        part = new - total
        carry = new, error + ((total - (new - part)) + (row - part))
        return carry, carry

    _, (totals, errors) = jax.lax.scan(add, (none, none), x)
    first = none[None]
    sums = jnp.concatenate([first, totals])
    return (sums, jnp.concatenate([first, errors])) if exact else (sums,)


def _fit_chunks(y: jax.Array, w: jax.Array, exact: bool) -> jax.Array:
    """Fit each column of [C, M] by ``max over j <= i of min over k >= i of mean(y[j..k])``."""
    chunk, columns = y.shape
    sums, weights = _prefix_sums(w * y, exact), _prefix_sums(w, exact)
    start = jnp.arange(chunk)[:, None]

    def between(parts: tuple[jax.Array, ...], k: jax.Array) -> jax.Array:
        return reduce(jnp.add, [part[k + 1] - part[:-1] for part in parts])

    def lower(r: jax.Array, carry: Pair) -> Pair:
        least, fitted = carry  # least mean of start..k' over k' > k, and the fit beyond k
        k = chunk - 1 - r
        fitted = fitted.at[jnp.minimum(k + 1, chunk - 1)].set(reduce(jnp.maximum, list(least)))
        weight = between(weights, k)
        heavy = weight > 0
        mean = jnp.where(heavy, between(sums, k) / jnp.where(heavy, weight, 1.0), y[k])
        return jnp.where(start <= k, jnp.minimum(least, mean), -jnp.inf), fitted

    full = _as_varying(jnp.full((chunk, columns), jnp.inf, jnp.float32), y)
    least, fitted = jax.lax.fori_loop(0, chunk, lower, (full, full))
    return fitted.at[0].set(least[0])


def _plan(fit: _Fit, level: jax.Array, lanes: int, held: int | jax.Array) -> _Plan:
    """Plan merges of pairs of segments of ``2**level`` columns; at most `lanes` pairs there are.

    Let c be the value of the pool that a merge makes. A left position belongs to it iff its value
    is above c, a right one iff its value is below. Let gain(v) be the sum of what left values
    exceed v by, less the sum of what right values fall short of v by: it falls in v and is 0 at c.
    For a probed left value a and right value b, the excess of the left end over a and the deficit
    of the right end under b are exact. The right end's deficit under a and the left end's excess
    over b are bounds, exact once the other side is settled. Together they decide at least one of
    the two sides in every iteration. Seen from the border between the segments, with
    right values negated, both sides obey the same rules; a side is the first axis below.
    """
    chunk, columns = fit.value.shape
    half = chunk << level
    bits = 32 - jax.lax.clz(half)
    # Lanes without a merge of their own repeat the last one, and are never read.
    start = jnp.arange(lanes, dtype=jnp.int32) * (2 * half)
    middle = jnp.minimum(start, chunk * columns - 2 * half) + half
    is_left = jnp.array([[True], [False]])
    sign = jnp.where(is_left, 1.0, -1.0)

    def pick(arrays: Pair, distance: jax.Array) -> jax.Array:
        """Entries at a distance from the border, of one array on either side: [2, lanes]."""
        near = jnp.clip(distance, 0, half - 1)
        positions = middle - 1 - near[0], middle + near[1]
        return jnp.stack(
            [
                array.reshape(-1)
                .at[(p % chunk) * columns + p // chunk]
                .get(mode="promise_in_bounds")
                for array, p in zip(arrays, positions, strict=True)
            ]
        )

    def values(distance: jax.Array) -> jax.Array:
        return pick((fit.value, fit.value), distance)

    def nearest(sums: Pair, count: jax.Array) -> jax.Array:
        """Sum over the `count` positions of each side that are nearest to the border."""
        return jnp.where(count > 0, pick(sums, count - 1), 0.0)

    def others(sums: Pair, count: jax.Array) -> jax.Array:
        """Sum over the positions of each side beyond those `count`."""
        return jnp.where(count < half, pick((sums[1], sums[0]), count), 0.0)

    def nearest_weight(count: jax.Array) -> jax.Array:
        if fit.weights is not None:
            return nearest(fit.weights, count)
        left = jnp.clip(held - middle + count, 0, count)
        return jnp.where(is_left, left, jnp.clip(held - middle, 0, count)).astype(jnp.float32)

    def narrow(node: jax.Array) -> jax.Array:
        # A node of the bisection tree over 0 .. 2**bits - 1: children are 2 node and 2 node + 1.
        remaining = bits - (31 - jax.lax.clz(node))
        is_open = remaining > 0
        low = (node << remaining) - (1 << bits)
        distance = jnp.where(is_open, low + (1 << jnp.maximum(remaining - 1, 0)) - 1, low - 1)
        count = jnp.minimum(distance + 1, half)
        value = sign * values(distance)
        total, weight = sign * nearest(fit.sums, count), nearest_weight(count)
        excess = total - value * weight
        less = excess[0] < excess[1]
        leads = jnp.stack([less, ~less])
        crossed = value + value[::-1] <= 0
        is_both = is_open & is_open[::-1]
        # `leads` decides where rounding, or a NaN, would leave both sides open for ever.
        joins = excess <= total[::-1] + value * weight[::-1]
        joins |= is_both & ~crossed & leads
        stays = ~is_both | (crossed & ~leads) | (distance >= half)
        joins &= distance < half
        return jnp.where(is_open & (joins | stays), 2 * node + joins, node)

    root = _as_varying(jnp.ones((2, lanes), jnp.int32), fit.value)
    node = jax.lax.while_loop(lambda node: jnp.any(node < (1 << bits)), narrow, root)
    count = node - (1 << bits)

    def merge() -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        """Ends of the pools, their values, and gained and remaining sums of each array."""
        heavy = (weight := nearest_weight(count).sum(0)) > 0
        mean = nearest(fit.sums, count).sum(0) / jnp.where(heavy, weight, 1.0)
        bound = jnp.where(count < half, values(count), -sign * jnp.inf)
        # Clipping to the neighbours keeps the result non-decreasing in spite of rounding.
        pooled = jnp.clip(jnp.where(heavy, mean, values(count - 1)[0]), bound[0], bound[1])
        every = jnp.full((2, lanes), half)
        sums = [fit.sums] if fit.weights is None else [fit.sums, fit.weights]
        moved = [jnp.stack([nearest(each, every), others(each, count)]) for each in sums]
        return jnp.stack([middle - count[0], middle + count[1]]), pooled, moved

    ends, pooled, moved = _once(merge, level, fit.value)
    column = jnp.arange(columns, dtype=jnp.int32)
    in_right = ((column >> level) & 1) == 1

    def spread(x: jax.Array) -> jax.Array:
        return x.at[column >> (level + 1)].get(mode="promise_in_bounds")

    def gain(every: jax.Array) -> Pair:
        of_left, of_right = spread(every[0]), spread(every[1])
        return jnp.where(in_right, 0.0, of_right), jnp.where(in_right, of_left, 0.0)

    def rest(beyond: jax.Array) -> Pair:
        return spread(beyond[1]), spread(beyond[0])

    return _Plan(
        first=spread(ends[0]),
        stop=spread(ends[1]),
        value=spread(pooled),
        sum_gain=gain(moved[0][0]),
        sum_rest=rest(moved[0][1]),
        weight_gain=None if fit.weights is None else gain(moved[1][0]),
        weight_rest=None if fit.weights is None else rest(moved[1][1]),
    )


def _apply(fit: _Fit, plan: _Plan, held: int | jax.Array) -> _Fit:
    chunk, columns = fit.value.shape
    position = jnp.arange(chunk, dtype=jnp.int32)[:, None] + chunk * jnp.arange(columns)
    inside = (position >= plan.first) & (position < plan.stop)

    def add(a: Pair, b: Pair) -> Pair:
        return a[0] + b[0], a[1] + b[1]

    if fit.weights is None or plan.weight_gain is None or plan.weight_rest is None:
        weights = None
        to_stop = jnp.clip(held - position, 0, plan.stop - position)
        from_first = jnp.clip(held - plan.first, 0, position + 1 - plan.first)
        pool_part = to_stop.astype(jnp.float32), from_first.astype(jnp.float32)
    else:
        weights = add(fit.weights, plan.weight_gain)
        pool_part = weights[0] - plan.weight_rest[0], weights[1] - plan.weight_rest[1]
    in_pool = add(plan.sum_rest, (plan.value * pool_part[0], plan.value * pool_part[1]))
    outside = add(fit.sums, plan.sum_gain)
    return _Fit(
        value=jnp.where(inside, plan.value, fit.value),
        sums=(jnp.where(inside, in_pool[0], outside[0]), jnp.where(inside, in_pool[1], outside[1])),
        weights=weights,
    )


def _fit(y: jax.Array, weights: jax.Array | None, held: int | jax.Array) -> jax.Array:
    """Fit the first `held` entries of [n]; unit weights for None. What follows is not read."""
    n = y.shape[0]
    columns = 1
    while columns * _CHUNK < n:
        columns *= 2
    chunk = -(-n // columns)

    def fold(x: jax.Array) -> jax.Array:
        return jnp.pad(x, (0, columns * chunk - n)).reshape(columns, chunk).T

    position = jnp.arange(chunk)[:, None] + chunk * jnp.arange(columns)
    counts = position < held
    w = counts.astype(jnp.float32) if weights is None else jnp.where(counts, fold(weights), 0.0)
    # Above everything before it, the rest never joins a pool.
    y = jnp.where(counts, fold(y), jnp.max(y))
    y, w = _as_varying(y, w), _as_varying(w, y)
    value = _fit_chunks(y, w, exact=weights is not None)
    fit = _Fit(value, _totals(w * value), None if weights is None else _totals(w))

    nowhere, nothing = jnp.zeros((columns,), jnp.int32), jnp.zeros((columns,), jnp.float32)
    pair = (nothing, nothing)
    of_weights = None if weights is None else pair
    idle = _Plan(nowhere, nowhere, nothing, pair, pair, of_weights, of_weights)
    plan = jax.tree.map(lambda x: _as_varying(x, y), idle)

    def advance(level: jax.Array, carry: tuple[_Fit, _Plan], lanes: int) -> tuple[_Fit, _Plan]:
        fit = _apply(*carry, held)
        return fit, _plan(fit, level, lanes, held)

    level, levels = 0, columns.bit_length() - 1
    while level < levels:
        lanes = columns >> (level + 1)
        shared = 1 if lanes > _MANY_LANES else _LEVELS_PER_LOOP
        stop = levels if lanes <= _FEW_LANES else min(levels, level + shared)
        fit, plan = jax.lax.fori_loop(level, stop, partial(advance, lanes=lanes), (fit, plan))
        level = stop
    return _apply(fit, plan, held).value.T.reshape(-1)[:n]


@jax.custom_jvp
def _centred_fit(y: jax.Array, weights: jax.Array | None, held: int | jax.Array) -> jax.Array:
    """`_fit` of values shifted to mean zero, so that long sums keep their digits."""
    is_held = jnp.arange(y.shape[0]) < held
    w = is_held.astype(jnp.float32) if weights is None else jnp.where(is_held, weights, 0.0)
    total = jnp.sum(w)
    mean = jnp.sum(jnp.where(is_held, y, 0.0) * w) / jnp.where(total > 0, total, 1.0)
    return _fit(jnp.where(is_held, y - mean, -jnp.inf), weights, held) + mean


def _blocks_of(fitted: jax.Array) -> jax.Array:
    return jnp.cumsum(jnp.concatenate([jnp.zeros((1,), bool), fitted[1:] != fitted[:-1]]))


@_centred_fit.defjvp
def _centred_fit_jvp(primals, tangents):  # type: ignore[no-untyped-def]
    y, weights, held = primals
    y_dot, weights_dot, _ = tangents
    fitted = _centred_fit(y, weights, held)
    is_held = jnp.arange(y.shape[0]) < held
    w = is_held.astype(jnp.float32) if weights is None else jnp.where(is_held, weights, 0.0)
    moved = w * y_dot
    if weights is not None:
        moved = moved + jnp.where(is_held, weights_dot * (y - fitted), 0.0)
    block = _blocks_of(fitted)

    def block_sum(x: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x, block, y.shape[0], indices_are_sorted=True)[block]

    weight = block_sum(w)
    return fitted, jnp.where(weight > 0, block_sum(moved) / jnp.where(weight > 0, weight, 1.0), 0.0)


def isotonic_regression(
    y: jax.Array, weights: jax.Array | None = None, *, mask: jax.Array | None = None
) -> jax.Array:
    """Non-decreasing values nearest to `y` in weighted least squares.

    Exact, not iterative: equal to scikit-learn's `isotonic_regression` to float32 precision
    (relative to the spread of `y`). Differentiable in `y` and `weights`: a block moves with its
    weighted mean.

    Args:
      y: [n]; the order of the entries is the order of the regressor, so average ties first.
        float32 or bfloat16; the work is done in float32.
      weights: [n], not negative; None for 1 each.
      mask: bool [n], false where an entry is to be ignored (it may be NaN there).

    Returns:
      float32 [n], non-decreasing. An entry that is masked or of weight 0 takes the value of the
      nearest one before it that counts (of the first that counts, where there is none); all NaN
      if none counts.

    Example:
      >>> isotonic_regression(jnp.array([1.0, 3.0, 2.0, 4.0])).tolist()
      [1.0, 2.5, 2.5, 4.0]
    """
    y = jnp.asarray(y, jnp.float32)
    n = y.shape[0]
    if n == 0:
        return y
    if weights is None and mask is None:
        return _centred_fit(y, None, n)
    counts = jnp.ones((n,), bool) if mask is None else mask > 0
    if weights is not None:
        counts &= weights > 0
    rank = jnp.cumsum(counts, dtype=jnp.int32) - 1
    slot = jnp.where(counts, rank, n)

    def pack(x: jax.Array) -> jax.Array:
        clean = jnp.where(counts, x.astype(jnp.float32), 0.0)
        return jnp.zeros((n,), jnp.float32).at[slot].set(clean, mode="drop")

    held = rank[-1] + 1
    packed = _centred_fit(pack(y), None if weights is None else pack(weights), held)
    return jnp.where(held > 0, packed[jnp.maximum(rank, 0)], jnp.nan)
