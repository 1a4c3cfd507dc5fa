"""Drawing one token per row from logits: temperature, top-k, top-p, and the log-prob of the draw.

The draw inverts the distribution function at one pair of uniform numbers per row, so that a step
needs two random numbers per row where Gumbel noise needs V. Nothing is sorted: the k-th largest
probability and the edge of the nucleus are found by bisection over the bits of a float.

The convention of log-probabilities, `before`: they are those of softmax(logits / temperature)
*before* truncation, so that they equal what a trainer computes that knows the temperature only. The
other one, `after`, gives those of the distribution that was drawn from, truncated and normalised
anew: right for importance weights where the trainer truncates in the same way. At temperature 0 the
most probable token is taken, and its log-probability is that at temperature 1, before truncation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from wmrl_jax.errors import UserError

Convention = Literal["before", "after"]


class Drawing(NamedTuple):
    """How a row's tokens are drawn, each [G, N]; see `draw`."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array


def by_row(name: str, setting: Any, dtype: Any, groups: int, group_size: int) -> jax.Array:
    """A setting of the sampler as one value a row, [G, N].

    Args:
      name: for the error.
      setting: a scalar, [G] or [G, N].
      dtype: of the result.
      groups: G.
      group_size: N.

    Raises:
      UserError: another shape.
    """
    setting = jnp.asarray(setting, dtype)
    if setting.shape not in ((), (groups,), (groups, group_size)):
        raise UserError(
            f"{name} has the shape {setting.shape}; give one value, one for each of {groups} "
            f"groups, or one for each row, {(groups, group_size)}"
        )
    setting = setting[:, None] if setting.ndim == 1 else setting
    return jnp.broadcast_to(setting, (groups, group_size))


def drawing_by_row(
    groups: int, group_size: int, *, temperature: Any, top_k: Any, top_p: Any, min_p: Any
) -> Drawing:
    """Settings of any of the shapes that `by_row` takes, each as [G, N]."""
    shape = (groups, group_size)
    return Drawing(
        by_row("temperature", temperature, jnp.float32, *shape),
        by_row("top_k", top_k, jnp.int32, *shape),
        by_row("top_p", top_p, jnp.float32, *shape),
        by_row("min_p", min_p, jnp.float32, *shape),
    )


def row_noise(key: jax.Array, order: jax.Array, group_size: int, new_tokens: int) -> jax.Array:
    """The uniform numbers of all steps, float32 [G, N, new_tokens, 2] in [0, 1).

    Each row has a key of its own, folded from the call's, its group's number and its own.

    Args:
      key: of the call.
      order: int32 [G], the groups' numbers.
      group_size: N.
      new_tokens: steps.
    """

    def of_row(group: jax.Array, row: jax.Array) -> jax.Array:
        row_key = jax.random.fold_in(jax.random.fold_in(key, group), row)
        return jax.random.uniform(row_key, (new_tokens, 2))

    rows = jnp.arange(group_size)
    return jax.vmap(jax.vmap(of_row, (None, 0)), (0, None))(order, rows)


def draw(
    logits: jax.Array,
    uniforms: jax.Array,
    *,
    temperature: jax.Array | float,
    top_k: jax.Array | int,
    top_p: jax.Array | float,
    min_p: jax.Array | float = 0.0,
    convention: Convention = "before",
) -> tuple[jax.Array, jax.Array]:
    """Draw one token per row.

    Every setting is a scalar or one value a row, [B].

    Args:
      logits: float32 [B, V].
      uniforms: float32 [B, 2] in [0, 1): the first picks a block of the vocabulary, the second a
        token in it.
      temperature: 0 takes the most probable token.
      top_k: only the k most probable tokens (and those that tie with the last of them) may be
        drawn; 0 is off.
      top_p: only the smallest set of most probable tokens whose probability reaches top_p (and
        those that tie with the last of them) may be drawn; 1 is off. Top-k cuts first.
      min_p: only tokens at least min_p times as probable as the most probable one may be drawn
        (arXiv 2407.01082); 0 is off.
      convention: of the log-probabilities, see above.

    Returns:
      (tokens int32 [B], their log-probabilities float32 [B]).
    """
    rows = logits.shape[0]
    greedy = jnp.broadcast_to(jnp.asarray(temperature) <= 0.0, (rows,))
    truncated = (jnp.asarray(top_k) > 0) | (jnp.asarray(top_p) < 1.0) | (jnp.asarray(min_p) > 0.0)
    divisor = jnp.where(greedy, 1.0, temperature)
    scaled = logits / divisor[:, None]
    peak = jnp.max(scaled, axis=-1, keepdims=True)
    mass = jnp.exp(scaled - peak)
    kept = jax.lax.cond(
        jnp.any(truncated),
        lambda: truncate(mass, top_k=top_k, top_p=top_p, min_p=min_p),
        lambda: mass,
    )
    tokens = jax.lax.cond(
        jnp.all(greedy), lambda: jnp.zeros(rows, jnp.int32), lambda: invert(kept, uniforms)
    )
    tokens = jax.lax.cond(
        jnp.any(greedy),
        lambda: jnp.where(greedy, jnp.argmax(mass, axis=-1).astype(jnp.int32), tokens),
        lambda: tokens,
    )
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1) - peak
    counted = mass if convention == "before" else jnp.where(greedy[:, None], mass, kept)
    return tokens, chosen[:, 0] - jnp.log(jnp.sum(counted, axis=-1))


def truncate(
    mass: jax.Array,
    *,
    top_k: jax.Array | int,
    top_p: jax.Array | float,
    min_p: jax.Array | float = 0.0,
) -> jax.Array:
    """Set to zero what top-k, then top-p, then min-p exclude.

    Args:
      mass: float32 [B, V], probabilities up to a factor per row.
      top_k: see `draw`; `top_p` and `min_p` alike.
      top_p: see `draw`.
      min_p: see `draw`.
    """
    k = jnp.where(jnp.asarray(top_k) > 0, top_k, mass.shape[-1])
    edge = _largest_bits(lambda t: jnp.sum(mass >= t, axis=-1) >= k, mass.shape[0])
    most = jnp.max(mass, axis=-1, keepdims=True)
    mass = jnp.where(mass >= edge, mass, 0.0)
    wanted = jnp.minimum(top_p, 1.0) * jnp.sum(mass, axis=-1)
    edge = _largest_bits(
        lambda t: jnp.sum(jnp.where(mass >= t, mass, 0.0), axis=-1) >= wanted, mass.shape[0]
    )
    edge = jnp.minimum(edge, most)  # the most probable token stays, however small top_p is
    least = jnp.broadcast_to(jnp.minimum(min_p, 1.0), mass.shape[:1])[:, None] * most
    return jnp.where(mass >= jnp.maximum(edge, least), mass, 0.0)


def invert(mass: jax.Array, uniforms: jax.Array) -> jax.Array:
    """The token at which the distribution function passes the uniform numbers, int32 [B].

    Args:
      mass: float32 [B, V], probabilities up to a factor per row; a token of mass 0 is not drawn.
      uniforms: float32 [B, 2] in [0, 1).
    """
    vocabulary = mass.shape[-1]
    width = 1 << max(0, (vocabulary - 1).bit_length() // 2)
    blocks = -(-vocabulary // width)
    padded = jnp.pad(mass, ((0, 0), (0, blocks * width - vocabulary)))
    padded = padded.reshape(-1, blocks, width)
    block = _pick(jnp.sum(padded, axis=-1), uniforms[:, 0])
    within = jnp.take_along_axis(padded, block[:, None, None], axis=1)[:, 0]
    return block * width + _pick(within, uniforms[:, 1])


def _pick(mass: jax.Array, uniform: jax.Array) -> jax.Array:
    reached = jnp.cumsum(mass, axis=-1)
    passed = (reached > uniform[:, None] * reached[:, -1:]) & (mass > 0.0)
    # Rounding in the cumulative sum may leave no entry passed; the largest one is then taken.
    first, largest = jnp.argmax(passed, axis=-1), jnp.argmax(mass, axis=-1)
    return jnp.where(jnp.any(passed, axis=-1), first, largest).astype(jnp.int32)


def _largest_bits(holds: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """The largest non-negative float t per row with holds(t), where holds falls from true to false.

    Non-negative floats are ordered as their bits are: 31 halvings find t exactly.
    """

    def halve(index: jax.Array, bits: jax.Array) -> jax.Array:
        longer = bits | (1 << (30 - index))
        value = jax.lax.bitcast_convert_type(longer, jnp.float32)[:, None]
        return jnp.where(holds(value), longer, bits)

    bits = jax.lax.fori_loop(0, 31, halve, jnp.zeros(rows, jnp.int32))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)[:, None]
