"""One new token per row against cached keys and values, for dense backbones.

The prompt's keys and values are computed once per group and shared by its N rows; each row has a
cache of its own only for what it wrote itself. The layers are written out instead of scanned: each
layer's cache is an array of its own, so that a loop around `decode` updates it in place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from wmrl_jax.models.layers import rms_norm, rotate
from wmrl_jax.models.lora import merge
from wmrl_jax.models.transformer import Architecture, arch_angles, head_norm


class PromptCache(NamedTuple):
    """What a group's rows share.

    Attributes:
      keys: one array [G, K, P, head_dim] per layer, rotated.
      values: one array [G, K, P, head_dim] per layer.
      lengths: int32 [G], real tokens of each prompt.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    lengths: jax.Array


class RowCache(NamedTuple):
    """What each row wrote itself; slot s holds its s-th token. Unwritten slots are zero.

    The slots of the keys lie side by side, so that scores are sums over contiguous vectors: on a
    CPU that takes a third of the time of the other layout.

    Attributes:
      keys: one array [G, N, K, head_dim, S] per layer, rotated.
      values: one array [G, N, K, S, head_dim] per layer.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


class LayerWeights(NamedTuple):
    """One layer's weights in the compute dtype, those that read the same input side by side."""

    input_norm: jax.Array
    qkv: jax.Array
    q_norm: jax.Array | None
    k_norm: jax.Array | None
    o: jax.Array
    post_norm: jax.Array
    gate_up: jax.Array
    down: jax.Array


class DecodeWeights(NamedTuple):
    """The parameters laid out for decoding; made once per call of the sampler.

    The rotary angles come as tables, cosines and sines [positions, head_dim / 2] each: where they
    are computed in the loop, XLA computes them anew for every layer and head.
    """

    embed: jax.Array
    layers: tuple[LayerWeights, ...]
    final_norm: jax.Array
    angles: tuple[jax.Array, jax.Array]


def decode_weights(arch: Architecture, params: Any, positions: int) -> DecodeWeights:
    """Lay the parameters of `Transformer` out for `decode` at positions 0..positions-1.

    Adapters are multiplied out: a step reads few rows, and would read them as an extra weight.
    """
    params = merge(params)

    def layer(index: int) -> LayerWeights:
        w = {name: stacked[index] for name, stacked in params["layers"].items()}
        cast = {name: w[name].astype(arch.dtype) for name in ("q", "k", "v", "o", "gate", "up")}
        return LayerWeights(
            input_norm=w["input_norm"],
            qkv=jnp.concatenate([cast["q"], cast["k"], cast["v"]], axis=1),
            q_norm=w.get("q_norm"),
            k_norm=w.get("k_norm"),
            o=cast["o"],
            post_norm=w["post_norm"],
            gate_up=jnp.concatenate([cast["gate"], cast["up"]], axis=1),
            down=w["down"].astype(arch.dtype),
        )

    return DecodeWeights(
        embed=params["embed"].astype(arch.dtype),
        layers=tuple(layer(index) for index in range(arch.layers)),
        final_norm=params["final_norm"],
        angles=arch_angles(arch, jnp.arange(positions)),
    )


def empty_cache(arch: Architecture, groups: int, group_size: int, slots: int) -> RowCache:
    """A row cache with `slots` unwritten slots."""
    shape = (groups, group_size, arch.kv_heads)

    def per_layer(*sizes: int) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(shape + sizes, arch.dtype) for _ in range(arch.layers))

    return RowCache(keys=per_layer(arch.head_dim, slots), values=per_layer(slots, arch.head_dim))


def grow_cache(cache: RowCache, slots: int) -> RowCache:
    """The same cache with room for `slots` tokens per row."""
    more, none = (0, slots - cache.values[0].shape[3]), (0, 0)
    return RowCache(
        keys=tuple(jnp.pad(keys, (none, none, none, none, more)) for keys in cache.keys),
        values=tuple(jnp.pad(values, (none, none, none, more, none)) for values in cache.values),
    )


def take_rows(prompt: Any, rows: Any, indices: jax.Array) -> tuple[Any, Any]:
    """Some rows, each as a group of its own, of caches of any family.

    Args:
      prompt: of G groups; arrays [G, ...].
      rows: of G groups of N rows; arrays [G, N, ...].
      indices: int32 [M], each a row's place among the G*N rows.

    Returns:
      the caches of M groups of one row.
    """
    group_size = jax.tree.leaves(rows)[0].shape[1]

    def of_row(x: jax.Array) -> jax.Array:
        return x.reshape(-1, 1, *x.shape[2:])[indices]

    return (
        jax.tree.map(lambda shared: shared[indices // group_size], prompt),
        jax.tree.map(of_row, rows),
    )


def decode(
    arch: Architecture,
    weights: DecodeWeights,
    prompt: PromptCache,
    rows: RowCache,
    tokens: jax.Array,
    step: jax.Array,
) -> tuple[RowCache, jax.Array]:
    """Read one token per row and give the hidden state that predicts the next.

    Args:
      arch: the backbone's sizes.
      weights: from `decode_weights`.
      prompt: the groups' prompts.
      rows: slots 0..step-1 written.
      tokens: int32 [G, N], the rows' `step`-th own tokens.
      step: int32 scalar below the number of slots of `rows`.

    Returns:
      (rows with slot `step` written, final-normed hidden states [G, N, D]).
    """
    groups, group_size = tokens.shape
    kv_heads, head_dim = arch.kv_heads, arch.head_dim
    cos, sin = (table[prompt.lengths + step][:, None, None, :] for table in weights.angles)

    x = weights.embed[tokens]
    all_keys, all_values = [], []
    for index, w in enumerate(weights.layers):
        y = rms_norm(x, w.input_norm, eps=arch.norm_eps)
        heads = (y @ w.qkv).reshape(groups, group_size, -1, head_dim)
        queries, keys, values = jnp.split(heads, [arch.heads, arch.heads + kv_heads], axis=2)
        queries = rotate(head_norm(queries, w.q_norm, eps=arch.norm_eps), cos, sin)
        keys = rotate(head_norm(keys, w.k_norm, eps=arch.norm_eps), cos, sin)
        row_keys = jax.lax.dynamic_update_slice_in_dim(
            rows.keys[index], keys[..., None], step, axis=4
        )
        row_values = jax.lax.dynamic_update_slice_in_dim(
            rows.values[index], values[:, :, :, None], step, axis=3
        )
        all_keys.append(row_keys)
        all_values.append(row_values)
        mixed = attend_cached(
            queries.reshape(groups, group_size, kv_heads, -1, head_dim),
            (prompt.keys[index], prompt.values[index], prompt.lengths),
            (row_keys, row_values, step + 1),
        )
        x = x + mixed.reshape(groups, group_size, -1) @ w.o
        y = rms_norm(x, w.post_norm, eps=arch.norm_eps)
        gate, up = jnp.split(y @ w.gate_up, 2, axis=-1)
        x = x + (jax.nn.silu(gate) * up) @ w.down
    hidden = rms_norm(x, weights.final_norm, eps=arch.norm_eps)
    return RowCache(keys=tuple(all_keys), values=tuple(all_values)), hidden


def attend_cached(
    queries: jax.Array,
    prompt: tuple[jax.Array, jax.Array, jax.Array],
    rows: tuple[jax.Array, jax.Array, jax.Array],
) -> jax.Array:
    """Attention of queries [G, N, K, R, head_dim] over (keys, values, filled) of both caches."""
    groups, group_size, kv_heads, repeats, head_dim = queries.shape
    prompt_keys, prompt_values, prompt_filled = prompt
    row_keys, row_values, row_filled = rows
    prompt_slots, row_slots = prompt_keys.shape[2], row_values.shape[3]
    # One matrix product per group and key head: all rows of the group against the shared prompt.
    side_by_side = queries.swapaxes(1, 2).reshape(groups, kv_heads, -1, head_dim)
    on_prompt = _dot("gkmd,gkpd->gkmp", side_by_side, prompt_keys)
    on_prompt = on_prompt.reshape(groups, kv_heads, group_size, repeats, -1).swapaxes(1, 2)
    on_rows = _dot("gnkrd,gnkds->gnkrs", queries, row_keys)
    in_prompt = jnp.arange(prompt_slots) < prompt_filled[:, None, None, None, None]
    in_rows = jnp.arange(row_slots) < row_filled
    scores = jnp.concatenate(
        [jnp.where(in_prompt, on_prompt, -jnp.inf), jnp.where(in_rows, on_rows, -jnp.inf)], axis=-1
    )
    shares = jax.nn.softmax(scores * head_dim**-0.5, axis=-1).astype(queries.dtype)
    of_prompt = shares[..., :prompt_slots].swapaxes(1, 2)
    of_prompt = of_prompt.reshape(groups, kv_heads, -1, prompt_slots)
    from_prompt = _dot("gkmp,gkpd->gkmd", of_prompt, prompt_values)
    from_prompt = from_prompt.reshape(groups, kv_heads, group_size, repeats, -1).swapaxes(1, 2)
    from_rows = _dot("gnkrs,gnksd->gnkrd", shares[..., prompt_slots:], row_values)
    return (from_prompt + from_rows).astype(queries.dtype)


def _dot(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, left, right, preferred_element_type=jnp.float32)
