"""Exporter spellings meet here, so that patterns stay few.

The model's own functions are inlined, shapes inferred, and Identity, inference Dropout and Casts that change
nothing are passed over. Constants are not folded in the file: `View.value` knows them wherever they come
from.
"""

from __future__ import annotations

import re

import onnx
import onnx.inliner
import onnx.shape_inference
import onnx_graphsurgeon as gs
from onnx import GraphProto, ModelProto
from onnx_graphsurgeon.logger import G_LOGGER

from trtfuse.errors import InputError
from trtfuse.infer import infer
from trtfuse.model import Model, graphs, one_line
from trtfuse.view import View, inner_graphs, kind

DOMAIN = "trtfuse"
PLACEHOLDER = re.compile(r"\?|-1|None|none|unk__\d+|unknown|dynamic|Dynamic")


def inline_functions(model: Model, ours: frozenset[str]) -> Model:
    """The model with every function of its own inlined but the fused ops (`ours`: their names before `_`)."""
    foreign = [f for f in model.proto.functions if f.domain != DOMAIN or f.name.split("_")[0] not in ours]
    if not foreign:
        return model
    names = [(f.domain, f.name, f.overload) for f in foreign]
    try:
        if len(foreign) == len(model.proto.functions):
            proto = onnx.inliner.inline_local_functions(model.proto, convert_version=True)
        else:
            proto = onnx.inliner.inline_selected_functions(model.proto, [n[:2] for n in names])
    except Exception as e:
        raise InputError(
            f"the model's own functions cannot be inlined: {one_line(e)}: export without them"
        ) from e
    return Model(proto, model.path, model.weights, model.external)


def infer_shapes(proto: ModelProto) -> ModelProto:
    """A copy of the proto with the types and shapes of its tensors, as far as they can be proven."""
    try:
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except Exception:  # onnx refuses some models that run; our own pass takes each node by itself
        inferred = ModelProto()
        inferred.CopyFrom(proto)
    infer(inferred)
    return inferred


def view(model: Model) -> View:
    """The graph as patterns see it, imported into onnx-graphsurgeon without what the surgeon cannot carry."""
    G_LOGGER.severity = G_LOGGER.CRITICAL
    proto = infer_shapes(model.proto)
    exposed: set[str] = set()
    for graph in graphs(proto.graph):
        _make_importable(graph, constants_are_inputs=proto.ir_version >= 4)
        exposed |= {o.name for o in graph.output}
        exposed |= _read_by_lists_of_graphs(graph)
    del proto.functions[:]
    return View(model, gs.import_onnx(proto), exposed)


def _make_importable(graph: GraphProto, *, constants_are_inputs: bool) -> None:
    """Takes from a graph what the surgeon mistakes: non-tensor types, and weights that callers may override.

    Before IR version 4 every weight had to be listed as an input; it is a constant all the same.
    """
    for info in (*graph.input, *graph.output, *graph.value_info):
        if info.type.WhichOneof("value") not in (None, "tensor_type"):
            info.ClearField("type")
    if constants_are_inputs:
        inputs = {i.name for i in graph.input}
        kept = [t for t in graph.initializer if t.name not in inputs]
        if len(kept) != len(graph.initializer):
            del graph.initializer[:]
            graph.initializer.extend(kept)


def _read_by_lists_of_graphs(graph: GraphProto) -> set[str]:
    """Tensors read inside attributes that hold lists of graphs, which the surgeon does not import."""
    lists = [
        inner
        for node in graph.node
        for a in node.attribute
        if a.type == onnx.AttributeProto.GRAPHS
        for outer in a.graphs
        for inner in graphs(outer)
    ]
    return {name for g in lists for n in g.node for name in n.input}


def without_placeholders(model: Model) -> Model:
    """The model, for a target, without names of dimensions that stand for any size ("?", "None", "unk__3").

    Exporters give such a name to dimensions that differ; a target takes equal names for equal sizes.
    """
    result = model.copy()
    for graph in graphs(result.proto.graph):
        for info in (*graph.input, *graph.output, *graph.value_info):
            for dim in info.type.tensor_type.shape.dim:
                if PLACEHOLDER.fullmatch(dim.dim_param):
                    dim.ClearField("dim_param")
    return result


def pass_over(view: View) -> int:
    """Removes nodes that change nothing, their readers reading what they read, and nodes that nothing reads.

    Returns how many went. One whose result is an output of a graph stays.
    """
    passed = 0
    for graph in inner_graphs(view.graph):
        for node in graph.nodes:
            _name_the_type(node, view)
        gone = [n for n in graph.nodes if _changes_nothing(n, view) and not view.is_exposed(n.outputs[0])]
        for node in gone:
            source, result = node.inputs[0], node.outputs[0]
            if result.dtype is not None and source.dtype is None:
                source.dtype = result.dtype
            for reader in list(result.outputs):
                for k, tensor in enumerate(reader.inputs):
                    if tensor is result:
                        reader.inputs[k] = source
            _detach(node)
        for node in reversed(graph.nodes):
            if node.outputs and not any(view.readers(o) or view.is_exposed(o) for o in node.outputs):
                _detach(node)
                gone.append(node)
        if gone:
            dead = {id(n) for n in gone}
            graph.nodes[:] = [n for n in graph.nodes if id(n) not in dead]
            passed += len(gone)
    if passed:
        view.refresh()
    return passed


def _detach(node: gs.Node) -> None:
    """Takes a node off its tensors, with those that the graphs inside it read."""
    for value in node.attrs.values():
        if isinstance(value, gs.Graph):
            for inner in value.nodes:
                _detach(inner)
    node.inputs.clear()
    node.outputs.clear()


def _name_the_type(node: gs.Node, view: View) -> None:
    """Makes a CastLike, which onnx's own functions have throughout, the Cast that it is."""
    to = view.dtype(node.inputs[1]) if kind(node) == "CastLike" else None
    if to is not None:
        node.op, node.attrs["to"] = "Cast", to
        del node.inputs[1]


def _changes_nothing(node: gs.Node, view: View) -> bool:
    op = kind(node)
    if not node.inputs or not node.outputs or node.inputs[0].is_empty():
        return False
    if op == "Identity":
        return True
    if op == "Dropout":
        unused_mask = all(not view.readers(o) and not view.is_exposed(o) for o in node.outputs[1:])
        return unused_mask and _is_inference(node, view)
    if op == "Cast":
        source = view.dtype(node.inputs[0])
        return source is not None and source == node.attrs.get("to")
    return False


def _is_inference(node: gs.Node, view: View) -> bool:
    if view.opset < 7:
        return bool(node.attrs.get("is_test", 0))
    if len(node.inputs) > 2 and not node.inputs[2].is_empty():
        training = view.scalar(node.inputs[2])
        return training == 0.0
    return True
