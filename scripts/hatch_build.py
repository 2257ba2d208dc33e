"""Hatchling's hook for wheels: the plugins' sources, and the plugin library where it can be built.

TRTFUSE_WHEEL_PLUGINS     auto: the library where a compiler and TensorRT's headers are at hand, else a wheel
                          of Python alone, said in a line on stderr. require: an error then. no: never.
TRTFUSE_TENSORRT_INCLUDE  the folder of TensorRT's headers, where they are not the system's
TRTFUSE_ARCHITECTURES     as `trtfuse plugins build --architectures`

An editable install compiles nothing: `trtfuse plugins build` does when asked.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from typing import TYPE_CHECKING, Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

if TYPE_CHECKING:
    from pathlib import Path

CHOICES = ("auto", "require", "no")


class PluginLibraryHook(BuildHookInterface):
    """Runs where hatchling alone is installed: of trtfuse, only what needs no other package is imported."""

    def dependencies(self) -> list[str]:
        """pip's nvcc, for a wheel that must hold the library on a machine without a CUDA toolkit."""
        if self._wanted() != "require":
            return []
        plugin_library, errors = self._trtfuse()
        try:
            plugin_library.toolchain()
        except errors.EnvironmentMissing:
            return list(plugin_library.NVCC_REQUIREMENTS)
        return []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Names what goes into the wheel besides the Python package, and the wheel's platform."""
        if version == "editable":
            return
        plugin_library, _ = self._trtfuse()
        root, included = plugin_library.source_folder(), build_data["force_include"]
        for path in plugin_library.sources(*plugin_library.SOURCES, "CMakeLists.txt"):
            included[str(path)] = f"trtfuse/plugins/{path.relative_to(root).as_posix()}"
        library = self._library()
        if library is not None:
            for path in (library, library.parent / "manifest.json"):
                included[str(path)] = f"trtfuse/lib/{path.name}"
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"

    def _library(self) -> Path | None:
        """Builds the library; None, said on stderr, where this machine cannot and need not."""
        wanted = self._wanted()
        if wanted == "no":
            return None
        plugin_library, errors = self._trtfuse()
        names = plugin_library.split_names(os.environ.get("TRTFUSE_ARCHITECTURES", ""))
        try:
            library: Path = plugin_library.build(architectures=names or plugin_library.ARCHITECTURES)
            return library
        except errors.TrtfuseError as e:
            if wanted == "require" or isinstance(e, errors.InputError):
                self.app.abort(f"trtfuse: no plugin library for the wheel: {e}")
            self.app.display_warning(f"trtfuse: the wheel holds no plugin library: {e}")
            return None

    def _wanted(self) -> str:
        wanted = os.environ.get("TRTFUSE_WHEEL_PLUGINS") or "auto"
        if wanted not in CHOICES:
            self.app.abort(f"trtfuse: TRTFUSE_WHEEL_PLUGINS is '{wanted}': use {', '.join(CHOICES)}")
        return wanted

    def _trtfuse(self) -> tuple[Any, Any]:
        """plugin_library and errors, of the sources that the wheel is made of."""
        if self.root not in sys.path:
            sys.path.insert(0, self.root)
        from trtfuse import errors, plugin_library

        return plugin_library, errors
