"""Tokenizers of published models, from their folder or from a GGUF file's metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from wmrl_jax.errors import UserError
from wmrl_jax.models.chat import Chat
from wmrl_jax.models.tokenizer import OUTCOME_SLOTS, Tokenizer

_CONTROL = 3  # of tokenizer.ggml.token_type
_SPLITS: dict[str, tuple[Any, ...]] = {
    "smollm": (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ),
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False),),
}
"""How text is cut before the merges, by tokenizer.ggml.pre."""


def tokenizer_of_folder(folder: Path, rows: int) -> Tokenizer:
    """The tokenizer of a published folder.

    Args:
      folder: with tokenizer.json, and tokenizer_config.json, generation_config.json,
        chat_template.jinja where there are any.
      rows: of the model's embedding.

    Raises:
      UserError: no or a broken tokenizer.json, no end-of-text, or more tokens than rows.
    """
    path = folder / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
        tokenizers.Tokenizer.from_str(text)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{path} is no tokenizer: {error}") from error
    settings = _json(folder / "tokenizer_config.json")
    named = {
        key: token if isinstance(token, str) else token.get("content", "")
        for key in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (token := settings.get(key))
    }
    template = settings.get("chat_template")
    if (folder / "chat_template.jinja").exists():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(template, list):  # several by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    generation = _json(folder / "generation_config.json").get("eos_token_id")
    ends = generation if isinstance(generation, list) else [generation]
    return _wrap(text, rows, named, template, [end for end in ends if end is not None], str(path))


def tokenizer_of_gguf(metadata: dict[str, Any], rows: int, source: str) -> Tokenizer:
    """The byte-level BPE of a GGUF file.

    Args:
      metadata: from `gguf_file.read_gguf`.
      rows: of the model's embedding.
      source: named in errors.

    Raises:
      UserError: another kind of tokenizer, or more tokens than rows.
    """
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in _SPLITS:
        raise UserError(
            f"{source} has a tokenizer of the kind {kind!r} / {split!r}; of GGUF files only 'gpt2' "
            f"with {' or '.join(map(repr, _SPLITS))} is read; use the published folder instead"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    bpe = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    bpe.pre_tokenizer = pre_tokenizers.Sequence(list(_SPLITS[split]))
    bpe.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    bpe.add_special_tokens([t for t, k in zip(tokens, kinds, strict=True) if k == _CONTROL])

    def name(key: str) -> str | None:
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return None if number is None else tokens[number]

    named = {
        "bos_token": name("bos"), "eos_token": name("eos"), "pad_token": name("padding"),
        "unk_token": name("unknown"),
    }  # fmt: skip
    named = {key: token for key, token in named.items() if token is not None}
    return _wrap(bpe.to_str(), rows, named, metadata.get("tokenizer.chat_template"), [], source)


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}") from error


def _wrap(
    text: str,
    rows: int,
    named: dict[str, str],
    template: str | None,
    ends: list[int],
    source: str,
) -> Tokenizer:
    plain, special = (tokenizers.Tokenizer.from_str(text) for _ in range(2))
    plain.encode_special_tokens = True  # what an agent writes is never a special token
    plain.no_truncation()
    plain.no_padding()
    largest = max(plain.get_vocab(with_added_tokens=True).values())
    if largest >= rows:
        raise UserError(
            f"{source} has tokens up to {largest} and the model's embedding has {rows} rows: the "
            "two do not belong together"
        )
    found = {key: special.token_to_id(token) for key, token in named.items()}
    ids = {key: number for key, number in found.items() if number is not None}
    end = ids.get("eos_token", ends[0] if ends else None)
    if end is None:
        raise UserError(f"{source} names no end-of-text token (eos_token)")
    pad = ids.get("pad_token")
    pad = end if pad is None else pad
    tokens = special.get_added_tokens_decoder()
    added = set(tokens)
    # Text encodes to the other added tokens (Qwen's <think> is one) and must come back.
    control = {number for number, token in tokens.items() if token.special}
    used = {end, pad, *ends, *ids.values()} | _in_template(template or "", special, added)
    slots = _spare_ids(OUTCOME_SLOTS + 1, rows, largest, added, control - used)
    chat = None
    if template:
        encode = lambda prompt: special.encode(prompt, add_special_tokens=False).ids  # noqa: E731
        chat = Chat(template, encode, named)
    return Tokenizer(
        vocab_size=rows,
        pad_id=pad,
        eos_id=end,
        outcome_id=slots[0],
        outcome_ids=tuple(slots[1:]),
        special_ids=frozenset(control),
        chat=chat,
        _bpe=plain,
    )


def _in_template(template: str, bpe: tokenizers.Tokenizer, added: set[int]) -> set[int]:
    """Special tokens whose names stand in the chat template."""
    return {number for number in added if (bpe.id_to_token(number) or "\0") in template}


def _spare_ids(count: int, rows: int, largest: int, added: set[int], spare: set[int]) -> list[int]:
    """Ids for what the world model predicts, which programs hold as rarely as can be.

    First rows of the embedding behind the last token, then special tokens that nothing uses, then
    the ordinary tokens that were merged last.
    """
    behind = list(range(largest + 1, rows))
    special = sorted(spare)
    ordinary = [number for number in range(largest, -1, -1) if number not in added]
    return (behind + special + ordinary)[:count]
