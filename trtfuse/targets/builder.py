"""One builder for TensorRT and TensorRT-RTX: their Python APIs are the same, given the module.

Runs in the child process only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from trtfuse.errors import BuildError
from trtfuse.targets import messages

Send = Callable[..., None]


def build(trt: Any, target: ModuleType, order: dict[str, Any], folder: Path, send: Send) -> dict[str, Any]:
    """Parses and builds; writes `folder`/engine (and `folder`/cache) and returns what there is to say of it.

    trt: the tensorrt or tensorrt_rtx package. target: our module for it. order: what `child` wrote.
    Raises BuildError with one line, InputError for a compute capability.
    """
    start = time.perf_counter()
    logger, errors = _logger(trt, order["verbose"], send)
    builder = trt.Builder(logger)
    if not builder:
        raise BuildError(messages.build_error(target.NAME, errors))
    config = builder.create_builder_config()
    capabilities, notes = target.set_capabilities(trt, config, order["compute_capability"])
    network = builder.create_network(target.network_flags(trt))
    send("progress", phase="Parsing", step=0, steps=1)
    _parse(trt, target.NAME, network, logger, order["model"], errors)
    send("progress", phase="Parsing", step=1, steps=1)
    _set_profile(builder, config, network, order["profile"], target.NAME)
    monitor = _monitor(trt, send)
    if monitor is not None:
        config.progress_monitor = monitor
    cache = _timing_cache(config, order["timing_cache"], notes)
    data = builder.build_serialized_network(network, config)
    if data is None:
        raise BuildError(messages.build_error(target.NAME, errors))
    with open(folder / "engine", "wb") as f:
        f.write(memoryview(data))
    if cache is not None:
        (folder / "cache").write_bytes(memoryview(config.get_timing_cache().serialize()))
    return {
        "compute_capabilities": capabilities,
        "seconds": time.perf_counter() - start,
        "layers": network.num_layers,
        "version": trt.__version__,
        "notes": notes,
    }


def _logger(trt: Any, verbose: bool, send: Send) -> tuple[Any, list[str]]:
    """A logger that sends its lines to the parent, and the errors it has seen."""
    levels = {
        trt.ILogger.INTERNAL_ERROR: "error",
        trt.ILogger.ERROR: "error",
        trt.ILogger.WARNING: "warning",
        trt.ILogger.INFO: "info",
    }
    errors: list[str] = []

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            level = levels.get(severity, "verbose")
            if level == "error":
                errors.append(text)
            if verbose or level in ("error", "warning"):
                send("log", severity=level, text=text)

    return Logger(), errors


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


def _timing_cache(config: Any, path: str | None, notes: list[str]) -> Any:
    """The cache at `path`, a new one where there is none or it is of another release; None without a path."""
    if path is None:
        return None
    data = Path(path).read_bytes() if Path(path).exists() else b""
    cache = config.create_timing_cache(data)
    if data and (not cache or not config.set_timing_cache(cache, False)):
        notes.append(f"the timing cache {path} is of another release or GPU: it is begun anew")
        data, cache = b"", config.create_timing_cache(b"")
    if not data and not config.set_timing_cache(cache, False):
        notes.append("timing caches are not taken here: none is written")
        return None
    return cache
