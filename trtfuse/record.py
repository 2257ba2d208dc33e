"""What a build is asked for, where its products go, and what is written down of it in the manifest."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx import TensorProto

from trtfuse import __version__, doctor, manifest, plugin_library, targets
from trtfuse.errors import EnvironmentMissing, InputError
from trtfuse.manifest import FileHash, GpuInfo, Manifest, PluginsInfo, ProfileInfo
from trtfuse.model import Model
from trtfuse.report import read_report

if TYPE_CHECKING:
    from trtfuse.result import Result

POLICIES = ("auto", "all", "none")


@dataclass(frozen=True)
class Options:
    """The options of a build; see `pipeline.build`."""

    shapes: tuple[str, ...] = ()
    min_shapes: tuple[str, ...] = ()
    opt_shapes: tuple[str, ...] = ()
    max_shapes: tuple[str, ...] = ()
    select: str = "auto"
    qdq: str = "keep"
    tf32: bool = False
    compute_capability: tuple[str, ...] = ()
    external_plugins: bool = False
    atol: tuple[str, ...] = ()
    rtol: tuple[str, ...] = ()
    check_error_stat: tuple[str, ...] = ()
    load_inputs: Path | None = None
    timing_cache: Path | None = None
    measure: bool = True

    def given(self) -> dict[str, Any]:
        """Those that are not at their default, as JSON has them."""
        found: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                found[field.name] = list(value) if isinstance(value, tuple) else value
                if isinstance(value, Path):
                    found[field.name] = str(value)
        return found


@dataclass(frozen=True)
class Places:
    """Where the products go."""

    product: Path
    fused: Path
    report: Path

    @staticmethod
    def of(
        model: Path, output: str | os.PathLike[str] | None, target: str, report: str | os.PathLike[str] | None
    ) -> Places:
        """Raises InputError for a place that cannot be."""
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
        return Places(product, fused, Path(report) if report else product.with_name(f"{product.stem}.report"))


def fingerprint(model: Path, source: Model, target: str, options: Options) -> dict[str, str]:
    """Everything that the products of a build depend on, by name: short texts, or hashes of files."""
    prints = {
        "model": manifest.hash_file(model).sha256,
        "data": _together(external_files(source)),
        "target": target,
        "trtfuse": __version__,
        "tensorrt": ".".join(map(str, targets.version(target))),
    }
    if target == "tensorrt":
        gpu = doctor.gpus()[0] if doctor.gpus() else None
        prints["gpu"] = f"{gpu.name} ({gpu.compute_capability})" if gpu else ""
        prints["driver"] = gpu.driver if gpu else ""
        library = plugin_library.find()
        prints["library"] = manifest.hash_file(library).sha256 if library is not None else ""
    if options.load_inputs is not None:
        prints["inputs"] = manifest.hash_file(options.load_inputs).sha256
    if options.select not in POLICIES:
        prints["selection"] = manifest.hash_file(options.select).sha256
    given = {k: v for k, v in options.given().items() if k not in ("timing_cache", "load_inputs")}
    prints |= {k: " ".join(map(str, v)) if isinstance(v, list) else str(v) for k, v in given.items()}
    return prints


def external_files(source: Model) -> list[Path]:
    """The files that hold weights of a model."""
    return list(dict.fromkeys(_locations(source)))


def _locations(source: Model) -> Iterator[Path]:
    for weight in source.weights:
        if weight.data_location == TensorProto.EXTERNAL:
            yield from (source.folder / e.value for e in weight.external_data if e.key == "location")


def _together(files: list[Path]) -> str:
    if not files:
        return ""
    hashes = [manifest.hash_file(f).sha256 for f in files]
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def reasons(places: Places, prints: dict[str, str]) -> list[str]:
    """Why the engine must be built (again); empty if all is there as it would be built."""
    products = [places.fused, places.report / "report.json", places.report / "report.html"]
    found = manifest.up_to_date(places.product, prints, products)
    if not found:
        try:
            read_report(places.report)
        except InputError as e:
            return [str(e)]
    return found


def timing_cache_path() -> Path | None:
    """The timing cache of this user for this GPU and TensorRT; None without a GPU or a place for it."""
    gpus = doctor.gpus()
    if not gpus:
        return None
    words = f"{gpus[0].name} {gpus[0].compute_capability} {gpus[0].driver}"
    release = ".".join(map(str, targets.version("tensorrt")))
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trtfuse" / "timing"
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return base / f"{re.sub(r'[^A-Za-z0-9.]+', '-', words).lower()}-tensorrt-{release}.cache"


def write(places: Places, source: Model, prints: dict[str, str], options: Options, result: Result) -> None:
    """Writes the manifest of the engine that was just put in its place."""
    plan = result.engine
    assert plan is not None
    gpus = doctor.gpus() if plan.target == "tensorrt" else ()
    cache = options.timing_cache or (timing_cache_path() if plan.target == "tensorrt" else None)
    manifest.write(
        Manifest(
            trtfuse=__version__,
            model=_hash(result.model),
            data=[_hash(f) for f in external_files(source)],
            fused=_hash(places.fused),
            engine=_hash(places.product),
            target=plan.target,
            tensorrt=plan.version,
            cuda=doctor.cuda_version() if gpus else "",
            driver=gpus[0].driver if gpus else "",
            gpu=GpuInfo(
                name=gpus[0].name, compute_capability=gpus[0].compute_capability, memory=gpus[0].memory
            )
            if gpus
            else None,
            compute_capabilities=list(plan.compute_capabilities),
            portable=plan.portable,
            plugins=_plugins(result),
            timing_cache=_hash(cache) if cache is not None and cache.exists() else None,
            flags=_flags(plan.target, options),
            profiles=[_profile(result)],
            fingerprint=prints,
        ),
        places.product,
    )


def _hash(path: Path) -> FileHash:
    return manifest.hash_file(path)


def _flags(target: str, options: Options) -> dict[str, Any]:
    return {"target": target, **options.given()}


def _plugins(result: Result) -> PluginsInfo | None:
    plugins = result.plugins
    if plugins is None:
        return None
    try:
        said = plugin_library.describe(plugins.library)
        sources = plugin_library.sources_hash()
    except (EnvironmentMissing, InputError):
        said, sources = {}, ""
    return PluginsInfo(
        sha256=_hash(plugins.library).sha256,
        sources=sources,
        tensorrt=str(said.get("tensorrt", "")),
        architectures=str(said.get("architectures", "")).split(),
        embedded=plugins.embedded,
        ops=sorted({s.op for s in result.sites if s.id in plugins.sites}),
        sites=list(plugins.sites),
    )


def _profile(result: Result) -> ProfileInfo:
    profile = result.profile
    assert profile is not None
    return ProfileInfo(
        min={n: list(s) for n, s in profile.min.items()},
        opt={n: list(s) for n, s in profile.opt.items()},
        max={n: list(s) for n, s in profile.max.items()},
    )
