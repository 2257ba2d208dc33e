"""Wheels: with the plugin library where it can be built, of Python alone elsewhere, and from the sdist."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from test_plugin_library import HEADERS, ROOT, cache, need_compiler

from trtfuse import plugin_library

pytest.importorskip("hatchling", reason="hatchling is not installed")
assert cache is not None  # the fixture


def hatch(root: Path, out: Path, target: str = "wheel", **variables: str) -> subprocess.CompletedProcess[str]:
    """Builds into `out` as a frontend would; TensorRT's headers only where `variables` names them."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TRTFUSE_")}
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    return subprocess.run(command, cwd=root, env={**kept, **variables}, capture_output=True, text=True)


def made(out: Path) -> Path:
    (path,) = out.iterdir()
    return path


def in_wheel(wheel: Path, folder: Path, code: str, **variables: str) -> str:
    """What `code` prints where the unpacked wheel is what `import trtfuse` finds."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    environment = {**os.environ, "PYTHONPATH": str(folder), **variables}
    environment.pop("TRTFUSE_PLUGIN_LIBRARY", None)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_wheel_of_python_alone(tmp_path: Path) -> None:
    """With the sources, from which `trtfuse plugins build` can make the library later."""
    nowhere = str(tmp_path / "nowhere")
    done = hatch(ROOT, tmp_path / "out", TRTFUSE_TENSORRT_INCLUDE=nowhere)
    assert done.returncode == 0, done.stderr
    assert f"trtfuse: the wheel holds no plugin library: {nowhere} has no NvInferRuntime.h" in done.stderr
    wheel = made(tmp_path / "out")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [n for n in names if n.startswith("trtfuse/lib/")]
    code = "from trtfuse import plugin_library as p; print(p.source_folder()); print(p.sources_hash())"
    folder, sources = in_wheel(wheel, tmp_path / "site", code).splitlines()
    assert folder == str((tmp_path / "site" / "trtfuse" / "plugins").resolve())
    assert sources == plugin_library.sources_hash()


@pytest.mark.slow
@pytest.mark.parametrize("headers", HEADERS[:1] or [None], ids=["headers"])
def test_wheel_with_the_plugin_library(headers: str | None, tmp_path: Path, cache: Path) -> None:
    if headers is None:
        pytest.skip("no TensorRT headers: TRTFUSE_TENSORRT_INCLUDE names folders with them")
    need_compiler()
    variables = {"TRTFUSE_TENSORRT_INCLUDE": headers, "TRTFUSE_ARCHITECTURES": "90"}
    done = hatch(ROOT, tmp_path / "out", TRTFUSE_WHEEL_PLUGINS="require", **variables)
    assert done.returncode == 0, done.stderr
    wheel = made(tmp_path / "out")
    assert "-py3-none-linux_" in wheel.name
    (tags,) = (n for n in zipfile.ZipFile(wheel).namelist() if n.endswith(".dist-info/WHEEL"))
    assert "Root-Is-Purelib: false" in zipfile.ZipFile(wheel).read(tags).decode()
    code = "from trtfuse.cli_plugins import app; app(['path'])"
    elsewhere = {"XDG_CACHE_HOME": str(tmp_path / "empty")}
    library = in_wheel(wheel, tmp_path / "site", code, **elsewhere)
    assert library == str((tmp_path / "site" / "trtfuse" / "lib" / plugin_library.LIBRARY).resolve())
    assert plugin_library.disagreements(Path(library)) == []
    code = "from trtfuse.cli_plugins import app; app(['list', '--json'])"
    (listed,) = json.loads(in_wheel(wheel, tmp_path / "again", code, **elsewhere))["libraries"]
    assert (listed["place"], listed["used"], listed["stale"]) == ("package", True, False)
    assert listed["architectures"] == ["90"]


def test_left_out_where_asked(tmp_path: Path) -> None:
    done = hatch(ROOT, tmp_path / "out", TRTFUSE_WHEEL_PLUGINS="no", TRTFUSE_TENSORRT_INCLUDE=str(tmp_path))
    assert done.returncode == 0
    assert "plugin library" not in done.stderr
    assert made(tmp_path / "out").name.endswith("-none-any.whl")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TRTFUSE_WHEEL_PLUGINS": "require"}, "trtfuse: no plugin library for the wheel: "),
        ({"TRTFUSE_ARCHITECTURES": "volta"}, "'volta' is no architecture"),
        ({"TRTFUSE_WHEEL_PLUGINS": "perhaps"}, "'perhaps': use auto, require, no"),
    ],
)
def test_errors_are_one_line_and_leave_no_wheel(
    variables: dict[str, str], message: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = hatch(ROOT, out, **{"TRTFUSE_TENSORRT_INCLUDE": "/nowhere", **variables})
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(out.glob("*.whl"))


@pytest.mark.parametrize(
    ("wanted", "at_hand", "asked"),
    [("require", False, True), ("require", True, False), ("auto", False, False)],
)
def test_a_build_that_must_hold_the_library_asks_for_nvcc(
    wanted: str, at_hand: bool, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if at_hand:
        need_compiler()
    monkeypatch.setenv("TRTFUSE_WHEEL_PLUGINS", wanted)
    code = """if True:
        import sys
        sys.path.insert(0, "")
        from trtfuse import plugin_library
        if sys.argv[1] == "absent":
            plugin_library._cuda_roots = lambda: iter(())
        from hatchling.build import get_requires_for_build_wheel
        print(get_requires_for_build_wheel())
    """
    state = "there" if at_hand else "absent"
    done = subprocess.run(
        [sys.executable, "-c", code, state], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ("nvidia-cuda-nvcc==13.0.*" in done.stdout) is asked


def test_editable_install_compiles_nothing_and_copies_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hatchling.builders.wheel import WheelBuilder

    monkeypatch.setenv("TRTFUSE_WHEEL_PLUGINS", "require")
    monkeypatch.setattr(plugin_library, "build", lambda **options: pytest.fail("compiled"))
    hook = WheelBuilder(str(ROOT)).get_build_hooks(str(tmp_path))["custom"]
    data: dict[str, Any] = {"force_include": {}}
    hook.initialize("editable", data)
    assert data == {"force_include": {}}


def test_a_wheel_from_the_sdist(tmp_path: Path) -> None:
    done = hatch(ROOT, tmp_path / "sdist", "sdist")
    assert done.returncode == 0, done.stderr
    with tarfile.open(made(tmp_path / "sdist")) as archive:
        # Debian 12's Python 3.11.2 and the first 3.10 know no filters; the archive is our own.
        words = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(tmp_path / "unpacked", **words)
    root = made(tmp_path / "unpacked")
    for out, variables in (("a", {}), ("b", {"TRTFUSE_WHEEL_PLUGINS": "require"})):
        done = hatch(root, tmp_path / out, TRTFUSE_TENSORRT_INCLUDE="/nowhere", **variables)
        assert done.returncode == (1 if variables else 0), done.stderr
        assert "/nowhere has no NvInferRuntime.h" in done.stderr
    hatch(ROOT, tmp_path / "c", TRTFUSE_WHEEL_PLUGINS="no")
    direct, through = (
        {n for n in zipfile.ZipFile(made(tmp_path / out)).namelist() if n.startswith("trtfuse/")}
        for out in ("c", "a")
    )
    assert direct == through
    assert "trtfuse/plugins/library.cpp" in direct
