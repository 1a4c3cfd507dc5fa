"""Qwen3.5, the text path: layers of linear and of full attention in a repeating pattern.

Gated delta-rule linear attention behind a short convolution, gated full attention with partial
rotary embedding, zero-centred norms. The layers are scanned over the repetitions of the pattern;
the parameter tree has one stack for each place in it:

    embed [V, D]
    layers/<place>/ input_norm [n, D]  post_norm [n, D]  gate, up [n, D, F]  down [n, F, D]
        full:       q [n, D, 2*H*head_dim]  k, v [n, D, K*head_dim]  o [n, H*head_dim, D]
                    q_norm, k_norm [n, head_dim]
        linear:     qkv [n, D, C]  conv [n, C, taps]  z [n, D, Hv*dv]  a, b [n, D, Hv]
                    a_log, dt_bias [n, Hv]  norm [n, dv]  out [n, Hv*dv, D]
    final_norm [D]
    head [D, V]                     only where the embeddings are not tied

The vision tower and the head that predicts further tokens are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from wmrl_jax.errors import UserError
from wmrl_jax.models import qwen3_5_layers as mixers
from wmrl_jax.models.decoding import take_rows
from wmrl_jax.models.families import Family, Settings, Weight, rotary
from wmrl_jax.models.model import Model
from wmrl_jax.models.packing import Packing
from wmrl_jax.models.qwen3_5_decoding import (
    decode,
    decode_weights,
    empty_cache,
    grow_cache,
    prompt_cache,
)
from wmrl_jax.models.qwen3_5_layers import FULL, LINEAR, HybridArchitecture
from wmrl_jax.models.shared_prefix import (
    group_stream,
    packed_states_of_stream,
    states_of_stream,
)
from wmrl_jax.models.transformer import REMAT

MixFn = Callable[[str, dict[str, jax.Array], jax.Array], tuple[jax.Array, Any]]
"""(layer type, its weights, normalised stream) -> (what is added to the stream, anything)."""


def architecture(config: Mapping[str, Any], dtype: str, remat: str) -> HybridArchitecture:
    """The architecture of the text part of a Qwen3.5 `config.json`.

    Raises:
      UserError: a setting is missing or not supported.
    """
    settings = Settings(config, INERT)
    settings.only("hidden_act", "silu")
    settings.only("attention_bias", False)
    settings.only("attn_output_gate", True)
    settings.only("output_gate_type", "swish")  # of linear attention
    settings.only("quantization_config", None)
    settings.only("num_experts", None, 0)
    settings.only("mlp_only_layers", None, [])
    layers = settings.get("num_hidden_layers")
    interval = settings.get("full_attention_interval", 4)
    if interval < 1:
        raise UserError(f"config.json says full_attention_interval: {interval}; it must be above 0")
    default = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers)]
    types = tuple(config.get("layer_types") or default)
    if len(types) != layers or not set(types) <= {LINEAR, FULL}:
        raise UserError(
            f"config.json has layer_types {sorted(set(types))} for {len(types)} layers; "
            f"{LINEAR} and {FULL} are supported, one for each of num_hidden_layers ({layers})"
        )
    theta, scaling, share = rotary(settings, 1e7, default_share=0.25)
    if scaling is not None:
        raise UserError("config.json scales the rotary frequencies; for Qwen3.5 it is unsupported")
    head_dim = settings.get("head_dim", 256)
    arch = HybridArchitecture(
        vocab_size=settings.get("vocab_size"),
        layers=layers,
        width=settings.get("hidden_size"),
        heads=settings.get("num_attention_heads"),
        kv_heads=settings.get("num_key_value_heads"),
        head_dim=head_dim,
        mlp_width=settings.get("intermediate_size"),
        rope_theta=theta,
        rotary_dim=int(head_dim * share),
        norm_eps=settings.get("rms_norm_eps", 1e-6),
        tied_embeddings=settings.get("tie_word_embeddings", False),
        linear_key_heads=settings.get("linear_num_key_heads", 16),
        linear_value_heads=settings.get("linear_num_value_heads", 32),
        linear_key_dim=settings.get("linear_key_head_dim", 128),
        linear_value_dim=settings.get("linear_value_head_dim", 128),
        conv_width=settings.get("linear_conv_kernel_dim", 4),
        layer_types=types,
        dtype=dtype,
        remat=remat,
    )
    settings.finish()
    _check(arch)
    return arch


def _check(arch: HybridArchitecture) -> None:
    """Sizes that do not fit together, by the names of config.json."""
    positive = {
        "num_hidden_layers": arch.layers,
        "num_key_value_heads": arch.kv_heads,
        "linear_num_key_heads": arch.linear_key_heads,
        "linear_conv_kernel_dim": arch.conv_width,
    }
    for name, size in positive.items():
        if size < 1:
            raise UserError(f"config.json says {name}: {size}; it must be at least 1")
    multiples = {
        ("num_attention_heads", "num_key_value_heads"): (arch.heads, arch.kv_heads),
        ("linear_num_value_heads", "linear_num_key_heads"): (
            arch.linear_value_heads,
            arch.linear_key_heads,
        ),
    }
    for (many, few), (count, divisor) in multiples.items():
        if count < 1 or count % divisor:
            raise UserError(
                f"config.json says {many}: {count}; it must be a multiple of {few} ({divisor})"
            )
    if arch.rotary_dim < 2 or arch.rotary_dim % 2 or arch.rotary_dim > arch.head_dim:
        raise UserError(
            f"config.json rotates {arch.rotary_dim} dimensions of a head of {arch.head_dim} "
            "(partial_rotary_factor); it must be an even number of them"
        )
    if arch.remat not in REMAT:
        raise UserError(f"remat must be one of {', '.join(REMAT)}, not {arch.remat!r}")


INERT = frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype"})
"""Settings of parts that are not read, and of a kernel's precision (float32 here)."""

_SKIPPED = (r"mtp\..*", r"model\.visual\..*", r"visual\..*")

_MLP = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
_MATRICES = {
    FULL: {
        "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
        "o": "self_attn.o_proj", **_MLP,
    },
    LINEAR: {
        "qkv": "linear_attn.in_proj_qkv", "z": "linear_attn.in_proj_z",
        "a": "linear_attn.in_proj_a", "b": "linear_attn.in_proj_b",
        "out": "linear_attn.out_proj", **_MLP,
    },
}  # fmt: skip
_NORMS = {"input_norm": "input_layernorm.weight", "post_norm": "post_attention_layernorm.weight"}
_VECTORS = {
    FULL: {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight", **_NORMS},
    LINEAR: {
        "a_log": "linear_attn.A_log", "dt_bias": "linear_attn.dt_bias",
        "norm": "linear_attn.norm.weight", **_NORMS,
    },
}  # fmt: skip


def weights(arch: HybridArchitecture, prefix: str = "model.") -> list[Weight]:
    """Where each published tensor of the text model goes."""
    found = [Weight(("embed",), None, f"{prefix}embed_tokens.weight", False)]
    for index, kind in enumerate(arch.layer_types):
        place, repetition = arch.place(index)
        at = f"{prefix}layers.{index}."
        for ours, theirs in _MATRICES[kind].items():
            path = ("layers", place, ours)
            found.append(Weight(path, repetition, f"{at}{theirs}.weight", True))
        for ours, theirs in _VECTORS[kind].items():
            found.append(Weight(("layers", place, ours), repetition, f"{at}{theirs}", False))
        if kind == LINEAR:
            shape = (arch.conv_channels, 1, arch.conv_width)
            name = f"{at}linear_attn.conv1d.weight"
            found.append(Weight(("layers", place, "conv"), repetition, name, False, shape))
    found.append(Weight(("final_norm",), None, f"{prefix}norm.weight", False))
    if not arch.tied_embeddings:
        found.append(Weight(("head",), None, "lm_head.weight", True))
    return found


class _Layers(nn.Module):
    """The parameters of one place in the pattern, stacked over its repetitions."""

    arch: HybridArchitecture
    kind: str

    @nn.compact
    def __call__(self) -> dict[str, jax.Array]:
        a, count = self.arch, self.arch.layers // self.arch.period
        fan_in = nn.initializers.lecun_normal(batch_axis=0)
        into_stream = nn.initializers.variance_scaling(
            0.5 / a.layers, "fan_in", "truncated_normal", batch_axis=0
        )
        zeros, ones = nn.initializers.zeros_init(), nn.initializers.ones_init()

        def log_rates(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            return jnp.log(jax.random.uniform(key, shape, minval=0.01, maxval=16.0))

        shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
            "input_norm": (zeros, (a.width,)),
            "post_norm": (zeros, (a.width,)),
            "gate": (fan_in, (a.width, a.mlp_width)),
            "up": (fan_in, (a.width, a.mlp_width)),
            "down": (into_stream, (a.mlp_width, a.width)),
        }
        if self.kind == FULL:
            shapes |= {
                "q": (fan_in, (a.width, 2 * a.heads * a.head_dim)),
                "k": (fan_in, (a.width, a.kv_heads * a.head_dim)),
                "v": (fan_in, (a.width, a.kv_heads * a.head_dim)),
                "o": (into_stream, (a.heads * a.head_dim, a.width)),
                "q_norm": (zeros, (a.head_dim,)),
                "k_norm": (zeros, (a.head_dim,)),
            }
        else:
            taps = nn.initializers.variance_scaling(
                1.0, "fan_in", "uniform", in_axis=-1, out_axis=-2, batch_axis=0
            )
            shapes |= {
                "qkv": (fan_in, (a.width, a.conv_channels)),
                "conv": (taps, (a.conv_channels, a.conv_width)),
                "z": (fan_in, (a.width, a.value_width)),
                "a": (fan_in, (a.width, a.linear_value_heads)),
                "b": (fan_in, (a.width, a.linear_value_heads)),
                "a_log": (log_rates, (a.linear_value_heads,)),
                "dt_bias": (ones, (a.linear_value_heads,)),
                "norm": (ones, (a.linear_value_dim,)),
                "out": (into_stream, (a.value_width, a.width)),
            }
        return {
            name: self.param(name, init, (count, *shape)) for name, (init, shape) in shapes.items()
        }


class _Pattern(nn.Module):
    """The parameters of all layers."""

    arch: HybridArchitecture

    @nn.compact
    def __call__(self) -> dict[str, dict[str, jax.Array]]:
        types = self.arch.layer_types[: self.arch.period]
        return {str(i): _Layers(self.arch, kind, name=str(i))() for i, kind in enumerate(types)}


class Qwen35(nn.Module):
    """Token ids to final-normed hidden states; see `Model.hidden`."""

    arch: HybridArchitecture

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Run all layers; also gives, by place, what a cache needs, stacked over repetitions."""
        a = self.arch
        embed = self.param("embed", nn.initializers.normal(0.02), (a.vocab_size, a.width))
        if not a.tied_embeddings:
            self.param("head", nn.initializers.normal(0.02), (a.width, a.vocab_size))
        layers = _Pattern(a, name="layers")()
        final_norm = self.param("final_norm", nn.initializers.zeros_init(), (a.width,))
        angles = mixers.angles_of(
            a, jnp.arange(tokens.shape[1]) if positions is None else positions
        )

        def mix(kind: str, w: dict[str, jax.Array], y: jax.Array) -> tuple[jax.Array, Any]:
            if kind == LINEAR:
                return mixers.linear_attention(a, w, y, segments=segments, lengths=lengths)
            return mixers.attention(a, w, y, angles, segments)

        x, caches = _run(a, layers, embed[tokens].astype(a.dtype), mix)
        return mixers.centred_norm(x, final_norm, a.norm_eps), caches


def _run(
    arch: HybridArchitecture, layers: dict[str, dict[str, jax.Array]], x: jax.Array, mix: MixFn
) -> tuple[jax.Array, dict[str, Any]]:
    """All layers on a stream, scanned over the repetitions of the pattern."""

    def layer(kind: str, x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        mixed, kept = mix(kind, w, mixers.centred_norm(x, w["input_norm"], arch.norm_eps))
        x = x + mixed
        return x + mixers.swiglu(w, mixers.centred_norm(x, w["post_norm"], arch.norm_eps)), kept

    def repetition(
        x: jax.Array, w: dict[str, dict[str, jax.Array]]
    ) -> tuple[jax.Array, dict[str, Any]]:
        kept = {}
        for place, kind in enumerate(arch.layer_types[: arch.period]):
            one = partial(layer, kind)
            if arch.remat != "none":
                one = jax.checkpoint(one, prevent_cse=False, policy=REMAT[arch.remat])
            x, kept[str(place)] = one(x, w[str(place)])
        return x, kept

    return jax.lax.scan(repetition, x, layers)


def completion_states(
    arch: HybridArchitecture,
    params: Any,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    completions: jax.Array,
) -> jax.Array:
    """See `Model.completion_states`."""
    x = _stream_states(arch, params, prompts, prompt_lengths, completions, None)
    return states_of_stream(x, prompt_lengths, prompts.shape[1], completions.shape[1])


def packed_states(
    arch: HybridArchitecture,
    params: Any,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    completions: jax.Array,
    packing: Packing,
) -> jax.Array:
    """See `Model.packed_states`; linear attention, which goes on by row, takes the rows apart."""
    x = _stream_states(arch, params, prompts, prompt_lengths, completions, packing)
    return packed_states_of_stream(x, prompt_lengths, prompts.shape[1], completions, packing)


def _stream_states(
    arch: HybridArchitecture,
    params: Any,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    completions: jax.Array,
    packing: Packing | None,
) -> jax.Array:
    shared = (prompt_lengths, prompts.shape[1], completions.shape[1], packing)
    tokens, positions = group_stream(prompts, prompt_lengths, completions, packing)
    angles = mixers.angles_of(arch, positions)

    def mix(kind: str, w: dict[str, jax.Array], y: jax.Array) -> tuple[jax.Array, None]:
        if kind == LINEAR:
            return mixers.linear_attention_of_rows(arch, w, y, *shared), None
        return mixers.attention_of_rows(arch, w, y, angles, *shared), None

    x, _ = _run(arch, params["layers"], params["embed"][tokens].astype(arch.dtype), mix)
    return mixers.centred_norm(x, params["final_norm"], arch.norm_eps)


def make_model(arch: HybridArchitecture) -> Model:
    """The model of a hybrid architecture; see `Model` for its functions.

    A row's cache of a linear layer is its state; at step 0 it is that of the prompt.
    """
    module = Qwen35(arch)

    def init(key: jax.Array) -> Any:
        return module.init(key, jnp.zeros((1, 1), jnp.int32))["params"]

    def hidden(
        params: Any,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> jax.Array:
        out: Any = module.apply({"params": params}, tokens, positions, segments)
        return out[0]

    def unembedding(params: Any) -> jax.Array:
        matrix = params["embed"].T if arch.tied_embeddings else params["head"]
        return matrix.astype(arch.dtype)

    def prefill(params: Any, tokens: jax.Array, lengths: jax.Array) -> tuple[Any, jax.Array]:
        out: Any = module.apply({"params": params}, tokens, lengths=lengths)
        states, caches = out
        last = jnp.take_along_axis(states, lengths[:, None, None] - 1, axis=1)[:, 0]
        return prompt_cache(arch, caches, lengths), last

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
        grow_cache=partial(grow_cache, arch),
        take_rows=take_rows,
        decode=partial(decode, arch),
    )


FAMILY = Family(architecture, weights, make_model, _SKIPPED)
