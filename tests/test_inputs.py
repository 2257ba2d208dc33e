from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from polygraphy.json import save_json

from trtfuse.errors import InputError
from trtfuse.inputs import load_inputs, make_inputs, runnable_inputs, validate
from trtfuse.model import set_mark

F, I64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


@dataclass
class Profile:
    min: dict = field(default_factory=dict)
    opt: dict = field(default_factory=dict)
    max: dict = field(default_factory=dict)


def model(nodes, inputs, outputs, weights=None, functions=(), opset=17) -> onnx.ModelProto:
    """nodes: (op, inputs, outputs, attributes?) tuples or NodeProtos; inputs: name -> (type, dims)."""
    made = [n if isinstance(n, onnx.NodeProto) else helper.make_node(*n[:3], **dict(*n[3:])) for n in nodes]
    graph = helper.make_graph(
        made,
        "g",
        [helper.make_tensor_value_info(n, t, d) for n, (t, d) in inputs.items()],
        [helper.make_tensor_value_info(n, t, None) for n, t in outputs.items()],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in (weights or {}).items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=list(functions), ir_version=9)


def run(proto: onnx.ModelProto, feed) -> list:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, feed)


def table(rows: int, width: int = 4) -> np.ndarray:
    return np.arange(rows * width, dtype=np.float32).reshape(rows, width)


IDS = {"ids": (I64, ["b", "s"])}


def direct() -> onnx.ModelProto:
    return model([("Gather", ["t", "ids"], ["y"])], IDS, {"y": F}, {"t": table(5)})


def through_moves() -> onnx.ModelProto:
    nodes = [
        ("Unsqueeze", ["ids", "last"], ["u"]),
        ("Cast", ["u"], ["c"], {"to": TensorProto.INT32}),
        ("Reshape", ["c", "flat"], ["r"]),
        ("Gather", ["t", "r"], ["y"]),
    ]
    return model(nodes, IDS, {"y": F}, {"t": table(5), "last": np.array([2]), "flat": np.array([-1])})


def with_offset() -> onnx.ModelProto:
    nodes = [("Add", ["ids", "two"], ["a"]), ("Gather", ["t", "a"], ["y"])]
    return model(nodes, IDS, {"y": F}, {"t": table(7), "two": np.array(2)})


def two_tables() -> onnx.ModelProto:
    nodes = [("Gather", ["t", "ids"], ["y"]), ("Gather", ["big", "ids"], ["z"])]
    return model(nodes, IDS, {"y": F, "z": F}, {"t": table(5), "big": table(50)})


def cast_table() -> onnx.ModelProto:
    nodes = [("Cast", ["t"], ["f"], {"to": F}), ("Gather", ["f", "ids"], ["y"])]
    return model(nodes, IDS, {"y": F}, {"t": table(5).astype(np.float16)})


def in_a_branch() -> onnx.ModelProto:
    def branch(name: str) -> onnx.GraphProto:
        node = helper.make_node("Gather", ["t", "ids"], [name])
        return helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, F, None)])

    node = helper.make_node("If", ["cond"], ["y"], then_branch=branch("a"), else_branch=branch("b"))
    return model([node], IDS, {"y": F}, {"t": table(5), "cond": np.array(True)})


def in_a_function() -> onnx.ModelProto:
    gather = helper.make_node("Gather", ["table", "index"], ["out"])
    opset = [helper.make_opsetid("", 17)]
    function = helper.make_function("local", "Embed", ["index"], ["out"], [_table_node(), gather], opset)
    node = helper.make_node("Embed", ["ids"], ["y"], domain="local")
    return model([node], IDS, {"y": F}, functions=[function])


def _table_node() -> onnx.NodeProto:
    return helper.make_node("Constant", [], ["table"], value=numpy_helper.from_array(table(5)))


def as_an_argument() -> onnx.ModelProto:
    gather = helper.make_node("Gather", ["table", "index"], ["out"])
    function = helper.make_function(
        "local", "Embed", ["table", "index"], ["out"], [gather], [helper.make_opsetid("", 17)]
    )
    node = helper.make_node("Embed", ["t", "ids"], ["y"], domain="local")
    return model([node], IDS, {"y": F}, {"t": table(5)}, functions=[function])


@pytest.mark.parametrize(
    "make",
    [as_an_argument, direct, through_moves, with_offset, two_tables, cast_table, in_a_branch, in_a_function],
    ids=lambda f: f.__name__,
)
def test_ids_stay_inside_the_table(make):
    proto = make()
    feeds = make_inputs(proto, count=6)
    values = np.concatenate([f["ids"].ravel() for f in feeds])
    low = -2 if make is with_offset else 0
    assert values.min() >= max(low, 0)
    assert values.max() < 5
    assert len(set(values.tolist())) >= 4  # the whole table, not one row of it
    for feed in feeds:
        run(proto, feed)


def test_the_largest_id_is_reached():
    assert max(f["ids"].max() for f in make_inputs(direct(), count=10)) == 4


def test_a_table_whose_data_was_set_aside():
    proto = direct()
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    set_mark(tensor, 0)
    assert max(f["ids"].max() for f in make_inputs(proto, count=10)) == 4


def test_segments_come_in_runs():
    proto = model(
        [("Gather", ["t", "kinds"], ["y"])], {"kinds": (I64, ["b", "s"])}, {"y": F}, {"t": table(2)}
    )
    for feed in make_inputs(proto, count=5):
        assert np.all(np.diff(feed["kinds"], axis=-1) >= 0)
        assert set(np.unique(feed["kinds"])) <= {0, 1}


def bert_mask(kind: int) -> onnx.ModelProto:
    nodes = [
        ("Unsqueeze", ["m", "axes"], ["u"]),
        ("Cast", ["u"], ["c"], {"to": F}),
        ("Sub", ["one", "c"], ["i"]),
        ("Mul", ["i", "low"], ["y"]),
    ]
    weights = {"axes": np.array([1, 2]), "one": np.float32(1), "low": np.float32(-1e4)}
    return model(nodes, {"m": (kind, ["b", "s"])}, {"y": F}, weights)


@pytest.mark.parametrize("kind", [I64, TensorProto.INT32, F, BOOL])
def test_masks_have_a_padded_tail(kind):
    feeds = make_inputs(bert_mask(kind), count=3)
    padded = 0
    for feed in feeds:
        mask = feed["m"].astype(int)
        assert set(np.unique(mask)) <= {0, 1}
        assert mask[:, 0].all()  # at least a one in each row
        assert np.all(np.diff(mask, axis=1) <= 0)  # zeros at the end only
        padded += (mask == 0).any()
    assert padded == 2
    assert feeds[0]["m"].all()  # and one without padding
    lengths = feeds[2]["m"].astype(int).sum(axis=1)
    assert len(set(lengths.tolist())) == len(lengths)


def test_masks_of_a_feed_agree():
    nodes = [("Cast", ["a"], ["x"], {"to": BOOL}), ("Cast", ["b"], ["y"], {"to": BOOL})]
    proto = model(nodes, {"a": (I64, ["n", "s"]), "b": (I64, ["n", "s"])}, {"x": BOOL, "y": BOOL})
    for feed in make_inputs(proto):
        np.testing.assert_array_equal(feed["a"], feed["b"])


def test_an_additive_mask_is_zero_or_very_negative():
    nodes = [("Add", ["x", "attn_mask"], ["s"]), ("Softmax", ["s"], ["y"])]
    proto = model(nodes, {"x": (F, [2, 4, 8, 8]), "attn_mask": (F, [2, 1, 8, 8])}, {"y": F})
    mask = make_inputs(proto)[1]["attn_mask"]
    assert set(np.unique(mask)) == {-10000.0, 0.0}
    assert (mask[..., 0] == 0).all()


def test_positions_count_up():
    proto = model(
        [("Gather", ["t", "position_ids"], ["y"])], {"position_ids": (I64, [1, 6])}, {"y": F}, {"t": table(9)}
    )
    assert make_inputs(proto)[0]["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5]]


def test_a_sampling_rate_takes_what_the_graph_compares_it_with():
    proto = model([("Equal", ["sr", "k"], ["y"])], {"sr": (I64, [])}, {"y": BOOL}, {"k": np.array(16000)})
    feeds = make_inputs(proto, count=4)
    assert [int(f["sr"]) for f in feeds] == [16000, 8000, 16000, 8000]
    assert feeds[0]["sr"].shape == ()
    assert feeds[0]["sr"].dtype == np.int64
    other = model([("Equal", ["mode", "k"], ["y"])], {"mode": (I64, [1])}, {"y": BOOL}, {"k": np.array(3)})
    assert make_inputs(other)[0]["mode"].tolist() == [3]


@pytest.mark.parametrize(
    ("node", "shape"),
    [
        (("Reshape", ["x", "n"], ["y"]), [3]),
        (("Expand", ["x", "n"], ["y"]), [2]),
        (("Tile", ["x", "n"], ["y"]), [2]),
        (("Range", ["zero", "n", "one"], ["y"]), []),
        (("Slice", ["x", "start", "n"], ["y"]), [1]),
        (("TopK", ["x", "n"], ["y", "i"]), [1]),
        (("ConstantOfShape", ["n"], ["y"]), [2]),
    ],
    ids=lambda v: v[0] if isinstance(v, tuple) else str(v),
)
def test_integers_that_say_a_size_run(node, shape):
    weights = {"zero": np.array(0), "one": np.array(1), "start": np.array([0])}
    proto = model([node], {"x": (F, [4, 6]), "n": (I64, shape)}, {"y": F}, weights)
    if node[0] == "Range":
        proto.graph.output[0].type.tensor_type.elem_type = I64
    for feed in make_inputs(proto):
        assert run(proto, feed)[0].size > 0


def test_a_logarithm_gets_positive_values():
    proto = model([("Log", ["x"], ["y"])], {"x": (F, [50])}, {"y": F})
    assert np.isfinite(run(proto, make_inputs(proto)[0])[0]).all()


def test_images_and_signals():
    image = model(
        [("Conv", ["x", "w"], ["y"])],
        {"x": (F, ["n", 3, "h", "w"])},
        {"y": F},
        {"w": np.ones((2, 3, 3, 3), np.float32)},
    )
    feed = make_inputs(image)[0]["x"]
    assert feed.shape[1] == 3
    assert all(side % 32 == 0 for side in feed.shape[2:])
    assert 1 < feed.std() < 2.5
    assert np.abs(feed).max() <= 2.5
    audio = model(
        [("Conv", ["audio", "w"], ["y"])],
        {"audio": (F, ["n", 1, "t"])},
        {"y": F},
        {"w": np.ones((2, 1, 3), np.float32)},
    )
    feed = make_inputs(audio)[0]["audio"]
    assert 0.1 < feed.std() < 0.6
    assert np.abs(feed).max() <= 1


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (F, np.float32),
        (TensorProto.FLOAT16, np.float16),
        (TensorProto.BFLOAT16, ml_dtypes.bfloat16),
        (TensorProto.DOUBLE, np.float64),
        (TensorProto.INT8, np.int8),
        (TensorProto.UINT8, np.uint8),
        (TensorProto.INT32, np.int32),
        (TensorProto.UINT64, np.uint64),
        (BOOL, np.bool_),
        (TensorProto.STRING, object),
    ],
)
def test_every_type(kind, dtype):
    proto = model([("Identity", ["x"], ["y"])], {"x": (kind, [2, 3])}, {"y": kind})
    feeds = make_inputs(proto)
    validate(feeds, proto)
    assert all(f["x"].dtype == dtype and f["x"].shape == (2, 3) for f in feeds)


def test_a_sequence_is_a_list_of_arrays():
    proto = model([("ConcatFromSequence", ["x"], ["y"], {"axis": 0})], {}, {"y": F})
    info = helper.make_tensor_sequence_value_info("x", F, [2, 3])
    proto.graph.input.append(info)
    feed = make_inputs(proto)[0]
    assert [a.shape for a in feed["x"]] == [(2, 3), (2, 3)]
    validate([feed], proto)
    assert run(proto, feed)[0].shape == (4, 3)


def test_the_same_seed_gives_the_same_inputs():
    proto = bert_mask(I64)
    proto.graph.input.append(helper.make_tensor_value_info("x", F, ["b", 8]))
    one, two, other = (make_inputs(proto, seed=s) for s in (7, 7, 8))
    for a, b in zip(one, two, strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])
    assert any(
        (a["x"].shape != b["x"].shape) or (a["x"] != b["x"]).any() for a, b in zip(one, other, strict=True)
    )


def test_dynamic_dimensions_get_several_sizes_shared_by_name():
    proto = model([("Add", ["x", "z"], ["y"])], {"x": (F, ["b", "s", 4]), "z": (F, ["b", "s", 4])}, {"y": F})
    feeds = make_inputs(proto)
    assert all(f["x"].shape == f["z"].shape and f["x"].size for f in feeds)
    assert len({f["x"].shape[0] for f in feeds}) > 1
    assert len({f["x"].shape[1] for f in feeds}) > 1


def test_a_dimension_that_is_a_sum():
    inputs = {"x": (F, [1, "past"]), "z": (F, [1, "past + 1"])}
    proto = model([("Concat", ["x", "z"], ["y"], {"axis": 1})], inputs, {"y": F})
    for feed in make_inputs(proto):
        assert feed["z"].shape[1] == feed["x"].shape[1] + 1


def test_weights_that_are_inputs_keep_their_defaults():
    proto = direct()
    proto.graph.input.append(helper.make_tensor_value_info("t", F, [5, 4]))
    assert list(make_inputs(proto)[0]) == ["ids"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=3, max_size=3),
    st.lists(st.integers(1, 40), min_size=3, max_size=3),
    st.integers(0, 1000),
)
def test_sizes_stay_within_the_profile(batch, length, seed):
    (b0, b1, b2), (s0, s1, s2) = sorted(batch), sorted(length)
    profile = Profile({"ids": (b0, s0)}, {"ids": (b1, s1)}, {"ids": (b2, s2)})
    feeds = make_inputs(direct(), count=4, seed=seed, profile=profile)
    assert feeds[0]["ids"].shape == (b1, s1)
    for feed in feeds:
        b, s = feed["ids"].shape
        assert b0 <= b <= b2
        assert s0 <= s <= s2
    if b0 < b2:
        assert len({f["ids"].shape[0] for f in feeds}) > 1


def test_given_shapes_are_taken():
    assert make_inputs(direct(), {"ids": (4, 9)})[2]["ids"].shape == (4, 9)


def test_a_profile_counts_more_than_shapes():
    profile = Profile({"ids": (1, 4)}, {"ids": (2, 8)}, {"ids": (2, 12)})
    shapes = {f["ids"].shape for f in make_inputs(direct(), dict(profile.opt), profile=profile)}
    assert len(shapes) > 1


@pytest.mark.parametrize("shape", [(4,), (4, 0), (4, 9, 1)])
def test_shapes_that_do_not_fit(shape):
    with pytest.raises(InputError, match="does not fit the input 'ids'"):
        make_inputs(direct(), {"ids": shape})


def test_profile_without_a_common_size():
    proto = model([("Add", ["x", "z"], ["y"])], {"x": (F, ["n"]), "z": (F, ["n"])}, {"y": F})
    profile = Profile({"x": (1,), "z": (5,)}, {"x": (2,), "z": (6,)}, {"x": (3,), "z": (7,)})
    with pytest.raises(InputError, match="'n'"):
        make_inputs(proto, profile=profile)


def save(proto: onnx.ModelProto, path: Path) -> Path:
    onnx.save(proto, path)
    return path


def test_runnable_inputs_replace_sizes_that_the_model_refuses(tmp_path):
    """Rows of 16 only: 7 and 33, which are within the profile, cannot be reshaped."""
    proto = model([("Reshape", ["x", "r"], ["y"])], {"x": (F, ["s"])}, {"y": F}, {"r": np.array([-1, 16])})
    path = save(proto, tmp_path / "m.onnx")
    made = make_inputs(proto)
    assert any(f["x"].size % 16 for f in made)
    feeds = runnable_inputs(path, proto)
    assert len(feeds) == 3
    assert all(f["x"].size % 16 == 0 for f in feeds)
    assert not np.array_equal(feeds[0]["x"], feeds[1]["x"])


def test_runnable_inputs_say_why_there_are_none(tmp_path):
    proto = model([("Reshape", ["x", "r"], ["y"])], {"x": (F, ["s"])}, {"y": F}, {"r": np.array([-1, 1009])})
    with pytest.raises(InputError, match="--load-inputs") as e:
        runnable_inputs(save(proto, tmp_path / "m.onnx"), proto)
    assert "\n" not in str(e.value)


X = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_npz_of_one_and_of_several_feeds(tmp_path):
    np.savez(tmp_path / "one.npz", **{"x": X, "a/b:0": X + 1})
    (feed,) = load_inputs(tmp_path / "one.npz")
    np.testing.assert_array_equal(feed["a/b:0"], X + 1)
    np.savez(tmp_path / "two.npz", **{"x@1": X + 1, "x@0": X, "n@0": X, "n@1": X})
    feeds = load_inputs(tmp_path / "two.npz")
    assert [sorted(f) for f in feeds] == [["n", "x"], ["n", "x"]]
    np.testing.assert_array_equal(feeds[1]["x"], X + 1)


def test_polygraphys_json(tmp_path):
    save_json([{"x": X}, {"x": X + 1}], str(tmp_path / "inputs.json"))
    feeds = load_inputs(tmp_path / "inputs.json")
    np.testing.assert_array_equal(feeds[1]["x"], X + 1)
    assert feeds[0]["x"].dtype == np.float32


UNUSABLE = (
    *("gone.npz", "text.txt", "cut.npz", "gap.npz", "none.npz", "pickle.npz"),
    *("cut.json", "list.json"),
)


def unusable(folder: Path) -> dict[str, Path]:
    paths = {name: folder / name for name in UNUSABLE}
    paths["text.txt"].write_text("hello")
    np.savez(paths["cut.npz"], x=X)
    paths["cut.npz"].write_bytes(paths["cut.npz"].read_bytes()[:-40])
    np.savez(paths["gap.npz"], **{"x@0": X, "x@2": X})
    np.savez(paths["none.npz"])
    paths["cut.json"].write_text('{"x": 1')
    paths["list.json"].write_text("[1, 2]")
    np.savez(paths["pickle.npz"], x=np.array([{}], dtype=object))
    return paths


@pytest.mark.parametrize("name", UNUSABLE)
def test_files_that_hold_no_inputs(name, tmp_path, capsys):
    with pytest.raises(InputError) as e:
        load_inputs(unusable(tmp_path)[name])
    assert "\n" not in str(e.value)
    assert name in str(e.value)
    out = capsys.readouterr()
    assert out.out + out.err == ""  # the library says nothing of its own


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        ({}, "lacks 'x'"),
        ({"x": X, "z": X, "q": X}, "'q', which the model does not take"),
        ({"x": X, "z": X.astype(np.float64)}, "'z' holds float64: give float [b, 3]"),
        ({"x": X, "z": X[0]}, "rank 1"),
        ({"x": X[:, :2], "z": X}, "2 on axis 1, not 3"),
        ({"x": X[:1], "z": X}, "b is 1 in 'x' and 2 in 'z'"),
        ({"x": [X], "z": X}, "a list"),
        ({"x": 3.0, "z": X}, "no numpy array"),
    ],
)
def test_validation(feed, message):
    proto = model([("Add", ["x", "z"], ["y"])], {"x": (F, ["b", 3]), "z": (F, ["b", 3])}, {"y": F})
    validate([{"x": X, "z": X}], proto)
    with pytest.raises(InputError) as e:
        validate([feed], proto)
    assert message in str(e.value)
    assert "\n" not in str(e.value)


def real_models() -> list[Path]:
    folder = os.environ.get("TRTFUSE_MODELS")
    return sorted(Path(folder).glob("*.onnx")) if folder else []


@pytest.mark.skipif(not real_models(), reason="TRTFUSE_MODELS names no folder with .onnx files")
@pytest.mark.parametrize("path", real_models(), ids=lambda p: p.stem)
def test_real_models_run_and_answer(path):
    proto = onnx.load(path)
    feeds = runnable_inputs(path, proto)
    assert len(feeds) == 3
    validate(feeds, proto)
    outputs = [run(proto, feed) for feed in feeds]
    for values in zip(*outputs, strict=True):
        assert all(np.isfinite(v).all() for v in values)
        joined = np.concatenate([v.ravel() for v in values])
        assert np.ptp(joined) > 1e-3
