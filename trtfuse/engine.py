"""Running a serialized engine: NumPy or DLPack tensors in, the same kind out, no framework needed."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from trtfuse import cuda, loading
from trtfuse.dlpack import DeviceTensor, consume
from trtfuse.errors import InputError, RunError

if TYPE_CHECKING:
    from trtfuse.manifest import Manifest

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Tensor:
    """An input or output of an engine. shape: -1 where dynamic. profiles: of an input with dynamic axes, its
    smallest, preferred and largest shape in each optimization profile. on_host: a shape input, whose values
    the engine reads before it starts."""

    name: str
    dtype: np.dtype[Any]
    shape: Shape
    profiles: tuple[tuple[Shape, Shape, Shape], ...] = ()
    on_host: bool = False


class Engine:
    """A serialized engine on a GPU.

    engine = Engine("model.engine")
    outputs = engine({"x": np.zeros((1, 3, 224, 224), np.float32)})

    An engine that carries plugins is a program: it is loaded if the manifest beside it names trtfuse's plugin
    library, or with `allow_host_code`. plugin_library: for an engine built with --external-plugins; by
    default the one that trtfuse finds. device: the GPU's index.

    Safe to use from several threads: each has a context (activations, stream, graphs) of its own, freed with
    the thread. Raises EnvironmentMissing where the GPU, the TensorRT release or a library is missing or
    another, InputError for a file that is no engine or not to be trusted.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        allow_host_code: bool = False,
        plugin_library: str | Path | None = None,
        device: int = 0,
    ) -> None:
        self.path = Path(path)
        self.device = device
        cuda.set_device(device)
        self._loaded = loading.load(
            self.path,
            allow_host_code=allow_host_code,
            plugin_library=Path(plugin_library) if plugin_library is not None else None,
            device=device,
        )
        self._engine = self._loaded.engine
        tensors = [self._tensor(i) for i in range(self._engine.num_io_tensors)]
        mode = self._loaded.trt.TensorIOMode.INPUT
        self.inputs = {t.name: t for t in tensors if self._engine.get_tensor_mode(t.name) == mode}
        self.outputs = {t.name: t for t in tensors if t.name not in self.inputs}
        self._local = threading.local()

    @property
    def manifest(self) -> Manifest | None:
        """What the engine is made of, if the manifest is beside it."""
        return self._loaded.manifest

    @property
    def profiles(self) -> int:
        """How many optimization profiles there are."""
        return int(self._engine.num_optimization_profiles)

    def opt_shapes(self, profile: int = 0) -> dict[str, Shape]:
        """The shapes of all inputs that a profile prefers."""
        return {n: t.profiles[profile][1] if t.profiles else t.shape for n, t in self.inputs.items()}

    def __call__(
        self,
        feed: Mapping[str, Any],
        *,
        outputs: Sequence[str] | None = None,
        profile: int | None = None,
        cuda_graph: bool = False,
    ) -> dict[str, Any]:
        """The outputs (all, or those named) for a feed: a tensor for every input.

        NumPy arrays give NumPy arrays. With a tensor on the GPU among them (whatever has __dlpack__: PyTorch,
        CuPy, JAX) the outputs are DeviceTensors, which those take by from_dlpack. profile: by default the
        first that the shapes fit. cuda_graph: record the launches at the first call with these shapes and
        replay them from then on; its inputs are copied to where the recording reads them.

        Raises InputError for a feed that does not fit, RunError where TensorRT fails.
        """
        names = list(outputs) if outputs is not None else list(self.outputs)
        if unknown := [n for n in names if n not in self.outputs]:
            raise InputError(f"{self.path} has no output {unknown[0]!r}: there are {', '.join(self.outputs)}")
        context = self._context()
        given = context.check(feed)
        context.shape({n: g.shape for n, g in given.items()}, profile, given)
        results = context.run(given, cuda_graph)
        return {name: results[name] for name in names}

    def context(self) -> Context:
        """A new execution context; see `Context`. For one thread at a time."""
        return Context(self)

    def close(self) -> None:
        """Frees this thread's context and the engine; otherwise both go with the object."""
        self._local = threading.local()
        self._engine = None
        self._loaded = None  # type: ignore[assignment]

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _context(self) -> Context:
        cuda.set_device(self.device)  # a property of the thread
        if not hasattr(self._local, "context"):
            self._local.context = Context(self)
        context: Context = self._local.context
        return context

    def _tensor(self, index: int) -> Tensor:
        engine, trt = self._engine, self._loaded.trt
        name = engine.get_tensor_name(index)
        shape = tuple(engine.get_tensor_shape(name))
        on_host = engine.get_tensor_location(name) == trt.TensorLocation.HOST
        profiles: tuple[tuple[Shape, Shape, Shape], ...] = ()
        if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT and -1 in shape and not on_host:
            numbers = range(engine.num_optimization_profiles)
            ranges = [engine.get_tensor_profile_shape(name, n) for n in numbers]
            profiles = tuple((tuple(a), tuple(b), tuple(c)) for a, b, c in ranges)
        return Tensor(name, _numpy_type(trt, engine.get_tensor_dtype(name)), shape, profiles, on_host)


def _numpy_type(trt: Any, dtype: Any) -> np.dtype[Any]:
    extra = {"BF16": ml_dtypes.bfloat16, "FP8": ml_dtypes.float8_e4m3fn}
    if dtype.name in extra:
        return np.dtype(extra[dtype.name])
    try:
        return np.dtype(trt.nptype(dtype))
    except TypeError as e:
        raise InputError(f"the engine has a tensor of type {dtype.name}, which no array holds") from e


@dataclass
class _Given:
    """One tensor of a feed. array: on the host. view: on the GPU (a dlpack View)."""

    shape: Shape
    array: np.ndarray[Any, Any] | None = None
    view: Any = None


class Context:
    """One execution of an engine at a time: activations, a stream, buffers and recorded graphs.

    For measuring: `shape`, `upload`, then `enqueue` (or `record` and `launch`) as often as wanted.
    """

    def __init__(self, engine: Engine) -> None:
        self.owner = engine
        self.stream = cuda.Stream()
        self._trt = engine._loaded.trt
        self._errors = engine._loaded.errors
        context = engine._engine.create_execution_context()
        if context is None:
            raise RunError(
                f"TensorRT cannot make a context for {engine.path} ({self._why()}): free GPU memory"
            )
        self._context = context
        self._profile = 0
        self._shapes: dict[str, Shape] = {}
        self._buffers: dict[str, cuda.Buffer] = {}
        self._host: dict[str, np.ndarray[Any, Any]] = {}
        self._allocators: dict[str, Any] = {}
        self._graphs: dict[Any, cuda.Graph] = {}

    # --- what goes in ---

    def check(self, feed: Mapping[str, Any]) -> dict[str, _Given]:
        """The feed, each tensor of the right type. Raises InputError naming the input and what it takes."""
        inputs = self.owner.inputs
        for name in feed:
            if name not in inputs:
                raise InputError(f"{self.owner.path} has no input {name!r}: there are {', '.join(inputs)}")
        for name in inputs:
            if name not in feed:
                raise InputError(f"the input {name!r} is missing: give it an array of {inputs[name].dtype}")
        return {name: self._given(name, feed[name]) for name in inputs}

    def _given(self, name: str, value: Any) -> _Given:
        tensor = self.owner.inputs[name]
        if not isinstance(value, np.ndarray) and hasattr(value, "__dlpack_device__"):
            view = consume(value, stream=self.stream.handle)
            if view.device_type != 1:  # kDLCPU
                if view.dtype != tensor.dtype:
                    raise _wrong_type(name, view.dtype, tensor.dtype)
                if not view.is_contiguous or tensor.on_host:
                    raise InputError(
                        f"the input {name!r} must be contiguous and on "
                        f"{'the CPU' if tensor.on_host else 'the GPU'}: make it so first"
                    )
                return _Given(tuple(view.shape), view=view)
            value = np.from_dlpack(value)
        array = np.asarray(value)
        if array.dtype != tensor.dtype:
            raise _wrong_type(name, array.dtype, tensor.dtype)
        return _Given(array.shape, array=np.ascontiguousarray(array).reshape(array.shape))

    def shape(
        self,
        shapes: Mapping[str, Shape],
        profile: int | None = None,
        given: Mapping[str, _Given] | None = None,
    ) -> None:
        """Sets the inputs' shapes. Raises InputError where no profile takes them."""
        number = self._fitting(shapes) if profile is None else profile
        if not 0 <= number < max(1, self.owner.profiles):
            raise InputError(f"{self.owner.path} has no profile {number}: it has {self.owner.profiles}")
        if number != self._profile:
            if not self._context.set_optimization_profile_async(number, self.stream.handle):
                raise RunError(f"TensorRT cannot switch to profile {number}: {self._why()}")
            self.stream.synchronize()
            self._profile, self._shapes = number, {}
        on_host = [n for n, t in self.owner.inputs.items() if t.on_host]
        if dict(shapes) == self._shapes and not on_host:
            return
        for name, shape in shapes.items():
            if not self._context.set_input_shape(name, tuple(shape)):
                raise InputError(self._misfit(name, shape, number))
        for name in on_host:
            self._set_values(name, shapes[name], given)
        missing = self._context.infer_shapes()
        if missing:
            raise InputError(
                f"the shapes or values of {', '.join(missing)} do not fit the engine: {self._why()}"
            )
        self._shapes = dict(shapes)

    def _set_values(self, name: str, shape: Shape, given: Mapping[str, _Given] | None) -> None:
        """A shape input: its values, which must outlive the run."""
        array = given[name].array if given is not None else None
        if array is None:
            array = np.ones(shape, self.owner.inputs[name].dtype)
        self._host[name] = np.atleast_1d(array).copy()
        self._context.set_tensor_address(name, self._host[name].ctypes.data)

    def _fitting(self, shapes: Mapping[str, Shape]) -> int:
        for number in range(self.owner.profiles):
            if all(self._fits(name, shape, number) for name, shape in shapes.items()):
                return number
        name = next((n for n, s in shapes.items() if not self._fits(n, s, 0)), next(iter(shapes)))
        raise InputError(self._misfit(name, shapes[name], 0))

    def _fits(self, name: str, shape: Shape, profile: int) -> bool:
        tensor = self.owner.inputs[name]
        if tensor.on_host:
            return True
        low, _, high = tensor.profiles[profile] if tensor.profiles else (tensor.shape,) * 3
        return len(shape) == len(low) and all(a <= d <= b for a, d, b in zip(low, shape, high, strict=True))

    def _misfit(self, name: str, shape: Shape, profile: int) -> str:
        tensor = self.owner.inputs[name]
        if tensor.profiles:
            low, _, high = tensor.profiles[profile]
            takes = f"from {_text(low)} to {_text(high)}"
            advice = "; build the engine for it with --min-shapes and --max-shapes"
        else:
            takes, advice = _text(tensor.shape), ""
        return f"the input {name!r} has shape {_text(shape)}, and the engine takes {takes}{advice}"

    # --- running ---

    def upload(self, given: Mapping[str, _Given], static: bool) -> None:
        """Brings the feed to the GPU; with `static` into this context's own buffers."""
        for name, value in given.items():
            tensor = self.owner.inputs[name]
            if tensor.on_host:
                continue
            if value.view is not None and not static:
                self._context.set_tensor_address(name, value.view.ptr or self._buffer(name, 1).ptr)
                continue
            size = int(np.prod(value.shape, dtype=np.int64)) * tensor.dtype.itemsize
            buffer = self._buffer(name, size)
            if size:
                source = value.view.ptr if value.view is not None else value.array.ctypes.data  # type: ignore[union-attr]
                cuda.copy_async(buffer.ptr, source, size, self.stream)
            self._context.set_tensor_address(name, buffer.ptr)

    def bind_outputs(self, fresh: bool) -> dict[str, cuda.Buffer]:
        """Gives every output memory: of this context, or `fresh` for the caller to keep."""
        made: dict[str, cuda.Buffer] = {}
        for name in self.owner.outputs:
            size = self._output_bytes(name)
            if size is None:
                self._context.set_output_allocator(name, self._allocator(name))
                continue
            made[name] = cuda.Buffer(size) if fresh else self._buffer(name, size)
            self._context.set_tensor_address(name, made[name].ptr)
        return made

    def enqueue(self) -> None:
        """Starts one inference on the stream. Raises RunError where TensorRT refuses."""
        if not self._context.execute_async_v3(self.stream.handle):
            raise RunError(f"TensorRT cannot run {self.owner.path}: {self._why()}")

    def record(self) -> cuda.Graph:
        """The launches at the present shapes and addresses as a CUDA graph."""
        self.enqueue()  # what TensorRT does at the first run only must not be in the recording
        self.stream.synchronize()
        return cuda.Graph.capture(self.stream, self.enqueue)

    def run(self, given: Mapping[str, _Given], cuda_graph: bool) -> dict[str, Any]:
        """The outputs for a feed whose shapes are set."""
        on_device = any(g.view is not None for g in given.values())
        if cuda_graph and any(self._output_bytes(n) is None for n in self.owner.outputs):
            raise InputError(
                "the sizes of the outputs depend on the data: run this engine without a CUDA graph"
            )
        self.upload(given, static=cuda_graph)
        buffers = self.bind_outputs(fresh=on_device and not cuda_graph)
        if cuda_graph:
            key = (self._profile, tuple(sorted(self._shapes.items())))
            if key not in self._graphs:
                self._graphs[key] = self.record()
            self._graphs[key].launch(self.stream)
        else:
            self.enqueue()
        return self._results(buffers, on_device, copied=cuda_graph)

    def _results(self, buffers: Mapping[str, cuda.Buffer], on_device: bool, copied: bool) -> dict[str, Any]:
        results: dict[str, Any] = {}
        if any(name not in buffers for name in self.owner.outputs):
            self.stream.synchronize()  # the allocators know the shapes now
        for name, tensor in self.owner.outputs.items():
            if name in buffers:
                buffer, shape = buffers[name], tuple(self._context.get_tensor_shape(name))
            else:
                buffer, shape = self._allocators[name].take()
            size = int(np.prod(shape, dtype=np.int64)) * tensor.dtype.itemsize
            if on_device:
                if copied:  # the recording will write there again
                    own = cuda.Buffer(size)
                    if size:
                        cuda.copy_async(own.ptr, buffer.ptr, size, self.stream)
                    buffer = own
                results[name] = DeviceTensor(
                    buffer.ptr, shape, tensor.dtype, self.owner.device, owner=buffer, stream=self.stream
                )
                continue
            array = np.empty(shape, tensor.dtype)
            if size:
                cuda.copy_async(array.ctypes.data, buffer.ptr, size, self.stream)
            results[name] = array
        if not on_device:
            self.stream.synchronize()
        return results

    def _output_bytes(self, name: str) -> int | None:
        """Bytes of an output, None where its shape depends on the data."""
        shape = tuple(self._context.get_tensor_shape(name))
        if any(d < 0 for d in shape):
            return None
        return int(np.prod(shape, dtype=np.int64)) * self.owner.outputs[name].dtype.itemsize

    def _buffer(self, name: str, size: int) -> cuda.Buffer:
        """This context's memory for a tensor. Where it must grow, recorded graphs are void."""
        have = self._buffers.get(name)
        if have is None or have.nbytes < size:
            self.stream.synchronize()
            self._graphs.clear()
            have = self._buffers[name] = cuda.Buffer(size)
        return have

    def _allocator(self, name: str) -> Any:
        if name not in self._allocators:
            self._allocators[name] = _allocator(self._trt)
        return self._allocators[name]

    def _why(self) -> str:
        from trtfuse.targets.messages import clean

        return clean(self._errors[-1]) if self._errors else "it gives no reason"


def _allocator(trt: Any) -> Any:
    """Memory for an output whose size is known when it is computed."""

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)
            self.buffer = cuda.Buffer(0)
            self.shape: Shape = ()

        def reallocate_output_async(self, name: str, memory: int, size: int, align: int, stream: int) -> int:
            if self.buffer.nbytes < size:
                self.buffer = cuda.Buffer(size)
            return int(self.buffer.ptr)

        def reallocate_output(self, name: str, memory: int, size: int, align: int) -> int:
            return self.reallocate_output_async(name, memory, size, align, 0)

        def notify_shape(self, name: str, shape: Iterable[int]) -> None:
            self.shape = tuple(shape)

        def take(self) -> tuple[cuda.Buffer, Shape]:
            """The memory, which from now on is the caller's, and the shape."""
            buffer, self.buffer = self.buffer, cuda.Buffer(0)
            return buffer, self.shape

    return Allocator()


def _wrong_type(name: str, have: Any, want: Any) -> InputError:
    return InputError(f"the input {name!r} is of {have}, and the engine takes {want}: convert it with astype")


def _text(shape: Sequence[int]) -> str:
    return "x".join("?" if d < 0 else str(d) for d in shape) or "scalar"
