"""The two mixers of Qwen3.5: gated attention, and linear attention by the gated delta rule.

Each comes in the forms that the project needs: over a sequence, over a prompt and the rows behind
it, and for one more token. Weights are one layer's, as `qwen3_5` names them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from wmrl_jax.models.decoding import attend_cached
from wmrl_jax.models.delta_rule import delta_rule, delta_step
from wmrl_jax.models.layers import causal_attention, project, rms_norm, rotary_angles, rotate
from wmrl_jax.models.packing import Packing, pack, unpack
from wmrl_jax.models.shared_prefix import attend_shared

Weights = dict[str, jax.Array]

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class HybridArchitecture:
    """Sizes and options of a hybrid backbone.

    Attributes:
      rotary_dim: leading dimensions of a head that are rotated.
      linear_key_heads: heads of keys and queries; each serves as many of `linear_value_heads`.
      layer_types: `LINEAR` or `FULL`, for each layer.
    """

    vocab_size: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float
    rotary_dim: int
    norm_eps: float
    tied_embeddings: bool
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    conv_width: int
    layer_types: tuple[str, ...]
    dtype: str
    remat: str = "matmuls"

    @property
    def period(self) -> int:
        """Layers after which their types repeat."""
        types, count = self.layer_types, len(self.layer_types)
        return next(
            p for p in range(1, count + 1) if count % p == 0 and types == types[:p] * (count // p)
        )

    def place(self, layer: int) -> tuple[str, int]:
        """Of a layer its place in the pattern, as the parameters name it, and its repetition."""
        return str(layer % self.period), layer // self.period

    @property
    def key_width(self) -> int:
        """Of all linear keys together."""
        return self.linear_key_heads * self.linear_key_dim

    @property
    def value_width(self) -> int:
        """Of all linear values together."""
        return self.linear_value_heads * self.linear_value_dim

    @property
    def conv_channels(self) -> int:
        """Inputs of the short convolution, C: linear queries, keys and values."""
        return 2 * self.key_width + self.value_width


class LinearState(NamedTuple):
    """What linear attention remembers of a text.

    Attributes:
      recent: [..., conv_width - 1, C], the last inputs of the convolution, the newest last.
      matrix: float32 [..., H, dk, dv].
    """

    recent: jax.Array
    matrix: jax.Array


class KeysValues(NamedTuple):
    """Rotated keys and values, [..., T, K, head_dim] each."""

    keys: jax.Array
    values: jax.Array


def centred_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """`rms_norm` whose scale is kept as its difference from one."""
    return rms_norm(x, 1.0 + scale, eps=eps)


def angles_of(arch: HybridArchitecture, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [..., 1, rotary_dim / 2], to broadcast over heads."""
    cos, sin = rotary_angles(positions, head_dim=arch.rotary_dim, theta=arch.rope_theta)
    return cos[..., None, :], sin[..., None, :]


def _queries_keys_values(
    arch: HybridArchitecture, w: Weights, y: jax.Array, angles: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(queries, keys, values) [..., heads, head_dim], rotated, and the gate [..., H*head_dim]."""

    def heads(name: str) -> jax.Array:
        return project(y, w[name].astype(y.dtype)).reshape(*y.shape[:-1], -1, arch.head_dim)

    def turned(x: jax.Array, scale: jax.Array) -> jax.Array:
        x = centred_norm(x, scale, arch.norm_eps)
        part = rotate(x[..., : arch.rotary_dim], *angles)
        return jnp.concatenate([part, x[..., arch.rotary_dim :]], axis=-1)

    # Published side by side in each head: its query, then its gate.
    both = heads("q").reshape(*y.shape[:-1], arch.heads, 2, arch.head_dim)
    queries, gate = both[..., 0, :], both[..., 1, :]
    gate = gate.reshape(*y.shape[:-1], -1)
    return turned(queries, w["q_norm"]), turned(heads("k"), w["k_norm"]), heads("v"), gate


def _gated_output(w: Weights, mixed: jax.Array, gate: jax.Array) -> jax.Array:
    mixed = mixed.reshape(gate.shape) * jax.nn.sigmoid(gate)
    return project(mixed, w["o"].astype(mixed.dtype))


def attention(
    arch: HybridArchitecture,
    w: Weights,
    y: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    segments: jax.Array | None = None,
) -> tuple[jax.Array, KeysValues]:
    """Gated attention over [B, T, D]; also what a cache needs."""
    queries, keys, values, gate = _queries_keys_values(arch, w, y, angles)
    mixed = causal_attention(queries, keys, values, segments)
    return _gated_output(w, mixed, gate), KeysValues(keys, values)


def attention_of_rows(
    arch: HybridArchitecture,
    w: Weights,
    y: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    prompt_lengths: jax.Array,
    prompt_tokens: int,
    rows: int,
    packing: Packing | None = None,
) -> jax.Array:
    """Gated attention over the stream [G, P + N*S or C, D] of `shared_prefix.group_stream`."""
    queries, keys, values, gate = _queries_keys_values(arch, w, y, angles)
    mixed = attend_shared(queries, keys, values, prompt_lengths, prompt_tokens, rows, packing)
    return _gated_output(w, mixed, gate)


def attention_step(
    arch: HybridArchitecture,
    w: Weights,
    y: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    prompt: tuple[jax.Array, jax.Array, jax.Array],
    rows: tuple[jax.Array, jax.Array],
    step: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One token of each row, y [G, N, D]; caches as in `decoding`."""
    groups, group_size, _ = y.shape
    queries, keys, values, gate = _queries_keys_values(arch, w, y, angles)
    row_keys = jax.lax.dynamic_update_slice_in_dim(rows[0], keys[..., None], step, axis=4)
    row_values = jax.lax.dynamic_update_slice_in_dim(rows[1], values[:, :, :, None], step, axis=3)
    by_key = queries.reshape(groups, group_size, arch.kv_heads, -1, arch.head_dim)
    mixed = attend_cached(by_key, prompt, (row_keys, row_values, step + 1))
    return _gated_output(w, mixed, gate), (row_keys, row_values)


def linear_attention(
    arch: HybridArchitecture,
    w: Weights,
    y: jax.Array,
    *,
    state: LinearState | None = None,
    segments: jax.Array | None = None,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, LinearState]:
    """Linear attention over [B, T, D].

    Args:
      arch: sizes.
      w: one layer's weights.
      y: normalised inputs.
      state: before the first token; None: nothing was read.
      segments: int32 [B, T]; where they change, nothing was read before.
      lengths: int32 [B]; tokens behind them are padding and leave the state alone.

    Returns:
      ([B, T, D], the state behind the last real token).
    """
    batch, time, _ = y.shape
    taps = arch.conv_width
    inputs = project(y, w["qkv"].astype(y.dtype))
    if state is None:
        recent = jnp.zeros((batch, taps - 1, inputs.shape[-1]), y.dtype)
    else:
        recent = state.recent
    padded = jnp.concatenate([recent, inputs], axis=1)
    shifted = [padded[:, tap : tap + time] for tap in range(taps)]  # the oldest first
    if segments is not None:
        before = jnp.pad(segments, ((0, 0), (taps - 1, 0)), mode="edge")
        same = [before[:, tap : tap + time] == segments for tap in range(taps)]
        shifted = [jnp.where(s[..., None], x, 0) for s, x in zip(same, shifted, strict=True)]
    q, k, v, log_decay, rate = _rule_inputs(arch, w, y, _convolved(w, shifted))
    if lengths is not None:
        real = (jnp.arange(time) < lengths[:, None])[..., None]
        log_decay, rate = jnp.where(real, log_decay, 0.0), jnp.where(real, rate, 0.0)
    starts = None
    if segments is not None:
        starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    matrix = None if state is None else state.matrix
    out, matrix = delta_rule(q, k, v, log_decay, rate, matrix, starts=starts)
    ends = jnp.full((batch,), time) if lengths is None else lengths
    places = ends[:, None] + jnp.arange(taps - 1)
    recent = jnp.take_along_axis(padded, places[..., None], axis=1)
    return _linear_output(arch, w, y, out), LinearState(recent, matrix)


def linear_attention_of_rows(
    arch: HybridArchitecture,
    w: Weights,
    y: jax.Array,
    prompt_lengths: jax.Array,
    prompt_tokens: int,
    rows: int,
    packing: Packing | None = None,
) -> jax.Array:
    """Linear attention over a stream; every row goes on from the state behind its prompt."""
    groups, _, width = y.shape
    by_prompt, state = linear_attention(arch, w, y[:, :prompt_tokens], lengths=prompt_lengths)
    state = jax.tree.map(lambda x: jnp.repeat(x, rows, axis=0), state)
    own = y[:, prompt_tokens:]
    if packing is not None:
        own = unpack(packing, own)
    by_rows, _ = linear_attention(arch, w, own.reshape(groups * rows, -1, width), state=state)
    by_rows = by_rows.reshape(groups, -1, width)
    if packing is not None:
        by_rows = pack(packing, by_rows)
    return jnp.concatenate([by_prompt, by_rows], axis=1)


def linear_attention_step(
    arch: HybridArchitecture, w: Weights, y: jax.Array, state: LinearState
) -> tuple[jax.Array, LinearState]:
    """One token of each row, y [..., D] and a state of the same leading axes."""
    inputs = project(y, w["qkv"].astype(y.dtype))
    window = jnp.concatenate([state.recent, inputs[..., None, :]], axis=-2)
    taps = [window[..., tap, :] for tap in range(arch.conv_width)]
    q, k, v, log_decay, rate = _rule_inputs(arch, w, y, _convolved(w, taps))
    matrix, out = delta_step(state.matrix, q, k, v, log_decay, rate)
    return _linear_output(arch, w, y, out), LinearState(window[..., 1:, :], matrix)


def _convolved(w: Weights, taps: list[jax.Array]) -> jax.Array:
    """The short convolution and its activation, of inputs [..., C] with the oldest first.

    Summed in float32 and in one order, so that sampling and training round alike.
    """
    kernel = w["conv"].astype(jnp.float32)
    summed = sum(x.astype(jnp.float32) * kernel[:, tap] for tap, x in enumerate(taps))
    return jax.nn.silu(summed).astype(taps[-1].dtype)


def _rule_inputs(
    arch: HybridArchitecture, w: Weights, y: jax.Array, mixed: jax.Array
) -> tuple[jax.Array, ...]:
    """Queries, keys, values, log decay and rate of the delta rule, for each value head."""
    q, k, v = jnp.split(mixed, [arch.key_width, 2 * arch.key_width], axis=-1)
    repeats = arch.linear_value_heads // arch.linear_key_heads

    def unit(x: jax.Array) -> jax.Array:
        x = x.reshape(*x.shape[:-1], arch.linear_key_heads, arch.linear_key_dim)
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
        return jnp.repeat(x, repeats, axis=-2)

    v = v.reshape(*v.shape[:-1], arch.linear_value_heads, arch.linear_value_dim)
    rate = jax.nn.sigmoid(project(y, w["b"].astype(y.dtype)))
    softened = jax.nn.softplus(
        project(y, w["a"].astype(y.dtype)).astype(jnp.float32) + w["dt_bias"]
    )
    log_decay = -jnp.exp(w["a_log"].astype(jnp.float32)) * softened
    return unit(q) * arch.linear_key_dim**-0.5, unit(k), v, log_decay, rate


def _linear_output(arch: HybridArchitecture, w: Weights, y: jax.Array, out: jax.Array) -> jax.Array:
    gate = project(y, w["z"].astype(y.dtype)).reshape(out.shape)
    normed = rms_norm(out, w["norm"], eps=arch.norm_eps) * jax.nn.silu(gate.astype(jnp.float32))
    flat = normed.astype(y.dtype).reshape(*y.shape[:-1], -1)
    return project(flat, w["out"].astype(y.dtype))


def swiglu(w: Weights, y: jax.Array) -> jax.Array:
    """The feed-forward half of a layer."""

    def onto(x: jax.Array, name: str) -> Any:
        return project(x, w[name].astype(x.dtype))

    return onto(jax.nn.silu(onto(y, "gate")) * onto(y, "up"), "down")
