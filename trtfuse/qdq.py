"""QuantizeLinear and DequantizeLinear (Q/DQ) as TensorRT takes them.

TensorRT takes symmetric quantization: int8 or fp8 with no zero point, one scale for an activation. ONNX
Runtime's static quantizer also emits uint8 activations with zero points and int32 biases. `apply` turns what
cannot be kept into float: constants become what DequantizeLinear computes of them, pairs around activations
are taken out (with the range they clip to where that may stand for an activation function that the quantizer
took out).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from trtfuse import quantized as q
from trtfuse.errors import InputError
from trtfuse.quantized import Load, Scope

MODES = ("auto", "keep", "drop")
# Operators that only move integers, so that they move floats as well. MaxPool keeps order.
MOVES = frozenset(
    "Reshape Transpose Squeeze Unsqueeze Flatten Identity Split Slice Gather Expand Tile MaxPool "
    "DepthToSpace SpaceToDepth Concat".split()
)
# Quantization that is not Q/DQ, and which only an exporter can spell anew.
OTHER = frozenset(
    "DynamicQuantizeLinear MatMulInteger ConvInteger QLinearConv QLinearMatMul QLinearAdd QLinearMul "
    "QLinearConcat QLinearSigmoid QLinearSoftmax QLinearLeakyRelu QLinearGlobalAveragePool "
    "QLinearAveragePool QGemm QAttention MatMulIntegerToFloat DynamicQuantizeMatMul DynamicQuantizeLSTM "
    "QEmbedLayerNormalization".split()
)
# What a Relu or Clip follows in networks. ONNX Runtime's quantizer takes such a one out where the range that
# the integers hold does its work; behind other operators a range from 0 on is but rounding.
LINEAR = frozenset(
    "Conv ConvTranspose Gemm MatMul Add Sub Sum BatchNormalization InstanceNormalization "
    "GroupNormalization LayerNormalization".split()
)
_KEPT_WEIGHTS = frozenset({TensorProto.INT8, TensorProto.FLOAT8E4M3FN, TensorProto.INT4})
_KEPT_ACTIVATIONS = frozenset({TensorProto.INT8, TensorProto.FLOAT8E4M3FN})


@dataclass(frozen=True)
class QdqReport:
    """What became of a model's Q/DQ.

    kept: regions of integers and constants that the target takes. folded: constants made float. dropped:
    QuantizeLinear on activations that were taken out; clipped: those of them that left their range behind.
    left: regions that the target may refuse and that cannot be taken out. unhandled: operators of other kinds
    of quantization, by name.
    notes: the same in words, a line each.
    """

    mode: str
    kept: int = 0
    folded: int = 0
    dropped: int = 0
    clipped: int = 0
    left: int = 0
    unhandled: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether the model is another than before."""
        return bool(self.folded or self.dropped)


def apply(model: ModelProto, mode: str, *, load: Load | None = None) -> tuple[ModelProto, QdqReport]:
    """A copy of `model` whose Q/DQ are as `mode` says, and what was done.

    mode: "keep" changes nothing; "drop" takes all out; "auto" keeps what TensorRT takes (symmetric int8, fp8;
    weights in int4 too) and takes out the rest. A layer is quantized in its activations and its weight, or in
    neither. Metadata, names, inputs and outputs stay; weights that were shared are folded once.
    load: gives the tensor with its data for one whose data lies elsewhere.
    Raises InputError for another mode, or for a quantized weight whose data is not in the model.
    """
    if mode not in MODES:
        raise InputError(f"there is no --qdq {mode}: use one of {', '.join(MODES)}")
    copy = ModelProto()
    copy.CopyFrom(model)
    opset = next((o.version for o in copy.opset_import if o.domain in ("", "ai.onnx")), 1)
    work = _Work(mode, load, opset)
    scope = Scope(copy.graph, None, copy.ir_version)
    work.count_others(copy.graph)
    if mode != "keep":
        work.graph(scope)
        if work.counts["folded"] or work.counts["dropped"]:
            q.sweep(model.graph, copy.graph)
    return copy, work.report()


@dataclass
class _Region:
    """Integers from where floats are quantized to where they are floats again.

    quantizers, dequantizers: the nodes at its ends. between: the nodes that only move the integers.
    constants: names of integer constants that enter. why: the reason it cannot be taken out, empty if it can.
    """

    quantizers: list[NodeProto] = field(default_factory=list)
    dequantizers: list[NodeProto] = field(default_factory=list)
    between: list[NodeProto] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    why: str = ""

    def is_weight(self, scope: Scope) -> bool:
        """Whether only constants enter it."""
        return all(scope.constant(n.input[0]) is not None for n in self.quantizers)


class _Work:
    """One call of `apply`: what is asked for, and the counts of what was done."""

    def __init__(self, mode: str, load: Load | None, opset: int) -> None:
        self.mode, self.load, self.opset = mode, load, opset
        self.counts: Counter[str] = Counter()
        self.types: Counter[str] = Counter()
        self.whys: Counter[str] = Counter()
        self.others: Counter[str] = Counter()

    def count_others(self, graph: GraphProto) -> None:
        for node in graph.node:
            if node.op_type in OTHER:
                self.others[node.op_type] += 1
            for inner in q.inner_graphs(node):
                self.count_others(inner)

    def graph(self, scope: Scope) -> None:
        """Treats a graph, then the graphs inside it, which see its constants."""
        for node in scope.nodes:
            for inner in q.inner_graphs(node):
                self.graph(Scope(inner, scope, scope.ir_version))
        out: list[_Region] = []
        freed: set[str] = set()  # floats that were quantized: what meets them is not to be quantized alone
        regions = list(_regions(scope))
        weights = [r for r in regions if r.is_weight(scope)]
        for region in [r for r in regions if r not in weights] + weights:
            if self.keeps(scope, region, freed):
                self.counts["kept"] += 1
            elif region.why:
                self.counts["left"] += 1
                self.whys[region.why] += 1
            else:
                out.append(region)
                freed |= {v for n in region.dequantizers for v in scope.views(n.output[0])}
        constants = [n for n in scope.dequantizers() if scope.constant(n.input[0]) is not None]
        folded = [n for n in constants if self.folds(scope, n, freed)]
        self.counts["kept"] += len(constants) - len(folded)
        edit = q.Edit(scope, self.opset)
        self.fold(edit, folded)
        for region in out:
            self.drop(edit, region)
        edit.finish()

    def keeps(self, scope: Scope, region: _Region, freed: set[str]) -> bool:
        """Whether TensorRT takes the region as it is."""
        if self.mode != "auto":
            return False
        weight = region.is_weight(scope)
        types = _KEPT_WEIGHTS if weight else _KEPT_ACTIVATIONS
        ends = [*region.quantizers, *region.dequantizers]
        if not all(q.standard(n) and self.symmetric(scope, n, types, not weight) for n in ends):
            return False
        return not (weight and any(_meets(scope, n, freed) for n in region.dequantizers))

    def symmetric(self, scope: Scope, node: NodeProto, types: frozenset[int], one_scale: bool) -> bool:
        scale = scope.constant(node.input[1])
        dtype = scope.quantized_type(node)
        if scale is None or dtype not in types or (one_scale and int(np.prod(scale.dims)) != 1):
            return False
        zero = node.input[2] if len(node.input) > 2 else ""
        if not zero:
            return True
        tensor = scope.constant(zero)
        return tensor is not None and not np.any(q.array(tensor, self.load).astype(np.float32))

    def folds(self, scope: Scope, node: NodeProto, freed: set[str]) -> bool:
        """Whether a constant's DequantizeLinear becomes a float constant."""
        if scope.constant(node.input[1]) is None or (
            len(node.input) > 2 and node.input[2] and scope.constant(node.input[2]) is None
        ):
            self.counts["left"] += 1
            self.whys["a scale or zero point is computed"] += 1
            return False
        if self.mode == "drop" or not q.standard(node):
            return True
        if not self.symmetric(scope, node, _KEPT_WEIGHTS, False):
            return True
        return _meets(scope, node, freed)

    def fold(self, edit: q.Edit, nodes: list[NodeProto]) -> None:
        """Constants, each with all its DequantizeLinear that say the same, become one float constant."""
        made: dict[tuple[Any, ...], str] = {}
        for node in nodes:
            key = (*node.input, q.attribute(node, "axis", 1), q.attribute(node, "block_size", 0))
            key = (*key, q.attribute(node, "output_dtype", 0))
            if key not in made:
                made[key] = node.output[0]
                value = q.dequantized(edit.scope, node, self.load)
                self.types[q.type_name(edit.scope.quantized_type(node))] += 1
                self.counts["folded"] += 1
                edit.constant(node, value)
            else:
                edit.instead(node, made[key])

    def drop(self, edit: q.Edit, region: _Region) -> None:
        """Takes out a region: floats take the way of the integers."""
        pattern = region.dequantizers[0]
        self.types[q.type_name(edit.scope.quantized_type(pattern))] += 1
        for name in region.constants:
            edit.dequantized_constant(name, pattern, region.between, self.load)
            self.counts["folded"] += 1
        for node in region.quantizers:
            source = node.input[0]
            bounds = self.range(edit.scope, node)
            if bounds is not None:
                self.counts["clipped"] += 1
            edit.through(node, source, bounds)
            self.counts["dropped"] += 1
        for node in region.between:
            edit.forget_types(node)
        for node in region.dequantizers:
            edit.through(node, node.input[0], None)

    def range(self, scope: Scope, node: NodeProto) -> tuple[np.ndarray, np.ndarray] | None:
        """The range that a QuantizeLinear clips to, where it begins at 0 and may stand for a Relu or Clip."""
        scale, zero = (
            scope.constant(node.input[1]),
            scope.constant(node.input[2]) if len(node.input) > 2 else None,
        )
        producer = scope.producer(node.input[0])
        if (
            scale is None
            or int(np.prod(scale.dims)) != 1
            or producer is None
            or producer.op_type not in LINEAR
        ):
            return None
        limits = q.limits(scope.quantized_type(node))
        if limits is None:
            return None
        point = 0 if zero is None else int(q.array(zero, self.load).reshape(-1)[0])
        if point != limits[0]:
            return None
        step = q.array(scale, self.load).reshape(())
        high = np.asarray((limits[1] - point) * step.astype(np.float32)).astype(step.dtype)
        return np.zeros_like(step), high

    def report(self) -> QdqReport:
        counts, notes = self.counts, []
        if counts["dropped"] or counts["folded"]:
            types = ", ".join(f"{n} {t}" for t, n in sorted(self.types.items()))
            notes.append(
                f"quantization taken out: {counts['dropped']} QuantizeLinear on activations, "
                f"{counts['folded']} constants made float (of {types})"
            )
        if counts["clipped"]:
            notes.append(
                f"{counts['clipped']} of them leave a Clip: a range from 0 on may stand for a Relu or Clip"
            )
        if counts["kept"]:
            notes.append(f"quantization kept: {counts['kept']} activations and constants")
        for why, number in sorted(self.whys.items()):
            notes.append(f"quantization left as it is in {number} places: {why}")
        if self.others:
            names = ", ".join(f"{n} {op}" for op, n in sorted(self.others.items()))
            notes.append(
                f"not handled: {names} (quantization that is not Q/DQ): "
                "quantize in the QDQ format, or export floats"
            )
        return QdqReport(
            self.mode,
            counts["kept"],
            counts["folded"],
            counts["dropped"],
            counts["clipped"],
            counts["left"],
            dict(self.others),
            tuple(notes),
        )


def _meets(scope: Scope, node: NodeProto, freed: set[str]) -> bool:
    """Whether an operator takes the result of `node` together with one of `freed`."""
    readers = (r for view in scope.views(node.output[0]) for r in scope.readers(view))
    return any(freed & set(r.input) for r in readers)


def _regions(scope: Scope) -> Iterator[_Region]:
    """Every region of integers in a graph, constants that are dequantized at once apart."""
    seen: set[str] = set()
    for node in [*scope.quantizers(), *scope.dequantizers()]:
        start = node.output[0] if q.is_quantize(node) else node.input[0]
        if start in seen or (not q.is_quantize(node) and scope.constant(start) is not None):
            continue
        yield _region(scope, start, seen)


def _region(scope: Scope, start: str, seen: set[str]) -> _Region:
    """The region that the integer tensor `start` lies in."""
    region, waiting = _Region(), [start]
    nodes: set[int] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if scope.constant(name) is not None:
            region.constants.append(name)
            continue
        region.why = region.why or _outside(scope, name)
        producer = scope.producer(name)
        for node in [*([producer] if producer is not None else []), *scope.readers(name)]:
            if id(node) in nodes:
                continue
            nodes.add(id(node))
            if q.is_quantize(node) and node.output[0] == name:
                region.quantizers.append(node)
            elif q.is_dequantize(node) and node.input[0] == name:
                region.dequantizers.append(node)
            else:
                moved = list(node.input) if node.op_type == "Concat" else list(node.input[:1])
                if node.op_type in MOVES and q.standard(node) and name in [*moved, *node.output]:
                    region.between.append(node)
                    waiting += [*moved, *(node.output if node.op_type == "Split" else node.output[:1])]
                else:
                    region.why = region.why or f"{node.op_type} computes with the integers"
    region.why = region.why or _inconsistent(scope, region)
    return region


def _outside(scope: Scope, name: str) -> str:
    if name in scope.inputs:
        return "the integers are an input of the graph"
    if name in scope.outputs:
        return "the integers are an output of the graph"
    if scope.read_inside(name):
        return "the integers are read in an inner graph"
    if scope.producer(name) is None:
        return "the integers come from an outer graph"
    return ""


def _inconsistent(scope: Scope, region: _Region) -> str:
    if not region.dequantizers or not (region.quantizers or region.constants):
        return "the integers are not quantized and dequantized in the same graph"
    ends = [*region.quantizers, *region.dequantizers]
    if len({scope.parameters(n) for n in ends}) > 1:
        return "it is dequantized with another scale than it was quantized with"
    scale = scope.constant(region.dequantizers[0].input[1])
    per_tensor = scale is not None and int(np.prod(scale.dims)) == 1
    if (region.between and not per_tensor and region.constants) or (region.constants and scale is None):
        return "constants with several scales are moved before they are dequantized"
    return ""
