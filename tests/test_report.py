"""The report's parts, its JSON and its page."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from pydantic import ValidationError

from trtfuse import account, doctor
from trtfuse.errors import InputError
from trtfuse.report import (
    Accuracy,
    EngineInfo,
    Latency,
    OutputAccuracy,
    Report,
    check_folder,
    number,
    saved,
    seconds,
    size,
    to_html,
    write_report,
)


@dataclasses.dataclass(frozen=True)
class FakeSite:
    id: str
    op: str
    variant: str
    nodes: list[str]
    lowering: str = "native"
    reason: str = "the target computes it in one kernel"
    bytes_before: int | None = 4_000_000
    bytes_after: int | None = 1_500_000
    launches_before: int = 9
    launches_after: int = 1
    output: str = "sum"


@dataclasses.dataclass(frozen=True)
class FakeMiss:
    op: str
    node: str
    reason: str


@dataclasses.dataclass(frozen=True)
class FakeEngine:
    data: bytes = b"engine" * 1000
    target: str = "tensorrt-rtx"
    compute_capabilities: tuple[str, ...] = ("SM86", "SM120")
    seconds: float = 1.25
    layers: int = 41
    version: str = "1.7.1"
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class FakeProfile:
    min: dict[str, tuple[int, ...]]
    opt: dict[str, tuple[int, ...]]
    max: dict[str, tuple[int, ...]]

    def chosen(self) -> list[str]:
        return ["ids: min 1x1, opt 1x128, max 8x512"]


PROFILE = FakeProfile(min={"ids": (1, 1)}, opt={"ids": (1, 128)}, max={"ids": (8, 512)})
SITES = [
    FakeSite("skip_layer_norm_0", "TrtfuseSkipLayerNorm", "bias_sum", ["/layer.0/Add", "/layer.0/Pow"]),
    FakeSite("skip_layer_norm_1", "TrtfuseSkipLayerNorm", "bias_sum", ["/layer.1/Add", "/layer.1/Pow"]),
    FakeSite("bias_act_0", "TrtfuseBiasAct", "gelu", ["/act/Erf"], bytes_before=None, bytes_after=None),
]
COMPARED: dict[str, Any] = {
    "passed": True,
    "inputs": 3,
    "notes": ["ONNX Runtime optimizes both alike"],
    "outputs": {
        "hidden": {
            "name": "hidden",
            "dtype": "float32",
            "shape": (1, 8, 384),
            "max_abs": np.float32(2e-6),
            "max_rel": float("inf"),
            "mean_abs": 1e-7,
            "atol": 1e-5,
            "rtol": 1e-5,
            "worst_index": (np.int64(0), 3, 17),
            "worst_expected": 1.5,
            "worst_actual": float("nan"),
            "passed": np.bool_(True),
        }
    },
}


def sample(folder: Path, **changes: Any) -> Report:
    """A report of a build whose files lie in `folder`."""
    model, fused, engine = folder / "my model.onnx", folder / "m.fused.onnx", folder / "m.engine"
    model.write_bytes(b"model")
    fused.write_bytes(b"fused model")
    engine.write_bytes(FakeEngine().data)
    given: dict[str, Any] = {
        "opset": 17,
        "nodes": 120,
        "nodes_after": 60,
        "inputs": [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", None])],
        "outputs": [helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["batch", 8, 384])],
        "sites": SITES,
        "near_misses": [FakeMiss("TrtfuseSoftmax", "/attn/<Softmax>", "its axis is not the last")],
        "fused_path": fused,
        "fused_accuracy": COMPARED,
        "engine_path": engine,
        "engine": FakeEngine(),
        "target": "tensorrt-rtx",
        "profile": PROFILE,
        "timings": {"load": 0.12, "build": 1.3},
        "notes": ["a note with <b>markup</b> & more"],
        "folder": folder,
    }
    return account.make_report(model, **{**given, **changes})


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same report on any machine."""
    monkeypatch.setattr(doctor, "gpus", tuple)


def test_the_keys_of_the_design_are_there(tmp_path: Path) -> None:
    made = json.loads(sample(tmp_path).to_json())
    assert made["schema"] == "trtfuse/report/1"
    assert {"model", "sites", "near_misses", "accuracy", "latency_ms", "engine", "environment"} <= made.keys()
    assert {"path", "sha256", "opset", "nodes"} <= made["model"].keys()
    site_keys = "id op variant nodes lowering reason bytes_before bytes_after launches_before launches_after"
    assert set(site_keys.split()) <= made["sites"][0].keys()
    assert {"path", "target", "bytes", "sha256", "compute_capabilities"} <= made["engine"].keys()
    assert {"engine", "plain", "onnxruntime"} <= made["latency_ms"].keys()
    assert {"versions", "platform", "gpu"} <= made["environment"].keys()
    hidden = made["accuracy"]["fused"]["outputs"]["hidden"]
    assert hidden["max_abs"] == pytest.approx(2e-6)
    assert hidden["max_rel"] == "Infinity"
    assert hidden["worst_actual"] == "NaN"
    assert hidden["worst_index"] == [0, 3, 17]


def test_what_was_not_measured_says_so_and_how_to(tmp_path: Path) -> None:
    report = sample(tmp_path)
    engine = report.accuracy.engine
    assert (engine.measured, engine.passed) == (False, None)
    assert engine.reason == "no NVIDIA GPU on this machine"
    assert engine.command is not None
    assert "--save-outputs" in engine.command
    assert "POLYGRAPHY_USE_TENSORRT_RTX=1 polygraphy run" in engine.command
    names = [name for name, why, command in report.unmeasured() if why and command]
    assert len(names) == 4  # the engine's accuracy and three latencies
    latency = json.loads(report.to_json())["latency_ms"]["engine"]
    assert latency["measured"] is False
    assert latency["p50"] is None


def test_a_rewrite_alone_says_that_nothing_was_compared(tmp_path: Path) -> None:
    report = sample(tmp_path, engine_path=None, engine=None, fused_accuracy=None, profile=None, target=None)
    assert report.engine.reason == "no engine was asked for"
    assert report.accuracy.fused.command is not None
    assert report.accuracy.fused.command.startswith("trtfuse check ")
    assert "'" in report.accuracy.fused.command  # the model's name has a space
    assert report.accuracy.engine.reason == "no engine was built"
    assert "polygraphy" not in (report.accuracy.engine.command or "")
    assert "--target ''" not in report.to_json()


def test_the_target_onnx_has_no_engine(tmp_path: Path) -> None:
    report = sample(tmp_path, engine_path=None, engine=None, target="onnx")
    assert report.engine.reason == "the target onnx makes the fused file only"
    assert report.engine.target == "onnx"
    assert len(report.commands) == 2  # the original, and the fused file against it
    assert report.commands[1].endswith(" --atol hidden:1e-05 --rtol hidden:1e-05")
    given = sample(tmp_path, tolerances=("--atol", "1e-3"))
    assert all(c.endswith(" --atol 1e-3") for c in given.commands[1:])


def test_a_model_changed_on_purpose_is_not_what_its_engine_is_held_against(tmp_path: Path) -> None:
    report = sample(tmp_path, reference=tmp_path / "m.fused.onnx")
    assert len(report.commands) == 2
    assert report.commands[0].startswith(f"polygraphy run {tmp_path / 'm.fused.onnx'} --onnxrt")
    assert "m.engine --trt" in report.commands[1]
    assert "my model" not in (report.accuracy.engine.command or "")


def test_json_round_trip_and_schema(tmp_path: Path) -> None:
    report = sample(tmp_path)
    text = report.to_json()
    assert not re.search(r"\bNaN\b(?!\")", text)
    assert Report.model_validate_json(text) == report
    schema = Report.model_json_schema()
    assert schema["properties"]["schema"]["const"] == "trtfuse/report/1"
    assert {"model", "accuracy", "latency_ms", "engine", "environment"} <= set(schema["required"])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float16("nan"), np.float64(1e-9), 3])
def test_any_number_becomes_json(value: Any) -> None:
    text = OutputAccuracy(passed=False, max_abs=value).model_dump_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_nothing_is_left_to_be_assumed() -> None:
    with pytest.raises(ValidationError, match="needs a reason"):
        Accuracy(measured=False)
    with pytest.raises(ValidationError, match="passed or failed"):
        Accuracy(measured=True)
    with pytest.raises(ValidationError, match="needs a reason"):
        Latency(measured=False)
    with pytest.raises(ValidationError, match="p50, p95 and p99"):
        Latency(measured=True, p50=1.0)
    with pytest.raises(ValidationError, match="needs a reason"):
        EngineInfo()


def test_totals_count_what_is_known(tmp_path: Path) -> None:
    report = sample(tmp_path)
    first, second = report.totals()
    assert (first.op, first.sites, first.bytes_before) == ("TrtfuseSkipLayerNorm", 2, 8_000_000)
    assert (second.op, second.sites, second.sized) == ("TrtfuseBiasAct", 1, 0)
    assert (report.total().launches_before, report.total().launches_after) == (27, 3)


class Page(HTMLParser):
    """Collects what a page would fetch, and checks that its elements close."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith("data:")]
        if tag not in ("meta", "link", "br", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_offline_and_escaped(tmp_path: Path) -> None:
    page = write_report(sample(tmp_path), tmp_path / "deep" / "report")
    text = page.read_text(encoding="utf-8")
    parser = Page()
    parser.feed(text)
    assert parser.open == []
    assert parser.fetched == []
    assert "http" not in text
    assert "<b>markup</b>" not in text
    assert "&lt;b&gt;markup" in text
    assert "attn/<wbr>&lt;Softmax&gt;" in text
    for words in (
        "not measured",
        "no NVIDIA GPU on this machine",
        "TrtfuseSkipLayerNorm",
        "its axis is not",
        "optimizes both",
    ):
        assert words in text
    assert sorted(p.name for p in page.parent.iterdir()) == ["report.html", "report.json"]


def test_pages_of_poor_and_rich_reports_render(tmp_path: Path) -> None:
    poor = sample(
        tmp_path, sites=[], near_misses=[], timings={}, notes=[], profile=None, inputs=[], outputs=[]
    )
    assert "No place in this model fits a fused op." in to_html(poor)
    measured = account.accuracy({"passed": False, "outputs": COMPARED["outputs"], "reason": "hidden is off"})
    latency = Latency(measured=True, p50=1.0, p95=1.1, p99=1.2)
    rich = sample(tmp_path)
    rich = rich.model_copy(
        update={
            "accuracy": rich.accuracy.model_copy(update={"engine": measured}),
            "latency_ms": rich.latency_ms.model_copy(update={"engine": latency}),
        }
    )
    text = to_html(rich)
    assert "hidden is off" in text
    assert "1.000 ms" in text


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(InputError, match="cannot write"):
        write_report(sample(tmp_path), tmp_path / "taken" / "report")
    with pytest.raises(InputError, match="taken is a file"):
        check_folder(tmp_path / "taken" / "report")
    check_folder(tmp_path / "not" / "there" / "yet")
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []


def test_polygraphy_commands_name_everything() -> None:
    shapes = {"a:0": (1, 3)}
    lines = account.polygraphy_commands("m.onnx", "m.bin", "f.onnx", target="tensorrt", shapes=shapes)
    assert lines == [
        "polygraphy run m.onnx --onnxrt --input-shapes 'a:0:[1,3]' --save-outputs outputs.json",
        "polygraphy run m.bin --model-type engine --trt "
        "--input-shapes 'a:0:[1,3]' --load-outputs outputs.json",
        "polygraphy run f.onnx --onnxrt --input-shapes 'a:0:[1,3]' --load-outputs outputs.json",
    ]


def test_numbers_for_people() -> None:
    assert [size(n) for n in (None, 0, 999, 1000, 90_387_606, 2_500_000_000)] == [
        "unknown",
        "0 B",
        "999 B",
        "1.0 kB",
        "90.4 MB",
        "2.5 GB",
    ]
    assert [seconds(s) for s in (None, 0.0012, 0.25, 0.9999, 12.34, 200)] == [
        "unknown",
        "1.2 ms",
        "250 ms",
        "1.0 s",
        "12.3 s",
        "3 min 20 s",
    ]
    assert (number(1.23456e-7), number("NaN"), number(None)) == ("1.23e-07", "NaN", "unknown")
    assert (saved(4, 1), saved(0, 0)) == ("75 %", "")
