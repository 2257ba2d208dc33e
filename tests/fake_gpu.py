"""A GPU whose memory is the host's, and a TensorRT whose engines double their input: for what runs engines.

An engine file is JSON: {"profiles": [[min, opt, max], ...]} of the shapes of x, or {"shape": [...]}; "dtype";
"code": it carries a library; "bad": TensorRT refuses it; "data": the size of y is known only when it is
computed. y = 2 x.
"""

from __future__ import annotations

import ctypes
import enum
import json
import types
from typing import Any

import numpy as np


class cudaError_t(enum.Enum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorNoDevice = 100


class Runtime(types.ModuleType):
    """In place of cuda.bindings.runtime. Work is done when it is asked for; graphs keep what they replay."""

    cudaError_t = cudaError_t
    cudaStreamNonBlocking = 1
    cudaMemcpyKind = types.SimpleNamespace(cudaMemcpyDefault=4)
    cudaStreamCaptureMode = types.SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)

    def __init__(self) -> None:
        super().__init__("cuda.bindings.runtime")
        self.memory: dict[int, Any] = {}
        self.recording: list[Any] | None = None
        self.fails: cudaError_t | None = None
        self.waits: list[tuple[int, Any]] = []
        self.handles = 100

    def _status(self, *results: Any) -> tuple[Any, ...]:
        return (self.fails or cudaError_t.cudaSuccess, *results)

    def _handle(self) -> int:
        self.handles += 1
        return self.handles

    def cudaGetErrorString(self, status: Any) -> tuple[Any, bytes]:
        return cudaError_t.cudaSuccess, {2: b"out of memory", 100: b"no CUDA-capable device"}[status.value]

    def cudaSetDevice(self, device: int) -> tuple[Any, ...]:
        return self._status()

    def cudaGetDeviceProperties(self, device: int) -> tuple[Any, ...]:
        words = {"name": b"NVIDIA H200", "major": 9, "minor": 0, "totalGlobalMem": 150 << 30}
        words |= {"multiProcessorCount": 132, "pciDomainID": 0, "pciBusID": 4, "pciDeviceID": 0}
        return self._status(types.SimpleNamespace(**words))

    def cudaDriverGetVersion(self) -> tuple[Any, ...]:
        return self._status(13000)

    def cudaMalloc(self, size: int) -> tuple[Any, ...]:
        block = ctypes.create_string_buffer(b"\xff" * size, size)
        self.memory[ctypes.addressof(block)] = block
        return self._status(ctypes.addressof(block))

    def cudaFree(self, address: int) -> tuple[Any, ...]:
        del self.memory[address]
        return self._status()

    def cudaMemcpyAsync(self, to: int, source: int, size: int, kind: Any, stream: int) -> tuple[Any, ...]:
        ctypes.memmove(to, source, size)
        return self._status()

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        return self._status(self._handle())

    def cudaStreamBeginCapture(self, stream: int, mode: Any) -> tuple[Any, ...]:
        self.recording = []
        return self._status()

    def cudaStreamEndCapture(self, stream: int) -> tuple[Any, ...]:
        work, self.recording = self.recording, None
        return self._status(work)

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> tuple[Any, ...]:
        return self._status(graph)

    def cudaGraphLaunch(self, graph: Any, stream: int) -> tuple[Any, ...]:
        for work in graph:
            work()
        return self._status()

    def cudaEventCreate(self) -> tuple[Any, ...]:
        return self._status(self._handle())

    def cudaEventElapsedTime(self, a: Any, b: Any) -> tuple[Any, ...]:
        return self._status(0.25)

    def cudaStreamWaitEvent(self, stream: int, event: Any, flags: int) -> tuple[Any, ...]:
        self.waits.append((stream, event))
        return self._status()

    def _nothing(self, *_: Any) -> tuple[Any, ...]:
        return self._status()

    cudaStreamSynchronize = cudaStreamDestroy = cudaEventRecord = cudaEventSynchronize = _nothing
    cudaEventDestroy = cudaGraphDestroy = cudaGraphExecDestroy = _nothing


class Mode(enum.Enum):
    INPUT = 0
    OUTPUT = 1


class Location(enum.Enum):
    DEVICE = 0
    HOST = 1


class DataType(enum.Enum):
    FLOAT = "float32"
    HALF = "float16"
    INT64 = "int64"
    BF16 = "bfloat16"
    INT4 = "int4"


class Logger:
    ERROR, INTERNAL_ERROR, WARNING, INFO = "error", "internal", "warning", "info"

    def log(self, severity: Any, text: str) -> None:
        raise NotImplementedError


class Allocator:
    pass


class TensorRT(types.ModuleType):
    """In place of the tensorrt package."""

    ILogger = Logger
    TensorIOMode, TensorLocation, DataType = Mode, Location, DataType
    IOutputAllocator = Allocator
    __version__ = "10.6.0"

    def __init__(self, cuda: Runtime) -> None:
        super().__init__("tensorrt")
        self.cuda = cuda
        self.libraries: list[str] = []
        self.contexts = 0

    def nptype(self, dtype: DataType) -> Any:
        if dtype is DataType.INT4:
            raise TypeError("no equivalent")
        return np.dtype(dtype.value)

    def Runtime(self, logger: Any) -> Any:
        return Loader(self, logger)


class Loader:
    engine_host_code_allowed = False

    def __init__(self, trt: TensorRT, logger: Any) -> None:
        self.trt, self.logger = trt, logger

    def get_plugin_registry(self) -> Any:
        return types.SimpleNamespace(load_library=self.trt.libraries.append)

    def deserialize_cuda_engine(self, data: bytes) -> Any:
        try:
            said = json.loads(data)
        except ValueError:
            self.logger.log(Logger.ERROR, "[runtime.cpp::parse::1] magicTag does not match")
            return None
        if said.get("code") and not self.engine_host_code_allowed:
            self.logger.log(Logger.ERROR, "the plan holds host code and engine_host_code_allowed is false")
            return None
        return None if said.get("bad") else FakeEngine(self.trt, said, self.logger)


class FakeEngine:
    num_io_tensors = 2

    def __init__(self, trt: TensorRT, said: dict[str, Any], logger: Any) -> None:
        self.trt, self.said, self.logger = trt, said, logger
        self.ranges = said.get("profiles", [])
        self.num_optimization_profiles = max(1, len(self.ranges))

    def get_tensor_name(self, index: int) -> str:
        return "xy"[index]

    def get_tensor_mode(self, name: str) -> Mode:
        return Mode.INPUT if name == "x" else Mode.OUTPUT

    def get_tensor_location(self, name: str) -> Location:
        return Location.DEVICE

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType(self.said.get("dtype", "float32"))

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.said["shape"]) if "shape" in self.said else (-1,) * len(self.ranges[0][0])

    def get_tensor_profile_shape(self, name: str, number: int) -> list[tuple[int, ...]]:
        return [tuple(s) for s in self.ranges[number]]

    def create_execution_context(self) -> Any:
        self.trt.contexts += 1
        return None if self.said.get("full") else FakeContext(self)


class FakeContext:
    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.address: dict[str, int] = {}
        self.shape: tuple[int, ...] | None = tuple(engine.said["shape"]) if "shape" in engine.said else None
        self.allocator: Any = None
        self.profiles: list[int] = []

    def set_optimization_profile_async(self, number: int, stream: int) -> bool:
        self.profiles.append(number)
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shape = tuple(shape)
        return True

    def infer_shapes(self) -> list[str]:
        return []

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name == "y" and self.engine.said.get("data"):
            return (-1,)
        assert self.shape is not None
        return self.shape

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.address[name] = address
        return True

    def set_output_allocator(self, name: str, allocator: Any) -> bool:
        self.allocator = allocator
        return True

    def execute_async_v3(self, stream: int) -> bool:
        if self.engine.said.get("fails"):
            self.engine.logger.log(Logger.ERROR, "[x.cpp::run::1] the kernel failed")
            return False
        shape, dtype = self.shape, np.dtype(self.engine.said.get("dtype", "float32"))
        assert shape is not None
        size = int(np.prod(shape)) * dtype.itemsize
        if self.allocator is not None:
            self.address["y"] = self.allocator.reallocate_output_async("y", 0, size, 1, stream)
            self.allocator.notify_shape("y", shape)
        source, to = self.address["x"], self.address["y"]

        def work() -> None:
            x = np.frombuffer(ctypes.string_at(source, size), dtype)
            ctypes.memmove(to, (x * 2).astype(dtype).tobytes(), size)

        recording = self.engine.trt.cuda.recording
        work() if recording is None else recording.append(work)
        return True


class OnGpu:
    """A tensor as a framework has it on the GPU: with __dlpack__, of fake GPU memory."""

    def __init__(self, array: Any, device: tuple[int, int] = (2, 0), strides: bool = True) -> None:
        self.array, self.device = array, device
        self.streams: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> Any:
        from trtfuse import dlpack

        self.streams.append(stream)
        a = self.array
        return dlpack.produce(a.ctypes.data, a.shape, a.dtype, self.device, a, versioned=bool(max_version))
