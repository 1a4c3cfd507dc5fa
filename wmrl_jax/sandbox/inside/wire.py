"""Length-prefixed frames over a stream socket: a JSON header and raw bytes."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTHS = struct.Struct("!II")


def send(sock: socket.socket, header: dict[str, Any], payload: bytes = b"") -> None:
    """Sends one frame whole."""
    text = json.dumps(header).encode()
    sock.sendall(_LENGTHS.pack(len(text), len(payload)) + text + payload)


def receive(sock: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Receives one frame; raises EOFError where the other side has gone."""
    text_length, payload_length = _LENGTHS.unpack(_exactly(sock, _LENGTHS.size))
    header = json.loads(_exactly(sock, text_length))
    return header, _exactly(sock, payload_length)


def _exactly(sock: socket.socket, length: int) -> bytes:
    pieces = []
    while length:
        piece = sock.recv(min(length, 1 << 20))
        if not piece:
            raise EOFError("the other side closed the socket")
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)
