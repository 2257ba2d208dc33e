"""Functions inlined, nodes that change nothing passed over, nodes that nothing reads dropped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from graphs import F16, F32, Graph, assert_same, finish, fused, layer_norm, names
from onnx import helper

from trtfuse import model as models
from trtfuse import normalise
from trtfuse.view import View


def normalised(model: onnx.ModelProto) -> View:
    view = normalise.view(models.hold(model, Path("m.onnx")))
    normalise.pass_over(view)
    return view


def left(g: Graph, y: str) -> list[str]:
    return [n.op for n in normalised(finish(g, y)).nodes]


def test_identity_and_inference_dropout_go() -> None:
    g = Graph()
    y = g.Relu(g.Dropout(g.Identity(g.input("x", (3,)))))
    assert left(g, y) == ["Relu", "Identity"]  # the last one makes the output


def test_dropout_in_training_stays() -> None:
    g = Graph()
    y = g.Relu(g.Dropout(g.input("x", (3,)), np.asarray(0.0, F32), np.array(True)))
    assert "Dropout" in left(g, y)


def test_dropout_whose_mask_is_read_stays() -> None:
    g = Graph()
    y, mask = g.node("Dropout", g.input("x", (3,)), outputs=2)
    assert "Dropout" in left(g, g.Where(mask, g.Relu(y), 0.0))


def test_a_cast_to_the_same_type_goes_and_another_stays() -> None:
    g = Graph()
    x = g.input("x", (3,))
    assert "Cast" not in left(g, g.Relu(g.cast(x, F32)))
    g = Graph()
    x = g.input("x", (3,))
    assert "Cast" in left(g, g.cast(g.Relu(g.cast(x, F16)), F32))


def test_a_node_that_nothing_reads_does_not_keep_a_site() -> None:
    g = Graph()
    keep: dict[str, str] = {}
    y = layer_norm(g, g.input("x", ("b", 4, 32)), keep=keep)
    g.Sin(g.Cos(keep["variance"]))
    model = finish(g, y)
    made, sites, _ = fused(model)
    assert names(sites) == ["TrtfuseLayerNorm"]
    assert "Sin" not in [n.op_type for n in made.graph.node]
    assert_same(model, made, g.feeds)


def test_functions_of_the_model_are_inlined_each_overload_by_itself() -> None:
    g = Graph(20)
    x = g.input("x", (2, 4))
    for overload, op in (("one", "Relu"), ("two", "Neg")):
        f = helper.make_function(
            "mine", "Act", ["a"], ["b"], [helper.make_node(op, ["a"], ["b"])], [helper.make_opsetid("", 20)]
        )
        f.overload = overload
        g.functions.append(f)
    y = g.node("Act", x, domain="mine")
    g.nodes[-1].overload = "two"
    model = finish(g, g.Mul(y, g.Sigmoid(y)))
    held = normalise.inline_functions(models.hold(model, Path("m.onnx")), frozenset())
    assert [n.op_type for n in held.proto.graph.node][:1] == ["Neg"]
    assert not held.proto.functions
    made, sites, _ = fused(model)
    assert names(sites) == ["TrtfuseBiasAct"]
    assert_same(model, made, g.feeds)


def test_our_own_functions_stay_where_asked() -> None:
    g = Graph()
    made, _, _ = fused(finish(g, layer_norm(g, g.input("x", ("b", 4, 32)))))
    held = models.hold(made, Path("m.onnx"))
    ours = frozenset({"TrtfuseLayerNorm"})
    assert normalise.inline_functions(held, ours).proto.functions
    inlined = normalise.inline_functions(models.hold(made, Path("m.onnx")), frozenset())
    assert not inlined.proto.functions
    assert "Sqrt" in [n.op_type for n in inlined.proto.graph.node]


def test_sequences_and_optionals_pass_through() -> None:
    g = Graph(17)
    sequence = helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, [2, 4, 32]))
    g.inputs.append(helper.make_value_info("parts", sequence))
    for k, feed in enumerate(g.feeds):
        feed["parts"] = [np.random.default_rng(k).standard_normal((2, 4, 32)).astype(F32)] * 2
    y = layer_norm(g, g.SequenceAt("parts", np.array(1)))
    model = finish(g, y)
    made, sites, _ = fused(model)
    assert names(sites) == ["TrtfuseLayerNorm"]
    assert_same(model, made, g.feeds)


def test_placeholder_names_of_dimensions_are_no_symbols_for_a_target() -> None:
    """Two dimensions named "?" are not of one size."""
    g = Graph()
    model = finish(g, g.Relu(g.input("x", ("batch", "?", "?"))))
    held = models.hold(model, Path("m.onnx"))
    dims = normalise.without_placeholders(held).proto.graph.input[0].type.tensor_type.shape.dim
    assert [d.dim_param for d in dims] == ["batch", "", ""]
    assert held.proto.graph.input[0].type.tensor_type.shape.dim[1].dim_param == "?"
