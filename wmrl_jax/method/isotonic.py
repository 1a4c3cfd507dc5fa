"""Exact weighted isotonic regression in compiled code.

The fit is the slope of the greatest convex minorant of the cumulative sums. It is built bottom
up: short chunks by the max-min formula, then neighbouring segments are merged by finding the
common tangent of their two minorants. All merges of one level are searched at once by a bisection
that narrows both ends of the tangent together (after Overmars and van Leeuwen, 1981). So n values
take O(log n) levels of O(log n) loop iterations and O(n log n) work, whatever the input.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

_CHUNK = 16  # longest chunk that the max-min formula fits
_FEW_LANES = 128  # so few merges share one compiled loop up to the last level
_LEVELS_PER_LOOP = 3  # levels that share a loop below that: more waste lanes, fewer compile longer


class _Fit(NamedTuple):
    """The fit of all segments of one level.

    Position p of the input lies in row p % C and column p // C: a segment is then a run of whole
    columns, and elementwise work runs along the long axis. Sums count fitted values from a
    position, inclusive, to the segment's end (0) and from its start to the position (1). Both are
    kept because a sum is only accurate relative to itself: a short one may not be had as the
    difference of two long ones.
    """

    value: jax.Array  # [C, M]
    sums: jax.Array  # [2, C, M], weighted sums of values
    weights: jax.Array | None  # [2, C, M], sums of weights; None for unit weights


class _Plan(NamedTuple):
    """What one level of merges changes, for each column: [M] or [2, M] as in `_Fit`.

    It is made in one loop iteration and applied in the next. That keeps it a buffer of its own;
    within an iteration the compiler would compute it anew for every position.
    """

    first: jax.Array  # int32 [M], first position of the segment's pool
    stop: jax.Array  # int32 [M], the one after its last
    value: jax.Array  # [M], of the pool
    sum_gain: jax.Array  # [2, M], sums of the neighbour that the segment was merged with
    sum_rest: jax.Array  # [2, M], sums beyond the pool
    weight_gain: jax.Array | None  # [2, M], the same of weights
    weight_rest: jax.Array | None


def _as_varying(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x`, typed as varying over the mapped axes of `like`: shard_map wants it of a loop's carry.

    A selection between equals has the type of its condition, and compiles to nothing.
    """
    return jnp.where(like.reshape(-1)[0] > 0, x, x)


def _totals(x: jax.Array) -> jax.Array:
    """Sums of the rows of [C, M] to the end and from the start: [2, C, M]."""
    none = _as_varying(jnp.zeros(x.shape[1:], jnp.float32), x)

    def add(total: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        return total + row, total + row

    return jnp.stack([jax.lax.scan(add, none, x, reverse=to_end)[1] for to_end in (True, False)])


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
        return sum(part[k + 1] - part[:-1] for part in parts)  # type: ignore[return-value]

    def lower(r: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        least, fitted = carry  # least mean of start..k' over k' >= k
        k = chunk - 1 - r
        weight = between(weights, k)
        heavy = weight > 0
        mean = jnp.where(heavy, between(sums, k) / jnp.where(heavy, weight, 1.0), y[k])
        least = jnp.where(start <= k, jnp.minimum(least, mean), -jnp.inf)
        return least, fitted.at[k].set(jnp.max(least, axis=0))

    full = _as_varying(jnp.full((chunk, columns), jnp.inf, jnp.float32), y)
    return jax.lax.fori_loop(0, chunk, lower, (full, full))[1]


def _plan(fit: _Fit, level: jax.Array, lanes: int, held: int | jax.Array) -> _Plan:
    """Plan merges of pairs of segments of ``2**level`` columns; at most `lanes` pairs there are.

    Let c be the value of the pool that a merge makes. A left position belongs to it iff its value
    is above c, a right one iff its value is below. Let gain(v) be the sum of what left values
    exceed v by, less the sum of what right values fall short of v by: it falls in v and is 0 at c.
    For a probed left value a and right value b, the excess of the left end over a and the deficit
    of the right end under b are exact. The right end's deficit under a and the left end's excess
    over b are bounds, exact once the other side is settled. Together they decide at least one of
    the two sides in every iteration. Seen from the border between the segments, with
    right values negated, both sides obey the same rules, and a side is the first axis below.
    """
    chunk, columns = fit.value.shape
    half = chunk << level
    bits = 32 - jax.lax.clz(half)
    # Lanes without a merge of their own repeat the last one, and are never read.
    start = jnp.arange(lanes, dtype=jnp.int32) * (2 * half)
    middle = jnp.minimum(start, chunk * columns - 2 * half) + half
    is_left = jnp.array([[True], [False]])
    sign = jnp.where(is_left, 1.0, -1.0)

    def pick(array: jax.Array, distance: jax.Array, plane: jax.Array | int = 0) -> jax.Array:
        """Entries of [.., C, M] at a distance from the border, on either side: [2, lanes]."""
        distance = jnp.clip(distance, 0, half - 1)
        p = jnp.where(is_left, middle - 1 - distance, middle + distance)
        index = plane * (chunk * columns) + (p % chunk) * columns + p // chunk
        return array.reshape(-1).at[index].get(mode="promise_in_bounds")

    def nearest(array: jax.Array, count: jax.Array) -> jax.Array:
        """Sum over the `count` positions of each side that are nearest to the border."""
        return jnp.where(count > 0, pick(array, count - 1, jnp.where(is_left, 0, 1)), 0.0)

    def others(array: jax.Array, count: jax.Array) -> jax.Array:
        """Sum over the positions of each side beyond those `count`."""
        return jnp.where(count < half, pick(array, count, jnp.where(is_left, 1, 0)), 0.0)

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
        value = sign * pick(fit.value, distance)
        total, weight = sign * nearest(fit.sums, count), nearest_weight(count)
        beyond_value = total - value * weight
        less = beyond_value[0] < beyond_value[1]
        leads = jnp.stack([less, ~less])
        crossed = value + value[::-1] <= 0
        is_both = is_open & is_open[::-1]
        # `leads` decides where rounding, or a NaN, would leave both sides open for ever.
        joins = beyond_value <= total[::-1] + value * weight[::-1]
        joins |= is_both & ~crossed & leads
        stays = ~is_both | (crossed & ~leads) | (distance >= half)
        joins &= distance < half
        return jnp.where(is_open & (joins | stays), 2 * node + joins, node)

    root = _as_varying(jnp.ones((2, lanes), jnp.int32), fit.value)
    node = jax.lax.while_loop(lambda node: jnp.any(node < (1 << bits)), narrow, root)
    count = node - (1 << bits)

    pool_sum, pool_weight = nearest(fit.sums, count).sum(0), nearest_weight(count).sum(0)
    bound = jnp.where(count < half, pick(fit.value, count), -sign * jnp.inf)
    heavy = pool_weight > 0
    mean = pool_sum / jnp.where(heavy, pool_weight, 1.0)
    # Clipping to the neighbours keeps the result non-decreasing in spite of rounding.
    pooled = jnp.clip(jnp.where(heavy, mean, pick(fit.value, count - 1)[0]), bound[0], bound[1])
    owner = jnp.arange(columns, dtype=jnp.int32) >> (level + 1)
    in_right = ((jnp.arange(columns, dtype=jnp.int32) >> level) & 1) == 1

    def spread(x: jax.Array) -> jax.Array:
        return x.at[..., owner].get(mode="promise_in_bounds")

    def gain(array: jax.Array) -> jax.Array:
        total = spread(nearest(array, jnp.full((2, lanes), half)))
        to_end, from_start = jnp.where(in_right, 0.0, total[1]), jnp.where(in_right, total[0], 0.0)
        return jnp.stack([to_end, from_start])

    weights = fit.weights
    return _Plan(
        first=spread(middle - count[0]),
        stop=spread(middle + count[1]),
        value=spread(pooled),
        sum_gain=gain(fit.sums),
        sum_rest=spread(others(fit.sums, count))[::-1],
        weight_gain=None if weights is None else gain(weights),
        weight_rest=None if weights is None else spread(others(weights, count))[::-1],
    )


def _apply(fit: _Fit, plan: _Plan, held: int | jax.Array) -> _Fit:
    chunk, columns = fit.value.shape
    position = jnp.arange(chunk, dtype=jnp.int32)[:, None] + chunk * jnp.arange(columns)
    inside = (position >= plan.first) & (position < plan.stop)
    if fit.weights is None or plan.weight_gain is None or plan.weight_rest is None:
        weights = None
        to_stop = jnp.clip(held - position, 0, plan.stop - position)
        from_first = jnp.clip(held - plan.first, 0, position + 1 - plan.first)
        pool_part = jnp.stack([to_stop, from_first]).astype(jnp.float32)
    else:
        weights = fit.weights + plan.weight_gain[:, None]
        pool_part = weights - plan.weight_rest[:, None]
    pooled_sums = plan.sum_rest[:, None] + plan.value * pool_part
    return _Fit(
        value=jnp.where(inside, plan.value, fit.value),
        sums=jnp.where(inside, pooled_sums, fit.sums + plan.sum_gain[:, None]),
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
    none, nothing = jnp.zeros((columns,), jnp.int32), jnp.zeros((2, columns), jnp.float32)
    no_weights = None if weights is None else nothing
    idle = _Plan(none, none, nothing[0], nothing, nothing, no_weights, no_weights)
    plan = jax.tree.map(lambda x: _as_varying(x, y), idle)

    def advance(level: jax.Array, carry: tuple[_Fit, _Plan], lanes: int) -> tuple[_Fit, _Plan]:
        fit = _apply(*carry, held)
        return fit, _plan(fit, level, lanes, held)

    level, levels = 0, columns.bit_length() - 1
    while level < levels:
        lanes = columns >> (level + 1)
        stop = levels if lanes <= _FEW_LANES else min(levels, level + _LEVELS_PER_LOOP)
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
