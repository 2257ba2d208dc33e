"""The command line: exit codes, one-line errors, clean stdout, what is shown."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_report import COMPARED, FakeSite, sample
from typer.testing import CliRunner

import trtfuse
from trtfuse import cli, doctor
from trtfuse.errors import BuildError, EnvironmentMissing, GateError, InputError

ROOT = Path(__file__).resolve().parents[1]


class FakeResult:
    """What pipeline functions return, as far as the command line reads it."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.report_dir: Path | None = folder / "report"
        self.report = sample(folder, **changes)
        self.up_to_date: Any = None
        self.engine_path = folder / "m.engine"

    def to_report(self) -> Any:
        return self.report


class FakeAccuracy:
    """What pipeline.check returns."""

    inputs = 3

    def __init__(self, passed: bool, reason: str | None = None) -> None:
        self.passed, self.reason = passed, reason

    def to_dict(self) -> dict[str, Any]:
        outputs = {name: {**o, "passed": self.passed} for name, o in COMPARED["outputs"].items()}
        return {"passed": self.passed, "outputs": outputs, "reason": self.reason}


class FakePipeline(types.ModuleType):
    """Takes the place of the pipeline; remembers the last call; libraries chatter on every stream."""

    def __init__(self, folder: Path) -> None:
        super().__init__("trtfuse.pipeline")
        self.folder = folder
        self.call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.answer: Any = None

    def __getattr__(self, name: str) -> Any:
        if name not in ("build", "fuse", "explain", "check"):
            raise AttributeError(name)

        def called(*args: Any, **options: Any) -> Any:
            self.call = (args, options)
            os.write(1, b"native chatter\n")
            os.write(2, b"native chatter\n")
            print("python chatter")
            print("python chatter", file=sys.stderr)
            options["progress"]("load", 0, 0)
            options["progress"]("tactics", 1, 2)
            if isinstance(self.answer, BaseException):
                raise self.answer
            return self.answer if self.answer is not None else FakeResult(self.folder)

        return called


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePipeline:
    fake = FakePipeline(tmp_path)
    monkeypatch.setattr(trtfuse, "pipeline", fake, raising=False)
    monkeypatch.setattr(doctor, "gpus", tuple)
    return fake


Outcome = tuple[int, str, str]
Run = Callable[..., Outcome]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process: exit code, stdout, stderr."""

    def runs(*arguments: str) -> Outcome:
        capfd.readouterr()
        code = cli.run(arguments)
        sys.stdout.flush()
        out, err = capfd.readouterr()
        return code, out, err

    return runs


def trtfuse_process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "trtfuse.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, **options)


def is_one_line(err: str) -> bool:
    return err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["frobnicate"], "No such command 'frobnicate'; see trtfuse --help"),
        (["build"], "Missing argument 'MODEL'; see trtfuse build --help"),
        (["build", "m.onnx", "--nope"], "--nope"),
        (["build", "m.onnx", "--qdq", "maybe"], "'auto', 'keep', 'drop'"),
        (["build", "m.onnx", "--target", "cuda"], "'tensorrt-rtx'"),
        (["build", "m.onnx", "n.onnx"], "n.onnx"),
        (["build", "m.onnx", "-o"], "-o"),
        (["build", "m.onnx", "--precision", "fp16"], "use keep"),
        (["build", "m.onnx", "--select", "absent.json"], "absent.json: no such file"),
        (["fuse", "m.onnx"], "--output"),
        (["check", "a.onnx"], "Missing argument 'B'"),
    ],
)
def test_a_usage_error_is_one_line(run: Run, pipeline: FakePipeline, arguments: list[str], says: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert is_one_line(err)
    assert says in err
    assert "Value error" not in err


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (GateError("output y differs\nby 0.3"), 1, "error: output y differs by 0.3\n"),
        (InputError("no such file: m.onnx"), 2, "error: no such file: m.onnx\n"),
        (BuildError("the parser refuses Foo"), 3, "error: the parser refuses Foo\n"),
        (EnvironmentMissing("pip install tensorrt-rtx"), 4, "error: pip install tensorrt-rtx\n"),
        (OSError(28, "No space left on device", "/full/x"), 2, "No space left on device; make room"),
        (MemoryError(), 4, "out of memory"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (ZeroDivisionError("a\nb"), 3, "internal error: ZeroDivisionError: a b; run with -vv"),
    ],
)
@pytest.mark.parametrize("command", ["build m.onnx", "fuse m.onnx -o o.onnx", "explain m.onnx", "check a b"])
def test_exit_codes(
    run: Run, pipeline: FakePipeline, command: str, error: BaseException, code: int, says: str
) -> None:
    pipeline.answer = error
    got, out, err = run(*command.split())
    assert (got, out) == (code, "")
    assert is_one_line(err)
    assert says in err


def test_vv_adds_the_traceback(run: Run, pipeline: FakePipeline) -> None:
    pipeline.answer = ValueError("odd")
    code, _, err = run("build", "m.onnx", "-vv")
    assert code == 3
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: internal error: ValueError: odd")
    assert cli.verbosity(["build", "-qv", "--verbose", "-o", "--", "x"]) == 2


def test_a_broken_pipe_is_silent(run: Run, pipeline: FakePipeline) -> None:
    process = subprocess.Popen(
        f"{sys.executable} -m trtfuse.cli --help; echo code $? >&2",
        shell=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == "code 141\n"
    process.wait()


def test_build_hands_every_option_on(run: Run, pipeline: FakePipeline, tmp_path: Path) -> None:
    selection = tmp_path / "selection.json"
    selection.write_text("[]")
    words = f"""build m.onnx -o m.engine --target tensorrt-rtx --shapes x:1x3 --min-shapes x:[1,2] y:1
        --opt-shapes x:1x2 --max-shapes x:[1,9],y:4 --select {selection} --qdq drop
        --compute-capability 8.6 12.0 --atol 1e-5 out:1e-3 --rtol=1e-4 a:b:2 --check-error-stat max out:mean
        --load-inputs in.npz --timing-cache t.cache --report r --tf32 --external-plugins --no-measure
        --force"""
    code, _, err = run(*words.split())
    assert (code, err) == (0, "")
    (model, output), options = pipeline.call
    assert (model, output) == (Path("m.onnx"), Path("m.engine"))
    assert callable(options.pop("progress"))
    assert options == {
        "target": "tensorrt-rtx",
        "precision": "keep",
        "shapes": ["x:1x3"],
        "min_shapes": ["x:[1,2]", "y:1"],
        "opt_shapes": ["x:1x2"],
        "max_shapes": ["x:[1,9],y:4"],
        "select": str(selection),
        "qdq": "drop",
        "tf32": True,
        "compute_capability": ("8.6", "12.0"),
        "external_plugins": True,
        "atol": ["1e-5", "out:1e-3"],
        "rtol": ["1e-4", "a:b:2"],
        "check_error_stat": ["max", "out:mean"],
        "load_inputs": Path("in.npz"),
        "timing_cache": Path("t.cache"),
        "measure": False,
        "report": Path("r"),
        "force": True,
        "verbose": False,
    }


def test_a_model_may_follow_an_option_of_several_values() -> None:
    assert cli.expand(["build", "--atol", "1e-5", "out:1e-3", "m.onnx"]) == [
        *["build", "--atol", "1e-5", "--atol", "out:1e-3", "m.onnx"]
    ]
    assert cli.expand(["--shapes", "x:[1,2]", "a/b:0:1x3", "m.onnx", "--", "--atol", "1", "2"]) == [
        *["--shapes", "x:[1,2]", "--shapes", "a/b:0:1x3", "m.onnx", "--", "--atol", "1", "2"]
    ]
    assert cli.expand(["--atol"]) == ["--atol"]
    assert cli.expand(["--select", "all", "1e-5"]) == ["--select", "all", "1e-5"]


def test_build_shows_what_was_done(run: Run, pipeline: FakePipeline, tmp_path: Path) -> None:
    code, out, err = run("build", "m.onnx")
    assert (code, err) == (0, "")
    assert "chatter" not in out
    assert re.search(r"TrtfuseSkipLayerNorm +native +2 +18 -> 2 +8.0 MB +3.0 MB +62 %", out)
    assert "fused file: passed on 3 inputs" in out
    assert re.search(r"^  hidden  float32 1x8x384 +2e-06 +Infinity ", out, re.MULTILINE)
    assert "engine: accuracy not measured here: no NVIDIA GPU on this machine; measure it with the" in out
    assert "engine: latency not measured here: no NVIDIA GPU on this machine; measure it with:" in out
    assert "shapes chosen: ids: min 1x1" in out
    assert "stages:  load 120 ms, build 1.3 s" in out
    assert f"engine:  {tmp_path / 'm.engine'} (6.0 kB, tensorrt-rtx 1.7.1, for SM86, SM120)" in out
    assert f"report:  {tmp_path / 'report' / 'report.html'}" in out
    assert f"  polygraphy run '{tmp_path / 'my model.onnx'}' --onnxrt" in out
    assert f"  POLYGRAPHY_USE_TENSORRT_RTX=1 polygraphy run {tmp_path / 'm.engine'} --trt" in out
    assert "\x1b" not in out


def test_a_build_with_nothing_to_do_says_so(run: Run, pipeline: FakePipeline, tmp_path: Path) -> None:
    pipeline.answer = FakeResult(tmp_path)
    pipeline.answer.up_to_date = pipeline.answer.report
    code, out, err = run("build", "m.onnx")
    assert (code, err) == (0, "")
    assert out.startswith(f"up to date: {tmp_path / 'm.engine'} (--force builds it again)\n")


@pytest.mark.parametrize("command", ["build m.onnx", "fuse m.onnx -o o.onnx", "explain m.onnx"])
def test_json_is_all_of_stdout(run: Run, pipeline: FakePipeline, command: str) -> None:
    code, out, err = run(*command.split(), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["schema"] == "trtfuse/report/1"
    code, out, err = run(*command.split(), "--json", "-v")
    assert json.loads(out)["sites"][0]["id"] == "skip_layer_norm_0"
    assert "native chatter" in err


def test_quiet_prints_nothing(run: Run, pipeline: FakePipeline) -> None:
    assert run("build", "m.onnx", "-q") == (0, "", "")
    assert run("fuse", "m.onnx", "-o", "o.onnx", "-q") == (0, "", "")


def test_fuse_is_one_line(run: Run, pipeline: FakePipeline, tmp_path: Path) -> None:
    code, out, err = run("fuse", "m.onnx", "-o", "o.onnx", "--verify")
    expected = "3 sites fused (2 TrtfuseSkipLayerNorm, 1 TrtfuseBiasAct)"
    assert (code, out, err) == (0, f"{expected}: {tmp_path / 'm.fused.onnx'}; accuracy passed\n", "")
    args, options = pipeline.call
    assert args == (Path("m.onnx"), Path("o.onnx"))
    assert (options["select"], options["verify"]) == ("all", True)
    pipeline.answer = FakeResult(tmp_path, sites=[], fused_accuracy=None)
    assert run("fuse", "m.onnx", "-o", "o.onnx")[1] == f"0 sites fused: {tmp_path / 'm.fused.onnx'}\n"


def test_explain_shows_sites_and_near_misses_in_full(
    run: Run, pipeline: FakePipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    nodes = [f"/encoder/a [bold]long[/bold] name/{i}" for i in range(30)]
    pipeline.answer = FakeResult(tmp_path, sites=[FakeSite("s0", "TrtfuseBiasAct", "gelu", nodes)])
    code, out, err = run("explain", "m.onnx", "--shapes", "x:1x3")
    assert (code, err) == (0, "")
    assert nodes[-1] in out
    assert "all nodes by name: --json" in out
    assert "/attn/<Softmax>" in out
    assert "its axis is not the last" in out
    assert pipeline.call[1]["shapes"] == ["x:1x3"]
    pipeline.answer = FakeResult(tmp_path, sites=[], near_misses=[])
    assert "no sites found" in run("explain", "m.onnx")[1]


def test_check_passes_and_fails(run: Run, pipeline: FakePipeline) -> None:
    pipeline.answer = FakeAccuracy(True)
    code, out, err = run("check", "a.onnx", "b.onnx", "--atol", "1e-3")
    assert (code, err) == (0, "")
    assert "accuracy: passed on 3 inputs" in out
    pipeline.answer = FakeAccuracy(False)
    code, out, err = run("check", "a.onnx", "b.onnx")
    assert code == 1
    assert "FAILED" in out
    assert is_one_line(err)
    assert "b.onnx does not give what a.onnx gives: hidden differs" in err
    code, out, err = run("check", "a.onnx", "b.onnx", "--json")
    assert code == 1
    assert json.loads(out)["outputs"]["hidden"]["max_rel"] == "Infinity"


def test_doctor_ends_with_4_where_nothing_builds(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    good = doctor.Check("onnx", True, "1.23", needed=True)
    bad = doctor.Check("tensorrt-rtx", False, "not installed", "pip install tensorrt-rtx")
    monkeypatch.setattr(doctor, "gpus", tuple)
    monkeypatch.setattr(doctor, "examine", lambda: [good, bad])
    code, out, err = run("doctor")
    assert code == 4
    assert "-> pip install tensorrt-rtx" in out
    assert is_one_line(err)
    assert err.rstrip().endswith("for want of tensorrt-rtx: pip install tensorrt-rtx")
    works = doctor.Check("tensorrt-rtx", True, "1.7: builds engines")
    monkeypatch.setattr(doctor, "examine", lambda: [good, works])
    code, out, err = run("doctor", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["builds_engines"] is True


def test_help_and_version_load_nothing_heavy() -> None:
    heavy = [
        "onnx",
        "onnxruntime",
        "onnx_graphsurgeon",
        "polygraphy",
        "tensorrt_rtx",
        "tensorrt",
        "numpy",
    ]
    for arguments in (["--help"], ["--version"], ["build", "--help"], []):
        code = (
            "import sys; from trtfuse import cli; code = cli.run(sys.argv[1:]);"
            f"print([m for m in {heavy} if m in sys.modules], code, file=sys.stderr)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout=60,
        )
        assert done.stderr == "[] 0\n", arguments
        assert done.stdout.startswith("trtfuse " if "--version" in arguments else "Usage: trtfuse")
    for name in ("build", "fuse", "explain", "check", "doctor"):
        assert re.search(rf"^  {name} ", trtfuse_process().stdout, re.MULTILINE)


def test_the_app_answers_typers_own_runner() -> None:
    answer = CliRunner().invoke(cli.app, ["--version"])
    assert answer.exit_code == 0
    assert answer.stdout.startswith("trtfuse ")


PROGRAM = """
import sys, time, types
import trtfuse
from trtfuse import cli
from trtfuse.errors import InputError
def build(*args, progress, **options):
    print("chatter"); print("chatter", file=sys.stderr)
    progress("loading", 0, 0); time.sleep(0.3)
    progress("tactics", 1, 2); time.sleep(0.3)
    progress("tactics", 2, 2)
    raise InputError("enough")
trtfuse.pipeline = types.SimpleNamespace(build=build)
cli.main(["build", "m.onnx"])
"""


def test_progress_is_drawn_on_a_terminal_only() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    piped = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=60
    )
    assert (piped.returncode, piped.stdout, piped.stderr) == (2, "", "error: enough\n")
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    while True:
        try:
            block = os.read(ours, 4096)
        except OSError:  # how Linux says that the other end is closed
            break
        if not block:
            break
        seen += block
    os.close(ours)
    assert process.wait(timeout=60) == 2
    assert b"loading" in seen
    assert b"tactics" in seen
    assert b"chatter" not in seen
    assert b"error:" in seen
    assert b"Traceback" not in seen


def test_termination_runs_the_clean_up(tmp_path: Path) -> None:
    program = """
import os, sys, time, types
import trtfuse
from trtfuse import cli
from trtfuse.files import atomic_write
def fuse(model, output, **options):
    with atomic_write(output) as f:
        f.write(b"half")
        open("started", "w").close()
        time.sleep(30)
trtfuse.pipeline = types.SimpleNamespace(fuse=fuse)
cli.main(["fuse", "m.onnx", "-o", "out.onnx"])
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=environment)
    while not (tmp_path / "started").exists():
        assert process.poll() is None
    process.terminate()
    assert process.wait(timeout=30) == 143
    assert [p.name for p in tmp_path.iterdir()] == ["started"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """x + bias through an erf GELU, as PyTorch's older exporter spells it; a dynamic batch."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
    chain (float[batch, 8] x) => (float[batch, 8] y)
    <float[8] bias = {0.1, -0.2, 0.3, 0.4, -0.5, 0.6, 0.7, -0.8},
     float root = {1.4142135}, float one = {1.0}, float half = {0.5}>
    {
        b = Add (x, bias)
        d = Div (b, root)
        e = Erf (d)
        p = Add (e, one)
        m = Mul (b, p)
        y = Mul (m, half)
    }"""
    import onnx
    from onnx import parser

    path = tmp_path / "chain.onnx"
    onnx.save(parser.parse_model(text), path)
    return path


def test_a_real_model_is_fused_explained_and_checked(model: Path) -> None:
    fused = model.with_name("fused.onnx")
    done = trtfuse_process("fuse", str(model), "-o", str(fused))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"1 site fused (1 TrtfuseBiasAct): {fused}\n"
    done = trtfuse_process("check", str(model), str(fused))
    assert (done.returncode, done.stderr) == (0, "")
    assert "accuracy: passed on 3 inputs" in done.stdout
    done = trtfuse_process("explain", str(model), "--json", "--shapes", "x:4x8")
    assert (done.returncode, done.stderr) == (0, "")
    site = json.loads(done.stdout)["sites"][0]
    assert (site["op"], site["launches_after"]) == ("TrtfuseBiasAct", 1)
    assert site["bytes_before"] > site["bytes_after"] > 0


def test_a_real_model_is_built(model: Path) -> None:
    if not doctor.builds_engines(doctor.examine()):
        pytest.skip("no engine can be built on this machine")
    done = trtfuse_process("build", "chain.onnx", cwd=model.parent)
    assert (done.returncode, done.stderr) == (0, "")
    folder = model.parent
    made = json.loads((folder / "chain.report" / "report.json").read_text())
    assert made["accuracy"]["fused"]["passed"] is True
    assert made["engine"]["bytes"] == (folder / "chain.engine").stat().st_size
    assert made["profile"]["inputs"]["x"]["min"][1] == 8
    assert "shapes chosen: x:" in done.stdout
    assert sorted(p.name for p in folder.iterdir()) == [
        "chain.engine",
        "chain.engine.manifest.json",
        "chain.fused.onnx",
        "chain.onnx",
        "chain.report",
    ]


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08\x08\x12\x03abc:\x05"])
def test_what_is_no_model_leaves_nothing_behind(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.onnx").write_bytes(content)
    for command in (["fuse", "bad.onnx", "-o", "out.onnx"], ["build", "bad.onnx"], ["explain", "bad.onnx"]):
        done = trtfuse_process(*command, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stdout == ""
        assert is_one_line(done.stderr)
        assert [p.name for p in tmp_path.iterdir()] == ["bad.onnx"]
