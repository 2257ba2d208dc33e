"""From sites to standard operators, at the opset that spells them shortest."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from graphs import Graph, assert_same, finish, layer_norm, normal

from trtfuse import lower
from trtfuse import model as models
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
