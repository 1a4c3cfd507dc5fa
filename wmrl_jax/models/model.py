"""A backbone as a frozen record of pure functions: what the rest of the project sees of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp

from wmrl_jax.errors import UserError
from wmrl_jax.models.decoding import (
    PromptCache,
    decode,
    decode_weights,
    empty_cache,
    grow_cache,
    take_rows,
)
from wmrl_jax.models.packing import Packing
from wmrl_jax.models.shared_prefix import completion_states, packed_states
from wmrl_jax.models.transformer import REMAT, Architecture, Transformer


class HiddenFn(Protocol):
    """See `Model.hidden`."""

    def __call__(  # noqa: D102
        self,
        params: Any,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> jax.Array: ...


class BackboneConfig(Protocol):
    """The fields of a model's configuration that shape its backbone."""

    @property
    def layers(self) -> int: ...  # noqa: D102
    @property
    def width(self) -> int: ...  # noqa: D102
    @property
    def heads(self) -> int: ...  # noqa: D102
    @property
    def kv_heads(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102
    @property
    def mlp_width(self) -> int: ...  # noqa: D102
    @property
    def rope_theta(self) -> float: ...  # noqa: D102
    @property
    def norm_eps(self) -> float: ...  # noqa: D102
    @property
    def tied_embeddings(self) -> bool: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102


@dataclass(frozen=True)
class Model:
    """Pure functions of one backbone; `params` is the same pytree in all of them.

    Attributes:
      arch: sizes and options; every family's has `vocab_size`, `layers`, `width`, `dtype`, `remat`.
      init: key -> params, float32.
      hidden: (params, tokens int32 [B, T], positions=None, segments=None) -> final-normed hidden
        states [B, T, D]. Padding on the right needs nothing. With `segments` int32 [B, T] a token
        reads earlier ones of its own segment only, and `positions` int32 [B, T] start anew in each:
        so texts are packed, and padding on the left is a segment of its own.
      completion_states: (params, prompts int32 [G, P], prompt_lengths [G], completions [G, N, S])
        -> [G, N, S + 1, D]: entry s has read the prompt and s completion tokens; each prompt is
        computed once. Padding is on the right.
      packed_states: (params, prompts, prompt_lengths, completions, `Packing` of their tokens) ->
        [G, C, D]: the states that score the packed tokens; padding is not computed.
      unembedding: params -> [D, V]; `hidden @ unembedding` are the logits.
      prefill: (params, tokens int32 [G, P], lengths int32 [G]) -> (prompt cache, hidden state of
        each prompt's last token [G, D]).
      decode_weights: (params, positions) -> the weights as `decode` reads them, for rows of at most
        `positions` tokens.
      empty_cache: (groups, group_size, slots) -> row cache with no slot written.
      grow_cache: (row cache, slots) -> the same with more slots.
      take_rows: (prompt cache, row cache, indices int32 [M] among the G*N rows) -> the caches of
        these rows alone, as M groups of one row.
      decode: (decode weights, prompt cache, row cache, tokens int32 [G, N], step) -> (row cache
        with slot `step` written, hidden states [G, N, D]).
    """

    arch: Any
    init: Callable[[jax.Array], Any]
    hidden: HiddenFn
    completion_states: Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]
    packed_states: Callable[[Any, jax.Array, jax.Array, jax.Array, Packing], jax.Array]
    unembedding: Callable[[Any], jax.Array]
    prefill: Callable[[Any, jax.Array, jax.Array], tuple[Any, jax.Array]]
    decode_weights: Callable[[Any, int], Any]
    empty_cache: Callable[[int, int, int], Any]
    grow_cache: Callable[[Any, int], Any]
    take_rows: Callable[[Any, Any, jax.Array], tuple[Any, Any]]
    decode: Callable[[Any, Any, Any, jax.Array, jax.Array], tuple[Any, jax.Array]]


def build_model(config: BackboneConfig, vocab_size: int, *, remat: str = "matmuls") -> Model:
    """The Qwen3-layout model of a configuration, to be trained from scratch.

    Args:
      config: any record with the fields of `BackboneConfig`, `train.config.ModelConfig` say.
      vocab_size: the tokenizer's; rows of the embedding.
      remat: what the backward pass recomputes, one of `transformer.REMAT`.

    Raises:
      UserError: sizes that do not fit together, or an unknown `remat`.
    """
    arch = Architecture(
        vocab_size=vocab_size,
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        mlp_width=config.mlp_width,
        rope_theta=config.rope_theta,
        norm_eps=config.norm_eps,
        tied_embeddings=config.tied_embeddings,
        dtype=config.dtype,
        remat=remat,
    )
    return make_dense(arch)


def make_dense(arch: Architecture) -> Model:
    """The model of a dense architecture.

    Raises:
      UserError: sizes that do not fit together, or an unknown `remat`.
    """
    _check(arch)
    module = Transformer(arch)

    def init(key: jax.Array) -> Any:
        return module.init(key, jnp.zeros((1, 1), jnp.int32))["params"]

    def hidden(
        params: Any,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> jax.Array:
        return cast(Any, module.apply({"params": params}, tokens, positions, segments))[0]

    def unembedding(params: Any) -> jax.Array:
        weights = params["embed"].T if arch.tied_embeddings else params["head"]
        return weights.astype(arch.dtype)

    def prefill(params: Any, tokens: jax.Array, lengths: jax.Array) -> tuple[Any, jax.Array]:
        states, (keys, values) = cast(Any, module.apply({"params": params}, tokens))
        last = jnp.take_along_axis(states, lengths[:, None, None] - 1, axis=1)[:, 0]

        def per_layer(stacked: Any) -> tuple[jax.Array, ...]:
            return tuple(layer.swapaxes(1, 2) for layer in stacked)

        return PromptCache(per_layer(keys), per_layer(values), lengths), last

    return Model(
        arch=arch,
        init=jax.jit(init),
        hidden=hidden,
        completion_states=partial(completion_states, arch),
        packed_states=partial(packed_states, arch),
        unembedding=unembedding,
        prefill=prefill,
        decode_weights=partial(decode_weights, arch),
        empty_cache=partial(empty_cache, arch),
        grow_cache=grow_cache,
        take_rows=take_rows,
        decode=partial(decode, arch),
    )


def _check(arch: Architecture) -> None:
    for name in ("vocab_size", "layers", "width", "heads", "kv_heads", "head_dim", "mlp_width"):
        if getattr(arch, name) < 1:
            raise UserError(f"model.{name} must be at least 1, not {getattr(arch, name)}")
    if arch.remat not in REMAT:
        raise UserError(f"remat must be one of {', '.join(REMAT)}, not {arch.remat!r}")
    if arch.heads % arch.kv_heads:
        raise UserError(
            f"model.heads ({arch.heads}) must be a multiple of model.kv_heads ({arch.kv_heads})"
        )
    if arch.head_dim % 2:
        raise UserError(f"model.head_dim must be even for rotary embedding, not {arch.head_dim}")
