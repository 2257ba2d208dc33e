"""What users of such tools ran into, each as a graph of our own: fused right, or left alone, never wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from graphs import (
    BOOL,
    F16,
    F32,
    I64,
    Graph,
    assert_same,
    finish,
    fused,
    layer_norm,
    names,
    normal,
    ops,
    prove,
    run,
)
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import trtfuse
from trtfuse.errors import InputError

LN, SKIP, RMS = "TrtfuseLayerNorm", "TrtfuseSkipLayerNorm", "TrtfuseRmsNorm"
BIAS_ACT, SOFTMAX, ATTENTION = "TrtfuseBiasAct", "TrtfuseSoftmax", "TrtfuseAttention"
LINEAR = "TrtfuseLinearAct"
ROWS = ("batch", 8, 32)
HEADS = ("batch", 4, 8, 16)


def gelu(g: Graph, x: str) -> str:
    return str(g.Mul(g.Mul(x, g.Add(g.Erf(g.Div(x, 2**0.5)), 1.0)), 0.5))


# --- norms ---


@pytest.mark.parametrize("square", ["pow", "mul"])
def test_values_of_300_in_fp16_do_not_overflow(square: str) -> None:
    """The original's squares are infinite in fp16; the fused norm has fp32 statistics and is finite."""
    g = Graph(17, F16)
    x = g.input("x", ROWS, scale=300)
    made, sites, _ = fused(finish(g, layer_norm(g, x, square=square)))
    assert names(sites) == [LN]
    (y,) = run(made, g.feeds[0], optimized=False)
    wide = g.feeds[0]["x"].astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    unit = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    weights = {t.name: numpy_helper.to_array(t) for t in made.graph.initializer}
    node = next(n for n in made.graph.node if n.domain == "trtfuse")
    want = unit * weights[node.input[1]] + weights[node.input[2]]
    np.testing.assert_allclose(y.astype(np.float64), want, atol=1e-2)


@pytest.mark.parametrize("fill", [-np.inf, -1e12, -3.4028235e38])
def test_tensorflows_norm_beside_its_mask_constants(fill: float) -> None:
    """x * (rsqrt * gamma) + (beta - mean * rsqrt * gamma), then scores under a mask of that constant."""
    g = Graph(13)
    x = g.input("x", ROWS)
    gamma, beta = (1 + normal((32,), 1, F32, 0.3)), normal((32,), 2)
    mean = g.reduce("ReduceMean", x)
    centred = g.Sub(x, mean)
    root = g.Sqrt(g.Add(g.reduce("ReduceMean", g.Mul(centred, centred)), 1e-3))
    slope = g.Mul(g.Reciprocal(root), gamma)
    y = g.Add(g.Mul(x, slope), g.Sub(beta, g.Mul(mean, slope)))
    mask = np.zeros((8, 8), F32)
    mask[np.triu_indices(8, 1)] = fill
    scores = g.Add(g.Mul(g.MatMul(y, g.Transpose(y, perm=[0, 2, 1])), 0.125), mask)
    prove(g, g.MatMul(g.Softmax(scores, axis=2), g.Sin(x)), [LN, ATTENTION])


@pytest.mark.parametrize("shape", [(8, 1), (1, 8, 1), (8, 32), (1, 1, 1, 32), (3, 1, 32)])
def test_a_scale_that_is_no_row_stays_outside(shape: tuple[int, ...]) -> None:
    g = Graph(13)
    y = layer_norm(g, g.input("x", (3, 8, 32)), scale=False, bias=False)
    prove(g, g.Mul(y, 1 + normal(shape, 5, F32, 0.3)), [LN])


def test_a_scale_of_channels_after_a_norm_over_the_last_axis() -> None:
    g = Graph(13)
    y = layer_norm(g, g.input("x", (2, 16, 5, 32)), scale=False, bias=False)
    made, _ = prove(g, g.Add(g.Mul(y, normal((1, 16, 1, 1), 5)), normal((1, 16, 1, 1), 6)), [LN])
    assert "noscale" in ops(made)[0]


def test_a_norm_of_a_permuted_view() -> None:
    g = Graph(13)
    x = g.Transpose(g.input("x", (2, 32, 4, 5)), perm=[0, 2, 3, 1])
    prove(g, g.Transpose(layer_norm(g, x), perm=[0, 3, 1, 2]), [LN])


def test_twelve_norms_of_one_gamma_store_it_once() -> None:
    g = Graph(13)
    y = g.input("x", ROWS)
    gamma = g.weight(1 + normal((1, 1, 32), 1, F32, 0.1))
    for k in range(12):
        y = g.Mul(layer_norm(g, g.Add(y, g.Sin(y)), scale=False, bias=False, eps=1e-5 + k * 1e-6), gamma)
    made, _ = prove(g, y, [SKIP] * 12)
    size = sum(np.prod(t.dims) for t in made.graph.initializer if t.data_type == TensorProto.FLOAT)
    assert size <= 32


# --- weights ---


def test_a_weight_that_is_tied() -> None:
    """The embedding is the last projection too, as a Transpose of it."""
    g = Graph(13)
    ids = g.input("ids", ("batch", 8), I64)
    for feed in g.feeds:
        feed["ids"] = np.abs(feed["ids"]) % 50
    table = g.weight(normal((50, 32), 1), name="table")
    y = layer_norm(g, g.Gather(table, ids))
    logits = g.MatMul(y, g.Transpose(table, perm=[1, 0]))
    made, _ = prove(g, logits, [LN])
    assert [t.name for t in made.graph.initializer if 50 in t.dims] == ["table"]


def test_weights_as_inputs_and_outputs_of_an_old_ir() -> None:
    """IR 3: every weight must be an input too, and is a constant all the same; one is also an output."""
    g = Graph(8)
    x = g.input("x", (2, 8, 32))
    scale, bias = g.weight(normal((32,), 1), name="scale"), g.weight(normal((32,), 2), name="bias")
    y = g.Relu(g.Add(g.MatMul(x, g.weight(normal((32, 32), 3), name="w")), bias))
    g.output(g.Mul(y, scale), (2, 8, 32))
    g.output("bias", (32,))
    model = g.model()
    model.ir_version = 3
    for t in model.graph.initializer:
        model.graph.input.append(helper.make_tensor_value_info(t.name, t.data_type, t.dims))
    made, sites, _ = fused(model)
    assert names(sites) == [LINEAR]
    assert_same(model, made, g.feeds)


def test_types_that_no_array_has_pass_through_a_file_that_fuses_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    kinds = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.float16, np.uint16]
    weights = [
        numpy_helper.from_array(rng.integers(0, 100, 64 * np.dtype(k).itemsize, np.uint8).view(k), f"w{n}")
        for n, k in enumerate(kinds)
    ]
    for kind in (TensorProto.INT4, TensorProto.UINT4):
        weights.append(helper.make_tensor(f"four{kind}", kind, [6], [1, 2, 3, 4, 5, 6]))
    weights.append(helper.make_tensor("words", TensorProto.STRING, [2], [b"a\x00b", "é".encode()]))
    nodes = [helper.make_node("Identity", [w.name], [f"o_{w.name}"]) for w in weights]
    outputs = [helper.make_tensor_value_info(f"o_{w.name}", w.data_type, list(w.dims)) for w in weights]
    graph = helper.make_graph(nodes, "g", [], outputs, weights)
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    onnx.save(model, tmp_path / "in.onnx")
    trtfuse.fuse(tmp_path / "in.onnx", tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx").read_bytes() == (tmp_path / "in.onnx").read_bytes()


# --- operators and names ---


@pytest.mark.parametrize("opset", [11, 13, 18])
def test_split_and_reshape_beside_a_site_keep_their_form(opset: int) -> None:
    """Split's sizes are an attribute up to opset 12 and an input from 13 on."""
    g = Graph(opset)
    x = g.input("x", (2, 8, 64))
    sizes = {"split": [32, 32]} if opset < 13 else {}
    more = [np.array([32, 32], I64)] if opset >= 13 else []
    gate, up = g.node("Split", x, *more, outputs=2, axis=2, **sizes)
    y = g.Mul(g.Mul(gate, g.Sigmoid(gate)), up)
    prove(g, g.Reshape(layer_norm(g, y), np.array([2, -1], I64)), ["TrtfuseGatedAct", LN])


def test_names_of_any_script_with_slashes_and_spaces(tmp_path: Path) -> None:
    g = Graph(13)
    x = g.input("/eingang:0 ü", ROWS)
    y = gelu(g, g.Add(x, g.weight(normal((32,), 1), name="gewicht/偏置")))
    model = finish(g, y)
    for node in model.graph.node:
        node.name = f"/層 {node.name}"
    made, sites, _ = fused(model)
    assert names(sites) == [BIAS_ACT]
    assert_same(model, made, g.feeds)


def test_optional_inputs_that_are_left_empty() -> None:
    g = Graph(13)
    x = g.input("x", ("batch", 32))
    low = g.node("Clip", x, "", np.asarray(1.0, F32))
    high = g.node("Clip", x, np.asarray(-1.0, F32), "")
    y = g.Relu(g.Add(g.Add(low, high), normal((32,), 1)))
    y = g.Unsqueeze(y, np.array([0, 1], I64))
    prove(g, g.node("Resize", y, "", np.array([1, 1, 1, 2], F32)), [BIAS_ACT])


def test_nodes_without_names_and_nodes_of_one_name() -> None:
    """ONNX Runtime refuses a name that two nodes have, other tools do not: onnx's reference is the judge."""
    for name in ("", "same"):
        g = Graph(13)
        x = g.input("x", ROWS)
        model = finish(g, layer_norm(g, g.Relu(g.Add(x, normal((32,), 1)))))
        for node in model.graph.node:
            node.name = name
        made, sites, _ = fused(model)
        assert names(sites) == [BIAS_ACT, LN]
        for feed in g.feeds:
            (want,), (have,) = (ReferenceEvaluator(m).run(None, feed) for m in (model, made))
            np.testing.assert_allclose(have, want, atol=1e-4)


def test_a_local_function_that_has_the_name_of_an_operator() -> None:
    """ "LayerNormalization" of the domain "mine" doubles: it is neither the operator nor ours."""
    g = Graph(17)
    g.domains["mine"] = 1
    body = helper.make_function(
        "mine",
        "LayerNormalization",
        ["a", "b"],
        ["c"],
        [helper.make_node("Add", ["a", "a"], ["d"]), helper.make_node("Mul", ["d", "b"], ["c"])],
        [helper.make_opsetid("", 17)],
    )
    g.functions.append(body)
    y = g.node("LayerNormalization", g.input("x", ROWS), normal((32,), 1), domain="mine")
    model = finish(g, y)
    made, sites, _ = fused(model)
    assert names(sites) == []
    assert_same(model, made, g.feeds)


# --- quantized neighbours ---


def test_qdq_around_a_norm_stays_and_the_norm_is_fused() -> None:
    g = Graph(13)
    x = g.input("x", ROWS)
    scale, zero = g.weight(np.asarray(0.05, F32)), g.weight(np.asarray(3, np.int8), np.int8)
    x = g.DequantizeLinear(g.QuantizeLinear(x, scale, zero), scale, zero)
    y = layer_norm(g, x)
    y = g.DequantizeLinear(g.QuantizeLinear(y, scale, zero), scale, zero)
    made, _ = prove(g, y, [LN], tolerance=2e-2)  # a step of the quantizer may tip over
    assert [n.op_type for n in made.graph.node].count("QuantizeLinear") == 2


def test_a_quantized_tensor_inside_a_pattern_is_none() -> None:
    g = Graph(13)
    x = g.input("x", ROWS)
    scale, zero = g.weight(np.asarray(0.05, F32)), g.weight(np.asarray(3, np.int8), np.int8)
    centred = g.Sub(x, g.reduce("ReduceMean", x))
    rough = g.DequantizeLinear(g.QuantizeLinear(centred, scale, zero), scale, zero)
    std = g.Sqrt(g.Add(g.reduce("ReduceMean", g.Mul(rough, rough)), 1e-5))
    prove(g, g.Div(centred, std), [], tolerance=1e-3)


def test_dynamic_int8_keeps_its_integers_and_fuses_what_is_float() -> None:
    g = Graph(13)
    x = layer_norm(g, g.input("x", (2, 8, 32)))
    q, scale, zero = g.node("DynamicQuantizeLinear", x, outputs=3)
    w = g.weight(np.random.default_rng(0).integers(-99, 99, (32, 32)).astype(np.int8), np.int8)
    product = g.cast(g.MatMulInteger(q, w, zero), F32)
    y = gelu(g, g.Add(g.Mul(product, g.Mul(scale, 0.01)), normal((32,), 3)))
    made, _ = prove(g, y, [LN, BIAS_ACT], tolerance=2e-2)
    kept = [n.op_type for n in made.graph.node]
    assert "DynamicQuantizeLinear" in kept
    assert "MatMulInteger" in kept


# --- ONNX Runtime's own operators ---


def test_operators_of_onnx_runtime_that_are_none_of_ours_stay() -> None:
    g = Graph(13)
    x = g.input("x", ("batch", 32))
    y = g.node("FusedMatMul", layer_norm(g, x), normal((32, 32), 1), domain="com.microsoft", alpha=0.5)
    made, _ = prove(g, y, [LN])
    assert "FusedMatMul" in [n.op_type for n in made.graph.node]


@pytest.mark.parametrize("op", ["BiasGelu", "Gelu", "QuickGelu"])
def test_activations_of_onnx_runtime_are_understood_or_stay(op: str) -> None:
    g = Graph(13)
    x = g.input("x", ROWS)
    more = [normal((32,), 1)] if op == "BiasGelu" else []
    model = finish(g, g.node(op, x, *more, domain="com.microsoft"))
    made, sites, _ = fused(model)
    assert names(sites) in ([BIAS_ACT], [])
    assert_same(model, made, g.feeds)


# --- attention as exporters write it ---


def heads(g: Graph, shape: tuple[Any, ...] = HEADS) -> tuple[str, str, str]:
    return g.input("q", shape), g.input("k", shape), g.input("v", shape)


def test_sdpa_with_both_operands_scaled_a_causal_mask_and_a_guard() -> None:
    """torch.nn.functional.scaled_dot_product_attention(is_causal=True) by torch.onnx.export."""
    g = Graph(18)
    q, k, v = heads(g)
    root = g.Sqrt(g.weight(np.asarray(0.25, F32)))
    kept = g.Trilu(g.weight(np.ones((8, 8), bool), BOOL), np.asarray(0, I64), upper=0)
    mask = g.Where(kept, np.asarray(0, F32), np.asarray(-np.inf, F32))
    kt = g.Transpose(k, perm=[0, 1, 3, 2])
    scores = g.Add(g.MatMul(g.Mul(q, root), g.Mul(kt, root)), mask)
    p = g.Softmax(scores, axis=-1)
    p = g.Where(g.IsNaN(p), np.asarray(0, F32), p)
    prove(g, g.MatMul(p, v), [ATTENTION])


@pytest.mark.parametrize("interleaved", [True, False])
def test_grouped_heads_by_repeat(interleaved: bool) -> None:
    """Key heads repeated for groups of query heads: 1 1 2 2, or the wrong order 1 2 1 2; both as they are."""
    g = Graph(17)
    q = g.input("q", (2, 4, 8, 16))
    k, v = g.input("k", (2, 2, 8, 16)), g.input("v", (2, 2, 8, 16))

    def repeat(t: str) -> str:
        axis = 2 if interleaved else 1
        wide = g.Unsqueeze(t, np.array([axis], I64))
        shape = [2, 2, 2, 8, 16]
        return str(g.Reshape(g.Expand(wide, np.array(shape, I64)), np.array([2, 4, 8, 16], I64)))

    scores = g.Mul(g.MatMul(q, g.Transpose(repeat(k), perm=[0, 1, 3, 2])), 0.25)
    prove(g, g.MatMul(g.Softmax(scores, axis=-1), repeat(v)), [ATTENTION])


def test_t5s_bias_without_a_scale() -> None:
    g = Graph(13)
    q, k, v = heads(g)
    bias = g.input("bias", (1, 4, 8, 8))
    scores = g.Add(g.MatMul(q, g.Transpose(k, perm=[0, 1, 3, 2])), bias)
    prove(g, g.MatMul(g.Softmax(scores, axis=3), v), [ATTENTION])


def test_gpt2s_causal_mask_by_where_under_an_additive_one() -> None:
    g = Graph(13)
    q, k, v = heads(g)
    causal = g.weight(np.tril(np.ones((1, 1, 8, 8), bool)), BOOL)
    extra = g.input("mask", ("batch", 1, 1, 8))
    scores = g.Div(g.MatMul(q, g.Transpose(k, perm=[0, 1, 3, 2])), 4.0)
    scores = g.Add(g.Where(causal, scores, np.asarray(-1e4, F32)), extra)
    prove(g, g.MatMul(g.Softmax(scores, axis=3), v), [ATTENTION])


# --- graphs ---


def test_an_unsorted_graph_is_refused_with_the_reason(tmp_path: Path) -> None:
    g = Graph(13)
    model = finish(g, layer_norm(g, g.input("x", ROWS)))
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(InputError, match="sorted") as caught:
        trtfuse.fuse(tmp_path / "m.onnx", tmp_path / "o.onnx")
    assert "\n" not in str(caught.value)


def test_two_nodes_that_make_one_tensor_are_refused(tmp_path: Path) -> None:
    g = Graph(13)
    model: ModelProto = finish(g, g.Relu(g.input("x", ROWS)))
    model.graph.node.append(model.graph.node[0])
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(InputError, match="not a valid ONNX model"):
        trtfuse.fuse(tmp_path / "m.onnx", tmp_path / "o.onnx")


@pytest.mark.parametrize("op", ["Scan", "Loop", "If"])
def test_bodies_that_read_what_is_outside_them(op: str) -> None:
    """A tensor inside a pattern that a body reads is read: the pattern must not take it away."""
    g = Graph(13)
    x = g.input("x", (4, 32))
    keep: dict[str, str] = {}
    y = layer_norm(g, x, keep=keep)
    inner = Graph(13)
    inner.count = 700
    if op == "Scan":
        row = helper.make_tensor_value_info("row", TensorProto.FLOAT, [32])
        state = helper.make_tensor_value_info("state", TensorProto.FLOAT, [4, 1])
        inner.Add("state", keep["mean"])
        inner.Relu("row")
        outs = [inner.nodes[0].output[0], inner.nodes[1].output[0]]
        body = helper.make_graph(inner.nodes, "body", [state, row], [_value(o) for o in outs])
        start = g.weight(np.zeros((4, 1), F32))
        last, rows = g.node("Scan", start, x, outputs=2, body=body, num_scan_inputs=1)
        y = g.Add(g.Add(y, last), rows)
    elif op == "Loop":
        i = helper.make_tensor_value_info("i", TensorProto.INT64, [])
        go = helper.make_tensor_value_info("go", TensorProto.BOOL, [])
        carried = helper.make_tensor_value_info("carried", TensorProto.FLOAT, [4, 32])
        inner.Add("carried", keep["centred"])
        inner.Identity("go")
        outs = [_value(inner.nodes[1].output[0], TensorProto.BOOL), _value(inner.nodes[0].output[0])]
        body = helper.make_graph(inner.nodes, "body", [i, go, carried], outs)
        y = g.node("Loop", np.asarray(3, I64), g.weight(np.asarray(True), BOOL), y, body=body)
    else:
        inner.Relu(keep["variance"])
        body = helper.make_graph(inner.nodes, "body", [], [_value(inner.nodes[0].output[0])])
        flag = g.weight(np.asarray(True), BOOL)
        y = g.Add(y, g.node("If", flag, then_branch=body, else_branch=body))
    model = finish(g, y)
    made, sites, _ = fused(model)
    assert LN not in names(sites)
    assert_same(model, made, g.feeds)


def _value(name: str, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, None)


def test_no_rows_and_no_columns() -> None:
    for shape in ((0, 8, 32), (2, 0, 32)):
        g = Graph(13)
        prove(g, layer_norm(g, gelu(g, g.Add(g.input("x", shape), normal((32,), 1)))), [BIAS_ACT, LN])


def test_a_sum_of_three_and_a_bias_before_an_activation() -> None:
    g = Graph(13)
    x, z = g.input("x", ROWS), g.input("z", ROWS)
    prove(g, g.Relu(g.Sum(x, z, normal((32,), 1))), [])


def test_one_tensor_in_both_places() -> None:
    g = Graph(13)
    x = g.input("x", ROWS)
    y = layer_norm(g, g.Add(x, x))
    y = g.Mul(g.Mul(y, g.Sigmoid(y)), y)
    model = finish(g, y)
    made, _, _ = fused(model)
    assert_same(model, made, g.feeds)


def test_a_gemm_whose_matrix_is_transposed_and_scaled() -> None:
    g = Graph(13)
    x = g.input("x", ("batch", 32))
    for words in ({"transB": 1}, {"alpha": 0.5, "transB": 1}, {"beta": 2.0, "transB": 1}):
        x = g.Relu(g.Gemm(x, normal((32, 32), 1, F32, 0.2), normal((32,), 2), **words))
    model = finish(g, x)
    made, _, _ = fused(model)
    assert_same(model, made, g.feeds)
