"""Builds that are killed, or run beside each other: the old files or the new ones, never some of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from fuzz_files import block

import trtfuse
from trtfuse import manifest

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
ROOT = Path(__file__).resolve().parents[1]
# Ends this process, as nothing can catch it, at the n-th file that is put in place or at a stage's beginning.
KILLED = """
import os, signal, sys
from trtfuse import files, pipeline, stages
place, where = sys.argv[1], sys.argv[2]
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if place == "stage":
    plain = stages.Stages.__call__
    stages.Stages.__call__ = lambda self, name: die() if name == where else plain(self, name)
else:
    left = [int(where)]
    replace = os.replace
    def counted(*paths):
        left[0] -= 1
        return die() if left[0] == 0 else replace(*paths)
    os.replace = counted
pipeline.build("m.onnx", "m.engine", target="tensorrt-rtx", select="none")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with its engine."""
    onnx.save(block(), tmp_path / "m.onnx")
    trtfuse.build(tmp_path / "m.onnx", tmp_path / "m.engine", target="tensorrt-rtx")
    return tmp_path


def start(folder: Path, code: str, *words: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *words]
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE)


def outputs(path: Path) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    x = np.linspace(-2, 2, 32, dtype=np.float32).reshape(2, 16)
    return np.asarray(session.run(None, {"x": x})[0])


STAGES = ["load", "match", "rewrite", "verify", "lower", "build", "write"]


@pytest.mark.parametrize("where", [*(("stage", s) for s in STAGES), *(("put", str(n)) for n in range(1, 9))])
def test_a_build_that_is_killed_leaves_the_old_or_the_new(folder: Path, where: tuple[str, str]) -> None:
    engine, fused = folder / "m.engine", folder / "m.fused.onnx"
    old = {p.name: p.read_bytes() for p in (engine, fused)}
    new_fused = (folder / "m.onnx").read_bytes()  # with nothing selected
    wanted = outputs(folder / "m.onnx")
    process = start(folder, KILLED, *where)
    process.communicate(timeout=120)
    if process.returncode == 0:
        assert where[0] == "put"  # there were not so many
        return
    assert process.returncode == -9
    assert fused.read_bytes() in (old[fused.name], new_fused)
    np.testing.assert_allclose(outputs(fused), wanted, atol=1e-5)
    json.loads((folder / "m.report" / "report.json").read_text())
    described = manifest.read(engine)
    assert described is not None
    is_old = engine.read_bytes() == old[engine.name]
    assert is_old or described.engine.sha256 != manifest.hash_file(engine).sha256 or where[0] == "put"
    again = trtfuse.build(folder / "m.onnx", engine, target="tensorrt-rtx", select="none")
    assert again.up_to_date is None
    assert (
        trtfuse.build(folder / "m.onnx", engine, target="tensorrt-rtx", select="none").up_to_date is not None
    )


def test_two_builds_into_one_place_at_once(folder: Path) -> None:
    code = """
import sys
from trtfuse import pipeline
pipeline.build("m.onnx", "m.engine", target="tensorrt-rtx", select=sys.argv[1], force=True)
"""
    both = [start(folder, code, select) for select in ("none", "all")]
    for process in both:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said.decode()
    described = manifest.read(folder / "m.engine")
    assert described is not None
    assert described.engine.sha256 == manifest.hash_file(folder / "m.engine").sha256
    assert described.fused is not None
    assert described.fused.sha256 == manifest.hash_file(folder / "m.fused.onnx").sha256
    chosen = described.flags["select"]
    is_plain = (folder / "m.fused.onnx").read_bytes() == (folder / "m.onnx").read_bytes()
    assert is_plain == (chosen == "none")
    done = trtfuse.build(folder / "m.onnx", folder / "m.engine", target="tensorrt-rtx", select=chosen)
    assert done.up_to_date is not None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    folder.chmod(0o555)
    try:
        with pytest.raises(trtfuse.InputError, match="cannot write"):
            trtfuse.build(folder / "m.onnx", folder / "other.engine", target="tensorrt-rtx")
    finally:
        folder.chmod(0o755)
