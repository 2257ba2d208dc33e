"""report.json and report.html: what was done to a model, what it gained, how exact it is.

Nothing is left to be assumed: what could not be measured on this machine is there with `measured: false`,
its numbers null, the reason, and the command that measures it where it can.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from trtfuse.errors import InputError
from trtfuse.files import atomic_write, explain_os_error

SCHEMA: Literal["trtfuse/report/1"] = "trtfuse/report/1"
TEMPLATE = "report.html.j2"


def jsonable(value: Any) -> Any:
    """NumPy scalars as Python's; NaN and infinities as words, since JSON has no numbers for them."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


Number = Annotated[Literal["NaN", "Infinity", "-Infinity"] | bool | int | float, BeforeValidator(jsonable)]
"""A number that JSON can hold: finite, or one of three words."""


class Part(BaseModel):
    """Base of the report's parts: frozen, unknown keys refused, so that the schema is exact."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Tensor(Part):
    """An input or output of the model. shape: numbers, or the names of dynamic dimensions (None: unnamed)."""

    name: str
    dtype: str
    shape: list[int | str | None] | None


class ModelInfo(Part):
    """The model as it was given. bytes: of its file alone. nodes_after: nodes of the fused file."""

    path: str
    sha256: str
    bytes: int
    opset: int
    nodes: int
    nodes_after: int | None = None
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []


class File(Part):
    """A file that was written."""

    path: str
    bytes: int
    sha256: str


class Site(Part):
    """One place where a fused op fits. bytes: HBM traffic, None where shapes are unknown."""

    id: str
    op: str
    variant: str = ""
    nodes: list[str]
    lowering: Literal["plugin", "native", "keep"]
    reason: str = ""
    bytes_before: int | None = None
    bytes_after: int | None = None
    launches_before: int
    launches_after: int
    output: str = ""


class NearMiss(Part):
    """A place that nearly fits an op, and the condition that fails."""

    op: str
    node: str
    reason: str


class OutputAccuracy(Part):
    """How far an output is from the reference. The worst element is the one with the largest error."""

    model_config = ConfigDict(extra="allow", frozen=True)  # what other comparisons say of an output is kept

    passed: bool
    max_abs: Number | None = None
    max_rel: Number | None = None
    mean_abs: Number | None = None
    atol: Number | None = None
    rtol: Number | None = None
    dtype: str | None = None
    shape: list[int] | None = None
    worst_index: list[int] | None = None
    worst_expected: Number | str | None = None
    worst_actual: Number | str | None = None


class Accuracy(Part):
    """A comparison with the original in ONNX Runtime, or why there is none and what makes one."""

    measured: bool
    passed: bool | None = None
    inputs: int | None = None
    outputs: dict[str, OutputAccuracy] = {}
    notes: list[str] = []
    reason: str | None = None
    command: str | None = None

    @model_validator(mode="after")
    def _said(self) -> Accuracy:
        if self.measured == (self.passed is None):
            raise ValueError("an accuracy that was measured passed or failed, one that was not did neither")
        if not self.measured and not self.reason:
            raise ValueError("an accuracy that was not measured needs a reason")
        return self


class Latency(Part):
    """Latency in ms: median, 95th and 99th percentile; or why there is none and what measures it."""

    measured: bool
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    throughput: float | None = Field(default=None, description="inferences a second")
    speedup: float | None = Field(default=None, description="of the engine over this one, from paired rounds")
    interval: list[float] | None = Field(default=None, description="of the speedup, 95 %")
    reason: str | None = None
    command: str | None = None

    @model_validator(mode="after")
    def _said(self) -> Latency:
        if self.measured and None in (self.p50, self.p95, self.p99):
            raise ValueError("a latency that was measured has p50, p95 and p99")
        if not self.measured and not self.reason:
            raise ValueError("a latency that was not measured needs a reason")
        return self


class Accuracies(Part):
    """fused: the fused file in ONNX Runtime. engine: the engine on a GPU."""

    fused: Accuracy
    engine: Accuracy


class Latencies(Part):
    """engine: trtfuse's. plain: TensorRT's of the original. onnxruntime: the original on the same GPU."""

    engine: Latency
    plain: Latency
    onnxruntime: Latency
    transfers: list[float] | None = Field(
        default=None, description="inputs in, outputs out; not in the others"
    )
    candidates: dict[str, Latency] = Field(default={}, description="engines that were not taken, by name")
    notes: list[str] = []


class EngineInfo(Part):
    """The engine; path, bytes and sha256 are None where none was built, and `reason` says why."""

    path: str | None = None
    target: str | None = None
    bytes: int | None = None
    sha256: str | None = None
    compute_capabilities: list[str] = []
    version: str | None = None
    layers: int | None = None
    seconds: float | None = None
    reason: str | None = None

    @model_validator(mode="after")
    def _said(self) -> EngineInfo:
        if self.path is None and not self.reason:
            raise ValueError("an engine that was not built needs a reason")
        return self


class Gpu(Part):
    """An NVIDIA GPU. memory: bytes."""

    name: str
    compute_capability: str
    memory: int
    driver: str


class Environment(Part):
    """Where the report was made. versions: of the packages, None where not installed. gpu: none is []."""

    versions: dict[str, str | None]
    platform: str
    python: str
    gpu: list[Gpu]


class ShapeRange(Part):
    """The shapes of one input in the engine's optimization profile."""

    min: list[int]
    opt: list[int]
    max: list[int]


class ProfileInfo(Part):
    """The optimization profile by input. derived: in words, what was chosen because nobody gave it."""

    inputs: dict[str, ShapeRange] = {}
    derived: list[str] = []


class OpTotal(Part):
    """All sites of one op with one lowering. bytes: of the `sized` sites, those whose shapes are known."""

    op: str
    lowering: str
    sites: int
    sized: int
    bytes_before: int
    bytes_after: int
    launches_before: int
    launches_after: int


class Report(Part):
    """report.json. Its JSON schema is `Report.model_json_schema()`."""

    schema_: Literal["trtfuse/report/1"] = Field(default=SCHEMA, alias="schema")
    model: ModelInfo
    fused: File | None = None
    sites: list[Site] = []
    near_misses: list[NearMiss] = []
    accuracy: Accuracies
    latency_ms: Latencies
    engine: EngineInfo
    environment: Environment
    timings: dict[str, float] = Field(default={}, description="seconds of each stage")
    profile: ProfileInfo = ProfileInfo()
    commands: list[str] = Field(default=[], description="what compares the results with other tools")
    deploy: list[str] = Field(default=[], description="what loads the engine in other tools")
    notes: list[str] = []

    def to_json(self) -> str:
        """The report as strict JSON (no NaN), indented, ending in a newline."""
        return self.model_dump_json(by_alias=True, indent=2) + "\n"

    def totals(self) -> list[OpTotal]:
        """The sites by op and lowering, most sites first."""
        groups: dict[tuple[str, str], list[Site]] = {}
        for site in self.sites:
            groups.setdefault((site.op, site.lowering), []).append(site)
        totals = [_total(op, lowering, sites) for (op, lowering), sites in groups.items()]
        return sorted(totals, key=lambda t: (-t.sites, t.op, t.lowering))

    def total(self) -> OpTotal:
        """All sites together."""
        return _total("all", "", self.sites)

    def fused_sites(self) -> int:
        """How many sites are fused; the others are found and kept as they were."""
        return sum(s.lowering != "keep" for s in self.sites)

    def unmeasured(self) -> list[tuple[str, str, str | None]]:
        """What was not measured: what it is, why, and the command that measures it."""
        parts: list[tuple[str, Accuracy | Latency]] = [
            ("accuracy of the fused file", self.accuracy.fused),
            ("accuracy of the engine", self.accuracy.engine),
            ("latency of the engine", self.latency_ms.engine),
            ("latency of plain TensorRT", self.latency_ms.plain),
            ("latency of ONNX Runtime", self.latency_ms.onnxruntime),
        ]
        return [(name, part.reason or "", part.command) for name, part in parts if not part.measured]


def _total(op: str, lowering: str, sites: Sequence[Site]) -> OpTotal:
    sized = [(s.bytes_before, s.bytes_after) for s in sites]
    known = [(before, after) for before, after in sized if before is not None and after is not None]
    return OpTotal(
        op=op,
        lowering=lowering,
        sites=len(sites),
        sized=len(known),
        bytes_before=sum(before for before, _ in known),
        bytes_after=sum(after for _, after in known),
        launches_before=sum(s.launches_before for s in sites),
        launches_after=sum(s.launches_after for s in sites),
    )


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Raises InputError where write_report could not write into `folder`; makes nothing.

    For a look before long work, so that a run does not end without its report.
    """
    there = Path(folder)
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise InputError(f"cannot write the report into {folder}: {there} is a file; name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"cannot write the report into {folder}: {there} is not yours to write to")


def read_report(folder: str | os.PathLike[str]) -> Report:
    """The report.json in `folder`. Raises InputError where it is missing or of another kind."""
    path = Path(folder) / "report.json"
    try:
        return Report.model_validate_json(path.read_bytes())
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror or e}; build again") from e
    except ValueError as e:
        raise InputError(f"{path} is no report of this version: build again") from e


def write_report(report: Report, folder: str | os.PathLike[str]) -> Path:
    """Writes report.json and report.html into `folder`, which is made where it is not there.

    Returns the path of report.html. Raises InputError when the folder cannot be made or written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise explain_os_error(folder, e) from e
    page = to_html(report)
    with atomic_write(folder / "report.json", "w") as f:
        f.write(report.to_json())
    with atomic_write(folder / "report.html", "w") as f:
        f.write(page)
    return folder / "report.html"


def to_html(report: Report) -> str:
    """The page: one file, nothing fetched from anywhere."""
    return str(_template().render(r=report, totals=report.totals(), total=report.total()))


@functools.cache
def _template() -> Any:
    import jinja2

    env = jinja2.Environment(
        loader=jinja2.PackageLoader("trtfuse", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    env.filters.update(size=size, number=number, seconds=seconds, breakable=_breakable, saved=saved)
    return env.get_template(TEMPLATE)


def size(count: int | None) -> str:
    """A number of bytes for people: "1.5 MB" (powers of 1000)."""
    if count is None:
        return "unknown"
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def number(value: float | str | None) -> str:
    """An error or tolerance for people: three digits."""
    if value is None:
        return "unknown"
    if isinstance(value, str):
        return value
    return f"{value:.3g}"


def seconds(value: float | None) -> str:
    """A duration for people: "820 ms", "2.4 s", "3 min 20 s"."""
    if value is None:
        return "unknown"
    if value < 0.9995:
        return f"{value * 1000:.0f} ms" if value >= 0.0095 else f"{value * 1000:.1f} ms"
    if value < 100:
        return f"{value:.1f} s"
    return f"{int(value) // 60} min {int(value) % 60} s"


def saved(before: int, after: int) -> str:
    """The part that is saved, "62 %"; "" where there was nothing."""
    return f"{100 * (before - after) / before:.0f} %" if before else ""


def _breakable(text: str) -> Any:
    """Text with places where a browser may break it: long tensor names and paths have no spaces."""
    from markupsafe import Markup, escape

    pieces: Iterable[str] = re.split(r"(?<=[/_.:,])", text)
    return Markup("<wbr>").join(escape(piece) for piece in pieces)
