"""The dense decoder-only transformer of the Qwen3 and Llama families, with scanned layers.

RMSNorm before each half, rotary embedding, grouped-query attention, with query and key norm or
without, SwiGLU. The parameter tree keeps one array per published weight, stacked over layers:

    embed [V, D]
    layers/ input_norm [L, D]  post_norm [L, D]
            q_norm, k_norm [L, head_dim]  only with `qk_norm`
            q [L, D, H*head_dim]  k, v [L, D, K*head_dim]  o [L, H*head_dim, D]
            gate, up [L, D, F]  down [L, F, D]
    final_norm [D]
    head [D, V]                   only where the embeddings are not tied
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen as nn

from wmrl_jax.models.layers import (
    RotaryScaling,
    causal_attention,
    project,
    rms_norm,
    rotary_angles,
    rotate,
)

REMAT = {
    "none": jax.checkpoint_policies.everything_saveable,
    "matmuls": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "layers": jax.checkpoint_policies.nothing_saveable,
}
"""What a layer keeps for the backward pass: everything; the products with its weights; nothing.

Measured on a CPU at 16 rows of 256 tokens, width 256: "matmuls" takes 0.8 of the time and a third
of the memory of "none", because attention is cheaper to repeat than to write and read again."""


@dataclass(frozen=True)
class Architecture:
    """Sizes and options of a dense backbone; F is `mlp_width`."""

    vocab_size: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float
    norm_eps: float
    tied_embeddings: bool
    dtype: str  # of the compute; parameters are float32
    remat: str = "matmuls"  # what the backward pass recomputes, one of `REMAT`
    qk_norm: bool = True  # queries and keys are normalised per head (Qwen3)
    rope_scaling: RotaryScaling | None = None


def head_norm(x: jax.Array, scale: jax.Array | None, *, eps: float) -> jax.Array:
    """`rms_norm` of heads where the family has one."""
    return x if scale is None else rms_norm(x, scale, eps=eps)


class Block(nn.Module):
    """One layer: attention and SwiGLU, each behind a norm, each added to the stream."""

    arch: Architecture

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        segments: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Map the stream [B, T, D] on; also gives the rotated keys and the values [B, T, K, dh]."""
        a = self.arch
        batch, time, _ = x.shape
        dtype = x.dtype
        q_width, kv_width = a.heads * a.head_dim, a.kv_heads * a.head_dim
        fan_in = nn.initializers.lecun_normal()
        # Each of the two additions per layer starts at 1 / (2L) of the stream's variance.
        into_stream = nn.initializers.variance_scaling(0.5 / a.layers, "fan_in", "truncated_normal")
        ones = nn.initializers.ones_init()

        q = self.param("q", fan_in, (a.width, q_width)).astype(dtype)
        k = self.param("k", fan_in, (a.width, kv_width)).astype(dtype)
        v = self.param("v", fan_in, (a.width, kv_width)).astype(dtype)
        o = self.param("o", into_stream, (q_width, a.width)).astype(dtype)
        gate = self.param("gate", fan_in, (a.width, a.mlp_width)).astype(dtype)
        up = self.param("up", fan_in, (a.width, a.mlp_width)).astype(dtype)
        down = self.param("down", into_stream, (a.mlp_width, a.width)).astype(dtype)
        input_norm = self.param("input_norm", ones, (a.width,))
        post_norm = self.param("post_norm", ones, (a.width,))
        q_norm, k_norm = (
            self.param(name, ones, (a.head_dim,)) if a.qk_norm else None
            for name in ("q_norm", "k_norm")
        )

        cos, sin = (part[..., None, :] for part in angles)
        y = rms_norm(x, input_norm, eps=a.norm_eps)
        queries = project(y, q).reshape(batch, time, a.heads, a.head_dim)
        keys = project(y, k).reshape(batch, time, a.kv_heads, a.head_dim)
        values = project(y, v).reshape(batch, time, a.kv_heads, a.head_dim)
        queries = rotate(head_norm(queries, q_norm, eps=a.norm_eps), cos, sin)
        keys = rotate(head_norm(keys, k_norm, eps=a.norm_eps), cos, sin)
        mixed = causal_attention(queries, keys, values, segments).reshape(batch, time, q_width)
        x = x + project(mixed, o)
        y = rms_norm(x, post_norm, eps=a.norm_eps)
        x = x + project(nn.silu(project(y, gate)) * project(y, up), down)
        return x, (keys, values)


def arch_angles(arch: Architecture, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rotary cosines and sines of an architecture, see `layers.rotary_angles`."""
    return rotary_angles(
        positions, head_dim=arch.head_dim, theta=arch.rope_theta, scaling=arch.rope_scaling
    )


class Transformer(nn.Module):
    """Token ids to final-normed hidden states."""

    arch: Architecture

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Run all layers.

        Args:
          tokens: int32 [B, T].
          positions: int32 [B, T]; None: 0, 1, ....
          segments: int32 [B, T], see `layers.causal_attention`; padding on the right needs none.

        Returns:
          (hidden, (keys, values)): [B, T, D], and [L, B, T, K, head_dim] each.
        """
        a = self.arch
        embed = self.param("embed", nn.initializers.normal(0.02), (a.vocab_size, a.width))
        if not a.tied_embeddings:
            self.param("head", nn.initializers.normal(0.02), (a.width, a.vocab_size))
        block = Block
        if a.remat != "none":
            block = nn.remat(Block, prevent_cse=False, policy=REMAT[a.remat])
        layers = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]
            length=a.layers,
        )(a, name="layers")
        angles = arch_angles(a, jnp.arange(tokens.shape[1]) if positions is None else positions)
        x, caches = layers(embed[tokens].astype(a.dtype), angles, segments)
        scale = self.param("final_norm", nn.initializers.ones_init(), (a.width,))
        return rms_norm(x, scale, eps=a.norm_eps), caches
