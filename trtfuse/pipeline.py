"""The order of the work: load, normalise, match, choose, rewrite, lower, build, verify, report."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtfuse import engines, files, normalise, record, targets
from trtfuse import model as models
from trtfuse import qdq as quantization
from trtfuse.errors import InputError
from trtfuse.fusions import NAMES
from trtfuse.model import Model
from trtfuse.proof import Proof
from trtfuse.record import Options, Places
from trtfuse.report import check_folder, read_report, write_report
from trtfuse.result import Result, count_nodes, site_reports
from trtfuse.rewrite import rewrite
from trtfuse.shapes import Profile, derive_profile
from trtfuse.sites import Matched, match
from trtfuse.stages import Progress, Stages
from trtfuse.trial import Job

if TYPE_CHECKING:
    import numpy as np

    from trtfuse.verify import Accuracy

Path_ = str | os.PathLike[str]
Inputs = list[dict[str, "np.ndarray[Any, Any]"]]


def fuse_model(model: Model, select: str | Path = "all") -> tuple[Model, Matched]:
    """The fused model of a loaded one, in memory; the model itself where nothing is fused."""
    matched = match(normalise.inline_functions(model, NAMES), select)
    return (rewrite(matched.model, matched.view, matched.chosen) if matched.chosen else model), matched


def fuse(
    model: Path_,
    output: Path_,
    *,
    select: str | Path = "all",
    qdq: str = "keep",
    verify: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Writes `model` with its sites fused to `output`, an ONNX file that runs in any ONNX Runtime.

    select: "all", "none", "auto" or a selection file. qdq: "drop" takes QuantizeLinear and DequantizeLinear
    out first, "auto" those that TensorRT refuses. verify: compare with the original (less what `qdq` took
    out) first, and raise GateError where an output differs.
    Raises InputError for an unusable model, selection or place; nothing is then written.
    """
    stages = Stages(progress)
    model, output = Path(model), Path(output)
    if output.exists() and model.exists() and output.resolve() == model.resolve():
        raise InputError(f"{output} is the model itself: name another output with -o")
    with stages("load"):
        source = models.load(model)
    with stages("match and rewrite"):
        plain, dropped = _without_qdq(source, qdq, "")
        fused, matched = fuse_model(plain, select)
    result = _result(model, "onnx", source, matched, stages)
    result.nodes_after = count_nodes(fused)
    result.notes = dropped
    if verify:
        from trtfuse.verify import Tolerances

        with _workplace(output) as folder, stages("verify"):
            made, reference = folder / output.name, model
            models.save(fused, made)
            if dropped:
                reference = folder / "dequantized.onnx"
                models.save(plain, reference)
            inputs = _inputs(
                reference, source, None, derive_profile(normalise.without_placeholders(source).proto)
            )
            proof = Proof(reference, inputs, Tolerances.default(), result.sites)
            result.accuracy = proof.gate(made, "fused file")
    with stages("write"):
        models.save(fused, output)
    result.fused_path = output
    return result


def explain(
    model: Path_, *, shapes: Sequence[str] = (), qdq: str = "keep", progress: Progress | None = None
) -> Result:
    """Finds the sites and near-misses of a model, with the traffic each site saves. Writes nothing.

    shapes: of dynamic inputs, in either spelling ("x:1x128", "x:[1,128]"), for the traffic. qdq: as `fuse`.
    """
    stages = Stages(progress)
    model = Path(model)
    with stages("load"):
        source = models.load(model)
    with stages("match"):
        plain, dropped = _without_qdq(source, qdq, "")
        matched = match(normalise.inline_functions(plain, NAMES))
    profile = derive_profile(normalise.without_placeholders(source).proto, shapes=shapes)
    result = _result(model, "onnx", source, matched, stages, profile)
    result.notes = dropped
    return result


def check(
    reference: Path_,
    candidate: Path_,
    *,
    shapes: Sequence[str] = (),
    atol: Sequence[str] = (),
    rtol: Sequence[str] = (),
    check_error_stat: Sequence[str] = (),
    load_inputs: Path_ | None = None,
    progress: Progress | None = None,
) -> Accuracy:
    """Compares two ONNX models in ONNX Runtime, `reference` with graph optimizations off.

    Tolerances are in Polygraphy's words ("1e-5", "out:1e-3"). Inputs are generated (seeded) or loaded.
    """
    from trtfuse.verify import Tolerances, compare

    stages = Stages(progress)
    with stages("load"):
        source = models.load(reference)
        models.load(candidate)
    with stages("verify"):
        inputs = _inputs(
            Path(reference),
            source,
            load_inputs,
            derive_profile(normalise.without_placeholders(source).proto, shapes=shapes),
        )
        return compare(
            Path(reference), Path(candidate), inputs, Tolerances.parse(atol, rtol, check_error_stat)
        )


def build(
    model: Path_,
    output: Path_ | None = None,
    *,
    target: str = "auto",
    precision: str = "keep",
    shapes: Sequence[str] = (),
    min_shapes: Sequence[str] = (),
    opt_shapes: Sequence[str] = (),
    max_shapes: Sequence[str] = (),
    select: str | Path = "auto",
    qdq: str = "keep",
    tf32: bool = False,
    compute_capability: Sequence[str] = (),
    external_plugins: bool = False,
    atol: Sequence[str] = (),
    rtol: Sequence[str] = (),
    check_error_stat: Sequence[str] = (),
    load_inputs: Path_ | None = None,
    timing_cache: Path_ | None = None,
    measure: bool = True,
    report: Path_ | None = None,
    force: bool = False,
    verbose: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Fuses `model`, proves the result against ONNX Runtime, builds an engine and reports.

    output: the engine; by default `<model>.engine` in the working directory. The fused file goes beside it
    (`<engine's stem>.fused.onnx`), the manifest too (`<engine>.manifest.json`), the report into `report`, by
    default `<engine's stem>.report`. Where all these are there and nothing that they depend on has changed,
    nothing is done, unless with `force`.
    target: "auto", "tensorrt", "tensorrt-rtx" or "onnx" (the fused file is the product then).
    shapes, min_shapes, opt_shapes, max_shapes: "x:1x128" or "x:[1,128]"; what is left out is derived.
    qdq: "drop" takes QuantizeLinear and DequantizeLinear out first, "auto" those that TensorRT refuses; how
        far that moves the outputs is measured and said, and all further comparisons are with what is left.
    select: "auto" (with the target tensorrt, the fastest of native sites, plugins and TensorRT alone, as
        measured here), "all" (every site that has a plugin becomes one), "none" or a selection file.
    tf32: lets TensorRT compute fp32 in TF32. compute_capability: GPU architectures ("8.9").
    external_plugins: the engine does not carry the plugin library; who loads it must load that first.
    atol, rtol, check_error_stat: tolerances in Polygraphy's words ("1e-5", "out:1e-3").
    load_inputs: .npz or Polygraphy's JSON; by default inputs are made from what reads each of them.
    timing_cache: a file of measurements, read and kept up to date; by default one for each user and GPU.
    measure: with the target tensorrt, time the engine beside plain TensorRT and ONNX Runtime.
    precision: "keep". verbose: the target's own messages go to stderr.

    Raises InputError (2), GateError (1), BuildError (3) or EnvironmentMissing (4); nothing new is then left
    under a final name.
    """
    if precision != "keep":
        raise InputError(
            f"precision {precision!r} is not offered: use 'keep' and export the model in that type"
        )
    options = Options(
        shapes=tuple(shapes),
        min_shapes=tuple(min_shapes),
        opt_shapes=tuple(opt_shapes),
        max_shapes=tuple(max_shapes),
        select=str(select),
        qdq=qdq,
        tf32=tf32,
        compute_capability=tuple(compute_capability),
        external_plugins=external_plugins,
        atol=tuple(atol),
        rtol=tuple(rtol),
        check_error_stat=tuple(check_error_stat),
        load_inputs=Path(load_inputs) if load_inputs else None,
        timing_cache=Path(timing_cache) if timing_cache else None,
        measure=measure,
    )
    stages = Stages(progress)
    model = Path(model)
    with stages("load"):
        source = models.load(model)
        target = targets.pick(target)
    places = Places.of(model, output, target, report)
    check_folder(places.report)
    prints, why = {}, []
    if target != "onnx":
        prints = record.fingerprint(model, source, target, options)
        why = record.reasons(places, prints)
        if not why and not force:
            return _unchanged(model, target, source, places, stages)
    result, matched, plain = _prepared(model, source, target, options, stages)
    if places.product.exists() and why:
        result.notes.append(f"built again: {'; '.join(why)}")
    with _workplace(places.product) as folder:
        made = folder / places.fused.name
        proof = _proven(made, folder, plain, matched, source, options, result, stages)
        if target != "onnx":
            job = Job(folder, model, target, options, verbose, progress)
            engines.make(job, plain, matched, proof, result, stages)
        # Two builds of one product at once: the files of either, not some of each.
        with stages("write"), files.lock_folder(places.product.parent):
            _deliver(places, made, source, prints, options, result)
    return result


def _unchanged(model: Path, target: str, source: Model, places: Places, stages: Stages) -> Result:
    """The result of a build that finds its products there."""
    previous = read_report(places.report)
    return Result(
        model,
        target,
        source,
        [],
        [],
        stages.timings,
        fused_path=places.fused,
        accuracy=previous.accuracy.fused,
        engine_path=places.product,
        report_dir=places.report,
        notes=list(previous.notes),
        up_to_date=previous,
    )


def _prepared(
    model: Path, source: Model, target: str, options: Options, stages: Stages
) -> tuple[Result, Matched, Model]:
    """The sites and what is done with them; the model that is rewritten, less the quantization taken out."""
    with stages("match"):
        plainly = normalise.without_placeholders(source).proto
        profile = derive_profile(
            plainly,
            min=options.min_shapes,
            opt=options.opt_shapes,
            max=options.max_shapes,
            shapes=options.shapes,
        )
        normal = normalise.inline_functions(source, frozenset())
        plain, dropped = _without_qdq(normal, options.qdq, target)
        matched = match(plain, options.select, target)
    result = _result(model, target, source, matched, stages, profile)
    result.tolerances = _words(options.atol, options.rtol, options.check_error_stat)
    result.notes, result.dequantized = dropped, bool(dropped)
    return result, matched, plain


def _proven(
    made: Path,
    folder: Path,
    plain: Model,
    matched: Matched,
    source: Model,
    options: Options,
    result: Result,
    stages: Stages,
) -> Proof:
    """Writes the fused file to `made` and proves it; what proves further files."""
    with stages("rewrite"):
        fused = rewrite(plain, matched.view, matched.chosen) if matched.chosen else plain
        models.save(fused, made)
        result.nodes_after = count_nodes(fused)
    from trtfuse.verify import Tolerances

    tolerances = Tolerances.parse(options.atol, options.rtol, options.check_error_stat)
    with stages("verify"):
        inputs = _inputs(result.model, source, options.load_inputs, result.profile)
        reference = result.model
        if result.dequantized:
            reference = folder / "dequantized.onnx"
            models.save(plain, reference)
            result.notes.append(_effect(result.model, reference, inputs))
        proof = Proof(reference, inputs, tolerances, result.sites)
        result.accuracy = proof.gate(made, "fused file")
    return proof


def _deliver(
    places: Places, made: Path, source: Model, prints: dict[str, str], options: Options, result: Result
) -> None:
    """Puts everything under its final name, the engine last but for what describes it."""
    models.move(made, places.fused)
    result.fused_path, result.report_dir = places.fused, places.report
    if result.engine is not None:
        with files.atomic_write(places.product) as f:
            f.write(result.engine.data)
        result.engine_path = places.product
    write_report(result.to_report(), places.report)
    if result.engine is not None:
        record.write(places, source, prints, options, result)


@contextmanager
def _workplace(output: Path) -> Iterator[Path]:
    """A folder beside the output for what is not yet proven; gone afterwards."""
    try:
        folder = tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent)
    except OSError as e:
        raise files.explain_os_error(output, e) from e
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _result(
    path: Path, target: str, source: Model, matched: Matched, stages: Stages, profile: Profile | None = None
) -> Result:
    sites = site_reports(matched.sites, matched.model, profile)
    return Result(path, target, source, sites, matched.near_misses, stages.timings, profile=profile)


def _without_qdq(model: Model, mode: str, target: str) -> tuple[Model, list[str]]:
    """The model as the target takes its quantization, and in words what was changed."""
    if mode == "keep":
        return model, []
    proto, report = quantization.apply(model.proto, mode, load=model.tensor)
    if not report.changed:
        return model, []
    return Model(proto, model.path, model.weights, model.external), list(report.notes)


def _inputs(path: Path, source: Model, given: Path_ | None, profile: Profile | None) -> Inputs:
    """The feeds to compare on: the user's, or generated ones that ONNX Runtime runs the model on."""
    from trtfuse import inputs

    if given is not None:
        loaded = inputs.load_inputs(Path(given))
        inputs.validate(loaded, source.proto)
        return loaded
    return inputs.runnable_inputs(path, source.proto, profile=profile)


def _effect(original: Path, changed: Path, inputs: Inputs) -> str:
    """In words, how far a change of the model moves its outputs."""
    from trtfuse.verify import Tolerances, compare

    accuracy = compare(original, changed, inputs, Tolerances.parse(["inf"], ["inf"]), optimized=False)
    moved = ", ".join(f"{name} by at most {o.max_abs:.3g}" for name, o in accuracy.outputs.items())
    return (
        f"taking quantization out moves the model's outputs in ONNX Runtime: {moved} (on {accuracy.inputs} "
        "inputs); all further comparisons are with the dequantized model"
    )


def _words(atol: Sequence[str], rtol: Sequence[str], stat: Sequence[str]) -> tuple[str, ...]:
    """The tolerances as Polygraphy's command line takes them."""
    words: list[str] = []
    for option, values in (("--atol", atol), ("--rtol", rtol), ("--check-error-stat", stat)):
        if values:
            words += [option, *values]
    return tuple(words)
