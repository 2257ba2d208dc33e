"""The manifest beside an engine: what the engine is made of and for.

`m.engine` has `m.engine.manifest.json`. A build that is asked for again reads it and finds nothing to do;
loading an engine checks it first, so that a wrong TensorRT release, GPU or library is named before TensorRT's
own error.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtfuse.errors import EnvironmentMissing, InputError
from trtfuse.files import atomic_write

SCHEMA: Literal["trtfuse/manifest/1"] = "trtfuse/manifest/1"
_LARGEST = 16 << 20  # bytes: a manifest is some kilobytes
_HASH_DIGITS = 64


class Part(BaseModel):
    """Base of the manifest's parts: what newer versions add is passed over."""

    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)


class FileHash(Part):
    """A file. bytes: its size."""

    path: str
    sha256: str
    bytes: int


class PluginsInfo(Part):
    """The plugin library. sha256: of its file; sources: of the sources it is built from, "" if unknown.
    embedded: whether the engine carries it. ops, sites: what became plugins."""

    sha256: str
    sources: str = ""
    tensorrt: str = ""
    architectures: list[str] = []
    embedded: bool
    ops: list[str] = []
    sites: list[str] = []


class GpuInfo(Part):
    """The GPU of the build. memory: bytes."""

    name: str
    compute_capability: str
    memory: int = 0


class ProfileInfo(Part):
    """One optimization profile, by input."""

    min: dict[str, list[int]] = {}
    opt: dict[str, list[int]] = {}
    max: dict[str, list[int]] = {}


class Manifest(Part):
    """What an engine is made of and for.

    trtfuse, tensorrt, cuda, driver: versions, "" where unknown. data: the model's external data.
    portable: whether GPUs later than `compute_capabilities` run it too. flags: every option of the build.
    fingerprint: by name, what the build depends on.
    """

    schema_: Literal["trtfuse/manifest/1"] = Field(default=SCHEMA, alias="schema")
    trtfuse: str
    model: FileHash
    data: list[FileHash] = []
    fused: FileHash | None = None
    engine: FileHash
    target: str
    tensorrt: str
    cuda: str = ""
    driver: str = ""
    gpu: GpuInfo | None = None
    compute_capabilities: list[str] = []
    portable: bool = False
    plugins: PluginsInfo | None = None
    timing_cache: FileHash | None = None
    flags: dict[str, Any] = {}
    profiles: list[ProfileInfo] = []
    fingerprint: dict[str, str] = {}


def path_for(engine: str | os.PathLike[str]) -> Path:
    """Where the manifest of an engine is."""
    return Path(f"{os.fspath(engine)}.manifest.json")


def read(engine: str | os.PathLike[str]) -> Manifest | None:
    """The manifest of an engine, None where there is none. Raises InputError for a damaged one."""
    path = path_for(engine)
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError("it is too large")
        return Manifest.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror or e}; check its rights") from e
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(
            f"the manifest {path} is damaged or of another kind ({where}: {first['msg']}): "
            "build the engine again"
        ) from e
    except (ValueError, RecursionError) as e:
        raise InputError(f"the manifest {path} is damaged ({e}): build the engine again") from e


def write(manifest: Manifest, engine: str | os.PathLike[str]) -> None:
    """Writes the manifest beside an engine, whole or not at all."""
    with atomic_write(path_for(engine), "w") as f:
        f.write(manifest.model_dump_json(indent=1, by_alias=True) + "\n")


def hash_bytes(data: bytes) -> str:
    """The SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def hash_file(path: str | os.PathLike[str]) -> FileHash:
    """A file's hash and size. Raises InputError where it cannot be read."""
    digest = hashlib.sha256()
    size = 0
    try:
        with open(path, "rb") as f:
            while block := f.read(1 << 22):
                digest.update(block)
                size += len(block)
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror or e}; check the path and its rights") from e
    return FileHash(path=str(path), sha256=digest.hexdigest(), bytes=size)


# What a build depends on, in words; parts that are not listed are options of the command line.
_WORDS = {
    "model": "the model",
    "data": "the model's external data",
    "inputs": "the file of --load-inputs",
    "selection": "the selection file",
    "library": "the plugin library",
    "trtfuse": "trtfuse",
    "tensorrt": "TensorRT",
    "target": "the target",
    "gpu": "the GPU",
    "driver": "the driver",
}


def changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """What differs between two fingerprints, a line each."""
    lines = []
    for part in dict.fromkeys((*_WORDS, *old, *new)):
        before, after = old.get(part, ""), new.get(part, "")
        if before == after:
            continue
        what = _WORDS.get(part, f"the option --{part.replace('_', '-')}")
        telling = before and after and _HASH_DIGITS not in (len(before), len(after))
        lines.append(f"{what} changed" + (f" from {before} to {after}" if telling else ""))
    return lines


def up_to_date(engine: Path, wanted: Mapping[str, str], products: Sequence[Path]) -> list[str]:
    """Why an engine must be built (again), a line each; empty if what is there is what is wanted.

    wanted: the fingerprint of the build that is asked for. products: the other files of the build.
    """
    if not engine.exists():
        return ["there is no engine yet"]
    try:
        manifest = read(engine)
    except InputError as e:
        return [str(e)]
    if manifest is None:
        return [f"{engine} has no manifest"]
    reasons = [f"{p} is gone" for p in products if not p.exists()]
    checked = [(engine, manifest.engine)]
    if manifest.fused is not None and Path(manifest.fused.path).name in {p.name for p in products}:
        fused = next(p for p in products if p.name == Path(manifest.fused.path).name)
        checked += [(fused, manifest.fused)] if fused.exists() else []
    reasons += [f"{p} was changed since" for p, was in checked if hash_file(p).sha256 != was.sha256]
    return reasons + changes(manifest.fingerprint, wanted)


def check(
    engine: Path,
    digest: str,
    manifest: Manifest,
    *,
    installed_version: str,
    gpu: tuple[str, str],
    library: Path | None,
) -> None:
    """Raises the one line that says why this engine cannot run here, before TensorRT sees it.

    digest: the SHA-256 of the engine file. gpu: name and compute capability of the GPU it is to run on.
    library: the plugin library that is at hand, for an engine that carries none.
    """
    again = f"build it again here: {rebuild_command(manifest, engine)}"
    if digest != manifest.engine.sha256:
        raise InputError(
            f"{engine} is not the file that its manifest describes (damaged or replaced): {again}"
        )
    if _release(installed_version) != _release(manifest.tensorrt):
        raise EnvironmentMissing(
            f"{engine} was built with {_NAMES[manifest.target]} {manifest.tensorrt}, "
            f"and {installed_version} is installed: install that release, or {again}"
        )
    name, capability = gpu
    if not _runs_on(manifest, capability):
        raise EnvironmentMissing(
            f"{engine} is for GPUs of compute capability {', '.join(manifest.compute_capabilities)}"
            f"{' and later' if manifest.portable else ''}, and this is {name} ({capability}): {again}"
        )
    plugins = manifest.plugins
    if plugins is None or plugins.embedded:
        return
    if library is None:
        raise EnvironmentMissing(
            f"{engine} needs the plugin library, which is not here: get it with `trtfuse plugins build`, or "
            "name it by TRTFUSE_PLUGIN_LIBRARY"
        )
    if hash_file(library).sha256 != plugins.sha256:
        raise EnvironmentMissing(
            f"{engine} was built with another plugin library than {library}: name that one by "
            f"TRTFUSE_PLUGIN_LIBRARY, or {again}"
        )


_NAMES = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}


def _release(version: str) -> tuple[str, ...]:
    """The parts of a version that engines depend on."""
    return tuple(version.split(".")[:3])


def _runs_on(manifest: Manifest, capability: str) -> bool:
    known = [_number(c) for c in manifest.compute_capabilities]
    have = _number(capability)
    if not known or have in known:
        return True
    if manifest.target == "tensorrt-rtx" and have == (9, 0):
        return False
    return manifest.portable and have > min(known)


def _number(capability: str) -> tuple[int, int]:
    major, _, minor = capability.partition(".")
    return int(major), int(minor or 0)


def host_code_allowed(manifest: Manifest | None, digest: str, *, allow: bool, known: Collection[str]) -> bool:
    """Whether an engine's own code may run: by the user's word, or because it is our plugin library.

    digest: of the engine file. known: hashes of this installation's libraries and of their sources. The
    manifest is as trustworthy as the place the engine comes from: this keeps out what is not ours by
    mistake, not somebody who forges both files.
    """
    if allow:
        return True
    if manifest is None or manifest.plugins is None or not manifest.plugins.embedded:
        return False
    ours = {manifest.plugins.sha256, manifest.plugins.sources} - {""}
    return manifest.engine.sha256 == digest and bool(ours & set(known))


def refusal(engine: Path, manifest: Manifest | None) -> InputError:
    """The line for an engine whose code nobody vouches for."""
    what = (
        "code that is not this trtfuse's plugin library"
        if manifest is not None and manifest.plugins is not None
        else "code of its own, and no manifest says that it is trtfuse's plugin library"
    )
    return InputError(
        f"{engine} carries {what}: an engine is a program; if you trust where it comes from, say "
        "--allow-host-code (allow_host_code=True)"
    )


def rebuild_command(manifest: Manifest, engine: Path) -> str:
    """The command line that builds the engine again."""
    words = ["trtfuse", "build", manifest.model.path, "-o", str(engine)]
    for name, value in manifest.flags.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif isinstance(value, list):
            words += [option, *map(str, value)] if value else []
        elif value not in (None, False, ""):
            words += [option, str(value)]
    return shlex.join(words)
