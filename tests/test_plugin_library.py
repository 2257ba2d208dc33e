"""The plugin library without a GPU: it compiles, and its creators are what the Python side declares."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trtfuse import plugin_library
from trtfuse.body import ACTIVATIONS
from trtfuse.errors import BuildError, EnvironmentMissing, InputError
from trtfuse.fusions import FUSIONS

ROOT = Path(__file__).parent.parent
HEADERS = [p for p in os.environ.get("TRTFUSE_TENSORRT_INCLUDE", "").split(os.pathsep) if p]
SHARED = ROOT.parent / "shared" / "tensorrt-headers"
HEADERS = HEADERS or [str(p) for p in sorted(SHARED.glob("*")) if (p / "NvInferRuntime.h").is_file()]


def need_compiler() -> None:
    try:
        plugin_library.toolchain()
    except EnvironmentMissing as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module", params=HEADERS or [None], ids=[Path(h).name for h in HEADERS] or ["none"])
def library(request, tmp_path_factory):
    """The library built for sm_90 against each set of headers that is there."""
    if request.param is None:
        pytest.skip("no TensorRT headers: TRTFUSE_TENSORRT_INCLUDE names folders with them, separated by ':'")
    need_compiler()
    return plugin_library.build(request.param, ["90"])


@pytest.mark.slow
def test_creators_agree_with_the_declarations(library):
    assert plugin_library.disagreements(library) == []
    described = plugin_library.describe(library)
    assert described["architectures"] == "90"
    assert {p["name"] for p in described["plugins"]} == set(plugin_library.PLUGINS)


@pytest.mark.slow
def test_exports_what_tensorrt_calls_and_nothing_that_could_clash(library):
    handle = ctypes.CDLL(str(library))
    count = ctypes.c_int32()
    handle.getCreators.restype = ctypes.POINTER(ctypes.c_void_p)
    creators = handle.getCreators(ctypes.byref(count))
    assert count.value == len(plugin_library.PLUGINS)
    assert all(creators[i] for i in range(count.value))
    handle.setLoggerFinder(None)
    symbols = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True).stdout
    names = {line.split()[-1] for line in symbols.splitlines()}
    assert {n for n in names if not n.startswith("trtfuse_")} == {"getCreators", "setLoggerFinder"}


@pytest.mark.slow
def test_needs_no_tensorrt_and_no_cuda_to_load(library):
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True).stdout
    assert "nvinfer" not in needed
    assert "cudart" not in needed


@pytest.mark.slow
def test_second_build_comes_from_the_cache(library, monkeypatch):
    monkeypatch.setattr(plugin_library, "_make", lambda *_: pytest.fail("compiled again"))
    include = next(h for h in HEADERS if plugin_library._tensorrt_version(Path(h)) in _version(library))
    assert plugin_library.build(include, ["90"]) == library
    assert library in [b.path for b in plugin_library.listing()]
    assert plugin_library.find() is not None


def _version(library: Path) -> list[str]:
    return [plugin_library.describe(library)["tensorrt"]]


@pytest.mark.slow
def test_creators_make_plugins_and_name_wrong_fields(library, tmp_path):
    """A small C++ program plays TensorRT: fields of every type, defaults, and the message for a wrong one."""
    include = next(h for h in HEADERS if plugin_library._tensorrt_version(Path(h)) in _version(library))
    tools = plugin_library.toolchain()
    program = tmp_path / "play"
    source = Path(__file__).parent / "plugins" / "play_tensorrt.cpp"
    flags = [
        "-std=c++17",
        "-Wno-deprecated-declarations",
        "-isystem",
        include,
        "-isystem",
        str(tools.include),
    ]
    subprocess.run(["g++", *flags, str(source), "-o", str(program), "-ldl"], check=True)
    done = subprocess.run([str(program), str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_activation_has_arithmetic():
    assert set(ACTIVATIONS) <= set(plugin_library.activation_names())


def test_table_follows_the_declarations():
    declared = {f.op: f for f in FUSIONS}
    for op, plugin in plugin_library.PLUGINS.items():
        assert (plugin.inputs, plugin.outputs) == (declared[op].inputs, declared[op].outputs)
        assert not {"inputs", "outputs", "plugin_version", "plugin_namespace"} & set(plugin.attributes)


def test_missing_compiler_says_how_to_get_it(monkeypatch):
    plugin_library.toolchain.cache_clear()
    monkeypatch.setattr(plugin_library, "_cuda_roots", lambda: iter(()))
    monkeypatch.setattr(plugin_library.shutil, "which", lambda name: "/usr/bin/" + name)
    with pytest.raises(EnvironmentMissing, match=r"nvcc .* pip install 'nvidia-cuda-nvcc==13\.0\.\*'"):
        plugin_library.toolchain()
    monkeypatch.setattr(plugin_library.shutil, "which", lambda name: None)
    with pytest.raises(EnvironmentMissing, match="apt-get install g"):
        plugin_library.toolchain()
    plugin_library.toolchain.cache_clear()


def test_headers_that_are_not_there(tmp_path, monkeypatch):
    monkeypatch.delenv("TRTFUSE_TENSORRT_INCLUDE", raising=False)
    with pytest.raises(EnvironmentMissing, match="has no NvInferRuntime"):
        plugin_library.headers(tmp_path)
    (tmp_path / "NvInferRuntime.h").touch()
    (tmp_path / "NvInferVersion.h").write_text("#define NV_TENSORRT_MAJOR 8\n#define NV_TENSORRT_MINOR 6\n")
    assert plugin_library.headers(tmp_path) == tmp_path
    with pytest.raises(EnvironmentMissing, match=r"8\.6.*10\.6 or newer"):
        plugin_library._tensorrt_version(tmp_path)


@pytest.mark.parametrize("names", [["91x"], ["ptx"], [], ["sm_volta"]])
def test_unknown_architectures(names):
    with pytest.raises(InputError, match="choose from 80, 86"):
        plugin_library.build("/nowhere", names)


def test_compiler_errors_are_one_line(tmp_path):
    source = tmp_path / "bad.cpp"
    source.write_text("int f( { return 1; }\n")
    with pytest.raises(BuildError, match=r"bad\.cpp.*error") as e:
        plugin_library._compile(["g++", "-c", str(source), "-o", str(tmp_path / "bad.o")])
    assert "\n" not in str(e.value)


def test_find_follows_the_environment(tmp_path, monkeypatch):
    library = tmp_path / "mine.so"
    monkeypatch.setenv("TRTFUSE_PLUGIN_LIBRARY", str(library))
    with pytest.raises(EnvironmentMissing, match="correct or unset it"):
        plugin_library.find()
    library.touch()
    assert plugin_library.find() == library
    monkeypatch.delenv("TRTFUSE_PLUGIN_LIBRARY")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert plugin_library.listing() == []
    assert plugin_library.find() is None


def test_other_libraries_are_refused(tmp_path):
    (tmp_path / "other.so").write_text("no library")
    with pytest.raises(InputError, match="no plugin library of trtfuse"):
        plugin_library.describe(tmp_path / "other.so")


def test_script_says_what_is_missing(tmp_path):
    script = ROOT / "scripts" / "build_plugins"
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        [str(script), "--include-dir", str(tmp_path), "--architectures", "7"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("build_plugins: '7' is no architecture")
