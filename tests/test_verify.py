from __future__ import annotations

import json
import math
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from trtfuse import isolated
from trtfuse.errors import InputError
from trtfuse.tolerances import computed_in
from trtfuse.verify import Accuracy, Tolerances, compare, compare_arrays, reference_session, suspect

F, F16, BF16, I64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT64
RNG = np.random.default_rng(0)
FEEDS = [{"x": RNG.standard_normal((n, 8)).astype(np.float32)} for n in (2, 1, 3)]
BODY = np.eye(8, dtype=np.float32) * 0.7 + 0.1


def save(path: Path, nodes, weights=None, inputs=None, outputs=None, opset=17) -> Path:
    """nodes: (op, inputs, outputs, attributes?); inputs, outputs: name -> (type, dims)."""
    graph = helper.make_graph(
        [helper.make_node(*n[:3], **dict(*n[3:])) for n in nodes],
        "g",
        [helper.make_tensor_value_info(n, *t) for n, t in (inputs or {"x": (F, ["b", 8])}).items()],
        [helper.make_tensor_value_info(n, *t) for n, t in (outputs or {"y": (F, ["b", 8])}).items()],
        [numpy_helper.from_array(np.asarray(v), n) for n, v in (weights or {}).items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9), path)
    return path


def chain(path: Path, scale: float = 2.0, shift: float = 0.5, **options) -> Path:
    """y = tanh(scale * (x @ BODY)) + shift"""
    nodes = [
        ("MatMul", ["x", "w"], ["h"]),
        ("Mul", ["h", "scale"], ["s"]),
        ("Tanh", ["s"], ["t"]),
        ("Add", ["t", "shift"], ["y"]),
    ]
    weights = {"w": BODY, "scale": np.float32(scale), "shift": np.float32(shift)}
    return save(path, nodes, weights, **options)


def identity(path: Path, kind: int, constant, shape) -> Path:
    """y = a constant, of one type."""
    return save(
        path,
        [("Identity", ["c"], ["y"])],
        {"c": constant},
        outputs={"y": (kind, shape)},
    )


def test_the_same_model_passes_exactly(tmp_path):
    path = chain(tmp_path / "a.onnx")
    accuracy = compare(path, path, FEEDS)
    assert accuracy.passed
    assert accuracy.reason is None
    assert accuracy.inputs == 3
    assert accuracy.outputs["y"].dtype == "float32"
    assert compare(path, path, FEEDS, optimized=False).outputs["y"].max_abs == 0


def test_a_wrong_constant_fails_and_names_output_and_element(tmp_path):
    a, b = chain(tmp_path / "a.onnx"), chain(tmp_path / "b.onnx", scale=2.01)
    accuracy = compare(a, b, FEEDS)
    assert not accuracy.passed
    result = accuracy.outputs["y"]
    expected = [np.tanh(2.0 * (f["x"] @ BODY)) + 0.5 for f in FEEDS]
    actual = [np.tanh(2.01 * (f["x"] @ BODY)) + 0.5 for f in FEEDS]
    worst = result.input
    assert result.worst_index is not None
    assert math.isclose(result.worst_expected, expected[worst][result.worst_index], rel_tol=1e-5)
    assert math.isclose(result.worst_actual, actual[worst][result.worst_index], rel_tol=1e-5)
    assert math.isclose(result.max_abs, np.abs(expected[worst] - actual[worst]).max(), rel_tol=1e-3)
    assert math.isclose(result.mean_abs, np.abs(expected[worst] - actual[worst]).mean(), rel_tol=1e-3)
    for part in ("'y'", str(list(result.worst_index)), f"input {worst}", f"{result.atol:.3g}"):
        assert part in accuracy.reason
    assert "\n" not in accuracy.reason


def test_the_numbers_are_those_of_the_worst_input(tmp_path):
    """Off only where x > 5, and only the second feed goes there."""
    nodes = [("Clip", ["x", "low", "high"], ["y"])]
    a = save(tmp_path / "a.onnx", nodes, {"low": np.float32(-9), "high": np.float32(9)})
    b = save(tmp_path / "b.onnx", nodes, {"low": np.float32(-9), "high": np.float32(5)})
    feeds = [{"x": f["x"].copy()} for f in FEEDS]
    feeds[1]["x"][0, 3] = 7
    result = compare(a, b, feeds).outputs["y"]
    assert (result.input, result.worst_index, result.max_abs) == (1, (0, 3), 2.0)
    assert (result.worst_expected, result.worst_actual) == (7.0, 5.0)


def test_small_outputs_do_not_pass_by_a_fixed_tolerance(tmp_path):
    nodes = [("Mul", ["x", "k"], ["y"])]
    a = save(tmp_path / "a.onnx", nodes, {"k": np.float32(1e-9)})
    b = save(tmp_path / "b.onnx", nodes, {"k": np.float32(1.01e-9)})
    assert not compare(a, b, FEEDS).passed
    assert compare(a, a, FEEDS).passed


def test_saturated_outputs_do_not_pass_by_their_magnitude(tmp_path):
    """1000 plus a little: a thousandth of a percent of the output is all of what it says."""
    nodes = [("Mul", ["x", "k"], ["h"]), ("Add", ["h", "big"], ["y"])]
    weights = {"k": np.float32(0.002), "big": np.float32(1000)}
    a = save(tmp_path / "a.onnx", nodes, weights)
    b = save(tmp_path / "b.onnx", nodes, {**weights, "k": np.float32(0.0)})
    assert not compare(a, b, FEEDS).passed
    assert compare(a, a, FEEDS).passed


def test_a_constant_output_is_told(tmp_path):
    a = save(tmp_path / "a.onnx", [("Mul", ["x", "k"], ["y"])], {"k": np.float32(0)})
    accuracy = compare(a, a, FEEDS)
    assert accuracy.passed
    assert "'y' is 0 everywhere" in accuracy.notes[0]


@pytest.mark.parametrize(
    ("dtype", "relative", "passes"),
    [
        (np.float32, 1e-5, True),
        (np.float32, 1e-3, False),
        (np.float16, 2e-3, True),
        (np.float16, 5e-2, False),
        (np.float64, 1e-12, True),
        (np.float64, 1e-6, False),
    ],
)
def test_defaults_by_type(tmp_path, dtype, relative, passes):
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    value = np.linspace(1, 2, 16).astype(dtype)
    a = identity(tmp_path / "a.onnx", kind, value, [16])
    b = identity(tmp_path / "b.onnx", kind, (value * (1 + relative)).astype(dtype), [16])
    if dtype == np.float64:  # as long as nothing in the graph is less
        for path in (a, b):
            proto = onnx.load(path)
            proto.graph.input[0].type.tensor_type.elem_type = TensorProto.DOUBLE
            onnx.save(proto, path)
    feeds = [{"x": f["x"].astype(np.float64 if dtype == np.float64 else np.float32)} for f in FEEDS]
    assert compare(a, b, feeds).passed == passes


def test_half_precision_inside_loosens_a_float_output(tmp_path):
    cast = [
        ("Cast", ["x"], ["h"], {"to": F16}),
        ("Mul", ["h", "k"], ["m"]),
        ("Cast", ["m"], ["y"], {"to": F}),
    ]
    a = save(tmp_path / "a.onnx", cast, {"k": np.float16(1.5)})
    b = save(tmp_path / "b.onnx", [("Mul", ["x", "k"], ["y"])], {"k": np.float32(1.5)})
    assert computed_in(onnx.load(a)) == "float16"
    assert computed_in(onnx.load(b)) == "float32"
    c = save(tmp_path / "c.onnx", [("Mul", ["x", "k"], ["y"])], {"k": np.float32(1.502)})
    assert compare(a, c, FEEDS).passed
    assert not compare(b, c, FEEDS).passed


def test_bfloat16_and_float8_outputs(tmp_path):
    for kind, name in ((BF16, "bfloat16"), (TensorProto.FLOAT8E4M3FN, "float8e4m3fn")):
        outputs = {"y": (kind, ["b", 8])}
        a = save(tmp_path / "a.onnx", [("Cast", ["x"], ["y"], {"to": kind})], outputs=outputs, opset=19)
        nodes = [("Mul", ["x", "k"], ["h"]), ("Cast", ["h"], ["y"], {"to": kind})]
        b = save(tmp_path / "b.onnx", nodes, {"k": np.float32(1.5)}, outputs=outputs, opset=19)
        accuracy = compare(a, a, FEEDS)
        assert accuracy.passed
        assert accuracy.outputs["y"].dtype == name
        assert not compare(a, b, FEEDS).passed


def test_bfloat16_inputs(tmp_path):
    import ml_dtypes

    a = save(tmp_path / "a.onnx", [("Cast", ["x"], ["y"], {"to": F})], inputs={"x": (BF16, ["b", 8])})
    feeds = [{"x": f["x"].astype(ml_dtypes.bfloat16)} for f in FEEDS]
    result = compare(a, a, feeds).outputs["y"]
    assert result.worst_expected == float(feeds[result.input]["x"][result.worst_index])


def test_integers_and_text_are_exact(tmp_path):
    large = np.array([2**62, -(2**63), 5])
    for name, value, other in (
        ("integers", large, large - np.array([0, -(2**62), 0])),
        ("wrapped", large, np.array([2**62, 2**63 - 1, 5])),
        ("unsigned", np.array([0, 1], np.uint64), np.array([0, 2**64 - 1], np.uint64)),
        ("booleans", np.array([True, False]), np.array([True, True])),
        ("text", np.array(["a", "b"], dtype=object), np.array(["a", "c"], dtype=object)),
    ):
        kind = TensorProto.STRING if name == "text" else helper.np_dtype_to_tensor_dtype(value.dtype)
        a = identity(tmp_path / "a.onnx", kind, value, list(value.shape))
        b = identity(tmp_path / "b.onnx", kind, other, list(value.shape))
        assert compare(a, a, FEEDS).passed, name
        accuracy = compare(a, b, FEEDS)
        assert not accuracy.passed, name
        assert "[1]" in accuracy.reason, name


@pytest.mark.parametrize(
    ("expected", "actual", "passes"),
    [
        ([1, np.nan], [1, np.nan], True),
        ([1, np.inf], [1, np.inf], True),
        ([1, np.inf], [1, -np.inf], False),
        ([1, 2], [1, np.nan], False),
        ([1, np.nan], [1, 2], False),
        ([1, np.inf], [1, 2], False),
        ([1, 2], [1, np.inf], False),
        ([1, np.nan], [1, np.inf], False),
        ([1, np.nan], [2, np.nan], False),
    ],
)
@pytest.mark.parametrize("statistic", ["elemwise", "max", "mean", "median", "quantile"])
def test_nan_and_infinity(expected, actual, passes, statistic):
    e, a = np.array(expected, np.float32), np.array(actual, np.float32)
    tolerances = Tolerances.parse([], [], [statistic])
    result = compare_arrays("y", e, a, tolerances, kind="float32")
    assert result.passed == passes
    if not passes and np.isnan(e).sum() + np.isinf(e).sum() != np.isnan(a).sum() + np.isinf(a).sum():
        assert result.max_abs == math.inf
        assert result.worst_index == (1,)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=8),
    st.lists(st.floats(-1, 1, width=32), min_size=8, max_size=8),
    st.sampled_from([1e-6, 1e-3, 1.0]),
    st.sampled_from([0.0, 1e-6, 1e-2]),
    st.sampled_from([0.0, 1e-5, 1e-2]),
)
def test_elements_pass_within_either_tolerance(values, noise, size, atol, rtol):
    expected = np.array(values, np.float64)
    actual = expected + size * np.array(noise[: len(values)], np.float64)
    tolerances = Tolerances(atol={"": atol}, rtol={"": rtol})
    result = compare_arrays("y", expected, actual, tolerances, kind="float32")
    error = np.abs(actual - expected)
    good = (error <= atol) | (error <= rtol * np.abs(expected))
    close = np.abs(error - np.maximum(atol, rtol * np.abs(expected))) <= 1e-9 * np.maximum(error, 1e-30)
    if not close.any():  # on the boundary a rounding decides
        assert result.passed == bool(good.all())
        assert result.excess > 1 or result.passed
        if not result.passed:
            assert not good[result.worst_index]
    assert result.max_abs == error.max()


def test_polygraphys_spelling():
    tolerances = Tolerances.parse(["1e-5", "out:0:1e-3"], ["out:0:0.1"], ["max", "b:mean"])
    assert tolerances.atol == {"": 1e-5, "out:0": 1e-3}
    assert tolerances.rtol == {"out:0": 0.1}
    assert tolerances.of("b", "float32", 1.0, 0.0)[2] == "mean"
    assert tolerances.of("out:0", "float32", 1.0, 0.0) == (1e-3, 0.1, "max")
    assert tolerances.of("seq[3]", "float32", 1.0, 0.0)[0] == 1e-5
    assert Tolerances.parse(None, None, None) == Tolerances.default()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((["abc"], [], []), "--atol abc"),
        ((["y:-1"], [], []), "--atol y:-1"),
        (([], ["nan"], []), "--rtol nan"),
        (([], [], ["y:most"]), "'most'"),
    ],
)
def test_bad_tolerances(options, message):
    with pytest.raises(InputError) as e:
        Tolerances.parse(*options)
    assert message in str(e.value)
    assert "\n" not in str(e.value)


def test_tolerances_by_output(tmp_path):
    a, b = chain(tmp_path / "a.onnx"), chain(tmp_path / "b.onnx", shift=0.51)
    assert not compare(a, b, FEEDS, Tolerances.parse(["0.005"], ["0"])).passed
    assert compare(a, b, FEEDS, Tolerances.parse(["0.005", "y:0.02"], ["0"])).passed
    with pytest.raises(InputError, match="'z', which is no output"):
        compare(a, b, FEEDS, Tolerances.parse(["z:1"]))


def test_a_statistic_is_what_is_checked(tmp_path):
    value = np.ones(100, np.float32)
    other = value.copy()
    other[7] = 2
    a, b = (identity(tmp_path / n, F, v, [100]) for n, v in (("a.onnx", value), ("b.onnx", other)))
    for statistic, passes in (("max", False), ("elemwise", False), ("median", True), ("mean", False)):
        accuracy = compare(a, b, FEEDS, Tolerances.parse(["1e-3"], ["1e-3"], [statistic]))
        assert accuracy.passed == passes, statistic
        assert accuracy.outputs["y"].max_abs == 1
    assert compare(a, b, FEEDS, Tolerances.parse(["0.02"], ["0"], ["mean"])).passed


def test_shapes_types_and_names_of_outputs(tmp_path):
    a = chain(tmp_path / "a.onnx")
    reduced = [("ReduceSum", ["x"], ["y"])]
    b = save(tmp_path / "b.onnx", reduced, outputs={"y": (F, [1, 1])})
    assert "has shape [1, 1] where" in compare(a, b, FEEDS).reason
    c = save(tmp_path / "c.onnx", [("Cast", ["x"], ["y"], {"to": I64})], outputs={"y": (I64, ["b", 8])})
    assert "is int64 where the reference is float32" in compare(a, c, FEEDS).reason
    d = save(tmp_path / "d.onnx", [("Tanh", ["x"], ["z"])], outputs={"z": (F, ["b", 8])})
    assert "lacks the output 'y'" in compare(a, d, FEEDS).reason


def test_several_failures_are_counted_and_the_worst_is_named(tmp_path):
    outputs = {"y": (F, ["b", 8]), "z": (F, ["b", 8])}
    nodes = [("Mul", ["x", "k"], ["y"]), ("Mul", ["x", "l"], ["z"])]
    one, two = np.float32(1), np.float32(2)
    a = save(tmp_path / "a.onnx", nodes, {"k": one, "l": one}, outputs=outputs)
    b = save(tmp_path / "b.onnx", nodes, {"k": np.float32(1.01), "l": two}, outputs=outputs)
    reason = compare(a, b, FEEDS).reason
    assert reason.startswith("output 'z'")
    assert "1 more output" in reason


def test_a_candidate_that_does_not_load_or_run_fails(tmp_path):
    a = chain(tmp_path / "a.onnx")
    b = save(tmp_path / "b.onnx", [("Nonsense", ["x"], ["y"])])
    accuracy = compare(a, b, FEEDS)
    assert not accuracy.passed
    assert "Nonsense" in accuracy.reason
    assert "graph optimizations off" in accuracy.reason
    c = save(tmp_path / "c.onnx", [("MatMul", ["x", "w"], ["y"])], {"w": np.ones((3, 8), np.float32)})
    accuracy = compare(a, c, FEEDS)
    assert not accuracy.passed
    assert "\n" not in accuracy.reason


def test_a_reference_that_does_not_run_is_an_input_error(tmp_path):
    a = chain(tmp_path / "a.onnx")
    with pytest.raises(InputError, match=r"cannot run .*a\.onnx"):
        compare(a, a, [{"x": np.zeros((2, 5), np.float32)}])
    with pytest.raises(InputError):
        compare(a, a, [])
    with pytest.raises(InputError, match="cannot load"):
        reference_session(save(tmp_path / "b.onnx", [("Nonsense", ["x"], ["y"])]))


def test_sequences(tmp_path):
    proto = onnx.load(save(tmp_path / "a.onnx", [("SplitToSequence", ["x"], ["s"], {"axis": 1})]))
    del proto.graph.output[:]
    proto.graph.output.append(helper.make_tensor_sequence_value_info("s", F, None))
    onnx.save(proto, tmp_path / "a.onnx")
    proto.graph.node.insert(0, helper.make_node("Neg", ["x"], ["n"]))
    proto.graph.node[1].input[0] = "n"
    onnx.save(proto, tmp_path / "b.onnx")
    accuracy = compare(tmp_path / "a.onnx", tmp_path / "a.onnx", FEEDS)
    assert accuracy.passed
    assert list(accuracy.outputs) == [f"s[{i}]" for i in range(8)]
    assert not compare(tmp_path / "a.onnx", tmp_path / "b.onnx", FEEDS).passed


def test_external_data_in_another_folder(tmp_path, monkeypatch):
    folder = tmp_path / "models"
    folder.mkdir()
    for name, scale in (("a", 2.0), ("b", 2.1)):
        proto = onnx.load(chain(tmp_path / "c.onnx", scale=scale))
        onnx.save(
            proto,
            folder / f"{name}.onnx",
            save_as_external_data=True,
            location=f"{name}.bin",
            size_threshold=0,
        )
    monkeypatch.chdir(tmp_path)
    a, b = Path("models/a.onnx"), Path("models/b.onnx")
    assert compare(a, a, FEEDS).passed
    assert not compare(a, b, FEEDS).passed
    before = sorted(folder.iterdir())
    assert "Mul" in suspect(a, b, FEEDS, SITES, isolate=False)
    assert sorted(folder.iterdir()) == before


def test_what_onnx_runtime_itself_changes_is_allowed(tmp_path, monkeypatch):
    """Where the optimizer moves the reference too, a candidate may be moved as far, and no further."""
    import trtfuse.verify as verify

    a, b = chain(tmp_path / "a.onnx"), chain(tmp_path / "b.onnx", shift=0.53)

    class Moved(verify.Session):
        def __init__(self, path, optimized, providers=()):
            # Stands for an optimizer that changes the answer by 0.01.
            moved = {"a": chain(tmp_path / "moved.onnx", shift=0.51), "b": b}
            super().__init__(moved[path.stem] if optimized else a, optimized)

    monkeypatch.setattr(verify, "Session", Moved)
    accuracy = compare(a, a, FEEDS)
    assert accuracy.passed
    assert "0.01" in accuracy.notes[0]
    assert not compare(
        a, a, FEEDS, Tolerances.parse(["1e-4"], ["0"])
    ).passed  # not where the user said how far
    accuracy = compare(a, b, FEEDS)
    assert not accuracy.passed
    assert "graph optimizations on" in accuracy.reason


@dataclass
class Site:
    id: str
    op: str
    output: str


SITES = [
    Site("last", "Add", "y"),
    Site("third", "Tanh", "t"),
    Site("second", "Mul", "s"),
    Site("first", "MatMul", "h"),
]


@pytest.mark.parametrize("isolate", [True, False])
def test_the_first_site_that_goes_wrong_is_suspected(tmp_path, isolate):
    a, b = chain(tmp_path / "a.onnx"), chain(tmp_path / "b.onnx", scale=2.1)
    phrase = suspect(a, b, FEEDS, SITES, isolate=isolate)
    assert phrase.startswith("site second (Mul) at tensor s: off by ")
    assert suspect(a, chain(tmp_path / "c.onnx", shift=1), FEEDS, SITES, isolate=False).startswith(
        "site last"
    )


def test_suspect_never_raises(tmp_path):
    a = chain(tmp_path / "a.onnx")
    assert suspect(a, a, FEEDS, SITES, isolate=False) is None
    assert suspect(a, a, FEEDS, [], isolate=False) is None
    assert suspect(a, a, FEEDS, [Site("s", "op", "absent")], isolate=False) is None
    assert suspect(a, tmp_path / "absent.onnx", FEEDS, SITES, isolate=False) is None
    assert suspect(a, a, [{"q": FEEDS[0]["x"]}], SITES, isolate=False) is None


def test_the_result_as_plain_values(tmp_path):
    a, b = chain(tmp_path / "a.onnx"), chain(tmp_path / "b.onnx", scale=2.1)
    values = json.loads(json.dumps(compare(a, b, FEEDS).to_dict()))
    assert set(values) == {"passed", "inputs", "outputs", "reason", "notes"}
    keys = {"passed", "max_abs", "max_rel", "mean_abs", "atol", "rtol", "dtype", "shape", "worst_index"}
    assert keys | {"worst_expected", "worst_actual"} <= set(values["outputs"]["y"])


def test_nothing_is_printed(tmp_path, capfd):
    a, b = chain(tmp_path / "a.onnx"), chain(tmp_path / "b.onnx", scale=2.1)
    compare(a, b, FEEDS)
    out = capfd.readouterr()
    assert out.out + out.err == ""


def test_isolated_gives_the_same(tmp_path):
    a, b = chain(tmp_path / "a.onnx"), chain(tmp_path / "b.onnx", scale=2.1)
    assert compare(a, b, FEEDS, isolate=True) == compare(a, b, FEEDS)
    with pytest.raises(InputError, match="cannot run"):
        compare(a, a, [{"x": np.zeros((2, 5), np.float32)}], isolate=True)


CRASHING = """
    import os, signal, sys

    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path.remove(folder)
    fake = sys.modules.pop("onnxruntime")
    import onnxruntime
    real = onnxruntime.InferenceSession

    def session(path, *arguments, **options):
        if os.path.basename(path) == "crash.onnx":
            os.kill(os.getpid(), signal.SIGSEGV)
        return real(path, *arguments, **options)

    onnxruntime.InferenceSession = session
"""


def test_a_native_crash_is_a_failed_result(tmp_path, monkeypatch):
    """The child imports an onnxruntime that dies on some files, as the real one does on some graphs."""
    package = tmp_path / "fake" / "onnxruntime"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(CRASHING))
    monkeypatch.syspath_prepend(package.parent)
    a, b = chain(tmp_path / "a.onnx"), chain(tmp_path / "crash.onnx")
    accuracy = compare(a, b, FEEDS, isolate=True)
    assert accuracy == Accuracy(False, 3, {}, accuracy.reason)
    assert "SIGSEGV" in accuracy.reason
    assert f"the candidate {b} with graph optimizations off" in accuracy.reason
    accuracy = compare(b, a, FEEDS, isolate=True)
    assert not accuracy.passed
    assert f"the reference {b}" in accuracy.reason
    assert suspect(a, b, FEEDS, SITES) is None


def test_a_child_without_an_answer_ends(tmp_path):
    with pytest.raises(isolated.ChildDied, match="no answer in"):
        isolated.call("time", "sleep_absent_then", (), timeout=0.001)
