"""Proof by running: a candidate's outputs against a reference's, in ONNX Runtime, compared by Polygraphy.

The reference runs with ONNX Runtime's graph optimizations off, which is the model as written. The candidate
runs twice: with them off, which is its own exactness, and on, which is how it will be used. Both must pass.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import onnx

from trtfuse.comparison import OutputResult, compare_arrays, quiet, text
from trtfuse.errors import InputError
from trtfuse.isolated import ChildDied, call, say
from trtfuse.ort import Session, flatten
from trtfuse.tolerances import DEFAULTS, Tolerances, computed_in, kind_of

__all__ = [
    "Accuracy",
    "OutputResult",
    "Tolerances",
    "compare",
    "compare_arrays",
    "reference_session",
    "suspect",
]

# How far an optimized output may be off, in what the same optimizations move the original's.
NOISE = 2.0
CPU = ("CPUExecutionProvider",)
_RANDOM = frozenset(
    ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli")
)
Outputs = dict[str, np.ndarray]


@dataclass(frozen=True)
class Accuracy:
    """A comparison. inputs: how many were run. outputs: by name. reason: one sentence on what failed, else
    None. notes: what the comparison cannot tell."""

    passed: bool
    inputs: int
    outputs: dict[str, OutputResult]
    reason: str | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: passed, inputs, reason, outputs by name (max_abs, max_rel, ...)."""
        outputs = {}
        for name, result in self.outputs.items():
            values = asdict(result)
            del values["name"]
            values["shape"] = list(result.shape)
            for key in ("worst_expected", "worst_actual"):  # text is in `problem`
                values[key] = None if isinstance(values[key], str) else values[key]
            values["worst_index"] = None if result.worst_index is None else list(result.worst_index)
            outputs[name] = values
        return {
            "passed": self.passed,
            "inputs": self.inputs,
            "outputs": outputs,
            "reason": self.reason,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class _Job:
    reference: Path
    candidate: Path
    inputs: Sequence[Mapping[str, Any]]
    tolerances: Tolerances
    optimized: bool
    providers: tuple[str, ...]
    verbose: bool


def compare(
    reference: Path,
    candidate: Path,
    inputs: Sequence[Mapping[str, Any]],
    tolerances: Tolerances | None = None,
    *,
    optimized: bool = True,
    isolate: bool = False,
    timeout: float | None = None,
    providers: Sequence[str] = CPU,
    verbose: bool = False,
) -> Accuracy:
    """Runs both ONNX files on the inputs in ONNX Runtime and compares all outputs.

    inputs: feeds as make_inputs or load_inputs give them. optimized: also run the candidate with ONNX
    Runtime's graph optimizations on; an output that is then out of its default tolerance may be as far off
    as twice what these optimizations do to the reference itself (a note says so). isolate: run in a child
    process (about a second more), so that a crash of ONNX Runtime is a failed result; so it is where the
    child takes longer than `timeout` seconds. verbose: Polygraphy's own log.

    A candidate that cannot be loaded or run, or lacks an output, fails with the reason. Raises InputError
    where the reference cannot be run on the inputs, or a tolerance names no output.
    """
    if not inputs:
        raise InputError("there are no inputs to compare on: give at least one")
    job = _Job(
        Path(reference),
        Path(candidate),
        inputs,
        tolerances or Tolerances(),
        optimized,
        tuple(providers),
        verbose,
    )
    if not isolate:
        return _compare(job, None)
    try:
        result = call("trtfuse.verify", "_compare", (job,), timeout)
    except ChildDied as e:
        return Accuracy(
            False, len(inputs), {}, f"ONNX Runtime crashed: {e.reason} while {e.phase or 'starting'}"
        )
    assert isinstance(result, Accuracy)
    return result


def reference_session(path: Path, providers: Sequence[str] = CPU) -> Session:
    """A session with graph optimizations off. Raises InputError where ONNX Runtime cannot load the model."""
    try:
        return Session(Path(path), optimized=False, providers=providers)
    except Exception as e:  # ONNX Runtime's own classes share no base but this
        raise InputError(
            f"ONNX Runtime cannot load {path}: {_words(e)}: fix or export the model again"
        ) from e


def _compare(job: _Job, phase: Path | None) -> Accuracy:
    say(phase, f"running the reference {job.reference}")
    try:
        expected, types = _run(job.reference, job, optimized=False)
    except Exception as e:
        raise InputError(
            f"ONNX Runtime cannot run {job.reference} on these inputs: {_words(e)}: "
            "check the model, and that the inputs fit it"
        ) from e
    names = list(dict.fromkeys(name for outputs in expected for name in outputs))
    job.tolerances.check_names(list(dict.fromkeys([*types, *names])))
    judge = _Judge(job, types, expected)
    results: list[OutputResult] = []
    notes = judge.notes()
    for optimized in (False, True) if job.optimized else (False,):
        mode = f"graph optimizations {'on' if optimized else 'off'}"
        say(phase, f"running the candidate {job.candidate} with {mode}")
        try:
            actual, actual_types = _run(job.candidate, job, optimized)
        except Exception as e:
            broken = f"ONNX Runtime cannot run {job.candidate} with {mode}: {_words(e)}"
            return Accuracy(False, len(job.inputs), _worst(results), broken, tuple(notes))
        missing = sorted({n for e, a in zip(expected, actual, strict=True) for n in e.keys() - a.keys()})
        if missing:
            broken = f"{job.candidate} lacks the output {', '.join(map(repr, missing))}"
            return Accuracy(False, len(job.inputs), _worst(results), broken, tuple(notes))
        judge.actual_types = actual_types
        judged = judge.all(expected, actual, optimized)
        if optimized and not all(r.passed for r in judged):
            say(phase, f"running the reference {job.reference} with {mode}")
            judged, more = _allow_noise(job, judge, judged, expected, actual)
            notes += more
        results += judged
    worst = _worst(results)
    failed = sorted((r for r in worst.values() if not r.passed), key=lambda r: -r.excess)
    reason: str | None = None
    if failed:
        reason = failed[0].sentence() + (f"; {len(failed) - 1} more outputs fail" if len(failed) > 1 else "")
        reason += _random_ops(job.reference)
    return Accuracy(not failed, len(job.inputs), worst, reason, tuple(notes))


def _allow_noise(
    job: _Job, judge: _Judge, judged: list[OutputResult], expected: list[Outputs], actual: list[Outputs]
) -> tuple[list[OutputResult], list[str]]:
    """The failed outputs again, where ONNX Runtime's optimizations by themselves move the original's as far.

    What they do to both files is not the candidate's doing. An output whose tolerance the user gave keeps it.
    """
    try:
        likewise, _ = _run(job.reference, job, optimized=True)
    except Exception:  # then there is nothing to measure the noise with
        return judged, []
    noise: dict[str, float] = {}
    for plain, moved in zip(expected, likewise, strict=True):
        for name in plain.keys() & moved.keys():
            noise[name] = max(noise.get(name, 0.0), _distance(plain[name], moved[name]))
    result, notes = [], {}
    for r in judged:
        allowed = NOISE * noise.get(r.name, 0.0)
        if not r.passed and not r.problem and allowed > r.atol and not job.tolerances.given(r.name):
            r = judge.one(r.name, r.input, expected, actual, True, replace_atol=allowed)
            notes[r.name] = (
                f"ONNX Runtime's own graph optimizations move the output {r.name!r} of the original by "
                f"{noise[r.name]:.3g}, so with them on up to {allowed:.3g} is allowed"
            )
        result.append(r)
    return result, list(notes.values())


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of finite values; 0 where arrays cannot be compared."""
    if one.shape != other.shape or one.dtype.kind != "f" or not one.size:
        return 0.0
    difference = np.abs(one.astype(np.float64) - other.astype(np.float64))
    finite = difference[np.isfinite(difference)]
    return float(finite.max()) if finite.size else 0.0


def _run(path: Path, job: _Job, optimized: bool) -> tuple[list[Outputs], dict[str, str]]:
    """Outputs by input, and ONNX Runtime's types of the outputs, of one file. One session lives at a time."""
    from polygraphy.backend.onnxrt import OnnxrtRunner
    from polygraphy.comparator import Comparator

    session = Session(path, optimized, job.providers)
    taken = {i.name for i in session.get_inputs()}
    feeds = [{n: v for n, v in feed.items() if n in taken} for feed in job.inputs]
    plain = session.tensors_only and not any(v.dtype == object for feed in feeds for v in feed.values())
    results: Sequence[Mapping[str, Any]]
    if plain and all(t.removeprefix("tensor(") != "string)" for t in session.types.values()):
        with quiet(job.verbose):
            ready = [{n: _held(v) for n, v in feed.items()} for feed in feeds]
            ((_, results),) = Comparator.run([OnnxrtRunner(lambda: session)], data_loader=ready)
    else:  # Polygraphy's runners know neither sequences nor text
        results = [dict(zip(session.types, session.run(None, feed), strict=True)) for feed in feeds]
    outputs = [
        {part: array for name, value in result.items() for part, array in flatten(name, value)}
        for result in results
    ]
    return outputs, dict(session.types)


def _held(array: np.ndarray) -> np.ndarray:
    """The array in a type that numpy itself has: float32 for bfloat16 and float8."""
    return array.astype(np.float32) if array.dtype.kind == "V" or "float8" in str(array.dtype) else array


class _Judge:
    """Compares outputs; holds what the tolerances need to know of the reference."""

    def __init__(self, job: _Job, types: Mapping[str, str], expected: Sequence[Outputs]) -> None:
        self.job = job
        self.types = types
        self.actual_types = types
        protos = [onnx.load(str(p), load_external_data=False) for p in (job.reference, job.candidate)]
        self.computed = max(map(computed_in, protos), key=list(DEFAULTS).index)
        self.spreads = {name: _spread(expected, name) for outputs in expected for name in outputs}

    def notes(self) -> list[str]:
        """What the reference itself makes hard to tell."""
        return [
            f"the output {name!r} is {s.low + 0.0:.6g} everywhere on every input, which shows little: "
            "use real inputs"
            for name, s in self.spreads.items()
            if s and s.low == s.high and s.size > 1
        ]

    def all(self, expected: list[Outputs], actual: list[Outputs], optimized: bool) -> list[OutputResult]:
        """A result for each output of each input."""
        return [
            self.one(name, number, expected, actual, optimized)
            for number, outputs in enumerate(expected)
            for name in outputs
        ]

    def one(
        self,
        name: str,
        number: int,
        expected: list[Outputs],
        actual: list[Outputs],
        optimized: bool,
        replace_atol: float | None = None,
    ) -> OutputResult:
        """The result for one output of one input."""
        value, spread = expected[number][name], self.spreads[name]
        tolerances = self.job.tolerances
        if replace_atol is not None:
            tolerances = replace(tolerances, atol={**tolerances.atol, name: replace_atol})
        result = compare_arrays(
            name,
            value,
            actual[number][name],
            tolerances,
            kind=self._kind(name, value),
            variation=spread.high - spread.low if spread else 0.0,
            largest=max(abs(spread.low), abs(spread.high)) if spread else 0.0,
            verbose=self.job.verbose,
        )
        dtype = _dtype_name(self.types.get(name, ""), value)
        return replace(result, input=number, optimized=optimized, dtype=dtype)

    def _kind(self, name: str, value: np.ndarray) -> str | None:
        types = (self.types, self.actual_types)
        kinds = [kind_of(_dtype_name(t.get(name, ""), value), self.computed) for t in types]
        known = [k for k in kinds if k]
        return max(known, key=list(DEFAULTS).index) if len(known) == 2 else None


class _Spread(NamedTuple):
    """The finite values of a reference's output over elements and inputs. size: elements, NaN and all."""

    low: float
    high: float
    size: int


def _spread(expected: Sequence[Outputs], name: str) -> _Spread | None:
    """None for what is not of floats, or has no finite value."""
    arrays = [o[name] for o in expected if name in o and o[name].dtype.kind == "f"]
    finite = [values for values in (a[np.isfinite(a)] for a in arrays) if values.size]
    if not finite:
        return None
    low, high = min(float(v.min()) for v in finite), max(float(v.max()) for v in finite)
    return _Spread(low, high, sum(a.size for a in arrays))


def _dtype_name(ort_type: str, value: np.ndarray) -> str:
    """numpy's name of an output's type; bfloat16 and float8 by ONNX Runtime's, for the arrays are float32."""
    inner = ort_type.removeprefix("tensor(").removesuffix(")")
    return inner if inner.startswith(("bfloat16", "float8")) else str(value.dtype)


def _worst(results: Sequence[OutputResult]) -> dict[str, OutputResult]:
    """By output, its result on the worst input: failed before passed, then furthest out, then largest."""
    worst: dict[str, OutputResult] = {}
    for r in results:
        best = worst.get(r.name)
        if best is None or (not r.passed, r.excess, r.max_abs) > (not best.passed, best.excess, best.max_abs):
            worst[r.name] = r
    return worst


def _random_ops(path: Path) -> str:
    proto = onnx.load(str(path), load_external_data=False)
    ops = sorted({n.op_type for n in proto.graph.node} & _RANDOM)
    return f" (the model draws random numbers: {', '.join(ops)})" if ops else ""


def _words(error: BaseException) -> str:
    """ONNX Runtime's message on one line, without its prefix of codes."""
    text = re.sub(r"\s+", " ", str(error)).strip()
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    return (text[:297] + "...") if len(text) > 300 else text


class SiteLike(Protocol):
    """A fused site: what it is called, its op, and the tensor that it writes."""

    @property
    def id(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def output(self) -> str: ...


def suspect(
    reference: Path,
    candidate: Path,
    inputs: Sequence[Mapping[str, Any]],
    sites: Sequence[SiteLike],
    *,
    isolate: bool = True,
    timeout: float | None = 600,
) -> str | None:
    """The first site, in the order of computation, whose result leaves tolerance: a phrase, or None.

    Sites' outputs are marked as extra outputs in copies of both files, which run with graph optimizations
    off, and for the candidate also on where that shows nothing. Never raises: None where it cannot tell.
    """
    job = (Path(reference), Path(candidate), list(inputs), [(s.id, s.op, s.output) for s in sites])
    try:
        found = call("trtfuse.verify", "_suspect", job, timeout) if isolate else _suspect(*job, None)
    except Exception:  # a hint on a failure must not become another failure
        return None
    return found if isinstance(found, str) else None


def _suspect(
    reference: Path,
    candidate: Path,
    inputs: Sequence[Mapping[str, Any]],
    sites: Sequence[tuple[str, str, str]],
    phase: Path | None,
) -> str | None:
    protos = [onnx.load(str(p), load_external_data=False) for p in (reference, candidate)]
    order = [{name: i for i, n in enumerate(p.graph.node) for name in n.output if name} for p in protos]
    known = [s for s in sites if all(s[2] in o for o in order)]
    known.sort(key=lambda s: order[1][s[2]])
    if not known:
        return None
    names = list(dict.fromkeys(s[2] for s in known))
    kind = max((computed_in(p) for p in protos), key=list(DEFAULTS).index)
    with _marked(reference, protos[0], names) as marked, _marked(candidate, protos[1], names) as also:
        expected = _outputs_of(marked, inputs, names, optimized=False)
        for optimized in (False, True):
            actual = _outputs_of(also, inputs, names, optimized)
            for id_, op, tensor in known:
                for e, a in zip(expected, actual, strict=True):
                    result = compare_arrays(
                        tensor, e[tensor], a[tensor], Tolerances(), kind=kind_of(e[tensor].dtype, kind)
                    )
                    if not result.passed:
                        return f"site {id_} ({op}) at tensor {tensor}: {_how_far(result)}"
    return None


def _how_far(result: OutputResult) -> str:
    if result.problem:
        return result.problem
    assert result.worst_index is not None
    return (
        f"off by {result.max_abs:.3g} at {list(result.worst_index)} "
        f"({text(result.worst_actual)} where the reference is {text(result.worst_expected)})"
    )


def _outputs_of(
    path: Path, inputs: Sequence[Mapping[str, Any]], names: Sequence[str], optimized: bool
) -> list[Outputs]:
    session = Session(path, optimized)
    taken = {i.name for i in session.get_inputs()}
    return [
        dict(zip(names, session.run(names, {n: v for n, v in f.items() if n in taken}), strict=True))
        for f in inputs
    ]


@contextlib.contextmanager
def _marked(path: Path, proto: onnx.ModelProto, names: Sequence[str]) -> Iterator[Path]:
    """A temporary copy of the file with more graph outputs. Beside the original where its weights lie in
    files of their own, which ONNX Runtime looks for in the model's folder only."""
    marked = onnx.ModelProto()
    marked.CopyFrom(proto)
    there = {o.name for o in marked.graph.output}
    marked.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names if n not in there)
    external = any(t.data_location == onnx.TensorProto.EXTERNAL for t in marked.graph.initializer)
    folder = path.resolve().parent if external else None
    with tempfile.NamedTemporaryFile(prefix=".trtfuse-", suffix=".onnx", dir=folder) as f:
        f.write(marked.SerializeToString())
        f.flush()
        del marked
        yield Path(f.name)
