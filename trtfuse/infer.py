"""Shapes, as far as they can be proven, in one pass over the nodes.

onnx infers each operator; what it lacks for exported models is the way of a size through Shape, Gather,
Concat and Reshape when some sizes are dynamic. Here such values are followed element by element: a number, a
symbol (the name of a dynamic dimension) or None. So a reshape to (batch, sequence, 12, 32) has a rank and two
sizes.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper

LARGEST = 1024  # elements: larger integer tensors are no shapes
LARGEST_UNKNOWN = 16  # elements: longer vectors of unknown elements are no shapes either
SIZES = (TensorProto.INT64, TensorProto.INT32)
Value = np.ndarray[Any, Any]  # of objects: int, str (a symbol), bool or None
Types = MutableMapping[str, TypeProto]
Values = MutableMapping[str, Value]

# ONNX Runtime's own operators whose result is like their first input
LIKE_FIRST = frozenset(
    "Gelu FastGelu BiasGelu QuickGelu SkipLayerNormalization SkipSimplifiedLayerNormalization "
    "SkipGroupNorm BiasSplitGelu RotaryEmbedding".split()
)


def infer(proto: ModelProto) -> None:
    """Adds to `proto` the types and shapes of its tensors that can be proven, in inner graphs too."""
    opsets = {o.domain or "": o.version for o in proto.opset_import}
    _Walk(opsets, list(proto.opset_import), proto.ir_version).graph(proto.graph, {}, {})


class _Walk:
    """One pass; holds what does not change: the opsets."""

    def __init__(self, opsets: dict[str, int], imports: list[onnx.OperatorSetIdProto], ir_version: int):
        self.opsets, self.imports, self.ir_version = opsets, imports, ir_version
        self.opsets.setdefault("", self.opsets.get("ai.onnx", 1))
        self.schemas: dict[tuple[str, str], Any] = {}

    def graph(self, graph: GraphProto, outer_types: Types, outer_values: Values) -> None:
        types: Types = ChainMap({}, outer_types)  # type: ignore[arg-type]
        values: Values = ChainMap({}, outer_values)  # type: ignore[arg-type]
        known = {v.name: v for v in (*graph.value_info, *graph.output) if v.type.HasField("tensor_type")}
        for info in (*graph.input, *known.values()):
            types[info.name] = info.type
        overridable = {i.name for i in graph.input} if self.ir_version >= 4 else set()
        for tensor in graph.initializer:
            types[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
            if tensor.name not in overridable and (value := _small(tensor)) is not None:
                values[tensor.name] = value
        for node in graph.node:
            self.node(node, types, values)
        for node in graph.node:
            for name in node.output:
                if name and name not in known and types.get(name, TypeProto()).HasField("tensor_type"):
                    graph.value_info.append(onnx.ValueInfoProto(name=name, type=types[name]))
                elif name in known and known[name].type is not types[name]:
                    if any(known[name] is o for o in graph.output):
                        continue  # an output stays as the model declares it
                    known[name].type.CopyFrom(types[name])

    def node(self, node: NodeProto, types: Types, values: Values) -> None:
        inner = [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
        for graph in inner:
            self.graph(graph, types, values)
        value = _follow(node, types, values)
        if value is not None and value.size <= LARGEST:
            values[node.output[0]] = value
        found = {} if inner else self.outputs(node, types, values)
        for name, new in found.items():
            types[name] = _merged(types.get(name), new)

    def outputs(self, node: NodeProto, types: Types, values: Values) -> dict[str, TypeProto]:
        if node.domain == "com.microsoft" and node.op_type in LIKE_FIRST and node.input[0] in types:
            return {node.output[0]: types[node.input[0]]}
        have = {i: types[i] for i in node.input if i and i in types}
        if len(have) == len({i for i in node.input if i}):
            found = self.by_schema(node, have, values)
        else:
            found = {}
        if node.op_type in ("Reshape", "Expand", "ConstantOfShape") and node.domain in ("", "ai.onnx"):
            _by_target(node, types, values, found)
        return found

    def by_schema(self, node: NodeProto, have: dict[str, TypeProto], values: Values) -> dict[str, TypeProto]:
        key = (node.domain or "", node.op_type)
        if key not in self.schemas:
            try:
                self.schemas[key] = onnx.defs.get_schema(key[1], self.opsets.get(key[0], 0), key[0])
            except Exception:  # an operator that onnx does not know
                self.schemas[key] = None
        schema = self.schemas[key]
        if schema is None:
            return {}
        data = {
            i: t for i in node.input if i in values and (t := _tensor(values[i], have.get(i))) is not None
        }
        try:
            return onnx.shape_inference.infer_node_outputs(
                schema, node, have, data, opset_imports=self.imports, ir_version=self.ir_version
            )
        except Exception:  # inference refuses the node: nothing is known of its outputs
            return {}


def _small(tensor: TensorProto) -> Value | None:
    size = int(np.prod(tensor.dims, dtype=np.int64))
    if size > LARGEST or tensor.data_location == TensorProto.EXTERNAL:
        return None
    if tensor.data_type not in (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL):
        return None
    return numpy_helper.to_array(tensor).astype(object)


def _tensor(value: Value, type_: TypeProto | None) -> TensorProto | None:
    """A value that is known in every element, as onnx's inference takes it."""
    if type_ is None or not all(isinstance(v, (int, np.integer)) for v in value.ravel()):
        return None
    dtype = helper.tensor_dtype_to_np_dtype(type_.tensor_type.elem_type)
    return numpy_helper.from_array(value.astype(dtype))


def dims_of(type_: TypeProto | None) -> list[int | str | None] | None:
    """The dimensions of a tensor type; None where the rank is unknown."""
    if type_ is None or not type_.tensor_type.HasField("shape"):
        return None
    return [
        d.dim_value if d.HasField("dim_value") else (d.dim_param or None) for d in type_.tensor_type.shape.dim
    ]


def _merged(old: TypeProto | None, new: TypeProto) -> TypeProto:
    """What both say together; where they differ, what was there."""
    if old is None or not old.HasField("tensor_type"):
        return new
    a, b = dims_of(old), dims_of(new)
    if b is None or (a is not None and len(a) != len(b)):
        return old
    if a is None:
        return new if new.tensor_type.elem_type else old
    dims = [_more_of(p, q) for p, q in zip(a, b, strict=True)]
    if dims == a:
        return old
    return helper.make_tensor_type_proto(old.tensor_type.elem_type or new.tensor_type.elem_type, dims)


def _more_of(one: int | str | None, other: int | str | None) -> int | str | None:
    """The better known of two statements on a dimension: a size, a symbol of the model, one of onnx's."""
    for p in (one, other):
        if isinstance(p, int):
            return p
    return next((p for p in (one, other) if p and not str(p).startswith("unk__")), one or other)


class _Size(str):
    """An unknown size that has a name all the same: that of its tensor and axis."""

    __slots__ = ()


def _sizes(name: str, types: Types) -> list[int | str | None] | None:
    """The dimensions of a tensor, the unknown ones named, so that a reshape knows them again."""
    dims = dims_of(types.get(name))
    return dims and [_Size(f"{name}\0{k}") if d is None else d for k, d in enumerate(dims)]


def _by_target(node: NodeProto, types: Types, values: Values, found: dict[str, TypeProto]) -> None:
    """The output of an operator that is given its shape, when only some of the sizes are known."""
    source = types.get(node.input[0])
    target = values.get(node.input[-1] if node.op_type != "Reshape" or len(node.input) > 1 else "")
    if target is None or target.ndim != 1:
        return
    dims: list[Any] = list(target)
    if node.op_type == "Reshape":
        have = _sizes(node.input[0], types)
        if not _attribute(node, "allowzero", 0):
            dims = [
                (have[k] if have and k < len(have) else None) if d == 0 else d for k, d in enumerate(dims)
            ]
        if -1 in dims:
            dims[dims.index(-1)] = _rest(have, dims)
    elif node.op_type == "Expand":
        have = dims_of(source)
        if have is None:
            return
        width = max(len(have), len(dims))
        both = zip([1] * (width - len(have)) + have, [1] * (width - len(dims)) + dims, strict=True)
        dims = [
            b if a == 1 else a if b == 1 or isinstance(a, int) else a if a == b else None for a, b in both
        ]
    if any(isinstance(d, (int, np.integer)) and d < 0 for d in dims):
        return
    element = source.tensor_type.elem_type if source is not None else 0
    if node.op_type == "ConstantOfShape":
        element = next((a.t.data_type for a in node.attribute if a.name == "value"), TensorProto.FLOAT)
    if element:
        sizes = [
            int(d) if isinstance(d, (int, np.integer)) else None if isinstance(d, _Size) else d for d in dims
        ]
        new = helper.make_tensor_type_proto(element, sizes)
        found[node.output[0]] = _merged(found.get(node.output[0]), new)


def _rest(have: list[int | str | None] | None, dims: list[Any]) -> int | None:
    """The size that -1 stands for: known when the symbols on both sides are the same."""
    if have is None or any(d is None for d in have):
        return None
    others = [d for d in dims if d != -1]
    if any(d is None for d in others):
        return None
    symbols = sorted(d for d in have if isinstance(d, str))
    if symbols != sorted(d for d in others if isinstance(d, str)):
        return None
    total = int(np.prod([d for d in have if isinstance(d, int)], dtype=np.int64))
    part = int(np.prod([d for d in others if not isinstance(d, str)], dtype=np.int64))
    return total // part if part and total % part == 0 else None


def _attribute(node: NodeProto, name: str, default: Any) -> Any:
    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


# --- values, element by element ----------------------------------------------------------------------------


def _follow(node: NodeProto, types: Types, values: Values) -> Value | None:
    """The value of a node's output where it is a shape or part of one; None where it is not followed."""
    if node.domain not in ("", "ai.onnx") or not node.output:
        return None
    if node.op_type == "Constant":
        return _constant(node)
    if node.op_type == "Shape":
        dims = _sizes(node.input[0], types)
        if dims is None:
            return None
        taken = dims[_attribute(node, "start", 0) : _attribute(node, "end", len(dims))]
        return _objects(taken)
    rule = RULES.get(node.op_type)
    if rule is None or not node.input:
        return None
    given = [_value_of(i, types, values) if i else None for i in node.input]
    if any(g is None and i for g, i in zip(given, node.input, strict=True)):
        return None
    try:
        return rule(node, given)
    except (ValueError, IndexError, TypeError, ZeroDivisionError, OverflowError):
        return None  # the model is wrong there, or spelled as no rule expects


def _value_of(name: str, types: Types, values: Values) -> Value | None:
    """The value of a tensor; where only its size is known, as many unknown elements."""
    value, type_ = values.get(name), types.get(name)
    if value is not None or type_ is None or type_.tensor_type.elem_type not in SIZES:
        return value
    dims = dims_of(type_)
    if dims is None or not all(isinstance(d, int) and d <= LARGEST_UNKNOWN for d in dims) or len(dims) > 1:
        return None
    return np.full([int(d) for d in dims if d is not None], None, object)


def _objects(elements: list[Any]) -> Value:
    result = np.empty(len(elements), object)
    result[:] = elements
    return result


def _constant(node: NodeProto) -> Value | None:
    for a in node.attribute:
        if a.name == "value":
            return _small(a.t)
        if a.name in ("value_int", "value_ints"):
            return np.array(helper.get_attribute_value(a), object)
    return None


def _axes(node: NodeProto, given: list[Any]) -> tuple[int, ...] | None:
    if len(given) > 1 and given[1] is not None:
        return tuple(int(a) for a in given[1].ravel())
    axes = _attribute(node, "axes", None)
    return None if axes is None else tuple(axes)


def _gather(node: NodeProto, given: list[Any]) -> Value:
    return np.asarray(np.take(given[0], given[1].astype(np.int64), axis=_attribute(node, "axis", 0)), object)


def _slice(node: NodeProto, given: list[Any]) -> Value | None:
    if given[0].ndim != 1:
        return None
    if len(given) == 1:
        starts, ends, steps = _attribute(node, "starts", []), _attribute(node, "ends", []), [1]
    else:
        starts, ends = given[1], given[2]
        steps = given[4] if len(given) > 4 and given[4] is not None else [1]
    return given[0][int(starts[0]) : int(ends[0]) : int(steps[0])]  # type: ignore[no-any-return]


def _unsqueeze(node: NodeProto, given: list[Any]) -> Value:
    return np.expand_dims(given[0], _axes(node, given) or ())


def _squeeze(node: NodeProto, given: list[Any]) -> Value:
    return np.asarray(np.squeeze(given[0], _axes(node, given)), object)


def _cast(node: NodeProto, given: list[Any]) -> Value | None:
    to = _attribute(node, "to", 0)
    return given[0] if to in (TensorProto.INT64, TensorProto.INT32) else None


def _elementwise(rule: Callable[..., Any]) -> Callable[[NodeProto, list[Any]], Value]:
    vectorised = np.frompyfunc(rule, 2, 1)
    return lambda node, given: np.asarray(vectorised(given[0], given[1]), object)


def _numbers(rule: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def of(a: Any, b: Any) -> Any:
        return rule(a, b) if isinstance(a, (int, np.integer)) and isinstance(b, (int, np.integer)) else None

    return of


def _times(a: Any, b: Any) -> Any:
    if a == 1 or b == 1:
        return b if a == 1 else a
    return _numbers(lambda p, q: p * q)(a, b)


def _divided(a: Any, b: Any) -> Any:
    return a if b == 1 else _numbers(lambda p, q: int(p / q) if q else None)(a, b)


def _equal(a: Any, b: Any) -> Any:
    if isinstance(a, str) or isinstance(b, str):
        other = b if isinstance(a, str) else a
        negative = isinstance(other, (int, np.integer)) and other < 0
        return False if negative else True if a == b else None  # a size is never negative
    return None if a is None or b is None else bool(a == b)


def _reduce_prod(node: NodeProto, given: list[Any]) -> Value | None:
    """The product of all elements of a vector; unknown where a symbol meets another size."""
    if given[0].ndim != 1 or _axes(node, given) not in (None, (0,), (-1,)):
        return None
    total: Any = 1
    for size in given[0]:
        total = _times(total, size)
    return _objects([total]) if _attribute(node, "keepdims", 1) else np.array(total, object)


def _larger(a: Any, b: Any) -> Any:
    return a if a == b else _numbers(max)(a, b)


def _where(_: NodeProto, given: list[Any]) -> Value:
    choose = np.frompyfunc(
        lambda c, a, b: (a if c else b) if c is not None else (a if a == b else None), 3, 1
    )
    return np.asarray(choose(*given), object)


def _constant_of_shape(node: NodeProto, given: list[Any]) -> Value | None:
    value = next((numpy_helper.to_array(a.t) for a in node.attribute if a.name == "value"), None)
    if value is None or value.dtype.kind != "i":
        return None
    return np.full([int(d) for d in given[0]], int(value.ravel()[0]), object)


RULES: dict[str, Callable[[NodeProto, list[Any]], Value | None]] = {
    "Gather": _gather,
    "Slice": _slice,
    "Concat": lambda node, given: np.concatenate(given, axis=_attribute(node, "axis", 0)),
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Identity": lambda _, given: given[0],
    "Range": lambda _, given: _objects(list(range(*(int(g) for g in given)))),
    "Cast": _cast,
    "Reshape": lambda _, given: given[0].reshape([int(d) for d in given[1]]),
    "Add": _elementwise(_numbers(lambda a, b: a + b)),
    "Sub": _elementwise(_numbers(lambda a, b: a - b)),
    "Mul": _elementwise(_times),
    "Div": _elementwise(_divided),
    "Equal": _elementwise(_equal),
    "Max": lambda node, given: _elementwise(_larger)(node, given) if len(given) == 2 else None,
    "ReduceProd": _reduce_prod,
    "Where": _where,
    "ConstantOfShape": _constant_of_shape,
}
