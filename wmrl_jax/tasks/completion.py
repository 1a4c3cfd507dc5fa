"""The program in a completion, and what can be said of it without executing it."""

from __future__ import annotations

import re
import warnings

from wmrl_jax.types import Outcome, Status, reward_of

MAX_PROGRAM_CHARS = 1 << 16
"""Longer programs are refused unread: a compiler's stack is not to be tried by an agent."""

_OPEN = re.compile(r"^ {0,3}```[ \t]*([\w+-]*)[^\n`]*$")
_CLOSE = re.compile(r"^ {0,3}```[ \t]*$")
_PYTHON = {"python", "python3", "py"}


def extract_program(completion: str) -> str | None:
    """The program that a completion means to have executed, exactly as written.

    In this order: the first closed fence marked as Python; the first closed fence; a fence that
    is never closed; else None. A fence stands at the start of its line.
    """
    fences = _fences(completion)
    closed = [(language, text) for language, text, is_closed in fences if is_closed]
    for language, text in closed:
        if language in _PYTHON:
            return text
    if closed:
        return closed[0][1]
    return fences[0][1] if fences else None


def _fences(completion: str) -> list[tuple[str, str, bool]]:
    """Language, text and whether it is closed, of each fence; only the last can be open."""
    fences = []
    language: str | None = None
    body: list[str] = []
    for line in completion.split("\n"):
        bare = line.rstrip("\r")
        if language is not None:
            if _CLOSE.match(bare):
                fences.append((language, "".join(body), True))
                language = None
            else:
                body.append(line + "\n")
        elif match := _OPEN.match(bare):
            language, body = match.group(1).lower(), []
    if language is not None:
        # The last piece had no line end of its own.
        fences.append((language, "".join(body)[:-1], False))
    return fences


def precheck(completion: str) -> Outcome | str:
    """The outcome where no execution is needed (`malformed`, `syntax_error`), else the program."""
    program = extract_program(completion)
    if program is None or not program.strip():
        return _refused("malformed", "There is no program: write one fenced block of Python.", None)
    if len(program) > MAX_PROGRAM_CHARS:
        text = f"The program has {len(program)} characters, more than {MAX_PROGRAM_CHARS}."
        return _refused("malformed", text, None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(program, "program.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        detail = error.msg if isinstance(error, SyntaxError) else str(error)
        text = f"The program does not compile{line}: {type(error).__name__}: {detail}"
        return _refused("syntax_error", text[:1024], type(error).__name__)
    return program


def _refused(status: Status, feedback: str, exception: str | None) -> Outcome:
    return Outcome(
        status=status,
        reward=reward_of(status),
        position=None,
        value=None,
        feedback=feedback,
        exception=exception,
        seconds=0.0,
    )
