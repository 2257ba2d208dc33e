"""Loading an engine file: the manifest is checked first, and an engine's own code only runs if it is ours.

An engine with plugins inside holds a shared library, which TensorRT writes to disk and runs: to load it is to
run a program.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtfuse import manifest as manifests
from trtfuse import plugin_library, targets
from trtfuse.errors import EnvironmentMissing, InputError
from trtfuse.manifest import Manifest
from trtfuse.targets import messages


@dataclass
class Loaded:
    """A deserialized engine with what must outlive it. errors: what TensorRT logged as errors, growing."""

    trt: Any
    engine: Any
    runtime: Any
    manifest: Manifest | None
    errors: list[str] = field(default_factory=list)


def load(path: Path, *, allow_host_code: bool, plugin_library: Path | None, device: int = 0) -> Loaded:
    """The engine in a file, on the current GPU.

    Raises InputError for a file that is no engine, that differs from its manifest, or whose code is not to be
    trusted; EnvironmentMissing for another TensorRT release or GPU, or a missing library.
    """
    try:
        data = path.read_bytes()
    except OSError as e:
        raise InputError(f"cannot read the engine {path}: {e.strerror or e}; check the path") from e
    manifest = manifests.read(path)
    target = manifest.target if manifest is not None else "tensorrt"
    trt = _module(target)
    library = _library(manifest, plugin_library)
    digest = manifests.hash_bytes(data)
    if manifest is not None:
        manifests.check(
            path,
            digest,
            manifest,
            installed_version=trt.__version__,
            gpu=_gpu(device),
            library=library,
        )
    allowed = manifests.host_code_allowed(manifest, digest, allow=allow_host_code, known=_known())
    if manifest is not None and manifest.plugins is not None and manifest.plugins.embedded and not allowed:
        raise manifests.refusal(path, manifest)
    errors: list[str] = []
    runtime = trt.Runtime(_logger(trt, errors))
    runtime.engine_host_code_allowed = allowed
    if library is not None and not (manifest and manifest.plugins and manifest.plugins.embedded):
        runtime.get_plugin_registry().load_library(str(library))
    engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        raise _refused(path, manifest, errors, allowed)
    return Loaded(trt, engine, runtime, manifest, errors)


def _refused(path: Path, manifest: Manifest | None, errors: list[str], allowed: bool) -> InputError:
    text = " ".join(errors)
    if "host code" in text.lower() or "hostCode" in text:
        return manifests.refusal(path, manifest)
    reason = messages.clean(errors[0]) if errors else "it gives no reason"
    return InputError(
        f"TensorRT cannot load {path}: {reason}; build it again here with `trtfuse build`"
        + ("" if allowed or manifest else ", or allow its own plugins by --allow-host-code")
    )


def _module(target: str) -> Any:
    from trtfuse.targets import tensorrt, tensorrt_rtx

    module = {"tensorrt": tensorrt, "tensorrt-rtx": tensorrt_rtx}.get(target)
    if module is None:
        raise InputError(f"the manifest names the target {target!r}, which this version does not know")
    if not targets.gpu.count():
        raise EnvironmentMissing(
            "an engine runs on an NVIDIA GPU, and the driver shows none here: run it on a machine with one"
        )
    try:
        return module.load()
    except (ImportError, OSError) as e:
        raise EnvironmentMissing(
            f"{messages.NAMES[target]} cannot be loaded ({messages.clean(str(e))}): {module.INSTALL}"
        ) from e


def _library(manifest: Manifest | None, given: Path | None) -> Path | None:
    """The library to load beside the engine: none for an engine that carries its own."""
    if given is not None:
        if not given.is_file():
            raise InputError(f"there is no plugin library {given}: correct the path")
        return given
    if manifest is None or manifest.plugins is None or manifest.plugins.embedded:
        return None
    return plugin_library.find()


def _known() -> set[str]:
    """Hashes of what code of ours may be: this installation's libraries, and the sources they are made of."""
    known: set[str] = set()
    for find in (_own_library, plugin_library.sources_hash):
        try:
            known |= {find()} - {""}
        except EnvironmentMissing:
            continue
    return known


def _own_library() -> str:
    library = plugin_library.find()
    return manifests.hash_file(library).sha256 if library is not None else ""


def _gpu(device: int) -> tuple[str, str]:
    """Name and compute capability of the GPU."""
    from trtfuse import cuda

    properties = cuda.device_properties(device)
    return properties.name, properties.compute_capability


def _logger(trt: Any, errors: list[str]) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                errors.append(text)

    return Logger()
