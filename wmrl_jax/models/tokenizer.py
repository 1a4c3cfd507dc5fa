"""Byte-level BPE whose merges may span a whole line of code, so that programs are short.

Text is cut at line ends (each line keeps its newline) and around quoted names, and nowhere else: a
line that many programs share becomes one token, while a column's name is written with the same
tokens in the prompt and in any program. Every byte is in the vocabulary, so any text comes back
unchanged.

Special tokens are ids that no text encodes to: their names hold characters that the byte-level
alphabet lacks, and no merge leads to them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from wmrl_jax.errors import UserError
from wmrl_jax.models.chat import Chat

OUTCOME_SLOTS = 32
"""Outcome tokens reserved in every vocabulary; the world model uses the first few."""

_PAD, _EOS, _OUTCOME = "⟨pad⟩", "⟨end⟩", "⟨outcome⟩"
_SPECIAL = (_PAD, _EOS, _OUTCOME, *(f"⟨outcome {slot}⟩" for slot in range(OUTCOME_SLOTS)))
_FILE = "tokenizer.json"
# A line with its newline, or the text between two quotes where it starts like a name.
_LINE = r"[^\n]*\n|[^\n]+"
_QUOTED_NAME = r"""(?<=")\w[^"'\n]*(?=")|(?<=')\w[^"'\n]*(?=')"""


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for (the convention of GPT-2).

    Printable bytes stand for themselves; the others, in order, are the characters from U+0100 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back, of this project or of a published model.

    Attributes:
      vocab_size: number of ids, special ones included; rows of the embedding.
      pad_id: fills rows behind their end.
      eos_id: ends a completion.
      outcome_id: stands where the world model reads out its prediction.
      outcome_ids: the outcomes that the world model predicts there.
      special_ids: ids that no text decodes from.
      chat: the model's chat template; None where prompts are read as they are.
    """

    vocab_size: int
    pad_id: int
    eos_id: int
    outcome_id: int
    outcome_ids: tuple[int, ...]
    special_ids: frozenset[int]
    chat: Chat | None
    _bpe: tokenizers.Tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; never a special one."""
        return self._bpe.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a task's prompt, up to where the agent begins to write."""
        if self.chat is None:
            return self.encode(text)
        return self.chat.encode([{"role": "user", "content": text}])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts at once, on all cores."""
        encodings = self._bpe.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; special ones are left out, broken UTF-8 becomes U+FFFD."""
        kept = [number for number in map(int, ids) if number not in self.special_ids]
        return self._bpe.decode(kept, skip_special_tokens=False)

    def token_bytes(self) -> list[bytes]:
        """The bytes of each id's token; none for special ones and for rows without a token."""
        pieces = []
        for number in range(self.vocab_size):
            token = None if number in self.special_ids else self._bpe.id_to_token(number)
            pieces.append(bytes(_BYTES[character] for character in token or ""))
        return pieces

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` into a folder, which is made where it is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _FILE).write_text(self._bpe.to_str(), encoding="utf-8")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn merges from texts; the same texts in the same order give the same tokenizer.

    Args:
      texts: what programs and prompts look like.
      vocab_size: ids to use at most, special tokens and the 256 bytes included; a small corpus
        gives fewer.

    Raises:
      UserError: `vocab_size` has no room for the special tokens and the bytes.
    """
    smallest = len(_SPECIAL) + 256
    if vocab_size < smallest:
        raise UserError(
            f"model.vocab_size must be at least {smallest} ({len(_SPECIAL)} special tokens and "
            f"256 bytes), not {vocab_size}"
        )
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_LINE), "isolated"),
            pre_tokenizers.Split(tokenizers.Regex(_QUOTED_NAME), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    bpe.train_from_iterator(texts, trainer)
    # An added token is searched for in user text; as a mere entry of the vocabulary it is not.
    written = json.loads(bpe.to_str())
    written["added_tokens"] = []
    return _wrap(written)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Read what `Tokenizer.save` wrote.

    Raises:
      UserError: the folder has no readable tokenizer of this project.
    """
    path = folder / _FILE
    try:
        return _wrap(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): train a tokenizer") from error
    except (KeyError, ValueError) as error:
        raise UserError(f"{path} is not a tokenizer of this project: {error}") from error


def _wrap(written: dict[str, Any]) -> Tokenizer:
    vocabulary = written["model"]["vocab"]
    special = {name: vocabulary[name] for name in _SPECIAL}
    return Tokenizer(
        vocab_size=len(vocabulary),
        pad_id=special[_PAD],
        eos_id=special[_EOS],
        outcome_id=special[_OUTCOME],
        outcome_ids=tuple(special[name] for name in _SPECIAL[3:]),
        special_ids=frozenset(special.values()),
        chat=None,
        _bpe=tokenizers.Tokenizer.from_str(json.dumps(written)),
    )
