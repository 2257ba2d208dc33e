"""Timing candidates side by side: noise, drift and moving clocks must not decide, a real gain must."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest

from trtfuse import cuda, measure
from trtfuse.clocks import Clocks, ClockSource, Sample
from trtfuse.errors import EnvironmentMissing, InputError
from trtfuse.measure import CudaTimer, Measured, compare, interleave, latency, order
from trtfuse.measure_ort import OrtCandidate

Slowness = Callable[[float], float]


@dataclass
class Engine:
    """Takes so many seconds for one inference on an undisturbed GPU."""

    name: str
    seconds: float
    stream: int = 7

    def enqueue(self) -> None:
        raise AssertionError("the simulated timer starts nothing")


@dataclass
class Simulated:
    """A GPU whose times are lognormally noisy (sigma: of each inference, lap_sigma: of a whole lap), and
    slower by a factor that depends on the time."""

    seed: int = 0
    sigma: float = 0.02
    lap_sigma: float = 0.0
    slowness: Slowness = lambda now: 1.0
    now: float = 0.0
    laps: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def lap(self, candidate: Engine, runs: int) -> list[float]:
        self.laps.append((candidate.name, runs))
        factor = self.slowness(self.now) * self.rng.lognormal(0, self.lap_sigma)
        times = candidate.seconds * factor * self.rng.lognormal(0, self.sigma, runs)
        self.now += float(times.sum())
        return list(times)


def drifting(now: float) -> float:
    """20 % slower over a run of about 2.5 s."""
    return 1 + 0.08 * now


def hot(now: float) -> float:
    """A thermal step: 12 % slower from the middle on."""
    return 1.12 if now > 1.3 else 1.0


def two_clocks(now: float) -> float:
    """Two clocks in turn, each held for some rounds."""
    return 1.15 if int(now / 0.37) % 2 else 1.0


def steady(now: float) -> float:
    return 1.0


WORLDS = [steady, drifting, hot, two_clocks]


def pair(timer: Simulated, gain: float = 1.0, seconds: float = 1e-3, **options) -> tuple[Measured, Measured]:
    """A candidate that is faster by `gain`, and the other one, which takes so many seconds."""
    a, b = interleave([Engine("new", seconds / gain), Engine("old", seconds)], timer, **options)
    return a, b


def rounds_of(name: str, *medians: float) -> Measured:
    return Measured(name, tuple(np.full(5, m) for m in medians))


# --- what is compared ---


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("seed", range(5))
def test_a_gain_of_3_percent_is_found_whatever_the_gpu_does(world: Slowness, seed: int) -> None:
    a, b = pair(Simulated(seed, slowness=world), gain=1.03)
    faster, slower = compare(a, b), compare(b, a)
    assert (faster.verdict, slower.verdict) == ("faster", "slower"), faster
    assert faster.ratio == pytest.approx(1.03, abs=0.008)
    assert faster.low <= faster.ratio <= faster.high
    assert faster.ratio * slower.ratio == pytest.approx(1)


@pytest.mark.parametrize("world", WORLDS)
def test_identical_candidates_are_told_apart_in_few_of_400_runs(world: Slowness) -> None:
    # Even without a minimum gain, and with every lap off by 3 %.
    wrong = {0.0: 0, 0.01: 0}
    for seed in range(400):
        timer = Simulated(seed, lap_sigma=0.03, slowness=world)
        a, b = pair(timer, seconds=5e-3)  # few inferences, for the time that the test takes
        for gain in wrong:
            wrong[gain] += compare(a, b, minimum_gain=gain).verdict != "undecided"
    assert wrong[0.0] <= 28  # 5 % of 400 are 20, and 8 more are two standard deviations
    assert wrong[0.01] <= 8


def test_the_interval_holds_the_true_ratio_in_most_runs() -> None:
    inside = 0
    for seed in range(200):
        a, b = pair(Simulated(seed, lap_sigma=0.02), gain=1.03, seconds=5e-3)
        found = compare(a, b)
        inside += found.low <= 1.03 <= found.high
    assert inside >= 182  # 95 % are 190; 8 fewer are 2.6 standard deviations


def test_clocks_that_change_with_every_lap_decide_nothing() -> None:
    for seed in range(50):
        clock = np.random.default_rng(1000 + seed)
        timer = Simulated(seed, slowness=lambda now, clock=clock: 1.15 if clock.random() < 0.5 else 1.0)
        a, b = pair(timer)
        assert compare(a, b).verdict == "undecided"


def test_a_slow_round_decides_nothing() -> None:
    a = rounds_of("a", *[1.0] * 20)
    assert compare(a, rounds_of("b", *[1.0] * 19, 100.0)).verdict == "undecided"
    late = compare(a, rounds_of("b", 1.0, *[1.05] * 19))
    assert late.verdict == "faster"
    assert late.ratio == pytest.approx(1.05)


def test_less_than_the_minimum_gain_is_undecided() -> None:
    a, b = rounds_of("a", *[1.0] * 20), rounds_of("b", *[1.005] * 20)
    assert compare(a, b).verdict == "undecided"
    assert compare(a, b, minimum_gain=0.001).verdict == "faster"
    assert compare(a, a, minimum_gain=0).verdict == "undecided"


@pytest.mark.parametrize(("rounds", "verdict"), [(1, "undecided"), (5, "undecided"), (6, "faster")])
def test_a_few_rounds_cannot_be_sure(rounds: int, verdict: str) -> None:
    found = compare(rounds_of("a", *[1.0] * rounds), rounds_of("b", *[2.0] * rounds))
    assert found.verdict == verdict
    assert found.ratio == pytest.approx(2)


def test_a_comparison_is_repeatable_and_says_itself_in_a_sentence() -> None:
    a, b = pair(Simulated(3), gain=1.05)
    assert compare(a, b) == compare(a, b)
    known = compare(rounds_of("engine", *[1.0] * 9), rounds_of("plain", *[1.25] * 9))
    assert known.sentence() == "engine is 1.250 times as fast as plain (95 % between 1.250 and 1.250): faster"


def test_what_was_not_measured_together_is_not_compared() -> None:
    with pytest.raises(ValueError, match="measure them together"):
        compare(rounds_of("a", 1.0, 1.0), rounds_of("b", 1.0))
    with pytest.raises(ValueError, match="took no time"):
        compare(rounds_of("a", 0.0), rounds_of("b", 1.0))


# --- how it is measured ---


def test_each_round_runs_every_candidate_once_for_as_long_as_asked() -> None:
    timer = Simulated(sigma=0.001)
    done: list[tuple[int, int]] = []
    found = interleave(
        [Engine("quick", 1e-4), Engine("slow", 0.1)],
        timer,
        rounds=4,
        seconds_per_lap=0.05,
        progress=lambda n, of: done.append((n, of)),
    )
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [m.name for m in found] == ["quick", "slow"]
    rounds = timer.laps[-8:]
    assert [name for name, _ in rounds] == [
        "quick",
        "slow",
        "slow",
        "quick",
        "slow",
        "quick",
        "quick",
        "slow",
    ]
    quick, slow = found
    assert quick.rounds == slow.rounds == 4
    assert all(len(lap) == pytest.approx(500, rel=0.02) for lap in quick.laps)
    assert all(len(lap) == measure.MINIMUM_RUNS for lap in slow.laps)
    assert dict(rounds)["slow"] == measure.MINIMUM_RUNS + measure.LEAD


def test_every_candidate_has_every_place_and_every_neighbour_alike() -> None:
    for count in (1, 2, 3, 4):
        rounds = [order(count, n) for n in range(2 * count)]
        assert all(sorted(r) == list(range(count)) for r in rounds)
        for i in range(count):
            places = [r.index(i) for r in rounds]
            assert sorted(places) == sorted(list(range(count)) * 2)
            for j in range(count):
                assert i == j or sum(r.index(i) < r.index(j) for r in rounds) == count


def test_the_first_inference_of_a_lap_does_not_count() -> None:
    class ColdStart(Simulated):
        def lap(self, candidate: Engine, runs: int) -> list[float]:
            return [50.0, *super().lap(candidate, runs)[1:]]

    a, b = pair(ColdStart(), rounds=3)
    assert max(a.samples.max(), b.samples.max()) < 0.01


def test_warming_up_goes_on_until_the_times_are_steady() -> None:
    def cold(now: float) -> float:
        return 1 + 2 * max(0.0, 0.15 - now)

    timer = Simulated(sigma=0.002, slowness=cold)
    (found,) = interleave([Engine("a", 1e-3)], timer, rounds=3)
    assert found.notes == ()
    assert found.medians == pytest.approx([1e-3] * 3, rel=0.01)
    warm = Simulated(sigma=0.002)
    interleave([Engine("a", 1e-3)], warm, rounds=3)
    assert len(warm.laps) - 3 == 1 + measure.STEADY_LAPS < len(timer.laps) - 3


def test_warming_up_has_an_end_and_says_that_the_times_never_were_steady() -> None:
    timer = Simulated(slowness=lambda now: 1 + now)
    (found,) = interleave([Engine("a", 1e-2)], timer, rounds=1, warm_up_seconds=1.0)
    assert found.notes == ("the times of a were not steady after its warm-up",)
    assert sum(runs for _, runs in timer.laps) < 200


def test_a_slow_first_inference_does_not_shorten_the_laps() -> None:
    class Loading(Simulated):
        def lap(self, candidate: Engine, runs: int) -> list[float]:
            times = super().lap(candidate, runs)
            return [9.0, *times[1:]] if len(self.laps) == 1 else times

    (found,) = interleave([Engine("a", 1e-3)], Loading(), rounds=2)
    assert len(found.laps[0]) == pytest.approx(50, abs=2)


def test_a_timer_that_sees_no_time_pass_comes_to_an_end() -> None:
    (found,) = interleave([Engine("a", 0.0)], Simulated(), rounds=1)
    assert len(found.samples) == measure.MAXIMUM_RUNS
    assert found.throughput == float("inf")


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        interleave([Engine("a", 1e-3)], Simulated(), rounds=0)


def test_the_figures_are_those_of_all_single_times() -> None:
    found = Measured("a", (np.arange(1, 51) / 1e3, np.arange(51, 102) / 1e3))
    assert found.p50 == pytest.approx(0.051)
    assert found.p95 == pytest.approx(0.096)
    assert found.p99 == pytest.approx(0.1)
    assert found.mean == pytest.approx(0.051)
    assert found.throughput == pytest.approx(1 / 0.051)
    assert found.medians == pytest.approx([0.0255, 0.076])
    part = latency(found)
    assert part.measured
    assert (part.p50, part.p95, part.p99) == pytest.approx((51, 96, 100))


# --- CUDA events ---


class FakeEvent:
    """An event of a GPU that takes 2 ms for each inference started before it is recorded."""

    log: ClassVar[list[str]] = []
    made = 0
    now = 0.0

    def __init__(self) -> None:
        FakeEvent.made += 1
        self.at: float | None = None

    def record(self, stream: int) -> None:
        FakeEvent.log.append(f"record {stream}")
        self.at = FakeEvent.now

    def synchronize(self) -> None:
        FakeEvent.log.append("synchronize")

    def seconds_since(self, earlier: FakeEvent) -> float:
        assert FakeEvent.log[-1] == "synchronize"
        assert self.at is not None
        assert earlier.at is not None
        return self.at - earlier.at


@dataclass
class Started:
    name: str = "started"
    stream: int = 42

    def enqueue(self) -> None:
        FakeEvent.log.append("enqueue")
        FakeEvent.now += 0.002


def test_events_stand_around_every_inference_and_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "log", [])
    monkeypatch.setattr(FakeEvent, "made", 0)
    timer = CudaTimer()
    assert timer.lap(Started(), 3) == pytest.approx([0.002] * 3)
    assert FakeEvent.log == ["record 42", *["enqueue", "record 42"] * 3, "synchronize"]
    assert timer.lap(Started(), 2) == pytest.approx([0.002] * 2)
    assert FakeEvent.made == 4
    assert len(timer.lap(Started(), 5)) == 5
    assert FakeEvent.made == 6


def test_the_api_of_events_is_that_of_the_cuda_module() -> None:
    for name in ("record", "synchronize", "seconds_since"):
        assert callable(getattr(cuda.Event, name))


def test_measuring_is_imported_without_cuda_onnx_or_onnxruntime() -> None:
    code = (
        "import sys, trtfuse.measure, trtfuse.measure_ort, trtfuse.clocks\n"
        "print([m for m in ('cuda', 'trtfuse.cuda', 'pynvml', 'onnx', 'onnxruntime') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- clocks ---


class NVMLError(Exception):
    pass


class FakeNvml(types.ModuleType):
    """pynvml as far as it is used, with its numbers. Whatever is in `unsupported` raises."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    nvmlClocksEventReasonGpuIdle = 0x1
    nvmlClocksEventReasonSwPowerCap = 0x4
    nvmlClocksEventReasonHwSlowdown = 0x8
    nvmlClocksEventReasonSyncBoost = 0x10
    nvmlClocksEventReasonSwThermalSlowdown = 0x20
    nvmlClocksEventReasonHwThermalSlowdown = 0x40
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80
    NVMLError = NVMLError

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.users = 0
        self.reasons = 0x1
        self.unsupported: set[str] = set()

    def _answer(self, name: str, value: int) -> int:
        if name in self.unsupported:
            raise NVMLError("Not Supported")
        return value

    def nvmlInit(self) -> None:
        self.users += self._answer("init", 1)

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlDeviceGetHandleByPciBusId(self, bus: str) -> str:
        self._answer("handle", 0)
        return bus

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return self._answer("clock", {1: 1980, 2: 3201}[kind])

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return self._answer("temperature", 61)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return self._answer("power", 512_500)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self._answer("reasons", self.reasons)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(
        cuda, "device_properties", lambda device: types.SimpleNamespace(bus=f"00000000:0{device}:00.0")
    )
    return fake


def test_a_gpu_tells_its_clocks_and_what_slows_it_down(nvml: FakeNvml) -> None:
    with ClockSource.open(3) or pytest.fail("no clocks") as source:
        assert source.sample() == Sample(1980, 3201, 61, 512.5, ())  # idle between laps is no throttling
        nvml.reasons = 0x4 | 0x8 | 0x20 | 0x40
        assert source.sample().throttled == ("power", "temperature", "hardware slowdown")
        assert source._handle == "00000000:03:00.0"
        assert nvml.users == 1
    assert nvml.users == 0


def test_what_a_gpu_does_not_tell_is_none(nvml: FakeNvml) -> None:
    nvml.unsupported = {"clock", "temperature", "power", "reasons"}
    source = ClockSource.open("00000000:17:00.0")
    assert source is not None
    assert source.sample() == Sample()
    assert Clocks.of([source.sample()]) is None


@pytest.mark.parametrize("missing", ["init", "handle"])
def test_there_are_no_clocks_without_a_driver_or_its_gpu(nvml: FakeNvml, missing: str) -> None:
    nvml.unsupported = {missing}
    assert ClockSource.open() is None
    assert nvml.users == 0


def test_there_are_no_clocks_without_the_package_or_cuda(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_gpu(device: int) -> None:
        raise EnvironmentMissing("there is no NVIDIA GPU to run on")

    monkeypatch.setattr(cuda, "device_properties", no_gpu)
    assert ClockSource.open(0) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert ClockSource.open("00000000:17:00.0") is None


def test_clocks_are_summed_up_in_a_sentence() -> None:
    seen = Clocks.of([Sample(1980), Sample(1830, 3201, 70, 690.0, ("power",)), Sample(), Sample(1900)])
    assert seen == Clocks(1830, 1900, 1980, ("power",), 70, 690.0)
    assert seen.sentence() == "SM clock 1830 to 1980 MHz; throttled by power"
    (note,) = seen.notes()
    assert note.startswith("the SM clock moved by 8 % while this was measured (SM clock 1830 to 1980 MHz;")
    still = Clocks(1980, 1980, 1980)
    assert still.sentence() == "SM clock 1980 MHz"
    assert still.notes() == Clocks(1890, 1950, 1980).notes() == ()


def test_clocks_are_sampled_between_laps_and_go_with_the_times() -> None:
    timer = Simulated()

    class Falling:
        def __init__(self) -> None:
            self.at: list[int] = []

        def sample(self) -> Sample:
            self.at.append(len(timer.laps))
            return Sample(2000 - 50 * len(self.at))

    clocks = Falling()
    found = interleave([Engine("a", 1e-3), Engine("b", 1e-3)], timer, rounds=3, clocks=clocks)
    assert clocks.at == list(range(clocks.at[0], clocks.at[0] + 6))
    assert clocks.at[-1] == len(timer.laps)
    for measured in found:
        assert measured.clocks == Clocks(1700, 1825, 1950)
        assert "moved by 13 %" in measured.notes[-1]


# --- ONNX Runtime ---


class FakeValue:
    def __init__(self, array: np.ndarray, device: str, index: int) -> None:
        self.array, self.where = array, (device, index)

    def data_ptr(self) -> int:
        return id(self.array)


class FakeBinding:
    def __init__(self) -> None:
        self.inputs: dict[str, tuple] = {}
        self.outputs: dict[str, tuple] = {}

    def bind_input(self, name: str, *rest: object) -> None:
        self.inputs[name] = rest

    def bind_output(self, name: str, *rest: object) -> None:
        self.outputs[name] = rest

    def synchronize_outputs(self) -> None:
        pass


class FakeOptions:
    log_severity_level = 2

    def __init__(self) -> None:
        self.entries: dict[str, str] = {}

    def add_run_config_entry(self, key: str, value: str) -> None:
        self.entries[key] = value


class FakeRuntime(types.ModuleType):
    """onnxruntime as far as it is used. refuses: what it raises when a CUDA graph is asked for; breaks: what
    it raises always; at_run: whether it raises then, else when the session is made. loads: whether the CUDA
    provider does."""

    class Fail(Exception):
        pass

    SessionOptions = RunOptions = FakeOptions
    OrtValue = types.SimpleNamespace(ortvalue_from_numpy=FakeValue)

    def __init__(self) -> None:
        super().__init__("onnxruntime")
        self.sessions: list[types.SimpleNamespace] = []
        self.providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
        self.loads, self.at_run = True, False
        self.refuses = self.breaks = ""
        self.severity: list[int] = []
        self.runs: list[tuple] = []

    def get_available_providers(self) -> list[str]:
        return self.providers

    def preload_dlls(self) -> None:
        if not self.loads:
            print("Failed to load libcublas.so.13: cannot open shared object file\nPlease follow the docs")

    def set_default_logger_severity(self, level: int) -> None:
        self.severity.append(level)

    def InferenceSession(self, model: str, options, providers, enable_fallback: int):
        assert enable_fallback == 0
        (_, cuda_options), cpu = providers
        refusal = self.breaks or (self.refuses if cuda_options["enable_cuda_graph"] == "1" else "")

        def fail() -> None:
            if refusal:
                raise FakeRuntime.Fail(refusal)

        def run(binding: FakeBinding, run_options: FakeOptions) -> None:
            fail()
            self.runs.append((binding, run_options.entries))

        if not self.at_run:
            fail()
        binding = FakeBinding()
        session = types.SimpleNamespace(
            options=cuda_options,
            binding=binding,
            get_providers=lambda: ["CUDAExecutionProvider", cpu] if self.loads else [cpu],
            io_binding=lambda: binding,
            get_inputs=lambda: [
                types.SimpleNamespace(name="x", type="tensor(float16)"),
                types.SimpleNamespace(name="b", type="tensor(bfloat16)"),
            ],
            get_outputs=lambda: [types.SimpleNamespace(name="y")],
            run_with_iobinding=run,
        )
        self.sessions.append(session)
        return session


FEED = {"x": np.ones((2, 3), np.float16).T, "b": np.array([1.0, 2.0], np.float32)}


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    fake = FakeRuntime()
    monkeypatch.setitem(sys.modules, "onnxruntime", fake)
    yield fake
    assert fake.severity in ([], [4, 2])  # nobody else's logging is left silent


def test_onnxruntime_runs_on_the_stream_with_everything_on_the_gpu(runtime: FakeRuntime) -> None:
    candidate = OrtCandidate("m.onnx", FEED, 77, device=1)
    (session,) = runtime.sessions
    assert session.options == {
        "device_id": "1",
        "user_compute_stream": "77",
        "use_tf32": "0",
        "enable_cuda_graph": "1",
    }
    assert (candidate.name, candidate.stream) == ("onnxruntime", 77)
    assert candidate.notes == ["ONNX Runtime replays a CUDA graph"]
    assert [bound[:4] for bound in session.binding.inputs.values()] == [
        ("cuda", 1, 10, (3, 2)),
        ("cuda", 1, 16, (2,)),
    ]
    assert session.binding.outputs == {"y": ("cuda", 1)}
    x, b = candidate._inputs
    assert x.array.flags.c_contiguous
    assert [v.data_ptr() for v in (x, b)] == [bound[4] for bound in session.binding.inputs.values()]
    assert b.array.view(ml_dtypes.bfloat16).tolist() == [1, 2]
    before = len(runtime.runs)
    candidate.enqueue()
    assert runtime.runs[before:] == [(session.binding, {"disable_synchronize_execution_providers": "1"})]


@pytest.mark.parametrize("at_run", [False, True])
def test_onnxruntime_runs_without_a_graph_where_it_refuses_one(runtime: FakeRuntime, at_run: bool) -> None:
    runtime.refuses = "[ONNXRuntimeError] : 1 : FAIL : nodes are\n on the CPU provider"
    runtime.at_run = at_run
    candidate = OrtCandidate("m.onnx", FEED, 77, tf32=True)
    assert candidate.notes == ["ONNX Runtime runs without a CUDA graph: nodes are on the CPU provider"]
    assert runtime.sessions[-1].options["enable_cuda_graph"] == "0"
    assert runtime.sessions[-1].options["use_tf32"] == "1"
    assert runtime.runs[-1][0] is runtime.sessions[-1].binding


def test_onnxruntime_makes_no_graph_where_none_is_wanted(runtime: FakeRuntime) -> None:
    candidate = OrtCandidate("m.onnx", FEED, 77, cuda_graph=False)
    assert [s.options["enable_cuda_graph"] for s in runtime.sessions] == ["0"]
    assert candidate.notes == []


def test_onnxruntime_on_the_cpu_is_not_taken_for_the_gpu(
    runtime: FakeRuntime, capsys: pytest.CaptureFixture
) -> None:
    runtime.loads = False
    with pytest.raises(EnvironmentMissing, match=r"does not load \(cannot open shared.*onnxruntime-gpu"):
        OrtCandidate("m.onnx", FEED, 77)
    assert capsys.readouterr().out == ""
    runtime.providers = ["CPUExecutionProvider"]
    with pytest.raises(EnvironmentMissing, match="no CUDA provider"):
        OrtCandidate("m.onnx", FEED, 77)


def test_what_onnxruntime_cannot_run_is_said_in_one_line(runtime: FakeRuntime) -> None:
    runtime.breaks = "[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : no kernel\nfor Foo"
    with pytest.raises(InputError, match=r"cannot run m.onnx on the GPU: no kernel for Foo$"):
        OrtCandidate("m.onnx", FEED, 77)
    runtime.severity.clear()
    runtime.breaks = ""
    with pytest.raises(InputError, match=r"input 'b' of m.onnx is missing"):
        OrtCandidate("m.onnx", {"x": FEED["x"]}, 77)
    with pytest.raises(ValueError, match="a stream of its own"):
        OrtCandidate("m.onnx", FEED, 0)
