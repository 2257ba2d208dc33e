"""What a dynamic axis of an input stands for, and which sizes are sensible for it.

Exporters name axes badly or not at all, so three things are asked: the axis' name, its place in the tensor,
and the operators that consume it (a position table bounds a sequence, a weight gives a feature's size).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
# Names that exporters give to axes they know nothing of: two axes of such a name need not be equal.
NAMELESS = frozenset({"", "?", "-1", "none", "unk", "unknown", "*"})
SHAPELESS = frozenset({"Cast", "Identity", "QuantizeLinear", "DequantizeLinear", "Dropout"})


@dataclass(frozen=True)
class Span:
    """Sizes of one axis: smallest, the one to be fastest at, largest."""

    min: int
    opt: int
    max: int

    def clipped(self, bound: int) -> Span:
        """The span with nothing above `bound`."""
        return Span(min(self.min, bound), min(self.opt, bound), min(self.max, bound))


BATCH, SEQUENCE, SAMPLES, PAST = Span(1, 1, 8), Span(1, 128, 512), Span(512, 16000, 160000), Span(0, 128, 512)
WINDOW = Span(256, 512, 576)  # samples that a model which carries a state takes at a time
DEPTH = Span(8, 16, 64)
_BY_NAME = (
    ("past", re.compile(r"past|cache")),
    ("batch", re.compile(r"batch|^(n|b|bs|bsz|bz)$|num_?images")),
    ("height", re.compile(r"height|^h$")),
    ("width", re.compile(r"width|^w$")),
    ("channels", re.compile(r"channel|^c$")),
    ("samples", re.compile(r"sample|audio|wave")),
    ("sequence", re.compile(r"seq|len|token|time|frame|steps|^(s|t|l)$")),
)


@dataclass(frozen=True)
class Axis:
    """One axis of an input. size: where the model fixes it. symbol: its name, if that tells it apart."""

    size: int | None
    symbol: str | None


def axes_of(info: onnx.ValueInfoProto) -> list[Axis] | None:
    """The axes of a tensor input; None where it is no tensor or its rank is unknown."""
    if not info.type.HasField("tensor_type") or not info.type.tensor_type.HasField("shape"):
        return None
    axes = []
    for dim in info.type.tensor_type.shape.dim:
        if dim.HasField("dim_value") and dim.dim_value >= 0:
            axes.append(Axis(dim.dim_value, None))
        else:
            name = dim.dim_param.strip()
            axes.append(Axis(None, None if name.lower() in NAMELESS else name))
    return axes


def is_state(axes: list[Axis]) -> bool:
    """Whether a tensor looks like the state of a recurrent network: layers, batch, hidden."""
    if len(axes) != 3:
        return False
    layers, _, hidden = (a.size for a in axes)
    return layers is not None and layers <= 8 and hidden is not None and hidden > 8


def role(name: str, dtype: int, axes: list[Axis], index: int) -> str:
    """batch, sequence, samples, past, channels, depth, height, width or feature: what an axis stands for.

    name: of the input. dtype: its onnx element type.
    """
    symbol = (axes[index].symbol or "").lower()
    for word, pattern in _BY_NAME:
        if pattern.search(symbol):
            return word
    rank = len(axes)
    if rank == 4 and re.search(r"past|cache|key_values", name.lower()):
        return "past" if index == 2 else "batch"
    if is_state(axes):
        return "batch"
    if index == 0:
        return "batch"
    if rank == 4:
        last = axes[3].size in (1, 3, 4) and axes[1].size is None  # N, H, W, C
        return (
            ("", "height", "width", "channels")[index] if last else ("", "channels", "height", "width")[index]
        )
    if rank == 5:
        return ("", "channels", "depth", "height", "width")[index]
    if rank == 2 and dtype in FLOATS:
        return "samples"
    return "sequence"


def evaluate(symbol: str, sizes: dict[str, int]) -> int | None:
    """The value of an axis named by a formula of others ("past + sequence"); None if unknown."""
    try:
        return _number(ast.parse(symbol, mode="eval").body, sizes)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _number(node: ast.expr, sizes: dict[str, int]) -> int | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return sizes.get(node.id)
    if isinstance(node, ast.BinOp):
        a, b = _number(node.left, sizes), _number(node.right, sizes)
        if a is None or b is None:
            return None
        if isinstance(node.op, ast.Add):
            return a + b
        if isinstance(node.op, ast.Sub):
            return a - b
        if isinstance(node.op, ast.Mult):
            return a * b
        if isinstance(node.op, ast.FloorDiv):
            return a // b
    return None


class Reading:
    """What a graph says of its inputs: who consumes them, and the tables that bound positions."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self.tensors = {t.name: t for t in graph.initializer}
        self.producers: dict[str, NodeProto] = {}
        self.consumers: dict[str, list[NodeProto]] = {}
        for node in graph.node:
            if node.op_type == "Constant":
                for attribute in node.attribute:
                    if attribute.name == "value":
                        self.tensors[node.output[0]] = attribute.t
            for output in node.output:
                self.producers[output] = node
            for name in node.input:
                self.consumers.setdefault(name, []).append(node)

    def readers(self, name: str) -> Iterator[tuple[NodeProto, int]]:
        """The operators that take an input as it is, with the place it has there."""
        for node in self.consumers.get(name, []):
            if node.op_type in SHAPELESS and node.input[0] == name:
                yield from self.readers(node.output[0])
            else:
                yield node, list(node.input).index(name)

    def channels(self, name: str) -> int | None:
        """The channels that a convolution expects of an input."""
        for node, place in self.readers(name):
            if node.op_type == "Conv" and place == 0 and (weight := self.weight(node.input[1])) is not None:
                group = next((a.i for a in node.attribute if a.name == "group"), 1)
                return int(weight.dims[1]) * group
        return None

    def features(self, name: str) -> int | None:
        """The size of an input's last axis that a matrix product with a weight expects."""
        for node, place in self.readers(name):
            if node.op_type in ("MatMul", "Gemm") and place == 0:
                weight = self.weight(node.input[1])
                if weight is not None and len(weight.dims) == 2:
                    transposed = any(a.name == "transB" and a.i for a in node.attribute)
                    return int(weight.dims[1 if transposed else 0])
        return None

    def weight(self, name: str) -> TensorProto | None:
        """The constant behind a name, looking through the Identity and DequantizeLinear it may pass."""
        while name not in self.tensors and name in self.producers:
            node = self.producers[name]
            if node.op_type not in SHAPELESS or not node.input:
                return None
            name = node.input[0]
        return self.tensors.get(name)

    def positions(self) -> int | None:
        """The longest sequence that the model's position tables allow; None where none is found."""
        bounds = [b for n in self.producers.values() if (b := self._bound(n)) is not None and b > 1]
        return min(bounds, default=None)

    def _bound(self, node: NodeProto) -> int | None:
        if node.op_type == "Slice":
            return self._sliced(node)
        if node.op_type == "Gather" and len(node.input) == 2:
            table = self.weight(node.input[0])
            if table is not None and len(table.dims) == 2 and table.data_type in FLOATS:
                return self._indexed(node.input[1], int(table.dims[0]))
        return None

    def _sliced(self, node: NodeProto) -> int | None:
        """Position ids or a table stored whole, of which the first `length` are taken."""
        if len(node.input) < 3 or node.input[0] not in self.tensors or node.input[2] in self.tensors:
            return None
        table = self.tensors[node.input[0]]
        axes = self._ints(node.input[3]) if len(node.input) > 3 else [0]
        ids = table.data_type in (TensorProto.INT64, TensorProto.INT32)
        if axes is None or len(axes) != 1 or not (ids or table.data_type in FLOATS):
            return None
        # ids are 1 x length; a table is (1 x) length x width. Masks (1 x 1 x length x length) bound as well.
        return int(table.dims[axes[0]]) if -len(table.dims) <= axes[0] < len(table.dims) else None

    def _indexed(self, indices: str, rows: int) -> int | None:
        """Rows of a table less what is added to positions that are counted (Range, CumSum) in the graph."""
        added, counted, name = 0, None, indices
        for _ in range(16):
            node = self.producers.get(name)
            if node is None:
                return None
            if node.op_type in ("Range", "CumSum"):
                counted = node.op_type
                break
            if node.op_type in ("Add", "Mul"):
                fixed = [i for i in node.input if i in self.tensors]
                if fixed and node.op_type == "Add":
                    added += (self._ints(fixed[0]) or [0])[0]
                moving = [i for i in node.input if i not in self.tensors]
                name = next((i for i in moving if self._counts(i)), moving[0] if moving else "")
            elif node.op_type in ("Cast", "Identity", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Slice"):
                name = node.input[0]
            else:
                return None
        if counted is None:
            return None
        return rows - added - (1 if counted == "CumSum" else 0)  # a CumSum of ones begins with 1

    def _counts(self, name: str) -> bool:
        for _ in range(4):
            node = self.producers.get(name)
            if node is None:
                return False
            if node.op_type in ("Range", "CumSum"):
                return True
            name = next((i for i in node.input if i not in self.tensors), "")
        return False

    def _ints(self, name: str) -> list[int] | None:
        tensor = self.tensors.get(name)
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL or len(tensor.dims) > 1:
            return None
        array = numpy_helper.to_array(tensor)
        return [int(v) for v in np.ravel(array)] if array.dtype.kind in "iu" else None


def light(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without the data of large weights: for shape inference at sizes that are tried out."""
    copy = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    for field in ("node", "input", "output", "value_info"):
        getattr(copy.graph, field).extend(getattr(model.graph, field))
    for tensor in model.graph.initializer:
        if tensor.ByteSize() <= 1024:
            copy.graph.initializer.append(tensor)
        else:  # infer takes the type and leaves data that lies elsewhere alone
            mark = TensorProto(
                name=tensor.name,
                data_type=tensor.data_type,
                dims=tensor.dims,
                data_location=TensorProto.EXTERNAL,
            )
            copy.graph.initializer.append(mark)
    del copy.graph.value_info[:]  # it says what the exporter saw, not what follows from the sizes tried
    return copy


def known_sizes(lean: onnx.ModelProto, shapes: dict[str, tuple[int, ...]]) -> int:
    """How many tensors have all sizes known for these inputs: fewer where sizes contradict each other."""
    from trtfuse.infer import dims_of, infer

    trial = onnx.ModelProto()
    trial.CopyFrom(lean)
    for info in trial.graph.input:
        if info.name in shapes:
            element = info.type.tensor_type.elem_type
            info.type.CopyFrom(helper.make_tensor_type_proto(element, list(shapes[info.name])))
    infer(trial)
    known = 0
    for value in trial.graph.value_info:
        dims = dims_of(value.type)
        known += dims is not None and all(isinstance(d, int) and d > 0 for d in dims)
    return known
