"""ONNX's own node tests as models: every one passes the rewriting whole, valid and with the same numbers.

Where nothing is fused the model comes back as it was, byte for byte. Where something is, it runs beside the
original: in ONNX Runtime where that gives the case's own answers, else in onnx's reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_nodes
import pytest
from graphs import run
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator
from onnx_nodes import FAMILIES, Case, Feeds, Fused, count, modelled, plain, reason, recognised

COUNTED = "1.23.2"  # the version of onnx whose cases are counted
# family: recognised of all, of the operator itself and of the operator spelled out, as models have them
COUNTS = {
    "LayerNormalization": ((7, 19), (38, 38)),
    "RMSNormalization": ((7, 19), (7, 19)),
    "GroupNormalization": ((2, 2), (0, 2)),
    "Gelu": ((4, 4), (4, 4)),
    "Swish": ((1, 1), (1, 1)),
    "HardSwish": ((1, 1), (1, 1)),
    "Mish": ((1, 1), (1, 1)),
    "SwiGLU": ((0, 3), (2, 3)),
    "Softmax": ((0, 7), (10, 14)),
    "LogSoftmax": ((0, 7), (0, 14)),
    "Attention": ((13, 93), (82, 93)),
    "FlexAttention": ((0, 11), (5, 11)),
}
# of the largest value: what the order of sums moves, and a rounding or two of the type
TOLERANCE: dict[Any, float] = {np.float32: 2e-6, np.float16: 2e-3, ml_dtypes.bfloat16: 1.6e-2}
RIGHT = 10  # times that: how far a runtime may be from the case's own answers to be the judge
counted = pytest.mark.skipif(onnx.__version__ != COUNTED, reason=f"the cases of onnx {COUNTED} are counted")

Runner = Callable[[ModelProto, Feeds], Sequence[Any]]
RUNTIME: tuple[Runner, ...] = (
    lambda model, feeds: run(model, feeds, optimized=False),
    lambda model, feeds: run(model, feeds, optimized=True),
)
REFERENCE: tuple[Runner, ...] = (lambda model, feeds: list(ReferenceEvaluator(model).run(None, feeds)),)


def differs(wanted: Sequence[Any], have: Sequence[Any], times: float = 1) -> str | None:
    """How two lists of outputs differ by more than the tolerance of their types; None if they do not."""
    for k, (w, h) in enumerate(zip(map(np.asarray, wanted), map(np.asarray, have), strict=True)):
        if (w.shape, w.dtype) != (h.shape, h.dtype):
            return f"output {k} is {h.dtype}{h.shape}, not {w.dtype}{w.shape}"
        w64, h64 = w.astype(np.float64), h.astype(np.float64)
        size = float(np.abs(w64[np.isfinite(w64)]).max(initial=1e-6))
        allowed = TOLERANCE.get(w.dtype.type, 0.0) * times * size
        if not np.allclose(h64, w64, rtol=0, atol=allowed, equal_nan=True):
            return f"output {k} is off by {np.nanmax(np.abs(h64 - w64)):.3g}, allowed {allowed:.3g}"
    return None


def judge(case: Case, feeds: Feeds, outputs: Sequence[Any]) -> tuple[tuple[Runner, ...], Sequence[Any]]:
    """The runtime that gives the case's own answers, and the original's answers in it."""
    why = ""
    for runners in (RUNTIME, REFERENCE):
        try:
            wanted = runners[0](case.model, feeds)
        except Exception as e:  # it lacks the operator, the type or the opset
            why += f"{type(e).__name__}; "
            continue
        if (wrong := differs(outputs, wanted, RIGHT)) is None:
            return runners, wanted
        why += f"{wrong}; "
    raise AssertionError(f"nothing runs the original: {why}")


def invalid(model: ModelProto) -> str | None:
    """What onnx's full check says of a model; None if it is valid."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as e:
        return str(e)
    return None


def faults(result: Fused) -> Iterator[str]:
    """What the rewriting did wrong to one case."""
    case, made = result.case, result.model
    if made is None:
        yield result.failure
        return
    if not result.ops:
        if made.SerializeToString() != case.model.SerializeToString():
            yield "nothing is fused, and the model is another"
        return
    if (complaint := invalid(made)) is not None and invalid(case.model) is None:
        yield f"is not valid any more: {complaint}"
    for ends in ("input", "output"):
        if list(getattr(made.graph, ends)) != list(getattr(case.model.graph, ends)):
            yield f"has another {ends}"
    for feeds, outputs in case.runs:
        try:
            runners, wanted = judge(case, feeds, outputs)
            wrong = [differs(wanted, runner(made, feeds)) for runner in runners]
        except Exception as e:  # one case that does not run must not hide the others
            yield f"does not run: {e}"
            continue
        yield from (f"{w}, with {', '.join(result.ops)}" for w in wrong if w is not None)


def told(results: Sequence[Fused]) -> list[str]:
    """The faults of all cases, with their names."""
    return [f"{r.case.name}: {fault}" for r in results for fault in faults(r)]


@pytest.mark.parametrize("op", [*FAMILIES, None])
def test_every_case_stays_whole(op: str | None) -> None:
    assert plain(op)
    assert told(plain(op)) == []


@pytest.mark.parametrize("op", FAMILIES)
def test_every_case_stays_whole_with_its_weights_constant(op: str) -> None:
    assert told(modelled(op)) == []


@counted
@pytest.mark.parametrize("op", COUNTS)
def test_as_many_are_recognised_as_are_counted(op: str) -> None:
    assert (count(modelled(op), False), count(modelled(op), True)) == COUNTS[op]


@counted
@pytest.mark.parametrize("op", [op for op, family in FAMILIES.items() if family.op])
def test_a_case_that_is_not_recognised_has_a_reason_and_no_other_has(op: str) -> None:
    results = modelled(op)
    assert [r.case.name for r in results if not recognised(r) and reason(r) is None] == []
    assert [(r.case.name, reason(r)) for r in results if recognised(r) and reason(r)] == []


def test_a_logarithm_of_softmax_becomes_no_softmax() -> None:
    assert {r.ops for r in (*plain("LogSoftmax"), *modelled("LogSoftmax"))} == {()}


def test_nearly_all_cases_are_there() -> None:
    assert len(onnx_nodes.cases()) > 1700
    assert set(COUNTS) == set(FAMILIES)
