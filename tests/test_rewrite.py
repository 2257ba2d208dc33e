"""What the rewrite keeps, in which order, and under which names."""

from __future__ import annotations

import onnx
from graphs import F32, Graph, assert_same, finish, fused, layer_norm, normal, ops
from onnx import helper

from trtfuse.rewrite import in_order

ROWS = ("batch", 4, 32)


def test_names_of_inputs_outputs_and_results_stay() -> None:
    g = Graph()
    y = layer_norm(g, g.input("/enc/größe:0", ROWS))
    made, _, _ = fused(finish(g, y))
    (site,) = [n for n in made.graph.node if n.domain == "trtfuse"]
    assert (site.input[0], site.output[0]) == ("/enc/größe:0", y)


def test_an_untouched_node_keeps_all_it_had() -> None:
    g = Graph(17)
    x = g.input("x", ROWS)
    y = g.Clip(g.Neg(layer_norm(g, x)), "", F32(1))
    model = finish(g, y)
    model.ir_version = 10
    neg = next(n for n in model.graph.node if n.op_type == "Neg")
    neg.metadata_props.add(key="module", value="head")
    neg.doc_string = "says something"
    made, _, _ = fused(model)
    kept = next(n for n in made.graph.node if n.op_type == "Neg")
    assert (kept.doc_string, kept.metadata_props[0].value) == ("says something", "head")
    assert next(n for n in made.graph.node if n.op_type == "Clip").input[1] == ""


def test_a_site_is_named_apart_from_the_models_nodes() -> None:
    g = Graph()
    x = g.Relu(g.input("x", ROWS))
    g.nodes[-1].name = "TrtfuseLayerNorm_0"
    model = finish(g, layer_norm(g, x))
    made, _, _ = fused(model)
    assert len({n.name for n in made.graph.node}) == len(made.graph.node)
    assert_same(model, made, g.feeds)


def test_the_ir_version_rises_to_that_of_functions_and_the_domain_is_imported() -> None:
    g = Graph(11)
    model = finish(g, layer_norm(g, g.input("x", ROWS)))
    model.ir_version = 6
    made, _, _ = fused(model)
    assert made.ir_version == 8
    assert ("trtfuse", 1) in [(o.domain, o.version) for o in made.opset_import]
    assert_same(model, made, g.feeds)


def test_weights_that_only_the_pattern_read_are_gone() -> None:
    g = Graph()
    made, _, _ = fused(finish(g, layer_norm(g, g.input("x", ROWS))))
    assert len(made.graph.initializer) == 2  # gamma and beta; the 2 and the epsilon are in the body


def test_weights_that_are_inputs_stay_inputs() -> None:
    """IR version 3: every weight had to be listed as an input."""
    g = Graph(9)
    model = finish(g, layer_norm(g, g.input("x", ROWS)))
    model.ir_version = 3
    for tensor in model.graph.initializer:
        model.graph.input.append(
            helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        )
    made, sites, _ = fused(model)
    assert len(sites) == 1
    assert [i.name for i in made.graph.input] == [i.name for i in model.graph.input]
    assert_same(model, made, g.feeds)


def test_two_variants_of_an_op_are_two_functions() -> None:
    g = Graph()
    x = g.input("x", ROWS)
    first = layer_norm(g, g.Add(x, g.Sin(x)))
    second = layer_norm(g, g.Add(g.Add(first, normal((32,), 3)), x))
    made, _, _ = fused(finish(g, second))
    assert ops(made) == ["TrtfuseSkipLayerNorm", "TrtfuseSkipLayerNorm_bias"]
    assert [f.name for f in made.functions] == ops(made)
    assert not any(f.overload for f in made.functions)


def test_order_is_kept_but_for_what_must_move() -> None:
    nodes = [
        helper.make_node("Relu", ["b"], ["c"], name="second"),
        helper.make_node("Neg", ["x"], ["z"], name="free"),
        helper.make_node("Sin", ["x"], ["b"], name="first"),
    ]
    assert [n.name for n in in_order(nodes)] == ["first", "second", "free"]


def test_what_an_inner_graph_reads_comes_before_it() -> None:
    inner = helper.make_graph(
        [helper.make_node("Neg", ["b"], ["d"])],
        "inner",
        [],
        [helper.make_tensor_value_info("d", onnx.TensorProto.FLOAT, None)],
    )
    nodes = [
        helper.make_node("If", ["flag"], ["y"], name="if", then_branch=inner, else_branch=inner),
        helper.make_node("Sin", ["x"], ["b"], name="sin"),
    ]
    assert [n.name for n in in_order(nodes)] == ["sin", "if"]


def test_a_thousand_nodes_in_a_row_do_not_recurse() -> None:
    nodes = [helper.make_node("Neg", [f"t{k}"], [f"t{k + 1}"]) for k in reversed(range(5000))]
    assert [n.input[0] for n in in_order(nodes)][:2] == ["t0", "t1"]


def test_a_foreign_function_of_our_name_is_not_taken_for_ours() -> None:
    g = Graph(17)
    x = g.input("x", ROWS)
    body = [helper.make_node("Neg", ["a"], ["b"])]
    name = "TrtfuseSoftmax_scale0p5"
    g.functions.append(
        helper.make_function("trtfuse", name, ["a"], ["b"], body, [helper.make_opsetid("", 17)])
    )
    y = g.node(name, g.Softmax(g.Mul(x, 0.5), axis=-1), domain="trtfuse")
    model = finish(g, y)
    made, _, _ = fused(model)
    assert len({f.name for f in made.functions}) == 2
    assert_same(model, made, g.feeds)


def test_a_weight_that_is_an_output_keeps_its_shape() -> None:
    g = Graph()
    x = g.input("x", ROWS)
    gamma = g.weight(1 + normal((1, 1, 32), 1, F32, 0.3), name="gamma")
    y = g.Mul(layer_norm(g, x, scale=False, bias=False), gamma)
    g.output(gamma)
    model = finish(g, y)
    made, _, _ = fused(model)
    assert_same(model, made, g.feeds)


def test_a_tensor_that_has_a_sites_name() -> None:
    g = Graph()
    x = g.Relu(g.input("x", ROWS))
    g.nodes[-1].output[0] = "TrtfuseLayerNorm_0_scale"
    gamma = g.weight(1 + normal((1, 1, 32), 1, F32, 0.3), name="gamma")
    y = g.Mul(layer_norm(g, "TrtfuseLayerNorm_0_scale", scale=False, bias=False), gamma)
    model = finish(g, g.Add(y, g.Mul("TrtfuseLayerNorm_0_scale", gamma)))
    assert x
    made, _, _ = fused(model)
    assert_same(model, made, g.feeds)
