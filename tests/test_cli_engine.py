"""`trtfuse run` and `trtfuse bench`: on a GPU that is not there, and without one."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_gpu import Runtime, TensorRT

from trtfuse import account, benchmark, cli, clocks, cuda, feeds, plugin_library
from trtfuse.benchmark import Outcome
from trtfuse.targets import Plugins, gpu
from trtfuse.targets import tensorrt as target


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine of y = 2 x, x of 1x4 to 8x4, and the machine to run it on."""
    runtime = Runtime()
    trt = TensorRT(runtime)
    monkeypatch.setattr(cuda, "runtime", lambda: runtime)
    monkeypatch.setattr(gpu, "count", lambda: 1)
    monkeypatch.setattr(target, "load", lambda: trt)
    monkeypatch.setattr(plugin_library, "find", lambda: None)
    path = tmp_path / "m.engine"
    path.write_text(json.dumps({"profiles": [[[1, 4], [2, 4], [8, 4]]]}))
    return path


def run(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capfd.readouterr()
    code = cli.run(words)
    out, err = capfd.readouterr()
    return code, out, err


def test_run_shows_and_saves_the_outputs(engine: Path, tmp_path: Path, capfd: Any) -> None:
    x = np.array([[1, 2, 3, np.nan]], np.float32)
    np.savez(tmp_path / "in.npz", x=x)
    saved = tmp_path / "out.npz"
    words = ("run", str(engine), "--load-inputs", str(tmp_path / "in.npz"), "--save-outputs", str(saved))
    code, out, err = run(capfd, *words)
    assert (code, err) == (0, "")
    assert out.splitlines()[1].split() == ["y", "float32", "1x4", "2", "6", "4", "1"]
    np.testing.assert_array_equal(np.load(saved)["y"], 2 * x)
    code, out, _ = run(capfd, "run", str(engine), "--shapes", "x:5x4", "--cuda-graph", "--json")
    made = json.loads(out)
    assert made["schema"] == "trtfuse/run/1"
    assert made["outputs"][0]["y"]["shape"] == [5, 4]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--shapes", "z:1x4"], 2, "--shapes names 'z', and the inputs are x"),
        (["--shapes", "x:9x4"], 2, "has shape 9x4, and the engine takes from 1x4 to 8x4"),
        (["--load-inputs", "absent.npz"], 2, "absent.npz"),
        (["--plugin-library", "absent.so"], 2, "there is no plugin library absent.so"),
    ],
)
def test_run_refuses_in_one_line(engine: Path, capfd: Any, words: list[str], code: int, says: str) -> None:
    have, out, err = run(capfd, "run", str(engine), *words)
    assert (have, out) == (code, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err


def test_inputs_of_another_name_are_refused(engine: Path, tmp_path: Path, capfd: Any) -> None:
    np.savez(tmp_path / "in.npz", z=np.zeros(3, np.float32))
    code, _, err = run(capfd, "run", str(engine), "--load-inputs", str(tmp_path / "in.npz"))
    assert code == 2
    assert "has no input 'x': it has z" in err


@pytest.mark.parametrize("command", ["run", "bench"])
def test_without_a_gpu_the_exit_code_is_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, command: str
) -> None:
    runtime = Runtime()
    monkeypatch.setattr(cuda, "runtime", lambda: runtime)
    monkeypatch.setattr(gpu, "count", lambda: 0)
    (tmp_path / "m.engine").write_text("{}")
    code, out, err = run(capfd, command, str(tmp_path / "m.engine"))
    assert (code, out) == (4, "")
    assert err.startswith("error: an engine runs on an NVIDIA GPU, and the driver shows none here")
    assert err.count("\n") == 1


def test_without_cuda_bindings_the_exit_code_is_4(tmp_path: Path, capfd: Any) -> None:
    try:
        cuda.runtime()
    except Exception:
        (tmp_path / "m.engine").write_text("{}")
        code, _, err = run(capfd, "run", str(tmp_path / "m.engine"))
        assert code == 4
        assert "cuda-bindings, which is missing: pip install 'trtfuse[tensorrt]'" in err
    else:
        pytest.skip("cuda-bindings is installed here")


def measured(order: Any) -> Outcome:
    """The measurement in this process, with a clock that stands still."""
    return benchmark.measure(order)


def test_bench_times_engines_in_turns(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    other = tmp_path / "other.engine"
    other.write_bytes(engine.read_bytes())
    monkeypatch.setattr(benchmark, "run", measured)
    monkeypatch.setattr(clocks.ClockSource, "open", classmethod(lambda cls, bus: None))
    code, out, err = run(capfd, "bench", str(engine), "--against", str(other), "--rounds", "6")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[1][:4] == ["engine", "0.2500", "0.2500", "0.2500"]
    assert lines[2][0] == "other.engine"
    assert lines[2][5] == "1.000"
    assert "inputs to the GPU 0.2500 ms" in out
    assert "NVIDIA H200 (9.0)" in out
    code, out, err = run(capfd, "bench", str(engine), "--rounds", "6", "--no-cuda-graph", "--json")
    assert json.loads(out)["latency_ms"]["engine"]["p50"] == pytest.approx(0.25)
    words = ("bench", str(engine), "--against", str(other), "--rounds", "6", "--minimum-speedup", "1.2")
    code, out, err = run(capfd, *words)
    assert code == 1
    assert "the engine is 1.000 times as fast as other.engine" in err
    code, _, err = run(capfd, "bench", str(engine), "--rounds", "6", "--minimum-speedup", "1.2")
    assert code == 2
    assert "name one with --against" in err


def test_feeds_are_in_the_range_of_what_reads_them() -> None:
    from trtfuse.engine import Tensor

    class Loaded:
        def __init__(self) -> None:
            ids = Tensor("ids", np.dtype(np.int64), (2, 3))
            x = Tensor("x", np.dtype(np.float16), (-1, 4), (((1, 4), (2, 4), (8, 4)),))
            self.inputs = {"ids": ids, "x": x}

        def opt_shapes(self) -> dict[str, tuple[int, ...]]:
            return {"ids": (2, 3), "x": (2, 4)}

    (feed,) = feeds.of(Loaded(), None, [])  # type: ignore[arg-type]
    assert feed["ids"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert (feed["x"].dtype, feed["x"].shape) == (np.float16, (2, 4))


@pytest.mark.parametrize("embedded", [None, True, False])
def test_the_lines_that_load_an_engine_elsewhere(embedded: bool | None) -> None:
    plugins = None if embedded is None else Plugins(Path("/l/lib x.so"), ("s",), embedded)
    trtexec, triton = map(shlex.split, account.deploy_commands("m.engine", plugins, {"x": (1, 3)}))
    assert trtexec[:3] == ["trtexec", "--loadEngine=m.engine", "--shapes=x:1x3"]
    wanted = {
        None: ([], []),
        True: (["--versionCompatible"], ["--backend-config=tensorrt,version-compatible=true"]),
        False: (["--dynamicPlugins=/l/lib x.so"], ["--backend-config=tensorrt,plugins=/l/lib x.so"]),
    }[embedded]
    assert (trtexec[3:], triton[2:]) == wanted
