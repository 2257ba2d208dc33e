"""From sites to standard operators, at the opset that spells them shortest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import BOOL, Graph, assert_same, finish, layer_norm, names, normal
from onnx import helper

from trtfuse import lower
from trtfuse import model as models
from trtfuse.errors import InputError
from trtfuse.pipeline import match

ROWS = ("batch", 4, 32)


def example(opset: int) -> tuple[onnx.ModelProto, Graph]:
    g = Graph(opset)
    x = g.input("x", ROWS)
    y = layer_norm(g, g.Add(x, g.Sin(x)))
    scores = g.Softmax(g.MatMul(y, g.Transpose(y, perm=[0, 2, 1])), axis=2)
    half = g.Mul(g.Mul(y, g.Add(g.Erf(g.Div(y, 2**0.5)), 1.0)), 0.5)
    return finish(g, g.MatMul(scores, g.Add(half, normal((32,), 2)))), g


@pytest.mark.parametrize("opset", [11, 13, 17, 20])
def test_the_native_model_has_nothing_of_ours_and_the_same_numbers(opset: int) -> None:
    model, g = example(opset)
    matched = match(models.hold(model, Path("m.onnx")))
    assert len(matched.chosen) >= 3
    made = models.whole(lower.lowered(matched.model, matched.view, matched.chosen))
    assert not made.functions
    assert all(n.domain != "trtfuse" for n in made.graph.node)
    assert ("LayerNormalization" in [n.op_type for n in made.graph.node]) == (opset >= 17)
    assert_same(model, made, g.feeds)


def test_the_wished_opset_is_that_of_the_shortest_spelling_within_the_limit() -> None:
    model, _ = example(11)
    matched = match(models.hold(model, Path("m.onnx")))
    assert lower.wished_opset(matched.chosen, 25) == 20
    assert lower.wished_opset(matched.chosen, 18) == 17
    model, _ = example(20)
    assert lower.wished_opset(match(models.hold(model, Path("m.onnx"))).chosen, 25) == 0


def test_a_raised_model_has_the_same_sites_and_numbers() -> None:
    """Softmax changed at 13: with shapes at hand the converter leaves it one operator."""
    model, g = example(11)
    held = models.hold(model, Path("m.onnx"))
    newer = lower.raised(held, 20)
    assert newer is not None
    assert newer.opset == 20
    again, first = match(newer), match(held)
    assert [s.id for s in again.chosen] == [s.id for s in first.chosen]
    made = models.whole(lower.lowered(newer, again.view, again.chosen))
    kinds = [n.op_type for n in made.graph.node]
    assert "LayerNormalization" in kinds
    assert "Gelu" in kinds
    assert "Flatten" not in kinds
    assert_same(model, made, g.feeds)


def test_a_model_that_cannot_be_converted_stays() -> None:
    g = Graph(17)
    y = g.node("QuickGelu", layer_norm(g, g.input("x", ROWS)), domain="com.microsoft", alpha=1.3)
    held = models.hold(finish(g, y), Path("m.onnx"))
    made = lower.raised(held, 20)
    assert made is None or made.opset == 20


def test_plugins_take_the_place_of_their_functions() -> None:
    """The file that is proven calls functions; the one that TensorRT parses has our plugins' nodes."""
    g = Graph(13)
    x, mask = g.input("x", ROWS), g.input("mask", (1, 1, 32), BOOL)
    y = layer_norm(g, g.Add(x, g.Sin(x)), eps=1e-12)
    chances = g.Softmax(g.Where(mask, g.Mul(y, 0.5), -1e4), axis=-1)
    model = finish(g, g.Relu(g.Add(chances, normal((32,), 2))))
    matched = match(models.hold(model, Path("m.onnx")), "all", "tensorrt")
    assert [(s.fusion.op, s.lowering) for s in matched.chosen] == [
        ("TrtfuseSkipLayerNorm", "plugin"),
        ("TrtfuseSoftmax", "plugin"),
        ("TrtfuseBiasAct", "plugin"),
    ]
    proven = lower.lowered(matched.model, matched.view, matched.chosen)
    assert_same(model, models.whole(proven), g.feeds)
    made = models.whole(lower.with_plugins(proven, matched.chosen))
    assert not made.functions
    ours = [n for n in made.graph.node if n.domain == "trtfuse"]
    assert [n.op_type for n in ours] == ["TrtfuseSkipLayerNorm", "TrtfuseSoftmax", "TrtfuseBiasAct"]
    norm, softmax, _ = ({a.name: helper.get_attribute_value(a) for a in n.attribute} for n in ours)
    assert norm["epsilon"] == pytest.approx(1e-12)
    assert (norm["inputs"], norm["outputs"]) == (b"x skip scale bias", b"y")
    assert (softmax["plugin_namespace"], softmax["plugin_version"]) == (b"trtfuse", b"1")
    assert (softmax["inputs"], softmax["scale"], softmax["fill"]) == (b"x condition", 0.5, -1e4)
    before = next(n for n in made.graph.node if ours[1].input[1] in n.output)
    assert (before.op_type, list(before.input)) == ("Cast", ["mask"])  # plugins take no booleans
    assert len(models.whole(proven).functions) == 3  # and the proven one is as it was


def test_what_cannot_be_a_plugin_is_native_and_says_why(tmp_path: Path) -> None:
    g = Graph(13)
    x = g.input("x", ROWS)
    deep = Graph(13)
    deep.count = 500
    y = deep.Relu(deep.Add(x, normal((32,), 2)))
    deep.output(y, None)
    inner = helper.make_graph(deep.nodes, "then", [], deep.outputs, deep.weights)
    branch = g.If(g.weight(np.array(True), BOOL), then_branch=inner, else_branch=inner)
    scores = g.MatMul(branch, g.Transpose(x, perm=[0, 2, 1]))
    model = finish(g, g.MatMul(g.Softmax(g.Mul(scores, 0.5), axis=2), x))
    matched = match(models.hold(model, Path("m.onnx")), "all", "tensorrt")
    reasons = {s.fusion.op: (s.lowering, s.reason) for s in matched.chosen}
    inside = reasons["TrtfuseBiasAct"]
    assert inside == ("native", "all sites are fused; native, since it is inside a branch or loop")
    assert reasons["TrtfuseSoftmax"][0] == "plugin"  # rather than an attention that has none
    selection = tmp_path / "s.json"
    selection.write_text('{"schema": "trtfuse/select/1", "ops": {"TrtfuseAttention": "plugin"}}')
    with pytest.raises(InputError, match=r"TrtfuseAttention_0, but there is no plugin for TrtfuseAttention"):
        match(models.hold(model, Path("m.onnx")), selection, "tensorrt")
    selection.write_text('{"schema": "trtfuse/select/1", "ops": {"TrtfuseAttention": "keep"}}')
    assert "TrtfuseAttention" not in names(match(models.hold(model, Path("m.onnx")), selection).chosen)
    selection.write_text('{"schema": "trtfuse/select/1", "ops": {"TrtfuseBiasAct": "plugin"}}')
    with pytest.raises(InputError, match="the target takes no plugins: write native or keep for it"):
        match(models.hold(model, Path("m.onnx")), selection, "tensorrt-rtx")
