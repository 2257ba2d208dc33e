"""A fused op is one frozen value; a site is one place in a model where it fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_graphsurgeon as gs
from onnx import FunctionProto, NodeProto, TensorProto

from trtfuse.body import Body, function
from trtfuse.pattern import UNTOLD, Match, Pattern, Trace, match, read_outside, roots
from trtfuse.view import FLOATS, View, kind

Attribute = str | int | float
Names = Mapping[str, str]  # input's name in the declaration -> tensor's name
TYPE_NAMES: dict[int, str] = {TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16"}
OLDEST_OPSET = 7  # before it, operators of two tensors broadcast by attributes
BROADCASTS = frozenset("Add Sub Mul Div Pow Max Min Where".split())


@dataclass(frozen=True)
class Fusion:
    """The declaration of a fused op.

    op: its name in the domain `trtfuse`.
    patterns: its spellings, the larger first.
    inputs, outputs: their names in order; one that a match lacks is left out, which makes a variant.
        The first output is the result of the pattern's root, a further one a tensor inside it.
    attributes: of a match; None voids it.
    where: the conditions that the pattern cannot say: None, or in one sentence what fails (UNTOLD: nothing
        that a person would be glad to know).
    body: writes the reference semantics for attributes and input names; returns the outputs' names.
    variant: words of the attributes and inputs that change the body.
    flops: operations an element of the result, for the roofline.
    minimum: how many nodes a near-miss must have matched to be worth a word.
    vectors: the inputs that must be of rank 1, whatever the model spells.
    simplify: attributes for the native lowering, where the graph proves that less will do.
    """

    op: str
    patterns: tuple[Pattern, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    where: Callable[[Match, View], str | None]
    attributes: Callable[[Match, View], dict[str, Attribute]]
    body: Callable[[Body, dict[str, Attribute], Names, tuple[str, ...]], tuple[str, ...]]
    variant: Callable[[Site], tuple[str, ...]]
    flops: int = 8
    minimum: int = 3
    vectors: tuple[str, ...] = ()
    simplify: Callable[[Match, View, dict[str, Attribute]], dict[str, Attribute]] | None = None


@dataclass(eq=False)
class Site:
    """One place where a fused op fits.

    tensors: what its inputs are, by the declaration's names; results: its outputs likewise.
    before: nodes that must stand before it. apart: a word that tells its function from a foreign one.
    """

    fusion: Fusion
    found: Match
    tensors: dict[str, gs.Tensor]
    results: dict[str, gs.Tensor]
    attributes: dict[str, Attribute]
    native_attributes: dict[str, Attribute]
    dtype: int
    opset: int
    id: str = ""
    apart: str = ""
    lowering: str = "native"
    reason: str = ""
    before: list[NodeProto] = field(default_factory=list)

    @property
    def root(self) -> gs.Node:
        assert self.found.root is not None
        return self.found.root

    @property
    def variant(self) -> str:
        """What tells this body from the op's others; empty for the plain one."""
        words = [*self.fusion.variant(self), *([TYPE_NAMES[self.dtype]] if self.dtype in TYPE_NAMES else [])]
        words += [self.apart] if self.apart else []
        return "_".join(words)

    @property
    def op_type(self) -> str:
        return f"{self.fusion.op}_{self.variant}" if self.variant else self.fusion.op

    def function(self) -> FunctionProto:
        """The model-local function of this site: the same for every site of the same op_type and opset."""
        body = Body(self.opset, self.dtype)
        outputs = self.fusion.body(body, self.attributes, {n: n for n in self.tensors}, tuple(self.results))
        body.rename(dict(zip(outputs, self.results, strict=True)))
        return function(self.op_type, list(self.tensors), list(self.results), list(self.attributes), body)

    def lowered(self) -> Body:
        """The native lowering: the standard nodes in place of the site, reading and giving its tensors."""
        body = Body(self.opset, self.dtype, f"{self.id}/")
        names = {n: t.name for n, t in self.tensors.items()}
        outputs = self.fusion.body(body, self.native_attributes, names, tuple(self.results))
        body.rename(dict(zip(outputs, (t.name for t in self.results.values()), strict=True)))
        return body


@dataclass(frozen=True)
class NearMiss:
    """A place where a fused op almost fits. node: its last node's name; reason: the failing condition."""

    op: str
    node: str
    reason: str


def word(stem: str, value: float, usual: float | None = None) -> tuple[str, ...]:
    """The variant's word for a number in the body, empty for the usual one: ("eps1em12",)."""
    text = str(np.float32(value))
    if usual is not None and text == str(np.float32(usual)):
        return ()
    return (stem + text.replace("-", "m").replace("+", "").replace(".", "p"),)


def find(fusions: tuple[Fusion, ...], view: View) -> tuple[list[Site], list[NearMiss]]:
    """Every site of every fusion, and the near-misses, in the order of the graph. Sites may overlap."""
    if view.opset < OLDEST_OPSET:
        return [], []
    by_kind: dict[str, list[tuple[Fusion, Pattern]]] = {}
    for fusion in fusions:
        for pattern in fusion.patterns:
            for root in roots(pattern):
                by_kind.setdefault(root, []).append((fusion, pattern))
    sites: list[Site] = []
    misses: list[tuple[NearMiss, Trace]] = []
    for node in view.nodes:
        found: set[str] = set()
        traces: dict[str, Trace] = {}
        for fusion, pattern in by_kind.get(kind(node), ()) if node.outputs else ():
            trace = traces.setdefault(fusion.op, Trace())
            site = fit(fusion, pattern, node.outputs[0], view, trace)
            if site is not None:  # a smaller pattern may fit too: it is what is left if this one overlaps
                sites.append(site)
                found.add(fusion.op)
        for op, trace in traces.items():
            minimum = next(f.minimum for f in fusions if f.op == op)
            if op not in found and trace.depth >= minimum and trace.reason != UNTOLD:
                misses.append((NearMiss(op, node.name or node.outputs[0].name, trace.reason), trace))
    return sites, _worth_telling(misses, sites)


def _worth_telling(misses: list[tuple[NearMiss, Trace]], sites: list[Site]) -> list[NearMiss]:
    """The near-misses outside all sites; of several that end in the same nodes the one that came furthest.

    One that ends in the middle of a site, or where its own op was found, is none.
    """
    inside = {id(n) for s in sites for n in s.found.nodes}
    ends = {(s.fusion.op, id(n)) for s in sites for n in s.found.nodes}
    ends |= {("", id(s.root)) for s in sites}
    told: list[NearMiss] = []
    seen: set[tuple[str, int]] = set()
    for miss, trace in sorted(misses, key=lambda m: -m[1].depth):
        end = id(trace.nodes[0])
        if (miss.op, end) in ends or (end in inside and ("", end) not in ends):
            continue
        if all(id(n) in inside for n in trace.nodes) or any((miss.op, id(n)) in seen for n in trace.nodes):
            continue
        seen |= {(miss.op, id(n)) for n in trace.nodes}
        told.append(miss)
    return told


def fit(fusion: Fusion, pattern: Pattern, tensor: gs.Tensor, view: View, trace: Trace) -> Site | None:
    """The site that ends in `tensor`, if the pattern and all conditions hold there."""
    for found in match(pattern, tensor, view, trace):
        reason = _unusable(fusion, found, view)
        if reason is not None:
            trace.fail(replace(found, nodes=(*found.nodes, found.nodes[0])), reason)
            continue
        return _site(fusion, found, view)
    return None


def _unusable(fusion: Fusion, found: Match, view: View) -> str | None:
    reason = read_outside(found, view, fusion.outputs[1:])
    if reason is not None:
        return UNTOLD if fusion.where(found, view) == UNTOLD else reason
    for name in fusion.inputs:
        tensor = found.tensors.get(name)
        if tensor is not None and any(o is tensor for n in found.nodes for o in n.outputs):
            return f"'{tensor.name}' is an input of it and made inside it"
    main = found.tensors[fusion.inputs[0]]
    assert found.root is not None
    result = found.root.outputs[0]
    dtype = view.dtype(main) or view.dtype(result)
    if dtype is None:
        return f"the type of '{main.name}' is unknown"
    if dtype not in FLOATS:
        return f"'{main.name}' is of a type that no kernel takes ({TensorProto.DataType.Name(dtype)})"
    if view.dtype(result) not in (None, dtype):
        return f"'{result.name}' is of another type than '{main.name}'"
    for name in fusion.inputs[1:]:
        other = found.tensors.get(name)
        if other is None or view.dtype(other) in (None, TensorProto.BOOL):
            continue
        if view.dtype(other) != dtype:
            return f"'{other.name}' is of another type than '{main.name}'"
    return _rounds_inside(found, dtype) or _raises_rank(found, view) or fusion.where(found, view)


def _rounds_inside(found: Match, dtype: int) -> str | None:
    """Why a fused op, which rounds its result alone, would change numbers: a Cast to a narrower type."""
    for node in found.nodes:
        to = node.attrs.get("to") if node.op == "Cast" else None
        if to == TensorProto.DOUBLE and dtype == TensorProto.FLOAT:
            return f"'{node.outputs[0].name}' is computed in fp64"
        if to in TYPE_NAMES and to != dtype:
            return f"'{node.outputs[0].name}' is rounded to {TYPE_NAMES[to]} inside it"
    return None


def _raises_rank(found: Match, view: View) -> str | None:
    """Why the result would have another rank: a constant of one element such as [[[0.5]]] that adds axes."""
    for node in found.nodes:
        if kind(node) not in BROADCASTS:
            continue
        for tensor in node.inputs:
            rank = view.rank(tensor)
            if not rank or view.scalar(tensor) is None:
                continue
            others = [view.rank(i) for i in node.inputs if i is not tensor and not view.is_fixed(i)]
            known = [r for r in others if r is not None]
            if max(known, default=0) < rank and (rank > 1 or len(known) == len(others)):
                return f"'{tensor.name}' of rank {rank} raises the rank of '{node.outputs[0].name}'"
    return None


def _site(fusion: Fusion, found: Match, view: View) -> Site:
    main = found.tensors[fusion.inputs[0]]
    assert found.root is not None
    results = {fusion.outputs[0]: found.root.outputs[0]}
    inside = {id(n) for n in found.nodes}
    for name in fusion.outputs[1:]:
        tensor = found.tensors.get(name)
        if tensor is not None and (
            view.is_exposed(tensor) or any(id(r) not in inside for r in view.readers(tensor))
        ):
            results[name] = tensor
    tensors = {n: found.tensors[n] for n in fusion.inputs if n in found.tensors}
    dtype = view.dtype(main) or view.dtype(found.root.outputs[0])
    assert dtype is not None
    attributes = fusion.attributes(found, view)
    native = fusion.simplify(found, view, attributes) if fusion.simplify else attributes
    return Site(fusion, found, tensors, results, attributes, native, dtype, view.opset)
