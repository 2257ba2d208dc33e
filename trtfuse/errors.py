"""The errors that trtfuse raises on purpose, each with the exit code of the command line.

Every message is one line that says what is wrong and how to fix it.
"""

from __future__ import annotations


class TrtfuseError(Exception):
    """Base of all errors raised on purpose. `exit_code` is what the command line ends with."""

    exit_code = 2


class GateError(TrtfuseError):
    """A gate failed: the result is not accurate or not fast enough (exit 1)."""

    exit_code = 1


class InputError(TrtfuseError):
    """The model, an option or another input cannot be used (exit 2)."""

    exit_code = 2


class BuildError(TrtfuseError):
    """The engine could not be built from a usable model (exit 3)."""

    exit_code = 3


class RunError(TrtfuseError):
    """An engine that was built failed while it ran (exit 3)."""

    exit_code = 3


class EnvironmentMissing(TrtfuseError):
    """This machine lacks a package, a library or a GPU that the work needs (exit 4)."""

    exit_code = 4
