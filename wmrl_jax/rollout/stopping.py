"""Stop strings inside compiled sampling: an automaton over bytes, tabulated by token.

A row's state is how much of a stop string its text ends with; one look into a table gives the next
state, whatever bytes the token has, so that strings are found across the borders of tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from wmrl_jax.errors import UserError

MOST_CELLS = 1 << 26
"""States times tokens: 128 MB."""

MOST_STATES = 1 << 15
"""States that an int16 tells apart."""


class StopTable(NamedTuple):
    """The automaton of Aho and Corasick (1975) for some strings and a vocabulary.

    Attributes:
      next: int16 [states, V], the state behind a token; 0 is the start.
      stop: int16 scalar, the state in which a string was found; it is never left.
    """

    next: np.ndarray
    stop: np.ndarray


def stop_table(pieces: Sequence[bytes], stops: Sequence[str]) -> StopTable:
    """Tabulates the automaton of stop strings.

    Args:
      pieces: bytes of each token of the vocabulary, `Tokenizer.token_bytes` say; those without
        bytes leave the state alone.
      stops: texts, none empty.

    Raises:
      UserError: no or an empty string, or strings too long for the table.
    """
    if not stops or not all(stops):
        raise UserError("stop strings must be texts of at least one character")
    trie, ends = _trie([text.encode() for text in stops])
    count = len(trie) + 1  # and the one that is never left
    if count * len(pieces) > MOST_CELLS or count > MOST_STATES:
        raise UserError(
            f"the stop strings have {count} states for {len(pieces)} tokens, more than "
            f"{MOST_STATES} states or {MOST_CELLS} cells; take shorter ones"
        )
    by_byte, found = _automaton(trie, ends)
    longest = max(map(len, pieces), default=0)
    padded = np.zeros((len(pieces), longest), np.uint8)
    lengths = np.array([len(piece) for piece in pieces])
    for number, piece in enumerate(pieces):
        padded[number, : len(piece)] = np.frombuffer(piece, np.uint8)
    states = np.repeat(np.arange(count, dtype=np.int16)[:, None], len(pieces), axis=1)
    for place in range(longest):
        has = lengths > place
        states[:, has] = by_byte[states[:, has], padded[has, place]]
    return StopTable(states, np.asarray(found, np.int16))


def _trie(strings: Sequence[bytes]) -> tuple[list[dict[int, int]], set[int]]:
    """The nodes, each with its children by byte, and those in which a string ends."""
    trie: list[dict[int, int]] = [{}]
    ends: set[int] = set()
    for string in strings:
        node = 0
        for byte in string:
            if byte not in trie[node]:
                trie.append({})
                trie[node][byte] = len(trie) - 1
            node = trie[node][byte]
        ends.add(node)
    return trie, ends


def _automaton(trie: list[dict[int, int]], ends: set[int]) -> tuple[np.ndarray, int]:
    """Transitions int16 [states, 256], with one last, absorbing state for all ends."""
    ends = set(ends)
    found = len(trie)
    table = np.zeros((found + 1, 256), np.int16)
    fail = [0] * found
    waiting = deque(trie[0].values())
    for byte, node in trie[0].items():
        table[0, byte] = node
    while waiting:
        node = waiting.popleft()
        if fail[node] in ends:
            ends.add(node)
        table[node] = table[fail[node]]
        for byte, child in trie[node].items():
            fail[child] = int(table[fail[node], byte])
            table[node, byte] = child
            waiting.append(child)
    table[np.isin(table, list(ends))] = found
    table[found] = found
    return table, found
