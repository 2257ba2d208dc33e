"""The order of the work: load, normalise, match, choose, rewrite, lower, build, verify, report."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtfuse import files, lower, normalise, targets
from trtfuse import model as models
from trtfuse import qdq as quantization
from trtfuse.choose import choose, disjoint
from trtfuse.errors import BuildError, GateError, InputError
from trtfuse.fusion import NearMiss, Site, find
from trtfuse.fusions import FUSIONS, NAMES
from trtfuse.model import Model
from trtfuse.report import check_folder, write_report
from trtfuse.result import Result, SiteReport, count_nodes, site_reports
from trtfuse.rewrite import rewrite
from trtfuse.shapes import Profile, derive_profile
from trtfuse.view import View

if TYPE_CHECKING:
    import numpy as np

    from trtfuse.targets import Engine
    from trtfuse.verify import Accuracy, Tolerances

Path_ = str | os.PathLike[str]
Progress = Callable[[str, int, int], None]
Inputs = list[dict[str, "np.ndarray[Any, Any]"]]


@dataclass
class _Stages:
    """Times the stages and tells the progress of them."""

    progress: Progress | None
    timings: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.progress is not None:
            self.progress(name, 0, 0)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - start


@dataclass
class Matched:
    """A normalised model with its sites: all without overlaps, and those chosen to be fused."""

    model: Model
    view: View
    sites: list[Site]
    chosen: list[Site]
    near_misses: list[NearMiss]


def match(model: Model, select: str | Path = "all") -> Matched:
    """Finds and chooses the sites of a model that is loaded and has none of its own functions left."""
    view = normalise.view(model)
    normalise.pass_over(view)
    sites, misses = find(FUSIONS, view)
    sites = disjoint(sites, view)
    return Matched(model, view, sites, choose(sites, select), misses)


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
    stages = _Stages(progress)
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
            proof = _Proof(reference, inputs, Tolerances.default(), result.sites)
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
    stages = _Stages(progress)
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

    stages = _Stages(progress)
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
    compute_capability: Sequence[str] = (),
    atol: Sequence[str] = (),
    rtol: Sequence[str] = (),
    check_error_stat: Sequence[str] = (),
    load_inputs: Path_ | None = None,
    timing_cache: Path_ | None = None,
    report: Path_ | None = None,
    verbose: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Fuses `model`, proves the result against ONNX Runtime, builds an engine and reports.

    output: the engine; by default `<model>.engine` in the working directory. The fused file goes beside it
    (`<engine's stem>.fused.onnx`), the report into `report`, by default `<engine's stem>.report`.
    target: "auto", "tensorrt", "tensorrt-rtx" or "onnx" (the fused file is the product then).
    shapes, min_shapes, opt_shapes, max_shapes: "x:1x128" or "x:[1,128]"; what is left out is derived.
    qdq: "drop" takes QuantizeLinear and DequantizeLinear out first, "auto" those that TensorRT refuses; how
        far that moves the outputs is measured and said, and all further comparisons are with what is left.
    select: "auto", "all", "none" or a selection file. compute_capability: GPU architectures ("8.9").
    atol, rtol, check_error_stat: tolerances in Polygraphy's words ("1e-5", "out:1e-3").
    load_inputs: .npz or Polygraphy's JSON; by default inputs are made from what reads each of them.
    timing_cache: a file of measurements, read and kept up to date. precision: "keep".
    verbose: the target's own messages go to stderr.

    Raises InputError (2), GateError (1), BuildError (3) or EnvironmentMissing (4); nothing new is then left
    under a final name.
    """
    if precision != "keep":
        raise InputError(
            f"precision {precision!r} is not offered: use 'keep' and export the model in that type"
        )
    stages = _Stages(progress)
    model = Path(model)
    with stages("load"):
        source = models.load(model)
        target = targets.pick(target)
    places = _Places.of(model, output, target, report)
    check_folder(places.report)
    notes: list[str] = []
    with stages("match"):
        plainly = normalise.without_placeholders(source).proto
        profile = derive_profile(plainly, min=min_shapes, opt=opt_shapes, max=max_shapes, shapes=shapes)
        normal = normalise.inline_functions(source, frozenset())
        plain, dropped = _without_qdq(normal, qdq, target)
        matched = match(plain, select)
    result = _result(model, target, source, matched, stages, profile)
    result.notes = notes
    result.tolerances = _words(atol, rtol, check_error_stat)
    with _workplace(places.product) as folder:
        with stages("rewrite"):
            fused = rewrite(plain, matched.view, matched.chosen) if matched.chosen else plain
            made = folder / places.fused.name
            models.save(fused, made)
            result.nodes_after = count_nodes(fused)
        from trtfuse.verify import Tolerances

        tolerances = Tolerances.parse(atol, rtol, check_error_stat)
        with stages("verify"):
            inputs = _inputs(model, source, load_inputs, profile)
            reference = model
            if dropped:
                reference = folder / "dequantized.onnx"
                models.save(plain, reference)
                notes += [*dropped, _effect(model, reference, inputs)]
                result.dequantized = True
            proof = _Proof(reference, inputs, tolerances, result.sites)
            result.accuracy = proof.gate(made, "fused file")
        if target != "onnx":
            with stages("lower"):
                lowered = folder / "lowered.onnx"
                _lowered(plain, matched, select, target, lowered, proof, notes)
            with stages("build"):
                options = targets.BuildOptions(
                    profile=profile,
                    compute_capability=tuple(compute_capability),
                    timing_cache=Path(timing_cache) if timing_cache else None,
                    verbose=verbose,
                    progress=progress,
                )
                result.engine = _built(target, lowered, options)
                notes += result.engine.notes
        with stages("write"):
            _move(made, places.fused)
            result.fused_path = places.fused
            if result.engine is not None:
                with files.atomic_write(places.product) as f:
                    f.write(result.engine.data)
                result.engine_path = places.product
            result.report_dir = places.report
            write_report(result.to_report(), places.report)
    return result


@dataclass(frozen=True)
class _Places:
    """Where the products go."""

    product: Path
    fused: Path
    report: Path

    @staticmethod
    def of(model: Path, output: Path_ | None, target: str, report: Path_ | None) -> _Places:
        if target == "onnx":
            product = Path(output) if output else Path(f"{model.stem}.fused.onnx")
            fused = product
        else:
            product = Path(output) if output else Path(f"{model.stem}.engine")
            fused = product.with_name(f"{product.stem}.fused.onnx")
        for place in (product, fused):
            if place.exists() and model.exists() and place.resolve() == model.resolve():
                raise InputError(f"{place} is the model itself: name another output with -o")
        if not product.parent.is_dir():
            raise InputError(f"there is no folder {product.parent}: make it, or name another output with -o")
        return _Places(
            product, fused, Path(report) if report else product.with_name(f"{product.stem}.report")
        )


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


def _move(made: Path, final: Path) -> None:
    """Puts a proven file under its final name, its external data first."""
    try:
        data = made.with_name(made.name + ".data")
        if data.exists():
            os.replace(data, final.with_name(data.name))
        os.replace(made, final)
    except OSError as e:
        raise files.explain_os_error(final, e) from e


def _result(
    path: Path, target: str, source: Model, matched: Matched, stages: _Stages, profile: Profile | None = None
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


@dataclass(frozen=True)
class _Proof:
    """What a file that we made must equal: the reference on these inputs, within the tolerances."""

    reference: Path
    inputs: Inputs
    tolerances: Tolerances
    sites: list[SiteReport]

    def accuracy(self, made: Path) -> Accuracy:
        from trtfuse.verify import compare

        return compare(self.reference, made, self.inputs, self.tolerances)

    def gate(self, made: Path, what: str) -> Accuracy:
        """The comparison. Raises GateError with the site to suspect."""
        from trtfuse.verify import suspect

        accuracy = self.accuracy(made)
        if accuracy.passed:
            return accuracy
        fused = [s for s in self.sites if s.lowering != "keep"]
        guilty = suspect(self.reference, made, self.inputs, fused)
        hint = f"; suspect {guilty}" if guilty else ""
        raise GateError(
            f"the {what} differs from the original: {accuracy.reason}{hint}; "
            "keep that site by --select FILE, or allow more by --atol and --rtol"
        )


def _effect(original: Path, changed: Path, inputs: Inputs) -> str:
    """In words, how far a change of the model moves its outputs."""
    from trtfuse.verify import Tolerances, compare

    accuracy = compare(original, changed, inputs, Tolerances.parse(["inf"], ["inf"]), optimized=False)
    moved = ", ".join(f"{name} by at most {o.max_abs:.3g}" for name, o in accuracy.outputs.items())
    return (
        f"taking quantization out moves the model's outputs in ONNX Runtime: {moved} (on {accuracy.inputs} "
        "inputs); all further comparisons are with the dequantized model"
    )


def _lowered(
    plain: Model,
    matched: Matched,
    select: str | Path,
    target: str,
    path: Path,
    proof: _Proof,
    notes: list[str],
) -> None:
    """Writes the file that the target parses, and proves it.

    Sites are native. The model is raised to the opset that spells them shortest, if what onnx's converter
    makes of it has the same sites and the same outputs.
    """
    opset = lower.wished_opset(matched.chosen, targets.newest_opset(target))
    newer = lower.raised(plain, opset) if opset > plain.opset else None
    if newer is not None:
        again = match(newer, select)
        if [s.id for s in again.chosen] == [s.id for s in matched.chosen]:
            with contextlib.suppress(*models.CHECKER_ERRORS):
                made = lower.native(newer, again.view, again.chosen)
                models.save(normalise.without_placeholders(made), path)
                if proof.accuracy(path).passed:
                    notes.append(f"for the target the model is raised from opset {plain.opset} to {opset}")
                    return
        notes.append(f"the model stays at opset {plain.opset}: onnx's converter to {opset} changes it")
    made = lower.native(plain, matched.view, matched.chosen)
    models.save(normalise.without_placeholders(made), path)
    proof.gate(path, "file for the target")


def _built(target: str, lowered: Path, options: targets.BuildOptions) -> Engine:
    try:
        return targets.build(target, lowered, options)
    except BuildError:
        raise
    except MemoryError as e:
        raise BuildError("the build ran out of memory: close other programs or use a larger machine") from e


def _words(atol: Sequence[str], rtol: Sequence[str], stat: Sequence[str]) -> tuple[str, ...]:
    """The tolerances as Polygraphy's command line takes them."""
    words: list[str] = []
    for option, values in (("--atol", atol), ("--rtol", rtol), ("--check-error-stat", stat)):
        if values:
            words += [option, *values]
    return tuple(words)
