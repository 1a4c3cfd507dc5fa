"""GGUF files of the llama family, read by the `gguf` package and dequantised to float32.

What comes out is what a published folder has: a `config.json`, tensors by their published names,
and the tokenizer's parts.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wmrl_jax.errors import UserError
from wmrl_jax.models.weights import Tensor

SUPPORTED = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q6_K")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufModel(NamedTuple):
    """A GGUF file.

    Attributes:
      config: as `config.json` of the llama family.
      tensors: by published name.
      metadata: the file's own fields, the tokenizer's among them.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    metadata: dict[str, Any]


def read_gguf(path: Path) -> GgufModel:
    """Reads a file's metadata; the tensors are dequantised when they are asked for.

    Raises:
      UserError: no GGUF file, another family, a quantisation that is not supported, or the package
        `gguf` is missing.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"reading {path.name} needs the package gguf: pip install gguf")
    import gguf  # type: ignore[import-not-found]

    try:
        reader = gguf.GGUFReader(str(path))
    except (OSError, ValueError, IndexError) as error:
        raise UserError(f"{path} is no whole GGUF file: {error}") from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    family = metadata.get("general.architecture")
    if family != "llama":
        raise UserError(f"{path} is of the family {family!r}; of GGUF files only 'llama' is read")
    tensors: dict[str, Tensor] = {}
    heads = {
        "q_proj": metadata["llama.attention.head_count"],
        "k_proj": metadata.get("llama.attention.head_count_kv")
        or metadata["llama.attention.head_count"],
    }
    for tensor in reader.tensors:
        if tensor.tensor_type.name not in SUPPORTED:
            raise UserError(
                f"{path} holds {tensor.name} as {tensor.tensor_type.name}; supported are "
                f"{', '.join(SUPPORTED)}"
            )
        name = _published(tensor.name)
        rotated = next((count for part, count in heads.items() if part in name), None)
        read = partial(_read, gguf.quants.dequantize, tensor, rotated)
        tensors[name] = Tensor(tuple(reversed(tensor.shape.tolist())), read)
    return GgufModel(_config(metadata, tensors), tensors, metadata)


def _published(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _OF_LAYER:
        return f"model.layers.{parts[1]}.{_OF_LAYER[parts[2]]}.{parts[3]}"
    return name  # left over, and named as such when the weights are loaded


def _read(dequantize: Any, tensor: Any, rotated_heads: int | None) -> np.ndarray:
    shape = tuple(reversed(tensor.shape.tolist()))
    array = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)
    if rotated_heads is None:
        return array
    # The two halves that rotary embedding turns against each other are interleaved in GGUF.
    halves = array.reshape(rotated_heads, -1, 2, shape[-1])
    return halves.swapaxes(1, 2).reshape(shape)


def _config(metadata: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    def get(name: str, default: Any = None) -> Any:
        return metadata.get(f"llama.{name}", default)

    scaling = get("rope.scaling.type", "none")
    if scaling not in ("none", "linear") or "rope_freqs.weight" in tensors:
        raise UserError(f"the GGUF file scales rotary frequencies by {scaling!r}: unsupported")
    rope = {"rope_type": "default", "rope_theta": get("rope.freq_base", 10_000.0)}
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": get("rope.scaling.factor")}
    heads = get("attention.head_count")
    return {
        "model_type": "llama",
        "vocab_size": get("vocab_size") or len(metadata["tokenizer.ggml.tokens"]),
        "num_hidden_layers": get("block_count"),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv") or heads,
        "head_dim": get("rope.dimension_count") or get("embedding_length") // heads,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope,
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
