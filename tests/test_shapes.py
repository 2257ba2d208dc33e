"""Shapes: both spellings read, wrong ones refused, missing ones derived from what the model says."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from trtfuse.errors import InputError
from trtfuse.shapes import Profile, derive_profile, parse_shapes

F, INT = TensorProto.FLOAT, TensorProto.INT64


def info(name: str, dims: list[int | str | None], dtype: int = F) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, dims)


def make(inputs, nodes=(), weights=(), outputs=None, opset=17) -> onnx.ModelProto:
    nodes = list(nodes) or [helper.make_node("Identity", [inputs[0].name], ["y"])]
    outputs = outputs or [helper.make_empty_tensor_value_info("y")]
    graph = helper.make_graph(nodes, "g", list(inputs), outputs, list(weights))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def weight(name: str, *dims: int) -> TensorProto:
    return numpy_helper.from_array(np.ones(dims, np.float32), name)


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        (["x:1x128,y:1x3"], {"x": (1, 128), "y": (1, 3)}),
        (["x:[1,128]"], {"x": (1, 128)}),
        (["x:[1, 128]", " y : 1 x 3 "], {"x": (1, 128), "y": (1, 3)}),
        (["x:[1,128],y:7"], {"x": (1, 128), "y": (7,)}),
        (["serving_default_input_2:0:1x43844x1"], {"serving_default_input_2:0": (1, 43844, 1)}),
        (["/a/b:0:[2,3],c/d:4x5"], {"/a/b:0": (2, 3), "c/d": (4, 5)}),
        (["'x':1x2", '"y":3'], {"x": (1, 2), "y": (3,)}),
        (["x:scalar", "y:[]"], {"x": (), "y": ()}),
        (["x:(3,)"], {"x": (3,)}),
        (["a b:1X2"], {"a b": (1, 2)}),
        (["x:1x2 y:[3] z:4"], {"x": (1, 2), "y": (3,), "z": (4,)}),
        (["x:1x2", "x:1x2"], {"x": (1, 2)}),
        ([], {}),
    ],
)
def test_reads_both_spellings(specs, expected):
    assert parse_shapes(specs) == expected


def test_an_empty_size_is_refused():
    with pytest.raises(InputError, match="a size is 1 or more"):
        parse_shapes(["x:0x4"])


@pytest.mark.parametrize(
    "spec",
    [
        "x",
        "",
        "1x3",
        "x:",
        "x:1xx3",
        "x:1x-1",
        "x:[1,a]",
        "x:[1,2",
        "x:1x2,,y:3",
        "x:1.5",
        ":1x2",
        "x:[1,,2]",
    ],
)
def test_refuses_what_is_no_shape(spec):
    with pytest.raises(InputError, match=r"cannot read the shape .*write x:1x128 or x:\[1,128\]"):
        parse_shapes([spec])


def test_refuses_two_shapes_for_one_name_and_sizes_that_overflow():
    with pytest.raises(InputError, match="two shapes, 1x2 and 1x3"):
        parse_shapes(["x:1x2", "x:1x3"])
    with pytest.raises(InputError, match="too large"):
        parse_shapes(["x:99999999999"])


def test_static_inputs_have_no_profile_and_nothing_to_say():
    profile = derive_profile(make([info("x", [1, 3, 8, 8])]))
    assert profile == Profile({}, {}, {})
    assert profile.chosen() == []


def test_given_shapes_are_taken_and_not_reported():
    model = make([info("x", ["n", 3, "h", "w"])])
    profile = derive_profile(model, min=["x:1x3x8x8"], opt=["x:[2,3,16,16]"], max=["x:4x3x32x64"])
    assert profile.min == {"x": (1, 3, 8, 8)}
    assert profile.opt == {"x": (2, 3, 16, 16)}
    assert profile.max == {"x": (4, 3, 32, 64)}
    assert profile.chosen() == []


def test_shapes_alone_fix_all_three():
    profile = derive_profile(make([info("x", ["n", 3])]), shapes=["x:5x3"])
    assert profile.min == profile.opt == profile.max == {"x": (5, 3)}


def test_derived_sizes_make_room_for_the_given_ones():
    model = make([info("ids", ["batch", "sequence"], INT)])
    assert derive_profile(model, opt=["ids:16x2000"]).max["ids"] == (16, 2000)
    low = derive_profile(model, max=["ids:1x64"])
    assert (low.min["ids"], low.opt["ids"], low.max["ids"]) == ((1, 1), (1, 64), (1, 64))
    high = derive_profile(model, min=["ids:4x300"])
    assert (high.min["ids"], high.opt["ids"], high.max["ids"]) == ((4, 300), (4, 300), (8, 512))
    assert high.chosen() == ["ids: min 4x300, opt 4x300, max 8x512"]


def test_one_name_is_one_size_across_inputs():
    model = make([info("a", ["batch", "seq"], INT), info("b", ["batch", "seq"], INT)])
    profile = derive_profile(model, opt=["b:3x77"])
    assert profile.opt == {"a": (3, 77), "b": (3, 77)}
    with pytest.raises(InputError, match="axis 'seq' the sizes 8 and 9"):
        derive_profile(model, opt=["a:1x8", "b:1x9"])


def test_axes_with_no_name_or_the_same_placeholder_are_independent():
    model = make([info("x", [None, 3, "?", "?"])])
    assert derive_profile(model, opt=["x:2x3x10x20"]).opt["x"] == (2, 3, 10, 20)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"min": ["z:1x2"]}, "'z', which is no input of the model: its inputs are 'x'"),
        ({"opt": ["x:1x3"]}, "has 2 sizes, the model has 4"),
        ({"max": ["x:1x4x8x8"]}, "3 is fixed there, not 4"),
        ({"min": ["x:4x3x8x8"], "max": ["x:2x3x8x8"]}, "min <= opt <= max"),
        ({"shapes": ["x:1x3"]}, "has 2 sizes"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(kwargs, message):
    with pytest.raises(InputError, match=message):
        derive_profile(make([info("x", ["n", 3, "h", "w"])]), **kwargs)


def test_weights_that_are_inputs_too_are_no_inputs():
    model = make([info("x", ["n", 4]), info("w", [4, 4])], weights=[weight("w", 4, 4)])
    assert set(derive_profile(model).opt) == {"x"}
    with pytest.raises(InputError, match="no input of the model"):
        derive_profile(model, shapes=["w:4x4"])


def test_scalars_and_inputs_that_are_no_tensors_are_left_alone():
    sequence = helper.make_tensor_sequence_value_info("list", F, None)
    model = make([info("x", ["n"]), info("rate", [], INT), sequence])
    assert derive_profile(model).opt == {"x": (1,)}
    assert derive_profile(model, shapes=["rate:scalar"]).opt == {"x": (1,)}
    with pytest.raises(InputError, match="no tensor of known rank"):
        derive_profile(model, shapes=["list:1"])


def test_the_position_table_bounds_the_sequence():
    ids = numpy_helper.from_array(np.arange(96, dtype=np.int64)[None], "ids_table")
    c = [numpy_helper.from_array(np.array([v], np.int64), n) for n, v in (("zero", 0), ("one", 1))]
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["length"]),
        helper.make_node("Slice", ["ids_table", "zero", "length", "one"], ["positions"]),
        helper.make_node("Gather", ["table", "positions"], ["y"]),
    ]
    model = make([info("x", ["batch", "sequence"], INT)], nodes, [ids, *c, weight("table", 96, 4)])
    assert derive_profile(model).max["x"] == (8, 96)
    assert derive_profile(model).opt["x"] == (1, 96)


@pytest.mark.parametrize(("op", "added", "bound"), [("CumSum", 1, 128), ("Range", 2, 128), ("Range", 0, 130)])
def test_positions_that_are_counted_leave_room_for_what_is_added(op, added, bound):
    constants = [numpy_helper.from_array(np.array(v, np.int64), n) for n, v in (("zero", 0), ("one", 1))]
    constants.append(numpy_helper.from_array(np.array([added], np.int64), "added"))
    counting = {
        "CumSum": [helper.make_node("CumSum", ["x", "one"], ["counted"])],
        "Range": [
            helper.make_node("Shape", ["x"], ["shape"]),
            helper.make_node("Gather", ["shape", "one"], ["length"]),
            helper.make_node("Range", ["zero", "length", "one"], ["counted"]),
        ],
    }[op]
    nodes = [
        *counting,
        helper.make_node("Add", ["counted", "added"], ["positions"]),
        helper.make_node("Gather", ["table", "positions"], ["y"]),
    ]
    model = make([info("x", ["batch", "sequence"], INT)], nodes, [*constants, weight("table", 130, 4)])
    assert derive_profile(model).max["x"] == (8, bound)


def test_a_vocabulary_is_no_position_table():
    nodes = [helper.make_node("Gather", ["table", "x"], ["y"])]
    model = make([info("x", ["batch", "sequence"], INT)], nodes, [weight("table", 50, 4)])
    assert derive_profile(model).max["x"] == (8, 512)


def test_weights_say_the_size_of_features_and_channels():
    product = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    assert derive_profile(make([info("x", ["n", None])], product, [weight("w", 20, 5)])).max["x"] == (8, 20)
    conv = [helper.make_node("Conv", ["x", "w"], ["y"])]
    model = make([info("x", ["n", "c", 16, 16])], conv, [weight("w", 4, 6, 3, 3)])
    assert derive_profile(model).opt["x"] == (1, 6, 16, 16)


def test_a_state_is_batched_on_its_second_axis_and_takes_a_window():
    model = make([info("audio", [None, None]), info("state", [2, None, 128])])
    profile = derive_profile(model)
    assert profile.opt == {"audio": (1, 512), "state": (2, 1, 128)}
    assert profile.max["state"] == (2, 8, 128)


def test_axes_named_by_a_formula_follow_the_others():
    model = make(
        [
            info("ids", ["batch", "sequence"], INT),
            info("mask", ["batch", "past + sequence"], INT),
            info("past_key_values.0.key", ["batch", 4, "past", 16]),
        ]
    )
    profile = derive_profile(model, opt=["ids:1x7", "past_key_values.0.key:1x4x20x16"])
    assert profile.opt["mask"] == (1, 27)
    assert profile.min["past_key_values.0.key"] == (1, 4, 0, 16)


def line_reader() -> onnx.ModelProto:
    """Reduces the height of an image to one row (48 to 1) and drops it, as text recognition does."""
    axes = numpy_helper.from_array(np.array([2], np.int64), "axes")
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], strides=[16, 4], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        helper.make_node("AveragePool", ["a"], ["b"], kernel_shape=[3, 2], strides=[3, 2]),
        helper.make_node("Squeeze", ["b", "axes"], ["y"]),
    ]
    return make([info("x", ["n", 3, "?", "?"])], nodes, [axes, weight("w", 4, 3, 3, 3)])


def test_an_image_gets_the_first_size_that_the_graph_does_not_contradict():
    profile = derive_profile(line_reader())
    assert profile.min["x"] == (1, 3, 48, 32)
    assert profile.opt["x"] == (1, 3, 48, 320)
    assert profile.max["x"][2] == 48


def test_an_image_network_gets_squares():
    conv = helper.make_node("Conv", ["x", "w"], ["a"], strides=[32, 32])
    pool = helper.make_node("GlobalAveragePool", ["a"], ["y"])
    model = make([info("x", ["n", 3, "h", "w"])], [conv, pool], [weight("w", 4, 3, 3, 3)])
    assert derive_profile(model).opt["x"] == (1, 3, 224, 224)
    sizes = numpy_helper.from_array(np.array([1, 1, 32, 32], np.float32), "scales")
    resize = helper.make_node("Resize", ["a", "", "scales"], ["y"])
    dense = make([info("x", ["n", 3, "h", "w"])], [conv, resize], [weight("w", 4, 3, 3, 3), sizes])
    profile = derive_profile(dense)
    assert profile.opt["x"] == (1, 3, 640, 640)
    assert all(d % 32 == 0 for p in (profile.min, profile.opt, profile.max) for d in p["x"][2:])


def test_channels_last_images():
    profile = derive_profile(make([info("x", [None, None, None, 3])]))
    assert profile.opt["x"] == (1, 224, 224, 3)


def test_the_model_is_not_changed():
    model = line_reader()
    before = model.SerializeToString()
    derive_profile(model)
    assert model.SerializeToString() == before


def test_the_smallest_image_is_one_that_the_network_can_take():
    convs = [
        helper.make_node("Conv", ["x", "w"], ["a"], strides=[16, 16]),
        helper.make_node("Conv", ["a", "v"], ["y"]),  # 32 pixels leave 2, of which this wants 3
    ]
    model = make([info("x", ["n", 3, "h", "w"])], convs, [weight("w", 4, 3, 3, 3), weight("v", 4, 4, 3, 3)])
    profile = derive_profile(model)
    assert profile.min["x"] == profile.opt["x"] == (1, 3, 224, 224)
