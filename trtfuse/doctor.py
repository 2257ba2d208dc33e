"""What this machine can build and run, each missing part with the command that brings it.

Native libraries are tried in child processes: a library that aborts takes its child along, never trtfuse.
"""

from __future__ import annotations

import functools
import importlib
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from trtfuse import plugin_library
from trtfuse.errors import EnvironmentMissing

PROBE_SECONDS = 60.0
MINIMUM_PYTHON = (3, 10)
LOW_DISK = 2 * 2**30  # bytes: an engine and the fused file of a mid-sized model
LOW_MEMORY = 2 * 2**30

# Run in a child: the driver's own library says what GPUs there are, without any CUDA toolkit.
GPU_PROBE = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
def number(f, *args):
    value = ctypes.c_int()
    return value.value if f(ctypes.byref(value), *args) == 0 else 0
status = cuda.cuInit(0)
found = []
for i in range(number(cuda.cuDeviceGetCount) if status == 0 else 0):
    device, size, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    if cuda.cuDeviceGet(ctypes.byref(device), i) != 0:
        continue
    cuda.cuDeviceGetName(name, 256, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    capability = [number(cuda.cuDeviceGetAttribute, a, device) for a in (75, 76)]
    found.append([name.value.decode(errors="replace"), "%d.%d" % tuple(capability), size.value])
print(json.dumps({"status": status, "cuda": number(cuda.cuDriverGetVersion), "gpus": found}))
"""

# Run in a child: whether the package builds an engine of one Relu, and whether it has a GPU to run one.
TENSORRT_PROBE = """
import importlib, json, sys
trt = importlib.import_module(sys.argv[1])
print(json.dumps({"version": trt.__version__}), flush=True)
builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
flags = getattr(getattr(trt, "NetworkDefinitionCreationFlag", None), "STRONGLY_TYPED", None)
network = builder.create_network(0 if flags is None else 1 << int(flags))
x = network.add_input("x", trt.float32, (4,))
network.mark_output(network.add_activation(x, trt.ActivationType.RELU).get_output(0))
config = builder.create_builder_config()
named = [n for n in getattr(getattr(trt, "ComputeCapability", None), "__members__", {}) if n.startswith("SM")]
if named:
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.__members__[named[0]], 0)
engine = builder.build_serialized_network(network, config)
print(json.dumps({"version": trt.__version__, "builds": engine is not None}), flush=True)
"""

# Run in a child: what a plugin library says of itself, and where it differs from the Python side.
LIBRARY_PROBE = """
import json, sys
from pathlib import Path
from trtfuse import plugin_library
library = Path(sys.argv[1])
said = plugin_library.describe(library)
print(json.dumps({**said, "differences": plugin_library.disagreements(library)}))
"""


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU. memory: bytes. driver: the kernel driver's version, "" where it does not say."""

    name: str
    compute_capability: str
    memory: int
    driver: str


@dataclass(frozen=True)
class Check:
    """One line of `trtfuse doctor`.

    needed: whether `trtfuse build` cannot do without it. remedy: the command or step that mends it, None
    where there is nothing to mend.
    """

    name: str
    ok: bool
    detail: str
    remedy: str | None = None
    needed: bool = False


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    """The NVIDIA GPUs that the driver offers to this process; empty where there is no driver."""
    return tuple(
        Gpu(name, capability, memory, _driver_version())
        for name, capability, memory in _gpu_probe().get("gpus", [])
    )


def cuda_version() -> str:
    """The newest CUDA that the driver supports ("13.0"), "" where there is no driver."""
    cuda = int(_gpu_probe().get("cuda", 0))
    return f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""


def examine() -> list[Check]:
    """Examines the machine: the packages, the two TensorRTs, the GPU, compilers, memory and disk."""
    return [
        _python(),
        _package("onnx", "onnx"),
        _onnxruntime(),
        *_two_onnxruntimes(),
        _package("onnx-graphsurgeon", "onnx_graphsurgeon"),
        _package("polygraphy", "polygraphy"),
        _tensorrt("tensorrt-rtx", "tensorrt_rtx"),
        _tensorrt("tensorrt", "tensorrt"),
        _runtime("cuda-bindings", "cuda.bindings.runtime"),
        _runtime("nvidia-ml-py", "pynvml"),
        _gpu(),
        _plugin_library(),
        _nvcc(),
        _compiler(),
        _memory(),
        _disk(),
    ]


def builds_engines(checks: Sequence[Check]) -> bool:
    """Whether `trtfuse build` can make some engine here."""
    return all(c.ok for c in checks if c.needed) and any(
        c.ok for c in checks if c.name in ("tensorrt-rtx", "tensorrt")
    )


def as_dict(checks: Sequence[Check]) -> dict[str, Any]:
    """The JSON of `trtfuse doctor --json`."""
    return {
        "schema": "trtfuse/doctor/1",
        "builds_engines": builds_engines(checks),
        "gpus": [asdict(g) for g in gpus()],
        "checks": [asdict(c) for c in checks],
    }


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, None where it is not installed. Imports nothing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _child(code: str, *args: str) -> tuple[str, str]:
    """Runs python code in a child; its stdout, and in one line why it failed ("" where it did not)."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=PROBE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return "", f"{type(e).__name__}: {e}".splitlines()[0]
    if done.returncode == 0:
        return done.stdout, ""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return done.stdout, lines[-1] if lines else f"ended with status {done.returncode}"


def _last_json(text: str) -> dict[str, Any]:
    """The last line of `text` that is a JSON object; empty where none is."""
    for line in reversed(text.splitlines()):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return {}


@functools.cache
def _gpu_probe() -> dict[str, Any]:
    return _last_json(_child(GPU_PROBE)[0])


def _driver_version() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return ""


def _python() -> Check:
    version = platform.python_version()
    wanted = ".".join(map(str, MINIMUM_PYTHON))
    if sys.version_info[:2] < MINIMUM_PYTHON:
        return Check("Python", False, version, f"use Python {wanted} or newer", needed=True)
    return Check("Python", True, f"{version} ({platform.system()} {platform.machine()})", needed=True)


def _package(distribution: str, module: str) -> Check:
    remedy = f"pip install {distribution}"
    try:
        found = importlib.import_module(module)
    except Exception as e:
        lines = str(e).splitlines() or [type(e).__name__]
        return Check(distribution, False, f"cannot be imported: {lines[0]}", remedy, needed=True)
    version = version_of(distribution) or getattr(found, "__version__", "version unknown")
    return Check(distribution, True, str(version), needed=True)


def _onnxruntime() -> Check:
    name, remedy = "onnxruntime", "pip install onnxruntime-gpu"
    code = "import json, onnxruntime as o; print(json.dumps([o.__version__, *o.get_available_providers()]))"
    text, why = _child(code)
    try:
        version, *providers = json.loads(text.splitlines()[-1])
    except (ValueError, IndexError):
        return Check(name, False, f"cannot be imported: {why}", remedy, needed=True)
    return Check(name, True, f"{version} (providers: {', '.join(providers)})", needed=True)


def _two_onnxruntimes() -> list[Check]:
    """A warning where both distributions are installed: they write the same files."""
    names = ("onnxruntime", "onnxruntime-gpu")
    versions = [version_of(name) for name in names]
    if None in versions:
        return []
    both = " and ".join(f"{name} {version}" for name, version in zip(names, versions, strict=True))
    detail = f"{both} are both installed: one has overwritten files of the other"
    remedy = "pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu"
    return [Check("onnxruntime twice", False, detail, remedy)]


def _runtime(distribution: str, module: str) -> Check:
    """A package that running and timing engines takes, and building them does not."""
    remedy = "pip install 'trtfuse[tensorrt]'"
    _, why = _child("import importlib, sys; importlib.import_module(sys.argv[1])", module)
    if not why:
        return Check(distribution, True, version_of(distribution) or "version unknown")
    if "No module named" in why:
        return Check(distribution, False, "not installed (engines are run and timed with it)", remedy)
    return Check(distribution, False, f"cannot be imported: {why}", remedy)


def _tensorrt(distribution: str, module: str) -> Check:
    """A build is tried, not assumed: TensorRT builds only where a GPU is, TensorRT-RTX anywhere."""
    text, why = _child(TENSORRT_PROBE, module)
    found = _last_json(text)
    if not found:
        if "No module named" in why:
            return Check(distribution, False, "not installed", f"pip install {distribution}")
        return Check(
            distribution, False, f"cannot be loaded: {why}", f"pip install --force-reinstall {distribution}"
        )
    version = found["version"]
    runs = "runs engines" if gpus() else "cannot run engines (no NVIDIA GPU)"
    if found.get("builds"):
        return Check(distribution, True, f"{version}: builds engines, {runs}")
    remedy = f"pip install --force-reinstall {distribution}"
    if module == "tensorrt" and not gpus():
        remedy = "use a machine with an NVIDIA GPU, or build with --target tensorrt-rtx"
        why = "it builds only where an NVIDIA GPU is"
    return Check(distribution, False, f"{version}: cannot build here ({why or 'the build failed'})", remedy)


def _gpu() -> Check:
    found = gpus()
    if found:
        words = [f"{g.name} (compute capability {g.compute_capability}, {_size(g.memory)})" for g in found]
        driver = f", driver {found[0].driver}" if found[0].driver else ""
        cuda = int(_gpu_probe().get("cuda", 0))
        return Check(
            "NVIDIA GPU", True, f"{'; '.join(words)}{driver}, CUDA {cuda // 1000}.{cuda % 1000 // 10}"
        )
    status = _gpu_probe().get("status")
    why = (
        "no driver (libcuda.so.1 is not there)"
        if status is None
        else f"the driver offers none (error {status})"
    )
    if status == 0:
        why = "the driver is there, and no GPU"
    remedy = (
        "engines build here with --target tensorrt-rtx; run and measure them on a machine with an NVIDIA GPU"
    )
    return Check("NVIDIA GPU", False, why, remedy)


def _plugin_library() -> Check:
    """The library is loaded in a child; whether it fits the GPUs here is said where there are any."""
    name, remedy = "plugin library", plugin_library.GET_LIBRARY
    try:
        path = plugin_library.find()
    except EnvironmentMissing as e:
        return _missing(name, e)
    if path is None:
        return Check(name, False, "none is built", remedy)
    text, why = _child(LIBRARY_PROBE, str(path))
    found = _last_json(text)
    if not found:
        return Check(name, False, f"{path} cannot be used: {why}", remedy)
    if found["differences"]:
        return Check(name, False, f"{path} does not fit this trtfuse: {found['differences'][0]}", remedy)
    names = found["architectures"].split()
    detail = f"{path} (headers of TensorRT {found['tensorrt']}; architectures {', '.join(names)})"
    unfit = [g for g in gpus() if not plugin_library.runs_on(names, g.compute_capability)]
    if not unfit:
        fits = f"; fits {', '.join(dict.fromkeys(g.name for g in gpus()))}" if gpus() else ""
        return Check(name, True, detail + fits)
    detail += f"; has no code for {unfit[0].name} (compute capability {unfit[0].compute_capability})"
    return Check(name, False, detail, _for_these_gpus(path))


def _for_these_gpus(path: Path) -> str:
    """How to get a library that fits, and to have it used in place of the one at `path`."""
    wanted = ",".join(dict.fromkeys(g.compute_capability.replace(".", "") for g in gpus()))
    remedy = f"trtfuse plugins build --architectures {wanted} --include-dir FOLDER (of TensorRT's headers)"
    if plugin_library.cache_folder() in path.parents:
        return remedy
    return f"{remedy}, and set TRTFUSE_PLUGIN_LIBRARY to the path that it prints"


def _nvcc() -> Check:
    try:
        tools = plugin_library.toolchain()
        return Check("nvcc", True, f"{tools.nvcc} (release {tools.version})")
    except EnvironmentMissing as e:
        return _missing("nvcc", e)


def _missing(name: str, error: EnvironmentMissing) -> Check:
    detail, _, remedy = str(error).partition(": ")
    return Check(name, False, detail, remedy)


def _compiler() -> Check:
    remedy = "apt-get install g++"
    path = shutil.which("g++")
    if path is None:
        return Check("g++", False, "not found (plugins are compiled with it)", remedy)
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired) as e:
        return Check("g++", False, f"{path} does not start: {e}", remedy)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return Check("g++", True, f"{path} ({lines[0] if lines else 'version unknown'})")


def _memory() -> Check:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kilobytes = {k: int(v.split()[0]) for k, _, v in (line.partition(":") for line in lines) if v.split()}
        free, total = kilobytes["MemAvailable"] * 1024, kilobytes["MemTotal"] * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return Check("memory", True, "unknown (no /proc/meminfo)")
    detail = f"{_size(free)} free of {_size(total)}"
    remedy = "close other programs; a build takes about three times the model's size"
    return Check("memory", free >= LOW_MEMORY, detail, remedy if free < LOW_MEMORY else None)


def _disk() -> Check:
    try:
        usage = shutil.disk_usage(Path.cwd())
    except OSError as e:
        return Check(
            "disk",
            False,
            f"the current folder cannot be examined: {e.strerror}",
            "change to a folder that exists",
        )
    detail = f"{_size(usage.free)} free of {_size(usage.total)} here"
    remedy = "make room, or write with -o to another disk"
    return Check("disk", usage.free >= LOW_DISK, detail, remedy if usage.free < LOW_DISK else None)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
