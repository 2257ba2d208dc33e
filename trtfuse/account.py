"""A run's account of itself: from what was done to the parts of the report.

What a run leaves out was not done or not measured on this machine; here it gets its reason and the command
that does it where it can be done.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trtfuse import doctor
from trtfuse.errors import InputError
from trtfuse.report import (
    Accuracies,
    Accuracy,
    EngineInfo,
    Environment,
    File,
    Gpu,
    Latencies,
    Latency,
    ModelInfo,
    NearMiss,
    OutputAccuracy,
    ProfileInfo,
    Report,
    ShapeRange,
    Site,
    Tensor,
    jsonable,
)

if TYPE_CHECKING:
    from onnx import ValueInfoProto

    from trtfuse.benchmark import Outcome
    from trtfuse.targets import Plugins

PACKAGES = (
    "trtfuse",
    "onnx",
    "onnxruntime-gpu",
    "onnxruntime",
    "onnx-graphsurgeon",
    "polygraphy",
    "tensorrt-rtx",
    "tensorrt",
    "numpy",
)


def accuracy(compared: Mapping[str, Any], inputs: int | None = None) -> Accuracy:
    """The report's part for a comparison's `to_dict()`: keys passed, outputs{name: {...}}, perhaps reason."""
    outputs = {name: OutputAccuracy.model_validate(_plain(o)) for name, o in compared["outputs"].items()}
    return Accuracy(
        measured=True,
        passed=bool(compared["passed"]),
        inputs=compared.get("inputs", inputs),
        outputs=outputs,
        notes=list(compared.get("notes", ())),
        reason=compared.get("reason"),
    )


class SiteLike(Protocol):
    """What a result says of a site; see `Site`."""

    @property
    def id(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def variant(self) -> str: ...
    @property
    def nodes(self) -> Sequence[str]: ...
    @property
    def lowering(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def bytes_before(self) -> int | None: ...
    @property
    def bytes_after(self) -> int | None: ...
    @property
    def launches_before(self) -> int: ...
    @property
    def launches_after(self) -> int: ...
    @property
    def output(self) -> str: ...


class NearMissLike(Protocol):
    """What a result says of a near miss; see `NearMiss`."""

    @property
    def op(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def reason(self) -> str: ...


def make_report(
    model: str | os.PathLike[str],
    *,
    opset: int,
    nodes: int,
    nodes_after: int | None = None,
    inputs: Iterable[ValueInfoProto] = (),
    outputs: Iterable[ValueInfoProto] = (),
    sites: Iterable[SiteLike] = (),
    near_misses: Iterable[NearMissLike] = (),
    fused_path: str | os.PathLike[str] | None = None,
    fused_accuracy: Mapping[str, Any] | None = None,
    engine_path: str | os.PathLike[str] | None = None,
    engine: Any = None,
    engine_accuracy: Mapping[str, Any] | None = None,
    outcome: Outcome | None = None,
    plugins: Plugins | None = None,
    target: str | None = None,
    profile: Any = None,
    tolerances: Sequence[str] = (),
    timings: Mapping[str, float] | None = None,
    notes: Sequence[str] = (),
    folder: str | os.PathLike[str] | None = None,
    reference: str | os.PathLike[str] | None = None,
) -> Report:
    """The report of one run. What is left out was not done or not measured, and the report says so.

    fused_accuracy, engine_accuracy: an Accuracy's `to_dict()`. engine: a targets.Plan. outcome: the times.
    plugins: in the engine. profile: a shapes.Profile. target: the concrete one. tolerances: the user's, as
    Polygraphy's words; by default those of fused_accuracy. folder: where the report goes; the printed
    commands write their outputs there.
    reference: what they compare with, by default the model; the fused file where the model was changed on
    purpose (quantization taken out), since no engine of it can then give what the model gives.
    """
    opt = dict(profile.opt) if profile is not None else None
    saved_to = Path(folder, "outputs.json") if folder is not None else Path("outputs.json")
    if engine_path is None and (target != "onnx" or fused_path is None):
        target = None  # nothing was made for it
    reference = model if reference is None else reference
    commands = polygraphy_commands(
        reference,
        engine_path,
        fused_path if fused_path != reference else None,
        target=target or "",
        outputs=saved_to,
        shapes=opt,
        tolerances=tolerances or _tolerances(fused_accuracy),
    )
    why = _why_engine_unmeasured(target, engine_path)
    latencies = unmeasured_latencies(
        why, model, engine_path, target=target or "", shapes=opt, profiled=_profile_words(profile)
    )
    return Report(
        model=ModelInfo(
            path=str(model),
            sha256=sha256(model),
            bytes=os.path.getsize(model),
            opset=opset,
            nodes=nodes,
            nodes_after=nodes_after,
            inputs=[_tensor(i) for i in inputs],
            outputs=[_tensor(o) for o in outputs],
        ),
        fused=file_info(fused_path) if fused_path is not None else None,
        sites=[_site(s) for s in sites],
        near_misses=[NearMiss(op=m.op, node=m.node, reason=m.reason) for m in near_misses],
        accuracy=Accuracies(
            fused=_fused_accuracy(fused_accuracy, model, fused_path),
            engine=_engine_accuracy(engine_accuracy, why, commands if engine_path is not None else [], model),
        ),
        latency_ms=latencies if outcome is None else _latencies(outcome, latencies),
        engine=_engine_info(engine, engine_path, target),
        environment=environment(),
        timings=dict(timings or {}),
        profile=_profile(profile),
        commands=commands if len(commands) > 1 else [],
        deploy=deploy_commands(engine_path, plugins, opt) if target == "tensorrt" and engine_path else [],
        notes=list(notes),
    )


def _tolerances(compared: Mapping[str, Any] | None) -> list[str]:
    """The tolerances of a comparison as Polygraphy's words: its own defaults are tighter than rounding."""
    words: list[str] = []
    for name in ("atol", "rtol"):
        outputs = compared["outputs"].items() if compared is not None else ()
        values = [f"{output}:{o[name]:.3g}" for output, o in outputs if o.get(name) is not None]
        words += [f"--{name}", *values] if values else []
    return words


def _site(site: SiteLike) -> Site:
    return Site.model_validate({name: _plain(getattr(site, name)) for name in Site.model_fields})


def _tensor(value: ValueInfoProto) -> Tensor:
    import onnx

    kind = value.type.WhichOneof("value") or "unknown"
    if kind != "tensor_type":
        return Tensor(name=value.name, dtype=kind.removesuffix("_type"), shape=None)
    tensor = value.type.tensor_type
    dims = [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim]
    dtype = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    return Tensor(name=value.name, dtype=dtype, shape=dims if tensor.HasField("shape") else None)


def _profile_words(profile: Any) -> list[str]:
    """A profile as options of `trtfuse build`."""
    words: list[str] = []
    for option in ("min", "opt", "max"):
        shapes = dict(getattr(profile, option)) if profile is not None else {}
        if shapes:
            words += [f"--{option}-shapes", *(f"{n}:[{','.join(map(str, s))}]" for n, s in shapes.items())]
    return words


def _profile(profile: Any) -> ProfileInfo:
    if profile is None:
        return ProfileInfo()
    ranges = {
        name: ShapeRange(
            min=list(profile.min[name]), opt=list(profile.opt[name]), max=list(profile.max[name])
        )
        for name in profile.opt
    }
    return ProfileInfo(inputs=ranges, derived=list(profile.chosen()))


def _engine_info(engine: Any, path: str | os.PathLike[str] | None, target: str | None) -> EngineInfo:
    if path is None or engine is None:
        why = "the target onnx makes the fused file only" if target == "onnx" else "no engine was asked for"
        return EngineInfo(target=target, reason=why)
    return EngineInfo(
        path=str(path),
        target=engine.target,
        bytes=len(engine.data),
        sha256=hashlib.sha256(engine.data).hexdigest(),
        compute_capabilities=list(engine.compute_capabilities),
        version=engine.version,
        layers=engine.layers,
        seconds=engine.seconds,
    )


def _fused_accuracy(
    compared: Mapping[str, Any] | None,
    model: str | os.PathLike[str],
    fused: str | os.PathLike[str] | None,
) -> Accuracy:
    if compared is not None:
        return accuracy(compared)
    if fused is None:
        command = shlex.join(["trtfuse", "build", str(model)])
        return Accuracy(measured=False, reason="no fused file was written", command=command)
    command = shlex.join(["trtfuse", "check", str(model), str(fused)])
    return Accuracy(measured=False, reason="the model was rewritten and not compared", command=command)


def _why_engine_unmeasured(target: str | None, engine: str | os.PathLike[str] | None) -> str:
    if target == "onnx":
        return "the target onnx makes no engine"
    if engine is None:
        return "no engine was built"
    if not doctor.gpus():
        return "no NVIDIA GPU on this machine"
    if target == "tensorrt-rtx":
        return "engines of TensorRT-RTX are built here and not run"
    return "it was not asked for"


def _engine_accuracy(
    compared: Mapping[str, Any] | None, why: str, commands: list[str], model: str | os.PathLike[str]
) -> Accuracy:
    """commands: what compares the engine, none where there is no engine."""
    if compared is not None:
        return accuracy(compared)
    command = " && ".join(commands[:2]) or shlex.join(["trtfuse", "build", str(model)])
    return Accuracy(measured=False, reason=why, command=command)


def _plain(value: Any) -> Any:
    """Containers and scalars of NumPy as JSON's."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if k != "name"}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return jsonable(value)


def sha256(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file in hexadecimal. Raises InputError when it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as f:
            while block := f.read(1 << 20):
                digest.update(block)
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror or e}; check the path and its rights") from e
    return digest.hexdigest()


def file_info(path: str | os.PathLike[str]) -> File:
    """The report's part for a file that was written."""
    return File(path=str(path), sha256=sha256(path), bytes=os.path.getsize(path))


def environment() -> Environment:
    """This machine: versions of the packages, platform, GPUs."""
    return Environment(
        versions={name: doctor.version_of(name) for name in PACKAGES},
        platform=platform.platform(),
        python=platform.python_version(),
        gpu=[
            Gpu(name=g.name, compute_capability=g.compute_capability, memory=g.memory, driver=g.driver)
            for g in doctor.gpus()
        ],
    )


def polygraphy_commands(
    model: str | os.PathLike[str],
    engine: str | os.PathLike[str] | None = None,
    fused: str | os.PathLike[str] | None = None,
    *,
    target: str = "tensorrt-rtx",
    outputs: str | os.PathLike[str] = "outputs.json",
    shapes: Mapping[str, Sequence[int]] | None = None,
    tolerances: Sequence[str] = (),
) -> list[str]:
    """The command lines that compare a model's results with its engine's and its fused file's by Polygraphy.

    The first saves the outputs of `model` in ONNX Runtime to `outputs`; each following one compares with
    them. shapes: of the dynamic inputs. tolerances: further words ("--atol", "1e-4").
    """
    given: list[str] = []
    if shapes:
        given = ["--input-shapes", *(f"{n}:[{','.join(map(str, s))}]" for n, s in shapes.items())]
    run = ["polygraphy", "run"]
    lines = [[*run, str(model), "--onnxrt", *given, "--save-outputs", str(outputs)]]
    compare = [*given, "--load-outputs", str(outputs), *tolerances]
    if engine is not None:
        kind = [] if str(engine).endswith((".engine", ".plan")) else ["--model-type", "engine"]
        lines.append([*run, str(engine), *kind, "--trt", *compare])
    if fused is not None:
        lines.append([*run, str(fused), "--onnxrt", *compare])
    rtx = "POLYGRAPHY_USE_TENSORRT_RTX=1 " if target == "tensorrt-rtx" else ""
    return [(rtx if "--trt" in line else "") + shlex.join(line) for line in lines]


def _latencies(outcome: Outcome, unmeasured: Latencies) -> Latencies:
    """The times that were taken; what was not keeps the command that takes it, and says why."""

    def one(name: str, without: Latency) -> Latency:
        if name in outcome.measured:
            return latency(outcome, name)
        return without.model_copy(update={"reason": outcome.unmeasured.get(name, without.reason)})

    return Latencies(
        engine=one("engine", unmeasured.engine),
        plain=one("plain", unmeasured.plain),
        onnxruntime=one("onnxruntime", unmeasured.onnxruntime),
        transfers=[t * 1e3 for t in outcome.transfers] if outcome.transfers else None,
        candidates={
            name: latency(outcome, name)
            for name, measured in outcome.measured.items()
            if name not in ("plain", "onnxruntime") and measured is not outcome.measured.get("engine")
        },
        notes=[*([f"on {outcome.gpu}; {outcome.clocks}"] if outcome.gpu else []), *outcome.notes],
    )


def latency(outcome: Outcome, name: str) -> Latency:
    """The times of one candidate in ms, or why there are none."""
    measured = outcome.measured.get(name)
    if measured is None:
        return Latency(measured=False, reason=outcome.unmeasured.get(name, "it was not asked for"))
    compared = outcome.comparisons.get(name)
    return Latency(
        measured=True,
        p50=measured.p50 * 1e3,
        p95=measured.p95 * 1e3,
        p99=measured.p99 * 1e3,
        throughput=measured.throughput,
        speedup=compared.ratio if compared else None,
        interval=[compared.low, compared.high] if compared else None,
    )


def deploy_commands(
    engine: str | os.PathLike[str], plugins: Plugins | None, shapes: Mapping[str, Sequence[int]] | None
) -> list[str]:
    """The command lines of other tools that load an engine of TensorRT.

    An engine that carries plugins is a program, which each tool must be told to allow.
    """
    words = ["trtexec", f"--loadEngine={engine}"]
    if shapes:
        words.append("--shapes=" + ",".join(f"{n}:{'x'.join(map(str, s))}" for n, s in shapes.items()))
    triton = ["tritonserver", "--model-repository=MODELS"]
    if plugins is not None and plugins.embedded:
        words.append("--versionCompatible")  # lets an engine's own code run
        triton.append("--backend-config=tensorrt,version-compatible=true")
    elif plugins is not None:
        words.append(f"--dynamicPlugins={plugins.library}")
        triton.append(f"--backend-config=tensorrt,plugins={plugins.library}")
    return [shlex.join(words), shlex.join(triton)]


def unmeasured_latencies(
    reason: str,
    model: str | os.PathLike[str],
    engine: str | os.PathLike[str] | None,
    *,
    target: str = "tensorrt-rtx",
    shapes: Mapping[str, Sequence[int]] | None = None,
    profiled: Sequence[str] | None = None,
) -> Latencies:
    """Latencies that nobody measured, each with the command that does on a machine with the engine's GPU.

    profiled: the options that give the plain engine the same profile.
    """
    repeat = ["--sequential-runners", "--iterations", "200", "--warm-up", "20"]
    if shapes:
        repeat += ["--input-shapes", *(f"{n}:[{','.join(map(str, s))}]" for n, s in shapes.items())]
    rtx = "POLYGRAPHY_USE_TENSORRT_RTX=1 " if target == "tensorrt-rtx" else ""

    def timed(path: str | os.PathLike[str]) -> str:
        kind = [] if str(path).endswith((".engine", ".plan")) else ["--model-type", "engine"]
        return rtx + shlex.join(["polygraphy", "run", str(path), *kind, "--trt", *repeat])

    named = ["--target", target] if target in ("tensorrt", "tensorrt-rtx") else []
    build = ["trtfuse", "build", str(model), *named]
    plain = Path(engine if engine is not None else Path(model).name).with_suffix(".plain.engine")
    bare = shlex.join([*build, *(profiled or ()), "--select", "none", "-o", str(plain)])
    original = ["polygraphy", "run", str(model), "--onnxrt", "--providers", "cuda", *repeat]
    return Latencies(
        engine=Latency(
            measured=False,
            reason=reason,
            command=timed(engine) if engine is not None else shlex.join(build),
        ),
        plain=Latency(
            measured=False,
            reason=reason,
            command=f"{bare} && {timed(plain)}" if engine is not None else bare,
        ),
        onnxruntime=Latency(measured=False, reason=reason, command=shlex.join(original)),
    )
