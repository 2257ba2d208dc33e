"""trtfuse: fuses ONNX models, builds TensorRT engines from them, and proves the result.

import trtfuse
result = trtfuse.build("model.onnx")
print(result.engine_path, result.accuracy.passed)
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtfuse.engine import Engine
    from trtfuse.errors import (
        BuildError,
        EnvironmentMissing,
        GateError,
        InputError,
        RunError,
        TrtfuseError,
    )
    from trtfuse.pipeline import build, check, explain, fuse
    from trtfuse.result import Result

__all__ = [
    "BuildError",
    "Engine",
    "EnvironmentMissing",
    "GateError",
    "InputError",
    "Result",
    "RunError",
    "TrtfuseError",
    "build",
    "check",
    "explain",
    "fuse",
]

try:
    __version__ = metadata.version("trtfuse")
except metadata.PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0.0.0"


def __getattr__(name: str) -> Any:
    """Loads what is asked for: onnx and ONNX Runtime take a second to import."""
    if name in __all__:
        home = {
            "Result": "result",
            "Engine": "engine",
            **dict.fromkeys(("build", "check", "explain", "fuse"), "pipeline"),
        }
        return getattr(importlib.import_module(f"trtfuse.{home.get(name, 'errors')}"), name)
    raise AttributeError(f"module 'trtfuse' has no attribute {name!r}")
