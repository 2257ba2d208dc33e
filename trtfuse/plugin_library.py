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
from trtfuse.files import atomic_path, explain_os_error

if TYPE_CHECKING:
    from trtfuse.fusion import Site

Attribute = str | int | float
NAMESPACE, VERSION = "trtfuse", "1"
LIBRARY, KERNELS = "libtrtfuse_plugins.so", "libtrtfuse_kernels.so"
ARCHITECTURES = ("80", "86", "89", "90", "100", "120", "ptx")
NVCC_PACKAGES = "nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl nvidia-nvvm"
FLAGS = {
    # TensorRT's own headers use what they deprecate.
    "host": "-std=c++17 -O2 -fPIC -fvisibility=hidden -Wall -Wextra -Wno-deprecated-declarations".split(),
    # Compressed, since every engine carries the library.
    "device": "-std=c++17 -O3 -Xcompiler=-fPIC,-fvisibility=hidden -Xfatbin=-compress-all".split(),
}
GET_NVCC = "pip install " + " ".join(f"'{p}==13.0.*'" for p in NVCC_PACKAGES.split())


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
    known = {k: v for k, v in site.attributes.items() if k in plugin.attributes}
    return {
        **known,
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

    TRTFUSE_PLUGIN_LIBRARY if set (EnvironmentMissing when no file is there), the package's own, or the newest
    in the cache that was built from the present sources.
    """
    given = os.environ.get("TRTFUSE_PLUGIN_LIBRARY")
    if given:
        if not Path(given).is_file():
            raise EnvironmentMissing(
                f"TRTFUSE_PLUGIN_LIBRARY names {given}, which is no file: correct or unset it"
            )
        return Path(given).resolve()
    own = Path(__file__).resolve().parent / "lib" / LIBRARY
    if own.is_file():
        return own
    try:
        wanted = sources_hash()
    except EnvironmentMissing:
        return None
    built = [b.path for b in listing() if b.sources == wanted and b.path.name == LIBRARY]
    return max(built, key=lambda p: p.stat().st_mtime, default=None)


@dataclass(frozen=True)
class Built:
    """A library in the cache. tensorrt: the headers' version, "" for kernels alone; sources: their hash."""

    path: Path
    architectures: tuple[str, ...]
    tensorrt: str
    sources: str
    bytes: int


def listing() -> list[Built]:
    """The libraries in the cache, by folder name; folders that are not whole are left out."""
    found = []
    for manifest in sorted(cache_folder().glob("*/manifest.json")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            data = json.loads(manifest.read_text())
            path = manifest.parent / data["library"]
            size = path.stat().st_size
            found.append(Built(path, tuple(data["architectures"]), data["tensorrt"], data["sources"], size))
    return found


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
    for folder in {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]}:
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
        f"{where}: apt-get install libnvinfer-headers-dev, or give a folder with them by --include-dir"
    )


def sources_hash() -> str:
    """A hash of the plugins' sources, and of nothing else."""
    digest = hashlib.sha256()
    for path in _sources("*.h", "*.cuh", "*.cu", "*.cpp", "*.map"):
        digest.update(f"{path.relative_to(source_folder())}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _sources(*patterns: str) -> list[Path]:
    return sorted(p for pattern in patterns for p in source_folder().rglob(pattern))


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
    Raises EnvironmentMissing for a missing compiler or headers, InputError for an unknown architecture, and
    BuildError with the compiler's first error.
    """
    names = _checked(architectures)
    tools = toolchain()
    trt = None if kernels_only else headers(include_dir)
    version = "" if trt is None else _tensorrt_version(trt)
    flags = _flags(tools, names, trt)
    sources = sources_hash()
    # Folders are left out of the key: the same headers elsewhere make the same library.
    key = hashlib.sha256(
        json.dumps([sources, names, version, tools.version, kernels_only, FLAGS]).encode()
    ).hexdigest()
    folder = cache_folder() / key[:32]
    library = folder / (KERNELS if kernels_only else LIBRARY)
    if force or not library.is_file() or not (folder / "manifest.json").is_file():
        manifest = {
            "library": library.name,
            "architectures": names,
            "tensorrt": version,
            "sources": sources,
            "cuda": tools.version,
        }
        _make(folder, manifest, tools, flags, jobs or os.cpu_count() or 1, trt is not None)
    if output is None:
        return library
    return _copy(library, Path(output))


def _copy(library: Path, target: Path) -> Path:
    if target.is_dir():
        target = target / library.name
    with atomic_path(target) as temporary:
        shutil.copyfile(library, temporary)
    return target


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


def _make(
    folder: Path,
    manifest: dict[str, Any],
    tools: Toolchain,
    flags: dict[str, list[str]],
    jobs: int,
    plugins: bool,
) -> None:
    """Compiles into a folder beside `folder`, which takes its name when all is there."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as e:
        raise explain_os_error(folder.parent, e) from e
    try:
        hosts = _sources("*.cpp") if plugins else [source_folder() / "kernels.cpp"]
        compiles = [[str(tools.nvcc), *flags["device"], "-c", str(p)] for p in _sources("*.cu")]
        compiles += [["g++", *flags["host"], "-c", str(p)] for p in hosts]
        objects = [str(work / f"{n}.o") for n in range(len(compiles))]
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(_compile, [[*c, "-o", o] for c, o in zip(compiles, objects, strict=True)]))
        target = work / manifest["library"]
        # cudart is linked in: the library must run in processes that have none, or another one.
        link = ["g++", "-shared", "-o", str(target), *objects, f"-L{tools.library}", "-lcudart_static"]
        exports = f"-Wl,--version-script={source_folder() / 'exports.map'}"
        _compile([*link, "-ldl", "-lpthread", "-lrt", exports, "-Wl,-s"])
        for path in objects:
            os.unlink(path)
        (work / "manifest.json").write_text(json.dumps(manifest, indent=1))
        work.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # another process has just put the same there
            work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


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
    names = [name for name in a.architectures.split(",") if name]
    try:
        path = build(a.include_dir, names, output=a.output, kernels_only=a.kernels_only, force=a.force)
        if not a.kernels_only:
            for line in disagreements(path):
                raise BuildError(f"the library does not fit the Python side: {line}; update both together")
    except TrtfuseError as e:
        print(f"build_plugins: {e}", file=sys.stderr)
        return e.exit_code
    print(path)
    return 0
