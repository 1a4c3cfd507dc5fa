"""The pieces that every backbone shares, as pure functions: normalisation, rotation, attention."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, *, eps: float) -> jax.Array:
    """Root-mean-square normalisation over the last axis, in float32; the dtype of `x` returns.

    Args:
      x: [..., D].
      scale: [D], multiplies the normalised values.
      eps: added to the mean square.
    """
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * inverse * scale).astype(x.dtype)


class RotaryScaling(NamedTuple):
    """How the frequencies of rotary embedding were stretched for longer texts.

    ``linear`` divides all of them by `factor`. ``llama3`` (Llama 3.1) divides those whose wave is
    longer than ``original_length / low_freq_factor``, keeps those shorter than
    ``original_length / high_freq_factor``, and goes over from one to the other in between.

    Attributes:
      kind: one of the two.
      factor: of the stretching.
      low_freq_factor: of `llama3`; `high_freq_factor` and `original_length` (tokens) alike.
      high_freq_factor: see `low_freq_factor`.
      original_length: see `low_freq_factor`.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192


def rotary_frequencies(
    head_dim: int, theta: float, scaling: RotaryScaling | None = None
) -> jax.Array:
    """Radians a position of each pair of dimensions, float32 [head_dim / 2]."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return frequencies
    stretched = frequencies / scaling.factor
    if scaling.kind == "linear":
        return stretched
    waves = scaling.original_length * frequencies / (2 * math.pi)  # in the original length
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = jnp.clip((waves - scaling.low_freq_factor) / span, 0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * stretched


def rotary_angles(
    positions: jax.Array, *, head_dim: int, theta: float, scaling: RotaryScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of rotary position embedding, float32 [..., head_dim / 2] each.

    Args:
      positions: integers of any shape.
      head_dim: width of one head, even.
      theta: the base of the frequencies.
      scaling: see `RotaryScaling`.
    """
    frequencies = rotary_frequencies(head_dim, theta, scaling)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the two halves of the last axis against each other (the layout of Qwen and Llama).

    Args:
      x: [..., head_dim].
      cos: broadcasts to [..., head_dim / 2]; `sin` alike.
      sin: see `cos`.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class LowRank(NamedTuple):
    """A weight and what a low-rank adapter adds to it; stands where a weight [..., D, E] stands.

    Attributes:
      base: [..., D, E].
      a: [..., D, r].
      b: [..., r, E], scaled.
    """

    base: jax.Array
    a: jax.Array
    b: jax.Array

    def astype(self, dtype: Any) -> LowRank:
        """All three in another dtype."""
        return LowRank(*(part.astype(dtype) for part in self))

    def merged(self) -> jax.Array:
        """The weight as one matrix, in the base's dtype."""
        return (self.base + self.a @ self.b).astype(self.base.dtype)


def project(x: jax.Array, weights: jax.Array | LowRank) -> jax.Array:
    """`x @ weights` over rows and positions at once, [..., D] -> [..., E].

    Flattened on purpose: from the product of three-dimensional arrays, XLA makes a weight gradient
    that first copies the whole cotangent transposed, which doubles the time of a backward pass.
    """
    flat = x.reshape(-1, x.shape[-1])
    if isinstance(weights, LowRank):
        product = flat @ weights.base + (flat @ weights.a) @ weights.b
    else:
        product = flat @ weights
    return product.reshape(*x.shape[:-1], -1)


def causal_attention(
    queries: jax.Array, keys: jax.Array, values: jax.Array, segments: jax.Array | None = None
) -> jax.Array:
    """Grouped-query attention in which position t sees positions 0..t; scores in float32.

    Padding on the right needs no mask: no real position sees it.

    Args:
      queries: [B, T, H, head_dim].
      keys: [B, T, K, head_dim] with H a multiple of K.
      values: [B, T, K, head_dim].
      segments: int32 [B, T]; a position sees those of its own segment only. None: one segment.

    Returns:
      [B, T, H, head_dim].
    """
    batch, time, heads, head_dim = queries.shape
    kv_heads = keys.shape[2]
    # Head k's H / K queries stand one behind the other: one matrix product per row and key head.
    queries = queries.swapaxes(1, 2).reshape(batch, kv_heads, -1, head_dim)
    keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
    scores = jnp.einsum(
        "bkmd,bksd->bkms", queries * head_dim**-0.5, keys, preferred_element_type=jnp.float32
    ).reshape(batch, kv_heads, -1, time, time)
    visible = jnp.tril(jnp.ones((time, time), dtype=bool))
    if segments is not None:
        same = segments[:, :, None] == segments[:, None, :]
        visible = (visible & same)[:, None, None]
    shares = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    shares = shares.reshape(batch, kv_heads, -1, time).astype(values.dtype)
    mixed = jnp.einsum("bkms,bksd->bkmd", shares, values)
    return mixed.reshape(batch, heads, time, head_dim).swapaxes(1, 2)
