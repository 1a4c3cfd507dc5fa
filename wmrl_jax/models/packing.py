"""Rows of one group packed one behind the other, so that padding costs nothing but attention.

The tokens of a group's N rows lie in N x S slots, most of them padding where lengths differ. All
of a layer but the mixing of tokens treats tokens alone: it works on the C packed ones, and so do
the logits. `pack` and `unpack` are each other's transposes, and each other's gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Packing(NamedTuple):
    """Where the packed tokens of G groups come from, and where each slot's token went.

    Attributes:
      slots: int32 [G, C], index among the N*S slots; N*S where the pack is empty.
      places: int32 [G, N*S], index among the C packed tokens; C where the slot is padding.
    """

    slots: jax.Array
    places: jax.Array


def make_packing(lengths: jax.Array, new_tokens: int, capacity: int) -> Packing:
    """Packs the first `lengths` tokens of each row, rows in order.

    Args:
      lengths: int32 [G, N], at most S.
      new_tokens: S.
      capacity: C; a group's lengths must not add up to more.
    """
    rows = lengths.shape[1]
    ends = jnp.cumsum(lengths, axis=1)
    starts = ends - lengths
    within = jnp.arange(new_tokens)
    places = jnp.where(within < lengths[..., None], starts[..., None] + within, capacity)
    places = places.reshape(len(lengths), -1).astype(jnp.int32)
    packed = jnp.arange(capacity)
    row = jax.vmap(lambda e: jnp.searchsorted(e, packed, side="right"))(ends)
    start = jnp.take_along_axis(starts, jnp.minimum(row, rows - 1), axis=1)
    slots = jnp.where(row < rows, row * new_tokens + packed - start, rows * new_tokens)
    return Packing(slots.astype(jnp.int32), places)


def pack(packing: Packing, x: jax.Array) -> jax.Array:
    """[G, N*S, ...] -> [G, C, ...], zero where the pack is empty."""
    return _moved(packing.slots, packing.places, x)


def unpack(packing: Packing, x: jax.Array) -> jax.Array:
    """[G, C, ...] -> [G, N*S, ...], zero in padding."""
    return _moved(packing.places, packing.slots, x)


@jax.custom_vjp
def _moved(source: jax.Array, target: jax.Array, x: jax.Array) -> jax.Array:
    """Gathers by `source`; the gradient gathers by `target`, where a scatter would be slow."""
    del target
    return jax.vmap(lambda row, index: row.at[index].get(mode="fill", fill_value=0))(x, source)


def _moved_forward(
    source: jax.Array, target: jax.Array, x: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _moved(source, target, x), (source, target)


def _moved_backward(
    indices: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[None, None, jax.Array]:
    source, target = indices
    return None, None, _moved(target, source, cotangent)


_moved.defvjp(_moved_forward, _moved_backward)


def capacities(slots: int) -> tuple[int, ...]:
    """The few capacities that are compiled for N*S slots, ascending, the last one for all."""
    return tuple(sorted({-(-slots * eighths // 8) for eighths in (2, 3, 4, 5, 6, 7, 8)}))


def capacity_for(tokens: int, slots: int) -> int:
    """The least of `capacities` that holds the tokens of the fullest group."""
    return next(c for c in capacities(slots) if c >= tokens)
