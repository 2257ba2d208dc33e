"""The matcher on small graphs: order, alternatives, names, constants, what is read outside."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from graphs import BOOL, F16, F32, Graph, finish, fused, layer_norm, names, normal

from trtfuse import model as models
from trtfuse import normalise
from trtfuse.pattern import Alt, Const, Match, Op, Pattern, Tag, Trace, Var, close, match, read_outside, roots
from trtfuse.view import View


def view_of(g: Graph, y: str) -> View:
    from pathlib import Path

    made = normalise.view(models.hold(finish(g, y), Path("test.onnx")))
    normalise.pass_over(made)
    return made


def found(pattern: Pattern, g: Graph, y: str) -> tuple[list[Match], Trace, View]:
    view, trace = view_of(g, y), Trace()
    tensor = next(o for n in view.nodes for o in n.outputs if o.name == y)
    return list(match(pattern, tensor, view, trace)), trace, view


def test_add_and_mul_match_in_either_order_and_sub_does_not() -> None:
    for kind, wanted in (("Add", 1), ("Mul", 1), ("Sub", 0)):
        g = Graph()
        y = g.node(kind, 2.0, g.input("x", (3,)))
        assert len(found(Op(kind, Var("x"), Const(2.0)), g, y)[0]) == wanted


def test_one_name_is_one_tensor() -> None:
    g = Graph()
    x = g.input("x", (3,))
    square = Op("Mul", Var("x"), Var("x"))
    assert found(square, g, g.Mul(x, x))[0]
    g = Graph()
    matches, trace, _ = found(square, g, g.Mul(g.input("x", (3,)), g.input("other", (3,))))
    assert not matches
    assert "is not" in trace.reason


def test_equal_constants_are_one_tensor_and_others_are_not() -> None:
    def twice(a: np.ndarray, b: np.ndarray) -> list[Match]:
        g = Graph()
        x = g.input("x", (3,))
        return found(Op("Add", Op("Mul", Var("x"), Var("w")), Var("w")), g, g.Add(g.Mul(x, a), b))[0]

    assert twice(normal((3,), 1), normal((3,), 1))
    assert not twice(normal((3,), 1), normal((3,), 2))


def test_alternatives_are_tried_in_order_and_tags_say_which() -> None:
    either = Alt(Tag("how", "first", Op("Relu", Var("x"))), Tag("how", "second", Op("Tanh", Var("x"))))
    g = Graph()
    matches, _, _ = found(either, g, g.Tanh(g.input("x", (3,))))
    assert [m.tags["how"] for m in matches] == ["second"]
    assert roots(either) == {"Relu", "Tanh"}


def test_a_sum_of_two_is_an_add() -> None:
    g = Graph()
    assert found(Op("Add", Var("a"), Var("b")), g, g.Sum(g.input("x", (3,)), g.input("z", (3,))))[0]


@pytest.mark.parametrize(
    ("value", "wanted", "dtype", "same"),
    [
        (1.4142135, 2**0.5, onnx.TensorProto.FLOAT, True),
        (1.41421, 2**0.5, onnx.TensorProto.FLOAT, False),
        (float(np.float16(2**0.5)), 2**0.5, onnx.TensorProto.FLOAT16, True),
        (1.4137, 2**0.5, onnx.TensorProto.FLOAT, False),
        (0.0, 0.0, onnx.TensorProto.FLOAT, True),
        (1e-9, 0.0, onnx.TensorProto.FLOAT, False),
        (-2.0, 2.0, onnx.TensorProto.FLOAT, False),
    ],
)
def test_constants_are_close_by_their_type(value: float, wanted: float, dtype: int, same: bool) -> None:
    assert close(value, wanted, dtype) is same


def test_the_reason_of_a_constant_that_is_nearly_right() -> None:
    g = Graph()
    y = g.Div(g.Relu(g.input("x", (3,))), 1.4137)
    pattern = Op("Div", Op("Relu", Var("x")), Const(2**0.5, says="sqrt(2)"))
    matches, trace, _ = found(pattern, g, y)
    assert not matches
    assert trace.reason == "1.4137 is not sqrt(2)"


def test_a_tensor_inside_that_is_read_voids_the_match_unless_it_is_given_back() -> None:
    g = Graph()
    inner = g.Relu(g.input("x", (3,)))
    other = g.Sin(inner)
    y = g.Tanh(inner)
    total = g.Add(y, other)
    view, trace = view_of(g, total), Trace()
    tensor = next(o for n in view.nodes for o in n.outputs if o.name == y)
    only = next(match(Op("Tanh", Op("Relu", Var("x"), name="r")), tensor, view, trace))
    assert "is read by" in str(read_outside(only, view, ()))
    assert read_outside(only, view, ("r",)) is None


def test_a_match_stays_in_one_graph() -> None:
    """The variance is computed outside the branch: the norm inside must not swallow it."""
    outer = Graph()
    x = outer.input("x", (2, 4, 32))
    flag = outer.input("flag", (), BOOL)
    outer.feeds[0]["flag"], outer.feeds[1]["flag"] = np.array(True), np.array(False)
    centred = outer.Sub(x, outer.reduce("ReduceMean", x))
    spread = outer.Sqrt(outer.Add(outer.reduce("ReduceMean", outer.Mul(centred, centred)), 1e-5))
    branches = {}
    for name in ("then_branch", "else_branch"):
        inner = Graph()
        inner.count = 100 if name == "then_branch" else 200
        y = inner.Div(centred, spread) if name == "then_branch" else inner.Neg(centred)
        inner.output(y, (2, 4, 32))
        branches[name] = inner.model().graph
    y = outer.node("If", flag, **branches)
    _, sites, _ = fused(finish(outer, y))
    assert names(sites) == []


def test_sites_inside_branches_are_found() -> None:
    outer = Graph()
    x = outer.input("x", (2, 4, 32))
    flag = outer.input("flag", (), BOOL)
    outer.feeds[0]["flag"], outer.feeds[1]["flag"] = np.array(True), np.array(False)
    branches = {}
    for k, name in enumerate(("then_branch", "else_branch")):
        inner = Graph()
        inner.count = 100 * (k + 1)
        y = layer_norm(inner, x)
        inner.output(y, (2, 4, 32))
        branches[name] = inner.model().graph
    model = finish(outer, outer.node("If", flag, **branches))
    made, sites, _ = fused(model)
    assert names(sites) == ["TrtfuseLayerNorm"] * 2
    from graphs import assert_same

    assert_same(model, made, outer.feeds)


def test_half_constants_match_by_their_own_precision() -> None:
    g = Graph(13, F16)
    y = g.Div(g.input("x", (3,)), np.float16(2**0.5))
    assert found(Op("Div", Var("x"), Const(2**0.5)), g, y)[0]
    g = Graph(13, F32)
    y = g.Div(g.input("x", (3,)), np.asarray(np.float16(2**0.5), F32))
    assert not found(Op("Div", Var("x"), Const(2**0.5)), g, y)[0]


def test_a_part_that_stands_twice_is_one_value() -> None:
    """exp(x/2 - max(x/2)) / sum(exp(x - max(x))) is no softmax, whichever alternative each half takes."""
    g = Graph()
    x = g.input("x", (2, 8))
    half = g.Mul(x, 0.5)
    top = g.Exp(g.Sub(half, g.reduce("ReduceMax", half)))
    other = g.Exp(g.Sub(x, g.reduce("ReduceMax", x)))
    model = finish(g, g.Div(top, g.reduce("ReduceSum", other)))
    assert names(fused(model)[1]) == []


def test_a_part_that_is_computed_twice_is_one_value() -> None:
    g = Graph()
    x = g.input("x", (2, 8))
    top = g.Exp(g.Sub(x, g.reduce("ReduceMax", x)))
    again = g.Exp(g.Sub(x, g.reduce("ReduceMax", x)))
    model = finish(g, g.Div(top, g.reduce("ReduceSum", again)))
    assert names(fused(model)[1]) == ["TrtfuseSoftmax"]


def test_a_guard_of_another_softmax_is_no_guard() -> None:
    g = Graph(18)
    q, k, v = (g.input(n, (2, 2, 4, 8)) for n in "qkv")
    scores = g.MatMul(q, g.Transpose(k, perm=[0, 1, 3, 2]))
    p, other = g.Softmax(g.Mul(scores, 0.5), axis=-1), g.Softmax(g.Mul(scores, 0.1), axis=-1)
    model = finish(g, g.MatMul(g.Where(g.IsNaN(other), 0.0, p), v))
    assert "TrtfuseAttention" not in names(fused(model)[1])
