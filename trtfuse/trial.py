"""Engines on the GPU that they were built for: proven, timed beside each other, and the fastest taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trtfuse import plugin_library, record, targets
from trtfuse.errors import BuildError, GateError, TrtfuseError
from trtfuse.fusion import Site
from trtfuse.proof import Proof
from trtfuse.record import Options
from trtfuse.result import SiteReport
from trtfuse.shapes import Profile
from trtfuse.targets import BuildOptions, Plan, Plugins

if TYPE_CHECKING:
    from trtfuse.benchmark import Feed, Outcome
    from trtfuse.measure import Comparison
    from trtfuse.verify import Accuracy

PLAIN = "plain"
ORT = "onnxruntime"


@dataclass(frozen=True)
class Job:
    """One build. folder: for what is not yet proven."""

    folder: Path
    model: Path
    target: str
    options: Options
    verbose: bool
    progress: Callable[[str, int, int], None] | None


@dataclass(frozen=True)
class Entrant:
    """An engine that may be the product. accuracy: on the GPU, None where it was not run."""

    name: str
    plan: Plan
    sites: list[SiteReport]
    plugins: Plugins | None = None
    file: Path | None = None
    accuracy: Accuracy | None = None


def plugins(sites: list[Site], options: Options) -> Plugins | None:
    """The plugins of the chosen sites, None if none is to be one.

    Raises EnvironmentMissing where there is no plugin library.
    """
    names = tuple(s.id for s in sites if s.lowering == "plugin")
    return Plugins(plugin_library.locate(), names, not options.external_plugins) if names else None


def build_options(job: Job, profile: Profile, needed: Plugins | None) -> BuildOptions:
    """How the target is to build."""
    cache = job.options.timing_cache
    if cache is None and job.target == "tensorrt":
        cache = record.timing_cache_path()
    return BuildOptions(
        profile=profile,
        compute_capability=job.options.compute_capability,
        timing_cache=cache,
        plugins=needed,
        tf32=job.options.tf32,
        verbose=job.verbose,
        progress=job.progress,
    )


def prove(job: Job, entrant: Entrant, proof: Proof) -> Entrant:
    """The engine, held against the original. Raises GateError where an output differs."""
    from trtfuse.verify_engine import compare_engine

    file = job.folder / f"{entrant.name}.engine"
    file.write_bytes(entrant.plan.data)
    accuracy = compare_engine(
        proof.reference,
        file,
        proof.inputs,
        proof.tolerances,
        library=_outside(entrant.plugins),
        tf32=job.options.tf32,
    )
    if not accuracy.passed:
        raise GateError(
            f"the engine differs from the original: {accuracy.reason}; see whether TensorRT alone does by "
            "--select none, or allow more by --atol and --rtol"
        )
    return replace(entrant, file=file, accuracy=accuracy)


def plain(job: Job, proof: Proof, profile: Profile, sites: Sequence[SiteReport]) -> Entrant:
    """TensorRT's own engine of the original. Raises BuildError where it refuses that."""
    plan = targets.build(job.target, proof.reference, build_options(job, profile, None))
    file = job.folder / f"{PLAIN}.engine"
    file.write_bytes(plan.data)
    return Entrant(PLAIN, plan, [_kept(s) for s in sites], file=file)


def _kept(site: SiteReport) -> SiteReport:
    return replace(site, lowering="keep", bytes_after=site.bytes_before, launches_after=site.launches_before)


def measure(job: Job, entrants: Sequence[Entrant], proof: Proof, profile: Profile) -> Outcome:
    """Times engines and ONNX Runtime, interleaved, at the profile's preferred shapes.

    What cannot be timed is said in the outcome.
    """
    from trtfuse import benchmark

    files = {e.name: e.file for e in entrants if e.file is not None}
    library = next((found for e in entrants if (found := _outside(e.plugins)) is not None), None)
    order = benchmark.Job(
        files,
        _preferred(proof, profile),
        proof.reference,
        trusted=True,
        tf32=job.options.tf32,
        library=library,
    )
    try:
        return benchmark.run(order)
    except TrtfuseError as e:  # an engine that is proven is not lost for want of its times
        return benchmark.Outcome(unmeasured=dict.fromkeys((*files, ORT), str(e)))


def _outside(needed: Plugins | None) -> Path | None:
    """The library of an engine that does not carry it."""
    return needed.library if needed is not None and not needed.embedded else None


def _preferred(proof: Proof, profile: Profile) -> Feed:
    """The inputs whose shapes are the profile's preferred ones, else the first."""
    opt = dict(profile.opt)
    for feed in proof.inputs:
        if all(tuple(feed[n].shape) == tuple(s) for n, s in opt.items() if n in feed):
            return feed
    return proof.inputs[0]


def beside_plain(job: Job, entrant: Entrant, proof: Proof, profile: Profile) -> Outcome:
    """The times of an engine, of TensorRT's own and of ONNX Runtime's; its name in them is "engine"."""
    runners, refused = [entrant], ""
    try:
        runners.append(plain(job, proof, profile, entrant.sites))
    except BuildError as e:
        refused = f"TensorRT does not build the original: {e}"
    outcome = measure(job, runners, proof, profile)
    if refused:
        outcome.unmeasured[PLAIN] = refused
    return _as_engine(outcome, entrant.name)


def fastest(entrants: Sequence[Entrant], outcome: Outcome) -> tuple[Entrant, Outcome]:
    """The engine to ship, its sites saying why, and the times with it under the name "engine".

    One of ours must be faster than TensorRT's own by more than the minimum gain, its whole confidence
    interval: else that is taken.
    """
    from trtfuse.measure import compare

    timed = [e for e in entrants if e.name in outcome.measured]
    if not timed:
        return entrants[0], _as_engine(outcome, entrants[0].name)
    own = next((e for e in timed if e.name == PLAIN), None)
    best = min((e for e in timed if e is not own), key=lambda e: outcome.measured[e.name].p50, default=own)
    assert best is not None
    compared = {
        e.name: compare(outcome.measured[e.name], outcome.measured[PLAIN])
        for e in timed
        if own is not None and e is not own
    }
    if own is not None and best is not own and compared[best.name].verdict != "faster":
        best = own
    reason = _reason(best, compared)
    sites = [s if s.lowering == "keep" and best is not own else replace(s, reason=reason) for s in best.sites]
    return replace(best, sites=sites), _as_engine(outcome, best.name)


def _reason(best: Entrant, compared: dict[str, Comparison]) -> str:
    times = "; ".join(
        f"{name} {c.ratio:.3f} times the speed of plain TensorRT ({c.low:.3f} to {c.high:.3f})"
        for name, c in compared.items()
    )
    what = (
        "TensorRT's own engine of the original is not beaten"
        if best.name == PLAIN
        else f"{best.name} is fastest"
    )
    return f"measured: {what} ({times})" if times else f"measured: {what}"


def _as_engine(outcome: Outcome, name: str) -> Outcome:
    """The times with the shipped engine as "engine", compared with all others."""
    from trtfuse.measure import compare

    measured = outcome.measured
    if name not in measured:
        return replace(outcome, unmeasured={"engine": outcome.unmeasured.get(name, ""), **outcome.unmeasured})
    return replace(
        outcome,
        measured={"engine": measured[name], **measured},
        comparisons={n: compare(measured[name], m) for n, m in measured.items() if n != name},
    )
