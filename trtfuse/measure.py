"""Latency of several candidates on one GPU, side by side.

They take turns in one process, so that a clock that moves, heat or a neighbour's load meets all alike; and
they are compared round by round, so that what a round has in common cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from trtfuse.clocks import Clocked, Clocks, Sample
from trtfuse.report import Latency

if TYPE_CHECKING:
    from trtfuse.cuda import Event

MINIMUM_RUNS = 5  # inferences in a lap
MAXIMUM_RUNS = 5000  # each takes an event, and the host must keep up
# Inferences at the start of a lap that do not count: the first waits for the host to start it and finds the
# caches full of another candidate's data.
LEAD = 1
WARM_UP_LAPS = 8  # in the time for warming up
STEADY_LAPS = 3  # so many medians in a row must agree
STEADY = 0.02  # to this part
RESAMPLES = 4000

Verdict = Literal["faster", "slower", "undecided"]


class Candidate(Protocol):
    """What is timed. stream: the cudaStream_t on which `enqueue` starts one inference.

    `enqueue` returns at once; the inputs are on the GPU already.
    """

    @property
    def name(self) -> str: ...
    @property
    def stream(self) -> int: ...
    def enqueue(self) -> None: ...


class Timer(Protocol):
    """What times; `CudaTimer` does, by CUDA events."""

    def lap(self, candidate: Candidate, runs: int) -> Sequence[float]:
        """Seconds of each of `runs` inferences, back to back."""


class CudaTimer:
    """Times by CUDA events around every inference; resolution 0.5 us.

    Inferences that take less time than the host needs to start them are timed at the host's pace.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []

    def lap(self, candidate: Candidate, runs: int) -> list[float]:
        """Seconds of each of `runs` inferences, back to back. Raises what `enqueue` raises, RunError where
        CUDA fails."""
        events = self._take(runs + 1)
        events[0].record(candidate.stream)
        for event in events[1:]:
            candidate.enqueue()
            event.record(candidate.stream)
        events[-1].synchronize()
        return [after.seconds_since(before) for before, after in pairwise(events)]

    def _take(self, count: int) -> list[Event]:
        from trtfuse.cuda import Event

        while len(self._events) < count:
            self._events.append(Event())
        return self._events[:count]


@dataclass(frozen=True, eq=False)
class Measured:
    """The times of one candidate. laps: seconds of the single inferences, one array (runs,) of float64 for
    each round. clocks: the GPU's during all rounds, None where it does not tell. notes: what to know of
    these times."""

    name: str
    laps: tuple[np.ndarray, ...]
    clocks: Clocks | None = None
    notes: tuple[str, ...] = ()

    @cached_property
    def samples(self) -> np.ndarray:
        """Seconds of all single inferences, float64."""
        return np.concatenate(self.laps)

    @cached_property
    def medians(self) -> np.ndarray:
        """The median of each round in seconds, (rounds,) of float64."""
        return np.array([np.median(lap) for lap in self.laps])

    @property
    def rounds(self) -> int:
        return len(self.laps)

    @property
    def p50(self) -> float:
        """The median in seconds."""
        return self._percentile(50)

    @property
    def p95(self) -> float:
        """The 95th percentile in seconds."""
        return self._percentile(95)

    @property
    def p99(self) -> float:
        """The 99th percentile in seconds."""
        return self._percentile(99)

    @property
    def mean(self) -> float:
        """The mean in seconds."""
        return float(self.samples.mean())

    @property
    def throughput(self) -> float:
        """Inferences in a second of the laps."""
        return 1 / self.mean if self.mean else math.inf

    def _percentile(self, percent: float) -> float:
        return float(np.percentile(self.samples, percent))


def interleave(
    candidates: Sequence[Candidate],
    timer: Timer,
    *,
    rounds: int = 20,
    seconds_per_lap: float = 0.05,
    warm_up_seconds: float = 0.3,
    clocks: Clocked | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Measured]:
    """Times the candidates in turn, each warmed up first; results in the candidates' order.

    In every round each candidate runs one lap: as many inferences as fill `seconds_per_lap`, at least
    MINIMUM_RUNS. The order changes from round to round (see `order`). Warming up ends when the times are
    steady, at the latest after `warm_up_seconds`. clocks: sampled between the laps, never within one.
    progress: called after each round with the rounds done and all rounds.

    Raises ValueError for fewer than one round; what a candidate raises goes through.
    """
    if rounds < 1:
        raise ValueError(f"{rounds} rounds measure nothing: take at least 1")
    warm = [_warm_up(c, timer, warm_up_seconds) for c in candidates]
    runs = [_runs(w.seconds, seconds_per_lap) for w in warm]
    laps: list[list[np.ndarray]] = [[] for _ in candidates]
    samples: list[Sample] = []
    for number in range(rounds):
        for i in order(len(candidates), number):
            times = timer.lap(candidates[i], LEAD + runs[i])[LEAD:]
            laps[i].append(np.asarray(times, np.float64))
            if clocks is not None:
                samples.append(clocks.sample())
        if progress is not None:
            progress(number + 1, rounds)
    seen = Clocks.of(samples)
    of_all = seen.notes() if seen is not None else ()
    return [
        Measured(c.name, tuple(own), seen, (*w.notes, *of_all))
        for c, own, w in zip(candidates, laps, warm, strict=True)
    ]


def order(count: int, number: int) -> list[int]:
    """The order of a round: every other one is the one before it backwards, and each such pair starts one
    further on.

    So a steady drift cancels within a pair. Over 2 * count rounds each candidate has had every place equally
    often, and has gone before any other as often as after it.
    """
    start = number // 2 % max(count, 1)
    places = [*range(start, count), *range(start)]
    return places[::-1] if number % 2 else places


@dataclass(frozen=True)
class _Warm:
    """seconds: of one inference."""

    seconds: float
    notes: tuple[str, ...] = ()


def _warm_up(candidate: Candidate, timer: Timer, seconds: float) -> _Warm:
    timer.lap(candidate, 1)  # loads, allocates and tunes: it says nothing of the times to come
    medians: list[float] = []
    spent, runs = 0.0, MINIMUM_RUNS
    while not medians or spent < seconds:
        times = timer.lap(candidate, runs)
        spent += math.fsum(times)
        medians.append(float(np.median(times)))
        runs = _runs(medians[-1], seconds / WARM_UP_LAPS)
        if _steady(medians):
            return _Warm(medians[-1])
    if len(medians) < STEADY_LAPS:
        return _Warm(medians[-1])
    return _Warm(medians[-1], (f"the times of {candidate.name} were not steady after its warm-up",))


def _steady(medians: Sequence[float]) -> bool:
    last = medians[-STEADY_LAPS:]
    return len(last) == STEADY_LAPS and max(last) - min(last) <= STEADY * min(last)


def _runs(seconds: float, fill: float) -> int:
    """How many inferences of so many seconds fill a time."""
    wanted = math.ceil(fill / seconds) if seconds > 0 else MAXIMUM_RUNS
    return min(max(wanted, MINIMUM_RUNS), MAXIMUM_RUNS)


@dataclass(frozen=True)
class Comparison:
    """How much faster one candidate is than another.

    ratio: the other's time through this one's, above 1 where this one is faster. low, high: the interval that
    holds it with the confidence. verdict: what the whole interval says, against the minimum gain (0.01: 1 %).
    """

    name: str
    other: str
    ratio: float
    low: float
    high: float
    verdict: Verdict
    confidence: float
    minimum_gain: float
    rounds: int

    def sentence(self) -> str:
        """ "engine is 1.034 times as fast as plain (95 % between 1.031 and 1.038): faster"."""
        return (
            f"{self.name} is {self.ratio:.3f} times as fast as {self.other} ({100 * self.confidence:g} % "
            f"between {self.low:.3f} and {self.high:.3f}): {self.verdict}"
        )


def compare(
    a: Measured, b: Measured, confidence: float = 0.95, *, minimum_gain: float = 0.01, seed: int = 0
) -> Comparison:
    """Whether `a` is faster than `b`, both from one call of `interleave`.

    The ratio is the median over the rounds of b's lap median through a's of the same round; its interval is
    that of an expanded percentile bootstrap over rounds. So one bad round decides nothing, nor does what
    slows whole rounds. Faster means that the whole interval is above 1 + minimum_gain, slower that it is
    below 1 / (1 + minimum_gain). Too few rounds for the confidence leave it undecided: fewer than 6 for 95 %.

    Raises ValueError where the rounds differ in number, or a time is not above zero.
    """
    if a.rounds != b.rounds:
        raise ValueError(f"{a.name} has {a.rounds} rounds and {b.name} {b.rounds}: measure them together")
    if not (np.all(a.medians > 0) and np.all(b.medians > 0)):
        raise ValueError(f"{a.name} or {b.name} took no time in some round: nothing to compare")
    logs = np.log(b.medians / a.medians)
    low, high = _interval(logs, confidence, seed)
    # All n rounds lie on one side of the true median once in 2^(n-1) times: no interval is surer than that.
    enough = 2.0 ** (1 - a.rounds) <= 1 - confidence
    verdict = _verdict(low, high, 1 + minimum_gain) if enough else "undecided"
    ratio = float(np.exp(np.median(logs)))
    return Comparison(a.name, b.name, ratio, low, high, verdict, confidence, minimum_gain, a.rounds)


def _interval(logs: np.ndarray, confidence: float, seed: int) -> tuple[float, float]:
    """The bootstrap interval of exp(median). logs: (rounds,) of float64."""
    rounds = len(logs)
    picks = np.random.default_rng(seed).integers(rounds, size=(RESAMPLES, rounds))
    medians = np.median(logs[picks], axis=1)
    tail = _tail(confidence, rounds)
    low, high = np.exp(np.quantile(medians, [tail, 1 - tail]))
    return float(low), float(high)


def _tail(confidence: float, rounds: int) -> float:
    """The part of the resamples to leave out at each end.

    The bare (1 - confidence) / 2 is too much for few rounds: of 20 rounds without a difference it finds one
    in 7 % of the cases, not in 5 %. This is Hesterberg's expanded percentile interval: Student's t for the
    normal distribution, and the variance for n - 1 rounds.
    """
    if rounds < 2:
        return 0.0
    normal, free = NormalDist(), rounds - 1
    z = normal.inv_cdf((1 + confidence) / 2)
    # Student's quantile from the normal one (Cornish-Fisher), right to 1 % from 6 rounds on.
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return normal.cdf(-t * math.sqrt(rounds / free))


def _verdict(low: float, high: float, gain: float) -> Verdict:
    return "faster" if low > gain else "slower" if high < 1 / gain else "undecided"


def latency(measured: Measured) -> Latency:
    """The report's part for these times, in ms."""
    return Latency(measured=True, p50=1e3 * measured.p50, p95=1e3 * measured.p95, p99=1e3 * measured.p99)
