"""From chosen sites to a proven engine, and with a GPU to the fastest of several."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trtfuse import lower, normalise, plugin_library, targets, trial
from trtfuse import model as models
from trtfuse.errors import BuildError, GateError, TrtfuseError
from trtfuse.fusion import Site
from trtfuse.model import Model
from trtfuse.proof import Proof
from trtfuse.result import Result, site_reports
from trtfuse.sites import Matched, match
from trtfuse.stages import Stages
from trtfuse.trial import Entrant, Job

if TYPE_CHECKING:
    from trtfuse.benchmark import Outcome
    from trtfuse.targets import Plan


def make(job: Job, plain: Model, matched: Matched, proof: Proof, result: Result, stages: Stages) -> None:
    """Makes the engine, into `result`: of the chosen sites, or with "auto" on a GPU the fastest."""
    assert result.profile is not None
    on_gpu = job.target == "tensorrt"
    if on_gpu and job.options.select == "auto" and job.options.measure:
        entrant, result.outcome = _fastest(job, plain, matched, proof, result, stages)
    else:
        entrant = _entrant("fused", job, plain, matched, proof, result, stages)
        if on_gpu and job.options.measure:
            with stages("measure"):
                result.outcome = trial.beside_plain(job, entrant, proof, result.profile)
    result.engine, result.plugins, result.sites = entrant.plan, entrant.plugins, entrant.sites
    result.engine_accuracy = entrant.accuracy
    result.notes += entrant.plan.notes


def _entrant(
    name: str,
    job: Job,
    plain: Model,
    matched: Matched,
    proof: Proof,
    result: Result,
    stages: Stages,
) -> Entrant:
    """An engine of a model with some choice of its sites; where there is a GPU for it, proven there."""
    assert result.profile is not None
    with stages("lower"):
        lowered, chosen = _lowered(plain, matched, job, proof, result.notes)
        plugins = trial.plugins(chosen, job.options)
    with stages("build"):
        plan = _built(job.target, lowered, trial.build_options(job, result.profile, plugins))
    sites = site_reports(matched.sites, matched.model, result.profile)
    entrant = Entrant(name, plan, sites, plugins)
    if job.target != "tensorrt":
        return entrant
    with stages("verify engine"):
        return trial.prove(job, entrant, proof)


def _fastest(
    job: Job, plain: Model, matched: Matched, proof: Proof, result: Result, stages: Stages
) -> tuple[Entrant, Outcome]:
    """The fastest of TensorRT's own engine, one with native sites and one with plugins, all proven."""
    assert result.profile is not None
    entrants: list[Entrant] = []
    failed: TrtfuseError | None = None
    for name, select in (("native", "auto"), ("plugins", "all")):
        chosen = matched if select == "auto" else match(plain, select, job.target)
        wanted = {s.lowering for s in chosen.chosen}
        if not wanted or (select == "all" and "plugin" not in wanted):
            continue
        if select == "all" and plugin_library.find() is None:
            result.notes.append("plugins are not tried: there is no plugin library (see `trtfuse doctor`)")
            continue
        asked = replace(job, options=replace(job.options, select=select))
        try:
            entrants.append(_entrant(name, asked, plain, chosen, proof, result, stages))
        except (BuildError, GateError) as e:
            failed = e
            result.notes.append(f"the engine with {name} sites is out: {e}")
    with stages("build"):
        try:
            entrants.append(trial.plain(job, proof, result.profile, result.sites))
        except BuildError as e:
            if not entrants:
                raise failed or e from e
    with stages("measure"):
        outcome = trial.measure(job, entrants, proof, result.profile)
        best, outcome = trial.fastest(entrants, outcome)
    if best.name == trial.PLAIN:
        with stages("verify engine"):
            best = trial.prove(job, best, proof)
    return best, outcome


def _lowered(
    plain: Model, matched: Matched, job: Job, proof: Proof, notes: list[str]
) -> tuple[Path, list[Site]]:
    """Writes the file that the target parses, and proves it; the file, and the sites as they are in it.

    The model is raised to the opset that spells native sites shortest, if what onnx's converter makes of it
    has the same sites and the same outputs.
    """
    path = job.folder / "lowered.onnx"
    opset = lower.wished_opset(matched.chosen, targets.newest_opset(job.target))
    newer = lower.raised(plain, opset) if opset > plain.opset else None
    if newer is not None:
        again = match(newer, job.options.select, job.target)
        if [(s.id, s.lowering) for s in again.chosen] == [(s.id, s.lowering) for s in matched.chosen]:
            with contextlib.suppress(*models.CHECKER_ERRORS):
                made = lower.lowered(newer, again.view, again.chosen)
                models.save(normalise.without_placeholders(made), path)
                if proof.accuracy(path).passed:
                    notes.append(f"for the target the model is raised from opset {plain.opset} to {opset}")
                    return _for_target(made, again.chosen, path), again.chosen
        notes.append(f"the model stays at opset {plain.opset}: onnx's converter to {opset} changes it")
    made = lower.lowered(plain, matched.view, matched.chosen)
    models.save(normalise.without_placeholders(made), path)
    proof.gate(path, "file for the target")
    return _for_target(made, matched.chosen, path), matched.chosen


def _for_target(made: Model, chosen: list[Site], path: Path) -> Path:
    """The proven file; with plugins another, with their nodes in place of the functions that were proven."""
    if not any(s.lowering == "plugin" for s in chosen):
        return path
    with_plugins = path.with_name("plugins.onnx")
    models.save(normalise.without_placeholders(lower.with_plugins(made, chosen)), with_plugins, check=False)
    return with_plugins


def _built(target: str, lowered: Path, options: targets.BuildOptions) -> Plan:
    try:
        return targets.build(target, lowered, options)
    except BuildError:
        raise
    except MemoryError as e:
        raise BuildError("the build ran out of memory: close other programs or use a larger machine") from e
