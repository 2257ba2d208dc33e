"""Q/DQ: what is kept, folded and dropped, with numbers from ONNX Runtime and onnx's reference."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from trtfuse import qdq
from trtfuse.errors import InputError

F, I8, U8, I32 = TensorProto.FLOAT, TensorProto.INT8, TensorProto.UINT8, TensorProto.INT32
random = np.random.default_rng(7)


def tensor(name: str, dtype: int, values, dims=()) -> TensorProto:
    flat = [v.item() if isinstance(v, np.generic) else v for v in np.ravel(values)]
    return helper.make_tensor(name, dtype, list(dims), flat)


def node(op: str, inputs: str, outputs: str, **attributes) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), **attributes)


def make(nodes, weights, inputs=None, outputs=None, opset=21, domains=()) -> onnx.ModelProto:
    inputs = inputs or [helper.make_tensor_value_info("x", F, [2, 8])]
    outputs = outputs or [helper.make_tensor_value_info("y", F, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    model.metadata_props.add(key="who", value="me")
    return model


def ops(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node]


def run(model: onnx.ModelProto, **feed) -> list[np.ndarray]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, feed)


def applied(model: onnx.ModelProto, mode: str) -> tuple[onnx.ModelProto, qdq.QdqReport]:
    before = model.SerializeToString()
    made, report = qdq.apply(model, mode)
    assert model.SerializeToString() == before  # a copy is worked on
    whole = onnx.shape_inference.infer_shapes(made)  # outputs of these models declare no shape
    onnx.checker.check_model(whole, full_check=True)
    assert list(made.metadata_props) == list(model.metadata_props)
    assert [i.name for i in made.graph.input] == [i.name for i in model.graph.input]
    assert [o.name for o in made.graph.output] == [o.name for o in model.graph.output]
    return made, report


X = random.standard_normal((2, 8)).astype(np.float32)


def layer(activation=(U8, 7), weight=(I8, 0), bias=True) -> onnx.ModelProto:
    """x -> Q -> DQ -> Gemm(DQ(weight), DQ(bias)), as ONNX Runtime's static quantizer writes it."""
    weights = [
        tensor("xs", F, [0.02]), tensor("xz", activation[0], [activation[1]]),
        tensor("w", weight[0], random.integers(0, 100, 32), [8, 4]),
        tensor("ws", F, [0.01]), tensor("wz", weight[0], [weight[1]]),
    ]  # fmt: skip
    nodes = [
        node("QuantizeLinear", "x xs xz", "xq"), node("DequantizeLinear", "xq xs xz", "xd"),
        node("DequantizeLinear", "w ws wz", "wd"),
    ]  # fmt: skip
    if bias:
        weights += [tensor("b", I32, [1000, -2, 3, 0], [4]), tensor("bs", F, [0.0002])]
        nodes += [node("DequantizeLinear", "b bs", "bd"), node("Gemm", "xd wd bd", "y")]
    else:
        nodes += [node("MatMul", "xd wd", "y")]
    return make(nodes, weights)


def test_keep_changes_nothing():
    made, report = applied(layer(), "keep")
    assert made == layer() or ops(made) == ops(layer())
    assert not report.changed
    assert report.notes == ()


def test_auto_makes_an_asymmetric_layer_float_without_leftovers():
    model = layer()
    made, report = applied(model, "auto")
    assert ops(made) == ["Gemm"]
    assert {t.name for t in made.graph.initializer} == {"wd", "bd"}
    assert (report.dropped, report.folded, report.kept, report.left) == (1, 2, 0, 0)
    assert "1 int32, 1 int8, 1 uint8" in report.notes[0]
    # What is dropped is the rounding: half a step of x for each of the 8 products.
    effect = 0.01 * np.abs(numpy_helper.to_array(made.graph.initializer[0])).sum(0).max()
    inside = np.clip(X, -0.14, 4.9)
    assert np.abs(run(model, x=inside)[0] - run(made, x=inside)[0]).max() <= effect + 1e-5


def test_auto_keeps_a_symmetric_layer_and_folds_its_bias():
    model = layer(activation=(I8, 0))
    made, report = applied(model, "auto")
    assert ops(made) == ["QuantizeLinear", "DequantizeLinear", "DequantizeLinear", "Gemm"]
    assert (report.dropped, report.folded, report.kept) == (0, 1, 2)
    np.testing.assert_array_equal(run(model, x=X)[0], run(made, x=X)[0])


def test_auto_changes_nothing_where_all_can_be_kept():
    made, report = applied(layer(activation=(I8, 0), bias=False), "auto")
    assert not report.changed
    assert report.kept == 2
    assert len(made.graph.initializer) == 5


def test_drop_takes_out_what_auto_keeps():
    made, report = applied(layer(activation=(I8, 0)), "drop")
    assert ops(made) == ["Gemm"]
    assert (report.dropped, report.folded, report.kept) == (1, 2, 0)


def test_auto_keeps_weights_that_are_quantized_alone():
    weights = [tensor("w", I8, random.integers(-9, 9, 32), [8, 4]), tensor("s", F, np.full(4, 0.1), [4])]
    model = make([node("DequantizeLinear", "w s", "d", axis=1), node("MatMul", "x d", "y")], weights)
    assert not applied(model, "auto")[1].changed
    made, report = applied(model, "drop")
    assert ops(made) == ["MatMul"]
    assert report.folded == 1
    np.testing.assert_array_equal(run(model, x=X)[0], run(made, x=X)[0])


CONSTANTS = [
    (I8, [], 3, {}),
    (U8, [], 200, {}),
    (I8, [4], 0, {"axis": 1}),
    (U8, [8], 17, {"axis": 0}),
    (I8, [8], 2, {"axis": -2}),
    (TensorProto.INT16, [], 5, {}),
    (TensorProto.UINT16, [4], 9, {"axis": 1}),
    (I8, [2, 4], 1, {"axis": 0, "block_size": 4}),
    (TensorProto.UINT4, [3, 4], 2, {"axis": 0, "block_size": 3}),
    (TensorProto.INT4, [8, 2], -1, {"axis": 1, "block_size": 2}),
    (I32, [], None, {}),
    (TensorProto.FLOAT8E4M3FN, [4], None, {"axis": 1}),
]


@pytest.mark.parametrize(("dtype", "dims", "zero", "attributes"), CONSTANTS)
@pytest.mark.parametrize("scale_type", [F, TensorProto.FLOAT16])
def test_constants_become_exactly_what_dequantizelinear_computes(dtype, dims, zero, attributes, scale_type):
    high = 7 if dtype in (TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT8E4M3FN) else 100
    number = int(np.prod(dims)) if dims else 1
    weights = [
        tensor("w", dtype, random.integers(0, high, 32), [8, 4]),
        tensor("s", scale_type, random.uniform(0.01, 0.1, number).astype(np.float16), dims),
    ]
    if zero is not None:
        weights.append(tensor("z", dtype, [zero] * number, dims))
    inputs = "w s z" if zero is not None else "w s"
    output = [helper.make_tensor_value_info("y", scale_type, None)]
    nodes = [node("DequantizeLinear", inputs, "d", **attributes), node("Identity", "d", "y")]
    model = make(nodes, weights, outputs=output)
    made, report = applied(model, "drop")
    assert ops(made) == ["Identity"]
    assert report.folded == 1
    expected = ReferenceEvaluator(model).run(None, {"x": X})[0]
    actual = numpy_helper.to_array(made.graph.initializer[0])
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(actual, expected, rtol=1e-3 if scale_type != F else 1e-7, atol=0)


def test_shared_weights_are_folded_once():
    weights = [
        tensor("w", U8, random.integers(0, 9, 64), [8, 8]),
        tensor("s", F, [0.1]),
        tensor("z", U8, [3]),
    ]
    nodes = [
        node("DequantizeLinear", "w s z", "d1"), node("MatMul", "x d1", "a"),
        node("DequantizeLinear", "w s z", "d2"), node("MatMul", "a d2", "y"),
    ]  # fmt: skip
    model = make(nodes, weights)
    made, report = applied(model, "auto")
    assert [t.name for t in made.graph.initializer] == ["d1"]
    assert report.folded == 1
    np.testing.assert_allclose(run(model, x=X)[0], run(made, x=X)[0], rtol=1e-6)


def test_integers_that_are_moved_between_go_the_same_way_as_floats():
    weights = [tensor("s", F, [0.05]), tensor("z", U8, [9]), tensor("shape", TensorProto.INT64, [16], [1])]
    nodes = [
        node("QuantizeLinear", "x s z", "q"), node("Transpose", "q", "t", perm=[1, 0]),
        node("Reshape", "t shape", "r"), node("DequantizeLinear", "r s z", "y"),
    ]  # fmt: skip
    model = make(nodes, weights)
    model.graph.value_info.append(helper.make_tensor_value_info("t", U8, [8, 2]))
    made, report = applied(model, "auto")
    assert ops(made) == ["Transpose", "Reshape", "Identity"]
    assert report.dropped == 1
    inside = np.clip(X, -0.4, 5)
    np.testing.assert_allclose(run(model, x=inside)[0], run(made, x=inside)[0], atol=0.026)


def test_an_integer_table_that_is_gathered_becomes_float():
    weights = [
        tensor("table", U8, random.integers(0, 255, 40), [10, 4]),
        tensor("s", F, [0.05]),
        tensor("z", U8, [128]),
    ]
    ids = [helper.make_tensor_value_info("i", TensorProto.INT64, [3])]
    model = make([node("Gather", "table i", "g"), node("DequantizeLinear", "g s z", "y")], weights, ids)
    made, _ = applied(model, "auto")
    assert "DequantizeLinear" not in ops(made)
    feed = {"i": np.array([0, 9, 4])}
    np.testing.assert_allclose(run(model, **feed)[0], run(made, **feed)[0], rtol=1e-6)


@pytest.mark.parametrize(("producer", "clips"), [("Add", 1), ("Mul", 0), ("Relu", 0)])
@pytest.mark.parametrize("opset", [10, 21])
def test_a_range_that_stands_for_a_relu_is_kept(producer, clips, opset):
    weights = [tensor("s", F, [0.05]), tensor("z", U8, [0]), tensor("c", F, [0.5])]
    inputs = "x" if producer == "Relu" else "x c"
    nodes = [
        node(producer, inputs, "a"), node("QuantizeLinear", "a s z", "q"),
        node("DequantizeLinear", "q s z", "d"), node("Neg", "d", "y"),
    ]  # fmt: skip
    model = make(nodes, weights, opset=opset)
    made, report = applied(model, "auto")
    assert ops(made) == [producer, *["Clip"] * clips, "Neg"]
    assert report.clipped == clips
    if clips:
        wide = X * 20  # beyond both ends of the range
        np.testing.assert_allclose(run(model, x=wide)[0], run(made, x=wide)[0], atol=0.026)


def test_results_of_the_graph_keep_their_names():
    weights = [tensor("s", F, [0.05]), tensor("z", U8, [9]), tensor("w", U8, [1, 2], [2])]
    nodes = [
        node("QuantizeLinear", "x s z", "q"),
        node("DequantizeLinear", "q s z", "y"),
        node("DequantizeLinear", "w s z", "v"),
    ]
    outputs = [helper.make_tensor_value_info("y", F, [2, 8]), helper.make_tensor_value_info("v", F, [2])]
    made, _ = applied(make(nodes, weights, outputs=outputs), "auto")
    assert ops(made) == ["Identity", "Identity"]
    np.testing.assert_array_equal(run(made, x=X)[0], X)
    np.testing.assert_allclose(run(made, x=X)[1], [-0.4, -0.35], rtol=1e-6)


def left_as_it_is(nodes, weights, outputs=None, inputs=None) -> qdq.QdqReport:
    model = make(nodes, weights, inputs=inputs, outputs=outputs)
    made, report = applied(model, "drop")
    assert ops(made) == ops(model)
    assert not report.changed
    assert report.left == 1
    return report


PAIR = [tensor("s", F, [0.05]), tensor("z", U8, [9])]


def test_integers_that_leave_the_graph_stay():
    outputs = [helper.make_tensor_value_info("q", U8, [2, 8]), helper.make_tensor_value_info("y", F, None)]
    nodes = [node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s z", "y")]
    assert "output of the graph" in left_as_it_is(nodes, PAIR, outputs).notes[0]


def test_integers_that_enter_the_graph_stay():
    inputs = [helper.make_tensor_value_info("i", U8, [2, 8])]
    nodes = [node("DequantizeLinear", "i s z", "y")]
    assert "input of the graph" in left_as_it_is(nodes, PAIR, inputs=inputs).notes[0]


def test_integers_that_are_computed_with_stay():
    nodes = [
        node("QuantizeLinear", "x s z", "q"), node("Add", "q z", "r"), node("DequantizeLinear", "r s z", "y"),
    ]  # fmt: skip
    model = make(nodes, PAIR)
    made, report = applied(model, "drop")
    assert ops(made) == ops(model)
    assert any("Add computes with the integers" in n for n in report.notes)


def test_another_scale_on_the_way_back_stays():
    nodes = [node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s2 z", "y")]
    report = left_as_it_is(nodes, [*PAIR, tensor("s2", F, [0.5])])
    assert "another scale" in report.notes[0]


def test_equal_parameters_under_other_names_are_the_same():
    nodes = [
        node("QuantizeLinear", "x s z", "q"),
        node("DequantizeLinear", "q s2 z2", "d"),
        node("Neg", "d", "y"),
    ]
    weights = [*PAIR, tensor("s2", F, [0.05]), tensor("z2", U8, [9])]
    assert ops(applied(make(nodes, weights), "auto")[0]) == ["Neg"]


def test_other_kinds_of_quantization_are_named():
    nodes = [
        node("DynamicQuantizeLinear", "x", "q s z"), node("MatMulInteger", "q w z", "i"),
        node("Cast", "i", "y", to=F),
    ]  # fmt: skip
    model = make(nodes, [tensor("w", I8, random.integers(-9, 9, 32), [8, 4])])
    made, report = applied(model, "auto")
    assert ops(made) == ops(model)
    assert report.unhandled == {"DynamicQuantizeLinear": 1, "MatMulInteger": 1}
    assert "not handled: 1 DynamicQuantizeLinear, 1 MatMulInteger" in report.notes[0]


def test_constants_of_nodes_and_inner_graphs():
    inner = helper.make_graph(
        [
            node("DequantizeLinear", "w s z", "wd"), node("QuantizeLinear", "x s z", "q"),
            node("DequantizeLinear", "q s z", "d"), node("MatMul", "d wd", "inside"),
        ],
        "branch", [], [helper.make_tensor_value_info("inside", F, None)],
    )  # fmt: skip
    other = helper.make_graph(
        [node("MatMul", "x free", "there")], "other", [], [helper.make_tensor_value_info("there", F, None)]
    )
    nodes = [
        helper.make_node("Constant", [], ["s"], value=tensor("", F, [0.05])),
        helper.make_node("Constant", [], ["z"], value=tensor("", U8, [9])),
        helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=other),
    ]
    weights = [
        tensor("w", U8, random.integers(0, 9, 32), [8, 4]), tensor("free", F, random.random(32), [8, 4]),
    ]  # fmt: skip
    inputs = [
        helper.make_tensor_value_info("x", F, [2, 8]),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    ]
    model = make(nodes, weights, inputs)
    made, report = applied(model, "auto")
    assert ops(made) == ["If"]
    assert {t.name for t in made.graph.initializer} == {"free"}
    assert (report.folded, report.dropped) == (1, 1)
    inside = np.clip(X, -0.4, 5)
    feed = {"x": inside, "c": np.array(True)}
    np.testing.assert_allclose(run(model, **feed)[0], run(made, **feed)[0], atol=0.2)


def test_weights_that_nobody_read_before_stay_and_annotations_go():
    model = layer()
    model.graph.initializer.append(tensor("idle", F, [1.0]))
    note = model.graph.quantization_annotation.add(tensor_name="x")
    note.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="xs")
    made, _ = applied(model, "auto")
    assert "idle" in {t.name for t in made.graph.initializer}
    assert not made.graph.quantization_annotation


def test_data_that_lies_elsewhere_is_asked_for():
    model = layer()
    weight = next(t for t in model.graph.initializer if t.name == "w")
    whole = TensorProto()
    whole.CopyFrom(weight)
    weight.ClearField("int32_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="w.bin")
    with pytest.raises(InputError, match="lies outside the model"):
        qdq.apply(model, "auto")
    made, report = qdq.apply(model, "auto", load=lambda t: whole if t.name == "w" else t)
    assert report.folded == 2
    reference = next(
        t for t in qdq.apply(layer_like(model, whole), "auto")[0].graph.initializer if t.name == "wd"
    )
    assert next(t for t in made.graph.initializer if t.name == "wd") == reference


def layer_like(model: onnx.ModelProto, whole: TensorProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    next(t for t in copy.graph.initializer if t.name == "w").CopyFrom(whole)
    return copy


def test_the_mode_is_checked():
    with pytest.raises(InputError, match="use one of auto, keep, drop"):
        qdq.apply(layer(), "most")


def test_what_the_quantizer_of_onnxruntime_writes(tmp_path):
    """A network with a Relu, which the static quantizer folds into the range that the integers hold."""
    quantization = pytest.importorskip("onnxruntime.quantization")
    weights = [
        numpy_helper.from_array(random.standard_normal(s).astype(np.float32), n)
        for n, s in (("w1", (8, 3, 3, 3)), ("b1", (8,)), ("w2", (8, 8, 1, 1)), ("b2", (8,)))
    ]
    nodes = [
        node("Conv", "x w1 b1", "a", name="c1"), node("Relu", "a", "r", name="r"),
        node("Conv", "r w2 b2", "y", name="c2"),
    ]  # fmt: skip
    shape = [1, 3, 8, 8]
    model = make(nodes, weights, [helper.make_tensor_value_info("x", F, shape)], opset=17)
    onnx.save(model, tmp_path / "float.onnx")
    data = [{"x": random.standard_normal(shape).astype(np.float32)} for _ in range(4)]

    class Reader(quantization.CalibrationDataReader):
        def __init__(self):
            self.left = iter(data)

        def get_next(self):
            return next(self.left, None)

    quantization.quantize_static(
        str(tmp_path / "float.onnx"), str(tmp_path / "int.onnx"), Reader(), per_channel=True
    )
    integers = onnx.load(tmp_path / "int.onnx")
    assert "Relu" not in ops(integers)
    made, report = applied(integers, "auto")
    assert set(ops(made)) <= {"Conv", "Clip", "Identity", "Relu"}
    assert report.left == 0
    expected, actual = run(integers, **data[0])[0], run(made, **data[0])[0]
    truth = run(model, **data[0])[0]
    span = np.abs(truth).max()
    assert np.abs(actual - truth).max() < 0.02 * span  # only the weights' rounding is left
    assert np.abs(actual - expected).max() < 0.04 * span


@pytest.mark.parametrize(("ir_version", "folded"), [(3, 1), (8, 0)])
def test_weights_that_are_inputs_too(ir_version, folded):
    """Before IR 4 all weights were listed as inputs; since then such a one can be given by the caller."""
    weights = [tensor("w", U8, range(32), [8, 4]), tensor("s", F, [0.1]), tensor("z", U8, [3])]
    inputs = [helper.make_tensor_value_info("x", F, [2, 8])]
    inputs += [helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in weights]
    nodes = [node("DequantizeLinear", "w s z", "d"), node("MatMul", "x d", "y")]
    model = make(nodes, weights, inputs, opset=13)
    model.ir_version = ir_version
    made, report = qdq.apply(model, "auto")
    assert report.folded == folded
    assert [i.name for i in made.graph.input] == (["x"] if folded else ["x", "w", "s", "z"])
    np.testing.assert_allclose(run(model, x=X)[0], run(made, x=X)[0], rtol=1e-6)
