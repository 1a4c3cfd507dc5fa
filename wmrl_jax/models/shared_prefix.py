"""Many completions of few prompts, each prompt computed once: hidden states with gradients.

What `Model.hidden` gives on rows of prompt and completion, at about half the cost where prompts
are as long as completions, and less where the rows are packed. For dense backbones.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from wmrl_jax.models.layers import causal_attention, project, rms_norm, rotate
from wmrl_jax.models.packing import Packing, pack, unpack
from wmrl_jax.models.transformer import REMAT, Architecture, arch_angles, head_norm


def completion_states(
    arch: Architecture,
    params: Any,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    completions: jax.Array,
) -> jax.Array:
    """Final-normed hidden states that score each completion token, and the one behind the last.

    Args:
      arch: the backbone's sizes.
      params: the parameters of `Transformer`.
      prompts: int32 [G, P], padded on the right.
      prompt_lengths: int32 [G], at least 1.
      completions: int32 [G, N, S], padded on the right.

    Returns:
      [G, N, S + 1, D]: entry s has read the prompt and s completion tokens, so that its logits
      score token s.
    """
    x = _stream_states(arch, params, prompts, prompt_lengths, completions, None)
    return states_of_stream(x, prompt_lengths, prompts.shape[1], completions.shape[1])


def packed_states(
    arch: Architecture,
    params: Any,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    completions: jax.Array,
    packing: Packing,
) -> jax.Array:
    """The states [G, C, D] of `completion_states` that score the packed tokens, and no others.

    Args:
      arch: the backbone's sizes.
      params: the parameters of `Transformer`.
      prompts: int32 [G, P], padded on the right.
      prompt_lengths: int32 [G], at least 1.
      completions: int32 [G, N, S].
      packing: of the completions' tokens.
    """
    x = _stream_states(arch, params, prompts, prompt_lengths, completions, packing)
    return packed_states_of_stream(x, prompt_lengths, prompts.shape[1], completions, packing)


def _stream_states(
    arch: Architecture,
    params: Any,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    completions: jax.Array,
    packing: Packing | None,
) -> jax.Array:
    """Final-normed states [G, P + N*S or C, D] of `group_stream`."""
    groups, prompt_tokens = prompts.shape
    rows, head_dim = completions.shape[1], arch.head_dim
    tokens, positions = group_stream(prompts, prompt_lengths, completions, packing)
    cos, sin = (part[:, :, None, :] for part in arch_angles(arch, positions))

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        def onto(y: jax.Array, name: str) -> jax.Array:
            return project(y, w[name].astype(x.dtype))

        def heads(y: jax.Array, name: str) -> jax.Array:
            return onto(y, name).reshape(groups, tokens.shape[1], -1, head_dim)

        y = rms_norm(x, w["input_norm"], eps=arch.norm_eps)
        queries = head_norm(heads(y, "q"), w.get("q_norm"), eps=arch.norm_eps)
        keys = head_norm(heads(y, "k"), w.get("k_norm"), eps=arch.norm_eps)
        queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
        values = heads(y, "v")
        attended = attend_shared(
            queries, keys, values, prompt_lengths, prompt_tokens, rows, packing
        )
        x = x + onto(attended.reshape(groups, tokens.shape[1], -1), "o")
        y = rms_norm(x, w["post_norm"], eps=arch.norm_eps)
        return x + onto(jax.nn.silu(onto(y, "gate")) * onto(y, "up"), "down"), None

    block = layer
    if arch.remat != "none":
        block = jax.checkpoint(layer, prevent_cse=False, policy=REMAT[arch.remat])
    x, _ = jax.lax.scan(block, params["embed"][tokens].astype(arch.dtype), params["layers"])
    return rms_norm(x, params["final_norm"], eps=arch.norm_eps)


def group_stream(
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    completions: jax.Array,
    packing: Packing | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One stream per group: the prompt, and then the rows one behind the other.

    All but the mixing of tokens treats them alike, and wants few large matrix products.

    Returns:
      (tokens, positions), int32 [G, P + N*S], or [G, P + C] where packed; a row's positions go on
      from its prompt's.
    """
    groups, prompt_tokens = prompts.shape
    own = prompt_lengths[:, None, None] + jnp.arange(completions.shape[2])
    own = jnp.broadcast_to(own, completions.shape).reshape(groups, -1)
    written = completions.reshape(groups, -1)
    if packing is not None:
        own, written = pack(packing, own), pack(packing, written)
    read = jnp.broadcast_to(jnp.arange(prompt_tokens), (groups, prompt_tokens))
    tokens = jnp.concatenate([prompts, written], axis=1)
    return tokens, jnp.concatenate([read, own], axis=1)


def states_of_stream(
    x: jax.Array, prompt_lengths: jax.Array, prompt_tokens: int, rows: int
) -> jax.Array:
    """From states [G, P + N*S, D] of a stream those of `completion_states`, [G, N, S + 1, D]."""
    groups, _, width = x.shape
    last = jnp.take_along_axis(x, prompt_lengths[:, None, None] - 1, axis=1)[:, None]
    last = jnp.broadcast_to(last, (groups, rows, 1, width))
    return jnp.concatenate([last, x[:, prompt_tokens:].reshape(groups, rows, -1, width)], 2)


def packed_states_of_stream(
    x: jax.Array,
    prompt_lengths: jax.Array,
    prompt_tokens: int,
    completions: jax.Array,
    packing: Packing,
) -> jax.Array:
    """From states [G, P + C, D] of a packed stream those of `packed_states`, [G, C, D]."""
    last = jnp.take_along_axis(x, prompt_lengths[:, None, None] - 1, axis=1)
    before = jnp.concatenate([last, x[:, prompt_tokens:-1]], axis=1)
    first = packing.slots % completions.shape[2] == 0
    return jnp.where(first[..., None], last, before)


def attend_shared(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    prompt_lengths: jax.Array,
    prompt_tokens: int,
    rows: int,
    packing: Packing | None = None,
) -> jax.Array:
    """Attention of a stream of a prompt and the rows behind it, which see it and themselves.

    Args:
      queries: [G, P + N*S, H, head_dim], rotated; C for N*S where packed.
      keys: [G, P + N*S, K, head_dim]; `values` alike.
      values: see `keys`.
      prompt_lengths: int32 [G], real tokens of the P.
      prompt_tokens: P.
      rows: N.
      packing: of the rows' tokens; None: all slots are there.

    Returns:
      As `queries`.
    """
    (q_prompt, q), (k_prompt, k), (v_prompt, v) = (
        jnp.split(part, [prompt_tokens], axis=1) for part in (queries, keys, values)
    )
    by_prompt = causal_attention(q_prompt, k_prompt, v_prompt)
    if packing is not None:
        q, k, v = (unpack(packing, part) for part in (q, k, v))
    groups, _, heads, head_dim = q.shape
    kv_heads, new_tokens = k.shape[2], k.shape[1] // rows
    repeats = heads // kv_heads
    in_prompt = (jnp.arange(prompt_tokens) < prompt_lengths[:, None])[:, None, None, None, None]
    causal = jnp.tril(jnp.ones((new_tokens, new_tokens), bool))
    k_prompt, v_prompt = (part.swapaxes(1, 2) for part in (k_prompt, v_prompt))  # [G, K, P, dh]
    k, v = (
        part.reshape(groups, rows, new_tokens, kv_heads, head_dim).swapaxes(2, 3) for part in (k, v)
    )
    # [G, N, K, R, S, head_dim]: the queries that share a key head stand one behind the other.
    q = (q * head_dim**-0.5).reshape(groups, rows, new_tokens, kv_heads, repeats, head_dim)
    q = q.transpose(0, 1, 3, 4, 2, 5)
    by_head = q.swapaxes(1, 2).reshape(groups, kv_heads, -1, head_dim)
    on_prompt = _dot("gkmd,gkpd->gkmp", by_head, k_prompt)
    on_prompt = on_prompt.reshape(groups, kv_heads, rows, repeats, new_tokens, -1)
    on_own = _dot("gnkmd,gnkpd->gnkmp", q.reshape(groups, rows, kv_heads, -1, head_dim), k).reshape(
        groups, rows, kv_heads, repeats, new_tokens, new_tokens
    )
    scores = jnp.concatenate(
        [
            jnp.where(in_prompt, on_prompt, -jnp.inf),
            jnp.where(causal, on_own, -jnp.inf).swapaxes(1, 2),
        ],
        axis=-1,
    )
    shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)  # [G, K, N, R, S, P + S]
    on_prompt = shares[..., :prompt_tokens].reshape(groups, kv_heads, -1, prompt_tokens)
    mixed = _dot("gkmp,gkpd->gkmd", on_prompt, v_prompt)
    mixed = mixed.reshape(groups, kv_heads, rows, -1, head_dim).swapaxes(1, 2)
    on_own = shares[..., prompt_tokens:].swapaxes(1, 2)
    on_own = on_own.reshape(groups, rows, kv_heads, -1, new_tokens)
    mixed += _dot("gnkmp,gnkpd->gnkmd", on_own, v)
    mixed = mixed.reshape(groups, rows, heads, new_tokens, head_dim).swapaxes(2, 3)
    by_rows = mixed.astype(v.dtype).reshape(groups, -1, heads, head_dim)
    if packing is not None:
        by_rows = pack(packing, by_rows)
    return jnp.concatenate([by_prompt, by_rows], axis=1)


def _dot(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, left, right, preferred_element_type=jnp.float32)
