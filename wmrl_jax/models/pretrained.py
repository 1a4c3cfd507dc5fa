"""A published model from its folder: architecture, functions, parameters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax

from wmrl_jax.models.families import Family, Weight, family_of, read_config
from wmrl_jax.models.model import Model
from wmrl_jax.models.weights import load_weights, open_safetensors, save_weights

_BESIDE_WEIGHTS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json",
    "merges.txt",
)  # fmt: skip


class Pretrained(NamedTuple):
    """A model whose folder was read but for its weights.

    Attributes:
      folder: where it lies.
      config: its `config.json`.
      family: the functions of its family.
      model: its pure functions.
      weights: where each published tensor goes.
    """

    folder: Path
    config: dict[str, Any]
    family: Family
    model: Model
    weights: list[Weight]


def open_pretrained(folder: Path, *, dtype: str = "float32", remat: str = "matmuls") -> Pretrained:
    """Reads a model's `config.json`.

    Args:
      folder: of a model as it is published: config.json, safetensors, tokenizer.json.
      dtype: of the compute; parameters are float32.
      remat: what the backward pass recomputes, one of `transformer.REMAT`.

    Raises:
      UserError: the folder is none, or of a model that is not supported.
    """
    config = read_config(folder)
    family, text = family_of(config)
    arch = family.architecture(text, dtype, remat)
    table = family.weights(arch, "model." if text is config else "model.language_model.")
    return Pretrained(folder, config, family, family.make_model(arch), table)


def abstract_params(model: Model, sharding: Any = None) -> Any:
    """Shapes and dtypes of a model's parameters, each with the given sharding."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(model.init, jax.random.key(0)),
    )


def load_pretrained(pretrained: Pretrained, like: Any = None) -> Any:
    """The parameters of a published model.

    Args:
      pretrained: from `open_pretrained`.
      like: shapes, dtypes and shardings of the parameters; None: float32 on the default device.

    Raises:
      UserError: tensors are missing, left over, misshapen, or a file is broken.
    """
    like = abstract_params(pretrained.model) if like is None else like
    skipped = list(pretrained.family.skipped)
    if getattr(pretrained.model.arch, "tied_embeddings", False):
        skipped.append(r"lm_head\.weight")
    with open_safetensors(pretrained.folder) as tensors:
        return load_weights(
            tensors, pretrained.weights, like, skipped=skipped, source=str(pretrained.folder)
        )


def export(pretrained: Pretrained, params: Any, folder: Path, *, dtype: str = "bfloat16") -> None:
    """Writes a folder that the published tools load: these parameters, the model's other files.

    Args:
      pretrained: the model that the parameters were trained from.
      params: of its `model`.
      folder: made if missing.
      dtype: of the file.
    """
    save_weights(params, pretrained.weights, folder, dtype=dtype)
    for name in _BESIDE_WEIGHTS:
        if (pretrained.folder / name).exists():
            shutil.copyfile(pretrained.folder / name, folder / name)
    config = pretrained.config | {"dtype": dtype, "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
