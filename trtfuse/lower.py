"""From a chosen site to what a target builds: the best standard operators in its place.

Where a newer opset has one operator for what the model must spell out (LayerNormalization, Gelu), the model
is raised to it by onnx's converter; the caller proves by numbers that the raised model computes the same.
"""

from __future__ import annotations

import onnx
import onnx.version_converter
from onnx import ModelProto, NodeProto

from trtfuse.fusion import Site
from trtfuse.model import Model
from trtfuse.normalise import infer_shapes
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
