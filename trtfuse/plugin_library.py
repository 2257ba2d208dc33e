"""The plugin library: what plugins there are, where the library is, and building it.

libtrtfuse_plugins.so is C++ and CUDA (the folder `plugins`): it needs nvcc and TensorRT's headers to build,
and neither to be used. It is looked for in TRTFUSE_PLUGIN_LIBRARY, in the package, and in the cache
that `build` fills.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtfuse.errors import BuildError, EnvironmentMissing, InputError
from trtfuse.files import atomic_path, explain_os_error, lock

if TYPE_CHECKING:
    from trtfuse.fusion import Site

Attribute = str | int | float
NAMESPACE, VERSION = "trtfuse", "1"
LIBRARY, KERNELS = "libtrtfuse_plugins.so", "libtrtfuse_kernels.so"
SOURCES = ("*.h", "*.cuh", "*.cu", "*.cpp", "*.map")
ARCHITECTURES = ("80", "86", "89", "90", "100", "120", "ptx")
NVCC_PACKAGES = "nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl nvidia-nvvm"
FLAGS = {
    # TensorRT's own headers use what they deprecate.
    "host": "-std=c++17 -O2 -fPIC -fvisibility=hidden -Wall -Wextra -Wno-deprecated-declarations".split(),
    # Compressed, since every engine carries the library.
    "device": "-std=c++17 -O3 -Xcompiler=-fPIC,-fvisibility=hidden -Xfatbin=-compress-all".split(),
}
NVCC_REQUIREMENTS = [f"{p}==13.0.*" for p in NVCC_PACKAGES.split()]
GET_NVCC = "pip install " + " ".join(f"'{r}'" for r in NVCC_REQUIREMENTS)
GET_LIBRARY = (
    "trtfuse plugins build --include-dir FOLDER (of TensorRT's headers), or install a wheel of trtfuse that "
    "holds it"
)


@dataclass(frozen=True)
class Plugin:
    """A plugin as the ONNX node of its name must spell it.

    inputs, outputs: names in the declaration's order. attributes: name -> (kind, default), besides `inputs`
    and `outputs`, which every plugin has: the names of those the node has, separated by spaces, in order.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, tuple[str, Attribute]]


_NORM_5: dict[str, tuple[str, Attribute]] = {"epsilon": ("float", 1e-5)}
_NORM_6: dict[str, tuple[str, Attribute]] = {"epsilon": ("float", 1e-6)}
_SLOPE: dict[str, tuple[str, Attribute]] = {"alpha": ("float", 0.01)}  # LeakyRelu's, below zero
_SOFTMAX: dict[str, tuple[str, Attribute]] = {
    "scale": ("float", 1.0),
    "fill": ("float", float("-inf")),  # stands where the condition is not `keep`
    "keep": ("int", 1),
}
# The fused ops that have a plugin, by name; inputs and outputs are those of the fused op's declaration. The
# condition of TrtfuseSoftmax is of bool or int32, all other tensors are of the first input's type.
PLUGINS: dict[str, Plugin] = {
    p.op: p
    for p in (
        Plugin("TrtfuseBiasAct", ("x", "bias"), ("y",), {"activation": ("text", "relu"), **_SLOPE}),
        Plugin("TrtfuseGatedAct", ("gate", "up"), ("y",), {"activation": ("text", "silu"), **_SLOPE}),
        Plugin("TrtfuseLayerNorm", ("x", "scale", "bias"), ("y",), _NORM_5),
        Plugin("TrtfuseSkipLayerNorm", ("x", "skip", "scale", "bias", "preset"), ("y", "sum"), _NORM_5),
        Plugin("TrtfuseRmsNorm", ("x", "scale"), ("y",), _NORM_6),
        Plugin("TrtfuseSkipRmsNorm", ("x", "skip", "scale", "preset"), ("y", "sum"), _NORM_6),
        Plugin("TrtfuseSoftmax", ("x", "mask", "condition"), ("y",), _SOFTMAX),
    )
}


def node_attributes(site: Site) -> dict[str, Attribute]:
    """All attributes of the node that TensorRT's parser turns into a site's plugin.

    Those of the site, which inputs and outputs it has, and which creator is meant. Raises InputError for a
    fused op that has no plugin.
    """
    plugin = PLUGINS.get(site.fusion.op)
    if plugin is None:
        raise InputError(f"{site.fusion.op} has no plugin; choose native or keep for '{site.id}'")
    return {
        **{name: site.attributes.get(name, default) for name, (_, default) in plugin.attributes.items()},
        "inputs": " ".join(site.tensors),
        "outputs": " ".join(site.results),
        "plugin_namespace": NAMESPACE,
        "plugin_version": VERSION,
    }


# --- where things are ---


def cache_folder() -> Path:
    """Where built libraries are kept: XDG_CACHE_HOME or ~/.cache, then trtfuse/plugins."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "trtfuse" / "plugins"


def source_folder() -> Path:
    """The folder of the plugins' sources: in the package where it was installed, else beside it."""
    package = Path(__file__).resolve().parent
    for folder in (package / "plugins", package.parent / "plugins"):
        if (folder / "library.cpp").is_file():
            return folder
    raise EnvironmentMissing(
        "this installation has no plugin sources: install trtfuse from its source archive or repository"
    )


def find() -> Path | None:
    """The library that trtfuse would use, None if there is none.

    TRTFUSE_PLUGIN_LIBRARY if set (EnvironmentMissing when no file is there), the package's own, or what was
    last asked for of those in the cache that were built from the present sources.
    """
    placed = _given() or _own()
    if placed is not None:
        return placed
    try:
        wanted = sources_hash()
    except EnvironmentMissing:
        return None
    built = [b.path for b in _cached() if b.sources == wanted and b.tensorrt]
    return max(built, key=lambda p: p.stat().st_mtime, default=None)


def locate() -> Path:
    """The library that trtfuse would use. Raises EnvironmentMissing with how to get one if there is none."""
    found = find()
    if found is None:
        raise EnvironmentMissing(f"the plugin library is missing: {GET_LIBRARY}")
    return found


def _given() -> Path | None:
    given = os.environ.get("TRTFUSE_PLUGIN_LIBRARY")
    if not given:
        return None
    if not Path(given).is_file():
        raise EnvironmentMissing(
            f"TRTFUSE_PLUGIN_LIBRARY names {given}, which is no file: correct or unset it"
        )
    return Path(given).resolve()


def _own() -> Path | None:
    own = Path(__file__).resolve().parent / "lib" / LIBRARY
    return own if own.is_file() else None


@dataclass(frozen=True)
class Built:
    """A library. tensorrt: the headers' version, "" for kernels alone; sources: their hash, "" if unknown.

    place: what named it, "environment" (TRTFUSE_PLUGIN_LIBRARY), "package" or "cache".
    """

    path: Path
    architectures: tuple[str, ...]
    tensorrt: str
    sources: str
    bytes: int
    place: str


def listing() -> list[Built]:
    """The libraries that are there, those first that go before others; folders not whole are left out.

    Raises EnvironmentMissing or InputError where TRTFUSE_PLUGIN_LIBRARY names no plugin library.
    """
    placed = (("environment", _given()), ("package", _own()))
    return [_built(path, place) for place, path in placed if path is not None] + _cached()


def _cached() -> list[Built]:
    found = []
    for manifest in sorted(cache_folder().glob("*/manifest.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, InputError):
            found.append(_built(manifest.parent / json.loads(manifest.read_text())["library"], "cache"))
    return found


def _built(library: Path, place: str) -> Built:
    """From the manifest beside the library, or where there is none from what the library says."""
    size = library.stat().st_size
    with contextlib.suppress(OSError, ValueError, KeyError):
        data = json.loads((library.parent / "manifest.json").read_text())
        if data["library"] == library.name:
            return Built(
                library, tuple(data["architectures"]), data["tensorrt"], data["sources"], size, place
            )
    said = describe(library)
    return Built(library, tuple(said["architectures"].split()), said["tensorrt"], "", size, place)


def runs_on(architectures: Sequence[str], compute_capability: str) -> bool:
    """Whether a library of these architectures has code for GPUs of the compute capability ("8.9").

    Machine code runs on its own generation from its own number on, that of 90a on 9.0 alone; "ptx" is of the
    newest architecture and runs on it and all later ones.
    """
    major, _, minor = compute_capability.partition(".")
    gpu = (int(major), int(minor or 0))
    matches = (re.fullmatch(r"(\d+)(\d)([af]?)(?:-real)?", a) for a in architectures)
    real = sorted((int(m[1]), int(m[2]), m[3]) for m in matches if m is not None)
    if "ptx" in architectures and real and gpu >= real[-1][:2]:
        return True
    return any(gpu == (a, b) if kind == "a" else gpu[0] == a and gpu[1] >= b for a, b, kind in real)


# --- what a library says of itself ---


def describe(library: Path) -> dict[str, Any]:
    """What the library says of itself: {"tensorrt", "architectures", "plugins": [{"name", ...}]}.

    Loads it into this process (it needs neither GPU nor TensorRT). Raises InputError for another library.
    """
    try:
        # RTLD_LOCAL and its own symbols first: two versions of it may be in one process.
        function = ctypes.CDLL(str(library), mode=os.RTLD_LOCAL | os.RTLD_NOW).trtfuse_describe
    except (OSError, AttributeError) as e:
        raise InputError(
            f"{library} is no plugin library of trtfuse ({e}); build it with 'trtfuse plugins build'"
        ) from e
    function.restype = ctypes.c_char_p
    result: dict[str, Any] = json.loads(function())
    return result


def disagreements(library: Path) -> list[str]:
    """Where the library's creators differ from PLUGINS, a line each; empty when they agree."""
    described = {p["name"]: p for p in describe(library)["plugins"]}
    lines = [f"{op}: the library has no such plugin" for op in PLUGINS if op not in described]
    lines += [f"{op}: no fused op of that name has a plugin" for op in described if op not in PLUGINS]
    for op, plugin in PLUGINS.items():
        if op in described:
            lines += [f"{op}: {line}" for line in _differences(plugin, described[op])]
    return lines


def _differences(plugin: Plugin, have: dict[str, Any]) -> Iterator[str]:
    wanted = {**plugin.attributes, "inputs": ("text", ""), "outputs": ("text", plugin.outputs[0])}
    fields = {f["name"]: (f["kind"], f["default"]) for f in have["fields"]}
    pairs = {
        "namespace": (NAMESPACE, have["namespace"]),
        "version": (VERSION, have["version"]),
        "inputs": (list(plugin.inputs), [i["name"] for i in have["inputs"]]),
        "outputs": (list(plugin.outputs), have["outputs"]),
        "fields": (sorted(wanted), sorted(fields)),
        "fields of the creator": (sorted(wanted), sorted(have["creator_fields"])),
    }
    for what, (python, library) in pairs.items():
        if python != library:
            yield f"{what} are {python} in Python, {library} in the library"
    for name in wanted.keys() & fields.keys():
        kind, default = wanted[name]
        same = default == fields[name][1] or (
            kind == "float" and abs(float(default) - float(fields[name][1])) <= 1e-6 * abs(float(default))
        )
        if kind != fields[name][0] or not same:
            yield f"field '{name}' is {wanted[name]} in Python, {fields[name]} in the library"


def activation_names() -> list[str]:
    """The activations of the kernels, in the order of their numbers."""
    text = (source_folder() / "common" / "activation.h").read_text()
    names = re.search(r"kActivationNames\[\]\s*=\s*\{([^}]*)\}", text)
    assert names is not None
    return re.findall(r'"(\w+)"', names.group(1))


# --- building ---


@dataclass(frozen=True)
class Toolchain:
    """nvcc and the folder of CUDA's headers and libraries that belong to it."""

    nvcc: Path
    include: Path
    library: Path

    @property
    def version(self) -> str:
        """The release that nvcc names, "13.0"."""
        text = _run([str(self.nvcc), "--version"]).stdout
        found = re.search(r"release (\d+\.\d+)", text)
        return found.group(1) if found else "unknown"


@cache
def toolchain() -> Toolchain:
    """nvcc of the PATH, of CUDA_HOME, of /usr/local/cuda or of pip's packages, and g++ for the rest.

    Raises EnvironmentMissing with the command that brings what is missing.
    """
    if shutil.which("g++") is None:
        raise EnvironmentMissing("g++ is missing: apt-get install g++")
    for root in _cuda_roots():
        nvcc = root / "bin" / "nvcc"
        if not os.access(nvcc, os.X_OK):
            continue
        include = _first(
            root, ("include", "targets/x86_64-linux/include", "targets/sbsa-linux/include"), "cuda_runtime.h"
        )
        library = _first(
            root, ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"), "libcudart_static.a"
        )
        if include is not None and library is not None:
            return Toolchain(nvcc, include, library)
    raise EnvironmentMissing(
        f"nvcc with CUDA's headers is missing: {GET_NVCC}, or install a CUDA toolkit and set CUDA_HOME"
    )


def _cuda_roots() -> Iterator[Path]:
    on_path = shutil.which("nvcc")
    if on_path is not None:
        yield Path(on_path).resolve().parent.parent
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable])
    yield Path("/usr/local/cuda")
    paths = sysconfig.get_paths()
    # pip builds wheels in an environment that is on sys.path alone.
    for folder in dict.fromkeys([*sys.path, paths["purelib"], paths["platlib"]]):
        yield from sorted(Path(folder).glob("nvidia/cu*"), reverse=True)


def _first(root: Path, folders: Iterable[str], name: str) -> Path | None:
    return next((root / f for f in folders if (root / f / name).is_file()), None)


def headers(include_dir: str | os.PathLike[str] | None) -> Path:
    """The folder of TensorRT's headers: the given one, TRTFUSE_TENSORRT_INCLUDE, or the system's.

    Raises EnvironmentMissing where NvInferRuntime.h is not in it.
    """
    given = include_dir or os.environ.get("TRTFUSE_TENSORRT_INCLUDE")
    places = [Path(given)] if given else [Path("/usr/include/x86_64-linux-gnu"), Path("/usr/include")]
    for place in places:
        if (place / "NvInferRuntime.h").is_file():
            return place.resolve()
    where = f"{given} has no NvInferRuntime.h" if given else "TensorRT's headers are missing"
    raise EnvironmentMissing(
        f"{where}: apt-get install libnvinfer-headers-dev, or give a folder with them by --include-dir or in "
        "TRTFUSE_TENSORRT_INCLUDE"
    )


def sources_hash() -> str:
    """A hash of the plugins' sources, and of nothing else."""
    return _hash(sources(*SOURCES))


def sources(*patterns: str) -> list[Path]:
    """The files of the plugins' sources with names like these."""
    return sorted(p for pattern in patterns for p in source_folder().rglob(pattern))


def _hash(files: Iterable[Path], *more: Any) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(source_folder())}\0".encode() + path.read_bytes() + b"\0")
    if more:
        digest.update(json.dumps(more).encode())
    return digest.hexdigest()[:32]


def build(
    include_dir: str | os.PathLike[str] | None = None,
    architectures: Sequence[str] = ARCHITECTURES,
    *,
    output: str | os.PathLike[str] | None = None,
    kernels_only: bool = False,
    jobs: int | None = None,
    force: bool = False,
) -> Path:
    """Builds the plugin library and returns its path; what is there from the same sources and flags is kept.

    include_dir: the folder of TensorRT's headers, else TRTFUSE_TENSORRT_INCLUDE or the system's.
    architectures: of ARCHITECTURES; "ptx" adds PTX of the newest of them, for GPUs that come after.
    output: where to copy the library, besides the cache.
    kernels_only: libtrtfuse_kernels.so, the kernels behind a C interface; needs no TensorRT headers.
    jobs: compilers at a time, by default the number of processors.
    force: compiles everything again.
    Raises EnvironmentMissing for a missing compiler or headers, InputError for an unknown architecture, and
    BuildError with the compiler's first error, or where the library does not fit the Python side.
    """
    names = _checked(architectures)
    tools = toolchain()
    trt = None if kernels_only else headers(include_dir)
    version = "" if trt is None else _tensorrt_version(trt)
    hashed = sources_hash()
    # Folders are left out of the key: the same headers elsewhere make the same library.
    key = _hash([], hashed, names, version, tools.version, kernels_only, FLAGS)
    library = cache_folder() / key / (KERNELS if kernels_only else LIBRARY)
    manifest = {
        "library": library.name,
        "architectures": names,
        "tensorrt": version,
        "sources": hashed,
        "cuda": tools.version,
    }
    job = _Job(library.parent, tools, _flags(tools, names, trt), jobs or os.cpu_count() or 1, force)
    if force or not _is_whole(library):
        with _building():
            if force or not _is_whole(library):  # another process may have made it meanwhile
                _make(job, manifest)
    with contextlib.suppress(OSError):  # a cache that others own
        os.utime(library)  # of several that fit, `find` takes what was asked for last
    return library if output is None else _copy(library, Path(output))


def _is_whole(library: Path) -> bool:
    return library.is_file() and (library.parent / "manifest.json").is_file()


@contextlib.contextmanager
def _building() -> Iterator[None]:
    """One build at a time: two at once would compile the same kernels twice."""
    folder = cache_folder()
    try:
        (folder / "objects").mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise explain_os_error(folder, e) from e
    with lock(folder / "build"):
        yield


def _copy(library: Path, target: Path) -> Path:
    if target.is_dir():
        target = target / library.name
    with atomic_path(target) as temporary:
        shutil.copyfile(library, temporary)
    return target


def split_names(text: str) -> list[str]:
    """The architectures in "80,90,ptx"; spaces and semicolons separate them too."""
    return [name for name in re.split(r"[\s,;]+", text) if name]


def _checked(architectures: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(a.strip().lower().removeprefix("sm_") for a in architectures))
    unknown = [a for a in names if a != "ptx" and not re.fullmatch(r"\d{2,3}[af]?", a)]
    if unknown or not set(names) - {"ptx"}:
        what = f"'{unknown[0]}' is no architecture" if unknown else "no architecture is given"
        raise InputError(f"{what}: choose from {', '.join(ARCHITECTURES)}")
    return names


def _flags(tools: Toolchain, names: list[str], trt: Path | None) -> dict[str, list[str]]:
    real = sorted((a for a in names if a != "ptx"), key=lambda a: int(a.rstrip("af")))
    gencode = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in real]
    if "ptx" in names:
        newest = real[-1].rstrip("af")
        gencode.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
    define = f'-DTRTFUSE_ARCHITECTURES="{" ".join(names)}"'
    host = [*FLAGS["host"], define, "-isystem", str(tools.include)]
    host += [] if trt is None else ["-isystem", str(trt)]
    return {"host": host, "device": [*FLAGS["device"], *gencode]}


def _tensorrt_version(trt: Path) -> str:
    text = (trt / "NvInferVersion.h").read_text()
    parts = [
        re.search(rf"#define (?:NV_TENSORRT|TRT)_{p}(?:_ENTERPRISE)? (\d+)", text) for p in ("MAJOR", "MINOR")
    ]
    if any(p is None for p in parts):
        raise EnvironmentMissing(
            f"{trt}/NvInferVersion.h names no version: give a folder of TensorRT 10.6 or newer"
        )
    major, minor = (int(p.group(1)) for p in parts if p is not None)
    if (major, minor) < (10, 6):
        raise EnvironmentMissing(
            f"{trt} is TensorRT {major}.{minor}: the plugins need headers of 10.6 or newer"
        )
    return f"{major}.{minor}"


@dataclass(frozen=True)
class _Job:
    """A build: the folder to make, with what, and whether kept kernels are compiled again."""

    folder: Path
    tools: Toolchain
    flags: dict[str, list[str]]
    jobs: int
    force: bool


def _make(job: _Job, manifest: dict[str, Any]) -> None:
    """Compiles into a folder beside the job's, which takes its name when all is there."""
    try:
        work = Path(tempfile.mkdtemp(prefix=f".{job.folder.name}.", dir=job.folder.parent))
    except OSError as e:
        raise explain_os_error(job.folder.parent, e) from e
    try:
        objects = work / "objects"
        objects.mkdir()
        target = work / manifest["library"]
        _link(target, _objects(job, objects, plugins=bool(manifest["tensorrt"])), job.tools)
        shutil.rmtree(objects)
        differences = disagreements(target) if manifest["tensorrt"] else []
        if differences:
            raise BuildError(
                f"the library does not fit the Python side: {'; '.join(differences)}; update both together"
            )
        (work / "manifest.json").write_text(json.dumps(manifest, indent=1))
        work.chmod(0o755)
        if job.folder.exists():
            shutil.rmtree(job.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another process has just put the same there
            work.rename(job.folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _objects(job: _Job, work: Path, plugins: bool) -> list[Path]:
    """Compiles the sources; the objects' paths.

    Those of kernels are kept, by what goes into them: they are the same whatever TensorRT's headers are.
    """
    included = _hash(sources("*.h", "*.cuh"), job.tools.version, job.flags["device"])
    commands: dict[Path, list[str]] = {}
    for path in sources("*.cu"):
        kept = job.folder.parent / "objects" / f"{_hash([path], included)}.o"
        if job.force:
            kept.unlink(missing_ok=True)
        commands[kept] = [str(job.tools.nvcc), *job.flags["device"], "-c", str(path)]
    for path in sources("*.cpp") if plugins else [source_folder() / "kernels.cpp"]:
        target = work / f"{_hash([path])}.o"
        commands[target] = ["g++", *job.flags["host"], "-c", str(path)]

    def make(target: Path) -> None:
        temporary = work / f"{target.name}.part"
        _compile([*commands[target], "-o", str(temporary)])
        os.replace(temporary, target)

    with ThreadPoolExecutor(job.jobs) as pool:
        list(pool.map(make, [t for t in commands if not t.is_file()]))
    return list(commands)


def _link(target: Path, objects: Iterable[Path], tools: Toolchain) -> None:
    # cudart is linked in: the library must run in processes that have none, or another one.
    link = ["g++", "-shared", "-o", str(target), *map(str, objects), f"-L{tools.library}", "-lcudart_static"]
    exports = f"-Wl,--version-script={source_folder() / 'exports.map'}"
    _compile([*link, "-ldl", "-lpthread", "-lrt", exports, "-Wl,-s"])


def _compile(command: list[str]) -> None:
    done = _run(command)
    if done.returncode == 0:
        return
    lines = (done.stderr + done.stdout).splitlines()
    first = next(
        (x.strip() for x in lines if "error" in x), lines[-1] if lines else f"exit {done.returncode}"
    )
    if "fatal error" in first and "cuda" in first:
        raise EnvironmentMissing(f"CUDA's headers are not whole ({first}): {GET_NVCC}")
    raise BuildError(f"the plugin library does not compile: {first}; the command was: {shlex.join(command)}")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as e:
        raise EnvironmentMissing(f"cannot run {command[0]} ({e.strerror}): {GET_NVCC}") from e


def main(arguments: Sequence[str] | None = None) -> int:
    """`scripts/build_plugins`: builds the library and prints its path."""
    import argparse

    from trtfuse.errors import TrtfuseError

    parser = argparse.ArgumentParser(
        "build_plugins", description="Builds the plugin library and prints its path."
    )
    parser.add_argument("--include-dir", "--include", help="folder of TensorRT's headers")
    parser.add_argument("--architectures", default=",".join(ARCHITECTURES), help="default: %(default)s")
    parser.add_argument(
        "--kernels-only", action="store_true", help="the kernels alone; needs no TensorRT headers"
    )
    parser.add_argument("-o", "--output", help="where to put a copy")
    parser.add_argument("--force", action="store_true", help="build even if the cache has it")
    a = parser.parse_args(arguments)
    names = split_names(a.architectures)
    try:
        path = build(a.include_dir, names, output=a.output, kernels_only=a.kernels_only, force=a.force)
    except TrtfuseError as e:
        print(f"build_plugins: {e}", file=sys.stderr)
        return e.exit_code
    print(path)
    return 0
