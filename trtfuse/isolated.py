"""Calls a function in a child process, so that a native crash in a library is an error here, not the end."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# The child finds modules where this process does. It is no fork: locks of native threads do not survive one;
# nor multiprocessing's spawn, which would run the user's script again.
_CHILD = """
import pickle, sys
with open(sys.argv[1], "rb") as f:
    sys.path[:], module, name = pickle.load(f)
    import importlib
    function = getattr(importlib.import_module(module), name)
    arguments = pickle.load(f)
try:
    result = (True, function(*arguments))
except Exception as error:
    try:
        pickle.dumps(error)
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    result = (False, error)
with open(sys.argv[2], "wb") as f:
    pickle.dump(result, f)
"""


class ChildDied(Exception):
    """The child ended without an answer. reason: how, in words; phase: what it last said it was doing."""

    def __init__(self, reason: str, phase: str) -> None:
        super().__init__(f"{reason} while {phase or 'starting'}")
        self.reason = reason
        self.phase = phase


def call(module: str, function: str, arguments: tuple[Any, ...], timeout: float | None = None) -> Any:
    """`module.function(*arguments, phase_file)` in a child process; its result or its exception.

    The function writes what it is doing into `phase_file` with `say`. Raises ChildDied where the process
    crashes, is killed or takes longer than `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="trtfuse-") as folder:
        asked, answered, phase = (Path(folder) / name for name in ("asked", "answered", "phase"))
        with open(asked, "wb") as f:
            pickle.dump(([p or os.getcwd() for p in sys.path], module, function), f)
            pickle.dump((*arguments, phase), f)
        command = [sys.executable, "-c", _CHILD, str(asked), str(answered)]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False
            )
            reason = _reason(done)
        except subprocess.TimeoutExpired:
            reason = f"the process gave no answer in {timeout:g} s"
        said = phase.read_text() if phase.exists() else ""
        if not answered.exists():
            raise ChildDied(reason, said)
        try:
            ok, result = pickle.loads(answered.read_bytes())
        except (EOFError, pickle.UnpicklingError):
            raise ChildDied(reason, said) from None
    if not ok:
        raise result
    return result


def say(phase_file: Path | None, text: str) -> None:
    """Leaves word of what comes next, for whoever has to tell what a crash happened in."""
    if phase_file is not None:
        phase_file.write_text(text)


def _reason(done: subprocess.CompletedProcess[bytes]) -> str:
    if done.returncode < 0:
        try:
            return f"the process died of {signal.Signals(-done.returncode).name}"
        except ValueError:
            return f"the process died of signal {-done.returncode}"
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return f"the process ended with {done.returncode}" + (f" ({lines[-1][:200]})" if lines else "")
