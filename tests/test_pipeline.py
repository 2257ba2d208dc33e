"""The whole job on small models: what is written, what is not, and with which error."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import trtfuse
from trtfuse.errors import GateError, InputError
from trtfuse.proof import Proof

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
WIDTH = 32


def block(opset: int = 13) -> onnx.ModelProto:
    """x W + b, added to x, normalised in decomposed spelling; then a GELU. x: batch x 8 x 32."""
    rng = np.random.default_rng(0)

    def weight(name: str, value: object) -> TensorProto:
        return numpy_helper.from_array(np.asarray(value, np.float32), name)

    text = f"""
    <ir_version: 8, opset_import: ["": {opset}], producer_name: "tests">
    block (float[batch,8,{WIDTH}] x) => (float[batch,8,{WIDTH}] y) {{
        p = MatMul(x, W)
        q = Add(p, b)
        s = Add(q, x)
        m = ReduceMean<axes=[-1]>(s)
        d = Sub(s, m)
        d2 = Pow(d, two)
        v = ReduceMean<axes=[-1]>(d2)
        ve = Add(v, eps)
        sd = Sqrt(ve)
        n = Div(d, sd)
        g = Mul(n, gamma)
        h = Add(g, beta)
        e = Div(h, root)
        f = Erf(e)
        o = Add(f, one)
        hf = Mul(h, o)
        y = Mul(hf, half)
    }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(
        [
            weight("W", rng.standard_normal((WIDTH, WIDTH)) / 6),
            weight("b", rng.standard_normal(WIDTH)),
            weight("gamma", 1 + 0.3 * rng.standard_normal(WIDTH)),
            weight("beta", rng.standard_normal(WIDTH)),
            weight("two", 2.0),
            weight("eps", 1e-5),
            weight("root", 2**0.5),
            weight("one", 1.0),
            weight("half", 0.5),
        ]
    )
    model.metadata_props.add(key="author", value="tests")
    return model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "block.onnx"
    onnx.save(block(), path)
    return path


def run(path: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


def test_build_makes_an_engine_a_fused_file_and_a_report(model: Path, tmp_path: Path) -> None:
    result = trtfuse.build(model, tmp_path / "b.engine", target="tensorrt-rtx")
    assert result.engine_path == tmp_path / "b.engine"
    assert result.engine_path.stat().st_size > 1000
    assert [s.op for s in result.sites] == ["TrtfuseSkipLayerNorm", "TrtfuseBiasAct"]
    assert result.accuracy is not None
    assert result.accuracy.passed
    assert result.accuracy.inputs >= 3
    report = json.loads((tmp_path / "b.report" / "report.json").read_text())
    assert report["schema"] == "trtfuse/report/1"
    assert report["engine"]["bytes"] == result.engine_path.stat().st_size
    assert report["accuracy"]["fused"]["passed"] is True
    assert report["accuracy"]["engine"]["measured"] is False
    assert report["accuracy"]["engine"]["command"]
    assert (tmp_path / "b.report" / "report.html").exists()
    x = np.random.default_rng(1).standard_normal((2, 8, WIDTH)).astype(np.float32)
    np.testing.assert_allclose(run(tmp_path / "b.fused.onnx", x), run(model, x), rtol=1e-4, atol=1e-5)
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_the_target_onnx_makes_the_fused_file_alone(model: Path, tmp_path: Path) -> None:
    result = trtfuse.build(model, tmp_path / "out.onnx", target="onnx")
    assert result.fused_path == tmp_path / "out.onnx"
    assert result.engine_path is None
    fused = onnx.load(tmp_path / "out.onnx")
    assert [n.op_type for n in fused.graph.node if n.domain == "trtfuse"] == [
        "TrtfuseSkipLayerNorm_bias",
        "TrtfuseBiasAct_gelu",
    ]
    assert [(p.key, p.value) for p in fused.metadata_props] == [("author", "tests")]


def test_the_model_for_the_target_is_raised_to_where_a_norm_is_one_operator(
    model: Path, tmp_path: Path
) -> None:
    result = trtfuse.build(model, tmp_path / "b.engine", target="tensorrt-rtx")
    assert "raised from opset 13 to 20" in " ".join(result.notes)


def test_a_wrong_body_fails_the_gate_and_nothing_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trtfuse.body import Body

    right = Body.layer_norm
    monkeypatch.setattr(Body, "layer_norm", lambda b, x, s, bias, eps: right(b, x, s, bias, eps + 0.05))
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(GateError, match=r"output 'y'.*suspect site TrtfuseSkipLayerNorm_0") as caught:
        trtfuse.build(model, tmp_path / "b.engine", target="tensorrt-rtx")
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_what_was_there_survives_a_failed_gate(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tmp_path / "b.engine"
    engine.write_bytes(b"the old one")
    monkeypatch.setattr(Proof, "gate", lambda *_: (_ for _ in ()).throw(GateError("no")))
    with pytest.raises(GateError):
        trtfuse.build(model, engine, target="tensorrt-rtx")
    assert engine.read_bytes() == b"the old one"


def test_external_data_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sub = tmp_path / "models" / "a"
    sub.mkdir(parents=True)
    onnx.save(block(), sub / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    result = trtfuse.build("../models/a/m.onnx", target="tensorrt-rtx")
    assert result.engine_path is not None
    assert result.engine_path.exists()
    x = np.random.default_rng(1).standard_normal((3, 8, WIDTH)).astype(np.float32)
    expected = run(sub / "m.onnx", x)
    sub.rename(tmp_path / "gone")
    np.testing.assert_allclose(run(elsewhere / "m.fused.onnx", x), expected, rtol=1e-4, atol=1e-5)


def test_fuse_with_external_data_keeps_it_outside_and_stands_alone(tmp_path: Path) -> None:
    sub = tmp_path / "in"
    sub.mkdir()
    onnx.save(block(), sub / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    trtfuse.fuse(sub / "m.onnx", tmp_path / "out.onnx")
    x = np.ones((1, 8, WIDTH), np.float32)
    expected = run(sub / "m.onnx", x)
    sub.rename(tmp_path / "gone")
    np.testing.assert_allclose(run(tmp_path / "out.onnx", x), expected, rtol=1e-4, atol=1e-5)
    assert len(list(tmp_path.glob("out.onnx.*.data"))) == 1


def test_fusing_a_fused_file_changes_nothing(model: Path, tmp_path: Path) -> None:
    trtfuse.fuse(model, tmp_path / "once.onnx")
    trtfuse.fuse(tmp_path / "once.onnx", tmp_path / "twice.onnx")
    assert (tmp_path / "once.onnx").read_bytes() == (tmp_path / "twice.onnx").read_bytes()


def test_a_fused_file_builds_too(model: Path, tmp_path: Path) -> None:
    trtfuse.fuse(model, tmp_path / "fused.onnx")
    result = trtfuse.build(tmp_path / "fused.onnx", tmp_path / "f.engine", target="tensorrt-rtx")
    assert result.engine is not None
    assert [s.op for s in result.sites] == ["TrtfuseSkipLayerNorm", "TrtfuseBiasAct"]


def test_nothing_to_fuse_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Sin", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])],
    )
    onnx.save(helper.make_model(graph, ir_version=8), tmp_path / "m.onnx")
    trtfuse.fuse(tmp_path / "m.onnx", tmp_path / "out.onnx")
    assert onnx.load(tmp_path / "out.onnx") == onnx.load(tmp_path / "m.onnx")


def test_a_selection_file_keeps_what_it_says(model: Path, tmp_path: Path) -> None:
    choice = tmp_path / "choice.json"
    choice.write_text(json.dumps({"schema": "trtfuse/select/1", "ops": {"TrtfuseBiasAct": "keep"}}))
    result = trtfuse.fuse(model, tmp_path / "out.onnx", select=choice)
    assert [s.lowering for s in result.sites] == ["native", "keep"]
    ops = [n.op_type for n in onnx.load(tmp_path / "out.onnx").graph.node]
    assert "Erf" in ops
    assert "TrtfuseSkipLayerNorm_bias" in ops


def test_python_and_command_line_agree(model: Path, tmp_path: Path) -> None:
    trtfuse.fuse(model, tmp_path / "a.onnx")
    subprocess.run([sys.executable, "-m", "trtfuse", "fuse", model, "-o", tmp_path / "b.onnx"], check=True)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


BAD = {
    "missing": (lambda p: None, "there is no file"),
    "folder": (lambda p: p.mkdir(), "is a folder"),
    "empty": (lambda p: p.write_bytes(b""), "holds no ONNX graph"),
    "text": (lambda p: p.write_text("hello, this is no model at all"), "not a whole ONNX model"),
    "truncated": (lambda p: p.write_bytes(block().SerializeToString()[:-700]), "not a whole ONNX model"),
    "unknown-op": (lambda p: _save_with(p, op="Flubber"), "not a valid ONNX model.*Flubber"),
    "no-opset": (lambda p: _save_without_opset(p), "imports no opset"),
    "cycle": (lambda p: _save_cycle(p), "not a valid ONNX model"),
    "missing-external": (lambda p: _save_external(p).unlink(), "keeps the weight .* which is missing"),
    "short-external": (lambda p: os.truncate(_save_external(p), 100), "too short"),
}


def _save_with(path: Path, op: str) -> None:
    model = block()
    model.graph.node[0].op_type = op
    onnx.save(model, path)


def _save_without_opset(path: Path) -> None:
    model = block()
    del model.opset_import[:]
    onnx.save(model, path)


def _save_cycle(path: Path) -> None:
    model = block()
    model.graph.node[0].input[0] = "y"
    onnx.save(model, path)


def _save_external(path: Path) -> Path:
    onnx.save(block(), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    return path.with_name("w.bin")


@pytest.mark.parametrize("command", ["fuse", "build"])
@pytest.mark.parametrize("kind", BAD)
def test_bad_models_are_refused_in_one_line_and_leave_nothing(
    kind: str, command: str, tmp_path: Path
) -> None:
    make, message = BAD[kind]
    path = tmp_path / "m.onnx"
    make(path)
    before = sorted(p.name for p in tmp_path.iterdir())
    work = trtfuse.fuse if command == "fuse" else trtfuse.build
    with pytest.raises(InputError, match=message) as caught:
        work(path, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shapes": ["nope:1x2"]}, "nope"),
        ({"shapes": ["x:1x8x33"]}, "33"),
        ({"shapes": ["x:1x"]}, "x:1x"),
        ({"min_shapes": ["x:4x8x32"], "max_shapes": ["x:2x8x32"]}, "min"),
        ({"select": "no-such.json"}, "no-such.json"),
        ({"precision": "fp16"}, "precision"),
        ({"atol": ["z:1e-3"]}, "'z', which is no output"),
        ({"target": "cuda"}, "no target 'cuda'"),
        ({"compute_capability": ["3.0"]}, "3.0"),
    ],
)
def test_bad_options_are_refused_in_one_line(
    arguments: dict[str, object], message: str, model: Path, tmp_path: Path
) -> None:
    options = {"target": "tensorrt-rtx", **arguments}
    with pytest.raises(InputError, match=message) as caught:
        trtfuse.build(model, tmp_path / "b.engine", **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["block.onnx"]


def test_an_output_folder_that_is_not_there(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no folder"):
        trtfuse.build(model, tmp_path / "no" / "b.engine", target="tensorrt-rtx")


def test_fuse_never_overwrites_its_model(model: Path) -> None:
    with pytest.raises(InputError, match="is the model itself"):
        trtfuse.fuse(model, model)


def test_a_model_in_text_is_refused_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text('{"graph": 3}')
    with pytest.raises(InputError, match="not a whole ONNX model"):
        trtfuse.fuse(tmp_path / "m.json", tmp_path / "o.onnx")


def test_the_model_is_never_the_output(model: Path) -> None:
    with pytest.raises(InputError, match="is the model itself"):
        trtfuse.build(model, model, target="onnx")


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system can be mounted by root only")
def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(block(), path)
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", small], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        (small / "out.onnx").write_bytes(b"old")
        with pytest.raises(InputError, match="No space left"):
            trtfuse.fuse(path, small / "out.onnx")
        assert [p.name for p in small.iterdir()] == ["out.onnx"]
        assert (small / "out.onnx").read_bytes() == b"old"
    finally:
        subprocess.run(["umount", small], check=True)


def test_what_is_there_and_unchanged_is_not_built_again(model: Path, tmp_path: Path) -> None:
    engine = tmp_path / "b.engine"
    first = trtfuse.build(model, engine, target="tensorrt-rtx")
    assert first.up_to_date is None
    stamp = engine.stat().st_mtime_ns
    again = trtfuse.build(model, engine, target="tensorrt-rtx")
    assert again.up_to_date is not None
    assert engine.stat().st_mtime_ns == stamp
    assert again.to_report().engine.sha256 == first.to_report().engine.sha256
    forced = trtfuse.build(model, engine, target="tensorrt-rtx", force=True)
    assert forced.up_to_date is None
    assert engine.stat().st_mtime_ns > stamp


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("model", "the model changed"),
        ("option", "the option --select changed from auto to none|the option --select changed"),
        ("engine", "b.engine was changed since"),
        ("fused", "b.fused.onnx was changed since"),
        ("gone", "b.fused.onnx is gone"),
        ("report", "report.json is gone"),
        ("broken report", "report"),
        ("no manifest", "has no manifest"),
        ("broken manifest", "manifest .* is damaged"),
    ],
)
def test_what_changed_is_why_it_is_built_again(model: Path, tmp_path: Path, change: str, why: str) -> None:
    engine, options = tmp_path / "b.engine", {}
    trtfuse.build(model, engine, target="tensorrt-rtx")
    manifest = tmp_path / "b.engine.manifest.json"
    if change == "model":
        changed = onnx.load(model)
        changed.graph.doc_string = "changed"
        onnx.save(changed, model)
    elif change == "option":
        options = {"select": "none"}
    elif change in ("engine", "fused"):
        path = engine if change == "engine" else tmp_path / "b.fused.onnx"
        path.write_bytes(path.read_bytes() + b" ")
    elif change == "gone":
        (tmp_path / "b.fused.onnx").unlink()
    elif change == "report":
        (tmp_path / "b.report" / "report.json").unlink()
    elif change == "broken report":
        (tmp_path / "b.report" / "report.json").write_text("{")
    elif change == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text("{")
    result = trtfuse.build(model, engine, target="tensorrt-rtx", **options)
    assert result.up_to_date is None
    (note,) = [n for n in result.notes if n.startswith("built again: ")]
    assert re.search(why, note), note
    assert trtfuse.build(model, engine, target="tensorrt-rtx", **options).up_to_date is not None
