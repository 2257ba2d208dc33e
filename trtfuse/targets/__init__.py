"""The targets: what an engine is built for, chosen here and built in a child process.

TensorRT's parser and builder end the whole process on some models (an operator taken for a plugin, an
assertion), so a build never runs in the caller's process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from trtfuse.errors import EnvironmentMissing, InputError
from trtfuse.targets import gpu

if TYPE_CHECKING:
    import onnx

    from trtfuse.shapes import Profile

TARGETS = ("auto", "tensorrt", "tensorrt-rtx", "onnx")
_PACKAGES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
_PIP = {"tensorrt": "pip install 'tensorrt>=10.6'", "tensorrt-rtx": "pip install 'tensorrt-rtx>=1.7'"}
# Distributions that bring the module by themselves.
_DISTRIBUTIONS = {
    "tensorrt": tuple(f"tensorrt-cu{n}{part}" for n in (13, 12) for part in ("", "-bindings")),
}
# The newest ONNX opset that the parser of a release states it reads.
_OPSETS = {
    "tensorrt": (((11, 0), 25), ((10, 15), 24), ((0, 0), 20)),
    "tensorrt-rtx": (((1, 7), 25), ((0, 0), 20)),
}
_EXTERNAL = 1_800_000_000  # bytes above which a model in memory is written with external data


@dataclass(frozen=True)
class Plan:
    """A serialized engine.

    data: what the runtime of the target deserializes. compute_capabilities: the GPU architectures it is built
    for ("8.6"); portable: whether later ones run it too. seconds: the build's time, parsing included. layers:
    of the network that was parsed; kernels: of the engine, None where the target does not tell. version: the
    target's. notes: what the user should know, a line each.
    """

    data: bytes
    target: str
    compute_capabilities: tuple[str, ...]
    seconds: float
    layers: int
    version: str
    notes: tuple[str, ...]
    portable: bool = False
    kernels: int | None = None


@dataclass(frozen=True)
class Plugins:
    """The plugins that a model's nodes need.

    library: the file with their creators. sites: names of the nodes, each of which must be a plugin in the
    engine. embedded: whether the engine carries the library, else who loads the engine must load that too.
    """

    library: Path
    sites: tuple[str, ...]
    embedded: bool = True


@dataclass(frozen=True)
class BuildOptions:
    """How to build.

    profile: shapes of the dynamic inputs. compute_capability: GPU architectures ("8.9", "89", "sm_89", or
    "portable", "all", "current"); empty for the portable set where the target has one, else this GPU's.
    timing_cache: a file that is read if it is there and brought up to date after the build, by the target
    that times kernels (tensorrt). plugins: what nodes of our domain become. tf32: whether fp32 may be
    computed in TF32. verbose: the target's own messages go to stderr. progress: called with (phase, step,
    steps) in the calling thread.
    """

    profile: Profile
    compute_capability: tuple[str, ...] = ()
    timing_cache: Path | None = None
    plugins: Plugins | None = None
    tf32: bool = False
    verbose: bool = False
    progress: Callable[[str, int, int], None] | None = None


def pick(target: str) -> str:
    """The concrete target for "auto", "tensorrt", "tensorrt-rtx" or "onnx".

    "auto" is TensorRT where there is an NVIDIA GPU and the package, else TensorRT-RTX. Imports neither.
    Raises InputError for another name, EnvironmentMissing where the package or the GPU it needs is missing.
    """
    if target not in TARGETS:
        raise InputError(f"there is no target {target!r}: use one of {', '.join(TARGETS)}")
    if target == "onnx":
        return target
    if target == "auto":
        target = "tensorrt" if installed("tensorrt") and gpu.count() else "tensorrt-rtx"
    if not installed(target):
        raise EnvironmentMissing(f"the target {target} needs a package that is not installed: {_PIP[target]}")
    if target == "tensorrt" and not gpu.count():
        raise EnvironmentMissing(
            "the target tensorrt needs an NVIDIA GPU and its driver, which are not here: "
            "build there, or use --target tensorrt-rtx"
        )
    return target


def installed(target: str) -> bool:
    """Whether the Python package of a target is there (it is not imported)."""
    try:
        return importlib.util.find_spec(_PACKAGES[target]) is not None
    except (ImportError, ValueError):  # a broken or half removed package
        return False


def version(target: str) -> tuple[int, int]:
    """The installed release of a target, (0, 0) where it is not known."""
    for name in (target, *_DISTRIBUTIONS.get(target, ())):
        with contextlib.suppress(metadata.PackageNotFoundError, ValueError):
            major, minor = metadata.version(name).split(".")[:2]
            return int(major), int(minor)
    return 0, 0


def newest_opset(target: str) -> int:
    """The newest opset of the standard ONNX domain that the target's parser reads."""
    if target not in _OPSETS:
        return 25
    have = version(target)
    return next(opset for since, opset in _OPSETS[target] if have >= since)


def build(target: str, model: onnx.ModelProto | Path, options: BuildOptions) -> Plan:
    """Builds an engine; `model` is a file (external data beside it) or a proto that holds all its data.

    Runs in a child process, which dies with this one. Raises BuildError where the target refuses the model or
    crashes on it, with its own reason; InputError for a compute capability it does not know;
    EnvironmentMissing where the package, a library or a GPU is missing.
    """
    from trtfuse.targets import child

    if target not in _PACKAGES:
        raise InputError(f"no engine can be built for the target {target!r}: use tensorrt or tensorrt-rtx")
    if isinstance(model, (str, Path)):
        return child.build(target, Path(model), options)
    with tempfile.TemporaryDirectory(prefix="trtfuse-") as folder:
        path = Path(folder) / "model.onnx"
        _write(model, path)
        return child.build(target, path, options)


def _write(model: onnx.ModelProto, path: Path) -> None:
    import onnx

    if model.ByteSize() <= _EXTERNAL:
        onnx.save(model, str(path))
        return
    copy = onnx.ModelProto()  # onnx.save moves the weights out of the proto it is given
    copy.CopyFrom(model)
    onnx.save(copy, str(path), save_as_external_data=True, location=path.name + ".data")
