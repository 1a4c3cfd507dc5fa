"""Drawing one token per row from logits: temperature, top-k, top-p, and the log-prob of the draw.

The draw inverts the distribution function at one pair of uniform numbers per row, so that a step
needs two random numbers per row where Gumbel noise needs V. Nothing is sorted: the k-th largest
probability and the edge of the nucleus are found by bisection over the bits of a float.

The convention of log-probabilities: they are those of softmax(logits / temperature) *before*
truncation, so that they equal what a trainer computes that knows the temperature only. At
temperature 0 the most probable token is taken, and its log-probability is that at temperature 1.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def draw(
    logits: jax.Array,
    uniforms: jax.Array,
    *,
    temperature: jax.Array | float,
    top_k: jax.Array | int,
    top_p: jax.Array | float,
) -> tuple[jax.Array, jax.Array]:
    """Draw one token per row.

    Args:
      logits: float32 [B, V].
      uniforms: float32 [B, 2] in [0, 1): the first picks a block of the vocabulary, the second a
        token in it.
      temperature: scalar; 0 takes the most probable token.
      top_k: scalar; only the k most probable tokens (and those that tie with the last of them)
        may be drawn; 0 is off.
      top_p: scalar; only the smallest set of most probable tokens whose probability reaches top_p
        (and those that tie with the last of them) may be drawn; 1 is off. Top-k cuts first.

    Returns:
      (tokens int32 [B], their log-probabilities float32 [B]).
    """
    greedy = jnp.asarray(temperature) <= 0.0
    truncated = (jnp.asarray(top_k) > 0) | (jnp.asarray(top_p) < 1.0)
    scaled = logits / jnp.where(greedy, 1.0, temperature)
    peak = jnp.max(scaled, axis=-1, keepdims=True)
    mass = jnp.exp(scaled - peak)

    def random(mass: jax.Array) -> jax.Array:
        kept = jax.lax.cond(
            truncated, lambda: truncate(mass, top_k=top_k, top_p=top_p), lambda: mass
        )
        return invert(kept, uniforms)

    tokens = jax.lax.cond(
        greedy, lambda mass: jnp.argmax(mass, axis=-1).astype(jnp.int32), random, mass
    )
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1) - peak
    return tokens, chosen[:, 0] - jnp.log(jnp.sum(mass, axis=-1))


def truncate(mass: jax.Array, *, top_k: jax.Array | int, top_p: jax.Array | float) -> jax.Array:
    """Set to zero what top-k and then top-p exclude.

    Args:
      mass: float32 [B, V], probabilities up to a factor per row.
      top_k: see `draw`; `top_p` alike.
      top_p: see `draw`.
    """
    k = jnp.where(jnp.asarray(top_k) > 0, top_k, mass.shape[-1])
    edge = _largest_bits(lambda t: jnp.sum(mass >= t, axis=-1) >= k, mass.shape[0])
    mass = jnp.where(mass >= edge, mass, 0.0)
    wanted = jnp.minimum(top_p, 1.0) * jnp.sum(mass, axis=-1)
    edge = _largest_bits(
        lambda t: jnp.sum(jnp.where(mass >= t, mass, 0.0), axis=-1) >= wanted, mass.shape[0]
    )
    most = jnp.max(mass, axis=-1, keepdims=True)  # stays, however small top_p is
    return jnp.where(mass >= jnp.minimum(edge, most), mass, 0.0)


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
