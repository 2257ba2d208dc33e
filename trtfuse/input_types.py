"""The declared types of a model's inputs."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, TypeProto, ValueInfoProto

from trtfuse.errors import InputError


def tensor_type(info: ValueInfoProto) -> TypeProto.Tensor:
    """The tensor type of an input, or of the elements of a sequence. Raises InputError for a map or none."""
    kind = info.type
    while True:
        if kind.HasField("sequence_type"):
            kind = kind.sequence_type.elem_type
        elif kind.HasField("optional_type"):
            kind = kind.optional_type.elem_type
        elif kind.HasField("tensor_type"):
            return kind.tensor_type
        else:
            raise InputError(
                f"no values can be made for input {info.name!r} ({kind.WhichOneof('value') or 'no type'}): "
                "make it a tensor or a sequence of tensors"
            )


def is_sequence(info: ValueInfoProto) -> bool:
    """Whether the input is a sequence of tensors, optional or not."""
    kind = info.type.optional_type.elem_type if info.type.HasField("optional_type") else info.type
    return bool(kind.HasField("sequence_type"))


def numpy_dtype(elem_type: int) -> np.dtype:
    """The numpy dtype of an ONNX element type; ml_dtypes' for bfloat16 and float8; object for strings.

    Raises InputError for a type that has none.
    """
    if elem_type == TensorProto.STRING:
        return np.dtype(object)
    if elem_type == TensorProto.BFLOAT16:
        return np.dtype(ml_dtypes.bfloat16)
    try:
        known: np.dtype = onnx.helper.tensor_dtype_to_np_dtype(elem_type)
    except KeyError as e:
        raise InputError(
            f"values of ONNX element type {elem_type} cannot be made: use another input type"
        ) from e
    return known


def describe(info: ValueInfoProto) -> str:
    """The type of an input in words: "int64 [batch, 128]"."""
    tensor = tensor_type(info)
    dims = ", ".join(str(d.dim_value or d.dim_param or "?") for d in tensor.shape.dim)
    kind = TensorProto.DataType.Name(tensor.elem_type).lower()
    return f"{'sequence of ' if is_sequence(info) else ''}{kind} [{dims}]"
