"""What each input of a model is for, read from the nodes that consume it.

A role says which values make sense: an input that indexes a table of 30522 rows holds integers below 30522,
one that ends in `1 - x` or a cast to bool is a mask. Inputs are followed forward through the ops that only
move or re-type values, into the bodies of If, Loop and Scan, and into the model's own functions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import onnx
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

# Ops whose first input's values come out as they are (moved, repeated or re-typed).
_MOVES = {
    *("Cast", "CastLike", "Identity", "Unsqueeze", "Squeeze", "Reshape", "Flatten", "Transpose", "Expand"),
    *("Tile", "Slice", "Pad", "Split", "Dropout", "QuantizeLinear", "DequantizeLinear", "Clip", "Gather"),
    "SequenceAt",
}
# Ops with a constant that shift or scale values: an image stays an image, a signal a signal.
_SCALES = frozenset(("Add", "Sub", "Mul", "Div"))
# Where an integer input says a size: (op, input) -> the value or values that always work.
_SIZES = {
    ("Reshape", 1): "reshape",
    ("Expand", 1): "one",
    ("ConstantOfShape", 0): "size",
    ("Range", 0): "zero",
    ("Range", 1): "size",
    ("Range", 2): "one",
    ("Slice", 1): "zero",
    ("Slice", 2): "size",
    ("Slice", 3): "axis",
    ("Slice", 4): "one",
    ("Tile", 1): "one",
    ("TopK", 1): "one",
    ("OneHot", 1): "size",
    ("Pad", 1): "one",
    ("Loop", 0): "size",
    ("Trilu", 1): "zero",
    ("CumSum", 1): "zero",
    ("Unsqueeze", 1): "zero",
    ("Squeeze", 1): "zero",
}
_FLOATS = frozenset((TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE))
_INTEGERS = frozenset(
    (
        TensorProto.INT8,
        TensorProto.INT16,
        TensorProto.INT32,
        TensorProto.INT64,
        TensorProto.UINT8,
        TensorProto.UINT16,
        TensorProto.UINT32,
        TensorProto.UINT64,
    )
)
SMALL_TABLE = 16  # rows up to which a table is one of kinds (segments), not of a vocabulary
FOLLOWED = 400  # uses looked at for one input: enough for every chain of moves, and no walk through a model


@dataclass(frozen=True)
class Role:
    """What an input is for.

    kind: "ids" (integers in [low, high)), "positions" (counting up, in [low, high)), "mask" (0 or 1),
    "additive_mask" (0 or a large negative), "choice" (one of `choices`), "size" (an integer that says a size,
    `how` says which), "lengths", "image", "bytes" (the whole range of a small integer type), "audio",
    "state", "positive", "timestep", "text", "float".
    """

    kind: str
    low: int = 0
    high: int = 0
    choices: tuple[int | str, ...] = ()
    how: str = ""


@dataclass(frozen=True)
class _Use:
    node: NodeProto
    index: int
    scope: _Scope
    offset: int  # what constants added so far
    exact: bool  # the values are the input's, but for `offset`


class _Scope:
    """Who reads which tensor of a graph (with its inner graphs) or of a function; constants and shapes."""

    def __init__(self, body: GraphProto | FunctionProto) -> None:
        self.uses: dict[str, list[tuple[NodeProto, int]]] = {}
        self.values: dict[str, TensorProto] = {}
        self.dims: dict[str, tuple[int, ...]] = {}
        self._read(body)

    def _read(self, body: GraphProto | FunctionProto) -> None:
        if isinstance(body, GraphProto):
            for tensor in body.initializer:
                self.values[tensor.name] = tensor
                self.dims[tensor.name] = tuple(tensor.dims)
            for info in (*body.value_info, *body.input):
                if info.type.tensor_type.HasField("shape"):
                    dims = tuple(d.dim_value or -1 for d in info.type.tensor_type.shape.dim)
                    self.dims.setdefault(info.name, dims)
        for node in body.node:
            for index, name in enumerate(node.input):
                if name:
                    self.uses.setdefault(name, []).append((node, index))
            for attribute in node.attribute:
                if node.op_type == "Constant" and attribute.type == AttributeProto.TENSOR:
                    self.values[node.output[0]] = attribute.t
                    self.dims[node.output[0]] = tuple(attribute.t.dims)
                elif node.op_type == "Constant" and attribute.name in ("value_int", "value_ints"):
                    tensor = numpy_helper.from_array(np.array(onnx.helper.get_attribute_value(attribute)))
                    self.values[node.output[0]] = tensor
                    self.dims[node.output[0]] = tuple(tensor.dims)
                elif attribute.type == AttributeProto.GRAPH:
                    self._read(attribute.g)
            if node.op_type in ("Cast", "Identity", "DequantizeLinear") and node.input[0] in self.dims:
                self.dims.setdefault(node.output[0], self.dims[node.input[0]])  # a table in another type

    def called(self, node: NodeProto, function: FunctionProto, caller: _Scope) -> _Scope:
        """This scope of a function's body, as `node` calls it: what its arguments are is known."""
        bound = copy.copy(self)
        bound.dims, bound.values = dict(self.dims), dict(self.values)
        for formal, actual in zip(function.input, node.input, strict=False):
            if actual in caller.dims:
                bound.dims[formal] = caller.dims[actual]
            if actual in caller.values:
                bound.values[formal] = caller.values[actual]
        return bound

    def constant(self, name: str) -> np.ndarray | None:
        """A small constant's value; None for what is no constant, is large, or lies in another file."""
        tensor = self.values.get(name)
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL or int(np.prod(tensor.dims)) > 1024:
            return None
        return numpy_helper.to_array(tensor)


class Roles:
    """The roles of a model's inputs. Weights that were set aside are not read, only their shapes."""

    def __init__(self, model: ModelProto) -> None:
        self._main = _Scope(model.graph)
        self._functions = {(f.domain, f.name, f.overload): f for f in model.functions}
        self._scope_of = lru_cache(maxsize=None)(lambda key: _Scope(self._functions[key]))

    def of(self, info: onnx.ValueInfoProto) -> Role:
        """The role of one input; a sequence's is that of its elements."""
        kind = info.type
        while kind.HasField("sequence_type") or kind.HasField("optional_type"):
            kind = (
                kind.sequence_type.elem_type
                if kind.HasField("sequence_type")
                else kind.optional_type.elem_type
            )
        tensor = kind.tensor_type
        shape = [d.dim_value or -1 for d in tensor.shape.dim]
        uses = list(self._follow(info.name))
        name = info.name.lower()
        if tensor.elem_type == TensorProto.STRING:
            return _text(uses)
        if tensor.elem_type == TensorProto.BOOL:
            return Role("mask")
        if tensor.elem_type in _INTEGERS:
            return _integer(name, tensor.elem_type, shape, uses)
        return _float(name, shape, uses)

    def _follow(self, name: str) -> Iterator[_Use]:
        """Every use of an input's values, moves followed, nearest first."""
        queue = [(name, self._main, 0, True)]
        seen = {(name, id(self._main))}
        entered = []  # keeps scopes alive, and their ids their own
        found = 0
        while queue and found < FOLLOWED:
            tensor, scope, offset, exact = queue.pop(0)
            for node, index in scope.uses.get(tensor, ()):
                found += 1
                yield _Use(node, index, scope, offset, exact)
                for step in self._steps(node, index, scope, offset, exact):
                    if (step[0], id(step[1])) not in seen:
                        seen.add((step[0], id(step[1])))
                        entered.append(step[1])
                        queue.append(step)

    def _steps(
        self, node: NodeProto, index: int, scope: _Scope, offset: int, exact: bool
    ) -> Iterator[tuple[str, _Scope, int, bool]]:
        key = (node.domain, node.op_type, node.overload)
        if key in self._functions:
            function = self._functions[key]
            if index < len(function.input):
                inner = self._scope_of(key).called(node, function, scope)
                yield function.input[index], inner, offset, exact
            return
        if node.op_type in ("Loop", "Scan"):
            body = next((a.g for a in node.attribute if a.name == "body"), None)
            if body is not None and index < len(body.input):
                yield body.input[index].name, scope, offset, exact
            return
        if node.op_type == "Concat" or (node.op_type in _MOVES and index == 0):
            for output in node.output:
                yield output, scope, offset, exact
        elif node.op_type in _SCALES and len(node.input) == 2:
            other = scope.constant(node.input[1 - index])
            if other is None or other.size > 16 or (node.op_type == "Sub" and index == 1):
                return
            if node.op_type in ("Add", "Sub") and other.size == 1 and other.dtype.kind in "iu":
                shift = int(other.reshape(-1)[0]) * (1 if node.op_type == "Add" else -1)
                yield node.output[0], scope, offset + shift, exact
            else:
                yield node.output[0], scope, offset, False


def _text(uses: list[_Use]) -> Role:
    for use in uses:
        for attribute in use.node.attribute:
            if attribute.name in ("keys_strings", "classes_strings", "cats_strings") and attribute.strings:
                return Role("text", choices=tuple(s.decode() for s in attribute.strings))
    return Role("text", choices=("a", "b", "c"))


def _integer(name: str, elem_type: int, shape: list[int], uses: list[_Use]) -> Role:
    scalar = all(d == 1 for d in shape)
    table = _table(uses)
    if table is not None:
        return Role("positions" if "position" in name else "ids", *table)
    if _is_mask(name, uses):
        return Role("mask")
    if scalar:
        choices = _choices(uses)
        if name in ("sr", "fs") or "sample_rate" in name or "sampling_rate" in name:
            return Role("choice", choices=tuple(dict.fromkeys((*choices, 16000, 8000))))
        if choices:
            return Role("choice", choices=choices)
    for use in uses:
        how = _SIZES.get((use.node.op_type, use.index))
        if how:
            return Role("size", how=how)
    if "len" in name and len(shape) <= 1:
        return Role("lengths")
    if elem_type in (TensorProto.UINT8, TensorProto.INT8):
        return Role("bytes")
    if "position" in name:
        return Role("positions", 0, 1 << 30)
    return Role("ids", 0, 4)


def _table(uses: list[_Use]) -> tuple[int, int] | None:
    """The range of integers that stay inside every table the input indexes; None where it indexes none."""
    low, high = 0, 1 << 30
    found = False
    for use in uses:
        rows = _rows(use)
        if rows is None or not use.exact:
            continue
        found = True
        low, high = max(low, -use.offset), min(high, rows - use.offset)
    return (low, max(high, low + 1)) if found else None


def _rows(use: _Use) -> int | None:
    """How many rows the table has that this use indexes; None where it is no index."""
    node, op = use.node, use.node.op_type
    if op in ("Gather", "GatherElements", "ScatterElements", "Scatter", "GatherND") and use.index == 1:
        dims = use.scope.dims.get(node.input[0])
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
        # Of a table that is no weight only row 0 is known to be there.
        return dims[axis] if dims and -len(dims) <= axis < len(dims) and dims[axis] > 0 else 1
    if op == "OneHot" and use.index == 0:
        depth = use.scope.constant(node.input[1])
        return int(depth.reshape(-1)[0]) if depth is not None else 1
    if op in ("EmbedLayerNormalization", "SkipEmbedLayerNormalization") and use.index in (0, 1):
        table = node.input[2 if use.index == 0 else 4]
        dims = use.scope.dims.get(table)
        return dims[0] if dims and dims[0] > 0 else 1
    return None


def _choices(uses: list[_Use]) -> tuple[int, ...]:
    """The constants that an input is compared with."""
    found: dict[int, None] = {}
    for use in uses:
        if use.node.op_type == "Equal" and use.exact:
            other = use.scope.constant(use.node.input[1 - use.index])
            if other is not None and other.size == 1 and other.dtype.kind in "iuf":
                found[int(other.reshape(-1)[0]) - use.offset] = None
    return tuple(found)


def _is_mask(name: str, uses: list[_Use]) -> bool:
    if "mask" in name:
        return True
    for use in uses:
        node = use.node
        if not use.exact or use.offset:
            continue
        if node.op_type == "Cast" and any(a.name == "to" and a.i == TensorProto.BOOL for a in node.attribute):
            return True
        if node.op_type == "Sub" and use.index == 1:  # (1 - mask) * -10000
            one = use.scope.constant(node.input[0])
            if one is not None and one.size == 1 and float(one.reshape(-1)[0]) == 1.0:
                return True
    return False


def _float(name: str, shape: list[int], uses: list[_Use]) -> Role:
    ops = {(u.node.op_type, u.index) for u in uses}
    if _is_mask(name, uses):
        added = ("Add", 0) in ops or ("Add", 1) in ops
        inverted = any(u.node.op_type == "Sub" and u.index == 1 for u in uses)
        attention = any(u.node.op_type == "Attention" and u.index >= 3 for u in uses)
        return Role("additive_mask" if attention or (added and not inverted) else "mask")
    if "timestep" in name:
        return Role("timestep")
    recurrent = {("LSTM", 5), ("LSTM", 6), ("GRU", 5), ("RNN", 5)}
    if name in ("h", "c", "h0", "c0", "hn", "cn") or "state" in name.split("_")[0] or ops & recurrent:
        return Role("state")
    if any(u.exact and u.node.op_type in ("Log", "Sqrt") for u in uses):
        return Role("positive")
    convolved = [u for u in uses if u.node.op_type == "Conv" and u.index == 0]
    kernel = next((len(u.scope.dims.get(u.node.input[1], ())) for u in convolved), 0)
    if len(shape) == 4 and (kernel == 4 or any(c in (1, 3, 4) for c in (shape[1], shape[3]))):
        return Role("image")
    signal = any(word in name for word in ("audio", "wave", "speech", "signal", "pcm"))
    if ("STFT", 0) in ops or (len(shape) <= 3 and (signal or _is_signal(shape, kernel))):
        return Role("audio")
    return Role("float")


def _is_signal(shape: list[int], kernel: int) -> bool:
    """One channel that is long, or that a one-dimensional convolution reads."""
    rest = [d for d in shape[1:] if d != 1]
    return len(rest) == 1 and (rest[0] >= 4000 or kernel == 3)
