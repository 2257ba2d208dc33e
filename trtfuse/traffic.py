"""What a site costs before and after: bytes through memory, launches, arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import ModelProto, TensorProto, helper

from trtfuse.fusion import Site
from trtfuse.infer import dims_of
from trtfuse.model import graphs
from trtfuse.normalise import infer_shapes
from trtfuse.view import kind

# Nodes that move no data in an engine: views of their input, and constants.
FREE = frozenset("Constant Flatten Identity Reshape Shape Squeeze Unsqueeze".split())
Bytes = Mapping[str, int]


@dataclass(frozen=True)
class Traffic:
    """bytes: None where a shape is unknown. launches: kernels, one for each operator that is not free."""

    bytes_before: int | None
    bytes_after: int | None
    launches_before: int
    launches_after: int


def sizes(proto: ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Bytes of each tensor whose shape is known when the inputs have `shapes`."""
    fixed = ModelProto()
    fixed.CopyFrom(proto)
    symbols: dict[str, int] = {}
    for value in fixed.graph.input:
        given = shapes.get(value.name)
        dims = value.type.tensor_type.shape.dim
        if given is None or len(given) != len(dims):
            continue
        for dim, size in zip(dims, given, strict=True):
            if dim.dim_param:
                symbols.setdefault(dim.dim_param, size)
            dim.dim_value = size
    for graph in graphs(fixed.graph):
        _settle(graph, symbols)
    result: dict[str, int] = {}
    for graph in graphs(infer_shapes(fixed).graph):
        for info in (*graph.input, *graph.value_info, *graph.output):
            dims = dims_of(info.type)
            if dims is not None and all(isinstance(d, int) for d in dims):
                result.setdefault(info.name, _bytes(info.type.tensor_type.elem_type, dims))  # type: ignore[arg-type]
        for tensor in graph.initializer:
            result[tensor.name] = _bytes(tensor.data_type, list(tensor.dims))
    return result


def _settle(graph: onnx.GraphProto, symbols: Mapping[str, int]) -> None:
    """Puts sizes in the place of symbols in what the file says of its tensors."""
    for info in (*graph.value_info, *graph.output):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param in symbols:
                dim.dim_value = symbols[dim.dim_param]


def _bytes(dtype: int, dims: list[int]) -> int:
    count = int(np.prod(dims, dtype=np.int64))
    try:
        return count * int(helper.tensor_dtype_to_np_dtype(dtype).itemsize)
    except (KeyError, TypeError):
        return count if dtype != TensorProto.STRING else 0


def traffic(site: Site, known: Bytes) -> Traffic:
    """The site's traffic: unfused, every operator reads its inputs and writes its outputs."""
    before = [n for n in site.found.nodes if kind(n) not in FREE]
    return Traffic(
        bytes_before=_sum([_node(n, known) for n in before]),
        bytes_after=_sum([_tensor(t, known) for t in (*site.tensors.values(), *site.results.values())]),
        launches_before=len(before),
        launches_after=1,
    )


def _node(node: gs.Node, known: Bytes) -> int | None:
    return _sum([_tensor(t, known) for t in (*node.inputs, *node.outputs) if not t.is_empty()])


def _tensor(tensor: gs.Tensor, known: Bytes) -> int | None:
    if tensor.name in known:
        return known[tensor.name]
    shape = tensor.shape  # weights of inner graphs and tensors that the rewrite made
    if isinstance(tensor, gs.Constant) and shape is not None:
        return int(np.prod(shape, dtype=np.int64)) * 4
    return None


def _sum(parts: list[int | None]) -> int | None:
    total = 0
    for part in parts:
        if part is None:
            return None
        total += part
    return total
