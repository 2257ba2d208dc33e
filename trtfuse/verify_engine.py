"""Proof of an engine: its outputs on the GPU against the original's in ONNX Runtime, run by Polygraphy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trtfuse.comparison import quiet
from trtfuse.errors import InputError
from trtfuse.isolated import ChildDied, call, say
from trtfuse.tolerances import DEFAULTS, Tolerances
from trtfuse.verify import CPU, Accuracy, Outputs, _Job, _Judge, _run, _words, _worst


@dataclass(frozen=True)
class _Order:
    job: _Job
    engine: Path
    library: Path | None
    tf32: bool


def compare_engine(
    reference: Path,
    engine: Path,
    inputs: Sequence[Mapping[str, Any]],
    tolerances: Tolerances | None = None,
    *,
    library: Path | None = None,
    tf32: bool = False,
    timeout: float | None = None,
) -> Accuracy:
    """Runs an ONNX file in ONNX Runtime on the CPU, in its own types and with graph optimizations off, and an
    engine on the GPU, and compares all outputs.

    library: plugins that the engine needs and does not carry. tf32: whether the engine may compute in TF32,
    which is then what its outputs are judged as. Runs in a child process: a crash is a failed result. Raises
    InputError where the reference cannot be run on the inputs.
    """
    job = _Job(Path(reference), Path(reference), inputs, tolerances or Tolerances(), False, CPU, False)
    try:
        result = call(
            "trtfuse.verify_engine", "_compare_engine", (_Order(job, Path(engine), library, tf32),), timeout
        )
    except ChildDied as e:
        return Accuracy(False, len(inputs), {}, f"running the engine crashed: {e}")
    assert isinstance(result, Accuracy)
    return result


def _compare_engine(order: _Order, phase: Path | None) -> Accuracy:
    job = order.job
    say(phase, f"running the reference {job.reference}")
    try:
        expected, types = _run(job.reference, job, optimized=False)
    except Exception as e:  # ONNX Runtime's own classes share no base but this
        raise InputError(
            f"ONNX Runtime cannot run {job.reference} on these inputs: {_words(e)}: "
            "check the model, and that the inputs fit it"
        ) from e
    job.tolerances.check_names(list(dict.fromkeys([*types, *(n for o in expected for n in o)])))
    judge = _Judge(job, types, expected)
    if order.tf32:  # its mantissa has as many bits as fp16's
        judge.computed = max(judge.computed, "float16", key=list(DEFAULTS).index)
    say(phase, f"running the engine {order.engine}")
    try:
        actual = _run_engine(order)
    except Exception as e:  # Polygraphy's and TensorRT's errors share no base but this
        return Accuracy(False, len(job.inputs), {}, f"the engine does not run: {_words(e)}")
    missing = sorted({n for e, a in zip(expected, actual, strict=True) for n in e.keys() - a.keys()})
    if missing:
        reason = f"the engine lacks the output {', '.join(map(repr, missing))}"
        return Accuracy(False, len(job.inputs), {}, reason)
    worst = _worst(judge.all(expected, actual, True))
    failed = sorted((r for r in worst.values() if not r.passed), key=lambda r: -r.excess)
    reason_ = failed[0].sentence() if failed else None
    return Accuracy(not failed, len(job.inputs), worst, reason_, tuple(judge.notes()))


def _run_engine(order: _Order) -> list[Outputs]:
    """The engine's outputs for each input."""
    import tensorrt as trt
    from polygraphy.backend.common import BytesFromPath
    from polygraphy.backend.trt import EngineFromBytes, TrtRunner

    if order.library is not None:
        trt.get_plugin_registry().load_library(str(order.library))
    with quiet(False), TrtRunner(EngineFromBytes(BytesFromPath(str(order.engine)))) as runner:
        names = list(runner.get_input_metadata())
        results = []
        for feed in order.job.inputs:
            given = runner.infer({n: feed[n] for n in names})
            results.append({name: np.array(value) for name, value in given.items()})
    return results
