"""One new token per row for Qwen3.5: cached keys and values, and states that are carried on.

As in `decoding`, a prompt is computed once per group and the layers are written out. A layer of
full attention caches keys and values as there; one of linear attention keeps its `LinearState`:
that behind the prompt, which the rows of a group share, and from step 0 on each row's own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from wmrl_jax.models import qwen3_5_layers as mixers
from wmrl_jax.models.lora import merge
from wmrl_jax.models.qwen3_5_layers import LINEAR, HybridArchitecture, LinearState


class PromptCache(NamedTuple):
    """What a group's rows share.

    Attributes:
      layers: for each layer `LinearState` [G, ...] behind the last real token, or rotated keys and
        values [G, K, P, head_dim].
      lengths: int32 [G], real tokens of each prompt.
    """

    layers: tuple[Any, ...]
    lengths: jax.Array


class DecodeWeights(NamedTuple):
    """The parameters laid out for decoding: matrices in the compute dtype, rotary angles as tables.

    Attributes:
      embed: [V, D].
      layers: one dict a layer.
      final_norm: [D].
      angles: cosines and sines, float32 [positions, 1, rotary_dim / 2] each.
    """

    embed: jax.Array
    layers: tuple[mixers.Weights, ...]
    final_norm: jax.Array
    angles: tuple[jax.Array, jax.Array]


def prompt_cache(
    arch: HybridArchitecture, caches: dict[str, Any], lengths: jax.Array
) -> PromptCache:
    """The cache of prompts from what the layers gave, by place, stacked over repetitions."""

    def of_layer(index: int) -> Any:
        place, repetition = arch.place(index)
        cache = jax.tree.map(lambda x: x[repetition], caches[place])
        if arch.layer_types[index] == LINEAR:
            return cache
        return tuple(x.swapaxes(1, 2) for x in cache)

    return PromptCache(tuple(of_layer(i) for i in range(arch.layers)), lengths)


def decode_weights(arch: HybridArchitecture, params: Any, positions: int) -> DecodeWeights:
    """Lay the parameters out for `decode` at positions 0..positions-1; adapters are merged."""
    params = merge(params)

    def of_layer(index: int) -> mixers.Weights:
        place, repetition = arch.place(index)
        stacked = params["layers"][place]
        return {
            # The convolution is summed in float32, and its few weights stay so.
            name: w[repetition].astype(arch.dtype)
            if w.ndim == 3 and name != "conv"
            else w[repetition]
            for name, w in stacked.items()
        }

    return DecodeWeights(
        embed=params["embed"].astype(arch.dtype),
        layers=tuple(of_layer(i) for i in range(arch.layers)),
        final_norm=params["final_norm"],
        angles=mixers.angles_of(arch, jnp.arange(positions)),
    )


def empty_cache(
    arch: HybridArchitecture, groups: int, group_size: int, slots: int
) -> tuple[Any, ...]:
    """A row cache with `slots` unwritten slots.

    One entry a layer: `LinearState` [G, N, ...], or keys [G, N, K, head_dim, S] and values
    [G, N, K, S, head_dim] as in `decoding.RowCache`.
    """
    rows = (groups, group_size)
    matrix = (arch.linear_value_heads, arch.linear_key_dim, arch.linear_value_dim)

    def of_layer(kind: str) -> Any:
        if kind == LINEAR:
            recent = jnp.zeros((*rows, arch.conv_width - 1, arch.conv_channels), arch.dtype)
            return LinearState(recent, jnp.zeros((*rows, *matrix), jnp.float32))
        return (
            jnp.zeros((*rows, arch.kv_heads, arch.head_dim, slots), arch.dtype),
            jnp.zeros((*rows, arch.kv_heads, slots, arch.head_dim), arch.dtype),
        )

    return tuple(of_layer(kind) for kind in arch.layer_types)


def grow_cache(arch: HybridArchitecture, cache: tuple[Any, ...], slots: int) -> tuple[Any, ...]:
    """The same cache with room for `slots` tokens per row; states need none."""

    def of_layer(kind: str, held: Any) -> Any:
        if kind == LINEAR:
            return held
        keys, values = held
        more = (0, slots - keys.shape[-1])
        return (
            jnp.pad(keys, [(0, 0)] * 4 + [more]),
            jnp.pad(values, [(0, 0)] * 3 + [more, (0, 0)]),
        )

    return tuple(map(of_layer, arch.layer_types, cache))


def decode(
    arch: HybridArchitecture,
    weights: DecodeWeights,
    prompt: PromptCache,
    rows: tuple[Any, ...],
    tokens: jax.Array,
    step: jax.Array,
) -> tuple[tuple[Any, ...], jax.Array]:
    """Read one token per row and give the hidden state that predicts the next.

    Args:
      arch: the backbone's sizes.
      weights: from `decode_weights`.
      prompt: the groups' prompts.
      rows: slots 0..step-1 written, and the states behind them; at step 0 those of the prompt.
      tokens: int32 [G, N], the rows' `step`-th own tokens.
      step: int32 scalar below the number of slots of `rows`.

    Returns:
      (rows with this token read, final-normed hidden states [G, N, D]).
    """
    x = weights.embed[tokens]
    cos, sin = (table[prompt.lengths + step][:, None] for table in weights.angles)
    read = []
    for kind, w, shared, own in zip(
        arch.layer_types, weights.layers, prompt.layers, rows, strict=True
    ):
        y = mixers.centred_norm(x, w["input_norm"], arch.norm_eps)
        if kind == LINEAR:
            state = jax.tree.map(lambda p, r: jnp.where(step == 0, p[:, None], r), shared, own)
            mixed, kept = mixers.linear_attention_step(arch, w, y, state)
        else:
            cached = (*shared, prompt.lengths)
            mixed, kept = mixers.attention_step(arch, w, y, (cos, sin), cached, own, step)
        read.append(kept)
        x = x + mixed
        x = x + mixers.swiglu(w, mixers.centred_norm(x, w["post_norm"], arch.norm_eps))
    return tuple(read), mixers.centred_norm(x, weights.final_norm, arch.norm_eps)
