"""Engines and ONNX Runtime timed against each other on the GPU, in a process of its own."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trtfuse import cuda
from trtfuse.clocks import ClockSource
from trtfuse.engine import Context, Engine
from trtfuse.errors import EnvironmentMissing, InputError, RunError
from trtfuse.isolated import ChildDied, call, say
from trtfuse.measure import Candidate, Comparison, CudaTimer, Measured, compare, interleave
from trtfuse.measure_ort import OrtCandidate

Feed = Mapping[str, np.ndarray[Any, Any]]
_COPIES = 20  # of transfers, whose median counts


@dataclass(frozen=True)
class Job:
    """What is measured. engines: name -> file; the first is held against the others. model: an ONNX file for
    ONNX Runtime, by the name "onnxruntime". feed: the inputs. cuda_graph: launches recorded. trusted: whether
    the engines may run code of their own; else their manifests decide. library: plugins for those that carry
    none."""

    engines: Mapping[str, Path]
    feed: Feed
    model: Path | None = None
    cuda_graph: bool = True
    trusted: bool = False
    rounds: int = 20
    tf32: bool = False
    library: Path | None = None


@dataclass
class Outcome:
    """Measurements by name; comparisons of the first engine with each of the others; why something was not
    measured; transfers: seconds to bring the inputs in and the outputs out; notes."""

    measured: dict[str, Measured] = field(default_factory=dict)
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    unmeasured: dict[str, str] = field(default_factory=dict)
    transfers: tuple[float, float] | None = None
    clocks: str = ""
    gpu: str = ""
    notes: list[str] = field(default_factory=list)


def run(job: Job, timeout: float | None = None) -> Outcome:
    """Measures in a child process. Raises RunError where it crashes."""
    try:
        outcome = call("trtfuse.benchmark", "measure", (job,), timeout)
    except ChildDied as e:
        raise RunError(f"the measurement crashed: {e}; run the engine alone with `trtfuse run`") from e
    assert isinstance(outcome, Outcome)
    return outcome


def measure(job: Job, phase: Path | None = None) -> Outcome:
    """Measures in this process."""
    properties = cuda.device_properties()
    outcome = Outcome(gpu=f"{properties.name} ({properties.compute_capability})")
    candidates: list[Candidate] = []
    for name, path in job.engines.items():
        say(phase, f"loading {path}")
        candidate = EngineCandidate(name, path, job)
        candidates.append(candidate)
        outcome.notes += candidate.notes
    outcome.transfers = _transfers(candidates[0]) if isinstance(candidates[0], EngineCandidate) else None
    stream = cuda.Stream()
    if job.model is not None:
        say(phase, f"loading {job.model} in ONNX Runtime")
        try:
            ort = OrtCandidate(job.model, job.feed, stream.handle, tf32=job.tf32, cuda_graph=job.cuda_graph)
            candidates.append(ort)
            outcome.notes += ort.notes
        except (EnvironmentMissing, InputError) as e:
            outcome.unmeasured["onnxruntime"] = str(e)
    say(phase, "measuring")
    clocks = ClockSource.open(properties.bus)
    found = interleave(candidates, CudaTimer(), rounds=job.rounds, clocks=clocks)
    outcome.measured = {m.name: m for m in found}
    outcome.comparisons = {m.name: compare(found[0], m) for m in found[1:]}
    outcome.notes += list(dict.fromkeys(n for m in found for n in m.notes))
    if found[0].clocks is not None:
        outcome.clocks = found[0].clocks.sentence()
    return outcome


class EngineCandidate:
    """An engine with its inputs on the GPU."""

    def __init__(self, name: str, path: Path, job: Job) -> None:
        self.name = name
        self.notes: list[str] = []
        self.engine = Engine(path, allow_host_code=job.trusted, plugin_library=job.library)
        self.context: Context = self.engine.context()
        self.given = self.context.check({n: a for n, a in job.feed.items() if n in self.engine.inputs})
        self.context.shape({n: g.shape for n, g in self.given.items()}, None, self.given)
        self.context.upload(self.given, static=True)
        self.context.bind_outputs(fresh=False)
        self._graph: cuda.Graph | None = None
        if job.cuda_graph:
            try:
                self._graph = self.context.record()
            except RunError as e:
                self.notes.append(
                    f"{name} cannot be recorded as a CUDA graph ({e}): it is launched each time"
                )

    @property
    def stream(self) -> int:
        return self.context.stream.handle

    def enqueue(self) -> None:
        """Starts one inference."""
        if self._graph is not None:
            self._graph.launch(self.context.stream)
        else:
            self.context.enqueue()


def _transfers(candidate: EngineCandidate) -> tuple[float, float]:
    """Median seconds of all inputs to the GPU, and of all outputs back, from and to pageable memory."""
    context = candidate.context
    before, after = cuda.Event(), cuda.Event()

    def timed(work: Any) -> float:
        before.record(context.stream.handle)
        work()
        after.record(context.stream.handle)
        after.synchronize()
        return after.seconds_since(before)

    context.enqueue()
    buffers = context.bind_outputs(fresh=False)
    arrays = {n: np.empty(b.nbytes, np.uint8) for n, b in buffers.items()}

    def down() -> None:
        for name, buffer in buffers.items():
            if buffer.nbytes:
                cuda.copy_async(arrays[name].ctypes.data, buffer.ptr, buffer.nbytes, context.stream)

    up = [timed(lambda: context.upload(candidate.given, static=True)) for _ in range(_COPIES)]
    return statistics.median(up), statistics.median(timed(down) for _ in range(_COPIES))
