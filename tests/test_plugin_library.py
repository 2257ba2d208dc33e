"""The plugin library without a GPU: it compiles, and its creators are what the Python side declares."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
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


def put(folder: Path, name: str, sources: str, tensorrt: str = "10.6", when: int = 1) -> Path:
    """A library as `build` leaves it in the cache, as far as looking for one goes."""
    library = folder / "trtfuse" / "plugins" / name / plugin_library.LIBRARY
    library.parent.mkdir(parents=True)
    library.write_bytes(b"some code")
    os.utime(library, (when, when))
    manifest = {
        "library": library.name,
        "architectures": ["90", "ptx"],
        "tensorrt": tensorrt,
        "sources": sources,
    }
    (library.parent / "manifest.json").write_text(json.dumps(manifest))
    return library


@pytest.fixture(scope="module")
def cache(request):
    """A cache of the tests' own, kept by pytest: what nothing changed in is compiled once, not every time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(request.config.cache.mkdir("plugins")))
        patch.delenv("TRTFUSE_PLUGIN_LIBRARY", raising=False)
        yield plugin_library.cache_folder()


@pytest.fixture(scope="module", params=HEADERS or [None], ids=[Path(h).name for h in HEADERS] or ["none"])
def library(request, cache):
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
    assert described["tensorrt"] in _versions()
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


@pytest.fixture
def own_cache(library, cache, tmp_path, monkeypatch):
    """A cache that no other test looks into, with the library and the kernels' objects in it."""
    folder = tmp_path / "trtfuse" / "plugins"
    for name in (library.parent.name, "objects"):
        shutil.copytree(cache / name, folder / name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return folder


@pytest.mark.slow
def test_second_build_comes_from_the_cache(library, own_cache, monkeypatch, tmp_path):
    include = _headers(library)
    monkeypatch.setattr(plugin_library, "_make", lambda *_: pytest.fail("compiled again"))
    put(tmp_path, "newer", plugin_library.sources_hash(), when=2)
    there = own_cache / library.parent.name / library.name
    os.utime(there, (1, 1))
    assert plugin_library.find() != there
    assert plugin_library.build(include, ["90"]) == there
    assert plugin_library.find() == plugin_library.locate() == there  # what was asked for last
    assert there in [b.path for b in plugin_library.listing() if b.place == "cache"]
    copy = plugin_library.build(include, ["90"], output=tmp_path / "copy.so")
    assert copy.read_bytes() == library.read_bytes()


@pytest.mark.slow
def test_a_library_that_does_not_fit_is_not_kept(library, own_cache, monkeypatch):
    """And kernels, which know nothing of TensorRT, are not compiled again for other headers of it."""
    include = _headers(library)
    commands = []
    compiler = plugin_library._compile
    monkeypatch.setattr(plugin_library, "_compile", lambda c: commands.append(c) or compiler(c))
    monkeypatch.setattr(plugin_library, "_tensorrt_version", lambda trt: "10.98")
    softer = plugin_library.Plugin("TrtfuseSoftmax", ("x",), ("y",), {"softness": ("int", 1)})
    monkeypatch.setitem(plugin_library.PLUGINS, "TrtfuseSoftmax", softer)
    with pytest.raises(BuildError, match=r"does not fit.*TrtfuseSoftmax: inputs.*update both"):
        plugin_library.build(include, ["90"])
    assert {c[0] for c in commands} == {"g++"}
    assert {p.name for p in own_cache.iterdir()} == {library.parent.name, "objects", "build.lock"}


def _versions() -> set[str]:
    return {plugin_library._tensorrt_version(Path(h)) for h in HEADERS}


def _headers(library: Path) -> str:
    version = plugin_library.describe(library)["tensorrt"]
    return next(h for h in HEADERS if plugin_library._tensorrt_version(Path(h)) == version)


@pytest.mark.slow
def test_creators_make_plugins_and_name_wrong_fields(library, tmp_path):
    """A small C++ program plays TensorRT: fields of every type, defaults, and the message for a wrong one."""
    include = _headers(library)
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
    with pytest.raises(InputError, match="no plugin library of trtfuse"):
        plugin_library.listing()
    monkeypatch.delenv("TRTFUSE_PLUGIN_LIBRARY")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert plugin_library.listing() == []
    assert plugin_library.find() is None
    with pytest.raises(EnvironmentMissing, match="plugin library is missing: trtfuse plugins build"):
        plugin_library.locate()


def test_the_cache_offers_what_fits_the_sources_and_was_asked_for_last(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRTFUSE_PLUGIN_LIBRARY", raising=False)
    sources = plugin_library.sources_hash()
    put(tmp_path, "a", sources, when=5)
    wanted = put(tmp_path, "b", sources, when=7)
    put(tmp_path, "c", "of other sources", when=9)
    put(tmp_path, "d", sources, tensorrt="", when=9)  # kernels alone
    half = put(tmp_path, "e", sources, when=9)
    half.unlink()
    (put(tmp_path, "f", sources, when=9).parent / "manifest.json").write_text('{"library": ')
    assert plugin_library.find() == wanted
    listed = plugin_library.listing()
    assert [b.path.parent.name for b in listed] == ["a", "b", "c", "d"]
    assert listed[0] == plugin_library.Built(
        listed[0].path, ("90", "ptx"), "10.6", sources, len(b"some code"), "cache"
    )


@pytest.mark.parametrize(
    ("architectures", "runs", "does_not"),
    [
        ("80", "8.0 8.6 8.9", "7.5 9.0 12.0"),
        ("86 90", "8.6 8.9 9.0", "8.0 10.0"),
        ("80 ptx", "8.0 8.9 9.0 12.0", "7.5"),
        ("90a", "9.0", "10.0 8.0"),
        ("100a", "10.0", "10.3"),
        ("100f", "10.0 10.3", "12.0"),
        ("90a ptx", "9.0 10.0", "8.9"),
        ("80-real 120", "8.6 12.1", "9.0"),  # as CMake says it
        ("", "", "8.0"),
    ],
)
def test_which_gpus_a_library_runs_on(architectures, runs, does_not):
    names = architectures.split()
    assert [c for c in runs.split() if not plugin_library.runs_on(names, c)] == []
    assert [c for c in does_not.split() if plugin_library.runs_on(names, c)] == []


def test_names_of_architectures_are_told_apart():
    assert plugin_library.split_names("80,90;ptx  120,") == ["80", "90", "ptx", "120"]


def test_needs_no_other_package_to_be_built():
    """A wheel's build environment has hatchling and nothing of trtfuse's."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); from trtfuse import plugin_library; print('there')"
    subprocess.run([sys.executable, "-I", "-S", "-c", code, str(ROOT)], check=True)


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
