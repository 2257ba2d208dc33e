"""The graph work under `qdq`: what a name means where, the arithmetic of Q/DQ, edits and the sweep after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 and float8 with numpy)
import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from trtfuse.errors import InputError

Load = Callable[[TensorProto], TensorProto]
_DOMAINS = ("", "ai.onnx", "com.microsoft")  # ONNX Runtime has had both operators before ONNX had the types
_VIEWS = frozenset({"Transpose", "Reshape", "Identity", "Unsqueeze", "Squeeze", "Flatten"})


def is_quantize(node: NodeProto) -> bool:
    """Whether a node is QuantizeLinear."""
    return node.op_type == "QuantizeLinear" and node.domain in _DOMAINS


def is_dequantize(node: NodeProto) -> bool:
    """Whether a node is DequantizeLinear."""
    return node.op_type == "DequantizeLinear" and node.domain in _DOMAINS


def standard(node: NodeProto) -> bool:
    """Whether a node is of ONNX's own domain."""
    return node.domain in ("", "ai.onnx")


def inner_graphs(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs inside a node (If, Loop, Scan)."""
    for a in node.attribute:
        if a.type == onnx.AttributeProto.GRAPH:
            yield a.g
        elif a.type == onnx.AttributeProto.GRAPHS:
            yield from a.graphs


def attribute(node: NodeProto, name: str, default: Any) -> Any:
    """An attribute's value, or `default`."""
    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def type_name(dtype: int) -> str:
    """An element type as people write it: int8, uint8, float8e4m3fn."""
    return str(TensorProto.DataType.Name(dtype)).lower() if dtype else "unknown type"


def limits(dtype: int) -> tuple[int, int] | None:
    """The smallest and largest value of an integer type; None for another."""
    bits = {"INT4": 4, "UINT4": 4, "INT8": 8, "UINT8": 8, "INT16": 16, "UINT16": 16}.get(
        type_name(dtype).upper()
    )
    if bits is None:
        return None
    signed = dtype in (TensorProto.INT4, TensorProto.INT8, TensorProto.INT16)
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)


def array(tensor: TensorProto, load: Load | None) -> np.ndarray:
    """The values of a tensor. Raises InputError where its data is not in the model and `load` is None."""
    if tensor.data_location == TensorProto.EXTERNAL:
        if load is None:
            raise InputError(
                f"the data of the quantized weight {tensor.name!r} lies outside the model: "
                "load it with its data"
            )
        tensor = load(tensor)
    return numpy_helper.to_array(tensor)


class Scope:
    """What names mean in one graph: its constants and nodes, and the constants of the graphs around it."""

    def __init__(self, graph: GraphProto, outer: Scope | None, ir_version: int) -> None:
        self.graph, self.outer, self.ir_version = graph, outer, ir_version
        self.nodes = list(graph.node)  # kept: they are told apart by identity
        self.inputs = {i.name for i in graph.input}
        self.outputs = {o.name for o in graph.output}
        # From IR 4 on an initializer that is an input too can be given another value by the caller.
        fixed = [t for t in graph.initializer if ir_version < 4 or t.name not in self.inputs]
        self.constants = {t.name: t for t in fixed}
        self.inputs -= set(self.constants)
        self._producers: dict[str, NodeProto] = {}
        self._readers: dict[str, list[NodeProto]] = {}
        self._inside: set[str] = set()
        for node in self.nodes:
            if node.op_type == "Constant" and (value := attribute(node, "value", None)) is not None:
                self.constants[node.output[0]] = value
            for name in node.output:
                self._producers[name] = node
            for name in dict.fromkeys(node.input):
                self._readers.setdefault(name, []).append(node)
            for inner in inner_graphs(node):
                self._inside |= names_read(inner)

    def quantizers(self) -> list[NodeProto]:
        return [n for n in self.nodes if is_quantize(n)]

    def dequantizers(self) -> list[NodeProto]:
        return [n for n in self.nodes if is_dequantize(n)]

    def constant(self, name: str) -> TensorProto | None:
        """The constant of a name, here or in a graph around this one."""
        if name in self.constants:
            return self.constants[name]
        if self.outer is None or name in self._producers or name in self.inputs:
            return None
        return self.outer.constant(name)

    def producer(self, name: str) -> NodeProto | None:
        return self._producers.get(name)

    def readers(self, name: str) -> list[NodeProto]:
        """The nodes of this graph that read a name; those of inner graphs are told by `read_inside`."""
        return self._readers.get(name, [])

    def views(self, name: str) -> Iterator[str]:
        """A tensor and those that are other views of it."""
        yield name
        for node in self.readers(name):
            if node.op_type in _VIEWS and node.input[0] == name:
                yield from self.views(node.output[0])

    def read_inside(self, name: str) -> bool:
        """Whether a graph inside this one reads a name."""
        return name in self._inside

    def quantized_type(self, node: NodeProto) -> int:
        """The integer (or fp8) type on the quantized side of a Q or DQ; 0 where it cannot be told."""
        zero = self.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        if zero is not None:
            return zero.data_type
        if is_quantize(node):
            return int(attribute(node, "output_dtype", 0)) or int(TensorProto.UINT8)
        value = self.constant(node.input[0])
        if value is not None:
            return value.data_type
        source: NodeProto | None = self.producer(node.input[0])
        for _ in range(32):  # through what moves integers, back to where they were quantized
            if source is None or is_quantize(source) or not source.input:
                break
            source = self.producer(source.input[0])
        return self.quantized_type(source) if source is not None and is_quantize(source) else 0

    def parameters(self, node: NodeProto) -> tuple[Any, ...]:
        """What tells two quantizations apart: scale and zero point by value (or name), and the axis."""
        parts: list[Any] = []
        for index in (1, 2):
            name = node.input[index] if len(node.input) > index else ""
            tensor = self.constant(name) if name else None
            if tensor is not None and tensor.data_location != TensorProto.EXTERNAL:
                values = numpy_helper.to_array(tensor).astype(np.float64)
                # No zero point and one of zeros are the same.
                absent = index == 2 and not values.any()
                parts.append(None if absent else (tuple(values.ravel().tolist())))
            else:
                parts.append(name or None)
        one = isinstance(parts[0], tuple) and len(parts[0]) == 1
        axis = None if one else (attribute(node, "axis", 1), attribute(node, "block_size", 0))
        return (*parts, axis)


def names_read(graph: GraphProto) -> set[str]:
    """Names that the nodes and outputs of a graph and of those inside it read."""
    names = {o.name for o in graph.output}
    for node in graph.node:
        names.update(node.input)
        for inner in inner_graphs(node):
            names |= names_read(inner)
    return names


def dequantized(scope: Scope, node: NodeProto, load: Load | None) -> np.ndarray:
    """What a DequantizeLinear of constants computes."""
    value = scope.constant(node.input[0])
    assert value is not None
    return dequantize(scope, node, array(value, load), load)


def dequantize(scope: Scope, node: NodeProto, value: np.ndarray, load: Load | None) -> np.ndarray:
    """(value - zero point) * scale as `node` has them, in float32, as the type of the result."""
    scale_tensor = scope.constant(node.input[1])
    assert scale_tensor is not None
    scale = array(scale_tensor, load)
    zero_tensor = scope.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
    axis, block = int(attribute(node, "axis", 1)), int(attribute(node, "block_size", 0))
    result = scale.dtype
    if wanted := int(attribute(node, "output_dtype", 0)):
        result = helper.tensor_dtype_to_np_dtype(wanted)
    difference = value.astype(np.int64) if _is_integer(value.dtype) else value.astype(np.float32)
    if zero_tensor is not None and _is_integer(value.dtype):
        zero = array(zero_tensor, load).astype(np.int64)
        difference = difference - _spread(zero, value.shape, axis, block)
    spread = _spread(scale.astype(np.float32), value.shape, axis, block)
    return np.asarray(difference.astype(np.float32) * spread).astype(result).reshape(value.shape)


def _is_integer(dtype: np.dtype) -> bool:
    return dtype.kind in "iu" or "int" in dtype.name


def _spread(parameter: np.ndarray, shape: tuple[int, ...], axis: int, block: int) -> np.ndarray:
    """A scale or zero point as it broadcasts against the tensor: of all, along an axis, or in blocks."""
    if parameter.size == 1:
        return parameter.reshape(())
    axis %= max(len(shape), 1)
    if block:
        wide = np.repeat(parameter, block, axis=axis)
        return np.asarray(wide[tuple(slice(0, d) for d in shape)])
    return parameter.reshape([-1 if i == axis else 1 for i in range(len(shape))])


class Edit:
    """Changes to one graph, made together at the end so that what was read stays true meanwhile."""

    def __init__(self, scope: Scope, opset: int) -> None:
        self.scope, self.graph, self.opset = scope, scope.graph, opset
        self.names: dict[str, str] = {}  # tensor -> what its readers read in its place
        self.removed: set[int] = set()
        self.replaced: dict[int, list[NodeProto]] = {}
        self.inputs: dict[tuple[int, int], str] = {}
        self.typeless: set[str] = set()
        self.added: list[TensorProto] = []

    def constant(self, node: NodeProto, value: np.ndarray) -> None:
        """A float constant in place of a node, under the name of its result."""
        name = node.output[0]
        if name in self.scope.outputs:  # a graph's output is the result of a node
            self.added.append(numpy_helper.from_array(value, self._fresh(f"{name}_value")))
            self.replaced[id(node)] = [self._identity(node, self.added[-1].name)]
            return
        self.added.append(numpy_helper.from_array(value, name))
        self.removed.add(id(node))

    def instead(self, node: NodeProto, name: str) -> None:
        """Another tensor in place of a node's result."""
        if node.output[0] in self.scope.outputs:
            self.replaced[id(node)] = [self._identity(node, name)]
            return
        self.names[node.output[0]] = name
        self.removed.add(id(node))

    def through(self, node: NodeProto, source: str, bounds: tuple[np.ndarray, np.ndarray] | None) -> None:
        """What goes into a node in place of its result, within bounds if there are any."""
        if bounds is None:
            self.instead(node, source)
            return
        low, high = bounds
        if self.opset < 11:
            clip = helper.make_node("Clip", [source], [node.output[0]], name=node.name)
            clip.attribute.extend(
                helper.make_attribute(k, float(v)) for k, v in (("min", low), ("max", high))
            )
        else:
            names = [self._fresh(f"{node.output[0]}_{end}") for end in ("low", "high")]
            self.added += [numpy_helper.from_array(b, n) for b, n in zip(bounds, names, strict=True)]
            clip = helper.make_node("Clip", [source, *names], [node.output[0]], name=node.name)
        clip.metadata_props.extend(node.metadata_props)
        self.replaced[id(node)] = [clip]
        self.typeless.add(node.output[0])

    def dequantized_constant(
        self, name: str, pattern: NodeProto, readers: list[NodeProto], load: Load | None
    ) -> None:
        """A float constant in place of an integer one, for the nodes that move it alone."""
        tensor = self.scope.constant(name)
        assert tensor is not None
        value = dequantize(self.scope, pattern, array(tensor, load), load)
        new = self._fresh(f"{name}_dequantized")
        self.added.append(numpy_helper.from_array(value, new))
        for node in readers:
            for index, read in enumerate(node.input):
                if read == name:
                    self.inputs[id(node), index] = new

    def forget_types(self, node: NodeProto) -> None:
        """The declared types of a node's results are no longer true."""
        self.typeless.update(node.output)

    def finish(self) -> None:
        """Makes the changes."""
        if not (self.removed or self.replaced or self.inputs):
            return
        nodes: list[NodeProto] = []
        for node in self.scope.nodes:
            if id(node) in self.removed:
                continue
            for index in range(len(node.input)):
                if (id(node), index) in self.inputs:
                    node.input[index] = self.inputs[id(node), index]
            nodes += self.replaced.get(id(node), [node])
        for node in nodes:
            self._rename(node)
        kept = [v for v in self.graph.value_info if v.name not in self.typeless]
        copies = [NodeProto.FromString(n.SerializeToString()) for n in nodes]
        infos = [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in kept]
        del self.graph.node[:]
        self.graph.node.extend(copies)
        del self.graph.value_info[:]
        self.graph.value_info.extend(infos)
        self.graph.initializer.extend(self.added)

    def _rename(self, node: NodeProto) -> None:
        for index, name in enumerate(node.input):
            node.input[index] = self._final(name)
        for inner in inner_graphs(node):
            own = {i.name for i in inner.input} | {o for n in inner.node for o in n.output}
            for deep in inner.node:
                if not own & set(self.names):
                    self._rename(deep)
                else:
                    self._rename_but(deep, own)
            for output in inner.output:
                if output.name not in own and output.name in self.names:
                    identity = helper.make_node("Identity", [self._final(output.name)], [output.name])
                    inner.node.append(identity)

    def _rename_but(self, node: NodeProto, own: set[str]) -> None:
        hidden = {n: self.names.pop(n) for n in own & set(self.names)}
        self._rename(node)
        self.names.update(hidden)

    def _final(self, name: str) -> str:
        while name in self.names:
            name = self.names[name]
        return name

    def _identity(self, node: NodeProto, source: str) -> NodeProto:
        new = helper.make_node("Identity", [source], [node.output[0]], name=node.name)
        new.metadata_props.extend(node.metadata_props)
        return new

    def _fresh(self, name: str) -> str:
        """A name that is not in use."""
        scope: Scope | None = self.scope
        used = {t.name for t in self.added}
        while scope is not None:
            used |= set(scope._producers) | scope.inputs | set(scope.constants)
            scope = scope.outer
        new, number = name, 1
        while new in used:
            new, number = f"{name}_{number}", number + 1
        return new


def sweep(before: GraphProto, graph: GraphProto) -> None:
    """Takes out what lost its last reader: nodes, weights, declared types and annotations.

    What nobody read in `before` either stays as it was.
    """
    was = names_read(before)
    idle = {t.name for t in before.initializer} - was
    _sweep_nodes(graph, was)
    _sweep_names(graph, idle)


def _sweep_nodes(graph: GraphProto, was: set[str]) -> None:
    for node in graph.node:
        for inner in inner_graphs(node):
            _sweep_nodes(inner, was)
    while True:
        read = names_read(graph)
        dead = [
            index
            for index, node in enumerate(graph.node)
            if not any(o in read for o in node.output) and any(o in was for o in node.output if o)
        ]
        if not dead:
            return
        for index in reversed(dead):
            del graph.node[index]


def _sweep_names(graph: GraphProto, idle: set[str]) -> None:
    for node in graph.node:
        for inner in inner_graphs(node):
            _sweep_names(inner, set())
    read = names_read(graph) | idle
    gone = {t.name for t in graph.initializer if t.name not in read}
    _keep(graph.initializer, lambda t: t.name not in gone)
    _keep(graph.input, lambda i: i.name not in gone)  # before IR 4 weights were listed as inputs
    there = {t.name for t in graph.initializer} | {i.name for i in graph.input}
    there |= {o for n in graph.node for o in n.output}
    _keep(graph.value_info, lambda v: v.name in there)
    _keep(
        graph.quantization_annotation,
        lambda a: {a.tensor_name, *(p.value for p in a.quant_parameter_tensor_names)} <= there,
    )


def _keep(entries: Any, wanted: Callable[[Any], bool]) -> None:
    for index in reversed(range(len(entries))):
        if not wanted(entries[index]):
            del entries[index]
