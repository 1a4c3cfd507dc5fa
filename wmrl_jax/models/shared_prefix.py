"""Many completions of few prompts, each prompt computed once: hidden states with gradients.

What `Model.hidden` gives on rows of prompt and completion, at about half the cost where prompts
are as long as completions. For backbones in the Qwen3 layout.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from wmrl_jax.models.layers import causal_attention, rms_norm, rotary_angles, rotate
from wmrl_jax.models.transformer import Architecture


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
    groups, prompt_tokens = prompts.shape
    _, rows, new_tokens = completions.shape
    kv_heads, head_dim = arch.kv_heads, arch.head_dim
    repeats = arch.heads // kv_heads
    # One stream per group, the prompt and then the rows one behind the other: all but attention
    # treats tokens alike, and wants few large matrix products.
    tokens = jnp.concatenate([prompts, completions.reshape(groups, -1)], axis=1)
    own = prompt_lengths[:, None, None] + jnp.arange(new_tokens)
    own = jnp.broadcast_to(own, (groups, rows, new_tokens)).reshape(groups, -1)
    read = jnp.broadcast_to(jnp.arange(prompt_tokens), (groups, prompt_tokens))
    cos, sin = (
        part[:, :, None, :]
        for part in rotary_angles(
            jnp.concatenate([read, own], axis=1), head_dim=head_dim, theta=arch.rope_theta
        )
    )
    in_prompt = (jnp.arange(prompt_tokens) < prompt_lengths[:, None])[:, None, None, None, None]
    causal = jnp.tril(jnp.ones((new_tokens, new_tokens), bool))

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        def matrix(name: str) -> jax.Array:
            return w[name].astype(x.dtype)

        def heads(name: str) -> jax.Array:
            return (y @ matrix(name)).reshape(groups, tokens.shape[1], -1, head_dim)

        y = rms_norm(x, w["input_norm"], eps=arch.norm_eps)
        queries = rotate(rms_norm(heads("q"), w["q_norm"], eps=arch.norm_eps), cos, sin)
        keys = rotate(rms_norm(heads("k"), w["k_norm"], eps=arch.norm_eps), cos, sin)
        values = heads("v")
        (q_prompt, q), (k_prompt, k), (v_prompt, v) = (
            jnp.split(part, [prompt_tokens], axis=1) for part in (queries, keys, values)
        )
        by_prompt = causal_attention(q_prompt, k_prompt, v_prompt)
        q = q.reshape(groups, rows, new_tokens, kv_heads, repeats, head_dim)
        k, v = (part.reshape(groups, rows, new_tokens, kv_heads, head_dim) for part in (k, v))
        scores = jnp.concatenate(
            [
                jnp.where(in_prompt, _dot("gnskrd,gpkd->gknrsp", q, k_prompt), -jnp.inf),
                jnp.where(causal, _dot("gnskrd,gntkd->gknrst", q, k), -jnp.inf),
            ],
            axis=-1,
        )
        shares = jax.nn.softmax(scores * head_dim**-0.5, axis=-1).astype(x.dtype)
        mixed = _dot("gknrsp,gpkd->gnskrd", shares[..., :prompt_tokens], v_prompt)
        mixed += _dot("gknrst,gntkd->gnskrd", shares[..., prompt_tokens:], v)
        attended = jnp.concatenate(
            [
                by_prompt.reshape(groups, prompt_tokens, -1),
                mixed.astype(x.dtype).reshape(groups, rows * new_tokens, -1),
            ],
            axis=1,
        )
        x = x + attended @ matrix("o")
        y = rms_norm(x, w["post_norm"], eps=arch.norm_eps)
        return x + (jax.nn.silu(y @ matrix("gate")) * (y @ matrix("up"))) @ matrix("down"), None

    block = jax.checkpoint(layer, prevent_cse=False) if arch.remat != "none" else layer
    x, _ = jax.lax.scan(block, params["embed"][tokens].astype(arch.dtype), params["layers"])
    x = rms_norm(x, params["final_norm"], eps=arch.norm_eps)
    last = jnp.take_along_axis(x, prompt_lengths[:, None, None] - 1, axis=1)[:, None]
    last = jnp.broadcast_to(last, (groups, rows, 1, arch.width))
    return jnp.concatenate([last, x[:, prompt_tokens:].reshape(groups, rows, new_tokens, -1)], 2)


def _dot(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, left, right, preferred_element_type=jnp.float32)
