"""One output against its reference: Polygraphy's verdict, and the numbers that say why."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from trtfuse.tolerances import Tolerances

LARGE = 0.01  # part of the largest magnitude from which on an element's relative error is reported


@dataclass(frozen=True)
class OutputResult:
    """One output, at the input where it is worst.

    max_abs, mean_abs: of |actual - expected|. max_rel: of |actual - expected| / |expected| over elements of
    at least a hundredth of the output's largest magnitude (near zero a ratio says nothing). Differences are
    inf where NaN or infinity is on one side only, or shapes differ. worst_*: the element that is furthest out
    of tolerance, None where nothing can be compared. excess: how many times its tolerance that element is off
    (up to 1 is within), inf where no number says it. input: its number. optimized: whether ONNX Runtime's
    graph optimizations were on. statistic: what was held against atol and rtol. problem: why it failed, where
    no number says it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    max_abs: float
    max_rel: float
    mean_abs: float
    worst_index: tuple[int, ...] | None
    worst_expected: float | str | None
    worst_actual: float | str | None
    atol: float
    rtol: float
    passed: bool
    statistic: str = "elemwise"
    input: int = 0
    optimized: bool = False
    excess: float = 0.0
    problem: str | None = None

    def sentence(self) -> str:
        """The result in words, with the worst element."""
        where = f" (input {self.input}{', graph optimizations on' if self.optimized else ''})"
        if self.problem:
            return f"output {self.name!r} {self.problem}{where}"
        at = f"[{', '.join(map(str, self.worst_index))}]" if self.worst_index is not None else "an element"
        expected, actual = text(self.worst_expected), text(self.worst_actual)
        checked = "" if self.statistic == "elemwise" else f" {self.statistic}"
        return (
            f"output {self.name!r} is {actual} at {at} where the reference is {expected}: off by up to "
            f"{self.max_abs:.3g}, tolerance{checked} {self.atol:.3g} absolute or {self.rtol:.3g} relative"
            f"{where}"
        )


@contextlib.contextmanager
def quiet(verbose: bool) -> Iterator[None]:
    """Polygraphy says nothing inside, or all there is to say."""
    from polygraphy.logger import G_LOGGER

    level = G_LOGGER.VERBOSE if verbose else G_LOGGER.CRITICAL + 1
    with G_LOGGER.verbosity(level), np.errstate(all="ignore"):
        yield


def compare_arrays(
    name: str,
    expected: np.ndarray,
    actual: np.ndarray,
    tolerances: Tolerances,
    *,
    kind: str | None,
    variation: float = 0.0,
    largest: float = 0.0,
    verbose: bool = False,
) -> OutputResult:
    """One output's arrays by Polygraphy's SimpleCompareFunc.

    kind: see tolerances.kind_of. variation: how far the reference ranges over all inputs, 0 where unknown.
    largest: its largest magnitude over all inputs, where these arrays' own is not the whole of it: an output
    of one number near 0 is as exact as the sums behind it, which are of the size of its other values.
    NaN and infinities pass where both sides have the same at the same place, and fail elsewhere.
    """
    finite = expected[np.isfinite(expected)] if expected.dtype.kind == "f" else np.zeros(0)
    largest = max(largest, float(np.abs(finite).max()) if finite.size else 0.0)
    atol, rtol, statistic = tolerances.of(name, kind, largest, max(variation, 0.0))
    result = OutputResult(
        name=name,
        dtype=str(expected.dtype),
        shape=expected.shape,
        max_abs=0.0,
        max_rel=0.0,
        mean_abs=0.0,
        worst_index=None,
        worst_expected=None,
        worst_actual=None,
        atol=atol,
        rtol=rtol,
        passed=True,
        statistic=statistic,
    )
    bad = replace(
        result, passed=False, max_abs=math.inf, max_rel=math.inf, mean_abs=math.inf, excess=math.inf
    )
    if expected.shape != actual.shape:
        return replace(
            bad, problem=f"has shape {list(actual.shape)} where the reference has {list(expected.shape)}"
        )
    if expected.dtype.kind != actual.dtype.kind:
        return replace(bad, problem=f"is {actual.dtype} where the reference is {expected.dtype}")
    if not expected.size:
        return result
    if expected.dtype.kind in "OUS":
        return _compare_text(result, expected, actual)
    if expected.dtype.kind == "f":
        return _compare_floats(result, bad, expected.astype(np.float64), actual.astype(np.float64), verbose)
    if expected.dtype.kind == "c":
        parts = [np.stack([a.real, a.imag], axis=-1).astype(np.float64) for a in (expected, actual)]
        return _compare_floats(result, bad, parts[0], parts[1], verbose)
    return _compare_numbers(result, expected, actual, verbose)


def _compare_text(result: OutputResult, expected: np.ndarray, actual: np.ndarray) -> OutputResult:
    different = np.argwhere(expected.astype(object) != actual.astype(object))
    if not len(different):
        return result
    index = tuple(int(i) for i in different[0])
    problem = f"is {actual[index]!r} at {list(index)} where the reference is {expected[index]!r}"
    return replace(
        result,
        passed=False,
        excess=math.inf,
        worst_index=index,
        worst_expected=str(expected[index]),
        worst_actual=str(actual[index]),
        problem=problem,
    )


def _compare_floats(
    result: OutputResult, bad: OutputResult, expected: np.ndarray, actual: np.ndarray, verbose: bool
) -> OutputResult:
    odd = ~(np.isfinite(expected) & np.isfinite(actual))
    if odd.any():
        same = (expected == actual) | (np.isnan(expected) & np.isnan(actual))
        different = odd & ~same
        if different.any():
            index = _index(int(np.argmax(different)), expected.shape)
            e, a = float(expected[index]), float(actual[index])
            count = int(different.sum())
            problem = f"is {text(a)} at {list(index)} where the reference is {text(e)}" + (
                f", and {count - 1} more such elements" if count > 1 else ""
            )
            return replace(bad, worst_index=index, worst_expected=e, worst_actual=a, problem=problem)
        expected, actual = np.where(odd, 0.0, expected), np.where(odd, 0.0, actual)
    return _compare_numbers(result, expected, actual, verbose)


def _compare_numbers(
    result: OutputResult, expected: np.ndarray, actual: np.ndarray, verbose: bool
) -> OutputResult:
    """Polygraphy's verdict, and our numbers on it: finite values of one shape and kind."""
    from polygraphy import comparator
    from polygraphy.comparator.struct import IterationResult

    # The older spelling is there where the newer is not, and deprecated where it is.
    function = getattr(comparator, "SimpleCompareFunc", None) or comparator.CompareFunc.simple
    judge = function(
        atol={result.name: result.atol},
        rtol={result.name: result.rtol},
        check_error_stat={result.name: result.statistic},
    )
    with quiet(verbose):
        verdict = judge(
            IterationResult(outputs={result.name: actual}, runner_name="candidate"),
            IterationResult(outputs={result.name: expected}, runner_name="reference"),
        )[result.name]
    passed = bool(verdict)
    if result.atol == 0 and result.rtol == 0:
        passed = bool(np.array_equal(expected, actual))  # differences of the largest integers wrap around
    e, a = expected.astype(np.float64), actual.astype(np.float64)
    error = np.abs(a - e)
    magnitude = np.abs(e)
    with np.errstate(all="ignore"):
        relative = np.where(error > 0, error / magnitude, 0.0)
        excess = np.fmin(error / result.atol if result.atol else np.inf, relative / (result.rtol or 0.0))
        excess = np.where(error > 0, excess, 0.0)
    top = excess == excess.max()
    index = _index(int(np.argmax(np.where(top, error, -1.0))), e.shape)
    judged = relative[magnitude >= max(magnitude.max() * LARGE, np.finfo(np.float64).tiny)]
    return replace(
        result,
        max_abs=float(error.max()),
        max_rel=float(judged.max()) if judged.size else 0.0,
        mean_abs=float(error.mean()),
        worst_index=index,
        worst_expected=expected[index].item(),
        worst_actual=actual[index].item(),
        passed=passed,
        excess=float(excess[index]),
    )


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(flat, shape))


def text(value: float | str | None) -> str:
    """A value in a sentence."""
    return f"{value:.6g}" if isinstance(value, float) else repr(value)
