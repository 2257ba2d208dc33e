"""Engines built with TensorRT-RTX, and the ways a build can go wrong in its child process."""

from __future__ import annotations

import importlib.util
import os
import time

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from trtfuse import qdq, targets
from trtfuse.errors import BuildError, EnvironmentMissing, InputError
from trtfuse.shapes import Profile, derive_profile
from trtfuse.targets import BuildOptions, child

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt_rtx is not installed"
)
F = TensorProto.FLOAT
FOO = helper.make_node("Foo", ["x"], ["y"], name="f", domain="bar")


def make(nodes, weights=(), dims=("n", 16), opset=17, domains=()) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info("x", F, list(dims))]
    outputs = [helper.make_tensor_value_info("y", F, None)]
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(weights))
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def perceptron() -> onnx.ModelProto:
    weights = [numpy_helper.from_array(np.full((16, 16), 0.5, np.float32), "w")]
    return make(
        [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Relu", ["a"], ["y"])], weights
    )


def options(model: onnx.ModelProto, **more) -> BuildOptions:
    return BuildOptions(derive_profile(model), **more)


@needs_rtx
def test_an_engine_with_its_facts_and_progress():
    steps = []
    model = perceptron()
    engine = targets.build("tensorrt-rtx", model, options(model, progress=lambda *s: steps.append(s)))
    assert len(engine.data) > 1000
    assert engine.target == "tensorrt-rtx"
    assert engine.compute_capabilities[:3] == ("8.0", "8.6", "8.9")
    assert engine.layers >= 2
    assert engine.seconds > 0
    assert engine.version == importlib.import_module("importlib.metadata").version("tensorrt-rtx")
    assert "7.5" in engine.notes[0]
    phases = {phase for phase, _, _ in steps}
    assert "Parsing" in phases
    assert len(phases) > 3
    assert all(0 <= step <= total for _, step, total in steps)


@needs_rtx
@pytest.mark.parametrize(
    ("asked", "expected"), [(("8.9",), ("8.9",)), (("sm_86", "120"), ("8.6", "12.0")), (("all",), None)]
)
def test_compute_capabilities(asked, expected):
    model = perceptron()
    engine = targets.build("tensorrt-rtx", model, options(model, compute_capability=asked))
    assert engine.compute_capabilities == (expected or ("8.0", "8.6", "8.9", "12.0"))


@needs_rtx
def test_an_unknown_capability_and_turing_without_fp16():
    model = perceptron()
    with pytest.raises(InputError, match=r"'9\.9' to build for: use 7\.5, .*or portable"):
        targets.build("tensorrt-rtx", model, options(model, compute_capability=("9.9",)))
    with pytest.raises(BuildError, match=r"FP32 GEMM is not supported; leave compute capability 7\.5 out"):
        targets.build("tensorrt-rtx", model, options(model, compute_capability=("7.5",)))


@needs_rtx
def test_external_data_in_a_folder_seen_from_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "m.onnx"
    onnx.save(perceptron(), path, save_as_external_data=True, location="m.bin", size_threshold=0)
    assert (tmp_path / "models" / "m.bin").exists()
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir("models"))
    model = perceptron()
    engine = targets.build("tensorrt-rtx", (path.relative_to(tmp_path)), options(model))
    assert len(engine.data) > 1000
    assert sorted(os.listdir("models")) == before


@needs_rtx
def test_no_timing_cache_where_nothing_is_timed(tmp_path):
    cache, model = tmp_path / "timing.cache", perceptron()
    engine = targets.build("tensorrt-rtx", model, options(model, timing_cache=cache))
    assert "no timing cache is written" in engine.notes[1]
    assert not cache.exists()


@needs_rtx
def test_a_timing_cache_is_written_read_again_and_begun_anew(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch)
    cache, model = tmp_path / "timing.cache", perceptron()
    engine = targets.build("tensorrt", model, options(model, timing_cache=cache))
    first = cache.read_bytes()
    assert len(first) > 0
    assert len(engine.notes) == 1
    assert targets.build("tensorrt", model, options(model, timing_cache=cache)).data
    cache.write_bytes(b"no cache at all" * 9)
    engine = targets.build("tensorrt", model, options(model, timing_cache=cache))
    assert "begun anew" in engine.notes[1]
    assert cache.read_bytes() == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["site", "timing.cache", "timing.cache.lock"]


@needs_rtx
def test_verbose_shows_the_messages(capfd):
    model = perceptron()
    targets.build("tensorrt-rtx", model, options(model, verbose=True))
    assert "[verbose]" in capfd.readouterr().err
    targets.build("tensorrt-rtx", model, options(model))
    captured = capfd.readouterr()
    assert captured.err == captured.out == ""


@needs_rtx
@pytest.mark.parametrize(
    ("nodes", "domains", "message"),
    [
        (
            [helper.make_node("Foo", ["x"], ["y"], name="f", domain="bar")],
            ["bar"],
            r"'f' \(Foo\): it knows no such",
        ),
        ([helper.make_node("Unique", ["x"], ["y"], name="u")], [], r"'u' \(Unique\): it does not"),
    ],
)
def test_refused_operators_are_named(nodes, domains, message):
    model = make(nodes, domains=domains)
    with pytest.raises(BuildError, match=message):
        targets.build("tensorrt-rtx", model, options(model))


@needs_rtx
def test_refused_quantization_names_the_option_which_then_helps():
    weights = [
        helper.make_tensor("s", F, [], [0.1]),
        helper.make_tensor("z", TensorProto.UINT8, [], [3]),
        helper.make_tensor("b", TensorProto.INT32, [16], list(range(16))),
    ]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("DequantizeLinear", ["b", "s"], ["bias"]),
        helper.make_node("Add", ["d", "bias"], ["y"]),
    ]
    model = make(nodes, weights)
    with pytest.raises(BuildError, match=r"QuantizeLinear.*--qdq auto"):
        targets.build("tensorrt-rtx", model, options(model))
    made, _ = qdq.apply(model, "auto")
    assert targets.build("tensorrt-rtx", made, options(made)).layers >= 1


@needs_rtx
@pytest.mark.parametrize("dtype", [F, TensorProto.FLOAT16])
def test_attention_that_has_no_kernel_of_its_own_is_built_of_its_parts(dtype):
    inputs = [helper.make_tensor_value_info(n, dtype, [1, 2, 8, 64]) for n in "qkv"]
    outputs = [helper.make_tensor_value_info("y", dtype, [1, 2, 8, 64])]
    graph = helper.make_graph([helper.make_node("Attention", ["q", "k", "v"], ["y"])], "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    assert targets.build("tensorrt-rtx", model, options(model)).data


@needs_rtx
def test_what_is_no_model_and_shapes_that_contradict_the_graph(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(b"this is no model")
    with pytest.raises(BuildError, match="TensorRT-RTX"):
        targets.build("tensorrt-rtx", path, BuildOptions(Profile({}, {}, {})))
    reshape = helper.make_node("Reshape", ["x", "shape"], ["y"])
    shape = numpy_helper.from_array(np.array([7, 16], np.int64), "shape")
    model = make([reshape], [shape])
    with pytest.raises(BuildError, match="TensorRT-RTX"):
        targets.build("tensorrt-rtx", model, options(model))
    with pytest.raises(BuildError, match=r"dynamic input 'x' that has no shapes.*--min-shapes"):
        targets.build("tensorrt-rtx", perceptron(), BuildOptions(Profile({}, {}, {})))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('terminate called', file=sys.stderr, flush=True); os.abort()", "SIGABRT.*terminate called"),
        ("os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("os.kill(os.getpid(), 9)", "killed.*memory"),
        ("sys.exit(3)", "ended with 3"),
        (
            """log = b'{"kind": "log", "severity": "error", "text": "bad layer"}\\n{"ki'; """
            "os.write(int(sys.argv[2]), log); os.abort()",
            "SIGABRT.*bad layer",
        ),
    ],
)
def test_a_death_is_one_error_with_the_last_words(monkeypatch, tmp_path, code, message):
    monkeypatch.setattr(child, "_START", f"import os, sys; {code}")
    with pytest.raises(BuildError, match=message) as caught:
        targets.build("tensorrt-rtx", tmp_path / "m.onnx", BuildOptions(Profile({}, {}, {})))
    assert "\n" not in str(caught.value)


def test_an_interrupt_ends_the_child_and_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    pid_file = tmp_path / "pid"
    event = '{"kind": "progress", "phase": "p", "step": 0, "steps": 1}\\n'
    code = f"open({str(pid_file)!r}, 'w').write(str(os.getpid())); os.write(int(sys.argv[2]), b'{event}')"
    monkeypatch.setattr(child, "_START", f"import os, sys, time; {code}; time.sleep(60)")

    def interrupt(*_):
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        targets.build("tensorrt-rtx", tmp_path / "m", BuildOptions(Profile({}, {}, {}), progress=interrupt))
    assert time.monotonic() - start < 20
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert list(tmp_path.iterdir()) == [pid_file]


# TensorRT itself needs a GPU to build. Its side of the work is run here on a package of that name which is
# TensorRT-RTX under another version.
def stand_in(tmp_path, monkeypatch, version="11.0.0", capability="8.9", first=""):
    package = tmp_path / "site" / "tensorrt"
    package.mkdir(parents=True)
    lines = [
        first,
        "from tensorrt_rtx import *",
        "import trtfuse.targets.gpu as gpu",
        f"gpu.capabilities = lambda: ({capability!r},)" if capability else "",
        f"__version__ = {version!r}",
        "from trtfuse.targets import tensorrt as target",
        "target.INSPECTS = False  # no GPU to load the engine on",
    ]
    (package / "__init__.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


@needs_rtx
def test_tensorrt_builds_for_the_gpu_it_has(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch)
    model = perceptron()
    engine = targets.build("tensorrt", model, options(model))
    assert (engine.target, engine.version, engine.compute_capabilities) == ("tensorrt", "11.0.0", ("8.9",))
    assert targets.build("tensorrt", model, options(model, compute_capability=("sm_89",))).data
    portable = targets.build("tensorrt", model, options(model, compute_capability=("portable",)))
    assert "8.0 and later" in portable.notes[0]
    with pytest.raises(InputError, match=r"use 8\.9, or portable"):
        targets.build("tensorrt", model, options(model, compute_capability=("8.6",)))


@needs_rtx
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"version": "10.3.0"}, r"10\.3\.0 is too old: pip install"),
        ({"capability": ""}, "needs an NVIDIA GPU"),
        ({"first": "raise ImportError('libnvinfer.so.11 is missing')"}, r"libnvinfer.*pip install"),
    ],
)
def test_tensorrt_that_cannot_be_used(tmp_path, monkeypatch, how, message):
    stand_in(tmp_path, monkeypatch, **how)
    if targets.gpu.count() and how == {"capability": ""}:
        pytest.skip("this machine has a GPU")
    model = perceptron()
    with pytest.raises(EnvironmentMissing, match=message):
        targets.build("tensorrt", model, options(model))


def test_no_engine_for_other_targets(tmp_path):
    with pytest.raises(InputError, match="no engine can be built for the target 'onnx'"):
        targets.build("onnx", tmp_path / "m.onnx", BuildOptions(Profile({}, {}, {})))
