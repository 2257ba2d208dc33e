"""One builder for TensorRT and TensorRT-RTX: their Python APIs are the same, given the module.

Runs in the child process only.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from trtfuse import files
from trtfuse.errors import BuildError, InputError
from trtfuse.targets import layers, messages

Send = Callable[..., None]


def build(trt: Any, target: ModuleType, order: dict[str, Any], folder: Path, send: Send) -> dict[str, Any]:
    """Parses and builds; writes `folder`/engine and the timing cache, returns what there is to say of them.

    trt: the tensorrt or tensorrt_rtx package. target: our module for it. order: what `child` wrote.
    Raises BuildError with one line, InputError for a compute capability.
    """
    start = time.perf_counter()
    logger, heard = _logger(trt, order["verbose"], send)
    library, sites, embedded = order["plugins"] or (None, (), False)
    if library is not None:
        _load_plugins(trt, library, heard)
    builder = trt.Builder(logger)
    if not builder:
        raise BuildError(messages.build_error(target.NAME, heard.errors))
    config = builder.create_builder_config()
    capabilities, portable, notes = target.set_capabilities(trt, config, order["compute_capability"])
    if not order["tf32"]:
        config.clear_flag(trt.BuilderFlag.TF32)
    if embedded:
        config.plugins_to_serialize = [library]
    network = builder.create_network(target.network_flags(trt))
    send("progress", phase="Parsing", step=0, steps=1)
    _parse(trt, target.NAME, network, logger, order["model"], heard.errors)
    send("progress", phase="Parsing", step=1, steps=1)
    _let_attention_decompose(trt, network)
    _set_profile(builder, config, network, order["profile"], target.NAME)
    monitor = _monitor(trt, send)
    if monitor is not None:
        config.progress_monitor = monitor
    cache = _TimingCache.begin(target, config, order["timing_cache"], heard, notes)
    if target.INSPECTS:
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    data = builder.build_serialized_network(network, config)
    if data is None:
        raise BuildError(messages.build_error(target.NAME, heard.errors))
    with open(folder / "engine", "wb") as f:
        f.write(memoryview(data))
    cache.keep(config)
    kernels = layers.inspect(trt, logger, data) if target.INSPECTS else None
    if kernels is not None:
        layers.require_plugins(kernels, sites)
    return {
        "compute_capabilities": capabilities,
        "portable": portable,
        "seconds": time.perf_counter() - start,
        "layers": network.num_layers,
        "kernels": None if kernels is None else len(kernels),
        "version": trt.__version__,
        "notes": notes,
    }


def _load_plugins(trt: Any, library: str, heard: _Heard) -> None:
    """Makes the library's creators known to the parser."""
    if trt.get_plugin_registry().load_library(library) is None:
        reason = messages.clean(heard.errors[0]) if heard.errors else "TensorRT gives no reason"
        raise BuildError(
            f"TensorRT cannot load the plugin library {library} ({reason}): "
            "build it again with `trtfuse plugins build --force`"
        )


@dataclass
class _Heard:
    """Texts that the logger was given."""

    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def _logger(trt: Any, verbose: bool, send: Send) -> tuple[Any, _Heard]:
    """A logger that sends its lines to the parent, and what it has heard."""
    levels = {
        trt.ILogger.INTERNAL_ERROR: "error",
        trt.ILogger.ERROR: "error",
        trt.ILogger.WARNING: "warning",
        trt.ILogger.INFO: "info",
    }
    heard = _Heard()

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            level = levels.get(severity, "verbose")
            if level in ("error", "warning"):
                (heard.errors if level == "error" else heard.warnings).append(text)
            if verbose or level in ("error", "warning"):
                send("log", severity=level, text=text)

    return Logger(), heard


def _parse(trt: Any, name: str, network: Any, logger: Any, path: str, errors: list[str]) -> None:
    parser = trt.OnnxParser(network, logger)
    if parser.parse_from_file(path):
        return
    if parser.num_errors == 0:
        raise BuildError(messages.build_error(name, errors))
    error = parser.get_error(0)
    text = str(error.desc())
    node, op = str(error.node_name() or ""), str(error.node_operator() or "")
    raise BuildError(messages.parse_error(name, node, op, int(error.node()), text))


def _let_attention_decompose(trt: Any, network: Any) -> None:
    """Attention for which there is no kernel of its own (float32, odd head sizes) is built of its parts.

    Without this the build fails there; where there is a kernel nothing changes.
    """
    kind = getattr(trt.LayerType, "ATTENTION_INPUT", None)
    if kind is None or not hasattr(getattr(trt, "IAttentionInputLayer", None), "attention"):
        return
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == kind:
            layer.__class__ = trt.IAttentionInputLayer  # how TensorRT's Python API casts down
            layer.attention.decomposable = True


def _set_profile(builder: Any, config: Any, network: Any, shapes: dict[str, Any], name: str) -> None:
    """One optimization profile for all dynamic inputs."""
    profile = builder.create_optimization_profile()
    used = False
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        if tensor.name in shapes:
            try:
                profile.set_shape(tensor.name, *shapes[tensor.name])
            except ValueError as e:
                raise BuildError(messages.build_error(name, [f"shape of {tensor.name}: {e}"])) from e
            used = True
        elif any(d == -1 for d in tensor.shape):
            raise BuildError(
                f"{messages.NAMES[name]} sees a dynamic input {tensor.name!r} that has no shapes: "
                "give them with --min-shapes, --opt-shapes and --max-shapes"
            )
    if used and config.add_optimization_profile(profile) < 0:
        raise BuildError(messages.build_error(name, ["the optimization profile is not valid"]))


def _monitor(trt: Any, send: Send) -> Any:
    """A progress monitor, None where this release has none."""
    if not hasattr(trt, "IProgressMonitor"):
        return None

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.steps[phase_name] = num_steps
            send("progress", phase=phase_name, step=0, steps=num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            send("progress", phase=phase_name, step=step + 1, steps=self.steps.get(phase_name, step + 1))
            return True

        def phase_finish(self, phase_name: str) -> None:
            steps = self.steps.pop(phase_name, 1)
            send("progress", phase=phase_name, step=steps, steps=steps)

    return Monitor()


class _TimingCache:
    """TensorRT's measurements of kernels, in a file that several builds may use at once.

    Read before the build; afterwards what this one measured is merged, under a lock, into what is there then.
    """

    def __init__(self, path: Path | None, cache: Any) -> None:
        self.path = path
        self.cache = cache

    @classmethod
    def begin(
        cls, target: ModuleType, config: Any, path: str | None, heard: _Heard, notes: list[str]
    ) -> _TimingCache:
        """With the cache at `path`, a new one where there is none or it is of another release."""
        if path is None:
            return cls(None, None)
        if not target.TIMES_KERNELS:
            notes.append(
                f"{messages.NAMES[target.NAME]} times no kernels while building: no timing cache is written"
            )
            return cls(None, None)
        before = len(heard.warnings), len(heard.errors)
        data = Path(path).read_bytes() if Path(path).exists() else b""
        cache = config.create_timing_cache(data)
        unread = any("timing cache" in text for text in heard.warnings[before[0] :])
        if data and (unread or not cache or not config.set_timing_cache(cache, False)):
            notes.append(
                f"the timing cache {path} is of another release or GPU, or damaged: it is begun anew"
            )
            data, cache = b"", config.create_timing_cache(b"")
        if not data and not config.set_timing_cache(cache, False):
            notes.append("no timing cache can be used here: none is written")
            cache = None
        del heard.errors[before[1] :]  # a cache that cannot be read is no reason for a build to fail
        return cls(Path(path), cache)

    def keep(self, config: Any) -> None:
        """Writes the cache. A place that cannot be written costs the cache, not the engine."""
        if self.path is None or self.cache is None:
            return
        made = config.get_timing_cache()
        with files.lock(self.path), contextlib.suppress(InputError):
            there = self.path.read_bytes() if self.path.exists() else b""
            other = config.create_timing_cache(there) if there else None
            if other:
                made.combine(other, True)
            with files.atomic_write(self.path) as f:
                f.write(memoryview(made.serialize()))
