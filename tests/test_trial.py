"""Which engine is shipped: the fastest of those that are proven, and TensorRT's own unless it is beaten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtfuse import benchmark, engines, plugin_library, trial
from trtfuse.benchmark import Outcome
from trtfuse.errors import BuildError, GateError, RunError
from trtfuse.measure import Measured
from trtfuse.result import SiteReport
from trtfuse.targets import Plan
from trtfuse.trial import PLAIN, Entrant


def plan() -> Plan:
    return Plan(b"engine", "tensorrt", ("9.0",), 1.0, 3, "10.6.0", ())


def site(lowering: str = "plugin") -> SiteReport:
    return SiteReport(
        "TrtfuseSoftmax_0", "TrtfuseSoftmax", "", ["n"], lowering, "all sites are fused", 8, 4, 2, 1, "y"
    )


def entrant(name: str) -> Entrant:
    return Entrant(name, plan(), [site("keep" if name == PLAIN else "plugin")], file=Path(f"{name}.engine"))


def times(name: str, us: float, noise: float = 0.002, seed: int = 0) -> Measured:
    generator = np.random.default_rng(seed)
    laps = tuple(us * 1e-6 * (1 + noise * generator.standard_normal(50)) for _ in range(20))
    return Measured(name, laps)


def judged(**us: float) -> tuple[Entrant, Outcome]:
    outcome = Outcome({n: times(n, t, seed=k) for k, (n, t) in enumerate(us.items())})
    return trial.fastest([entrant(n) for n in us], outcome)


def test_the_fastest_is_taken_and_its_sites_say_by_how_much() -> None:
    best, outcome = judged(native=90.0, plugins=80.0, plain=100.0)
    assert best.name == "plugins"
    assert best.sites[0].reason.startswith("measured: plugins is fastest (native 1.11")
    assert "plugins 1.2" in best.sites[0].reason
    assert outcome.measured["engine"] is outcome.measured["plugins"]
    assert outcome.comparisons["plain"].ratio == pytest.approx(1.25, rel=0.01)


@pytest.mark.parametrize("ours", [100.0, 99.6, 130.0])
def test_tensorrts_own_engine_is_shipped_unless_it_is_beaten(ours: float) -> None:
    best, outcome = judged(plugins=ours, plain=100.0)
    assert best.name == PLAIN
    assert best.sites[0].lowering == "keep"
    assert "TensorRT's own engine of the original is not beaten (plugins " in best.sites[0].reason
    assert outcome.measured["engine"] is outcome.measured[PLAIN]


def test_lucky_noise_does_not_win() -> None:
    won = 0
    for seed in range(20):
        outcome = Outcome(
            {"native": times("native", 100, 0.03, 2 * seed), "plain": times("plain", 100, 0.03, 2 * seed + 1)}
        )
        won += trial.fastest([entrant("native"), entrant("plain")], outcome)[0].name == "native"
    assert won == 0


def test_without_times_the_first_is_taken_and_the_reason_is_kept() -> None:
    found = [entrant("native"), entrant("plain")]
    best, outcome = trial.fastest(found, Outcome(unmeasured={"native": "the measurement crashed"}))
    assert best is found[0]
    assert outcome.unmeasured["engine"] == "the measurement crashed"


def test_one_that_was_not_timed_is_no_candidate() -> None:
    outcome = Outcome({"plugins": times("plugins", 80), "plain": times("plain", 100, seed=1)})
    assert (
        trial.fastest([entrant("native"), entrant("plugins"), entrant("plain")], outcome)[0].name == "plugins"
    )


# --- the contest of a build, with engines that are not built ---


class Contest:
    """Stands for everything of `engines.make` that needs a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **us: float) -> None:
        self.us, self.built, self.fails = us, [], {}  # type: ignore[var-annotated]
        monkeypatch.setattr(engines, "_entrant", self.entrant)
        monkeypatch.setattr(trial, "plain", lambda *_: self.one(PLAIN))
        monkeypatch.setattr(trial, "prove", lambda job, e, proof: e)
        monkeypatch.setattr(benchmark, "run", self.run)
        monkeypatch.setattr(plugin_library, "find", lambda: Path("lib.so"))

    def one(self, name: str) -> Entrant:
        self.built.append(name)
        if name in self.fails:
            raise self.fails[name]
        return entrant(name)

    def entrant(self, name: str, *_: Any) -> Entrant:
        return self.one(name)

    def run(self, order: Any) -> Outcome:
        if not self.us:
            raise RunError("the measurement crashed: signal 11")
        return Outcome({n: times(n, self.us[n], seed=k) for k, n in enumerate(order.engines)})


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the contest on a real model; the result."""
    import onnx
    from graphs import Graph, finish, layer_norm

    from trtfuse import model as models
    from trtfuse.proof import Proof
    from trtfuse.record import Options
    from trtfuse.result import Result
    from trtfuse.shapes import derive_profile
    from trtfuse.sites import match
    from trtfuse.stages import Stages
    from trtfuse.tolerances import Tolerances

    def run(contest: Contest, **options: Any) -> Any:
        g = Graph(13)
        model = finish(g, layer_norm(g, g.input("x", (2, 4, 32))))
        path = tmp_path / "m.onnx"
        onnx.save(model, path)
        source = models.load(path)
        matched = match(source, "auto", "tensorrt")
        result = Result(path, "tensorrt", source, [], [], profile=derive_profile(model))
        job = trial.Job(tmp_path, path, "tensorrt", Options(**options), False, None)

        inputs = g.feeds[:1]
        engines.make(job, source, matched, Proof(path, inputs, Tolerances(), []), result, Stages(None))
        return result

    return run


def test_native_plugins_and_plain_are_built_and_timed(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    contest = Contest(monkeypatch, native=95.0, plugins=80.0, plain=100.0)
    result = make(contest)
    assert contest.built == ["native", "plugins", "plain"]
    assert result.outcome.measured["engine"].name == "plugins"
    assert result.sites[0].reason.startswith("measured: plugins is fastest")


@pytest.mark.parametrize("error", [BuildError("no kernel"), GateError("off by 3")])
def test_a_candidate_that_fails_is_out_and_the_others_go_on(
    make: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    contest = Contest(monkeypatch, native=95.0, plain=100.0)
    contest.fails["plugins"] = error
    result = make(contest)
    assert result.outcome.measured["engine"].name == "native"
    assert f"the engine with plugins sites is out: {error}" in result.notes


def test_without_a_plugin_library_native_and_plain_are_tried(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    contest = Contest(monkeypatch, native=95.0, plain=100.0)
    monkeypatch.setattr(plugin_library, "find", lambda: None)
    result = make(contest)
    assert contest.built == ["native", "plain"]
    assert any("there is no plugin library" in note for note in result.notes)


def test_where_nothing_builds_the_first_reason_is_told(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    contest = Contest(monkeypatch, plain=100.0)
    for name in ("native", "plugins", "plain"):
        contest.fails[name] = BuildError(f"{name} does not build")
    with pytest.raises(BuildError, match="plugins does not build"):
        make(contest)


def test_an_engine_is_not_lost_for_want_of_its_times(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    result = make(Contest(monkeypatch))
    assert result.engine is not None
    assert result.outcome.unmeasured["engine"] == "the measurement crashed: signal 11"


def test_no_measuring_builds_one_engine(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    contest = Contest(monkeypatch, fused=1.0)
    result = make(contest, measure=False)
    assert contest.built == ["fused"]
    assert result.outcome is None


def test_a_forced_choice_is_timed_beside_plain(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    contest = Contest(monkeypatch, fused=110.0, plain=100.0)
    result = make(contest, select="all")
    assert contest.built == ["fused", "plain"]
    assert result.outcome.measured["engine"].name == "fused"  # asked for, so shipped, though it is slower
    assert result.outcome.comparisons["plain"].ratio == pytest.approx(0.909, rel=0.01)
