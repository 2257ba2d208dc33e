"""Puts one node in the place of each site, into a copy of the original that keeps all the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import GraphProto, NodeProto, helper, numpy_helper

from trtfuse.fusion import Site
from trtfuse.model import Model, graphs
from trtfuse.normalise import DOMAIN
from trtfuse.view import View

FUNCTIONS_IR = 8  # the first IR version that has model-local functions
Emit = Callable[[Site], list[NodeProto]]


@dataclass
class _Plan:
    """What happens to each node: `replaced` maps the id of a site's root to the site; `dropped` go."""

    replaced: dict[int, Site]
    dropped: set[int]


def rewrite(
    model: Model, view: View, sites: list[Site], spell: Callable[[Site], list[NodeProto] | None] | None = None
) -> Model:
    """The fused model: one node and one model-local function for each kind of site.

    spell: gives the standard nodes of a site that shall not be one node, None for the others.
    Without sites the model comes back as it was. Names of inputs, outputs and of the sites' results stay.
    """
    functions = {f.name: f for f in model.proto.functions if f.domain == DOMAIN}
    for site in sites:
        while site.op_type in functions and functions[site.op_type] != site.function():
            site.apart += "x"  # the model has another function of that name
    called: list[Site] = []

    def emit(site: Site) -> list[NodeProto]:
        nodes = spell(site) if spell is not None else None
        if nodes is None:
            called.append(site)
        return _fused_node(site) if nodes is None else nodes

    fused = apply(model, view, sites, emit)
    if not called:
        return fused
    proto = fused.proto
    proto.ir_version = max(proto.ir_version, FUNCTIONS_IR)
    if not any(o.domain == DOMAIN for o in proto.opset_import):
        proto.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    have = {f.name for f in proto.functions if f.domain == DOMAIN}
    for site in called:
        if site.op_type not in have:
            have.add(site.op_type)
            proto.functions.append(site.function())
    return fused


def _fused_node(site: Site) -> list[NodeProto]:
    node = helper.make_node(
        site.op_type,
        [t.name for t in site.tensors.values()],
        [t.name for t in site.results.values()],
        name=site.id,
        domain=DOMAIN,
        **dict[str, Any](site.attributes),
    )
    return [node]


def apply(model: Model, view: View, sites: list[Site], emit: Emit) -> Model:
    """A copy of the model with each site's nodes replaced by what `emit` makes of it, and cleaned up."""
    result = model.copy()
    if not sites:
        return result
    _name_apart(sites, result.proto.graph)
    _straighten_weights(sites, result.proto.graph)
    plan = _Plan({id(s.root): s for s in sites}, {id(n) for s in sites for n in s.found.nodes})
    _write(result.proto.graph, view.graph, view, plan, emit)
    _clean(result.proto.graph)
    return result


def _name_apart(sites: list[Site], graph: GraphProto) -> None:
    """Gives each site an id that begins no name of the model."""
    names = {n for g in graphs(graph) for node in g.node for n in (node.name, *node.output)}
    names |= {t.name for g in graphs(graph) for t in (*g.initializer, *g.input)}
    ours = sorted(n for n in names if n.startswith("Trtfuse"))
    for site in sites:
        while any(n.startswith(site.id) for n in ours):
            site.id += "_"


def _straighten_weights(sites: list[Site], graph: GraphProto) -> None:
    """Makes weights such as (1, 1, H) the vectors that norms want.

    A weight that only our sites read changes its dimensions in place; one that others read too, or that is
    an input as well, is reshaped by a node, so that nothing is stored twice.
    """
    inputs = {i.name for i in graph.input}
    outputs = {o.name for g in graphs(graph) for o in g.output}
    weights = {t.name: t for t in graph.initializer if t.name not in inputs}
    ours = {id(n) for s in sites for n in s.found.nodes}
    wanted = {id(s.tensors[n]): s.tensors[n] for s in sites for n in s.fusion.vectors if n in s.tensors}
    elsewhere = {id(t) for s in sites for n, t in s.tensors.items() if n not in s.fusion.vectors}
    for site in sites:
        for name in site.fusion.vectors:
            tensor = site.tensors.get(name)
            if tensor is None or tensor.shape is None or len(tensor.shape) == 1:
                continue
            weight = weights.get(tensor.name)
            only_ours = all(id(r) in ours for r in tensor.outputs) and id(tensor) not in elsewhere
            only_ours &= tensor.name not in outputs
            if weight is not None and isinstance(tensor, gs.Constant) and id(tensor) in wanted and only_ours:
                del weight.dims[:-1]
                continue
            row = gs.Variable(f"{site.id}_{name}", dtype=tensor.dtype, shape=(tensor.shape[-1],))
            shape = numpy_helper.from_array(np.array([-1], np.int64))
            size = f"{row.name}_shape"
            site.before += [
                helper.make_node("Constant", [], [size], name=size, value=shape),
                helper.make_node("Reshape", [tensor.name, size], [row.name], name=row.name),
            ]
            site.tensors[name] = row


def _write(proto: GraphProto, graph: gs.Graph, view: View, plan: _Plan, emit: Emit) -> None:
    """Brings the nodes of one graph and of the graphs inside it into the proto, in topological order."""
    nodes: list[NodeProto] = []
    for node in graph.nodes:
        site = plan.replaced.get(id(node))
        if site is not None:
            nodes += [*site.before, *emit(site)]
            continue
        if id(node) in plan.dropped:
            continue
        kept = NodeProto()
        kept.CopyFrom(proto.node[view.index(node)])
        kept.input[:] = [t.name for t in node.inputs]
        if node.op != kept.op_type:  # a CastLike that became a Cast
            kept.op_type = node.op
            kept.attribute.append(helper.make_attribute("to", node.attrs["to"]))
        for attribute in kept.attribute:
            inner = node.attrs.get(attribute.name)
            if isinstance(inner, gs.Graph):
                _write(attribute.g, inner, view, plan, emit)
        nodes.append(kept)
    ordered = in_order(nodes)
    del proto.node[:]
    proto.node.extend(ordered)


def in_order(nodes: list[NodeProto]) -> list[NodeProto]:
    """The nodes in topological order, each as early as it stood or as late as its inputs make it."""
    makers = {o: k for k, n in enumerate(nodes) for o in n.output if o}
    state = bytearray(len(nodes))  # 0 new, 1 waiting for its inputs, 2 done
    result: list[NodeProto] = []
    for start in range(len(nodes)):
        stack = [start]
        while stack:
            k = stack[-1]
            if state[k] == 2:
                stack.pop()
                continue
            waits = [] if state[k] else [m for i in reads(nodes[k]) if (m := makers.get(i)) is not None]
            state[k] = max(state[k], 1)
            pending = [m for m in reversed(waits) if state[m] == 0]
            if pending:
                stack += pending
                continue
            state[k] = 2
            result.append(nodes[k])
            stack.pop()
    return result


def reads(node: NodeProto) -> Iterator[str]:
    """Every name that a node reads, by itself or inside its graphs."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graphs(graph):
                yield from (o.name for o in inner.output)
                for n in inner.node:
                    yield from n.input


def _clean(graph: GraphProto) -> None:
    """Removes nodes that nothing reads, then weights and notes of tensors that are gone."""
    live = {o.name for o in graph.output}
    kept: list[NodeProto] = []
    for node in reversed(graph.node):
        if not any(o in live for o in node.output if o):
            continue
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _clean(attribute.g)
        live.update(reads(node))
        kept.append(node)
    kept.reverse()
    made = {o for n in kept for o in n.output}
    inputs = {i.name for i in graph.input}
    copies = [_copy(n) for n in kept]
    del graph.node[:]
    graph.node.extend(copies)
    _keep(graph.initializer, [t.name in live or t.name in inputs for t in graph.initializer])
    _keep(
        graph.sparse_initializer,
        [t.values.name in live or t.values.name in inputs for t in graph.sparse_initializer],
    )
    _keep(graph.value_info, [v.name in made for v in graph.value_info])


def _copy(node: NodeProto) -> NodeProto:
    copy = NodeProto()
    copy.CopyFrom(node)
    return copy


def _keep(entries: Any, which: list[bool]) -> None:
    for k in range(len(which) - 1, -1, -1):
        if not which[k]:
            del entries[k]
