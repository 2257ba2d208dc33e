"""From a chosen site to what a target builds: the best standard operators in its place.

Where a newer opset has one operator for what the model must spell out (LayerNormalization, Gelu), the model is
raised to it by onnx's converter; the caller proves by numbers that the raised model computes the same.
"""

from __future__ import annotations

import onnx
import onnx.version_converter
from onnx import ModelProto, NodeProto

from trtfuse.fusion import Site
from trtfuse.model import Model
from trtfuse.rewrite import apply
from trtfuse.view import View


def native(model: Model, view: View, sites: list[Site]) -> Model:
    """The model with every site in standard operators: no function, no domain of ours."""
    return apply(model, view, sites, lambda site: _nodes(site))


def _nodes(site: Site) -> list[NodeProto]:
    return list(site.lowered().nodes)


def wished_opset(sites: list[Site], limit: int) -> int:
    """The opset at which the sites' native lowering is shortest, at most `limit`; 0 if the model's is."""
    wishes = {site.lowered().wishes for site in sites}
    return max((w for w in wishes if w <= limit), default=0)


def raised(model: Model, opset: int) -> Model | None:
    """The model converted to a newer opset, None where onnx's converter cannot."""
    if any(f for f in model.proto.functions):
        return None
    try:
        proto: ModelProto = onnx.version_converter.convert_version(model.proto, opset)
    except Exception:  # no adapter for some operator: the model stays at its opset
        return None
    _keep_constants_in_their_place(model.proto, proto)
    return Model(proto, model.path, model.weights, model.external)


def _keep_constants_in_their_place(old: ModelProto, new: ModelProto) -> None:
    """The converter lists no input twice; inputs and outputs must be those of the original."""
    del new.graph.input[:]
    new.graph.input.extend(old.graph.input)
    del new.graph.output[:]
    new.graph.output.extend(old.graph.output)
