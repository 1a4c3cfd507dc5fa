"""What the dense families share: their common settings and the names of their weights."""

from __future__ import annotations

from wmrl_jax.errors import UserError
from wmrl_jax.models.families import Settings, Weight, rotary
from wmrl_jax.models.transformer import Architecture

_PROJECTIONS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_NORMS = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}


def dense_architecture(
    settings: Settings, *, qk_norm: bool, theta: float, dtype: str, remat: str
) -> Architecture:
    """The architecture that a dense family's `config.json` describes.

    Raises:
      UserError: a setting is missing or not supported.
    """
    settings.only("hidden_act", "silu")
    settings.only("attention_bias", False)
    settings.only("mlp_bias", False)
    settings.only("use_sliding_window", False)
    settings.only("quantization_config", None)
    theta, scaling, share = rotary(settings, theta)
    if share != 1.0:
        raise UserError(
            f"config.json says partial_rotary_factor: {share}; this family supports 1.0 only"
        )
    heads, width = settings.get("num_attention_heads"), settings.get("hidden_size")
    arch = Architecture(
        vocab_size=settings.get("vocab_size"),
        layers=settings.get("num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=settings.get("num_key_value_heads", heads),
        head_dim=settings.get("head_dim", width // heads),
        mlp_width=settings.get("intermediate_size"),
        rope_theta=theta,
        norm_eps=settings.get("rms_norm_eps", 1e-6),
        tied_embeddings=settings.get("tie_word_embeddings", False),
        dtype=dtype,
        remat=remat,
        qk_norm=qk_norm,
        rope_scaling=scaling,
    )
    settings.finish()
    return arch


def dense_weights(arch: Architecture, prefix: str = "model.") -> list[Weight]:
    """Where each published tensor of a dense model goes."""
    weights = [Weight(("embed",), None, f"{prefix}embed_tokens.weight", False)]
    for layer in range(arch.layers):
        norms = _NORMS | (_HEAD_NORMS if arch.qk_norm else {})
        for table, transpose in ((_PROJECTIONS, True), (norms, False)):
            weights += [
                Weight(
                    ("layers", ours), layer, f"{prefix}layers.{layer}.{theirs}.weight", transpose
                )
                for ours, theirs in table.items()
            ]
    weights.append(Weight(("final_norm",), None, f"{prefix}norm.weight", False))
    if not arch.tied_embeddings:
        weights.append(Weight(("head",), None, "lm_head.weight", True))
    return weights


SKIPPED = (r".*rotary_emb\.inv_freq",)
"""Tensors of old files that are computed here; `lm_head.weight` is one where it is tied."""
