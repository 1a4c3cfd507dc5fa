"""Runs the text of a program as `__main__` in a forked process, as the interpreter would."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import random
import sys
import threading
import traceback
import types
from collections.abc import Callable


def execute(text: str, path: str, on_exception: Callable[[str], None]) -> int:
    """Executes `text` and ends it as an interpreter ends; returns the exit code.

    Args:
      text: the program, exactly as written.
      path: where the same text lies, for tracebacks.
      on_exception: is told the class name of the exception that ended the program.
    """
    _seed()
    main = types.ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    sys.argv = [path]
    sys.path.insert(0, os.path.dirname(path))
    code = _run(text, path, main, on_exception)
    _finish(main)
    return code


def _seed() -> None:
    random.seed(0)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(0)


def _run(text: str, path: str, main: types.ModuleType, on_exception: Callable[[str], None]) -> int:
    try:
        exec(compile(text, path, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as end:
        if end.code is None:
            return 0
        code = end.code if isinstance(end.code, int) else 1
        if code is not end.code:
            print(end.code, file=sys.stderr)
        if code:
            on_exception("SystemExit")
        return code & 0xFF
    except BaseException as fault:  # whatever ends a program is its result
        on_exception(type(fault).__name__)
        with contextlib.suppress(ValueError, OSError, AttributeError):
            sys.stdout.flush()  # so that the exception is what the output ends with
        trace = fault.__traceback__.tb_next if fault.__traceback__ else None  # without this frame
        traceback.print_exception(type(fault), fault, trace)
        fault.__traceback__ = None
        return 1
    return 0


def _finish(main: types.ModuleType) -> None:
    """What interpreter shutdown does that a program can notice, without its cost."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # waits for threads
    atexit._run_exitfuncs()
    main.__dict__.clear()  # closes, and so flushes, files that were left open
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            stream.flush()
