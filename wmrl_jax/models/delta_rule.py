"""The gated delta rule of linear attention, in parallel over chunks and one token at a time.

A head keeps a matrix S that maps keys to values. With decay a_t = exp(g_t) and rate b_t::

    S_t = a_t S_{t-1} + k_t b_t (v_t - k_t^T a_t S_{t-1})^T        out_t = q_t^T S_t

(Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464). In a chunk, all updates follow
from one triangular system, so that the work is in matrix products; only the chunks are sequential.
Everything is computed in float32.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

# Accelerators round the inputs of float32 products by default; in a state these errors stay.
_dot = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def delta_rule(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    log_decay: jax.Array,
    rate: jax.Array,
    state: jax.Array | None = None,
    *,
    starts: jax.Array | None = None,
    chunk: int = 64,
) -> tuple[jax.Array, jax.Array]:
    """Outputs of a sequence, and the state behind it.

    A token with `rate` 0 and `log_decay` 0 changes nothing, which is what padding needs.

    Args:
      queries: float [B, T, H, dk], scaled as wanted.
      keys: float [B, T, H, dk], of length at most 1.
      values: float [B, T, H, dv].
      log_decay: float [B, T, H], g <= 0.
      rate: float [B, T, H], b in [0, 1].
      state: float [B, H, dk, dv] before the first token; None: zero.
      starts: bool [B, T]; before such a token the state becomes zero. None: nowhere.
      chunk: tokens that are computed in parallel; T need not be a multiple.

    Returns:
      (outputs float32 [B, T, H, dv], state float32 [B, H, dk, dv]).
    """
    batch, time, heads, key_dim = keys.shape
    chunk = min(chunk, time)
    count = -(-time // chunk)
    if starts is None:
        starts = jnp.zeros((batch, time), bool)

    def chunked(x: jax.Array) -> jax.Array:
        """[B, T, ...] -> [chunks, B, chunk, ...], filled up with zeros."""
        x = jnp.pad(x, [(0, 0), (0, count * chunk - time)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, count, chunk, *x.shape[2:]), 1, 0)

    def by_head(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(chunked(x.astype(jnp.float32)), 3, 2)  # [chunks, B, H, chunk, ...]

    inputs = (*map(by_head, (queries, keys, values, log_decay, rate)), chunked(starts))
    if state is None:
        state = jnp.zeros((batch, heads, key_dim, values.shape[-1]), jnp.float32)
    state, outputs = jax.lax.scan(_one_chunk, state.astype(jnp.float32), inputs)
    outputs = jnp.moveaxis(outputs, (0, 3), (1, 2))  # [B, chunks, chunk, H, dv]
    return outputs.reshape(batch, count * chunk, heads, -1)[:, :time], state


def _one_chunk(state: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    q, k, v, g, b, starts = inputs  # [B, H, C, ...]; starts [B, C]
    size = k.shape[2]
    total = jnp.cumsum(g, axis=-1)
    # Which stretch of the chunk a token is in, 0 being the one that reads the old state.
    stretch = jnp.cumsum(starts, axis=-1)[:, None]
    lower = jnp.tril(jnp.ones((size, size), bool))
    visible = lower & (stretch[..., :, None] == stretch[..., None, :])
    difference = total[..., :, None] - total[..., None, :]
    decay = jnp.where(visible, jnp.exp(jnp.where(visible, difference, 0.0)), 0.0)
    from_old = jnp.where(stretch == 0, jnp.exp(total), 0.0)[..., None]
    last = stretch[..., -1:]
    to_end = jnp.where(stretch == last, jnp.exp(total[..., -1:] - total), 0.0)[..., None]
    kept = jnp.where(last == 0, jnp.exp(total[..., -1:]), 0.0)[..., None]

    products = _dot("bhik,bhjk->bhij", k, k)
    system = jnp.where(lower & ~jnp.eye(size, dtype=bool), b[..., None] * products * decay, 0.0)
    known = b[..., None] * jnp.concatenate([v, k * from_old], axis=-1)
    solved = jax.scipy.linalg.solve_triangular(system, known, lower=True, unit_diagonal=True)
    written, reads = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    written = written - _dot("bhik,bhkv->bhiv", reads, state)
    scores = _dot("bhik,bhjk->bhij", q, k) * decay
    outputs = _dot("bhik,bhkv->bhiv", q * from_old, state)
    outputs += _dot("bhij,bhjv->bhiv", scores, written)
    state = kept * state + _dot("bhik,bhiv->bhkv", k * to_end, written)
    return state, outputs


def delta_step(
    state: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    rate: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One token of `delta_rule`.

    Args:
      state: float32 [..., H, dk, dv].
      query: [..., H, dk]; `key` alike.
      key: see `query`.
      value: [..., H, dv].
      log_decay: [..., H]; `rate` alike.
      rate: see `log_decay`.

    Returns:
      (state, output float32 [..., H, dv]).
    """
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    state = jnp.exp(log_decay.astype(jnp.float32))[..., None, None] * state
    held = _dot("...k,...kv->...v", key, state)
    delta = rate.astype(jnp.float32)[..., None] * (value - held)
    state = state + key[..., :, None] * delta[..., None, :]
    return state, _dot("...k,...kv->...v", query, state)
