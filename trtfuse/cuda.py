"""The few calls of CUDA's runtime that running an engine takes, over the cuda-bindings package."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trtfuse.errors import EnvironmentMissing, RunError

INSTALL = "pip install 'trtfuse[tensorrt]'"


@functools.cache
def runtime() -> Any:
    """The module cuda.bindings.runtime. Raises EnvironmentMissing where the package is not installed."""
    try:
        from cuda.bindings import runtime as module
    except ImportError as e:
        raise EnvironmentMissing(
            f"engines run with the package cuda-bindings, which is missing: {INSTALL}"
        ) from e
    return module


def call(name: str, *arguments: Any) -> Any:
    """`cuda.bindings.runtime.<name>(*arguments)`: its result, or a tuple of several.

    Raises EnvironmentMissing where there is no driver or GPU, RunError for any other failure.
    """
    module = runtime()
    status, *results = getattr(module, name)(*arguments)
    if status != module.cudaError_t.cudaSuccess:
        text = module.cudaGetErrorString(status)[1]
        words = text.decode() if isinstance(text, bytes) else str(text)
        missing = ("cudaErrorNoDevice", "cudaErrorInsufficientDriver", "cudaErrorStubLibrary")
        if status.name in missing:
            raise EnvironmentMissing(f"there is no NVIDIA GPU to run on ({words}): use a machine with one")
        advice = ": use smaller shapes, or free GPU memory" if "MemoryAllocation" in status.name else ""
        raise RunError(f"CUDA's {name} failed: {words}{advice}")
    return results[0] if len(results) == 1 else tuple(results)


@dataclass(frozen=True)
class Properties:
    """A GPU. memory: bytes. multiprocessors: how many there are. bus: PCI bus id."""

    name: str
    compute_capability: str
    memory: int
    multiprocessors: int
    bus: str


def device_properties(device: int = 0) -> Properties:
    """What the GPU of an index is."""
    p = call("cudaGetDeviceProperties", device)
    name = p.name.decode() if isinstance(p.name, bytes) else str(p.name)
    bus = f"{p.pciDomainID:08x}:{p.pciBusID:02x}:{p.pciDeviceID:02x}.0"
    return Properties(
        name.rstrip("\0"), f"{p.major}.{p.minor}", int(p.totalGlobalMem), int(p.multiProcessorCount), bus
    )


def set_device(device: int) -> None:
    """Makes a GPU the current one of this thread."""
    call("cudaSetDevice", device)


def driver_version() -> str:
    """The CUDA version that the driver supports, "13.0"."""
    number = int(call("cudaDriverGetVersion"))
    return f"{number // 1000}.{number % 1000 // 10}"


def copy_async(target: int, source: int, size: int, stream: Stream) -> None:
    """Copies bytes between any two addresses, of the host or the GPU, in the order of the stream."""
    kind = runtime().cudaMemcpyKind.cudaMemcpyDefault
    call("cudaMemcpyAsync", target, source, size, kind, stream.handle)


class _Owned:
    """Something of CUDA's that is given back with the object; never raises then, at the interpreter's end
    neither."""

    _release: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self._release is not None:
            with contextlib.suppress(Exception):
                self._release()


class Buffer(_Owned):
    """Memory on the current GPU. ptr: its address; nbytes: as asked for (at least one byte is there)."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.ptr = int(call("cudaMalloc", max(nbytes, 1)))
        self._release = functools.partial(runtime().cudaFree, self.ptr)


class Stream(_Owned):
    """An order of work on the current GPU. handle: cudaStream_t."""

    def __init__(self) -> None:
        module = runtime()
        created = call("cudaStreamCreateWithFlags", module.cudaStreamNonBlocking)
        self.handle = int(created)
        self._release = functools.partial(module.cudaStreamDestroy, created)

    def synchronize(self) -> None:
        """Waits until all its work is done."""
        call("cudaStreamSynchronize", self.handle)


class Event(_Owned):
    """A mark in a stream, with a time."""

    def __init__(self) -> None:
        self._event = call("cudaEventCreate")
        self._release = functools.partial(runtime().cudaEventDestroy, self._event)

    def record(self, stream: int) -> None:
        """Marks the end of what the stream has been given so far."""
        call("cudaEventRecord", self._event, stream)

    def synchronize(self) -> None:
        """Waits for it."""
        call("cudaEventSynchronize", self._event)

    def seconds_since(self, earlier: Event) -> float:
        """The time between two marks that have both been reached, in seconds (resolution 0.5 us)."""
        return float(call("cudaEventElapsedTime", earlier._event, self._event)) / 1e3

    def hold(self, stream: int) -> None:
        """Lets a stream wait for it."""
        call("cudaStreamWaitEvent", stream, self._event, 0)


class Graph(_Owned):
    """Launches that were recorded once and are started together."""

    def __init__(self, executable: Any) -> None:
        self._executable = executable
        self._release = functools.partial(runtime().cudaGraphExecDestroy, executable)

    @classmethod
    def capture(cls, stream: Stream, enqueue: Callable[[], None]) -> Graph:
        """Records what `enqueue` gives to the stream. Raises RunError where that cannot be recorded."""
        module = runtime()
        call(
            "cudaStreamBeginCapture",
            stream.handle,
            module.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal,
        )
        try:
            enqueue()
        except BaseException:
            with contextlib.suppress(RunError):
                call("cudaStreamEndCapture", stream.handle)
            raise
        graph = call("cudaStreamEndCapture", stream.handle)
        try:
            return cls(call("cudaGraphInstantiate", graph, 0))
        finally:
            module.cudaGraphDestroy(graph)

    def launch(self, stream: Stream) -> None:
        """Starts the recorded launches in the order of the stream."""
        call("cudaGraphLaunch", self._executable, stream.handle)
