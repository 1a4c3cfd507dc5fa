"""The families of published models: from `config.json` to an architecture and its weights' names.

A family is one file with `architecture`, `weights` and `make_model`; this one holds what they
share and finds the right one.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from wmrl_jax.errors import UserError, did_you_mean
from wmrl_jax.models.layers import RotaryScaling
from wmrl_jax.models.model import Model


class Weight(NamedTuple):
    """Where one published tensor goes in our parameters.

    Attributes:
      path: keys of the leaf in the parameter tree.
      layer: place on the leaf's leading, stacked axis; None where it has none.
      name: of the published tensor.
      transpose: it is published as [out, in] and kept here as [in, out].
      reshape: the published shape where it is another than ours and no transposition.
    """

    path: tuple[str, ...]
    layer: int | None
    name: str
    transpose: bool
    reshape: tuple[int, ...] | None = None


class Family(NamedTuple):
    """One family's functions.

    Attributes:
      architecture: (config, dtype, remat) -> its architecture.
      weights: (architecture, what the text model's names begin with) -> where each published
        tensor goes.
      make_model: architecture -> `Model`.
      skipped: regular expressions of tensor names that a file may hold and that are not read.
    """

    architecture: Callable[[Mapping[str, Any], str, str], Any]
    weights: Callable[[Any, str], list[Weight]]
    make_model: Callable[[Any], Model]
    skipped: tuple[str, ...] = ()


FAMILIES = {
    "qwen3": "qwen3",
    "llama": "llama",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
}
"""Files of the families, by the `model_type` of config.json."""


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model's folder.

    Raises:
      UserError: there is none, or it is no JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); model.path must be the folder of a "
            "published model, with config.json, safetensors and tokenizer.json in it"
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} holds a {type(config).__name__}, not an object")
    return config


def family_of(config: Mapping[str, Any]) -> tuple[Family, Mapping[str, Any]]:
    """The family of a `config.json`, and the part of it that describes the text model.

    Raises:
      UserError: an architecture that is not supported.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise UserError(
            f"config.json is of a model of the type {kind!r}"
            f"{did_you_mean(str(kind), FAMILIES)}; supported are {', '.join(FAMILIES)}"
        )
    # The families import this file.
    family = importlib.import_module(f"wmrl_jax.models.{FAMILIES[kind]}").FAMILY
    text = config.get("text_config")
    if text is None:
        return family, config
    tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return family, {**tied, **text}


class Settings:
    """The keys of a `config.json`, each read once; what is left unread must be known to be inert.

    Args:
      config: the text model's part.
      inert: keys that change nothing of what is computed here.
    """

    def __init__(self, config: Mapping[str, Any], inert: frozenset[str] = frozenset()) -> None:
        self._config = config
        self._unread = set(config) - inert - INERT

    def get(self, name: str, default: Any = ...) -> Any:
        """The value of a key.

        Raises:
          UserError: it is missing and has no default.
        """
        self._unread.discard(name)
        value = self._config.get(name)
        if value is not None:
            return value
        if default is ...:
            raise UserError(f"config.json lacks {name!r}")
        return default

    def only(self, name: str, *allowed: Any) -> None:
        """Reads a key of which only some values are supported; the first stands for a missing one.

        Raises:
          UserError: another value.
        """
        value = self.get(name, allowed[0])
        if value not in allowed:
            listed = " or ".join(repr(a) for a in allowed)
            raise UserError(f"config.json says {name}: {value!r}; only {listed} is supported")

    def finish(self) -> None:
        """To be called when all is read.

        Raises:
          UserError: a key is left that this project knows nothing of.
        """
        if self._unread:
            names = ", ".join(sorted(self._unread))
            raise UserError(f"config.json has settings that are not supported: {names}")


INERT = frozenset(
    (
        *(
            "_name_or_path",
            "architectures",
            "model_type",
            "tokenizer_class",
            "torch_dtype",
            "dtype",
        ),
        *("transformers_version", "transformers.js_config", "unsloth_fixed", "is_llama_config"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
        *("attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop"),
        *("initializer_range", "max_position_embeddings", "pretraining_tp", "use_cache"),
        *("cache_implementation", "return_dict", "output_hidden_states", "output_attentions"),
        *("chunk_size_feed_forward", "problem_type", "is_encoder_decoder", "id2label", "label2id"),
        # Said for all of transformers' models; a window is read in `use_sliding_window`.
        *("sliding_window", "max_window_layers", "layer_types", "rope_interleaved"),
    )
)
"""Keys that say nothing of what is computed here; each family takes out those that do for it."""


def rotary(
    settings: Settings, default_theta: float, default_share: float = 1.0
) -> tuple[float, RotaryScaling | None, float]:
    """The base of the rotary frequencies, their scaling, and the share of a head that is rotated.

    Reads `rope_parameters` (transformers 5) and `rope_theta`, `rope_scaling` (before).

    Raises:
      UserError: a kind of scaling that is not supported.
    """
    parameters = settings.get("rope_parameters", {})
    scaling = {**(settings.get("rope_scaling", None) or {}), **parameters}
    theta = float(scaling.get("rope_theta", settings.get("rope_theta", default_theta)))
    share = float(
        scaling.get("partial_rotary_factor", settings.get("partial_rotary_factor", default_share))
    )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None, share
    if kind == "linear":
        return theta, RotaryScaling("linear", float(scaling["factor"])), share
    if kind == "llama3":
        return (
            theta,
            RotaryScaling(
                "llama3",
                float(scaling["factor"]),
                float(scaling["low_freq_factor"]),
                float(scaling["high_freq_factor"]),
                int(scaling["original_max_position_embeddings"]),
            ),
            share,
        )
    raise UserError(
        f"config.json says rope_type: {kind!r}; only 'default', 'linear' and 'llama3' are supported"
    )
