"""ONNX Runtime sessions as Polygraphy's runner takes them, for every tensor type that a model can have."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

# Types that numpy lacks: ONNX Runtime takes and gives them as raw memory only. Between runs they are float32,
# which holds each of their values exactly.
_RAW: dict[str, tuple[int, np.dtype, np.dtype]] = {
    "tensor(bfloat16)": (16, np.dtype(ml_dtypes.bfloat16), np.dtype(np.uint16)),
    "tensor(float8e4m3fn)": (17, np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.uint8)),
    "tensor(float8e4m3fnuz)": (18, np.dtype(ml_dtypes.float8_e4m3fnuz), np.dtype(np.uint8)),
    "tensor(float8e5m2)": (19, np.dtype(ml_dtypes.float8_e5m2), np.dtype(np.uint8)),
    "tensor(float8e5m2fnuz)": (20, np.dtype(ml_dtypes.float8_e5m2fnuz), np.dtype(np.uint8)),
}


class Port(NamedTuple):
    """An input or output of a session. type: as ONNX Runtime spells it, of what goes in and out here."""

    name: str
    type: str
    shape: list[Any]


class Session:
    """An onnxruntime.InferenceSession that also runs models with bfloat16 and float8 inputs and outputs.

    Those go in as ml_dtypes' arrays or float32 ones, and come out as float32; `types` has what they are in
    the model. With `optimized` false no graph optimization is on. Nothing is logged.
    """

    def __init__(
        self, path: Path, optimized: bool, providers: Sequence[str] = ("CPUExecutionProvider",)
    ) -> None:
        import onnxruntime

        level = onnxruntime.GraphOptimizationLevel
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = level.ORT_ENABLE_ALL if optimized else level.ORT_DISABLE_ALL
        options.log_severity_level = 4
        self._session = onnxruntime.InferenceSession(str(path), options, providers=list(providers))
        self._ort_value = onnxruntime.OrtValue
        self._in = {i.name: i for i in self._session.get_inputs()}
        self.types = {o.name: o.type for o in self._session.get_outputs()}
        ports = (*self._in.values(), *self._session.get_outputs())
        self._raw = any(p.type in _RAW for p in ports)
        self.tensors_only = all(p.type.startswith("tensor(") for p in ports)

    def get_inputs(self) -> list[Port]:
        """The inputs, as ONNX Runtime's session gives them."""
        return [_port(i) for i in self._session.get_inputs()]

    def get_outputs(self) -> list[Port]:
        """The outputs, as ONNX Runtime's session gives them."""
        return [_port(o) for o in self._session.get_outputs()]

    def run(self, names: Sequence[str] | None, feed: Mapping[str, Any]) -> list[Any]:
        """Outputs (those of `names`, or all) for a feed, as ONNX Runtime's session gives them."""
        names = list(names) if names else list(self.types)
        if not self._raw:
            return list(self._session.run(names, dict(feed)))
        values = {name: self._value(name, array) for name, array in feed.items()}
        outputs = self._session.run_with_ort_values(names, values)
        return [_array(value) for value in outputs]

    def _value(self, name: str, array: np.ndarray) -> Any:
        raw = _RAW.get(self._in[name].type) if name in self._in else None
        if raw is None:
            return self._ort_value.ortvalue_from_numpy(np.asarray(array))
        number, dtype, view = raw
        bits = np.ascontiguousarray(array.astype(dtype)).reshape(array.shape).view(view)
        return self._ort_value.ortvalue_from_numpy_with_onnx_type(bits, number)


def _port(port: Any) -> Port:
    return Port(port.name, "tensor(float)" if port.type in _RAW else port.type, port.shape)


def _array(value: Any) -> Any:
    raw = _RAW.get(value.data_type())
    if raw is None:
        return value.numpy()
    _, dtype, _ = raw
    shape = value.shape()
    size = int(np.prod(shape)) * dtype.itemsize
    bits = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(bits, dtype=dtype).reshape(shape).astype(np.float32)


def flatten(name: str, value: Any) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of an output: itself, or those of a sequence (`name[0]`) or map (`name[key]`); none of an
    absent optional one."""
    if isinstance(value, np.ndarray):
        yield name, value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from flatten(f"{name}[{key}]", value[key])
    elif isinstance(value, (list, tuple)):
        for index, element in enumerate(value):
            yield from flatten(f"{name}[{index}]", element)
    elif value is not None:
        yield name, np.asarray(value)
