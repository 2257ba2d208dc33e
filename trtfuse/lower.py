"""From a chosen site to what a target builds: its plugin, or the best standard operators in its place.

Where a newer opset has one operator for what the model must spell out (LayerNormalization, Gelu), the model
is raised to it by onnx's converter; the caller proves by numbers that the raised model computes the same.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx.version_converter
from onnx import ModelProto, NodeProto, TensorProto, helper

from trtfuse import plugin_library
from trtfuse.fusion import Site
from trtfuse.model import Model
from trtfuse.normalise import DOMAIN, infer_shapes
from trtfuse.rewrite import rewrite
from trtfuse.view import View

KERNEL_TYPES = frozenset((TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16))


def lowered(model: Model, view: View, sites: list[Site]) -> Model:
    """The model as the target shall compute it: sites to be plugins call their functions, so that any ONNX
    Runtime still runs it; all others are in standard operators."""
    return rewrite(model, view, sites, lambda s: None if s.lowering == "plugin" else list(s.lowered().nodes))


def with_plugins(model: Model, sites: list[Site]) -> Model:
    """The file that TensorRT parses: the calls of `lowered` become nodes of our plugins, their functions go.

    TensorRT looks an operator up by its name alone, among its own, then the model's functions, then plugins;
    with the function there, it would take that.
    """
    chosen = {s.id: s for s in sites if s.lowering == "plugin"}
    result = model.copy()
    nodes: list[NodeProto] = []
    for node in result.proto.graph.node:
        site = chosen.get(node.name) if node.domain == DOMAIN else None
        nodes += [node] if site is None else _plugin_nodes(node, site)
    made = [NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del result.proto.graph.node[:]
    result.proto.graph.node.extend(made)
    gone = {s.op_type for s in chosen.values()}
    kept = [f for f in result.proto.functions if f.domain != DOMAIN or f.name not in gone]
    del result.proto.functions[:]
    result.proto.functions.extend(kept)
    return result


def _plugin_nodes(call: NodeProto, site: Site) -> list[NodeProto]:
    node = helper.make_node(site.fusion.op, list(call.input), list(call.output), site.id, domain=DOMAIN)
    attributes = plugin_library.node_attributes(site)
    node.attribute.extend(helper.make_attribute(k, v) for k, v in sorted(attributes.items()))
    if "condition" not in site.tensors:
        return [node]
    # Plugins take no booleans.
    place = list(site.tensors).index("condition")
    name = f"{site.id}/condition"
    cast = helper.make_node("Cast", [node.input[place]], [name], name=name, to=TensorProto.INT32)
    node.input[place] = name
    return [cast, node]


def plugin_refusal(view: View) -> Callable[[Site], str | None]:
    """Why a site of the view's model cannot be a plugin, in words; None if it can."""
    top = {id(n) for n in view.graph.nodes}

    def refusal(site: Site) -> str | None:
        op = site.fusion.op
        if op not in plugin_library.PLUGINS:
            return f"there is no plugin for {op}"
        if site.dtype not in KERNEL_TYPES:
            return f"no kernel takes {TensorProto.DataType.Name(site.dtype)}"
        if id(site.root) not in top:
            return "it is inside a branch or loop"
        return None

    return refusal


def wished_opset(sites: list[Site], limit: int) -> int:
    """The opset at which the sites' native lowering is shortest, at most `limit`; 0 if the model's is."""
    wishes = {site.lowered().wishes for site in sites if site.lowering != "plugin"}
    return max((w for w in wishes if w <= limit), default=0)


def raised(model: Model, opset: int) -> Model | None:
    """The model converted to a newer opset, None where onnx's converter cannot."""
    if any(f for f in model.proto.functions):
        return None
    try:
        # With shapes: the converter spells Softmax anew, by Flatten and Reshape, where it knows no rank.
        proto: ModelProto = onnx.version_converter.convert_version(infer_shapes(model.proto), opset)
    except Exception:  # no adapter for some operator: the model stays at its opset
        return None
    _restore(model.proto, proto)
    return Model(proto, model.path, model.weights, model.external)


def _restore(old: ModelProto, new: ModelProto) -> None:
    """Gives the converted graph the inputs, outputs and notes of the original back."""
    for entries, kept in (
        (new.graph.input, old.graph.input),
        (new.graph.output, old.graph.output),
        (new.graph.value_info, old.graph.value_info),
    ):
        del entries[:]
        entries.extend(kept)
