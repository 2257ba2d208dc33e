"""ONNX Runtime on the GPU as something to time: the model as it was, on the same stream and inputs."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trtfuse.errors import EnvironmentMissing, InputError, TrtfuseError

PROVIDER = "CUDAExecutionProvider"
INSTALL = "pip install 'onnxruntime-gpu[cuda,cudnn]'"


class OrtCandidate:
    """A model in ONNX Runtime's CUDA provider, with inputs and outputs on the GPU.

    feed: an array for each input; bfloat16 and float8 inputs take ml_dtypes' arrays or float32 ones. stream:
    a cudaStream_t other than the default one; the caller keeps it alive. tf32: whether float32 GEMMs may use
    it. cuda_graph: record and replay one where ONNX Runtime can. device: the GPU's index as CUDA counts. All
    calls belong to the thread that made the object, which has the recorded graph.

    notes: in words, whether there is a CUDA graph and why not.

    Raises EnvironmentMissing where the CUDA provider is not there or does not load, InputError for a model or
    feed that it cannot run.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        feed: Mapping[str, Any],
        stream: int,
        *,
        name: str = "onnxruntime",
        tf32: bool = False,
        cuda_graph: bool = True,
        device: int = 0,
    ) -> None:
        if not stream:
            raise ValueError("ONNX Runtime takes the default stream for none: give it a stream of its own")
        self.name = name
        self.stream = stream
        self.notes: list[str] = []
        self._model = Path(model)
        self._feed = feed
        self._tf32 = tf32
        self._device = device
        self._unloaded = _load_libraries()
        with _quiet():
            self._start(cuda_graph)

    def enqueue(self) -> None:
        """Starts one inference on the stream. Raises what ONNX Runtime raises where it fails."""
        self._session.run_with_iobinding(self._binding, self._options)

    def _start(self, cuda_graph: bool) -> None:
        """Prepares with a CUDA graph, or without one where ONNX Runtime refuses it.

        Its errors have no base of their own, hence Exception.
        """
        if cuda_graph:
            try:
                self._prepare(cuda_graph=True)
                self.notes.append("ONNX Runtime replays a CUDA graph")
                return
            except TrtfuseError:
                raise
            except Exception as e:
                self.notes.append(f"ONNX Runtime runs without a CUDA graph: {_words(e)}")
        try:
            self._prepare(cuda_graph=False)
        except TrtfuseError:
            raise
        except Exception as e:
            raise InputError(f"ONNX Runtime cannot run {self._model} on the GPU: {_words(e)}") from e

    def _prepare(self, cuda_graph: bool) -> None:
        """The session, its bindings and the first inference, at which ONNX Runtime records the graph."""
        import onnxruntime

        self._session = self._open(cuda_graph)
        self._binding = self._session.io_binding()
        self._inputs = [self._bind(i.name, i.type) for i in self._session.get_inputs()]
        for output in self._session.get_outputs():
            # Allocated at the first inference; the later ones write to the same place.
            self._binding.bind_output(output.name, "cuda", self._device)
        self._options = onnxruntime.RunOptions()
        self._options.log_severity_level = 4
        # Without it every inference waits for the GPU before the next one starts.
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self.enqueue()
        self._binding.synchronize_outputs()

    def _open(self, cuda_graph: bool) -> Any:
        import onnxruntime

        cuda = {
            "device_id": str(self._device),
            "user_compute_stream": str(self.stream),
            "use_tf32": str(int(self._tf32)),
            "enable_cuda_graph": str(int(cuda_graph)),
        }
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        providers = [(PROVIDER, cuda), "CPUExecutionProvider"]
        # By default a session that the provider refuses is made again on the CPU, with a line on stdout.
        session = onnxruntime.InferenceSession(
            str(self._model), options, providers=providers, enable_fallback=0
        )
        if PROVIDER not in session.get_providers():
            why = f" ({self._unloaded})" if self._unloaded else ""
            raise _missing(f"its CUDA provider does not load{why}")
        return session

    def _bind(self, name: str, kind: str) -> Any:
        """Brings one input to the GPU; the value that holds its memory."""
        import onnxruntime

        if name not in self._feed:
            raise InputError(f"the input {name!r} of {self._model} is missing: give it an array ({kind})")
        number, bits = _bits(self._feed[name], kind)
        value = onnxruntime.OrtValue.ortvalue_from_numpy(bits, "cuda", self._device)
        self._binding.bind_input(name, "cuda", self._device, number, bits.shape, value.data_ptr())
        return value


def _bits(array: Any, kind: str) -> tuple[int, np.ndarray]:
    """An input of ONNX Runtime's type `kind`: the element type's number in ONNX, and an array of a type that
    NumPy has, of the same bits."""
    from onnx import helper

    from trtfuse.ort import _RAW

    array = np.asarray(array)
    if kind not in _RAW:
        return int(helper.np_dtype_to_tensor_dtype(array.dtype)), np.array(array, order="C")
    number, dtype, view = _RAW[kind]
    return number, np.array(array.astype(dtype), order="C").view(view)


def _load_libraries() -> str:
    """Loads the CUDA libraries that pip installs, which the provider would not find by itself.

    Returns the first one that is missing and why, "" where none is. Raises EnvironmentMissing where this
    onnxruntime has no CUDA provider.
    """
    import onnxruntime

    if PROVIDER not in onnxruntime.get_available_providers():
        raise _missing("this onnxruntime has no CUDA provider")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):  # it prints what it does not find
        onnxruntime.preload_dlls()
    failed = re.search(r"Failed to load \S+: (.*)", said.getvalue())
    return failed[1].strip() if failed else ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps ONNX Runtime from writing to stderr why a provider does not load; the error says it."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    try:
        yield
    finally:
        onnxruntime.set_default_logger_severity(2)  # its default; what it was cannot be asked


def _missing(what: str) -> EnvironmentMissing:
    return EnvironmentMissing(
        f"ONNX Runtime cannot be timed on the GPU, since {what}: on a machine with an NVIDIA GPU, {INSTALL}"
    )


def _words(error: BaseException) -> str:
    """ONNX Runtime's message on one line, without its prefix of codes."""
    text = re.sub(r"\s+", " ", str(error)).strip()
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    return f"{text[:297]}..." if len(text) > 300 else text
