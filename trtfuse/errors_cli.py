"""From an exception to one line on stderr and an exit code."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from typing import Any

import typer

from trtfuse.errors import EnvironmentMissing, InputError, TrtfuseError

INTERNAL_ERROR = 3
INTERRUPTED = 130
BROKEN_PIPE = 141  # as if the signal had ended it, which is what other tools do


def say(error: BaseException, verbose: int) -> int:
    """Says in one line on stderr what ended the command line (-vv: after the traceback); the exit code."""
    if isinstance(error, typer.Exit):
        return int(error.exit_code)
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, BrokenPipeError):
        _forget_stdout()
        return BROKEN_PIPE
    if verbose >= 2:
        traceback.print_exception(error, file=sys.stderr)
    message, code = _message(error)
    _error_line(message)
    return code


def _error_line(text: str) -> None:
    """Writes "error: `text`" to stderr as one line, whatever line breaks it came with."""
    coloured = sys.stderr.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    label = "\x1b[1;31merror:\x1b[0m" if coloured else "error:"
    with contextlib.suppress(OSError, ValueError):  # a closed stderr changes no exit code
        sys.stderr.write(f"{label} {' '.join(text.split())}\n")
        sys.stderr.flush()


def _message(error: BaseException) -> tuple[str, int]:
    if isinstance(error, TrtfuseError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return "interrupted", INTERRUPTED
    if isinstance(error, MemoryError):
        return "out of memory; close other programs or use a larger machine", EnvironmentMissing.exit_code
    if isinstance(error, OSError) and error.errno is not None:
        where = error.filename or "what was asked for"
        advice = (
            "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the path and its rights"
        )
        return f"cannot read or write {where}: {error.strerror}; {advice}", InputError.exit_code
    usage = getattr(error, "format_message", None)  # typer's own errors, whichever click it stands on
    if callable(usage):
        context: Any = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "trtfuse"
        said = str(usage()).rstrip(".").replace("Value error, ", "")
        return f"{said}; see {path} --help", InputError.exit_code
    return (
        f"internal error: {type(error).__name__}: {error}; run with -vv for the traceback and report it",
        INTERNAL_ERROR,
    )


def _forget_stdout() -> None:
    """Nobody reads stdout any more: what is left in its buffer must not fail again at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        return
