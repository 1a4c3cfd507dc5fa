"""Compact rows, taken apart at the end of their prompts and put together again, in compiled code.

The rows of a group share their prompt, so models compute it once: they want prompts [G, P] and
what follows, [G, N, T - P], apart.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from wmrl_jax.types import Rollouts


def prompt_lengths_of(loss_mask: jax.Array, prompt_tokens: int) -> jax.Array:
    """Length int32 [G] of each group's shared prompt: what stands before its first written token.

    Args:
      loss_mask: bool [G, N, T].
      prompt_tokens: P; a group without a written token counts as a full prompt.
    """
    written = jnp.any(loss_mask, axis=1)
    first = jnp.where(jnp.any(written, axis=-1), jnp.argmax(written, axis=-1), prompt_tokens)
    return jnp.clip(first, 1, prompt_tokens).astype(jnp.int32)


def split_rows(
    rows: jax.Array, prompt_lengths: jax.Array, prompt_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """Takes rows apart.

    Args:
      rows: [G, N, T], one entry per token: ids, masks or log-probs.
      prompt_lengths: int32 [G], at most `prompt_tokens`.
      prompt_tokens: P.

    Returns:
      (prompts [G, P] from each group's first row, suffixes [G, N, T - P]). A prompt's entries
      behind its length are the beginning of a suffix and mean nothing.
    """
    slots = prompt_lengths[:, None, None] + jnp.arange(rows.shape[-1] - prompt_tokens)
    slots = jnp.broadcast_to(slots, (*rows.shape[:2], slots.shape[-1]))
    return rows[:, 0, :prompt_tokens], jnp.take_along_axis(rows, slots, axis=-1)


def join_rows(suffixes: jax.Array, prompt_lengths: jax.Array, prompt_tokens: int) -> jax.Array:
    """Puts suffixes [G, N, S] back to where they stand in compact rows [G, N, P + S].

    Entries outside a suffix repeat its nearest entry; mask them.
    """
    length = suffixes.shape[-1]
    slots = jnp.arange(prompt_tokens + length) - prompt_lengths[:, None, None]
    slots = jnp.broadcast_to(
        jnp.clip(slots, 0, length - 1), (*suffixes.shape[:2], prompt_tokens + length)
    )
    return jnp.take_along_axis(suffixes, slots, axis=-1)


def compact_rollouts(
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    *,
    tokens: jax.Array,
    logprobs: jax.Array,
    written: jax.Array,
    finished: jax.Array,
    pad_id: int,
) -> Rollouts:
    """Puts each completion directly behind its prompt.

    Args:
      prompts: int32 [G, P], padded on the right.
      prompt_lengths: int32 [G].
      tokens: int32 [G, N, S], the completions.
      logprobs: float32 [G, N, S], of these tokens.
      written: int32 [G, N], tokens of each completion.
      finished: bool [G, N].
      pad_id: fills rows behind their end.
    """
    new_tokens = tokens.shape[2]
    lengths = prompt_lengths[:, None] + written
    slots = jnp.arange(prompts.shape[1] + new_tokens)
    in_prompt = slots < prompt_lengths[:, None, None]
    loss_mask = ~in_prompt & (slots < lengths[..., None])
    source = jnp.clip(slots - prompt_lengths[:, None, None], 0, new_tokens - 1)
    source = jnp.broadcast_to(source, loss_mask.shape)
    padded = jnp.pad(prompts, ((0, 0), (0, new_tokens)))[:, None]
    tokens = jnp.take_along_axis(tokens, source, axis=2)
    return Rollouts(
        tokens=jnp.where(in_prompt, padded, jnp.where(loss_mask, tokens, pad_id)),
        loss_mask=loss_mask,
        behaviour_logprobs=jnp.where(loss_mask, jnp.take_along_axis(logprobs, source, axis=2), 0.0),
        prompt_lengths=prompt_lengths.astype(jnp.int32),
        lengths=lengths,
        finished=finished,
    )
