"""Damaged models end in one line, or run: scripts/fuzz_files.py in short, and what longer runs found."""

from __future__ import annotations

import sys
from pathlib import Path

import fuzz_files
import onnx
import pytest
from onnx import TensorProto

from trtfuse import model as models
from trtfuse.errors import InputError


@pytest.mark.skipif(sys.platform != "linux", reason="cases are forks")
def test_damaged_models_end_in_one_line_or_run() -> None:
    counts, faults = fuzz_files.fuzz(60, seed=7)
    assert faults == []
    assert counts["2"] > 20  # most damage is seen
    assert counts["0"] > 5  # and some does not matter


def damaged(kind: str) -> bytes:
    model = fuzz_files.block()
    if kind == "bytes":
        model.graph.initializer[0].raw_data += b"1234"
    elif kind == "type":
        model.graph.value_info.add(name="h").type.tensor_type.elem_type = 94
    elif kind == "weight type":
        model.graph.initializer[0].data_type = TensorProto.DOUBLE
    else:
        model.graph.doc_string = "abc"
        return model.SerializeToString().replace(b"abc", b"\xe2bc")
    return model.SerializeToString()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("bytes", "1028 bytes for the weight 'w', and its shape needs 1024"),
        ("type", "gives 'h' the unknown type 94"),
        ("weight type", "not a valid|contradict|needs 2048"),
        ("text", "not UTF-8|not a whole ONNX model"),
    ],
)
def test_what_the_checker_lets_through(kind: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(damaged(kind))
    with pytest.raises(InputError, match=says) as caught:
        models.load(path)
    assert "\n" not in str(caught.value)


def test_the_undamaged_model_is_whole(tmp_path: Path) -> None:
    onnx.checker.check_model(fuzz_files.block(), full_check=True)
