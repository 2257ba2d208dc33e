"""What patterns may ask of a graph: producers, readers, shapes, types, constant values.

A view is made of one onnx-graphsurgeon graph with its inner graphs (bodies of If, Loop, Scan). It answers
from what is proven; what is not known is None, and a pattern that needs it does not match.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto, numpy_helper
from onnx_graphsurgeon.ir.tensor import LazyValues

from trtfuse.model import Model

Dim = int | str | None  # a size, a symbol, or unknown
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
# What a fused op may compute in on its way: TorchScript takes the square of an fp16 LayerNorm in fp64.
INSIDE = (*FLOATS, TensorProto.DOUBLE)
LARGEST_CONSTANT = 1 << 22  # elements: larger ones are never read by value

# Operators whose value may be computed from constant inputs while matching: cheap, deterministic, without
# inner graphs. Exporters compute axes, scales and masks with them.
FOLDED = frozenset(
    "Abs Add And Cast CastLike Ceil Concat Constant ConstantOfShape Div Equal Exp Expand Flatten Floor "
    "Gather GreaterOrEqual Greater Identity Less LessOrEqual Log Max Min Mul Neg Not Or Pow Range Reciprocal "
    "ReduceProd ReduceSum Reshape Shape Size Slice Sqrt Squeeze Sub Tile Transpose Trilu Unsqueeze "
    "Where".split()
)

INTEGERS = frozenset(
    getattr(TensorProto, n) for n in "BOOL INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64".split()
)
# Operators that make finite results of finite inputs: they move values, choose among them, or combine mask
# values, which are far from the range of fp32 (`_is_huge` sees to factors that are not).
KEEPS_FINITE = frozenset(
    "Add Cast Concat Expand Gather Identity Mul Neg Reshape Slice Squeeze Sub Tile Transpose Unsqueeze "
    "Where".split()
)


def _all_finite(value: np.ndarray) -> bool:
    return value.dtype.kind in "biu" or bool(np.isfinite(value.astype(np.float64)).all())


@dataclass
class View:
    """A graph as patterns see it. `model` gives constants their data; `graph` is the surgeon's graph."""

    model: Model
    graph: gs.Graph
    exposed: set[str]
    nodes: list[gs.Node] = field(default_factory=list)
    _scope: dict[int, int] = field(default_factory=dict)
    _order: dict[int, int] = field(default_factory=dict)
    _values: dict[int, np.ndarray | None] = field(default_factory=dict)
    _fixed: dict[int, bool] = field(default_factory=dict)
    _index: dict[int, int] = field(default_factory=dict)
    _finite: dict[int, bool] = field(default_factory=dict)
    _held: dict[int, list[gs.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for graph in inner_graphs(self.graph):
            self._index.update((id(n), k) for k, n in enumerate(graph.nodes))
        self.refresh()

    def index(self, node: gs.Node) -> int:
        """The position of the node in its graph as the model has it."""
        return self._index[id(node)]

    @property
    def opset(self) -> int:
        return self.model.opset

    def refresh(self) -> None:
        """Takes note of the nodes as they are now: which graph each is in, and in which order."""
        self.nodes.clear()
        self._scope.clear()
        self._order.clear()
        for scope, graph in enumerate(inner_graphs(self.graph)):
            for node in graph.nodes:
                self._scope[id(node)] = scope
                self._order[id(node)] = len(self.nodes)
                self.nodes.append(node)

    # --- structure ---

    def scope(self, node: gs.Node) -> int:
        """The number of the graph that holds the node (0 is the main graph)."""
        return self._scope[id(node)]

    def order(self, node: gs.Node) -> int:
        """The position of the node among all nodes."""
        return self._order[id(node)]

    def producer(self, tensor: gs.Tensor) -> gs.Node | None:
        """The node that makes a tensor; None for inputs, weights and empty optional inputs."""
        inputs = tensor.inputs
        return inputs[0] if len(inputs) == 1 and id(inputs[0]) in self._scope else None

    def readers(self, tensor: gs.Tensor) -> list[gs.Node]:
        """The nodes that read a tensor, those of inner graphs too."""
        return list(tensor.outputs)

    def is_exposed(self, tensor: gs.Tensor) -> bool:
        """Whether the tensor is an output of the model or of an inner graph: then it must survive."""
        return tensor.name in self.exposed

    # --- types and shapes ---

    def dtype(self, tensor: gs.Tensor) -> int | None:
        """The ONNX element type of a tensor, None if unknown."""
        dtype = tensor.dtype
        if dtype is None:
            return None
        if isinstance(dtype, int):
            return dtype or None
        try:
            return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
        except (KeyError, TypeError, ValueError):
            return None

    def shape(self, tensor: gs.Tensor) -> tuple[Dim, ...] | None:
        """The dimensions of a tensor; None where even the rank is unknown."""
        shape = tensor.shape
        if shape is None:
            return None
        return tuple(int(d) if isinstance(d, (int, np.integer)) else (d or None) for d in shape)

    def rank(self, tensor: gs.Tensor) -> int | None:
        shape = self.shape(tensor)
        return None if shape is None else len(shape)

    def last_dim(self, tensor: gs.Tensor) -> Dim:
        """The size of the last axis; None if unknown."""
        shape = self.shape(tensor)
        return shape[-1] if shape else None

    # --- constants ---

    def is_fixed(self, tensor: gs.Tensor) -> bool:
        """Whether a tensor depends on nothing but constants, so that it is the same in every run."""
        known = self._fixed.get(id(tensor))
        if known is not None:
            return known
        try:
            return self._prove_fixed(tensor)
        except RecursionError:  # a chain of thousands of constants: not known to be one
            return False

    def _prove_fixed(self, tensor: gs.Tensor) -> bool:
        if isinstance(tensor, gs.Constant):
            fixed = True
        else:
            node = self.producer(tensor)
            fixed = (
                node is not None
                and kind(node) in FOLDED
                and (bool(node.inputs) or node.op == "Constant")
                and all(i.is_empty() or self.is_fixed(i) for i in node.inputs)
            )
        self._fixed[id(tensor)] = fixed
        return fixed

    def value(self, tensor: gs.Tensor) -> np.ndarray | None:
        """The value of a tensor that is the same in every run, None if it is not, or is too large to read.

        bfloat16 and 8-bit floats come as ml_dtypes arrays.
        """
        key = id(tensor)
        if key not in self._values:
            self._values[key] = None  # a tensor that depends on itself has no value
            with contextlib.suppress(RecursionError):
                self._values[key] = self._evaluate(tensor)
            self._held.setdefault(key, []).append(tensor)  # keeps the id from being used again
        return self._values[key]

    def scalar(self, tensor: gs.Tensor) -> float | None:
        """The value of a constant of one element; None for anything else."""
        shape = self.shape(tensor)
        if shape is not None and any(d not in (1,) for d in shape):
            return None
        value = self.value(tensor)
        if value is None or value.size != 1 or value.dtype.kind in "OSU":
            return None
        return float(value.reshape(()).astype(np.float64))

    def is_finite(self, tensor: gs.Tensor) -> bool:
        """Whether a tensor is proven to hold no infinity and no NaN, from what it is computed of."""
        known = self._finite.get(id(tensor))
        if known is None:
            self._finite[id(tensor)] = False  # until proven
            with contextlib.suppress(RecursionError):
                self._finite[id(tensor)] = self._prove_finite(tensor)
            known = self._finite[id(tensor)]
        return known

    def _prove_finite(self, tensor: gs.Tensor) -> bool:
        if self.dtype(tensor) in INTEGERS:
            return True
        if self.is_fixed(tensor):
            value = self.value(tensor)
            return value is not None and value.dtype.kind not in "OSU" and _all_finite(value)
        node = self.producer(tensor)
        if node is None or kind(node) not in KEEPS_FINITE:
            return False
        if self.dtype(tensor) == TensorProto.FLOAT16 and node.op in ("Add", "Cast", "Mul", "Sub"):
            return node.op == "Cast" and self.dtype(node.inputs[0]) == TensorProto.BOOL  # it ends at 65504
        if node.op == "Mul" and any(self._is_huge(i) for i in node.inputs):
            return False
        return all(i.is_empty() or self.is_finite(i) for i in node.inputs)

    def _is_huge(self, tensor: gs.Tensor) -> bool:
        """Whether a constant is so large that a product with it may overflow."""
        value = self.value(tensor) if self.is_fixed(tensor) else None
        return value is not None and bool((np.abs(value.astype(np.float64)) > 1e18).any())

    def _evaluate(self, tensor: gs.Tensor) -> np.ndarray | None:
        if isinstance(tensor, gs.Constant):
            return self._read(tensor)
        node = self.producer(tensor)
        if node is None or kind(node) not in FOLDED or len(node.outputs) != 1:
            return None
        if node.op == "Constant":
            return self._constant_node(node)
        if node.op in ("Gather", "Slice") and (dims := self._dims_taken(node)) is not None:
            return dims
        if node.op == "Shape":
            shape = self.shape(node.inputs[0])
            taken = None if shape is None else shape[node.attrs.get("start", 0) : node.attrs.get("end")]
            if taken is None or not all(isinstance(d, int) for d in taken):
                return None
            return np.array(taken, np.int64)
        if not node.inputs:
            return None
        values = [None if i.is_empty() else self.value(i) for i in node.inputs]
        if any(v is None and not i.is_empty() for v, i in zip(values, node.inputs, strict=True)):
            return None
        if sum(v.size for v in values if v is not None) > LARGEST_CONSTANT:
            return None
        return run_node(node, values, self.opset)

    def _read(self, tensor: gs.Constant) -> np.ndarray | None:
        held = tensor._values
        if not isinstance(held, LazyValues):
            return held if isinstance(held, np.ndarray) else None
        if int(np.prod(held.tensor.dims, dtype=np.int64)) > LARGEST_CONSTANT:
            return None
        return numpy_helper.to_array(self.model.tensor(held.tensor))

    def _constant_node(self, node: gs.Node) -> np.ndarray | None:
        for name, value in node.attrs.items():
            if name == "value":
                return self._read(value)
            if name in ("value_float", "value_floats"):
                return np.asarray(value, np.float32)
            if name in ("value_int", "value_ints"):
                return np.asarray(value, np.int64)
        return None

    def _dims_taken(self, node: gs.Node) -> np.ndarray | None:
        """The sizes that Gather or Slice takes from a Shape: known although other dimensions are dynamic."""
        source = self.producer(node.inputs[0])
        if source is None or kind(source) != "Shape" or source.attrs:
            return None
        shape = self.shape(source.inputs[0])
        if shape is None:
            return None
        arguments = [self.value(i) for i in node.inputs[1:]]
        if any(a is None for a in arguments):
            return None
        positions = np.arange(len(shape))
        if node.op == "Gather":
            index = arguments[0]
            assert index is not None
            if (
                node.attrs.get("axis", 0) != 0
                or (abs(index) > len(shape)).any()
                or (index >= len(shape)).any()
            ):
                return None
            picked = positions[index.astype(np.int64)]
        else:
            taken = run_node(node, [positions, *arguments], self.opset)
            if taken is None:
                return None
            picked = taken
        sizes = [shape[i] for i in np.atleast_1d(picked).ravel()]
        if not all(isinstance(s, int) for s in sizes):
            return None
        return np.array(sizes, np.int64).reshape(np.shape(picked))


def kind(node: gs.Node) -> str:
    """The operator as patterns name it: standard ops by op_type (Sum of two: Add), others domain.op_type."""
    if node.domain in (None, "", "ai.onnx"):
        return "Add" if node.op == "Sum" and len(node.inputs) == 2 else node.op
    return f"{node.domain}.{node.op}"


def inner_graphs(graph: gs.Graph) -> Iterator[gs.Graph]:
    """The graph and every graph inside it, in the order of their nodes."""
    yield graph
    for node in graph.nodes:
        for value in node.attrs.values():
            if isinstance(value, gs.Graph):
                yield from inner_graphs(value)


def run_node(node: gs.Node, values: Sequence[np.ndarray | None], opset: int) -> np.ndarray | None:
    """The output of one standard operator for constant inputs, by ONNX's reference implementation.

    None where the reference has none for it or refuses the inputs: the constant is then unknown.
    """
    from onnx.reference import ReferenceEvaluator

    names = [f"i{k}" if v is not None else "" for k, v in enumerate(values)]
    attributes = {
        k: numpy_helper.from_array(v.values) if isinstance(v, gs.Constant) else v
        for k, v in node.attrs.items()
    }
    try:
        proto = onnx.helper.make_node(node.op, names, ["out"], **attributes)
        inputs = [
            onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for n, v in zip(names, values, strict=True)
            if v is not None
        ]
        output = onnx.helper.make_value_info("out", onnx.TypeProto())
        graph = onnx.helper.make_graph([proto], "constant", inputs, [output])
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
        feeds = {n: v for n, v in zip(names, values, strict=True) if v is not None}
        (result,) = ReferenceEvaluator(model).run(None, feeds)
    except Exception:  # whatever the reference raises, the value is unknown and nothing is fused on it
        return None
    array = np.asarray(result)
    return array if array.size <= LARGEST_CONSTANT else None
